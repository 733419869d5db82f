"""What a release promises, as frozen values. What a sequence of them costs is the account's business.

The unit of privacy is one owner's whole update in one release (local model: any two inputs of the owner are
neighbours), unless a `RecordLevel` says that it is any one of her records. The two are two products: no sum of both
means anything, and no account takes a loss of the other unit. Each value is the strongest simple statement about a
mechanism; the account weakens it where its cap is in another currency. `PureDp`, `ZCdp` and `ApproxDp` also serve as
caps, and `Uncapped` is one for whoever sells updates as they are: `Unprotected` is what such a release promises, and it
fits under no other cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass
from math import inf, isfinite, nan
from numbers import Real
from typing import Any, ClassVar, Literal, TypeVar

from flmarket.errors import InvalidInput, UnknownName

# Ten releases of the double nearest 0.1 add up to 1 + 5.6e-17. Accounts let a total pass its cap by this
# relative amount so that 10 × 0.1 fits in 1.0, and the mechanisms of this package add noise for a loss
# smaller by as much, so that the loss actually delivered still stays within the cap.
ROUNDING_ALLOWANCE = 1e-12

_LARGEST = 1e18
# from where to where numbers of these names may be, wherever a value here has them; squares and scales made from a clip
# must be normal numbers
_LIMITS = {
    "epsilon": (0.0, _LARGEST),
    "rho": (0.0, _LARGEST),
    "delta": (1e-30, 0.5),
    "noise_multiplier": (1e-9, _LARGEST),
    "clip": (1e-50, 1e50),
    "rate": (1e-12, 1e12),
}


def checked_number(name: str, value: object, low: float, high: float) -> float:
    """One finite number between two limits (both accepted), or a typed error."""
    number = value if type(value) is float else _real(value)  # the usual case, and millions of it
    if not (isfinite(number) and low <= number <= high):
        raise InvalidInput(name, value, f"a number from {low:g} to {high:g}")
    return number


def _real(value: object) -> float:
    """As a float: NaN for what is no number, infinite for what is too large for one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return nan
    try:
        return float(value)
    except OverflowError:
        return inf


def checked_whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """One whole number of at least `least`, and at most `most` if that is given, or a typed error."""
    if type(value) is not int or value < least or (most is not None and value > most):
        accepted = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise InvalidInput(name, value, f"a whole number {accepted}")
    return value


def checked_positive(name: str, value: Any) -> float:
    """One finite number above 0, or a typed error."""
    number = _real(value)
    if not 0 < number < inf:
        raise InvalidInput(name, value, "a finite number above 0")
    return number


class Checked:
    """A frozen value; its fields that have limits by their name are within them."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name in _LIMITS:
                object.__setattr__(self, name, checked_number(name, getattr(self, name), *_LIMITS[name]))


@dataclass(frozen=True, slots=True)
class PureDp(Checked):
    """ε-differential privacy (Dwork, McSherry, Nissim, Smith 2006)."""

    epsilon: float


@dataclass(frozen=True, slots=True)
class ApproxDp(Checked):
    """(ε, δ)-differential privacy, with nothing else known about the mechanism."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class ZCdp(Checked):
    """ρ-zero-concentrated differential privacy (Bun & Steinke 2016, Definition 1.1)."""

    rho: float


@dataclass(frozen=True, slots=True)
class GaussianRelease(Checked):
    """A Gaussian mechanism; `noise_multiplier` is σ divided by the replace-one sensitivity (2·clip here)."""

    noise_multiplier: float


@dataclass(frozen=True, slots=True)
class ExponentialRelease(Checked):
    """An exponential mechanism of parameter ε: ε-DP and ε-bounded-range, hence ε²/8-zCDP.

    Bounded range: Durfee & Rogers 2019; its zCDP constant: Cesar & Rogers 2021 (arXiv:2004.07223).
    """

    epsilon: float


