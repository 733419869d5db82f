"""What must hold after every step and in the end, told by entries, rows and messages alone.

No code of the ledger, the round or the guard has a say here: money is counted again from the log's lines, privacy from
the rows of owners' files, and what left a machine from what the network saw. The rules:

    money      every line takes from one account what it gives to another; none but the bank's is negative
    escrow     what is in escrow is the sum of the open holds, and nothing is left of a task that has ended
    once       an award is held once, released for once and resolved once, to the right party, at its price
    cap        nobody has given away more than her cap allows, by the ledger and by her own account
    charged    what left a machine was charged before; what was paid for, or came and was bad, is on the ledger
    one        for one release one vector leaves, however often it is asked for
    touched    records are read for a release that was claimed and charged, and for no other
    sold       nothing leaves for less than was asked, for more privacy or records than were bid, or without a hold
    paid       who is paid has delivered, and who has delivered is paid
    bill       a round's record says what the ledger did
    home       the ledger knows of no release that its owner's account does not
    ends       once nothing breaks any more, every task ends

A broker's books and rows, told by SQL alone: did anybody lose?

No code of the broker or the ledger has a say: the log is counted by `Books`, and bills, statements and tasks are
held against that. `look` is for any moment, `verdict` for the end, when every task must have ended.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flmarket.ledger import Ledger
from flmarket.market import RoundRecord

SLACK = 1e-9  # relative: sums of a few hundred floating-point numbers
_ENDS = ("posted", "voided", "expired")
Broke = Callable[[str, str], None]


def pure(event: Mapping[str, Any]) -> float:
    """ε of a loss; ∞ if it has no pure one."""
    return float(event["epsilon"]) if event["kind"] in ("pure-dp", "exponential") else math.inf


def rho(event: Mapping[str, Any]) -> float:
    """ρ of a loss (Bun and Steinke 2016, Propositions 1.4 and 1.6); ∞ if it has none."""
    kind = event["kind"]
    if kind == "zcdp":
        return float(event["rho"])
    if kind == "gaussian":
        return 1 / (2 * float(event["noise_multiplier"]) ** 2)
    return float(event["epsilon"]) ** 2 / 2 if kind == "pure-dp" else math.inf


def beyond(cap: Mapping[str, Any], given: Iterable[Mapping[str, Any]]) -> float:
    """By which factor so much passes a cap; 0 for caps that are not counted here."""
    if cap["kind"] == "pure-dp":
        return sum(map(pure, given)) / float(cap["epsilon"])
    return sum(map(rho, given)) / float(cap["rho"]) if cap["kind"] == "zcdp" else 0.0


@dataclass
class Books:
    """A ledger's log, read line by line as it grows."""

    broke: Broke
    size: int = 0
    balances: Counter[str] = field(default_factory=Counter)
    holds: dict[str, dict[str, Any]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    caps: dict[str, dict[str, Any]] = field(default_factory=dict)
    open_micros: int = 0
    _by_owner: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def read(self, lines: Iterable[dict[str, Any]]) -> None:
        """Everything that is new: the log's lines from `size` on."""
        for line in lines:
            if line["seq"] != self.size:
                self.broke("money", f"entry {self.size} of the log is missing")
            self.take(line)
            self.size = line["seq"] + 1
        if self.balances["escrow"] != self.open_micros:
            self.broke("escrow", f"{self.balances['escrow']} in escrow, open holds are {self.open_micros}")

    def compare(self, kept: Mapping[str, int]) -> None:
        """The balances that are kept beside the log are those of its lines."""
        for name in self.balances.keys() | kept.keys():
            if self.balances[name] != kept.get(name, 0):
                self.broke("money", f"{name} is kept as {kept.get(name, 0)}, the lines say {self.balances[name]}")
        if sum(self.balances.values()):
            self.broke("money", f"all accounts together hold {sum(self.balances.values())}")

    def take(self, line: dict[str, Any]) -> None:
        """One line of the log."""
        kind, ref, amount, owner = line["kind"], line["ref"], line["amount_micros"], line["owner"]
        if line["debit"] is not None:
            self.balances[line["debit"]] -= amount
            self.balances[line["credit"]] += amount
            if self.balances[line["debit"]] < 0 and line["debit"] != "bank":
                self.broke("money", f"{kind} {ref}: {line['debit']} is left with {self.balances[line['debit']]}")
        if kind == "hold":
            self._once(self.holds, kind, ref, line)
            self.open_micros += amount
        elif kind in _ENDS:
            self._end(kind, ref, amount, line["credit"])
        elif kind == "cap":
            self.caps[owner] = json.loads(line["detail"])["cap"]
        elif kind == "release":
            self._release(ref, owner, json.loads(line["detail"])["guarantee"])
        if kind in ("cap", "release") and owner in self.caps:
            share = beyond(self.caps[owner], self._by_owner[owner])
            if share > 1 + SLACK:
                self.broke("cap", f"{owner} has given {share:g} times her registered cap by {ref}")

    def _once(self, known: dict[str, Any], kind: str, ref: str, value: Any) -> None:
        if ref in known:
            self.broke("once", f"a second {kind} of {ref}")
        known[ref] = value

    def _end(self, kind: str, ref: str, amount: int, credit: str) -> None:
        self._once(self.ends, "end", ref, kind)
        hold = self.holds.get(ref)
        if hold is None:
            self.broke("once", f"{ref} is {kind} and was never held")
            return
        self.open_micros -= hold["amount_micros"]
        payee = hold["owner"] if kind == "posted" else hold["debit"]
        if (amount, credit) != (hold["amount_micros"], payee):
            self.broke("once", f"{ref} is {kind}: {amount} to {credit}, not {hold['amount_micros']} to {payee}")
        if kind == "posted" and ref not in self.given and self.sells(ref):
            self.broke("charged", f"{ref} is paid, and no release is on the ledger")

    def sells(self, ref: str) -> bool:
        """Whether an award is for privacy that something bounds."""
        loss = json.loads(self.holds[ref]["detail"]).get("loss")
        return loss is not None and loss["kind"] != "unprotected"

    def _release(self, ref: str, owner: str, event: dict[str, Any]) -> None:
        self._once(self.given, "release", ref, event)
        self._by_owner[owner].append(event)
        loss = json.loads(self.holds[ref]["detail"]).get("loss", {"kind": "pure-dp", "epsilon": 0.0})
        measure = pure if loss["kind"] == "pure-dp" else rho
        if measure(event) > measure(loss) * (1 + SLACK):
            self.broke("cap", f"{ref} is for {loss}, {event} was given away")


@dataclass
class Home:
    """One owner's account, as its rows say. The file is opened beside whoever uses it."""

    number: int
    path: Path
    broke: Broke
    charged: dict[str, dict[str, Any]] = field(default_factory=dict)
    _read: int = 0
    _file: sqlite3.Connection | None = None

    def look(self) -> None:
        """Read what is new, and hold it against the cap."""
        if self._file is None:
            if not self.path.exists():
                return
            self._file = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, check_same_thread=False)
        query = "SELECT number, award_id, guarantee FROM releases WHERE number > ? ORDER BY number"
        for number, release, text in self._file.execute(query, (self._read,)):
            if release in self.charged:
                self.broke("once", f"owner {self.number} was charged twice for {release}")
            self.charged[release], self._read = json.loads(text), number
        (cap,) = self._file.execute("SELECT cap FROM caps ORDER BY number DESC LIMIT 1").fetchone()
        share = beyond(json.loads(cap), self.charged.values())
        if share > 1 + SLACK:
            self.broke("cap", f"owner {self.number} has given {share:g} times her own cap")

    def close(self) -> None:
        """Leave the file alone."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class Sold:
    """An order as the network saw it go to a machine, in numbers."""

    award: str
    release: str
    amount: float
    records: int
    price_micros: int
    cost: float


class Watch:
    """Everything that was seen of one run; `broken` is what was wrong, in the order in which it was found."""

    def __init__(self) -> None:
        self.broken: list[tuple[str, str]] = []
        self.books = Books(self.broke)
        self.homes: dict[int, Home] = {}
        self.held: set[tuple[str, str, int]] = set()  # award, owner, price: whatever a ledger ever held
        self.bids: dict[tuple[int, str, int], tuple[float, int]] = {}  # owner, task, round: privacy, records
        self.left: dict[tuple[int, str], bytes] = {}
        self.handed: defaultdict[str, set[str]] = defaultdict(set)  # by release: what came of it
        self.liars: set[int] = set()

    def broke(self, rule: str, message: str) -> None:
        """A promise was not kept."""
        self.broken.append((rule, message))

    def look(self, ledger: Ledger) -> None:
        """After a step."""
        before = len(self.books.holds)
        self.books.read(entry.to_dict() for entry in ledger.entries(self.books.size))
        if len(self.books.holds) > before:
            for ref, hold in list(self.books.holds.items())[before:]:
                self.held.add((ref, hold["owner"], hold["amount_micros"]))
        for home in self.homes.values():
            home.look()

    def leaves(self, number: int, sold: Sold, bid: tuple[float, int] | None, vector: bytes) -> None:
        """A vector leaves an owner's machine for an order."""
        home, name = self.homes[number], f"owner {number}"
        home.look()
        if sold.release not in home.charged:
            self.broke("charged", f"{sold.release} leaves {name}, and her account does not know it")
        if self.left.setdefault((number, sold.release), vector) != vector:
            self.broke("one", f"a second vector leaves {name} for {sold.release}")
        if bid is None:
            self.broke("sold", f"{sold.release} leaves {name}, who made no bid")
            return
        if sold.amount > bid[0] * (1 + SLACK) or sold.records > bid[1]:
            self.broke("sold", f"{sold.release}: {sold.amount:g} of {sold.records} records leave {name}, who bid {bid}")
        if (sold.award, f"owner-{number}", sold.price_micros) not in self.held:
            self.broke("sold", f"{sold.release} leaves {name} for a price of {sold.price_micros} that nobody holds")
        if sold.price_micros < math.floor(sold.cost * 1e6 * (1 - SLACK)):
            self.broke("sold", f"{sold.release} leaves {name} for {sold.price_micros}, it costs her {sold.cost:g}")

    def record(self, task: str, record: RoundRecord, *, lasting: bool, last: bool) -> None:
        """A round's record is about to be written: what it says of awards is what the ledger says."""
        for place, owner in enumerate(record.bidders.tolist()):
            said, ref = record.state[place], f"{task}/{0 if lasting else record.index}/{owner}"
            if said is None:
                continue
            if ref not in self.books.holds:
                self.broke("bill", f"round {record.index} of {task} tells of {ref}, which was never held")
                continue
            known = self.books.ends.get(ref, "pending")
            runs_on = lasting and not last and known == "pending"
            if said.value != ("posted" if runs_on else known):
                self.broke("bill", f"round {record.index} of {task} says {ref} is {said.value}, it is {known}")
            price, held = int(record.price_micros[place]), self.books.holds[ref]["amount_micros"]
            if said.value == "posted" and not runs_on and price != held:
                self.broke("bill", f"round {record.index} of {task} bills {price} for {ref}, the hold is {held}")

    def ended(self, task: str, spent_micros: int, rounds: int, *, lasting: bool) -> None:
        """A task is over; its records say that it cost so much."""
        books, paid = self.books, 0
        for ref, hold in books.holds.items():
            if not ref.startswith(f"{task}/"):
                continue
            end, owner = books.ends.get(ref), int(ref.rpartition("/")[2])
            if end is None:
                self.broke("escrow", f"{task} is over, and {ref} is still held")
            elif end == "posted":
                paid += hold["amount_micros"]
                self._earned(ref, rounds, lasting=lasting)
            elif end == "voided":
                self._bad(ref, owner, rounds, lasting=lasting)
            if owner not in self.liars and ref in books.given:
                self._known_at_home(ref, owner)
        if paid != spent_micros:
            self.broke("bill", f"{task} is said to have cost {spent_micros}, the ledger paid {paid}")

    def unpaid(self, release: str, owner: int) -> None:
        """Nothing was broken when this round was collected, and an award of it expired."""
        if owner not in self.liars and (owner, release) in self.left:
            self.broke("paid", f"owner {owner} released {release}, could be asked for it, and is not paid")

    def _earned(self, ref: str, rounds: int, *, lasting: bool) -> None:
        for release in [f"{ref}@{index}" for index in range(rounds)] if lasting else [ref]:
            if "good" not in self.handed[release]:
                self.broke("paid", f"{ref} is paid, and nothing good came for {release}")

    def _bad(self, ref: str, owner: int, rounds: int, *, lasting: bool) -> None:
        came: set[str] = set()
        for release in [f"{ref}@{index}" for index in range(rounds + 1)] if lasting else [ref]:
            came |= self.handed[release]
        charged = ref in self.books.given or self.books.holds[ref]["owner"] in self.books.caps
        if "bad" in came and "refused" not in came and self.books.sells(ref) and not charged:
            self.broke("charged", f"something bad left owner {owner} for {ref}, and it is on nobody's account")

    def _known_at_home(self, ref: str, owner: int) -> None:
        charged, event = self.homes[owner].charged, self.books.given[ref]
        mine = [one for release, one in charged.items() if release == ref or release.startswith(f"{ref}@")]
        if not mine:
            self.broke("home", f"the ledger has a release of owner {owner} for {ref}, her account has none")
        elif rho(event) > sum(map(rho, mine)) * (1 + SLACK):
            self.broke("home", f"the ledger has {event} of owner {owner} for {ref}, her account less")


