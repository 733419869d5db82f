"""Does a perturbation keep its privacy promise? An empirical lower bound on ε, and a test of the noise law.

The lower bound (`distinguish`) holds whatever the mechanism is inside, with the stated probability. The law test
(`check_noise_law`) compares with what the perturbation says of itself, and so also finds too little noise where ε is
too large for any experiment to show. Together they catch half the noise, a forgotten clip, an L2 clip under Laplace
noise, and a reused seed. What they cannot see is a backdoor that opens for one special input. The low bits of simulated
releases, which `SecureNoise` does not have, are looked at only when asked (`low_bits`).

A mechanism that is no function of one vector (training with every record's gradient clipped) is audited from what it
released on two neighbouring data sets (`audit_releases`); which neighbours are worst is then the caller's to know.

What a choice among groups gives away, exactly and from samples, on inputs made to give away most.

A choice has finitely many outcomes, so for two given inputs the loss is a finite maximum, the largest |ln P_u/P_v| over
single outcomes. From samples it is bounded from below: a set of outcomes is picked on one half of the draws, and its
two probabilities are bounded on the other half by Clopper–Pearson intervals.

Both look at one pair of inputs. They can refute a promise, never prove one; the pairs here are built so that a promise
which counts on too small a sensitivity fails.

The model that scores is one number θ that is right about a record x when |θ − x| ≤ ½. That is enough to move any
client's leave-one-out groups from all right to all wrong by one upload.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import isfinite, log, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri

from flmarket.aggregation.robust import ExponentialChoice
from flmarket.bids import FloatArray
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
    clip_l1,
    clip_l2,
    gaussian_epsilon,
)

_THRESHOLDS = 80
Rng = np.random.Generator | NoiseSource


Told = tuple[str, str, FloatArray, FloatArray, float]  # pair of inputs, statistic, its values under either, and ±1


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
    rng: Rng,
    *,
    low_bits: bool = False,
) -> tuple[float, float, str, str]:
    """Lower bounds of ε and μ, each wrong with at most half of `failure_probability`; the pair and the statistic.

    A lower bound on ε that cannot be argued with: tell two inputs apart better than ε allows.

    If a mechanism is (ε, δ)-DP then for any event S and any two inputs, P_u(S) ≤ e^ε·P_v(S) + δ (the hockey-stick
    divergence at e^ε is at most δ), so ε ≥ ln((P_u(S) − δ)/P_v(S)). The event is a threshold on a number computed from
    the release. Which pair of inputs, number and threshold to use is chosen on one half of the releases; the
    probabilities are then bounded on the other half by Clopper–Pearson intervals, so the choice costs nothing (as in
    Jagielski, Ullman, Oprea 2020, and Nasr et al. 2021). For a Gaussian promise (μ-GDP; Dong, Roth, Su 2019) the same
    event also bounds μ ≥ Φ⁻¹(P_u) − Φ⁻¹(P_v), which is far sharper.

    In N releases no more than about ln(N/12) can be shown, whatever the mechanism gives away.

    Releases are rounded to 20 binary digits of the clip first, so that what is judged is the mechanism as written, on
    real numbers. With `low_bits` they are not: the test then finds by itself that `value + float_noise` tells its value
    by the last digits (Mironov 2012). In one dimension Laplace noise from NumPy that promises ε = 1 is seen to give
    away 2.5.
    """
    digit = 2.0 ** (np.floor(np.log2(perturbation.clip)) - 20)

    def told() -> Iterator[Told]:
        for pair, (u, v) in crafted_pairs(perturbation.clip, dimension).items():
            at_u, at_v = (perturbation.privatize(np.broadcast_to(x, (trials, dimension)), epsilon, rng) for x in (u, v))
            if not low_bits:
                at_u, at_v = (np.round(seen / digit) * digit for seen in (at_u, at_v))
            for statistic, (su, sv) in _statistics(perturbation, u, v, at_u, at_v, trials // 2).items():
                yield pair, statistic, su, sv, 1.0
                # the event "s ≤ t" under v is the same test with the inputs exchanged
                yield pair, statistic, -sv, -su, -1.0

    found = _told_apart(told(), delta, failure_probability / 4)  # two bounds of two proportions each
    (epsilon_lower, pair, statistic), (mu_lower, *_) = found["epsilon"], found["mu"]
    return epsilon_lower, mu_lower, pair, statistic


def _told_apart(told: Iterable[Told], delta: float, alpha: float) -> dict[str, tuple[float, str, str]]:
    """For ε and μ the best bound by any event "s ≥ t", with its names: chosen on one half, measured on the other."""
    chosen: dict[str, tuple[float, Told]] = {}
    for pair, statistic, one, two, sign in told:
        half = len(one) // 2
        seen = sign * np.concatenate([one[:half], two[:half]])
        for t in (sign * np.quantile(seen, np.linspace(0.002, 0.998, _THRESHOLDS))).tolist():
            hits, misses = int((one[:half] >= t).sum()), int((two[:half] >= t).sum())
            for bound, score in _bounds(hits, misses, half, delta, alpha).items():
                if bound not in chosen or score > chosen[bound][0]:
                    chosen[bound] = score, (pair, statistic, one[half:], two[half:], t)
    found = {}
    for bound, (_, (pair, statistic, one, two, t)) in chosen.items():
        rates = _bounds(int((one >= t).sum()), int((two >= t).sum()), len(one), delta, alpha)
        found[bound] = max(rates[bound], 0.0), pair, statistic
    return found


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


_ROUNDING = 1e-6


@dataclass(frozen=True)
class NoiseLaw:
    """Measured against stated; `allowed_z` is how many standard errors chance explains."""

    energy_stated: float
    energy_measured: float
    energy_z: float  # negative: less noise than stated
    mean_z: float  # of the worst coordinate of the worst input
    mean_input: str
    repeated: float  # share of releases whose noise is the same as that of the next one or of the next call
    correlation_z: float
    allowed_z: float

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong, one sentence each."""
        found = []
        ratio = self.energy_measured / self.energy_stated
        if self.energy_z < -self.allowed_z:
            found.append(f"less noise than stated: {ratio:.3g} of the stated energy")
        if self.energy_z > self.allowed_z:
            found.append(f"more noise than stated: {ratio:.3g} times the stated energy")
        if self.mean_z > self.allowed_z:
            found.append(f"the mean is not the clipped input ({self.mean_input})")
        if self.repeated > 0 or self.correlation_z > self.allowed_z:
            found.append("noise is reused: releases are not independent")
        return tuple(found)


