"""The cryptography that masking stands on, each piece under the one name by which the protocol uses it.

X25519 for a secret between two owners, HKDF-SHA256 for what is derived from it, ChaCha20 on the whole 256-bit key for
masks, ChaCha20-Poly1305 for shares in transit, Ed25519 for identities, SHA-256 for commitments: all from
`cryptography`, none of our own making. Shamir's sharing is over the field of 2^256 + 297, the least prime above what 32
bytes can say, so that a key is one element of it.

What would break it: using a derived key twice for different texts. Every derivation names its purpose, both owners and
the digest of the round's terms, and a round's secrets all come from one root that is drawn for it, so a key seals one
text and one mask. What is derived again from the same root is the same, bit for bit: that is how an owner repeats
herself after a crash.

Shamir, How to share a secret (CACM 1979).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import InvalidInput, MissingDependency

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise MissingDependency("cryptography", "secure") from None

Words = NDArray[np.unsignedinteger[Any]]
Value = int | bytes | str | Sequence[Any]
Secret = X25519PrivateKey

KEY, SHARE = 32, 33
PRIME = 2**256 + 297
_BLOCK = 1 << 16  # words masked at a time: what a processor's cache holds
_ZEROS = bytes(8 * _BLOCK)
_DEEPEST = 6


# texts


def packed(value: Value) -> bytes:
    """Numbers, bytes, texts and lists of them as bytes: one value, one text, so that it can be signed."""
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, str):
        value = value.encode()
        return b"s%d;" % len(value) + value
    if isinstance(value, bytes):
        return b"b%d;" % len(value) + value
    return b"l%d;" % len(value) + b"".join(map(packed, value))


def unpacked(text: bytes) -> Value:
    """What `packed` made; anything else, one byte more included, is refused."""
    try:
        value, end = _unpacked(text, 0, _DEEPEST)
    except (ValueError, IndexError):
        raise InvalidInput("text", text[:40], "a packed value") from None
    if end != len(text):
        raise InvalidInput("text", text[:40], "one packed value and nothing after it")
    return value


def _unpacked(text: bytes, at: int, deep: int) -> tuple[Value, int]:
    stop = text.index(b";", at, at + 24)
    kind, number = text[at : at + 1], int(text[at + 1 : stop])
    if b"%d" % number != text[at + 1 : stop]:  # one value, one text
        raise ValueError
    stop += 1
    if kind == b"i":
        return number, stop
    if not 0 <= number <= len(text) - stop:  # a list's items have a byte at least
        raise ValueError
    if kind in (b"b", b"s"):
        end = stop + number
        return (text[stop:end] if kind == b"b" else text[stop:end].decode()), end
    if kind != b"l" or deep == 0:
        raise ValueError
    items = []
    for _ in range(number):
        item, stop = _unpacked(text, stop, deep - 1)
        items.append(item)
    return items, stop


def digest(*parts: Value) -> bytes:
    """SHA-256 of the parts."""
    return hashlib.sha256(packed(parts)).digest()


# keys


def derived(secret: bytes, terms: bytes, *purpose: Value, length: int = KEY) -> bytes:
    """A key for one purpose in one round."""
    return HKDF(hashes.SHA256(), length, terms, packed(purpose)).derive(secret)


def secret_key(private: bytes) -> Secret:
    """An X25519 key, ready for use: making it costs as much as using it once."""
    return X25519PrivateKey.from_private_bytes(private)


def public_key(private: Secret) -> bytes:
    """The public half of an X25519 key."""
    return private.public_key().public_bytes_raw()


def agreed(private: Secret, public: bytes) -> bytes:
    """The secret of two X25519 keys; ValueError if the other's is none (of small order)."""
    return private.exchange(X25519PublicKey.from_public_bytes(public))


def identity_key(private: bytes) -> bytes:
    """The public half of an Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def signed(private: bytes, text: bytes) -> bytes:
    """A signature, always the same for the same text."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(text)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether this key's holder signed this text."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def sealed(key: bytes, text: bytes, beside: bytes) -> bytes:
    """A text encrypted and authenticated, with what goes beside it in the open. A key seals one text, ever."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, beside)


def opened(key: bytes, text: bytes, beside: bytes) -> bytes | None:
    """The text that was sealed, or None if it or what goes beside it is another."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), text, beside)
    except InvalidTag:
        return None


# masks


def stream(key: bytes, length: int) -> bytes:
    """ChaCha20's key stream on the whole key."""
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(length))


def add_masks(total: Words, keys: Sequence[tuple[bytes, int]]) -> None:
    """Add (+1) or subtract (−1) each key's mask, in place, modulo the words' own size."""
    ciphers = [(Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor(), sign) for key, sign in keys]
    size = total.dtype.itemsize
    for start in range(0, len(total), _BLOCK):
        part = total[start : start + _BLOCK]
        zeros = _ZEROS[: len(part) * size]
        for cipher, sign in ciphers:
            mask = np.frombuffer(cipher.update(zeros), dtype=total.dtype)
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)


# shares


def shares(secret: bytes, holders: Sequence[int], threshold: int, randomness: bytes) -> dict[int, bytes]:
    """Shamir's shares for holders (numbers of at least 1): any `threshold` give the secret, fewer say nothing.

    `randomness` is 64 bytes for each coefficient, so that none is off uniform by more than 2^−255.
    """
    if not 1 <= threshold <= len(holders) or len(randomness) != 64 * (threshold - 1):
        raise InvalidInput("threshold", threshold, f"1 to {len(holders)}, with 64 bytes for each but one")
    parts = [randomness[at : at + 64] for at in range(0, len(randomness), 64)]
    coefficients = [int.from_bytes(part) % PRIME for part in parts]
    found = {}
    for holder in holders:
        value = 0
        for one in coefficients:
            value = (value + one) * holder % PRIME
        found[holder] = ((value + int.from_bytes(secret)) % PRIME).to_bytes(SHARE)
    return found


def weights(holders: Sequence[int]) -> dict[int, int]:
    """Lagrange's coefficients at 0 for shares of these holders."""
    found = {}
    for one in holders:
        above, below = 1, 1
        for other in holders:
            if other != one:
                above, below = above * other % PRIME, below * (other - one) % PRIME
        found[one] = above * pow(below, -1, PRIME) % PRIME
    return found


def recovered(parts: Mapping[int, bytes], weight: Mapping[int, int]) -> bytes | None:
    """The secret of exactly these shares, or None if it is none of 32 bytes."""
    value = sum(int.from_bytes(part) * weight[holder] for holder, part in parts.items()) % PRIME
    return value.to_bytes(KEY) if value < 2 ** (8 * KEY) else None
