"""STACK: the server posts a reward, users answer with zCDP budgets, and both know it.

Stage 1: the server announces R and will pay user i her share ρ_i R/Σρ. Stage 2: users choose ρ at the unique Nash
equilibrium (`equilibrium`). Seeing that coming, the server picks R*. Hu and Gong, Trading Data for
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

The users' game: R is shared in proportion to privacy budgets, and everybody minds her own cost.

*Linear costs*, STACK Algorithm 2, in O(n log n): with ν ascending, the k cheapest users take part, k the largest with
(k − 1)ν_k < ν_1 + … + ν_k (the slack falls in k, so this is a prefix), and with Σ their sum

    ρ_i = ((k − 1)R/Σ)·t_i,     payment R·t_i,     utility R·t_i²,     t_i = 1 − (k − 1)ν_i/Σ.

The printed condition has ≤ for <. It admits a user at equality, whose ρ is 0; she then counts as a participant with
infinite noise, and the server's utility collapses to λ/2 (docs/errata.md E16).

*Any other convex cost.* Given the total P, each user's best reply is known in closed form and her share of
P falls in P, from 1 at P = 0 to 0. So Σ shares = 1 has exactly one root, the unique equilibrium
(Szidarovszky & Okuguchi 1997). Best replies against the aggregate, with bisection on one number, converge always;
iterating best replies against each other need not when there are many users.

What would break it: one user alone has no best reply (any ρ > 0 earns all of R), so there must be two; and users who
collude, or who misstate ν if the server asks them for it.

What a privacy budget ρ costs a user of privacy value ν: linear, quadratic or exponential (STACK section III-A).

| name | c(ν, ρ) | ρ at which a total budget P leaves the user content |
| --- | --- | --- |
| linear | νρ | P − νP²/R |
| quadratic | νρ² | PR/(R + 2νP²) |
| exponential | e^{νρ} − 1 | P − ω(νP + log(ν²P²/R))/ν, ω Wright's omega |

The last column is the root of the first-order condition R(P − ρ)/P² = ∂c/∂ρ, zero where it would be negative: her best
reply, written against the total including herself. Divided by P it falls in P, which is what makes the equilibrium
unique; any convex family with c(ν, 0) = 0 would do.

The paper prints e^{νρ}, which charges 1 for an arbitrarily small ρ. With that entry fee the game may have no
equilibrium at all (docs/errata.md E17), so the cost here starts at 0.

Does anybody gain by deviating? A certificate for an equilibrium that does not trust the formulas that made it.

Each user's utility is evaluated from its definition on a grid of privacy budgets from 0 to the one that costs the whole
reward (nobody wants more), and the best bracket is refined by golden section. The answer is the largest gain found, in
the reward's currency: 0 up to rounding at an equilibrium. Only payments, costs and the others' total enter; neither
first-order conditions nor Algorithm 2 do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import wrightomega

from flmarket.bids import EXACT, NONE, FloatArray, Guarantees, checked_array, slices
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_number
from flmarket.registry import Registry


@dataclass(frozen=True)
class CostFamily:
    """A convex privacy cost with c(ν, 0) = 0."""

    name: str
    cost: Callable[[FloatArray, FloatArray], FloatArray]
    """c(ν, ρ)."""
    reply: Callable[[FloatArray, float, float], FloatArray]
    """The ρ that is optimal when all users together offer a total, at a reward; 0 for those who stay out."""
    break_even: Callable[[FloatArray, float], FloatArray]
    """The ρ that costs the whole reward: no user ever wants more."""


def _exponential_reply(value: FloatArray, total: float, reward: float) -> FloatArray:
    kept = wrightomega(value * total + np.log(value**2 * (total**2 / reward))) / value
    return np.asarray(np.maximum(total - kept, 0.0))


_FAMILIES = (
    CostFamily(
        "linear",  # Algorithm 2's case
        cost=lambda value, rho: value * rho,
        reply=lambda value, total, reward: np.maximum(total - value * total**2 / reward, 0.0),
        break_even=lambda value, reward: reward / value,
    ),
    CostFamily(
        "quadratic",  # the first bit of privacy is free, so everybody takes part
        cost=lambda value, rho: value * rho**2,
        reply=lambda value, total, reward: total * reward / (reward + 2.0 * value * total**2),
        break_even=lambda value, reward: np.sqrt(reward / value),
    ),
    CostFamily(
        "exponential",
        cost=lambda value, rho: np.expm1(value * rho),
        reply=_exponential_reply,
        break_even=lambda value, reward: np.asarray(np.log1p(reward) / value),
    ),
)
_registry: Registry[CostFamily] = Registry("cost")
family = _registry.get
families = _registry.names
for _family in _FAMILIES:
    _registry.register(_family.name, lambda made=_family: made)


def linear_shares(values: FloatArray) -> tuple[FloatArray, float]:
    """Algorithm 2 without the reward: each user's share t of R (0 for those who stay out), and the total ρ per R."""
    ascending = np.sort(values)
    sums = np.cumsum(ascending)
    others = np.arange(values.size)
    participants = int(np.count_nonzero(others * ascending < sums))
    total = sums[participants - 1]
    shares = np.maximum(1.0 - (participants - 1) * values / total, 0.0)
    shares[values > ascending[participants - 1]] = 0.0
    return shares, float((participants - 1) / total)


