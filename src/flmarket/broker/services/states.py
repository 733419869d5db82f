"""The states of a task, in one place.

funding → queued → running → finished
             │         ├───→ cancelled, expired (the deadline passed), failed
             └─────────┘
"""

from __future__ import annotations

__all__ = ["ACTIVE", "ENDED", "PLAYABLE"]

PLAYABLE = ("queued", "running")
ACTIVE = ("funding", *PLAYABLE)
ENDED = ("finished", "cancelled", "expired", "failed")