def check_noise_law(
    perturbation: Perturbation, epsilon: float, dimension: int, trials: int, failure_probability: float, rng: Rng
) -> NoiseLaw:
    """All comparisons together raise a false alarm with about `failure_probability`.

    Does a perturbation release what it says: the clipped input on average, with the stated noise energy, always afresh?

    Inputs at the clip and ten times beyond it. Means and energies are compared with their closed forms by normal
    approximation, so a few thousand releases are needed; laws with very heavy tails would need more.
    """
    clip = clip_l1 if perturbation.norm == "l1" else clip_l2
    spike, dense = np.zeros(dimension), np.ones(dimension)
    spike[0] = 1.0
    order = 1 if perturbation.norm == "l1" else 2
    at_clip = perturbation.clip / float(np.linalg.norm(dense, ord=order)) * dense
    inputs = {
        "one coordinate at the clip": perturbation.clip * spike,
        "all coordinates, norm at the clip": at_clip,
        "one coordinate, ten times the clip": 10 * perturbation.clip * spike,
        "all coordinates, ten times the clip": 10 * perturbation.clip * dense,
    }
    # per input a mean of `dimension` coordinates, energies of two inputs, two correlations
    allowed = float(-ndtri(failure_probability / (2 * (len(inputs) * dimension + 4))))
    # at inputs of norm `clip`; `noise_energy` is for the worst input where the energy depends on it
    at_norm = getattr(perturbation, "energy", None)
    stated = float(
        perturbation.noise_energy(epsilon, dimension)
        if at_norm is None
        else at_norm(epsilon, dimension, norm=perturbation.clip)
    )
    mean_z, mean_input, energies = 0.0, "", []
    for name, x in inputs.items():
        centre = clip(x, perturbation.clip)
        noise = perturbation.privatize(np.broadcast_to(x, (trials, dimension)), epsilon, rng) - centre
        error = noise.std(axis=0, ddof=1) / np.sqrt(trials) + _ROUNDING * perturbation.clip
        z = float((np.abs(noise.mean(axis=0)) / error).max())
        if z > mean_z:
            mean_z, mean_input = z, name
        if name.endswith("at the clip"):
            energies.append(np.square(noise).sum(axis=-1))
    errors = (energy.std(ddof=1) / np.sqrt(len(energy)) + _ROUNDING * stated for energy in energies)
    scores = [float((energy.mean() - stated) / error) for energy, error in zip(energies, errors, strict=True)]
    worst = int(np.argmax(np.abs(scores)))
    repeated, correlation = _independence(perturbation, epsilon, at_clip, trials, rng)
    return NoiseLaw(
        stated, float(energies[worst].mean()), scores[worst], mean_z, mean_input, repeated, correlation, allowed
    )


