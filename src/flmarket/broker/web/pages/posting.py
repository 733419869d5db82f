"""Post a task of any kind, with a budget explorer for auctions beside the form: what each budget buys, before any money
moves.

The form has the fields of all kinds; the style sheet hides what the chosen one does not need, and only what it needs is
read. The explorer asks `office.explore`, which runs the task's own auction on the task's own owners; the page comes
without it and asks for it by itself, because it takes a while. The form asks for fewer things than the API takes, and
kinds that somebody registered are for the API alone. The rest has the API's defaults, except that owners' sizes differ
less (not at all in the reward game, which needs that) and that an auction's buyer gets the mean of the latter half of
all models, which is what most people want.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

from flmarket import auctions
from flmarket.aggregation import robust
from flmarket.broker.core import Broker, Party
from flmarket.broker.office import explore, market, parties, tasks
from flmarket.broker.requests import FLOWER, SIMULATION, ExploreRequest, TaskRequest, engines
from flmarket.broker.stamps import derived_id, new_id
from flmarket.broker.web.auth import get_gate
from flmarket.broker.web.pages.context import (
    Buyer,
    BuyerWrites,
    Form,
    PageRoute,
    Reader,
    Visitor,
    fragment,
    page,
    sentence,
)
from flmarket.broker.web.pages.rendering import Chart, Column
from flmarket.client import wire
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.learning import models
from flmarket.ledger import MICROS
from flmarket.report.formatting import epsilon, money, percent, rate, significant
from flmarket.trust import AT_BROKER, AT_OWNERS, task_words

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_DEFAULTS = {
    "name": "", "kind": "auction", "data": "breast-cancer", "owners": "40", "auction": "posted",
    "aggregation": "opt-aggr", "perturbation": "recommended", "model": "softmax", "hidden": "32", "budget": "200",
    "rounds": "25", "bidders": "20", "learning_rate": "0.2", "clip": "0.5", "round_seconds": "5", "deadline_days": "7",
    "seed": "0", "engine": SIMULATION, "expected": "60", "hard_cap": "120", "first_rate": "0.1", "scheme": "optimal",
    "reward": "100", "joint_budget": "5000", "epsilon": "20", "selection": "m1", "rule": "leave-one-out",
}  # fmt: skip
_FIELDS = {
    "task.name": "name", "data.name": "data", "data.owners": "owners", "mechanism.auction": "auction",
    "mechanism.aggregation": "aggregation", "mechanism.perturbation": "perturbation", "mechanism.clip": "clip",
    "model.name": "model", "model": "model", "task.rounds": "rounds", "task.bidders_per_round": "bidders",
    "task.budget_per_round": "budget", "task.learning_rate": "learning_rate", "broker.round_seconds": "round_seconds",
    "broker.deadline_seconds": "deadline_days", "seed": "seed", "broker.engine": "engine", "owners": "owners",
    "kind": "kind", "model.hidden": "hidden", "sampling.hard_cap": "hard_cap", "sampling.first_rate": "first_rate",
    "sampling.scheme": "scheme", "reward.reward": "reward", "joint.budget": "joint_budget", "joint.epsilon": "epsilon",
    "joint.selection": "selection", "joint.aggregation": "rule",
}  # fmt: skip
_ENGINES = {SIMULATION: AT_BROKER.place, FLOWER: AT_OWNERS.place}
_OFFERED = ("auction", "sampling", "reward", "joint")  # kinds that have fields here
_SCHEMES = (
    ("optimal", "optimal: by costs, truthful"), ("uniform", "uniform: one price for all"),
    ("prior-independent", "prior-independent: costs unknown"), ("complete", "complete: costs known, not truthful"),
)  # fmt: skip
_FURTHER = ("learning_rate", "first_rate", "clip", "round_seconds", "deadline_days", "seed")  # under a fold of the form
# As shares of what all bidders of a round would cost; beyond it more money buys nothing.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25)
_TRIAL_SHARES = (0.1, 0.3, 0.6, 1.0)  # of _SHARES, so that trials belong to points that are there
_PROFILES = 30
_NOT_HERE = (
    "The explorer compares budgets of auctions only. In this kind of market there is nothing to compare before it is "
    "played; what it may cost at most is below, and what is not spent comes back."
)
_FIRST = ("posted", "posted-private", "all-in-capped", "m2-bf")  # at the top of the list


@dataclass(frozen=True)
class Exploration:
    """What the explorer shows: either an explanation of what is missing, or charts."""

    problem: str = ""
    told: str | Markup = ""
    bound: Chart | None = None
    accuracy: Chart | None = None
    facts: tuple[tuple[str, str], ...] = ()
    deposit_micros: int = 0
    basis: str = ""


@router.get("/tasks/new")
def ask(visitor: Buyer) -> HTMLResponse:
    """The form as it is filled in at first."""
    return _form(visitor, _DEFAULTS, {})


@router.get("/tasks/new/explore")
async def explore_budgets(request: Request, visitor: Buyer) -> HTMLResponse:
    """The explorer for what is typed so far; with `trial`, also the accuracy, which takes longer."""
    query = dict(request.query_params)

    def work() -> HTMLResponse:
        made = _explore(visitor.broker, visitor.party, query, trial=query.get("trial") == "1")
        return fragment(visitor, "_explorer.html.j2", exploration=made)

    return await get_gate(request).heavy.run(visitor.party.id, work)


@router.post("/tasks/new")
def post(visitor: BuyerWrites, form: Form) -> Response:
    """Post the task and put its budget into escrow, once for each form; a form that was edited is another task."""
    reader = Reader(form)
    order = _order(reader)
    if order is not None:
        form_key = reader.text("idempotency_key")
        key = derived_id("form", form_key, order.model_dump_json()) if form_key else None
        try:
            task = tasks.post_task(visitor.broker, visitor.party, order, key=key)
            return RedirectResponse(f"/tasks/{task.id}/live", 303)
        except InvalidInput as error:
            name = error.field.removeprefix("task: ")
            reader.errors[_fields(order.kind).get(name, "_")] = sentence(error)
        except FlmarketError as error:
            reader.errors["_"] = sentence(error)
    return _form(visitor, {name: reader.text(name, _DEFAULTS[name]) for name in _DEFAULTS}, reader.errors)


def _form(visitor: Visitor, values: dict[str, str], errors: dict[str, str]) -> HTMLResponse:
    catalogue = market.catalogue(visitor.broker)
    return page(
        visitor,
        "task_new.html.j2",
        title="Post a task",
        status=422 if errors else 200,
        form=values,
        errors=errors,
        further=not errors.keys().isdisjoint(_FURTHER),
        idempotency_key=new_id("form"),
        catalogue=catalogue,
        engines=[(name, _ENGINES[name]) for name in engines(visitor.broker.settings)],
        offered=_offered(catalogue),
        kinds=sorted(
            (one for one in catalogue.kinds if one.name in _OFFERED), key=lambda one: _OFFERED.index(one.name)
        ),
        schemes=_SCHEMES,
        rules=robust.names(),
        about={one.name: auctions.about(one.name) for one in catalogue.auctions},
        account=parties.account(visitor.broker, visitor.party),
        models=[(name, f"{name}: {models.about(name)}") for name in catalogue.models],
        trusts=[(kind, task_words(SIMULATION, kind)) for kind in _OFFERED],
    )


def _offered(catalogue: wire.Catalogue) -> list[wire.Mechanism]:
    """The auctions that the form offers: all, those of ours with every guarantee first."""
    known = {one.name: one for one in catalogue.auctions}
    return [known[name] for name in dict.fromkeys((*_FIRST, *known)) if name in known]


def _order(reader: Reader, *, name: str | None = None) -> TaskRequest | None:
    kind = reader.text("kind", "auction")
    values: dict[str, Any] = {
        "kind": kind,
        "seed": reader.whole("seed"),
        "task": {
            "name": reader.text("name") if name is None else name,
            "rounds": reader.whole("rounds"),
        },
        "data": {"name": reader.text("data"), "owners": reader.whole("owners"), "sigma": 0.5},
        "mechanism": {},
        "model": {"name": reader.text("model", "softmax")},
        "broker": {
            "engine": reader.text("engine", SIMULATION) if kind == "auction" else SIMULATION,
            "round_seconds": reader.number("round_seconds"),
            "deadline_seconds": round(86_400 * reader.number("deadline_days")),
        },
    }
    if values["model"]["name"] == "mlp":
        values["model"]["hidden"] = _sizes(reader, "hidden")
    _OF_KIND.get(kind, _auction)(reader, values)
    return reader.build(TaskRequest, values, _fields(kind))


def _auction(reader: Reader, values: dict[str, Any]) -> None:
    values["task"] |= {
        "bidders_per_round": reader.whole("bidders"),
        "budget_per_round": reader.micros("budget") / MICROS,
        "learning_rate": reader.number("learning_rate"),
    }
    values["mechanism"] = {
        "auction": reader.text("auction"),
        "aggregation": reader.text("aggregation"),
        "perturbation": reader.text("perturbation"),
        "clip": reader.number("clip"),
    }
    values["training"] = {"average": True}


def _sampling(reader: Reader, values: dict[str, Any]) -> None:
    values["task"]["budget_per_round"] = reader.micros("expected") / MICROS
    values["sampling"] = {
        "scheme": reader.text("scheme"),
        "hard_cap": reader.micros("hard_cap") / MICROS,
        "first_rate": reader.number("first_rate"),
    }


def _reward(reader: Reader, values: dict[str, Any]) -> None:
    values["task"]["learning_rate"] = reader.number("learning_rate")
    values["mechanism"] = {"clip": reader.number("clip")}
    values["data"]["partition"] = "equal"
    values["reward"] = {"reward": reader.micros("reward") / MICROS}


def _joint(reader: Reader, values: dict[str, Any]) -> None:
    values["mechanism"] = {"clip": reader.number("clip")}
    values["joint"] = {
        "budget": reader.micros("joint_budget") / MICROS,
        "epsilon": reader.number("epsilon"),
        "selection": reader.text("selection"),
        "aggregation": reader.text("rule"),
    }


_OF_KIND = {"auction": _auction, "sampling": _sampling, "reward": _reward, "joint": _joint}


def _sizes(reader: Reader, name: str) -> list[int]:
    """Whole numbers with commas or spaces between them."""
    typed = reader.text(name).replace(",", " ").split()
    if not typed or not all(one.isascii() and one.isdigit() and 0 < int(one) <= 1024 for one in typed[:16]):
        reader.errors[name] = "This should be whole numbers from 1 to 1024, with commas between them."
        return []
    return [int(one) for one in typed]


def _fields(kind: str) -> dict[str, str]:
    """The form's field for each key of the order."""
    return _FIELDS | ({"task.budget_per_round": "expected"} if kind == "sampling" else {})


