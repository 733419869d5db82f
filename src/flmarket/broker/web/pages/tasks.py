"""A buyer's tasks: the list, one task with its accuracy, bill and receipts, and the model to download."""

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.broker.errors import NotFound
from flmarket.broker.office import market, parties, tasks
from flmarket.broker.requests import FLOWER, TaskRequest, order_of, task_words_of
from flmarket.broker.tables import PLAYABLE
from flmarket.broker.web.pages.context import Buyer, BuyerOrOperator, BuyerOrOperatorWrites, PageRoute, SignedIn, page
from flmarket.broker.web.pages.rendering import Chart, Column, kind_words, list_of
from flmarket.broker.web.problems import attachment
from flmarket.client import wire
from flmarket.client.wire import ENDED
from flmarket.ledger import MICROS, AwardState
from flmarket.privacy import ApproxDp
from flmarket.report.formatting import count, money, percent, rate, significant

router = APIRouter(route_class=PageRoute, include_in_schema=False)

TaskId = Annotated[str, Path(max_length=60)]
_SHOWN = 200


@router.get("/tasks")
def list_tasks(visitor: BuyerOrOperator) -> HTMLResponse:
    """One's own tasks, or all for the operator."""
    found = tasks.list_tasks(visitor.broker, visitor.party, limit=_SHOWN)
    money = parties.account(visitor.broker, visitor.party) if visitor.party.role == "buyer" else None
    title = "My tasks" if visitor.party.role == "buyer" else "Tasks"
    rows = [(task, mechanism(task)) for task in found.items]
    return page(visitor, "tasks.html.j2", title=title, tasks=rows, more=found.next, account=money)


@router.get("/tasks/{task_id}")
def show_task(task_id: TaskId, visitor: BuyerOrOperator) -> HTMLResponse:
    """One task."""
    broker, party = visitor.broker, visitor.party
    task = tasks.get_task(broker, party, task_id)
    played = tasks.rounds(broker, party, task_id).items
    bill = tasks.bill(broker, party, task_id)
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
        rounds=list(reversed(settled)),
        trust=task_words_of(order),
        owners=_owners(task, market.registered_places(broker, task_id)),
    )


@router.get("/tasks/{task_id}/rounds/{number}")
def show_round(task_id: TaskId, number: Annotated[int, Path(ge=1, le=10**6)], visitor: BuyerOrOperator) -> HTMLResponse:
    """One round: every award, how it ended, and its receipt. Rounds count from 1 on pages."""
    task = tasks.get_task(visitor.broker, visitor.party, task_id)
    detail = tasks.round_detail(visitor.broker, visitor.party, task_id, number - 1)
    order, title = order_of(task.request), f"Round {number} of {task.rounds}"
    paid = sum(one.price_micros for one in detail.awards if one.state == AwardState.POSTED)
    return page(
        visitor, "round.html.j2", title=title, task=task, number=number, round=detail.round, awards=detail.awards,
        paid=paid, order=order, words=kind_words(order.kind),
    )  # fmt: skip


@router.get("/tasks/{task_id}/rounds/{number}/receipts.json")
def download_receipts(
    task_id: TaskId, number: Annotated[int, Path(ge=1, le=10**6)], visitor: SignedIn, award: str = ""
) -> Response:
    """The receipts of a round, or of one award; owners get their own."""
    found = tasks.receipts(visitor.broker, visitor.party, task_id, number - 1).items
    documents = [one.document for one in found if not award or one.award_id == award]
    if not documents:
        raise NotFound("receipt", award or str(number))
    content = documents[0] if award else documents
    name = f"receipt-{task_id}-{number}.json" if award else f"receipts-{task_id}-{number}.json"
    return attachment(json.dumps(content, indent=1), "application/json", name)


@router.get("/tasks/{task_id}/model.{suffix}")
def download_model(task_id: TaskId, suffix: Literal["zip", "npz", "safetensors"], visitor: Buyer) -> Response:
    """The trained model, for whoever paid for it."""
    made = tasks.model(visitor.broker, visitor.party, task_id, format=suffix)
    return attachment(made.content, made.media_type, made.name)


@router.post("/tasks/{task_id}/cancel")
def cancel(task_id: TaskId, visitor: BuyerOrOperatorWrites) -> RedirectResponse:
    """Stop after the round at hand."""
    tasks.cancel_task(visitor.broker, visitor.party, task_id)
    return RedirectResponse(f"/tasks/{task_id}", 303)


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
        x="round",
        columns=(
            Column("Round"),
            Column("Accuracy", "accuracy"),
            Column("Always the larger class", "larger class", "slate", "dashed"),
        ),
        rows=[(number, value, baseline) for number, value in known],
        reading=reading,
        caption=caption,
        options={"whole": "", "end": "", "fill": ""},
    )


def _spending_chart(settled: list[wire.Round], bill: wire.Bill, budget_micros: int, called: str) -> Chart:
    rows = [(one.index + 1, one.spent_micros / MICROS, budget_micros / MICROS) for one in settled]
    budgets = budget_micros * len(settled)
    share = percent(bill.spent_micros / budgets) if budgets else "nothing"
    return Chart(
        title="Spending per round",
        unit="currency units",
        x="round",
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
        x="round",
        columns=(Column("Round"), Column("Error bound", "error bound", decimals=2)),
        rows=[(one.index + 1, one.error_bound) for one in settled if one.error_bound is not None],
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


def _cards(task: wire.Task, settled: list[wire.Round], *, lasting: bool) -> list[tuple[str, str, str]]:
    """Headline figures: what, how much, and what to know of it."""
    wins, delivered = sum(one.winners for one in settled), sum(one.delivered for one in settled)
    escrow = max(task.escrow_micros, 1)
    bounds = sorted(one.error_bound for one in settled if one.error_bound is not None)
    missed = f"; {wins - delivered} not delivered" if wins > delivered else ", all that were awarded"
    paid = f"{percent(task.spent_micros / escrow)} of the deposit"
    if lasting and task.state not in ENDED:
        paid = "everybody is paid after the last round"
    median = significant(bounds[len(bounds) // 2]) if bounds else "–"
    return [
        ("Accuracy", rate(task.accuracy), f"{rate(task.baseline_accuracy)} by always answering the larger class"),
        ("Round", f"{task.rounds_done} of {task.rounds}", f"the task is {task.state}"),
        ("Paid to owners", money(task.spent_micros), paid),
        ("Updates bought", f"{delivered:,}", f"in {count(len(settled), 'round')}{missed}"),
        ("Error bound", median, "median of the rounds, lower is better"),
    ]


def _owners(task: wire.Task, registered: int) -> str:
    """Who can sell, told as it is: a place that nobody registered has taken is a simulated owner, or empty."""
    order = order_of(task.request)
    if order.broker.engine == FLOWER:
        return f"{count(registered, 'registered owner')} so far, {task_words_of(order).place}"
    places = order.data.owners
    if not order.broker.simulated:
        return f"{count(registered, 'registered owner')} so far, of {count(places, 'place')}"
    if not registered:
        return f"{places:,}, all simulated"
    return f"{places:,}: {registered:,} registered, {places - registered:,} simulated"
