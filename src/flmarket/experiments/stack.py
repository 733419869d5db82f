"""STACK's Figures 2–4 and whether their trends hold: participants, server's and users' utility against n and ν_max.

Each run draws one population per point (the same quantiles along an axis, so neighbouring points differ by the axis,
not by luck); a seed stands for several runs, since they are cheap. The three accounts of the noise
(`flmarket.games`) are all drawn. Figures 2 and 4 are judged by the printed equations. Figure 3 does not
follow from its equation (17), which is an item of its own; it is judged by what the paper's Algorithm 1 does, which
divides every user's noise by |S| (line 6).

Assumes ν uniform on [1, ν_max] and the server's best reward at every point, as the paper does.

`against_users` and `against_value_range` give the series as arrays, each point an average over independent draws of the
users (the paper does not say over how many).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, get_args

import numpy as np

from flmarket.bids import FloatArray
from flmarket.experiments.items import Check, Item, Job, Reproduction, Sheet, exact, lines_of, means_of, trend
from flmarket.games import NoiseAccount, Stackelberg, families, verify_equilibrium


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


USERS = tuple(range(100, 1001, 100))
VALUE_MAX = tuple(range(2, 11))


def against_users(
    users: Sequence[int] = USERS, *, draws: int = 20, seed: int = 0, noise_account: NoiseAccount = "printed"
) -> EquilibriumSeries:
    """Figures 2(a), 3(a), 4(a): the number of users varies, ν_max is 5."""
    return _series("users", users, [(n, 5.0) for n in users], draws, seed, noise_account)


def against_value_range(
    value_max: Sequence[float] = VALUE_MAX, *, draws: int = 20, seed: int = 0, noise_account: NoiseAccount = "printed"
) -> EquilibriumSeries:
    """Figures 2(b), 3(b), 4(b): the largest privacy value varies among 1,000 users."""
    return _series("value_max", value_max, [(1000, v) for v in value_max], draws, seed, noise_account)


def _series(
    axis: str, x: Sequence[float], games: Sequence[tuple[int, float]], draws: int, seed: int, account: NoiseAccount
) -> EquilibriumSeries:
    rows = np.array([np.mean([_play(n, v, [seed, d], account) for d in range(draws)], axis=0) for n, v in games])
    return EquilibriumSeries(axis, np.asarray(x, dtype=np.float64), *rows.T)


def _play(users: int, value_max: float, seed: list[int], noise_account: NoiseAccount) -> tuple[float, ...]:
    # the same quantiles at every point of the axis: neighbouring points differ by the axis, not by luck
    values = 1.0 + (value_max - 1.0) * np.random.default_rng(seed).random(users)
    outcome = Stackelberg(values, noise_account=noise_account, **PAPER_SETTINGS).outcome()
    users_get = outcome.utilities
    return float(outcome.participants.sum()), outcome.server_utility, users_get.mean(), users_get.std(), outcome.reward


Series = Mapping[NoiseAccount, Mapping[str, FloatArray]]  # what is measured, (runs, points)

ACCOUNTS: tuple[NoiseAccount, ...] = get_args(NoiseAccount)
RUNS = 40, 100  # for a seed, quick and full
_AXES = {"users": "number of users n", "value_max": "largest privacy value ν_max"}
_MEASURED = ("participants", "server_utility", "user_utility", "user_deviation", "reward")
_ROUNDING = 1e-9  # of the reward


@dataclass(frozen=True)
class Figure:
    """One panel of the paper: what is plotted against what, and the direction that the paper reports."""

    key: str
    quantity: str
    axis: str
    label: str
    sign: int
    account: NoiseAccount = "printed"
    diminishing: bool = False

    @property
    def claim(self) -> str:
        """The paper's statement."""
        slower = ", ever more slowly" if self.diminishing else ""
        return f"{self.label} {'grows' if self.sign > 0 else 'falls'} with the {_AXES[self.axis]}{slower}."

    def check(self, key: str, series: Series, account: NoiseAccount) -> Check:
        """Whether the trend holds under an account of the noise."""
        found = trend(series[account][self.quantity], self.sign, diminishing=self.diminishing)
        return Check.of(key, self.claim, found + f", {account} noise")


FIGURES = (
    Figure("fig2a", "participants", "users", "Participants |S|", +1),
    Figure("fig2b", "participants", "value_max", "Participants |S|", -1),
    Figure("fig3a", "server_utility", "users", "Server's utility", +1, "averaged", diminishing=True),
    Figure("fig3b", "server_utility", "value_max", "Server's utility", -1, "averaged"),
    Figure("fig4a", "user_utility", "users", "Users' mean utility", -1),
    Figure("fig4b", "user_utility", "value_max", "Users' mean utility", +1),
)


