"""Our colours, in a light and a dark set with the same names.

The five series colours differ in lightness as well as hue, so that they stay apart under the common kinds of colour
blindness; tests measure that under each. All are dark (or light) enough on their background to set text in.
"""

from __future__ import annotations

__all__ = ["DARK", "LIGHT", "SERIES", "css_variables"]

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
