"""The sound sampler of sphere, privunit, privunit-g and projunit: one of finitely many public points, chosen by rank.

Adding floating-point numbers to an input, or multiplying it by them, shows the input in the low bits, and in which
numbers can come out at all (Mironov 2012, "On significance of the least significant bits for differential privacy").
Here the input is never part of an output. A release has three steps:

1. *Candidates.* Points z_1 … z_M are drawn from a law that knows the dimension and ε only, and −z_1 … −z_M are added.
   They may be known to everybody; so any generator and any arithmetic will do.
2. *Order.* All 2M are sorted by ⟨z, u⟩, u being the owner's unit vector. Whatever rounding does to these numbers, and
   however ties fall, the result is some order, and exactly n candidates are its first n.
3. *Choice.* One candidate is released: each of the first n with probability a/W, each other with probability b/W, where
   a and b are whole numbers, a/b ≤ e^ε, W = n·a + (2M − n)·b, and the draw is an exact uniform whole number below W.

**Claim.** Given the candidates, each release has probability a/W or b/W under every input, and W is the same for all
inputs. So two inputs differ by a factor of at most a/b ≤ e^ε at every output: ε-DP with nothing left over for
finite precision (η = 0), also for those who know all candidates. Scaling by a public number, dropping the lifted
coordinate and rounding to fewer bits are post-processing. So is what happens before: rounding v onto the sphere
chooses between two inputs by a coin, and a mixture of releases within e^ε of each other stays within it. The sets of
possible outputs are the same for all inputs. The work done does not depend on the input, sorting and caches apart.

What arithmetic does affect is accuracy, and only in its last digits: the closed forms of mean and energy (`caps`) are
those of independent candidates with a law that is the same in all directions. Few or short candidates are drawn so.
Many long ones are the rows of random rotations: three rounds of random signs and a cosine transform, which cost
p·log p in place of M·p. Such rows are orthogonal rather than independent, and their law is nearly but not exactly
uniform; what that does to mean and energy is below what a hundred thousand releases can show (tests/privacy).

Breaks if the number of the first n depends on the input, if a draw below W is not uniform, or if candidates are drawn
with knowledge of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import expm1

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct

from flmarket.bids import FloatArray
from flmarket.privacy.caps import Cap
from flmarket.privacy.noise import NoiseSource

WEIGHT_BITS = 128  # b = 2^128, so that ε = 1e-30 still tilts the odds
CHANCE_BITS = 64
_BLOCK = 2**18  # numbers held at a time
_LISTED_DIMENSION = 64  # up to here all candidates are written out


@lru_cache(maxsize=4096)
def weights(epsilon: float, bits: int) -> tuple[int, int]:
    """a and b with a/b ≤ e^epsilon; `epsilon` is below the promise by more than expm1 is wrong by."""
    unit = 1 << bits
    return unit + int(Fraction(expm1(epsilon)) * unit), unit


def chance(source: NoiseSource, probability: float) -> bool:
    """True with this probability, to the nearest 2^−CHANCE_BITS."""
    return source.below(1 << CHANCE_BITS) < round(Fraction(probability) * (1 << CHANCE_BITS))


def choose(units: FloatArray, cap: Cap, epsilon: FloatArray, source: NoiseSource, *, normal: bool) -> FloatArray:
    """One release for each row of unit vectors: standard normal points, or points of the unit sphere."""
    out, size = np.empty_like(units), units.shape[1]
    for pairs in np.unique(cap.pairs).tolist():
        listed = pairs == 1 or size <= _LISTED_DIMENSION
        members = np.flatnonzero(cap.pairs == pairs)
        step = max(1, _BLOCK // max(size, pairs * size if listed else pairs))
        for first in range(0, members.size, step):
            rows = members[first : first + step]
            everything = np.arange(rows.size)
            frame = (_Listed if listed else _Rotated).draw(source.generator(), (rows.size, pairs, size), normal)
            scores = frame.scores(units[rows])
            order = np.argsort(-np.abs(scores), axis=1)
            ranks = np.array([rank(cap.count[row], pairs, epsilon[row], source) for row in rows])
            # Best first, the 2M candidates are those on u's side by falling |score|, then the others by rising |score|.
            behind = ranks >= pairs
            index = order[everything, np.where(behind, 2 * pairs - 1 - ranks, ranks)]
            away = (scores[everything, index] < 0) != behind
            out[rows] = frame.points(index) * np.where(away, -1.0, 1.0)[:, None]
    return out


def rank(count: int, pairs: int, epsilon: float, source: NoiseSource) -> int:
    """A place among 2·pairs candidates: each of the first `count` is e^ε times as likely as each other."""
    count = int(count)
    near, far = weights(float(epsilon), WEIGHT_BITS)
    pick = source.below(count * near + (2 * pairs - count) * far)
    return pick // near if pick < count * near else count + (pick - count * near) // far


@dataclass(frozen=True)
class _Listed:
    """Independent candidates (rows, pairs, size), written out."""

    candidates: FloatArray

    @classmethod
    def draw(cls, generator: np.random.Generator, shape: tuple[int, int, int], normal: bool) -> _Listed:
        candidates = generator.standard_normal(shape)
        if not normal:
            candidates /= np.maximum(np.sqrt(np.einsum("rmi,rmi->rm", candidates, candidates)), 1e-300)[..., None]
        return cls(candidates)

    def scores(self, units: FloatArray) -> FloatArray:
        return np.asarray(np.einsum("rmi,ri->rm", self.candidates, units))

    def points(self, index: NDArray[np.intp]) -> FloatArray:
        return self.candidates[np.arange(index.size), index]


@dataclass(frozen=True)
class _Rotated:
    """Rows of as many rotations as are needed, on independent radii if they are to be normal."""

    rotation: Rotation
    radii: FloatArray

    @classmethod
    def draw(cls, generator: np.random.Generator, shape: tuple[int, int, int], normal: bool) -> _Rotated:
        rows, pairs, size = shape
        turns = -(-pairs // fast_length(size))
        radii = np.sqrt(generator.chisquare(size, (rows, pairs))) if normal else np.ones((rows, pairs))
        return cls(Rotation.draw(generator, (rows, turns), size), radii)

    def scores(self, units: FloatArray) -> FloatArray:
        turned = self.rotation.turn(units[:, None, :])
        return turned.reshape(len(units), -1)[:, : self.radii.shape[1]] * self.radii

    def points(self, index: NDArray[np.intp]) -> FloatArray:
        rows = np.arange(index.size)
        turn, place = np.divmod(index, fast_length(self.rotation.signs.shape[-1]))
        coordinates = np.zeros((index.size, fast_length(self.rotation.signs.shape[-1])))
        coordinates[rows, place] = self.radii[rows, index]
        return Rotation(self.rotation.signs[:, rows, turn]).back(coordinates)


@dataclass(frozen=True)
class Rotation:
    """Nearly uniform rotations of R^size: signs, cosine transform of the first L coordinates; of the last L; again.

    L is the largest length up to `size` at which a transform is fast. Signs have shape (3, ..., size).
    """

    signs: NDArray[np.int8]

    @classmethod
    def draw(cls, generator: np.random.Generator, batch: tuple[int, ...], size: int) -> Rotation:
        """Independent rotations."""
        bits = np.unpackbits(np.frombuffer(generator.bytes(-(-3 * int(np.prod(batch)) * size // 8)), dtype=np.uint8))
        signs = 1 - 2 * bits[: 3 * int(np.prod(batch)) * size].astype(np.int8)
        return cls(signs.reshape(3, *batch, size))

    def turn(self, vectors: FloatArray) -> FloatArray:
        """The first L coordinates of the rotated vectors (..., size)."""
        fast = fast_length(vectors.shape[-1])
        head, tail = slice(None, fast), slice(vectors.shape[-1] - fast, None)
        for signs, block in zip(self.signs, (head, tail, head), strict=True):
            vectors = vectors * signs
            vectors[..., block] = dct(vectors[..., block], norm="ortho")
        return vectors[..., head]

    def back(self, coordinates: FloatArray) -> FloatArray:
        """The vectors (..., size) whose first coordinates after `turn` are these, and whose others are 0."""
        size, fast = self.signs.shape[-1], fast_length(self.signs.shape[-1])
        head, tail = slice(None, fast), slice(size - fast, None)
        vectors = np.zeros((*coordinates.shape[:-1], size))
        vectors[..., : coordinates.shape[-1]] = coordinates
        for signs, block in zip(self.signs[::-1], (head, tail, head), strict=True):
            vectors[..., block] = idct(vectors[..., block], norm="ortho")
            vectors *= signs
        return vectors


@lru_cache(maxsize=1024)
def fast_length(size: int) -> int:
    """The largest 2^a·3^b·5^c up to size."""
    best, five = 1, 1
    while five <= size:
        three = five
        while three <= size:
            best = max(best, three << ((size // three).bit_length() - 1))
            three *= 3
        five *= 5
    return best
