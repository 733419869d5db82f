"""Pages that compare: mechanisms with each other, and the papers with what came out here.

Mechanisms side by side: the error bound that each pair of auction and aggregation buys with a budget.

For the papers' comparison tables: rows come in as values, and leave as CSV, strict JSON, a figure and a page.

The index of a reproduction: every claim with its verdict, then every table and figure with its plot and numbers.

A folder that one can put on the web: pages and pictures refer to each other by relative name only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from flmarket.errors import InvalidInput
from flmarket.files import Name, csv_text, jsonable, write_files
from flmarket.report.curves import Curve, CurveSet, draw_curves
from flmarket.report.drawing import inline_svg, pictures, styled
from flmarket.report.formatting import count, percent
from flmarket.report.html import render, strict_json
from flmarket.trust import BIDS_ONLY, PAPERS_HERE

_KEY = "comparison"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ComparisonRow:
    """One pair at one budget; means over profiles, the error bound's over those in which somebody sold."""

    auction: str
    aggregation: str
    budget_factor: float
    error_bound_mean: float
    error_bound_se: float
    invalid_rate: float
    spent_share: float
    winners_share: float
    over_second_best: float | None = None  # on some of the profiles; None where nobody knows the law of rates

    @property
    def overspends(self) -> bool:
        """Whether the pair spends more than the budget on average, which buys an error bound that was not for sale."""
        return self.spent_share > 1 + _ROUNDING


@dataclass(frozen=True)
class Comparison:
    """A whole table: which population, how many profiles, which seed."""

    title: str
    population: str
    profiles: int
    seed: int
    rows: tuple[ComparisonRow, ...]

    def best(self) -> dict[float, float]:
        """The lowest finite mean error bound at each budget factor, among those who keep to the budget."""
        lowest: dict[float, float] = {}
        for row in self.rows:
            if math.isfinite(row.error_bound_mean) and not row.overspends:
                known = lowest.get(row.budget_factor, math.inf)
                lowest[row.budget_factor] = min(known, row.error_bound_mean)
        return lowest

    def leads(self, row: ComparisonRow) -> bool:
        """Whether a row has the lowest bound at its budget."""
        return not row.overspends and row.error_bound_mean == self.best().get(row.budget_factor)


def write_comparison(comparison: Comparison, out_dir: Name, command: str | None = None) -> Path:
    """Write comparison.csv, .json, .svg, .png and .html, whole or not at all; returns the path of the page."""
    if not comparison.rows:
        raise InvalidInput("rows", (), "at least one row to compare")
    curves = _curves(comparison)
    caption = _caption(comparison)
    drawn = pictures(_KEY, _KEY, comparison.title, lambda: draw_curves(curves, log_y=True))
    with styled(_KEY):
        # the page has the title as its heading
        inline = inline_svg(draw_curves(curves, log_y=True, titled=False), _KEY, "Error bound by budget", caption)
    page = render(
        "comparison.html.j2",
        trust=BIDS_ONLY,
        title=comparison.title,
        comparison=comparison,
        caption=caption,
        chart=inline,
        command=command,
    )
    files = drawn | {
        "comparison.csv": csv_text(list(ComparisonRow.__dataclass_fields__), map(astuple, comparison.rows)),
        "comparison.json": strict_json(jsonable(asdict(comparison))),
        "comparison.html": page,
    }
    return write_files(out_dir, files) / "comparison.html"


