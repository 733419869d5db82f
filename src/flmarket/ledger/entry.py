"""One entry of the log, its canonical bytes and its hash.

An entry's bytes are its fields as one JSON object with sorted keys, no spaces and ASCII only. Whole numbers, text and
null are the only values (terms with real numbers are text inside `detail`), so that nobody can read an entry in two
ways. Its hash is SHA-256 over a zero byte and these bytes, the leaf hash of RFC 6962, and each entry contains the hash
of the one before: changing, dropping or reordering entries changes every later hash. That shows tampering to whoever
knows a later hash; against a writer who can recompute the whole log only a published head helps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flmarket.errors import InvalidInput
from flmarket.ledger.journal import AwardState

__all__ = ["GENESIS", "OF_AWARDS", "RESOLUTIONS", "Entry", "EntryKind", "Line", "canonical", "sealed"]

GENESIS = "0" * 64  # the predecessor of the first entry


class EntryKind(StrEnum):
    """What an entry records. The three ways to resolve an award are called like the states they lead to."""

    DEPOSIT = "deposit"
    WITHDRAWAL = "withdrawal"
    FEE = "fee"
    HOLD = "hold"
    POSTED = "posted"
    VOIDED = "voided"
    EXPIRED = "expired"
    CAP = "cap"
    RELEASE = "release"


RESOLUTIONS = {AwardState(kind.value): kind for kind in (EntryKind.POSTED, EntryKind.VOIDED, EntryKind.EXPIRED)}
OF_AWARDS = (EntryKind.HOLD, EntryKind.RELEASE, *RESOLUTIONS.values())


@dataclass(frozen=True, slots=True)
class Line:
    """What an entry says, before it has a place in the log.

    `ref` is the caller's id: of a deposit, or of the award that is held, released for or resolved. `spent_pico` and
    `limit_pico` are an owner's total and cap after this entry, in 10⁻¹² of the cap's currency. `detail` is canonical
    JSON with the terms that only this kind has.
    """

    kind: EntryKind
    ref: str
    debit: str | None = None
    credit: str | None = None
    amount_micros: int = 0
    owner: str | None = None
    round_index: int | None = None
    spent_pico: int | None = None
    limit_pico: int | None = None
    detail: str = "{}"

    @property
    def terms(self) -> dict[str, Any]:
        """`detail` as a dictionary."""
        return dict(json.loads(self.detail))


@dataclass(frozen=True, slots=True)
class Entry:
    """A line in its place: number, time, predecessor's hash and own hash."""

    seq: int
    time_us: int
    line: Line
    previous: str
    hash: str

    def content(self) -> dict[str, Any]:
        """The fields that are hashed."""
        line = self.line
        terms = {name: getattr(line, name) for name in Line.__slots__}
        terms["kind"] = line.kind.value
        return {"seq": self.seq, "time_us": self.time_us, "previous": self.previous, **terms}

    def computed_hash(self) -> str:
        """What the hash must be, by the content."""
        return leaf_hash(self.content())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the hash."""
        return {**self.content(), "hash": self.hash}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """The entry that `to_dict` wrote; other fields or types are refused. Whether the hash fits is not checked."""
        if not isinstance(data, Mapping) or data.keys() != _FIELDS.keys():
            raise InvalidInput("entry", data, "an object with exactly " + ", ".join(_FIELDS))
        for name, accepted in _FIELDS.items():
            if type(data[name]) not in accepted:
                raise InvalidInput(f"entry.{name}", data[name], "text, a whole number or null, as this field has")
        kind = _KINDS.get(data["kind"])
        if kind is None:
            raise InvalidInput("entry.kind", data["kind"], "one of " + ", ".join(_KINDS))
        line = Line(kind, *(data[name] for name in Line.__slots__[1:]))
        return cls(data["seq"], data["time_us"], line, data["previous"], data["hash"])


_KINDS = {kind.value: kind for kind in EntryKind}
_FIELDS: dict[str, tuple[type, ...]] = {
    "seq": (int,),
    "time_us": (int,),
    "previous": (str,),
    "kind": (str,),
    "ref": (str,),
    "debit": (str, type(None)),
    "credit": (str, type(None)),
    "amount_micros": (int,),
    "owner": (str, type(None)),
    "round_index": (int, type(None)),
    "spent_pico": (int, type(None)),
    "limit_pico": (int, type(None)),
    "detail": (str,),
    "hash": (str,),
}


def canonical(value: Mapping[str, Any]) -> str:
    """The one way in which a JSON object is written here."""
    return _encode(value)


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


def leaf_hash(content: Mapping[str, Any]) -> str:
    """SHA-256 over a zero byte and the canonical bytes, in hexadecimal."""
    return hashlib.sha256(b"\x00" + canonical(content).encode("ascii")).hexdigest()


def sealed(line: Line, seq: int, time_us: int, previous: str) -> Entry:
    """The line as an entry of the log, hashed."""
    unsealed = Entry(seq, time_us, line, previous, "")
    return Entry(seq, time_us, line, previous, unsealed.computed_hash())
