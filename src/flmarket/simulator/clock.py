"""Time as a simulated run has it: it passes when somebody sleeps, and what is due happens meanwhile.

`running` puts this clock in the place of the `time` module in every module of this package that reads it, so nothing
has to be told which clock to use, and none can be forgotten. `skew` is how wrong the clock of the machine at work is.

What would break it: a module that says `from time import …`, or another thread that reads the time while a run is on.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_BEGIN = 1_800_000_000.0  # seconds since 1970: any moment will do


class Clock:
    """Virtual seconds, and what is to happen at which of them. It has the functions of `time` that are in use here."""

    perf_counter = staticmethod(time.perf_counter)  # how long a step takes is measured, not simulated
    process_time = staticmethod(time.process_time)

    def __init__(self) -> None:
        self.now, self.skew = 0.0, 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, moment: float, what: Callable[[], None]) -> None:
        """Let something happen then."""
        heapq.heappush(self._due, (moment, next(self._number), what))

    def sleep(self, seconds: float) -> None:
        """Let time pass; what is due happens in order."""
        until = self.now + max(0.0, seconds)
        while self._due and self._due[0][0] <= until:
            moment, _, what = heapq.heappop(self._due)
            self.now = max(self.now, moment)
            what()
        self.now = max(self.now, until)

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return self.now

    def time(self) -> float:
        """Seconds since 1970, as the machine at work believes."""
        return _BEGIN + self.now + self.skew

    def time_ns(self) -> int:
        """The same in whole nanoseconds."""
        return int(self.time() * 1e9)


@contextmanager
def running(clock: Clock) -> Iterator[None]:
    """Every module of this package goes by this clock, and says nothing in the log."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("flmarket.")]
    reading = [module for module in ours if getattr(module, "time", None) is time and module.__name__ != __name__]
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    for module in reading:
        vars(module)["time"] = clock
    try:
        yield
    finally:
        for module in reading:
            vars(module)["time"] = time
        logging.disable(before)
