"""An owner's pages: what she sold, earned and gave up, and the bid helper.

The helper says in plain words what all that she gives up lets others learn at worst, from her lifetime total, and what
a bid would earn as far as her cap lets her sell.
"""

import math
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

from flmarket.broker.core import Broker, Party
from flmarket.broker.office import disputes, explore, offers, papers, parties, statements
from flmarket.broker.requests import BidHelpRequest, BidRequest, CapRequest
from flmarket.broker.web.api import Call, serve
from flmarket.broker.web.auth import get_gate
from flmarket.broker.web.pages.context import (
    Form,
    Incomplete,
    Owner,
    OwnerWrites,
    PageNumber,
    PageRoute,
    Pages,
    Reader,
    Typed,
    Unit,
    Visitor,
    fragment,
    page,
)
from flmarket.broker.web.pages.disputes import disputable_since
from flmarket.broker.web.pages.rendering import Chart, Column, seconds
from flmarket.client import wire
from flmarket.ledger import MICROS
from flmarket.market.owner import LEAST_EPSILON
from flmarket.report.formatting import count, epsilon, money, percent, significant
from flmarket.trust import AT_BROKER, certainty, market_words, meaning_of, sure

# --- bid helper -------------------------------------------------------------------------------------------------------

router = APIRouter(route_class=PageRoute, include_in_schema=False)

KINDS = (
    ("linear", "in step with ε"),
    ("quadratic", "slowly at first, then fast"),
    ("sqrt", "fast at first, then slowly"),
    ("exponential", "ever faster"),
    ("step", "one price for any ε"),
)
_DEFAULTS = {"task": "", "epsilon": "0.5", "kind": "linear", "rate": "1", "records": "", "accept": ""}
_FIELDS = {
    "privacy_budget": "epsilon", "valuation.kind": "kind", "valuation.rate": "rate", "valuation": "rate",
    "data_size": "records",
}  # fmt: skip
_TYPICAL_RECORDS = 10
_RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
_PROFILES = 200
_OFFERS = 25


@router.get("/owner/bid")
def ask(request: Request, visitor: Owner, task: str = "", placed: bool = False) -> HTMLResponse:
    """The form, filled in with the standing bid if there is one, or as the address says."""
    found, _ = offers.my_offers(*visitor.who, limit=_OFFERS, task_id=task)
    chosen = next((offer for offer in found if offer.task_id == task), found[0] if found else None)
    values = dict(_DEFAULTS)
    if chosen is not None:
        values["task"] = chosen.task_id
        if chosen.bid is not None and chosen.bid.active and chosen.bid.rate is not None:
            bid = chosen.bid
            values |= {
                "epsilon": f"{bid.privacy_budget:g}",
                "kind": bid.kind,
                "rate": f"{bid.rate:g}",
                "records": "" if bid.data_size == chosen.records else f"{bid.data_size}",
                "accept": "on" if bid.terms == chosen.terms_hash else "",
            }
    values |= {name: text[:40] for name, text in request.query_params.items() if name in values and name != "task"}
    return _form(visitor, found, values, {}, placed)


@router.get("/owner/bid/help")
async def explain(request: Request, visitor: Owner) -> HTMLResponse:
    """The helper for what is typed so far."""
    typed = dict(request.query_params)

    def work() -> HTMLResponse:
        return fragment(visitor, "_bid_help.html.j2", help=_help(*visitor.who, typed))

    return await get_gate(request).heavy.run(visitor.party.id, work)


@router.post("/owner/bid")
def place(visitor: OwnerWrites, reader: Form) -> Response:
    """Place the bid, or replace the one that stands."""
    task = reader.text("task")
    with reader.refusals("_", _FIELDS):
        wanted = _bid(reader)
        if reader.text("accept"):
            signed = offers.get_offer(*visitor.who, task).terms_hash
            offers.place_bid(*visitor.who, task, wanted.model_copy(update={"terms": signed}))
            return RedirectResponse(f"/owner/bid?task={task}&placed=true", 303)
    if not reader.text("accept"):
        reader.errors["accept"] = "Read the terms and accept them: they say what you sell, to whom and for what."
    found, _ = offers.my_offers(*visitor.who, limit=_OFFERS, task_id=task)
    return _form(visitor, found, {name: reader.text(name) for name in _DEFAULTS}, reader.errors, False)


