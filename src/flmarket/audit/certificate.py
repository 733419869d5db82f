"""Certificates for learned mechanisms: how much regret a *new* profile has, with a stated probability.

Let R_1, …, R_m be the largest regret over cost of any owner in m held-out profiles, and R that of a new one. If all
m + 1 are exchangeable (independent draws of one population are), R is as likely to have any rank as any other, so

    P( R > r ) ≤ α      for r = the k-th smallest of R_1, …, R_m,   k = ⌈(m + 1)(1 − α)⌉,

and r = ∞ where k > m: fewer than 1/α − 1 profiles certify nothing (Vovk, Gammerman, Shafer 2005; split conformal
prediction). No law of regret is assumed. The probability is over the held-out profiles and the new one together.

Two things it does not say. **R is what the search finds**, a lower bound of the true regret: the certificate bounds
what *this* search would find in a new profile, not what the cleverest liar could. And it is about the population:
owners drawn otherwise, or profiles that were trained on, void it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput


@dataclass(frozen=True)
class Certificate:
    """Regret over cost of a new profile of `population` exceeds `regret` with probability at most `alpha`."""

    population: str
    search: str
    profiles: int
    alpha: float
    regret: float

    def __str__(self) -> str:
        if not math.isfinite(self.regret):
            return f"{self.profiles} profiles are too few to certify anything at {self.alpha:.0%}"
        return (
            f"in a new profile of {self.population}, {self.search} search finds regret above {self.regret:.3g} of cost "
            f"with probability at most {self.alpha:.0%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For a weight file; no certificate (∞) is null."""
        values = asdict(self)
        return values | {"regret": self.regret if math.isfinite(self.regret) else None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Certificate:
        """The inverse of `to_dict`."""
        regret = values["regret"]
        known = {name: values[name] for name in ("population", "search", "profiles", "alpha")}
        return cls(**known, regret=math.inf if regret is None else float(regret))


def certify(regrets: FloatArray, *, population: str, search: str, alpha: float = 0.05) -> Certificate:
    """From the largest regret over cost of each held-out profile, shape (profiles,)."""
    if not 0 < alpha < 1:
        raise InvalidInput("alpha", alpha, "a probability between 0 and 1")
    scores = np.sort(np.asarray(regrets, dtype=np.float64).ravel())
    if not scores.size or np.isnan(scores).any():
        raise InvalidInput("regrets", regrets, "a number for every held-out profile, at least one")
    rank = math.ceil((scores.size + 1) * (1 - alpha) * (1 - 1e-12))
    bound = float(scores[rank - 1]) if rank <= scores.size else math.inf
    return Certificate(population, search, int(scores.size), float(alpha), bound)
