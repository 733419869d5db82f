"""The owners' side as a Flower ClientApp: local training, and the guard in front of it, which answers all else itself.

`client_app(owner_of)` always puts the guard in front; there is no way to get the app without it. A model of one's own
comes in as `compute(owner, order, parameters) -> vector`; what it returns goes to the guard and no further.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flmarket.engines.flower.guard import OwnerGuard
from flmarket.engines.flower.messages import (
    TRAIN,
    Delivery,
    Order,
    Refusal,
    release_id,
    reply,
    unpack,
    unpack_vector,
)
from flmarket.engines.flower.owner import Owner, raw_update
from flmarket.errors import InvalidInput
from flmarket.learning import Purpose

__all__ = ["Compute", "OwnerOf", "client_app"]

FloatArray = NDArray[np.float64]
OwnerOf = Callable[[Context], Owner]
Compute = Callable[[Owner, Order, FloatArray], FloatArray]


def client_app(owner_of: OwnerOf, compute: Compute = raw_update, *, faults: bool = False) -> ClientApp:
    """The app that runs beside an owner's data. `owner_of` reads the node's own configuration, never a message.

    `faults` lets simulated owners fail as often as their market's file says; it puts a step outside the guard.
    """
    app = ClientApp(mods=[*([_simulated_faults(owner_of)] if faults else []), OwnerGuard(owner_of)])

    @app.query("bid")
    @app.query("release")
    def answered(message: Message, context: Context) -> Message:
        raise InvalidInput("message", message.metadata.message_type, "the guard answers this by itself")

    @app.train()
    def train(message: Message, context: Context) -> Message:
        owner, order = owner_of(context), unpack(Order, message)
        if order is None:
            raise InvalidInput("message", "train", "an order")
        vector = compute(owner, order, unpack_vector(message))
        return reply(Delivery(release="raw", owner=owner.number), message, vector)

    return app


def _simulated_faults(owner_of: OwnerOf) -> Callable[[Message, Context, Callable[..., Message]], Message]:
    """Drop-outs, nonsense and malice as a simulated market asks for; nothing for owners who are not simulated."""

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        try:
            order = unpack(Order, message) if message.metadata.message_type == TRAIN else None
            owner = None if order is None else owner_of(context)
        except Exception:  # the guard says what is wrong
            return call_next(message, context)
        if order is None or owner is None or not owner.simulated:
            return call_next(message, context)
        fate = owner.stream(order, Purpose.PARTICIPATION).random()
        if fate < owner.dropout:
            raise ConnectionError("simulated drop-out")
        answer = call_next(message, context)
        if fate < owner.dropout + owner.faulty and unpack(Refusal, answer) is None:
            broken = np.full_like(unpack_vector(answer), np.nan)
            return reply(Delivery(release=release_id(order), owner=owner.number), message, broken)
        if owner.adversary is not None and unpack(Refusal, answer) is None:
            draw = owner.stream(order, Purpose.ADVERSARY)
            false = owner.adversary.upload(unpack_vector(answer), unpack_vector(message), draw)
            return reply(Delivery(release=release_id(order), owner=owner.number), message, false)
        return answer

    return mod
