"""A receipt: the entries of one award, each with a proof that it stands in the log that a head commits to.

Whoever trusts the head can check a receipt without the log, the database or the broker: the entries hash to leaves, the
leaves lead to the head's root, and hold, release and payment belong together. What it cannot show is that the broker
shows everybody the same head: compare heads with others, or take them from where they are published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flmarket.errors import InvalidInput
from flmarket.ledger.entry import RESOLUTIONS, Entry, EntryKind
from flmarket.ledger.errors import LedgerCorrupt
from flmarket.ledger.journal import ESCROW, Award, AwardState, Release
from flmarket.ledger.lines import award_of, release_of
from flmarket.ledger.merkle import Head, Tree, checked_inclusion, digest

__all__ = ["Proof", "Receipt", "make_receipt"]

_VERSION = 1


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

    def check(self, known: Head | None = None) -> tuple[Award, Release | None]:
        """The award as this receipt proves it, and its release; LedgerCorrupt if anything does not fit.

        `known` is the head as published. Without it the receipt is only checked against the head that it carries.
        """
        if known is not None and known != self.head:
            raise LedgerCorrupt(
                f"this receipt is for a log of {self.head.size} entries with another head than the known"
            )
        for proof in self.proofs:
            _check_proof(proof, self.head)
        return _check_story(self.award_id, tuple(proof.entry for proof in self.proofs))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        proofs = [{"entry": proof.entry.to_dict(), "path": list(proof.path)} for proof in self.proofs]
        return {"version": _VERSION, "award": self.award_id, "proofs": proofs, "head": self.head.to_dict()}

    @classmethod
    def from_dict(cls, data: object) -> Receipt:
        """The receipt that `to_dict` wrote; checks its form, not its truth."""
        if not isinstance(data, Mapping) or data.get("version") != _VERSION:
            raise InvalidInput("receipt", data, f"a receipt of version {_VERSION}")
        try:
            award, head = str(data["award"]), Head.from_dict(data["head"])
            proofs = tuple(
                Proof(
                    Entry.from_dict(proof["entry"]), tuple(digest("receipt.path", step).hex() for step in proof["path"])
                )
                for proof in data["proofs"]
            )
        except (KeyError, TypeError) as error:
            raise InvalidInput("receipt", data, f"an award, proofs and a head ({error})") from None
        return cls(award, proofs, head)


def make_receipt(award_id: str, entries: Iterable[Entry], tree: Tree, head: Head) -> Receipt:
    """The receipt for these entries of an award, those within the tree."""
    proofs = tuple(
        Proof(entry, tuple(step.hex() for step in tree.inclusion(entry.seq)))
        for entry in sorted(entries, key=lambda entry: entry.seq)
        if entry.seq < tree.size
    )
    if not proofs:
        raise InvalidInput("award", award_id, f"an award held within the first {tree.size} entries")
    return Receipt(award_id, proofs, head)


def _check_proof(proof: Proof, head: Head) -> None:
    entry = proof.entry
    if entry.computed_hash() != entry.hash:
        raise LedgerCorrupt("the content does not match the hash", entry.seq)
    try:
        path = [bytes.fromhex(step) for step in proof.path]
        root = checked_inclusion(bytes.fromhex(entry.hash), entry.seq, path, head.size)
    except (InvalidInput, ValueError) as error:
        raise LedgerCorrupt(f"the proof is malformed ({error})", entry.seq) from None
    if root.hex() != head.root:
        raise LedgerCorrupt("the entry is not in the log of the head", entry.seq)


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
    if wrong_owner or wrong_money or late:
        raise LedgerCorrupt(f"the entries of award {award_id} do not belong together")
    return award, release_of(release[0]) if release else None
