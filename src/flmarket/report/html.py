"""The report page of a run: one file that needs nothing else, for whoever paid, was paid, or wants to check."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.errors import MissingDependency
from flmarket.files import write_files
from flmarket.report import view
from flmarket.report.charts import market_charts
from flmarket.report.drawing import DARK, FONT_STACK, LIGHT, css_variables
from flmarket.report.view import check_guarantees, summarize
from flmarket.trust import OWNERS_HERE, TrustWords

if TYPE_CHECKING:
    from flmarket.market import MarketResult

__all__ = ["heading", "render", "strict_json", "write_report"]

_TOP_OWNERS = 20
# beyond this a browser struggles with the table; the page says how many are left out
_MAX_OWNERS = 2_000


def write_report(
    result: MarketResult,
    out_dir: str | os.PathLike[str],
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
    owners = view.owner_rows(result)
    checks = check_guarantees(result)
    page = render(
        "report.html.j2",
        title=heading(result.task.name),
        story=story or view.default_story(result, summary),
        command=command,
        cards=view.cards(result, summary),
        charts=market_charts(result),
        example=view.example_round(result),
        top_owners=owners[:_TOP_OWNERS],
        all_owners=owners[:_MAX_OWNERS] if len(owners) > _TOP_OWNERS else [],
        owner_count=len(owners),
        owners_left_out=max(0, len(owners) - _MAX_OWNERS),
        tables=tables,
        checks=checks,
        broken=sum(not check.holds for check in checks),
        settings=view.settings(result),
        trust=trust,
    )
    files = {"summary.json": strict_json(summary | {"trust": asdict(trust)}), "report.html": page}
    return write_files(out_dir, files) / "report.html"


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
    return environment.get_template(template).render(
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        fonts=FONT_STACK,
        version=__version__,
        trust=trust,
        runtime=f"Python {platform.python_version()}, NumPy {np.__version__}",
        **context,
    )
