"""States and names as people read them, in one place for all pages."""

from __future__ import annotations

__all__ = ["AWARD", "award_state", "award_tone", "list_of", "seconds", "tone"]

_TONES = {
    "queued": "warn",
    "running": "live",
    "finished": "good",
    "cancelled": "idle",
    "expired": "warn",
    "failed": "bad",
}
AWARD = {
    "posted": ("paid", "good"),
    "voided": ("not delivered", "warn"),
    "expired": ("too late", "warn"),
    "pending": ("in escrow", "live"),
}


def tone(state: str) -> str:
    """The colour of a task's state."""
    return _TONES.get(state, "idle")


def award_state(state: str) -> str:
    """How an award ended."""
    return AWARD.get(state, (state, ""))[0]


def award_tone(state: str) -> str:
    """Its colour."""
    return AWARD.get(state, ("", "idle"))[1]


def seconds(value: float) -> str:
    """A span of time, roughly."""
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if value >= size:
            count = round(value / size)
            return f"{count} {name}{'' if count == 1 else 's'}"
    return f"{value:.0f} s"


def list_of(names: tuple[str, ...] | list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
