"""Each claim of a mechanism against what the audit found.

An EXACT claim is contradicted by a single violation above tolerance. An APPROXIMATE one needs a measured figure; how
much is acceptable is the reader's to judge. Where nothing is claimed, the finding is given all the same. "Holds" means
that this search on these profiles found nothing against it: it is evidence, not proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flmarket.bids import Auction, Guarantee

if TYPE_CHECKING:
    from flmarket.audit.report import AuditReport

__all__ = ["ClaimVerdict", "check_claims"]

Verdict = Literal["holds", "contradicted", "no figure", "not claimed"]


@dataclass(frozen=True)
class ClaimVerdict:
    """One claim, how strong it is, and what became of it."""

    claim: str
    level: str
    verdict: Verdict
    evidence: str


def check_claims(mechanism: Auction, report: AuditReport) -> list[ClaimVerdict]:
    """Truthful, rational, within budget as the mechanism declares them; and the cap, which no mechanism may break."""
    declared = getattr(mechanism, "guarantees", None)
    checks: tuple[tuple[str, str, Callable[[AuditReport], tuple[bool, float, str]]], ...] = (
        ("truthful", "truthful", _truthful),
        ("rational", "rational", _rational),
        ("budget_feasible", "budget_feasible", _budget),
    )
    verdicts = []
    for claim, field, look in checks:
        level = Guarantee(getattr(declared, field, Guarantee.NONE))
        broken, figure, evidence = look(report)
        verdicts.append(ClaimVerdict(claim, str(level), _judge(level, broken, figure), evidence))
    over = report.rational.over_cap
    evidence = (
        f"{over:,} owners were awarded more than their own limit, up to {report.rational.worst_over_cap:.3g} times it."
        if over
        else f"None of {report.rational.owners_checked:,} owners was awarded more privacy loss than she allows."
    )
    verdicts.append(ClaimVerdict("within_privacy_budget", "exact", "contradicted" if over else "holds", evidence))
    return verdicts


def _judge(level: Guarantee, broken: bool, figure: float) -> Verdict:
    if level is Guarantee.NONE:
        return "not claimed"
    if level is Guarantee.EXACT:
        return "contradicted" if broken else "holds"
    return "holds" if math.isfinite(figure) else "no figure"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _truthful(report: AuditReport) -> tuple[bool, float, str]:
    found, search = report.truthful.overall, report.truthful.search
    fields = _listed([field.replace("_", " ") for field in report.private])
    tried = sum(sum(search.by_search.get(dimension, {}).values()) for dimension in report.truthful.judged)
    searched = f"{tried:,} misreports by each of {search.profiles * search.owners_per_profile:,} owners"
    broken = found.owners_with_gain > 0
    if not broken:
        return False, found.mean_regret_over_cost, f"No lie about {fields} paid off, in {searched}."
    return (
        True,
        found.mean_regret_over_cost,
        f"In {found.profiles_with_gain:.1%} of profiles somebody gains by a lie about {fields}; "
        f"regret is {found.mean_regret_over_cost:.3g} of cost on average and {found.max_regret_over_cost:.3g} at worst "
        f"({searched}).",
    )


def _rational(report: AuditReport) -> tuple[bool, float, str]:
    found = report.rational
    if not found.violations:
        return False, found.mean_loss_over_cost, f"None of {found.owners_checked:,} honest owners was paid below cost."
    ties = f", {found.crafted_violations:,} of them where bids tie" if found.crafted_violations else ""
    return (
        True,
        found.mean_loss_over_cost,
        f"{found.violations:,} of {found.owners_checked:,} honest owners were paid below cost{ties}; the worst lost "
        f"{-found.worst:.3g} of her cost, the mean loss is {found.mean_loss_over_cost:.3g}.",
    )


def _budget(report: AuditReport) -> tuple[bool, float, str]:
    found = report.budget
    if not found.violations:
        return (
            False,
            found.mean_ratio,
            f"None of {found.profiles_checked:,} auctions cost more than the budget; on average "
            f"{found.mean_ratio:.1%} of it was spent.",
        )
    return (
        True,
        found.mean_ratio,
        f"{found.violations:,} of {found.profiles_checked:,} auctions ({found.profiles_over:.1%} of the random ones) "
        f"cost more than the budget, up to {found.worst_ratio:.3g} times it.",
    )
