"""JDP's Figure 2: how many clients and how much data M1 and M2 buy, and what M2 really spends on it.

Costs and sizes uniform in [1, 1000] (population "jdp"). The paper's budget runs "from 10 units to 100 units" and ends
where nearly every one of 100 clients is chosen; with such costs that takes about 50,000, so a unit is 500 here. Each
seed is a batch of fresh profiles, the same for every mechanism, so that differences are paired.

M2's greedy set includes M1's winners: M1 stops where q_m·Σd passes B, and Σc ≤ q_m·Σd. It buys more because it counts
costs against the budget and then pays critical bids, which are higher (docs/errata.md E8). So the same figure shows M1
with the money that M2 really spends, and a separate item judges M2's budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket import auctions
from flmarket.bids import BidProfile
from flmarket.experiments.items import Check, Item, Step, from_checks
from flmarket.experiments.stack import Trend
from flmarket.report import Curve, CurveSet, write_curves

__all__ = ["figure_2", "selection_curves"]

FloatArray = NDArray[np.float64]
UNIT = 500.0
BUDGETS = tuple(10.0 * k for k in range(1, 11))
CANDIDATES = tuple(range(10, 101, 10))
FIXED_BUDGET, FIXED_CANDIDATES = 60.0, 100
MECHANISMS = ("m1", "m2", "m2-bf")
SPENDING = "m1 with what m2 spends"


def selection_curves(
    budgets: Sequence[float], candidates: Sequence[int], *, seeds: int, profiles: int
) -> dict[str, dict[str, FloatArray]]:
    """Means per seed and point of clients, data, spending / budget and share over budget; arrays (seeds, points)."""
    points = list(zip(budgets, candidates, strict=True))
    found = {
        name: {what: np.zeros((seeds, len(points))) for what in ("clients", "data", "spent", "over")}
        for name in (*MECHANISMS, SPENDING)
    }
    for seed in range(seeds):
        for place, (units, n) in enumerate(points):
            bids = BidProfile.sample(np.random.default_rng((seed, n)), profiles, n, "jdp")
            budget: float | FloatArray = units * UNIT
            for name in MECHANISMS:
                _note(found[name], seed, place, name, bids, budget, units * UNIT)
            spent = auctions.get("m2").run(bids, budget).spent
            _note(found[SPENDING], seed, place, "m1", bids, spent, units * UNIT)
    return found


def _note(
    into: dict[str, FloatArray],
    seed: int,
    place: int,
    name: str,
    bids: BidProfile,
    money: float | FloatArray,
    budget: float,
) -> None:
    outcome = auctions.get(name).run(bids, money)
    into["clients"][seed, place] = outcome.winners.sum(axis=-1).mean()
    into["data"][seed, place] = (outcome.winners * bids.data_size).sum(axis=-1).mean()
    into["spent"][seed, place] = outcome.spent.mean() / budget
    into["over"][seed, place] = (outcome.spent > budget * (1 + 1e-9)).mean()


def figure_2(
    out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step
) -> tuple[Item, ...]:  # fmt: skip
    """Panels (a, b) against the budget and (c, d) against the number of candidates."""
    del data_dir
    profiles, seeds = (100, seeds) if quick else (500, seeds)
    step("selection against the budget")
    by_budget = selection_curves(BUDGETS, [FIXED_CANDIDATES] * len(BUDGETS), seeds=seeds, profiles=profiles)
    step("selection against the number of candidates")
    by_number = selection_curves([FIXED_BUDGET] * len(CANDIDATES), CANDIDATES, seeds=seeds, profiles=profiles)
    axis = f"budget in units of {UNIT:g}, {FIXED_CANDIDATES} candidates"
    other = f"candidates, budget {FIXED_BUDGET:g} units"
    return (
        _item(out_dir, "jdp-fig2-budget", "budget (Fig. 2a, b)", BUDGETS, axis, by_budget),
        _item(out_dir, "jdp-fig2-candidates", "number of candidates (Fig. 2c, d)", CANDIDATES, other, by_number),
        _budget_item(by_budget, by_number),
    )


def _budget_item(*found: dict[str, dict[str, FloatArray]]) -> Item:
    spent = np.concatenate([one["m2"]["spent"].ravel() for one in found])
    over = np.concatenate([one["m2"]["over"].ravel() for one in found])
    within = max(float(one[name]["spent"].max()) for one in found for name in ("m1", "m2-bf"))
    return Item(
        "jdp-m2-budget",
        "What M2 really spends",
        "M2 is budget-balanced (abstract, section 4.2).",
        "reproduced" if not over.any() else "differs",
        f"It exceeds the budget on {over.mean():.0%} of profiles and spends {spent.min():.2f} to {spent.max():.2f} "
        "times as much, the more the closer it comes to choosing everybody (E8). M1 and m2-bf spend at most "
        f"{within:.3f} of it.",
        numbers={"spent_over_budget": [one["m2"]["spent"].mean(axis=0).tolist() for one in found]},
    )


def _item(
    out_dir: Path,
    key: str,
    title: str,
    x: Sequence[float],
    axis: str,
    found: dict[str, dict[str, FloatArray]],
) -> Item:
    files: tuple[str, ...] = ()
    for what, label in (("clients", "clients chosen"), ("data", "records bought"), ("spent", "payments / budget")):
        shown = [name for name in found if what != "spent" or name != SPENDING]
        curves = tuple(_curve(name, x, found[name][what]) for name in shown)
        stem = f"{key}-{what}"
        write_curves(CurveSet(f"JDP: {label} against the {title}", axis, label, curves), out_dir, stem)
        files += tuple(f"{stem}.{ending}" for ending in ("png", "svg", "csv"))
    m1, m2, within = (found[name] for name in MECHANISMS)
    growth = {
        f"{name} {what}": Trend.of(found[name][what], +1) for name in ("m1", "m2") for what in ("clients", "data")
    }
    more = bool((m2["data"] >= m1["data"]).all() and (m2["clients"] >= m1["clients"]).all())
    fair = float((found[SPENDING]["data"] / m2["data"]).mean())
    checks = (
        Check.of(
            "growth",
            f"Clients and data chosen grow with the {title.split(' (')[0]}.",
            all(trend.holds for trend in growth.values()),
            "; ".join(f"{name} {trend}" for name, trend in growth.items()),
        ),
        Check.of(
            "order",
            "M2 chooses more clients and data than M1.",
            more,
            f"records bought by M2 over M1: {(m2['data'] / m1['data']).mean():.2f} on average",
        ),
    )
    note = (
        f"M2 is paid for out of more than the budget: with the money that it really spends, M1 buys {fair:.2f} of M2's "
        f"records. m2-bf spends at most {within['spent'].max():.3f} of the budget and buys "
        f"{(within['data'] / m1['data']).mean():.3f} of M1's records here: its guarantee is for the worst case, and on "
        "such profiles both take the same clients."
    )
    numbers = {name: {what: a.mean(axis=0).tolist() for what, a in values.items()} for name, values in found.items()}
    return from_checks(
        key,
        f"Client selection against the {title}",
        checks,
        files=files,
        numbers={"x": list(x), **numbers},
        note=note,
    )


def _curve(label: str, x: Sequence[float], values: FloatArray) -> Curve:
    error = values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
    return Curve(
        label,
        tuple(map(float, x)),
        tuple(values.mean(axis=0).tolist()),
        None if error is None else tuple(error.tolist()),
    )
