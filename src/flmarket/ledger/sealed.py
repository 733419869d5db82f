"""A sealed receipt: what a buyer gets of an award. It shows that its entries stand in the log, not what is in them.

An entry names its owner, her total privacy loss and her cap, and its hash covers all of it, so nobody can show a part
of an entry. A sealed receipt has the hashes alone, with proofs that they are leaves of the head's tree. Its terms are
the broker's word: price, privacy loss and state, and a name for the owner that is good in this task only. They can be
held against the owner's own receipt, which has the same hashes and opens them; whoever has the log checks both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flmarket.errors import InvalidInput
from flmarket.ledger.errors import LedgerCorrupt
from flmarket.ledger.journal import as_loss, epsilon_of
from flmarket.ledger.merkle import Head, checked_inclusion, digest
from flmarket.ledger.receipt import Receipt
from flmarket.privacy import Event, event_from_dict, event_to_dict

__all__ = ["SealedEntry", "SealedReceipt", "seal"]

# by version: the first had a bare number for the loss
_FIELDS = {
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
    """One award as its buyer may know it: `award` and `owner` are names that are good in this task only."""

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
        if known is not None and known != self.head:
            raise LedgerCorrupt(
                f"this receipt is for a log of {self.head.size} entries with another head than the known"
            )
        seqs = [entry.seq for entry in self.entries]
        if not seqs or seqs != sorted(set(seqs)):
            raise LedgerCorrupt("the receipt shows no entries, or one twice")
        for entry in self.entries:
            try:
                path = [bytes.fromhex(step) for step in entry.path]
                root = checked_inclusion(bytes.fromhex(entry.hash), entry.seq, path, self.head.size)
            except (InvalidInput, ValueError) as error:
                raise LedgerCorrupt(f"the proof is malformed ({error})", entry.seq) from None
            if root.hex() != self.head.root:
                raise LedgerCorrupt("the entry is not in the log of the head", entry.seq)

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
    def from_dict(cls, data: object) -> SealedReceipt:
        """The receipt that `to_dict` wrote; checks its form, not its truth."""
        version = data.get("version") if isinstance(data, Mapping) else None
        if not isinstance(data, Mapping) or type(version) is not int or data.keys() != _FIELDS.get(version, set()):
            raise InvalidInput("receipt", data, "a sealed receipt of version 1 or 2")
        try:
            entries = tuple(
                SealedEntry(
                    int(one["seq"]),
                    str(one["kind"]),
                    digest("receipt.hash", one["hash"]).hex(),
                    tuple(digest("receipt.path", step).hex() for step in one["path"]),
                )
                for one in data["entries"]
            )
            return cls(
                str(data["award"]),
                str(data["owner"]),
                event_from_dict(data["loss"]) if version == 2 else as_loss(float(data["epsilon"])),
                int(data["price_micros"]),
                str(data["state"]),
                entries,
                Head.from_dict(data["head"]),
            )
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
