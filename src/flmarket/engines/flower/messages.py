"""What travels between buyer and owners (`flmarket.market.kind`) in the form of Flower's records.

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
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flmarket.bids import FloatArray
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.ledger import Head, HoldReceipt
from flmarket.market.kind import Announcement, Bid, Order, ReleasedUpdate
from flmarket.privacy import event_from_dict, event_to_dict

__all__ = [
    "BID",
    "RELEASE",
    "TRAIN",
    "Delivery",
    "Refusal",
    "pack",
    "reply",
    "unpack",
    "unpack_escrow",
    "unpack_head",
    "unpack_vector",
]

BID, TRAIN, RELEASE = "query.bid", "train", "query.release"

# Limits on everything that arrives: longer texts or larger numbers are not messages of this market.
LONGEST_TEXT = 2_000
LARGEST_COUNT = 2**62
LONGEST_TABLE = 1_000
LARGEST_VECTOR = 100_000_000  # before the receiver knows how long it should be


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
_SINGLE, _DOUBLE = "float32", "float64"
_HEAD, _ESCROW, _TEXT = "head", "escrow", "json"
LONGEST_PROOF = 20_000


def pack(
    value: Announcement | Bid | Order | Delivery | Refusal,
    vector: FloatArray | None = None,
    *,
    head: Head | None = None,
    escrow: HoldReceipt | None = None,
    dtype: str = _DOUBLE,
) -> RecordDict:
    """The value as a message's content, with what goes beside it; the vector in numbers of this type."""
    config = {f.name.replace("_", "-"): _plain(getattr(value, f.name)) for f in fields(value)}
    content = RecordDict({_RECORD[type(value)]: ConfigRecord(config)})
    if vector is not None:
        content[_VECTOR] = ArrayRecord({_ARRAY: Array(np.asarray(vector).astype(dtype))})
    for name, proof in ((_HEAD, head), (_ESCROW, escrow)):
        if proof is not None:
            content[name] = ConfigRecord({_TEXT: json.dumps(proof.to_dict())})
    return content


def _plain(item: Any) -> Any:
    """A field as a record takes it."""
    if isinstance(item, tuple):
        return list(item)
    return item if isinstance(item, str | int | float) else json.dumps(event_to_dict(item), sort_keys=True)


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
    known = array.stype == "numpy.ndarray" and array.dtype in (_SINGLE, _DOUBLE)
    if not known or len(array.data) > 8 * length + 4096:
        found = f"{array.stype} of {array.dtype}, {len(array.data)} bytes"
        raise InvalidInput("vector", found, f"a float array of {length} numbers")
    try:
        numbers = array.numpy()
    except (ValueError, TypeError, OSError, EOFError, MemoryError) as error:
        raise InvalidInput("vector", type(error).__name__, "a readable array of numbers") from None
    if str(numbers.dtype) != array.dtype:
        raise InvalidInput("vector", str(numbers.dtype), f"what it says it is: {array.dtype}")
    return np.asarray(numbers, dtype=np.float64)


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
    value: Bid | Delivery | Refusal, to: Message, vector: ReleasedUpdate | None = None, *, head: Head | None = None
) -> Message:
    """An answer that holds this and nothing else; of vectors only one that a guard has released.

    Its numbers are of the type in which the parameters came: so the size of an answer depends on the question alone.
    """
    asked = to.content.array_records.get(_VECTOR) if to.has_content() else None
    single = asked is not None and any(array.dtype == _SINGLE for array in asked.values())
    return Message(pack(value, vector, head=head, dtype=_SINGLE if single else _DOUBLE), reply_to=to)


def _checked(key: str, value: Any, kind: str) -> Any:
    if kind == "str":
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise InvalidInput(key, value, f"a text of at most {LONGEST_TEXT} characters")
        return value
    if kind == "Event":
        try:
            return event_from_dict(json.loads(_checked(key, value, "str")))
        except (ValueError, TypeError, AttributeError, RecursionError, FlmarketError):
            raise InvalidInput(key, value, "a privacy loss") from None
    if kind == "bool":
        if type(value) is not bool:
            raise InvalidInput(key, value, "true or false")
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
