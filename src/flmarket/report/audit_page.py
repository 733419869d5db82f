"""The page of an audit, for somebody who has never seen the code: verdicts, the worst lie, what was searched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flmarket.audit import AuditReport, ClaimVerdict, Example
from flmarket.files import write_files
from flmarket.report.audit_chart import gain_chart
from flmarket.report.audit_story import tell
from flmarket.report.formatting import count, epsilon, percent, significant
from flmarket.report.html import render
from flmarket.trust import BIDS_ONLY

__all__ = ["claim_rows", "write_audit"]

_CLAIM = {
    "truthful": "Nobody gains by lying (truthful)",
    "rational": "Nobody is paid below cost (rational)",
    "budget_feasible": "Payments stay within the budget",
    "within_privacy_budget": "Nobody gives up more privacy than she allows",
}
_LEVEL = {"exact": "claimed without exception", "approximate": "claimed approximately", "none": "not claimed"}
_SIGN = {
    "holds": ("✓", "kept"),
    "contradicted": ("✗", "broken"),
    "no figure": ("?", "broken"),
    "not claimed": ("–", ""),
}
_LIE = {
    "value_only": "her cost only",
    "privacy_budget": "her privacy limit only",
    "data_size": "her number of records only",
    "joint": "several at once",
}
_SEARCH = {
    "grid": "fixed multiples of the truth",
    "critical": "bisection to the point where her allocation changes",
    "families": "another shape of cost curve",
    "reshaped": "cost curves of any shape",
    "ranks": "just under and over every rival",
    "random": "random reports",
    "refine": "small steps around the best found",
}


def write_audit(report: AuditReport, path: str | os.PathLike[str], *, command: str | None = None) -> Path:
    """Write one HTML file that needs nothing else, whole or not at all; returns its path."""
    target = Path(path)
    chart, caption = gain_chart(report.worst)
    page = render(
        "audit.html.j2",
        trust=BIDS_ONLY,
        title=report.mechanism,
        story=_story(report),
        contradicted=[_CLAIM.get(claim.claim, claim.claim) for claim in report.contradicted],
        cards=_cards(report),
        claims=claim_rows(report.claims),
        chart=chart,
        caption=caption,
        tale=tell(report.worst),
        owners=_owners(report.worst),
        lies=_lies(report),
        efficiency=_efficiency(report),
        conduct=_conduct(report),
        searches=_searches(report),
        log=report.truthful.search,
        source=report.source,
        assumes=report.assumes,
        command=command,
    )
    return write_files(target.parent, {target.name: page}) / target.name


def _story(report: AuditReport) -> str:
    log = report.truthful.search
    findings = len(report.contradicted)
    silent = [_CLAIM[claim.claim] for claim in report.claims if claim.verdict == "not claimed"]
    but = (
        f" It does not claim that {', or that '.join(text[0].lower() + text[1:] for text in silent)}." if silent else ""
    )
    verdict = (f"{count(findings, 'claim')} did not survive." if findings else "Every claim it makes survived.") + but
    return (
        f"An auction decides whose data a buyer gets, how much privacy each owner gives up and what she is paid. "
        f"This page tests whether {report.mechanism} does so as it claims, on "
        f"{count(report.profiles, 'random auction')} of {count(report.owners, 'owner')} "
        f"(population {report.population}), trying {count(log.misreports_per_owner, 'lie')} for each owner. {verdict}"
    )


def _cards(report: AuditReport) -> list[dict[str, str]]:
    regret, rational, budget = report.truthful.overall, report.rational, report.budget
    cards = [
        ("Auctions where a lie pays", percent(regret.profiles_with_gain), "at least one owner gains"),
        ("Largest gain by lying", percent(regret.max_regret_over_cost), "of the owner’s own cost"),
        ("Paid below cost", f"{rational.violations:,}", f"of {rational.owners_checked:,} honest owners"),
        ("Over budget", percent(budget.profiles_over), f"worst: {significant(budget.worst_ratio)} × the budget"),
    ]
    middle = [row for row in report.efficiency if row.budget_factor == 0.5]
    if middle:
        cards.append(
            ("Error against the ideal", f"{significant(middle[0].ratio)} ×", "of the first best, at half of all costs")
        )
    return [{"label": name, "value": value, "note": note} for name, value, note in cards]


def claim_rows(claims: Sequence[ClaimVerdict]) -> list[dict[str, str]]:
    """Claims as the page lists them."""
    rows = []
    for claim in claims:
        sign, style = _SIGN[claim.verdict]
        rows.append(
            {
                "sign": sign,
                "style": style,
                "name": _CLAIM.get(claim.claim, claim.claim.replace("_", " ")),
                "verdict": claim.verdict,
                "level": _LEVEL[claim.level],
                "evidence": claim.evidence,
            }
        )
    return rows


def _owners(example: Example) -> list[dict[str, Any]]:
    rows = []
    for i, bid in enumerate(example.bids[:100]):
        before, after = example.honest, example.lying
        rows.append(
            {
                "name": f"Owner {i + 1}",
                "liar": i == example.owner and example.gain > 0,
                "records": f"{bid.data_size:,.6g}",
                "limit": epsilon(bid.privacy_budget),
                "cost": significant(bid.full_cost, 4),
                "honest": _cell(before.others_epsilon[i], before.others_payment[i]),
                "lying": _cell(after.others_epsilon[i], after.others_payment[i]),
                "lost": before.others_epsilon[i] <= 0 and after.others_epsilon[i] <= 0,
            }
        )
    return rows


def _cell(eps: float, payment: float) -> str:
    return significant(payment, 4) if eps > 0 or payment > 0 else "–"


def _lies(report: AuditReport) -> list[dict[str, str]]:
    return [
        {
            "name": _LIE[name],
            "judged": "" if name in report.truthful.judged else "not private here",
            "mean": percent(found.mean_regret_over_cost),
            "largest": percent(found.max_regret_over_cost),
            "auctions": percent(found.profiles_with_gain),
            "owners": percent(found.owners_with_gain),
        }
        for name, found in report.truthful.by_dimension.items()
    ]


def _efficiency(report: AuditReport) -> list[dict[str, str]]:
    return [
        {
            "factor": f"{row.budget_factor:g}",
            "reached": significant(row.error_bound),
            "best": significant(row.first_best),
            "ratio": significant(row.ratio),
            "spent": percent(row.budget_used),
            "nobody": percent(row.nobody_selected),
        }
        for row in report.efficiency
    ]


def _conduct(report: AuditReport) -> list[tuple[str, str, str]]:
    found = report.structure

    def share(value: float | None) -> str:
        return "does not apply" if value is None else percent(value)

    return [
        ("Bidding less never loses", share(found.monotone), "owners for whom this held"),
        ("Paid the highest bid that still wins", share(found.critical_payment), "winners of all-or-nothing auctions"),
        ("Order of owners does not matter", share(found.permutation_equivariant), "auctions"),
        ("Currency does not matter", share(found.scale_invariant), "auctions"),
        ("Envy, per record", share(found.envy_per_record), "auctions where an owner would rather sell her records on "
         "another’s price per record and privacy loss"),
        ("Envy, whole contract", share(found.envy_whole_contract), "auctions where she would rather have another’s "
         "payment and privacy loss, whatever the sizes"),
        ("Losers are paid", share(found.losers_paid), "auctions"),
        ("Nobody is selected", share(found.nobody_selected), "auctions"),
        ("Budget used", share(found.budget_used), "on average"),
    ]  # fmt: skip


def _searches(report: AuditReport) -> list[dict[str, Any]]:
    by_search = report.truthful.search.by_search
    names = [name for name in _SEARCH if any(name in found for found in by_search.values())]
    return [
        {"name": _SEARCH[name], "counts": [by_search.get(kind, {}).get(name, 0) or "–" for kind in _LIE]}
        for name in names
    ]
