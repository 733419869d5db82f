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

What arithmetic does affect is accuracy, and only in its last digits: the closed forms of mean and energy (`Cap`) are
those of independent candidates with a law that is the same in all directions. Few or short candidates are drawn so.
Many long ones are the rows of random rotations: three rounds of random signs and a cosine transform, which cost
p·log p in place of M·p. Such rows are orthogonal rather than independent, and their law is nearly but not exactly
uniform; what that does to mean and energy is below what a hundred thousand releases can show (tests/privacy).

Breaks if the number of the first n depends on the input, if a draw below W is not uniform, or if candidates are drawn
with knowledge of the input.

Caps: how many of the candidates that point the right way are made likelier, and what the release then looks like.

Let z_1 … z_M be independent points with a law that does not change under rotation (uniform on a sphere, or standard
normal), u the owner's unit vector and t = ⟨z, u⟩. Of the 2M points ±z_j the n with the largest t are the cap. Each of
them is released with e^ε times the probability of each other. How that is done to the last bit, and why it is ε-DP
exactly, is above; here is what it means for the buyer. With κ = e^ε − 1, S = E[Σ t] and Q = E[Σ t²] over
the cap:

- E[z] = m·u with m = κS/(2M + κn), because all 2M together sum to 0. So z/m is an unbiased release of u.
- E[t²] = (2M·E[t²] + κQ)/(2M + κn), the expectation on the right being that of a single candidate.
- The v of the candidates that have an |t| larger than the n-th largest of M have a Beta(n, M − n) law, as a share of
  all. Hence S = M·E[A(v)], with A(v) = E[|t|; |t| among the largest share v], a smooth function with a closed form; Q
  likewise. The expectation is an integral over one variable.
- n is the number with the largest m, that is the least noise. For M → ∞ this is the cap {t ≥ γ} with γ = m. With
  M = 128 (ε ≤ 2) or 1280 (ε ≤ 8) there is up to 1 % or 2 % more noise, with M = 8192 up to 3 % until ε = 11. Beyond,
  noise soon stops falling.

For M → ∞ on the sphere this is PrivUnit2 (Bhowmick, Duchi, Freudiger, Kapoor, Rogers 2018, arXiv:1812.00984, Algorithm
1) with the best split of ε (Feldman & Talwar 2021, arXiv:2102.12099), for the normal law PrivUnitG (Asi, Feldman,
Talwar 2022, arXiv:2205.02466). M = n = 1 is the ℓ2-sphere mechanism of Duchi, Jordan and Wainwright, exactly.

Breaks if u is not a unit vector, or if candidates have another law.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from math import expm1
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct
from scipy.special import betainc, betaincinv, betaln, ndtr, ndtri, xlog1py, xlogy

from flmarket.bids import FloatArray, IntArray, slices
from flmarket.privacy.noise import NoiseSource

_PAIRS = ((2.0, 128), (8.0, 1280), (np.inf, 8192))  # how many pairs of candidates up to which ε
_PER_OCTAVE = 64  # sizes of caps that are tried
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


