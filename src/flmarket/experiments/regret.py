"""Tables of regret and IR violation: what a paper printed, its own metric on its networks, and the audit's search.

All are means over owners: the gain of the best misreport found, about value and privacy budget together, and the amount
paid below cost. The papers search by a fixed number of ascent steps from the truth, keep the last, and divide by the
cost of what is sold (`training.papers`); the audit searches far harder (`flmarket.audit`), and divides by the
cost of the whole privacy budget. Its regret is a lower bound all the same. Every seed has profiles of its own, the same
for all auctions.

The papers' networks with few or many sub-bids an owner (M), trained here: FLM22 Figure 10 and FLM21 Figure 7.

The papers train for days: 5,000 or 10,000 batches of a thousand profiles, for each of ten models per M. These are the
same networks and losses with a training of minutes, the same for every M, so levels are ours and only the direction in
M can be compared. Regret is that of a gauge, a fixed list of lies, over the owner's full cost.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flmarket.auctions.learned import LearnedAuction, PaperAuction
from flmarket.audit import AuditReport, audit
from flmarket.bids import Auction
from flmarket.errors import MissingDependency
from flmarket.experiments import fl_market as fl
from flmarket.experiments.items import Check, Item, Job, from_checks, line
from flmarket.experiments.verdicts import Estimate, Finding, judged, missing, trend
from flmarket.files import write_files
from flmarket.report.curves import Bar, BarSet, write_bars

if TYPE_CHECKING:
    from flmarket.auctions.learned.training.papers import PapersMetric

PRIVATE = ("value", "privacy_budget")
PROFILES = {True: 20, False: 60}  # quick, full; of all seeds together
SAMPLED_PROFILES = 30  # at most, where an auction draws lots: every lie is judged over 32 draws
LOW = 0.1  # of cost: what we call a small violation
METRIC_PROFILES = {True: 200, False: 1000}


def audited(job: Job, auction: Auction, population: str) -> list[AuditReport]:
    """The audits that every row of a table comes from, one for each seed."""
    number = PROFILES[job.quick]
    ours = isinstance(auction, LearnedAuction) and auction.settings.deployment == "sampled"
    if ours or (isinstance(auction, PaperAuction) and auction.settings.sold == "drawn"):
        number = min(number, SAMPLED_PROFILES)
    each = -(-number // len(job.seeds))
    search = "quick" if job.quick else "strong"
    return [audit(auction, population, each, search=search, seed=seed, private=PRIVATE) for seed in job.seeds]


def measured_by_the_papers(job: Job, auction: PaperAuction, preset_name: str, population: str) -> list[PapersMetric]:
    """The papers' own search and metric on one of their networks, on fresh profiles for each seed."""
    try:
        from flmarket.auctions.learned.training import paper_preset
        from flmarket.auctions.learned.training.market import Source
        from flmarket.auctions.learned.training.papers import by_the_papers
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "torch") from None
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
    bars = tuple(
        Bar(name, what, float(value))
        for name, row in means.items()
        for what, value in zip(("regret", "IR violation"), row, strict=True)
    )
    drawn = BarSet(f"Regret and IR violation, {population}", "share of the owner's cost", bars) if bars else None
    files = () if drawn is None else write_bars(drawn, job.out_dir, key)
    write_files(job.out_dir, {f"{key}-audit.csv": _csv(reports)})
    log = next((rows[0].truthful.search for rows in reports.values()), None)
    fields = ("rgt", "irv", "rgt_deployed", "irv_deployed", "noise")
    return from_checks(
        key,
        title,
        [_far_below(found), _within_two(metric, printed), _ours_is_small(found), _posted(found)],
        files=(*files, f"{key}-audit.csv"),
        numbers={name: {"regret": float(rgt), "ir_violation": float(ir)} for name, (rgt, ir) in means.items()}
        | {f"{name}, the paper's metric": {f: mean(one, f) for f in fields} for name, one in metric.items()},
        beside=beside,
        note=""
        if log is None
        else f"{log.strength.capitalize()} search: {log.misreports_per_owner} misreports by each owner of "
        f"{PROFILES[job.quick]} profiles (at most {SAMPLED_PROFILES} where lots are drawn). Rows: regret, IR "
        f"violation. {fl.without(tuple(printed), entrants)}",
    )


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
    return Check.of("metric", claim, Finding(judged(ratio, above=-1.0, below=1.0, or_equal=True).verdict, text))


