"""The error bound ERR that aggregation minimises and auctions are judged by (FL-Market 2021 §4, 2022 §IV).

    ERR(λ; ε, d) = Σ λ_i² σ_i + (L Σ|λ_i − W_i|)²,    W_i = d_i / Σd,

the variance that noise adds to the aggregate plus the square of the bias from weighing owners unlike their data, for
gradients clipped to norm L. σ_i is the noise energy of owner i's release. The papers count one coordinate of Laplace
noise, σ_i = 8L²/ε_i²; a p-dimensional release carries p times that (docs/errata.md E2), hence `dimension`. Any other
randomizer comes in by its own noise energy. Where owners' updates are seen only as a sum (`trust`), noise is common and
its energy is the most that any one owner's promise needs, max λ_i²σ_i, times the `excess` of what is added (`secure`).

The bound charges nothing for fewer records: by it, buying a part of everybody's data looks as good as buying all. Where
mechanisms buy parts, give `records` and the variance of one record's gradient: an owner who computes on x of her d
records, drawn at random, errs by record_variance·(1/x − 1/d) about her full gradient, which then counts as noise.
"""

from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput

Trust = Literal["local", "secure-aggregation"]
TRUST: tuple[Trust, ...] = get_args(Trust)


class HasNoiseEnergy(Protocol):
    """The part of a perturbation that aggregation needs."""

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """E‖release − clipped input‖² at privacy loss ε."""


def release_energy(
    epsilon: ArrayLike,
    *,
    clip: float = 1.0,
    dimension: int = 1,
    perturbation: HasNoiseEnergy | None = None,
    data_size: ArrayLike = 1.0,
) -> FloatArray:
    """σ of each owner's release: the papers' Laplace noise unless a perturbation is given; infinite at ε = 0.

    Noise for one record (`unit = "record"`) is the less the more records an owner has; all other noise is not.
    """
    eps = checked_array("epsilon", epsilon)
    if not (np.isfinite(clip) and clip > 0):
        raise InvalidInput("clip", clip, "a positive number")
    if int(dimension) != dimension or dimension < 1:
        raise InvalidInput("dimension", dimension, "a whole number of at least 1")
    sells = eps > 0
    energy = np.full(eps.shape, np.inf)
    if perturbation is None:
        np.divide(8.0 * clip * clip * dimension, eps * eps, out=energy, where=sells)
    elif sells.any():
        energy[sells] = perturbation.noise_energy(eps[sells], dimension)
        if getattr(perturbation, "unit", "update") == "record":
            energy = energy / np.square(np.maximum(checked_array("data_size", data_size), 1.0))
    return energy


def data_shares(data_size: ArrayLike) -> FloatArray:
    """W: each owner's share of the records of her profile."""
    size = checked_array("data_size", data_size)
    total = size.sum(axis=-1, keepdims=True)
    if not (total > 0).all():
        raise InvalidInput("data_size", 0, "at least one record in every profile")
    return np.asarray(size / total)


def sampling_variance(records: ArrayLike, data_size: ArrayLike, record_variance: float) -> FloatArray:
    """What computing on x of d records, drawn at random, adds to the error of an owner's gradient; 0 for x = 0."""
    sold, size = checked_array("records", records), checked_array("data_size", data_size)
    if not (np.isfinite(record_variance) and record_variance >= 0):
        raise InvalidInput("record_variance", record_variance, "a finite number of at least 0")
    if (sold > size * (1 + 1e-9)).any():
        raise InvalidInput("records", sold.max(), "no more records than the owner has")
    inverse_sold, inverse_size = (np.divide(1.0, x, out=np.zeros(x.shape), where=x > 0) for x in (sold, size))
    return record_variance * np.where(sold > 0, np.maximum(inverse_sold - inverse_size, 0.0), 0.0)


def common_energy(weights: ArrayLike, energy: ArrayLike) -> FloatArray:
    """max λ²σ: the least energy of noise common to a sum at which every owner's promise holds."""
    lam, sigma = np.broadcast_arrays(checked_array("weights", weights), np.asarray(energy, dtype=np.float64))
    return np.asarray(np.where(lam > 0, np.square(lam) * np.where(lam > 0, sigma, 0.0), 0.0).max(axis=-1))


def error_bound(
    weights: ArrayLike,
    epsilon: ArrayLike,
    data_size: ArrayLike,
    clip: float = 1.0,
    dimension: int = 1,
    *,
    perturbation: HasNoiseEnergy | None = None,
    records: ArrayLike | None = None,
    record_variance: float = 0.0,
    trust: Trust = "local",
    excess: float = 1.0,
) -> FloatArray:
    """ERR of given weights; infinite where an owner who releases nothing (ε = 0) is given weight.

    `trust` says whether each update is private by itself, or only their sum is seen, with `excess` times the noise that
    it needs.
    """
    if trust not in TRUST:
        raise InvalidInput("trust", trust, " or ".join(TRUST))
    lam = checked_array("weights", weights)
    energy = release_energy(epsilon, clip=clip, dimension=dimension, perturbation=perturbation, data_size=data_size)
    shares = data_shares(data_size)
    drawn = np.zeros(()) if records is None else sampling_variance(records, data_size, record_variance)
    try:
        lam, energy, shares, drawn = np.broadcast_arrays(lam, energy, shares, drawn)
    except ValueError:
        raise InvalidInput("weights", lam.shape, f"the shape of epsilon, {energy.shape}") from None
    if trust == "local":
        variance = np.where(lam > 0, np.square(lam) * np.where(lam > 0, energy + drawn, 0.0), 0.0).sum(axis=-1)
    else:
        variance = excess * common_energy(lam, energy) + (np.square(lam) * drawn).sum(axis=-1)
    bias = clip * np.abs(lam - shares).sum(axis=-1)
    return np.asarray(variance + bias * bias)
