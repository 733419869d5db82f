"""API keys: `flm_<id>_<secret>`, the secret 256 random bits, stored as an HMAC-SHA256 under a secret of the service.

A slow hash protects what people can remember; 256 random bits cannot be guessed at any speed, so a fast hash is right:
every request looks at the key as the database has it now, and a revoked one is refused at once, in every process. What
would break it: secrets that are not random. Older versions stored argon2id hashes; those are checked as they are, and
replaced when their key is next used.
"""

from __future__ import annotations

import hashlib
import hmac

from flmarket.broker.ids import new_secret

__all__ = ["format_key", "hash_secret", "is_slow", "make_secret", "split_key", "verify_secret"]

_PREFIX = "flm_"
_FAST, _SLOW = "hmac-sha256$", "$argon2"


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


def hash_secret(service_secret: bytes, key_id: str, secret: str) -> str:
    """What is stored."""
    return _FAST + hmac.new(service_secret, f"{key_id}\0{secret}".encode(), hashlib.sha256).hexdigest()


def is_slow(stored: str) -> bool:
    """Whether checking a secret against this hash takes milliseconds of work."""
    return stored.startswith(_SLOW)


def verify_secret(service_secret: bytes, key_id: str, stored: str, secret: str) -> bool:
    """Whether the secret belongs to the stored hash."""
    if not is_slow(stored):
        return hmac.compare_digest(stored.encode(), hash_secret(service_secret, key_id, secret).encode())
    from argon2 import PasswordHasher
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        return PasswordHasher().verify(stored, secret)
    except (Argon2Error, InvalidHashError):
        return False
