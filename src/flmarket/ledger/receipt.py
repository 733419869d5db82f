"""Receipts: entries of one award, each with a proof that it stands in the log that a head commits to.

Whoever trusts the head can check a receipt without the log, the database or the broker: the entries hash to leaves, the
leaves lead to the head's root, and hold, release and payment belong together. What it cannot show is that the broker
shows everybody the same head: compare heads with others, or take them from where they are published.

A `Receipt` is for afterwards. A `HoldReceipt` is for before: an owner asks for it while the award is pending, and lets
nothing leave her machine without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flmarket.errors import InvalidInput, SettlementError
from flmarket.ledger.entry import RESOLUTIONS, Entry, EntryKind, award_of, fits, release_of
from flmarket.ledger.journal import (
    ESCROW,
    NOTHING,
    Award,
    AwardState,
    HoldNotProven,
    LedgerCorrupt,
    Release,
    as_loss,
    epsilon_of,
)
from flmarket.ledger.merkle import Head, Tree, checked_consistency, checked_inclusion, digest
from flmarket.privacy import Event, Unprotected, event_from_dict, event_to_dict

_VERSION = 1
# no log has 2⁶² entries, so no proof has more steps; and no entry that a ledger writes has longer texts
_LONGEST_PATH, _LONGEST_TEXT = 64, 4096
_MOST = 10_000  # receipts in one file


@dataclass(frozen=True)
class Proof:
    """An entry and its audit path, from the bottom of the tree up."""

    entry: Entry
    path: tuple[str, ...]


@dataclass(frozen=True)
class Receipt:
    """What an owner keeps: one award's entries with proofs against one head."""

    award_id: str
    proofs: tuple[Proof, ...]
    head: Head

    def check(self, known: Head | None = None, *, pending: bool = False) -> tuple[Award, Release | None]:
        """The award as this receipt proves it, and its release; LedgerCorrupt if anything does not fit or is left out.

        `known` is the head as published. Without it the receipt is only checked against the head that it carries. A
        receipt shows how the award ended, and a paid one for what (unless nothing was sold, or nothing promised). Since
        a log cannot prove that no more entries follow, one without an end is refused, unless `pending` expects it.
        """
        _check_head(self.head, known)
        for proof in self.proofs:
            _check_proof(proof, self.head)
        award, release = _check_story(self.award_id, tuple(proof.entry for proof in self.proofs))
        if award.state is AwardState.PENDING and not pending:
            raise LedgerCorrupt(
                f"the receipt shows neither payment nor refund of award {award.id}: ask for a later one"
            )
        if award.state is AwardState.POSTED and release is None and award.loss not in (NOTHING, Unprotected()):
            raise LedgerCorrupt(f"the receipt shows award {award.id} paid without its release")
        return award, release

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        proofs = [{"entry": proof.entry.to_dict(), "path": list(proof.path)} for proof in self.proofs]
        return {"version": _VERSION, "award": self.award_id, "proofs": proofs, "head": self.head.to_dict()}

    @classmethod
    def from_dict(cls, data: object) -> "Receipt":
        """The receipt that `to_dict` wrote; checks its form, not its truth."""
        if not isinstance(data, Mapping) or data.get("version") != _VERSION:
            raise InvalidInput("receipt", data, f"a receipt of version {_VERSION}")
        try:
            award, head = str(data["award"]), Head.from_dict(data["head"])
            proofs = tuple(
                Proof(Entry.from_dict(proof["entry"]), _path("receipt.path", proof["path"])) for proof in data["proofs"]
            )
        except (KeyError, TypeError) as error:
            raise InvalidInput("receipt", data, f"an award, proofs and a head ({error})") from None
        return cls(award, proofs, head)


