"""What FL-Market's two papers share: who takes part in a figure, error bounds with their floor, regret, training runs.

The papers' own networks take part where trained weights for the population ship, and are left out where not; a figure
says who is missing, and how far the others were trained, and a claim about who is missing is undecided. This project's
networks stand beside them, as `cleared-menu`. `posted`, fitted to the population, takes part in every figure too, and
the first best (a buyer who knows every cost) is the floor: no auction that must leave owners a rent reaches it.

Error bounds are kept per profile: auctions are compared on the same ones, on those in which both bought somebody.

Tables of regret and IR violation: what a paper printed, its own metric on its networks, and the audit's search. All are
means over owners: the gain of the best misreport found, about value and privacy budget together, and the amount paid
below cost. The papers search by a fixed number of ascent steps from the truth, keep the last, and divide by the cost of
what is sold (`training.papers`); the audit searches far harder (`flmarket.audit`), and divides by the cost of the whole
privacy budget. Its regret is a lower bound all the same. Every seed has profiles of its own, the same for all auctions.

The papers' networks with few or many sub-bids an owner (M), trained here: FLM22 Figure 10 and FLM21 Figure 7. The
papers train for days: 5,000 or 10,000 batches of a thousand profiles, for each of ten models per M. These are the same
networks and losses with a training of minutes, the same for every M, so levels are ours and only the direction in M can
be compared. Regret is that of a gauge, a fixed list of lies, over the owner's full cost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

import flmarket
from flmarket import auctions
from flmarket.aggregation import error_bound
from flmarket.aggregation import get as get_rule
from flmarket.auctions import learned
from flmarket.auctions.learned import LearnedAuction, PaperAuction
from flmarket.audit import STRENGTHS, AuditReport, audit, first_best
from flmarket.audit.attacks import Around
from flmarket.bids import Auction, BidProfile, FloatArray, Outcome
from flmarket.engines.config import MarketConfig
from flmarket.errors import FlmarketError, MissingDependency, needed
from flmarket.experiments import bound_summary
from flmarket.experiments.items import (
    Check,
    Estimate,
    Finding,
    Item,
    Job,
    Sheet,
    judged,
    line,
    lines_of,
    means_of,
    missing,
    trend,
)
from flmarket.files import csv_text, write_files
from flmarket.learning import DataSet
from flmarket.report import Curve
from flmarket.report.curves import Bar, BarSet, write_bars

if TYPE_CHECKING:
    from flmarket.auctions.learned.training.papers import PapersMetric


FIRST_BEST = "first best"
LEARNED = (*learned.PAPERS, *learned.DEFAULTS)
RUNS = "market-runs"  # folder of finished trainings inside the output folder
VERSION = 1  # of what a kept training means
PRIVATE = ("value", "privacy_budget")
PROFILES = {True: 20, False: 60}  # quick, full; of all seeds together
SAMPLED_PROFILES = 30  # at most, where an auction draws lots: every lie is judged over 32 draws
VIOLATIONS = ("regret", "IR violation")
LOW = 0.1  # of cost: what we call a small violation
METRIC_PROFILES = {True: 200, False: 1000}
SIZES = (1, 2, 4, 8, 16)
POPULATION = "flm22-iid"
# epochs, batches an epoch, profiles a batch, steps of the search for lies
SHORT = {True: (2, 15, 32, 6), False: (10, 20, 128, 20)}


def contenders(population: str, names: Sequence[str]) -> dict[str, Auction]:
    """The auctions among `names` that exist for a population, those trained on it where there are such, by name."""
    found: dict[str, Auction] = {}
    for name in names:
        tuned = name in LEARNED or name == "posted"
        try:
            found[name] = auctions.get(f"{name}:{population}" if tuned and ":" not in name else name)
        except MissingDependency:
            raise
        except (FlmarketError, FileNotFoundError, TypeError):  # unknown, or no weights for this population
            continue
    return found


def no_weights(*names: str) -> Finding:
    """What there is to say about auctions that are not there."""
    return missing(f"weights of {' and '.join(names)} not shipped")


def compared(
    key: str, claim: str, lead: Mapping[str, Estimate] | None, absent: Sequence[str], *, or_equal: bool = False
) -> Check:
    """Whether every lead is above 0; None where weights are missing."""
    found = no_weights(*absent) if lead is None else judged(lead, above=0.0, or_equal=or_equal)
    return Check.of(key, claim, found)


def on_average(key: str, claim: str, what: str, gain: Mapping[str, FloatArray]) -> Check:
    """Whether the mean gain of all auctions, run by run, is above 0."""
    listed = ", ".join(f"{name} {Estimate.of(values)}" for name, values in gain.items())
    together = {what: Estimate.of(np.mean(list(gain.values()), axis=0))}
    return Check.of(key, claim, judged(together, above=0.0) + f"; {listed}")


def without(names: Sequence[str], found: Mapping[str, object]) -> str:
    """A remark on who is missing, and on how far the papers' networks were trained that are there."""
    absent = [name for name in names if name not in found]
    text = [f"Weights of {', '.join(absent)} are not shipped for this population."] if absent else []
    papers = [f"{name} {one.training}" for name, one in found.items() if isinstance(one, learned.PaperAuction)]
    return " ".join(text + ([f"Trained: {', '.join(papers)}."] if papers else []))


