"""FL-Market 2022: Figures 7 to 10 and Table I, with `posted` and All-in beside the paper's auctions.

Profiles are ten of a thousand owners who share NSL-KDD (`flmarket.populations`). Error bounds are the paper's (one
coordinate of Laplace noise). Figure 9 is trained as the paper says: Laplace noise on every coordinate, L = 1, η = 0.01,
B̄ drawn from [0.1, 2] each round. The model has 615 coordinates, so that noise is far above the signal (docs/errata.md
E2); "ours" beside it has the recommended noise, weights for the whole gradient, and is otherwise the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket import auctions
from flmarket.bids import Auction, BidProfile
from flmarket.engines.config import MarketConfig
from flmarket.experiments import against_m, regret
from flmarket.experiments import fl_market as fl
from flmarket.experiments.items import Check, Item, Reproduction, Step, from_checks
from flmarket.learning import DataSet, load
from flmarket.report import Curve, CurveSet

__all__ = ["ITEMS", "PRINTED_TABLE"]

FloatArray = NDArray[np.float64]
POPULATIONS = {"iid": "flm22-iid", "niid": "flm22-niid"}
FACTORS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
RULES = ("conventional", "opt-aggr")
PAPERS_OWN = ("regretnet", "m-regretnet", "dm-regretnet")
ENTRANTS = (*PAPERS_OWN, "cleared-menu", "all-in", "posted")
DM = "dm-regretnet"
CONVL = "dm-regretnet-convl"
FOR_CONVENTIONAL = {DM: CONVL, "cleared-menu": "cleared-menu-convl"}
TABLE_ROWS = (*PAPERS_OWN, CONVL, "cleared-menu", "cleared-menu-convl", "menu-lottery", "single-lottery", "posted")
# regret and IR violation, IID and non-IID
PRINTED_TABLE = {
    "regretnet": ((0.9351, 0.1684), (0.8164, 0.3864)),
    "m-regretnet": ((0.7715, 0.1508), (0.6652, 0.2020)),
    CONVL: ((0.0617, 0.0251), (0.0516, 0.0210)),
    "dm-regretnet": ((0.0556, 0.0265), (0.0428, 0.0259)),
}


def _profiles(population: str, quick: bool, seeds: int) -> tuple[BidProfile, list[FloatArray]]:
    number = 500 * seeds if quick else 2000 * seeds
    bids = BidProfile.sample(np.random.default_rng(0), number, 10, population)
    return bids, [factor * bids.full_cost.sum(axis=-1) for factor in FACTORS]


def fig7(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Error bound against the budget factor, every auction with both aggregations."""
    del data_dir
    items = []
    for split, population in POPULATIONS.items():
        step(f"error bounds on {population}")
        bids, budgets = _profiles(population, quick, seeds)
        entrants = fl.contenders(population, ENTRANTS)
        curves = fl.bounds(bids, budgets, entrants, RULES)
        own = _for_conventional(population)
        redone = {curve.label: curve for curve in fl.bounds(bids, budgets, own, RULES[:1])}
        curves = [redone.get(curve.label, curve) for curve in curves]
        step(f"first best on {population}")
        least = fl.floor(bids, budgets, profiles=50 if quick else 1000)
        title = f"Error bound against the budget, {population}"
        drawn = fl.curve_set(title, "budget factor B̄", "error bound, log scale", FACTORS, [*curves, least])
        files = fl.written(out_dir, f"flm22-fig7-{split}", drawn, log_y=True)
        by = {(curve.auction, curve.rule): curve for curve in curves}
        checks = (_dm_is_lowest(by), _opt_aggr_is_lower(by, entrants), _falls_beyond_one(by, entrants))
        numbers: dict[str, object] = {curve.label: curve.mean.tolist() for curve in (*curves, least)}
        items.append(
            from_checks(
                f"flm22-fig7-{split}",
                f"FLM22 Figure 7: error bound against the budget ({split})",
                checks,
                files=files,
                numbers={"factors": list(FACTORS), "profiles": len(bids.data_size), **numbers},
                note=" ".join((_standing(by, least), _trained_for(own), fl.without(ENTRANTS, entrants))),
            )
        )
    return tuple(items)


