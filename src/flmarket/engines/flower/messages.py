"""What travels between buyer and owners: frozen values, and their form in Flower's records.

Four exchanges, each a question and its answer:

    query.bid      Announcement → Bid, or Refusal ("nothing to sell")
    train          Order + parameters → Delivery + vector, or Refusal
    query.release  Order → Delivery + the vector that was released before, or Refusal
    (all others)   refused

Every field is checked on arrival, by type and range; a record with missing, additional or odd fields is an error and
never half read. What would break it: trusting a field that the receiver can compute. Award and release ids follow from
task, round and owner; guard and server compute them and compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from flmarket.bids import BidProfile, Valuations
from flmarket.errors import InvalidInput
from flmarket.market import award_id

__all__ = [
    "BID",
    "LASTING",
    "RELEASE",
    "REPLAY",
    "TRAIN",
    "Announcement",
    "Bid",
    "Delivery",
    "MarketName",
    "Order",
    "Refusal",
    "pack",
    "profile",
    "release_id",
    "reply",
    "unpack",
    "unpack_vector",
]

BID, TRAIN, RELEASE = "query.bid", "train", "query.release"
REPLAY = "replay"  # the refusal's code if the release was begun before

MarketName = Literal["auction", "sampling", "reward", "joint"]
LASTING = ("reward", "joint")  # markets whose awards run over all rounds
FloatArray = NDArray[np.float64]

# Limits on everything that arrives: longer texts or larger numbers are not messages of this market.
LONGEST_TEXT = 500
LARGEST_COUNT = 2**62
LONGEST_TABLE = 1_000
LARGEST_VECTOR = 100_000_000  # before the receiver knows how long it should be


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A buyer's round: what is trained, and how releases are made private. Without privacy in a sampling market."""

    task: str
    buyer: str
    market: str
    round_index: int
    rounds: int
    features: int
    classes: int
    perturbation: str
    clip: float
    delta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Bid:
    """An owner's offer for one round: at most `privacy_budget` of privacy, on `data_size` records.

    `rate` is the number she reports: α of her valuation `kind` in an auction, her cost of taking part where clients are
    sampled or chosen once, her value of privacy in the reward game. `grid` and `values` are a tabulated valuation, else
    empty.
    """

    owner: int
    data_size: int
    privacy_budget: float
    kind: int
    rate: float
    grid: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Order:
    """An award and the work it pays for. `epsilon`: ε of this release, ρ of all rounds in the reward game, ∞ if raw.

    `total_size`: how many records the last public model was made of, for clients who mix it with their own (joint DP).
    """

    award: str
    task: str
    buyer: str
    market: str
    round_index: int
    rounds: int
    owner: int
    epsilon: float
    price_micros: int
    records: int
    features: int
    classes: int
    perturbation: str
    clip: float
    steps: int
    batch_size: int
    learning_rate: float
    l2: float
    delta: float = 0.0
    total_size: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Goes with a private vector: which release this is."""

    release: str
    owner: int


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Nothing was released; why, in words that reveal no data."""

    owner: int
    code: str
    reason: str


Value = TypeVar("Value", Announcement, Bid, Order, Delivery, Refusal)
_RECORD = {Announcement: "announcement", Bid: "bid", Order: "order", Delivery: "delivery", Refusal: "refusal"}
_VECTOR, _ARRAY = "vector", "values"


def release_id(order: Order) -> str:
    """One release per award; one per award and round in markets whose awards run over all rounds."""
    if order.market in LASTING:
        return f"{award_id(order.task, 0, order.owner)}@{order.round_index}"
    return award_id(order.task, order.round_index, order.owner)


def pack(value: Announcement | Bid | Order | Delivery | Refusal, vector: FloatArray | None = None) -> RecordDict:
    """The value as a message's content, with a vector if there is one."""
    plain = {f.name.replace("_", "-"): getattr(value, f.name) for f in fields(value)}
    config = {key: list(item) if isinstance(item, tuple) else item for key, item in plain.items()}
    content = RecordDict({_RECORD[type(value)]: ConfigRecord(config)})
    if vector is not None:
        content[_VECTOR] = ArrayRecord({_ARRAY: Array(np.asarray(vector, dtype=np.float64))})
    return content


def unpack(cls: type[Value], message: Message) -> Value | None:
    """The value that a message carries, None if it carries another kind; raises InvalidInput if it is malformed."""
    if not message.has_content() or _RECORD[cls] not in message.content.config_records:
        return None
    record = message.content.config_records[_RECORD[cls]]
    names = {f.name.replace("_", "-"): f for f in fields(cls)}
    if set(record) != set(names):
        raise InvalidInput(_RECORD[cls], sorted(record), f"the fields {', '.join(names)}")
    return cls(**{f.name: _checked(key, record[key], str(f.type)) for key, f in names.items()})


def unpack_vector(message: Message, length: int = LARGEST_VECTOR) -> FloatArray:
    """The vector of at most `length` numbers that a message carries; raises InvalidInput if there is none."""
    records = message.content.array_records
    if _VECTOR not in records or list(records[_VECTOR]) != [_ARRAY]:
        raise InvalidInput("vector", list(records), "one array of numbers")
    array = records[_VECTOR][_ARRAY]
    if array.stype != "numpy.ndarray" or array.dtype != "float64" or len(array.data) > 8 * length + 4096:
        found = f"{array.stype} of {array.dtype}, {len(array.data)} bytes"
        raise InvalidInput("vector", found, f"a float64 array of {length} numbers")
    try:
        return np.asarray(array.numpy(), dtype=np.float64)
    except (ValueError, TypeError, OSError, EOFError, MemoryError) as error:
        raise InvalidInput("vector", type(error).__name__, "a readable array of numbers") from None


def reply(value: Bid | Delivery | Refusal, to: Message, vector: FloatArray | None = None) -> Message:
    """An answer that holds this value and nothing else."""
    return Message(pack(value, vector), reply_to=to)


def profile(bids: list[Bid]) -> BidProfile:
    """Bids of several owners as the mechanisms take them."""
    valuations = [
        Valuations([bid.kind], [bid.rate], grid=[bid.grid], values=[bid.values])
        if bid.grid
        else Valuations([bid.kind], [bid.rate])
        for bid in bids
    ]
    budgets, sizes = [bid.privacy_budget for bid in bids], [bid.data_size for bid in bids]
    return BidProfile(Valuations.concatenate(valuations), budgets, sizes)


def _checked(key: str, value: Any, kind: str) -> Any:
    if kind == "str":
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise InvalidInput(key, value, f"a text of at most {LONGEST_TEXT} characters")
        return value
    if kind == "int":
        if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
            raise InvalidInput(key, value, "a whole number of at least 0")
        return value
    if kind == "float":
        if type(value) not in (float, int) or math.isnan(value) or value < 0:
            raise InvalidInput(key, value, "a number of at least 0")
        return float(value)
    if not isinstance(value, list) or len(value) > LONGEST_TABLE or not all(type(v) is float for v in value):
        raise InvalidInput(key, value, f"a list of at most {LONGEST_TABLE} numbers")
    return tuple(value)
