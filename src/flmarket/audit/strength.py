"""How hard to look: "quick" for every day, "strong" before believing a claim; `dataclasses.replace` makes others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["STRENGTHS", "Strength"]


@dataclass(frozen=True)
class Strength:
    """How much of each search to do; every number counts misreports per owner, or rounds of several."""

    name: str
    factors: tuple[float, ...]
    family_factors: tuple[float, ...]
    reshapes: int
    bisections: int
    ranked_others: int
    random_value: int
    random_joint: int
    refine_rounds: int
    owners_per_profile: int
    draws: int  # for mechanisms that draw random numbers
    structure_profiles: int  # of the checks beside the search; 0 leaves efficiency out
    efficiency_profiles: int


def _around_one(least: float, count: int) -> tuple[float, ...]:
    """0, then factors ever denser towards 1 from both sides, `least` being the closest."""
    distance = np.geomspace(least, 4.6, count)
    return (0.0, *np.exp(-distance[::-1]).tolist(), *np.exp(distance).tolist())


STRENGTHS = {
    "quick": Strength(
        name="quick",
        factors=(0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 0.999, 1.001, 1.03, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0, 20.0),
        family_factors=(0.5, 0.9, 1.2),
        reshapes=6,
        bisections=14,
        ranked_others=0,
        random_value=4,
        random_joint=12,
        refine_rounds=5,
        owners_per_profile=16,
        draws=8,
        structure_profiles=200,
        efficiency_profiles=50,
    ),
    "strong": Strength(
        name="strong",
        factors=_around_one(1e-4, 20),
        family_factors=(0.3, 0.6, 0.8, 0.95, 1.0, 1.05, 1.3, 2.0),
        reshapes=24,
        bisections=32,
        ranked_others=9,
        random_value=60,
        random_joint=80,
        refine_rounds=20,
        owners_per_profile=100,
        draws=32,
        structure_profiles=1_000,
        efficiency_profiles=200,
    ),
}
