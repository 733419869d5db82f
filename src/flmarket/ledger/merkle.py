"""The Merkle tree of RFC 6962 over the log: heads, inclusion proofs and consistency proofs.

Leaves are entry hashes (already prefixed with 0x00, see `entry`), a node is SHA-256 of 0x01, left and right. The root
over n entries commits to all of them; a proof that an entry is among them has about log₂ n hashes, and so has a proof
that one log is the beginning of another (RFC 6962, sections 2.1.1 and 2.1.2; checking as in RFC 9162, 2.1.3.2 and
2.1.4.2). A proof is worth as much as the head it is checked against: take that from where the broker publishes it.

Stores keep every complete node whose level is a multiple of `TILE` beside the leaves (R. Cox, "Transparent logs for
skeptical clients", 2019), one for 256 entries. Any proof then reads a few tiles of at most 256 hashes, whatever the
size of the log; a `Tree` reads each tile once, and keeps the nodes it computed, so that many proofs cost little more
than one.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flmarket.errors import InvalidInput
from flmarket.ledger.entry import GENESIS

TILE = 8
_WIDTH = 1 << TILE

# (level, first, count) → that many hashes of complete nodes at a level that is a multiple of TILE
Fetch = Callable[[int, int, int], Sequence[bytes]]


@dataclass(frozen=True)
class Head:
    """A commitment to the first `size` entries: the last entry's hash, and the root of the tree over them all."""

    size: int
    last: str
    root: str

    def to_dict(self) -> dict[str, int | str]:
        """JSON-ready."""
        return {"size": self.size, "last": self.last, "root": self.root}

    @classmethod
    def from_dict(cls, data: object) -> "Head":
        """The head that `to_dict` wrote."""
        if not isinstance(data, dict) or set(data) != {"size", "last", "root"}:
            raise InvalidInput("head", data, "an object with size, last and root")
        size, last, root = data["size"], data["last"], data["root"]
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**62:
            raise InvalidInput("head.size", size, "a whole number of at least 0")
        return cls(size, digest("head.last", last).hex(), digest("head.root", root).hex())


def digest(field: str, value: object) -> bytes:
    """32 bytes from 64 hexadecimal digits."""
    if isinstance(value, str) and len(value) == 64 and value.isascii() and value.isalnum():
        try:
            return bytes.fromhex(value)
        except ValueError:
            pass
    raise InvalidInput(field, value, "64 hexadecimal digits")


def node_hash(left: bytes, right: bytes) -> bytes:
    """The parent of two nodes."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """Roots and proofs over the first `size` leaves, reading stored hashes through `fetch`, a tile at a time."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        self.size, self.fetch = size, fetch
        self._tiles: dict[tuple[int, int], Sequence[bytes]] = {}
        self._known: dict[tuple[int, int], bytes] = {}

    def leaf(self, index: int) -> bytes:
        """One leaf."""
        return self._range(index, index + 1)

    def root(self) -> bytes:
        """The Merkle tree hash of all leaves."""
        return self._range(0, self.size) if self.size else hashlib.sha256(b"").digest()

    def head(self) -> Head:
        """What commits to all leaves."""
        last = self.leaf(self.size - 1).hex() if self.size else GENESIS
        return Head(self.size, last, self.root().hex())

    def inclusion(self, index: int) -> tuple[bytes, ...]:
        """The audit path of a leaf, from the bottom up."""
        if not 0 <= index < self.size:
            raise InvalidInput("index", index, f"an entry below {self.size}")
        path, low, high = [], 0, self.size
        while high - low > 1:
            middle = low + _split(high - low)
            if index < middle:
                path.append(self._range(middle, high))
                high = middle
            else:
                path.append(self._range(low, middle))
                low = middle
        return tuple(reversed(path))

    def consistency(self, old_size: int) -> tuple[bytes, ...]:
        """The proof that the tree over the first `old_size` leaves is the beginning of this one."""
        if not 0 <= old_size <= self.size:
            raise InvalidInput("old_size", old_size, f"a whole number from 0 to {self.size}")
        if old_size in (0, self.size):
            return ()
        path, low, high, complete = [], 0, self.size, True
        while old_size != high:
            middle = low + _split(high - low)
            if old_size <= middle:
                path.append(self._range(middle, high))
                high = middle
            else:
                path.append(self._range(low, middle))
                low, complete = middle, False
        if not complete:
            path.append(self._range(low, high))
        return tuple(reversed(path))

    def _range(self, low: int, high: int) -> bytes:
        """The hash over leaves low to high, where low is a multiple of the power of two at or above high − low."""
        count = high - low
        level = (count - 1).bit_length()
        if count == 1 << level and level % TILE == 0:
            tile, place = divmod(low >> level, _WIDTH)
            if (level, tile) not in self._tiles:
                first = tile << TILE
                self._tiles[level, tile] = self.fetch(level, first, min(_WIDTH, (self.size >> level) - first))
            return self._tiles[level, tile][place]
        if (low, high) not in self._known:
            middle = low + _split(count)
            self._known[low, high] = node_hash(self._range(low, middle), self._range(middle, high))
        return self._known[low, high]


