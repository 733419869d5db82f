"""Gaussian noise for one record: every record's gradient is clipped, and every step of training is noised.

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
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.calibration import analytic_gaussian_sigma
from flmarket.privacy.events import GaussianRelease, RecordLevel, Unit, checked_number
from flmarket.privacy.noise import NoiseSource
from flmarket.privacy.perturbation import checked_clip, checked_dimension


def record_distance(clip: float, records: int, steps: int) -> float:
    """What K steps' worth of noise is for, in each step: √K·2C/d."""
    return float(2 * clip * np.sqrt(steps) / records)


@dataclass(frozen=True, kw_only=True)
class RecordNoise:
    """Per-record clipping and noise; ε of one release is at `delta`, for one record.

    `steps` and `rate` are those of the local work, as far as the buyer needs them: `rate` is how far one step of length
    1 carries the model (with momentum, at most).
    """

    clip: float = 1.0
    delta: float = 1e-5
    steps: int = 1
    rate: float = 1.0
    name: ClassVar[str] = "gaussian-records"
    norm: ClassVar[Literal["l1", "l2"]] = "l2"
    unit: ClassVar[Unit] = "record"
    sound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", checked_clip(self.clip))
        object.__setattr__(self, "delta", checked_number("delta", self.delta, 1e-30, 0.5))
        object.__setattr__(self, "rate", checked_number("rate", self.rate, 1e-12, 1e12))
        if type(self.steps) is not int or not 1 <= self.steps <= 1_000_000:
            raise InvalidInput("steps", self.steps, "a whole number of at least 1")

    @property
    def length(self) -> float:
        """The longest update without noise."""
        return self.rate * self.steps * self.clip

    def multiplier(self, epsilon: float) -> float:
        """σ at a distance of 1, by the analytic calibration."""
        return float(analytic_gaussian_sigma(epsilon=epsilon, delta=self.delta, sensitivity=1.0))

    def guarantee(self, epsilon: float) -> RecordLevel:
        """One Gaussian release, for one record."""
        return RecordLevel(GaussianRelease(self.multiplier(epsilon)))

    def scale(self, epsilon: float, records: int, steps: int) -> float:
        """σ in each coordinate of every step's mean gradient."""
        return self.multiplier(epsilon) * record_distance(self.clip, records, steps)

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """Of an owner of one record; d records have a d²-th of it (`aggregation.release_energy`)."""
        eps = checked_array("epsilon", epsilon)
        sigma = np.full(eps.shape, np.inf)
        sells = eps > 0
        if sells.any():
            step = analytic_gaussian_sigma(epsilon=eps[sells], delta=self.delta, sensitivity=2 * self.clip)
            sigma[sells] = step * self.rate * self.steps
        return np.asarray(checked_dimension(dimension) * sigma**2)

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """None: what protects records is done to gradients, before there is a vector."""
        raise InvalidInput("perturbation", self.name, "one that takes whole updates, or unit = 'record' in an auction")
