"""Was what people saw of the market possible, and did everything happen that was said to have happened, once?

A history is a list of events, as clients saw them: each attempt of an operation is an `invoke` and at most one end:
`ok`, `fail` (refused, nothing happened) or `unknown` (no answer, or one that says nothing: the operation may have
happened, may happen later, or never). Attempts under the same idempotency key are one operation. `Final` is what
plain SQL finds in the tables in the end. Nothing of the market's own code has a say here.

- Exactly once: what was acknowledged is in the books once, what was refused is not, what is unknown is there at most
  once, and nothing is there that nobody asked for. Deposits are told apart by their amounts, tasks, parties and keys by
  their names: each is used once in a history.
- The log is strictly serializable: of two operations, one answered before the other was sent, the first is the first.
- Balances are linearizable, account by account (Wing and Gong, JPDC 1993; Lowe, Testing for linearizability, 2017).
  Operations on an account are sums; deposits and postings come from clients, with their times. Refunds and payments
  are the service's own: their amounts are read from the final log, and they happen some time between the request that
  made them possible (the posting, the first bid) and the first answer that tells of them (an ended task, a statement).
  Payments of one task to one owner come in the order of their rounds. An operation of unknown end counts if the
  final log has it, at any time from its start on. Refusals for lack of money are not checked.
- Registers (an owner's cap, an owner's bid in a task) are linearizable: every value is written once, so it is enough to
  look at pairs of values (Gibbons and Korach, Testing shared memories, SIAM J. Comput. 1997).
- What can only grow never shrinks: a task's state, bills, earnings, the log; what was read of the log stays so.

Breaks if amounts or names are used twice, or if clients' clocks are not one clock.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ENDED = ("finished", "cancelled", "expired", "failed")
_ORDER = {state: place for place, state in enumerate(("funding", "queued", "running"))} | dict.fromkeys(ENDED, 3)
_MOST_WAYS = 50_000  # of one account, that have to be looked at together


@dataclass(frozen=True)
class Op:
    """One operation of one client: all its attempts. `end` is infinite if nobody was told of its end."""

    id: int
    who: str
    what: str
    about: dict[str, Any]
    start: float
    end: float
    outcome: str
    value: Any = None


@dataclass(frozen=True)
class Final:
    """The tables, in the end. Entries: seq, kind, ref, debit, credit, amount."""

    entries: Sequence[tuple[int, str, str, str | None, str | None, int]] = ()
    tasks: Sequence[tuple[str, str, str, str]] = ()  # id, buyer, name, state
    parties: Sequence[str] = ()  # names
    keys: Sequence[str] = ()  # labels
    bids: Sequence[tuple[str, str, float, bool]] = ()  # task, owner, ε, active


def operations(events: Iterable[dict[str, Any]]) -> list[Op]:
    """Attempts put together."""
    attempts: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        attempts[event["op"]][event["attempt"]].append(event)
    found = []
    for number, tries in attempts.items():
        first = tries[min(tries)][0]
        ends = [tried[1] if len(tried) > 1 else {"type": "unknown"} for tried in tries.values()]
        good = min((end for end in ends if end["type"] == "ok"), key=lambda end: end["at"], default=None)
        # refused after an attempt whose end is unknown: that one may still be on its way
        refused = all(end["type"] == "fail" for end in ends)
        outcome = "ok" if good else "fail" if refused else "unknown"
        end = good["at"] if good else max(end["at"] for end in ends) if refused else math.inf
        value = good["value"] if good else None
        found.append(Op(number, first["who"], first["what"], first["about"], first["at"], end, outcome, value))
    return sorted(found, key=lambda op: op.start)


def check(events: Iterable[dict[str, Any]], final: Final) -> list[str]:
    """Everything that is wrong, in words."""
    ops = operations(events)
    return [*exactly_once(ops, final), *real_time(ops, final), *balances(ops, final), *registers(ops, final),
            *growing(ops, final)]  # fmt: skip


def _of(ops: Iterable[Op], *what: str) -> list[Op]:
    return [op for op in ops if op.what in what]


def _answered(ops: Iterable[Op], *what: str) -> list[Op]:
    return [op for op in _of(ops, *what) if op.outcome == "ok"]


# --- exactly once ---------------------------------------------------------------------------------------------------


def _effects(final: Final) -> dict[str, dict[Any, list[int]]]:
    """What happened, by what it is known by; with its place in the log if it is there."""
    found: dict[str, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    names = {task: name for task, _, name, _ in final.tasks}
    for seq, kind, ref, _, credit, amount in final.entries:
        task, _, rest = ref.partition("/")
        if kind == "deposit":
            found["deposit"][credit, amount].append(seq)
        elif kind == "hold" and rest == "escrow" and amount:
            found["post"][names.get(task, f"no task, but {ref}")].append(seq)
    for what, told in (("party", final.parties), ("key", final.keys)):
        for name in told:
            found[what][name].append(-1)
    return found


def known_by(op: Op) -> Any:
    """What tells an operation's effect from all others."""
    return (op.about["party"], op.about["amount"]) if op.what == "deposit" else op.about["name"]


