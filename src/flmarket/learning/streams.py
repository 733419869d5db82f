"""Random streams by name: (seed, purpose, round, owner) in, a generator out.

Nothing is handed from one draw to the next, so a result cannot depend on how many workers ran, in which
order, or which other owners took part. What would break it: reusing one (purpose, round, owner) for two kinds
of draw, which would correlate them; hence `Purpose`, whose codes are part of every seeded result and must
never be renumbered.

Built on NumPy's SeedSequence (after O'Neill's seed_seq_fe): the words of the key are hashed, not added, so
neighbouring rounds and owners give unrelated streams. Simulation only: noise that leaves a machine must not
be seeded.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, SupportsIndex, overload

import numpy as np

from flmarket.errors import InvalidInput

# Seed and key must fill a fixed number of 32-bit words, or two different keys could spell the same words.
SEED_LIMIT = 1 << 128
KEY_LIMIT = 1 << 32


class Purpose(IntEnum):
    """What a stream is used for. Append only."""

    PARTITION = 0
    BIDS = 1
    PARTICIPATION = 2
    AUCTION = 3
    BATCHES = 4
    NOISE = 5
    ADVERSARY = 6
    AGGREGATION = 7
    EVALUATION = 8


def stream(seed: int, round_index: int = 0, owner: int | None = None, *, purpose: Purpose) -> np.random.Generator:
    """The generator for one purpose in one round; `owner=None` is for draws of the round as a whole."""
    entropy = whole("seed", seed, 0, SEED_LIMIT - 1)
    key: tuple[int, ...] = (int(Purpose(purpose)), whole("round_index", round_index, 0, KEY_LIMIT - 1))
    if owner is not None:
        key = (*key, whole("owner", owner, 0, KEY_LIMIT - 1))
    return _seeded(entropy, key)


def _seeded(entropy: int, key: tuple[int, ...]) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=key)))


@dataclass(frozen=True)
class OwnerStreams(Sequence[np.random.Generator]):
    """The streams of a round's owners, made on demand: item i is a fresh `stream` of `owners[i]`."""

    seed: int
    round_index: int
    owners: Sequence[int]
    purpose: Purpose

    def __len__(self) -> int:
        return len(self.owners)

    @overload
    def __getitem__(self, index: SupportsIndex) -> np.random.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> "OwnerStreams": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "np.random.Generator | OwnerStreams":
        if isinstance(index, slice):
            return OwnerStreams(self.seed, self.round_index, self.owners[index], self.purpose)
        owner = self.owners[operator.index(index)]
        return stream(self.seed, self.round_index, owner, purpose=self.purpose)

    def __iter__(self) -> Iterator[np.random.Generator]:
        """All of them, with the round looked at once."""
        entropy, code = whole("seed", self.seed, 0, SEED_LIMIT - 1), int(Purpose(self.purpose))
        index = whole("round_index", self.round_index, 0, KEY_LIMIT - 1)
        return (_seeded(entropy, (code, index, whole("owner", owner, 0, KEY_LIMIT - 1))) for owner in self.owners)


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int within limits, or a typed error."""
    accepted = f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidInput(name, value, accepted) from None
    if number < least or (most is not None and number > most):
        raise InvalidInput(name, value, accepted)
    return number
