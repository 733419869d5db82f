"""One's own account: people, keys, sessions and whom to tell, each listed and each to be ended here.

Forms lead to a page that can be loaded again; only a secret is answered with directly, because it is shown once.
"""

from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse, Response

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
    Typed,
    Unit,
    Visitor,
    page,
)

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Ended = Literal["keys", "sessions", "users", "hooks"]
_EVENTS = {
    "cap": "nine tenths of a privacy cap are used", "award": "an update was bought", "payment": "an award was paid",
    "payout": "a payout was sent", "task.ended": "a task ended", "task.failed": "a task failed",
    "dispute.opened": "a dispute was opened", "dispute.decided": "a dispute was decided",
}  # fmt: skip
_MAIL = {"email": Unit(pattern="An address such as somebody@example.org.")}


@router.get("/account")
def show(visitor: SignedIn, reader: Typed) -> HTMLResponse:
    """Everything at a glance."""
    return _page(visitor, reader)


@router.post("/account/keys")
def new_key(visitor: SignedInWrites, reader: Form) -> Response:
    """A new key, shown this once."""
    made = None
    with reader.refusals("label"):
        wanted = reader.build(KeyRequest, {"label": "label"})
        made = parties.issue_key(*visitor.who, visitor.party.id, label=wanted.label, key=reader.once)
    return _page(visitor, reader, key=made)


@router.post("/account/users")
def add_user(visitor: SignedInWrites, reader: Form) -> Response:
    """Enter somebody."""
    with reader.refusals("email"):
        wanted = reader.build(UserRequest, {"name": "person", "email": "email", "rights": "rights"}, _MAIL)
        users.add_user(*visitor.who, visitor.party.id, wanted, key=reader.once)
        return RedirectResponse("/account#people", 303)
    return _page(visitor, reader)


@router.post("/account/users/{user_id}")
def set_rights(visitor: SignedInWrites, user_id: TaskId, reader: Form) -> Response:
    """What somebody may do."""
    users.set_rights(*visitor.who, user_id, reader.build(RightsRequest, {"rights": "rights"}))
    return RedirectResponse("/account#people", 303)


@router.post("/account/hooks")
def add_hook(visitor: SignedInWrites, reader: Form) -> Response:
    """Tell an address; its secret can be seen this once."""
    values, made = {"address": reader.text("address"), "events": [one for one in EVENTS if reader.text(one)]}, None
    with reader.refusals("address"):
        wanted = reader.build(HookRequest, {"": "address"}, values=values)
        made = notices.create_hook(*visitor.who, visitor.party.id, wanted, key=reader.once)
    if reader.errors.pop("_", ""):
        reader.errors["address"] = "An address such as https://example.org/hook, and at least one event."
    return _page(visitor, reader, hook=made)


@router.post("/account/hooks/{hook_id}/test")
def try_hook(visitor: SignedInWrites, hook_id: TaskId) -> Response:
    """Send it something of no consequence."""
    notices.try_hook(*visitor.who, hook_id)
    return RedirectResponse("/account#hooks", 303)


@router.post("/account/bank")
def set_bank(visitor: SignedInWrites, reader: Form) -> Response:
    """Where one's payouts go."""
    with reader.refusals("iban", {"iban": "iban"}):
        transfers.set_iban(*visitor.who, visitor.party.id, reader.text("iban")[:60])
        return RedirectResponse("/account#bank", 303)
    return _page(visitor, reader)


@router.post("/account/{what}/{identifier}/end")
def end(visitor: SignedInWrites, what: Ended, identifier: TaskId) -> Response:
    """Revoke a key, end a session, remove a person or a hook."""
    ends: dict[str, Any] = {
        "keys": parties.revoke_key, "sessions": sessions.end_session, "users": users.remove_user,
        "hooks": notices.remove_hook,
    }  # fmt: skip
    ends[what](*visitor.who, identifier)
    return RedirectResponse(f"/account#{what}", 303)


def _page(visitor: Visitor, reader: Reader, **secrets: Any) -> HTMLResponse:
    (broker, party), people = visitor.who, users.list_users(*visitor.who).items
    done = any(secrets.values()) and not reader.errors
    cookie = visitor.auth.cookie if visitor.auth is not None else None
    return page(
        visitor, "account.html.j2", title="Account", errors=reader.errors,
        typed={} if done else reader.kept(("label", "person", "email", "address", "iban")),
        admin=party.rights == "admin", me=next((one.name for one in people if one.id == party.user_id), ""),
        events=_EVENTS, single=bool(broker.settings.oidc_issuer), me_party=parties.my_view(broker, party),
        keys=[one for one in parties.list_keys(broker, party).items if one.revoked_at is None],
        sessions=sessions.list_sessions(broker, party, cookie).items, users=people,
        hooks=notices.list_hooks(broker, party).items, told=notices.list_notices(broker, party, limit=10).items,
        idempotency_key=new_id("form"), **{"key": None, "hook": None} | secrets,
    )  # fmt: skip
