"""Parameters that several routes share, each with its limits. Numbers in a query are digits and nothing else."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BeforeValidator

__all__ = ["After", "Before", "Identifier", "Index", "Limit", "Search", "Start"]

_ID = r"^[A-Za-z0-9_-]{1,64}$"


def _digits(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\d{1,18}", value):
        raise ValueError("a whole number, in digits")
    return value


Identifier = Annotated[str, Path(pattern=_ID, description="An id as the API returns it.")]
Index = Annotated[int, BeforeValidator(_digits), Path(ge=0, le=1_000_000, description="A round, from 0.")]
Limit = Annotated[int, BeforeValidator(_digits), Query(ge=1, le=500, description="Items at most.")]
Before = Annotated[str | None, Query(pattern=_ID, description="`next` of the page before.")]
Start = Annotated[int, BeforeValidator(_digits), Query(ge=0, le=10**15, description="Where to begin.")]
After = Annotated[
    int | None, BeforeValidator(_digits), Query(ge=0, le=10**15, description="`next` of the page before.")
]
Search = Annotated[str | None, Query(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9_/.-]*$")]
