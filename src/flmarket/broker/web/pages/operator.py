"""The operator's pages: queues and health, parties and their money, and who did what.

Every action that moves money or ends somebody's access is asked about first, is done once for each form, and leads to a
page that can be loaded again; only a secret is answered with directly, because it is shown once.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from flmarket.broker.errors import Conflict, NotFound
from flmarket.broker.office import disputes, operator, parties, payouts, runs, sessions, tasks, transfers
from flmarket.broker.requests import DepositRequest, NodeRequest, PartyRequest, PayoutRequest, check_visible
from flmarket.broker.stamps import derived_id, new_id
from flmarket.broker.tables import PartyRow
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
    Unit,
    Visitor,
    ask,
    fragment,
    page,
    refused,
)
from flmarket.broker.web.pages.rendering import remedy, seconds, when
from flmarket.broker.web.problems import attachment
from flmarket.broker.work.flower import runs as flower
from flmarket.client import wire
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.ledger import MICROS, format_micros
from flmarket.report.formatting import count, money

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN, _LISTED = 100, 25
_INVITE_SECONDS = 7 * 86_400.0
_TYPED = ("amount", "reference", "node_id", "iban")
NOTHING: Mapping[str, str] = {}
Action = Literal["close", "reopen", "reissue", "invite"]
Typed = Annotated[str, Query(max_length=80)]
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
def show(visitor: Operator, q: ByName = "", page_number: PageNumber = 1, party_name: Typed = "") -> HTMLResponse:
    """Everything at a glance; parties whose name holds `q`."""
    return _page(visitor, {}, search=q, number=page_number, typed=party_name)


@router.get("/operator/health")
def health(visitor: Operator) -> HTMLResponse:
    """The headline figures again."""
    view = operator.status(visitor.broker, visitor.party)
    return fragment(visitor, "_health.html.j2", health=_health(view), alerts=view.alerts)


@router.get("/operator/log")
def show_log(visitor: Operator, q: ByName = "", before: Before = None) -> HTMLResponse:
    """Who did what, of everybody or of those whose name holds `q`."""
    found = operator.audit_log(visitor.broker, visitor.party, limit=_SHOWN, before=before, about=q or None)
    return page(visitor, "log.html.j2", title="Audit log", lines=found.items, more=found.next, q=q, actions=_ACTIONS)


@router.post("/operator/parties")
def register(visitor: OperatorWrites, reader: Form) -> Response:
    """Register somebody, once for each form, and go to her page."""
    fields = {"role": "role", "name": "party_name"}
    wanted = reader.build(PartyRequest, {"role": reader.text("role"), "name": reader.text("party_name")}, fields)
    if wanted is not None:
        form = reader.text("idempotency_key")
        key = derived_id("form", form, wanted.model_dump_json()) if form else None
        try:
            made = parties.create_party(visitor.broker, visitor.party, role=wanted.role, name=wanted.name, key=key)
            return _done(made.id, "registered")
        except InvalidInput as error:
            reader.errors["party_name"] = remedy(error)
    return _page(visitor, reader.errors, typed=reader.text("party_name"))


@router.get("/operator/parties/{party_id}")
def show_party(visitor: Operator, party_id: TaskId, request: Request, done: Typed = "") -> HTMLResponse:
    """One party: her money, her keys, what she did, and what can be done for her."""
    return _party(visitor, party_id, {}, done=_DONE.get(done, ""), typed=Reader(request.query_params).kept(_TYPED))


@router.post("/operator/parties/{party_id}/{action}")
def act(visitor: OperatorWrites, party_id: TaskId, action: Action, reader: Form) -> Response:
    """Close, reopen, give a new key or a link to sign in with; each is asked about first."""
    broker, party = visitor.broker, visitor.party
    if not reader.text("confirmed"):
        return _ask(visitor, party_id, f"/operator/parties/{party_id}/{action}", _ASKED[action], reader)
    if action in ("close", "reopen"):
        parties.set_active(broker, party, party_id, active=action == "reopen")
        return _done(party_id, action)
    if action == "invite":
        parties.party_view(broker, party, party_id)
        link = sessions.link_path(sessions.make_link(broker, party_id, seconds=_INVITE_SECONDS))
        return _party(visitor, party_id, {}, link=link)
    made = parties.reissue_key(broker, party, party_id, key=reader.text("idempotency_key")[:80] or None)
    return _party(visitor, party_id, {}, key=made)


@router.get("/operator/runs/{task_id}")
async def show_run(request: Request, visitor: Operator, task_id: TaskId, log: Typed = "") -> HTMLResponse:
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
    return _move_money(visitor, reader, reader.text("buyer"), "/operator/deposits")


@router.post("/operator/payouts")
def pay_out(visitor: OperatorWrites, reader: Form) -> Response:
    """Withdraw money of somebody and send it."""
    return _move_money(visitor, reader, reader.text("payee"), "/operator/payouts")


@router.get("/operator/payouts")
def show_payouts(visitor: Operator, before: Before = None, done: Typed = "") -> HTMLResponse:
    """Money that is to be sent, what the bank's file would hold, and what was sent."""
    broker, party = visitor.broker, visitor.party
    found, due = payouts.list_payouts(broker, party, limit=_SHOWN, before=before), transfers.transfers(broker, party)
    return page(
        visitor, "payouts.html.j2", title="Payouts", payouts=found.items, more=found.next, due=due,
        done=_DONE.get(done, ""), total=sum(one.amount_micros for one in due.ready),
        file=transfers.message_id(due.ready),
    )  # fmt: skip