def exactly_once(ops: Sequence[Op], final: Final) -> Iterator[str]:
    """Acknowledged: once. Refused: not. Unknown: at most once. Nobody asked for it: not."""
    effects = _effects(final)
    for what in ("deposit", "post", "party", "key"):
        asked = {known_by(op): op for op in _of(ops, what)}
        for name in effects[what].keys() - asked.keys():
            yield f"once: {what} {name} happened, and nobody asked for it"
        for name, op in asked.items():
            times = len(effects[what].get(name, ()))
            accepted = {"ok": (1,), "fail": (0,), "unknown": (0, 1)}[op.outcome]
            if times not in accepted:
                yield f"once: {what} {name} is {op.outcome} and happened {times} times"
    for op in _answered(ops, "post"):
        told = [name for task, _, name, _ in final.tasks if task == op.value["id"]]
        if told != [op.about["name"]]:
            yield f"once: the task {op.about['name']} was said to be {op.value['id']}, which is {told}"
    for award, count in _resolved(final).items():
        if count > 1:
            yield f"once: {award} was paid {count} times"


def _resolved(final: Final) -> dict[str, int]:
    paid: dict[str, int] = defaultdict(int)
    for _, kind, ref, *_ in final.entries:
        paid[ref] += kind == "posted"
    return paid


def real_time(ops: Sequence[Op], final: Final) -> Iterator[str]:
    """The log's order agrees with the clients' clock."""
    effects = _effects(final)
    placed = []
    for op in _of(ops, "deposit", "post"):
        found = effects[op.what].get(known_by(op), [])
        if len(found) == 1:
            placed.append((found[0], op))
    earliest, witness = math.inf, None
    for _, op in sorted(placed, key=lambda one: one[0], reverse=True):  # later entries first
        if earliest < op.start and witness is not None:
            first, second = (f"{one.what} {known_by(one)}" for one in (witness, op))
            yield f"order: {first} ended before {second} began, and is after it in the log"
        if op.end < earliest:
            earliest, witness = op.end, op


# --- balances ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Add:
    """A sum that was added to an account once between `start` and `end`; after `after`, if it says so."""

    id: str
    amount: int
    start: float
    end: float
    after: str | None = None


@dataclass(frozen=True)
class Read:
    """What somebody saw of it, at one moment between `start` and `end`; after `needs` happened, if it says so."""

    id: str
    value: int
    start: float
    end: float
    needs: str | None = None


class Undecided(Exception):
    """Too many ways in which it might have been."""