def equilibrium(family: CostFamily, values: FloatArray, reward: float) -> FloatArray:
    """ρ of every user at the unique Nash equilibrium; 0 for those who stay out."""
    if reward <= 0:
        return np.zeros(values.shape)
    if family.name == "linear":
        shares, per_reward = linear_shares(values)
        return shares * (per_reward * reward)
    # the replies' sum exceeds the total at low totals and falls short of it at high ones
    low = high = float(family.break_even(values.min(keepdims=True), reward)[0])

    def excess(log_total: float) -> float:
        total = float(np.exp(log_total))
        return float(np.sum(family.reply(values, total, reward)) / total - 1.0)

    while excess(np.log(low)) <= 0:
        low /= 4
    while excess(np.log(high)) >= 0:
        high *= 4
    total = float(np.exp(brentq(excess, np.log(low), np.log(high), xtol=1e-15, rtol=1e-15)))
    return family.reply(values, total, reward)


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


def searched_optimum(utility: Callable[[float], float], weight: float) -> float:
    """The best R in [0, λ/2] by grid and refinement, 0 included."""
    grid = weight / 2 * np.logspace(-9, 0, 97)
    values = np.array([utility(float(reward)) for reward in grid])
    best = int(np.argmax(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)]
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
        self.cost_family = family(cost)
        if noise_account not in get_args(NoiseAccount):
            raise InvalidInput("noise_account", noise_account, f"one of {', '.join(get_args(NoiseAccount))}")
        self.noise_account: NoiseAccount = noise_account
        noise_energy = 2.0 * self.dimension * self.learning_rate**2 * self.rounds * self.clip**2
        self._kappa = float(self.records) ** 2 / noise_energy
        shares, per_reward = linear_shares(self.privacy_values)
        self._scaled = noisy_units(self._kappa * per_reward * shares, noise_account)  # the X_i of linear costs

    @property
    def n(self) -> int:
        """Users, in or out."""
        return self.privacy_values.size

    def equilibrium(self, reward: float) -> FloatArray:
        """ρ of every user at the Nash equilibrium, 0 for those who stay out."""
        return equilibrium(self.cost_family, self.privacy_values, _checked_reward(reward))

    def outcome(self, reward: float | None = None) -> Equilibrium:
        """Everything at a reward (default: the server's best): ρ, payments, utilities on both sides."""
        amount = self.optimal_reward() if reward is None else _checked_reward(reward)
        rho = self.equilibrium(amount)
        payments = self.payments(rho, amount)
        utilities = payments - self.cost_family.cost(self.privacy_values, rho)
        return Equilibrium(amount, rho, payments, utilities, self._utility_of(rho, amount))

    def payments(self, rho: ArrayLike, reward: float) -> FloatArray:
        """ρ_i R/Σρ; nothing to anybody if nobody takes part."""
        budgets = self.checked_rho(rho)
        total = budgets.sum()
        return budgets * (_checked_reward(reward) / total) if total > 0 else np.zeros(self.n)

    def user_utilities(self, rho: ArrayLike, reward: float) -> FloatArray:
        """Payment minus privacy cost of every user at any profile, equilibrium or not."""
        budgets = self.checked_rho(rho)
        return self.payments(budgets, reward) - self.cost_family.cost(self.privacy_values, budgets)

    def server_utility(self, reward: ArrayLike) -> FloatArray | float:
        """(λ/2)(1 + g) − R when users answer with their equilibrium; a number, or an array for an array of rewards."""
        rewards = np.asarray(reward, dtype=np.float64)
        values = [self._utility_of(self.equilibrium(r), r) for r in rewards.ravel().tolist()]
        return values[0] if rewards.ndim == 0 else np.array(values).reshape(rewards.shape)

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

    def checked_rho(self, rho: ArrayLike) -> FloatArray:
        """One privacy budget for each user, or a typed error."""
        budgets = checked_array("rho", rho)
        if budgets.shape != (self.n,):
            raise InvalidInput("rho", budgets.shape, f"one privacy budget for each of {self.n} users")
        return budgets


