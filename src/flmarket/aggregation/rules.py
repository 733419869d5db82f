"""The papers' simple rules: conventional, BiasOpt and VarOpt.

With no winner at all each rule returns the data shares W, of infinite error bound: there is nothing to aggregate.
Sources: FL-Market 2021 Alg. 2 (BiasOpt), Alg. 3 (VarOpt), Lemmas 4.1 and 4.2; McMahan et al. 2017 (conventional).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flmarket.aggregation.bound import HasNoiseEnergy, data_shares, release_energy
from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput

__all__ = ["BiasOpt", "Conventional", "VarOpt", "normalised", "shares_and_winners"]


def shares_and_winners(epsilon: ArrayLike, data_size: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Data shares and privacy losses of one common shape; an owner of no records is no winner."""
    eps, shares = checked_array("epsilon", epsilon), data_shares(data_size)
    try:
        eps, shares = np.broadcast_arrays(eps, shares)
    except ValueError:
        raise InvalidInput("data_size", shares.shape, f"the shape of epsilon, {eps.shape}") from None
    return shares, eps


def normalised(weights: FloatArray, shares: FloatArray) -> FloatArray:
    """Weights that sum to 1; the data shares where all are 0."""
    total = weights.sum(axis=-1, keepdims=True)
    return np.where(total > 0, np.divide(weights, total, out=np.zeros_like(weights), where=total > 0), shares)


@dataclass(frozen=True)
class Conventional:
    """ConvlAggr: winners in proportion to their records."""

    name: str = "conventional"

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """Rows sum to 1, 0 where ε = 0."""
        shares, eps = shares_and_winners(epsilon, data_size)
        return normalised(np.where(eps > 0, shares, 0.0), shares)


@dataclass(frozen=True)
class BiasOpt:
    """Least bias: winners keep their data share, the spare weight goes to the owner of the largest ε."""

    name: str = "bias-opt"

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """Rows sum to 1, 0 where ε = 0; among equally large ε the lowest index gets the spare weight."""
        shares, eps = shares_and_winners(epsilon, data_size)
        kept = np.where(eps > 0, shares, 0.0)
        spare = 1.0 - kept.sum(axis=-1, keepdims=True)
        best = eps.argmax(axis=-1)[..., None] == np.arange(eps.shape[-1])
        return np.where((eps > 0).any(axis=-1, keepdims=True), kept + np.where(best, spare, 0.0), shares)


@dataclass(frozen=True)
class VarOpt:
    """Least variance: weights inverse to the noise energy (in ε² for the papers' Laplace noise)."""

    clip: float = 1.0
    dimension: int = 1
    perturbation: HasNoiseEnergy | None = None
    name: str = "var-opt"

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """Rows sum to 1, 0 where ε = 0."""
        shares, eps = shares_and_winners(epsilon, data_size)
        energy = release_energy(eps, clip=self.clip, dimension=self.dimension, perturbation=self.perturbation)
        least = np.where(np.isfinite(energy), energy, np.inf).min(axis=-1, keepdims=True)
        precision = np.where(eps > 0, np.divide(least, energy, out=np.zeros(eps.shape), where=eps > 0), 0.0)
        return normalised(precision, shares)
