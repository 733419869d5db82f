"""Which engines this broker can play a task on.

Both take a task through one round at a time, with the same rows (`round_rows`), the same ledger and the same endings.
The simulation is played by the worker, in this process (`rounds`). A Flower task is played by a run on a SuperLink,
which owners' SuperNodes are connected to (`flower`); the worker starts it and watches it. Without a SuperLink such an
order is refused rather than half served.
"""

from __future__ import annotations

from flmarket.broker.errors import Conflict
from flmarket.broker.settings import Settings

__all__ = ["FLOWER", "SIMULATION", "check_engine", "engines"]

SIMULATION, FLOWER = "simulation", "flower"


def engines(settings: Settings) -> tuple[str, ...]:
    """What this broker runs."""
    return (SIMULATION, FLOWER) if settings.superlink else (SIMULATION,)


def check_engine(settings: Settings, name: str) -> None:
    """Conflict unless this broker can run the engine."""
    offered = engines(settings)
    if name not in offered:
        raise Conflict(f"this broker does not run {name} tasks; it runs {', '.join(offered)}")
