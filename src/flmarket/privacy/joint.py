"""M3, what a client does to her parameters before they leave, and the account of who is protected against whom.

`unit="client"` protects a client's whole data set. Her trained vector is clipped to L2 norm C, and noise for a distance
of 2C is added to every coordinate (JDP Alg. 3). What is clipped is either the *update*, her parameters minus the last
public model, or the *parameters* themselves, as the paper prints it. The update is the default: a network's parameters
are long mostly because of their public starting point, so clipping them to a C that the noise could live with shrinks
the model every round; and σ grows with C.

`unit="record"` protects each record, which is what the paper's neighbours are. Clipping the result of training does not
bound what one record did to it (docs/errata.md E20), so every record's gradient is clipped to C, at each of the K steps
of a round: replacing one of d records then moves the mean by at most 2C/d, and that is what the noise of every step is
for. K Gaussian steps of noise √K·σ are one Gaussian release of σ, whatever each step makes of the ones before. Steps
use all records, so that a client's account is exact and one number; a random part of them would be cheaper.

`calibration="analytic"` finds the least σ for (ε, δ) at every ε; `"paper"` is √(2 ln(1.25/δ))·Δ/ε, which fails above
ε ≈ 8 (docs/errata.md E9). What would break it: an account that adds up releases of both units.

The noise is NumPy's when generators are given: right in distribution and not safe to release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isinf
from typing import ClassVar, Literal

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput
from flmarket.privacy import (
    ApproxDp,
    Event,
    GaussianRelease,
    NoiseSource,
    PrivacyAccount,
    ZCdp,
    as_noise_source,
    classic_gaussian_sigma,
    clip_l2,
    gaussian_epsilon,
)
from flmarket.privacy.additive import analytic_sigma, record_distance
from flmarket.privacy.events import ROUNDING_ALLOWANCE, Checked

_UNLIMITED = 1e15


@dataclass(frozen=True, kw_only=True)
class LocalPerturbation(Checked):
    """Clip and Gaussian noise, at home; see the module for the choices."""

    clip: float = 1.0
    delta: float = 1e-5
    clipped: Literal["update", "parameters"] = "update"
    calibration: Literal["analytic", "paper"] = "analytic"
    unit: Literal["client", "record"] = "client"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, accepted in (
            ("clipped", ("update", "parameters")),
            ("calibration", ("analytic", "paper")),
            ("unit", ("client", "record")),
        ):
            if getattr(self, name) not in accepted:
                raise InvalidInput(name, getattr(self, name), " or ".join(accepted))
        if (self.unit, self.clipped) == ("record", "parameters"):
            raise InvalidInput("clipped", self.clipped, "update where records are protected: it is gradients that are")

    name: ClassVar[str] = "m3"

    @property
    def choices(self) -> dict[str, float | str]:
        """Everything but the clip, as an announcement says it; JSON-ready."""
        return {name: getattr(self, name) for name in ("delta", "clipped", "calibration", "unit")}

    def guarantee(self, epsilon: float) -> GaussianRelease:
        """What one upload promises for its unit: the noise's σ at a distance of 1."""
        return _release(self.calibration, epsilon, self.delta)

    def scale(self, epsilon: float, records: int, steps: int = 1) -> float:
        """σ in each coordinate: of an upload or, where records are protected, of each of so many steps."""
        distance = record_distance(self.clip, records, steps) if self.unit == "record" else 2 * self.clip
        return float(self.guarantee(epsilon).noise_multiplier * distance)

    def upload(
        self,
        parameters: FloatArray,
        public: FloatArray,
        sigma: FloatArray,
        rngs: Sequence[np.random.Generator | NoiseSource],
    ) -> FloatArray:
        """What each client sends: parameters (m, p) clipped around the public model (p,), plus noise σ (m,)."""
        centre = public if self.clipped == "update" else np.zeros_like(public)
        clipped = clip_l2(parameters - centre, self.clip)
        sent = np.empty_like(clipped)
        for i, rng in enumerate(rngs):
            scale = float(sigma[i]) * (1 + ROUNDING_ALLOWANCE)
            sent[i] = centre + as_noise_source(rng).add_gaussian(clipped[i], scale=scale, sensitivity=2 * self.clip)
        return sent


