"""A market to look at: parties, money, tasks in every state, bids, an audit. Seeded, so that it looks the same again.

It lives for as long as it is tended (`Demo.tend`, every few seconds): a task that has ended is posted again, buyers get
new money, an owner who has sold the privacy she was willing to sell makes room for a new one, and what visitors close
or revoke is opened again. All of that follows from what is stored, so a demo that was killed goes on.

Everything goes through the services, as it would from outside; only the finished task is played at once.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select

from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import Conflict
from flmarket.broker.office import audits, offers, parties, sessions, statements, tasks
from flmarket.broker.requests import AuditRequest, BidRequest, TaskRequest, Valuation
from flmarket.broker.stamps import now
from flmarket.broker.tables import ACTIVE, Bid, PartyRow, SignInLink, TaskRow, how_many
from flmarket.broker.work.worker import Worker
from flmarket.ledger import MICROS

log = logging.getLogger("flmarket.broker")

_LINK_SECONDS = 3650 * 86_400.0
_TEND_SECONDS = 3.0
_BUYERS = (("Meridian Diagnostics", 120_000), ("Harbour Forms Ltd", 150_000))  # and what each pays in at a time
_OWNERS = (("St Anna Clinic", 8.0), ("Lakeside Hospital", 5.0), ("Dr Okafor's practice", None))  # None: the usual cap
_DESK = "Market desk"
_NEWCOMERS = ("Riverside Clinic", "Old Mill Hospital", "Dr Lindqvist's practice", "Hill Street Surgery", "Bay Clinic")
_LEAST_BIDS_LEFT = 2  # an owner whose cap has room for fewer makes room for another


@dataclass(frozen=True)
class DemoParty:
    """Somebody to sign in as: `key` for the API, `link` (a path) for the pages. Both are secrets."""

    party: Party
    key: str
    link: str


@dataclass(frozen=True)
class Series:
    """A task that is posted again whenever it has ended; `budget` is what a round may cost at most, `bids` are by
    owner: kind, rate, ε of a round. What is no auction says in `order` what its task needs."""

    name: str
    buyer: int
    rounds: int
    budget: float
    bids: Mapping[int, tuple[str, float, float]] = field(default_factory=dict)
    bidders: int = 20
    order: Mapping[str, Any] = field(default_factory=dict)

    def number(self, n: int) -> str:
        """The name of the n-th of them."""
        return self.name if n == 0 else f"{self.name}, no. {n + 1}"


_DIGITS = {"name": "digits", "owners": 60, "sigma": 0.5, "minimum": 5}
SERIES = (
    Series(
        "Biopsy triage, autumn", 0, 150, 300,
        {0: ("linear", 0.4, 0.02), 1: ("quadratic", 0.7, 0.02), 2: ("exponential", 0.2, 0.02)},
    ),
    Series(
        "Handwritten forms", 1, 120, 900, {0: ("linear", 0.4, 0.02), 1: ("quadratic", 0.7, 0.015)}, 30,
        {"data": _DIGITS, "owners": {"dropout": 0.2, "faulty": 0.05}},
    ),
    Series(
        "Second opinion, registered clinics only", 0, 60, 80, {0: ("linear", 0.7, 0.02), 1: ("linear", 0.6, 0.02)},
        order={"mechanism": {"auction": "all-in-capped"}, "broker": {"simulated": False, "minimum_bids": 2}},
    ),
    Series(
        "Postcode reader, clients by lot", 1, 90, 80,
        order={"kind": "sampling", "data": _DIGITS, "task": {"budget_per_round": 40},
               "sampling": {"costs": [1, 8], "hard_cap": 80, "first_rate": 0.3}},
    ),
    Series(
        "Readmission risk, one reward for all", 0, 60, 15,
        order={"kind": "reward", "data": {"owners": 20, "partition": "equal"}, "task": {"learning_rate": 0.3},
               "reward": {"reward": 900}},
    ),
    Series(
        "Blood counts, safe from poisoned updates", 0, 40, 125,
        order={"kind": "joint", "data": {"owners": 20, "sigma": 0.5, "minimum": 5}, "task": {},
               "joint": {"budget": 5000, "costs": [1, 300], "epsilon": 20, "validation": 60}},
    ),
)  # fmt: skip


def is_empty(broker: Broker) -> bool:
    """Whether nobody has been registered yet."""
    with broker.database.read() as session:
        return session.scalars(select(PartyRow.id).limit(1)).first() is None


def seed_demo(broker: Broker, *, round_seconds: float = 6.0) -> tuple[DemoParty, ...]:
    """Buyers, owners and an operator with a market under way; returns them in that order."""
    people = (
        *(_join(broker, "buyer", name) for name, _ in _BUYERS),
        *(_join(broker, "owner", name, cap) for name, cap in _OWNERS),
        _join(broker, "operator", _DESK),
    )
    demo = Demo(broker, people, round_seconds=round_seconds)
    demo.fund()
    meridian, harbour, *owners, desk = (one.party for one in people)
    finished = _post(broker, meridian, "Biopsy triage, pilot", rounds=30, budget=220)
    asked = (("linear", 0.3, 0.05), ("quadratic", 0.6, 0.04), ("sqrt", 0.1, 0.03))
    for owner, bid in zip(owners, asked, strict=True):
        _bid(broker, owner, finished, *bid)
    worker = Worker(broker)
    worker.run_until_idle(300)
    worker.stop()  # gives the queue to the service

    digits: dict[str, Any] = {"name": "digits", "owners": 40, "sigma": 0.5}
    stopped = _post(broker, harbour, "Postcode reader", rounds=40, budget=250, seed=4, data=digits)
    tasks.cancel_task(broker, harbour, stopped)
    demo.tend()
    for party, auction in ((desk, "posted"), (meridian, "all-in")):
        audits.start_audit(broker, party, AuditRequest(auction=auction, profiles=20))
    return people


def find_demo(broker: Broker) -> tuple[DemoParty, ...]:
    """The people of a demo that was seeded in this database before, with new keys; nobody if it is none.

    Only a demo has links that work more than once.
    """
    linked = PartyRow.id.in_(select(SignInLink.party_id).where(SignInLink.reusable))
    query = select(PartyRow).where(linked, PartyRow.active).order_by(PartyRow.created_at.desc(), PartyRow.id)
    with broker.database.read() as session:
        rows = session.scalars(query).all()
    wanted = {"buyer": len(_BUYERS), "owner": len(_OWNERS), "operator": 1}
    found = [[row for row in rows if row.role == role][:most][::-1] for role, most in wanted.items()]
    if [len(of_role) for of_role in found] != list(wanted.values()):
        return ()
    desk = parties.as_party(found[-1][0])
    return tuple(_key_and_link(broker, parties.as_party(row), desk) for of_role in found for row in of_role)


class Demo:
    """A seeded market that is kept alive; `people` are who there is to sign in as, now."""

    def __init__(
        self,
        broker: Broker,
        people: Sequence[DemoParty],
        *,
        series: Sequence[Series] = SERIES,
        round_seconds: float = 6.0,
        told: Callable[[tuple[DemoParty, ...]], None] = lambda people: None,
    ) -> None:
        """`told` hears of the people whenever they change."""
        self.broker, self.people, self.series, self.round_seconds = broker, tuple(people), tuple(series), round_seconds
        self._told = told
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="flmarket-demo", daemon=True)

    def start(self) -> None:
        """Tend the market from a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what is at hand, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def tend(self) -> None:
        """Whatever is missing is put back; a market that lacks nothing is left as it is."""
        self._let_in()
        self.fund()
        self._renew_owners()
        live = [self._task(one) for one in self.series]
        for one, task_id in zip(self.series, live, strict=True):
            self._bids(one, task_id)

    def fund(self) -> None:
        """A buyer who could not pay for all of her tasks once more gets money."""
        needs = [0.0] * len(_BUYERS)
        for one in self.series:
            needs[one.buyer] += one.rounds * one.budget
        for buyer, need, (_, units) in zip(self._of("buyer"), needs, _BUYERS, strict=True):
            if self.broker.books.ledger.balance(buyer.id) < need * MICROS:
                parties.deposit(self.broker, self._desk, buyer.id, units * MICROS)

    def _loop(self) -> None:
        while not self._stop.wait(_TEND_SECONDS):
            try:
                self.tend()
            except Exception:  # a visitor may be at the same party; what is missing is still so in the next turn
                log.exception("the demo could not be tended; it is tried again")

    @property
    def _desk(self) -> Party:
        return self.people[-1].party

    def _of(self, role: str) -> list[Party]:
        return [one.party for one in self.people if one.party.role == role]

    def _become(self, people: Sequence[DemoParty]) -> None:
        if tuple(people) != self.people:
            self.people = tuple(people)
            self._told(self.people)

    def _let_in(self) -> None:
        """Who was closed is opened, and whose link was taken gets another."""
        ids = [one.party.id for one in self.people]
        with self.broker.database.read() as session:
            closed = set(session.scalars(select(PartyRow.id).where(PartyRow.id.in_(ids), ~PartyRow.active)))
            links = SignInLink.party_id.in_(ids), SignInLink.reusable, SignInLink.expires_at > now()
            linked = set(session.scalars(select(SignInLink.party_id).where(*links)))
        for party_id in closed - {self._desk.id}:
            parties.set_active(self.broker, self._desk, party_id, active=True)
        self._become(
            [one if one.party.id in linked else replace(one, link=_link(self.broker, one.party)) for one in self.people]
        )

    def _renew_owners(self) -> None:
        """In the place of an owner whose cap is used a new one joins; the other keeps her statement and her link."""
        owners = self._of("owner")
        privacy = self.broker.books.privacy_of([one.id for one in owners])
        people, first = list(self.people), len(_BUYERS)
        for place, owner in enumerate(owners):
            cap, spent = privacy[owner.id]
            least = _LEAST_BIDS_LEFT * sum(one.bids[place][2] for one in self.series if place in one.bids)
            if (cap or 0.0) - spent < least:
                with self.broker.database.read() as session:
                    n = how_many(session, PartyRow.role == "owner") - len(_OWNERS)
                name, again = _NEWCOMERS[n % len(_NEWCOMERS)], n // len(_NEWCOMERS)
                name = f"{name} {again + 1}" if again else name
                people[first + place] = _join(self.broker, "owner", name, _OWNERS[place][1])
        self._become(people)

    def _task(self, one: Series) -> str:
        """The one that is under way, posted if there is none."""
        buyer = self._of("buyer")[one.buyer]
        its = TaskRow.buyer_id == buyer.id, (TaskRow.name == one.name) | TaskRow.name.startswith(f"{one.name}, no. ")
        with self.broker.database.read() as session:
            live = session.scalars(select(TaskRow.id).where(*its, TaskRow.state.in_(ACTIVE)).limit(1)).first()
            n = how_many(session, *its)
        if live is not None:
            return live
        # one that waits for bids that do not come ends after a while, and is posted again
        deadline = max(600, int(4 * one.rounds * self.round_seconds))
        timing = {"round_seconds": self.round_seconds, "deadline_seconds": deadline}
        order = {**one.order, "seed": n + 1, "broker": {**one.order.get("broker", {}), **timing}}
        key = f"demo {one.name} {n}"
        sizes: dict[str, Any] = {"rounds": one.rounds, "budget": one.budget, "bidders": one.bidders}
        return _post(self.broker, buyer, one.number(n), key=key, **sizes, **order)

    def _bids(self, one: Series, task_id: str) -> None:
        """Owners who never bid here do; what a visitor changed or withdrew is hers."""
        with self.broker.database.read() as session:
            known = set(session.scalars(select(Bid.party_id).where(Bid.task_id == task_id)))
        for place, owner in enumerate(self._of("owner")):
            if place in one.bids and owner.id not in known:
                with suppress(Conflict):  # no place is left, or the task has ended
                    _bid(self.broker, owner, task_id, *one.bids[place])


