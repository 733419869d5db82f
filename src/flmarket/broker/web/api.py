"""The API's routes, below /api/v1: each is one call of an `office` function, and most are a line in a table of them.

What is in a path or a query has limits; numbers there are digits and nothing else.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, Signature, getdoc, signature
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
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
Open = Annotated[bool | None, Query(alias="open")]


# --- a route from a service -------------------------------------------------------------------------------------------

_IN_PATH: dict[Any, Any] = {str: Identifier, int: Index, int | None: Index}
_IN_QUERY: dict[tuple[str, Any], Any] = {
    ("limit", int): Limit, ("limit", int | None): Limit, ("start", int): Start, ("search", str): ByName,
    ("search", str | None): Search, ("before", str | None): Before, ("before", int | None): After,
    ("after", str | None): Before, ("about", str | None): Before, ("is_open", bool | None): Open,
}  # fmt: skip
_BY_NAME = Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Call:
    """A route that is one call of a service, and is described by what the service says it does, or by `about`.

    Of the `query` it takes what has a default here. A `body` is for services that take its fields one by one. An answer
    with a `secret` is not kept for repetitions; a `file` is the name under which a browser keeps the answer. What is
    `heavy` is asked in turn: a party has one under way and one that waits, and more are refused (429).
    """

    asked: str
    service: Callable[..., Any]
    query: Mapping[str, Any] = field(default_factory=dict)
    status: int | None = None
    body: type[requests.Request] | None = None
    secret: bool = False
    file: str = ""
    heavy: bool = False
    about: str = ""

    def endpoint(self) -> Callable[..., Any]:
        """What FastAPI calls. Its parameters are the service's, with limits on what is in path and query; broker and
        party are the caller's, and so is a `party_id` that is not in the path."""
        takes = dict(signature(self.service).parameters)
        told = [takes.pop(name) for name in ("broker", "party") if name in takes]
        mine = "party_id" in takes and takes["party_id"].default is Parameter.empty and "{party_id}" not in self.asked
        keyed = "key" in takes
        assert {*re.findall(r"{(\w+)}", self.asked), *self.query} <= takes.keys(), self.asked

        def call(http: Request, who: Caller, **given: Any) -> Any:
            if self.secret:
                keep_secret(http)
            key, body = given.pop("key", None), given.pop("body", ())
            given |= dict(body) | ({"party_id": who.party.id} if mine else {}) | ({"key": key} if keyed else {})
            found = self.service(*who[: len(told)], **given)
            return attachment(found, _media_type(self.file), self.file.format(**given)) if self.file else found

        async def in_turn(http: Request, who: Caller, **given: Any) -> Any:
            return await get_gate(http).heavy.run(who.party.id, lambda: call(http, who, **given))

        read = [one for one in signature(call).parameters.values() if one.name != "given"]
        for name, one in takes.items():
            if f"{{{name}}}" in self.asked:
                read.append(Parameter(name, _BY_NAME, annotation=_IN_PATH[one.annotation]))
            elif name in self.query:
                limits = _IN_QUERY[name, one.annotation]
                read.append(Parameter(name, _BY_NAME, annotation=limits, default=self.query[name]))
            elif isinstance(one.annotation, type) and issubclass(one.annotation, requests.Request):
                read.append(one.replace(kind=_BY_NAME))
        if self.body is not None:
            read.append(Parameter("body", _BY_NAME, annotation=self.body))
        if not self.asked.startswith("GET"):
            read.append(Parameter("key", _BY_NAME, annotation=IdempotencyKey, default=None))
        answers = Response if self.file else signature(self.service).return_annotation
        endpoint = in_turn if self.heavy else call
        vars(endpoint)["__signature__"] = Signature(read, return_annotation=answers)
        return endpoint


def _media_type(file: str) -> str:
    kind = file.rpartition(".")[2]
    return f"text/{kind}" if kind == "csv" else f"application/{kind}"


def serve(router: APIRouter, **calls: Call) -> None:
    """Add routes of these names."""
    for name, one in calls.items():
        method, path = one.asked.split()
        options: dict[str, Any] = {"status_code": one.status, "description": one.about or getdoc(one.service)}
        if one.file:
            options |= {"response_class": Response, "responses": file_response(_media_type(one.file))}
        router.add_api_route(path, one.endpoint(), methods=[method], name=name, **options)


async def _operator(who: Caller) -> None:
    """A dependency: the operator, whatever else a service asks for."""
    require(who.party, "operator")


def _section(tag: str, path: str = "", **options: Any) -> APIRouter:
    return APIRouter(prefix=API + path, tags=[tag], responses=PROBLEMS, **{"route_class": IdempotentRoute} | options)