class Law(Hashable, Protocol):
    """The law of t = ⟨z, u⟩ for one candidate, symmetric around 0."""

    def beyond(self, edge: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """P(t ≥ edge), E[t; t ≥ edge] and E[t²; t ≥ edge], for edge ≥ 0."""

    def component(self, tail: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The t ≥ 0 with P(· ≥ t) = tail ≤ 1/2, and the length that is left for the directions across u."""


@dataclass(frozen=True)
class SphereLaw:
    """z uniform on the unit sphere of R^dimension: t has density ∝ (1 − t²)^((dimension−3)/2).

    Everything is a function of x = 1 − t², whose tails have no cancellation: P(t ≥ γ) = I_x((d−1)/2, 1/2)/2.
    `dimension` may be an array, one for each owner; in dimension 1 the sphere is {−1, 1}.
    """

    dimension: int | IntArray

    def beyond(self, edge: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """½·I_x, A = x^a / (2a·B(a, ½)) with a = (dimension − 1)/2, and by parts (P + 2aγA)/(2a + 1)."""
        half, line = self._half()
        x = (1 - edge) * (1 + edge)
        tail = np.where(line, 0.5, 0.5 * betainc(half, 0.5, x))
        pull = np.where(line, 0.5, np.exp(xlogy(half, x) - betaln(half, 0.5)) / (2 * half))
        return tail, pull, np.where(line, 0.5, (tail + 2 * half * edge * pull) / (2 * half + 1))

    def component(self, tail: FloatArray) -> tuple[FloatArray, FloatArray]:
        """√(1 − x) and √x, by the inverse of the incomplete beta function."""
        half, line = self._half()
        x = np.where(line, 0.0, betaincinv(half, 0.5, 2 * tail))
        return np.sqrt(1 - x), np.sqrt(x)

    def _half(self) -> tuple[FloatArray, NDArray[np.bool_]]:
        dimension = np.asarray(self.dimension)
        return np.where(dimension > 1, dimension - 1, 1) / 2, dimension == 1


@dataclass(frozen=True)
class NormalLaw:
    """z standard normal, in any dimension: t is N(0, 1), and so is every coordinate across u."""

    def beyond(self, edge: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Φ(−γ), φ(γ) and Φ(−γ) + γφ(γ)."""
        tail, pull = ndtr(-edge), np.exp(-edge * edge / 2) / np.sqrt(2 * np.pi)
        return tail, pull, tail + edge * pull

    def component(self, tail: FloatArray) -> tuple[FloatArray, FloatArray]:
        """−Φ⁻¹(tail); the coordinates across keep their own length."""
        return -ndtri(tail), np.ones_like(tail)


@dataclass(frozen=True)
class Cap:
    """Caps of owners, in arrays of one shape: M, n, the probability of a release outside the cap, m and E[t²]."""

    pairs: IntArray
    count: IntArray
    outside: FloatArray
    mean: FloatArray
    square: FloatArray

    def take(self, index: NDArray[np.intp]) -> Cap:
        """The caps at these positions."""
        return Cap(self.pairs[index], self.count[index], self.outside[index], self.mean[index], self.square[index])

    def where(self, condition: NDArray[np.bool_], other: Cap) -> Cap:
        """This cap where the condition holds, the other elsewhere."""
        names = [field.name for field in fields(self)]
        return Cap(*(np.where(condition, getattr(self, name), getattr(other, name)) for name in names))


def half_cap(law: Law, epsilon: FloatArray) -> Cap:
    """One pair, and the cap is the half that points the right way."""
    return _least_noise(law, epsilon, 1)


def best_cap(law: Law, epsilon: FloatArray) -> Cap:
    """The cap with the largest mean, that is the least noise, among those that spend exactly ε."""
    cap, below = _least_noise(law, epsilon, _PAIRS[0][1]), _PAIRS[0][0]
    for largest, pairs in _PAIRS[1:]:
        if (epsilon > below).any():
            cap = cap.where(epsilon <= below, _least_noise(law, epsilon, pairs))
        below = largest
    return cap


def _least_noise(law: Law, epsilon: FloatArray, pairs: int) -> Cap:
    counts, pull, square, spread = _table(law, pairs)
    kappa = np.expm1(epsilon)[:, None]
    total = 2 * pairs + kappa * counts
    mean = kappa * pull / total
    best = mean.argmax(axis=1)[:, None]
    count, everything = counts[best], np.take_along_axis(total, best, axis=1)
    outside = (2 * pairs - count) / everything
    second = (2 * pairs * spread + kappa * square[best]) / everything
    half = count == pairs  # then one pair does the same
    most = np.take_along_axis(mean, best, axis=1)[:, 0]
    return Cap(
        np.where(half, 1, pairs)[:, 0], np.where(half, 1, count)[:, 0], outside[:, 0], most, np.asarray(second)[:, 0]
    )


@lru_cache(maxsize=512)
def _table(law: Law, pairs: int) -> tuple[IntArray, FloatArray, FloatArray, float]:
    """Sizes n of a cap; expected sums of t and of t² over it; and E[t²] of one candidate."""
    _, pull, square = (2 * pairs * float(part) for part in law.beyond(np.zeros(())))
    spread = square / pairs
    octaves = np.arange(_PER_OCTAVE * (pairs.bit_length() - 1), 0, -1) / _PER_OCTAVE
    counts = np.unique(np.rint(pairs * 2.0**-octaves).astype(np.int64))
    counts = counts[counts < pairs]
    if law == SphereLaw(1):  # on {−1, 1} all |t| are equal
        return np.array([pairs]), np.array([pull]), np.array([square]), spread
    # The Beta density of the share beyond the n-th largest, on a stretch that holds all but 1e-15 of it.
    share = counts / pairs
    width = 9 * np.sqrt(share * (1 - share) / pairs)
    low, high = np.maximum(share - width, 0), np.minimum(share + width + 30 / pairs, 1)
    v = low[:, None] + (high - low)[:, None] * (_NODES + 1) / 2
    n = counts[:, None]
    density = np.exp(xlogy(n - 1, v) + xlog1py(pairs - n - 1, -v) - betaln(n, pairs - n))
    weight = density * (high - low)[:, None] * _WEIGHTS / 2
    _, part, part_square = law.beyond(law.component(v / 2)[0])
    pulls, squares = (2 * pairs * (column * weight).sum(axis=1) for column in (part, part_square))
    return np.append(counts, pairs), np.append(pulls, pull), np.append(squares, square), spread


def coin(rng: np.random.Generator, probability: FloatArray) -> NDArray[np.bool_]:
    """For simulation: true with the given probability, resolved to 2⁻¹⁰⁴, as at ε = 50 the rare side has 2⁻⁷²."""
    whole = np.floor(probability * 2.0**52)
    first = rng.integers(2**52, size=probability.shape)
    return np.asarray(
        (first < whole) | ((first == whole) & (rng.random(probability.shape) < probability * 2.0**52 - whole))
    )


def draw(law: Law, cap: Cap, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """For simulation: the component of z along u, and the length across, for one release from each cap.

    The same law as that of a chosen candidate, without candidates: a rank, and the Beta-distributed share of a law
    beyond the point of that rank.
    """
    outside = coin(rng, cap.outside)
    place = rng.integers(np.where(outside, cap.count, 0), np.where(outside, 2 * cap.pairs, cap.count))
    negative = place >= cap.pairs
    rank = np.where(negative, 2 * cap.pairs - 1 - place, place)
    along, across = law.component(rng.beta(rank + 1, cap.pairs - rank) / 2)
    return np.where(negative, -along, along), across


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
        for part in slices(members.size, _BLOCK // max(size, pairs * size if listed else pairs)):
            rows = members[part]
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
