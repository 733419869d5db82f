"""What the sections of a market file share: a base that refuses unknown keys, and ranges of numbers."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _ordered(span: tuple[float, float]) -> tuple[float, float]:
    if span[0] > span[1]:
        raise ValueError("a smaller number, then a larger one")
    return span


def _or_none(value: Any) -> Any:
    return math.inf if value is None else value


Range = Annotated[tuple[NonNegative, NonNegative], AfterValidator(_ordered)]
# A cap, or none: inf in TOML, null in JSON, which has no infinity.
Cap = Annotated[
    float,
    Field(gt=0, allow_inf_nan=True),
    BeforeValidator(_or_none),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}], "default": None}),
]


class Section(BaseModel):
    """One section; frozen, and a key that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)
