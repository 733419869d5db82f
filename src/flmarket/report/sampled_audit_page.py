"""The page of a sampling scheme's audit: verdicts, what a lie does to one client, and what the scheme spends."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flmarket.audit import SamplingAudit
from flmarket.files import write_files
from flmarket.report.audit_page import claim_rows
from flmarket.report.drawing import inline_svg, label, panel, styled
from flmarket.report.formatting import count, percent, significant
from flmarket.report.html import render
from flmarket.report.theme import LIGHT
from flmarket.trust import BIDS_ONLY

__all__ = ["write_sampling_audit"]


def write_sampling_audit(found: SamplingAudit, path: str | os.PathLike[str], *, command: str | None = None) -> Path:
    """Write one HTML file that needs nothing else, whole or not at all; returns its path."""
    target = Path(path)
    chart, caption = _lie_chart(found)
    page = render(
        "sampled_audit.html.j2",
        trust=BIDS_ONLY,
        title=found.scheme,
        story=_story(found),
        contradicted=[claim.claim.replace("_", " ") for claim in found.contradicted],
        cards=_cards(found),
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


def _story(found: SamplingAudit) -> str:
    broken = len(found.contradicted)
    end = f"{count(broken, 'claim')} did not survive." if broken else "Every claim it makes survived."
    return (
        f"A sampling scheme decides how often each client takes part and what she is paid, from the cost that she "
        f"reports. This page tests whether {found.scheme} does so as it claims, on {count(found.draws, 'draw')} of "
        f"{count(found.clients, 'client')} ({found.population}), trying {count(found.reports_per_client, 'report')} "
        f"for each. {end}"
    )


def _cards(found: SamplingAudit) -> list[dict[str, str]]:
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
