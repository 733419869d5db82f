"""The page of an audit, for somebody who has never seen the code: verdicts, the worst lie, what was searched.

Its picture shows what one owner gains or loses as her report moves away from the truth. A sampling scheme's page has
the same parts for one client, and what the scheme spends.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.audit import AuditReport, Bid, Example, SamplingAudit
from flmarket.bids import FloatArray
from flmarket.files import Name, write_files
from flmarket.report.drawing import LIGHT, inline_svg, label, panel, styled
from flmarket.report.formatting import epsilon, percent, significant
from flmarket.report.html import render
from flmarket.trust import BIDS_ONLY

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
    x, gain = np.array(curve.factor), np.array(curve.gain) / (cost if cost > 0 else 1.0)
    caption = _caption(gain, example)
    shown = np.where(np.isfinite(gain), gain, np.nan)
    known = shown[np.isfinite(shown)]
    low, high = min(0.0, float(known.min(initial=0.0))), max(0.0, float(known.max(initial=0.0)))
    low = max(low, -max(3.0 * high, 1.2))  # a deep loss needs no more room than it takes to see it
    if high - low < 0.05:
        low, high = low - 0.1, high + 0.1
    margin = 0.12 * (high - low)
    # a jump is a jump: no line leads from one outcome to another
    sells = np.array(curve.epsilon) > 0
    cut = np.flatnonzero(sells[1:] != sells[:-1]) + 1
    broken_x, broken_y = np.insert(x, cut, x[cut]), np.insert(shown, cut, np.nan)
    honest_x, lie_x = (0.0, 1.0) if curve.field == "all fields" else (1.0, _lie_position(curve.field, example))
    with styled(_KEY):
        unit = "gain over honesty, as a share of her true cost"
        figure, axes = panel(unit, _X_LABEL[curve.field], width=_WIDTH, height=_HEIGHT, left=58)
        axes.set_ylim(low - margin, high + 1.8 * margin)
        axes.set_xlim(float(x[0]), float(x[-1]))
        axes.axhline(0.0, color=LIGHT["slate"], linewidth=1.2, dashes=(4, 3))
        axes.fill_between(broken_x, 0.0, broken_y, where=broken_y > 0, color=LIGHT["bad"], alpha=0.14, linewidth=0)
        axes.plot(broken_x, broken_y, color=LIGHT["blue"], linewidth=2)
        axes.plot(broken_x, np.where(broken_y > 1e-12, broken_y, np.nan), color=LIGHT["bad"], linewidth=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:,.0f} %".replace("-", "−"))
        _point(axes, honest_x, 0.0, "the truth", "ink", right=True, dy=-7, va="top")
        if example.gain > 0 and x[0] <= lie_x <= x[-1]:
            height, right = example.gain_over_cost, lie_x < 0.75 * x[-1] + 0.25 * x[0]
            _point(axes, lie_x, height, f"the lie: +{percent(height)}", "bad", right=right, weight="bold")
        return inline_svg(figure, _KEY, "Gain against misreport", caption), caption


def _point(axes: Any, x: float, y: float, name: str, color: str, *, right: bool, dy: float = 7, **options: Any) -> None:
    """A report among others, with its name on one side of it."""
    axes.plot([x], [y], "o", color=LIGHT[color], markersize=7, clip_on=False)
    label(axes, x, y, name, color, dx=9 if right else -9, dy=dy, ha="left" if right else "right", **options)


def _lie_position(field: str, example: Example) -> float:
    truth, lie = example.bids[example.owner], example.lie
    told, true = {
        "value": (lie.full_cost, truth.full_cost),
        "privacy_budget": (lie.privacy_budget, truth.privacy_budget),
        "data_size": (lie.data_size, truth.data_size),
    }[field]
    return told / true if true > 0 else 1.0


def _caption(gain: FloatArray, example: Example) -> str:
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


def write_audit(report: AuditReport, path: Name, *, command: str | None = None) -> Path:
    """Write one HTML file that needs nothing else, whole or not at all; returns its path."""
    shown = {"title": report.mechanism, "report": report, "tale": tell(report.worst), "command": command}
    return _written(path, "audit.html.j2", *gain_chart(report.worst), shown)


def write_sampling_audit(found: SamplingAudit, path: Name, *, command: str | None = None) -> Path:
    """Write one HTML file that needs nothing else, whole or not at all; returns its path."""
    shown = {"title": found.scheme, "found": found, "command": command}
    return _written(path, "sampled_audit.html.j2", *_lie_chart(found), shown)


def _written(path: Name, template: str, chart: str, caption: str, shown: Mapping[str, Any]) -> Path:
    target = Path(path)
    page = render(template, trust=BIDS_ONLY, chart=chart, caption=caption, **shown)
    return write_files(target.parent, {target.name: page}) / target.name


def _lie_chart(found: SamplingAudit) -> tuple[str, str]:
    """The utility of every report for the client with the most profitable lie found."""
    reported, utility = (np.array(values) for values in zip(*found.curve, strict=True))
    lie, key, title = found.worst, "lie", "Utility against the reported cost"
    with styled(key):
        figure, axes = panel("expected utility per round", "reported cost", width=640, left=56, right=24)
        axes.axhline(0, color=LIGHT["rule"], linewidth=1)
        axes.plot(reported, utility, color=LIGHT["blue"], linewidth=2)
        _point(axes, lie.cost, lie.honest_utility, "the truth", "teal", right=True)
        caption = f"A client of cost {significant(lie.cost, 4)}: "
        if found.clients_with_gain:
            _point(axes, lie.reported, lie.lying_utility, "the lie", "bad", right=False)
            caption += f"saying {significant(lie.reported, 4)} brings {significant(lie.gain)} more each round."
        else:
            caption += "no report brings more than the truth."
        return inline_svg(figure, f"chart-{key}", title, caption), caption
