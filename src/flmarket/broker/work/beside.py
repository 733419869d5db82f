"""Threads beside the worker's."""

import threading
from collections.abc import Callable

from sqlalchemy import Connection

from flmarket.broker.core import Broker

_PATIENCE = 3.0  # seconds for a thread to stop


class Beside:
    """What a thread does beside the worker's; `check` says whether this process may still write."""

    def __init__(self, broker: Broker, stop: threading.Event, check: Callable[[Connection], None]) -> None:
        self.broker, self.stop, self.check = broker, stop, check
        self._thread: threading.Thread | None = None

    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None], name: str) -> None:
        """Do the work in a thread."""
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait a little for the thread."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)