# --- account ----------------------------------------------------------------------------------------------------------

account_routes = _section("account")
sign_in_routes = _section("account", route_class=OneThreadRoute)


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


serve(
    account_routes,
    me=Call("GET /me", parties.my_view),
    my_bank=Call("PUT /me/bank", transfers.set_iban, body=requests.BankRequest),
    my_account=Call("GET /me/account", parties.account),
    my_keys=Call("GET /me/keys", parties.list_keys),
    new_key=Call("POST /me/keys", parties.issue_key, status=201, body=requests.KeyRequest, secret=True),
    revoke_key=Call("DELETE /me/keys/{key_id}", parties.revoke_key),
)


@account_routes.get("/me/sessions")
def my_sessions(who: Caller, auth: CurrentAuth) -> wire.SessionPage:
    """Browsers that are signed in as me; for an admin, all of my party's."""
    return sessions.list_sessions(*who, auth.cookie)


serve(
    account_routes,
    end_session=Call("DELETE /me/sessions/{session_id}", sessions.end_session, status=204),
    my_users=Call("GET /me/users", users.list_users),
    add_user=Call("POST /me/users", users.add_user, status=201),
    set_rights=Call("PUT /me/users/{user_id}", users.set_rights),
    remove_user=Call("DELETE /me/users/{user_id}", users.remove_user),
    my_hooks=Call("GET /me/hooks", notices.list_hooks),
    new_hook=Call("POST /me/hooks", notices.create_hook, status=201, secret=True),
    remove_hook=Call("DELETE /me/hooks/{hook_id}", notices.remove_hook),
    try_hook=Call("POST /me/hooks/{hook_id}/test", notices.try_hook, status=202),
    my_notices=Call("GET /me/notices", notices.list_notices, {"limit": 100}),
    overview=Call("GET /market", market.overview, {"limit": 50, "start": 0, "search": ""}),
    get_listing=Call("GET /listings/{task_id}", listing.listing),
    get_terms=Call("GET /listings/{task_id}/terms", listing.terms_text, file="terms-{task_id}.json"),
    catalogue=Call("GET /catalogue", market.catalogue),
    ledger_entries=Call("GET /ledger", ledger.entries, {"search": None, "limit": 100, "before": None}),
    ledger_head=Call("GET /ledger/head", ledger.head),
)

# --- tasks ------------------------------------------------------------------------------------------------------------

task_routes = _section("tasks")
serve(
    task_routes,
    post_task=Call("POST /tasks", tasks.post_task, status=201),
    list_tasks=Call("GET /tasks", tasks.list_tasks, {"limit": 50, "before": None, "search": ""}),
    get_task=Call("GET /tasks/{task_id}", tasks.get_task),
    cancel_task=Call("POST /tasks/{task_id}/cancel", tasks.cancel_task),
    list_rounds=Call("GET /tasks/{task_id}/rounds", tasks.rounds, {"limit": 500, "start": 0}),
    get_round=Call("GET /tasks/{task_id}/rounds/{index}", tasks.round_detail, {"limit": 500, "start": 0}),
    get_receipts=Call("GET /tasks/{task_id}/rounds/{index}/receipts", tasks.receipts, {"limit": 50, "start": 0}),
    get_bill=Call("GET /tasks/{task_id}/bill", tasks.bill),
    bill_csv=Call("GET /tasks/{task_id}/bill.csv", tasks.bill_csv, file="bill-{task_id}.csv"),
    invoice_pdf=Call("GET /tasks/{task_id}/invoice.pdf", papers.invoice_pdf, file="invoice-{task_id}.pdf"),
    list_evaluations=Call("GET /evaluations", evaluations.list_sets),
    add_evaluation=Call("POST /evaluations", evaluations.add_set, status=201),
    remove_evaluation=Call("DELETE /evaluations/{set_id}", evaluations.remove_set, status=204),
    explore_budgets=Call("POST /explore", explore.explore, heavy=True),
)


@task_routes.get(
    "/tasks/{task_id}/model",
    response_class=Response,
    responses=file_response("application/octet-stream", "application/zip"),
)
def get_model(who: Caller, task_id: Identifier, format: ModelFormat = "npz") -> Response:
    """The trained model, for the buyer who paid for it."""
    file = tasks.model(*who, task_id, format=format)
    return attachment(file.content, file.media_type, file.name)


# --- owners -----------------------------------------------------------------------------------------------------------

