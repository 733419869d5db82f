"""Writing TOML: just what market and owner files need, namely scalars, lists of them, and sections one level deep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flmarket.errors import InvalidInput

__all__ = ["toml_text"]


def toml_text(values: Mapping[str, Any]) -> str:
    """The values as a file that `tomllib` reads back equal."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    return "\n".join([_lines(plain), *(f"[{name}]\n{_lines(section)}" for name, section in sections.items())])


def _lines(section: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_scalar(key, value)}\n" for key, value in section.items())


def _scalar(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_scalar(key, item) for item in value)}]"
    raise InvalidInput(key, value, "a number, a text, true or false, or a list of them")
