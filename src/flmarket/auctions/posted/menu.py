"""What a posted auction offers: a price per record for each ε of a catalogue, from public facts and past sales only.

    price(ε) = (money left / records left) · exp(level + power·ln ε + bend·ln² ε)

with level, power and bend linear in features that the owner being served cannot influence: her share of the records
left and of all records, the share of records left, the share whose owners declined, and how much money there is per
record, measured against what the owners served before her said one record at ε = 1 is worth. So the scale of money does
not matter; only for the first owner, before anybody has spoken, it is unknown (`first`). A menu trained on one
population may fix that `unit` of money instead. ε has a natural unit: at ε ≈ 1 the noise and the bias of the error
bound are of one order. Prices never fall as ε grows.

`reserve` keeps money for those who come later: an owner with the share s of the records left is offered at most the
share s^reserve of the money left (0: everything, 1: in proportion).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import ConfigError, UnknownName

Number = float | FloatArray

FEATURES = (
    "one",
    "share_of_rest",
    "share_of_all",
    "declined",
    "rest",
    "share_of_rest × rest",
    "first",
    "money",
    "money²",
    "money × share_of_rest",
)
# Steps of two per cent: an owner sells at most that much less than her whole privacy budget.
CATALOGUE = np.geomspace(0.05, 8.0, 256)
_LOG_CATALOGUE = np.log(CATALOGUE)
# which features sales change, and which they do not
_MOVING = tuple(FEATURES.index(name) for name in ("declined", "money", "money²", "money × share_of_rest"))
_FIXED = tuple(k for k in range(len(FEATURES)) if k not in _MOVING)
_moving_of = itemgetter(*_MOVING)
_SHIPPED = files("flmarket.auctions.posted") / "menus"


@dataclass(frozen=True)
class Situation:
    """What is known of every owner's turn before anything is sold; arrays of shape (n, ...), in order of service.

    The axes after the first are the batch; one auction has none. `value_per_record` is the typical worth of a record at
    ε = 1 to those served before her, 0 where nobody was.
    """

    share_of_rest: FloatArray
    share_of_all: FloatArray
    rest: FloatArray
    value_per_record: FloatArray

    @staticmethod
    def typical_values(value_at_one: FloatArray) -> FloatArray:
        """The geometric mean of what owners before each said; who puts no value on a record is not counted."""
        speaks = value_at_one > 0
        logs = np.log(np.where(speaks, value_at_one, 1.0)).cumsum(axis=0)
        voices = speaks.cumsum(axis=0)
        typical = np.zeros(value_at_one.shape)
        typical[1:] = np.where(voices > 0, np.exp(logs / np.maximum(voices, 1)), 0.0)[:-1]
        return typical


class Pricing:
    """A menu put to one batch of queues: everything that sales do not change is computed once.

    All arithmetic is element by element and in one order, never a matrix product, whose rounding would depend on how
    many auctions are cleared together. It is written for plain floats and arrays alike: an auction cleared alone is
    mostly scalar work, on which NumPy spends its time in overhead (`scalar`, for one row served one by one).
    """

    def __init__(self, menu: Menu, situation: Situation, *, scalar: bool = False) -> None:
        share, rest, value = situation.share_of_rest, situation.rest, situation.value_per_record
        unspoken = value <= 0
        known = np.ones(share.shape) if menu.unit is not None else 1.0 - unspoken
        typical = np.full(share.shape, menu.unit) if menu.unit is not None else np.where(unspoken, 1.0, value)
        log_typical = np.log(np.maximum(typical, 1e-200))
        fixed = (np.ones(share.shape), share, situation.share_of_all, rest, share * rest, unspoken)
        rows = np.array([menu.level, menu.power, menu.bend]).reshape(3, len(FEATURES), *[1] * share.ndim)
        level, power, bend = sum(rows[:, k] * feature for k, feature in zip(_FIXED, fixed, strict=True))
        turns = [known, log_typical, share, level, power, bend]
        self._turns: Any = list(zip(*(column.tolist() for column in turns), strict=True)) if scalar else turns
        self._scalar = scalar
        self._moving = [_moving_of(row) for row in (menu.level, menu.power, menu.bend)]

    def offers(
        self, turn: int | slice, log_money: Number, declined: Number, log_records: Number, epsilon: slice = slice(None)
    ) -> FloatArray:
        """What each owner of a turn is offered for her records at every ε (the last axis), never falling.

        A turn is one owner or a slice of them; `log_money`, of the money left per record, and `declined` have the shape
        of the batch. Without money the price is the exponential of −∞, and an absurd price meets its limit later: the
        caller lets division by zero and overflow pass.
        """
        here = self._turns[turn] if self._scalar else [column[turn] for column in self._turns]
        known, log_typical, share, level, power, bend = here
        money = _within_20(log_money - log_typical) * known
        square, product = money * money, money * share
        level, power, bend = (
            fixed + a * declined + b * money + c * square + d * product
            for fixed, (a, b, c, d) in zip((level, power, bend), self._moving, strict=True)
        )
        log_epsilon = _LOG_CATALOGUE[epsilon]
        prices = _column(bend) * log_epsilon
        prices += _column(power)
        prices *= log_epsilon
        prices += _column(level + log_money + log_records)
        np.exp(prices, out=prices)
        return np.asarray(np.maximum.accumulate(prices, axis=-1, out=prices))


def _within_20(value: Any) -> Any:
    """Brought into [−20, 20]."""
    if isinstance(value, float):
        return min(max(value, -20.0), 20.0)
    return np.minimum(np.maximum(value, -20.0), 20.0)


def _column(value: Any) -> Any:
    """To be combined with the catalogue, which is the last axis."""
    return value if isinstance(value, float) else value[..., None]


@dataclass(frozen=True)
class Menu:
    """The coefficients of level, power and bend over `FEATURES`, and the reserve."""

    level: tuple[float, ...]
    power: tuple[float, ...]
    bend: tuple[float, ...]
    reserve: float = 0.0
    unit: float | None = None
    name: str = ""
    provenance: str = ""

    def __post_init__(self) -> None:
        for field in ("level", "power", "bend"):
            values = getattr(self, field)
            if len(values) != len(FEATURES) or not np.isfinite(values).all():
                raise ConfigError(f"menu {self.name}: {field}", values, f"{len(FEATURES)} finite numbers")
        if not 0 <= self.reserve <= 1:
            raise ConfigError(f"menu {self.name}: reserve", self.reserve, "a number from 0 to 1")
        if self.unit is not None and not (np.isfinite(self.unit) and self.unit > 0):
            raise ConfigError(f"menu {self.name}: unit", self.unit, "a positive amount of money, or null")

    def to_vector(self) -> FloatArray:
        """All coefficients in one array, for training; the reserve last."""
        return np.array([*self.level, *self.power, *self.bend, self.reserve])

    @classmethod
    def from_vector(
        cls, vector: FloatArray, *, unit: float | None = None, name: str = "", provenance: str = ""
    ) -> Menu:
        """The inverse of `to_vector`; a reserve outside [0, 1] is brought inside."""
        level, power, bend = (tuple(row.tolist()) for row in np.split(np.asarray(vector[:-1], dtype=np.float64), 3))
        reserve = float(np.clip(vector[-1], 0.0, 1.0))
        return cls(level, power, bend, reserve=reserve, unit=unit, name=name, provenance=provenance)

    def save(self, path: Path) -> None:
        """Write the menu as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Menu:
        """Read a menu written by `save`."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            level, power, bend = (tuple(map(float, values[key])) for key in ("level", "power", "bend"))
            unit = values["unit"]
            return cls(
                level,
                power,
                bend,
                reserve=float(values["reserve"]),
                unit=None if unit is None else float(unit),
                name=str(values["name"]),
                provenance=str(values["provenance"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("menu", str(path), f"a menu file ({error})") from None


def _linear(share: float) -> Menu:
    zeros = (0.0,) * (len(FEATURES) - 1)
    level, power, bend = (float(np.log(share)), *zeros), (1.0, *zeros), (0.0, *zeros)
    return Menu(level, power, bend, name="linear", provenance=f"no training: {share:g} of an even share, linear in ε")


LINEAR = _linear(0.9)


def menu_names() -> tuple[str, ...]:
    """Menus that ship: the untrained one and the trained ones."""
    trained = (entry.name.removesuffix(".json") for entry in _SHIPPED.iterdir() if entry.name.endswith(".json"))
    return ("linear", *sorted(trained))


def load_menu(name: str) -> Menu:
    """A shipped menu by name, or one from a JSON file by path."""
    if name == "linear":
        return LINEAR
    if name.endswith(".json"):
        return Menu.read(Path(name))
    if name not in menu_names():
        raise UnknownName("menu", name, f"one of {', '.join(menu_names())}, or a path to a .json file")
    return Menu.read(Path(str(_SHIPPED / f"{name}.json")))
