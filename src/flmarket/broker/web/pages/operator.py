"""The operator's pages: queues and health, parties and their money, and who did what.

Every action that moves money or ends somebody's access is asked about first, is done once for each form, and leads to a
page that can be loaded again; only a secret is answered with directly, because it is shown once.
"""

from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from flmarket.broker.errors import Conflict
from flmarket.broker.office import disputes, operator, parties, payouts, runs, sessions, tasks, transfers
from flmarket.broker.requests import DepositRequest, NodeRequest, PartyRequest, PayoutRequest, check_visible
from flmarket.broker.stamps import derived_id, new_id
from flmarket.broker.tables import PartyRow
from flmarket.broker.web.api import Call, serve
from flmarket.broker.web.auth import get_gate
from flmarket.broker.web.pages.context import (
    ByName,
    Form,
    Operator,
    OperatorWrites,
    PageNumber,
    PageRoute,
    Pages,
    Reader,
    TaskId,
    Typed,
    Unit,
    Visitor,
    ask,
    fragment,
    page,
)
from flmarket.broker.web.pages.rendering import seconds, when
from flmarket.broker.work.flower import runs as flower
from flmarket.client import wire
from flmarket.ledger import MICROS, format_micros
from flmarket.report.formatting import count, money

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN, _LISTED = 100, 25
_INVITE_SECONDS = 7 * 86_400.0
_TYPED = ("amount", "reference", "node_id", "iban")
Action = Literal["close", "reopen", "reissue", "invite"]
Word = Annotated[str, Query(max_length=80)]
Before = Annotated[int | None, Query(ge=0, le=10**15)]
_ASKED = {
    "close": "Close {name}? Her keys and sessions stop working at once; her money stays hers.",
    "reopen": "Reopen {name}? Her keys work again.",
    "reissue": "Give {name} a new key? All keys, sessions and links that she has stop working at once.",
    "invite": "Make a link that signs {name} in, once, within a week? Whoever has it gets in.",
}
_DONE = {
    "registered": "Registered. Send her a link to sign in with, or give her a key.", "close": "Closed.",
    "reopen": "Reopened.", "booked": "The deposit is booked.", "paid": "The payout is booked.",
    "sent": "Noted as sent.", "bound": "The SuperNode is bound.", "bank": "Payouts go there from now on.",
}  # fmt: skip
_ACTIONS = {
    "sign-in.key": "signed in with a key", "sign-in.link": "signed in by link", "sign-out": "signed out",
    "task.post": "posted a task", "task.cancel": "cancelled a task", "task.finished": "finished the task",
    "task.cancelled": "ended the cancelled task", "task.expired": "ended the task at its deadline",
    "task.failed": "gave up the task", "task.recover": "cleared up the posting of",
    "bid.place": "placed a bid", "bid.withdraw": "withdrew a bid",
    "cap.set": "set a privacy cap", "model.download": "downloaded a model", "party.create": "registered a party",
    "party.open": "reopened a party", "party.close": "closed a party", "key.create": "made a key",
    "key.revoke": "revoked a key", "deposit": "booked a deposit", "audit.start": "started an audit",
    "ledger.verify": "verified the ledger", "node.bind": "bound a SuperNode", "node.unbind": "unbound a SuperNode",
    "flower.start": "started a Flower run", "key.reissue": "replaced all keys", "payout": "asked for a payout",
    "sign-in.oidc": "signed in", "session.end": "ended a session", "user.add": "entered somebody",
    "user.rights": "changed somebody's rights", "user.remove": "removed somebody",
    "dispute.open": "opened a dispute", "dispute.decide": "decided a dispute",
    "hook.create": "asked for notices", "hook.remove": "stopped notices", "bank.set": "changed where payouts go",
    "payout.file": "took the bank's file of payouts", "evaluation.add": "brought an evaluation set",
    "evaluation.remove": "removed an evaluation set",
    "payout.booked": "booked a payout", "payout.sent": "sent a payout", "payout.failed": "could not send a payout",
}  # fmt: skip


@router.get("/operator")
def show(visitor: Operator, reader: Typed, q: ByName = "", page_number: PageNumber = 1) -> HTMLResponse:
    """Everything at a glance; parties whose name holds `q`."""
    return _page(visitor, reader, q, page_number)


@router.get("/operator/health")
def health(visitor: Operator) -> HTMLResponse:
    """The headline figures again."""
    view = operator.status(*visitor.who)
    return fragment(visitor, "_health.html.j2", health=_health(view), alerts=view.alerts)


