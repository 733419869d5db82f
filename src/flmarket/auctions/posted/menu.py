"""What a posted auction offers: a price per record for each ε of a catalogue, from public facts and past sales only.

    price(ε) = (money left / records left) · exp(curve(ln ε))

The curve comes from facts that the owner being served cannot influence (`INPUTS`): data sizes, the money left, what was
bought so far, and what the owners served before her said. Their words are the scale: money is measured against what
they said one record at ε = 1 is worth, so the unit of money does not matter; only for the first owner, before anybody
has spoken, it is unknown. A menu trained on one population may fix that `unit` instead. ε has a natural unit: at ε ≈ 1
the noise and the bias of the error bound are of one order. Prices never fall as ε grows.

* `NetworkMenu`: the curve is piecewise linear between `KNOTS`, whose heights are a small network's outputs.
* `Menu`, the earlier form: level + power·ln ε + bend·ln² ε, each linear in `FEATURES`. Files of it open as ever.

`reserve` keeps money for those who come later: an owner with the share s of the records left is offered at most the
share s^reserve of the money left (0: everything, 1: in proportion). `explorers` is how many of the smallest are served
before the largest, so that somebody has spoken when it matters.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from flmarket.bids import BidProfile, FloatArray
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

# What a network sees: first what sales change, then what they do not.
INPUTS = (
    "money", "money²", "money × share_of_rest", "declined", "log noise", "log squares",
    "first", "share_of_rest", "log share_of_rest", "share_of_all", "log share_of_all", "rest", "next_share",
    "concentration", "log cost of those served", "log privacy budget of those served",
)  # fmt: skip
KNOTS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 1.15, 1.5, 2.0, 3.0, 5.0, 8.0)
MONEY_RANGE = 8.0  # logarithms of money per record over its worth are brought within this
_LOG_KNOTS = np.log(KNOTS)
_INTERVAL = np.clip(np.searchsorted(_LOG_KNOTS, _LOG_CATALOGUE, side="right") - 1, 0, len(KNOTS) - 2)
_INTO = (_LOG_CATALOGUE - _LOG_KNOTS[_INTERVAL]) / np.diff(_LOG_KNOTS)[_INTERVAL]
_MAX_LAYERS, _MAX_WIDTH = 4, 256
_SHIPPED = files("flmarket.auctions.posted") / "menus"


@dataclass(frozen=True)
class Situation:
    """What is known of every owner's turn before anything is sold; arrays of shape (n, ...), in order of service.

    The axes after the first are the batch; one auction has none.
    """

    share_of_rest: FloatArray
    share_of_all: FloatArray
    rest: FloatArray
    next_share: FloatArray  # of the records left, of whoever is served next
    concentration: FloatArray  # the sum of squared shares of the records left
    value_per_record: FloatArray  # typical of those served before her, at ε = 1; 0 where nobody was
    privacy_budget: FloatArray  # typical of those served before her; 0 where nobody was
    full_cost: FloatArray  # of all served before her, as a share of the budget

    @staticmethod
    def typical(values: FloatArray) -> FloatArray:
        """The geometric mean of what owners before each said; who says 0 is not counted."""
        speaks = values > 0
        logs = np.log(np.where(speaks, values, 1.0)).cumsum(axis=0)
        voices = speaks.cumsum(axis=0)
        found = np.zeros(values.shape)
        found[1:] = np.where(voices > 0, np.exp(logs / np.maximum(voices, 1)), 0.0)[:-1]
        return found

    def scale(self, unit: float | None) -> tuple[FloatArray, FloatArray]:
        """Whether the worth of a record is known at each turn, and its logarithm; both 0 where it is not."""
        if unit is not None:
            return np.ones(self.rest.shape), np.full(self.rest.shape, np.log(unit))
        unspoken = self.value_per_record <= 0
        log = np.log(np.maximum(np.where(unspoken, 1.0, self.value_per_record), 1e-200))
        return np.where(unspoken, 0.0, 1.0), log

    def inputs(self, unit: float | None) -> tuple[FloatArray, ...]:
        """The part of `INPUTS` that sales do not change."""
        share, share_of_all = (np.log(np.maximum(x, 1e-4)) / 3.0 for x in (self.share_of_rest, self.share_of_all))
        spoken = self.privacy_budget > 0
        return (
            1.0 - self.scale(unit)[0],
            self.share_of_rest,
            share,
            self.share_of_all,
            share_of_all,
            self.rest,
            self.next_share,
            self.concentration,
            np.log(0.05 + np.minimum(self.full_cost, 20.0)),
            np.log(np.where(spoken, self.privacy_budget, 1.0)),
        )


class Sales(NamedTuple):
    """What was bought so far: the share of records whose owners declined, and what the bought ε are good for."""

    declined: Any
    noise: Any  # Σ 8·W²/ε²: of the papers' noise, at weights like the data
    squares: Any  # Σ ε²: one over the least noise, but for the factor 8

    def after(self, share: Any, epsilon: Any) -> Sales:
        """With the sales of one turn, (..., batch) for a block of owners and (batch) for one."""
        if isinstance(epsilon, float):
            if epsilon <= 0:
                return self._replace(declined=self.declined + share)
            ratio = share / epsilon
            return Sales(self.declined, self.noise + 8.0 * ratio * ratio, self.squares + epsilon * epsilon)
        ratio = np.divide(share, epsilon, out=np.zeros(epsilon.shape), where=epsilon > 0)
        terms = share * (epsilon <= 0), 8.0 * ratio * ratio, epsilon * epsilon
        if epsilon.ndim > np.ndim(self.declined):
            terms = tuple(term.sum(axis=0) for term in terms)
        return Sales(*(old + new for old, new in zip(self, terms, strict=True)))


def moving_inputs(log: Any, money: Any, share: Any, sales: Sales) -> tuple[Any, ...]:
    """The part of `INPUTS` that sales change, for floats, arrays and tensors alike."""
    return (
        money,
        0.2 * money * money,
        money * share,
        sales.declined,
        0.5 * log(sales.noise + 0.01),
        log(sales.squares + 0.05),
    )


class Pricing(Protocol):
    """A menu put to one batch of queues: everything that sales do not change is computed once.

    All arithmetic is element by element and in one order, never a matrix product, whose rounding would depend on how
    many auctions are cleared together. It is written for plain floats and arrays alike: an auction cleared alone is
    mostly scalar work, on which NumPy spends its time in overhead (`scalar`, for one row served one by one).
    """

    def offers(
        self, turn: int | slice, log_money: Number, sales: Sales, log_records: Number, epsilon: slice = slice(None)
    ) -> FloatArray:
        """What each owner of a turn is offered for her records at every ε (the last axis), never falling.

        A turn is one owner or a slice of them; `log_money`, of the money left per record, and `sales` have the shape
        of the batch. Without money the price is the exponential of −∞, and an absurd price meets its limit later: the
        caller lets division by zero and overflow pass.
        """


class LogQuadratic:
    """Prices of a `Menu`."""

    def __init__(self, menu: Menu, situation: Situation, *, scalar: bool) -> None:
        share, rest = situation.share_of_rest, situation.rest
        known, log_typical = situation.scale(menu.unit)
        unspoken = situation.value_per_record <= 0
        fixed = (np.ones(share.shape), share, situation.share_of_all, rest, share * rest, unspoken)
        rows = np.array([menu.level, menu.power, menu.bend]).reshape(3, len(FEATURES), *[1] * share.ndim)
        level, power, bend = sum(rows[:, k] * feature for k, feature in zip(_FIXED, fixed, strict=True))
        turns = [known, log_typical, share, level, power, bend]
        self._turns: Any = list(zip(*(column.tolist() for column in turns), strict=True)) if scalar else turns
        self._scalar = scalar
        self._moving = [_moving_of(row) for row in (menu.level, menu.power, menu.bend)]

    def offers(
        self, turn: int | slice, log_money: Number, sales: Sales, log_records: Number, epsilon: slice = slice(None)
    ) -> FloatArray:
        """See `Pricing`."""
        here = self._turns[turn] if self._scalar else [column[turn] for column in self._turns]
        known, log_typical, share, level, power, bend = here
        money = _within(log_money - log_typical, 20.0) * known
        square, product = money * money, money * share
        level, power, bend = (
            fixed + a * sales.declined + b * money + c * square + d * product
            for fixed, (a, b, c, d) in zip((level, power, bend), self._moving, strict=True)
        )
        log_epsilon = _LOG_CATALOGUE[epsilon]
        prices = _column(bend) * log_epsilon
        prices += _column(power)
        prices *= log_epsilon
        return _rising(prices, level + log_money + log_records)


class Networked:
    """Prices of a `NetworkMenu`. Sums run over a layer's inputs one after another, alone and in a batch."""

    def __init__(self, menu: NetworkMenu, situation: Situation, *, scalar: bool) -> None:
        first, *rest = menu.arrays
        fixed = situation.inputs(menu.unit)
        moving = len(INPUTS) - len(fixed)
        axes = (1,) * situation.rest.ndim
        start = first[0].reshape(-1, *axes) * np.ones(situation.rest.shape)
        for weights, values in zip(first[moving + 1 :], fixed, strict=True):
            start += weights.reshape(-1, *axes) * values
        self._moving, self._rest, self._scalar = first[1 : moving + 1], rest, scalar
        columns = [*situation.scale(menu.unit), situation.share_of_rest]
        if scalar:
            self._turns: Any = list(zip(*(column.tolist() for column in columns), start.T, strict=True))
            self._terms = np.empty((moving + 1, first.shape[1]))
            self._values = [np.ones(len(layer)) for layer in rest]  # the first stays 1: it is the bias's
        else:
            self._turns = [*columns, start]

    def offers(
        self, turn: int | slice, log_money: Number, sales: Sales, log_records: Number, epsilon: slice = slice(None)
    ) -> FloatArray:
        """See `Pricing`."""
        if self._scalar:
            known, log_typical, share, start = self._turns[turn]
        else:
            *columns, hidden = self._turns
            known, log_typical, share = (column[turn] for column in columns)
            start = hidden[:, turn]
        money = _within(log_money - log_typical, MONEY_RANGE) * known
        moving = moving_inputs(np.log, money, share, sales)
        heights = self._alone(start, moving) if self._scalar else self._together(start, moving)
        interval, into, half = _INTERVAL[epsilon], _INTO[epsilon], len(KNOTS) - 1
        prices = heights[..., half:].take(interval, axis=-1)
        prices *= into
        prices += heights[..., :half].take(interval, axis=-1)
        return _rising(prices, log_money + log_records)

    def _alone(self, start: FloatArray, moving: Sequence[float]) -> FloatArray:
        terms = self._terms
        terms[0] = start
        np.multiply(self._moving, np.array(moving)[:, None], out=terms[1:])
        for layer, values in zip(self._rest, self._values, strict=True):
            np.maximum(np.add.reduce(terms, axis=0), 0.0, out=values[1:])
            terms = layer * values[:, None]
        return np.asarray(np.add.reduce(terms, axis=0))

    def _together(self, start: FloatArray, moving: Sequence[FloatArray]) -> FloatArray:
        axes = (1,) * (start.ndim - 1)
        values = start
        for weights, value in zip(self._moving, moving, strict=True):
            values = values + weights.reshape(-1, *axes) * value
        for bias, *layer in self._rest:
            active, values = np.maximum(values, 0.0), bias.reshape(-1, *axes)
            for weights, value in zip(layer, active, strict=True):
                values = values + weights.reshape(-1, *axes) * value
        return np.ascontiguousarray(np.moveaxis(values, 0, -1))


