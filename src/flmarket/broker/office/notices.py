"""Telling parties what happened: who wants to be told of what (hooks), and the outbox of what is to be told (notices).

A notice is written in the transaction of the event that it tells, so one is there exactly if the other is; sending it
is somebody else's work (`work.deliveries`), at least once. Its id follows from hook, event and subject, so a step that
is repeated after a crash tells nothing twice.

| event | to whom | when |
| --- | --- | --- |
| cap | an owner | nine tenths of her cap are used; once for each cap that she sets |
| award | an owner | the price of an update of hers is in escrow |
| payment | an owner | an award of hers was paid |
| dispute.opened | both sides of an award, and operators | somebody disputes it |
| dispute.decided | the same | the operator has decided |
| payout | anybody | the operator sent her money |
| task.ended | its buyer, and owners with a place in it | it has finished, or was cancelled, or its time is over |
| task.failed | the same, and operators | it failed |
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from flmarket.broker.books import is_simulated
from flmarket.broker.core import Broker, Party, require_admin
from flmarket.broker.errors import Conflict, Forbidden
from flmarket.broker.office.operator import note
from flmarket.broker.requests import EventName, HookRequest
from flmarket.broker.stamps import derived_id, iso, keyed_id, now
from flmarket.broker.tables import Hook, Notice, PartyRow, Slot, TaskRow, as_wire, how_many, made_before, row_of
from flmarket.client import wire
from flmarket.client.webhooks import PREFIX
from flmarket.ledger import Award, AwardState

NEARLY = 0.9
_MOST = 10_000  # parties in one question to the database

# --- what is told -----------------------------------------------------------------------------------------------------


def announce(session: Session, event: EventName, told: Mapping[str, Mapping[str, Any]], *, subject: str) -> None:
    """Write what is to be told, within the transaction of what happened; `told` has the data by party, `subject` is
    what it is about: the same event about the same subject is told once."""
    for hook in _hooks(session, told):
        if event in hook.events:
            data = told[hook.party_id]
            identifier = derived_id("n", hook.id, event, str(data.get("award_id", subject)))
            if session.get(Notice, identifier) is None:
                session.add(_notice(identifier, hook, event, data))


def announce_awards(
    session: Session, event: EventName, task: TaskRow, index: int, awards: Iterable[Award], *, state: AwardState
) -> None:
    """Those of a round's awards that are in this state, each to the registered owner whose it is."""
    told = {
        award.owner: {
            "task_id": task.id, "task_name": task.name, "round": index, "award_id": award.id,
            "price_micros": award.price_micros, "state": award.state.value,
        }
        for award in awards if award.state is state and not is_simulated(award.owner)
    }  # fmt: skip
    announce(session, event, told, subject=f"{task.id}/{index}")


def announce_end(session: Session, task: TaskRow) -> None:
    """A task has ended, well or not."""
    parties = {task.buyer_id, *session.scalars(select(Slot.party_id).where(Slot.task_id == task.id))} - {None}
    event: EventName = "task.failed" if task.state == "failed" else "task.ended"
    if task.state == "failed":
        parties |= set(session.scalars(select(PartyRow.id).where(PartyRow.role == "operator", PartyRow.active)))
    data: dict[str, Any] = {
        "task_id": task.id, "task_name": task.name, "state": task.state, "rounds_done": task.rounds_done,
        "rounds": task.rounds,
    }  # fmt: skip
    money = {"spent_micros": task.spent_micros, "refunded_micros": task.refunded_micros, "error": task.error}
    told = {one: data | money if one == task.buyer_id else data for one in parties if one is not None}
    announce(session, event, told, subject=task.id)


def announce_caps(session: Session, privacy: Mapping[str, tuple[float | None, float]]) -> None:
    """Whose cap is nearly used, as the ledger said before this transaction: cap and total ε spent by party."""
    for party, (cap, spent) in privacy.items():
        if cap and spent >= NEARLY * cap:
            data = {"cap_epsilon_total": cap, "spent_epsilon_total": spent, "left_epsilon_total": max(0.0, cap - spent)}
            announce(session, "cap", {party: data}, subject=f"{party} {cap!r}")


def listeners(session: Session, parties: Collection[str]) -> list[str]:
    """Those of these parties who want to be told of anything."""
    return sorted({hook.party_id for hook in _hooks(session, parties)})


def _hooks(session: Session, parties: Collection[str]) -> list[Hook]:
    ids, found = sorted(parties), list[Hook]()
    for start in range(0, len(ids), _MOST):
        of_them = Hook.party_id.in_(ids[start : start + _MOST]), Hook.removed_at.is_(None)
        found += session.scalars(select(Hook).where(*of_them).order_by(Hook.created_at)).all()
    return found


