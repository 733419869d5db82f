"""The API's routes, below /api/v1: each is one call of an `office` function.

What is in a path or a query has limits; numbers there are digits and nothing else.
"""

import re
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BeforeValidator

from flmarket.broker import requests
from flmarket.broker.core import require
from flmarket.broker.office import (
    audits,
    disputes,
    evaluations,
    explore,
    ledger,
    listing,
    market,
    notices,
    offers,
    operator,
    papers,
    parties,
    payouts,
    runs,
    sessions,
    statements,
    tasks,
    transfers,
    users,
)
from flmarket.broker.office.tasks import ModelFormat
from flmarket.broker.web.auth import (
    Caller,
    CurrentAuth,
    CurrentBroker,
    clear_cookie,
    client_address,
    get_gate,
    set_cookie,
)
from flmarket.broker.web.idempotency import IdempotencyKey, IdempotentRoute, keep_secret
from flmarket.broker.web.problems import PROBLEMS, attachment, file_response
from flmarket.broker.web.routes import API, OneThreadRoute
from flmarket.broker.work.flower import runs as flower
from flmarket.client import wire

# --- parameters -------------------------------------------------------------------------------------------------------

_ID = r"^[A-Za-z0-9_-]{1,64}$"
_NEXT = "`next` of the page before."