def _rising(log_prices: FloatArray, level: Any) -> FloatArray:
    log_prices += _column(level)
    np.exp(log_prices, out=log_prices)
    return np.asarray(np.maximum.accumulate(log_prices, axis=-1, out=log_prices))


def _within(value: Any, most: float) -> Any:
    """Brought into [−most, most]."""
    if isinstance(value, float):
        return min(max(value, -most), most)
    return np.minimum(np.maximum(value, -most), most)


def _column(value: Any) -> Any:
    """To be combined with the catalogue, which is the last axis."""
    return value if isinstance(value, float) else value[..., None]


@dataclass(frozen=True)
class Menu:
    """The coefficients of level, power and bend over `FEATURES`, and the reserve: the earlier form."""

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
        _check_common(self)

    @property
    def explorers(self) -> int:
        """Nobody is served before the largest."""
        return 0

    def pricing(self, situation: Situation, *, scalar: bool = False) -> Pricing:
        """Put to a batch of queues."""
        return LogQuadratic(self, situation, scalar=scalar)

    def save(self, path: Path) -> None:
        """Write the menu as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Menu:
        """Of what `save` wrote."""
        level, power, bend = (tuple(map(float, values[key])) for key in ("level", "power", "bend"))
        return cls(level, power, bend, reserve=float(values["reserve"]), **_common(values))


class UnlikeHistory(UserWarning):
    """Today's bidders look unlike those that a menu was fitted to: the guarantees hold, the accuracy may not."""


