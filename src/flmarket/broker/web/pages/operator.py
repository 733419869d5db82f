"""The operator's page: queues and health, parties and their money, and who did what."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.broker.office import operator, parties, tasks
from flmarket.broker.requests import DepositRequest, NodeRequest, PartyRequest
from flmarket.broker.stamps import new_id
from flmarket.broker.web.pages.context import Form, Operator, OperatorWrites, PageRoute, Visitor, fragment, page
from flmarket.broker.web.pages.rendering import seconds, when
from flmarket.client import wire
from flmarket.errors import FlmarketError
from flmarket.report.formatting import count, money

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 100
_ACTIONS = {
    "sign-in.key": "signed in with a key", "sign-in.link": "signed in by link", "sign-out": "signed out",
    "task.post": "posted a task", "task.cancel": "cancelled a task", "task.finished": "task finished",
    "task.cancelled": "task cancelled", "task.expired": "task expired", "task.failed": "task failed",
    "task.recover": "task recovered", "bid.place": "placed a bid", "bid.withdraw": "withdrew a bid",
    "cap.set": "set a privacy cap", "model.download": "downloaded a model", "party.create": "registered a party",
    "party.open": "reopened a party", "party.close": "closed a party", "key.create": "made a key",
    "key.revoke": "revoked a key", "deposit": "booked a deposit", "audit.start": "started an audit",
    "ledger.verify": "verified the ledger", "node.bind": "bound a SuperNode", "node.unbind": "unbound a SuperNode",
    "flower.start": "started a Flower run",
}  # fmt: skip


@router.get("/operator")
def show(visitor: Operator) -> HTMLResponse:
    """Everything at a glance."""
    return _page(visitor, {})


@router.get("/operator/health")
def health(visitor: Operator) -> HTMLResponse:
    """The headline figures again."""
    return fragment(visitor, "_health.html.j2", health=_health(operator.status(visitor.broker, visitor.party)))


@router.post("/operator/parties")
def register(visitor: OperatorWrites, reader: Form) -> Response:
    """Register somebody and show her key, this once."""
    fields = {"role": "role", "name": "party_name"}
    wanted = reader.build(PartyRequest, {"role": reader.text("role"), "name": reader.text("party_name")}, fields)
    if wanted is None:
        return _page(visitor, reader.errors)
    made = parties.create_party(visitor.broker, visitor.party, role=wanted.role, name=wanted.name)
    key = parties.issue_key(visitor.broker, visitor.party, made.id, label="first key")
    return _page(visitor, {}, key=key, registered=made.name)


@router.post("/operator/deposits")
def deposit(visitor: OperatorWrites, reader: Form) -> Response:
    """Book money that a buyer paid in."""
    wanted = reader.build(DepositRequest, {"amount_micros": reader.micros("amount")}, {"amount_micros": "amount"})
    if wanted is not None:
        try:
            key = reader.text("idempotency_key")[:80] or None
            parties.deposit(visitor.broker, visitor.party, reader.text("buyer"), wanted.amount_micros, key=key)
            return RedirectResponse("/operator#money", 303)
        except FlmarketError as error:
            reader.errors["buyer"] = f"{error}"
    return _page(visitor, reader.errors)


@router.post("/operator/nodes")
def bind(visitor: OperatorWrites, reader: Form) -> Response:
    """Say which SuperNode is an owner's."""
    wanted = reader.build(NodeRequest, {"node_id": reader.text("node_id")}, {"node_id": "node_id"})
    if wanted is not None:
        try:
            parties.bind_node(visitor.broker, visitor.party, reader.text("owner"), node_id=wanted.node_id)
            return RedirectResponse("/operator#nodes", 303)
        except FlmarketError as error:
            reader.errors["node_id"] = f"{error}"
    return _page(visitor, reader.errors)


def _page(
    visitor: Visitor, errors: dict[str, str], *, key: wire.NewKey | None = None, registered: str = ""
) -> HTMLResponse:
    broker, party = visitor.broker, visitor.party
    everybody = parties.list_parties(broker, party, limit=_SHOWN)
    balances = broker.books.ledger.balances()
    return page(
        visitor,
        "operator.html.j2",
        title="Operator",
        status=422 if errors else 200,
        errors=errors,
        health=_health(operator.status(broker, party)),
        runs=tasks.list_tasks(broker, party, limit=25).items,
        names={one.id: one.name for one in everybody.items},
        parties=[(one, balances.get(one.id, 0)) for one in everybody.items],
        more_parties=everybody.next is not None,
        lines=operator.audit_log(broker, party, limit=_SHOWN).items,
        actions=_ACTIONS,
        key=key,
        registered=registered,
        flower=bool(broker.settings.superlink),
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
        ("In escrow now", money(view.escrow_micros), "for awards not yet resolved"),
        ("Ledger", f"{view.ledger_entries:,}", f"entries, in {view.database}"),
        ("Bills and ledger", *books),
        ("Parties", f"{sum(view.parties.values()):,}", roles),
    ]