def tiles(old: int, more: int, fetch: Fetch) -> Iterator[tuple[int, int, bytes]]:
    """The nodes to store, (level, index, hash), when `more` leaves join a tree of `old`.

    `fetch` also sees the new leaves, and each node given here before: lower levels come first.
    """
    level, new = TILE, old + more
    while new >> level:
        for index in range(old >> level, new >> level):
            yield level, index, _fold(fetch(level - TILE, index << TILE, _WIDTH))
        level += TILE


def checked_inclusion(leaf: bytes, index: int, path: Sequence[bytes], size: int) -> bytes:
    """The root that a leaf and its audit path lead to; equal to the head's root if and only if the entry is there."""
    if not 0 <= index < size:
        raise InvalidInput("seq", index, f"an entry below the head's size, {size}")
    return _climbed(leaf, index, size - 1, path)[1]


def checked_consistency(old_size: int, old_root: bytes, size: int, path: Sequence[bytes]) -> bytes:
    """The root of the larger tree that the proof leads to; refused if it does not lead to the old root too."""
    if not 0 < old_size <= size:
        raise InvalidInput("old size", old_size, f"a whole number from 1 to {size}")
    if old_size == size:
        if path:
            raise InvalidInput("path", len(path), "no path between equal sizes")
        return old_root
    hashes = list(path) if old_size & (old_size - 1) else [old_root, *path]
    if not hashes:
        raise InvalidInput("path", len(path), "a longer path")
    position, last = old_size - 1, size - 1
    while position % 2:
        position, last = position >> 1, last >> 1
    old, new = _climbed(hashes[0], position, last, hashes[1:])
    if old != old_root:
        raise InvalidInput("path", old.hex(), f"a path that leads to the old root {old_root.hex()}")
    return new


def _climbed(node: bytes, position: int, last: int, path: Sequence[bytes]) -> tuple[bytes, bytes]:
    """From a node of a level that ends at `last` up to the root: of the tree that ends with it, and of the whole."""
    old = new = node
    for sibling in path:
        if last == 0:
            raise InvalidInput("path", len(path), "a shorter path")
        if position % 2 or position == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while not position % 2 and position:
                position, last = position >> 1, last >> 1
        else:
            new = node_hash(new, sibling)
        position, last = position >> 1, last >> 1
    if last:
        raise InvalidInput("path", len(path), "a longer path")
    return old, new


def _split(count: int) -> int:
    """The largest power of two below a count of at least 2."""
    return 1 << ((count - 1).bit_length() - 1)


def _fold(hashes: Sequence[bytes]) -> bytes:
    """The tree hash over hashes of equal height: an odd last one moves up unchanged, which is RFC 6962's shape."""
    nodes, hashed = list(hashes), hashlib.sha256
    while len(nodes) > 1:
        # `node_hash`, without a call for each
        pairs = [hashed(b"\x01" + left + right).digest() for left, right in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[len(nodes) - len(nodes) % 2 :]
    return nodes[0]
