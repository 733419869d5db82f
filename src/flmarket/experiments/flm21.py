"""FL-Market 2021: Figures 5 to 8 and Table 1, with `posted` beside All-in and MURBA.

Ten owners of equal data size; ε̄ up to 5 ("low" sensitivity) or 2 ("high"). The figures' budgets are not in the text:
here a budget is a multiple of what one owner costs on average, B = k · mean v_i(ε̄_i), as the text defines it for Figure
6, so that k = 10 pays everybody her whole privacy budget. "Nobody sells" is a curve that disappears in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.auctions.learned import PaperAuction
from flmarket.audit import AuditReport
from flmarket.bids import Auction, BidProfile
from flmarket.engines.config import MarketConfig
from flmarket.errors import FlmarketError
from flmarket.experiments import against_m, regret
from flmarket.experiments import fl_market as fl
from flmarket.experiments.items import Check, Item, Reproduction, Step, from_checks
from flmarket.learning import DataSet, load
from flmarket.report import Curve, CurveSet

__all__ = ["ITEMS", "PRINTED_TABLE"]

FloatArray = NDArray[np.float64]
POPULATIONS = {"low": "flm21-low", "high": "flm21-high"}
MULTIPLES = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
OWNERS = (2, 5, 10, 20, 30)
RULES = ("bias-opt", "var-opt")
ENTRANTS = ("murba", "all-in", "cleared-menu-20", "posted")
SIZES = (10, 15, 20)
MURBA = {10: "murba-10", 15: "murba-15", 20: "murba"}
# M → (regret max, regret mean, IR max, IR mean), each (low, high); "< 0.0001" as 0.0001
PRINTED_TABLE = {
    10: ((0.0040, 0.1603), (0.0009, 0.0537), (0.0011, 0.0013), (0.0001, 0.0001)),
    15: ((0.0226, 0.1307), (0.0051, 0.0371), (0.0034, 0.0279), (0.0003, 0.0030)),
    20: ((0.0229, 0.0718), (0.0057, 0.0265), (0.0009, 0.0361), (0.0001, 0.0040)),
}


def _profiles(population: str, quick: bool, seeds: int, owners: int = 10) -> BidProfile:
    number = 500 * seeds if quick else 2000 * seeds
    return BidProfile.sample(np.random.default_rng(0), number, owners, population)


def fig5(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Error bound against the budget."""
    del data_dir
    items = []
    for level, population in POPULATIONS.items():
        step(f"error bounds on {population}")
        bids = _profiles(population, quick, seeds)
        budgets = [k * bids.full_cost.mean(axis=-1) for k in MULTIPLES]
        entrants = fl.contenders(population, ENTRANTS)
        curves = fl.bounds(bids, budgets, entrants, RULES)
        step(f"first best on {population}")
        least = fl.floor(bids, budgets, profiles=50 if quick else 1000)
        label = "budget, in mean costs of one owner (log10)"
        x = np.round(np.log10(MULTIPLES), 2).tolist()
        stem = f"flm21-fig5-{level}"
        title = f"Error bound against the budget, {population}"
        drawn = fl.curve_set(title, label, "error bound, log scale", x, [*curves, least])
        empty = fl.curve_set(
            f"Auctions in which nobody sells, {population}", label, "share", x, _one_rule(curves), invalid=True
        )
        files = (*fl.written(out_dir, stem, drawn, log_y=True), *fl.written(out_dir, f"{stem}-nobody", empty))
        by = {(curve.auction, curve.rule): curve for curve in curves}
        checks = [_small_budgets(by), _var_opt(by, entrants)]
        if level == "high":
            checks.append(_large_budgets(by))
        items.append(
            from_checks(
                stem,
                f"FLM21 Figure 5: error bound against the budget ({level} sensitivity)",
                checks,
                files=files,
                numbers={
                    "multiples": list(MULTIPLES),
                    "bound": {curve.label: curve.mean.tolist() for curve in (*curves, least)},
                    "nobody_sells": {curve.auction: curve.invalid.tolist() for curve in _one_rule(curves)},
                },
                note=fl.without(ENTRANTS, entrants),
            )
        )
    return tuple(items)


def _one_rule(curves: list[fl.BoundCurve]) -> list[fl.BoundCurve]:
    return [curve for curve in curves if curve.rule == RULES[-1]]


