"""Jinja2 for the pages: one environment, the filters that decide how numbers read, and the generated style sheet.

Everything is escaped; templates mark nothing of a caller's as safe. Amounts are rounded down for reading
(`report.formatting.money`), the exact ones are `ledger.format_micros`; every ε goes through `report.formatting.epsilon`
and is labelled per round or total by the template that shows it.
"""

from __future__ import annotations

import hashlib
import math
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from flmarket import __version__
from flmarket.ledger import format_micros
from flmarket.report.drawing import DARK, FONT_STACK, LIGHT, css_variables
from flmarket.report.formatting import epsilon, money, percent, rate, significant

__all__ = ["STATIC_PATH", "environment", "render", "theme_css", "theme_href"]

STATIC_PATH = "/static"


def static(name: str) -> str:
    """The address of a static file; its content is in it, so that it may be cached for ever."""
    return f"{STATIC_PATH}/{name}?v={_digest(name)}"


@cache
def _digest(name: str) -> str:
    content = resources.files("flmarket.broker").joinpath("static", *name.split("/")).read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


@cache
def theme_css() -> str:
    """The report's palette as custom properties: the system's scheme unless the reader chose one; paper is light."""
    light, dark = css_variables(LIGHT), css_variables(DARK)
    return (
        f":root {{ color-scheme: light; --fonts: {FONT_STACK}; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) "
        f"{{ color-scheme: dark; {dark} }} }}\n"
        f"@media screen {{ :root[data-theme=dark] {{ color-scheme: dark; {dark} }} }}\n"
    )


@cache
def theme_href() -> str:
    """Where the palette is served, with its content in the address."""
    return f"/theme.css?v={hashlib.sha256(theme_css().encode()).hexdigest()[:12]}"


def when(moment: str | None) -> str:
    """An RFC 3339 time as 15 Nov 2026, 23:04 UTC."""
    if moment is None:
        return "–"
    at = datetime.fromisoformat(moment).astimezone(UTC)
    return f"{at.day} {at:%b %Y, %H:%M} UTC"


def clock(moment: str | None) -> str:
    """23:04:09, for a log."""
    return "–" if moment is None else f"{datetime.fromisoformat(moment).astimezone(UTC):%H:%M:%S}"


def decimals(value: float, places: int) -> str:
    """A fixed number of decimals, with thousands apart."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{int(places)}f}"


def plain(value: float) -> str:
    """A round number or a budget on an axis: no decimals where there are none."""
    return f"{value:,.10g}"


@cache
def environment() -> jinja2.Environment:
    """The templates inside the package, strict about what a page forgot to pass."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("flmarket.broker"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        money=money,
        exact=format_micros,
        epsilon=epsilon,
        rate=rate,
        percent=percent,
        significant=significant,
        thousands=lambda value: f"{value:,}",
        decimals=decimals,
        plain=plain,
        when=when,
        clock=clock,
    )
    made.globals.update(static=static, version=__version__, theme_css=theme_href)
    return made


def render(template: str, **context: Any) -> str:
    """A page or a fragment of one."""
    return environment().get_template(template).render(**context)
