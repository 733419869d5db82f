"""What people type into forms, read into the same strict requests that the API takes, with errors by field.

A form arrives as text. Each reader here returns a value or adds to `errors`, so that a page can show everything that
is wrong at once and the text as it was typed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flmarket.ledger import MICROS

__all__ = ["Reader", "local_path"]

M = TypeVar("M", bound=BaseModel)


class Reader:
    """Reads the fields of one form; `errors` collects what was wrong, by field name."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = form
        self.errors: dict[str, str] = {}

    def text(self, name: str, default: str = "") -> str:
        """The field without surrounding blanks."""
        value = self._form.get(name)
        return value.strip() if isinstance(value, str) else default

    def number(self, name: str, default: str = "") -> float:
        """A finite decimal number; 0 and an error otherwise."""
        try:
            value = float(self.text(name, default))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self.errors[name] = "This should be a number."
            return 0.0
        return value

    def whole(self, name: str, default: str = "") -> int:
        """A whole number; 0 and an error otherwise."""
        try:
            return int(self.text(name, default))
        except ValueError:
            self.errors[name] = "This should be a whole number."
            return 0

    def micros(self, name: str, default: str = "") -> int:
        """An amount in currency units as whole micro-units, exactly; 0 and an error otherwise."""
        try:
            amount = Decimal(self.text(name, default)) * MICROS
        except InvalidOperation:
            amount = Decimal("NaN")
        if not amount.is_finite() or amount != amount.to_integral_value() or abs(amount) > 10**18:
            self.errors[name] = "This should be an amount with at most six decimals."
            return 0
        return int(amount)

    def build(self, model: type[M], values: dict[str, Any], fields: Mapping[str, str]) -> M | None:
        """The request, or None with errors; `fields` maps the request's paths to the form's field names."""
        if self.errors:
            return None
        try:
            return model.model_validate(values)
        except ValidationError as error:
            for found in error.errors():
                path = ".".join(str(part) for part in found["loc"])
                reason = found["msg"].removeprefix("Value error, ").replace("Input should", "This should")
                self.errors.setdefault(fields.get(path, "_"), f"{reason[:1].upper()}{reason[1:]}.")
            return None


def local_path(target: str) -> str:
    """A path on this site to go on to after signing in; anything else becomes the market."""
    local = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if local and "\\" not in target else "/"
