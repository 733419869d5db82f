"""Which groups of clients the server averages before it chooses one of them (JDP Alg. 4 and Figure 5).

| grouping | groups | keeps every adversary out of some group |
| --- | --- | --- |
| `LeaveOneOut` | m, each without one client | of one adversary, always |
| `LeaveKOut(k, count)` | `count` random ones, each without k clients | of f ≤ k, as likely as `coverage` says |
| `Partition(size)` | about m/size, every client in one | of f < number of groups, always; but each group is small |

Leave-one-out sums take O(m·p) by running sums from both ends. The obvious total minus own would cost the same and is
not safe here: an upload of 1e20 swallows the digits of all others, so exactly the group without the adversary would
be destroyed by her (a test shows it).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput

__all__ = ["Grouping", "LeaveKOut", "LeaveOneOut", "Partition", "coverage"]

BoolArray = NDArray[np.bool_]
_ENUMERATE_BELOW = 5_000


@runtime_checkable
class Grouping(Protocol):
    """Groups of m clients, and every group's sum of vectors."""

    def members(self, clients: int, rng: np.random.Generator | None) -> BoolArray:
        """Who is in which group, shape (groups, clients); no group is empty."""

    def sums(self, weighted: FloatArray, members: BoolArray) -> FloatArray:
        """Sums (groups, p) over each group of vectors (clients, p) that are already multiplied by their sizes."""


def _product(weighted: FloatArray, members: BoolArray) -> FloatArray:
    return np.asarray(members.astype(np.float64) @ weighted)


@dataclass(frozen=True)
class LeaveOneOut:
    """Group i is everybody but client i."""

    def members(self, clients: int, rng: np.random.Generator | None) -> BoolArray:
        """Deterministic."""
        del rng
        if clients < 2:
            raise InvalidInput("clients", clients, "two or more, so that one can be left out")
        return ~np.eye(clients, dtype=bool)

    def sums(self, weighted: FloatArray, members: BoolArray) -> FloatArray:
        """Sum before i plus sum after i."""
        del members
        before, after = np.zeros_like(weighted), np.zeros_like(weighted)
        np.cumsum(weighted[:-1], axis=0, out=before[1:])
        np.cumsum(weighted[:0:-1], axis=0, out=after[-2::-1])
        before += after
        return before


@dataclass(frozen=True)
class LeaveKOut:
    """`count` different random groups, each without k clients; all of them if there are no more than `count`."""

    k: int = 2
    count: int = 40

    def __post_init__(self) -> None:
        for name in ("k", "count"):
            _whole(name, getattr(self, name))

    def members(self, clients: int, rng: np.random.Generator | None) -> BoolArray:
        """Fresh groups each time."""
        if clients <= self.k:
            raise InvalidInput("clients", clients, f"more than the {self.k} that are left out")
        possible = comb(clients, self.k)
        if possible <= self.count:
            return _all_without(clients, self.k)
        draw = _generator(rng)
        if possible <= _ENUMERATE_BELOW:  # few: sampling until enough differ could take long
            return _all_without(clients, self.k)[np.sort(draw.choice(possible, self.count, replace=False))]
        seen: dict[bytes, BoolArray] = {}
        while len(seen) < self.count:
            group = np.ones(clients, dtype=bool)
            group[draw.choice(clients, self.k, replace=False)] = False
            seen[group.tobytes()] = group
        return np.array(list(seen.values()))

    def sums(self, weighted: FloatArray, members: BoolArray) -> FloatArray:
        """A matrix product."""
        return _product(weighted, members)


@dataclass(frozen=True)
class Partition:
    """Clients dealt at random into groups of `size`; the last group also takes what is left over."""

    size: int = 5

    def __post_init__(self) -> None:
        _whole("size", self.size)

    def members(self, clients: int, rng: np.random.Generator | None) -> BoolArray:
        """Every client in exactly one group."""
        if clients < self.size:
            raise InvalidInput("clients", clients, f"at least the {self.size} of a group")
        groups = clients // self.size
        place = np.minimum(np.arange(clients) // self.size, groups - 1)
        made = np.zeros((groups, clients), dtype=bool)
        made[place, _generator(rng).permutation(clients)] = True
        return made

    def sums(self, weighted: FloatArray, members: BoolArray) -> FloatArray:
        """A matrix product."""
        return _product(weighted, members)


def coverage(clients: int, adversaries: int, grouping: LeaveKOut) -> float:
    """How likely some group is free of all adversaries: 1 − (1 − C(m−f, k−f)/C(m, k))^count, groups as if independent.

    The groups are drawn without repetition, so the true probability is at least this.
    """
    if adversaries > grouping.k:
        return 0.0
    clean = comb(clients - adversaries, grouping.k - adversaries) / comb(clients, grouping.k)
    return 1.0 - (1.0 - clean) ** min(grouping.count, comb(clients, grouping.k))


def _all_without(clients: int, k: int) -> BoolArray:
    absent = np.array(list(combinations(range(clients), k)), dtype=np.intp)
    made = np.ones((len(absent), clients), dtype=bool)
    made[np.arange(len(absent))[:, None], absent] = False
    return made


def _generator(rng: np.random.Generator | None) -> np.random.Generator:
    if rng is None:
        raise InvalidInput("rng", rng, "a numpy.random.Generator, to draw groups")
    return rng


def _whole(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise InvalidInput(name, value, "a whole number of at least 1")
