"""What travels between buyer and owners (`flmarket.market.kind`) in the form of Flower's records.

Six exchanges, each a question and its answer:

    query.bid      Announcement → Bid, or Refusal ("nothing to sell")
    train          Order + parameters → Delivery + vector, or Refusal
    query.release  Order → Delivery + the vector that was released before, or Refusal
    query.mask     Order + a stage of a masked sum and its question → Delivery + the answer, or Refusal
    train.mask     the same for the stage at which she trains: + parameters → + her masked input
    (all others)   refused

A `train` message may hold any of the three questions: that is the only type that every ClientApp takes, so it is how
owners behind somebody else's app are asked (`flmarket.flower`).

Every field is checked on arrival, by type and range; a record with missing, additional or odd fields is an error and
never half read. What would break it: trusting a field that the receiver can compute. Award and release ids follow from
task, round and owner; guard and server compute them and compare.

Beside an announcement travels the head of the buyer's ledger, beside a bid the one that the owner goes by, beside an
order the proof that its price is in escrow, in a log that extends that head. These are no terms: they change when asked
again.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flmarket.bids import FloatArray
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.ledger import Head, HoldReceipt
from flmarket.market.kind import Announcement, Bid, Order, ReleasedUpdate
from flmarket.market.masking import AFTER, STAGES
from flmarket.market.masking.primitives import KEY as _KEY
from flmarket.market.masking.primitives import Words
from flmarket.privacy import event_from_dict, event_to_dict

BID, TRAIN, RELEASE, MASK, MASKED = "query.bid", "train", "query.release", "query.mask", "train.mask"

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


Records = dict[str, ArrayRecord | ConfigRecord | MetricRecord]
_Beside = TypeVar("_Beside")
Sent = Announcement | Bid | Order | Delivery | Refusal
Value = TypeVar("Value", Announcement, Bid, Order, Delivery, Refusal)
_RECORD = {Announcement: "announcement", Bid: "bid", Order: "order", Delivery: "delivery", Refusal: "refusal"}
# a record's keys, and for each the field's name and type
_FIELDS = {cls: {f.name.replace("_", "-"): (f.name, str(f.type)) for f in fields(cls)} for cls in _RECORD}
VECTOR, _ARRAY = "vector", "values"
_SINGLE, _DOUBLE, _NUMPY = "float32", "float64", "numpy.ndarray"
_HEAD, _ESCROW, _TEXT = "head", "escrow", "json"
_IDENTITY, _STAGE, _WORDS = "identity", "stage", "words"
LONGEST_STAGE = 10_000_000
LONGEST_PROOF = 20_000
RESERVED = frozenset({*_RECORD.values(), VECTOR, _HEAD, _ESCROW})  # names of records that are the market's own


class Beside(TypedDict, total=False):
    """What may go beside a value, and the type of its vector's numbers (`parts`)."""

    head: Head | None
    escrow: HoldReceipt | None
    identity: bytes
    stage: tuple[str, bytes] | None
    words: Words | None
    dtype: str


def pack(value: Sent, vector: FloatArray | ArrayRecord | None = None, **beside: Unpack[Beside]) -> RecordDict:
    """The value as a message's content, with what goes beside it."""
    return RecordDict(parts(value, vector, **beside))


def parts(
    value: Sent,
    vector: FloatArray | ArrayRecord | None = None,
    *,
    head: Head | None = None,
    escrow: HoldReceipt | None = None,
    identity: bytes = b"",
    stage: tuple[str, bytes] | None = None,
    words: Words | None = None,
    dtype: str = _DOUBLE,
) -> Records:
    """The value and what goes beside it as records by their names; the vector in numbers of this type.

    A record that was made before (`vector_record`) is not copied: the same for all messages that carry it.
    `stage` is one of a masked sum with its question or answer, `words` a masked input.
    """
    config = {key: _plain(getattr(value, name)) for key, (name, _) in _FIELDS[type(value)].items()}
    content: Records = {_RECORD[type(value)]: ConfigRecord(config)}
    if vector is not None:
        content[VECTOR] = vector if isinstance(vector, ArrayRecord) else vector_record(vector, dtype)
    for name, proof in ((_HEAD, head), (_ESCROW, escrow)):
        if proof is not None:
            content[name] = text_record(json.dumps(proof.to_dict()))
    if identity:
        content[_IDENTITY] = ConfigRecord({"key": identity})
    if stage is not None:
        content[_STAGE] = ConfigRecord({"name": stage[0], "body": stage[1]})
    if words is not None:
        content[_WORDS] = ArrayRecord({_ARRAY: Array(words)})
    return content


