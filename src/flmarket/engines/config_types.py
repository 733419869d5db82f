"""What the sections of a market file share: a base that refuses unknown keys, and ranges of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["NonNegative", "Positive", "Probability", "Range", "Section"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Range = tuple[NonNegative, NonNegative]


class Section(BaseModel):
    """One section; frozen, and a key that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)