@router.post("/owner/bid/{task_id}/withdraw")
def withdraw(task_id: str, visitor: OwnerWrites) -> Response:
    """Stay out of later rounds."""
    offers.withdraw_bid(*visitor.who, task_id)
    return RedirectResponse("/owner", 303)


def _form(
    visitor: Visitor, found: tuple[wire.Offer, ...], values: dict[str, str], errors: dict[str, str], placed: bool
) -> HTMLResponse:
    return page(
        visitor, "bid.html.j2", title="Bid helper", form=values, errors=errors, placed=placed, offers=found, kinds=KINDS
    )


def _bid(reader: Reader) -> BidRequest:
    values: dict[str, Any] = {
        "valuation": {"kind": reader.text("kind"), "rate": reader.number("rate")},
        "privacy_budget": reader.number("epsilon"),
    }
    if reader.text("records"):
        values["data_size"] = reader.whole("records")
    return reader.build(BidRequest, _FIELDS, {"epsilon": Unit("ε per round"), "records": Unit("records")}, values)


def _help(broker: Broker, party: Party, values: dict[str, str]) -> dict[str, Any]:
    """The helper's half of the page: what is wrong with the form, or what the bid means and earns."""
    reader = Reader(values)
    try:
        bid = _bid(reader)
    except Incomplete:
        return {"problem": next(iter(reader.errors.values()))}
    found, _ = offers.my_offers(broker, party, limit=1, task_id=values.get("task", ""))
    offer = next((one for one in found if one.task_id == values.get("task")), None)
    rounds = 1 if offer is None else max(1, offer.rounds - offer.rounds_done)
    auction = "posted" if offer is None else offer.auction
    records = bid.data_size or (offer.records if offer is not None and offer.records else _TYPICAL_RECORDS)
    bid = bid.model_copy(update={"data_size": records})
    assert bid.valuation.rate is not None
    views = {}
    for scale in _RATES:
        valuation = bid.valuation.model_copy(update={"rate": bid.valuation.rate * scale})
        asked = BidHelpRequest(
            bid=bid.model_copy(update={"valuation": valuation}), rounds=rounds, auction=auction, profiles=_PROFILES
        )
        views[scale] = explore.bid_help(broker, party, asked)
    mine = views[1.0]
    cost = offers.as_profile(bid.valuation, bid.privacy_budget, records).full_cost[0]
    return {
        "problem": "",
        "meaning": _meaning(mine, bid.privacy_budget),
        "odds": _odds(mine, bid.privacy_budget),
        "trust": AT_BROKER,  # owners' own nodes bid in other tasks
        "so_far": _so_far(*statements.paid_in(broker, party, offer.task_id)) if offer is not None else "",
        "earns": _earns(mine, records, float(cost), bid.privacy_budget),
        "chart": _chart(views, bid.valuation.rate),
        "basis": f"{mine.profiles} simulated rounds of {auction} among owners drawn like those of the paper "
        f"(population {mine.population}), with half of all their costs as the budget. The real rivals may differ.",
    }


def _meaning(view: wire.BidAdvice, limit: float) -> Markup:
    total, spent = view.epsilon.epsilon, view.spent_epsilon_total
    before = Markup("You have given up ε = {} in total so far. ").format(epsilon(spent)) if spent else Markup("")
    return before + Markup(
        "With this bid it comes to at most <strong>ε = {} in total</strong>. Whatever somebody suspects about your "
        "data, seeing all of it multiplies her odds by at most {}: a guess that was a coin toss can then be right "
        "<strong>{}</strong> of the time, at worst. One more round at ε = {} alone multiplies odds by at most {}."
    ).format(
        epsilon(total), significant(view.epsilon.odds_factor), sure(total), epsilon(limit), significant(math.exp(limit))
    )