def _explore(broker: Broker, party: Party, values: Any, *, trial: bool = False) -> Exploration:
    order = _order(Reader(dict(values)), name="explore")
    if order is None:
        return Exploration(problem="Fill in the form, and this shows what your budget buys.")
    if order.kind != "auction":
        return Exploration(problem=_NOT_HERE, deposit_micros=order.escrow_micros)
    mine = order.budget_micros
    # The same owners whatever the budget: one simulation serves all, and the chart's ends stay where they are.
    task = order.with_budget(MICROS)
    try:
        first = explore.explore(broker, party, _request(task, [mine], 10))
        full = first.full_cost_micros
        budgets = sorted({mine, *_budgets(full, _SHARES)})
        view = explore.explore(broker, party, _request(task, budgets, _PROFILES))
        if trial:  # one's own budget first: each call stops when its time is up
            trials = [
                explore.explore(broker, party, _request(task, wanted, 1, accuracy=True))
                for wanted in ([mine], _budgets(full, _TRIAL_SHARES))
            ]
            view = _with_accuracy(view, trials)
    except FlmarketError as error:
        return Exploration(problem=sentence(error))
    return _told(view, order, mine)


def _budgets(full_cost: int, shares: tuple[float, ...]) -> list[int]:
    return [max(1, int(share * full_cost)) for share in shares]