def _independence(
    perturbation: Perturbation, epsilon: float, x: FloatArray, trials: int, rng: Rng
) -> tuple[float, float]:
    """Two calls in a row, and neighbouring rows of one call: equal noise, or noise that goes together?"""
    batch = np.broadcast_to(x, (trials, len(x)))
    first, second = (perturbation.privatize(batch, epsilon, rng) - x for _ in range(2))
    scale = float(np.sqrt(np.mean(np.square(first)))) or 1.0
    repeated, z = 0.0, 0.0
    for one, two in ((first, second), (first[:-1], first[1:])):
        # a mechanism with few possible releases repeats some by chance: only the whole vector counts, and only often
        same = float((np.abs(one - two).max(axis=-1) <= 1e-12 * scale).mean())
        repeated = max(repeated, same if same > 0.5 else 0.0)
        product = (one * two).sum(axis=-1)
        error = float(product.std(ddof=1)) / len(product) ** 0.5
        z = max(z, abs(float(product.mean())) / error if error > 0 else 0.0)
    return repeated, z


_DELTA = 1e-5  # at which a promise without a δ of its own is read
MAX_ENTRIES = 50_000_000


@dataclass(frozen=True, kw_only=True)
class ReleasesAudit:
    """What releases on two neighbours gave away, against the promise of one; bounds fail with the stated chance."""

    trials: int  # on each neighbour; half of them chose where to look
    failure_probability: float
    epsilon_claimed: float  # of the promise, at `delta`
    delta: float
    epsilon_lower: float
    mu_claimed: float | None  # for Gaussian promises: sensitivity / σ
    mu_lower: float | None

    @property
    def findings(self) -> tuple[str, ...]:
        """What contradicts the promise, one sentence each."""
        found = []
        if self.epsilon_lower > self.epsilon_claimed:
            found.append(f"gives away ε ≥ {self.epsilon_lower:.3g} where {self.epsilon_claimed:.3g} is promised")
        if self.mu_lower is not None and self.mu_claimed is not None and self.mu_lower > self.mu_claimed:
            found.append(f"gives away μ ≥ {self.mu_lower:.3g} where {self.mu_claimed:.3g} is promised (Gaussian DP)")
        return tuple(found)

    @property
    def holds(self) -> bool:
        """Whether nothing was found against the promise."""
        return not self.findings


