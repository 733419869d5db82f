"""Tables of regret and IR violation: what a paper printed beside what the audit's search finds on our weights.

Both are means over owners, in units of the owner's cost: the gain of the best misreport found, about value and privacy
budget together, and the amount paid below cost. The papers search by gradient ascent from the truth, on a few steps;
the audit searches far harder (`flmarket.audit`), so its regret is expected to be larger on the same mechanism. It is a
lower bound all the same. Costs here are of the whole privacy budget; the papers divide by the cost of what was sold.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from flmarket.auctions.learned import LearnedAuction
from flmarket.audit import AuditReport, audit
from flmarket.bids import Auction
from flmarket.experiments.fl_market import OTHER_NETWORKS
from flmarket.experiments.items import Check, Item, Step, from_checks
from flmarket.report.bars import Bar, BarSet, write_bars
from flmarket.report.files import write_files

__all__ = ["audited", "regret_table"]

PRIVATE = ("value", "privacy_budget")
PROFILES = {True: 20, False: 60}  # quick, full
SAMPLED_PROFILES = 30  # at most, where an auction draws lots: every lie is judged over 32 draws
LOW = 0.1  # of cost: what we call a small violation


def audited(auction: Auction, population: str, *, quick: bool, profiles: int | None = None) -> AuditReport:
    """The audit that every row of a table comes from."""
    number = PROFILES[quick] if profiles is None else profiles
    if isinstance(auction, LearnedAuction) and auction.settings.deployment == "sampled":
        number = min(number, SAMPLED_PROFILES)
    return audit(auction, population, number, search="quick" if quick else "strong", private=PRIVATE)


def regret_table(
    out_dir: Path,
    key: str,
    title: str,
    population: str,
    entrants: Mapping[str, Auction],
    printed: Mapping[str, tuple[float, float]],
    *,
    quick: bool,
    step: Step,
) -> Item:
    """Audit each mechanism and set the figures beside the printed (regret, IR violation)."""
    reports = {}
    for name, auction in entrants.items():
        step(f"searching for lies in {name} on {population}")
        reports[name] = audited(auction, population, quick=quick)
    found = {name: (_regret(report), report.rational.mean_loss_over_cost) for name, report in reports.items()}
    beside = [
        (name, f"{printed[name][0]:.4f}, {printed[name][1]:.4f}" if name in printed else "–", f"{rgt:.4f}, {ir:.4f}")
        for name, (rgt, ir) in found.items()
    ] + [(name, f"{row[0]:.4f}, {row[1]:.4f}", "not in this run") for name, row in printed.items() if name not in found]
    bars = [
        bar
        for name, (rgt, ir) in found.items()
        for bar in (Bar(name, "regret", rgt), Bar(name, "IR violation", ir))
    ]  # fmt: skip
    files = (
        write_bars(
            BarSet(f"Regret and IR violation, {population}", "share of the owner's cost", tuple(bars)), out_dir, key
        )
        if bars
        else ()
    )
    write_files(out_dir, {f"{key}-audit.csv": _csv(reports)})
    search = max((report.truthful.search for report in reports.values()), key=lambda log: log.profiles, default=None)
    return from_checks(
        key,
        title,
        [_far_below(found), _ours_is_small(found), _posted(found)],
        files=(*files, f"{key}-audit.csv"),
        numbers={name: {"regret": rgt, "ir_violation": ir} for name, (rgt, ir) in found.items()},
        beside=beside,
        note=""
        if search is None
        else f"{search.strength.capitalize()} search: {search.misreports_per_owner} misreports by each owner of "
        f"{search.profiles} profiles ({min(search.profiles, SAMPLED_PROFILES)} where lots are drawn). Rows: regret, IR "
        f"violation. {OTHER_NETWORKS}",
    )


def _regret(report: AuditReport) -> float:
    return report.truthful.overall.mean_regret_over_cost


def _far_below(found: Mapping[str, tuple[float, float]]) -> Check:
    claim = "DM-RegretNet's regret and IR violation are significantly lower than RegretNet's and M-RegretNet's."
    rivals = [name for name in ("regretnet", "m-regretnet") if name in found]
    if "dm-regretnet" not in found or not rivals:
        return Check.skipped("order", claim, "no trained weights to compare")
    rgt, ir = found["dm-regretnet"]
    holds = all(rgt < found[name][0] and ir < found[name][1] for name in rivals)
    text = ", ".join(f"{name} {found[name][0]:.3f} and {found[name][1]:.3f}" for name in rivals)
    return Check.of("order", claim, holds, f"DM-RegretNet {rgt:.3f} and {ir:.3f}; {text}")


def _ours_is_small(found: Mapping[str, tuple[float, float]]) -> Check:
    """About our weights, so not the paper's statement: its own networks are not shipped."""
    claim = "Beyond the paper: our DM-RegretNet, another network than the paper's, keeps both small."
    if "dm-regretnet" not in found:
        return Check.skipped("size", claim, "no trained weights", beyond=True)
    rgt, ir = found["dm-regretnet"]
    text = f"{rgt:.4f} and {ir:.4f} by this search; up to {LOW:g} counts as small"
    return Check.of("size", claim, max(rgt, ir) <= LOW, text, beyond=True)


def _posted(found: Mapping[str, tuple[float, float]]) -> Check:
    claim = "Beyond the paper: posted has neither."
    if "posted" not in found:
        return Check.skipped("posted", claim, "not among the entrants", beyond=True)
    rgt, ir = found["posted"]
    return Check.of("posted", claim, rgt == 0 and ir == 0, f"posted {rgt:g} and {ir:g}", beyond=True)


def _csv(reports: Mapping[str, AuditReport]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ("mechanism", "mean_regret", "median_regret", "max_regret", "owners_with_gain", "regret_size_lies",
         "ir_mean", "ir_worst", "over_budget")
    )  # fmt: skip
    for name, report in reports.items():
        overall, size = report.truthful.overall, report.truthful.by_dimension["data_size"]
        writer.writerow(
            (name, overall.mean_regret_over_cost, overall.median_regret_over_cost, overall.max_regret_over_cost,
             overall.owners_with_gain, size.mean_regret_over_cost, report.rational.mean_loss_over_cost,
             report.rational.worst, report.budget.profiles_over)
        )  # fmt: skip
    return buffer.getvalue()
