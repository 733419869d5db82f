"""What the broker stamps on things: identifiers and times.

An identifier is a letter for the kind and 80 random bits, or bits that follow from an idempotency key. Time is in whole
milliseconds since 1970, UTC; the same in every database.
"""

import base64
import hashlib
import secrets
import time
from datetime import UTC, datetime

_BYTES = 10


def _text(raw: bytes) -> str:
    return base64.b32encode(raw).decode().lower().rstrip("=")


def new_id(kind: str) -> str:
    """A fresh identifier such as t_4xk…"""
    return f"{kind}_{_text(secrets.token_bytes(_BYTES))}"


def derived_id(kind: str, *parts: str) -> str:
    """The same identifier for the same parts: a repeated request finds what the first one made."""
    return f"{kind}_{_text(hashlib.sha256(chr(0).join((kind, *parts)).encode()).digest()[:_BYTES])}"


def keyed_id(kind: str, caller: str, key: str | None) -> str:
    """A fresh identifier, or the one that follows from the idempotency key under which this party asks."""
    return new_id(kind) if key is None else derived_id(kind, caller, key)


def new_secret() -> str:
    """256 random bits that are safe in a header and in an address."""
    return secrets.token_urlsafe(32)


def now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def iso(milliseconds: int | None) -> str | None:
    """RFC 3339 with milliseconds, or None."""
    if milliseconds is None:
        return None
    whole, rest = divmod(milliseconds, 1000)
    return f"{datetime.fromtimestamp(whole, UTC).isoformat()[:19]}.{rest:03d}Z"