@dataclass(frozen=True)
class HoldReceipt:
    """That an award's price is in escrow, for its owner to check before anything leaves her machine.

    It proves, by hashes alone: the log that `head` commits to contains the hold (this much money, from this buyer to
    escrow, for this owner and this award), and that log continues the one whose head she saw before. So the broker
    cannot take the hold back, nor show her another past, without a log that contradicts a head she keeps.

    It does not prove that nothing follows the hold: a ledger makes this receipt for pending awards only, but a log
    cannot prove an absence, and the broker may void the award right after (then its log shows a void that she can hold
    against an update she delivered: ask for the full `Receipt` under a later head). Nor that the buyer's money is more
    than a number in this broker's books, nor, at the first contact (`seen` None), that others see the same log.
    """

    hold: Proof
    head: Head
    newest: tuple[str, ...]  # audit path of the head's last entry
    since: int = 0  # size of the log that `consistency` starts from; 0 without one
    consistency: tuple[str, ...] = ()

    def verify(
        self,
        *,
        award_id: str,
        owner: str,
        price_micros: int,
        buyer: str | None = None,
        loss: Event | float | None = None,
        round_index: int | None = None,
        seen: Head | None = None,
    ) -> Head:
        """The head to keep as the next `seen`; HoldNotProven if anything is not as expected.

        `seen` is the last head that she accepted from this broker, None only if there was none. Terms given as None
        are not compared; a `loss` given as a number is a pure ε.
        """
        award = _held(self.hold.entry)
        if award is None:
            raise HoldNotProven("entry", f"entry {self.hold.entry.seq} does not hold the price of an award in escrow")
        expected = {"id": award_id, "owner": owner, "price_micros": price_micros}
        sold = None if loss is None else as_loss(loss)
        optional = {"buyer": buyer, "loss": sold, "round_index": round_index}
        for name, value in (expected | {name: value for name, value in optional.items() if value is not None}).items():
            if getattr(award, name) != value:
                raise HoldNotProven("award", f"the hold is for {name} {getattr(award, name)}, expected {value}")
        try:
            _check_proof(self.hold, self.head)
        except LedgerCorrupt as error:
            raise HoldNotProven("inclusion", str(error)) from None
        if not _leads_to_root(self.head.last, self.head.size - 1, self.newest, self.head):
            raise HoldNotProven("head", "the head's last hash is not in its tree")
        self._check_past(seen)
        return self.head

    def _check_past(self, seen: Head | None) -> None:
        old_size = 0 if seen is None else seen.size
        if self.since != old_size or (self.consistency and not old_size):
            raise HoldNotProven("consistency", f"a proof from {self.since} entries on; a log of {old_size} was seen")
        if seen is None or not old_size:
            return
        try:
            path = [bytes.fromhex(step) for step in self.consistency]
            root = checked_consistency(old_size, bytes.fromhex(seen.root), self.head.size, path).hex()
        except (InvalidInput, ValueError) as error:
            raise HoldNotProven("consistency", f"the log does not continue the one seen before ({error})") from None
        if root != self.head.root or (old_size == self.head.size and seen != self.head):
            raise HoldNotProven("consistency", f"another log than the one of {old_size} entries seen before")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "version": _VERSION,
            "entry": self.hold.entry.to_dict(),
            "path": list(self.hold.path),
            "head": self.head.to_dict(),
            "newest": list(self.newest),
            "since": self.since,
            "consistency": list(self.consistency),
        }

    @classmethod
    def from_dict(cls, data: object) -> "HoldReceipt":
        """The receipt that `to_dict` wrote; checks its form, not its truth. Anything longer than needed is refused."""
        names = ("version", "entry", "path", "head", "newest", "since", "consistency")
        if not isinstance(data, dict) or set(data) != set(names) or repr(data["version"]) != repr(_VERSION):
            raise InvalidInput("hold receipt", type(data).__name__, f"version {_VERSION} with " + ", ".join(names))
        entry, since = data["entry"], data["since"]
        if not isinstance(entry, dict) or any(isinstance(v, str) and len(v) > _LONGEST_TEXT for v in entry.values()):
            raise InvalidInput("hold receipt.entry", type(entry).__name__, "an entry of a ledger")
        if type(since) is not int or not 0 <= since < 2**62:
            raise InvalidInput("hold receipt.since", type(since).__name__, "a whole number of at least 0")
        path, newest, past = (_path(f"hold receipt.{name}", data[name]) for name in ("path", "newest", "consistency"))
        return cls(Proof(Entry.from_dict(entry), path), Head.from_dict(data["head"]), newest, since, past)


