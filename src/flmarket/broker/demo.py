"""A market to look at: parties, money, tasks in every state, bids, an audit. Seeded, so that it looks the same again.

Everything goes through the services, as it would from outside; only the finished task is played at once.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from flmarket.broker.core import Broker, Party
from flmarket.broker.office import audits, offers, parties, sessions, statements, tasks
from flmarket.broker.requests import AuditRequest, BidRequest, TaskRequest, Valuation
from flmarket.broker.tables import PartyRow
from flmarket.broker.work.worker import Worker
from flmarket.ledger import MICROS

_LINK_SECONDS = 7 * 86_400.0
_PEOPLE = {
    "buyer": ("Meridian Diagnostics", "Harbour Forms Ltd"),
    "owner": ("St Anna Clinic", "Lakeside Hospital", "Dr Okafor's practice"),
    "operator": ("Market desk",),
}


@dataclass(frozen=True)
class DemoParty:
    """Somebody to sign in as: `key` for the API, `link` (a path) for the pages. Both are secrets."""

    party: Party
    key: str
    link: str


def is_empty(broker: Broker) -> bool:
    """Whether nobody has been registered yet."""
    with broker.database.read() as session:
        return not session.scalar(select(func.count()).select_from(PartyRow))


def seed_demo(broker: Broker, *, round_seconds: float = 6.0) -> tuple[DemoParty, ...]:
    """Buyers, owners and an operator with a market under way; returns them in that order."""
    people = tuple(_join(broker, role, name) for role, names in _PEOPLE.items() for name in names)
    meridian, harbour, anna, lakeside, okafor, desk = (one.party for one in people)
    for buyer, units in ((meridian, 120_000), (harbour, 150_000)):
        parties.deposit(broker, desk, buyer.id, units * MICROS)
    for owner, cap in ((anna, 8.0), (lakeside, 5.0)):  # the third keeps the cap that everybody begins with
        statements.set_cap(broker, owner, cap)

    finished = _post(broker, meridian, "Biopsy triage, pilot", rounds=30, budget=220)
    _bid(broker, anna, finished, "linear", 0.3, 0.25)
    _bid(broker, lakeside, finished, "quadratic", 0.6, 0.2)
    _bid(broker, okafor, finished, "sqrt", 0.1, 0.1)
    worker = Worker(broker)
    worker.run_until_idle(300)
    worker.stop()  # gives the queue to the service

    live = {"round_seconds": round_seconds}
    registered_only = {"simulated": False, "minimum_bids": 2}
    triage = _post(broker, meridian, "Biopsy triage, autumn", rounds=150, budget=300, seed=1, broker=live)
    unreliable: dict[str, Any] = {"owners": {"dropout": 0.2, "faulty": 0.05}, "bidders": 30, "broker": live}
    digits: dict[str, Any] = {"name": "digits", "owners": 60, "sigma": 0.5, "minimum": 5}
    forms = _post(broker, harbour, "Handwritten forms", rounds=120, budget=900, seed=2, data=digits, **unreliable)
    capped: dict[str, Any] = {"mechanism": {"auction": "all-in-capped"}, "broker": registered_only | live}
    second = "Second opinion, registered clinics only"
    clinics = _post(broker, meridian, second, rounds=60, budget=80, seed=3, **capped)
    digits = {"name": "digits", "owners": 40, "sigma": 0.5}
    stopped = _post(broker, harbour, "Postcode reader", rounds=40, budget=250, seed=4, data=digits)
    tasks.cancel_task(broker, harbour, stopped)
    for owner, kind, rate, epsilon in ((anna, "linear", 0.4, 0.2), (lakeside, "quadratic", 0.7, 0.15)):
        _bid(broker, owner, triage, kind, rate, epsilon)
        _bid(broker, owner, forms, kind, rate, epsilon)
    _bid(broker, okafor, triage, "exponential", 0.2, 0.1)
    _bid(broker, anna, clinics, "linear", 0.7, 0.1)
    _bid(broker, lakeside, clinics, "linear", 0.6, 0.1)
    for party, auction in ((desk, "posted"), (meridian, "all-in")):
        audits.start_audit(broker, party, AuditRequest(auction=auction, profiles=20))
    return people


def _join(broker: Broker, role: Any, name: str) -> DemoParty:
    view = parties.create_party(broker, None, role=role, name=name)
    key = parties.issue_key(broker, None, view.id, label="demo").key
    token = sessions.make_link(broker, view.id, seconds=_LINK_SECONDS, reusable=True)
    return DemoParty(Party(view.id, role, name), key, sessions.link_path(token))


def _post(
    market: Broker, buyer: Party, name: str, *, rounds: int, budget: float, bidders: int = 20, **more: Any
) -> str:
    task = {"name": name, "rounds": rounds, "bidders_per_round": bidders, "budget_per_round": budget}
    usual = {"data": {"owners": 40, "sigma": 0.5}, "training": {"average": True}}
    return tasks.post_task(market, buyer, TaskRequest.model_validate({"task": task, **usual, **more})).id


def _bid(broker: Broker, owner: Party, task_id: str, kind: Any, rate: float, epsilon: float) -> None:
    request = BidRequest(valuation=Valuation(kind=kind, rate=rate), privacy_budget=epsilon)
    offers.place_bid(broker, owner, task_id, request)