def profiles(job: Job, population: str, owners: int = 10) -> BidProfile:
    """Fresh profiles for every seed."""
    rng = np.random.default_rng((job.seeds.start, owners))
    return BidProfile.sample(rng, (500 if job.quick else 2000) * len(job.seeds), owners, population)


@dataclass(frozen=True, eq=False)
class BoundCurve:
    """Error bounds (points, profiles), ∞ where nobody sold."""

    auction: str
    rule: str
    values: FloatArray

    @property
    def label(self) -> str:
        """As it stands in a plot."""
        return f"{self.auction} · {self.rule}" if self.rule else self.auction

    @property
    def mean(self) -> FloatArray:
        """Over the auctions in which somebody sold; ∞ if nobody ever did."""
        return np.array([bound_summary(row)[0] for row in self.values])

    @property
    def empty(self) -> NDArray[np.bool_]:
        """Where nobody sold."""
        return np.isinf(self.values)


Curves = dict[tuple[str, str], BoundCurve]  # by auction and rule


def bounds(
    bids: BidProfile,
    budgets: Sequence[FloatArray],
    entrants: Mapping[str, Auction],
    rules: Sequence[str],
    *,
    dimension: int = 1,
) -> Curves:
    """Every auction with every aggregation on the same profiles, a budget per profile at each point."""
    points: dict[tuple[str, str], list[FloatArray]] = {}
    for name, auction in entrants.items():
        for place, budget in enumerate(budgets):
            outcome = auction.run(bids, budget, rng=np.random.default_rng(place))
            sold = np.where(outcome.participation > 0, outcome.epsilon, 0.0)
            for rule in rules:
                weights = get_rule(rule, dimension=dimension).weights(sold, bids.data_size)
                bound = error_bound(weights, sold, bids.data_size, dimension=dimension)
                points.setdefault((name, rule), []).append(bound)
    return {pair: BoundCurve(*pair, np.array(rows)) for pair, rows in points.items()}


def floor(job: Job, bids: BidProfile, budgets: Sequence[FloatArray]) -> BoundCurve:
    """The first best on the first few profiles."""
    count = min(50 if job.quick else 1000, len(bids.data_size))
    # all budgets in one call: the solver's effort hardly depends on how many profiles it has
    many = bids[np.tile(np.arange(count), len(budgets))]
    found = first_best(many, np.concatenate([budget[:count] for budget in budgets]))[1]
    return BoundCurve(FIRST_BEST, "", found.reshape(len(budgets), count))


def gaps(lower: BoundCurve, higher: BoundCurve, points: Sequence[float], what: str = "") -> dict[str, Estimate]:
    """By how much the first bound is below the second at each point, on profiles in which both bought somebody."""
    found = {}
    for x, ours, theirs in zip(points, lower.values, higher.values, strict=True):
        both = np.isfinite(ours) & np.isfinite(theirs)
        if both.sum() > 1:
            found[f"{what} at {x:g}".strip()] = Estimate.of(theirs[both] - ours[both])
    return found


def fall(curve: BoundCurve, first: int, last: int) -> Estimate:
    """By how much a bound is lower at one point than at another, on profiles in which somebody sold at both."""
    both = np.isfinite(curve.values[first]) & np.isfinite(curve.values[last])
    return Estimate.of(curve.values[first][both] - curve.values[last][both])


def lines(x: Sequence[float], curves: Collection[BoundCurve], *, empty: bool = False) -> list[Curve]:
    """Colour by auction, dash by aggregation; `empty`: the shares of auctions in which nobody sold, once each."""
    names = list(dict.fromkeys(curve.auction for curve in curves))
    rules = list(dict.fromkeys(curve.rule for curve in curves))
    if empty:
        last = [curve for curve in curves if curve.rule == rules[-1]]
        return [line(c.auction, x, c.empty.mean(axis=1), names.index(c.auction), 0) for c in last]
    return [_bound_line(c, x, names.index(c.auction), rules.index(c.rule)) for c in curves]


