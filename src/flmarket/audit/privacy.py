"""Does a perturbation keep its privacy promise? An empirical lower bound on ε, and a test of the noise law.

The lower bound (`distinguish`) holds whatever the mechanism is inside, with the stated probability. The law test
(`noise_law`) compares with what the perturbation says of itself, and so also finds too little noise where ε is too
large for any experiment to show. Together they catch half the noise, a forgotten clip, an L2 clip under Laplace noise,
and a reused seed. What they cannot see is a backdoor that opens for one special input. The low bits of simulated
releases, which `SecureNoise` does not have, are looked at only when asked (`low_bits`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite, log, sqrt
from typing import Any

import numpy as np

from flmarket.audit.distinguish import distinguish, measurable_epsilon
from flmarket.audit.noise_law import NoiseLaw, check_noise_law
from flmarket.errors import InvalidInput
from flmarket.privacy import (
    ApproxDp,
    Event,
    ExponentialRelease,
    GaussianRelease,
    NoiseSource,
    Perturbation,
    PureDp,
    ZCdp,
    gaussian_epsilon,
)

__all__ = ["PrivacyAudit", "audit_privacy"]

_DELTA = 1e-5  # at which a promise without a δ of its own is read
MAX_ENTRIES = 50_000_000


@dataclass(frozen=True)
class PrivacyAudit:
    """What one release was seen to give away, per round, against what it promises."""

    perturbation: str
    epsilon: float  # asked for
    dimension: int
    trials: int
    failure_probability: float
    epsilon_claimed: float  # of the promise, at `delta`
    delta: float
    epsilon_lower: float
    epsilon_measurable: float  # no lower bound above this is possible with so many trials
    mu_claimed: float | None  # for Gaussian promises: sensitivity / σ
    mu_lower: float | None
    pair: str
    statistic: str
    law: NoiseLaw

    @property
    def findings(self) -> tuple[str, ...]:
        """What contradicts the promise, one sentence each."""
        found = []
        if self.epsilon_lower > self.epsilon_claimed:
            found.append(f"gives away ε ≥ {self.epsilon_lower:.3g} where {self.epsilon_claimed:.3g} is promised")
        if self.mu_claimed is not None and self.mu_lower is not None and self.mu_lower > self.mu_claimed:
            found.append(f"gives away μ ≥ {self.mu_lower:.3g} where {self.mu_claimed:.3g} is promised (Gaussian DP)")
        return (*found, *self.law.findings)

    @property
    def holds(self) -> bool:
        """Whether nothing was found against the promise."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"findings": list(self.findings), "holds": self.holds}


def audit_privacy(
    perturbation: Perturbation,
    epsilon: float,
    dimension: int = 20,
    trials: int = 20_000,
    failure_probability: float = 0.01,
    rng: np.random.Generator | NoiseSource | None = None,
    *,
    low_bits: bool = False,
) -> PrivacyAudit:
    """Release crafted inputs `trials` times each and look; a sound mechanism fails with that probability at most."""
    if not (isfinite(epsilon) and epsilon > 0):
        raise InvalidInput("epsilon", epsilon, "a finite number greater than 0")
    if not 0 < failure_probability < 0.5:
        raise InvalidInput("failure_probability", failure_probability, "a number between 0 and 0.5")
    if dimension < 1 or trials < 100 or trials * dimension > MAX_ENTRIES:
        raise InvalidInput("trials", trials, f"at least 100, and trials × dimension at most {MAX_ENTRIES:,}")
    source = np.random.default_rng(0) if rng is None else rng
    claimed, delta, mu = _promise(perturbation.guarantee(epsilon), getattr(perturbation, "delta", _DELTA))
    share = failure_probability / 2
    seen = distinguish(perturbation, epsilon, dimension, trials, delta, share, source, low_bits=low_bits)
    return PrivacyAudit(
        perturbation.name,
        float(epsilon),
        dimension,
        trials,
        failure_probability,
        claimed,
        delta,
        seen.epsilon_lower,
        measurable_epsilon(trials, share / 4),
        mu,
        None if mu is None else seen.mu_lower,
        seen.pair,
        seen.statistic,
        check_noise_law(perturbation, epsilon, dimension, trials, share, source),
    )


def _promise(event: Event, delta: float) -> tuple[float, float, float | None]:
    """A promise as ε at some δ, and as μ if it is Gaussian."""
    match event:
        case PureDp(epsilon) | ExponentialRelease(epsilon):
            return epsilon, 0.0, None
        case ApproxDp(epsilon, own):
            return epsilon, own, None
        case GaussianRelease(multiplier):
            return float(gaussian_epsilon(sigma=multiplier, delta=delta)), delta, 1.0 / multiplier
        case ZCdp(rho):  # Bun & Steinke 2016, Proposition 1.3
            return rho + 2.0 * sqrt(rho * log(1.0 / delta)), delta, None
    raise InvalidInput("guarantee", event, "a promise that flmarket.privacy knows")