def _for_conventional(population: str) -> dict[str, Auction]:
    """Networks are trained for an aggregation, so a line with ConvlAggr is another network where there is one."""
    found = fl.contenders(population, tuple(FOR_CONVENTIONAL.values()))
    return {name: found[other] for name, other in FOR_CONVENTIONAL.items() if other in found}


def _trained_for(own: Mapping[str, Auction]) -> str:
    if own:
        return f"Lines with ConvlAggr of {', '.join(own)} are networks trained for it."
    return "Networks were trained for OptAggr."


def _dm_is_lowest(by: Mapping[tuple[str, str], fl.BoundCurve]) -> Check:
    claim = "DM-RegretNet with OptAggr has a lower error bound than RegretNet and M-RegretNet."
    rivals = [name for name in PAPERS_OWN if name != DM and (name, "opt-aggr") in by]
    if (DM, "opt-aggr") not in by or not rivals:
        return Check.skipped("dm", claim, "no trained weights to compare")
    ours = by[DM, "opt-aggr"]
    lower = {name: int((ours.mean < by[name, "opt-aggr"].mean).sum()) for name in rivals}
    none = {name: int(np.isinf(by[name, "opt-aggr"].mean).sum()) for name in rivals}
    text = ", ".join(
        f"below {name} at {count} of {len(FACTORS)} budgets"
        + (f" (at {none[name]} of them nobody ever sells to it)" if none[name] else "")
        for name, count in lower.items()
    )
    return Check.of("dm", claim, all(count == len(FACTORS) for count in lower.values()), text)


def _opt_aggr_is_lower(by: Mapping[tuple[str, str], fl.BoundCurve], entrants: Mapping[str, Auction]) -> Check:
    gain = {name: fl.ratio(by[name, RULES[1]], by[name, RULES[0]]) for name in entrants}
    holds = not any((ratio > 1 + 1e-12).any() for ratio in gain.values())
    text = ", ".join(f"{name} {fl.finite_mean(ratio):.2f}" for name, ratio in gain.items())
    return Check.of(
        "opt-aggr",
        "OptAggr has a lower error bound than ConvlAggr under every auction.",
        holds,
        f"OptAggr's bound over ConvlAggr's, mean over budgets: {text}",
    )


def _falls_beyond_one(by: Mapping[tuple[str, str], fl.BoundCurve], entrants: Mapping[str, Auction]) -> Check:
    at = FACTORS.index(1.0)
    change = {name: by[name, "opt-aggr"].mean[-1] / by[name, "opt-aggr"].mean[at] - 1.0 for name in entrants}
    text = ", ".join(f"{name} {value:+.0%}" for name, value in change.items())
    return Check.of(
        "budget",
        "Beyond B̄ = 1 the bound may still fall, since truthful payments exceed costs.",
        all(value < 0 for value in change.values()),
        f"change from B̄ = 1 to 2: {text}",
    )


def _standing(by: Mapping[tuple[str, str], fl.BoundCurve], least: fl.BoundCurve) -> str:
    """Means over the budgets at which every auction bought somebody: a mean over easier budgets only would flatter."""
    curves = {name: curve for (name, rule), curve in by.items() if rule == "opt-aggr"}
    common = np.logical_and.reduce([np.isfinite(curve.mean) for curve in curves.values()])
    if not common.any():
        return "At no budget did every auction buy somebody."
    means = {name: float(curve.mean[common].mean()) for name, curve in curves.items()}
    order = ", ".join(f"{name} {value:.2f}" for name, value in sorted(means.items(), key=lambda pair: pair[1]))
    at = ", ".join(f"{factor:g}" for factor, use in zip(FACTORS, common, strict=True) if use)
    return f"Mean over B̄ = {at} with OptAggr: {order}; first best {least.mean[common].mean():.2f}."


