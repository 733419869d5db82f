"""A buyer's tasks: the list, one task with its accuracy, bill and receipts, and the model to download."""

import json
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.broker.errors import NotFound
from flmarket.broker.office import market, papers, parties, tasks
from flmarket.broker.requests import FLOWER, TaskRequest, order_of, trust_of
from flmarket.broker.tables import PLAYABLE
from flmarket.broker.web.api import Call, serve
from flmarket.broker.web.pages.context import (
    Buyer,
    BuyerOrOperator,
    BuyerOrOperatorWrites,
    ByName,
    Form,
    PageNumber,
    PageRoute,
    Pages,
    SignedIn,
    TaskId,
    ask,
    page,
)
from flmarket.broker.web.pages.disputes import disputable_since
from flmarket.broker.web.pages.listing import facts_of
from flmarket.broker.web.pages.rendering import ACCURACY, Chart, Column, condition, kind_words, list_of
from flmarket.broker.web.problems import attachment
from flmarket.client import wire
from flmarket.client.wire import ENDED
from flmarket.ledger import MICROS, format_micros
from flmarket.privacy import ApproxDp
from flmarket.report.formatting import adding_up, count, money, percent, rate, significant

Row = TypeVar("Row")
router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 50
_AWARDS = 100
_POINTS = 200  # of a chart, whose table is on the page


@router.get("/tasks")
def list_tasks(
    visitor: BuyerOrOperator, before: Annotated[str | None, Query(max_length=60)] = None, q: ByName = ""
) -> HTMLResponse:
    """One's own tasks, or all for the operator; or those whose name holds `q`."""
    found = tasks.list_tasks(*visitor.who, limit=_SHOWN, before=before, search=q.strip())
    money = parties.account(*visitor.who) if visitor.party.role == "buyer" else None
    title = "My tasks" if visitor.party.role == "buyer" else "Tasks"
    rows = [(task, mechanism(task)) for task in found.items]
    return page(visitor, "tasks.html.j2", title=title, tasks=rows, more=found.next, account=money, search=q)


@router.get("/tasks/{task_id}")
def show_task(task_id: TaskId, visitor: BuyerOrOperator, page_number: PageNumber = 1) -> HTMLResponse:
    """One task."""
    broker, party = visitor.who
    task = tasks.get_task(broker, party, task_id)
    played = tasks.rounds(broker, party, task_id).items
    bill = tasks.bill(broker, party, task_id, lines=False)
    settled = [one for one in played if one.closed_at]
    order = order_of(task.request)
    words = kind_words(order.kind)
    return page(
        visitor,
        "task.html.j2",
        title=task.name,
        task=task,
        order=order,
        words=words,
        mechanism=mechanism(task),
        model=_model(order),
        running=task.state in PLAYABLE,
        download=party.id == task.buyer_id and task.state in ENDED and task.rounds_done > 0,
        cards=_cards(task, settled, lasting=words.lasting),
        accuracy=accuracy_chart(settled, task.baseline_accuracy),
        bounds=_bound_chart(settled),
        upload=ApproxDp(order.joint.epsilon, order.joint.delta),
        spending=_spending_chart(settled, bill, order.budget_micros, words.budget),
        bill=bill,
        amounts=_amounts(bill),
        verdict=_verdict(task),
        rounds=settled[::-1][(page_number - 1) * _SHOWN : page_number * _SHOWN],
        pages=Pages(page_number, _SHOWN, len(settled), f"/tasks/{task_id}", "#rounds"),
        trust=trust_of(order),
        facts=facts_of(broker, party, task_id),
        owners=_owners(task, market.registered_places(broker, task_id)),
    )


@router.get("/tasks/{task_id}/rounds/{number}")
def show_round(
    task_id: TaskId, number: Annotated[int, Path(ge=1, le=10**6)], visitor: BuyerOrOperator, page_number: PageNumber = 1
) -> HTMLResponse:
    """One round: every award, how it ended, and its receipt. Rounds count from 1 on pages."""
    task = tasks.get_task(*visitor.who, task_id)
    first = (page_number - 1) * _AWARDS
    detail = tasks.round_detail(*visitor.who, task_id, number - 1, limit=_AWARDS, start=first)
    order, title = order_of(task.request), f"Round {number} of {task.rounds}"
    known = detail.round.winners if detail.awards or page_number > 1 else 0
    pages = Pages(page_number, _AWARDS, known, f"/tasks/{task_id}/rounds/{number}", "#awards")
    return page(
        visitor, "round.html.j2", title=title, task=task, number=number, round=detail.round, awards=detail.awards,
        paid=detail.round.spent_micros, pages=pages, order=order, words=kind_words(order.kind), trust=trust_of(order),
        disputable=visitor.party.role == "buyer" and (detail.round.closed_at or "") > disputable_since(visitor.broker),
    )  # fmt: skip