def _far_below(found: Mapping[str, np.ndarray[tuple[int, int], np.dtype[np.float64]]]) -> Check:
    claim = "DM-RegretNet's regret and IR violation are not above RegretNet's and M-RegretNet's."
    rivals = [name for name in ("regretnet", "m-regretnet") if name in found]
    if "dm-regretnet" not in found or not rivals:
        return Check.of("order", claim, fl.no_weights("dm-regretnet", "its rivals"))
    saved = {
        f"{name}'s {what} minus DM-RegretNet's": Estimate.of((found[name] - found["dm-regretnet"])[:, place])
        for name in rivals
        for place, what in enumerate(("regret", "IR violation"))
    }
    return Check.of("order", claim, judged(saved, above=0.0, or_equal=True))


def _ours_is_small(found: Mapping[str, np.ndarray[tuple[int, int], np.dtype[np.float64]]]) -> Check:
    """About our network, so not the paper's statement."""
    claim = f"Beyond the paper: cleared-menu, this project's network, keeps both below {LOW:g}."
    if "cleared-menu" not in found:
        return Check.of("size", claim, fl.no_weights("cleared-menu"), beyond=True)
    both = {what: Estimate.of(found["cleared-menu"][:, place]) for place, what in enumerate(("regret", "IR violation"))}
    return Check.of("size", claim, judged(both, below=LOW), beyond=True)


def _posted(found: Mapping[str, np.ndarray[tuple[int, int], np.dtype[np.float64]]]) -> Check:
    claim = "Beyond the paper: posted has neither."
    if "posted" not in found:
        return Check.of("posted", claim, missing("not among the entrants"), beyond=True)
    both = {what: Estimate.of(found["posted"][:, place]) for place, what in enumerate(("regret", "IR violation"))}
    return Check.of("posted", claim, judged(both, below=0.0, or_equal=True), beyond=True)


def _csv(reports: Mapping[str, Sequence[AuditReport]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ("mechanism", "seed", "mean_regret", "median_regret", "max_regret", "owners_with_gain", "regret_size_lies",
         "ir_mean", "ir_worst", "over_budget")
    )  # fmt: skip
    for name, report in ((name, one) for name, rows in reports.items() for one in rows):
        overall, size = report.truthful.overall, report.truthful.by_dimension["data_size"]
        writer.writerow(
            (name, report.seed, overall.mean_regret_over_cost, overall.median_regret_over_cost,
             overall.max_regret_over_cost, overall.owners_with_gain, size.mean_regret_over_cost,
             report.rational.mean_loss_over_cost, report.rational.worst, report.budget.profiles_over)
        )  # fmt: skip
    return buffer.getvalue()


SIZES = (1, 2, 4, 8, 16)
POPULATION = "flm22-iid"
# epochs, batches an epoch, profiles a batch, steps of the search for lies
SHORT = {True: (2, 15, 32, 6), False: (10, 20, 128, 20)}


def short_training(
    preset_name: str, items: int, population: str, *, quick: bool, seed: int
) -> tuple[PaperAuction, float, float]:
    """A paper's network with M = `items`, trained briefly: the auction, its regret and its payments below cost."""
    try:
        import torch

        from flmarket.auctions.learned.training import paper_preset
        from flmarket.auctions.learned.training.market import Source
        from flmarket.auctions.learned.training.papers import PaperTrainer
        from flmarket.auctions.learned.training.trainer import measure
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "torch") from None
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
    found = {name: np.zeros((len(job.seeds), len(SIZES))) for name in ("regret", "IR violation")}
    for place, m in enumerate(SIZES):
        for row, seed in enumerate(job.seeds):
            job.step(f"training M-RegretNet, M = {m}, seed {seed}")
            measured = short_training("m-regretnet", m, POPULATION, quick=job.quick, seed=seed)[1:]
            found["regret"][row, place], found["IR violation"][row, place] = measured
    epochs, batches, profiles, _ = SHORT[job.quick]
    return from_checks(
        "flm22-fig10",
        "FLM22 Figure 10: effect of M on regret and IR violation",
        [
            Check.of(key, f"M-RegretNet's {name} falls as M grows.", trend(values, -1, steps=False))
            for key, (name, values) in zip(("regret", "ir"), found.items(), strict=True)
        ],
        files=job.written(
            "flm22-fig10", "M-RegretNet against M, short training", "M", "share of the owner's cost",
            [line(name, SIZES, values) for name, values in found.items()],
        ),
        numbers={"m": list(SIZES), **{name: values.mean(axis=0).tolist() for name, values in found.items()}},
        note=f"{len(job.seeds)} models per M, each trained on {epochs * batches} batches of {profiles} profiles (the "
        "paper: ten models, 5,000 batches of 1,024).",
    )  # fmt: skip
