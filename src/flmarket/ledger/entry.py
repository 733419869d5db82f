"""One entry of the log: its canonical bytes, its hash, and what it says as a value (an award, a release, a cap).

An entry's bytes are its fields as one JSON object with sorted keys, no spaces and ASCII only. Whole numbers, text and
null are the only values (terms with real numbers are text inside `detail`), so that nobody can read an entry in two
ways. Its hash is SHA-256 over a zero byte and these bytes, the leaf hash of RFC 6962, and each entry contains the hash
of the one before: changing, dropping or reordering entries changes every later hash. That shows tampering to whoever
knows a later hash; against a writer who can recompute the whole log only a published head helps.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, get_args, get_type_hints

from flmarket.errors import InvalidInput
from flmarket.ledger.journal import NOTHING, Award, AwardState, Release, Transfer, as_loss
from flmarket.privacy import (
    ApproxDp,
    Cap,
    Event,
    ExponentialRelease,
    GaussianL2,
    GaussianRelease,
    GaussianZCdp,
    PrivacyAccount,
    PureDp,
    RecordLevel,
    Uncapped,
    Unprotected,
    ZCdp,
    event_from_dict,
    event_to_dict,
)
from flmarket.privacy.composition import ApproxTotal, pure_epsilon, zcdp_rho

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

    __hash__ = str.__hash__  # as quick as that of the text, which it equals


RESOLUTIONS = {AwardState(kind.value): kind for kind in (EntryKind.POSTED, EntryKind.VOIDED, EntryKind.EXPIRED)}
_STATES = {kind: state for state, kind in RESOLUTIONS.items()}
OF_AWARDS = (EntryKind.HOLD, EntryKind.RELEASE, *RESOLUTIONS.values())


class Line(NamedTuple):
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

    def computed_hash(self) -> str:
        """What the hash must be, by the content."""
        return row_hash(self.row()).hex()

    def row(self) -> "Row":
        """The entry as stores keep it."""
        return row_of(self.line, self.seq, self.time_us, self.previous, self.hash)

    @classmethod
    def from_row(cls, row: "Row") -> "Entry":
        """The entry that a store kept; other types than a field has are refused."""
        checked_row(row)
        return cls(row[0], row[1], line_of(row), row[2], row[3])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the fields that are hashed, and the hash."""
        return dict(zip(ROW, self.row(), strict=True))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Entry":
        """The entry that `to_dict` wrote; other fields or types are refused. Whether the hash fits is not checked."""
        if not isinstance(data, Mapping) or data.keys() != set(ROW):
            raise InvalidInput("entry", data, "an object with exactly " + ", ".join(ROW))
        return cls.from_row(tuple(data[name] for name in ROW))


_KINDS = {kind.value: kind for kind in EntryKind}
_NAMES = {kind: kind.value for kind in EntryKind}  # to ask an enumeration for a value takes longer than this
# An entry as one tuple, which is how databases give it and what the hot paths work on: its fields in this order.
ROW = ("seq", "time_us", "previous", "hash", *Line._fields)
Row = tuple[Any, ...]
# what each field may be, by the annotations of a line
_TYPES = get_type_hints(Line) | {"seq": int, "time_us": int, "previous": str, "hash": str, "kind": str}
_ACCEPTED = tuple(frozenset(get_args(_TYPES[name]) or (_TYPES[name],)) for name in ROW)
_known_types: set[tuple[type, ...]] = set()


def canonical(value: Mapping[str, Any]) -> str:
    """The one way in which a JSON object is written here."""
    return _encode(value)


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


def checked_row(row: Row) -> None:
    """InvalidInput unless every field has a type that it may have, and the kind is one."""
    types = tuple(map(type, row))
    if types not in _known_types:  # there are few ways to fill in an entry rightly
        for name, value, accepted in zip(ROW, row, _ACCEPTED, strict=True):
            if type(value) not in accepted:
                raise InvalidInput(f"entry.{name}", value, "text, a whole number or null, as this field has")
        _known_types.add(types)
    if row[4] not in _KINDS:
        raise InvalidInput("entry.kind", row[4], "one of " + ", ".join(_KINDS))


