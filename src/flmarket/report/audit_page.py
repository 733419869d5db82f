"""The page of an audit, for somebody who has never seen the code: verdicts, the worst lie, what was searched.

Its picture shows what one owner gains or loses as her report moves away from the truth. A sampling scheme's page has
the same parts for one client, and what the scheme spends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.audit import AuditReport, Bid, ClaimVerdict, Curve, Example, SamplingAudit
from flmarket.files import write_files
from flmarket.report.drawing import LIGHT, inline_svg, label, panel, styled
from flmarket.report.formatting import count, epsilon, percent, significant
from flmarket.report.html import render
from flmarket.trust import BIDS_ONLY

__all__ = ["claim_rows", "gain_chart", "tell", "write_audit", "write_sampling_audit"]

_KEY = "gain"
_WIDTH, _HEIGHT = 860.0, 300.0
_X_LABEL = {
    "value": "cost she reports, as a multiple of the true one",
    "privacy_budget": "privacy limit ε̄ she reports (this round), as a multiple of the true one",
    "data_size": "records she reports, as a multiple of the true number",
    "all fields": "from the truth (0) to the lie (1)",
}


def gain_chart(example: Example) -> tuple[str, str]:
    """The figure as SVG, and its caption."""
    curve = example.curve
    assert curve is not None
    cost = example.bids[example.owner].full_cost
    x = np.array(curve.factor)
    gain = np.array(curve.gain) / (cost if cost > 0 else 1.0)
    caption = _caption(curve, gain, example)
    with styled(_KEY):
        figure, axes = panel(
            "gain over honesty, as a share of her true cost",
            _X_LABEL[curve.field],
            width=_WIDTH,
            height=_HEIGHT,
            left=58,
        )
        _draw(axes, curve, x, gain, example)
        return inline_svg(figure, _KEY, "Gain against misreport", caption), caption


def _draw(axes: Any, curve: Curve, x: np.ndarray[Any, Any], gain: np.ndarray[Any, Any], example: Example) -> None:
    shown = np.where(np.isfinite(gain), gain, np.nan)
    known = shown[np.isfinite(shown)]
    low, high = min(0.0, float(known.min(initial=0.0))), max(0.0, float(known.max(initial=0.0)))
    low = max(low, -max(3.0 * high, 1.2))  # a deep loss needs no more room than it takes to see it
    if high - low < 0.05:
        low, high = low - 0.1, high + 0.1
    margin = 0.12 * (high - low)
    axes.set_ylim(low - margin, high + 1.8 * margin)
    axes.set_xlim(float(x[0]), float(x[-1]))
    # a jump is a jump: no line leads from one outcome to another
    broken_x, broken_y = _broken(x, shown, np.array(curve.epsilon))
    axes.axhline(0.0, color=LIGHT["slate"], linewidth=1.2, dashes=(4, 3))
    axes.fill_between(broken_x, 0.0, broken_y, where=broken_y > 0, color=LIGHT["bad"], alpha=0.14, linewidth=0)
    axes.plot(broken_x, broken_y, color=LIGHT["blue"], linewidth=2)
    axes.plot(broken_x, np.where(broken_y > 1e-12, broken_y, np.nan), color=LIGHT["bad"], linewidth=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:,.0f} %".replace("-", "−"))
    honest_x, lie_x = (0.0, 1.0) if curve.field == "all fields" else (1.0, _lie_position(curve.field, example))
    axes.plot([honest_x], [0.0], "o", color=LIGHT["ink"], markersize=7, clip_on=False)
    label(axes, honest_x, 0.0, "the truth", "ink", dx=9, dy=-7, va="top")
    if example.gain > 0 and x[0] <= lie_x <= x[-1]:
        height = example.gain_over_cost
        axes.plot([lie_x], [height], "o", color=LIGHT["bad"], markersize=7, clip_on=False)
        right = lie_x < 0.75 * x[-1] + 0.25 * x[0]
        label(
            axes, lie_x, height, f"the lie: +{percent(height)}", "bad", dx=2 if right else -2, dy=8,
            ha="left" if right else "right", va="bottom", weight="bold",
        )  # fmt: skip


def _lie_position(field: str, example: Example) -> float:
    truth, lie = example.bids[example.owner], example.lie
    told, true = {
        "value": (lie.full_cost, truth.full_cost),
        "privacy_budget": (lie.privacy_budget, truth.privacy_budget),
        "data_size": (lie.data_size, truth.data_size),
    }[field]
    return told / true if true > 0 else 1.0


def _broken(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], epsilon: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    cut = np.flatnonzero((epsilon[1:] > 0) != (epsilon[:-1] > 0)) + 1
    return np.insert(x, cut, x[cut]), np.insert(y, cut, np.nan)


def _caption(curve: Curve, gain: np.ndarray[Any, Any], example: Example) -> str:
    best = float(gain.max(initial=0.0))
    where = "Every point is an auction run again with all other bids unchanged. "
    gap = " The line stops where she would have to sell what she does not have." if np.isinf(gain).any() else ""
    if example.gain > 0:
        more = f"Above the dashed line she earns more than by telling the truth, up to {percent(best)} of her cost."
        return f"{where}{more}{gap}"
    return f"{where}The dashed line is what honesty earns; no report along this line brings more.{gap}"


def tell(example: Example) -> list[str]:
    """The worst example as a few sentences.

    One lie as a story in numbers: who she is, what honesty earns, what she says instead, what that earns.
    """
    truth, lie, honest, lying = example.bids[example.owner], example.lie, example.honest, example.lying
    who = f"Owner {example.owner + 1}"
    told = [
        f"{who} of {len(example.bids)} holds {_records(truth.data_size)}, allows a privacy loss of at most "
        f"{epsilon(truth.privacy_budget)} this round, and that would cost her {significant(truth.full_cost, 4)}. "
        f"The buyer has {significant(example.budget, 4)} to spend.",
        f"If everybody is honest, {_award(honest.epsilon, honest.payment)}; her profit is "
        f"{significant(honest.utility, 4)}.",
    ]
    if example.gain <= 0:
        told.append("Whatever else we let her report, with all other bids unchanged, she did no better than that.")
        return told
    told.append(f"Instead she reports {_difference(truth, lie)}. Now {_award(lying.epsilon, lying.payment)}.")
    sold = min(lie.data_size, truth.data_size)
    cost = lying.payment - lying.utility
    less = f" for the {_records(sold)} she sells" if sold < truth.data_size else ""
    told.append(
        f"What she gives up truly costs her {significant(cost, 4)}{less}, so her profit is "
        f"{significant(lying.utility, 4)}: "
        f"{significant(example.gain, 4)} more than by telling the truth, "
        f"or {percent(example.gain_over_cost)} of her cost."
    )
    return told


def _records(size: float) -> str:
    return "1 record" if size == 1 else f"{size:,.6g} records"


def _award(eps: float, payment: float) -> str:
    if eps <= 0:
        return "she is not selected" + (f" (and still paid {significant(payment, 4)})" if payment > 0 else "")
    return f"she sells a privacy loss of {epsilon(eps)} this round and is paid {significant(payment, 4)}"


def _difference(truth: Bid, lie: Bid) -> str:
    parts = []
    if (lie.rate, lie.kind, lie.values) != (truth.rate, truth.kind, truth.values):
        shape = "" if lie.kind == truth.kind else f" (and a {lie.kind} cost curve where hers is {truth.kind})"
        parts.append(f"a cost of {significant(lie.full_cost, 4)} instead of {significant(truth.full_cost, 4)}{shape}")
    if lie.privacy_budget != truth.privacy_budget:
        parts.append(
            f"a privacy limit of {epsilon(lie.privacy_budget)} this round instead of {epsilon(truth.privacy_budget)}"
        )
    if lie.data_size != truth.data_size:
        parts.append(f"{_records(lie.data_size)} instead of {truth.data_size:,.6g}")
    return " and ".join(parts) or "the truth"


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


def write_sampling_audit(found: SamplingAudit, path: str | os.PathLike[str], *, command: str | None = None) -> Path:
    """Write one HTML file that needs nothing else, whole or not at all; returns its path."""
    target = Path(path)
    chart, caption = _lie_chart(found)
    page = render(
        "sampled_audit.html.j2",
        trust=BIDS_ONLY,
        title=found.scheme,
        story=_sampling_story(found),
        contradicted=[claim.claim.replace("_", " ") for claim in found.contradicted],
        cards=_sampling_cards(found),
        claims=claim_rows(found.claims),
        chart=chart,
        caption=caption,
        lies=found.clients_with_gain > 0,
        spending=[
            {
                "factor": f"{row.budget_factor:g}",
                "draws": f"{row.draws:,}",
                "mean": f"{percent(row.mean_ratio)} ± {percent(row.standard_error)}",
                "worst": percent(row.worst_ratio),
                "objective": significant(row.objective),
                "best": significant(row.first_best),
            }
            for row in found.spending
        ],
        source=found.source,
        assumes=found.assumes,
        reports=f"{found.reports_per_client:,}",
        clients=f"{found.draws * found.clients:,}",
        command=command,
    )
    return write_files(target.parent, {target.name: page}) / target.name


def _sampling_story(found: SamplingAudit) -> str:
    broken = len(found.contradicted)
    end = f"{count(broken, 'claim')} did not survive." if broken else "Every claim it makes survived."
    return (
        f"A sampling scheme decides how often each client takes part and what she is paid, from the cost that she "
        f"reports. This page tests whether {found.scheme} does so as it claims, on {count(found.draws, 'draw')} of "
        f"{count(found.clients, 'client')} ({found.population}), trying {count(found.reports_per_client, 'report')} "
        f"for each. {end}"
    )


def _sampling_cards(found: SamplingAudit) -> list[dict[str, str]]:
    worst = max(row.worst_ratio for row in found.spending)
    mean = max(row.mean_ratio for row in found.spending)
    cards = (
        ("Clients for whom a lie pays", percent(found.clients_with_gain), "of all, in any draw"),
        (
            "Largest gain by lying",
            percent(max(0.0, found.largest_gain_over_cost)),
            "of the client’s own cost, per round",
        ),
        ("Lose by taking part", f"{found.paid_below_cost:,}", f"of {found.draws * found.clients:,} honest clients"),
        ("Expected bill", percent(mean), f"of the budget on average; {percent(worst)} in the worst draw"),
    )
    return [{"label": name, "value": value, "note": note} for name, value, note in cards]


def _lie_chart(found: SamplingAudit) -> tuple[str, str]:
    """The utility of every report for the client with the most profitable lie found."""
    reported, utility = (np.array(values) for values in zip(*found.curve, strict=True))
    lie, key, title = found.worst, "lie", "Utility against the reported cost"
    with styled(key):
        figure, axes = panel("expected utility per round", "reported cost", width=640, left=56, right=24)
        axes.axhline(0, color=LIGHT["rule"], linewidth=1)
        axes.plot(reported, utility, color=LIGHT["blue"], linewidth=2)
        axes.plot([lie.cost], [lie.honest_utility], marker="o", markersize=7, color=LIGHT["teal"])
        label(axes, lie.cost, lie.honest_utility, "the truth", "teal", dx=9, dy=7)
        caption = f"A client of cost {significant(lie.cost, 4)}: "
        if found.clients_with_gain:
            axes.plot([lie.reported], [lie.lying_utility], marker="o", markersize=7, color=LIGHT["bad"])
            label(axes, lie.reported, lie.lying_utility, "the lie", "bad", dx=-9, dy=7, ha="right")
            caption += f"saying {significant(lie.reported, 4)} brings {significant(lie.gain)} more each round."
        else:
            caption += "no report brings more than the truth."
        return inline_svg(figure, f"chart-{key}", title, caption), caption