def vector_record(vector: FloatArray, dtype: str = _DOUBLE) -> ArrayRecord:
    """A vector as a message carries it."""
    values = np.asarray(vector).astype(dtype)
    if values.ndim != 1:
        return ArrayRecord({_ARRAY: Array(values)})
    data = _npy_header(dtype, len(values)) + values.tobytes()  # the bytes of NumPy's own file, without writing one
    return ArrayRecord({_ARRAY: Array(dtype, values.shape, _NUMPY, data)})


@lru_cache(maxsize=64)
def _npy_header(dtype: str, length: int) -> bytes:
    """How NumPy's file of a vector begins; what follows are its numbers."""
    buffer = io.BytesIO()
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def _from_npy(array: Array) -> npt.NDArray[Any]:
    """What an array holds. A vector as NumPy writes it is known by its first bytes; all else NumPy reads itself."""
    if array.dtype in (_SINGLE, _DOUBLE) and len(array.shape) == 1:
        length, size = int(array.shape[0]), np.dtype(array.dtype).itemsize
        header = _npy_header(array.dtype, length)
        if len(array.data) == len(header) + size * length and array.data.startswith(header):
            return np.frombuffer(array.data, dtype=array.dtype, offset=len(header)).copy()
    return array.numpy()


def _plain(item: Any) -> Any:
    """A field as a record takes it."""
    if isinstance(item, tuple):
        return list(item)
    return item if isinstance(item, str | int | float) else json.dumps(event_to_dict(item), sort_keys=True)


def unpack(cls: type[Value], message: Message) -> Value | None:
    """The value that a message carries, None if it carries another kind; raises InvalidInput if it is malformed."""
    record = _config(message, _RECORD[cls]) if message.has_content() else None
    if record is None:
        return None
    names, came = _FIELDS[cls], dict(record)
    if came.keys() != names.keys():
        raise InvalidInput(_RECORD[cls], sorted(record), f"the fields {', '.join(names)}")
    return cls(**{name: _checked(key, came[key], kind) for key, (name, kind) in names.items()})


def _config(message: Message, name: str) -> ConfigRecord | None:
    """A message's configuration of that name. Flower's own view of them all is made anew for every look."""
    record = message.content.get(name)
    return record if isinstance(record, ConfigRecord) else None


def _arrays(message: Message, name: str) -> ArrayRecord | None:
    """A message's arrays of that name."""
    record = message.content.get(name)
    return record if isinstance(record, ArrayRecord) else None


def has_arrays(message: Message) -> bool:
    """Whether any arrays came with a message."""
    return any(isinstance(record, ArrayRecord) for record in message.content.values())


def unpack_vector(message: Message, length: int = LARGEST_VECTOR) -> FloatArray:
    """The vector of at most `length` numbers that a message carries; raises InvalidInput if there is none."""
    record = _arrays(message, VECTOR)
    if record is None or list(record) != [_ARRAY]:
        raise InvalidInput("vector", list(message.content.array_records), "one array of numbers")
    return numbers("vector", record[_ARRAY], length)


def numbers(name: str, array: Array, length: int, accepted: Sequence[str] = (_SINGLE, _DOUBLE)) -> FloatArray:
    """What an array of at most `length` numbers holds; raises InvalidInput unless it is what it says it is."""
    known = array.stype == _NUMPY and array.dtype in accepted
    if not known or len(array.data) > 8 * length + 4096:
        found = f"{array.stype} of {array.dtype}, {len(array.data)} bytes"
        raise InvalidInput(name, found, f"a float array of {length} numbers")
    try:
        found_there = _from_npy(array)
    except (ValueError, TypeError, OSError, EOFError, MemoryError) as error:
        raise InvalidInput(name, type(error).__name__, "a readable array of numbers") from None
    if str(found_there.dtype) != array.dtype:
        raise InvalidInput(name, str(found_there.dtype), f"what it says it is: {array.dtype}")
    return np.asarray(found_there, dtype=np.float64)