@dataclass(frozen=True, slots=True)
class Unprotected:
    """A release without noise: no bound holds, so it counts as unbounded against every cap."""


@dataclass(frozen=True, slots=True)
class RecordLevel:
    """The promise inside, for any one record of an owner (replace-one), where all others are for her whole update.

    As a cap: what may be given away of any one record.
    """

    loss: PureDp | ApproxDp | ZCdp | GaussianRelease

    def __post_init__(self) -> None:
        if not isinstance(self.loss, PureDp | ApproxDp | ZCdp | GaussianRelease):
            raise InvalidInput("loss", self.loss, "PureDp, ApproxDp, ZCdp or GaussianRelease, for a record")


@dataclass(frozen=True, slots=True)
class Uncapped(Checked):
    """No limit on what may be given away. Totals are still kept: ε at `delta`, ∞ after an unprotected release."""

    delta: float = 1e-6


Event = PureDp | ApproxDp | ZCdp | GaussianRelease | ExponentialRelease | Unprotected | RecordLevel
Cap = PureDp | ZCdp | ApproxDp | Uncapped | RecordLevel
Unit = Literal["update", "record"]


def unit_of(event: Event | Cap) -> Unit:
    """What a loss or a cap is for: an owner's whole update, or any one of her records."""
    return "record" if isinstance(event, RecordLevel) else "update"


_KINDS: dict[str, type[Event]] = {
    "pure-dp": PureDp,
    "approx-dp": ApproxDp,
    "zcdp": ZCdp,
    "gaussian": GaussianRelease,
    "exponential": ExponentialRelease,
    "unprotected": Unprotected,
    "record-level": RecordLevel,
}
_NAMES: dict[type, str] = {cls: name for name, cls in _KINDS.items()} | {Uncapped: "uncapped"}


def event_to_dict(event: Event | Cap) -> dict[str, Any]:
    """A JSON-ready dictionary of an event or a cap; `event_from_dict` restores an equal value."""
    if type(event) not in _NAMES:
        raise InvalidInput("event", event, "one of " + ", ".join(cls.__name__ for cls in _NAMES))
    if isinstance(event, RecordLevel):
        return {"kind": _NAMES[RecordLevel], "loss": event_to_dict(event.loss)}
    return {"kind": _NAMES[type(event)], **{name: getattr(event, name) for name in type(event).__slots__}}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """The event written by `event_to_dict`; unknown kinds and missing or extra fields are refused."""
    return _from_dict(data, _KINDS)


def cap_from_dict(data: Mapping[str, Any]) -> Cap:
    """The cap written by `event_to_dict`, as strictly."""
    kinds: dict[str, type[Cap]] = {_NAMES[cls]: cls for cls in (PureDp, ZCdp, ApproxDp, Uncapped, RecordLevel)}
    cap = _from_dict(data, kinds)
    if isinstance(cap, RecordLevel) and isinstance(cap.loss, GaussianRelease):
        raise InvalidInput("cap", cap, "PureDp, ZCdp or ApproxDp, for a record")
    return cap


_Value = TypeVar("_Value")


def _from_dict(data: Mapping[str, Any], kinds: Mapping[str, type[_Value]]) -> _Value:
    if (type(data) is not dict and not isinstance(data, Mapping)) or "kind" not in data:
        raise InvalidInput("event", data, "a dictionary with a kind")
    fields = dict(data)
    kind = fields.pop("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise UnknownName("event kind", kind, "one of " + ", ".join(kinds))
    made = kinds[kind]
    if made is RecordLevel and fields.keys() == {"loss"}:
        inside = fields["loss"]
        if not isinstance(inside, Mapping) or inside.get("kind") == _NAMES[RecordLevel]:
            raise InvalidInput("event", dict(data), "one loss inside, of a record")
        fields = {"loss": event_from_dict(inside)}
    try:
        return made(**fields)
    except TypeError:
        raise InvalidInput("event", dict(data), f"the fields of a {kind} event, no more, no fewer") from None
