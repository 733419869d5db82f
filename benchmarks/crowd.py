"""A large market, quickly built: parties, tasks, and one task of many rounds, straight into the stores.

What is written is what the services would have written: the ledger verifies and agrees with the broker's rows
(`reconcile`), names are as long and as odd as the rules let them be. Only the models are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert

from flmarket.broker.core import Broker, Party
from flmarket.broker.office import offers, parties, sessions, tasks
from flmarket.broker.requests import BidRequest, TaskRequest, Valuation
from flmarket.broker.stamps import derived_id, now
from flmarket.broker.tables import AuditLog, Event, PartyRow, PayoutRow, Release, RoundRow, Slot, TaskRow
from flmarket.ledger import MICROS, Award, AwardState, Resolution
from flmarket.ledger import Release as Given
from flmarket.ledger.memory import Wanted
from flmarket.privacy import PureDp, event_to_dict

EPSILON, PRICE = 0.001, 20_000
LONG_NAME = "Gesellschaft für außerordentlich lange Namen ohne Leerzeichen".ljust(80, "n")
_BATCH = 3_000  # awards


@dataclass(frozen=True)
class Size:
    """How large: `awards` in every round of the long task, `crowded` in the last of those that were played."""

    parties: int
    tasks: int
    rounds: int
    awards: int
    crowded: int
    under_way: int = 60

    @property
    def played(self) -> int:
        """Rounds of the long task that are over; the last one is still to come."""
        return self.rounds - 1


FULL = Size(parties=5_000, tasks=500, rounds=1_000, awards=20, crowded=900)


_SHORT = (
    "me", "me/keys", "me/sessions", "me/users", "me/hooks", "me/notices", "catalogue", "ledger/head",
    "disputes", "audits",
)  # fmt: skip


@dataclass(frozen=True)
class Crowd:
    """What was built, and who may look at it: cookies by role."""

    size: Size
    people: dict[str, Party]
    cookies: dict[str, str]
    keys: dict[str, str]
    task: str
    last_buyer: str

    def pages(self) -> dict[str | None, list[str]]:
        """Addresses of pages and lists by who looks at them; None is a stranger."""
        task, rounds, api = self.task, self.size.played, "/api/v1"
        market = ["/", "/market/tasks", f"/market/{task}", f"/market/{task}/live", "/ledger", "/sign-in"]
        found = "/?q=task%201"
        everybody = [f"{api}/market", f"{api}/listings/{task}", f"{api}/ledger", f"{api}/ledger?search=release"]
        everybody += ["/account", "/disputes", *(f"{api}/{one}" for one in _SHORT)]
        own = [
            "/tasks", "/tasks?q=task%201", f"/tasks/{task}", f"/tasks/{task}?page=3", f"/tasks/{task}/live",
            f"/tasks/{task}/rounds/1", f"/tasks/{task}/rounds/{rounds}", f"/tasks/{task}/rounds/{rounds}?page=3",
            f"{api}/tasks", f"{api}/tasks?limit=50", f"{api}/tasks/{task}", f"{api}/tasks/{task}/rounds",
            f"{api}/tasks/{task}/rounds/{rounds - 1}", f"{api}/tasks/{task}/bill",
        ]  # fmt: skip
        ledger = ["/ledger?q=release", "/ledger?q=nothing-like-it", f"/ledger/entries?q={task}"]
        return {
            None: [*market, found, "/market/compare",
                   f"/market/compare?task={task}&task={derived_id('t', 'crowd', '1')}"],
            "buyer": [*market, *own, *ledger, *everybody, "/tasks/new", "/tasks/data", f"{api}/evaluations", "/audit"],
            "owner": [
                *market, *ledger, *everybody, "/owner", "/owner?page=3", "/owner/bid", f"{api}/offers",
                f"{api}/me/statement", f"{api}/me/privacy", f"{api}/me/account", "/audit",
            ],
            "operator": [
                *market, *own, *ledger, *everybody, "/operator", "/operator?q=party%201", "/operator?page=9",
                "/operator/health", "/operator/log", "/operator/log?q=party%2012",
                f"/operator/parties/{self.last_buyer}", f"/operator/parties/{self.people['owner'].id}",
                f"{api}/operator/parties", f"{api}/operator/parties?search=party%204", f"{api}/operator/status",
                f"{api}/operator/audit-log", f"{api}/operator/payouts", "/operator/payouts",
            ],
        }  # fmt: skip


def build(broker: Broker, size: Size) -> Crowd:
    """The market; takes about half a minute at full size."""
    people = {role: _join(broker, role) for role in ("buyer", "owner", "operator")}
    others = [derived_id("p", "crowd", str(k)) for k in range(size.parties - 3)]
    roles = ["buyer" if k % 10 == 0 else "owner" for k in range(len(others))]
    owners = [one for one, role in zip(others, roles, strict=True) if role == "owner"]
    _parties(broker, others, roles, owners)
    parties.deposit(broker, None, people["buyer"].id, 10**9 * MICROS)
    task = _long_task(broker, people["buyer"], size)
    _others(broker, people["buyer"], task, size)
    _rounds(broker, people["owner"], task, owners, size)
    keys = {role: parties.issue_key(broker, None, one.id, label="crowd").key for role, one in people.items()}
    cookies = {role: sessions.sign_in(broker, key).cookie for role, key in keys.items()}
    last = [one for one, role in zip(others, roles, strict=True) if role == "buyer"][-1]
    return Crowd(size, people, cookies, keys, task, last)


def _join(broker: Broker, role: Any) -> Party:
    view = parties.create_party(broker, None, role=role, name=LONG_NAME if role == "owner" else f"Crowd {role}")
    return Party(view.id, role, view.name)


def _parties(broker: Broker, ids: list[str], roles: list[str], owners: list[str]) -> None:
    at = now()
    rows = [
        {"id": one, "role": role, "name": LONG_NAME if k % 50 == 7 else f"party {k}", "created_at": at + k}
        for k, (one, role) in enumerate(zip(ids, roles, strict=True))
    ]
    lines = [{"at": at + k, "action": "party.create", "target": one, "outcome": "ok"} for k, one in enumerate(ids)]
    paid = [
        {"id": derived_id("w", one), "party_id": one, "amount_micros": MICROS, "state": "sent", "reference": "crowd"}
        | {"created_at": at + k, "sent_at": at + k}
        for k, one in enumerate(ids[::10])
    ]
    with broker.database.write() as session:
        session.execute(insert(PartyRow), [{"active": True} | row for row in rows])
        session.execute(insert(AuditLog), lines)
        session.execute(insert(PayoutRow), paid)
    # one transaction for all of them: a call for each would sync the disk for each
    book = broker.books.ledger
    wanted = Wanted(owners=owners, privacy=True)
    book._write(wanted, lambda draft: [draft.register_cap(one, PureDp(10.0)) for one in owners])
    for start in range(0, len(paid), _BATCH):
        some = paid[start : start + _BATCH]
        wanted = Wanted([f"d{one['id']}" for one in some], [str(one["party_id"]) for one in some])
        book._write(wanted, lambda draft, some=some: [  # type: ignore[misc]
            draft.deposit(f"d{one['id']}", one["party_id"], 2 * MICROS) for one in some])  # fmt: skip
        wanted = Wanted([str(one["id"]) for one in some], [str(one["party_id"]) for one in some])
        book._write(wanted, lambda draft, some=some: [  # type: ignore[misc]
            draft.withdraw(one["id"], one["party_id"], MICROS) for one in some])  # fmt: skip


def _long_task(broker: Broker, buyer: Party, size: Size) -> str:
    """Through the service, so that its terms are there; its rounds come later."""
    places = size.crowded
    order = {
        "task": {"name": LONG_NAME, "rounds": size.rounds, "bidders_per_round": places, "budget_per_round": 100},
        "data": {"name": "digits", "owners": places, "partition": "equal"},
        "broker": {"simulated": False, "minimum_bids": places},
    }
    return tasks.post_task(broker, buyer, TaskRequest.model_validate(order)).id


def _others(broker: Broker, buyer: Party, like: str, size: Size) -> None:
    """More tasks: some under way, of which some wait for Flower; most have ended and were paid back."""
    with broker.database.read() as session:
        model = session.get_one(TaskRow, like)
        shape = {column.key: getattr(model, column.key) for column in TaskRow.__table__.columns}
    rows, awards = [], []
    for k in range(1, size.tasks):
        task, live = derived_id("t", "crowd", str(k)), k % (size.tasks // size.under_way or 1) == 0
        spec = shape["spec"]
        if live and k % 4 == 0:
            spec = spec | {"broker": spec["broker"] | {"engine": "flower"}}
        back = 0 if live else MICROS
        made = {"id": task, "name": f"task {k}", "state": "running" if live else "finished", "spec": spec}
        made |= {"escrow_micros": MICROS, "refunded_micros": back, "created_at": shape["created_at"] - 1000 * k}
        rows.append(shape | made | {"rounds": 3, "spent_micros": 0, "rounds_done": 0 if live else 3})
        awards.append(Award(f"{task}/escrow", 0, buyer.id, task, 0.0, MICROS))
        if not live:
            awards.append(Award(f"{task}/refund", 0, task, buyer.id, 0.0, MICROS))
    with broker.database.write() as session:
        session.execute(insert(TaskRow), rows)
        session.execute(
            insert(Slot), [{"task_id": row["id"], "slot": slot, "records": 5} for row in rows for slot in range(3)]
        )
    for ending in ("escrow", "refund"):  # money comes before it goes
        some = [award for award in awards if award.id.endswith(ending)]
        broker.books.ledger.hold_many(some)
        broker.books.ledger.resolve_many(Resolution(award.id, AwardState.POSTED) for award in some)


def _rounds(broker: Broker, owner: Party, task: str, owners: list[str], size: Size) -> None:
    bid = BidRequest(valuation=Valuation(kind="linear", rate=0.01), privacy_budget=EPSILON)
    offers.place_bid(broker, owner, task, bid)
    crowd = [owner.id, *owners][: size.crowded]
    at, loss = now(), event_to_dict(PureDp(EPSILON))
    with broker.database.write() as session:
        for slot, party in enumerate(crowd[1:], 1):
            session.get_one(Slot, (task, slot)).party_id = party
    batch: list[tuple[int, list[int]]] = []
    for index in range(size.played):
        last = index == size.played - 1
        count = min(size.crowded if last else size.awards, len(crowd))
        some = range(1, count) if last else sorted({1 + (7 * index + k) % (len(crowd) - 1) for k in range(count - 1)})
        slots = [0, *some]
        batch.append((index, slots))
        if last or sum(len(one) for _, one in batch) >= _BATCH:
            _settle(broker, task, crowd, batch, at, loss)
            batch = []
    with broker.database.write() as session:
        row = session.get_one(TaskRow, task)
        row.state, row.rounds_done, row.accuracy, row.error_bound = "running", size.played, 0.83, 1.5


def _settle(
    broker: Broker, task: str, crowd: list[str], batch: list[tuple[int, list[int]]], at: int, loss: dict[str, Any]
) -> None:
    sold = [(index, slot, f"{task}/{index}/{slot}") for index, slots in batch for slot in slots]
    book = broker.books.ledger
    book.hold_many(Award(one, index, task, crowd[slot], EPSILON, PRICE) for index, slot, one in sold)
    book.resolve_many(
        Resolution(one, AwardState.POSTED, release=Given(one, "laplace-l1", PureDp(EPSILON))) for _, _, one in sold
    )
    with broker.database.write() as session:
        session.execute(insert(RoundRow), [_round(task, index, len(slots), at) for index, slots in batch])
        session.execute(
            insert(Release),
            [
                {"task_id": task, "index": index, "slot": slot, "party_id": crowd[slot], "epsilon": EPSILON}
                | {"records": 1.0, "weight": 0.01, "price_micros": PRICE, "state": "posted", "reason": ""}
                | {"award_id": one, "at": at + index}
                for index, slot, one in sold
            ],
        )
        session.execute(insert(Event), [one for index, slots in batch for one in _events(task, index, slots, at, loss)])
        session.get_one(TaskRow, task).spent_micros += PRICE * len(sold)


def _round(task: str, index: int, awards: int, at: int) -> dict[str, Any]:
    told = {"bids": awards + 5, "winners": awards, "delivered": awards, "budget_micros": 100 * MICROS}
    told |= {"spent_micros": PRICE * awards, "error_bound": 1.5, "accuracy": 0.5 + 0.4 * index / (index + 40)}
    return {"task_id": task, "index": index, "state": "settled", "opened_at": at, "closed_at": at + index} | told


def _events(task: str, index: int, slots: list[int], at: int, loss: dict[str, Any]) -> Iterator[dict[str, Any]]:
    shown = [{"slot": slot, "epsilon": EPSILON, "price_micros": PRICE, "loss": loss} for slot in slots[:200]]
    count, held = len(slots), PRICE * len(slots)
    for kind, data in (
        ("open", {}),
        ("bids", {"bids": count + 5, "budget_micros": 100 * MICROS}),
        ("awards", {"awards": count, "held_micros": held, "winners": shown}),
        ("updates", {"awards": count, "delivered": count}),
        ("settled", {"delivered": count, "winners": count, "spent_micros": held, "accuracy": 0.8, "rounds": index + 2}),
    ):
        yield {"task_id": task, "kind": kind, "data": {"round": index, **data}, "at": at + index}