def fig8(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """How often nobody sells."""
    del data_dir
    items = []
    for split, population in POPULATIONS.items():
        step(f"invalid gradients on {population}")
        bids, budgets = _profiles(population, quick, seeds)
        entrants = fl.contenders(population, ENTRANTS)
        curves = fl.bounds(bids, budgets, entrants, RULES[1:])
        drawn = fl.curve_set(
            f"Auctions in which nobody sells, {population}", "budget factor B̄", "share", FACTORS, curves, invalid=True
        )
        rate = {curve.auction: float(curve.invalid.mean()) for curve in curves}
        listed = ", ".join(f"{name} {value:.2%}" for name, value in rate.items())
        claim = "DM-RegretNet never yields an invalid gradient."
        text = f"share of invalid gradients, mean over budgets: {listed}"
        known = DM in rate
        checks = [
            Check.of("dm", claim, rate[DM] == 0, text) if known else Check.skipped("dm", claim, f"no weights; {text}")
        ]
        random = [name for name in ("regretnet", "m-regretnet") if name in rate]
        claim = "The randomised RegretNet and M-RegretNet often do."
        often = all(rate[name] > 0.05 for name in random)
        checks.append(
            Check.of("randomised", claim, often, ", ".join(f"{name} {rate[name]:.1%}" for name in random))
            if random
            else Check.skipped("randomised", claim, "no trained weights")
        )
        items.append(
            from_checks(
                f"flm22-fig8-{split}",
                f"FLM22 Figure 8: invalid gradients ({split})",
                checks,
                files=fl.written(out_dir, f"flm22-fig8-{split}", drawn),
                numbers={curve.auction: curve.invalid.tolist() for curve in curves},
                note=fl.without(ENTRANTS, entrants),
            )
        )
    return tuple(items)


def fig9(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Accuracy over rounds, as the paper trains; and with the recommended noise beside it."""
    data = fl.few_tests(load("nsl-kdd", data_dir), 4000) if quick else load("nsl-kdd", data_dir)
    return tuple(
        _fig9(out_dir, data, split, quick=quick, seeds=seeds, step=step) for split in POPULATIONS
    )  # fmt: skip


def _fig9(out_dir: Path, data: DataSet, split: str, *, quick: bool, seeds: int, step: Step) -> Item:
    population = POPULATIONS[split]
    entrants = fl.contenders(population, ENTRANTS)
    rounds, last = 60 if quick else 100, 20  # rounds that the final accuracy is averaged over: single rounds are noise
    accuracy: dict[str, FloatArray] = {}
    own = _for_conventional(population)
    for name, auction in entrants.items():
        for rule in RULES:
            step(f"{population}: {name} with {rule}")
            clearing = own.get(name, auction) if rule == "conventional" else auction
            accuracy[f"{name} · {rule}"] = _accuracy(_market(split, rule, rounds), data, clearing, seeds)
    step(f"{population}: ours")
    ours = _market(split, "opt-aggr", rounds, perturbation="recommended", bound_dimension="model")
    accuracy["posted · ours"] = _accuracy(ours, data, entrants.get("posted", auctions.get("posted")), seeds)
    final = {label: values[:, -last:].mean(axis=1) for label, values in accuracy.items()}
    curves = []
    for place, (label, values) in enumerate(accuracy.items()):
        mean, error = fl.mean_and_se(_smoothed(values))
        color = list(entrants).index(label.split(" · ")[0]) if label.split(" · ")[0] in entrants else place
        dash = {"conventional": 1, "opt-aggr": 0, "ours": 2}[label.split(" · ")[1]]
        band = None if error is None else tuple(error.tolist())
        curves.append(Curve(label, tuple(range(1, rounds + 1)), tuple(mean.tolist()), band, color, dash))
    title = f"Accuracy on NSL-KDD, {population} (mean of ten rounds)"
    files = fl.written(
        out_dir, f"flm22-fig9-{split}", CurveSet(title, "round", "test accuracy", tuple(curves))
    )  # fmt: skip
    means = {label: float(values.mean()) for label, values in final.items()}
    baseline = float(np.bincount(data.y_test).max() / len(data.y_test))
    checks = (_dm_trains_best(final, entrants), _opt_aggr_trains_better(final, entrants), _ours_trains(final, baseline))
    return from_checks(
        f"flm22-fig9-{split}",
        f"FLM22 Figure 9: accuracy over rounds ({split})",
        checks,
        files=files,
        numbers={"final": {label: values.tolist() for label, values in final.items()}, "mean": dict(means)},
        note=f"Always saying the commonest class scores {baseline:.3f}. Accuracy is the mean of the last {last} "
        f"rounds, {seeds} seeds. {_trained_for(own)} " + fl.without(ENTRANTS, entrants),
    )


def _market(split: str, rule: str, rounds: int, **mechanism: object) -> MarketConfig:
    partition = {"iid": "power-law", "niid": "dirichlet"}[split]
    paper = {"auction": "all-in", "perturbation": "laplace-l1", "bound_dimension": 1, "aggregation": rule}
    return MarketConfig.parse(
        {
            # the announced budget is the largest; DrawnBudget takes a share of it, so that B̄ is uniform in [0.1, 2]
            "task": {"rounds": rounds, "bidders_per_round": 10, "budget_factor": 2.0, "learning_rate": 0.01},
            "data": {"name": "nsl-kdd", "owners": 1000, "partition": partition, "minimum": 10 if split == "iid" else 1},
            "mechanism": paper | mechanism,
        }
    )


def _accuracy(config: MarketConfig, data: DataSet, auction: Auction, seeds: int) -> FloatArray:
    results = fl.runs(config, data, auction, range(seeds), least_share=0.05)
    return np.array([result.accuracy for result in results])


def _smoothed(values: FloatArray, width: int = 10) -> FloatArray:
    """Mean of the last `width` rounds at every round: a single round's accuracy under so much noise is a coin toss."""
    total = np.cumsum(np.concatenate([np.zeros((len(values), 1)), values], axis=1), axis=1)
    ends = np.arange(1, values.shape[1] + 1)
    starts = np.maximum(ends - width, 0)
    return np.asarray((total[:, ends] - total[:, starts]) / (ends - starts))


def _dm_trains_best(final: Mapping[str, FloatArray], entrants: Mapping[str, Auction]) -> Check:
    claim = "DM-RegretNet trains more accurate models than RegretNet and M-RegretNet."
    rivals = [name for name in PAPERS_OWN if name != DM and name in entrants]
    if DM not in entrants or not rivals:
        return Check.skipped("dm", claim, "no trained weights to compare")
    gaps = {name: fl.paired(final[f"{DM} · opt-aggr"], final[f"{name} · opt-aggr"]) for name in rivals}
    text = ", ".join(f"{mean:+.3f} ± {error:.3f} against {name}" for name, (mean, error) in gaps.items())
    return Check.of("dm", claim, all(mean > 2 * error for mean, error in gaps.values()), text)


def _opt_aggr_trains_better(final: Mapping[str, FloatArray], entrants: Mapping[str, Auction]) -> Check:
    gaps = {name: final[f"{name} · opt-aggr"] - final[f"{name} · conventional"] for name in entrants}
    return Check.of(
        "opt-aggr",
        "OptAggr trains more accurate models than ConvlAggr.",
        *fl.clearly_positive("OptAggr minus ConvlAggr", gaps),
    )


def _ours_trains(final: Mapping[str, FloatArray], baseline: float) -> Check:
    """Not the paper's claim, but what makes its other claims meaningful: is anything learned at all?"""
    ours = float(final["posted · ours"].mean())
    papers = {label: float(values.mean()) for label, values in final.items() if label != "posted · ours"}
    best = max(papers, key=lambda label: papers[label])
    return Check.of(
        "learns",
        "Beyond the paper: with the recommended noise and weights for all coordinates the model learns more.",
        ours > papers[best] and ours > baseline,
        f"{ours:.3f}, against {papers[best]:.3f} for {best}, the best with the paper's noise",
        beyond=True,
    )


def table1(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Regret and IR violation: printed, by the paper's metric, and as a strong search finds them."""
    del data_dir, seeds
    return tuple(
        regret.regret_table(
            out_dir,
            f"flm22-table1-{split}",
            f"FLM22 Table I: regret and IR violation ({split})",
            population,
            fl.contenders(population, TABLE_ROWS),
            {name: row[place] for name, row in PRINTED_TABLE.items()},
            quick=quick,
            step=step,
        )
        for place, (split, population) in enumerate(POPULATIONS.items())
    )


def fig10(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """Regret and IR violation of M-RegretNet against M, models trained here."""
    del data_dir
    return against_m.fig10(out_dir, quick=quick, seeds=seeds, step=step)


ITEMS: dict[str, Reproduction] = {"fig7": fig7, "fig8": fig8, "fig9": fig9, "fig10": fig10, "table1": table1}