def unpack_head(message: Message) -> Head | None:
    """The ledger's head that goes with an announcement or a bid, if any."""
    return _beside(message, _HEAD, Head.from_dict)


def unpack_escrow(message: Message) -> HoldReceipt | None:
    """The proof of escrow that goes with an order, if any; read, not yet checked."""
    return _beside(message, _ESCROW, HoldReceipt.from_dict)


def unpack_identity(message: Message) -> bytes:
    """The public key by which an owner is known in masked sums, beside a bid; empty if she has none."""
    record = _config(message, _IDENTITY)
    if record is None:
        return b""
    key = record.get("key")
    if set(record) != {"key"} or not isinstance(key, bytes) or len(key) != _KEY:
        raise InvalidInput(_IDENTITY, sorted(record), f"a key of {_KEY} bytes")
    return key


def unpack_stage(message: Message) -> tuple[str, bytes]:
    """A stage of a masked sum, and its question or answer, not yet read."""
    record = _config(message, _STAGE) or ConfigRecord()
    name, body = record.get("name"), record.get("body")
    if set(record) != {"name", "body"} or not isinstance(name, str) or not isinstance(body, bytes):
        raise InvalidInput(_STAGE, sorted(record), "a stage's name and body")
    if name not in (*STAGES, *AFTER) or len(body) > LONGEST_STAGE:
        raise InvalidInput(_STAGE, (name, len(body)), f"one of {', '.join(STAGES)}, of at most {LONGEST_STAGE} bytes")
    return name, body


def unpack_words(message: Message, length: int) -> Words | None:
    """A masked input of so many words, if one came; what is wrong with it otherwise its receiver finds."""
    record = _arrays(message, _WORDS)
    if record is None:
        return None
    array = record.get(_ARRAY)
    if array is None or array.dtype not in ("uint32", "uint64") or len(array.data) > 8 * length + 4096:
        raise InvalidInput(_WORDS, list(record), f"an array of {length} whole numbers")
    try:
        words = array.numpy()
    except (ValueError, TypeError, OSError, EOFError, MemoryError) as error:
        raise InvalidInput(_WORDS, type(error).__name__, "a readable array of numbers") from None
    if str(words.dtype) != array.dtype:
        raise InvalidInput(_WORDS, str(words.dtype), f"what it says it is: {array.dtype}")
    return words


def _beside(message: Message, name: str, meaning: Callable[[Any], _Beside]) -> _Beside | None:
    text = unpack_text(message, name, LONGEST_PROOF)
    if text is None:
        return None
    try:
        return meaning(json.loads(text))
    except (ValueError, RecursionError):
        raise InvalidInput(name, len(text), "a readable proof") from None


def unpack_text(message: Message, name: str, longest: int) -> str | None:
    """A text that goes beside, if any."""
    record = _config(message, name)
    if record is None:
        return None
    text = record.get(_TEXT)
    if set(record) != {_TEXT} or not isinstance(text, str) or len(text) > longest:
        raise InvalidInput(name, sorted(record), f"one text of at most {longest} characters")
    return text


def text_record(text: str) -> ConfigRecord:
    """A text as it goes beside."""
    return ConfigRecord({_TEXT: text})


def reply(
    value: Bid | Delivery | Refusal, to: Message, vector: ReleasedUpdate | None = None, **beside: Unpack[Beside]
) -> Message:
    """An answer that holds this and nothing else; of vectors only one that a guard has released.

    Its numbers are of the type in which the parameters came: so the size of an answer depends on the question alone.
    """
    asked = _arrays(to, VECTOR) if to.has_content() else None
    single = asked is not None and any(array.dtype == _SINGLE for array in asked.values())
    beside["dtype"] = _SINGLE if single else _DOUBLE
    return Message(pack(value, vector, **beside), reply_to=to)


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
