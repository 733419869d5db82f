"""The owners' side as a Flower ClientApp: the guard answers everything, and trains.

`client_app(owner_of)` always has the guard in front; there is no way to get the app without it. What an owner trains is
the announced model, her own (`Owner.model`), or whatever `compute(owner, order, parameters) -> vector` does; what it
returns goes to the guard and no further.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from flmarket.bids import FloatArray
from flmarket.engines.flower.messages import (
    BID,
    RELEASE,
    TRAIN,
    Delivery,
    Refusal,
    reply,
    unpack,
    unpack_escrow,
    unpack_head,
    unpack_vector,
)
from flmarket.errors import InvalidInput
from flmarket.market.kind import Announcement, Order, Refused, release_id
from flmarket.market.owner import Guard, Owner, drops_out, guarded, spoilt

__all__ = ["Compute", "OwnerGuard", "OwnerOf", "client_app"]

OwnerOf = Callable[[Context], Owner]
Compute = Callable[[Owner, Order, FloatArray], object]


class OwnerGuard:
    """A mod for `ClientApp(mods=[...])`. `owner_of` says whose machine this is, from the node's own configuration.

    `faults` lets simulated owners fail as often as their market's file says; it puts a step outside the guard.
    """

    def __init__(self, owner_of: OwnerOf, compute: Compute | None = None, *, faults: bool = False) -> None:
        self.owner_of, self.compute, self.faults = owner_of, compute, faults

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer, or refuse; never raise, but for a simulated drop-out."""
        owner = guarded(lambda: self.owner_of(context))
        if isinstance(owner, Refused):
            return _refusal(0, owner, message)
        if self.faults and owner.simulated and message.metadata.message_type == TRAIN:
            order = guarded(lambda: unpack(Order, message))
            if isinstance(order, Order) and drops_out(owner, order):
                raise ConnectionError("simulated drop-out")
        answer = guarded(lambda: self._answer(message, owner))
        return _refusal(owner.number, answer, message) if isinstance(answer, Refused) else answer

    def _answer(self, message: Message, owner: Owner) -> Message:
        asked, guard = message.metadata.message_type, Guard(owner)
        if asked == BID:
            call = unpack(Announcement, message)
            if call is None:
                return _refusal(owner.number, Refused("malformed", "a bid is asked for by an announcement"), message)
            bid, seen = guard.bid(call, unpack_head(message))
            return reply(bid, message, head=seen)
        order = unpack(Order, message) if asked in (TRAIN, RELEASE) else None
        if order is None:
            known = asked in (TRAIN, RELEASE)
            words = ("malformed", "work and releases are asked for by an order")
            return _refusal(owner.number, Refused(*(words if known else _UNKNOWN)), message)
        parameters = unpack_vector(message) if asked == TRAIN else None
        if parameters is None:
            vector = guard.release(order)
        else:
            compute, mine = self.compute, parameters
            own = None if compute is None else lambda: compute(owner, order, mine)
            vector = guard.train(order, mine, unpack_escrow(message), own)
            if self.faults and owner.simulated:
                vector = spoilt(owner, order, vector, mine)
        return reply(Delivery(release=release_id(order), owner=owner.number), message, vector)


_UNKNOWN = ("unknown", "this owner answers bids, orders and nothing else")


def _refusal(number: int, refused: Refused, message: Message) -> Message:
    return reply(Refusal(owner=number, code=refused.code, reason=refused.why), message)


def client_app(owner_of: OwnerOf, compute: Compute | None = None, *, faults: bool = False) -> ClientApp:
    """The app that runs beside an owner's data. `owner_of` reads the node's own configuration, never a message."""
    app = ClientApp(mods=[OwnerGuard(owner_of, compute, faults=faults)])

    @app.train()
    @app.query("bid")
    @app.query("release")
    def answered(message: Message, context: Context) -> Message:
        raise InvalidInput("message", message.metadata.message_type, "the guard answers this by itself")

    return app