def _small_budgets(by: Mapping[tuple[str, str], fl.BoundCurve]) -> Check:
    claim = "At small budgets All-in buys nobody and MURBA outperforms it."
    empty = by["all-in", "var-opt"].invalid
    rivals = [name for name in ("murba", "posted") if (name, "var-opt") in by]
    text = f"All-in buys nobody in {empty[0]:.0%} of auctions at {MULTIPLES[0]:g} mean costs"
    text += "".join(f", {name} in {by[name, 'var-opt'].invalid[0]:.0%}" for name in rivals)
    if "murba" not in rivals:
        return Check.skipped("small-budgets", claim, f"no trained weights of murba; {text}")
    holds = bool(empty[0] > 0.5 and by["murba", "var-opt"].invalid[0] < empty[0])
    return Check.of("small-budgets", claim, holds, text)


def _var_opt(by: Mapping[tuple[str, str], fl.BoundCurve], entrants: Mapping[str, Auction]) -> Check:
    worse = {name: fl.dearer(by[name, "var-opt"], by[name, "bias-opt"]) for name in entrants}
    ratio = {name: fl.finite_mean(fl.ratio(by[name, "var-opt"], by[name, "bias-opt"])) for name in entrants}
    text = ", ".join(f"{name} {value:.2f}" for name, value in ratio.items())
    where = [f"{k:g}" for k, *lost in zip(MULTIPLES, *worse.values(), strict=True) if any(lost)]
    because = f"; VarOpt is clearly worse at {', '.join(where)} mean costs, where noise is small and bias counts"
    return Check.of(
        "var-opt",
        "VarOpt performs better than BiasOpt.",
        not where and all(value < 1 for value in ratio.values()),
        f"VarOpt's bound over BiasOpt's, mean over budgets: {text}" + (because if where else ""),
    )


def _large_budgets(by: Mapping[tuple[str, str], fl.BoundCurve]) -> Check:
    claim = "In the highly sensitive scenario All-in is superior when the budget is relatively large."
    if ("murba", "var-opt") not in by:
        return Check.skipped("large-budgets", claim, "no trained weights of murba")
    ours, theirs = (by[name, "var-opt"].mean[-1] for name in ("all-in", "murba"))
    return Check.of(
        "large-budgets", claim, bool(ours < theirs), f"at {MULTIPLES[-1]:g} mean costs {ours:.3f}, MURBA {theirs:.3f}"
    )


