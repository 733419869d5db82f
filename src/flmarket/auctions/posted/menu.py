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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import ConfigError, UnknownName

__all__ = ["CATALOGUE", "FEATURES", "LINEAR", "Menu", "Pricing", "Situation", "load_menu", "menu_names"]

FloatArray = NDArray[np.float64]

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
_BASIS = np.stack([np.ones(CATALOGUE.size), np.log(CATALOGUE), np.log(CATALOGUE) ** 2])
_SHIPPED = files("flmarket.auctions.posted") / "menus"


@dataclass(frozen=True)
class Situation:
    """What is known of every owner's turn before anything is sold; arrays of shape (rows, n), in order of service.

    `value_per_record` is the typical worth of a record at ε = 1 to those served before her, 0 where nobody was.
    """

    share_of_rest: FloatArray
    share_of_all: FloatArray
    rest: FloatArray
    value_per_record: FloatArray

    @staticmethod
    def typical_values(value_at_one: FloatArray) -> FloatArray:
        """The geometric mean of what owners before each said; who puts no value on a record is not counted."""
        speaks = value_at_one > 0
        logs = np.cumsum(np.log(np.where(speaks, value_at_one, 1.0)), axis=-1)
        voices = np.cumsum(speaks, axis=-1)
        before = np.where(voices > 0, np.exp(logs / np.maximum(voices, 1)), 0.0)
        return np.concatenate([np.zeros((len(before), 1)), before[:, :-1]], axis=-1)


class Pricing:
    """A menu put to one batch of queues: everything that sales do not change is computed once."""

    def __init__(self, menu: Menu, situation: Situation) -> None:
        share, rest, value = situation.share_of_rest, situation.rest, situation.value_per_record
        self._coefficients = np.array([menu.level, menu.power, menu.bend]).T
        self._known = np.ones(share.shape) if menu.unit is not None else (value > 0).astype(np.float64)
        typical = np.full(share.shape, menu.unit) if menu.unit is not None else np.where(value > 0, value, 1.0)
        self._log_typical = np.log(np.maximum(typical, 1e-200))
        self._features = np.zeros((*share.shape, len(FEATURES)))
        fixed = (np.ones(share.shape), share, situation.share_of_all, None, rest, share * rest, value <= 0)
        for column, values in enumerate(fixed):
            if values is not None:
                self._features[..., column] = values

    def offers(
        self,
        turn: slice,
        money_per_record: FloatArray,
        declined: FloatArray,
        records: FloatArray,
        epsilon: slice = slice(None),
    ) -> FloatArray:
        """What each owner of a turn is offered for her records at every ε, shape (rows, turn, ε), never falling.

        `money_per_record` and `declined` have shape (rows, 1), `records` (rows, turn).
        """
        features = self._features[:, turn]
        log_money = np.log(np.maximum(money_per_record, 1e-200)) - self._log_typical[:, turn]
        money = np.minimum(np.maximum(log_money, -20.0), 20.0) * self._known[:, turn]
        features[..., 3] = declined
        features[..., 7] = money
        features[..., 8] = money * money
        features[..., 9] = money * features[..., 1]
        shape = features @ self._coefficients
        with np.errstate(divide="ignore", over="ignore"):  # no money: price 0; an absurd price meets the limit later
            shape[..., 0] += np.log(money_per_record * records)
            prices = np.exp(shape @ _BASIS[:, epsilon])
        return np.asarray(np.maximum.accumulate(prices, axis=-1))


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
