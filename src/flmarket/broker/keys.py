"""API keys: `flm_<id>_<secret>`, the secret 256 random bits, stored as an argon2id hash.

argon2 makes guessing slow; a secret of 256 random bits cannot be guessed anyway, so the hash needs far less work than
one of a password (8 MiB and one pass, about 5 ms). A verified key is remembered for a minute by a SHA-256 of the whole
key, so that a busy client pays once a minute; revoking a key empties that memory in this process at once and in others
within the minute.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Generic, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from flmarket.broker.ids import new_secret

__all__ = ["KeyCache", "format_key", "hash_secret", "make_secret", "split_key", "verify_secret"]

T = TypeVar("T")

_PREFIX = "flm_"
_HASHER = PasswordHasher(time_cost=1, memory_cost=8 * 1024, parallelism=1)
_MAX_CACHED = 100_000
# Verified against when the key id is unknown, so that an unknown id takes as long as a wrong secret.
_NOBODY = _HASHER.hash("nobody")


def format_key(key_id: str, secret: str) -> str:
    """The key as its holder keeps it."""
    return f"{_PREFIX}{key_id.removeprefix('k_')}_{secret}"


def split_key(key: str) -> tuple[str, str] | None:
    """Key id and secret, or None for what is not a key."""
    if not key.startswith(_PREFIX) or len(key) > 200 or not key.isascii():
        return None
    key_id, separator, secret = key.removeprefix(_PREFIX).partition("_")
    return (f"k_{key_id}", secret) if separator and key_id and secret else None


def make_secret() -> str:
    """256 random bits."""
    return new_secret()


def hash_secret(secret: str) -> str:
    """What is stored."""
    return _HASHER.hash(secret)


def verify_secret(stored: str | None, secret: str) -> bool:
    """Whether the secret belongs to the stored hash."""
    try:
        matches = _HASHER.verify(_NOBODY if stored is None else stored, secret)
    except (Argon2Error, InvalidHashError):
        return False
    return matches and stored is not None


class KeyCache(Generic[T]):
    """Keys verified within the last minute, by hash, with their parties."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[bytes, tuple[T, float]] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> T | None:
        """The party, if the key was verified recently."""
        with self._lock:
            found = self._known.get(_digest(key))
        return found[0] if found is not None and found[1] > time.monotonic() else None

    def put(self, key: str, party: T) -> None:
        """Remember a verified key."""
        with self._lock:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[_digest(key)] = (party, time.monotonic() + self._seconds)

    def clear(self) -> None:
        """Forget everything, after a key was revoked or a party was closed."""
        with self._lock:
            self._known.clear()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
