"""A broker's books and rows, told by SQL alone: did anybody lose?

No code of the broker or the ledger has a say: the log is counted by `watch.Books`, and bills, statements and tasks are
held against that. `look` is for any moment, `verdict` for the end, when every task must have ended.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any, Protocol

from flmarket.simulator.watch import Books, Broke

ENDED = ("finished", "cancelled", "expired", "failed")
_NAMES = ("seq", "kind", "ref", "debit", "credit", "amount_micros", "owner", "detail")
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
    for row in rows(connection, _LINES.format(books.size)):
        if row[0] != books.size:
            books.broke("money", f"entry {books.size} of the log is missing")
        books.take(dict(zip(_NAMES, row, strict=True)))
        books.size = row[0] + 1
    if books.balances["escrow"] != books.open_micros:
        books.broke("escrow", f"{books.balances['escrow']} in escrow, open holds are {books.open_micros}")


def verdict(connection: Connection, *, broke: Broke, money_micros: int | None = None) -> Books:
    """Everything that is wrong at the end; with `money_micros`, what every buyer had at first."""
    books = Books(broke)
    look(connection, books)
    kept = dict(rows(connection, "SELECT name, balance FROM ledger_accounts"))
    for name in books.balances.keys() | kept.keys():
        if books.balances[name] != kept.get(name, 0):
            broke("money", f"{name} is kept as {kept.get(name, 0)}, the lines say {books.balances[name]}")
    if sum(kept.values()) or kept.get("escrow", 0):
        broke("escrow", f"escrow keeps {kept.get('escrow', 0)}")
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
    query = "SELECT id, buyer_id, state, escrow_micros, spent_micros, refunded_micros, spec FROM broker_tasks"
    tasks = rows(connection, query)
    known, of_task, bought = {row[0] for row in tasks}, defaultdict(list), Counter[str]()
    for ref in books.holds:
        of_task[ref.partition("/")[0]].append(ref)
        if ref.endswith("/escrow") and ref.partition("/")[0] not in known and books.holds[ref]["amount_micros"]:
            broke("escrow", f"{ref}: money for no task")
    lasting = {row[0] for row in tasks if _spec(row[6])["kind"] in ("reward", "joint")}
    by_round: Counter[str] = Counter()
    query = 'SELECT task_id, "index", state, closed_at, spent_micros FROM broker_rounds'
    for task, index, state, closed, cost in rows(connection, query):
        by_round[task] += cost
        paid = sum(_paid(books, ref) for ref in of_task[task] if ref.startswith(f"{task}/{index}/"))
        if closed is None or (task not in lasting and paid != cost):
            broke("bill", f"round {index} of {task} is {state}, billed {cost}, the ledger paid {paid}")
    for task, buyer, state, escrow, spent, refunded, _ in tasks:
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


def _spec(stored: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stored) if isinstance(stored, str) else stored
    return found


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
