"""What a sequence of releases adds up to, in each of the three currencies.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput, MissingDependency
from flmarket.privacy.calibration import gaussian_delta, gaussian_epsilon
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
        return {
            "pure": sorted([eps, n] for eps, n in self.pure.items()),
            "exponential": sorted([eps, n] for eps, n in self.exponential.items()),
            "rho": str(self.rho),
            "precision": str(self.precision),
            "delta": str(self.delta),
            "unprotected": str(self.unprotected),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ApproxTotal:
        """The inverse of `state`."""
        return cls(
            pure={PureDp(eps).epsilon: whole(n) for eps, n in state["pure"]},
            exponential={PureDp(eps).epsilon: whole(n) for eps, n in state["exponential"]},
            rho=whole(state["rho"]),
            precision=whole(state["precision"]),
            delta=whole(state["delta"]),
            unprotected=whole(state.get("unprotected", 0)),  # states written before there was such a thing
        )


def whole(value: int | str) -> int:
    """A whole number of at least 0 from a stored state: a corrupt record must not give budget back."""
    number = int(value)
    if isinstance(value, float) or number < 0:
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
    try:
        from dp_accounting.pld import common
        from dp_accounting.pld import privacy_loss_distribution as pld
    except ImportError:
        raise MissingDependency("dp-accounting", "secure") from None
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
