"""What every robust rule has in common: m clients' vectors in, one vector out, and who counted how much.

A rule sees vectors, the clients' data sizes and, if it wants, a score: how good a candidate is on records that the
server holds. It never sees who is honest. Rules are immutable; all randomness comes from the generator given.

What would break all of them: one client who turns up under many names. Each rule bounds the influence of a *number* of
clients, and counting heads is meaningless where heads are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput

__all__ = ["Choice", "Combined", "RobustAggregation", "Score", "checked_uploads", "mix"]

BoolArray = NDArray[np.bool_]
Score = Callable[[FloatArray], FloatArray]
"""Candidates (k, p) in, a number from 0 to 1 for each out: accuracy on the server's validation records."""


@dataclass(frozen=True, eq=False)
class Choice:
    """How an exponential mechanism chose: every candidate's members (k, m), score and probability, and which won."""

    index: int
    probabilities: FloatArray
    scores: FloatArray
    members: BoolArray


@dataclass(frozen=True, eq=False)
class Combined:
    """The result of a rule. `total_size` is Σd of the clients in it; (average·total_size, total_size) is M4's pair.

    `shares` (m,) add up to 1 and say how much each client counts. Rules that work coordinate by coordinate have no
    such numbers; theirs are the shares of a client chosen at random.
    """

    average: FloatArray
    total_size: float
    shares: FloatArray
    choice: Choice | None = None


@runtime_checkable
class RobustAggregation(Protocol):
    """One vector from many, some of which may be malicious."""

    @property
    def name(self) -> str:
        """The registered name."""

    def combine(
        self,
        vectors: ArrayLike,
        data_size: ArrayLike,
        *,
        score: Score | None = None,
        rng: np.random.Generator | None = None,
    ) -> Combined:
        """Combine vectors (m, p) of clients with data sizes (m,)."""


def mix(combined: Combined, own: ArrayLike, data_size: ArrayLike) -> FloatArray:
    """M5: (agg + d·θ)/(sum + d) for each client, with her own true parameters θ (m, p) and size d (m,).

    The result is hers alone. By the billboard lemma all clients' results together are jointly private because each
    uses the public pair and her own data; one that is published is not private at all.
    """
    mine, size = checked_uploads(own, data_size)
    share = (size / (combined.total_size + size))[:, None]
    return np.asarray(combined.average + share * (mine - combined.average))


def checked_uploads(vectors: ArrayLike, data_size: ArrayLike, *, least: int = 1) -> tuple[FloatArray, FloatArray]:
    """Finite vectors (m, p) of at least `least` clients and a positive size for each, or a typed error."""
    array = np.asarray(vectors, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] < 1 or len(array) < least:
        raise InvalidInput("vectors", array.shape, f"(m, p): vectors of {least} clients or more")
    if not np.isfinite(array).all():
        raise InvalidInput("vectors", array[~np.isfinite(array)][0], "finite coordinates")
    size = checked_array("data_size", data_size)
    if size.shape != (len(array),) or not (size > 0).all():
        raise InvalidInput("data_size", data_size, f"a size above 0 for each of {len(array)} clients")
    return array, size
