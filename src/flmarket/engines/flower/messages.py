"""What travels between buyer and owners: frozen values, and their form in Flower's records.

Four exchanges, each a question and its answer:

    query.bid      Announcement → Bid, or Refusal ("nothing to sell")
    train          Order + parameters → Delivery + vector, or Refusal
    query.release  Order → Delivery + the vector that was released before, or Refusal
    (all others)   refused

Every field is checked on arrival, by type and range; a record with missing, additional or odd fields is an error and
never half read. What would break it: trusting a field that the receiver can compute. Award and release ids follow from
task, round and owner; guard and server compute them and compare.

Beside an announcement travels the head of the buyer's ledger, beside a bid the one that the owner goes by, beside an
order the proof that its price is in escrow, in a log that extends that head. These are no terms: they change when asked
again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from flmarket.bids import BidProfile, Valuations
from flmarket.errors import InvalidInput
from flmarket.ledger import Head, HoldReceipt
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
    "unpack_escrow",
    "unpack_head",
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
    """A buyer's round: what is trained and how, and how releases are made private (not at all in a sampling market).

    `parameters` is how many numbers an update has. An order has the same `steps`, `batch_size` and `l2`, and a rate of
    at most `learning_rate`.
    """

    task: str
    buyer: str
    market: str
    round_index: int
    rounds: int
    features: int
    classes: int
    perturbation: str
    clip: float
    parameters: int
    steps: int
    batch_size: int
    learning_rate: float
    l2: float
    delta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Bid:
    """An owner's offer for one round: at most `privacy_budget` of privacy, on `data_size` records.

    `rate` is the number she reports: α of her valuation `kind` in an auction, her cost of taking part where clients are
    sampled or chosen once, her value of privacy in the reward game. `grid` and `values` are a tabulated valuation, else
    empty. Orders for less privacy or fewer records than the `least_` ones are refused.
    """

    owner: int
    data_size: int
    privacy_budget: float
    kind: int
    rate: float
    grid: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    least_epsilon: float = 0.0
    least_records: int = 1


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


_Beside = TypeVar("_Beside")
Value = TypeVar("Value", Announcement, Bid, Order, Delivery, Refusal)
_RECORD = {Announcement: "announcement", Bid: "bid", Order: "order", Delivery: "delivery", Refusal: "refusal"}
_VECTOR, _ARRAY = "vector", "values"
_HEAD, _ESCROW, _TEXT = "head", "escrow", "json"
LONGEST_PROOF = 20_000


def release_id(order: Order) -> str:
    """One release per award; one per award and round in markets whose awards run over all rounds."""
    if order.market in LASTING:
        return f"{award_id(order.task, 0, order.owner)}@{order.round_index}"
    return award_id(order.task, order.round_index, order.owner)


def pack(
    value: Announcement | Bid | Order | Delivery | Refusal,
    vector: FloatArray | None = None,
    *,
    head: Head | None = None,
    escrow: HoldReceipt | None = None,
) -> RecordDict:
    """The value as a message's content, with what goes beside it."""
    plain = {f.name.replace("_", "-"): getattr(value, f.name) for f in fields(value)}
    config = {key: list(item) if isinstance(item, tuple) else item for key, item in plain.items()}
    content = RecordDict({_RECORD[type(value)]: ConfigRecord(config)})
    if vector is not None:
        content[_VECTOR] = ArrayRecord({_ARRAY: Array(np.asarray(vector, dtype=np.float64))})
    for name, proof in ((_HEAD, head), (_ESCROW, escrow)):
        if proof is not None:
            content[name] = ConfigRecord({_TEXT: json.dumps(proof.to_dict())})
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


def unpack_head(message: Message) -> Head | None:
    """The ledger's head that goes with an announcement or a bid, if any."""
    return _beside(message, _HEAD, Head.from_dict)


def unpack_escrow(message: Message) -> HoldReceipt | None:
    """The proof of escrow that goes with an order, if any; read, not yet checked."""
    return _beside(message, _ESCROW, HoldReceipt.from_dict)


def _beside(message: Message, name: str, meaning: Callable[[Any], _Beside]) -> _Beside | None:
    record = message.content.config_records.get(name)
    if record is None:
        return None
    text = record.get(_TEXT)
    if set(record) != {_TEXT} or not isinstance(text, str) or len(text) > LONGEST_PROOF:
        raise InvalidInput(name, sorted(record), f"one text of at most {LONGEST_PROOF} characters")
    try:
        return meaning(json.loads(text))
    except (ValueError, RecursionError):
        raise InvalidInput(name, len(text), "a readable proof") from None


def reply(
    value: Bid | Delivery | Refusal, to: Message, vector: FloatArray | None = None, *, head: Head | None = None
) -> Message:
    """An answer that holds this and nothing else."""
    return Message(pack(value, vector, head=head), reply_to=to)


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
