"""STACK: the server posts a reward, users answer with zCDP budgets, and both know it.

Stage 1: the server announces R and will pay user i her share ρ_i R/Σρ. Stage 2: users choose ρ at the unique Nash
equilibrium (`flmarket.games.contest`). Seeing that coming, the server picks R*. Hu and Gong, Trading Data for
Learning, 2020.

What would break it: the server must know everybody's ν. Users who are asked for it have a reason to lie: this is a game
of complete information, not a truthful mechanism. The promise is an equilibrium, which `verify_equilibrium` certifies.

The server's side: accuracy grows with everybody's ρ, and R is what it costs (STACK equations 9, 11, 17).

With participants S, κ = m²/(2dη²TL²) (the paper leaves out the clip L, that is, has L = 1) and ρ_i = R·x_i,

    U(R) = (λ/2)[1 + g(R)] − R,     g(R) = exp(−(1/|S|) Σ_S log(1 + 1/(X_i R))),     X_i = κ x_i.

Three accounts of the noise:

- `"printed"`: the above. It charges the server the noise of single users, as if the model did not average them. R is
  split among |S| users, so U *falls* as users join: the paper's Figure 3 shows the opposite and does not follow from
  its equations (docs/errata.md E18).
- `"averaged"`: line 6 of the paper's Algorithm 1 moves the model by η/|S| times the sum, so a user's noise arrives
  divided by |S|: the same formula with |S|²X_i. Both trends of Figure 3 follow.
- `"pooled"`: the noise of the average that the server applies when users weigh in proportion to ρ_i (inverse variance,
  the aggregation rule "var-opt"): Σ w_i²σ_i² ∝ 1/Σρ, the same formula with one X = κ Σx_i. Figure 3's trends follow.

Linear costs: x does not depend on R. Writing g(R) = R·exp(mean(log X_i − log(1 + X_i R))) is exact down to R = 0, where

    U'(R) = (λ/2) exp(mean(log X_i − log(1 + X_i R)))·mean(1/(1 + X_i R)) − 1

decreases strictly, so there is one maximiser: 0 if (λ/2)·(geometric mean of X) ≤ 1, else the root of U', which lies
below λ/2 because U(R) < λ − R and U(0) = λ/2. (The paper has U(0) = 0 and always an interior optimum: E6.)

Other costs: concavity is not proved. U is searched over (0, λ/2) on a logarithmic grid, the best bracket is refined,
and R = 0 is compared.

From a zCDP budget to Gaussian noise (STACK Theorem 1; Bun & Steinke 2016, Prop. 1.6 and Lemma 1.7).

A user releases the mean of m clipped per-record gradients T times. Replacing one record moves the mean by at most 2L/m,
so noise N(0, σ²) in every coordinate costs (2L/m)²/(2σ²) = ρ/T a round, ρ in all, when

    σ = (L/m)·√(2T/ρ).

What would break it: gradients that are not clipped to L. The paper asks for an L-smooth loss, which bounds how
gradients change, not how large they are (docs/errata.md E5).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, minimize_scalar

from flmarket.bids import EXACT, NONE, FloatArray, Guarantees, checked_array
from flmarket.errors import InvalidInput
from flmarket.games import contest
from flmarket.privacy.events import checked_number


def noise_scale(rho: ArrayLike, *, rounds: int, records: ArrayLike, clip: float = 1.0) -> FloatArray:
    """σ per coordinate and round that spends ρ over all rounds; ∞ where ρ = 0 (release nothing)."""
    m = checked_array("records", records, minimum=1.0)
    length = checked_number("clip", clip, 1e-12, 1e12)
    return np.asarray(2.0 * length / m * noise_multiplier(rho, rounds=rounds))


def noise_multiplier(rho: ArrayLike, *, rounds: int) -> FloatArray:
    """σ over the sensitivity 2L/m, √(T/(2ρ)): what an accountant calls the noise multiplier of one round."""
    budget = checked_array("rho", rho)
    times = checked_number("rounds", rounds, 1, 1e12)
    with np.errstate(divide="ignore"):
        return np.sqrt(times / (2.0 * budget))


def zcdp_of_noise(sigma: ArrayLike, *, rounds: int, records: ArrayLike, clip: float = 1.0) -> FloatArray:
    """The inverse of `noise_scale`: ρ over all rounds."""
    m = checked_array("records", records, minimum=1.0)
    length = checked_number("clip", clip, 1e-12, 1e12)
    noise = checked_array("sigma", sigma, minimum=1e-300)
    return np.asarray(2.0 * checked_number("rounds", rounds, 1, 1e12) * (length / (m * noise)) ** 2)


NoiseAccount = Literal["printed", "averaged", "pooled"]


def accuracy_term(scaled_rho: FloatArray, account: NoiseAccount) -> float:
    """g at privacy budgets scaled by κ, over those who take part (ρ > 0); 0 if nobody does."""
    scaled = noisy_units(scaled_rho, account)
    return float(np.exp(-np.mean(np.log1p(1.0 / scaled)))) if scaled.size else 0.0


def noisy_units(scaled_rho: FloatArray, account: NoiseAccount) -> FloatArray:
    """What the mean of g runs over: every participant, her noise divided or not, or all of them pooled into one."""
    taking_part = scaled_rho[scaled_rho > 0]
    if account == "pooled":
        return np.atleast_1d(taking_part.sum())[: taking_part.size]
    return taking_part * float(taking_part.size) ** 2 if account == "averaged" else taking_part


def linear_gradient(scaled: FloatArray, weight: float, reward: float) -> float:
    """U'(R) for linear costs; `scaled` are the X_i of `noisy_units`."""
    level = np.exp(np.mean(np.log(scaled) - np.log1p(scaled * reward)))
    return float(weight / 2 * level * np.mean(1.0 / (1.0 + scaled * reward)) - 1.0)


