"""Posted-reward games (STACK): a reward in, equilibrium privacy budgets and payments out."""

from flmarket.games.contest import CostFamily, families, family
from flmarket.games.stackelberg import Equilibrium, Stackelberg, noise_multiplier, noise_scale, zcdp_of_noise
from flmarket.games.verification import best_deviations, best_response_dynamics, verify_equilibrium

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
