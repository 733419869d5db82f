"""Post a task of any kind, with a budget explorer for auctions beside the form: what each budget buys, before any money
moves.

The form has the fields of all kinds; the style sheet hides what the chosen one does not need, and only what it needs is
read. The explorer asks `office.explore`, which runs the task's own auction on the task's own owners; the page comes
without it and asks for it by itself, because it takes a while. The form asks for fewer things than the API takes, and
kinds that somebody registered are for the API alone. The rest has the API's defaults, except that owners' sizes differ
less (not at all in the reward game, which needs that) and that an auction's buyer gets the mean of the latter half of
all models, which is what most people want.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

from flmarket import auctions
from flmarket.aggregation import robust
from flmarket.broker.core import Broker, Party
from flmarket.broker.office import evaluations, explore, listing, market, parties, tasks
from flmarket.broker.requests import FLOWER, OWN, SIMULATION, ExploreRequest, TaskRequest, engines, order_of
from flmarket.broker.stamps import derived_id, new_id
from flmarket.broker.web.auth import get_gate
from flmarket.broker.web.pages.context import (
    Buyer,
    BuyerWrites,
    Form,
    PageRoute,
    Reader,
    Unit,
    Visitor,
    fragment,
    page,
    refused,
)
from flmarket.broker.web.pages.rendering import ACCURACY, Chart, Column
from flmarket.client import wire
from flmarket.errors import FlmarketError
from flmarket.learning import models
from flmarket.ledger import MICROS
from flmarket.report.formatting import epsilon, money, percent, rate, significant
from flmarket.trust import AT_BROKER, AT_OWNERS, task_words

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_DEFAULTS = {
    "name": "", "kind": "auction", "data": "breast-cancer", "owners": "40", "auction": "posted",
    "aggregation": "opt-aggr", "perturbation": "recommended", "model": "softmax", "hidden": "32", "budget": "200",
    "rounds": "25", "bidders": "20", "learning_rate": "0.2", "clip": "0.5", "round_seconds": "5", "deadline_days": "7",
    "seed": "0", "engine": SIMULATION, "expected": "60", "hard_cap": "120", "first_rate": "0.1", "scheme": "optimal",
    "reward": "100", "joint_budget": "5000", "epsilon": "20", "selection": "m1", "rule": "leave-one-out",
    "purpose": "", "named": "", "evaluation": "", "model_settings": "",
    "trust": "local", "sum_epsilon": "1",
}  # fmt: skip
_TEXT, _WHOLE, _NUMBER = Reader.text, Reader.whole, Reader.number


def _units(reader: Reader, name: str) -> float:
    return reader.micros(name) / MICROS


def _days(reader: Reader, name: str) -> int:
    """Days in seconds; what is far out of bounds stays so, and finite."""
    return round(86_400 * max(-1e9, min(reader.number(name), 1e9)))


# The keys of an order, by kind: the form’s field for each, and how that is read. All others have the API’s defaults.
_Read = Callable[[Reader, str], Any]
_ALL: dict[str, tuple[str, _Read]] = {
    "seed": ("seed", _WHOLE), "task.name": ("name", _TEXT), "task.rounds": ("rounds", _WHOLE),
    "data.name": ("data", _TEXT), "data.owners": ("owners", _WHOLE), "broker.round_seconds": ("round_seconds", _NUMBER),
    "broker.deadline_seconds": ("deadline_days", _days),
    "broker.evaluation": ("evaluation", _TEXT), "broker.purpose": ("purpose", _TEXT),
    "broker.named": ("named", lambda reader, name: bool(reader.text(name))),
}  # fmt: skip
_OF_KIND: dict[str, dict[str, tuple[str, _Read]]] = {
    "auction": {
        "task.bidders_per_round": ("bidders", _WHOLE), "task.budget_per_round": ("budget", _units),
        "task.learning_rate": ("learning_rate", _NUMBER), "mechanism.auction": ("auction", _TEXT),
        "mechanism.aggregation": ("aggregation", _TEXT), "mechanism.perturbation": ("perturbation", _TEXT),
        "mechanism.clip": ("clip", _NUMBER),
    },
    "sampling": {
        "task.budget_per_round": ("expected", _units), "sampling.scheme": ("scheme", _TEXT),
        "sampling.hard_cap": ("hard_cap", _units), "sampling.first_rate": ("first_rate", _NUMBER),
    },
    "reward": {
        "task.learning_rate": ("learning_rate", _NUMBER), "mechanism.clip": ("clip", _NUMBER),
        "reward.reward": ("reward", _units),
    },
    "joint": {
        "mechanism.clip": ("clip", _NUMBER), "joint.budget": ("joint_budget", _units),
        "joint.epsilon": ("epsilon", _NUMBER), "joint.selection": ("selection", _TEXT),
        "joint.aggregation": ("rule", _TEXT),
    },
}  # fmt: skip
_TRUST = (
    ("local", "each update, with noise of its own (in samples without any)"),
    ("secure-aggregation", "only sums: one noise that all owners add together"),
)
_SHOWN_AT = {  # where in the form problems with other keys are shown
    "model.name": "model", "model": "model", "model.hidden": "hidden", "broker.engine": "engine", "owners": "owners",
    "kind": "kind", "trust": "trust", "sampling.epsilon": "sum_epsilon", "aggregation": "rule",
}  # fmt: skip
_ENGINES = {FLOWER: AT_OWNERS.place, SIMULATION: f"{AT_BROKER.place}, to try it out"}  # the normal way first
_SCHEMES = (
    ("optimal", "optimal: by costs, truthful"), ("uniform", "uniform: one price for all"),
    ("prior-independent", "prior-independent: costs unknown"), ("complete", "complete: costs known, not truthful"),
)  # fmt: skip
_MONEY = ("budget", "expected", "hard_cap", "reward", "joint_budget")
_UNITS = {
    "deadline_days": Unit("days", 86_400, "seconds"), "round_seconds": Unit("seconds"),
}  # fmt: skip
_FURTHER = ("learning_rate", "first_rate", "clip", "round_seconds", "deadline_days", "seed")  # under a fold of the form
# As shares of what all bidders of a round would cost; beyond it more money buys nothing.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25)
_TRIAL_SHARES = (0.1, 0.3, 0.6, 1.0)  # of _SHARES, so that trials belong to points that are there
_PROFILES = 30
_NOT_HERE = (
    "The explorer compares budgets of auctions of single updates only. Here there is nothing to compare before it is "
    "played; what it may cost at most is below, and what is not spent comes back."
)
_ELSEWHERE = "Only owners’ machines hold such records: there is nothing here to try budgets on before it is played."
_FIRST = ("posted", "posted-private", "all-in-capped", "m2-bf")  # of all auctions: those of ours with every guarantee


@router.get("/tasks/new")
def ask(request: Request, visitor: Buyer) -> HTMLResponse:
    """The form as it is filled in at first, or as the address says."""
    given = {name: value[:600] for name, value in request.query_params.items() if name in _DEFAULTS}
    alike = request.query_params.get("like")
    usual = {"engine": FLOWER} if FLOWER in engines(visitor.broker.settings) else {}
    base = _DEFAULTS | (usual if alike is None else _like(listing.public_task(visitor.broker, alike)))
    return _form(visitor, base | given, {})


@router.get("/tasks/new/explore")
async def explore_budgets(request: Request, visitor: Buyer) -> HTMLResponse:
    """The explorer for what is typed so far; with `trial`, also the accuracy, which takes longer."""
    query = dict(request.query_params)

    def work() -> HTMLResponse:
        return fragment(visitor, "_explorer.html.j2", exploration=_explore(*visitor.who, query))

    return await get_gate(request).heavy.run(visitor.party.id, work)


@router.post("/tasks/new")
def post(visitor: BuyerWrites, reader: Form) -> Response:
    """Post the task and put its budget into escrow, once for each form; a form that was edited is another task."""
    order = _order(reader, currency=visitor.broker.currency)
    if order is not None:
        fields = _fields(order.kind)
        with reader.refusals("_", fields | {f"task: {key}": field for key, field in fields.items()}):
            key = reader.once and derived_id("form", reader.once, order.model_dump_json())
            task = tasks.post_task(*visitor.who, order, key=key)
            return RedirectResponse(f"/tasks/{task.id}/live", 303)
    return _form(visitor, {name: reader.text(name, _DEFAULTS[name]) for name in _DEFAULTS}, reader.errors)


def _form(visitor: Visitor, values: dict[str, str], errors: dict[str, str]) -> HTMLResponse:
    catalogue, mine = market.catalogue(visitor.broker), evaluations.list_sets(*visitor.who).items
    known = {one.name: one for one in catalogue.auctions}
    return page(
        visitor,
        "task_new.html.j2",
        title="Post a task",
        form=values,
        errors=errors,
        further=not errors.keys().isdisjoint(_FURTHER),
        idempotency_key=new_id("form"),
        catalogue=catalogue,
        data_sets=[
            *((name, name) for name in catalogue.data_sets),
            *((one.id, f"{one.name}, data of your own") for one in mine if one.schema is not None),
        ],
        sets=[
            ("", "the test part of the data"),
            *((one.id, f"{one.name}, for {one.data}") for one in mine if one.schema is None),
        ],
        engines=[(name, words) for name, words in _ENGINES.items() if name in engines(visitor.broker.settings)],
        offered=[known[name] for name in _FIRST if name in known],
        others=[one for name, one in known.items() if name not in _FIRST],
        kinds=[one for name in _OF_KIND for one in catalogue.kinds if one.name == name],
        schemes=_SCHEMES,
        rules=robust.names(),
        about={one.name: auctions.about(one.name) for one in catalogue.auctions},
        account=parties.account(*visitor.who),
        models=[(name, f"{name}: {models.about(name)}") for name in catalogue.models],
        trust_models=_TRUST,
        trusts=[(kind, task_words(SIMULATION, kind)) for kind in _OF_KIND],
    )


def _order(reader: Reader, *, name: str | None = None, currency: str = "units") -> TaskRequest | None:
    kind, model = reader.text("kind", "auction"), reader.text("model", "softmax")
    values: dict[str, Any] = {"kind": kind, "model": {"name": model}, "data": {"sigma": 0.5}}
    for key, (field, read) in (_ALL | _OF_KIND.get(kind, _OF_KIND["auction"])).items():
        section, _, last = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[last] = read(reader, field)
    values["broker"]["engine"] = reader.text("engine", SIMULATION) if kind == "auction" else SIMULATION
    if reader.text("trust", "local") != "local":  # owners are simulated, and weights and noise are a sum's own
        values["trust"] = reader.text("trust")
        values["broker"] |= {"engine": SIMULATION, "open": False}
        for taken in ("aggregation", "perturbation"):
            values.get("mechanism", {}).pop(taken, None)
        if kind == "sampling":
            values["sampling"]["epsilon"] = reader.number("sum_epsilon")
    if name is not None:
        values["task"]["name"] = name
    if values["data"]["name"].startswith(OWN):  # what it is tested on is all that there is of it here
        values["data"] |= {"owners": 1, "partition": "equal"}
        values["broker"]["evaluation"] = values["data"]["name"]
    if model == "mlp":
        values["model"]["hidden"] = _sizes(reader, "hidden")
    elif model != "softmax":
        values["model"] |= _settings(reader, "model_settings")
    if kind == "reward":
        values["data"]["partition"] = "equal"
    elif kind not in _OF_KIND or kind == "auction":
        values["training"] = {"average": True}
    made = None
    with reader.refusals("_"):
        made = reader.build(TaskRequest, _fields(kind), _UNITS | dict.fromkeys(_MONEY, Unit(currency)), values)
        if kind == "sampling" and (made.sampling.hard_cap or 0) < (made.task.budget_per_round or 0):
            reader.errors["hard_cap"] = "At least what a round is expected to cost."
            return None
    return made


def _like(task: wire.Task) -> dict[str, str]:
    """The form filled in as for another task, whose seed stays its buyer's."""
    order = order_of(task.request)
    values = {"kind": order.kind, "model": order.model.name, "engine": order.broker.engine, "name": order.task.name}
    given = order.model.settings
    if isinstance(hidden := given.get("hidden"), list):
        values["hidden"] = ", ".join(map(str, hidden))
    plain = {name: one for name, one in given.items() if not isinstance(one, list)}
    values["model_settings"] = ", ".join(f"{name} = {one}" for name, one in plain.items())
    for key, (field, _) in (_ALL | _OF_KIND.get(order.kind, {})).items():
        section, _, name = key.rpartition(".")
        found = getattr(getattr(order, section) if section else order, name)
        if key != "seed" and found is not None:
            size = 86_400 if field == "deadline_days" else 1
            values[field] = f"{found / size:.10g}" if isinstance(found, float | int) and size > 1 else _typed(found)
    return values


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else ""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _sizes(reader: Reader, name: str) -> list[int]:
    """Whole numbers with commas or spaces between them."""
    typed = reader.text(name).replace(",", " ").split()
    if not typed or not all(one.isascii() and one.isdigit() and 0 < int(one) <= 1024 for one in typed[:16]):
        reader.errors[name] = "This should be whole numbers from 1 to 1024, with commas between them."
        return []
    return [int(one) for one in typed]


