"""The series of STACK Figures 2–4, as arrays: participants and utilities against the number of users and ν_max.

Privacy values are uniform on [1, ν_max]; the game is played at the server's best reward. Every point is an average over
independent draws of the users (the paper does not say over how many). `noise_account="averaged"` and `"pooled"` give
the trends of the paper's Figure 3; its printed utility gives the opposite ones (`flmarket.games.stackelberg`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from flmarket.bids import FloatArray
from flmarket.games.stackelberg import NoiseAccount, Stackelberg


class PaperSettings(TypedDict):
    """The training that R buys."""

    records: int
    dimension: int
    learning_rate: float
    rounds: int
    weight: float


PAPER_SETTINGS = PaperSettings(records=1000, dimension=1000, learning_rate=0.1, rounds=500, weight=20.0)


@dataclass(frozen=True, eq=False)
class EquilibriumSeries:
    """One entry per point of the x-axis, each the mean over draws; deviations are across users (Fig. 4's bars)."""

    axis: str
    x: FloatArray
    participants: FloatArray
    server_utility: FloatArray
    user_utility: FloatArray
    user_deviation: FloatArray
    reward: FloatArray


def against_users(
    users: Sequence[int] = tuple(range(100, 1001, 100)),
    *,
    value_max: float = 5.0,
    draws: int = 20,
    seed: int = 0,
    noise_account: NoiseAccount = "printed",
) -> EquilibriumSeries:
    """Figures 2(a), 3(a), 4(a): the number of users varies."""
    return _series("users", list(users), [(n, value_max) for n in users], draws, seed, noise_account)


def against_value_range(
    value_max: Sequence[float] = tuple(range(2, 11)),
    *,
    users: int = 1000,
    draws: int = 20,
    seed: int = 0,
    noise_account: NoiseAccount = "printed",
) -> EquilibriumSeries:
    """Figures 2(b), 3(b), 4(b): the largest privacy value varies."""
    return _series("value_max", list(value_max), [(users, v) for v in value_max], draws, seed, noise_account)


def _series(
    axis: str,
    x: Sequence[float],
    games: Sequence[tuple[int, float]],
    draws: int,
    seed: int,
    noise_account: NoiseAccount,
) -> EquilibriumSeries:
    rows = np.array([np.mean([_play(n, v, [seed, d], noise_account) for d in range(draws)], axis=0) for n, v in games])
    return EquilibriumSeries(axis, np.asarray(x, dtype=np.float64), *rows.T)


def _play(users: int, value_max: float, seed: list[int], noise_account: NoiseAccount) -> tuple[float, ...]:
    # the same quantiles at every point of the axis: neighbouring points differ by the axis, not by luck
    values = 1.0 + (value_max - 1.0) * np.random.default_rng(seed).random(users)
    outcome = Stackelberg(values, noise_account=noise_account, **PAPER_SETTINGS).outcome()
    users_get = outcome.utilities
    return float(outcome.participants.sum()), outcome.server_utility, users_get.mean(), users_get.std(), outcome.reward
