"""Does anybody gain by deviating? A certificate for an equilibrium that does not trust the formulas that made it.

Each user's utility is evaluated from its definition on a grid of privacy budgets from 0 to the one that costs the whole
reward (nobody wants more), and the best bracket is refined by golden section. The answer is the largest gain found, in
the reward's currency: 0 up to rounding at an equilibrium. Only payments, costs and the others' total enter; neither
first-order conditions nor Algorithm 2 do.

`best_response_dynamics` is the naive way to an equilibrium, users replying in turn: for cross-checks on small games.
"""

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.games.stackelberg import Stackelberg
from flmarket.privacy.events import checked_number

_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0
_CHUNK_ENTRIES = 200_000


def verify_equilibrium(game: Stackelberg, rho: ArrayLike, *, reward: float, points: int = 65) -> float:
    """The most that any user gains by changing her own ρ; at an equilibrium, no more than rounding."""
    profile = checked_array("rho", rho)
    _, best = best_deviations(game, profile, reward=reward, points=points)
    return float(np.max(best - game.user_utilities(profile, reward)))


def best_deviations(
    game: Stackelberg, rho: ArrayLike, *, reward: float, points: int = 65
) -> tuple[FloatArray, FloatArray]:
    """Every user's best ρ against the others' as they are, and her utility there."""
    profile, amount = checked_array("rho", rho), checked_number("reward", reward, 0.0, 1e15)
    if profile.shape != (game.n,):
        raise InvalidInput("rho", profile.shape, f"one privacy budget for each of {game.n} users")
    # Σ_{j≠i} ρ_j as sums from both sides: exact zeros where all others are out, no cancellation
    before = np.concatenate(([0.0], np.cumsum(profile)[:-1]))
    others = before + np.concatenate((np.cumsum(profile[::-1])[::-1][1:], [0.0]))
    choice, best = np.empty(game.n), np.empty(game.n)
    rows = max(1, _CHUNK_ENTRIES // points)
    for start in range(0, game.n, rows):
        part = slice(start, start + rows)
        choice[part], best[part] = _search(game, game.privacy_values[part], others[part], amount, points)
    return choice, best


def best_response_dynamics(
    game: Stackelberg, reward: float, *, sweeps: int = 200, tolerance: float = 1e-8
) -> FloatArray:
    """Users reply in turn, from an even start, until nobody moves by more than `tolerance` of the total."""
    rho = game.cost_family.break_even(game.privacy_values, reward) / (4 * game.n)
    for _ in range(sweeps):
        before = rho.copy()
        for user in range(game.n):
            value, others = game.privacy_values[[user]], np.array([rho.sum() - rho[user]])
            rho[user] = _search(game, value, others, reward, 33)[0][0]
        if np.abs(rho - before).max() <= tolerance * rho.sum():
            break
    return rho


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