def _curves(comparison: Comparison) -> CurveSet:
    curves = []
    auctions = list(dict.fromkeys(row.auction for row in comparison.rows))
    aggregations = list(dict.fromkeys(row.aggregation for row in comparison.rows))
    for pair in dict.fromkeys((row.auction, row.aggregation) for row in comparison.rows):
        rows = sorted(
            (row for row in comparison.rows if (row.auction, row.aggregation) == pair),
            key=lambda row: row.budget_factor,
        )
        # an aggregation that is the same on every line says nothing
        name = pair[0] if len(aggregations) == 1 else f"{pair[0]} · {pair[1]}"
        label = name + (" (over budget)" if any(row.overspends for row in rows) else "")
        x, mean, se = zip(*((row.budget_factor, row.error_bound_mean, row.error_bound_se) for row in rows), strict=True)
        curves.append(Curve(label, x, mean, se, auctions.index(pair[0]), aggregations.index(pair[1])))
    return CurveSet(
        comparison.title, "budget, as a share of the bidders' full costs", "error bound, log scale", tuple(curves)
    )


def _caption(comparison: Comparison) -> str:
    best = comparison.best()
    if not best:
        return "No pair within the budget had a finite error bound."
    wins: dict[str, int] = {}
    for row in comparison.rows:
        if comparison.leads(row):
            name = f"{row.auction} with {row.aggregation}"
            wins[name] = wins.get(name, 0) + 1
    leader = max(wins, key=lambda name: wins[name])
    at = count(len(best), "budget")
    empty = max(row.invalid_rate for row in comparison.rows)
    note = f" Up to {percent(empty)} of profiles had no seller and are left out of the mean." if empty > 0 else ""
    over = sorted({row.auction for row in comparison.rows if row.overspends})
    if over:
        verbs = "spends more than the budget and is" if len(over) == 1 else "spend more than the budget and are"
        note += f" {', '.join(over)} {verbs} not ranked there."
    return f"Lower is better. {leader} has the lowest mean error bound at {wins[leader]} of {at}.{note}"


_SIGNS = {"reproduced": "✓", "differs": "✗", "undecided": "?", "not run": "–"}


@dataclass(frozen=True)
class ClaimRow:
    """One line of the table of claims; `items` are keys of items on the page."""

    where: str
    text: str
    verdict: str
    items: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperSection:
    """A paper: its claims, and its items as mappings with key, title, claim, verdict, reason, files and numbers.

    Items may also have checks, beside, note and settings (a few words on how they were run).
    """

    key: str
    title: str
    source: str
    claims: tuple[ClaimRow, ...]
    items: tuple[Mapping[str, object], ...]


def write_reproduction(sections: Sequence[PaperSection], out_dir: Path, *, command: str, note: str = "") -> Path:
    """Write index.html, claims.md and items.json beside the items' own files; returns the path of the page."""
    claims = [claim.verdict for section in sections for claim in section.claims]
    page = render(
        "reproduction.html.j2",
        trust=PAPERS_HERE,
        title="Papers, reproduced",
        sections=[section for section in sections if section.items or section.claims],
        claims={verdict: claims.count(verdict) for verdict in _SIGNS},
        figures=sum(len(section.items) for section in sections),
        signs=_SIGNS,
        note=note,
        command=command,
    )
    public = [dict(item) for section in sections for item in section.items]
    files = {"items.json": strict_json(public), "claims.md": _markdown(sections), "index.html": page}
    return write_files(out_dir, files) / "index.html"


def _markdown(sections: Sequence[PaperSection]) -> str:
    """The claims of every paper as tables for a README or a documentation page; items where there are no claims."""
    lines: list[str] = []
    for section in sections:
        lines += [f"## {section.title}", "", f"{section.source}.", ""]
        if section.claims:
            lines += ["| where | claim | verdict | what we found |", "| --- | --- | --- | --- |"]
            lines += [
                _cells(c.where, c.text, c.verdict, " ".join(f"{one}." for one in c.reasons)) for c in section.claims
            ]
        else:
            lines += ["| question | verdict | what we found |", "| --- | --- | --- |"]
            lines += [_cells(str(i["title"]), str(i["verdict"]), str(i["reason"])) for i in section.items]
        lines.append("")
    return "\n".join(lines)


def _cells(*texts: str) -> str:
    return f"| {' | '.join(text.replace('|', '∣').replace('..', '.') for text in texts)} |"
