"""From a zCDP budget to Gaussian noise (STACK Theorem 1; Bun & Steinke 2016, Prop. 1.6 and Lemma 1.7).

A user releases the mean of m clipped per-record gradients T times. Replacing one record moves the mean by at most 2L/m,
so noise N(0, σ²) in every coordinate costs (2L/m)²/(2σ²) = ρ/T a round, ρ in all, when

    σ = (L/m)·√(2T/ρ).

What would break it: gradients that are not clipped to L. The paper asks for an L-smooth loss, which bounds how
gradients change, not how large they are (docs/errata.md E5).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.privacy.events import checked_number

__all__ = ["noise_multiplier", "noise_scale", "zcdp_of_noise"]


def noise_scale(rho: ArrayLike, *, rounds: int, records: ArrayLike, clip: float = 1.0) -> FloatArray:
    """σ per coordinate and round that spends ρ over all rounds; ∞ where ρ = 0 (release nothing)."""
    m = checked_array("records", records, minimum=1.0)
    length = checked_number("clip", clip, 1e-12, 1e12)
    return np.asarray(2.0 * length / m * noise_multiplier(rho, rounds=rounds))


def noise_multiplier(rho: ArrayLike, *, rounds: int) -> FloatArray:
    """σ over the sensitivity 2L/m, √(T/(2ρ)): what an accountant calls the noise multiplier of one round."""
    budget = checked_array("rho", rho)
    times = checked_number("rounds", rounds, 1, 1e12)
    with np.errstate(divide="ignore"):
        return np.sqrt(times / (2.0 * budget))


def zcdp_of_noise(sigma: ArrayLike, *, rounds: int, records: ArrayLike, clip: float = 1.0) -> FloatArray:
    """The inverse of `noise_scale`: ρ over all rounds."""
    m = checked_array("records", records, minimum=1.0)
    length = checked_number("clip", clip, 1e-12, 1e12)
    noise = checked_array("sigma", sigma, minimum=1e-300)
    return np.asarray(2.0 * checked_number("rounds", rounds, 1, 1e12) * (length / (m * noise)) ** 2)