@router.get("/operator/payouts.xml")
def transfer_file(visitor: Operator) -> Response:
    """What is to be sent, for the bank."""
    text = transfers.transfer_file(visitor.broker, visitor.party)
    return attachment(text, "application/xml", "payouts.xml")


@router.post("/operator/payouts/sent")
def all_sent(visitor: OperatorWrites, reader: Form) -> Response:
    """What was in the bank's file has left; only if the file would be the same now."""
    broker, party = visitor.broker, visitor.party
    due = transfers.transfers(broker, party)
    if reader.text("file") != transfers.message_id(due.ready):
        raise Conflict("payouts were booked or sent since then: look at the list again, nothing was noted")
    if not reader.text("confirmed"):
        asked = f"Note that {count(len(due.ready), 'payout')} of the file were sent?"
        return ask(visitor, "/operator/payouts/sent", asked, "/operator/payouts", {"file": reader.text("file")})
    for one in due.ready:
        payouts.mark_sent(broker, party, one.id)
    return RedirectResponse("/operator/payouts?done=sent", 303)


@router.post("/operator/bank")
def set_bank(visitor: OperatorWrites, reader: Form) -> Response:
    """Where somebody's payouts go."""
    her, _, _ = parties.party_view(visitor.broker, visitor.party, reader.text("party"))
    try:
        iban = transfers.checked_iban(reader.text("iban")) if reader.text("iban") else ""
        if not reader.text("confirmed"):
            asked = f"Send payouts of {her.name} to {iban}?" if iban else f"Forget the account of {her.name}?"
            fields = {"iban": iban, "party": her.id}
            return ask(visitor, "/operator/bank", asked, f"/operator/parties/{her.id}", fields)
        transfers.set_iban(visitor.broker, visitor.party, her.id, iban)
        return _done(her.id, "bank")
    except InvalidInput as error:
        reader.errors["iban"] = remedy(error)
    return _party(visitor, her.id, reader.errors, typed=reader.kept(_TYPED))


@router.post("/operator/payouts/{payout_id}/sent")
def payout_sent(visitor: OperatorWrites, payout_id: TaskId, reader: Form) -> Response:
    """The money has left."""
    found = payouts.get_payout(visitor.broker, visitor.party, payout_id)
    if not reader.text("confirmed"):
        asked = f"Note that {format_micros(found.amount_micros)} {found.currency} were sent to {{name}}?"
        return _ask(visitor, found.party_id, f"/operator/payouts/{payout_id}/sent", asked, reader)
    made = payouts.mark_sent(visitor.broker, visitor.party, payout_id)
    return _done(made.party_id, "sent")


@router.get("/operator/payouts.csv")
def download_payouts(visitor: Operator) -> Response:
    """All payouts, for the bank."""
    text = payouts.payouts_csv(visitor.broker, visitor.party)
    return attachment(text, "text/csv; charset=utf-8", "payouts.csv")


@router.post("/operator/nodes")
def bind(visitor: OperatorWrites, reader: Form) -> Response:
    """Say which SuperNode is an owner's."""
    units = {"node_id": Unit(pattern="Digits only, as flwr supernode register printed them.")}
    wanted = reader.build(NodeRequest, {"node_id": reader.text("node_id")}, {"node_id": "node_id"}, units)
    owner = reader.text("owner")
    if wanted is not None and not reader.text("confirmed"):
        asked = f"Let SuperNode {wanted.node_id} sell for {{name}}? What it sells is counted against her cap."
        return _ask(visitor, owner, "/operator/nodes", asked, reader)
    if wanted is not None:
        try:
            parties.bind_node(visitor.broker, visitor.party, owner, node_id=wanted.node_id)
            return _done(owner, "bound")
        except FlmarketError as error:
            reader.errors["node_id"] = refused(error)
    return _party(visitor, owner, reader.errors, typed=reader.kept(_TYPED))


