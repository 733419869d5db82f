"""An owner's lifetime privacy account: how much she has given away, and a refusal before it is too much.

The cap is in one of three currencies, or there is none, and what an event costs follows from it:

- `PureDp(ε)`: ε's add up; accepts pure and exponential events only.
- `ZCdp(ρ)`: ρ's add up; also accepts Gaussian (1/(2m²)), pure (ε²/2) and exponential (ε²/8) events.
- `ApproxDp(ε, δ)`: accepts everything; the best valid bound on ε at that δ (see `composition`). Not additive,
  so `remaining` is what is left of ε now, not what one more event may cost: ask `would_exceed` or
  `affordable`.
- `Uncapped()`: accepts everything, releases without noise too, and still tells the total.
- `RecordLevel(one of the first three)`: the same for any one record; takes losses of records (`RecordLevel`) and no
  others, as the other accounts take none of those.

A release without noise (`Unprotected`) has no bound and passes every cap but the last.

A total may pass its cap by the relative `ROUNDING_ALLOWANCE` (1e-12) and no more; the mechanisms of this
package deliver that much less than they are charged for, so what an owner really loses stays within her cap.

The account counts what it is told. It must live beside the data, be asked before a release, and be stored
durably before the release leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import floor, inf, sqrt
from typing import Any

from scipy.optimize import brentq

from flmarket.errors import InvalidInput, PrivacyBudgetExhausted
from flmarket.privacy.composition import ApproxTotal, amount, pure_epsilon, units, whole, zcdp_rho
from flmarket.privacy.events import (
    ROUNDING_ALLOWANCE,
    ApproxDp,
    Cap,
    Event,
    PureDp,
    RecordLevel,
    Uncapped,
    Unprotected,
    ZCdp,
    cap_from_dict,
    checked_whole,
    event_to_dict,
    unit_of,
)

_VERSION = 1
_LEAST, _MOST = 1e-9, 1e6  # what `affordable` looks for lies between
_CLOSE = 1e-9  # and is found to within


class PrivacyAccount:
    """One owner's account. `compose` either records a release or raises and changes nothing."""

    __slots__ = ("_additive_cost", "_cap", "_inner", "_limit", "_limit_units", "_releases", "_total")

    def __init__(self, cap: Cap) -> None:
        # Under an additive cap the total is one exact whole number (see `composition.units`).
        self._total: int | ApproxTotal = 0
        inner = cap.loss if isinstance(cap, RecordLevel) else cap
        self._additive_cost: Callable[[Event], float] | None = None
        if isinstance(inner, PureDp):
            self._additive_cost, self._limit = pure_epsilon, inner.epsilon
        elif isinstance(inner, ZCdp):
            self._additive_cost, self._limit = zcdp_rho, inner.rho
        elif isinstance(inner, ApproxDp):
            self._total, self._limit = ApproxTotal(), inner.epsilon
        elif isinstance(inner, Uncapped):
            self._total, self._limit = ApproxTotal(), inf
        else:
            accepted = "PureDp(epsilon), ZCdp(rho), ApproxDp(epsilon, delta) or Uncapped()"
            raise InvalidInput("cap", cap, f"{accepted}, or RecordLevel of the first three")
        self._cap: Cap = cap
        self._inner = inner
        self._limit_units = 0 if self._limit == inf else floor(self._limit * (1 + ROUNDING_ALLOWANCE) * 2.0**100)
        self._releases = 0

    def __copy__(self) -> PrivacyAccount:
        made = object.__new__(PrivacyAccount)
        made._cap, made._inner, made._additive_cost = self._cap, self._inner, self._additive_cost
        made._limit, made._limit_units = self._limit, self._limit_units
        made._releases, made._total = self._releases, self._total
        return made

    @property
    def cap(self) -> Cap:
        """The most that may ever be spent."""
        return self._cap

    @property
    def limit(self) -> float:
        """The number in the cap: ε or ρ, ∞ without one."""
        return self._limit

    @property
    def releases(self) -> int:
        """How many releases are recorded."""
        return self._releases

    @property
    def spent(self) -> float:
        """The total so far in the cap's currency: ε, ρ, or ε at the cap's δ (∞ after a release without noise)."""
        return self._cost(self._total)

    @property
    def rho(self) -> float:
        """The total as ρ-zCDP, where all that was released is that; ∞ where something else was."""
        total = self._total
        if isinstance(total, ApproxTotal):
            return amount(total.rho) if total == ApproxTotal(rho=total.rho) else inf
        return amount(total) if isinstance(self._inner, ZCdp) else inf

    @property
    def remaining(self) -> float:
        """The cap minus what is spent, never below 0."""
        return self._limit if self._limit == inf else max(0.0, self._limit - self.spent)

    def would_exceed(self, event: Event, count: int = 1) -> bool:
        """Whether `count` such releases would go past the cap. Records nothing."""
        return self._unbounded(event) or not self._fits(self._after(event, count))

    def compose(self, event: Event, count: int = 1) -> None:
        """Record `count` such releases, or raise `PrivacyBudgetExhausted` and record none."""
        if self._unbounded(event):
            raise PrivacyBudgetExhausted(f"a release without noise has no bound: it fits under no cap, not {self._cap}")
        total = self._after(event, count)
        if not self._fits(total):
            raise PrivacyBudgetExhausted(
                f"{count} × {event} would bring the lifetime total to {self._cost(total):.6g}, past the cap "
                f"{self._cap} ({self.remaining:.6g} left after {self._releases} releases)"
            )
        self._total = total
        self._releases += count

    def take_back(self, event: ZCdp) -> None:
        """Undo one `compose` of this loss, where what was to be released never can be seen."""
        lost, total = units(event.rho), self._total
        if isinstance(total, ApproxTotal):
            left: int | ApproxTotal = replace(total, rho=total.rho - lost)
            enough = total.rho >= lost
        else:
            left, enough = total - lost, isinstance(self._inner, ZCdp) and total >= lost
        if not enough or not self._releases:
            raise InvalidInput("event", event, "a loss that was counted before")
        self._total, self._releases = left, self._releases - 1

    def affordable(
        self, releases: int = 1, *, guarantee: Callable[[float], Event] = PureDp, least: float = 0.0, most: float = inf
    ) -> float:
        """The largest ε up to `most` of which `releases` equal further releases still fit; 0 if not even `least` does.

        By default for pure releases. Pass a perturbation's `guarantee` for its own ε; costs must grow with ε.
        """
        checked_whole("releases", releases, 1)
        if self._limit == inf:
            return most
        if guarantee is PureDp and self._inner is self._cap and not isinstance(self._total, ApproxTotal):
            share = self.remaining / releases
            found = min(most, share if isinstance(self._inner, PureDp) else sqrt(2 * share))
            return found if found >= least else 0.0
        low = max(least, _LEAST)
        if most < inf and not self.would_exceed(guarantee(most), releases):
            return most
        if most <= low or self.would_exceed(guarantee(low), releases):
            return 0.0
        high = most if most < inf else 2 * max(low, 0.5)
        while most == inf and high < _MOST and not self.would_exceed(guarantee(high), releases):
            low, high = high, 2 * high
        if high >= _MOST and most == inf:
            return low

        def excess(epsilon: float) -> float:
            return min(_MOST, self._cost(self._after(guarantee(epsilon), releases)) - self._limit)

        found = float(brentq(excess, low, high, xtol=_LEAST * _LEAST, rtol=_CLOSE / 4)) if excess(low) < 0 else low
        while found > low and self.would_exceed(guarantee(found), releases):
            found *= 1 - _CLOSE
        return max(found, low)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to restore the account, JSON-ready."""
        return {
            "version": _VERSION,
            "cap": event_to_dict(self._cap),
            "releases": self._releases,
            # Whole numbers of 2⁻¹⁰⁰ travel as text, because JSON readers differ on large ones.
            "total": self._total.state() if isinstance(self._total, ApproxTotal) else str(self._total),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> PrivacyAccount:
        """The account that `state_dict` described; anything malformed is refused."""
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise InvalidInput("state", state, f"a privacy account of version {_VERSION}")
        try:
            account = cls(cap_from_dict(state["cap"]))
            total = state["total"]
            additive = isinstance(account._total, int)
            account._total = whole(total) if additive else ApproxTotal.from_state(total)
            account._releases = whole(state["releases"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidInput("state", state, f"a complete privacy account ({error})") from None
        return account

    def _unbounded(self, event: Event) -> bool:
        return isinstance(event, Unprotected) and self._limit < inf

    def _after(self, event: Event, count: int) -> int | ApproxTotal:
        checked_whole("count", count, 1)
        event, total = self._own(event), self._total
        if isinstance(total, ApproxTotal):
            return total.plus(event, count)
        assert self._additive_cost is not None
        return total + count * units(self._additive_cost(event))

    def _own(self, event: Event) -> Event:
        """An event of this account's unit, as it is counted; one of the other unit is refused, never added."""
        if unit_of(event) == unit_of(self._cap):
            return event.loss if isinstance(event, RecordLevel) else event
        accepted = "a loss of one record" if isinstance(self._cap, RecordLevel) else "a loss of the whole update"
        raise InvalidInput("event", event, f"{accepted}: this account counts those, and no sum of both means anything")

    def _cost(self, total: int | ApproxTotal) -> float:
        if isinstance(total, ApproxTotal):
            assert isinstance(self._inner, ApproxDp | Uncapped)
            return total.epsilon(self._inner.delta, allowance=ROUNDING_ALLOWANCE)
        return amount(total)

    def _fits(self, total: int | ApproxTotal) -> bool:
        if isinstance(total, ApproxTotal):
            if self._limit == inf or (
                isinstance(self._inner, ApproxDp) and total.surely_within(self._limit, self._inner.delta)
            ):
                return True
            return self._cost(total) <= self._limit * (1 + ROUNDING_ALLOWANCE)
        return total <= self._limit_units
