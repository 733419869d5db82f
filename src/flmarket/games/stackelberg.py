"""STACK: the server posts a reward, users answer with zCDP budgets, and both know it.

Stage 1: the server announces R and will pay user i her share ρ_i R/Σρ. Stage 2: users choose ρ at the unique Nash
equilibrium (`flmarket.games.contest`). Seeing that coming, the server picks R* (`flmarket.games.server`). Hu and Gong,
Trading Data for Learning, 2020.

What would break it: the server must know everybody's ν. Users who are asked for it have a reason to lie: this is a game
of complete information, not a truthful mechanism. The promise is an equilibrium, which `verify_equilibrium` certifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import EXACT, NONE, Guarantees, checked_array
from flmarket.errors import InvalidInput
from flmarket.games import contest, costs, server
from flmarket.games.noise import noise_scale
from flmarket.games.server import NoiseAccount
from flmarket.privacy.events import checked_number

__all__ = ["Equilibrium", "Stackelberg"]

FloatArray = NDArray[np.float64]

_SMALLEST, _LARGEST = 1e-12, 1e12


@dataclass(frozen=True, eq=False)
class Equilibrium:
    """What everybody does and gets at a reward; arrays per user, zeros for those who stay out."""

    reward: float
    rho: FloatArray
    payments: FloatArray
    utilities: FloatArray
    server_utility: float

    @property
    def participants(self) -> NDArray[np.bool_]:
        """Who takes part."""
        return np.asarray(self.rho > 0)


class Stackelberg:
    """The two-stage game of n ≥ 2 users with privacy values ν; the keywords describe the training that R buys."""

    name = "stackelberg"
    guarantees = Guarantees(
        NONE, EXACT, EXACT, "STACK Algorithm 2", "privacy values are known to the server; users play the equilibrium"
    )

    def __init__(
        self,
        privacy_values: ArrayLike,
        *,
        records: int,
        dimension: int,
        learning_rate: float,
        rounds: int,
        weight: float,
        clip: float = 1.0,
        cost: str = "linear",
        noise_account: NoiseAccount = "printed",
    ) -> None:
        self.privacy_values = checked_array("privacy_values", privacy_values, minimum=_SMALLEST)
        if self.privacy_values.ndim != 1 or self.privacy_values.size < 2:
            raise InvalidInput("privacy_values", self.privacy_values.shape, "a vector of at least two users")
        if self.privacy_values.max() > _LARGEST:
            raise InvalidInput("privacy_values", self.privacy_values.max(), f"numbers of at most {_LARGEST:g}")
        self.records = int(checked_number("records", records, 1, _LARGEST))
        self.dimension = int(checked_number("dimension", dimension, 1, _LARGEST))
        self.learning_rate = checked_number("learning_rate", learning_rate, _SMALLEST, _LARGEST)
        self.rounds = int(checked_number("rounds", rounds, 1, _LARGEST))
        self.weight = checked_number("weight", weight, _SMALLEST, _LARGEST)
        self.clip = checked_number("clip", clip, _SMALLEST, _LARGEST)
        self.cost_family = costs.family(cost)
        if noise_account not in get_args(NoiseAccount):
            raise InvalidInput("noise_account", noise_account, f"one of {', '.join(get_args(NoiseAccount))}")
        self.noise_account: NoiseAccount = noise_account
        noise_energy = 2.0 * self.dimension * self.learning_rate**2 * self.rounds * self.clip**2
        self._kappa = float(self.records) ** 2 / noise_energy
        shares, per_reward = contest.linear_shares(self.privacy_values)
        self._scaled = server.noisy_units(self._kappa * per_reward * shares, noise_account)  # the X_i of linear costs

    @property
    def n(self) -> int:
        """Users, in or out."""
        return self.privacy_values.size

    def equilibrium(self, reward: float) -> FloatArray:
        """ρ of every user at the Nash equilibrium, 0 for those who stay out."""
        return contest.equilibrium(self.cost_family, self.privacy_values, _checked_reward(reward))

    def outcome(self, reward: float | None = None) -> Equilibrium:
        """Everything at a reward (default: the server's best): ρ, payments, utilities on both sides."""
        amount = self.optimal_reward() if reward is None else _checked_reward(reward)
        rho = self.equilibrium(amount)
        payments = self.payments(rho, amount)
        utilities = payments - self.cost_family.cost(self.privacy_values, rho)
        return Equilibrium(amount, rho, payments, utilities, self._utility_of(rho, amount))

    def payments(self, rho: ArrayLike, reward: float) -> FloatArray:
        """ρ_i R/Σρ; nothing to anybody if nobody takes part."""
        budgets = self._checked_rho(rho)
        total = budgets.sum()
        return budgets * (_checked_reward(reward) / total) if total > 0 else np.zeros(self.n)

    def user_utilities(self, rho: ArrayLike, reward: float) -> FloatArray:
        """Payment minus privacy cost of every user at any profile, equilibrium or not."""
        budgets = self._checked_rho(rho)
        return self.payments(budgets, reward) - self.cost_family.cost(self.privacy_values, budgets)

    def server_utility(self, reward: ArrayLike) -> FloatArray | float:
        """(λ/2)(1 + g) − R when users answer with their equilibrium; a number, or an array for an array of rewards."""
        rewards = np.asarray(reward, dtype=np.float64)
        values = [self._utility_of(self.equilibrium(r), r) for r in rewards.ravel().tolist()]
        return values[0] if rewards.ndim == 0 else np.array(values).reshape(rewards.shape)

    def server_gradient(self, reward: float) -> float:
        """U'(R), exact for linear costs and refused for others."""
        if self.cost_family.name != "linear":
            raise InvalidInput("cost", self.cost_family.name, "linear costs for the exact derivative")
        return server.linear_gradient(self._scaled, self.weight, _checked_reward(reward))

    def optimal_reward(self) -> float:
        """R*: the server's best reward; 0 where buying nothing is best."""
        if self.cost_family.name == "linear":
            return server.linear_optimum(self._scaled, self.weight)
        return server.searched_optimum(lambda r: self._utility_of(self.equilibrium(r), r), self.weight)

    def noise_scale(self, rho: ArrayLike) -> FloatArray:
        """σ_i = (L/m)√(2T/ρ_i); ∞ for those who stay out."""
        return noise_scale(rho, rounds=self.rounds, records=self.records, clip=self.clip)

    def _utility_of(self, rho: FloatArray, reward: float) -> float:
        return self.weight / 2 * (1.0 + server.accuracy_term(self._kappa * rho, self.noise_account)) - reward

    def _checked_rho(self, rho: ArrayLike) -> FloatArray:
        budgets = checked_array("rho", rho)
        if budgets.shape != (self.n,):
            raise InvalidInput("rho", budgets.shape, f"one privacy budget for each of {self.n} users")
        return budgets


def _checked_reward(reward: float) -> float:
    return checked_number("reward", reward, 0.0, 1e15)
