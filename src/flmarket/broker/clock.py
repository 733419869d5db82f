"""Time as the broker stores it: whole milliseconds since 1970, UTC; the same in every database."""

from __future__ import annotations

import time
from datetime import UTC, datetime

__all__ = ["iso", "now"]


def now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def iso(milliseconds: int | None) -> str | None:
    """RFC 3339 with milliseconds, or None."""
    if milliseconds is None:
        return None
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{milliseconds % 1000:03d}Z"
