"""An owner's page: her pay, her privacy against her own cap, every release, and the tasks that she can sell to."""

from __future__ import annotations

import math

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.broker.pages.charts import Chart, Column
from flmarket.broker.pages.context import Form, Owner, OwnerWrites, PageRoute, Visitor, page
from flmarket.broker.pages.forms import Reader
from flmarket.broker.pages.words import award_state, award_tone
from flmarket.broker.schemas import CapRequest
from flmarket.broker.services import offers, parties, statements
from flmarket.broker.services.views import OfferView, PrivacyView, ReleaseView, StatementView
from flmarket.errors import FlmarketError
from flmarket.ledger import MICROS, AwardState
from flmarket.report.formatting import epsilon, money
from flmarket.trust import market_words, meaning_of

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 100


@router.get("/owner")
def show(visitor: Owner) -> HTMLResponse:
    """Everything that concerns one owner."""
    return _page(visitor, {})


@router.get("/owner/statement.csv")
def download(visitor: Owner) -> Response:
    """The whole statement as a table."""
    text = statements.statement_csv(visitor.broker, visitor.party)
    headers = {"Content-Disposition": 'attachment; filename="statement.csv"'}
    return Response(text, media_type="text/csv; charset=utf-8", headers=headers)


@router.post("/owner/cap")
def set_cap(visitor: OwnerWrites, form: Form) -> Response:
    """Change one's own lifetime cap."""
    reader = Reader(form)
    request = reader.build(CapRequest, {"cap_epsilon_total": reader.number("cap")}, {"cap_epsilon_total": "cap"})
    if request is not None:
        try:
            statements.set_cap(visitor.broker, visitor.party, request.cap_epsilon_total)
            return RedirectResponse("/owner", 303)
        except FlmarketError as error:
            reader.errors["cap"] = f"{error}"
    return _page(visitor, reader.errors)


def _page(visitor: Visitor, errors: dict[str, str]) -> HTMLResponse:
    broker, party = visitor.broker, visitor.party
    statement = statements.statement(broker, party)
    newest = list(reversed(statement.releases))
    return page(
        visitor,
        "owner.html.j2",
        title="My data",
        status=422 if errors else 200,
        errors=errors,
        statement=statement,
        privacy=statement.privacy,
        used=_share(statement.privacy),
        outlook=_outlook(statement),
        cap_means=meaning_of(statement.privacy.cap_epsilon_total),
        spent_means=meaning_of(statement.privacy.spent_epsilon_total),
        trust=market_words(on_owners_machines=bool(broker.settings.superlink)),
        spent=_spent_chart(statement),
        earnings=_earnings_chart(statement),
        account=parties.account(broker, party),
        offers=[(offer, _bid_text(offer)) for offer in offers.list_offers(broker, party).items],
        releases=newest[:_SHOWN],
        left_out=max(0, len(newest) - _SHOWN),
        award_state=award_state,
        award_tone=award_tone,
    )


def _share(privacy: PrivacyView) -> float:
    return privacy.spent_epsilon_total / privacy.cap_epsilon_total if privacy.cap_epsilon_total > 0 else 1.0


def _outlook(statement: StatementView) -> str:
    """How long the cap lasts at the pace so far."""
    sold = [one.epsilon for one in statement.releases if one.state == AwardState.POSTED]
    left = statement.privacy.left_epsilon_total
    if left <= 0:
        return "Your cap is reached: nothing more is sold in your name, and nothing more is paid."
    if not sold:
        return "Nothing has been released in your name yet."
    mean = sum(sold) / len(sold)
    return (
        f"A release cost you ε {epsilon(mean)} on average, so about {math.floor(left / mean):,} more fit under your "
        f"cap. After that nothing more is sold in your name."
    )


def _delivered(statement: StatementView) -> list[ReleaseView]:
    return [one for one in statement.releases if one.state == AwardState.POSTED]


def _spent_chart(statement: StatementView) -> Chart:
    cap = statement.privacy.cap_epsilon_total
    known = _delivered(statement)
    return Chart(
        title="Privacy spent so far",
        unit="ε total, release by release",
        x="release",
        columns=(
            Column("Release"),
            Column("ε spent, total", "ε total", "teal", decimals=2),
            Column("Your cap", "cap", "rust", "dashed", decimals=2),
        ),
        rows=[(i + 1, one.epsilon_total, cap) for i, one in enumerate(known)],
        reading=f"{epsilon(statement.privacy.spent_epsilon_total)} now",
        options={"whole": "", "floor": "0", "fill": "", "end": ""},
    )


def _earnings_chart(statement: StatementView) -> Chart:
    total, rows = 0, []
    for i, one in enumerate(_delivered(statement)):
        total += one.paid_micros
        rows.append((i + 1, total / MICROS))
    return Chart(
        title="Earned so far",
        unit="currency units, release by release",
        x="release",
        columns=(Column("Release"), Column("Earned, total", "earned", "blue", decimals=2)),
        rows=rows,
        reading=f"{money(statement.earned_micros)} now",
        options={"whole": "", "floor": "0", "fill": "", "end": ""},
    )


def _bid_text(offer: OfferView) -> str:
    bid = offer.bid
    if bid is None or not bid.active:
        return ""
    value = bid.kind if bid.rate is None else f"{bid.kind}, rate {bid.rate:g}"
    return f"ε ≤ {bid.privacy_budget:g} per round, {value}"
