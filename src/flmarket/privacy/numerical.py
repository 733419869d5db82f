"""Tighter totals by numerical composition (dp-accounting's privacy loss distributions), for reports.

For a mixture of Gaussian and pure releases this is up to a tenth below the closed-form bound of
`composition`. It takes milliseconds to seconds, needs an optional package and changes in the last digits
between its versions; an account that may refuse a release must not depend on that, so accounts do not use it.
Pessimistic: an upper bound.

Events are given in the local (replace-one) sense of `events`, so a Gaussian's noise multiplier already
contains the factor 2 of the sensitivity 2·clip. This is why no neighbouring relation is passed on:
dp-accounting's `RdpAccountant(REPLACE_ONE)` returns the add/remove ε for plain Gaussian events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flmarket.errors import InvalidInput, MissingDependency
from flmarket.privacy.events import ApproxDp, Event, ExponentialRelease, GaussianRelease, PureDp

__all__ = ["numerical_epsilon"]


def numerical_epsilon(counts: Mapping[Event, int], *, delta: float, interval: float = 1e-4) -> float:
    """The ε at `delta` of all events together; `interval` is the grid of privacy losses (finer, tighter)."""
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