@lru_cache(maxsize=4096)
def _release(calibration: str, epsilon: float, delta: float) -> GaussianRelease:
    if calibration == "analytic":
        return GaussianRelease(analytic_sigma(epsilon, delta, 1.0))
    return GaussianRelease(float(classic_gaussian_sigma(epsilon=epsilon, delta=delta)))


def upload_epsilon(total: float, delta: float, rounds: int) -> float:
    """The ε of each of `rounds` uploads that come to `total` together, both at δ."""
    sigma = analytic_sigma(total, delta, 1.0) * np.sqrt(rounds)
    return float(gaussian_epsilon(sigma=sigma, delta=delta))


@dataclass(frozen=True)
class JointPrivacy:
    """What a training gives away, per round and over the `rounds` agreed on; ε's at `delta`, ∞ where nothing protects.

    A training that stops early has played fewer, but when it stopped depended on what was released, so a total for the
    rounds played is true only after the fact.

    `client` is the client with least noise, against everybody who sees uploads or models, the server included: her
    whole data set or, if `unit` says so, any one record of it. `record` is one of the server's validation records,
    against everybody who sees the models.
    """

    rounds: int
    delta: float
    client_per_round: float
    client_total: float
    record_per_round: float
    record_total: float
    paper_per_round: float  # ε_L + ε_E as asked for; the paper states no composition over rounds
    unit: Literal["client", "record"] = "client"

    def sentences(self) -> tuple[str, ...]:
        """What is protected against whom, for a page."""
        whose = "Any one record of a client's" if self.unit == "record" else "A client's whole data set"
        said = [
            f"{whose}, against the server and everybody else: {_pair(self.client_per_round, self)} "
            f"per round, {_pair(self.client_total, self)} over the {self.rounds} rounds agreed on."
        ]
        if isinf(self.record_total):
            said.append("The server's validation records are not protected: what is published may depend on each.")
        else:
            said.append(
                f"One of the server's validation records, against everybody who sees the models: "
                f"ε = {self.record_per_round:.3g} per round, {_pair(self.record_total, self)} in total."
            )
        said.append(
            f"The paper counts ε_L + ε_E = {self.paper_per_round:.3g} per round. For clients the choice adds nothing: "
            "uploads are private before it. A client's own mixed model is for her eyes only."
        )
        return tuple(said)


def _pair(epsilon: float, privacy: JointPrivacy) -> str:
    return "no protection" if isinf(epsilon) else f"(ε, δ) = ({epsilon:.3g}, {privacy.delta:g})"


def account_of(
    *,
    rounds: int,
    delta: float,
    uploads: GaussianRelease | ZCdp | None,
    choices: Event | None,
    stopping: Event | None,
    asked: float,
    unit: Literal["client", "record"] = "client",
) -> JointPrivacy:
    """Compose `rounds` uploads and choices, and one stopping rule; None where there is no protection at all."""
    client, record = (float("inf"),) * 2, (float("inf"),) * 2
    if uploads is not None:
        if isinstance(uploads, GaussianRelease):
            once = float(gaussian_epsilon(sigma=uploads.noise_multiplier, delta=delta))
        else:
            once = _total(delta, [(uploads, 1)])
        client = (once, _total(delta, [(uploads, rounds)]))
    if choices is not None:
        events = [(choices, rounds)] + ([(stopping, 1)] if stopping is not None else [])
        record = (_total(delta, [(choices, 1)]), _total(delta, events))
    return JointPrivacy(rounds, delta, *client, *record, asked, unit)


def _total(delta: float, events: list[tuple[Event, int]]) -> float:
    account = PrivacyAccount(ApproxDp(_UNLIMITED, delta))
    for event, count in events:
        if count:
            account.compose(event, count)
    return account.spent
