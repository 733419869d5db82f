"""What a masked sum is agreed on before anybody masks: who, how many, which modulus; and who shares with whom.

Let n owners be on the roster, T the least number whose sum may be unmasked, d = n − T the drop-outs that are borne, c
the owners who may collude with the broker. Two conditions carry everything (docs/secure-aggregation.md, Protocol):

    2T > n + c        two different sets of survivors cannot both be signed by T owners: honest ones sign once
    k ≥ max(2d, d + 1) + c, h = k + 1, t = h − d     holders of an owner's shares, and how many of them are needed

where k is the degree of the graph of neighbours. With them any d owners may go, at any stage and chosen by anybody: of
every owner's h holders t are left, so her share of the sum can always be unmasked; t > c, so colluders alone learn
nothing; and no two sets of t holders are without a common honest one. The graph is a ring of owners in which each
is joined to the k/2 next on either side (Harary's graph, k-connected): without any d + c owners, whoever chooses them,
it hangs together as k > d + c, so the broker learns one sum and not two. The complete graph is the case k = n − 1; up
to `COMPLETE` owners it is used, where its cost is small and t = T.

So nothing hangs on the order of the ring, which follows from the digest of the terms that everybody signs, and no
probability of a bad graph is to be borne. Bell et al. (CCS 2020) have k = O(log n), against drop-outs that nobody
chooses once the graph is known; a broker can choose them.

What would break it: more than c owners who collude with the broker, or owners that the broker invented. So each
owner compares the roster's keys with those that she has from elsewhere.

Bonawitz et al., Practical secure aggregation (CCS 2017); Harary, The maximum connectivity of a graph (PNAS 1962).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flmarket.errors import InvalidInput
from flmarket.market.masking.primitives import KEY, Table, Value, Words, digest, packed, unpacked

COMPLETE = 60
MOST_OWNERS = 10_000
LEAST_BITS, MOST_BITS = 2, 62
LONGEST = 100_000_000
_ROSTER = Table(KEY)


@dataclass(frozen=True)
class MaskTerms:
    """One round's sum. `terms` is the digest of what owners bid for, `roster` their registered Ed25519 keys, by owner.

    `survivors` is T, `colluders` c; an input is `length` numbers modulo 2^`bits`.
    """

    task: str
    round_index: int
    terms: bytes
    bits: int
    length: int
    survivors: int
    colluders: int
    roster: tuple[tuple[int, bytes], ...]

    def __post_init__(self) -> None:
        owners, keys = [owner for owner, _ in self.roster], [key for _, key in self.roster]
        n = len(owners)
        if not 2 <= n <= MOST_OWNERS or owners != sorted(set(owners)) or not 0 <= owners[0] <= owners[-1] < 2**63:
            raise InvalidInput("roster", n, f"2 to {MOST_OWNERS} owners, each once, in order")
        if len(set(keys)) < n or any(len(key) != KEY for key in keys):
            raise InvalidInput("roster", n, "a registered key of her own for every owner")
        if not LEAST_BITS <= self.bits <= MOST_BITS:
            raise InvalidInput("bits", self.bits, f"{LEAST_BITS} to {MOST_BITS}")
        if not 1 <= self.length <= LONGEST:
            raise InvalidInput("length", self.length, f"1 to {LONGEST}")
        if not (0 <= self.colluders <= self.survivors - 2 and self.survivors <= n):
            raise InvalidInput("survivors", self.survivors, f"at least two more than colluders, at most {n}")
        if not 2 * self.survivors > n + self.colluders:
            least = (n + self.colluders) // 2 + 1
            raise InvalidInput("survivors", self.survivors, f"at least {least} of {n} with {self.colluders} colluders")

    @cached_property
    def digest(self) -> bytes:
        """What everybody goes by."""
        return digest("flmarket masked sum 2", self.text)

    @cached_property
    def text(self) -> bytes:
        """As it travels."""
        numbers = (self.round_index, self.bits, self.length, self.survivors, self.colluders)
        return packed((self.task, self.terms, numbers, _ROSTER.pack(self.roster)))

    @classmethod
    def unpack(cls, text: bytes) -> MaskTerms:
        """What `text` is."""
        task, terms, numbers, roster = items(unpacked(text), str, bytes, list, bytes)
        index, bits, length, survivors, colluders = items(numbers, int, int, int, int, int)
        return cls(task, index, terms, bits, length, survivors, colluders, tuple(_ROSTER.unpack(roster)))

    @property
    def dtype(self) -> type[np.uint32] | type[np.uint64]:
        """The words that inputs are masked in."""
        return np.uint32 if self.bits <= 32 else np.uint64

    def reduce(self, words: Words) -> None:
        """Words modulo 2^b, in place."""
        if self.bits < 8 * words.dtype.itemsize:
            words &= self.dtype(2**self.bits - 1)

    @cached_property
    def keys(self) -> dict[int, bytes]:
        """Registered keys by owner."""
        return dict(self.roster)

    @cached_property
    def degree(self) -> int:
        """How many neighbours each owner has: k."""
        n, gone = len(self.roster), len(self.roster) - self.survivors
        least = max(2 * gone, gone + 1) + self.colluders
        even = least + least % 2
        return n - 1 if n <= COMPLETE or even >= n - 1 else even

    @property
    def threshold(self) -> int:
        """How many shares give a secret: t."""
        return self.degree + 1 - (len(self.roster) - self.survivors)

    @property
    def voiders(self) -> int:
        """How many must sign that they will sign no set of survivors, so that none can be signed by T any more."""
        return len(self.roster) - self.survivors + self.colluders + 1

    @cached_property
    def _ring(self) -> tuple[list[int], dict[int, int]]:
        order = sorted(self.keys, key=lambda owner: digest(self.digest, owner))
        return order, {owner: at for at, owner in enumerate(order)}

    def neighbours(self, owner: int) -> list[int]:
        """Whom an owner shares with and masks against, in order."""
        order, at = self._ring
        n, k, here = len(order), self.degree, at[owner]
        if k == n - 1:
            return [one for one in sorted(order) if one != owner]
        return sorted(order[(here + step) % n] for step in range(-k // 2, k // 2 + 1) if step)

    def holder(self, owner: int) -> int:
        """The number at which an owner's shares are taken."""
        return self._ring[1][owner] + 1


def items(value: Value, *kinds: type) -> list[Any]:
    """The items of a list, each of its type; InvalidInput otherwise."""
    if not isinstance(value, list) or [type(one) for one in value] != list(kinds):
        raise InvalidInput("message", value, f"a list of {', '.join(kind.__name__ for kind in kinds)}")
    return value
