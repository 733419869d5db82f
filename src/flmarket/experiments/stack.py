"""STACK's Figures 2–4 and whether their trends hold: participants, server's and users' utility against n and ν_max.

Each seed draws one population per point (the same quantiles along an axis, so neighbouring points differ by the axis,
not by luck); curves are means over seeds with standard errors. Wherever the two accounts of the noise differ
(`flmarket.games.stackelberg`), both are drawn. A verdict is on the paper's own equations, the "printed" account, and is
computed: a trend holds if the change from end to end, paired by seed, has the claimed sign by more than two standard
errors, and no single step goes the other way by more than two.

Assumes ν uniform on [1, ν_max] and the server's best reward at every point, as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import InvalidInput
from flmarket.experiments.items import Item, Reproduction, Step
from flmarket.games import Stackelberg, families, verify_equilibrium
from flmarket.games.figures import PAPER_SETTINGS, EquilibriumSeries, against_users, against_value_range
from flmarket.games.stackelberg import NoiseAccount
from flmarket.report import Curve, CurveSet, write_curves

__all__ = ["FIGURES", "ITEMS", "Figure", "Trend", "reproduce"]

FloatArray = NDArray[np.float64]

_ACCOUNTS: tuple[NoiseAccount, ...] = get_args(NoiseAccount)
_AXES = {"users": "number of users n", "value_max": "largest privacy value ν_max"}
_QUICK_SEEDS = 10
_CLEAR = 2.0  # standard errors
_ROUNDING = 1e-9  # of the reward


@dataclass(frozen=True)
class Figure:
    """One panel of the paper: what is plotted against what, and the direction that the paper reports."""

    key: str
    quantity: str
    axis: str
    label: str
    sign: int
    diminishing: bool = False

    @property
    def claim(self) -> str:
        """The paper's statement."""
        slower = ", with diminishing gains" if self.diminishing else ""
        return f"{self.label} {'grows' if self.sign > 0 else 'falls'} with the {_AXES[self.axis]}{slower}"


FIGURES = (
    Figure("fig2a", "participants", "users", "participants |S|", +1),
    Figure("fig2b", "participants", "value_max", "participants |S|", -1),
    Figure("fig3a", "server_utility", "users", "server's utility", +1, diminishing=True),
    Figure("fig3b", "server_utility", "value_max", "server's utility", -1),
    Figure("fig4a", "user_utility", "users", "users' mean utility", -1),
    Figure("fig4b", "user_utility", "value_max", "users' mean utility", +1),
)


@dataclass(frozen=True)
class Trend:
    """A claimed direction against measured values of shape (seeds, points)."""

    first: float
    last: float
    change_se: float
    against: int
    holds: bool

    @classmethod
    def of(cls, values: FloatArray, sign: int, *, diminishing: bool = False) -> Trend:
        """Whether the values go in the direction of `sign`, and ever more slowly if that is claimed."""
        change, error = _paired(values[:, -1:] - values[:, :1])
        steps, step_errors = _paired(np.diff(values, axis=1))
        against = int(np.count_nonzero(sign * steps < -_CLEAR * step_errors))
        holds = bool(sign * change[0] > _CLEAR * error[0]) and against == 0
        if diminishing:
            middle = values.shape[1] // 2
            halves = values[:, middle] - values[:, 0], values[:, -1] - values[:, middle]
            holds = holds and bool(sign * (halves[0].mean() - halves[1].mean()) > 0)
        return cls(float(values[:, 0].mean()), float(values[:, -1].mean()), float(error[0]), against, holds)

    def __str__(self) -> str:
        verb = "stays at" if self.last == self.first else "rises from" if self.last > self.first else "falls from"
        return f"{verb} {self.first:.4g} to {self.last:.4g} (±{self.change_se:.2g})"


def reproduce(
    out_dir: Path,
    *,
    quick: bool,
    seeds: int,
    data_dir: Path | None,
    step: Step,
    users: Sequence[int] = tuple(range(100, 1001, 100)),
    value_max: Sequence[float] = tuple(range(2, 11)),
    figures: Sequence[Figure] = FIGURES,
) -> tuple[Item, ...]:
    """The panels, all six by default; `quick` draws no more than 10 populations per point. No data set is needed."""
    del data_dir
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InvalidInput("seeds", seeds, "a whole number of at least 1")
    for name, axis in (("users", users), ("value_max", value_max)):
        if len(axis) < 2 or list(axis) != sorted(set(axis)):
            raise InvalidInput(name, axis, "at least two points, ascending")
    draws = min(seeds, _QUICK_SEEDS) if quick else seeds
    series: dict[str, dict[NoiseAccount, list[EquilibriumSeries]]] = {"users": {}, "value_max": {}}
    for account in _ACCOUNTS:
        step(f"users from {users[0]} to {users[-1]}, {account} noise account")
        series["users"][account] = [
            against_users(users, draws=1, seed=seed, noise_account=account) for seed in range(draws)
        ]
        step(f"ν_max from {value_max[0]} to {value_max[-1]}, {account} noise account")
        series["value_max"][account] = [
            against_value_range(value_max, users=max(users), draws=1, seed=seed, noise_account=account)
            for seed in range(draws)
        ]
    items = []
    for figure in figures:
        step(f"drawing {figure.key}")
        items.append(_item(figure, series[figure.axis], out_dir))
    return tuple(items)


