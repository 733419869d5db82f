"""How much Gaussian noise an (ε, δ) promise needs, and what a given amount delivers.

N(0, σ²) on a query of L2 sensitivity Δ is (ε, δ)-DP exactly when, with μ = Δ/σ,

    Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) ≤ δ            (Balle & Wang 2018, arXiv:1805.06530, Theorem 8)

for every ε ≥ 0; `analytic_gaussian_sigma` inverts this on the safe side. Assumes real-valued Gaussian noise.

Evaluated as written, the difference loses all digits for small μ and overflows for large ε. With a = ε/μ −
μ/2, b = a + μ and Mills' ratio R(x) = Φ(−x)/φ(x), the left side is φ(a)·(R(a) − R(b)); and as R' = xR − 1,
for small μ R(a) − R(b) is the integral of 1 − xR(x), whose integrand is positive and smooth. Also ∂δ/∂μ =
φ(a) and ∂δ/∂ε = −φ(a)R(b), which makes Newton's method cheap.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, ndtr, ndtri

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput

_LOG_SQRT_2PI = 0.5 * np.log(2 * np.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
# A relative step to the safe side, a hundred times the rounding error of the evaluation.
_SAFE_STEP = 1e-12


def gaussian_delta(*, sigma: ArrayLike, epsilon: ArrayLike, sensitivity: ArrayLike = 1.0) -> FloatArray:
    """The smallest δ for which Gaussian noise σ is (ε, δ)-DP."""
    mu = _positive("sensitivity", sensitivity) / _positive("sigma", sigma)
    mu, eps = np.broadcast_arrays(mu, checked_array("epsilon", epsilon))
    return np.exp(np.minimum(_log_delta(mu, eps)[0], 0.0))


def gaussian_epsilon(*, sigma: ArrayLike, delta: ArrayLike, sensitivity: ArrayLike = 1.0) -> FloatArray:
    """The smallest ε ≥ 0 for which Gaussian noise σ is (ε, δ)-DP, rounded up."""
    mu = _positive("sensitivity", sensitivity) / _positive("sigma", sigma)
    mu, target = np.broadcast_arrays(mu, np.log(_delta(delta)))
    # δ ≤ Φ(−a) gives an upper bound: choose ε so that Φ(−a) = δ.
    top = np.maximum(mu * (mu / 2 - ndtri(np.exp(target))), 0.0)

    def gap(eps: FloatArray) -> tuple[FloatArray, FloatArray]:
        log_delta, spread, mills_b = _log_delta(mu, eps)
        return target - log_delta, mills_b / spread

    eps = _root(gap, np.zeros_like(top), top, start=top)
    eps = np.where(_log_delta(mu, np.zeros_like(mu))[0] <= target, 0.0, eps)
    return _step_until(lambda e: _log_delta(mu, e)[0] <= target, eps, 1 + _SAFE_STEP)


def analytic_gaussian_sigma(*, epsilon: ArrayLike, delta: ArrayLike, sensitivity: ArrayLike = 1.0) -> FloatArray:
    """The smallest σ that is (ε, δ)-DP (Balle & Wang, Algorithm 1), rounded up; ε > 0, 0 < δ < 1."""
    span = _positive("sensitivity", sensitivity)
    eps, target = np.broadcast_arrays(_positive("epsilon", epsilon), np.log(_delta(delta)))
    # δ ≤ Φ(−a) gives a safe μ to start from: the positive root of ε/μ − μ/2 = z.
    z = -ndtri(np.exp(target))
    hypotenuse = np.hypot(z, np.sqrt(2 * eps))
    low = np.where(z > 0, 2 * eps / (hypotenuse + np.abs(z)), hypotenuse - z)
    high = low
    for _ in range(2000):  # doubles: σ is never smaller than 1e-300 of anything
        short = _log_delta(high, eps)[0] <= target
        if not short.any():
            break
        high = np.where(short, 2 * high, high)

    def gap(mu: FloatArray) -> tuple[FloatArray, FloatArray]:
        log_delta, spread, _ = _log_delta(mu, eps)
        return log_delta - target, 1 / spread

    mu = _root(gap, low, high, start=low)
    mu = _step_until(lambda m: _log_delta(m, eps)[0] <= target, mu, 1 - _SAFE_STEP)
    return np.asarray(span / mu)


def classic_gaussian_sigma(*, epsilon: ArrayLike, delta: ArrayLike, sensitivity: ArrayLike = 1.0) -> FloatArray:
    """The textbook √(2 ln(1.25/δ))·Δ/ε (Dwork & Roth 2014, Theorem A.1). For comparison only.

    Proved for ε < 1 only. At δ = 1e-5 it wastes noise up to ε ≈ 8.4 and breaks the promise above: asked for ε
    = 20 it delivers 25.4.
    """
    eps, span = _positive("epsilon", epsilon), _positive("sensitivity", sensitivity)
    return np.asarray(np.sqrt(2 * np.log(1.25 / _delta(delta))) * span / eps)


def _log_delta(mu: FloatArray, eps: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """log δ, the spread δ/φ(a) = R(a) − R(b), and R(b)."""
    a, b = eps / mu - mu / 2, eps / mu + mu / 2
    log_density = -0.5 * a * a - _LOG_SQRT_2PI
    mills_b = _mills(b)
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        x = a[..., None] + np.minimum(mu, 1.0)[..., None] * (0.5 + 0.5 * _NODES)
        narrow = mu / 2 * (_decline(x) @ _WEIGHTS)
        spread = np.where(mu <= 1, narrow, _mills(np.maximum(a, 0.0)) - mills_b)
        log_delta = log_density + np.log(spread)
        # Far left of zero Mills' ratio overflows, but there the two terms do not cancel.
        wide = (mu > 1) & (a < 0)
        direct = ndtr(-a) - np.exp(log_density) * mills_b
        log_delta = np.where(wide, np.log(direct), log_delta)
        spread = np.where(wide, np.exp(np.log(direct) - log_density), spread)
    return log_delta, spread, mills_b


def _mills(x: FloatArray) -> FloatArray:
    """Φ(−x)/φ(x) for x ≥ 0."""
    return np.asarray(np.sqrt(np.pi / 2) * erfcx(x / np.sqrt(2)))


def _decline(x: FloatArray) -> FloatArray:
    """1 − x·R(x), by its asymptotic series where the difference would cancel."""
    far = np.maximum(x, 30.0) ** -2.0
    series = far * (1 - far * (3 - far * (15 - far * (105 - far * (945 - far * 10395)))))
    near = np.minimum(x, 30.0)
    return np.where(x > 30.0, series, 1 - near * _mills(near))


def _root(
    gap: Callable[[FloatArray], tuple[FloatArray, FloatArray]], low: FloatArray, high: FloatArray, *, start: FloatArray
) -> FloatArray:
    """Where an increasing function crosses 0: Newton's steps, and halving where they leave the bracket."""
    low, high, x = low.copy(), high.copy(), start.copy()
    for _ in range(100):
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            value, slope = gap(x)
            low, high = np.where(value <= 0, x, low), np.where(value > 0, x, high)
            newton = x - value / slope
        step = np.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
        if (np.abs(step - x) <= 1e-15 * np.abs(x)).all():
            break
        x = step
    return x


def _step_until(safe: Callable[[FloatArray], NDArray[np.bool_]], x: FloatArray, factor: float) -> FloatArray:
    """Step to the safe side until the evaluated δ is within the promise."""
    x = x * factor
    for _ in range(60):
        ok = safe(x)
        if ok.all():
            break
        x = np.where(ok, x, x * factor)
        factor = 1 + 2 * (factor - 1)
    return x


def _positive(name: str, value: ArrayLike) -> FloatArray:
    array = checked_array(name, value)
    if not ((array >= 1e-100) & (array <= 1e100)).all():
        raise InvalidInput(name, value, "numbers from 1e-100 to 1e100")
    return array


def _delta(delta: ArrayLike) -> FloatArray:
    array = checked_array("delta", delta)
    if not ((array >= 1e-100) & (array < 1)).all():
        raise InvalidInput("delta", delta, "numbers from 1e-100 to just below 1")
    return array