def make_hold_receipts(
    award_ids: Iterable[str], entries: Iterable[Entry], tree: Tree, since: Head | Mapping[str, Head] | None
) -> dict[str, HoldReceipt]:
    """Receipts for these awards, whose entries are given; an award that is not pending is refused."""
    holds, ended = dict[str, Entry](), dict[str, EntryKind]()
    for entry in entries:
        if entry.line.kind is EntryKind.HOLD:
            holds[entry.line.ref] = entry
        elif entry.line.kind in RESOLUTIONS.values():
            ended[entry.line.ref] = entry.line.kind
    head, newest, found = tree.head(), _hex(tree.inclusion(tree.size - 1)) if tree.size else (), {}
    pasts: dict[Head, tuple[str, ...]] = {}
    for award_id in award_ids:
        if award_id not in holds:
            raise SettlementError(f"there is no award {award_id}")
        if award_id in ended:
            raise SettlementError(f"award {award_id} is {ended[award_id]}: nothing is held for it")
        seen = since if isinstance(since, Head) or since is None else since.get(award_id)
        if seen is not None and seen not in pasts:
            # what is no head of this log is the asker's mistake, or this log was changed
            if seen.size > tree.size or Tree(seen.size, tree.fetch).head() != seen:
                raise InvalidInput("since", seen.to_dict(), f"a head of this ledger, which has {tree.size} entries")
            pasts[seen] = _hex(tree.consistency(seen.size))
        hold = Proof(holds[award_id], _hex(tree.inclusion(holds[award_id].seq)))
        past = () if seen is None else pasts[seen]
        found[award_id] = HoldReceipt(hold, head, newest, 0 if seen is None else seen.size, past)
    return found


def make_receipt(award_id: str, entries: Iterable[Entry], tree: Tree) -> Receipt:
    """The receipt for these entries of an award, those within the tree."""
    proofs = tuple(
        Proof(entry, _hex(tree.inclusion(entry.seq)))
        for entry in sorted(entries, key=lambda entry: entry.seq)
        if entry.seq < tree.size
    )
    if not proofs:
        raise InvalidInput("award", award_id, f"an award held within the first {tree.size} entries")
    return Receipt(award_id, proofs, tree.head())