def _notice(identifier: str, hook: Hook, event: str, data: Mapping[str, Any]) -> Notice:
    at = now()
    body = {"id": identifier, "event": event, "at": iso(at), "party_id": hook.party_id, "data": dict(data)}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    times = {"at": at, "next_at": at, "sent_at": None}
    return Notice(id=identifier, hook_id=hook.id, event=event, body=text, state="waiting", tries=0, error="", **times)


# --- who is told ------------------------------------------------------------------------------------------------------


def secret_of(broker: Broker, hook_id: str) -> str:
    """What a webhook is signed with: it follows from the hook's id and a secret of the service, so it is not stored."""
    digest = hmac.new(broker.secrets.keys, f"webhook\0{hook_id}".encode(), hashlib.sha256).digest()
    return PREFIX + base64.b64encode(digest).decode()


def create_hook(
    broker: Broker, party: Party, party_id: str, request: HookRequest, *, key: str | None = None
) -> wire.NewHook:
    """A new hook, for oneself, or by the operator for anybody; the same `key` makes one.

    What is posted is signed with the secret in the answer, and posted again until it is taken (2xx). Mail goes where
    the operator says: else parties could have strangers sent mail.
    """
    require_admin(party, of=party_id)
    if request.kind == "email":
        if party.role != "operator":
            raise Forbidden("mail addresses are the operator's to set: ask her, or use a webhook")
        if not broker.settings.smtp_host:
            raise Conflict("this broker sends no mail: its operator has set no smtp_host")
    hook_id = keyed_id("h", party.id, key)
    with broker.database.write() as session:
        row_of(session, PartyRow, party_id, "party")
        asked = {"party_id": party_id, "kind": request.kind, "address": request.address}
        known = made_before(session, Hook, hook_id, "hook", **asked)
        if known is None:
            live = how_many(session, Hook.party_id == party_id, Hook.removed_at.is_(None))
            if live >= broker.settings.max_hooks_per_party:
                raise Conflict(f"a party has at most {broker.settings.max_hooks_per_party} hooks: remove one first")
            events = list(dict.fromkeys(request.events))
            known = Hook(id=hook_id, **asked, events=events, created_at=now(), removed_at=None)
            session.add(known)
            note(session, party, "hook.create", party_id, detail=f"{request.kind} {hook_id}")
    return wire.NewHook(_view(known, ""), secret_of(broker, hook_id) if request.kind == "webhook" else "")


def list_hooks(broker: Broker, party: Party) -> wire.HookPage:
    """Whom one wants told of what happens to one."""
    with broker.database.read() as session:
        rows = _hooks(session, [party.id])
        return wire.HookPage(tuple(_view(row, _failing(session, row.id)) for row in rows))


def remove_hook(broker: Broker, party: Party, hook_id: str) -> wire.Hook:
    """Nothing more is told to it, not even what waits."""
    require_admin(party)
    with broker.database.write() as session:
        row = row_of(session, Hook, hook_id, "hook", of=party.id)
        row.removed_at = now()
        note(session, party, "hook.remove", party.id, detail=hook_id)
    return _view(row, "")


def try_hook(broker: Broker, party: Party, hook_id: str, *, key: str | None = None) -> wire.Notice:
    """Tell it something of no consequence (event `test`), to see that it works; the same `key` does it once."""
    with broker.database.write() as session:
        hook = row_of(session, Hook, hook_id, "hook", of=party.id)
        identifier = keyed_id("n", party.id, key)
        row = made_before(session, Notice, identifier, "hook's trial", hook_id=hook.id)
        if row is None:
            row = _notice(identifier, hook, "test", {})
            session.add(row)
    broker.wake.set()
    return as_wire(wire.Notice, row)


def list_notices(broker: Broker, party: Party, *, limit: int = 100) -> wire.NoticePage:
    """What was told to one's own hooks, or waits to be."""
    mine = select(Hook.id).where(Hook.party_id == party.id)
    query = select(Notice).where(Notice.hook_id.in_(mine)).order_by(Notice.at.desc(), Notice.id).limit(limit)
    with broker.database.read() as session:
        return wire.NoticePage(tuple(as_wire(wire.Notice, row) for row in session.scalars(query)))


def _failing(session: Session, hook_id: str) -> str:
    tried = Notice.hook_id == hook_id, Notice.tries > 0
    query = select(Notice.state, Notice.error).where(*tried).order_by(Notice.at.desc(), Notice.id).limit(1)
    found = session.execute(query).one_or_none()
    return "" if found is None or found[0] == "sent" else found[1]


def _view(row: Hook, failing: str) -> wire.Hook:
    return as_wire(wire.Hook, row, events=tuple(row.events), failing=failing)
