"""Errors that a caller can act on.

Every error names the field, the value and what is accepted, in one line. Each class carries the exit code that
the command returns for it, so that scripts can tell a typing mistake from missing data or a refused release.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args


class FlmarketError(Exception):
    """Base of all errors that flmarket raises on purpose."""

    exit_code = 1


class InvalidInput(FlmarketError, ValueError):
    """A value that is not accepted: says which, what it was and what would be."""

    exit_code = 2

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{field}: {_short(value)} is not accepted; expected {accepted}")


class UnknownName(InvalidInput):
    """A mechanism, data set or population that is not registered."""


class ConfigError(InvalidInput):
    """A configuration or data file that cannot be read as meant."""

    exit_code = 3


def first_problem(error: Any, source: str, model: Any) -> ConfigError:
    """What pydantic finds wrong first with a file, in one line: which key, what it was, what is accepted."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "file"
    value, accepted = first.get("input"), first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if first["type"] == "missing":
        value, accepted = None, "a value: it is needed"
    elif first["type"] == "extra_forbidden" and (known := _keys(model, first["loc"][:-1])):
        accepted = f"one of the keys {', '.join(known)}"
    return ConfigError(f"{source}: {key}", value, accepted)


def _keys(model: Any, place: tuple[object, ...]) -> list[str]:
    """The keys of a section of a file."""
    for part in place:
        found = getattr(model, "model_fields", {}).get(part)
        kinds = [] if found is None else [found.annotation, *get_args(found.annotation)]
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return list(getattr(model, "model_fields", {}))


class DataUnavailable(FlmarketError):
    """A data set that is neither in the named directory nor in the cache and cannot be fetched."""

    exit_code = 4


class MissingDependency(FlmarketError):
    """An optional dependency that this call needs."""

    exit_code = 5

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed; it comes with: pip install 'flmarket[{extra}]'")


@contextmanager
def needed(extra: str, package: str = "") -> Iterator[None]:
    """Imports from an extra: what is not installed is a `MissingDependency`, of this package or by its own name."""
    try:
        yield
    except ImportError as error:
        raise MissingDependency(package or str(error.name), extra) from None


class PrivacyBudgetExhausted(FlmarketError):
    """A release that would take an owner past her own cap; raised before anything is released."""

    exit_code = 6


class MechanismViolation(FlmarketError):
    """A mechanism's outcome broke a rule that the market enforces (overspending, more privacy than offered)."""

    exit_code = 7


class SettlementError(FlmarketError):
    """A transfer or award that would create money, overdraw an account or resolve twice."""

    exit_code = 8


class Tampered(FlmarketError):
    """Something of an owner's was invented, altered, replayed or not what it should be: says whose, and what."""

    exit_code = 10

    def __init__(self, owner: int, what: str, why: str) -> None:
        self.owner, self.what, self.why = owner, what, why
        super().__init__(f"the {what} of owner {owner} is refused: {why}")


class SumVoid(FlmarketError):
    """A masked sum that will not be unmasked: too few owners are left. Nothing of anybody's input is known."""

    exit_code = 11


def _short(value: object, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
