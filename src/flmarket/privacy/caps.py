"""Caps: how much more often a direction-valued release should point the right way, and where to draw the line.

Let z be a random point whose law does not change under rotation (uniform on a sphere, or standard normal), u the
owner's unit vector and t = ⟨z, u⟩. The release is z with its density multiplied by e^ε on the cap {t ≥ γ} and by 1
elsewhere, then normalised. With q = P(t ≥ γ), A = E[t; t ≥ γ] and κ = 1/(e^ε − 1):

- The normaliser 1 + q(e^ε − 1) is the same for all u, so densities of any two inputs differ by a factor of at most
  e^ε everywhere: ε-local differential privacy, exactly and with nothing wasted.
- E[z] = m·u with m = A/(q + κ), because E[t; t < γ] = −A. So z/m is an unbiased release of u.
- As dA/dγ = γ·dq/dγ, the mean m is largest where γ = m: the best cap starts at the mean itself. Its equation
  A(γ) = γ(q(γ) + κ) is convex and decreasing, and Newton's step for it is γ ← m(γ), which climbs from γ = 0.

On the sphere this is PrivUnit2 (Bhowmick, Duchi, Freudiger, Kapoor, Rogers 2018, arXiv:1812.00984, Algorithm 1) with
p = 1 − `outside`; its split of the budget is ε₀ = log(p/(1−p)) for the coin and ε₁ = log((1−q)/q) for the cap, and
γ = m is the best split (Feldman & Talwar 2021, arXiv:2102.12099, take the same exact ε₀ + ε₁). For the normal law it is
PrivUnitG (Asi, Feldman, Talwar 2022, arXiv:2205.02466). γ = 0 is the ℓ2-sphere mechanism of Duchi, Jordan and
Wainwright.

Breaks if u is not a unit vector, or if t is drawn from a law other than the one q was computed for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv, betaln, ndtr, ndtri

from flmarket.privacy.noise import NoiseSource

__all__ = ["Cap", "NormalLaw", "SphereLaw", "best_cap", "cap_at", "coin", "draw"]

FloatArray = NDArray[np.float64]

_STEPS = 400  # about ε are needed, and ε is at most 64 here


class Law(Protocol):
    """The law of t = ⟨z, u⟩, symmetric around 0."""

    limit: ClassVar[float]

    def beyond(self, edge: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(t ≥ edge) and E[t; t ≥ edge], for edge ≥ 0."""

    def component(self, tail: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The t ≥ 0 with P(· ≥ t) = tail ≤ 1/2, and the length that is left for the directions across u."""


@dataclass(frozen=True)
class SphereLaw:
    """z uniform on the unit sphere of R^dimension: t has density ∝ (1 − t²)^((dimension−3)/2).

    Everything is a function of x = 1 − t², whose tails have no cancellation: P(t ≥ γ) = I_x((d−1)/2, 1/2)/2.
    `dimension` may be an array, one for each owner; in dimension 1 the sphere is {−1, 1}.
    """

    dimension: int | NDArray[np.int64]
    limit: ClassVar[float] = 1 - 2.0**-50

    def beyond(self, edge: FloatArray) -> tuple[FloatArray, FloatArray]:
        """½·I_x and x^a / (2a·B(a, ½)), with a = (dimension − 1)/2."""
        half, line = self._half()
        x = (1 - edge) * (1 + edge)
        tail = 0.5 * betainc(half, 0.5, x)
        pull = np.exp(half * np.log(x) - betaln(half, 0.5)) / (2 * half)
        return np.where(line, 0.5, tail), np.where(line, 0.5, pull)

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

    limit: ClassVar[float] = np.inf

    def beyond(self, edge: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Φ(−γ) and φ(γ)."""
        return ndtr(-edge), np.exp(-edge * edge / 2) / np.sqrt(2 * np.pi)

    def component(self, tail: FloatArray) -> tuple[FloatArray, FloatArray]:
        """−Φ⁻¹(tail); the coordinates across keep their own length."""
        return -ndtri(tail), np.ones_like(tail)


@dataclass(frozen=True)
class Cap:
    """Caps of owners, in arrays of one shape: γ, q, the probability of a release outside the cap, and m."""

    edge: FloatArray
    tail: FloatArray
    outside: FloatArray
    mean: FloatArray

    @property
    def split(self) -> tuple[FloatArray, FloatArray]:
        """ε₀ of the coin and ε₁ of the cap; their sum is the largest log-ratio of densities."""
        coin_ratio = np.log1p(-self.outside) - np.log(self.outside)
        return np.asarray(coin_ratio), np.asarray(np.log1p(-self.tail) - np.log(self.tail))

    def take(self, index: NDArray[np.intp]) -> Cap:
        """The caps at these positions."""
        return Cap(self.edge[index], self.tail[index], self.outside[index], self.mean[index])

    def where(self, condition: NDArray[np.bool_], other: Cap) -> Cap:
        """This cap where the condition holds, the other elsewhere."""
        pairs = zip(
            (self.edge, self.tail, self.outside, self.mean),
            (other.edge, other.tail, other.outside, other.mean),
            strict=True,
        )
        return Cap(*(np.where(condition, ours, theirs) for ours, theirs in pairs))


def cap_at(law: Law, epsilon: FloatArray, edge: FloatArray) -> Cap:
    """The cap with a given edge that spends exactly ε."""
    kappa = 1 / np.expm1(epsilon)
    tail, pull = law.beyond(edge)
    return Cap(edge, tail, kappa * (1 - tail) / (tail + kappa), pull / (tail + kappa))


def best_cap(law: Law, epsilon: FloatArray) -> Cap:
    """The cap with the largest mean, that is the least noise, among those that spend exactly ε."""
    edge = np.zeros_like(epsilon)
    for _ in range(_STEPS):
        cap = cap_at(law, epsilon, edge)
        edge = np.minimum(cap.mean, law.limit)
        if (np.abs(edge - cap.edge) <= 1e-13 * edge).all():
            break
    return cap_at(law, epsilon, edge)


def coin(source: NoiseSource, probability: FloatArray) -> NDArray[np.bool_]:
    """True with the given probability, resolved to 2⁻¹⁰⁴: at ε = 50 the rare side has probability 2⁻⁷²."""
    whole = np.floor(probability * 2.0**52)
    first = np.floor(source.uniform(probability.shape) * 2.0**52)
    second = source.uniform(probability.shape) < probability * 2.0**52 - whole
    return np.asarray((first < whole) | ((first == whole) & second))


def draw(law: Law, cap: Cap, source: NoiseSource) -> tuple[FloatArray, FloatArray]:
    """The component of z along u, and the length across, for one release from each cap."""
    outside = coin(source, cap.outside)
    # The cap is the upper tail of mass q; the rest is the lower tail of mass 1 − q. Rank within it, then fold at 0.
    rank = source.uniform(cap.tail.shape) * np.where(outside, 1 - cap.tail, cap.tail)
    negative = outside & (rank < 0.5)
    along, across = law.component(np.where(outside & ~negative, 1 - rank, rank))
    return np.where(negative, -along, along), across
