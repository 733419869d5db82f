"""Oneself: who I am, my keys, my session, my money; and the market as everybody sees it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from flmarket.broker.api.idempotency import IdempotencyKey, IdempotentRoute, keep_secret
from flmarket.broker.api.parameters import After, Identifier, Limit, Search
from flmarket.broker.api.problems import PROBLEMS
from flmarket.broker.auth import (
    CurrentAuth,
    CurrentBroker,
    CurrentParty,
    clear_cookie,
    client_address,
    get_gate,
    set_cookie,
)
from flmarket.broker.schemas import KeyRequest, SignInRequest
from flmarket.broker.services import ledger, market, parties, sessions
from flmarket.broker.services.views import (
    AccountView,
    Catalogue,
    KeyPage,
    KeyView,
    LedgerHead,
    LedgerPage,
    MarketView,
    NewKey,
    PartyView,
    SessionView,
)

__all__ = ["router", "sign_in_router"]

router = APIRouter(tags=["account"], route_class=IdempotentRoute, responses=PROBLEMS)
sign_in_router = APIRouter(tags=["account"], responses=PROBLEMS)


@sign_in_router.post("/session", status_code=201)
def sign_in(request: Request, response: Response, broker: CurrentBroker, body: SignInRequest) -> SessionView:
    """Exchange a key for a session cookie. Writes by cookie need the returned token as `X-CSRF-Token`."""
    get_gate(request).sign_ins.take(client_address(request))
    signed_in = sessions.sign_in(broker, body.key)
    set_cookie(response, broker.settings, signed_in)
    return signed_in.view


@router.delete("/session", status_code=204)
def sign_out(response: Response, broker: CurrentBroker, auth: CurrentAuth, key: IdempotencyKey = None) -> None:
    """End the session of this cookie; with a key instead of a cookie there is nothing to end."""
    if auth.cookie is not None:
        sessions.sign_out(broker, auth.party, auth.cookie)
        clear_cookie(response, broker.settings)


@router.get("/me")
def me(broker: CurrentBroker, party: CurrentParty) -> PartyView:
    """Who I am."""
    return parties.my_view(broker, party)


@router.get("/me/account")
def my_account(broker: CurrentBroker, party: CurrentParty) -> AccountView:
    """My money: the balance, and what running tasks hold in escrow."""
    return parties.account(broker, party)


@router.get("/me/keys")
def my_keys(broker: CurrentBroker, party: CurrentParty) -> KeyPage:
    """My keys, without their secrets."""
    return parties.list_keys(broker, party)


@router.post("/me/keys", status_code=201)
def new_key(
    request: Request, broker: CurrentBroker, party: CurrentParty, body: KeyRequest, key: IdempotencyKey = None
) -> NewKey:
    """A new key for me; its secret is shown this once."""
    keep_secret(request)
    return parties.issue_key(broker, party, party.id, label=body.label)


@router.delete("/me/keys/{key_id}")
def revoke_key(broker: CurrentBroker, party: CurrentParty, key_id: Identifier, key: IdempotencyKey = None) -> KeyView:
    """Revoke one of my keys."""
    return parties.revoke_key(broker, party, key_id)


@router.get("/market")
def overview(broker: CurrentBroker, party: CurrentParty) -> MarketView:
    """The market at a glance."""
    return market.overview(broker, party)


@router.get("/catalogue")
def catalogue(broker: CurrentBroker, party: CurrentParty) -> Catalogue:
    """The names that a task may use, and what each auction claims."""
    return market.catalogue(broker)


@router.get("/ledger")
def ledger_entries(
    broker: CurrentBroker, party: CurrentParty, search: Search = None, limit: Limit = 100, before: After = None
) -> LedgerPage:
    """Entries of the ledger's log that concern me (the operator: all), newest first."""
    return ledger.entries(broker, party, search=search, limit=limit, before=before)


@router.get("/ledger/head")
def ledger_head(broker: CurrentBroker, party: CurrentParty) -> LedgerHead:
    """What commits to the whole log: keep it, and the past cannot change unseen."""
    return ledger.head(broker)