def _settings(reader: Reader, name: str) -> dict[str, Any]:
    """A model's own settings: name = value, with commas between them; numbers are numbers."""
    found: dict[str, Any] = {}
    for part in filter(None, (one.strip() for one in reader.text(name).split(","))):
        key, sign, text = (one.strip() for one in part.partition("="))
        if not sign or not key.isidentifier() or key == "name" or not text:
            reader.errors[name] = "This should be like width = 32, dropout = 0.1."
            return {}
        try:
            found[key] = int(text) if text.lstrip("-").isdigit() else float(text)
        except ValueError:
            found[key] = text
    return found


def _fields(kind: str) -> dict[str, str]:
    """The form's field for each key of the order; some keys have another one in another kind."""
    tables = (_ALL, *_OF_KIND.values(), _OF_KIND.get(kind, _OF_KIND["auction"]))
    return _SHOWN_AT | {key: field for table in tables for key, (field, _) in table.items()}


def _explore(broker: Broker, party: Party, values: dict[str, str]) -> dict[str, Any]:
    """What the explorer shows: either an explanation of what is missing, or charts."""
    order = _order(Reader(values), name="explore")
    if order is None:
        return {"problem": "Fill in the form, and this shows what your budget buys.", "deposit_micros": 0}
    if order.kind != "auction" or order.trust != "local":
        return {"problem": _NOT_HERE, "deposit_micros": order.escrow_micros}
    if order.data.registered.startswith(OWN):
        return {"problem": _ELSEWHERE, "deposit_micros": order.escrow_micros}
    mine = order.budget_micros
    # The same owners whatever the budget: one simulation serves all, and the chart's ends stay where they are.
    task = order.with_budget(MICROS)

    def ask(budgets: list[int], profiles: int, task: TaskRequest = task, **more: bool) -> wire.Exploration:
        asked = ExploreRequest(task=task, budgets_micros=budgets, profiles=profiles, **more)
        return explore.explore(broker, party, asked)

    try:
        full = ask([mine], 10).full_cost_micros
        view = ask(sorted({mine, *(_round(share * full) for share in _SHARES)}), _PROFILES)
        if values.get("trial") == "1":  # one's own budget first: each call stops when its time is up
            trials = [
                ask(some, 1, accuracy=True) for some in ([mine], [_round(share * full) for share in _TRIAL_SHARES])
            ]
            known = {point.budget_micros: point.accuracy for one in trials for point in one.points}
            held = {point.budget_micros: point.over_second_best for point in ask([mine], 40, second_best=True).points}
            points = (
                replace(point, accuracy=known.get(at), over_second_best=held.get(at))
                for point in view.points
                for at in (point.budget_micros,)
            )
            view = replace(view, points=tuple(points))
        told = _told(view, order, mine)
        return told | {"beside": _side_by_side(ask, task, mine) if values.get("beside") == "1" else ()}
    except FlmarketError as error:
        return {"problem": refused(error), "deposit_micros": 0}


