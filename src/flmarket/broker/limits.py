"""Rate limits: a bucket of tokens for each party or address, refilled steadily, in this process's memory."""

from __future__ import annotations

import threading
import time

from flmarket.broker.errors import TooMany

__all__ = ["Buckets", "Streams"]

_MOST = 50_000


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
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        """Count a new stream, or TooMany."""
        with self._lock:
            if sum(self._open.values()) >= self._most or self._open.get(name, 0) >= self._most_per_party:
                raise TooMany("too many open event streams: close one", 5.0)
            self._open[name] = self._open.get(name, 0) + 1

    def leave(self, name: str) -> None:
        """A stream ended."""
        with self._lock:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    @property
    def count(self) -> int:
        """All open streams."""
        return sum(self._open.values())