def _join(broker: Broker, role: Any, name: str, cap: float | None = None) -> DemoParty:
    view = parties.create_party(broker, None, role=role, name=name)
    party = Party(view.id, role, name)
    if cap is not None:
        statements.set_cap(broker, party, cap)
    return _key_and_link(broker, party)


def _key_and_link(broker: Broker, party: Party, desk: Party | None = None) -> DemoParty:
    """With a desk: instead of all keys and links that she had."""
    made = (
        parties.issue_key(broker, None, party.id, label="demo")
        if desk is None
        else parties.reissue_key(broker, desk, party.id)
    )
    return DemoParty(party, made.key, _link(broker, party))


def _link(broker: Broker, party: Party) -> str:
    return sessions.link_path(sessions.make_link(broker, party.id, seconds=_LINK_SECONDS, reusable=True))


def _post(
    market: Broker,
    buyer: Party,
    name: str,
    *,
    rounds: int,
    budget: float,
    bidders: int = 20,
    key: str | None = None,
    **more: Any,
) -> str:
    task: dict[str, Any] = {"name": name, "rounds": rounds}
    if "kind" not in more:
        task |= {"bidders_per_round": bidders, "budget_per_round": budget}
        more = {"data": {"owners": 40, "sigma": 0.5}, "training": {"average": True}, **more}
    order = more | {"task": task | more.get("task", {})}
    return tasks.post_task(market, buyer, TaskRequest.model_validate(order), key=key).id


def _bid(broker: Broker, owner: Party, task_id: str, kind: Any, rate: float, epsilon: float) -> None:
    request = BidRequest(valuation=Valuation(kind=kind, rate=rate), privacy_budget=epsilon)
    offers.place_bid(broker, owner, task_id, request)