def _measured(job: Job, axis: str) -> tuple[tuple[float, ...], Series]:
    """Everything along an axis, for every account."""
    x, against = (USERS, against_users) if axis == "users" else (VALUE_MAX, against_value_range)
    found: dict[NoiseAccount, dict[str, FloatArray]] = {}
    for account in ACCOUNTS:
        job.step(f"{_AXES[axis]} from {x[0]} to {x[-1]}, {account} noise")
        played = [against(x, draws=1, seed=seed, noise_account=account) for seed in job.runs(*RUNS)]
        found[account] = {what: np.array([getattr(one, what) for one in played]) for what in _MEASURED}
    return x, found


def _item(job: Job, figure: Figure, x: tuple[float, ...], series: Series) -> Item:
    values = {account: measured[figure.quantity] for account, measured in series.items()}
    same = all(np.array_equal(values["printed"], other) for other in values.values())
    shown = {"all accounts": values["printed"]} if same else {f"{account} noise": v for account, v in values.items()}
    title = f"{figure.label} against the {_AXES[figure.axis]}"
    sheet = Sheet(job, f"stack-{figure.key}", f"STACK Figure {figure.key[3]}({figure.key[4]}): {title}")
    # the mean user's utility spans orders of magnitude; participants and the server's utility do not
    log_y = figure.quantity == "user_utility" and all((v.mean(axis=0) > 0).all() for v in values.values())
    sheet.draw(_AXES[figure.axis], figure.label, lines_of(x, shown), title, log_y=log_y)
    sheet.checks.append(figure.check("trend", series, figure.account))
    if figure.quantity == "user_utility":  # the bars of Figure 4
        spread = Figure(figure.key, "user_deviation", figure.axis, "The spread among users", figure.sign)
        sheet.checks.append(spread.check("spread", series, figure.account))
    sheet.numbers = {"x": list(x), "runs": len(values["printed"])}
    sheet.numbers |= {account: means_of(measured) for account, measured in series.items()}
    return sheet.item()


def _equation(job: Job, series: Mapping[str, Series]) -> Item:
    """Figure 3 by the equation that the paper gives for it."""
    sheet = Sheet(job, "stack-eq17", "STACK equation (17): the server's utility as printed")
    panels = [figure for figure in FIGURES if figure.quantity == "server_utility"]
    sheet.checks += [figure.check(figure.key, series[figure.axis], "printed") for figure in panels]
    pooled = [figure.check(figure.key, series[figure.axis], "pooled") for figure in panels]
    note = "It charges the server every single user's noise, as if the model did not average them (E18). "
    return sheet.item(note + " ".join(f"With pooled noise {one.evidence}." for one in pooled))


def _panels(number: int) -> Reproduction:
    """The two panels of one figure as a unit of work; with Figure 3 goes the equation."""

    def work(job: Job) -> tuple[Item, ...]:
        axes = {axis: _measured(job, axis) for axis in _AXES}
        chosen = [figure for figure in FIGURES if figure.key.startswith(f"fig{number}")]
        items = [_item(job, figure, *axes[figure.axis]) for figure in chosen]
        if number == 3:
            items.append(_equation(job, {axis: series for axis, (_, series) in axes.items()}))
        return tuple(items)

    return work


def equilibrium(job: Job) -> Item:
    """The largest gain of any unilateral deviation, searched, for every family of costs."""
    users = (2, 10, 100) if job.quick else (2, 10, 100, 1000)
    worst: dict[str, list[float]] = {}
    for name in families():
        for n in users:
            job.step(f"deviations of {n} users with {name} costs")
            worst.setdefault(name, []).append(max(_largest_gain(name, n, seed) for seed in job.seeds))
    sheet = Sheet(job, "stack-equilibrium", "STACK Algorithm 2: nobody gains by a deviation")
    curves = lines_of(users, {f"{name} costs": np.maximum(gains, 1e-18) for name, gains in worst.items()})
    title = "Largest gain by a deviation, over the reward"
    sheet.draw(_AXES["users"], "share of the reward, log scale", curves, title, log_y=True)
    listed = ", ".join(f"{name} {max(gains):.1e}" for name, gains in worst.items())
    found = exact(
        max(max(gains) for gains in worst.values()) < _ROUNDING,
        f"the largest gain that a search over every user's own ρ finds, as a share of the reward: {listed} "
        f"({len(job.seeds)} games of up to {users[-1]:,} users each)",
    )
    sheet.check("gain", "The computed profile is a Nash equilibrium.", found)
    sheet.numbers = {"users": list(users), "largest_gain_over_reward": worst}
    return sheet.item()


def _largest_gain(cost: str, users: int, seed: int) -> float:
    values = np.random.default_rng((seed, users)).uniform(1.0, 5.0, users)
    game = Stackelberg(values, cost=cost, noise_account="pooled", **PAPER_SETTINGS)
    reward = 1.0
    return verify_equilibrium(game, game.equilibrium(reward), reward=reward) / reward


ITEMS: dict[str, Reproduction] = {
    "fig2": _panels(2),
    "fig3": _panels(3),
    "fig4": _panels(4),
    "equilibrium": equilibrium,
}