serve(
    router,
    bill_csv=Call("GET /tasks/{task_id}/bill.csv", tasks.bill_csv, file="bill-{task_id}.csv"),
    invoice_pdf=Call("GET /tasks/{task_id}/invoice.pdf", papers.invoice_pdf, file="invoice-{task_id}.pdf"),
)


@router.get("/tasks/{task_id}/rounds/{number}/receipts.json")
def download_receipts(
    task_id: TaskId, number: Annotated[int, Path(ge=1, le=10**6)], visitor: SignedIn, award: str = ""
) -> Response:
    """The receipts of a round, or of one award; owners get their own."""
    found = tasks.receipts(*visitor.who, task_id, number - 1).items
    documents = [one.document for one in found if not award or one.award_id == award]
    if not documents:
        raise NotFound("receipt", award or str(number))
    content = documents[0] if award else documents
    name = f"receipt-{task_id}-{number}.json" if award else f"receipts-{task_id}-{number}.json"
    return attachment(json.dumps(content, indent=1), "application/json", name)


@router.get("/tasks/{task_id}/model.{suffix}")
def download_model(task_id: TaskId, suffix: Literal["zip", "npz", "safetensors"], visitor: Buyer) -> Response:
    """The trained model, for whoever paid for it."""
    made = tasks.model(*visitor.who, task_id, format=suffix)
    return attachment(made.content, made.media_type, made.name)


@router.post("/tasks/{task_id}/cancel")
def cancel(task_id: TaskId, request: Request, visitor: BuyerOrOperatorWrites, reader: Form) -> Response:
    """Stop after the round at hand; the script asks before it sends, the page after."""
    if not reader.text("confirmed") and not request.headers.get("HX-Request"):
        name = tasks.get_task(*visitor.who, task_id).name
        asked = f"Stop {name} after the round at hand? What is left of the deposit comes back."
        return ask(visitor, f"/tasks/{task_id}/cancel", asked, f"/tasks/{task_id}", {})
    tasks.cancel_task(*visitor.who, task_id)
    return RedirectResponse(f"/tasks/{task_id}", 303)


