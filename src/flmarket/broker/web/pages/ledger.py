"""The ledger: check a receipt (anybody), search and verify the log (the operator)."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from flmarket.broker.core import Broker
from flmarket.broker.office import ledger, market
from flmarket.broker.office.pseudonyms import buyers_receipt
from flmarket.broker.web.pages.context import (
    AnyVisitor,
    Form,
    OperatorWrites,
    PageRoute,
    SignedIn,
    Visitor,
    fragment,
    page,
    refused,
)
from flmarket.broker.web.pages.rendering import award_state, kind_words, loss_words
from flmarket.client import wire
from flmarket.errors import FlmarketError
from flmarket.ledger import Receipt, SealedReceipt, format_micros, read_receipts
from flmarket.privacy import Event

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 30
_LONGEST = 200_000
Search = Annotated[str, Query(max_length=120)]
Before = Annotated[int | None, Query(ge=0, le=10**15)]
KINDS = {
    "deposit": "deposit", "withdrawal": "withdrawal", "fee": "fee", "hold": "into escrow", "posted": "paid",
    "voided": "returned", "expired": "returned, too late", "cap": "privacy cap set", "release": "update released",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What became of a receipt."""

    ok: bool
    headline: str
    text: str


@router.get("/ledger")
def show(visitor: AnyVisitor, q: Search = "", before: Before = None) -> HTMLResponse:
    """The ledger as far as the visitor may see it."""
    return _page(visitor, search=q, before=before)


@router.get("/ledger/entries")
def entries(visitor: SignedIn, q: Search = "", before: Before = None) -> HTMLResponse:
    """Entries that match."""
    return fragment(visitor, "_entries.html.j2", **_entries(visitor, q, before))


@router.post("/ledger/verify")
def verify(request: Request, visitor: OperatorWrites) -> HTMLResponse:
    """Replay the whole log."""
    check = ledger.verify(*visitor.who)
    if request.headers.get("HX-Request"):
        return fragment(visitor, "_verification.html.j2", check=check)
    return _page(visitor, check=check)


@router.post("/ledger/receipt")
def check_receipt(request: Request, visitor: AnyVisitor, reader: Form) -> HTMLResponse:
    """Check a receipt against this ledger. Nothing changes, so nobody needs to be signed in."""
    text = reader.text("receipt")
    answer = _answer(visitor.broker, text)
    if request.headers.get("HX-Request"):
        return fragment(visitor, "_receipt.html.j2", answer=answer)
    return _page(visitor, answer=answer, text=text)


def _page(visitor: Visitor, *, search: str = "", before: int | None = None, **context: Any) -> HTMLResponse:
    shown = {"answer": None, "text": "", "check": None} | context | _entries(visitor, search, before)
    return page(visitor, "ledger.html.j2", title="Ledger", head=ledger.head(visitor.broker), **shown)


def _entries(visitor: Visitor, search: str, before: int | None) -> dict[str, Any]:
    """What the table of entries shows, if the visitor may see any."""
    found, wanted = None, search.strip() or None
    if visitor.auth is not None:
        found = ledger.entries(*visitor.who, search=wanted, limit=_SHOWN, before=before)
    return {"found": found, "search": search, "kinds": KINDS, "name": _names(visitor, found)}


def _names(visitor: Visitor, found: wire.LedgerPage | None) -> Callable[[str | None], str]:
    """Ids as the visitor knows them: her own tasks and, for the operator, everybody by name."""
    known = {"escrow": "escrow", "bank": "outside"}
    if found is not None:
        known |= ledger.names_in(*visitor.who, found.items)

    def name(identifier: str | None) -> str:
        head, _, rest = (identifier or "–").partition("/")
        place = re.fullmatch(r"(?:(\d+)/)?(?:owner-)?([a-z2-7]{8}|\d+)", rest)
        if place is not None:
            played = "" if place[1] is None else f"round {int(place[1]) + 1}, "
            rest = f"{played}owner-{place[2]}"
        return ", ".join(filter(None, (known.get(head, head), rest)))

    return name


def _answer(broker: Broker, text: str) -> Answer:
    if not text or len(text) > _LONGEST:
        return Answer(False, "That is not a receipt", "Paste the whole file, as it was downloaded.")
    try:
        receipts = read_receipts(json.loads(text))
    except FlmarketError:
        lacks = "It lacks what every receipt has, or has something that none has."
        return Answer(False, "That is not a receipt", lacks)
    except (ValueError, RecursionError):  # also numbers of more digits than Python reads
        return Answer(False, "That is not a receipt", "It is not JSON; paste the whole file, as it was downloaded.")
    answers = [_checked(broker, receipt) for receipt in receipts]
    wrong = next((one for one in answers if not one.ok), None)
    if len(answers) == 1 or wrong is not None:
        return wrong or answers[0]
    return Answer(True, f"These {len(answers):,} receipts are genuine", answers[0].text)


def _checked(broker: Broker, receipt: Receipt | SealedReceipt) -> Answer:
    try:
        if receipt.head.size > broker.books.ledger.head().size:
            said = "It speaks of entries that this ledger does not have."
            return Answer(False, "This receipt is not of this ledger", said)
        told = _sealed_terms(broker, receipt) if isinstance(receipt, SealedReceipt) else _open_terms(broker, receipt)
    except FlmarketError as error:
        return Answer(False, "This receipt does not hold", refused(error))
    if told is None:
        return Answer(False, "This receipt does not hold", "Its terms are not those of the entries that it names.")
    return Answer(True, "This receipt is genuine", told)


def _open_terms(broker: Broker, receipt: Receipt) -> str:
    award, release = receipt.check(broker.books.ledger.head(receipt.head.size))
    sold = f" for what was released at {_terms(broker, award.id, award.loss)}" if release is not None else ""
    return (
        f"Award {award.id}: {format_micros(award.price_micros)}{sold}, {award_state(str(award.state.value))}. Its "
        f"{len(receipt.proofs)} entries lead to the head that this ledger had at {receipt.head.size:,} entries."
    )


def _terms(broker: Broker, award: str, loss: Event) -> str:
    """What an award is for, and of how many rounds that is."""
    kind = market.kind_of(broker, award.partition("/")[0])
    return loss_words(loss) if kind is None else f"{loss_words(loss)} {kind_words(kind).loss}"


def _sealed_terms(broker: Broker, receipt: SealedReceipt) -> str | None:
    """A buyer's receipt: its entries are opened here; None if its terms are not theirs."""
    books = broker.books.ledger
    receipt.check(books.head(receipt.head.size))
    first = receipt.entries[0].seq
    award = next(books.entries(first, first + 1)).line.ref
    if buyers_receipt(broker, books.receipt(award, receipt.head.size)) != receipt:
        return None
    terms = _terms(broker, receipt.award, receipt.loss)
    return (
        f"Award {receipt.award}: {format_micros(receipt.price_micros)} at {terms}, "
        f"{award_state(receipt.state)}. Its {len(receipt.entries)} sealed entries lead to the head that this ledger "
        f"had at {receipt.head.size:,} entries, and say what the receipt says."
    )