ENDED = ("finished", "cancelled", "expired", "failed")
_NAMES = ("seq", "kind", "ref", "debit", "credit", "amount_micros", "owner", "detail")
_SPECS = "SELECT id, spec FROM broker_tasks"
_LINES = f"SELECT {', '.join(_NAMES)} FROM ledger_entries WHERE seq >= {{}} ORDER BY seq"  # noqa: S608


class Connection(Protocol):
    """What drivers of both databases have."""

    def execute(self, query: Any, /) -> Any:
        """Run a query; the answer has `fetchall`."""


def rows(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    """All of a query's."""
    return list(connection.execute(query).fetchall())


def look(connection: Connection, books: Books) -> None:
    """Read what the log has that is new."""
    books.read(dict(zip(_NAMES, row, strict=True)) for row in rows(connection, _LINES.format(books.size)))


def verdict(connection: Connection, *, broke: Broke, money_micros: int | None = None) -> Books:
    """Everything that is wrong at the end; with `money_micros`, what every buyer had at first."""
    books = Books(broke)
    look(connection, books)
    kept = dict(rows(connection, "SELECT name, balance FROM ledger_accounts"))
    books.compare(kept)
    if kept.get("escrow", 0):
        broke("escrow", f"escrow keeps {kept['escrow']}")
    for ref in books.holds.keys() - books.ends.keys():
        broke("escrow", f"{ref} was never resolved")
    spent = _tasks(connection, books, kept, broke)
    if money_micros is not None:
        for buyer, cost in spent.items():
            if kept.get(buyer, 0) != money_micros - cost:
                broke("money", f"{buyer} has {kept.get(buyer, 0)} after spending {cost}")
    _statements(connection, books, kept, broke)
    return books


def _paid(books: Books, ref: str) -> int:
    return int(books.holds[ref]["amount_micros"]) if books.ends.get(ref) == "posted" else 0


def _tasks(connection: Connection, books: Books, kept: dict[str, int], broke: Broke) -> Counter[str]:
    """Bills of tasks and rounds; what each buyer spent."""
    query = "SELECT id, buyer_id, state, escrow_micros, spent_micros, refunded_micros FROM broker_tasks"
    tasks = rows(connection, query)
    known, of_task, bought = {row[0] for row in tasks}, defaultdict(list), Counter[str]()
    for ref in books.holds:
        of_task[ref.partition("/")[0]].append(ref)
        if ref.endswith("/escrow") and ref.partition("/")[0] not in known and books.holds[ref]["amount_micros"]:
            broke("escrow", f"{ref}: money for no task")
    lasting, by_round = lasting_tasks(connection), Counter[str]()
    query = 'SELECT task_id, "index", state, closed_at, spent_micros FROM broker_rounds'
    for task, index, state, closed, cost in rows(connection, query):
        by_round[task] += cost
        paid = sum(_paid(books, ref) for ref in of_task[task] if ref.startswith(f"{task}/{index}/"))
        if closed is None or (task not in lasting and paid != cost):
            broke("bill", f"round {index} of {task} is {state}, billed {cost}, the ledger paid {paid}")
    for task, buyer, state, escrow, spent, refunded in tasks:
        paid = sum(_paid(books, ref) for ref in of_task[task] if ref.count("/") == 2)
        moved = [_paid(books, f"{task}/{end}") if f"{task}/{end}" in books.holds else 0 for end in ("escrow", "refund")]
        bought[buyer] += spent
        if state not in ENDED:
            broke("ends", f"{task} is {state}")
        if kept.get(task, 0) or [moved[0], paid, moved[1]] != [escrow, spent, refunded] or escrow != spent + refunded:
            said = f"{escrow} in, {spent} spent, {refunded} back"
            broke("bill", f"{task} ({state}): {said}; ledger {moved[0]}, {paid}, {moved[1]}")
        if by_round[task] != spent:
            broke("bill", f"{task}: the rounds cost {by_round[task]}, the task {spent}")
    return bought


def lasting_tasks(connection: Connection) -> set[str]:
    """Tasks whose awards run over all rounds."""
    specs = {task: json.loads(spec) if isinstance(spec, str) else spec for task, spec in rows(connection, _SPECS)}
    return {task for task, spec in specs.items() if spec["kind"] in ("reward", "joint")}


def _statements(connection: Connection, books: Books, kept: dict[str, int], broke: Broke) -> None:
    """What owners are told is what the ledger did."""
    earned, seen = Counter[str](), set()
    query = "SELECT award_id, task_id, slot, party_id, state, price_micros, epsilon FROM broker_releases"
    for award, task, slot, party, state, price, epsilon in rows(connection, query):
        owner, hold = party or f"{task}/owner-{slot}", books.holds.get(award)
        if award in seen:
            broke("bill", f"{award} is in two statements")
        seen.add(award)
        if hold is None or (owner, price) != (hold["owner"], hold["amount_micros"]):
            broke("bill", f"the statement of {award} says {owner}, {price}: {hold}")
            continue
        loss = json.loads(hold["detail"]).get("loss", {"kind": "pure-dp", "epsilon": 0.0})
        if loss["kind"] == "pure-dp" and loss["epsilon"] != epsilon:
            broke("bill", f"the statement of {award} says {epsilon}: {loss}")
        if books.ends.get(award, "pending") != state:
            broke("bill", f"the statement of {award} says {state}, it is {books.ends.get(award, 'pending')}")
        earned[owner] += price if state == "posted" else 0
    for ref in books.holds:
        if ref.count("/") == 2 and ref not in seen:
            broke("bill", f"{ref} is in no statement")
    for name, amount in kept.items():
        if ("/owner-" in name or name in earned) and amount != earned[name]:
            broke("money", f"{name} has {amount}, earned {earned[name]}")
