"""The cryptography that masking stands on, each piece under the one name by which the protocol uses it.

X25519 for a secret between two owners who meet, HKDF-SHA256 and keyed BLAKE2b (RFC 7693) for what is derived
from it and for tags, AES-256 in counter mode for masks, ChaCha20-Poly1305 for what is sealed, Poly1305 for masked
inputs, Ed25519 for identities, SHA-256 for commitments: all from `cryptography` and Python's `hashlib`, none of our own
making. Shamir's sharing is over the field of 2^256 + 297, the least prime above what 32 bytes can say, so that a key is
one element of it.

What would break it: using a derived key twice for different texts. Every derivation names its purpose and the digest
of the round's terms, and a round's secrets all come from one root that is drawn for it, so a key seals one text and
one mask. What is derived again from the same root is the same, bit for bit: that is how an owner repeats herself after
a crash. A counter-mode stream differs from random words by the birthday bound of its 128-bit blocks: at 10^6 numbers
an advantage of 2^-93, at the most that terms allow 2^-78.

Shamir, How to share a secret (CACM 1979).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import InvalidInput, MissingDependency

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.poly1305 import Poly1305
except ImportError:
    raise MissingDependency("cryptography", "secure") from None

Words = NDArray[np.unsignedinteger[Any]]
Value = int | bytes | str | Sequence[Any]
Secret = X25519PrivateKey
Dealing = dict[int, tuple[bytes, bytes]]  # shares of two secrets, by holder

KEY, SHARE = 32, 33
PRIME = 2**256 + 297
_BLOCK = 1 << 16  # words masked at a time: what a processor's cache holds
_ZEROS = bytes(8 * _BLOCK)
_DEEPEST = 6
_NONCES = [use.to_bytes(12) for use in range(4)]
_FROM_ZERO = modes.CTR(bytes(16))


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


class Table:
    """Rows of an owner's number and fields of fixed sizes, as bytes: one table, one text."""

    def __init__(self, *sizes: int) -> None:
        self._row = Struct(">Q" + "".join(f"{size}s" for size in sizes))

    def pack(self, rows: Iterable[Sequence[Any]]) -> bytes:
        """As it travels."""
        make = self._row.pack
        return b"".join([make(*row) for row in rows])

    def unpack(self, text: bytes) -> list[tuple[Any, ...]]:
        """What `pack` made; a text that is no whole number of rows is refused."""
        if len(text) % self._row.size:
            raise InvalidInput("text", text[:40], f"rows of {self._row.size} bytes")
        return list(self._row.iter_unpack(text))


# keys


def derived(secret: bytes, terms: bytes, *purpose: Value, length: int = KEY) -> bytes:
    """A key for one purpose in one round."""
    return HKDF(hashes.SHA256(), length, terms, packed(purpose)).derive(secret)


def mac(key: bytes, text: bytes) -> bytes:
    """BLAKE2b under a key: a tag that only who has it can make, and a key for the purpose that the text names."""
    return hashlib.blake2b(text, key=key, digest_size=KEY).digest()


def two_keys(key: bytes, text: bytes) -> tuple[bytes, bytes]:
    """BLAKE2b under a key, of which each half is a key."""
    both = hashlib.blake2b(text, key=key).digest()
    return both[:KEY], both[KEY:]


def same(one: bytes, other: bytes) -> bool:
    """Whether two tags are the same, without telling by time where they differ."""
    return hmac.compare_digest(one, other)


def tagged(key: bytes, words: Words) -> bytes:
    """Poly1305 of a long text. A key tags one text, ever."""
    return Poly1305.generate_tag(key, words.data.cast("B"))


def secret_key(private: bytes) -> Secret:
    """An X25519 key, ready for use: making it costs as much as using it once."""
    return X25519PrivateKey.from_private_bytes(private)


def public_key(private: Secret) -> bytes:
    """The public half of an X25519 key."""
    return private.public_key().public_bytes_raw()


def agreed(private: Secret, public: bytes) -> bytes:
    """The secret of two X25519 keys; ValueError if the other's is none (of small order)."""
    return private.exchange(X25519PublicKey.from_public_bytes(public))


