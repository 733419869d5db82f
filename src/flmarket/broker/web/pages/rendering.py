"""Jinja2 for the pages: one environment, the filters that decide how numbers read, words, charts and the style sheet.

Everything is escaped; templates mark nothing of a caller's as safe. Amounts are rounded down for reading
(`report.formatting.money`), the exact ones are `ledger.format_micros`; every ε goes through
`report.formatting.epsilon`, an award's through `loss_words`, and is labelled per round or total by the template that
shows it. A chart is a table of numbers and how each of its columns is drawn: the browser draws the very table that
readers can open below it, so the two cannot differ.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Literal

import jinja2
from markupsafe import Markup, escape

from flmarket import __version__
from flmarket.broker.books import SHOWN_DELTA, shown_epsilon
from flmarket.broker.office.statements import AWARD_WORDS
from flmarket.client import wire
from flmarket.errors import InvalidInput
from flmarket.ledger import format_micros
from flmarket.market import kinds
from flmarket.privacy import (
    ApproxDp,
    Event,
    ExponentialRelease,
    PureDp,
    RecordLevel,
    Unprotected,
    ZCdp,
    event_from_dict,
)
from flmarket.report.drawing import DARK, FONT_STACK, LIGHT, css_variables
from flmarket.report.formatting import epsilon, money, percent, rate, significant

STATIC_PATH = "/static"


def static(name: str) -> str:
    """The address of a static file; its content is in it, so that it may be cached for ever."""
    return f"{STATIC_PATH}/{name}?v={_digest(name)}"


@cache
def _digest(name: str) -> str:
    content = resources.files("flmarket.broker.web").joinpath("static", *name.split("/")).read_bytes()
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


def _time(form: str) -> Callable[[str | None], str]:
    """How an RFC 3339 time is told, in UTC."""
    return lambda moment: "–" if moment is None else form.format(at=datetime.fromisoformat(moment).astimezone(UTC))


when = _time("{at.day} {at:%b %Y, %H:%M} UTC")
clock = _time("{at:%H:%M:%S}")  # for what happens now
dated = _time("{at.day} {at:%b, %H:%M:%S}")  # for a log


def _local(name: str, told: Callable[[str | None], str]) -> Callable[[str | None], str]:
    """A time on a page: in UTC, and with it what app.js needs to say it in the reader's own time."""

    def shown(moment: str | None) -> str:
        if moment is None:
            return told(None)
        full = "" if told is when else f' title="{when(moment)}"'
        text = f'<time datetime="{escape(moment)}" data-time="{name}"{full}>{told(moment)}</time>'
        return Markup(text)  # noqa: S704  (all of it our own words)

    return shown


def decimals(value: float, places: int) -> str:
    """A fixed number of decimals, with thousands apart."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{int(places)}f}"


def plain(value: float) -> str:
    """A round number or a budget on an axis: no decimals where there are none."""
    return f"{value:,.10g}"


_INVISIBLE = dict.fromkeys((0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF))


def _visible(value: Any) -> Any:
    """Somebody's text without signs that turn or hide the text around them, such as U+202E."""
    return value.translate(_INVISIBLE) if type(value) is str else value


@cache
def environment() -> jinja2.Environment:
    """The templates inside the package, strict about what a page forgot to pass."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("flmarket.broker.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    times = {"when": when, "clock": clock, "dated": dated}
    for one in (money, epsilon, rate, percent, significant, decimals, plain, said):
        made.filters[one.__name__] = one
    made.filters.update({name: _local(name, told) for name, told in times.items()})
    made.filters.update(exact=format_micros, loss=loss_words, thousands=lambda value: f"{value:,}")
    made.filters["capitalize"] = lambda text: f"{text[:1].upper()}{text[1:]}"  # Jinja's own makes EUR Eur
    made.globals.update(static=static, version=__version__, theme_css=theme_href, condition=condition)
    made.globals.update(award_state=award_state, award_tone=award_tone, still=still)
    return made


def load_all() -> None:
    """Compile every template now, before anybody waits for it."""
    for name in environment().list_templates():
        environment().get_template(name)


def render(template: str, **context: Any) -> Markup:
    """A page or a fragment of one, with everything in it escaped."""
    return Markup(environment().get_template(template).render(**context))  # noqa: S704


# --- charts -----------------------------------------------------------------------------------------------------------

Draw = Literal["line", "dashed", "step", "bars"]


@dataclass(frozen=True)
class Column:
    """One column. `short` names it beside a value under the pointer."""

    label: str
    short: str = ""
    colour: str = "blue"
    draw: Draw = "line"
    decimals: int = 3


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What is drawn over the first of its columns; `options` are the data attributes that app.js reads."""

    title: str
    unit: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[float | None]]
    reading: str = ""
    caption: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def x(self) -> str:
        """What the first column is called under the pointer."""
        return self.columns[0].short or self.columns[0].label.lower()


