"""Is this answer what was paid for? The server's checks on arrival, before a delivery counts.

They see to form, not to truth: the right award, a vector of the right length, finite, and no longer than clip and noise
can make it. Within that a liar can send what she likes, and how much she can spoil is bounded by her weight.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from flmarket.engines.flower.messages import REPLAY, Delivery, Order, Refusal, release_id, unpack, unpack_vector
from flmarket.errors import InvalidInput

__all__ = ["BadUpdate", "checked_delivery"]


class BadUpdate(str):
    """The reason of an award that is void because what came was no good: something has left the owner's machine."""


def checked_delivery(
    answer: Message, order: Order, *, length: int, largest_norm: float
) -> tuple[NDArray[np.float64] | None, str]:
    """The vector, or None and what is wrong; `REPLAY` if the owner says that she released it before."""
    try:
        refusal, delivery = unpack(Refusal, answer), unpack(Delivery, answer)
        if refusal is not None:
            return None, REPLAY if refusal.code == REPLAY else f"refused: {refusal.reason}"
        if delivery is None:
            return None, BadUpdate("bad update: neither a delivery nor a refusal")
        if (delivery.release, delivery.owner) != (release_id(order), order.owner):
            return None, BadUpdate("bad update: another award's")
        vector = unpack_vector(answer, length)
    except InvalidInput as problem:
        return None, BadUpdate(f"bad update: {problem}")
    if vector.shape != (length,):
        return None, BadUpdate(f"bad update: shape {vector.shape} instead of ({length},)")
    if not np.isfinite(vector).all():
        return None, BadUpdate("bad update: not finite")
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(vector))
    if norm > largest_norm:
        return None, BadUpdate("bad update: longer than clip and noise can make it")
    return vector, ""
