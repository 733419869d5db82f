"""Posted-reward games (STACK): a reward in, equilibrium privacy budgets and payments out."""

from flmarket.games.stackelberg import (
    CostFamily,
    Equilibrium,
    Stackelberg,
    best_deviations,
    best_response_dynamics,
    families,
    family,
    noise_multiplier,
    noise_scale,
    verify_equilibrium,
    zcdp_of_noise,
)

__all__ = [
    "CostFamily",
    "Equilibrium",
    "Stackelberg",
    "best_deviations",
    "best_response_dynamics",
    "families",
    "family",
    "noise_multiplier",
    "noise_scale",
    "verify_equilibrium",
    "zcdp_of_noise",
]