def _side_by_side(ask: Callable[..., wire.Exploration], task: TaskRequest, mine: int) -> list[dict[str, Any]]:
    """What the auction that is chosen and those that the form offers first would buy with the same budget, on the same
    owners and rounds, best first."""
    found = []
    for name in dict.fromkeys((task.mechanism.auction, *_FIRST)):
        truthful = str(auctions.get(name).guarantees.truthful)
        other = task.model_copy(update={"mechanism": task.mechanism.model_copy(update={"auction": name})})
        point, chosen = ask([mine], _PROFILES, task=other).points[0], name == task.mechanism.auction
        bound = math.inf if point.error_bound is None else point.error_bound
        found.append((bound, {"name": name, "chosen": chosen, "truthful": truthful, "point": point}))
    return [shown for _, shown in sorted(found, key=itemgetter(0))]


def _round(micros: float) -> int:
    """A budget to try, in figures that people like to read."""
    return max(1, int(float(f"{micros:.3g}")))


def _told(view: wire.Exploration, order: TaskRequest, mine: int) -> dict[str, Any]:
    point = next(point for point in view.points if point.budget_micros == mine)
    if point.failed:
        return {"problem": f"At this budget {view.auction} does not work: {point.failed}.", "deposit_micros": 0}
    sells = f"{point.winners:.1f}"
    if point.error_bound is None:
        told = Markup("At <strong>{} a round</strong> nobody sells: every owner asks for more.").format(money(mine))
    else:
        told = Markup(
            "At <strong>{} a round</strong> about <strong>{} of {}</strong> bidders sell, and the error bound of the "
            "aggregated update is <strong>{}</strong>."
        ).format(money(mine), sells, view.bidders, significant(point.error_bound))
    if point.accuracy is not None:
        reached = Markup(" Trained that way, the model reached <strong>{}</strong> in a trial.")
        told += reached.format(rate(point.accuracy))
    full = view.full_cost_micros
    return {
        "problem": "",
        "told": told,
        "suggested": _suggested(view),
        "bound": _bound_chart(view, mine, point),
        "accuracy": _accuracy_chart(view, mine, point),
        "facts": (
            ("Bidders who sell, mean", f"{sells} of {view.bidders}"),
            ("Spent a round, mean", f"{money(point.spent_micros)} of {money(mine)}"),
            ("ε sold, mean per round", epsilon(point.mean_epsilon) if point.winners else "–"),
            ("All bidders’ costs a round", f"{money(full)}; you offer {percent(mine / max(full, 1))}"),
            *_second_best(point),
        ),
        "deposit_micros": order.escrow_micros,
        "basis": f"Mean of {view.profiles} simulated rounds of this task’s own owners, with {view.perturbation} noise "
        f"on {view.dimension:,} coordinates. Accuracy: a trial of up to 25 rounds at each budget.",
    }