@dataclass(frozen=True, kw_only=True)
class PrivacyAudit(ReleasesAudit):
    """What one release was seen to give away, per round, against what it promises."""

    perturbation: str
    epsilon: float  # asked for
    dimension: int
    epsilon_measurable: float  # no lower bound above this is possible with so many trials
    pair: str
    statistic: str
    law: NoiseLaw

    @property
    def findings(self) -> tuple[str, ...]:
        """What contradicts the promise, one sentence each."""
        return (*super().findings, *self.law.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"findings": list(self.findings), "holds": self.holds}


def audit_privacy(
    perturbation: Perturbation,
    epsilon: float,
    dimension: int = 20,
    trials: int = 20_000,
    failure_probability: float = 0.01,
    rng: Rng | None = None,
    *,
    low_bits: bool = False,
) -> PrivacyAudit:
    """Release crafted inputs `trials` times each and look; a sound mechanism fails with that probability at most."""
    if not (isfinite(epsilon) and epsilon > 0):
        raise InvalidInput("epsilon", epsilon, "a finite number greater than 0")
    _check_failure(failure_probability)
    if dimension < 1 or trials < 100 or trials * dimension > MAX_ENTRIES:
        raise InvalidInput("trials", trials, f"at least 100, and trials × dimension at most {MAX_ENTRIES:,}")
    source = np.random.default_rng(0) if rng is None else rng
    claimed, delta, mu = _promise(perturbation.guarantee(epsilon), getattr(perturbation, "delta", _DELTA))
    share = failure_probability / 2
    epsilon_lower, mu_lower, pair, statistic = distinguish(
        perturbation, epsilon, dimension, trials, delta, share, source, low_bits=low_bits
    )
    return PrivacyAudit(
        trials=trials,
        failure_probability=failure_probability,
        epsilon_claimed=claimed,
        delta=delta,
        epsilon_lower=epsilon_lower,
        mu_claimed=mu,
        mu_lower=None if mu is None else mu_lower,
        perturbation=perturbation.name,
        epsilon=float(epsilon),
        dimension=dimension,
        epsilon_measurable=measurable_epsilon(trials, share / 4),
        pair=pair,
        statistic=statistic,
        law=check_noise_law(perturbation, epsilon, dimension, trials, share, source),
    )


def _check_failure(probability: float) -> None:
    if not 0 < probability < 0.5:
        raise InvalidInput("failure_probability", probability, "a number between 0 and 0.5")


