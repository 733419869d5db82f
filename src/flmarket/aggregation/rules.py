"""The error bound, and the rules that weigh releases by it: the papers', and the least error where only a sum is seen.

The error bound ERR that aggregation minimises and auctions are judged by (FL-Market 2021 §4, 2022 §IV).

    ERR(λ; ε, d) = Σ λ_i² σ_i + (L Σ|λ_i − W_i|)²,    W_i = d_i / Σd,

the variance that noise adds to the aggregate plus the square of the bias from weighing owners unlike their data, for
gradients clipped to norm L. σ_i is the noise energy of owner i's release. The papers count one coordinate of Laplace
noise, σ_i = 8L²/ε_i²; a p-dimensional release carries p times that (docs/errata.md E2), hence `dimension`. Any other
randomizer comes in by its own noise energy. Where owners' updates are seen only as a sum (`trust`), noise is common and
its energy is the most that any one owner's promise needs, max λ_i²σ_i, times the `excess` of what is added.

The bound charges nothing for fewer records: by it, buying a part of everybody's data looks as good as buying all. Where
mechanisms buy parts, give `records` and the variance of one record's gradient: an owner who computes on x of her d
records, drawn at random, errs by record_variance·(1/x − 1/d) about her full gradient, which then counts as noise.

The papers' rules: conventional, BiasOpt, VarOpt and OptAggr.

With no winner at all each rule returns the data shares W, of infinite error bound: there is nothing to aggregate.
Sources: FL-Market 2021 Alg. 2 (BiasOpt), Alg. 3 (VarOpt), Lemmas 4.1 and 4.2; McMahan et al. 2017 (conventional).

Weights where only a sum is seen: the least error of many unequal privacy losses behind one common noise.

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
from typing import ClassVar, Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array, slices
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_positive

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
    checked_positive("clip", clip)
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


# Rows are independent: chunks of about this many entries keep every temporary in the processor's cache.
_CHUNK_ENTRIES = 60_000


@dataclass(frozen=True)
class _ByEnergy:
    """Rules that look at the noise energy of every release."""

    clip: float = 1.0
    dimension: int = 1
    perturbation: HasNoiseEnergy | None = None

    def energy(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """σ of each owner's release."""
        return release_energy(
            epsilon, clip=self.clip, dimension=self.dimension, perturbation=self.perturbation, data_size=data_size
        )

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """Rows sum to 1, 0 where ε = 0; the data shares where nobody releases anything."""
        shares, eps = shares_and_winners(epsilon, data_size)
        flat, energy = shares.reshape(-1, eps.shape[-1]), self.energy(eps, data_size).reshape(-1, eps.shape[-1])
        out = np.empty_like(flat)
        for part in slices(len(out), _CHUNK_ENTRIES // eps.shape[-1]):
            out[part] = self._solved(flat[part], energy[part])
        return out.reshape(eps.shape)

    def _solved(self, shares: FloatArray, energy: FloatArray) -> FloatArray:
        """The weights of rows (rows, n), by their data shares and energies, which are ∞ for those who do not sell."""
        raise NotImplementedError


@dataclass(frozen=True)
class VarOpt(_ByEnergy):
    """Least variance: weights inverse to the noise energy (in ε² for the papers' Laplace noise)."""

    name: str = "var-opt"

    def _solved(self, shares: FloatArray, energy: FloatArray) -> FloatArray:
        least, sells = energy.min(axis=-1, keepdims=True), np.isfinite(energy)
        return normalised(np.divide(least, energy, out=np.zeros(energy.shape), where=sells), shares)


@dataclass(frozen=True)
class OptAggr(_ByEnergy):
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

    name: str = "opt-aggr"

    def _solved(self, shares: FloatArray, energy: FloatArray) -> FloatArray:
        return _solve(shares, energy, 8.0 * self.clip * self.clip)


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


@dataclass(frozen=True)
class SecureOpt(_ByEnergy):
    """Of a sum that nobody sees the parts of: the weights of least error bound."""

    excess: float = 1.0
    name: str = "secure-opt"
    trust: ClassVar[Trust] = "secure-aggregation"

    def noise(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """N: the standard deviation per coordinate that the sum must have; infinite where nobody sells."""
        energy = self.energy(epsilon, data_size)
        return np.sqrt(common_energy(self.weights(epsilon, data_size), energy) / self.dimension)

    def _solved(self, shares: FloatArray, energy: FloatArray) -> FloatArray:
        return _solve_for_sum(shares, energy, self.excess, 4.0 * self.clip * self.clip)


def _solve_for_sum(shares: FloatArray, energy: FloatArray, excess: float, penalty: float) -> FloatArray:
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