def _digits(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\d{1,18}", value):
        raise ValueError("a whole number, in digits")
    return value


Identifier = Annotated[str, Path(pattern=_ID, description="An id as the API returns it.")]
Index = Annotated[int, BeforeValidator(_digits), Path(ge=0, le=1_000_000, description="A round, from 0.")]
Limit = Annotated[int, BeforeValidator(_digits), Query(ge=1, le=500, description="Items at most.")]
Before = Annotated[str | None, Query(pattern=_ID, description=_NEXT)]
Start = Annotated[int, BeforeValidator(_digits), Query(ge=0, le=10**15, description="Where to begin.")]
After = Annotated[int | None, BeforeValidator(_digits), Query(ge=0, le=10**15, description=_NEXT)]
ByName = Annotated[str, Query(max_length=80, description="Part of a name, or the beginning of an id.")]
Search = Annotated[str | None, Query(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9_/.-]*$")]


# --- account ----------------------------------------------------------------------------------------------------------

account_routes = APIRouter(prefix=API, tags=["account"], route_class=IdempotentRoute, responses=PROBLEMS)
sign_in_routes = APIRouter(prefix=API, tags=["account"], route_class=OneThreadRoute, responses=PROBLEMS)


@sign_in_routes.post("/session", status_code=201)
def sign_in(request: Request, response: Response, broker: CurrentBroker, body: requests.SignInRequest) -> wire.Session:
    """Exchange a key for a session cookie. Writes by cookie need the returned token as `X-CSRF-Token`."""
    get_gate(request).sign_ins.take(client_address(request))
    signed_in = sessions.sign_in(broker, body.key)
    set_cookie(response, broker.settings, signed_in)
    return signed_in.view


@account_routes.delete("/session", status_code=204)
def sign_out(response: Response, broker: CurrentBroker, auth: CurrentAuth, key: IdempotencyKey = None) -> None:
    """End the session of this cookie; with a key instead of a cookie there is nothing to end."""
    if auth.cookie is not None:
        sessions.sign_out(broker, auth.party, auth.cookie)
        clear_cookie(response, broker.settings)


@account_routes.get("/me")
def me(who: Caller) -> wire.Party:
    """Who I am."""
    return parties.my_view(*who)


@account_routes.put("/me/bank")
def my_bank(who: Caller, body: requests.BankRequest, key: IdempotencyKey = None) -> wire.Party:
    """Where my payouts go."""
    return transfers.set_iban(*who, who.party.id, body.iban)


@account_routes.get("/me/account")
def my_account(who: Caller) -> wire.Account:
    """My money: the balance, and what running tasks hold in escrow."""
    return parties.account(*who)


@account_routes.get("/me/keys")
def my_keys(who: Caller) -> wire.KeyPage:
    """My keys, without their secrets."""
    return parties.list_keys(*who)


@account_routes.post("/me/keys", status_code=201)
def new_key(request: Request, who: Caller, body: requests.KeyRequest, key: IdempotencyKey = None) -> wire.NewKey:
    """A new key for me; its secret is shown this once."""
    keep_secret(request)
    return parties.issue_key(*who, who.party.id, label=body.label, key=key)


@account_routes.delete("/me/keys/{key_id}")
def revoke_key(who: Caller, key_id: Identifier, key: IdempotencyKey = None) -> wire.Key:
    """Revoke one of my keys."""
    return parties.revoke_key(*who, key_id)


@account_routes.get("/me/sessions")
def my_sessions(who: Caller, auth: CurrentAuth) -> wire.SessionPage:
    """Browsers that are signed in as me; for an admin, all of my party's."""
    return sessions.list_sessions(*who, auth.cookie)


@account_routes.delete("/me/sessions/{session_id}", status_code=204)
def end_session(who: Caller, session_id: Identifier, key: IdempotencyKey = None) -> None:
    """Sign one of them out."""
    sessions.end_session(*who, session_id)


@account_routes.get("/me/users")
def my_users(who: Caller) -> wire.UserPage:
    """The people of my party."""
    return users.list_users(*who)


@account_routes.post("/me/users", status_code=201)
def add_user(who: Caller, body: requests.UserRequest, key: IdempotencyKey = None) -> wire.User:
    """Enter somebody, who then signs in with the operator's identity provider."""
    return users.add_user(*who, who.party.id, body, key=key)


@account_routes.put("/me/users/{user_id}")
def set_rights(who: Caller, user_id: Identifier, body: requests.RightsRequest, key: IdempotencyKey = None) -> wire.User:
    """What she may do: admin, member or viewer."""
    return users.set_rights(*who, user_id, body)


@account_routes.delete("/me/users/{user_id}")
def remove_user(who: Caller, user_id: Identifier, key: IdempotencyKey = None) -> wire.User:
    """She is signed out and cannot come back."""
    return users.remove_user(*who, user_id)


@account_routes.get("/me/hooks")
def my_hooks(who: Caller) -> wire.HookPage:
    """Whom I want told of what happens to me."""
    return notices.list_hooks(*who)


@account_routes.post("/me/hooks", status_code=201)
def new_hook(request: Request, who: Caller, body: requests.HookRequest, key: IdempotencyKey = None) -> wire.NewHook:
    """Tell an address of mine: signed, and again until it is taken (2xx). The answer holds the secret to check with."""
    keep_secret(request)
    return notices.create_hook(*who, who.party.id, body, key=key)


@account_routes.delete("/me/hooks/{hook_id}")
def remove_hook(who: Caller, hook_id: Identifier, key: IdempotencyKey = None) -> wire.Hook:
    """Tell it nothing more."""
    return notices.remove_hook(*who, hook_id)


@account_routes.post("/me/hooks/{hook_id}/test", status_code=202)
def try_hook(who: Caller, hook_id: Identifier, key: IdempotencyKey = None) -> wire.Notice:
    """Tell it something of no consequence."""
    return notices.try_hook(*who, hook_id, key=key)


@account_routes.get("/me/notices")
def my_notices(who: Caller, limit: Limit = 100) -> wire.NoticePage:
    """What was told to my hooks, or waits to be."""
    return notices.list_notices(*who, limit=limit)


@account_routes.get("/market")
def overview(who: Caller, limit: Limit = 50, start: Start = 0, search: ByName = "") -> wire.Market:
    """The market at a glance, and its tasks, those under way first, or those whose name holds `search`."""
    return market.overview(*who, limit=limit, start=start, search=search)


@account_routes.get("/listings/{task_id}")
def get_listing(who: Caller, task_id: Identifier) -> wire.Listing:
    """Any task's terms, and how far it has come."""
    return listing.listing(*who, task_id)


@account_routes.get("/listings/{task_id}/terms", response_class=Response, responses=file_response("application/json"))
def get_terms(who: Caller, task_id: Identifier) -> Response:
    """The text of its terms, whose SHA-256 an owner accepts."""
    return attachment(listing.terms_text(who.broker, task_id), "application/json", f"terms-{task_id}.json")


@account_routes.get("/catalogue")
def catalogue(who: Caller) -> wire.Catalogue:
    """The names that a task may use, and what each auction claims."""
    return market.catalogue(who.broker)


@account_routes.get("/ledger")
def ledger_entries(who: Caller, search: Search = None, limit: Limit = 100, before: After = None) -> wire.LedgerPage:
    """Entries of the ledger's log that concern me (the operator: all), newest first."""
    return ledger.entries(*who, search=search, limit=limit, before=before)


@account_routes.get("/ledger/head")
def ledger_head(who: Caller) -> wire.LedgerHead:
    """What commits to the whole log: keep it, and the past cannot change unseen."""
    return ledger.head(who.broker)


# --- tasks ------------------------------------------------------------------------------------------------------------

task_routes = APIRouter(prefix=API, tags=["tasks"], route_class=IdempotentRoute, responses=PROBLEMS)


@task_routes.post("/tasks", status_code=201)
def post_task(who: Caller, body: requests.TaskRequest, key: IdempotencyKey = None) -> wire.Task:
    """Post a task. Its whole budget goes into escrow; what is not spent comes back."""
    return tasks.post_task(*who, body, key=key)


@task_routes.get("/tasks")
def list_tasks(who: Caller, limit: Limit = 50, before: Before = None, search: ByName = "") -> wire.TaskPage:
    """My tasks (the operator: all), newest first, or those whose name holds `search`."""
    return tasks.list_tasks(*who, limit=limit, before=before, search=search)


@task_routes.get("/tasks/{task_id}")
def get_task(who: Caller, task_id: Identifier) -> wire.Task:
    """One task."""
    return tasks.get_task(*who, task_id)


@task_routes.post("/tasks/{task_id}/cancel")
def cancel_task(who: Caller, task_id: Identifier, key: IdempotencyKey = None) -> wire.Task:
    """Stop after the round being played; the rest of the escrow comes back."""
    return tasks.cancel_task(*who, task_id)


@task_routes.get("/tasks/{task_id}/rounds")
def list_rounds(who: Caller, task_id: Identifier, limit: Limit = 500, start: Start = 0) -> wire.RoundPage:
    """The rounds so far."""
    return tasks.rounds(*who, task_id, limit=limit, start=start)


@task_routes.get("/tasks/{task_id}/rounds/{index}")
def get_round(who: Caller, task_id: Identifier, index: Index, limit: Limit = 500, start: Start = 0) -> wire.RoundDetail:
    """One round and its awards."""
    return tasks.round_detail(*who, task_id, index, limit=limit, start=start)


@task_routes.get("/tasks/{task_id}/rounds/{index}/receipts")
def get_receipts(
    who: Caller, task_id: Identifier, index: Index, limit: Limit = 50, start: Start = 0
) -> wire.ReceiptPage:
    """The ledger's receipts of a round, each with proofs; an owner gets her own."""
    return tasks.receipts(*who, task_id, index, limit=limit, start=start)


@task_routes.get("/tasks/{task_id}/bill")
def get_bill(who: Caller, task_id: Identifier) -> wire.Bill:
    """What was paid for."""
    return tasks.bill(*who, task_id)


@task_routes.get("/tasks/{task_id}/bill.csv", response_class=Response, responses=file_response("text/csv"))
def bill_csv(who: Caller, task_id: Identifier) -> Response:
    """The same as a table."""
    return attachment(tasks.bill_csv(*who, task_id), "text/csv", f"bill-{task_id}.csv")


@task_routes.get("/tasks/{task_id}/invoice.pdf", response_class=Response, responses=file_response("application/pdf"))
def invoice_pdf(who: Caller, task_id: Identifier) -> Response:
    """The same to print: an invoice once the task has ended, an account of it so far before."""
    return attachment(papers.invoice_pdf(*who, task_id), "application/pdf", f"invoice-{task_id}.pdf")


@task_routes.get(
    "/tasks/{task_id}/model",
    response_class=Response,
    responses=file_response("application/octet-stream", "application/zip"),
)
def get_model(who: Caller, task_id: Identifier, format: ModelFormat = "npz") -> Response:
    """The trained model, for the buyer who paid for it."""
    file = tasks.model(*who, task_id, format=format)
    return attachment(file.content, file.media_type, file.name)


@task_routes.get("/evaluations")
def list_evaluations(who: Caller) -> wire.EvaluationPage:
    """My evaluation sets."""
    return evaluations.list_sets(*who)


@task_routes.post("/evaluations", status_code=201)
def add_evaluation(who: Caller, body: requests.EvaluationRequest, key: IdempotencyKey = None) -> wire.EvaluationSet:
    """Records of my own to test models on; a task names the set as `broker.evaluation`."""
    return evaluations.add_set(*who, body, key=key)


@task_routes.delete("/evaluations/{set_id}", status_code=204)
def remove_evaluation(who: Caller, set_id: Identifier, key: IdempotencyKey = None) -> None:
    """Forget a set that no task was posted with."""
    evaluations.remove_set(*who, set_id)


@task_routes.post("/explore")
async def explore_budgets(
    request: Request, who: Caller, body: requests.ExploreRequest, key: IdempotencyKey = None
) -> wire.Exploration:
    """What different budgets would buy, before posting a task. Nothing is posted and nothing is paid.

    A party has one under way and one that waits; more are refused (429).
    """
    return await get_gate(request).heavy.run(who.party.id, lambda: explore.explore(*who, body))


# --- owners -----------------------------------------------------------------------------------------------------------

owner_routes = APIRouter(prefix=API, tags=["owners"], route_class=IdempotentRoute, responses=PROBLEMS)


@owner_routes.get("/offers")
def list_offers(who: Caller, limit: Limit = 50, before: Before = None) -> wire.OfferPage:
    """Tasks that I can sell to."""
    return offers.list_offers(*who, limit=limit, before=before)


@owner_routes.get("/offers/{task_id}")
def get_offer(who: Caller, task_id: Identifier) -> wire.Offer:
    """One offer, with my place and my bid."""
    return offers.get_offer(*who, task_id)


@owner_routes.get("/offers/{task_id}/bid")
def get_bid(who: Caller, task_id: Identifier) -> wire.Bid:
    """My standing bid."""
    return offers.my_bid(*who, task_id)


@owner_routes.put("/offers/{task_id}/bid")
def place_bid(who: Caller, task_id: Identifier, body: requests.BidRequest, key: IdempotencyKey = None) -> wire.Bid:
    """Bid, or replace my bid. It counts in every round until I replace or withdraw it."""
    return offers.place_bid(*who, task_id, body)


@owner_routes.delete("/offers/{task_id}/bid")
def withdraw_bid(who: Caller, task_id: Identifier, key: IdempotencyKey = None) -> wire.Bid:
    """Stay out of later rounds."""
    return offers.withdraw_bid(*who, task_id)


@owner_routes.get("/me/statement")
def statement(who: Caller, limit: Limit = 200, start: Start = 0) -> wire.Statement:
    """What I sold, earned and gave up in all, and my awards, oldest first."""
    return statements.statement(*who, limit=limit, start=start)


@owner_routes.get("/me/statement.csv", response_class=Response, responses=file_response("text/csv"))
def statement_csv(who: Caller) -> Response:
    """The same as a table."""
    return attachment(statements.statement_csv(*who), "text/csv", "statement.csv")


@owner_routes.get("/me/statement.pdf", response_class=Response, responses=file_response("application/pdf"))
def statement_pdf(who: Caller) -> Response:
    """The same to print."""
    return attachment(papers.statement_pdf(*who), "application/pdf", "statement.pdf")


@owner_routes.get("/me/privacy")
def privacy(who: Caller) -> wire.Privacy:
    """My total ε, spent and left."""
    return statements.privacy(*who)


@owner_routes.put("/me/privacy")
def set_cap(who: Caller, body: requests.CapRequest, key: IdempotencyKey = None) -> wire.Privacy:
    """Set the most ε that I give up in total; not below what I gave up already."""
    return statements.set_cap(*who, body.cap_epsilon_total, unit=body.unit, delta=body.delta)


@owner_routes.post("/bid-help")
async def bid_help(
    request: Request, who: Caller, body: requests.BidHelpRequest, key: IdempotencyKey = None
) -> wire.BidAdvice:
    """What a bid would earn, and what its ε means on top of all I gave up before. Nothing is placed."""
    return await get_gate(request).heavy.run(who.party.id, lambda: explore.bid_help(*who, body))


# --- disputes ---------------------------------------------------------------------------------------------------------

dispute_routes = APIRouter(prefix=API, tags=["disputes"], route_class=IdempotentRoute, responses=PROBLEMS)


@dispute_routes.post("/disputes", status_code=201)
def open_dispute(who: Caller, body: requests.DisputeRequest, key: IdempotencyKey = None) -> wire.Dispute:
    """Dispute an award that I won or pay for. While its price is in escrow it is frozen there until the operator
    decides; an award that has ended stays as it is, and the operator may credit the price from her own money."""
    return disputes.open_dispute(*who, body)


@dispute_routes.get("/disputes")
def list_disputes(
    who: Caller, limit: Limit = 50, before: Before = None, is_open: Annotated[bool | None, Query(alias="open")] = None
) -> wire.DisputePage:
    """Disputes about my awards (the operator: all), newest first; or only those that are open, or are not."""
    return disputes.list_disputes(*who, limit=limit, before=before, is_open=is_open)


@dispute_routes.get("/disputes/{dispute_id}")
def get_dispute(who: Caller, dispute_id: Identifier) -> wire.Dispute:
    """One dispute."""
    return disputes.get_dispute(*who, dispute_id)


@dispute_routes.post("/disputes/{dispute_id}/decision")
def decide_dispute(
    who: Caller, dispute_id: Identifier, body: requests.DecisionRequest, key: IdempotencyKey = None
) -> wire.Dispute:
    """The operator's: who gets the price, once and for all."""
    return disputes.decide(*who, dispute_id, body)


# --- audits -----------------------------------------------------------------------------------------------------------

audit_routes = APIRouter(prefix=API, tags=["audits"], route_class=IdempotentRoute, responses=PROBLEMS)


@audit_routes.post("/audits", status_code=202)
def start_audit(who: Caller, body: requests.AuditRequest, key: IdempotencyKey = None) -> wire.Audit:
    """Run the auditor on a mechanism, in the background."""
    return audits.start_audit(*who, body, key=key)


@audit_routes.get("/audits")
def list_audits(who: Caller, limit: Limit = 50) -> wire.AuditPage:
    """My audits."""
    return audits.list_audits(*who, limit=limit)


@audit_routes.get("/audits/{audit_id}")
def get_audit(who: Caller, audit_id: Identifier) -> wire.Audit:
    """One audit: its progress, and then its verdict."""
    return audits.get_audit(*who, audit_id)


# --- operator ---------------------------------------------------------------------------------------------------------

operator_routes = APIRouter(
    prefix=f"{API}/operator", tags=["operator"], route_class=IdempotentRoute, responses=PROBLEMS
)


@operator_routes.get("/status")
def status(who: Caller) -> wire.Operations:
    """Queues and health."""
    return operator.status(*who)


@operator_routes.get("/parties")
def list_parties(who: Caller, limit: Limit = 100, after: Before = None, search: ByName = "") -> wire.PartyPage:
    """All parties, or those whose name holds `search`."""
    return parties.list_parties(*who, limit=limit, after=after, search=search)


@operator_routes.post("/parties", status_code=201)
def create_party(who: Caller, body: requests.PartyRequest, key: IdempotencyKey = None) -> wire.Party:
    """Somebody new."""
    return parties.create_party(*who, role=body.role, name=body.name, key=key)


@operator_routes.post("/parties/{party_id}/close")
def close_party(who: Caller, party_id: Identifier, key: IdempotencyKey = None) -> wire.Party:
    """Keys and sessions of the party stop working; her money stays hers."""
    return parties.set_active(*who, party_id, active=False)


@operator_routes.post("/parties/{party_id}/reopen")
def reopen_party(who: Caller, party_id: Identifier, key: IdempotencyKey = None) -> wire.Party:
    """Keys and sessions of the party work again."""
    return parties.set_active(*who, party_id, active=True)


@operator_routes.put("/parties/{party_id}/node")
def bind_node(who: Caller, party_id: Identifier, body: requests.NodeRequest, key: IdempotencyKey = None) -> wire.Party:
    """Which SuperNode is an owner's, so that she can sell in Flower tasks."""
    return parties.bind_node(*who, party_id, node_id=body.node_id, number=body.number)


@operator_routes.delete("/parties/{party_id}/node")
def unbind_node(who: Caller, party_id: Identifier, key: IdempotencyKey = None) -> wire.Party:
    """The owner takes no part in further rounds of Flower tasks."""
    return parties.unbind_node(*who, party_id)


@operator_routes.post("/parties/{party_id}/keys", status_code=201)
def issue_key(
    request: Request, who: Caller, party_id: Identifier, body: requests.KeyRequest, key: IdempotencyKey = None
) -> wire.NewKey:
    """A key for a party; its secret is shown this once."""
    require(who.party, "operator")
    keep_secret(request)
    return parties.issue_key(*who, party_id, label=body.label, key=key)


@operator_routes.post("/parties/{party_id}/users", status_code=201)
def user_for(who: Caller, party_id: Identifier, body: requests.UserRequest, key: IdempotencyKey = None) -> wire.User:
    """A person of a party's, such as its first admin."""
    require(who.party, "operator")
    return users.add_user(*who, party_id, body, key=key)


@operator_routes.post("/parties/{party_id}/hooks", status_code=201)
def hook_for(
    request: Request, who: Caller, party_id: Identifier, body: requests.HookRequest, key: IdempotencyKey = None
) -> wire.NewHook:
    """A webhook or a mail address of a party's."""
    require(who.party, "operator")
    keep_secret(request)
    return notices.create_hook(*who, party_id, body, key=key)


@operator_routes.post("/parties/{party_id}/deposits", status_code=201)
def deposit(
    who: Caller, party_id: Identifier, body: requests.DepositRequest, key: IdempotencyKey = None
) -> wire.Account:
    """Book money that a buyer paid in."""
    return parties.deposit(*who, party_id, body.amount_micros, key=key)


@operator_routes.post("/parties/{party_id}/payouts", status_code=201)
def pay_out(who: Caller, party_id: Identifier, body: requests.PayoutRequest, key: IdempotencyKey = None) -> wire.Payout:
    """Withdraw money of a party and send it."""
    return payouts.pay_out(*who, party_id, body.amount_micros, reference=body.reference, key=key)


@operator_routes.get("/payouts")
def list_payouts(who: Caller, limit: Limit = 100, before: After = None) -> wire.PayoutPage:
    """Money that left the market, or is about to."""
    return payouts.list_payouts(*who, limit=limit, before=before)


@operator_routes.post("/payouts/{payout_id}/sent")
def payout_sent(who: Caller, payout_id: Identifier, key: IdempotencyKey = None) -> wire.Payout:
    """Say that the money has left."""
    return payouts.mark_sent(*who, payout_id)


@operator_routes.get("/payouts.csv", response_class=Response, responses=file_response("text/csv"))
def payouts_csv(who: Caller) -> Response:
    """All payouts as a table."""
    return attachment(payouts.payouts_csv(*who), "text/csv", "payouts.csv")


@operator_routes.get("/payouts.xml", response_class=Response, responses=file_response("application/xml"))
def payouts_xml(who: Caller) -> Response:
    """Payouts that are still to be sent, as a file for the bank (ISO 20022, pain.001.001.09)."""
    return attachment(transfers.transfer_file(*who), "application/xml", "payouts.xml")


@operator_routes.put("/parties/{party_id}/bank")
def bank_of(who: Caller, party_id: Identifier, body: requests.BankRequest, key: IdempotencyKey = None) -> wire.Party:
    """Where a party's payouts go."""
    require(who.party, "operator")
    return transfers.set_iban(*who, party_id, body.iban)


@operator_routes.get("/runs/{task_id}")
def flower_run(who: Caller, task_id: Identifier) -> wire.RunDetail:
    """A Flower task's latest run: whether it is at work, whose nodes it saw, and what Flower said when it was asked."""
    found = runs.run_detail(*who, task_id)
    return replace(found, said=flower.asked(who.broker.settings, task_id, found.attempt))


@operator_routes.get("/audit-log")
def audit_log(who: Caller, limit: Limit = 100, before: After = None, about: Before = None) -> wire.LogPage:
    """Who did what, newest first."""
    return operator.audit_log(*who, limit=limit, before=before, about=about)


@operator_routes.post("/ledger/verify")
def verify_ledger(who: Caller, key: IdempotencyKey = None) -> wire.LedgerCheck:
    """Replay the whole log and say what was found."""
    return ledger.verify(*who)


ROUTERS = (
    sign_in_routes, account_routes, task_routes, owner_routes, dispute_routes, audit_routes, operator_routes,
)  # fmt: skip