@router.get("/operator/log")
def show_log(visitor: Operator, q: ByName = "", before: Before = None) -> HTMLResponse:
    """Who did what, of everybody or of those whose name holds `q`."""
    found = operator.audit_log(*visitor.who, limit=_SHOWN, before=before, about=q or None)
    return page(visitor, "log.html.j2", title="Audit log", lines=found.items, more=found.next, q=q, actions=_ACTIONS)


@router.post("/operator/parties")
def register(visitor: OperatorWrites, reader: Form) -> Response:
    """Register somebody, once for each form, and go to her page."""
    with reader.refusals("party_name", {"name": "party_name"}):
        wanted = reader.build(PartyRequest, {"role": "role", "name": "party_name"})
        key = reader.once and derived_id("form", reader.once, wanted.model_dump_json())
        made = parties.create_party(*visitor.who, role=wanted.role, name=wanted.name, key=key)
        return _done(made.id, "registered")
    return _page(visitor, reader)


@router.get("/operator/parties/{party_id}")
def show_party(visitor: Operator, party_id: TaskId, reader: Typed) -> HTMLResponse:
    """One party: her money, her keys, what she did, and what can be done for her."""
    return _party(visitor, party_id, reader)


@router.post("/operator/parties/{party_id}/{action}")
def act(visitor: OperatorWrites, party_id: TaskId, action: Action, reader: Form) -> Response:
    """Close, reopen, give a new key or a link to sign in with; each is asked about first."""
    if not reader.text("confirmed"):
        return _ask(visitor, party_id, f"/operator/parties/{party_id}/{action}", _ASKED[action], reader)
    if action in ("close", "reopen"):
        parties.set_active(*visitor.who, party_id, active=action == "reopen")
        return _done(party_id, action)
    if action == "invite":
        parties.party_view(*visitor.who, party_id)
        link = sessions.link_path(sessions.make_link(visitor.broker, party_id, seconds=_INVITE_SECONDS))
        return _party(visitor, party_id, reader, link=link)
    made = parties.reissue_key(*visitor.who, party_id, key=reader.once)
    return _party(visitor, party_id, reader, key=made)


@router.get("/operator/runs/{task_id}")
async def show_run(request: Request, visitor: Operator, task_id: TaskId, log: Word = "") -> HTMLResponse:
    """A Flower task's run: whether it is at work, whose nodes are connected, and what Flower said; with `log`, also
    what the SuperLink has of the run itself, which takes a while."""
    broker = visitor.broker

    def work() -> HTMLResponse:
        found = runs.run_detail(broker, visitor.party, task_id)
        said = flower.said(broker.settings, found.run_id) if log else ()
        asked = flower.asked(broker.settings, task_id, found.attempt)
        return page(visitor, "run.html.j2", title="Flower run", found=found, asked=asked, said=said)

    return await get_gate(request).heavy.run(visitor.party.id, work) if log else await run_in_threadpool(work)


@router.post("/operator/deposits")
def deposit(visitor: OperatorWrites, reader: Form) -> Response:
    """Book money that a buyer paid in."""
    her, currency = reader.text("buyer"), visitor.broker.currency
    fields, amount = {"amount_micros": "amount"}, {"amount_micros": reader.micros("amount")}
    with reader.refusals("amount"):
        wanted = reader.build(DepositRequest, fields, {"amount": Unit(currency, MICROS)}, amount)
        if not reader.text("confirmed"):
            asked = f"Book {format_micros(wanted.amount_micros)} {currency} as paid in by {{name}}?"
            return _ask(visitor, her, "/operator/deposits", asked, reader)
        parties.deposit(*visitor.who, her, wanted.amount_micros, key=reader.once)
        return _done(her, "booked")
    return _party(visitor, her, reader)


@router.post("/operator/payouts")
def pay_out(visitor: OperatorWrites, reader: Form) -> Response:
    """Withdraw money of somebody and send it."""
    her, currency = reader.text("payee"), visitor.broker.currency
    fields = {"amount_micros": "amount", "reference": "reference"}
    values = {"amount_micros": reader.micros("amount"), "reference": reader.text("reference")}
    with reader.refusals("amount", fields):
        wanted = reader.build(PayoutRequest, fields, {"amount": Unit(currency, MICROS)}, values)
        check_visible("reference", wanted.reference)
        if not reader.text("confirmed"):
            asked = f"Pay out {format_micros(wanted.amount_micros)} {currency} to {{name}}?"
            return _ask(visitor, her, "/operator/payouts", asked, reader)
        payouts.pay_out(*visitor.who, her, wanted.amount_micros, reference=wanted.reference, key=reader.once)
        return _done(her, "paid")
    if "amount" in reader.errors:
        reader.errors["payout-amount"] = reader.errors.pop("amount")
    return _party(visitor, her, reader)


