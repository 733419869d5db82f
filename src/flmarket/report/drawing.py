"""Drawing with matplotlib without touching its global state, and SVG fit to stand inside a page.

Figures are drawn in the light colours. Inside a page each colour becomes a CSS variable that falls back to it, so one
drawing serves light, dark and print. Text stays text, in the page's own font; nothing in the output depends on the
user's matplotlibrc, the clock or a random salt.

Our colours, in a light and a dark set with the same names.

The five series colours differ in lightness as well as hue, so that they stay apart under the common kinds of colour
blindness; tests measure that under each. All are dark (or light) enough on their background to set text in.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import numpy as np

from flmarket.errors import needed

LIGHT = {
    "paper": "#ffffff",
    "ink": "#17212b",
    "muted": "#5c6773",
    "rule": "#dfe3e8",
    "wash": "#f5f7f8",
    "blue": "#1a4fbd",
    "rust": "#b8480d",
    "teal": "#068174",
    "plum": "#b041a2",
    "earth": "#482204",
    "slate": "#66707c",
    "good": "#068175",
    "bad": "#b3261e",
}
DARK = {
    "paper": "#10161c",
    "ink": "#e8ecf0",
    "muted": "#9ba7b3",
    "rule": "#2b353f",
    "wash": "#171f27",
    "blue": "#5c8ffb",
    "rust": "#f87f3d",
    "teal": "#6ed6b5",
    "plum": "#db7fcb",
    "earth": "#f7e394",
    "slate": "#8e99a5",
    "good": "#6ed6b6",
    "bad": "#ff8a80",
}
SERIES = ("blue", "rust", "teal", "plum", "earth")


def css_variables(theme: dict[str, str]) -> str:
    """`--blue: #1a4fbd; …` for a style sheet."""
    return " ".join(f"--{name}: {value};" for name, value in theme.items())


# `system-ui` comes late: on a bare Linux it is often a wide font made for terminals
FONT_STACK = (
    '-apple-system, BlinkMacSystemFont, "Segoe UI", Inter, Roboto, "Helvetica Neue", Arial, system-ui, sans-serif'
)
WIDTH, HEIGHT = 400.0, 244.0  # of a chart in the grid, in points
_FONT_SIZE = 11.0
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: text is measured the same on every machine
    "font.size": _FONT_SIZE,
    "svg.fonttype": "none",
    "axes.edgecolor": LIGHT["rule"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 6,
    "ytick.major.pad": 6,
    "lines.solid_capstyle": "round",
}


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Our settings on top of matplotlib's defaults, for as long as one figure is drawn and saved."""
    with needed("app", "matplotlib"):
        import matplotlib
    with matplotlib.rc_context(), warnings.catch_warnings():
        # a label in a script that DejaVu lacks is drawn as boxes in the PNG only; no reason to fail a report
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        settings: Any = _STYLE | {"svg.hashsalt": salt}  # Any: older matplotlib has no types, newer ones list every key
        matplotlib.rcParams.update(settings)
        yield


def panel(
    unit: str,
    x_label: str,
    *,
    width: float = WIDTH,
    height: float = HEIGHT,
    left: float = 44,
    right: float = 14,
    top: float = 28,
    head: float = 0,
) -> tuple[Any, Any]:
    """A figure of one axes, sizes in points; the unit stands above the axis, where it need not be turned to be read."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    bottom = 38
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )
    muted = LIGHT["muted"]
    figure.text(0, 1 - (4 + head) / height, unit, va="top", color=muted, parse_math=False)
    figure.text(1 - right / width, 2 / height, x_label, ha="right", va="bottom", color=muted, parse_math=False)
    return figure, axes


def heading(figure: Any, height: float, text: str) -> None:
    """The title of a figure that stands by itself, at its top."""
    ink = LIGHT["ink"]
    figure.text(0, 1 - 4 / height, text, va="top", color=ink, weight="bold", size=13, parse_math=False)


def label(
    axes: Any, x: float, y: float, text: str, color: str, *, dx: float = 0, dy: float = 0, **options: Any
) -> None:
    """Text at a data point, shifted by points: direct labels instead of a legend. Never read as TeX."""
    axes.annotate(
        text, (x, y), xytext=(dx, dy), textcoords="offset points", color=LIGHT[color], parse_math=False,
        annotation_clip=False, **options,
    )  # fmt: skip


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones and at least a gap apart, pushed down from the top where it gets tight."""
    order = np.argsort(wanted, kind="stable")
    placed = np.clip(np.asarray(wanted, dtype=float)[order], low, high)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    ceiling = high
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    result = np.empty(len(placed))
    result[order] = placed
    return [float(value) for value in result]


