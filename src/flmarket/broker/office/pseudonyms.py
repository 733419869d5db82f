"""Owners as buyers know them: a name for each place that is good in one task and says nothing elsewhere.

A name is an HMAC of task and place under a secret of the service, so two buyers cannot tell whether they bought from
the same owner by any name, id, number or total that they are served. What they pay for they see, award by award: ε,
price and records; an owner who sells the same unusual figures everywhere can be recognised by those.

How reliably they deliver: so many of the last 20 awards that have ended, paid ones count as delivered. One rule for
owners, buyers and the operator. An award that was voided (refused, bad, given up with its round) or came too late
counts as not delivered, whoever's fault it was; one whose price is still in escrow, in dispute or not, is not counted
yet. A registered owner is judged by her awards in all tasks, a simulated one by those of her place in the task. Each
owner costs the database 20 rows of an index, however many awards she has had.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Collection, Set
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Integer, bindparam, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from flmarket.broker.core import Broker, Party
from flmarket.broker.tables import PartyRow, Release, Slot
from flmarket.client import wire
from flmarket.ledger import BANK, ESCROW, FEES, AwardState
from flmarket.ledger.receipt import Receipt, SealedReceipt, seal

_AWARD = re.compile(r"([^/\s]+)/(\d+)/(\d+)(/dispute|/refund)?")  # also what follows from an award in the ledger
_PARTY = re.compile(r"\bp_[a-z2-7]{16}\b")
WINDOW = 20
_one = aliased(Release, name="one")


def owner_name(broker: Broker, task_id: str, place: int) -> str:
    """The owner at a place of a task, as the task's buyer knows her: owner-4xk…"""
    mac = hmac.new(broker.secrets.pseudonyms, f"{task_id}\0{place}".encode(), hashlib.sha256).digest()
    return f"owner-{base64.b32encode(mac[:5]).decode().lower()}"


def buyers_award(broker: Broker, award_id: str) -> str:
    """An award's id with the owner's name instead of her number."""
    found = _AWARD.fullmatch(award_id)
    if found is None:
        return award_id
    return f"{found[1]}/{found[2]}/{owner_name(broker, found[1], int(found[3]))}{found[4] or ''}"


def buyers_text(broker: Broker, text: str) -> str:
    """What went wrong, in words that may have been written for the operator, without owners' ids and numbers."""
    return _PARTY.sub("an owner", _AWARD.sub(lambda found: buyers_award(broker, found[0]), text))


def buyers_data(broker: Broker, party: Party, task_id: str, data: dict[str, Any]) -> dict[str, Any]:
    """An event's figures: winners by name, in the order of their names; to the operator by their place."""
    known, plain = dict(data), party.role == "operator"
    if isinstance(known.get("winners"), list):  # where an event only counts them, it is a number
        winners = [
            {"owner": f"owner-{one['slot']}" if plain else owner_name(broker, task_id, one["slot"])}
            | {name: one.get(name) for name in ("epsilon", "price_micros", "loss")}
            for one in known["winners"]
        ]
        known["winners"] = winners if plain else sorted(winners, key=lambda one: str(one["owner"]))
    if not plain and known.get("error"):
        known["error"] = buyers_text(broker, str(known["error"]))
    return known


def buyers_receipt(broker: Broker, receipt: Receipt) -> SealedReceipt:
    """An award's receipt for the buyer who paid."""
    named = buyers_award(broker, receipt.award_id)
    return seal(receipt, award=named, owner=named.rpartition("/")[2])


def buyers_entry(broker: Broker, entry: wire.LedgerEntry, own: Set[str]) -> wire.LedgerEntry:
    """An entry of the log as a buyer may see it: `own` accounts by their names, owners by theirs in the task."""
    found = _AWARD.fullmatch(entry.ref)
    owner = None if found is None else f"{found[1]}/{owner_name(broker, found[1], int(found[3]))}"

    def account(name: str | None) -> str | None:
        return name if name is None or name in own or name in (BANK, ESCROW, FEES) else owner

    debit, credit, named = map(account, (entry.debit, entry.credit, entry.owner))
    return replace(entry, ref=buyers_award(broker, entry.ref), debit=debit, credit=credit, owner=named)


def reputations(session: Session, parties: Collection[str]) -> dict[str, wire.Reputation]:
    """Of registered owners, by their ids."""
    found = session.execute(_OF_PARTIES, {"parties": list(parties), "window": WINDOW})
    return {party: reputation(delivered, ended) for party, delivered, ended in found}


def simulated_reputations(session: Session, task_id: str, slots: Collection[int]) -> dict[int, wire.Reputation]:
    """Of simulated owners, by their places in a task."""
    hers = _one.task_id == Slot.task_id, _one.slot == Slot.slot, _one.party_id.is_(None)
    query = select(Slot.slot, *_counts(Slot, *hers, order=(_one.index,)))
    found = session.execute(query.where(Slot.task_id == task_id, Slot.slot.in_(list(slots))), {"window": WINDOW})
    return {slot: reputation(delivered, ended) for slot, delivered, ended in found}


def reputation(delivered: int, ended: int) -> wire.Reputation:
    """The figures and their words, which say over how many awards they are."""
    if not ended:
        words = f"No award has ended yet; the last {WINDOW} count."
    elif ended < WINDOW:
        words = f"Delivered {delivered} of {ended} so far; the last {WINDOW} awards count."
    else:
        words = f"Delivered {delivered} of the last {WINDOW} awards."
    return wire.Reputation(int(delivered), int(ended), WINDOW, words)


def _counts(
    outer: Any, *hers: ColumnElement[bool], order: tuple[InstrumentedAttribute[Any], ...]
) -> tuple[ColumnElement[int], ColumnElement[int]]:
    ended = select(_one.state).where(*hers, _one.state != AwardState.PENDING.value)
    last = (
        ended.order_by(*(column.desc() for column in order))
        .limit(bindparam("window", type_=Integer))
        .correlate(outer)
        .subquery()
    )
    posted = last.c.state == AwardState.POSTED.value
    return (
        select(func.count().filter(posted)).select_from(last).scalar_subquery(),
        select(func.count()).select_from(last).scalar_subquery(),
    )


BY_PARTY = _counts(PartyRow, _one.party_id == PartyRow.id, order=(_one.at, _one.task_id, _one.index))
_OF_PARTIES = select(PartyRow.id, *BY_PARTY).where(PartyRow.id.in_(bindparam("parties", expanding=True)))
