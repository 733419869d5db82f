"""Weights where only a sum is seen: the least error of many unequal privacy losses behind one common noise.

With secure aggregation nobody's update is private by itself; the sum Σλ_i g_i + noise is. Owner i moves it by at most
2Lλ_i, so noise of standard deviation N per coordinate costs her what a Gaussian of sensitivity 2Lλ_i and deviation N
costs. She sold μ_i (the ratio of the two that her ε allows), so λ_i ≤ Nμ_i/(2L). In terms of the energy
σ_i = p(2L/μ_i)² that she would add by herself in the local model, and of the root energy S = N√p of the common noise,
λ_i ≤ S/√σ_i: the same energies say both trust models, and

    local    ERR = Σ λ_i²σ_i   + (L Σ|λ_i − W_i|)²,
    secure   ERR = κ max λ_i²σ_i + (L Σ|λ_i − W_i|)²,

κ ≥ 1 being the noise that is in the sum over what its owners need (shares of those who may drop out or collude).

**Least error.** At a given S the bias is least when every owner who may keep her data share keeps it: with u_i = 1/√σ_i
and D(S) = Σ(W_i − S·u_i)⁺, Σ|λ_i − W_i| ≥ 2D(S), since Σλ = ΣW; and any distribution of the D that others give up over
those with room, (S·u_i − W_i)⁺ in all NΣμ/(2L) − 1 + D ≥ D, attains it. So S minimises

    F(S) = κS² + 4L²D(S)²    over    S ≥ 1/Σu,

D is convex, piecewise linear and non-negative, so F is strictly convex and piecewise quadratic with kinks at W_i/u_i
(infinite for those who sell nothing, whose share is bias whatever S is). Sort the kinks; the left slope of F at each
follows from suffix sums; beyond the last where it is negative, with A the owners above, the minimum is at
S = 4L²·W(A)·u(A)/(κ + 4L²·u(A)²), or at that kink itself if this is smaller.
Exact, O(n log n), checked against an interior-point solver in tests/aggregation.

Spare weight is spread in proportion to room: owners who sold more lose no more than they sold, and all with room lose
less. Breaks if a weight is used with less noise than `common_energy` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from flmarket.aggregation.bound import HasNoiseEnergy, Trust, common_energy, release_energy
from flmarket.aggregation.rules import normalised, shares_and_winners
from flmarket.bids import FloatArray


@dataclass(frozen=True)
class SecureOpt:
    """Of a sum that nobody sees the parts of: the weights of least error bound."""

    clip: float = 1.0
    dimension: int = 1
    perturbation: HasNoiseEnergy | None = None
    excess: float = 1.0
    name: str = "secure-opt"
    trust: ClassVar[Trust] = "secure-aggregation"

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """Rows sum to 1, 0 where ε = 0; the data shares where nobody releases anything."""
        shares, eps = shares_and_winners(epsilon, data_size)
        energy = release_energy(eps, clip=self.clip, dimension=self.dimension, perturbation=self.perturbation)
        n = eps.shape[-1]
        found = _solve(shares.reshape(-1, n), energy.reshape(-1, n), self.excess, 4.0 * self.clip * self.clip)
        return found.reshape(eps.shape)

    def noise(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """N: the standard deviation per coordinate that the sum must have; infinite where nobody sells."""
        energy = release_energy(epsilon, clip=self.clip, dimension=self.dimension, perturbation=self.perturbation)
        return np.sqrt(common_energy(self.weights(epsilon, data_size), energy) / self.dimension)


def _solve(shares: FloatArray, energy: FloatArray, excess: float, penalty: float) -> FloatArray:
    """Optimal weights of each row of a (rows, n) problem; `penalty` is 4L²."""
    wins = np.isfinite(energy)
    least = np.where(wins.any(axis=1), energy.min(axis=1, initial=np.inf, where=wins), 1.0)[:, None]
    u = np.where(wins, np.sqrt(least / energy), 0.0)  # S in units of the least √σ: u is from 0 to 1
    root = np.maximum(_root_energy(shares, u, excess * least[:, 0], penalty), 1.0 / np.maximum(u.sum(axis=1), 1e-300))
    most = root[:, None] * u
    kept = np.minimum(shares, most)
    room, spare = most - kept, np.maximum(1.0 - kept.sum(axis=1, keepdims=True), 0.0)
    total = room.sum(axis=1, keepdims=True)
    filled = np.minimum(spare * np.divide(room, total, out=np.zeros_like(room), where=total > 0), room)
    return np.where(wins.any(axis=1, keepdims=True), normalised(kept + filled, shares), shares)


def _root_energy(shares: FloatArray, u: FloatArray, excess: FloatArray, penalty: float) -> FloatArray:
    """The unconstrained minimiser S of each row, by the sign of F's left slope at the sorted kinks."""
    n = shares.shape[1]
    kink = np.divide(shares, u, out=np.full(shares.shape, np.inf), where=u > 0)
    order = np.argsort(kink, axis=1, kind="stable")
    kink, w, v = (np.take_along_axis(x, order, axis=1) for x in (kink, shares, u))
    # of the owners from the k-th kink on; one more column for nobody
    above = [np.concatenate([np.cumsum(x[:, ::-1], axis=1)[:, ::-1], np.zeros((len(x), 1))], axis=1) for x in (w, v)]
    w_above, v_above = above
    at = np.where(np.isfinite(kink), kink, 0.0)
    slope = excess[:, None] * at - penalty * (w_above[:, :n] - at * v_above[:, :n]) * v_above[:, :n]
    passed = (np.isfinite(kink) & (slope < 0)).sum(axis=1)  # S lies beyond so many kinks
    rows = np.arange(len(shares))
    a, b = w_above[rows, passed], v_above[rows, passed]
    last = np.where(passed > 0, at[rows, np.maximum(passed - 1, 0)], 0.0)
    return np.asarray(np.maximum(penalty * a * b / (excess + penalty * b * b), last))
