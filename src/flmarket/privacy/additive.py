"""Laplace noise on L1-clipped vectors: pure ε-local differential privacy.

Clip to ‖g‖₁ ≤ L; any two inputs are then at most 2L apart, and Laplace(2L/ε) noise in each coordinate is ε-DP
(Dwork, McSherry, Nissim, Smith 2006, Proposition 1). This is the mechanism of FL-Market (Zheng et al. 2021,
2022).

Breaks without the clip, and in high dimension gives little: the noise energy is 8pL²/ε² for p coordinates.

Gaussian noise on L2-clipped vectors, for an (ε, δ) promise or a zCDP promise.

Clip to ‖g‖₂ ≤ C; any two inputs of an owner are then at most 2C apart (replace-one: the local model has no
other neighbour), so the sensitivity is 2C, not C. `GaussianL2` chooses σ by the analytic calibration of Balle
& Wang 2018; `GaussianZCdp` by σ = 2C/√(2ρ) (Bun & Steinke 2016, Proposition 1.6). Both report the noise
itself to the account, not only the (ε, δ) asked for, because many Gaussian releases compose far better than
many (ε, δ) promises. `DistributedGaussian` is the noise that many owners add up to where only the sum of their updates
is seen (`secure_sum`): it promises ρ, the most that an (ε, δ) allows, because that is what is proven of sums of integer
noise. One owner alone adds all of it.

Never ε-DP for any ε: an owner with a pure cap cannot use these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.privacy.calibration import analytic_gaussian_sigma
from flmarket.privacy.composition import rho_of_epsilon
from flmarket.privacy.events import ROUNDING_ALLOWANCE, Event, GaussianRelease, PureDp, ZCdp, checked_number
from flmarket.privacy.noise import NoiseSource
from flmarket.privacy.perturbation import (
    checked_clip,
    checked_dimension,
    clip_l1,
    clip_l2,
    positive_epsilon,
    release_epsilon,
    release_source,
)


@dataclass(frozen=True)
class LaplaceL1:
    """Clip to L1 norm `clip`, add Laplace(2·clip/ε) to each coordinate."""

    clip: float = 1.0
    name: ClassVar[str] = "laplace-l1"
    norm: ClassVar[Literal["l1", "l2"]] = "l1"
    sound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", checked_clip(self.clip))

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """Private versions of vectors (..., p), each with its own ε."""
        source = release_source(self, rng)
        clipped = clip_l1(vectors, self.clip)
        scale = 2 * self.clip / release_epsilon(epsilon, clipped.shape[:-1]) * (1 + ROUNDING_ALLOWANCE)
        return source.add_laplace(clipped, scale=scale, sensitivity=2 * self.clip)

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """dimension · 8·clip²/ε²."""
        eps = checked_array("epsilon", epsilon)
        with np.errstate(divide="ignore", over="ignore"):
            return np.asarray(2.0 * checked_dimension(dimension) * (2 * self.clip / eps) ** 2)

    def guarantee(self, epsilon: float) -> PureDp:
        """Pure ε-DP."""
        return PureDp(positive_epsilon(epsilon))


class _Gaussian:
    """Everything except how σ follows from the promise."""

    clip: float
    name: ClassVar[str]
    norm: ClassVar[Literal["l1", "l2"]] = "l2"
    sound: ClassVar[bool] = True

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """The standard deviation in each coordinate; ε > 0."""
        raise NotImplementedError

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """Private versions of vectors (..., p), each with its own ε."""
        source = release_source(self, rng)
        clipped = clip_l2(vectors, self.clip)
        scale = self.sigma(release_epsilon(epsilon, clipped.shape[:-1])) * (1 + ROUNDING_ALLOWANCE)
        return source.add_gaussian(clipped, scale=scale, sensitivity=2 * self.clip)

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """dimension · σ(ε)²."""
        eps = checked_array("epsilon", epsilon)
        variance = np.full(eps.shape, np.inf)
        variance[eps > 0] = self.sigma(eps[eps > 0]) ** 2 if (eps > 0).any() else np.inf
        return np.asarray(checked_dimension(dimension) * variance)

    def guarantee(self, epsilon: float) -> Event:
        """A Gaussian release with noise σ(ε) against sensitivity 2·clip."""
        return GaussianRelease(float(self.sigma(positive_epsilon(epsilon))) / (2 * self.clip))


@lru_cache(maxsize=4096)
def _analytic(epsilon: float, delta: float, sensitivity: float) -> float:
    return float(analytic_gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=sensitivity))


@dataclass(frozen=True)
class GaussianL2(_Gaussian):
    """Clip to L2 norm `clip`; one release is (ε, `delta`)-DP for any ε > 0."""

    clip: float = 1.0
    delta: float = 1e-5
    name: ClassVar[str] = "gaussian-l2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", checked_clip(self.clip))
        object.__setattr__(self, "delta", checked_number("delta", self.delta, 1e-30, 0.5))

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """The least σ for (ε, δ) at sensitivity 2·clip."""
        if np.size(epsilon) == 1:  # one release is asked about by guard, account, noise and books in turn
            once = _analytic(float(np.asarray(epsilon).item()), self.delta, 2 * self.clip)
            return np.full(np.shape(epsilon), once)
        distinct, position = np.unique(epsilon, return_inverse=True)
        sigma = analytic_gaussian_sigma(epsilon=distinct, delta=self.delta, sensitivity=2 * self.clip)
        return sigma[position].reshape(np.shape(epsilon))


@dataclass(frozen=True)
class GaussianZCdp(_Gaussian):
    """Clip to L2 norm `clip`; one release is ρ-zCDP. Where a method says epsilon, this mechanism reads ρ."""

    clip: float = 1.0
    name: ClassVar[str] = "gaussian-zcdp"

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", checked_clip(self.clip))

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """2·clip/√(2ρ)."""
        return np.asarray(2 * self.clip / np.sqrt(2 * np.asarray(epsilon, dtype=np.float64)))


@dataclass(frozen=True)
class DistributedGaussian(_Gaussian):
    """Clip to L2 norm `clip`; one release is ρ-zCDP with the most ρ that is (ε, `delta`)-DP. Made for sums."""

    clip: float = 1.0
    delta: float = 1e-6
    name: ClassVar[str] = "distributed-gaussian"

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", checked_clip(self.clip))
        object.__setattr__(self, "delta", checked_number("delta", self.delta, 1e-30, 0.5))

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """2·clip/√(2ρ) for the ρ of this ε; of the whole noise, whoever adds it."""
        with np.errstate(divide="ignore"):
            return np.asarray(2 * self.clip / np.sqrt(2 * rho_of_epsilon(epsilon, delta=self.delta)))

    def guarantee(self, epsilon: float) -> ZCdp:
        """The ρ of this ε."""
        return ZCdp(float(rho_of_epsilon(positive_epsilon(epsilon), delta=self.delta)))