# How well a model does, beside what a constant answer would reach.
ACCURACY = (Column("Accuracy", "accuracy"), Column("Always the larger class", "larger class", "slate", "dashed"))

_SIZE = 1000  # of a still picture


def still(chart: Chart) -> dict[str, Any] | None:
    """A chart as a still picture, for readers whose browser runs no scripts: the numbers of its table, to scale; None
    if there is nothing to see. With scripts the same table is drawn by app.js, and the style sheet hides this one.

    Points are in a box of 1000 × 1000 that is stretched to the place there is; labels are text beside it, which is not
    stretched. A line is a column's points, or its bars as (x, y, width, height).
    """
    rows = [row for row in chart.rows if row[0] is not None]
    values = [y for row in rows for y in row[1:] if y is not None and math.isfinite(y)]
    log = chart.options.get("scale") == "log" and bool(values) and min(values) > 0
    if not values or len(rows) < 2:
        return None
    left, right = (float(row[0] or 0.0) for row in (rows[0], rows[-1]))
    low = min(values) if log or "floor" not in chart.options else min(*values, float(chart.options["floor"]))
    high = max(values)

    def across(x: float | None) -> int:
        return round(_SIZE * (float(x or 0.0) - left) / ((right - left) or 1.0))

    def up(y: float) -> int:
        share = math.log(y / low) / (math.log(high / low) or 1.0) if log else (y - low) / ((high - low) or 1.0)
        return round(_SIZE * (1 - share))

    lines, drawn = [], dict[str, Any]()
    for i, column in enumerate(chart.columns[1:], 1):
        known = [(across(row[0]), up(y)) for row in rows if (y := row[i]) is not None and math.isfinite(y)]
        if column.draw == "bars":
            half = max(1, round(0.36 * _SIZE / len(rows)))
            drawn = {"bars": [(x - half, y, 2 * half, _SIZE - y) for x, y in known]}
        else:
            drawn = {"bars": [], "points": " ".join(f"{x},{y}" for x, y in known)}
        lines.append({"colour": column.colour, "draw": column.draw} | drawn)
    return {"lines": lines, "left": left, "right": right, "low": low, "high": high}


# --- words ------------------------------------------------------------------------------------------------------------

_TONES = {"queued": "warn", "running": "live", "expired": "warn", "failed": "bad"}
_WAITS = {
    "lonely": "waits for owners’ nodes", "starting": "waits for its run", "waiting": "waits for its run",
    "silent": "its run is silent", "broken": "its run broke down", "unreachable": "waits for the SuperLink",
}  # fmt: skip
_AWARD_TONES = {"posted": "good", "voided": "warn", "expired": "warn", "pending": "live"}


@dataclass(frozen=True)
class KindWords:
    """How pages speak of one kind of market: who takes part, what each of them does first, and what a budget is for."""

    who: str
    first: str
    waiting: str
    came: str
    event: str
    budget: str
    lasting: bool = False
    won: str = "awarded"

    @property
    def per(self) -> str:
        """What an award's price and a budget are for."""
        return "in total" if self.lasting else "a round"

    @property
    def loss(self) -> str:
        """What an award's privacy loss is of."""
        return "total, all rounds" if self.lasting else "this round"