def _odds(view: wire.BidAdvice, limit: float) -> list[dict[str, Any]]:
    """How sure somebody can be at worst, from the lifetime total: as it is, after one more round, after all that are
    left or fit under the cap. The bar is what a coin toss knows, and what is learnt on top of it."""
    spent, most = view.spent_epsilon_total, view.epsilon.epsilon
    lines = {
        f"Now, ε {epsilon(spent)} total" if spent else "Before you sell": certainty(spent),
        "After one more round" if spent else "After one round": certainty(min(spent + limit, most)),
    }
    if view.rounds > 1:
        capped = ", your cap" if most >= spent + view.left_epsilon_total else ""
        lines[f"After {count(view.rounds, 'round')}, ε {epsilon(most)} total{capped}"] = certainty(most)
    texts = {one: "> 99.9 %" if share > 0.9995 else percent(share) for one, share in lines.items()}  # never quite 1
    return [
        {"label": one, "bar": [(0.5, "slate"), (share - 0.5, "rust")], "text": texts[one]}
        for one, share in lines.items()
    ]


def _so_far(paid: int, micros: int) -> Markup | str:
    """What this very task has paid her, which says more than any population."""
    if not paid:
        return ""
    told = Markup("In this task you were paid <strong>{}</strong> so far, <strong>{}</strong> a round on average.")
    return told.format(count(paid, "time"), money(micros // paid))


def _earns(view: wire.BidAdvice, records: int, cost: float, limit: float) -> Markup:
    asked = Markup("Selling ε = {} on {} is worth <strong>{}</strong> to you. ").format(
        epsilon(limit), count(records, "record"), significant(cost)
    )
    if view.left_epsilon_total < LEAST_EPSILON:
        return asked + Markup(
            "Your cap is reached, at ε = {} in total: you can sell nothing, and <strong>nothing is paid</strong>, "
            "whatever you bid."
        ).format(epsilon(view.spent_epsilon_total))
    if view.wins == 0:
        return asked + Markup("At that price you would not have sold in a single round.")
    advice = (
        "This auction is truthful: your best bid is what it really costs you."
        if view.truthful == "exact"
        else "This auction does not promise that an honest bid is your best one."
    )
    each = Markup(
        "You would sell in <strong>{}</strong> of rounds, ε {} each time, and be paid <strong>{}</strong> for what "
        "costs you {}. "
    ).format(
        percent(view.wins), epsilon(view.mean_epsilon_if_won), money(view.mean_payment_micros_if_won),
        money(view.mean_cost_micros_if_won),
    )  # fmt: skip
    together = Markup(
        "Of the {} left, your cap (ε {} left in total) lets you be paid for <strong>{} at most</strong>; expect about "
        "<strong>{}</strong> in all. "
    ).format(
        count(view.rounds, "round"), epsilon(view.left_epsilon_total), view.rounds_paid_most,
        money(view.expected_payment_micros_total),
    )  # fmt: skip
    return asked + each + together + advice


def _chart(views: dict[float, wire.BidAdvice], rate: float) -> Chart:
    return Chart(
        title="Pay by valuation",
        unit="currency units a round, mean over won and lost rounds",
        columns=(Column("Rate"), Column("Mean pay a round", "pay", "teal", decimals=2)),
        rows=[(rate * scale, view.mean_payment_micros / MICROS) for scale, view in views.items()],
        reading=f"{money(views[1.0].mean_payment_micros)} at your rate",
        options={"mark": f"{rate:g}", "floor": "0", "fill": ""},
    )


# --- what she sold ----------------------------------------------------------------------------------------------------

_SHOWN, _POINTS = 50, 200


@router.get("/owner")
def show(visitor: Owner, reader: Typed, page_number: PageNumber = 1) -> HTMLResponse:
    """Everything that concerns one owner."""
    return _page(visitor, reader, page_number)


serve(
    router,
    statement_csv=Call("GET /owner/statement.csv", statements.statement_csv, file="statement.csv"),
    statement_pdf=Call("GET /owner/statement.pdf", papers.statement_pdf, file="statement.pdf"),
)


@router.post("/owner/cap")
def set_cap(visitor: OwnerWrites, reader: Form) -> Response:
    """Change one's own lifetime cap."""
    fields, units = {"cap_epsilon_total": "cap"}, {"cap": Unit("ε in total")}
    with reader.refusals("cap"):
        wanted = reader.build(CapRequest, fields, units, {"cap_epsilon_total": reader.number("cap")})
        statements.set_cap(*visitor.who, wanted.cap_epsilon_total)
        return RedirectResponse("/owner", 303)
    return _page(visitor, reader)


def _page(visitor: Visitor, reader: Reader, number: int = 1) -> HTMLResponse:
    broker, party = visitor.who
    with broker.database.moment():
        statement = statements.statement(broker, party, limit=_SHOWN, start=(number - 1) * _SHOWN, newest=True)
        sold, privacy = statements.history(broker, party, statement.deliveries, most=_POINTS), statement.privacy
        open_to_her, more_offers = offers.my_offers(broker, party, limit=_OFFERS)
        account, hers = parties.account(broker, party), disputes.list_disputes(broker, party, limit=5)
    cap, spent = privacy.cap_epsilon_total, privacy.spent_epsilon_total
    return page(
        visitor,
        "owner.html.j2",
        title="My data",
        errors=reader.errors,
        typed=reader.text("cap"),
        statement=statement,
        privacy=privacy,
        used=spent / cap if cap > 0 else 1.0,
        outlook=_outlook(privacy.left_epsilon_total, sold),
        cap_means=meaning_of(cap, privacy.delta),
        spent_means=meaning_of(spent, privacy.delta),
        trust=market_words(on_owners_machines=bool(broker.settings.superlink)),
        spent=_by_release(
            "Privacy spent so far",
            "ε total",
            epsilon(spent),
            [(number, total, cap) for number, total, _ in sold],
            Column("ε spent, total", "ε total", "teal", decimals=2),
            Column("Your cap", "cap", "rust", "dashed", decimals=2),
        ),
        earnings=_by_release(
            "Earned so far",
            "currency units",
            money(statement.earned_micros),
            [(number, earned / MICROS) for number, _, earned in sold],
            Column("Earned, total", "earned", "blue", decimals=2),
        ),
        account=account,
        offers=[(offer, _bid_text(offer)) for offer in open_to_her],
        more_offers=more_offers,
        releases=statement.releases,
        disputes=hers,
        since=disputable_since(broker),
        window=seconds(broker.settings.dispute_seconds),
        pages=Pages(number, _SHOWN, statement.awards, "/owner", "#releases"),
    )


def _outlook(left: float, sold: list[tuple[int, float, int]]) -> str:
    """How long the cap lasts at the pace so far."""
    if left <= 0:
        return "Your cap is reached: nothing more is sold in your name, and nothing more is paid."
    if not sold or not sold[-1][1]:
        return "Nothing has been released in your name yet."
    mean = sold[-1][1] / sold[-1][0]
    return (
        f"A release cost you ε {epsilon(mean)} on average, so about {math.floor(left / mean):,} more fit under your "
        f"cap. After that nothing more is sold in your name."
    )


def _by_release(title: str, unit: str, now: str, rows: list[tuple[float, ...]], *columns: Column) -> Chart:
    return Chart(
        title=title,
        unit=f"{unit}, release by release",
        columns=(Column("Release"), *columns),
        rows=rows,
        reading=f"{now} now",
        options={"whole": "", "floor": "0", "fill": "", "end": ""},
    )


def _bid_text(offer: wire.Offer) -> str:
    bid = offer.bid
    if bid is None or not bid.active:
        return ""
    value = bid.kind if bid.rate is None else f"{bid.kind}, rate {bid.rate:g}"
    return f"ε ≤ {bid.privacy_budget:g} per round, {value}"