@dataclass(frozen=True)
class Seen:
    """Of the bids that a menu was fitted to: how many, and between which values nine in ten of them lie."""

    bids: int
    value_per_record: tuple[float, float]  # at ε = 1
    privacy_budget: tuple[float, float]

    @classmethod
    def of(cls, bids: BidProfile) -> Seen:
        """What to remember of a history."""
        ends = (np.quantile(x, (0.05, 0.95)).tolist() for x in (bids.valuations.per_record(1.0), bids.privacy_budget))
        return cls(bids.valuations.kind.size, *((low, high) for low, high in ends))

    def warn_if_unlike(self, bids: BidProfile) -> None:
        """Warn where more bidders lie outside than chance explains (once in a thousand, by Hoeffding's inequality)."""
        count = bids.valuations.kind.size
        most = 0.1 + np.sqrt(np.log(1000.0) / 2.0 * (1.0 / count + 1.0 / self.bids))
        today = (bids.valuations.per_record(1.0), bids.privacy_budget)
        named = ("value of a record at ε = 1", "privacy budget")
        for what, values, (low, high) in zip(named, today, (self.value_per_record, self.privacy_budget), strict=True):
            outside = float(((values < low) | (values > high)).mean())
            if outside > most:
                share = f"{outside:.0%} of {count} bidders have a {what} outside {low:.3g} to {high:.3g}"
                warnings.warn(
                    f"{share}, where nine in ten of the {self.bids} bids lay that the menu was fitted to: still "
                    "truthful, rational and within budget, but fit it again to buy well",
                    UnlikeHistory,
                    stacklevel=3,
                )