def _checked_reward(reward: float) -> float:
    return checked_number("reward", reward, 0.0, 1e15)


_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0
_CHUNK_ENTRIES = 200_000


def verify_equilibrium(game: Stackelberg, rho: ArrayLike, *, reward: float, points: int = 65) -> float:
    """The most that any user gains by changing her own ρ; at an equilibrium, no more than rounding."""
    _, best = best_deviations(game, rho, reward=reward, points=points)
    return float(np.max(best - game.user_utilities(rho, reward)))


def best_deviations(
    game: Stackelberg, rho: ArrayLike, *, reward: float, points: int = 65
) -> tuple[FloatArray, FloatArray]:
    """Every user's best ρ against the others' as they are, and her utility there."""
    profile, amount = game.checked_rho(rho), _checked_reward(reward)
    # Σ_{j≠i} ρ_j as sums from both sides: exact zeros where all others are out, no cancellation
    before = np.concatenate(([0.0], np.cumsum(profile)[:-1]))
    others = before + np.concatenate((np.cumsum(profile[::-1])[::-1][1:], [0.0]))
    choice, best = np.empty(game.n), np.empty(game.n)
    for part in slices(game.n, _CHUNK_ENTRIES // points):
        choice[part], best[part] = _search(game, game.privacy_values[part], others[part], amount, points)
    return choice, best


def _search(
    game: Stackelberg, values: FloatArray, others: FloatArray, reward: float, points: int
) -> tuple[FloatArray, FloatArray]:
    """Best ρ and utility of each user against the others' total: grid, then golden section in the best bracket."""
    values, others = values[:, None], others[:, None]

    def utility(rho: FloatArray) -> FloatArray:
        total = rho + others
        payment = np.divide(rho * reward, total, out=np.zeros(total.shape), where=total > 0)
        return payment - game.cost_family.cost(values, rho)

    # cubed, because the best reply is often a small part of the range
    grid = game.cost_family.break_even(values, reward) * np.linspace(0.0, 1.0, points) ** 3
    user = np.arange(len(values))
    at = np.argmax(utility(grid), axis=1)
    low, high = grid[user, np.maximum(at - 1, 0)][:, None], grid[user, np.minimum(at + 1, points - 1)][:, None]
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(80):
        falls = utility(left) > utility(right)
        low, high = np.where(falls, low, left), np.where(falls, right, high)
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    middle = (low + high) / 2
    found = np.concatenate([grid[user, at][:, None], middle], axis=1)
    worth = utility(found)
    pick = np.argmax(worth, axis=1)
    alone = (others[:, 0] == 0) & (reward > 0)  # any ρ > 0 earns everything: the supremum, at no attained ρ
    return np.where(alone, 0.0, found[user, pick]), np.where(alone, reward, worth[user, pick])