def audit_releases(
    first: ArrayLike, second: ArrayLike, promised: Event, *, delta: float = _DELTA, failure_probability: float = 0.01
) -> ReleasesAudit:
    """Judge independent releases (trials, p) on either of two neighbouring inputs, told apart along their difference.

    The direction and the threshold are chosen on one half of the releases and judged on the other.
    """
    u, v = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if u.ndim != 2 or u.shape != v.shape or len(u) < 100:
        raise InvalidInput("releases", (u.shape, v.shape), "as many on either neighbour, at least 100, one a row")
    _check_failure(failure_probability)
    half = len(u) // 2
    direction = u[:half].mean(axis=0) - v[:half].mean(axis=0)
    claimed, at, mu = _promise(promised, delta)
    alpha = failure_probability / 4  # two bounds, two rates each
    found = _told_apart([("the two given", "projection", u @ direction, v @ direction, 1.0)], at, alpha)
    return ReleasesAudit(
        trials=len(u),
        failure_probability=failure_probability,
        epsilon_claimed=claimed,
        delta=at,
        epsilon_lower=found["epsilon"][0],
        mu_claimed=mu,
        mu_lower=found["mu"][0],
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


Changed = Literal["record", "client"]


@dataclass(frozen=True)
class ChoiceAudit:
    """The loss of one choice when one validation record or one client's upload changes, per round."""

    changed: Changed
    epsilon_asked: float
    epsilon_promised: float  # by the rule's own `guarantee`
    epsilon_exact: float  # on the crafted pair
    epsilon_lower: float  # from samples of it

    @property
    def as_asked(self) -> bool:
        """Whether nothing was found against the ε asked for."""
        return max(self.epsilon_exact, self.epsilon_lower) <= self.epsilon_asked * (1 + 1e-9)

    @property
    def holds(self) -> bool:
        """Whether nothing was found against what the rule itself promises."""
        return max(self.epsilon_exact, self.epsilon_lower) <= self.epsilon_promised * (1 + 1e-9)


def audit_choice(
    rule: ExponentialChoice,
    changed: Changed,
    clients: int,
    *,
    trials: int = 100_000,
    failure_probability: float = 0.01,
    rng: np.random.Generator,
) -> ChoiceAudit:
    """Look at the worst pair of inputs known; a sound rule is accused with `failure_probability` at most."""
    u, v = crafted_scores(changed, clients, rule.validation)
    exact = exact_epsilon(rule.log_probabilities(u, clients), rule.log_probabilities(v, clients))
    draws = [rule.draw(np.broadcast_to(s, (trials, s.size)), clients, rng) for s in (u, v)]
    lower = sampled_epsilon(draws[0], draws[1], failure_probability=failure_probability)
    return ChoiceAudit(changed, rule.epsilon, rule.guarantee(changed, clients).epsilon, exact, lower)


def crafted_scores(changed: Changed, clients: int, validation: int) -> tuple[FloatArray, FloatArray]:
    """Scores of the leave-one-out groups before and after the change, computed from actual uploads and records."""
    if clients < 4 or validation < 2:
        raise InvalidInput("clients, validation", (clients, validation), "at least 4 clients and 2 records")
    # client 1 stands apart by so much that the groups with and without her are a whole unit apart
    uploads = np.zeros(clients)
    uploads[1] = clients - 1.0
    records = np.zeros(validation)
    if changed == "client":  # client 0 moves everybody's groups by a unit: from right to wrong, or wrong to right
        moved = uploads.copy()
        moved[0] = -uploads[1]
        return _accuracies(uploads, records), _accuracies(moved, records)
    records[: validation // 2] = 1.0  # one record goes over from those that fit the many to those that fit group 1
    replaced = records.copy()
    replaced[0] = 0.0
    return _accuracies(uploads, records), _accuracies(uploads, replaced)


def _accuracies(uploads: FloatArray, records: FloatArray) -> FloatArray:
    theta = np.array([np.delete(uploads, i).mean() for i in range(uploads.size)])
    return np.asarray((np.abs(theta[:, None] - records) <= 0.5).mean(axis=1))


def exact_epsilon(log_p: FloatArray, log_q: FloatArray) -> float:
    """The least ε for which two laws over the same outcomes, given by log probabilities, are e^ε-close."""
    return float(np.abs(log_p - log_q).max())


def sampled_epsilon(u: NDArray[np.intp], v: NDArray[np.intp], *, failure_probability: float) -> float:
    """A lower bound on ε from draws under two inputs, wrong with at most `failure_probability`; 0 if none is found."""
    outcomes, half = int(max(u.max(), v.max())) + 1, len(u) // 2
    best, event = 0.0, None
    for one, two, flipped in ((u, v, False), (v, u, True)):
        seen = [np.bincount(draws[:half], minlength=outcomes) + 0.5 for draws in (one, two)]
        order = np.argsort(-(seen[0] / seen[1]), kind="stable")
        for size in range(1, outcomes):  # likeliest ratios first: the Neyman–Pearson sets
            guess = _bound(one[:half], two[:half], order[:size], failure_probability)
            if guess > best:
                best, event = guess, (order[:size], flipped)
    if event is None:
        return 0.0
    chosen, flipped = event
    one, two = (v, u) if flipped else (u, v)
    return max(0.0, _bound(one[half:], two[half:], chosen, failure_probability))


def _bound(one: NDArray[np.intp], two: NDArray[np.intp], event: NDArray[np.intp], failure_probability: float) -> float:
    hits, misses = int(np.isin(one, event).sum()), int(np.isin(two, event).sum())
    return _bounds(hits, misses, len(one), 0.0, failure_probability / 2)["epsilon"]