def fig6(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Error bound against the number of owners, at one budget: an owner's mean cost."""
    del data_dir
    items = []
    for level, population in POPULATIONS.items():
        entrants = fl.contenders(population, ENTRANTS)
        points: dict[tuple[str, str], list[fl.BoundCurve]] = {}
        for owners in OWNERS:
            step(f"{owners} owners of {population}")
            bids = _profiles(population, quick, seeds, owners)
            budget = [np.full(len(bids.data_size), bids.full_cost.mean())]
            able = {name: auction for name, auction in entrants.items() if _runs(auction, bids, budget[0])}
            for curve in fl.bounds(bids, budget, able, RULES):
                points.setdefault((curve.auction, curve.rule), []).append(curve)
            points.setdefault((fl.FIRST_BEST, ""), []).append(
                fl.floor(bids, budget, profiles=50 if quick else 1000)
            )  # fmt: skip
        whole = {name: _joined(parts) for name, parts in points.items() if len(parts) == len(OWNERS)}
        stem = f"flm21-fig6-{level}"
        title = f"Error bound against the number of owners, {population}"
        drawn = fl.curve_set(title, "owners", "error bound, log scale", OWNERS, list(whole.values()))
        some = [name for name in entrants if (name, "var-opt") not in whole]
        items.append(
            from_checks(
                stem,
                f"FLM21 Figure 6: error bound against owners ({level} sensitivity)",
                (_more_owners(whole), _nobody(whole), _lead(whole)),
                files=fl.written(out_dir, stem, drawn, log_y=True),
                numbers={
                    "owners": list(OWNERS),
                    "bound": {curve.label: curve.mean.tolist() for curve in whole.values()},
                    "nobody_sells": {curve.label: curve.invalid.tolist() for curve in whole.values()},
                },
                note=fl.without(ENTRANTS, entrants)
                + (f" {', '.join(some)}: trained for ten owners only, not drawn." if some else ""),
            )
        )
    return tuple(items)


def _runs(auction: Auction, bids: BidProfile, budget: FloatArray) -> bool:
    """Whether a learned auction takes this number of owners."""
    try:
        auction.run(bids[:1], budget[:1], rng=np.random.default_rng(0))
    except FlmarketError:
        return False
    return True


def _joined(parts: list[fl.BoundCurve]) -> fl.BoundCurve:
    columns = (np.concatenate([getattr(part, field) for part in parts]) for field in ("mean", "se", "invalid"))
    return fl.BoundCurve(parts[0].auction, parts[0].rule, *columns)


def _more_owners(whole: Mapping[tuple[str, str], fl.BoundCurve]) -> Check:
    falls = {curve.label: curve.mean[-1] / curve.mean[0] for curve in whole.values() if curve.rule == "var-opt"}
    best = whole[fl.FIRST_BEST, ""].mean
    text = (
        ", ".join(f"{label} {ratio:.2f}" for label, ratio in falls.items()) + f"; first best {best[-1] / best[0]:.2f}"
    )
    because = "; even the first best rises, since whoever is left out adds to the bias" if best[-1] > best[0] else ""
    return Check.of(
        "owners",
        "At a fixed budget all mechanisms do better with more owners.",
        all(ratio < 1 for ratio in falls.values()),
        f"bound with {OWNERS[-1]} owners over that with {OWNERS[0]}: {text}{because}",
    )


def _nobody(whole: Mapping[tuple[str, str], fl.BoundCurve]) -> Check:
    empty = whole["all-in", "var-opt"].invalid
    return Check.of(
        "nobody",
        "With few owners All-in may fail to select even one.",
        bool(empty[0] > 0 and empty[0] > empty[-1]),
        f"nobody sells in {empty[0]:.1%} of auctions of {OWNERS[0]} owners and {empty[-1]:.1%} of {OWNERS[-1]}",
    )


def _lead(whole: Mapping[tuple[str, str], fl.BoundCurve]) -> Check:
    claim = "With many owners the advantage of MURBA with VarOpt over All-in becomes smaller."
    if ("murba", "var-opt") not in whole:
        return Check.skipped("lead", claim, "no trained weights of murba for these numbers of owners")
    lead = whole["all-in", "var-opt"].mean - whole["murba", "var-opt"].mean
    return Check.of("lead", claim, bool(lead[-1] < lead[0]), f"from {lead[0]:.3f} to {lead[-1]:.3f}")


def fig7(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """The error bound of the paper's MURBA against M; every model gets the same short training."""
    del data_dir
    return tuple(_fig7(out_dir, level, quick=quick, seeds=seeds, step=step) for level in POPULATIONS)


def _fig7(out_dir: Path, level: str, *, quick: bool, seeds: int, step: Step) -> Item:
    population = POPULATIONS[level]
    bids = BidProfile.sample(np.random.default_rng(1), 500 if quick else 2000, 10, population)
    budget = [5.0 * bids.full_cost.mean(axis=-1)]
    mean = {rule: np.zeros((seeds, len(SIZES))) for rule in RULES}
    for place, m in enumerate(SIZES):
        for seed in range(seeds):
            step(f"training MURBA on {population}, M = {m}, seed {seed}")
            auction = against_m.short_training(MURBA[m], m, population, quick=quick, seed=seed)[0]
            for curve in fl.bounds(bids, budget, {"murba": auction}, RULES):
                mean[curve.rule][seed, place] = curve.mean[0]
    lines = []
    for rule in RULES:
        values, error = fl.mean_and_se(mean[rule])
        band = None if error is None else tuple(error.tolist())
        lines.append(Curve(f"murba · {rule}", tuple(SIZES), tuple(values.tolist()), band))
    drawn = CurveSet(f"MURBA's error bound against M, {population}, short training", "M", "error bound", tuple(lines))
    change, error_of_change = fl.paired(mean["var-opt"][:, -1], mean["var-opt"][:, 0])
    text = ", ".join(f"{value:.3f}" for value in mean["var-opt"].mean(axis=0))
    check = Check.of(
        "m",
        "MURBA's error bound falls as M grows.",
        change < -2 * error_of_change,
        f"with VarOpt {text} at M = {', '.join(map(str, SIZES))}; from first to last {change:+.3f} ± "
        f"{error_of_change:.3f}",
    )
    epochs, batches, profiles, _ = against_m.SHORT[quick]
    return from_checks(
        f"flm21-fig7-{level}",
        f"FLM21 Figure 7: effect of M ({level} sensitivity)",
        [check],
        files=fl.written(out_dir, f"flm21-fig7-{level}", drawn),
        numbers={"m": list(SIZES), "bound": {rule: values.mean(axis=0).tolist() for rule, values in mean.items()}},
        note=f"{seeds} models per M on {epochs * batches} batches of {profiles} profiles each (the paper: 10,000 of "
        "1,000); B = 5 mean costs.",
    )


def fig8(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Accuracy on Bank Marketing after ten rounds, against the budget."""
    data = load("bank-marketing", data_dir)
    data = fl.few_tests(data, 2000) if quick else data
    repeats = range(2 * seeds if quick else 10 * seeds)  # ten rounds are cheap, and noisy
    multiples = (0.5, 2.0, 10.0) if quick else (0.5, 1.0, 2.0, 5.0, 10.0)
    return tuple(_fig8(out_dir, data, level, multiples, repeats, step) for level in POPULATIONS)


def _fig8(
    out_dir: Path, data: DataSet, level: str, multiples: tuple[float, ...], repeats: range, step: Step
) -> Item:  # fmt: skip
    population = POPULATIONS[level]
    entrants = fl.contenders(population, ENTRANTS)
    final: dict[str, list[FloatArray]] = {}
    for name, auction in entrants.items():
        for rule in RULES:
            step(f"{population}: {name} with {rule}")
            for k in multiples:
                results = fl.runs(_market(level, rule, k / 10), data, auction, repeats)
                final.setdefault(f"{name} · {rule}", []).append(np.array([run.accuracy[-1] for run in results]))
    ours = [
        fl.runs(_market(level, "opt-aggr", k / 10, ours=True), data, entrants["posted"], repeats) for k in multiples
    ]
    final["posted · ours"] = [np.array([run.accuracy[-1] for run in results]) for results in ours]
    curves = []
    for label, columns in final.items():
        mean, error = fl.mean_and_se(np.array(columns).T)
        name, rule = label.split(" · ")
        band = None if error is None else tuple(error.tolist())
        dash = {"bias-opt": 1, "var-opt": 0, "ours": 2}[rule]
        curves.append(Curve(label, multiples, tuple(mean.tolist()), band, list(entrants).index(name), dash))
    title = f"Accuracy on Bank Marketing after ten rounds, {population}"
    drawn = CurveSet(title, "budget, in mean costs of one owner", "test accuracy", tuple(curves))
    stem = f"flm21-fig8-{level}"
    baseline = ours[0][0].baseline_accuracy
    return from_checks(
        stem,
        f"FLM21 Figure 8: accuracy on Bank Marketing ({level} sensitivity)",
        (_budget_helps(final, entrants), _murba_wins(final, entrants)),
        files=fl.written(out_dir, stem, drawn),
        numbers={
            "multiples": list(multiples),
            "mean": {label: [float(column.mean()) for column in columns] for label, columns in final.items()},
        },
        note=f"{len(repeats)} runs a point. Always saying no scores {baseline:.3f}; with the "
        f"recommended noise posted reaches {np.mean(final['posted · ours'][-1]):.3f} at the largest budget. "
        + fl.without(ENTRANTS, entrants),
    )


def _market(level: str, rule: str, factor: float, *, ours: bool = False) -> MarketConfig:
    """A thousand owners of equal size, ten of whom bid: fresh owners each round, as in the paper."""
    noise = {"perturbation": "recommended", "bound_dimension": "model"} if ours else {
        "perturbation": "laplace-l1", "bound_dimension": 1,
    }  # fmt: skip
    return MarketConfig.parse(
        {
            "task": {"rounds": 10, "bidders_per_round": 10, "budget_factor": factor, "learning_rate": 0.01},
            "data": {"name": "bank-marketing", "owners": 1000, "partition": "equal"},
            "owners": {"privacy_budget": [0.5, {"low": 5.0, "high": 2.0}[level]]},
            "mechanism": {"auction": "all-in", "aggregation": rule, **noise},
        }
    )


def _budget_helps(final: Mapping[str, list[FloatArray]], entrants: Mapping[str, Auction]) -> Check:
    gaps = {name: final[f"{name} · var-opt"][-1] - final[f"{name} · var-opt"][0] for name in entrants}
    return Check.of(
        "budget",
        "Accuracy tends to be better with a larger budget.",
        *fl.clearly_positive("largest minus smallest budget, VarOpt", gaps),
    )


def _murba_wins(final: Mapping[str, list[FloatArray]], entrants: Mapping[str, Auction]) -> Check:
    claim = "MURBA with VarOpt always outperforms the other mechanisms."
    means = {
        label: float(np.mean(columns))
        for label, columns in final.items()
        if label.split(" · ")[0] in ("murba", "all-in")
    }
    text = ", ".join(f"{label} {value:.3f}" for label, value in means.items())
    if "murba" not in entrants:
        return Check.skipped("murba", claim, f"no trained weights of murba; mean over budgets {text}")
    best = max(means, key=lambda label: means[label])
    return Check.of("murba", claim, best == "murba · var-opt", f"mean over budgets: {text}")


def table1(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """MURBA's violations for M = 10, 15, 20: printed, by the paper's metric, and as our search finds them."""
    del out_dir, data_dir, seeds
    claim = "MURBA's regret and IR violations are highly limited: at most 0.16 and 0.036."
    rows: list[tuple[str, str, str]] = []
    metric: dict[str, dict[str, float]] = {}
    strong: dict[str, dict[str, float]] = {}
    for m, printed in PRINTED_TABLE.items():
        for place, (level, population) in enumerate(POPULATIONS.items()):
            what, row = f"M = {m}, {level}", " / ".join(f"{column[place]:.4f}" for column in printed)
            theirs = fl.contenders(population, (MURBA[m],)).get(MURBA[m])
            if not isinstance(theirs, PaperAuction):
                rows.append((what, row, "no trained weights"))
                continue
            step(f"searching for lies in MURBA, {what}")
            found = regret.measured_by_the_papers(theirs, MURBA[m], population, quick=quick)
            metric[what] = dict(
                zip(_COLUMNS, (found.worst_rgt, found.rgt, found.worst_irv, found.irv), strict=True)
            )  # fmt: skip
            strong[what] = _violations(regret.audited(theirs, population, quick=quick))
            rows.append((f"{what}, the paper's metric", row, _row(metric[what])))
            rows.append((f"{what}, our search, over cost", row, _row(strong[what])))
    ours = {level: fl.contenders(population, ("cleared-menu-20",)) for level, population in POPULATIONS.items()}
    for level, population in POPULATIONS.items():
        for name, auction in ours[level].items():
            step(f"searching for lies in {name}, {level}")
            rows.append(
                (
                    f"{name}, {level}, our search",
                    "–",
                    _row(_violations(regret.audited(auction, population, quick=quick))),
                )
            )
    if not metric:
        check = Check.skipped("size", claim, "no trained weights of murba")
    else:
        regrets, losses = (max(row[column] for row in metric.values()) for column in ("regret_max", "ir_max"))
        text = (
            f"by the paper's metric at most {regrets:.3f} and {losses:.3f}, in money; by our search {_largest(strong)}"
        )
        check = Check.of("size", claim, regrets <= 0.16 and losses <= 0.036, text)
    return from_checks(
        "flm21-table1",
        "FLM21 Table 1: regret and IR violation of MURBA",
        [check],
        numbers={"papers_metric": metric, "our_search": strong},
        beside=rows,
        note="Rows: regret max / regret mean / IR max / IR mean, of one owner's mean in money as in the paper; by our "
        "search over the owner's cost.",
    )


_COLUMNS = ("regret_max", "regret_mean", "ir_max", "ir_mean")


def _row(values: Mapping[str, float]) -> str:
    return " / ".join(f"{values[column]:.4f}" for column in _COLUMNS)


def _violations(report: AuditReport) -> dict[str, float]:
    overall, rational = report.truthful.overall, report.rational
    return {
        "regret_max": overall.max_regret_over_cost,
        "regret_mean": overall.mean_regret_over_cost,
        "ir_max": max(0.0, -rational.worst),
        "ir_mean": rational.mean_loss_over_cost,
    }


def _largest(found: Mapping[str, Mapping[str, float]]) -> str:
    worst = (max(row[column] for row in found.values()) for column in ("regret_mean", "ir_mean"))
    return "mean regret up to {:.3f} and mean IR violation up to {:.3f} of cost".format(*worst)


ITEMS: dict[str, Reproduction] = {"fig5": fig5, "fig6": fig6, "fig7": fig7, "fig8": fig8, "table1": table1}