def _with_accuracy(view: wire.Exploration, trials: list[wire.Exploration]) -> wire.Exploration:
    known = {point.budget_micros: point.accuracy for one in trials for point in one.points}
    return replace(view, points=tuple(replace(point, accuracy=known.get(point.budget_micros)) for point in view.points))


def _request(task: TaskRequest, budgets: list[int], profiles: int, *, accuracy: bool = False) -> ExploreRequest:
    return ExploreRequest(task=task, budgets_micros=budgets, profiles=profiles, accuracy=accuracy)


def _told(view: wire.Exploration, order: TaskRequest, mine: int) -> Exploration:
    point = next(point for point in view.points if point.budget_micros == mine)
    if point.failed:
        return Exploration(problem=f"At this budget {view.auction} does not work: {point.failed}.")
    sells = f"{point.winners:.1f}"
    if point.error_bound is None:
        told = Markup("At <strong>{} a round</strong> nobody sells: every owner asks for more.").format(money(mine))
    else:
        told = Markup(
            "At <strong>{} a round</strong> about <strong>{} of {}</strong> bidders sell, and the error bound of the "
            "aggregated update is <strong>{}</strong>."
        ).format(money(mine), sells, view.bidders, significant(point.error_bound))
    if point.accuracy is not None:
        told += Markup(" Trained that way, the model reached <strong>{}</strong> in a trial.").format(
            rate(point.accuracy)
        )
    full = view.full_cost_micros
    return Exploration(
        told=told,
        bound=_bound_chart(view, mine, point),
        accuracy=_accuracy_chart(view, mine, point),
        facts=(
            ("Bidders who sell, mean", f"{sells} of {view.bidders}"),
            ("Spent a round, mean", f"{money(point.spent_micros)} of {money(mine)}"),
            ("ε sold, mean per round", epsilon(point.mean_epsilon) if point.winners else "–"),
            ("All bidders’ costs a round", f"{money(full)}; you offer {percent(mine / max(full, 1))}"),
        ),
        deposit_micros=order.escrow_micros,
        basis=(
            f"Mean of {view.profiles} simulated rounds of this task’s own owners, with {view.perturbation} noise on "
            f"{view.dimension:,} coordinates. Accuracy: a trial of up to 25 rounds at each budget."
        ),
    )


