"""The papers' simple rules: conventional, BiasOpt and VarOpt.

With no winner at all each rule returns the data shares W, of infinite error bound: there is nothing to aggregate.
Sources: FL-Market 2021 Alg. 2 (BiasOpt), Alg. 3 (VarOpt), Lemmas 4.1 and 4.2; McMahan et al. 2017 (conventional).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flmarket.aggregation.bound import HasNoiseEnergy, data_shares, release_energy
from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput


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
        energy = release_energy(
            eps, clip=self.clip, dimension=self.dimension, perturbation=self.perturbation, data_size=data_size
        )
        least = np.where(np.isfinite(energy), energy, np.inf).min(axis=-1, keepdims=True)
        precision = np.where(eps > 0, np.divide(least, energy, out=np.zeros(eps.shape), where=eps > 0), 0.0)
        return normalised(precision, shares)


# Rows are independent: chunks of about this many entries keep every temporary in the processor's cache.
_CHUNK_ENTRIES = 60_000


@dataclass(frozen=True)
class OptAggr:
    """The weights that minimise the error bound for a given clip, dimension and perturbation.

    OptAggr in closed form: the weights of least error bound, exact, O(n log n), a whole batch at once.

    FL-Market 2022 (Alg. 2) solves a quadratic programme per profile and knows no analytic solution. There is one. Let
    w₀ be the data share of the owners who release nothing. Because Σλ = ΣW = 1, Σ|λ_i − W_i| = 2P, P = Σ_winners (λ_i −
    W_i)⁺, so the bound is Σλ_i²σ_i + 4L²P². Its optimality conditions read, with ν the multiplier of Σλ = 1 and a = ν −
    8L²P,

        λ_i = max( min(W_i, ν u_i), a u_i ),      u_i = 1/(2σ_i),

    that is, an owner keeps her data share unless her noise is so large that it is cut to ν u_i, or so small that it is
    raised to a u_i. With P(a) = Σ(a u_i − W_i)⁺ and N(ν) = Σ(W_i − ν u_i)⁺, the condition Σλ = 1 is

        G(a) = P(a) − w₀ − N(a + 8L²P(a)) = 0.

    P grows and N falls, both piecewise linear with kinks at b_i = W_i/u_i, so G is increasing; its root is found by
    sorting the kinks, locating first a and then ν between two of them by bisection, and solving one linear equation.
    The published problem drops w₀ from the bias, and the published code renormalises W over the winners: both are
    sub-optimal when somebody loses (docs/errata.md E1).
    """

    clip: float = 1.0
    dimension: int = 1
    perturbation: HasNoiseEnergy | None = None
    name: str = "opt-aggr"

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """Rows sum to 1, 0 where ε = 0; the data shares where nobody releases anything."""
        shares, eps = shares_and_winners(epsilon, data_size)
        energy = release_energy(
            eps, clip=self.clip, dimension=self.dimension, perturbation=self.perturbation, data_size=data_size
        )
        n = eps.shape[-1]
        flat_shares, flat_energy = shares.reshape(-1, n), energy.reshape(-1, n)
        out = np.empty_like(flat_shares)
        rows = max(1, _CHUNK_ENTRIES // n)
        for start in range(0, len(out), rows):
            part = slice(start, start + rows)
            out[part] = _solve(flat_shares[part], flat_energy[part], 8.0 * self.clip * self.clip)
        return out.reshape(eps.shape)


def _solve(shares: FloatArray, energy: FloatArray, penalty: float) -> FloatArray:
    """Optimal weights of each row of a (rows, n) problem; `penalty` is 8L².

    Inside, owners run along the first axis: sums over few owners are then long vector operations over many rows.
    """
    shares, energy = np.ascontiguousarray(shares.T), np.ascontiguousarray(energy.T)
    wins = np.isfinite(energy)
    # the minimiser depends on σ and L² only through their ratio: dividing by the row's least σ keeps u in (0, 1/2]
    least = energy.min(axis=0)
    someone = np.isfinite(least)
    least[~someone] = 1.0
    u = 0.5 * least / energy  # 0 for losers
    w = shares * wins
    lost = np.where(wins.all(axis=0), 0.0, 1.0 - w.sum(axis=0))

    a, nu = _multipliers(w, u, lost, penalty / least)
    weights = np.maximum(np.minimum(w, nu * u), a * u)
    weights /= np.where(someone, weights.sum(axis=0), 1.0)
    return np.asarray(np.where(someone, weights, shares).T)


def _multipliers(
    w: FloatArray, u: FloatArray, lost: FloatArray, bias_cost: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The root (a, ν) of G for each column of an (n, rows) problem; owners with u = 0 do not count."""
    n, rows = w.shape
    row = np.arange(rows)
    kink = np.divide(w, u, out=np.zeros_like(w), where=u > 0)
    # losers carry no mass, so their kink may stand anywhere finite: at the end
    np.copyto(kink, kink.max(axis=0), where=u == 0)
    order = np.argsort(kink, axis=0)
    kink, sorted_u, sorted_w = (np.take_along_axis(x, order, axis=0) for x in (kink, u, w))
    below_u, below_w = np.cumsum(sorted_u, axis=0), np.cumsum(sorted_w, axis=0)

    # first a: the number k of kinks at which G is not yet positive, by bisection
    low, high = np.zeros(rows, dtype=np.int64), np.full(rows, n)
    for _ in range(n.bit_length()):
        middle = np.minimum((low + high) // 2, n - 1)
        at = kink[middle, row]
        excess = at * below_u[middle, row] - below_w[middle, row]
        cut = np.maximum(w - (at + bias_cost * excess) * u, 0.0).sum(axis=0)
        searching, reached = low < high, excess <= lost + cut
        low = np.where(searching & reached, middle + 1, low)
        high = np.where(searching & ~reached, middle, high)
    last = np.maximum(low - 1, 0)
    p_u, p_w = (np.where(low > 0, prefix[last, row], 0.0) for prefix in (below_u, below_w))

    # then ν: with k known, P = (ν p_u − p_w)/slope is linear in ν, and N at every kink follows from suffix sums
    slope = 1.0 + bias_cost * p_u
    above_u = np.cumsum(sorted_u[::-1], axis=0)[::-1]  # summed from the end, so that small terms survive
    above_w = np.cumsum(sorted_w[::-1], axis=0)[::-1]
    count = ((kink * p_u - p_w) / slope - lost <= above_w - kink * above_u).sum(axis=0)
    at_count = np.minimum(count, n - 1)
    n_u, n_w = (np.where(count < n, suffix[at_count, row], 0.0) for suffix in (above_u, above_w))
    nu = (p_w + slope * (lost + n_w)) / np.maximum(p_u + slope * n_u, np.finfo(np.float64).tiny)
    return (nu + bias_cost * p_w) / slope, nu