def _second_best(point: wire.BudgetPoint) -> tuple[tuple[str, str], ...]:
    """A fact for those who asked for a trial."""
    if point.over_second_best is None:
        return ()
    times = f"{significant(point.over_second_best)} × the second best"
    return (("Error against what honesty allows", f"{times}, an estimate; one coordinate, Laplace noise"),)


def _suggested(view: wire.Exploration) -> tuple[str, str] | None:
    """The least of the budgets tried whose error bound is within a quarter of the best one: beyond it money buys
    little. As it is typed, and as it is read."""
    known = [(one.budget_micros, one.error_bound) for one in view.points if one.error_bound is not None]
    if not known:
        return None
    best = min(bound for _, bound in known)
    least = min(budget for budget, bound in known if bound <= 1.25 * best)
    rounded = -(-least // MICROS) * MICROS if least > 10 * MICROS else least
    return f"{rounded / MICROS:.6f}".rstrip("0").rstrip("."), money(rounded)


def _bound_chart(view: wire.Exploration, mine: int, point: wire.BudgetPoint) -> Chart:
    known = [(one.budget_micros / MICROS, one.error_bound) for one in view.points if one.error_bound is not None]
    values = [bound for _, bound in known]
    log = bool(values) and max(values) > 30 * min(values) > 0
    return Chart(
        title="Error of a round’s aggregate",
        unit="error bound, lower is better",
        columns=(Column("Budget a round", "budget"), Column("Error bound", "error bound", decimals=2)),
        rows=known,
        reading="" if point.error_bound is None else f"{significant(point.error_bound)} at your budget",
        options={"mark": f"{mine / MICROS:g}", "fill": ""} | ({"scale": "log"} if log else {"floor": "0"}),
    )


def _accuracy_chart(view: wire.Exploration, mine: int, point: wire.BudgetPoint) -> Chart | None:
    tried = [(one.budget_micros / MICROS, one.accuracy) for one in view.points if one.accuracy is not None]
    if not tried:
        return None
    return Chart(
        title="Accuracy in a trial",
        unit="share of test examples classified correctly",
        columns=(Column("Budget a round", "budget"), *ACCURACY),
        rows=[(budget, reached, view.baseline_accuracy) for budget, reached in tried],
        reading="" if point.accuracy is None else f"{rate(point.accuracy)} at your budget",
        options={"mark": f"{mine / MICROS:g}"},
    )
