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
    MASK,
    MASKED,
    RELEASE,
    TRAIN,
    Delivery,
    Refusal,
    has_arrays,
    reply,
    unpack,
    unpack_escrow,
    unpack_head,
    unpack_stage,
    unpack_vector,
)
from flmarket.errors import InvalidInput
from flmarket.ledger import HoldReceipt
from flmarket.market.kind import Announcement, Order, Refused, ReleasedUpdate, release_id
from flmarket.market.masking.guarding import SumGuard, public_identity
from flmarket.market.owner import Guard, Owner, guarded

OwnerOf = Callable[[Context], Owner]
Compute = Callable[[Owner, Order, FloatArray], object]
WorkOf = tuple[FloatArray, HoldReceipt | None, Callable[[], object] | None]


class OwnerGuard:
    """A mod for `ClientApp(mods=[...])`. `owner_of` says whose machine this is, from the node's own configuration.

    What is asked for is told by what a message holds, as far as its type admits it: an announcement asks for a bid, an
    order for work if parameters come with it, and otherwise for what was released before.
    """

    def __init__(self, owner_of: OwnerOf, compute: Compute | None = None) -> None:
        self.owner_of, self.compute = owner_of, compute

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer, or refuse; never raise."""
        owner = guarded(lambda: self.owner_of(context))
        if isinstance(owner, Refused):
            return _refusal(0, owner, message)
        answer = guarded(lambda: self._answer(owner, message, context, call_next))
        return _refusal(owner.number, answer, message) if isinstance(answer, Refused) else answer

    def _answer(self, owner: Owner, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        asked, guard = message.metadata.message_type, Guard(owner)
        if asked not in (BID, TRAIN, RELEASE, MASK, MASKED):
            return _refusal(
                owner.number, Refused("unknown", "this owner answers bids, orders and nothing else"), message
            )
        call = unpack(Announcement, message) if asked in (BID, TRAIN) else None
        declined = None if call is None else self.declined(owner, call)
        if declined is not None:
            return _refusal(owner.number, declined, message)
        if call is not None:
            bid, seen = guard.bid(call, unpack_head(message))
            return reply(bid, message, head=seen, identity=public_identity(owner))
        order = None if asked == BID else unpack(Order, message)
        if order is None:
            words = "bids are asked for by an announcement, work and releases by an order"
            return _refusal(owner.number, Refused("malformed", words), message)
        if has_arrays(message) and (owner.answer_seconds or 0.0) >= message.metadata.ttl:
            words = f"answers leave {owner.answer_seconds:g} s after an order, which is too late for this one"
            return _refusal(owner.number, Refused("late", words), message)
        return self.carried_out(guard, order, message, context, call_next)

    def declined(self, owner: Owner, call: Announcement) -> Refused | None:
        """Why this machine is not for what is announced, if that is known by its terms; the owner decides the rest."""
        return None

    def carried_out(
        self, guard: Guard, order: Order, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """The answer to an order."""
        delivery = Delivery(release=release_id(order), owner=guard.owner.number)
        if message.metadata.message_type in (MASK, MASKED):
            stage, question = unpack_stage(message)
            work = self.work_of(guard, order, message) if message.metadata.message_type == MASKED else ()
            answer, words = SumGuard(guard).answer(order, stage, question, *work)
            return reply(delivery, message, stage=(stage, answer), words=words)
        works = message.metadata.message_type == TRAIN and has_arrays(message)
        vector = self.work(guard, order, message) if works else guard.release(order)
        return reply(delivery, message, vector)

    def work(self, guard: Guard, order: Order, message: Message) -> ReleasedUpdate:
        """What is released for an order, from the parameters that came with it."""
        return guard.train(order, *self.work_of(guard, order, message))

    def work_of(self, guard: Guard, order: Order, message: Message) -> WorkOf:
        """What an order brings along: parameters and proof; and how she computes, if in a way of her own."""
        compute, parameters = self.compute, unpack_vector(message)
        own = None if compute is None else lambda: compute(guard.owner, order, parameters)
        return parameters, unpack_escrow(message), own


def _refusal(number: int, refused: Refused, message: Message) -> Message:
    return reply(Refusal(owner=number, code=refused.code, reason=refused.why), message)


def client_app(owner_of: OwnerOf, compute: Compute | None = None, *, guard: type[OwnerGuard] = OwnerGuard) -> ClientApp:
    """The app that runs beside an owner's data. `owner_of` reads the node's own configuration, never a message."""
    app = ClientApp(mods=[guard(owner_of, compute)])

    @app.train()
    @app.train("mask")
    @app.query("mask")
    @app.query("bid")
    @app.query("release")
    def answered(message: Message, context: Context) -> Message:
        raise InvalidInput("message", message.metadata.message_type, "the guard answers this by itself")

    return app