def end_labels(
    axes: Any, ends: Sequence[tuple[str, str, float, float]], *, gap: float = 14.0, leader: bool = False
) -> None:
    """Names at the right of (name, colour, x, y), at least so many points apart; a hairline leads to the place."""
    finite = [end for end in ends if np.isfinite(end[3])]
    points = axes.get_position().height * axes.figure.get_size_inches()[1] * 72
    to_points, back = axes.transData.transform, axes.transAxes.inverted().transform
    wanted = [float(back(to_points((x, y)))[1]) * points for _, _, x, y in finite]
    line = {"arrowstyle": "-", "linewidth": 0.7, "alpha": 0.6, "shrinkA": 0, "shrinkB": 4}
    for (text, color, x, y), place in zip(finite, spread(wanted, gap, 0, points), strict=True):
        if leader:
            axes.annotate(
                "", xy=(x, y), xytext=(1.012, place / points), textcoords="axes fraction", annotation_clip=False,
                arrowprops=line | {"color": LIGHT[color]},
            )  # fmt: skip
        axes.text(
            1.02, place / points, text, transform=axes.transAxes, color=LIGHT[color], va="center", parse_math=False
        )


def log_scale(axes: Any, low: float, high: float) -> None:
    """A log axis with plain numbers (0.1, 1, 10), with 2 and 5 between them when there are few decades."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axis = axes.yaxis
    decades = np.arange(np.floor(np.log10(low)) - 1, np.ceil(np.log10(high)) + 2)
    steps = (1, 2, 5) if np.log10(high / low) < 2.3 else (1,)
    if np.log10(high / low) > 6:
        decades = decades[::2]
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10g}" if 1e-4 <= value < 1e7 else f"{value:.0e}")
    )


def thousands(axis: Any) -> None:
    """1,500 rather than 1500, and no more decimals than the ticks need."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def inline_svg(figure: Any, key: str, title: str, description: str) -> str:
    """The figure as an `<svg>` element: named for screen readers, ids its own, colours by CSS variable."""
    body = _clean(_raw_svg(figure), key)
    for name, value in LIGHT.items():
        body = body.replace(f": {value}", f": var(--{name}, {value})")
    size = figure.get_size_inches() * 72
    return (
        f'<svg viewBox="0 0 {size[0]:g} {size[1]:g}" role="img" aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(description)}</desc>{body}</svg>'
    )


def standalone_svg(figure: Any, key: str, title: str) -> str:
    """The figure as a file of its own, on white."""
    size = figure.get_size_inches() * 72
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]:g}" height="{size[1]:g}" '
        f'viewBox="0 0 {size[0]:g} {size[1]:g}" font-family="{escape(FONT_STACK)}">'
        f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>'
        f"{_clean(_raw_svg(figure), key)}</svg>\n"
    )


def png(figure: Any) -> bytes:
    """The figure as a picture on white, without a date or version in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def pictures(stem: str, key: str, title: str, draw: Callable[[], Any]) -> dict[str, str | bytes]:
    """A figure as the files stem.png and stem.svg; it is drawn for each, as saving changes it."""
    with styled(stem):
        return {f"{stem}.png": png(draw()), f"{stem}.svg": standalone_svg(draw(), key, title)}


def _raw_svg(figure: Any) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return buffer.getvalue()


def _clean(svg: str, key: str) -> str:
    """The inside of matplotlib's `<svg>`: no style for the whole page, no id that another chart may also use."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # matplotlib's one rule selects everything on the page; as attributes of a group it reaches this chart only
    body = re.sub(r'<defs>\s*<style type="text/css">.*?</style>\s*</defs>', "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{key}-", body)
    # the font is the page's: older releases of matplotlib write `font:`, newer ones `font-family:`
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"font-family: [^;\"]*(; )?", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r">\s+<", "><", body)
    return f'<g stroke-linejoin="round">{body.strip()}</g>'
