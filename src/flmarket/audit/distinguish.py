"""A lower bound on ε that cannot be argued with: tell two inputs apart better than ε allows.

If a mechanism is (ε, δ)-DP then for any event S and any two inputs, P_u(S) ≤ e^ε·P_v(S) + δ (the hockey-stick
divergence at e^ε is at most δ), so ε ≥ ln((P_u(S) − δ)/P_v(S)). The event is a threshold on a number computed from the
release. Which pair of inputs, number and threshold to use is chosen on one half of the releases; the probabilities are
then bounded on the other half by Clopper–Pearson intervals, so the choice costs nothing (as in Jagielski, Ullman, Oprea
2020, and Nasr et al. 2021). For a Gaussian promise (μ-GDP; Dong, Roth, Su 2019) the same event also bounds
μ ≥ Φ⁻¹(P_u) − Φ⁻¹(P_v), which is far sharper.

In N releases no more than about ln(N/12) can be shown, whatever the mechanism gives away.

Releases are rounded to 20 binary digits of the clip first, so that what is judged is the mechanism as written, on real
numbers. With `low_bits` they are not: the test then finds by itself that `value + float_noise` tells its value by the
last digits (Mironov 2012). In one dimension Laplace noise from NumPy that promises ε = 1 is seen to give away 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, ndtri

from flmarket.bids import FloatArray
from flmarket.privacy import NoiseSource, Perturbation, clip_l1, clip_l2

__all__ = ["Distinguished", "crafted_pairs", "distinguish", "measurable_epsilon"]

_THRESHOLDS = 80


@dataclass(frozen=True)
class Distinguished:
    """The bounds, each wrong with at most the failure probability it was made with."""

    epsilon_lower: float
    mu_lower: float
    pair: str
    statistic: str


def crafted_pairs(clip: float, dimension: int) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Inputs that a faulty clip or noise treats too differently; in the local model all pairs are neighbours."""
    spike, dense = np.zeros(dimension), np.ones(dimension)
    spike[0] = 1.0
    pairs = {
        "opposite, one coordinate, at the clip": (clip * spike, -clip * spike),
        "opposite, one coordinate, ten times the clip": (10 * clip * spike, -10 * clip * spike),
    }
    if dimension > 1:
        pairs["opposite, all coordinates, far beyond the clip"] = (10 * clip * dense, -10 * clip * dense)
        pairs["one coordinate against all"] = (10 * clip * spike, -10 * clip * dense)
    return pairs


def measurable_epsilon(trials: int, failure_probability: float) -> float:
    """The most that could be shown: the event always happens under one input and never under the other."""
    half = trials // 2
    return float(np.log(rate_at_least(half, half, failure_probability) / rate_at_most(0, half, failure_probability)))


def distinguish(
    perturbation: Perturbation,
    epsilon: float,
    dimension: int,
    trials: int,
    delta: float,
    failure_probability: float,
    rng: np.random.Generator | NoiseSource,
    *,
    low_bits: bool = False,
) -> Distinguished:
    """Each of the two bounds fails with probability at most `failure_probability` / 2."""
    alpha = failure_probability / 4  # two bounds of two proportions each
    half = trials // 2
    chosen: dict[str, tuple[float, str, str, FloatArray, FloatArray, float]] = {}
    for name, (u, v) in crafted_pairs(perturbation.clip, dimension).items():
        at_u, at_v = (_releases(perturbation, x, epsilon, trials, rng, low_bits) for x in (u, v))
        for statistic, (su, sv) in _statistics(perturbation, u, v, at_u, at_v, half).items():
            thresholds = np.quantile(np.concatenate([su[:half], sv[:half]]), np.linspace(0.002, 0.998, _THRESHOLDS))
            for side, flip in ((1.0, False), (-1.0, True)):
                # the event "s ≥ t" under u, or "s ≤ t" under v: the same test with the inputs exchanged
                one, two = (-sv, -su) if flip else (su, sv)
                for t in side * thresholds:
                    hits, misses = int((one[:half] >= t).sum()), int((two[:half] >= t).sum())
                    for bound, score in _bounds(hits, misses, half, delta, alpha).items():
                        if bound not in chosen or score > chosen[bound][0]:
                            chosen[bound] = (score, name, statistic, one[half:], two[half:], float(t))
    final = {}
    for bound, (_, _, _, one, two, t) in chosen.items():
        rest = len(one)
        final[bound] = _bounds(int((one >= t).sum()), int((two >= t).sum()), rest, delta, alpha)[bound]
    _, pair, statistic, *_ = chosen["epsilon"]
    return Distinguished(max(final["epsilon"], 0.0), max(final["mu"], 0.0), pair, statistic)


def _releases(
    perturbation: Perturbation,
    x: FloatArray,
    epsilon: float,
    trials: int,
    rng: np.random.Generator | NoiseSource,
    low_bits: bool,
) -> FloatArray:
    seen = perturbation.privatize(np.broadcast_to(x, (trials, len(x))), epsilon, rng)
    if low_bits:
        return seen
    digit = 2.0 ** (np.floor(np.log2(perturbation.clip)) - 20)
    return np.asarray(np.round(seen / digit) * digit)


def _statistics(
    perturbation: Perturbation, u: FloatArray, v: FloatArray, at_u: FloatArray, at_v: FloatArray, half: int
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """One number per release; centres are estimated on the first half only."""
    clip = clip_l1 if perturbation.norm == "l1" else clip_l2
    stated = clip(u, perturbation.clip), clip(v, perturbation.clip)
    seen = np.median(at_u[:half], axis=0), np.median(at_v[:half], axis=0)
    out = {"projection on the difference": (at_u @ (u - v), at_v @ (u - v))}
    for name, (cu, cv) in (("Laplace likelihood ratio", stated), ("Laplace likelihood ratio, centres seen", seen)):
        ratio_u, ratio_v = (np.abs(y - cv).sum(axis=-1) - np.abs(y - cu).sum(axis=-1) for y in (at_u, at_v))
        out[name] = ratio_u, ratio_v
    return out


def _bounds(hits: int, misses: int, count: int, delta: float, alpha: float) -> dict[str, float]:
    true_rate, false_rate = rate_at_least(hits, count, alpha), rate_at_most(misses, count, alpha)
    ratio = (true_rate - delta) / false_rate
    return {
        "epsilon": float(np.log(ratio)) if ratio > 0 else -np.inf,
        "mu": float(ndtri(true_rate) - ndtri(false_rate)) if true_rate > 0 and false_rate < 1 else -np.inf,
    }


def rate_at_least(hits: int, count: int, alpha: float) -> float:
    """Clopper–Pearson: the true rate is below this with probability at most alpha."""
    return 0.0 if hits == 0 else float(betaincinv(hits, count - hits + 1, alpha))


def rate_at_most(hits: int, count: int, alpha: float) -> float:
    """Clopper–Pearson: the true rate is above this with probability at most alpha."""
    return 1.0 if hits == count else float(betaincinv(hits + 1, count - hits, 1 - alpha))
