"""What releases cost: a sequence of them, in each of the three currencies, and one of Gaussian noise, exactly.

Sums are kept as whole multiples of 2⁻¹⁰⁰, each term rounded up: addition is then exact, so order does not
matter, `count=k` is the same as k single releases, and a total is never below what was given away.

For an (ε, δ) total the smallest of these valid bounds is taken:
- *Gaussian releases together* are one Gaussian release with 1/m² = Σ 1/mᵢ², whose ε at δ is exact (Dong,
  Roth, Su 2022, Corollary 3.3; Balle & Wang 2018). Pure and (ε, δ) events are added to it by basic
  composition.
- *Rényi*: zCDP and Gaussian events cost ρα; a pure event costs no more than randomised response at the same
  ε, of which every ε-DP mechanism is a post-processing (Kairouz, Oh, Viswanath 2015); the sum becomes an ε by
  Canonne, Kamath, Steinke 2020 (arXiv:2004.00010), Proposition 12 (of version 4). (ε, δ) events count as
  pure, their δ taken from the total.

Assumes that the sequence of ε's does not depend on earlier outputs in a way that picks the bound afterwards.
Pure and zCDP totals do not need this: they hold for adaptively chosen ε too (Rogers et al. 2016; Feldman &
Zrnic 2021, arXiv:2008.11193).

How much Gaussian noise an (ε, δ) promise needs, and what a given amount delivers.

N(0, σ²) on a query of L2 sensitivity Δ is (ε, δ)-DP exactly when, with μ = Δ/σ,

    Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) ≤ δ            (Balle & Wang 2018, arXiv:1805.06530, Theorem 8)

for every ε ≥ 0; `analytic_gaussian_sigma` inverts this on the safe side. Assumes real-valued Gaussian noise.

Evaluated as written, the difference loses all digits for small μ and overflows for large ε. With a = ε/μ −
μ/2, b = a + μ and Mills' ratio R(x) = Φ(−x)/φ(x), the left side is φ(a)·(R(a) − R(b)); and as R' = xR − 1,
for small μ R(a) − R(b) is the integral of 1 − xR(x), whose integrand is positive and smooth. Also ∂δ/∂μ =
φ(a) and ∂δ/∂ε = −φ(a)R(b), which makes Newton's method cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, ndtr, ndtri

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput, needed
from flmarket.privacy.events import (
    ROUNDING_ALLOWANCE,
    ApproxDp,
    Event,
    ExponentialRelease,
    GaussianRelease,
    PureDp,
    Unprotected,
    ZCdp,
)

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


_ONE = 2.0**100
_CLEARLY = 1 - 1e-9
_ORDERS = 1.0 + np.geomspace(1e-3, 1e7, 400)


def pure_epsilon(event: Event) -> float:
    """ε of an event that is ε-DP; others have none."""
    if isinstance(event, PureDp) or isinstance(event, ExponentialRelease):  # noqa: SIM101  # a union is made anew each time
        return event.epsilon
    raise InvalidInput("event", event, "a pure ε-DP event, because the cap is a pure ε")


def zcdp_rho(event: Event) -> float:
    """ρ of an event that is ρ-zCDP: Gaussian 1/(2m²), pure ε²/2 (Bun & Steinke 2016, Prop. 1.6, 1.4)."""
    if isinstance(event, PureDp):
        return event.epsilon**2 / 2
    if isinstance(event, ZCdp):
        return event.rho
    if isinstance(event, GaussianRelease):
        return 0.5 / event.noise_multiplier**2
    if isinstance(event, ExponentialRelease):
        return event.epsilon**2 / 8
    raise InvalidInput("event", event, "a zCDP, Gaussian, pure or exponential event, because the cap is a ρ")


def units(amount: float) -> int:
    """The amount in multiples of 2⁻¹⁰⁰, rounded up."""
    return ceil(amount * _ONE)


def amount(count: int) -> float:
    """The nearest float to so many units."""
    return count / 2**100


def rdp_epsilon(curve: FloatArray, delta: float) -> float:
    """The ε at δ of a Rényi curve given on the standard orders (arXiv:2004.00010, Proposition 12)."""
    return max(0.0, float((curve + _slack(delta)).min()))


def _slack(delta: float) -> FloatArray:
    """What δ adds at every order when a Rényi curve becomes an ε."""
    return np.asarray(np.log1p(-1 / _ORDERS) - (np.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1))


def epsilon_of_rho(rho: ArrayLike, *, delta: float) -> FloatArray:
    """The ε at δ of ρ-zCDP, as an account counts it; 0 for ρ = 0."""
    some = checked_array("rho", rho)
    found = (some[..., None] * _ORDERS + _slack(delta)).min(axis=-1)
    return np.where(some > 0, np.maximum(found, 0.0), 0.0)


def rho_of_epsilon(epsilon: ArrayLike, *, delta: float) -> FloatArray:
    """The most ρ whose ε at δ is no more than this: the inverse of `epsilon_of_rho`, rounded down."""
    some = checked_array("epsilon", epsilon)
    found = ((some[..., None] - _slack(delta)) / _ORDERS).max(axis=-1)
    return np.where(some > 0, np.maximum(found, 0.0), 0.0) * (1 - ROUNDING_ALLOWANCE)


def _pure_curve(epsilon: FloatArray) -> FloatArray:
    """Rényi divergence of randomised response, (number of ε's, orders), never rounded below its value."""
    eps, order = epsilon[:, None], _ORDERS
    log_truth = -np.log1p(np.exp(-eps))
    exact = (log_truth + np.logaddexp((order - 1) * eps, -order * eps)) / (order - 1)
    rounding = 1e-15 * (1 + order * eps) / (order - 1)
    return np.minimum(np.minimum(exact + rounding, eps), eps**2 * order / 2)


_SUMS = ("rho", "precision", "delta", "unprotected")


@dataclass(frozen=True, slots=True)
class ApproxTotal:
    """What an (ε, δ) total needs: ε's with their counts, sums of ρ, 1/m² and δ, and how often nothing protected."""

    pure: Mapping[float, int] = field(default_factory=dict)
    exponential: Mapping[float, int] = field(default_factory=dict)
    rho: int = 0
    precision: int = 0
    delta: int = 0
    unprotected: int = 0

    def plus(self, event: Event, count: int) -> ApproxTotal:
        """The total after `count` more such releases; this value does not change."""
        if isinstance(event, PureDp):
            return replace(self, pure=_counted(self.pure, event.epsilon, count))
        if isinstance(event, ApproxDp):
            pure = _counted(self.pure, event.epsilon, count)
            return replace(self, pure=pure, delta=self.delta + count * units(event.delta))
        if isinstance(event, ZCdp):
            return replace(self, rho=self.rho + count * units(event.rho))
        if isinstance(event, GaussianRelease):
            return replace(self, precision=self.precision + count * units(event.noise_multiplier**-2))
        if isinstance(event, ExponentialRelease):
            return replace(self, exponential=_counted(self.exponential, event.epsilon, count))
        if isinstance(event, Unprotected):
            return replace(self, unprotected=self.unprotected + count)
        raise InvalidInput("event", event, "a known privacy event")

    def surely_within(self, epsilon: float, delta: float) -> bool:
        """Whether Gaussian releases alone come to clearly less than so much: one look at δ, where ε is a root."""
        others = self.pure or self.exponential or self.rho or self.delta or self.unprotected
        if others or not self.precision or epsilon <= 0:
            return False
        return bool(gaussian_delta(sigma=1 / sqrt(amount(self.precision)), epsilon=epsilon * _CLEARLY) <= delta)

    def epsilon(self, delta: float, *, allowance: float = 0.0) -> float:
        """The best valid ε at a total of `delta`; ∞ if the δ's use it up already, or something left without noise."""
        left = delta - amount(self.delta)
        if self.unprotected or left < -allowance * delta:
            return float("inf")
        # A remainder of rounding size is no budget to build a bound on.
        left = left if left > 1e-9 * delta else 0.0
        rho, precision = amount(self.rho), amount(self.precision)
        basic = amount(sum(units(eps) * n for part in (self.pure, self.exponential) for eps, n in part.items()))
        if left == 0.0:
            return basic if rho == precision == 0 else float("inf")
        smooth = rho + precision / 2
        if smooth == 0:
            best = basic
        elif rho == 0:
            best = basic + float(gaussian_epsilon(sigma=1 / sqrt(precision), delta=left))
        else:
            best = basic + rdp_epsilon(smooth * _ORDERS, left)
        if self.pure or self.exponential:
            best = min(best, rdp_epsilon(self._curve(smooth), left))
        return best

    def _curve(self, smooth: float) -> FloatArray:
        curve = smooth * _ORDERS
        if self.pure:
            eps, counts = (
                np.array(column, dtype=np.float64) for column in zip(*sorted(self.pure.items()), strict=True)
            )
            curve = curve + counts @ _pure_curve(eps)
        for eps_one, n in sorted(self.exponential.items()):
            curve = curve + n * np.minimum(eps_one, eps_one**2 / 8 * _ORDERS)
        return curve

    def state(self) -> dict[str, Any]:
        """JSON-ready."""
        counts = {"pure": self.pure, "exponential": self.exponential}
        listed: dict[str, Any] = {name: sorted([eps, n] for eps, n in each.items()) for name, each in counts.items()}
        return listed | {name: str(getattr(self, name)) for name in _SUMS}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ApproxTotal:
        """The inverse of `state`."""
        pure, exponential = (
            {PureDp(eps).epsilon: whole(n) for eps, n in state[name]} for name in ("pure", "exponential")
        )
        known = {"unprotected": 0, **state}  # states were written before there was such a thing
        return cls(pure, exponential, **{name: whole(known[name]) for name in _SUMS})


def whole(value: int | str) -> int:
    """A whole number of at least 0 from a stored state: a corrupt record must not give budget back."""
    if isinstance(value, float) or (number := int(value)) < 0:
        raise InvalidInput("state", value, "a whole number of at least 0")
    return number


def _counted(counts: Mapping[float, int], key: float, count: int) -> dict[float, int]:
    return {**counts, key: counts.get(key, 0) + count}


def numerical_epsilon(counts: Mapping[Event, int], *, delta: float, interval: float = 1e-4) -> float:
    """The ε at `delta` of all events together; `interval` is the grid of privacy losses (finer, tighter).

    Tighter totals by numerical composition (dp-accounting's privacy loss distributions), for reports.

    For a mixture of Gaussian and pure releases this is up to a tenth below the closed-form bound of `composition`. It
    takes milliseconds to seconds, needs an optional package and changes in the last digits between its versions; an
    account that may refuse a release must not depend on that, so accounts do not use it. Pessimistic: an upper bound.

    Events are given in the local (replace-one) sense of `events`, so a Gaussian's noise multiplier already contains the
    factor 2 of the sensitivity 2·clip. This is why no neighbouring relation is passed on: dp-accounting's
    `RdpAccountant(REPLACE_ONE)` returns the add/remove ε for plain Gaussian events.
    """
    with needed("secure", "dp-accounting"):
        from dp_accounting.pld import common
        from dp_accounting.pld import privacy_loss_distribution as pld
    if not counts:
        return 0.0
    if not 0 < delta < 1:
        raise InvalidInput("delta", delta, "a number between 0 and 1")
    total: Any = None
    for event, count in counts.items():
        if isinstance(event, GaussianRelease):
            one = pld.from_gaussian_mechanism(event.noise_multiplier, value_discretization_interval=interval)
        elif isinstance(event, PureDp | ExponentialRelease | ApproxDp):
            parameters = common.DifferentialPrivacyParameters(event.epsilon, getattr(event, "delta", 0.0))
            one = pld.from_privacy_parameters(parameters, value_discretization_interval=interval)
        else:
            raise InvalidInput("event", event, "a Gaussian, pure, exponential or approximate event (zCDP has no PLD)")
        one = one.self_compose(count)
        total = one if total is None else total.compose(one)
    return float(total.get_epsilon_for_delta(delta))