def line_of(row: Row) -> Line:
    """What a row that was checked says."""
    return Line(_KINDS[row[4]], *row[5:])


def row_of(line: Line, seq: int, time_us: int, previous: str, hash: str = "") -> Row:
    """A line as a row."""
    return (seq, time_us, previous, hash, _NAMES[line.kind], *line[1:])


def row_hash(row: Row) -> bytes:
    """SHA-256 over a zero byte and the canonical bytes.

    The bytes are written out here, because every entry of a log passes through: they are those of `canonical` over
    `Entry.to_dict` but for the hash, which tests compare. The kind is one of ours, wherever the row is from, and needs
    no quoting.
    """
    seq, time_us, previous, _, kind, ref, debit, credit, amount, owner, index, spent, limit, detail = row
    text = (
        f'\x00{{"amount_micros":{amount},"credit":{"null" if credit is None else _quote(credit)},'
        f'"debit":{"null" if debit is None else _quote(debit)},"detail":{_quote(detail)},"kind":"{kind}",'
        f'"limit_pico":{"null" if limit is None else limit},"owner":{"null" if owner is None else _quote(owner)},'
        f'"previous":{_quote(previous)},"ref":{_quote(ref)},"round_index":{"null" if index is None else index},'
        f'"seq":{seq},"spent_pico":{"null" if spent is None else spent},"time_us":{time_us}}}'
    )
    return _sha256(text.encode("ascii")).digest()


_quote, _sha256 = json.encoder.encode_basestring_ascii, hashlib.sha256


def sealed(line: Line, seq: int, time_us: int, previous: str) -> Entry:
    """The line as an entry of the log, hashed."""
    return Entry(seq, time_us, line, previous, row_hash(row_of(line, seq, time_us, previous)).hex())


PICO = 10**12
# an award's release may exceed the awarded privacy loss by floating-point rounding only
_ROUNDING = 1e-9


def award_of(held: Line, resolved: Line | None) -> Award:
    """An award from the line that holds it and the one that resolves it."""
    assert held.debit is not None
    assert held.owner is not None
    assert held.round_index is not None
    state = AwardState.PENDING if resolved is None else _STATES[resolved.kind]
    reason = "" if resolved is None or resolved.detail == "{}" else resolved.terms.get("reason", "")
    loss = _loss_in(held.detail)
    return Award(held.ref, held.round_index, held.debit, held.owner, loss, held.amount_micros, state, reason)


@lru_cache(4096)  # an owner mostly sells the same loss again
def _loss_in(detail: str) -> Event:
    return loss_of(json.loads(detail))


def loss_terms(loss: Event) -> dict[str, Any]:
    """What a hold says of its loss. No loss at all is written as ever: the database's triggers know it by that."""
    return {"epsilon": "0.0"} if loss == NOTHING else {"loss": event_to_dict(loss)}


def loss_of(terms: Mapping[str, Any]) -> Event:
    """The loss that a hold's terms state; holds of before state a bare number."""
    return event_from_dict(terms["loss"]) if "loss" in terms else as_loss(float(terms["epsilon"]))


def release_detail(mechanism: str, guarantee: Event) -> str:
    """What a release says: `canonical` over its mechanism and guarantee, written out here, which tests compare."""
    known = _NUMBERED.get(type(guarantee))
    if known is None:
        text = canonical(event_to_dict(guarantee))
    else:
        before, name, after = known
        text = f"{before}{getattr(guarantee, name)!r}{after}"
    return f'{{"guarantee":{text},"mechanism":{_quote(mechanism)}}}'


def _numbered(event: PureDp | ZCdp | GaussianRelease | ExponentialRelease) -> tuple[str, str, str]:
    """The text of an event of one number, before and after the number."""
    (name,) = type(event).__slots__
    before, after = canonical(event_to_dict(event)).split(repr(getattr(event, name)))
    return before, name, after


_NUMBERED: dict[type[Event], tuple[str, str, str]] = {
    type(event): _numbered(event) for event in (PureDp(0.5), ZCdp(0.5), GaussianRelease(0.5), ExponentialRelease(0.5))
}


