"""Every decision of a simulated run, drawn from one seed; what was broken is counted, so that it can be left out.

Each purpose has a stream of its own: how often one thing is asked does not change what is drawn for another. A fault
that happens is remembered as (fault, how many times that question had been asked). A run with the same seed in which
some of them are `spared` is how a failure is made small (`torture`).

`Swarm` is what a seed makes of all this: which faults there are in this run at all, and how often. Half of them are
left out of any one run, because faults hide each other: a network that loses everything never shows what a doubled
message does (Groce et al., Swarm Testing, ISSTA 2012).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

_Item = TypeVar("_Item")
Fault = tuple[str, int]

# The faults there are, and the most often each happens when it is asked about: at every call of a store, every
# statement of a database, every message, every turn.
FAULTS: dict[str, float] = {
    "server crash": 0.02,
    "ledger error": 0.02,
    "disk full": 0.02,
    "torn write": 0.02,
    "message lost": 0.25,
    "message doubled": 0.2,
    "message delayed": 0.3,
    "message late": 0.1,
    "node crash": 0.02,
    "node error": 0.02,
    "node away": 0.1,
    "clock jump": 0.1,
    "journal restored": 0.05,
    "server restored": 0.03,
    "hostile server": 0.3,
    "hostile owner": 0.4,
    "cap changed": 0.15,
    "cap registered": 0.1,
    "posted twice": 0.1,
    "worker paused": 0.1,
    "database error": 0.01,
    "database crash": 0.01,
    "cancelled": 0.1,
    "withdrawn": 0.1,
}


class Crash(BaseException):
    """The power fails here. Not an Exception: nothing in a program may handle it."""


@dataclass(frozen=True)
class Swarm:
    """Which faults a run has, how often each happens, and how much is played."""

    rates: Mapping[str, float]
    owners: int = 4
    tasks: int = 12
    turns: int = 220

    @classmethod
    def of(cls, seed: int) -> Swarm:
        """What the seed makes of it."""
        draw = random.Random(f"{seed}/swarm")
        rates = {name: most * 10 ** draw.uniform(-1.5, 0) for name, most in FAULTS.items() if draw.random() < 0.5}
        return cls(rates, owners=draw.randint(2, 6), tasks=draw.randint(4, 16), turns=draw.randint(120, 400))


@dataclass
class Chance:
    """The decisions of one run. While it is `quiet`, nothing breaks any more."""

    seed: int
    rates: Mapping[str, float]
    spared: frozenset[Fault] = frozenset()
    quiet: bool = False
    fired: list[Fault] = field(default_factory=list)
    _asked: Counter[str] = field(default_factory=Counter)
    _streams: dict[str, random.Random] = field(default_factory=dict)

    def stream(self, purpose: str) -> random.Random:
        """The draws for one purpose."""
        if purpose not in self._streams:
            self._streams[purpose] = random.Random(f"{self.seed}/{purpose}")
        return self._streams[purpose]

    def happens(self, fault: str) -> bool:
        """Whether this fault happens now."""
        rate = self.rates.get(fault, 0.0)
        if self.quiet or not rate:
            return False
        self._asked[fault] += 1
        here = fault, self._asked[fault]
        if self.stream(fault).random() >= rate or here in self.spared:
            return False
        self.fired.append(here)
        return True

    def choice(self, purpose: str, among: Sequence[_Item]) -> _Item:
        """One of these."""
        return self.stream(purpose).choice(among)

    def uniform(self, purpose: str, low: float, high: float) -> float:
        """A number between two."""
        return self.stream(purpose).uniform(low, high)
