"""Is this answer what was paid for? The server's checks on arrival, before a delivery counts.

They see to form, not to truth: the right award, a vector of the right length, finite, and no longer than clip and noise
can make it. Within that a liar can send what she likes, and how much she can spoil is bounded by her weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from flmarket.engines.flower.messages import Delivery, Order, Refusal, release_id, unpack, unpack_vector
from flmarket.errors import InvalidInput

__all__ = ["Bad", "Delivered", "Refused", "checked_delivery"]


@dataclass(frozen=True, eq=False)
class Delivered:
    """What was paid for."""

    vector: NDArray[np.float64]


@dataclass(frozen=True)
class Bad:
    """Something left the owner's machine, and it is not what was paid for: it counts in her account all the same."""

    problem: str

    @property
    def reason(self) -> str:
        """For people."""
        return f"bad update: {self.problem}"


@dataclass(frozen=True)
class Refused:
    """Nothing left the owner's machine. `code` is for machines."""

    code: str
    why: str

    @property
    def reason(self) -> str:
        """For people."""
        return f"refused: {self.why}"


def checked_delivery(answer: Message, order: Order, *, length: int, largest_norm: float) -> Delivered | Bad | Refused:
    """What an owner's answer to an order is."""
    try:
        refusal, delivery = unpack(Refusal, answer), unpack(Delivery, answer)
        if refusal is not None:
            return Refused(refusal.code, refusal.reason)
        if delivery is None:
            return Bad("neither a delivery nor a refusal")
        if (delivery.release, delivery.owner) != (release_id(order), order.owner):
            return Bad("another award's")
        vector = unpack_vector(answer, length)
    except InvalidInput as problem:
        return Bad(str(problem))
    if vector.shape != (length,):
        return Bad(f"shape {vector.shape} instead of ({length},)")
    if not np.isfinite(vector).all():
        return Bad("not finite")
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(vector))
    if norm > largest_norm:
        return Bad("longer than clip and noise can make it")
    return Delivered(vector)
