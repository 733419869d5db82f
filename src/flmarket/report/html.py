"""The report page of a run: one file that needs nothing else, for whoever paid, was paid, or wants to check."""

import json
import math
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.errors import MissingDependency
from flmarket.files import Name, write_files
from flmarket.ledger import format_micros
from flmarket.report import view
from flmarket.report.charts import market_charts
from flmarket.report.drawing import DARK, FONT_STACK, LIGHT, css_variables
from flmarket.report.formatting import count, epsilon, money, money_decimals, percent, rate, significant
from flmarket.report.view import check_guarantees, summarize
from flmarket.trust import OWNERS_HERE, TrustWords

if TYPE_CHECKING:
    from flmarket.market import MarketResult


def write_report(
    result: "MarketResult",
    out_dir: Name,
    *,
    story: str | None = None,
    command: str | None = None,
    tables: Sequence[view.Table] = (),
    trust: TrustWords = OWNERS_HERE,
) -> Path:
    """Write `report.html` and `summary.json`, whole or not at all; returns the path of the page.

    `tables` are what only this kind of market has to show, `trust` says where records and noise were.
    """
    summary = summarize(result)
    bounds = [bound for bound in summary["error_bound"] if bound is not None]
    most = max(result.owners, key=lambda owner: owner.loss_total, default=None)
    page = render(
        "report.html.j2",
        title=heading(result.task.name),
        story=story,
        command=command,
        result=result,
        summary=summary,
        symbol=view.symbol(result),
        places=money_decimals([result.budget_micros]),
        median_bound=float(np.median(bounds)) if bounds else np.inf,
        unbounded=len(result.rounds) - len(bounds),
        largest_cap=np.inf if most is None else most.loss_cap,
        charts=market_charts(result),
        example=view.example_round(result),
        owners=sorted(result.owners, key=lambda owner: (-owner.paid_micros, owner.owner)),
        owner_places=money_decimals(owner.paid_micros for owner in result.owners),
        tables=tables,
        checks=check_guarantees(result),
        trust=trust,
    )
    files = {"summary.json": strict_json(summary | said(trust)), "report.html": page}
    return write_files(out_dir, files) / "report.html"


def said(trust: TrustWords) -> dict[str, Any]:
    """What a summary says of trust: the model, whose data an ε is for, and the sentences."""
    return {"trust": trust.model, "unit": trust.protects, "words": asdict(trust)}


def heading(name: str) -> str:
    """A slug such as tumour-diagnosis as a heading; a name that is more than a slug is left as it is."""
    if not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", name):
        return name
    spaced = re.sub("[-_]", " ", name)
    return spaced[0].upper() + spaced[1:]


def strict_json(value: Any) -> str:
    """JSON that every parser reads: an infinity or NaN that slipped through is an error here, not at the reader's."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def render(template: str, *, trust: TrustWords, **context: Any) -> str:
    """A page of ours, with its style inside; everything but our own SVG and style sheet is escaped.

    Every page says, under its story, where records and noise are and what is private (`trust`).
    """
    try:
        import jinja2
    except ImportError:
        raise MissingDependency("jinja2", "app") from None
    from flmarket import __version__

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flmarket.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for shown in (count, epsilon, format_micros, money, percent, rate, significant):
        environment.filters[shown.__name__] = shown
    environment.tests |= {"finite": math.isfinite, "picture": lambda name: str(name).endswith(".svg")}
    return environment.get_template(template).render(
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        fonts=FONT_STACK,
        version=__version__,
        trust=trust,
        runtime=f"Python {platform.python_version()}, NumPy {np.__version__}",
        **context,
    )