def release_of(line: Line) -> Release:
    """A release from its line."""
    terms = line.terms
    return Release(line.ref, terms["mechanism"], event_from_dict(terms["guarantee"]))


def fits(release: Release, loss: Event) -> bool:
    """Whether a release gives away no more than its award is for, but for rounding.

    Compared in the award's currency: ρ under a ρ or under noise, ε at the award's δ under an (ε, δ). What cannot be
    stated in that currency does not fit. Awards for a pure ε are bounded as `_number_of` says.
    """
    given = release.guarantee
    if isinstance(loss, Unprotected) or given == loss:
        return True
    if isinstance(loss, RecordLevel) and isinstance(given, RecordLevel):
        return fits(replace(release, guarantee=given.loss), loss.loss)
    try:
        if isinstance(loss, PureDp):
            spent, limit = _number_of(release), loss.epsilon
        elif isinstance(loss, ExponentialRelease):
            spent, limit = pure_epsilon(given), loss.epsilon
        elif isinstance(loss, ApproxDp):
            if ApproxTotal().plus(given, 1).surely_within(loss.epsilon * (1 + _ROUNDING), loss.delta):
                return True
            spent, limit = ApproxTotal().plus(given, 1).epsilon(loss.delta), loss.epsilon
        else:
            spent, limit = zcdp_rho(given), zcdp_rho(loss)
    except InvalidInput:
        return False
    return spent <= limit * (1 + _ROUNDING)


def _number_of(release: Release) -> float:
    """The part of a release that an award's bare number bounds: callers and logs that know no other loss.

    ε for pure and approximate guarantees; ρ for zCDP and for an auction's Gaussian noise. Under "gaussian-zcdp" the
    award's number is ρ. Under "gaussian-l2" it is ε at a δ that the ledger does not know; ρ is below that ε at any δ in
    use (δ ≤ 0.01), so this finds gross lies and no honest release. Other Gaussian releases are those of joint markets,
    whose award states one upload and whose release all of them: only the owner's cap bounds those.
    """
    guarantee = release.guarantee
    if isinstance(guarantee, Unprotected):
        return float("inf")
    if isinstance(guarantee, RecordLevel):
        raise InvalidInput("release", guarantee, "a loss of the whole update, as its award is for")
    if isinstance(guarantee, GaussianRelease):
        return zcdp_rho(guarantee) if release.mechanism in (GaussianL2.name, GaussianZCdp.name) else 0.0
    return guarantee.rho if isinstance(guarantee, ZCdp) else guarantee.epsilon


def cap_of(line: Line) -> Cap:
    """A cap from its line."""
    cap = event_from_dict(line.terms["cap"])
    if not isinstance(cap, PureDp | ZCdp | ApproxDp | RecordLevel):
        raise InvalidInput("cap", cap, "PureDp, ZCdp or ApproxDp")
    return cap


def transfer_of(line: Line) -> Transfer | None:
    """The movement of money in a line, if it has one."""
    if line.debit is None or line.credit is None:
        return None
    return Transfer(f"{line.ref}/{line.kind}", line.debit, line.credit, line.amount_micros)


def pico(account: PrivacyAccount) -> tuple[int, int]:
    """Total and cap in 10⁻¹²: the total rounded down, the cap up with twice the account's relative allowance of 10⁻¹².

    So whatever the account accepts passes the integer comparison, and a relative excess of 3 · 10⁻¹² does not.
    """
    spent, parts = account.spent.as_integer_ratio()
    return spent * PICO // parts, _limit_pico(account.limit)


@lru_cache(1024)
def _limit_pico(cap: float) -> int:
    limit, parts = cap.as_integer_ratio()
    return -(-limit * (PICO + 2) // parts)


def limit_of(cap: Cap) -> float:
    """The number in a cap: ρ, or ε."""
    inner = cap.loss if isinstance(cap, RecordLevel) else cap
    if isinstance(inner, Uncapped | GaussianRelease):
        return float("inf")
    return inner.rho if isinstance(inner, ZCdp) else inner.epsilon
