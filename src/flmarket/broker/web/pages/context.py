"""Who looks at a page, what every page shows around its content, how a refusal becomes a page, and how forms are read.

Pages sign in by cookie only. A write needs the session's token too, as a form field or, from HTMX, as a header; the
check is here, once, for all of them. A form arrives as text and is read into the same strict requests that the API
takes; a `Reader` collects what is wrong by field, so that a page can show everything at once and the text as typed.
"""

import logging
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlencode

from fastapi import Depends, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.database import is_transient
from flmarket.broker.demo import DemoParty
from flmarket.broker.errors import BrokerError, Forbidden, TooMany, Unauthenticated
from flmarket.broker.office import sessions
from flmarket.broker.tables import Role
from flmarket.broker.web.auth import (
    COOKIE,
    SAFE,
    Auth,
    check_csrf,
    check_rights,
    client_address,
    get_broker,
    get_gate,
    masked,
)
from flmarket.broker.web.pages.rendering import remedy, render, sentence
from flmarket.broker.web.routes import Handler, OneThreadRoute
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.ledger import MICROS

log = logging.getLogger("flmarket.broker")
TaskId = Annotated[str, Path(max_length=60)]
PageNumber = Annotated[int, Query(alias="page", ge=1, le=100_000)]
ByName = Annotated[str, Query(max_length=80)]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Pages:
    """Which part of a long list a page shows: its number, how many are on one and in all, and where others are."""

    number: int
    size: int
    of: int
    path: str
    anchor: str = ""
    query: str = ""

    @property
    def last(self) -> int:
        """The number of the last page."""
        return max(1, -(-self.of // self.size))

    def href(self, number: int) -> str:
        """Where another page is."""
        return f"{self.path}?{f'{self.query}&' if self.query else ''}page={number}{self.anchor}"


@dataclass(frozen=True)
class Visitor:
    """Somebody at a page, signed in or not."""

    broker: Broker
    path: str
    auth: Auth | None
    people: tuple[DemoParty, ...] = ()  # of the demonstration, to look around as

    @property
    def party(self) -> Party:
        """Who is signed in; Unauthenticated if nobody is."""
        if self.auth is None:
            raise Unauthenticated("sign in first")
        return self.auth.party

    @property
    def known(self) -> Party | None:
        """Who is signed in, if anybody is."""
        return None if self.auth is None else self.auth.party

    @property
    def who(self) -> tuple[Broker, Party]:
        """Broker and party, as services take them first."""
        return self.broker, self.party

    @property
    def csrf(self) -> str:
        """The session's token against forged requests."""
        return masked(self.auth.session.csrf) if self.auth is not None and self.auth.session is not None else ""


_NAVIGATION: dict[Role | None, tuple[tuple[str, str], ...]] = {
    None: (("Market", "/"), ("Ledger", "/ledger")),
    "buyer": (("Market", "/"), ("My tasks", "/tasks"), ("Post a task", "/tasks/new"), ("Audit", "/audit"),
              ("Ledger", "/ledger")),
    "owner": (("Market", "/"), ("My data", "/owner"), ("Bid helper", "/owner/bid"), ("Audit", "/audit"),
              ("Ledger", "/ledger")),
    "operator": (("Market", "/"), ("Tasks", "/tasks"), ("Operator", "/operator"), ("Audit", "/audit"),
                 ("Ledger", "/ledger")),
}  # fmt: skip


def identify(request: Request) -> Visitor:
    """Whoever asks, by cookie, once for each request; an old cookie is as good as none."""
    known: Visitor | None = getattr(request.state, "visitor", None)
    if known is not None:
        return known
    auth, broker, cookie = None, get_broker(request), request.cookies.get(COOKIE)
    if cookie:
        with suppress(Unauthenticated):
            auth = request.state.auth = Auth(*sessions.session_of(broker, cookie), cookie)
    made = Visitor(broker, request.url.path, auth, getattr(request.app.state, "demo_people", ()))
    request.state.visitor = made
    return made


# Dependencies are coroutines that do not wait, as `routes` wants them.
async def anyone(request: Request) -> Visitor:
    """A dependency: whoever asks, and not too often."""
    visitor, gate = identify(request), get_gate(request)
    if visitor.auth is None:
        gate.strangers.take(client_address(request))
    else:
        gate.parties.take(visitor.party.id)
    return visitor


AnyVisitor = Annotated[Visitor, Depends(anyone)]


def member(*roles: Role) -> Callable[[Visitor], Coroutine[Any, Any, Visitor]]:
    """A dependency: somebody signed in, with one of these roles if any are given."""

    async def check(visitor: AnyVisitor) -> Visitor:
        require(visitor.party, *(roles or ("buyer", "owner", "operator")))
        return visitor

    return check


@dataclass(frozen=True)
class Unit:
    """What is typed into a field: `size` of what a request counts, which is called `small`, make one; `pattern` says
    what a text may hold."""

    name: str = ""
    size: float = 1.0
    small: str = ""
    pattern: str = "Only letters, digits and signs in one line."


NO_UNITS: Mapping[str, Unit] = {}
NO_FIELDS: Mapping[str, str] = {}
_BOUNDS = {
    "greater_than": ("gt", "More than"), "greater_than_equal": ("ge", "At least"),
    "less_than": ("lt", "Less than"), "less_than_equal": ("le", "At most"),
}  # fmt: skip


def _explained(kind: str, given: Mapping[str, Any], message: str, unit: Unit | None) -> str:
    """What is wrong with a field, in its own unit; never a pattern, never how it is written inside."""
    unit = unit or Unit()
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        amount, name = float(given[key]) / unit.size, unit.name
        if unit.small and amount < 0.01:
            amount, name = float(given[key]), unit.small
        return f"{words} {_figure(amount)}{f' {name}' if name else ''}."
    if kind in ("missing", "none_required") or (kind == "string_too_short" and given.get("min_length") == 1):
        return "Fill this in."
    if kind == "string_too_long":
        return f"At most {given['max_length']} characters."
    if kind == "string_pattern_mismatch":
        return unit.pattern
    if kind in ("literal_error", "enum"):
        return f"One of {str(given['expected']).replace(' or ', ', ').replace(chr(39), '')}."
    if kind == "value_error":
        reason = message.removeprefix("Value error, ")
        return f"{reason[:1].upper()}{reason[1:]}."
    return "This is not accepted here."


def _figure(value: float) -> str:
    """A bound as people write numbers: 0.000001, never 1e-06."""
    text = f"{value:,.10g}"
    return f"{value:,.12f}".rstrip("0").rstrip(".") if "e" in text else text


_INCOMPLETE = "the form cannot be read as it is"


class Incomplete(FlmarketError):
    """A form cannot be read; its `Reader` knows what is wrong."""


class Reader:
    """Reads the fields of one form; `errors` collects what was wrong, by field name."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = form
        self.errors: dict[str, str] = {}

    def text(self, name: str, default: str = "") -> str:
        """The field without surrounding blanks."""
        value = self._form.get(name)
        return value.strip() if isinstance(value, str) else default

    def number(self, name: str, default: str = "") -> float:
        """A finite decimal number; 0 and an error otherwise."""
        try:
            value = float(self.text(name, default))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self.errors[name] = "This should be a number."
            return 0.0
        return value

    def whole(self, name: str, default: str = "") -> int:
        """A whole number; 0 and an error otherwise."""
        try:
            return int(self.text(name, default))
        except ValueError:
            self.errors[name] = "This should be a whole number."
            return 0

    def micros(self, name: str, default: str = "") -> int:
        """An amount in currency units as whole micro-units, exactly; 0 and an error otherwise."""
        try:
            amount = Decimal(self.text(name, default)) * MICROS
        except ArithmeticError:  # no number, or one too large even for a Decimal
            amount = Decimal("NaN")
        if not amount.is_finite() or amount != amount.to_integral_value() or abs(amount) > 10**18:
            self.errors[name] = "This should be an amount with at most six decimals."
            return 0
        return int(amount)

    @property
    def once(self) -> str | None:
        """What a form carries so that it is done once."""
        return self.text("idempotency_key")[:80] or None

    def build(
        self,
        model: type[M],
        fields: Mapping[str, str],
        units: Mapping[str, Unit] = NO_UNITS,
        values: Mapping[str, Any] | None = None,
    ) -> M:
        """The request; Incomplete, with `errors`, if there is none. `fields` maps the request's paths to the form's
        field names, `units` those to what is typed there; `values` are the texts of the fields if none are given."""
        if self.errors:
            raise Incomplete(_INCOMPLETE)
        try:
            return model.model_validate(values or {path: self.text(name) for path, name in fields.items()})
        except ValidationError as error:
            for found in error.errors():
                name = fields.get(".".join(str(part) for part in found["loc"]), "_")
                told = _explained(found["type"], found.get("ctx", {}), found["msg"], units.get(name))
                self.errors.setdefault(name, told)
            raise Incomplete(_INCOMPLETE) from None

    def refusals(self, at: str, fields: Mapping[str, str] = NO_FIELDS) -> "_Refusals":
        """What is refused inside is told beside its field, if `fields` maps it to one, and beside `at` otherwise."""
        return _Refusals(self, at, fields)

    def kept(self, names: Iterable[str]) -> dict[str, str]:
        """What was typed, to be shown again."""
        return {name: self.text(name) for name in names}


@dataclass(frozen=True)
class _Refusals:
    reader: Reader
    at: str
    fields: Mapping[str, str]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, FlmarketError) or isinstance(error, Forbidden) or is_transient(error):
            return False  # a mistake, a form that she was not given, or a fault of the database: each has a page
        if isinstance(error, InvalidInput) and error.field in self.fields:
            self.reader.errors[self.fields[error.field]] = remedy(error)
        elif not isinstance(error, Incomplete):
            self.reader.errors[self.at] = sentence(error)
        return True


async def read_form(request: Request) -> Reader:
    """The fields of a form; no files."""
    return Reader(await request.form(max_files=0, max_fields=60))


async def read_query(request: Request) -> Reader:
    """What the address says of a form: what was typed into it before a session ended."""
    return Reader(request.query_params)


Form = Annotated[Reader, Depends(read_form)]
Typed = Annotated[Reader, Depends(read_query)]


def writer(*roles: Role) -> Callable[[Request, Visitor, Reader], Coroutine[Any, Any, Visitor]]:
    """A dependency: like `member`, and the request was made on a page of ours."""
    look = member(*roles)

    async def check(request: Request, visitor: AnyVisitor, form: Form) -> Visitor:
        await look(visitor)
        assert visitor.auth is not None
        check_rights(visitor.auth, request)
        try:
            check_csrf(visitor.auth, request.headers.get("x-csrf-token") or form.text("csrf_token"))
        except Forbidden:
            raise StaleForm(
                "this form was made for another session, or on another site, so nothing was done: go back and send it "
                "again if it was you"
            ) from None
        return visitor

    return check


SignedIn = Annotated[Visitor, Depends(member())]
Buyer = Annotated[Visitor, Depends(member("buyer"))]
Owner = Annotated[Visitor, Depends(member("owner"))]
Operator = Annotated[Visitor, Depends(member("operator"))]
BuyerOrOperator = Annotated[Visitor, Depends(member("buyer", "operator"))]
SignedInWrites = Annotated[Visitor, Depends(writer())]
BuyerWrites = Annotated[Visitor, Depends(writer("buyer"))]
OwnerWrites = Annotated[Visitor, Depends(writer("owner"))]
OperatorWrites = Annotated[Visitor, Depends(writer("operator"))]
BuyerOrOperatorWrites = Annotated[Visitor, Depends(writer("buyer", "operator"))]


def page(visitor: Visitor, template: str, *, title: str, status: int = 0, **context: Any) -> HTMLResponse:
    """A whole page; what has `errors` was not accepted."""
    entries, path = _NAVIGATION[visitor.known.role if visitor.known else None], visitor.path
    status = status or (422 if context.get("errors") else 200)
    leads = (href for _, href in entries if path == href or (href != "/" and path.startswith(f"{href}/")))
    best = max(leads, key=len, default="")
    navigation = [{"label": label, "href": href, "current": href == best} for label, href in entries]
    return fragment(visitor, template, status=status, title=title, navigation=navigation, **context)


def fragment(visitor: Visitor, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """A part of a page, for HTMX. Never cached: it shows what one party may see."""
    return HTMLResponse(render_for(visitor, template, **context), status, headers={"Cache-Control": "no-store"})


def render_for(visitor: Visitor, template: str, **context: Any) -> str:
    """A template with what all of them use."""
    around = {"party": visitor.known, "csrf": visitor.csrf, "demo": bool(visitor.people), "people": visitor.people}
    return render(template, **around, currency=visitor.broker.currency, **context)


def ask(visitor: Visitor, path: str, asked: str, back: str, fields: Mapping[str, str]) -> HTMLResponse:
    """Are you sure? With everything that was typed."""
    shown = {name: value for name, value in fields.items() if value}
    title = "Are you sure?"
    return page(visitor, "confirm.html.j2", title=title, asked=asked, path=path, fields=shown, back=back)


def error_page(request: Request, status: int, title: str, text: str, *, back: str = "") -> Response:
    """A refusal as a page; for HTMX as plain text, which the script shows in a message."""
    if request.headers.get("HX-Request"):
        return Response(text, status, media_type="text/plain", headers={"Cache-Control": "no-store"})
    try:
        visitor = identify(request)
    except Exception:  # whatever failed may fail again: then for nobody in particular
        visitor = Visitor(get_broker(request), request.url.path, None, getattr(request.app.state, "demo_people", ()))
    return page(visitor, "error.html.j2", title=title, status=status, code=status, text=text, back=back)


def too_large(request: Request, text: str) -> Response:
    """More was sent than is read."""
    return error_page(request, 413, "That is too large", text)


_FORMS = {
    "/owner/cap": "/owner",
    "/ledger/verify": "/ledger",
    "/disputes": "/disputes/new",
}  # the page of a form that is sent elsewhere
_OF_PARTY = {
    "/operator/deposits": "buyer", "/operator/payouts": "payee", "/operator/nodes": "owner", "/operator/bank": "party",
}  # fmt: skip
_LONGEST_AGAIN = 3000


async def _again(request: Request) -> str:
    """Where somebody who was stopped goes on: the page she asked for, or that of the form she sent, with what she had
    typed; sending it again is up to her."""
    path = request.url.path
    if request.method in SAFE:
        return f"{path}?{request.url.query}" if request.url.query else path
    form = await request.form(max_files=0, max_fields=60)
    if found := re.fullmatch(r"(/tasks/\w+|/operator/parties/\w+)/\w+", path):
        return found[1]
    page = _FORMS.get(path) or ("/account" if path.startswith("/account/") else path)
    if path in _OF_PARTY:  # their form is on the page of whom they are about
        about = form.get(_OF_PARTY[path])
        page = f"/operator/parties/{about}" if isinstance(about, str) and about.isidentifier() else "/operator"
    elif path.startswith("/operator/"):
        page = "/operator"
    fields = ((name, value) for name, value in form.multi_items() if isinstance(value, str) and name not in _NOT_KEPT)
    typed = [(name, value) for name, value in fields if len(value) <= _LONGEST_AGAIN // 3]  # a table is sent again
    query = urlencode(typed)
    return page if not query or len(query) > _LONGEST_AGAIN else f"{page}?{query}"


_NOT_KEPT = ("csrf_token", "idempotency_key", "confirmed", "buyer", "payee", "owner", "party", "key", "receipt")


class StaleForm(Forbidden):
    """A form without its session's token: one of an older session, or one that somebody forged."""

    title = "Send it once more"


class PageRoute(OneThreadRoute):
    """Turns what a page raises into a page, and a missing session into the way to sign in."""

    def look(self, request: Request) -> None:
        """Who asks."""
        identify(request)

    async def answer(self, request: Request, handle: Handler) -> Response:
        """The page, or our refusal."""
        try:
            return await handle(request)
        except Unauthenticated:
            if request.headers.get("HX-Request"):  # the script says so, and what is typed stays
                return Response(status_code=401, headers={"Cache-Control": "no-store"})
            return RedirectResponse(f"/sign-in?next={quote(await _again(request), safe='/')}", 303)
        except Exception as error:
            return await _refusal(request, error)


async def _refusal(request: Request, error: Exception) -> Response:
    """What a page raised, as a page. A fault of the database is no refusal: nobody knows what became of a form."""
    if isinstance(error, HTTPException):
        raise error
    if is_transient(error):
        log.warning("a page failed, the database is at fault", exc_info=error)
        answer = error_page(request, 503, "Back in a moment", _FAULTS[request.method in SAFE])
        answer.headers["Retry-After"] = "2"
        return answer
    if isinstance(error, StaleForm):
        return error_page(request, error.status, error.title, sentence(error), back=await _again(request))
    if isinstance(error, BrokerError):
        title = _TITLES.get(error.status, error.title)
        answer = error_page(request, error.status, title, _TEXTS.get(error.status) or sentence(error))
        if isinstance(error, TooMany):
            answer.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        return answer
    if isinstance(error, FlmarketError):
        return error_page(request, 422, "That cannot be done", sentence(error))
    if isinstance(error, RequestValidationError):
        return error_page(request, 404, _TITLES[404], _TEXTS[404])
    log.error("a page failed", exc_info=error)
    return error_page(request, 500, "Something went wrong here", _MISTAKES[request.method in SAFE])


def refused(error: FlmarketError) -> str:
    """A refusal as a sentence, beside a form; a fault of the database is none, and goes on to a page of its own."""
    if is_transient(error):
        raise error
    return sentence(error)


_TITLES = {403: "That is not yours to do", 404: "There is no such page", 409: "Not in this state", 429: "Too fast"}
_LOOK = "Whether what you sent was done is not known: look before you send it again."
_MISTAKES = {  # by whether something was only looked at
    True: "The market made a mistake; nothing of yours was changed by this page. The operator’s log has the details.",
    False: f"The market made a mistake. {_LOOK} The operator’s log has the details.",
}
_FAULTS = {
    True: "The market’s database does not answer just now. Nothing was changed; try again in a moment.",
    False: f"The market’s database did not answer. {_LOOK} A form that is sent again as it was is done once.",
}
_TEXTS = {
    404: "Either it never existed or it belongs to somebody else; the market does not say which.",
    429: "Too many requests came from you. Wait a moment and try again.",
}


def local_path(target: str) -> str:
    """A path on this site to go on to after signing in; anything else becomes the market."""
    local = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if local and "\\" not in target else "/"
