"""One's own account: people, keys, sessions and whom to tell, each listed and each to be ended here.

Forms lead to a page that can be loaded again; only a secret is answered with directly, because it is shown once.
"""

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.broker.core import Party
from flmarket.broker.office import notices, parties, sessions, transfers, users
from flmarket.broker.requests import EVENTS, HookRequest, KeyRequest, RightsRequest, UserRequest
from flmarket.broker.stamps import new_id
from flmarket.broker.web.pages.context import (
    Form,
    PageRoute,
    Reader,
    SignedIn,
    SignedInWrites,
    TaskId,
    Unit,
    Visitor,
    page,
    refused,
)
from flmarket.broker.web.pages.rendering import remedy
from flmarket.errors import FlmarketError, InvalidInput

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Ended = Literal["keys", "sessions", "users", "hooks"]
_EVENTS = {
    "cap": "nine tenths of a privacy cap are used", "award": "an update was bought", "payment": "an award was paid",
    "payout": "a payout was sent", "task.ended": "a task ended", "task.failed": "a task failed",
    "dispute.opened": "a dispute was opened", "dispute.decided": "a dispute was decided",
}  # fmt: skip
_MAIL = {"email": Unit(pattern="An address such as somebody@example.org.")}


@router.get("/account")
def show(visitor: SignedIn, request: Request) -> HTMLResponse:
    """Everything at a glance; what was typed before a session ended is still there."""
    return _page(visitor, Reader(request.query_params))


@router.post("/account/keys")
def new_key(visitor: SignedInWrites, reader: Form) -> Response:
    """A new key, shown this once."""
    wanted = reader.build(KeyRequest, {"label": reader.text("label")}, {"label": "label"})
    made, form = None, reader.text("idempotency_key")[:80] or None
    if wanted is not None:
        try:
            made = parties.issue_key(visitor.broker, visitor.party, visitor.party.id, label=wanted.label, key=form)
        except FlmarketError as error:
            reader.errors["label"] = refused(error)
    return _page(visitor, reader, key=made)


@router.post("/account/users")
def add_user(visitor: SignedInWrites, reader: Form) -> Response:
    """Enter somebody."""
    fields = {"name": "person", "email": "email", "rights": "rights"}
    values = {name: reader.text(field) for name, field in fields.items()}
    wanted = reader.build(UserRequest, values, fields, _MAIL)
    if wanted is not None:
        form = reader.text("idempotency_key")[:80] or None
        try:
            users.add_user(visitor.broker, visitor.party, visitor.party.id, wanted, key=form)
            return RedirectResponse("/account#people", 303)
        except FlmarketError as error:
            reader.errors["email"] = refused(error)
    return _page(visitor, reader)


@router.post("/account/users/{user_id}")
def set_rights(visitor: SignedInWrites, user_id: TaskId, reader: Form) -> Response:
    """What somebody may do."""
    wanted = reader.build(RightsRequest, {"rights": reader.text("rights")}, {"rights": "rights"})
    if wanted is not None:
        users.set_rights(visitor.broker, visitor.party, user_id, wanted)
    return RedirectResponse("/account#people", 303)


@router.post("/account/hooks")
def add_hook(visitor: SignedInWrites, reader: Form) -> Response:
    """Tell an address; its secret can be seen this once."""
    events = [event for event in EVENTS if reader.text(event)]
    wanted = reader.build(HookRequest, {"address": reader.text("address"), "events": events}, {"": "address"})
    made = None
    if wanted is not None:
        form = reader.text("idempotency_key")[:80] or None
        try:
            made = notices.create_hook(visitor.broker, visitor.party, visitor.party.id, wanted, key=form)
        except FlmarketError as error:
            reader.errors["address"] = refused(error)
    elif "address" not in reader.errors:
        reader.errors["address"] = "An address such as https://example.org/hook, and at least one event."
    return _page(visitor, reader, hook=made)


@router.post("/account/hooks/{hook_id}/test")
def try_hook(visitor: SignedInWrites, hook_id: TaskId) -> Response:
    """Send it something of no consequence."""
    notices.try_hook(visitor.broker, visitor.party, hook_id)
    return RedirectResponse("/account#hooks", 303)


@router.post("/account/bank")
def set_bank(visitor: SignedInWrites, reader: Form) -> Response:
    """Where one's payouts go."""
    try:
        transfers.set_iban(visitor.broker, visitor.party, visitor.party.id, reader.text("iban")[:60])
        return RedirectResponse("/account#bank", 303)
    except InvalidInput as error:
        reader.errors["iban"] = remedy(error)
    return _page(visitor, reader)


@router.post("/account/{what}/{identifier}/end")
def end(visitor: SignedInWrites, what: Ended, identifier: TaskId) -> Response:
    """Revoke a key, end a session, remove a person or a hook."""
    ends: dict[str, Any] = {
        "keys": parties.revoke_key, "sessions": sessions.end_session, "users": users.remove_user,
        "hooks": notices.remove_hook,
    }  # fmt: skip
    ends[what](visitor.broker, visitor.party, identifier)
    return RedirectResponse(f"/account#{what}", 303)


def _page(visitor: Visitor, reader: Reader | None = None, **secrets: Any) -> HTMLResponse:
    broker, party = visitor.broker, visitor.party
    errors = {} if reader is None else reader.errors
    again = reader is not None and (errors or not any(secrets.values()))
    typed = reader.kept(("label", "person", "email", "address", "iban")) if reader is not None and again else {}
    cookie = visitor.auth.cookie if visitor.auth is not None else None
    return page(
        visitor, "account.html.j2", title="Account", status=422 if errors else 200, errors=errors, typed=typed,
        admin=party.rights == "admin", me=_name(visitor, party), events=_EVENTS,
        single=bool(broker.settings.oidc_issuer), me_party=parties.my_view(broker, party),
        keys=[one for one in parties.list_keys(broker, party).items if one.revoked_at is None],
        sessions=sessions.list_sessions(broker, party, cookie).items, users=users.list_users(broker, party).items,
        hooks=notices.list_hooks(broker, party).items, told=notices.list_notices(broker, party, limit=10).items,
        idempotency_key=new_id("form"), **{"key": None, "hook": None} | secrets,
    )  # fmt: skip


def _name(visitor: Visitor, party: Party) -> str:
    return next((one.name for one in users.list_users(visitor.broker, party).items if one.id == party.user_id), "")