def _item(figure: Figure, series: dict[NoiseAccount, list[EquilibriumSeries]], out_dir: Path) -> Item:
    x = tuple(series["printed"][0].x.tolist())
    values = {a: np.array([getattr(one, figure.quantity) for one in runs]) for a, runs in series.items()}
    trends = {a: Trend.of(v, figure.sign, diminishing=figure.diminishing) for a, v in values.items()}
    same = np.array_equal(values["printed"], values["pooled"])
    drawn = {"both accounts": values["printed"]} if same else {str(a): v for a, v in values.items()}
    curves = tuple(_curve(label, x, v) for label, v in drawn.items())
    number, panel = figure.key[3], figure.key[4]
    title = f"STACK Figure {number}({panel}): {figure.label} against the {_AXES[figure.axis]}"
    stem = f"stack-{figure.key}"
    # the mean user's utility spans orders of magnitude; participants and the server's utility do not
    log_y = figure.quantity == "user_utility" and all((v.mean(axis=0) > 0).all() for v in drawn.values())
    write_curves(CurveSet(title, _AXES[figure.axis], figure.label, curves), out_dir, stem, log_y=log_y)
    numbers: dict[str, object] = {"x": list(x), "seeds": len(series["printed"]), "accounts_agree": same}
    for account, runs in series.items():
        mean, error = _paired(values[account])
        numbers[account] = {
            "mean": mean.tolist(),
            "se": error.tolist(),
            "trend_holds": trends[account].holds,
            "steps_against": trends[account].against,
            "reward": np.mean([one.reward for one in runs], axis=0).tolist(),
        }
        if figure.quantity == "user_utility":
            deviation = np.mean([one.user_deviation for one in runs], axis=0)
            numbers[account] |= {"deviation_across_users": deviation.tolist()}  # type: ignore[operator]
    return Item(
        key=stem,
        title=title,
        claim=figure.claim,
        verdict="reproduced" if trends["printed"].holds else "differs",
        reason=_reason(trends, same),
        files=tuple(f"{stem}.{ending}" for ending in ("png", "svg", "csv")),
        numbers=numbers,
    )


def _reason(trends: dict[NoiseAccount, Trend], same: bool) -> str:
    if same:
        return f"It {trends['printed']}; the account of the noise plays no part."
    words = {True: "as claimed", False: "not as claimed"}
    printed, pooled = trends["printed"], trends["pooled"]
    text = f"By the printed equation (17) it {printed}, {words[printed.holds]}; with pooled noise it {pooled}, "
    return text + words[pooled.holds] + (" (E18)." if printed.holds != pooled.holds else ".")


def _curve(label: str, x: tuple[float, ...], values: FloatArray) -> Curve:
    mean, error = _paired(values)
    return Curve(label, x, tuple(mean.tolist()), tuple(error.tolist()) if len(values) > 1 else None)


def _paired(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean over seeds (first axis) and its standard error; one seed has none, which counts as 0."""
    count = len(values)
    error = values.std(axis=0, ddof=1) / np.sqrt(count) if count > 1 else np.zeros(values.shape[1:])
    return np.asarray(values.mean(axis=0)), np.asarray(error)


def _panels(number: int) -> Reproduction:
    """The two panels of one figure as a unit of work."""
    chosen = tuple(figure for figure in FIGURES if figure.key.startswith(f"fig{number}"))

    def work(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
        return reproduce(out_dir, quick=quick, seeds=seeds, data_dir=data_dir, step=step, figures=chosen)

    return work


def equilibrium(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """The largest gain of any unilateral deviation, searched, for every family of costs."""
    del data_dir
    users = (2, 10, 100) if quick else (2, 10, 100, 1000)
    curves, worst = [], {}
    for name in families():
        gains = []
        for n in users:
            step(f"deviations of {n} users with {name} costs")
            gains.append(max(_largest_gain(name, n, seed) for seed in range(seeds)))
        worst[name] = max(gains)
        curves.append(Curve(f"{name} costs", users, tuple(max(gain, 1e-18) for gain in gains)))
    title = "Largest gain by a deviation, over the reward"
    write_curves(CurveSet(title, _AXES["users"], "share of the reward, log scale", tuple(curves)), out_dir,
                 "stack-equilibrium", log_y=True)  # fmt: skip
    listed = ", ".join(f"{name} {gain:.1e}" for name, gain in worst.items())
    return Item(
        "stack-equilibrium",
        "STACK Algorithm 2: nobody gains by a deviation",
        "The computed profile is a Nash equilibrium.",
        "reproduced" if max(worst.values()) < _ROUNDING else "differs",
        f"Largest gain found by a search over every user's own ρ, as a share of the reward: {listed} ({seeds} games of "
        f"up to {users[-1]:,} users each).",
        tuple(f"stack-equilibrium.{ending}" for ending in ("png", "svg", "csv")),
        {"users": list(users), "largest_gain_over_reward": worst},
    )


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