@dataclass(frozen=True)
class NetworkMenu:
    """A network from `INPUTS` to the heights of the price curve at `KNOTS`.

    A layer is a matrix whose first row is the bias, then one row an input; all but the last are followed by max(·, 0).
    """

    layers: tuple[tuple[tuple[float, ...], ...], ...]
    reserve: float = 0.0
    explorers: int = 0
    unit: float | None = None
    name: str = ""
    provenance: str = ""
    seen: Seen | None = None

    def __post_init__(self) -> None:
        where = f"menu {self.name}: layers"
        if not 1 <= len(self.layers) <= _MAX_LAYERS:
            raise ConfigError(where, len(self.layers), f"1 to {_MAX_LAYERS} layers")
        width = len(INPUTS)
        for layer in self.layers:
            widths = {len(row) for row in layer}
            if len(layer) != width + 1 or len(widths) != 1 or not 1 <= max(widths) <= _MAX_WIDTH:
                raise ConfigError(where, f"{len(layer)} rows", f"{width + 1} rows of one length up to {_MAX_WIDTH}")
            width = max(widths)
            if not (np.abs(layer) < 1e6).all():
                raise ConfigError(where, "entries", "finite numbers below a million")
        if width != len(KNOTS):
            raise ConfigError(where, width, f"{len(KNOTS)} outputs")
        _check_common(self)
        if not 0 <= self.explorers <= 1000:
            raise ConfigError(f"menu {self.name}: explorers", self.explorers, "a whole number from 0 to 1000")

    @cached_property
    def arrays(self) -> list[FloatArray]:
        """The layers; the last one gives the heights at the left ends of all intervals, then the rises."""
        *layers, last = (np.array(layer) for layer in self.layers)
        return [*layers, np.concatenate((last[:, :-1], np.diff(last)), axis=1)]

    def pricing(self, situation: Situation, *, scalar: bool = False) -> Pricing:
        """Put to a batch of queues."""
        return Networked(self, situation, scalar=scalar)

    def save(self, path: Path) -> None:
        """Write the menu as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NetworkMenu:
        """Of what `save` wrote."""
        layers = tuple(tuple(tuple(map(float, row)) for row in layer) for layer in values["layers"])
        seen = values.get("seen")
        if seen is not None:
            ends = (tuple(map(float, seen[key])) for key in ("value_per_record", "privacy_budget"))
            (a, b), (c, d) = ends
            seen = Seen(max(int(seen["bids"]), 1), (a, b), (c, d))
        explorers = int(values["explorers"])
        return cls(layers, float(values["reserve"]), explorers, seen=seen, **_common(values))


AnyMenu = Menu | NetworkMenu


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    unit = values["unit"]
    named = {"name": str(values["name"]), "provenance": str(values["provenance"])}
    return {"unit": None if unit is None else float(unit), **named}


def _check_common(menu: AnyMenu) -> None:
    if not 0 <= menu.reserve <= 1:
        raise ConfigError(f"menu {menu.name}: reserve", menu.reserve, "a number from 0 to 1")
    if menu.unit is not None and not (np.isfinite(menu.unit) and menu.unit > 0):
        raise ConfigError(f"menu {menu.name}: unit", menu.unit, "a positive amount of money, or null")


def read_menu(path: Path) -> AnyMenu:
    """Read a menu of either form."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return (NetworkMenu if "layers" in values else Menu).from_dict(values)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
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


def load_menu(name: str) -> AnyMenu:
    """A shipped menu by name, or one from a JSON file by path."""
    if name == "linear":
        return LINEAR
    if name.endswith(".json"):
        return read_menu(Path(name))
    if name not in menu_names():
        raise UnknownName("menu", name, f"one of {', '.join(menu_names())}, or a path to a .json file")
    return read_menu(Path(str(_SHIPPED / f"{name}.json")))
