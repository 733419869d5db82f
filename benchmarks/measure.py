"""One row of a benchmark: what was measured, for us and for the peer, in the same unit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

__all__ = ["Row", "best_of"]


@dataclass(frozen=True)
class Row:
    """Seconds per unit of work; `peer` names what `peer_seconds` measures."""

    what: str
    unit: str
    ours_seconds: float
    peer: str
    peer_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """How many times faster we are."""
        return None if self.peer_seconds is None else self.peer_seconds / self.ours_seconds

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return asdict(self) | {"ratio": self.ratio}


def best_of(work: Callable[[], object], repeats: int = 3, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """The least wall time of several runs: the one least disturbed by others.

    Work too long to be repeated may be measured in processor time (`time.process_time`), if one thread does it.
    """
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)