_KINDS = {
    "auction": KindWords(
        "Bidders", "Bids", "owners decide what to ask", "sealed bids received", "sealed bids", "Budget", won="won"
    ),
    "sampling": KindWords(
        "Clients", "Drawn", "clients are drawn by their posted probabilities", "clients drawn to take part",
        "clients drawn", "Hard cap",
    ),
    "reward": KindWords(
        "Users", "Users", "users answer the reward with their privacy", "users share the reward", "users take part",
        "Reward", True,
    ),
    "joint": KindWords(
        "Clients", "Clients", "one auction chooses clients for all rounds", "clients chosen for all rounds",
        "chosen clients", "Budget", True,
    ),
}  # fmt: skip


def kind_words(kind: str) -> KindWords:
    """Of a kind; of one that somebody registered, what holds for all."""
    if kind in _KINDS:
        return _KINDS[kind]
    lasting = kinds.of(kind).side.lasting
    return KindWords("Owners", "Owners", "owners are asked", "owners take part", "owners", "Budget", lasting)


def loss_words(loss: Event | Mapping[str, Any], given: float | None = None) -> str:
    """A privacy loss as it is: ε, ρ, ε at its δ, or that there is no bound; `given` is a pure ε without its kind."""
    if isinstance(loss, Mapping):
        if not loss:
            return "–" if given is None else f"ε = {epsilon(given)}"
        loss = event_from_dict(loss)
    if isinstance(loss, RecordLevel):
        return f"{loss_words(loss.loss)}, of a record"
    if isinstance(loss, Unprotected):
        return "no bound"
    if isinstance(loss, ZCdp):
        return f"ρ = {significant(loss.rho)}"
    if isinstance(loss, PureDp | ExponentialRelease):
        return f"ε = {epsilon(loss.epsilon)}"
    number, delta = (loss.epsilon, loss.delta) if isinstance(loss, ApproxDp) else (shown_epsilon(loss), SHOWN_DELTA)
    mantissa, _, exponent = f"{delta:.3g}".partition("e")
    power = f"{mantissa}e{int(exponent)}" if exponent else mantissa  # 1e-5, without the leading zero of its exponent
    return f"ε = {epsilon(number)} at δ = {power}"


def condition(task: wire.Task | wire.MarketTask | wire.Listing) -> tuple[str, str]:
    """How a task really is, and the colour of that: a task that nobody plays is not under way, and one whose model is
    no better than guessing is no success. Of one whose accuracy is not for everybody, green would say too much."""
    if task.run is not None and not task.run.at_work:
        return _WAITS[task.run.state], "warn"
    if task.state == "finished" and isinstance(task, wire.Task) and task.better_than_guessing is not None:
        return ("finished", "good") if task.better_than_guessing else ("finished, no better than guessing", "warn")
    return task.state, _TONES.get(task.state, "idle")


def award_state(state: str) -> str:
    """How an award ended."""
    return AWARD_WORDS.get(state, state)


def award_tone(state: str) -> str:
    """Its colour."""
    return _AWARD_TONES.get(state, "idle")


def seconds(value: float) -> str:
    """A span of time, roughly."""
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if value >= size:
            count = round(value / size)
            return f"{count} {name}{'' if count == 1 else 's'}"
    return f"{value:.0f} s"


_LOSSES = re.compile(r"(?:PureDp|ApproxDp|ZCdp)\(([^()]*)\)")
_FROZEN = re.compile(r"^in dispute, else (\w+)")
_AWARD = re.compile(r"^(past the registered cap: )?award \S+: ")


def said(text: str) -> str:
    """A reason that was written down for programs, for people: privacy losses as pages write them, and not whose award
    it is, which stands beside it."""

    def loss(found: re.Match[str]) -> str:
        parts = dict(one.strip().split("=", 1) for one in found[1].split(",") if "=" in one)
        signs = {"epsilon": "ε", "delta": "δ", "rho": "ρ"}
        try:
            return ", ".join(f"{signs.get(name, name)} = {significant(float(value))}" for name, value in parts.items())
        except ValueError:
            return "her cap"

    plain = _FROZEN.sub(lambda found: f"without the dispute: {award_state(found[1])}", _AWARD.sub(r"\1", text))
    return _LOSSES.sub(loss, plain)


def sentence(error: Exception) -> str:
    """An error's message as a sentence."""
    text = said(str(error))
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def remedy(error: InvalidInput) -> str:
    """What a field takes, beside that field."""
    return f"This should be {said(error.accepted)}."


def list_of(names: tuple[str, ...] | list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
