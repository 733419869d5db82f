"""JDP's Figure 2: how many clients and how much data M1 and M2 buy, what M2 really spends on it, and who envies whom.

Costs and sizes uniform in [1, 1000] (population "jdp"). The paper's budget runs "from 10 units to 100 units" and ends
where nearly every one of 100 clients is chosen; with such costs that takes about 50,000, so a unit is 500 here. Each
seed is a batch of fresh profiles, the same for every mechanism, so that differences are paired.

M2's greedy set includes M1's winners: M1 stops where q_m·Σd passes B, and Σc ≤ q_m·Σd. It buys more because it counts
costs against the budget and then pays critical bids, which are higher (docs/errata.md E8). So the same figure shows M1
with the money that M2 really spends, and a separate item judges what the paper promises of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flmarket import auctions
from flmarket.audit.rules import envy
from flmarket.bids import BidProfile, FloatArray
from flmarket.experiments.items import Check, Item, Job, from_checks, line
from flmarket.experiments.verdicts import Estimate, Finding, combined, judged, trend

Found = dict[str, dict[str, FloatArray]]
UNIT = 500.0
BUDGETS = tuple(10.0 * k for k in range(1, 11))
CANDIDATES = tuple(range(10, 101, 10))
FIXED_BUDGET, FIXED_CANDIDATES = 60.0, 100
MECHANISMS = ("m1", "m2", "m2-bf")
SPENDING = "m1 with what m2 spends"
PRINTED_AT, PRINTED = 90, {"m1": 35_000.0, "m2": 39_000.0}  # records at so many candidates, Fig. 2(d)
NEAR = 0.03  # of a printed level that was read off a plot


def selection_curves(
    budgets: Sequence[float], candidates: Sequence[int], *, seeds: range, profiles: int, spending: bool = True
) -> Found:
    """Means per seed and point of clients, data, spending / budget and share over budget; arrays (seeds, points)."""
    found: Found = {}
    for place, seed in enumerate(seeds):
        for point, (units, n) in enumerate(zip(budgets, candidates, strict=True)):
            bids, budget = _bids(seed, n, profiles), units * UNIT
            outcomes = {name: auctions.get(name).run(bids, budget) for name in MECHANISMS}
            if spending:
                outcomes[SPENDING] = auctions.get("m1").run(bids, outcomes["m2"].spent)
            for name, outcome in outcomes.items():
                measured = {
                    "clients": outcome.winners.sum(axis=-1),
                    "data": (outcome.winners * bids.data_size).sum(axis=-1),
                    "spent": outcome.spent / budget,
                    "over": outcome.spent > budget * (1 + 1e-9),
                }
                for what, values in measured.items():
                    into = found.setdefault(name, {}).setdefault(what, np.zeros((len(seeds), len(budgets))))
                    into[place, point] = values.mean()
    return found


def _bids(seed: int, candidates: int, profiles: int) -> BidProfile:
    return BidProfile.sample(np.random.default_rng((seed, candidates)), profiles, candidates, "jdp")


def figure_2(job: Job) -> tuple[Item, ...]:
    """Panels (a, b) against the budget and (c, d) against the number of candidates."""
    profiles = 100 if job.quick else 500
    job.step("selection against the budget")
    by_budget = selection_curves(
        BUDGETS, [FIXED_CANDIDATES] * len(BUDGETS), seeds=job.seeds, profiles=profiles
    )  # fmt: skip
    job.step("selection against the number of candidates")
    by_number = selection_curves(
        [FIXED_BUDGET] * len(CANDIDATES), CANDIDATES, seeds=job.seeds, profiles=profiles
    )  # fmt: skip
    axis = f"budget in units of {UNIT:g}, {FIXED_CANDIDATES} candidates"
    other = f"candidates, budget {FIXED_BUDGET:g} units"
    return (
        _item(job, "jdp-fig2-budget", "budget (Fig. 2a, b)", BUDGETS, axis, by_budget, []),
        _item(
            job, "jdp-fig2-candidates", "number of candidates (Fig. 2c, d)", CANDIDATES, other, by_number,
            [_levels(job, profiles)],
        ),
        _promises(job, by_budget, by_number),
    )  # fmt: skip


def _item(
    job: Job, key: str, title: str, x: Sequence[float], axis: str, found: Found, more: Sequence[Check]
) -> Item:  # fmt: skip
    files: tuple[str, ...] = ()
    for what, label in (("clients", "clients chosen"), ("data", "records bought"), ("spent", "payments / budget")):
        curves = [line(name, x, found[name][what]) for name in found if what != "spent" or name != SPENDING]
        files += job.written(f"{key}-{what}", f"JDP: {label} against the {title}", axis, label, curves)
    m1, m2, within = (found[name] for name in MECHANISMS)
    growth = {f"{name} {what}": trend(found[name][what], +1) for name in ("m1", "m2") for what in ("clients", "data")}
    lead = {
        f"{what} at {at:g}": Estimate.of(gap)
        for what in ("clients", "data")
        for at, gap in zip(x, (m2[what] - m1[what]).T, strict=True)
    }
    ratio = f"records bought by M2 over M1: {(m2['data'] / m1['data']).mean():.2f} on average"
    checks = (
        Check.of(
            "growth",
            f"Clients and data chosen grow with the {title.split(' (')[0]}.",
            Finding(
                combined(one.verdict for one in growth.values()),
                "; ".join(f"{name} {one.text}" for name, one in growth.items()),
            ),
        ),
        Check.of(
            "order",
            "M2 chooses no fewer clients and data than M1.",
            Finding(judged(lead, above=0.0, or_equal=True).verdict, ratio),
        ),
        *more,
    )
    fair = float((found[SPENDING]["data"] / m2["data"]).mean())
    note = (
        f"M2 is paid for out of more than the budget: with the money that it really spends, M1 buys {fair:.2f} of M2's "
        f"records. m2-bf spends at most {within['spent'].max():.3f} of the budget and buys "
        f"{(within['data'] / m1['data']).mean():.3f} of M1's records here: its guarantee is for the worst case, and on "
        "such profiles both take the same clients."
    )
    numbers = {name: {what: a.mean(axis=0).tolist() for what, a in values.items()} for name, values in found.items()}
    title = f"Client selection against the {title}"
    return from_checks(key, title, checks, files=files, numbers={"x": list(x), **numbers}, note=note)


def _levels(job: Job, profiles: int) -> Check:
    """What M2 buys at the budget at which M1 buys what the paper prints."""
    job.step("the printed levels of Figure 2(d)")
    budgets = tuple(np.arange(40.0, 101.0, 5.0).tolist())
    found = selection_curves(
        budgets, [PRINTED_AT] * len(budgets), seeds=job.seeds, profiles=profiles, spending=False
    )  # fmt: skip
    at = [np.interp(PRINTED["m1"], row, budgets) for row in found["m1"]["data"]]
    m2 = np.array([np.interp(units, budgets, row) for units, row in zip(at, found["m2"]["data"], strict=True)])
    told = judged({"": Estimate.of(m2)}, above=PRINTED["m2"] * (1 - NEAR), below=PRINTED["m2"] * (1 + NEAR))
    return Check.of(
        "levels",
        "At 90 candidates M1 buys about 35,000 records and M2 39,000.",
        Finding(told.verdict, f"where M1 buys 35,000 (at {np.mean(at):.0f} units), M2 buys {told.text}"),
    )


def _promises(job: Job, *found: Found) -> Item:
    """Budget balance of both mechanisms, and M1's freedom from envy."""
    over = {
        name: Estimate.of(np.concatenate([one[name]["over"] for one in found], axis=1).mean(axis=1))
        for name in ("m1", "m2")
    }
    spent = np.concatenate([one["m2"]["spent"].ravel() for one in found])
    within = max(float(one[name]["spent"].max()) for one in found for name in ("m1", "m2-bf"))
    job.step("envy")
    envied = np.array(
        [
            envy(bids, auctions.get("m1").run(bids, FIXED_BUDGET * UNIT))
            for bids in (_bids(s, 40, 50) for s in job.seeds)
        ]
    )
    checks = (
        Check.of(
            "m1-budget",
            "M1 is budget-balanced (Theorem 3).",
            judged({"share of profiles over budget": over["m1"]}, below=0.0, or_equal=True),
        ),
        Check.of(
            "m2-budget",
            "M2 is budget-balanced (section 4.2).",
            judged({"share of profiles over budget": over["m2"]}, below=0.0, or_equal=True)
            + f"; it spends {spent.min():.2f} to {spent.max():.2f} times the budget, the more the closer it comes to "
            f"choosing everybody (E8). M1 and m2-bf spend at most {within:.3f} of it",
        ),
        Check.of(
            "envy",
            "M1 is envy-free: nobody would rather sell her records at another's price (section 4.2.1).",
            judged({"share of profiles with envy": Estimate.of(envied[:, 0])}, below=0.0, or_equal=True)
            + f"; for another's whole payment, which her fewer records would not earn, it is {envied[:, 1].mean():.0%}",
        ),
    )
    return from_checks(
        "jdp-promises",
        "What M1 and M2 promise",
        checks,
        numbers={"m2_spent_over_budget": [one["m2"]["spent"].mean(axis=0).tolist() for one in found]},
    )