def _bound_line(curve: BoundCurve, x: Sequence[float], color: int, dash: int) -> Curve:
    mean, error, _ = zip(*(bound_summary(row) for row in curve.values), strict=True)
    return Curve(curve.label, tuple(x), mean, error, color, dash)


def labelled(x: Sequence[float], values: Mapping[str, FloatArray], entrants: Sequence[str]) -> list[Curve]:
    """Lines through (runs, points) called "auction · rule": colour by auction, dash by rule."""
    rules = list(dict.fromkeys(label.split(" · ")[1] for label in values))
    found = []
    for label, rows in values.items():
        name, rule = label.split(" · ")
        color = list(entrants).index(name) if name in entrants else len(entrants)
        found.append(line(label, x, rows, color, rules.index(rule)))
    return found


@dataclass(frozen=True)
class DrawnBudget(Around):
    """An auction whose budget is a random share of the announced one: the papers draw B̄ afresh each round.

    The share is drawn before the auction runs and is the same for every mechanism of one seed and round.
    """

    least_share: float

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Draw the share, then clear."""
        draw = np.random.default_rng(0) if rng is None else rng
        share = draw.uniform(self.least_share, 1.0)
        return self.auction.run(bids, np.asarray(budget, dtype=np.float64) * share, rng=draw)


def trained(
    job: Job, config: MarketConfig, data: DataSet, auction: Auction, runs: range, *, least_share: float | None = None
) -> dict[str, FloatArray]:
    """The market that `config` describes with this auction in it, once for each seed: arrays with a row per run.

    `accuracy` after each round, `spent` in currency units, and `privacy`, Σ ε·records delivered. Kept when finished.
    """

    def play() -> dict[str, list[object]]:
        found: dict[str, list[object]] = {"accuracy": [], "spent": [], "privacy": []}
        for seed in runs:
            simulation = config.model_copy(update={"seed": seed}).simulation(data=data)
            clearing = auction if least_share is None else DrawnBudget(auction, least_share)
            result = replace(simulation, auction=clearing).run()
            found["accuracy"].append(result.accuracy)
            found["spent"].append(result.spent_micros / 1e6)
            sold = (record.epsilon[record.delivered] @ record.data_size[record.delivered] for record in result.rounds)
            found["privacy"].append(float(sum(sold)))
        return found

    setting = {
        "version": [flmarket.__version__, VERSION],
        "market": config.model_dump(mode="json"),
        "auction": [auction.name, auction.guarantees.source, least_share],
        "tests": len(data.y_test),
        "seeds": [runs.start, runs.stop],
    }
    return {what: np.array(values) for what, values in job.kept(RUNS, setting, play).items()}


def few_tests(data: DataSet, records: int) -> DataSet:
    """The same training records and a random part of the test records: every round is measured on them."""
    some = np.random.default_rng(0).permutation(len(data.y_test))[:records]
    return DataSet(data.name, data.x_train, data.y_train, data.x_test[some], data.y_test[some], data.classes)


def audited(job: Job, auction: Auction, population: str) -> list[AuditReport]:
    """The audits that every row of a table comes from, one for each seed."""
    number = PROFILES[job.quick]
    ours = isinstance(auction, LearnedAuction) and auction.settings.deployment == "sampled"
    if ours or (isinstance(auction, PaperAuction) and auction.settings.sold == "drawn"):
        number = min(number, SAMPLED_PROFILES)
    each = -(-number // len(job.seeds))
    search = replace(STRENGTHS["quick" if job.quick else "strong"], efficiency_profiles=0)  # tables show none
    return [audit(auction, population, each, search=search, seed=seed, private=PRIVATE) for seed in job.seeds]


def measured_by_the_papers(job: Job, auction: PaperAuction, preset_name: str, population: str) -> list[PapersMetric]:
    """The papers' own search and metric on one of their networks, on fresh profiles for each seed."""
    with needed("torch"):
        from flmarket.auctions.learned.training import paper_preset
        from flmarket.auctions.learned.training.market import Source
        from flmarket.auctions.learned.training.papers import by_the_papers
    schedule, each = paper_preset(preset_name).schedule, -(-METRIC_PROFILES[job.quick] // len(job.seeds))
    drawn = [(seed, Source(population).draw(np.random.default_rng((seed, 77)), each)) for seed in job.seeds]
    return [by_the_papers(auction, schedule, *profiles, seed=seed) for seed, profiles in drawn]


def mean(found: Sequence[object], field: str) -> float:
    """Of a field over seeds."""
    return float(np.mean([getattr(one, field) for one in found]))


def regret_table(
    job: Job,
    key: str,
    title: str,
    population: str,
    entrants: Mapping[str, Auction],
    printed: Mapping[str, tuple[float, float]],
) -> Item:
    """Audit each mechanism and set the figures beside the printed (regret, IR violation)."""
    reports: dict[str, list[AuditReport]] = {}
    metric: dict[str, list[PapersMetric]] = {}
    for name, auction in entrants.items():
        job.step(f"searching for lies in {name} on {population}")
        reports[name] = audited(job, auction, population)
        if isinstance(auction, PaperAuction):
            metric[name] = measured_by_the_papers(job, auction, name, population)
    found = {name: np.array([_violations(one) for one in rows]) for name, rows in reports.items()}
    means = {name: rows.mean(axis=0) for name, rows in found.items()}
    said = {name: f"{row[0]:.4f}, {row[1]:.4f}" for name, row in printed.items()}
    beside = [(name, said.get(name, "–"), f"{rgt:.4f}, {ir:.4f}") for name, (rgt, ir) in means.items()]
    beside += [(f"{name}, the paper's metric", said[name], _shown(one)) for name, one in metric.items()]
    beside += [(name, row, "weights not shipped") for name, row in said.items() if name not in found]
    sheet = Sheet(job, key, title)
    pairs = [(name, *pair) for name, row in means.items() for pair in zip(VIOLATIONS, row.tolist(), strict=True)]
    bars = [Bar(name, what, value) for name, what, value in pairs]
    if bars:
        drawn = BarSet(f"Regret and IR violation, {population}", "share of the owner's cost", tuple(bars))
        sheet.files += write_bars(drawn, job.out_dir, key)
    write_files(job.out_dir, {f"{key}-audit.csv": _csv(reports)})
    sheet.files.append(f"{key}-audit.csv")
    fields = ("rgt", "irv", "rgt_deployed", "irv_deployed", "noise")
    network = f"cleared-menu, this project's network, keeps both below {LOW:g}."
    sheet.checks = [
        _far_below(found),
        _within_two(metric, printed),
        _ours(found, "cleared-menu", "size", network, LOW, no_weights("cleared-menu")),
        _ours(found, "posted", "posted", "posted has neither.", 0.0, missing("not among the entrants")),
    ]
    sheet.numbers |= {name: {"regret": float(rgt), "ir_violation": float(ir)} for name, (rgt, ir) in means.items()}
    for name, one in metric.items():
        sheet.numbers[f"{name}, the paper's metric"] = {field: mean(one, field) for field in fields}
    note, searched = "", [rows[0].truthful.search for rows in reports.values()]
    if searched:
        log = searched[0]
        note = f"{log.strength.capitalize()} search: {log.misreports_per_owner} misreports by each owner of "
        note += f"{PROFILES[job.quick]} profiles (at most {SAMPLED_PROFILES} where lots are drawn). Rows: regret, IR "
        note += f"violation. {without(tuple(printed), entrants)}"
    return sheet.item(note, beside=beside)


def _violations(report: AuditReport) -> tuple[float, float]:
    return report.truthful.overall.mean_regret_over_cost, report.rational.mean_loss_over_cost


def _shown(one: Sequence[PapersMetric]) -> str:
    noise = f"; with lots drawn anew and no lie {mean(one, 'noise'):.4f}" if mean(one, "noise") else ""
    deployed = f"as deployed {mean(one, 'rgt_deployed'):.4f}, {mean(one, 'irv_deployed'):.4f}"
    return f"{mean(one, 'rgt'):.4f}, {mean(one, 'irv'):.4f}; {deployed}{noise}"


def _within_two(metric: Mapping[str, Sequence[PapersMetric]], printed: Mapping[str, tuple[float, float]]) -> Check:
    """Judged where the printed figure is no sampling noise (docs/errata.md E22): where nothing is drawn."""
    claim = "By its own metric the paper's deterministic networks have the printed violations, within a factor 2."
    fixed = [name for name in printed if name in metric and not mean(metric[name], "noise")]
    ratio = {
        f"{name} {what}": Estimate.of(
            [np.log2(max(getattr(one, what), 1e-9) / printed[name][place]) for one in metric[name]]
        )
        for name in fixed
        for place, what in enumerate(("rgt", "irv"))
    }
    if not ratio:
        return Check.of("metric", claim, missing("weights of the paper's deterministic networks not shipped"))
    text = ", ".join(f"{name} {mean(metric[name], 'rgt'):.3f} and {mean(metric[name], 'irv'):.3f}" for name in fixed)
    return Check.of("metric", claim, judged(ratio, above=-1.0, below=1.0, or_equal=True).told(text))


def _far_below(found: Mapping[str, FloatArray]) -> Check:
    claim = "DM-RegretNet's regret and IR violation are not above RegretNet's and M-RegretNet's."
    saved = {
        f"{name}'s {what} minus DM-RegretNet's": Estimate.of((found[name] - found["dm-regretnet"])[:, place])
        for name in ("regretnet", "m-regretnet")
        if name in found and "dm-regretnet" in found
        for place, what in enumerate(VIOLATIONS)
    }
    return compared("order", claim, saved or None, ("dm-regretnet", "its rivals"), or_equal=True)


def _ours(found: Mapping[str, FloatArray], name: str, key: str, claim: str, below: float, absent: Finding) -> Check:
    """About an auction of ours, so not the paper's statement; a bound of 0 may be reached."""
    if name in found:
        both = {what: Estimate.of(found[name][:, place]) for place, what in enumerate(VIOLATIONS)}
        absent = judged(both, below=below, or_equal=not below)
    return Check.of(key, f"Beyond the paper: {claim}", absent, beyond=True)


def _csv(reports: Mapping[str, Sequence[AuditReport]]) -> str:
    columns = (
        "mechanism", "seed", "mean_regret", "median_regret", "max_regret", "owners_with_gain", "regret_size_lies",
        "ir_mean", "ir_worst", "over_budget",
    )  # fmt: skip
    table = []
    for name, report in ((name, one) for name, rows in reports.items() for one in rows):
        overall, size = report.truthful.overall, report.truthful.by_dimension["data_size"]
        table.append(
            (name, report.seed, overall.mean_regret_over_cost, overall.median_regret_over_cost,
             overall.max_regret_over_cost, overall.owners_with_gain, size.mean_regret_over_cost,
             report.rational.mean_loss_over_cost, report.rational.worst, report.budget.profiles_over)
        )  # fmt: skip
    return csv_text(columns, table)


def short_training(
    preset_name: str, items: int, population: str, *, quick: bool, seed: int
) -> tuple[PaperAuction, float, float]:
    """A paper's network with M = `items`, trained briefly: the auction, its regret and its payments below cost."""
    with needed("torch"):
        import torch

        from flmarket.auctions.learned.training import paper_preset
        from flmarket.auctions.learned.training.market import Source
        from flmarket.auctions.learned.training.papers import PaperTrainer
        from flmarket.auctions.learned.training.trainer import measure
    chosen = paper_preset(preset_name)
    epochs, batches, profiles, misreports = SHORT[quick]
    schedule = replace(chosen.schedule, epochs=epochs, batches=batches, profiles=profiles, misreports=misreports)
    settings = replace(chosen.settings, items=items)
    torch.manual_seed(seed)
    trainer = PaperTrainer(
        replace(chosen, settings=settings, schedule=schedule), Source(population), seed=seed, validation=300
    )
    for _ in trainer.run():
        pass
    auction = trainer.auction()
    draws = 4 if settings.sold == "drawn" else 1
    found = measure(auction, *trainer.held_out, liars=40, draws=draws, seed=seed)
    return auction, found.regret, found.below_cost


def fig10(job: Job) -> Item:
    """Train M-RegretNet for each M and draw regret and IR violation."""
    found = {name: np.zeros((len(job.seeds), len(SIZES))) for name in VIOLATIONS}
    for place, m in enumerate(SIZES):
        for row, seed in enumerate(job.seeds):
            job.step(f"training M-RegretNet, M = {m}, seed {seed}")
            measured = short_training("m-regretnet", m, POPULATION, quick=job.quick, seed=seed)[1:]
            found["regret"][row, place], found["IR violation"][row, place] = measured
    epochs, batches, profiles, _ = SHORT[job.quick]
    sheet = Sheet(job, "flm22-fig10", "FLM22 Figure 10: effect of M on regret and IR violation")
    sheet.draw("M", "share of the owner's cost", lines_of(SIZES, found), "M-RegretNet against M, short training")
    for key, (name, values) in zip(("regret", "ir"), found.items(), strict=True):
        sheet.check(key, f"M-RegretNet's {name} falls as M grows.", trend(values, -1, steps=False))
    sheet.numbers = {"m": list(SIZES), **means_of(found)}
    return sheet.item(
        f"{len(job.seeds)} models per M, each trained on {epochs * batches} batches of {profiles} profiles (the "
        "paper: ten models, 5,000 batches of 1,024)."
    )
