"""What everybody may see, worked out once a second at most, however many ask.

For answers that do not depend on who asks. A value may be as old as `seconds`; while one thread works out a new one,
the others that ask for it wait for that one instead of doing the same work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["Recent"]

Value = TypeVar("Value")


class Recent:
    """Values by key, each with the moment until which it is good enough."""

    def __init__(self, seconds: float = 1.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._values: dict[Hashable, tuple[float, Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value, made anew if it is too old. Use few keys: none is ever dropped."""
        found = self._values.get(key)
        if found is None or found[0] <= self._clock():
            with self._lock:
                found = self._values.get(key)
                if found is None or found[0] <= self._clock():
                    value = make()
                    found = self._values[key] = (self._clock() + self.seconds, value)
        result: Value = found[1]
        return result
