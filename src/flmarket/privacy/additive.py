"""Noise added to clipped vectors: Laplace, Gaussian, and Gaussian at every step for one record.

Laplace noise on L1-clipped vectors: pure ε-local differential privacy.

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

Gaussian noise for one record: every record's gradient is clipped, and every step of training is noised.

Each of the K steps of an owner's descent is the mean of her d records' gradients, each clipped to L2 norm C. Replacing
one record (the neighbours here; their number is public) moves that mean by at most 2C/d, whatever came before, so noise
of σ = m·√K·2C/d a step makes the K steps together one Gaussian release of multiplier m: adaptive composition of
Gaussian mechanisms is exact (Dong, Roth, Su 2022, Corollary 3.3), and everything after the noise is post-processing.
Steps use all records (Abadi et al. 2016 draw some of them, which is cheaper and has no such closed form).

The same noise serves auctions (`unit = "record"`) and joint training (`joint.LocalPerturbation`). For an owner of d
records it is d times less than what hiding her whole update takes; and that is not what it hides: whoever knows all
but one of her records learns of that one no more than ε says, while what her records have in common is not hidden.

What would break it: a gradient of one record that another one moves (batch normalisation), a clip of the mean instead
of the records (docs/errata.md E20), and an account that adds losses of both units (`events.RecordLevel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.composition import analytic_gaussian_sigma, rho_of_epsilon
from flmarket.privacy.events import (
    ROUNDING_ALLOWANCE,
    Event,
    GaussianRelease,
    PureDp,
    RecordLevel,
    Unit,
    ZCdp,
    checked_whole,
)
from flmarket.privacy.noise import NoiseSource
from flmarket.privacy.perturbation import (
    Clipping,
    checked_dimension,
    energy_where_sold,
    positive_epsilon,
    release_epsilon,
    release_source,
)


class _Additive(Clipping):
    """Everything except what the noise is and how its scale follows from the promise."""

    name: ClassVar[str]

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """The scale of the noise in each coordinate; ε > 0."""
        raise NotImplementedError

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """Private versions of vectors (..., p), each with its own ε."""
        source, clipped = release_source(self, rng), self.clipped(vectors)
        scale = self.sigma(release_epsilon(epsilon, clipped.shape[:-1])) * (1 + ROUNDING_ALLOWANCE)
        add = source.add_laplace if self.norm == "l1" else source.add_gaussian
        return add(clipped, scale=scale, sensitivity=2 * self.clip)

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """dimension · σ(ε)² of Gaussian noise."""
        return checked_dimension(dimension) * energy_where_sold(epsilon, lambda eps: self.sigma(eps) ** 2)

    def guarantee(self, epsilon: float) -> Event:
        """A Gaussian release with noise σ(ε) against sensitivity 2·clip."""
        return GaussianRelease(float(self.sigma(positive_epsilon(epsilon))) / (2 * self.clip))


@dataclass(frozen=True)
class LaplaceL1(_Additive):
    """Clip to L1 norm `clip`, add Laplace(2·clip/ε) to each coordinate."""

    name: ClassVar[str] = "laplace-l1"
    norm: ClassVar[Literal["l1", "l2"]] = "l1"

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """2·clip/ε, which is 1/√2 of the standard deviation."""
        with np.errstate(divide="ignore", over="ignore"):
            return np.asarray(2 * self.clip / np.asarray(epsilon, dtype=np.float64))

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """dimension · 8·clip²/ε²."""
        with np.errstate(over="ignore"):
            return np.asarray(2.0 * checked_dimension(dimension) * self.sigma(checked_array("epsilon", epsilon)) ** 2)

    def guarantee(self, epsilon: float) -> PureDp:
        """Pure ε-DP."""
        return PureDp(positive_epsilon(epsilon))


@lru_cache(maxsize=4096)
def analytic_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """One `analytic_gaussian_sigma`; a release is asked about by guard, account, noise and books in turn."""
    return float(analytic_gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=sensitivity))


@dataclass(frozen=True)
class GaussianL2(_Additive):
    """Clip to L2 norm `clip`; one release is (ε, `delta`)-DP for any ε > 0."""

    delta: float = 1e-5
    name: ClassVar[str] = "gaussian-l2"

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """The least σ for (ε, δ) at sensitivity 2·clip."""
        if np.size(epsilon) == 1:
            once = analytic_sigma(float(np.asarray(epsilon).item()), self.delta, 2 * self.clip)
            return np.full(np.shape(epsilon), once)
        distinct, position = np.unique(epsilon, return_inverse=True)
        sigma = analytic_gaussian_sigma(epsilon=distinct, delta=self.delta, sensitivity=2 * self.clip)
        return sigma[position].reshape(np.shape(epsilon))


@dataclass(frozen=True)
class GaussianZCdp(_Additive):
    """Clip to L2 norm `clip`; one release is ρ-zCDP. Where a method says epsilon, this mechanism reads ρ."""

    name: ClassVar[str] = "gaussian-zcdp"

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """2·clip/√(2ρ)."""
        return np.asarray(2 * self.clip / np.sqrt(2 * np.asarray(epsilon, dtype=np.float64)))


@dataclass(frozen=True)
class DistributedGaussian(_Additive):
    """Clip to L2 norm `clip`; one release is ρ-zCDP with the most ρ that is (ε, `delta`)-DP. Made for sums."""

    delta: float = 1e-6
    name: ClassVar[str] = "distributed-gaussian"

    def sigma(self, epsilon: ArrayLike) -> FloatArray:
        """2·clip/√(2ρ) for the ρ of this ε; of the whole noise, whoever adds it."""
        with np.errstate(divide="ignore"):
            return np.asarray(2 * self.clip / np.sqrt(2 * rho_of_epsilon(epsilon, delta=self.delta)))

    def guarantee(self, epsilon: float) -> ZCdp:
        """The ρ of this ε."""
        return ZCdp(float(rho_of_epsilon(positive_epsilon(epsilon), delta=self.delta)))


def record_distance(clip: float, records: int, steps: int) -> float:
    """What K steps' worth of noise is for, in each step: √K·2C/d."""
    return float(2 * clip * np.sqrt(steps) / records)