def _held(entry: Entry) -> Award | None:
    line = entry.line
    complete = line.debit is not None and line.owner is not None and line.round_index is not None
    if line.kind is not EntryKind.HOLD or line.credit != ESCROW or not complete:
        return None
    try:
        return award_of(line, None)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _hex(path: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(step.hex() for step in path)


def _path(field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _LONGEST_PATH:
        raise InvalidInput(field, type(value).__name__, f"a list of at most {_LONGEST_PATH} hashes")
    return tuple(digest(field, step).hex() for step in value)


def _check_proof(proof: Proof, head: Head) -> None:
    entry = proof.entry
    if entry.computed_hash() != entry.hash:
        raise LedgerCorrupt("the content does not match the hash", entry.seq)
    _check_leaf(entry.hash, entry.seq, proof.path, head)


def _check_leaf(leaf: str, seq: int, path: Iterable[str], head: Head) -> None:
    if not _leads_to_root(leaf, seq, path, head):
        raise LedgerCorrupt("the entry is not in the log of the head", seq)


def _check_head(carried: Head, known: Head | None) -> None:
    if known is not None and known != carried:
        raise LedgerCorrupt(f"this receipt is for a log of {carried.size} entries with another head than the known")


def _leads_to_root(leaf: str, index: int, path: Iterable[str], head: Head) -> bool:
    """Whether a leaf's path, neither longer nor shorter than it must be, leads to the head's root."""
    try:
        steps = [bytes.fromhex(step) for step in path]
        return checked_inclusion(bytes.fromhex(leaf), index, steps, head.size).hex() == head.root
    except (InvalidInput, ValueError):
        return False


def _check_story(award_id: str, entries: tuple[Entry, ...]) -> tuple[Award, Release | None]:
    """Hold, then at most one release and one resolution, in order, for one owner and one amount."""
    lines = [entry.line for entry in sorted(entries, key=lambda entry: entry.seq)]
    if not lines or lines[0].kind is not EntryKind.HOLD or any(line.ref != award_id for line in lines):
        raise LedgerCorrupt(f"the receipt does not show award {award_id} from its hold on")
    held, later = lines[0], lines[1:]
    release = [line for line in later if line.kind is EntryKind.RELEASE]
    ending = [line for line in later if line.kind in RESOLUTIONS.values()]
    if len(release) > 1 or len(ending) > 1 or len(release) + len(ending) != len(later):
        raise LedgerCorrupt(f"the receipt shows award {award_id} released or resolved more than once")
    award = award_of(held, ending[0] if ending else None)
    payee = award.owner if award.state is AwardState.POSTED else award.buyer
    wrong_owner = any(line.owner != award.owner for line in lines)
    wrong_money = any(
        (line.debit, line.credit, line.amount_micros) != (ESCROW, payee, award.price_micros) for line in ending
    )
    late = award.state is AwardState.POSTED and bool(release) and lines[-1] is not ending[0]
    given = release_of(release[0]) if release else None
    excess = given is not None and not fits(given, award.loss)
    if wrong_owner or wrong_money or late or excess:
        raise LedgerCorrupt(f"the entries of award {award_id} do not belong together")
    return award, given


# by version: the first had a bare number for the loss
_SEALED_FIELDS = {
    version: {"version", "sealed", "award", "owner", loss, "price_micros", "state", "entries", "head"}
    for version, loss in ((1, "epsilon"), (2, "loss"))
}


@dataclass(frozen=True)
class SealedEntry:
    """An entry by its place, its kind, its hash and its audit path, from the bottom of the tree up."""

    seq: int
    kind: str
    hash: str
    path: tuple[str, ...]


@dataclass(frozen=True)
class SealedReceipt:
    """What a buyer gets of an award: it shows that its entries stand in the log, not what is in them.

    `award` and `owner` are names that are good in this task only.

    An entry names its owner, her total privacy loss and her cap, and its hash covers all of it, so nobody can show a
    part of an entry. A sealed receipt has the hashes alone, with proofs that they are leaves of the head's tree. Its
    terms are the broker's word: price, privacy loss and state, and a name for the owner that is good in this task only.
    They can be held against the owner's own receipt, which has the same hashes and opens them; whoever has the log
    checks both.
    """

    award: str
    owner: str
    loss: Event
    price_micros: int
    state: str
    entries: tuple[SealedEntry, ...]
    head: Head

    @property
    def epsilon(self) -> float:
        """The loss as a pure ε, ∞ if nothing protects; an error for any other loss."""
        return epsilon_of(self.loss)

    def check(self, known: Head | None = None) -> None:
        """LedgerCorrupt unless every entry is a leaf of the head; `known` is the head as published."""
        _check_head(self.head, known)
        seqs = [entry.seq for entry in self.entries]
        if not seqs or seqs != sorted(set(seqs)):
            raise LedgerCorrupt("the receipt shows no entries, or one twice")
        for entry in self.entries:
            _check_leaf(entry.hash, entry.seq, entry.path, self.head)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "version": 2,
            "sealed": True,
            **{name: getattr(self, name) for name in ("award", "owner", "price_micros", "state")},
            "loss": event_to_dict(self.loss),
            "entries": [asdict(entry) | {"path": list(entry.path)} for entry in self.entries],
            "head": self.head.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: object) -> "SealedReceipt":
        """The receipt that `to_dict` wrote; checks its form, not its truth."""
        version = data.get("version") if isinstance(data, Mapping) else None
        if (
            not isinstance(data, Mapping)
            or type(version) is not int
            or data.keys() != _SEALED_FIELDS.get(version, set())
        ):
            raise InvalidInput("receipt", data, "a sealed receipt of version 1 or 2")
        try:
            entries = []
            for one in data["entries"]:
                path = tuple(digest("receipt.path", step).hex() for step in one["path"])
                leaf = digest("receipt.hash", one["hash"]).hex()
                entries.append(SealedEntry(int(one["seq"]), str(one["kind"]), leaf, path))
            award, owner, state = (str(data[name]) for name in ("award", "owner", "state"))
            loss = event_from_dict(data["loss"]) if version == 2 else as_loss(float(data["epsilon"]))
            price, head = int(data["price_micros"]), Head.from_dict(data["head"])
            return cls(award, owner, loss, price, state, tuple(entries), head)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput("receipt", data, f"an award, its terms, entries and a head ({error})") from None


def seal(receipt: Receipt, *, award: str, owner: str) -> SealedReceipt:
    """A receipt without what its entries say, under other names."""
    found, _ = receipt.check()
    entries = tuple(
        SealedEntry(proof.entry.seq, proof.entry.line.kind.value, proof.entry.hash, proof.path)
        for proof in receipt.proofs
    )
    return SealedReceipt(award, owner, found.loss, found.price_micros, found.state.value, entries, receipt.head)


def read_receipts(data: object, *, levels: int = 8) -> list[Receipt | SealedReceipt]:
    """All receipts in anything that a market hands out: one by itself, some in a list, an answer of the HTTP interface,
    a model's receipts.json. Checks their form, not their truth; InvalidInput if there is none, or something else.
    What is wrapped more than `levels` times is something else."""
    if levels and isinstance(data, Mapping):
        for inside in ("items", "receipts", "document"):
            if inside in data:
                return read_receipts(data[inside], levels=levels - 1)
        return [SealedReceipt.from_dict(data) if "sealed" in data else Receipt.from_dict(data)]
    if not levels or not isinstance(data, list) or not 0 < len(data) <= _MOST:
        raise InvalidInput("receipt", type(data).__name__, f"a receipt, or 1 to {_MOST} of them")
    return [receipt for one in data for receipt in read_receipts(one, levels=levels - 1)]