def linear_optimum(scaled: FloatArray, weight: float) -> float:
    """R* for linear costs."""
    if linear_gradient(scaled, weight, 0.0) <= 0:
        return 0.0
    return float(
        brentq(lambda reward: linear_gradient(scaled, weight, reward), 0.0, weight / 2, xtol=1e-300, rtol=1e-14)
    )


def searched_optimum(utility: Callable[[float], float], weight: float, *, points: int = 97) -> float:
    """The best R in [0, λ/2] by grid and refinement, 0 included."""
    grid = weight / 2 * np.logspace(-9, 0, points)
    values = np.array([utility(float(reward)) for reward in grid])
    best = int(np.argmax(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    found = minimize_scalar(
        lambda log_reward: -utility(float(np.exp(log_reward))),
        bounds=(np.log(low), np.log(high)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(np.exp(found.x)) if -found.fun > weight / 2 else 0.0


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
        self.cost_family = contest.family(cost)
        if noise_account not in get_args(NoiseAccount):
            raise InvalidInput("noise_account", noise_account, f"one of {', '.join(get_args(NoiseAccount))}")
        self.noise_account: NoiseAccount = noise_account
        noise_energy = 2.0 * self.dimension * self.learning_rate**2 * self.rounds * self.clip**2
        self._kappa = float(self.records) ** 2 / noise_energy
        shares, per_reward = contest.linear_shares(self.privacy_values)
        self._scaled = noisy_units(self._kappa * per_reward * shares, noise_account)  # the X_i of linear costs

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
        return linear_gradient(self._scaled, self.weight, _checked_reward(reward))

    def optimal_reward(self) -> float:
        """R*: the server's best reward; 0 where buying nothing is best."""
        if self.cost_family.name == "linear":
            return linear_optimum(self._scaled, self.weight)
        return searched_optimum(lambda r: self._utility_of(self.equilibrium(r), r), self.weight)

    def noise_scale(self, rho: ArrayLike) -> FloatArray:
        """σ_i = (L/m)√(2T/ρ_i); ∞ for those who stay out."""
        return noise_scale(rho, rounds=self.rounds, records=self.records, clip=self.clip)

    def _utility_of(self, rho: FloatArray, reward: float) -> float:
        return self.weight / 2 * (1.0 + accuracy_term(self._kappa * rho, self.noise_account)) - reward

    def _checked_rho(self, rho: ArrayLike) -> FloatArray:
        budgets = checked_array("rho", rho)
        if budgets.shape != (self.n,):
            raise InvalidInput("rho", budgets.shape, f"one privacy budget for each of {self.n} users")
        return budgets


def _checked_reward(reward: float) -> float:
    return checked_number("reward", reward, 0.0, 1e15)