def _bound_chart(view: wire.Exploration, mine: int, point: wire.BudgetPoint) -> Chart:
    known = [(one.budget_micros / MICROS, one.error_bound) for one in view.points if one.error_bound is not None]
    values = [bound for _, bound in known]
    log = bool(values) and max(values) > 30 * min(values) > 0
    return Chart(
        title="Error of a round’s aggregate",
        unit="error bound, lower is better",
        x="budget",
        columns=(Column("Budget a round"), Column("Error bound", "error bound", decimals=2)),
        rows=known,
        reading="" if point.error_bound is None else f"{significant(point.error_bound)} at your budget",
        options={"mark": f"{mine / MICROS:g}", "fill": ""} | ({"scale": "log"} if log else {"floor": "0"}),
    )


def _accuracy_chart(view: wire.Exploration, mine: int, point: wire.BudgetPoint) -> Chart | None:
    known = [
        (one.budget_micros / MICROS, one.accuracy, view.baseline_accuracy)
        for one in view.points
        if one.accuracy is not None
    ]
    if not known:
        return None
    return Chart(
        title="Accuracy in a trial",
        unit="share of test examples classified correctly",
        x="budget",
        columns=(
            Column("Budget a round"),
            Column("Accuracy", "accuracy", "teal"),
            Column("Always the larger class", "larger class", "slate", "dashed"),
        ),
        rows=known,
        reading="" if point.accuracy is None else f"{rate(point.accuracy)} at your budget",
        options={"mark": f"{mine / MICROS:g}"},
    )
