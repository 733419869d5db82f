"""Identifiers: a letter for the kind and 80 random bits, or bits that follow from an idempotency key."""

from __future__ import annotations

import base64
import hashlib
import secrets

__all__ = ["derived_id", "new_id", "new_secret"]

_BYTES = 10


def _text(raw: bytes) -> str:
    return base64.b32encode(raw).decode().lower().rstrip("=")


def new_id(kind: str) -> str:
    """A fresh identifier such as t_4xk…"""
    return f"{kind}_{_text(secrets.token_bytes(_BYTES))}"


def derived_id(kind: str, *parts: str) -> str:
    """The same identifier for the same parts: a repeated request finds what the first one made."""
    return f"{kind}_{_text(hashlib.sha256(chr(0).join((kind, *parts)).encode()).digest()[:_BYTES])}"


def new_secret() -> str:
    """256 random bits that are safe in a header and in an address."""
    return secrets.token_urlsafe(32)
