"""Laplace noise on L1-clipped vectors: pure ε-local differential privacy.

Clip to ‖g‖₁ ≤ L; any two inputs are then at most 2L apart, and Laplace(2L/ε) noise in each coordinate is ε-DP
(Dwork, McSherry, Nissim, Smith 2006, Proposition 1). This is the mechanism of FL-Market (Zheng et al. 2021,
2022).

Breaks without the clip, and in high dimension gives little: the noise energy is 8pL²/ε² for p coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.privacy.clipping import clip_l1
from flmarket.privacy.events import ROUNDING_ALLOWANCE, PureDp
from flmarket.privacy.noise import NoiseSource
from flmarket.privacy.perturbation import (
    checked_clip,
    checked_dimension,
    positive_epsilon,
    release_epsilon,
    release_source,
)

__all__ = ["LaplaceL1"]


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