@dataclass
class _Account:
    """Where an account may stand: for each way, which of the open sums have been added, and which open reads done."""

    settled: int = 0
    closed: set[str] = field(default_factory=set)
    adds: dict[str, Add] = field(default_factory=dict)
    reads: dict[str, Read] = field(default_factory=dict)
    ways: set[tuple[frozenset[str], frozenset[str]]] = field(default_factory=lambda: {(frozenset(), frozenset())})

    def _now(self, done: frozenset[str]) -> int:
        return self.settled + sum(self.adds[name].amount for name in done)

    def _seen(self, done: frozenset[str], read: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """A read whose value stands is done now rather than later: that rules nothing out."""
        now = self._now(done)
        more = (
            name
            for name, one in self.reads.items()
            if one.value == now and (one.needs is None or one.needs in done or one.needs in self.closed)
        )
        return done, read.union(more)

    def invoke(self, one: Add | Read) -> None:
        """It may happen from now on."""
        if isinstance(one, Add):
            self.adds[one.id] = one
            return
        self.reads[one.id] = one
        self.ways = {self._seen(*way) for way in self.ways}

    def complete(self, one: Add | Read) -> bool:
        """It has happened by now; False if that cannot be."""
        self._spread()
        if isinstance(one, Read):
            del self.reads[one.id]
            self.ways = {(done, read - {one.id}) for done, read in self.ways if one.id in read}
            return bool(self.ways)
        ways = set()
        for done, read in self.ways:
            before = set()  # what has to come before it, as rounds do
            at: str | None = one.id
            while at is not None and at not in done and at in self.adds:
                before.add(at)
                at = self.adds[at].after
            ways.add(self._seen(done | before, read))
        self.settled += one.amount
        self.closed.add(one.id)
        del self.adds[one.id]
        self.ways = {(done - {one.id}, read) for done, read in ways}
        return True

    def _spread(self) -> None:
        """All ways to make further open reads come true. Sums that no open read asks for can as well come later."""
        todo = list(self.ways)
        while todo:
            done, read = todo.pop()
            now = self._now(done)
            for name, one in self.reads.items():
                if name in read:
                    continue
                for more in self._subsets(done, one.value - now):
                    way = self._seen(done | more, read)
                    if name in way[1] and way not in self.ways:
                        self.ways.add(way)
                        todo.append(way)
            if len(self.ways) > _MOST_WAYS:
                raise Undecided

    def _subsets(self, done: frozenset[str], wanted: int) -> Iterator[frozenset[str]]:
        """Which of the open sums that are not done make up `wanted`: half of them against the other half."""
        chains: dict[str, list[Add]] = defaultdict(list)
        heads: dict[str, str] = {}
        for name, one in self.adds.items():  # in the order of their rounds
            if name not in done:
                heads[name] = heads.get(one.after or "", name)
                chains[heads[name]].append(one)
        halves: list[list[tuple[int, frozenset[str]]]] = [[(0, frozenset())], [(0, frozenset())]]
        for chain in chains.values():
            steps = [(0, frozenset[str]()), *((sum(one.amount for one in chain[:k]), frozenset(
                one.id for one in chain[:k])) for k in range(1, len(chain) + 1))]  # fmt: skip
            half = 0 if len(halves[0]) <= len(halves[1]) else 1
            halves[half] = [(a + b, m | n) for (a, m), (b, n) in itertools.product(halves[half], steps)]
            if len(halves[half]) > _MOST_WAYS:
                raise Undecided
        other: dict[int, list[frozenset[str]]] = defaultdict(list)
        for amount, names in halves[1]:
            other[amount].append(names)
        for amount, names in halves[0]:
            for rest in other.get(wanted - amount, ()):
                if names or rest:
                    yield names | rest


def linearizable(adds: Sequence[Add], reads: Sequence[Read]) -> str | None:
    """None if there is an order of all of it that agrees with the clock; else the first that cannot be, in words."""
    moments: list[tuple[float, int, int, Add | Read]] = []
    for place, one in enumerate((*adds, *reads)):
        moments += [(one.start, 0, place, one), (one.end, 1, place, one)]
    account = _Account()
    try:
        for at, ends, _, one in sorted(moments, key=lambda moment: moment[:3]):
            if not ends:
                account.invoke(one)
            elif at < math.inf and not account.complete(one):
                return f"{one.id} cannot have been: {one}"
    except Undecided:
        return "undecided: too many ways in which it might have been"
    return None


def balances(ops: Sequence[Op], final: Final) -> Iterator[str]:
    """Every account on its own."""
    parties = {op.about["party"] for op in _of(ops, "account", "deposit")}
    for party in sorted(parties):
        wrong = linearizable(_adds(party, ops, final), _reads(party, ops))
        if wrong is not None:
            yield f"balance: of {party}: {wrong}"


def _reads(party: str, ops: Sequence[Op]) -> list[Read]:
    found = []
    for op in _answered(ops, "account", "deposit"):
        if op.about["party"] == party:
            needs = f"deposit {op.id}" if op.what == "deposit" else None
            found.append(Read(f"read {op.id}", op.value["balance_micros"], op.start, op.end, needs))
    return found


def _adds(party: str, ops: Sequence[Op], final: Final) -> list[Add]:
    effects, found = _effects(final), []
    buyers = {op.about["name"]: op for op in _of(ops, "post")}
    for op in _of(ops, "deposit", "post"):
        if op.about["party"] == party and (op.outcome == "ok" or effects[op.what].get(known_by(op))):
            found.append(Add(f"{op.what} {op.id}", op.about["amount"], op.start, op.end))
    names = {task: name for task, _, name, _ in final.tasks}
    ends, told = _first_told(ops)
    bid: dict[tuple[str, str], float] = {}
    for op in _of(ops, "bid"):
        bid.setdefault((op.about["task"], op.about["party"]), op.start)
    last: dict[str, str] = {}
    for _, kind, ref, _, credit, amount in final.entries:
        task, _, rest = ref.partition("/")
        if kind != "posted" or credit != party or not amount:
            continue
        seen = min(ends.get(task, math.inf), told.get(ref, math.inf))
        if rest == "refund":
            posting = buyers.get(names.get(task, ""))
            found.append(Add(ref, amount, posting.start if posting else -math.inf, seen))
        elif (task, party) in bid:
            found.append(Add(ref, amount, bid[task, party], seen, last.get(task)))
            last[task] = ref
        else:
            found.append(Add(ref, amount, -math.inf, seen))
    return found


def _first_told(ops: Sequence[Op]) -> tuple[dict[str, float], dict[str, float]]:
    """When somebody was first told that a task has ended, and that an award was paid."""
    ends: dict[str, float] = {}
    told: dict[str, float] = {}
    for op in sorted(_answered(ops, "post", "task", "cancel", "statement"), key=lambda op: op.end):
        if op.what == "statement":
            for one in op.value["releases"]:
                if one["state"] == "posted":
                    told.setdefault(one["award_id"], op.end)
        elif op.value["state"] in ENDED:
            ends.setdefault(op.value["id"], op.end)
    return ends, told


# --- registers --------------------------------------------------------------------------------------------------------


def registers(ops: Sequence[Op], final: Final) -> Iterator[str]:
    """Caps and bids, each on its own."""
    writes: dict[Any, list[Op]] = defaultdict(list)
    reads: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for op in ops:
        name = (op.what.removeprefix("read "), op.about.get("party"), op.about.get("task"))
        if op.what in ("cap", "bid"):
            writes[name].append(op)
        elif op.what in ("read cap", "read bid") and op.outcome == "ok":
            reads[name].append((op.value["value"], op.start, op.end))
    for task, owner, epsilon, _ in final.bids:
        if ("bid", owner, task) in writes:
            reads["bid", owner, task].append((epsilon, math.inf, math.inf))
    for name, written in writes.items():
        for wrong in register(written, reads[name]):
            yield f"register: {name}: {wrong}"
    yield from _withdrawn(ops, final)


def register(writes: Sequence[Op], reads: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """A register whose values are each written once; reads of what was there before the first write do not count."""
    zones: dict[float, list[tuple[float, float]]] = {}
    for op in writes:
        if op.outcome != "fail":
            zones[op.about["value"]] = [(op.start, op.end)]
    refused = {op.about["value"] for op in writes if op.outcome == "fail"}
    for value, start, end in reads:
        if value in refused:
            yield f"{value} was read, which was refused"
        if value not in zones:
            if any(op.outcome == "ok" and op.end < start for op in writes) and value not in refused:
                yield f"{value} was read, which nobody wrote, after others were written"
            continue
        if end < zones[value][0][0]:
            yield f"{value} was read before it was written"
        zones[value].append((start, end))
    # between its first end and its last start a value must have stood all the time
    spans = []
    for value, times in zones.items():
        first, last = min(end for _, end in times), max(start for start, _ in times)
        if first < math.inf:
            spans.append((first, last, value))
    forward = sorted(one for one in spans if one[0] < one[1])
    for (_, last, value), (first, _, other) in itertools.pairwise(forward):
        if first < last:
            yield f"{value} and {other} cannot both have stood when they did"
    for last, first, value in (one for one in spans if one[0] >= one[1]):
        if any(begin < first and last < end for begin, end, _ in forward):
            yield f"{value} was written while another value stood"


def _withdrawn(ops: Sequence[Op], final: Final) -> Iterator[str]:
    """Who withdrew a bid, and has certainly not bid again, does not stand in the end; and the other way round."""
    active = {(task, owner): stands for task, owner, _, stands in final.bids}
    for (task, owner), stands in active.items():
        mine = [op for op in _of(ops, "bid", "withdraw") if (op.about["task"], op.about["party"]) == (task, owner)]
        mine = [op for op in mine if op.outcome != "fail"]
        for what, wrong in (("withdraw", True), ("bid", False)):
            sure = max((op.start for op in mine if op.what == what and op.outcome == "ok"), default=None)
            if sure is not None and stands is wrong and all(op.end < sure for op in mine if op.what != what):
                yield f"register: the bid of {owner} in {task} is {'' if stands else 'not '}standing after a {what}"


# --- what only grows --------------------------------------------------------------------------------------------------


def growing(ops: Sequence[Op], final: Final) -> Iterator[str]:
    """Of two reads, one answered before the other was sent, the second shows no less."""
    seen: dict[Any, list[tuple[float, float, Any]]] = defaultdict(list)
    log = {seq: (kind, ref, amount) for seq, kind, ref, _, _, amount in final.entries}
    roots: dict[int, str] = {}
    for op in _answered(ops, "task", "post", "cancel", "bill", "statement", "head", "ledger"):
        value = op.value
        if op.what in ("task", "post", "cancel"):
            shown: Any = (_ORDER[value["state"]], value["rounds_done"], value["spent_micros"])
            seen["task", value["id"]].append((op.start, op.end, shown))
        elif op.what == "bill":
            lines = sum(line["spent_micros"] for line in value["lines"])
            total = value["spent_micros"] + value["refunded_micros"] + value["left_micros"]
            if total != value["escrow_micros"] or lines != value["spent_micros"]:
                yield f"bill: {value['task_id']}: {lines} in its lines, {value}"
            seen["bill", value["task_id"]].append((op.start, op.end, (len(value["lines"]), value["spent_micros"])))
        elif op.what == "statement":
            seen["earned", op.who].append((op.start, op.end, (value["earned_micros"],)))
        elif op.what == "head":
            if roots.setdefault(value["entries"], value["root"]) != value["root"]:
                yield f"log: two roots at {value['entries']} entries"
            seen["head", ""].append((op.start, op.end, (value["entries"],)))
        else:
            for entry in value["items"]:
                if log.get(entry["seq"]) != (entry["kind"], entry["ref"], entry["amount_micros"]):
                    yield f"log: entry {entry['seq']} was read as {entry}, it is {log.get(entry['seq'])}"
            size = max((entry["seq"] for entry in value["items"]), default=-1) + 1
            seen["head", ""].append((op.start, op.end, (size,)))
    for name, reads in seen.items():
        yield from _shrinking(name, reads)


def _shrinking(name: Any, reads: list[tuple[float, float, Any]]) -> Iterator[str]:
    ended = sorted(reads, key=lambda read: read[1])
    at, most = 0, None
    for start, _, shown in sorted(reads, key=lambda read: read[0]):
        while at < len(ended) and ended[at][1] < start:
            most = ended[at][2] if most is None else tuple(map(max, zip(most, ended[at][2], strict=True)))
            at += 1
        if most is not None and any(now < before for now, before in zip(shown, most, strict=True)):
            yield f"growing: {name} was {most} before, and then {shown}"