def thinned(rows: list[Row]) -> list[Row]:
    """At most some hundred rows of a long table, evenly, and always the last: a picture shows no more."""
    step = -(-len(rows) // _POINTS)
    return rows if step <= 1 else rows[(len(rows) - 1) % step :: step]


def accuracy_chart(settled: list[wire.Round], baseline: float) -> Chart:
    """Accuracy by round, beside what a constant answer would reach."""
    known = [(one.index + 1, one.accuracy) for one in settled if one.accuracy is not None]
    caption = reading = ""
    if known:
        (last, now), (round_, best) = known[-1], max(known, key=lambda pair: pair[1])
        reading = f"{rate(now)} after round {last}"
        caption = f"Best {rate(best)} in round {round_}; always answering the larger class would give {rate(baseline)}."
    return Chart(
        title="Accuracy",
        unit="share of test examples classified correctly",
        columns=(Column("Round"), *ACCURACY),
        rows=thinned([(number, value, baseline) for number, value in known]),
        reading=reading,
        caption=caption,
        options={"whole": "", "end": "", "fill": ""},
    )


def _spending_chart(settled: list[wire.Round], bill: wire.Bill, budget_micros: int, called: str) -> Chart:
    rows = thinned([(one.index + 1, one.spent_micros / MICROS, budget_micros / MICROS) for one in settled])
    budgets = budget_micros * len(settled)
    share = percent(bill.spent_micros / budgets) if budgets else "nothing"
    return Chart(
        title="Spending per round",
        unit="currency units",
        columns=(
            Column("Round"), Column("Paid", "paid", draw="bars", decimals=2),
            Column(called, called.lower(), "ink", "step", decimals=2),
        ),
        rows=rows,
        caption=f"{money(bill.spent_micros)} paid so far, {share} of what these rounds could have cost.",
        options={"whole": "", "floor": "0"},
    )  # fmt: skip


def _bound_chart(settled: list[wire.Round]) -> Chart:
    return Chart(
        title="Error bound",
        unit="of a round’s aggregate, lower is better",
        columns=(Column("Round"), Column("Error bound", "error bound", decimals=2)),
        rows=thinned([(one.index + 1, one.error_bound) for one in settled if one.error_bound is not None]),
        options={"whole": "", "floor": "0"},
    )


def mechanism(task: wire.Task) -> str:
    """The kind of market and the auction in it, if there is one."""
    order = order_of(task.request)
    return order.kind + (f", {order.auction_name}" if order.auction_name else "")


def _model(order: TaskRequest) -> str:
    """What is trained, with its settings."""
    shown = [order.model.name]
    for name, value in order.model.settings.items():
        shown.append(f"{name} {list_of(list(map(str, value))) if isinstance(value, list) else value}")
    return ", ".join(shown)


def _amounts(bill: wire.Bill) -> list[tuple[str, str, str]]:
    """Where the deposit is, in lines that add up to it: what, for reading, exactly."""
    parts = {"Paid to owners": bill.spent_micros, "Returned": bill.refunded_micros}
    if bill.disputed_micros:
        parts["In escrow until a dispute is decided"] = bill.disputed_micros
    parts["Still in escrow"] = bill.left_micros - bill.disputed_micros
    exact = {name: format_micros(micros) for name, micros in parts.items()}
    return [
        (name[:1].upper() + name[1:], text, exact.get(name, "")) for name, text in adding_up(bill.escrow_micros, parts)
    ]


def _verdict(task: wire.Task) -> tuple[str, str, str] | None:
    """What an ended task's model is worth, in plain words: the colour, the headline, and what it rests on."""
    if task.state not in ENDED or not task.rounds_done or task.accuracy is None:
        return None
    guess = f"always answering the larger class is right in {rate(task.baseline_accuracy)} of cases"
    on = "" if task.test_examples is None else (
        f" Measured on {count(task.test_examples, 'test example')}, where {rate(task.margin)} more is what luck alone "
        "reaches one time in twenty (one-sided 5 % test of a share)."
    )  # fmt: skip
    if task.better_than_guessing:
        return "good", "Better than guessing", f"The model is right in {rate(task.accuracy)} of cases; {guess}.{on}"
    said = f"The model is right in {rate(task.accuracy)} of cases, but {guess}.{on}"
    return "warn", "No better than guessing", f"{said} A larger budget, more rounds or less noise may help."


def _cards(task: wire.Task, settled: list[wire.Round], *, lasting: bool) -> list[tuple[str, str, str]]:
    """Headline figures: what, how much, and what to know of it."""
    wins, delivered = sum(one.winners for one in settled), sum(one.delivered for one in settled)
    escrow = max(task.escrow_micros, 1)
    bounds = sorted(one.error_bound for one in settled if one.error_bound is not None)
    missed = f"; {wins - delivered} not delivered" if wins > delivered else ", all that were awarded" if wins else ""
    paid = f"{percent(task.spent_micros / escrow)} of the deposit"
    if lasting and task.state not in ENDED:
        paid = "everybody is paid after the last round"
    median = significant(bounds[len(bounds) // 2]) if bounds else "–"
    return [
        ("Accuracy", rate(task.accuracy), f"{rate(task.baseline_accuracy)} by always answering the larger class"),
        ("Round", f"{task.rounds_done} of {task.rounds}", f"the task {_how(task)}"),
        ("Paid to owners", money(task.spent_micros), paid),
        ("Updates bought", f"{delivered:,}", f"in {count(len(settled), 'round')}{missed}"),
        ("Error bound", median, "median of the rounds, lower is better"),
    ]


def _how(task: wire.Task) -> str:
    """Is running, is finished, or what it waits for."""
    waits = task.run is not None and not task.run.at_work
    return condition(task)[0] if waits else f"is {task.state}"


def _owners(task: wire.Task, registered: int) -> str:
    """Who can sell, told as it is: a place that nobody registered has taken is a simulated owner, or empty."""
    order = order_of(task.request)
    if order.broker.engine == FLOWER:
        return f"{count(registered, 'registered owner')} so far, {trust_of(order).place}"
    places = order.data.owners
    if not order.broker.simulated:
        return f"{count(registered, 'registered owner')} so far, of {count(places, 'place')}"
    if not registered:
        return f"{places:,}, all simulated"
    return f"{places:,}: {registered:,} registered, {places - registered:,} simulated"