@dataclass(frozen=True, kw_only=True)
class RecordNoise(Clipping):
    """Per-record clipping and noise; ε of one release is at `delta`, for one record.

    `steps` and `rate` are those of the local work, as far as the buyer needs them: `rate` is how far one step of length
    1 carries the model (with momentum, at most).
    """

    delta: float = 1e-5
    steps: int = 1
    rate: float = 1.0
    name: ClassVar[str] = "gaussian-records"
    unit: ClassVar[Unit] = "record"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_whole("steps", self.steps, 1, 1_000_000)

    @property
    def length(self) -> float:
        """The longest update without noise."""
        return self.rate * self.steps * self.clip

    def multiplier(self, epsilon: float) -> float:
        """σ at a distance of 1, by the analytic calibration."""
        return analytic_sigma(epsilon, self.delta, 1.0)

    def guarantee(self, epsilon: float) -> RecordLevel:
        """One Gaussian release, for one record."""
        return RecordLevel(GaussianRelease(self.multiplier(epsilon)))

    def scale(self, epsilon: float, records: int, steps: int) -> float:
        """σ in each coordinate of every step's mean gradient."""
        return self.multiplier(epsilon) * record_distance(self.clip, records, steps)

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """Of an owner of one record; d records have a d²-th of it (`aggregation.release_energy`)."""

        def squared(eps: FloatArray) -> FloatArray:
            step = analytic_gaussian_sigma(epsilon=eps, delta=self.delta, sensitivity=2 * self.clip)
            return np.asarray((step * self.rate * self.steps) ** 2)

        return checked_dimension(dimension) * energy_where_sold(epsilon, squared)

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """None: what protects records is done to gradients, before there is a vector."""
        raise InvalidInput("perturbation", self.name, "one that takes whole updates, or unit = 'record' in an auction")