@router.get("/operator/payouts")
def show_payouts(visitor: Operator, before: Before = None, done: Word = "") -> HTMLResponse:
    """Money that is to be sent, what the bank's file would hold, and what was sent."""
    broker, party = visitor.who
    found, due = payouts.list_payouts(broker, party, limit=_SHOWN, before=before), transfers.transfers(broker, party)
    return page(
        visitor, "payouts.html.j2", title="Payouts", payouts=found.items, more=found.next, due=due,
        done=_DONE.get(done, ""), total=sum(one.amount_micros for one in due.ready),
        file=transfers.message_id(due.ready),
    )  # fmt: skip


@router.post("/operator/payouts/sent")
def all_sent(visitor: OperatorWrites, reader: Form) -> Response:
    """What was in the bank's file has left; only if the file would be the same now."""
    due = transfers.transfers(*visitor.who)
    if reader.text("file") != transfers.message_id(due.ready):
        raise Conflict("payouts were booked or sent since then: look at the list again, nothing was noted")
    if not reader.text("confirmed"):
        asked = f"Note that {count(len(due.ready), 'payout')} of the file were sent?"
        return ask(visitor, "/operator/payouts/sent", asked, "/operator/payouts", {"file": reader.text("file")})
    for one in due.ready:
        payouts.mark_sent(*visitor.who, one.id)
    return RedirectResponse("/operator/payouts?done=sent", 303)


@router.post("/operator/bank")
def set_bank(visitor: OperatorWrites, reader: Form) -> Response:
    """Where somebody's payouts go."""
    her, _, _ = parties.party_view(*visitor.who, reader.text("party"))
    with reader.refusals("iban", {"iban": "iban"}):
        iban = transfers.checked_iban(reader.text("iban")) if reader.text("iban") else ""
        if not reader.text("confirmed"):
            asked = f"Send payouts of {her.name} to {iban}?" if iban else f"Forget the account of {her.name}?"
            fields = {"iban": iban, "party": her.id}
            return ask(visitor, "/operator/bank", asked, f"/operator/parties/{her.id}", fields)
        transfers.set_iban(*visitor.who, her.id, iban)
        return _done(her.id, "bank")
    return _party(visitor, her.id, reader)


@router.post("/operator/payouts/{payout_id}/sent")
def payout_sent(visitor: OperatorWrites, payout_id: TaskId, reader: Form) -> Response:
    """The money has left."""
    found = payouts.get_payout(*visitor.who, payout_id)
    if not reader.text("confirmed"):
        asked = f"Note that {format_micros(found.amount_micros)} {found.currency} were sent to {{name}}?"
        return _ask(visitor, found.party_id, f"/operator/payouts/{payout_id}/sent", asked, reader)
    return _done(payouts.mark_sent(*visitor.who, payout_id).party_id, "sent")


serve(
    router,
    payouts_csv=Call("GET /operator/payouts.csv", payouts.payouts_csv, file="payouts.csv"),
    payouts_xml=Call("GET /operator/payouts.xml", transfers.transfer_file, file="payouts.xml"),
)


@router.post("/operator/nodes")
def bind(visitor: OperatorWrites, reader: Form) -> Response:
    """Say which SuperNode is an owner's."""
    owner, digits = reader.text("owner"), Unit(pattern="Digits only, as flwr supernode register printed them.")
    with reader.refusals("node_id"):
        wanted = reader.build(NodeRequest, {"node_id": "node_id"}, {"node_id": digits})
        if not reader.text("confirmed"):
            asked = f"Let SuperNode {wanted.node_id} sell for {{name}}? What it sells is counted against her cap."
            return _ask(visitor, owner, "/operator/nodes", asked, reader)
        parties.bind_node(*visitor.who, owner, node_id=wanted.node_id)
        return _done(owner, "bound")
    return _party(visitor, owner, reader)


def _done(party_id: str, what: str) -> RedirectResponse:
    return RedirectResponse(f"/operator/parties/{party_id}?done={what}", 303)


