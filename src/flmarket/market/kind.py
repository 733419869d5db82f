"""What differs between markets, behind one face: who is asked, what is decided, what a closed round does.

A kind is told bids and deliveries and answers with plans and models. It talks to nobody and writes nothing; the round
(`round`), the ledger and the store do that, the same way for every kind. `plan` must be a function of the kind's state
and the bids: it is computed once, stored before any money moves, and read back after a crash. What a kind means at an
owner's (what she bids, what she computes, how it is made private) is its `OwnerSide` (`owner`).

The values here are what travels between buyer and owners, whatever carries them. An order says only what its
announcement does not: everything else an owner goes by is what she bid for.

What would break it: trusting a field that the receiver can compute. Award and release ids follow from task, round and
owner; both sides compute them and compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NewType, cast

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import BidProfile, FloatArray, Valuations
from flmarket.errors import ConfigError, FlmarketError, InvalidInput
from flmarket.learning import Model, Records, described
from flmarket.ledger import EXPIRY, Award, AwardState, Release, Resolution
from flmarket.privacy import ApproxDp, Event, PureDp, Unit, Unprotected, ZCdp, event_from_dict, event_to_dict
from flmarket.registry import Registry

if TYPE_CHECKING:
    from flmarket.market.owner import OwnerSide

Currency = Literal["epsilon", "rho"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A buyer's order: train this long, with these mechanisms, within this much money a round.

    The budget of a round is either an amount (`budget_micros`) or, for experiments, `budget_factor` times the sum of
    what the simulation drew as the bidders' full costs. Exactly one of the two is given. Neither depends on what
    bidders report: a budget that did could be moved by a lie, which voids every claim of truthfulness.

    The server's rate falls from `learning_rate` to `last_learning_rate`, by the same factor every round, if that is
    given: what noise did in early rounds later ones correct, and late ones then add little of their own.
    """

    name: str = "task"
    rounds: int = 50
    bidders_per_round: int = 10
    budget_micros: int | None = None
    budget_factor: float | None = None
    learning_rate: float = 0.1
    last_learning_rate: float | None = None

    def rate(self, index: int) -> float:
        """The server's rate in a round."""
        if self.last_learning_rate is None or self.rounds == 1:
            return self.learning_rate
        share = min(index, self.rounds - 1) / (self.rounds - 1)
        return float(self.learning_rate * (self.last_learning_rate / self.learning_rate) ** share)

    def __post_init__(self) -> None:
        for name, limit in (("rounds", 1_000_000), ("bidders_per_round", 10_000_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InvalidInput(name, value, f"a whole number from 1 to {limit:,}")
        if (self.budget_micros is None) == (self.budget_factor is None):
            given = (self.budget_micros, self.budget_factor)
            raise InvalidInput("budget", given, "either budget_micros or budget_factor, not both")
        if self.budget_micros is not None and (
            isinstance(self.budget_micros, bool) or not isinstance(self.budget_micros, int) or self.budget_micros < 0
        ):
            raise InvalidInput("budget_micros", self.budget_micros, "a whole number of at least 0")
        if self.budget_factor is not None and not (np.isfinite(self.budget_factor) and self.budget_factor >= 0):
            raise InvalidInput("budget_factor", self.budget_factor, "a finite number of at least 0")
        if not (np.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidInput("learning_rate", self.learning_rate, "a positive number")
        last = self.last_learning_rate
        if last is not None and not (np.isfinite(last) and last > 0):
            raise InvalidInput("last_learning_rate", last, "a positive number")


@dataclass(frozen=True)
class RoundRecord:
    """One round as it happened. Arrays run over the round's bidders; a loser has a loss of 0 and no state.

    `loss` is what each release gave away, in `currency`: pure ε, or ρ of zero-concentrated privacy. ∞ is a release
    without noise, whatever the currency. `unit` says what it is for: an owner's whole update, or any one record.
    """

    index: int
    bidders: NDArray[np.int64]
    data_size: NDArray[np.float64]
    loss: NDArray[np.float64]
    price_micros: NDArray[np.int64]
    state: tuple[AwardState | None, ...]
    reason: tuple[str, ...]
    weights: NDArray[np.float64]
    budget_micros: int
    error_bound: float
    metrics: dict[str, float] = field(default_factory=dict)
    currency: Currency = "epsilon"
    unit: Unit = "update"

    @property
    def epsilon(self) -> NDArray[np.float64]:
        """`loss` where it is an ε; an error where it is ρ."""
        if self.currency != "epsilon":
            raise InvalidInput("epsilon", self.currency, "a round whose losses are pure ε; read `loss` for others")
        return self.loss

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> RoundRecord:
        """What `to_dict` wrote."""
        whole = {name: np.array(saved[name], dtype=np.int64) for name in ("bidders", "price_micros")}
        if "epsilon" in saved:  # as it was called before
            saved = {("loss" if name == "epsilon" else name): value for name, value in saved.items()}
        real = {name: np.array(saved[name], dtype=np.float64) for name in ("data_size", "loss", "weights")}
        states = tuple(None if state is None else AwardState(state) for state in saved["state"])
        return cls(**{**saved, **whole, **real, "state": states, "reason": tuple(saved["reason"])})

    @property
    def delivered(self) -> NDArray[np.bool_]:
        """Who delivered and was paid."""
        return np.array([state is AwardState.POSTED for state in self.state], dtype=bool)

    @property
    def spent_micros(self) -> int:
        """What was paid out, which leaves out voided and expired awards."""
        return int(self.price_micros[self.delivered].sum())

    @property
    def valid(self) -> bool:
        """Whether anything was delivered: a round of no winners trains nothing."""
        return bool(self.delivered.any())


@dataclass(frozen=True)
class OwnerStatement:
    """What one owner sold and earned over the whole task; losses are in the currency of its rounds."""

    owner: int
    data_size: int
    bids: int
    releases: int
    refusals: int
    paid_micros: int
    loss_total: float
    loss_cap: float


@dataclass(frozen=True)
class MarketResult:
    """A finished task: every round, every owner's statement, and the model."""

    task: Task
    mechanism: str
    aggregation: str
    perturbation: str
    data_set: str
    seed: int
    rounds: tuple[RoundRecord, ...]
    owners: tuple[OwnerStatement, ...]
    parameters: NDArray[np.float64]
    baseline_accuracy: float
    trust: str = "local"
    delta: float = 0.0  # at which owners' totals are an ε: their cap's; they are then less than the sum of losses

    @property
    def currency(self) -> Currency:
        """What losses are counted in."""
        return self.rounds[0].currency if self.rounds else "epsilon"

    @property
    def unit(self) -> Unit:
        """What losses are for: an owner's whole update, or any one of her records."""
        return self.rounds[0].unit if self.rounds else "update"

    @property
    def accuracy(self) -> list[float]:
        """Test accuracy after each round."""
        return [record.metrics["accuracy"] for record in self.rounds]

    @property
    def spent_micros(self) -> int:
        """All payments."""
        return sum(record.spent_micros for record in self.rounds)

    @property
    def budget_micros(self) -> int:
        """All budgets."""
        return sum(record.budget_micros for record in self.rounds)


# Noise longer than so many times its root mean square: never, for all practical purposes. The heaviest tail here is one
# coordinate of Laplace noise, P(|x| > 50·√2·b) = exp(−50·√2) < 1e-30.
NOISE_MARGIN = 50.0

# What training gave, and what may leave: only a guard makes the second of the first.
RawUpdate = NewType("RawUpdate", FloatArray)
ReleasedUpdate = NewType("ReleasedUpdate", FloatArray)


def owner_account(owner: int) -> str:
    """The ledger account of an owner."""
    return f"owner-{owner}"


def award_id(task: str, round_index: int, owner: int) -> str:
    """One award per task, round and owner: repeating a round's clearing cannot pay twice."""
    return f"{task}/{round_index}/{owner}"


def release_id(order: Order) -> str:
    """One release per award; one per award and round where awards run over all rounds."""
    return f"{order.award}@{order.round_index}" if order.lasting else order.award


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A buyer's round: what is trained and how, and how releases are made private (not at all if `perturbation` is "").

    `model` describes what is trained (`flmarket.learning.described`), `parameters` is how many numbers an update has,
    and no order asks for a local rate above `learning_rate`. `settings` is what else a kind needs to say, as JSON.
    `trust`: whether each release is private by itself ("local"), or only the sum of a round's releases is ever seen.
    """

    task: str
    buyer: str
    market: str
    round_index: int
    rounds: int
    features: int
    classes: int
    model: str
    parameters: int
    learning_rate: float
    perturbation: str
    clip: float
    settings: str = "{}"
    trust: str = "local"


@dataclass(frozen=True, kw_only=True)
class Bid:
    """An owner's offer for one round: at most `privacy_budget` of privacy, on `data_size` records.

    The budget is in the kind's own currency (ε of a release; ρ of all rounds in the reward game; ∞ without noise).
    `rate` is the number she reports: α of her valuation `kind` in an auction, her cost of taking part where clients are
    sampled or chosen once, her value of privacy in the reward game. `grid` and `values` are a tabulated valuation, else
    empty. Orders for less privacy or fewer records than the `least_` ones are refused. `unit` says what her ε is for:
    her whole update, or any one of her records; they are two products.
    """

    owner: int
    data_size: int
    privacy_budget: float
    kind: int
    rate: float
    grid: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    least_budget: float = 0.0
    least_records: int = 1
    unit: str = "update"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(vars(self))  # flat: `asdict` would look into every number for more

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Bid:
        """What `to_dict` made of one, also by way of JSON."""
        return cls(**{**saved, "grid": tuple(saved["grid"]), "values": tuple(saved["values"])})


@dataclass(frozen=True, kw_only=True)
class Order:
    """An award and the work it pays for. `loss` is what the award buys: of one release, or of all rounds if `lasting`.

    `total_size`: how many records the last public model was made of, for clients who mix it with their own (joint).
    `share`: her part in a sum that is all anybody sees (`flmarket.privacy.secure_sum.SumTerms`, as JSON); else empty.
    """

    award: str
    task: str
    buyer: str
    market: str
    round_index: int
    owner: int
    loss: Event
    price_micros: int
    records: int
    learning_rate: float
    lasting: bool = False
    total_size: float = 0.0
    share: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; without an empty share, as before there were any."""
        values = {**vars(self), "loss": event_to_dict(self.loss)}
        return values if self.share else {name: value for name, value in values.items() if name != "share"}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Order:
        """What `to_dict` wrote."""
        return cls(**{**saved, "loss": event_from_dict(saved["loss"])})

    @classmethod
    def from_older(cls, saved: Mapping[str, Any]) -> Order:
        """An order of a plan that an earlier version stored, with a bare number as its loss."""
        number, market = float(saved["epsilon"]), saved["market"]
        losses: dict[str, Callable[[], Event]] = {"sampling": Unprotected, "reward": lambda: ZCdp(number)}
        losses["joint"] = lambda: ApproxDp(number, saved["delta"]) if saved["perturbation"] else Unprotected()
        same = ("award", "task", "buyer", "market", "round_index", "owner", "price_micros", "records", "learning_rate")
        loss, lasting = losses.get(market, lambda: PureDp(number))(), market in ("reward", "joint")
        return cls(**{name: saved[name] for name in same}, loss=loss, lasting=lasting, total_size=saved["total_size"])


@dataclass(frozen=True, eq=False)
class Delivered:
    """What was paid for. Where only a sum is seen, a part of it that says nothing by itself, in whole numbers."""

    vector: ReleasedUpdate


@dataclass(frozen=True)
class Bad:
    """Something left the owner's machine, and it is not what was paid for: it counts in her account all the same."""

    problem: str

    @property
    def reason(self) -> str:
        """For people."""
        return f"bad update: {self.problem}"


@dataclass(frozen=True)
class Refused:
    """Nothing left the owner's machine. `code` is for machines, `replayed` says that it left before."""

    code: str
    why: str
    replayed: bool = False

    @property
    def reason(self) -> str:
        """For people."""
        return f"refused: {self.why}"


@dataclass(frozen=True)
class Silent:
    """Nothing came by the deadline."""


Delivery = Delivered | Bad | Refused | Silent


def checked_delivery(vector: object, *, length: int, largest_norm: float) -> Delivered | Bad:
    """Whether this is an update of the right form: length, finite, no longer than clip and noise can make it.

    Form, not truth: within that a liar can send what she likes, and how much she can spoil is bounded by her weight.
    """
    try:
        array = np.asarray(vector, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return Bad("not a vector of numbers")
    if array.shape != (length,):
        return Bad(f"shape {array.shape} instead of ({length},)")
    norm = length_of(array)
    if not (math.isfinite(norm) or np.isfinite(array).all()):
        return Bad("not finite")
    return Bad("longer than clip and noise can make it") if norm > largest_norm else Delivered(ReleasedUpdate(array))


def length_of(vector: FloatArray) -> float:
    """The L2 norm of one vector: in one step, since every order takes several; not finite if a number is not, or if
    squares overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(vector.dot(vector))


@dataclass(frozen=True)
class RoundPlan:
    """A round decided: money to bring in, awards to hold, orders to send (by owner), and what the kind remembers.

    `bids` are those that orders answer to, if they were asked for in this round; all, if they are for all rounds.
    """

    index: int
    deposit_id: str = ""
    deposit_micros: int = 0
    orders: tuple[Order, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict)
    bids: tuple[Bid, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        orders, bids = [order.to_dict() for order in self.orders], [bid.to_dict() for bid in self.bids]
        return {**vars(self), "orders": orders, "bids": bids}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RoundPlan:
        """What `to_dict` wrote."""
        orders = [Order.from_dict(one) if "loss" in one else Order.from_older(one) for one in saved["orders"]]
        bids = tuple(Bid.from_dict(bid) for bid in saved.get("bids", ()))
        return cls(**{**saved, "orders": tuple(orders), "bids": bids})


class MarketKind:
    """One market over many rounds; a kind of one's own begins here and overrides what differs.

    `parameters` is the model now; `history` earlier ones, if they are averaged; `terms` what holds for all rounds once
    it is settled (JSON-ready, empty before); `notes` what a closed round leaves for the next besides the model
    (JSON-ready, saved with it). `best` is the model that did best on the buyer's `validation` records, if she has any;
    they decide nothing else. `tested` are the records that a model is measured with, if not all test records. As it
    stands, bids are collected every round and an award pays for one delivery.
    """

    name: ClassVar[str]
    side: ClassVar[OwnerSide]
    unit: Unit = "update"  # what losses are for: an owner's whole update, or any one of her records

    def __init__(self, task: str, rounds: int, model: Model, parameters: FloatArray, buyer: str = "buyer") -> None:
        self.task, self.buyer, self.rounds, self.model, self.parameters = task, buyer, rounds, model, parameters
        self.history: list[FloatArray] = []
        self.terms: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self.validation: Records | None = None
        self.best: FloatArray | None = None
        self.tested: Records | None = None

    @classmethod
    def described(cls, common: Any, **settings: Any) -> Any:
        """What a market file says for a kind of one's own: `common` is the file as an auction market would have it
        (`AuctionSpec`), `settings` its `[market]` section; returns the spec."""
        raise ConfigError("kind", cls.name, "a kind that a market file can describe")

    @property
    def dimension(self) -> int:
        """Length of an update."""
        return self.parameters.size

    @property
    def done(self) -> bool:
        """Whether the market ended before its last round."""
        return False

    @property
    def buyers_model(self) -> FloatArray:
        """The model that the buyer gets: the last one, or the mean of the latter half of those that are kept."""
        if not self.history:
            return self.parameters
        return np.asarray(np.mean(self.history[len(self.history) // 2 :], axis=0))

    def judged(self, record: RoundRecord) -> RoundRecord:
        """A closed round with the accuracy of its model on the validation records; the first of the best is kept."""
        if self.validation is None:
            return record
        found = self.model.evaluate(self.buyers_model, self.validation)["accuracy"]
        if found > self.notes.get("best_accuracy", -1.0):
            self.best = self.buyers_model
            self.notes = {**self.notes, "best_accuracy": found, "best_round": record.index}
        return replace(record, metrics={**record.metrics, "validation_accuracy": found})

    def asks(self, index: int) -> bool:
        """Whether bids are collected in this round."""
        return not (self.side.asks_once and self.terms)

    def announcement(self, index: int) -> Announcement:
        """What is announced to every owner."""
        raise NotImplementedError

    def accepts(self, bid: Bid) -> bool:
        """Whether one bid by itself makes sense; what does not is left out, so that nobody's bid stops a round."""
        return bid.data_size >= 1

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Decide a round; `bids` is empty if none were asked for."""
        raise NotImplementedError

    def order(
        self, index: int, owner: int, *, loss: Event, price_micros: int, records: int, learning_rate: float,
        total_size: float = 0.0, share: str = "",
    ) -> Order:  # fmt: skip
        """An order of this market, with the ids that follow."""
        return Order(
            award=self.award_id(index, owner), task=self.task, buyer=self.buyer,
            market=self.name, round_index=index, owner=owner, loss=loss, price_micros=price_micros, records=records,
            learning_rate=learning_rate, lasting=self.side.lasting, total_size=total_size, share=share,
        )  # fmt: skip

    def award_id(self, index: int, owner: int) -> str:
        """The id of an owner's award in a round."""
        return award_id(self.task, 0 if self.side.lasting else index, owner)

    def award(self, order: Order) -> Award:
        """An order's award as the ledger holds it."""
        index = 0 if self.side.lasting else order.round_index
        buys, owner = self.bought(order), owner_account(order.owner)
        return Award(order.award, index, order.buyer, owner, buys, order.price_micros)

    def bought(self, order: Order) -> Event:
        """What an award is for, in its owner's account: what the order says."""
        return order.loss

    def checked(self, order: Order, vector: object) -> Delivered | Bad:
        """What came for an order, if its form is right."""
        return checked_delivery(vector, length=self.dimension, largest_norm=self.largest_norm(order))

    def largest_norm(self, order: Order) -> float:
        """The L2 norm that an honest delivery never passes (probability below 1e-20)."""
        return float("inf")

    def left(self, order: Order) -> Release | None:
        """What has left the owner's machine for this award once she has answered this order."""
        return None

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """How the round's open awards end: as it stands, posted if their update came, expired if not."""
        pending = [order for order in plan.orders if awards[order.owner].state is AwardState.PENDING]
        return [
            Resolution(order.award, AwardState.POSTED, "", self.left(order))
            if order.owner in updates
            else Resolution(order.award, AwardState.EXPIRED, EXPIRY)
            for order in pending
        ]

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """Move the model and say what happened; `awards` are resolved, and `updates` those that count.

        Equal input and model, equal result.
        """
        raise NotImplementedError


class _Kinds(Registry[MarketKind]):
    """The registry of kinds."""

    def of(self, name: str) -> type[MarketKind]:
        """The kind of that name; guards ask often."""
        known = self._entries.get(name)
        return cast("type[MarketKind]", self.factory(name) if known is None else known.factory)


kinds = _Kinds("kind of market", "flmarket.kinds", spoken=True)


def say(model: Model) -> str:
    """What an announcement says of a model; empty if only machines that hold the same object can train it."""
    try:
        return described(model)
    except FlmarketError:
        return ""


def on_wire(vector: FloatArray, model: Model) -> FloatArray:
    """A vector as it travels: in the model's own precision."""
    dtype = np.dtype(getattr(model, "dtype", np.float64))
    return vector if dtype == np.float64 else vector.astype(dtype).astype(np.float64)


def cost(bid: Bid, epsilon: float, records: int) -> float:
    """What so much privacy of so many records costs the bidder, by her own valuation."""
    return _per_record(bid.kind, bid.rate, bid.grid, bid.values, epsilon) * records


@lru_cache(maxsize=4096)  # many bid the same in every round
def _per_record(kind: int, rate: float, grid: tuple[float, ...], values: tuple[float, ...], epsilon: float) -> float:
    return float(_valuation(kind, rate, grid, values).per_record(np.array([epsilon]))[0])


@lru_cache(maxsize=4096)
def _valuation(kind: int, rate: float, grid: tuple[float, ...], values: tuple[float, ...]) -> Valuations:
    return Valuations([kind], [rate], grid=[grid], values=[values]) if grid else Valuations([kind], [rate])


def profile(bids: Sequence[Bid]) -> BidProfile:
    """Bids of several owners as the mechanisms take them."""
    budgets, sizes = [bid.privacy_budget for bid in bids], [bid.data_size for bid in bids]
    if not any(bid.grid for bid in bids):
        return BidProfile(Valuations([bid.kind for bid in bids], [bid.rate for bid in bids]), budgets, sizes)
    valuations = [_valuation(bid.kind, bid.rate, bid.grid, bid.values) for bid in bids]
    return BidProfile(Valuations.concatenate(valuations), budgets, sizes)
