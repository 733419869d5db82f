"""Which engines this broker can play a task on.

An engine takes a task through one round at a time: open, clear, collect, close (`rounds.play_round` has the order, the
storage and the money; they are the same for every engine). The simulation is in this process. A Flower run needs a
SuperLink and owners' agents, which this service does not start: such an order is refused rather than half served.
"""

from __future__ import annotations

from flmarket.broker.errors import Conflict

__all__ = ["ENGINES", "check_engine"]

ENGINES = ("simulation",)


def check_engine(name: str) -> None:
    """Conflict unless this broker can run the engine."""
    if name not in ENGINES:
        raise Conflict(f"this broker does not run {name} tasks; it runs {', '.join(ENGINES)}")