def _move_money(visitor: Visitor, reader: Reader, party_id: str, path: str) -> Response:
    out = path.endswith("payouts")
    field = "payout-amount" if out else "amount"
    values: dict[str, Any] = {"amount_micros": reader.micros("amount")}
    if out:
        values["reference"] = reader.text("reference")
    units = {"amount": Unit(visitor.broker.currency, MICROS)}
    fields = {"amount_micros": "amount", "reference": "reference"}
    wanted: DepositRequest | PayoutRequest | None = (
        reader.build(PayoutRequest, values, fields, units) if out
        else reader.build(DepositRequest, values, fields, units)
    )  # fmt: skip
    try:
        if wanted is not None and out:
            check_visible("reference", reader.text("reference"))
        if wanted is not None and not reader.text("confirmed"):
            asked = f"{'Pay out' if out else 'Book'} {format_micros(wanted.amount_micros)} {visitor.broker.currency}"
            return _ask(visitor, party_id, path, f"{asked} {'to' if out else 'as paid in by'} {{name}}?", reader)
        if wanted is not None:
            key, amount = reader.text("idempotency_key")[:80] or None, wanted.amount_micros
            if out:
                note = reader.text("reference")
                payouts.pay_out(visitor.broker, visitor.party, party_id, amount, reference=note, key=key)
            else:
                parties.deposit(visitor.broker, visitor.party, party_id, amount, key=key)
            return _done(party_id, "paid" if out else "booked")
    except InvalidInput as error:
        reader.errors[error.field] = remedy(error)
    except NotFound:
        raise
    except FlmarketError as error:
        reader.errors["amount"] = refused(error)
    if "amount" in reader.errors:
        reader.errors[field] = reader.errors.pop("amount")
    return _party(visitor, party_id, reader.errors, typed=reader.kept(_TYPED))


def _done(party_id: str, what: str) -> RedirectResponse:
    return RedirectResponse(f"/operator/parties/{party_id}?done={what}", 303)


def _ask(visitor: Visitor, party_id: str, path: str, asked: str, reader: Reader) -> HTMLResponse:
    """Are you sure? With everything that was typed."""
    her, _, _ = parties.party_view(visitor.broker, visitor.party, party_id)
    fields = reader.kept(("idempotency_key", "buyer", "payee", "owner", *_TYPED))
    return ask(visitor, path, asked.format(name=her.name), f"/operator/parties/{her.id}", fields)


def _party(
    visitor: Visitor, party_id: str, errors: dict[str, str], *, done: str = "", typed: Mapping[str, str] = NOTHING,
    key: wire.NewKey | None = None, link: str = "",
) -> HTMLResponse:  # fmt: skip
    broker, party = visitor.broker, visitor.party
    her, account, keys = parties.party_view(broker, party, party_id)
    return page(
        visitor, "party.html.j2", title=her.name, status=422 if errors else 200, errors=errors, her=her, done=done,
        reputation=parties.reputation_of(broker, party, party_id), account=account,
        keys=keys.items, key=key, link=link, typed=typed, flower=bool(broker.settings.superlink),
        payouts=payouts.list_payouts(broker, party, party_id=party_id, limit=20).items, actions=_ACTIONS,
        lines=operator.audit_log(broker, party, limit=30, about=party_id).items, idempotency_key=new_id("form"),
    )  # fmt: skip


def _page(
    visitor: Visitor, errors: dict[str, str], *, search: str = "", number: int = 1, typed: str = ""
) -> HTMLResponse:
    broker, party = visitor.broker, visitor.party
    found = parties.list_parties(broker, party, limit=_LISTED, search=search.strip(), start=(number - 1) * _LISTED)
    balances = broker.books.ledger.balances(one.id for one in found.items)
    latest, view = tasks.list_tasks(broker, party, limit=15).items, operator.status(broker, party)
    with broker.database.read() as session:
        names = operator.names_of(session, {one.buyer_id for one in latest}, (PartyRow,))
    return page(
        visitor,
        "operator.html.j2",
        title="Operator",
        status=422 if errors else 200,
        errors=errors,
        typed=typed,
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