owner_routes = _section("owners")
serve(
    owner_routes,
    list_offers=Call("GET /offers", offers.list_offers, {"limit": 50, "before": None}),
    get_offer=Call("GET /offers/{task_id}", offers.get_offer),
    get_bid=Call("GET /offers/{task_id}/bid", offers.my_bid),
    place_bid=Call("PUT /offers/{task_id}/bid", offers.place_bid),
    withdraw_bid=Call("DELETE /offers/{task_id}/bid", offers.withdraw_bid),
    statement=Call("GET /me/statement", statements.statement, {"limit": 200, "start": 0}),
    statement_csv=Call("GET /me/statement.csv", statements.statement_csv, file="statement.csv"),
    statement_pdf=Call("GET /me/statement.pdf", papers.statement_pdf, file="statement.pdf"),
    privacy=Call("GET /me/privacy", statements.privacy),
    set_cap=Call("PUT /me/privacy", statements.set_cap, body=requests.CapRequest),
    bid_help=Call("POST /bid-help", explore.bid_help, heavy=True),
)


# --- disputes and audits ----------------------------------------------------------------------------------------------

dispute_routes = _section("disputes")
audit_routes = _section("audits")
serve(
    dispute_routes,
    open_dispute=Call("POST /disputes", disputes.open_dispute, status=201),
    list_disputes=Call("GET /disputes", disputes.list_disputes, {"limit": 50, "before": None, "is_open": None}),
    get_dispute=Call("GET /disputes/{dispute_id}", disputes.get_dispute),
    decide_dispute=Call("POST /disputes/{dispute_id}/decision", disputes.decide),
)
serve(
    audit_routes,
    start_audit=Call("POST /audits", audits.start_audit, status=202),
    list_audits=Call("GET /audits", audits.list_audits, {"limit": 50}),
    get_audit=Call("GET /audits/{audit_id}", audits.get_audit),
)

# --- operator ---------------------------------------------------------------------------------------------------------

operator_routes = _section("operator", "/operator", dependencies=[Depends(_operator)])
serve(
    operator_routes,
    status=Call("GET /status", operator.status),
    list_parties=Call("GET /parties", parties.list_parties, {"limit": 100, "after": None, "search": ""}),
    create_party=Call("POST /parties", parties.create_party, status=201, body=requests.PartyRequest),
    close_party=Call(
        "POST /parties/{party_id}/close",
        partial(parties.set_active, active=False),
        about="Keys and sessions of the party stop working; her money stays hers.",
    ),
    reopen_party=Call(
        "POST /parties/{party_id}/reopen",
        partial(parties.set_active, active=True),
        about="Keys and sessions of the party work again.",
    ),
    bind_node=Call("PUT /parties/{party_id}/node", parties.bind_node, body=requests.NodeRequest),
    unbind_node=Call("DELETE /parties/{party_id}/node", parties.unbind_node),
    issue_key=Call(
        "POST /parties/{party_id}/keys", parties.issue_key, status=201, body=requests.KeyRequest, secret=True
    ),
    user_for=Call("POST /parties/{party_id}/users", users.add_user, status=201),
    hook_for=Call("POST /parties/{party_id}/hooks", notices.create_hook, status=201, secret=True),
    deposit=Call("POST /parties/{party_id}/deposits", parties.deposit, status=201, body=requests.DepositRequest),
    pay_out=Call("POST /parties/{party_id}/payouts", payouts.pay_out, status=201, body=requests.PayoutRequest),
    list_payouts=Call("GET /payouts", payouts.list_payouts, {"limit": 100, "before": None}),
    payout_sent=Call("POST /payouts/{payout_id}/sent", payouts.mark_sent),
    payouts_csv=Call("GET /payouts.csv", payouts.payouts_csv, file="payouts.csv"),
    payouts_xml=Call("GET /payouts.xml", transfers.transfer_file, file="payouts.xml"),
    bank_of=Call("PUT /parties/{party_id}/bank", transfers.set_iban, body=requests.BankRequest),
    audit_log=Call("GET /audit-log", operator.audit_log, {"limit": 100, "before": None, "about": None}),
    verify_ledger=Call("POST /ledger/verify", ledger.verify),
)


@operator_routes.get("/runs/{task_id}")
def flower_run(who: Caller, task_id: Identifier) -> wire.RunDetail:
    """A Flower task's latest run: whether it is at work, whose nodes it saw, and what Flower said when it was asked."""
    found = runs.run_detail(*who, task_id)
    return replace(found, said=flower.asked(who.broker.settings, task_id, found.attempt))


ROUTERS = (
    sign_in_routes, account_routes, task_routes, owner_routes, dispute_routes, audit_routes, operator_routes,
)  # fmt: skip
