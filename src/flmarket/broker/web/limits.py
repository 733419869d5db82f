"""Limits in this process's memory: a bucket of tokens for each party or address, refilled steadily; open streams; and
work that takes seconds, which has threads of its own so that no crowd of it holds up what is quick."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from flmarket.broker.errors import TooMany

T = TypeVar("T")

_MOST = 50_000
_RETRY_SECONDS = 2.0


class Buckets:
    """Up to `burst` requests at once and `per_second` in the long run, for each name."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._rate, self._burst = per_second, float(burst)
        self._levels: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """One token, or TooMany."""
        at = time.monotonic()
        with self._lock:
            level, since = self._levels.get(name, (self._burst, at))
            level = min(self._burst, level + (at - since) * self._rate)
            if level < 1:
                raise TooMany("too many requests: slow down", (1 - level) / self._rate)
            if len(self._levels) >= _MOST:
                self._forget_full(at)
            self._levels[name] = (level - 1, at)

    def _forget_full(self, at: float) -> None:
        """Names whose bucket is full again need no entry; were all of them busy, everybody starts anew."""
        busy = {
            name: (level, since)
            for name, (level, since) in self._levels.items()
            if level + (at - since) * self._rate < self._burst
        }
        self._levels = busy if len(busy) < _MOST else {}


class Streams:
    """How many event streams are open, in all and for each party."""

    def __init__(self, most: int, most_per_party: int) -> None:
        self._most, self._most_per_party = most, most_per_party
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        """Count a new stream, or TooMany."""
        with self._lock:
            if self.count >= self._most or self._open[name] >= self._most_per_party:
                raise TooMany("too many open event streams: close one", 5.0)
            self._open[name] += 1

    def leave(self, name: str) -> None:
        """A stream ended."""
        with self._lock:
            self._open.subtract([name])
            self._open = +self._open  # without those who have none

    @property
    def count(self) -> int:
        """All open streams."""
        return self._open.total()


class HeavyWork:
    """`workers` jobs at once, one of a party; one more of hers may wait, and the newest replaces the one that waits.

    Whoever finds no place is told to come back (TooMany). All methods belong to the event loop that serves requests; a
    job whose client has gone away still holds its place until it is done.
    """

    def __init__(self, workers: int, most_waiting: int) -> None:
        self._workers, self._most_waiting = workers, most_waiting
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="flmarket-heavy")
        self._running: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def run(self, name: str, job: Callable[[], T]) -> T:
        """The job's result, once it was this party's turn."""
        if name in self._running or len(self._running) >= self._workers:
            await self._turn(name)
        else:
            self._running.add(name)
        loop, done = asyncio.get_running_loop(), self._pool.submit(job)

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the service has ended, and its loop with it
                loop.call_soon_threadsafe(self._leave, name)

        done.add_done_callback(ended)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Take no more jobs; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, name: str) -> None:
        older = self._waiting.pop(name, None)
        if older is not None and not older.done():
            older.set_exception(TooMany("a newer request of yours took this one's place", _RETRY_SECONDS))
        elif len(self._waiting) >= self._most_waiting:
            raise TooMany("the market is busy working things out: try again", _RETRY_SECONDS)
        turn = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(name)  # it was her turn just then
            raise
        finally:
            if self._waiting.get(name) is turn:
                del self._waiting[name]

    def _leave(self, name: str) -> None:
        self._running.discard(name)
        for other, turn in list(self._waiting.items()):
            if len(self._running) >= self._workers:
                return
            if other not in self._running and not turn.done():
                self._running.add(other)
                del self._waiting[other]
                turn.set_result(None)