def _ask(visitor: Visitor, party_id: str, path: str, asked: str, reader: Reader) -> HTMLResponse:
    """Are you sure? With everything that was typed."""
    her, _, _ = parties.party_view(*visitor.who, party_id)
    fields = reader.kept(("idempotency_key", "buyer", "payee", "owner", *_TYPED))
    return ask(visitor, path, asked.format(name=her.name), f"/operator/parties/{her.id}", fields)


def _party(
    visitor: Visitor, party_id: str, reader: Reader, *, key: wire.NewKey | None = None, link: str = ""
) -> HTMLResponse:
    broker, party = visitor.who
    her, account, keys = parties.party_view(broker, party, party_id)
    return page(
        visitor, "party.html.j2", title=her.name, errors=reader.errors, her=her, account=account,
        reputation=parties.reputation_of(broker, party, party_id), done=_DONE.get(reader.text("done"), ""),
        keys=keys.items, key=key, link=link, typed=reader.kept(_TYPED), flower=bool(broker.settings.superlink),
        payouts=payouts.list_payouts(broker, party, party_id=party_id, limit=20).items, actions=_ACTIONS,
        lines=operator.audit_log(broker, party, limit=30, about=party_id).items, idempotency_key=new_id("form"),
    )  # fmt: skip


def _page(visitor: Visitor, reader: Reader, search: str = "", number: int = 1) -> HTMLResponse:
    broker, party = visitor.who
    found = parties.list_parties(broker, party, limit=_LISTED, search=search.strip(), start=(number - 1) * _LISTED)
    balances = broker.books.ledger.balances(one.id for one in found.items)
    latest, view = tasks.list_tasks(broker, party, limit=15).items, operator.status(broker, party)
    with broker.database.read() as session:
        names = operator.names_of(session, {one.buyer_id for one in latest}, (PartyRow,))
    return page(
        visitor,
        "operator.html.j2",
        title="Operator",
        errors=reader.errors,
        typed=reader.text("party_name"),
        health=_health(view),
        alerts=view.alerts,
        runs=latest,
        names=names,
        search=search,
        parties=[(one, balances.get(one.id, 0), found.reputations.get(one.id)) for one in found.items],
        disputes=disputes.list_disputes(broker, party, limit=5, is_open=True),
        pages=Pages(number, _LISTED, found.total, "/operator", "#parties", urlencode({"q": search}) if search else ""),
        lines=operator.audit_log(broker, party, limit=40).items,
        actions=_ACTIONS,
        idempotency_key=new_id("form"),
    )


def _health(view: wire.Operations) -> list[tuple[str, str, str]]:
    running, queued = view.tasks.get("running", 0), view.tasks.get("queued", 0)
    late = view.oldest_waiting_seconds or 0.0
    stuck = [run for run in view.runs if not run.at_work]
    waiting = "nothing is due" if view.next_round_in_seconds is None else (
        f"behind by {seconds(late)}" if late > 5 else "on time"
    )  # fmt: skip
    if stuck:
        waiting = f"{count(len(stuck), 'Flower task')} not played"
    ended = sum(view.tasks.values()) - running - queued
    audits = view.audits.get("running", 0) + view.audits.get("queued", 0)
    books = ("Agree", f"compared {when(view.reconciled_at)}") if view.reconciled_at else ("–", "not compared yet")
    if view.findings:
        first = view.findings[0]
        books = f"{len(view.findings)} do not agree", f"{first.rule} {first.subject}: {first.message}"
    roles = ", ".join(count(n, role) for role, n in sorted(view.parties.items()))
    nodes = [run.nodes for run in view.runs if run.nodes is not None]
    seen = f"{max(nodes)} of {count(view.runs[0].owners, 'node')} connected" if nodes else "no node seen yet"
    told = f"{stuck[0].words} {stuck[0].detail}".strip() if stuck else seen
    flower = [("Flower runs at work", f"{len(view.runs) - len(stuck)} of {len(view.runs)}", told)] if view.runs else []
    return [
        ("Worker", "At work" if view.worker_alive else "Missing", waiting),
        *flower,
        ("Tasks running", f"{running}", f"{queued} queued, {ended} ended"),
        ("Audits", f"{audits}", f"waiting or running; {view.audits.get('done', 0)} done"),
        ("Locked in tasks", money(view.locked_micros), f"{money(view.escrow_micros)} of it for awards under way"),
        ("Ledger", f"{view.ledger_entries:,}", f"entries, in {view.database}"),
        ("Bills and ledger", *books),
        ("Parties", f"{sum(view.parties.values()):,}", roles),
    ]