@lru_cache(maxsize=1024)
def _signer(private: bytes) -> tuple[Ed25519PrivateKey, bytes]:
    """A key ready for use, and its public half: making it costs as much as signing."""
    key = Ed25519PrivateKey.from_private_bytes(private)
    return key, key.public_key().public_bytes_raw()


def identity_key(private: bytes) -> bytes:
    """The public half of an Ed25519 key."""
    return _signer(private)[1]


def signed(private: bytes, text: bytes) -> bytes:
    """A signature, always the same for the same text."""
    return _signer(private)[0].sign(text)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether this key's holder signed this text."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def sealed(key: bytes, text: bytes, beside: bytes, use: int = 0) -> bytes:
    """A text encrypted and authenticated, with what goes beside it in the open. A key seals one text for each use."""
    return ChaCha20Poly1305(key).encrypt(_NONCES[use], text, beside)


def opened(key: bytes, text: bytes, beside: bytes, use: int = 0) -> bytes | None:
    """The text that was sealed, or None if it, its use or what goes beside it is another."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCES[use], text, beside)
    except InvalidTag:
        return None


# masks


def _keystream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), _FROM_ZERO).encryptor()


def stream(key: bytes, length: int) -> bytes:
    """The key stream of AES in counter mode on the whole 256-bit key."""
    return _keystream(key).update(bytes(length))


def add_masks(total: Words, keys: Sequence[tuple[bytes, int]]) -> None:
    """Add (+1) or subtract (−1) each key's mask, in place, modulo the words' own size."""
    ciphers = [(_keystream(key).update, np.add if sign > 0 else np.subtract) for key, sign in keys]
    size, dtype = total.dtype.itemsize, total.dtype
    for start in range(0, len(total), _BLOCK):
        part = total[start : start + _BLOCK]
        zeros = _ZEROS[: len(part) * size]
        for update, combine in ciphers:
            combine(part, np.frombuffer(update(zeros), dtype=dtype), out=part)


# shares


def shares(secrets: tuple[bytes, bytes], holders: Sequence[int], threshold: int, randomness: bytes) -> Dealing:
    """Shamir's shares of two secrets for holders (numbers of at least 1): any `threshold` give a secret, fewer nothing.

    `randomness` is 64 bytes for each coefficient, so that none is off uniform by more than 2^−255.
    """
    if not 1 <= threshold <= len(holders) or len(randomness) != 128 * (threshold - 1):
        raise InvalidInput("threshold", threshold, f"1 to {len(holders)}, with 128 bytes for each but one")
    drawn = [int.from_bytes(randomness[at : at + 64]) % PRIME for at in range(0, len(randomness), 64)]
    # Both polynomials at once, one above the other: nothing is reduced before the end, so this is how wide they get.
    width = 8 * SHARE + threshold * max(holders).bit_length() + 8
    parts, low = [one | other << width for one, other in zip(drawn[::2], drawn[1::2], strict=True)], (1 << width) - 1
    last, found = int.from_bytes(secrets[0]) | int.from_bytes(secrets[1]) << width, {}
    for holder in holders:
        value = 0
        for one in parts:
            value = (value + one) * holder
        value += last
        found[holder] = ((value & low) % PRIME).to_bytes(SHARE), ((value >> width) % PRIME).to_bytes(SHARE)
    return found


def weights(holders: Sequence[int]) -> dict[int, int]:
    """Lagrange's coefficients at 0 for shares of these holders: all inverses by one."""
    whole = prod(holders)
    below = [one * prod([other - one for other in holders if other != one]) % PRIME for one in holders]
    before = [1]
    for one in below:
        before.append(before[-1] * one % PRIME)
    inverse, found = pow(before[-1], -1, PRIME), dict[int, int]()
    for at in range(len(below) - 1, -1, -1):
        found[holders[at]] = whole * before[at] * inverse % PRIME
        inverse = inverse * below[at] % PRIME
    return found


def recovered(parts: Mapping[int, bytes], weight: Mapping[int, int]) -> bytes | None:
    """The secret of exactly these shares, or None if it is none of 32 bytes."""
    value = sum(int.from_bytes(part) * weight[holder] for holder, part in parts.items()) % PRIME
    return value.to_bytes(KEY) if value < 2 ** (8 * KEY) else None
