"""The round: the only place where one is played, whatever the market, the owners and the books.

    1 announce, collect bids                      who does not answer is not in the round
    2 decide, write the plan down                 from here the round is the same after any crash
    3 bring the budget in, hold every award       by ids that follow from task, round and owner: repeatable
    4 send orders, check and store deliveries     a bad one voids its award and is charged; a good one is stored
    5 pay, expire what did not come               repeatable, from the stored deliveries
    6 write the record and the next model         the round is over

`Rounds.steps` is a generator that stops after each, so that a service can show and stop between them. What must not be
lost is stored before the next step, and a round that was cut off goes on from its plan: owners whose award is open are
asked for what they may have released already, and only then to train. One who says that she has released meanwhile is
asked once more. So an owner who released is paid even if whoever asked is gone.

What differs comes in through three seams: the kind (`kind`), the owners (`Owners`), and the books, ledger and store. A
mechanism's decisions are the kind's; what they may do to money and privacy is decided here.

What would break it: a ledger that is not the one the awards were held in. Store and ledger belong together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput, PrivacyBudgetExhausted, SettlementError
from flmarket.ledger import Award, AwardState, Frozen, Head, HoldReceipt, IdReused, Ledger, MemoryLedger, Resolution
from flmarket.market.kind import (
    Announcement,
    Bad,
    Bid,
    Delivered,
    Delivery,
    MarketKind,
    Order,
    Refused,
    RoundPlan,
    RoundRecord,
    on_wire,
    owner_account,
)
from flmarket.market.store import Checkpoint, RoundStore
from flmarket.privacy import Cap, PrivacyAccount

_log = logging.getLogger(__name__)
Prove = Callable[[Sequence[Order], Mapping[int, Head]], Mapping[str, HoldReceipt]]


class TooFewBids(Exception):
    """The round waits: fewer owners bid than are asked for. Nothing was decided."""


class Owners(Protocol):
    """How owners are reached. Answers come in batches, as they come; who is in none is silent."""

    def bids(self, call: Announcement, accepts: Callable[[Bid], bool]) -> Mapping[int, Bid]:
        """Everybody's bid, by owner, as far as it is accepted."""

    def train(
        self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, bids: Sequence[Bid], prove: Prove
    ) -> Iterator[Mapping[int, Delivery]]:
        """Have orders carried out, if there are any. `prove` shows that their prices are in escrow.

        `bids` are those that these orders answer to, or those of later rounds if they are for all rounds.
        """

    def replay(self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, bids: Sequence[Bid]) -> None:
        """These orders were carried out before a process ended; owners who ended with it do again what they did."""

    def released(self, call: Announcement, orders: Sequence[Order]) -> Iterator[Mapping[int, Delivery]]:
        """Ask for what was released for orders before."""

    def state(self) -> bytes:
        """What the owners' side needs to go on in another process, if it is played in this one."""

    def restore(self, state: bytes) -> None:
        """Go on from it."""


class Rounds:
    """A market's rounds, from wherever they stand.

    `account_of` names owners in the ledger. A budget is deposited round by round unless it is in the buyer's account
    already (`deposits=False`). `minimum_bids`: a round with fewer raises TooFewBids. `progress` is called with every
    finished round's record. `seconds` and `timings` say how long the steps of a round took.
    """

    def __init__(
        self,
        kind: MarketKind,
        owners: Owners,
        ledger: Ledger,
        store: RoundStore,
        *,
        account_of: Callable[[int], str] = owner_account,
        deposits: bool = True,
        minimum_bids: int = 0,
        progress: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        self.kind, self.owners, self.ledger, self.store = kind, owners, ledger, store
        self.account_of, self.deposits, self.minimum_bids, self.progress = account_of, deposits, minimum_bids, progress
        self.records: list[RoundRecord] = []
        self.timings: list[dict[str, float]] = []
        self.plan: RoundPlan | None = None
        self.awards: dict[int, Award] = {}
        self.updates: dict[int, FloatArray] = {}

    def play(self, rounds: int | None = None) -> list[RoundRecord]:
        """All rounds that are left, up to so many in all; returns the records of all."""
        self.store.lock()
        try:
            for index in self.left(rounds):
                for _ in self.steps(index):
                    pass
        finally:
            self.store.unlock()
        return self.records

    def left(self, rounds: int | None = None) -> Iterator[int]:
        """The rounds that are left, up to so many in all. One under way is closed, also if the market ends with it."""
        for index in range(self.resume(), self.kind.rounds if rounds is None else rounds):
            if self.kind.done and self.store.plan(index) is None:
                return
            yield index

    def resume(self) -> int:
        """Take up the last checkpoint; returns the round to play next."""
        kind, saved = self.kind, self.store.checkpoint()
        kind.terms = self.store.terms()
        if saved is None:
            return 0
        if saved.parameters.shape != (kind.dimension,):
            raise InvalidInput("checkpoint", saved.parameters.shape, f"{kind.dimension} parameters")
        kind.parameters, kind.history, kind.notes = saved.parameters, list(saved.history), saved.notes
        kind.best = saved.best
        if saved.owners:
            self.owners.restore(saved.owners)
        kept = (self.store.record(index) for index in range(saved.next_round))
        self.records = [record for record in kept if record is not None]
        return saved.next_round

    def steps(self, index: int) -> Iterator[str]:
        """One round; yields the name of each step once it is stored, from the first that was not."""
        clock = [time.perf_counter()]
        plan = self.store.plan(index)
        resumed = plan is not None
        if plan is None:
            yield "open"
            clock = [time.perf_counter()]
            bids = self._bids(index) if self.kind.asks(index) else {}
            clock.append(time.perf_counter())
            plan = self.kind.plan(index, bids)
            kept = bids if self.kind.side.asks_once else [order.owner for order in plan.orders]
            plan = replace(plan, bids=tuple(bids[owner] for owner in kept) if bids else ())
            self.store.save_plan(plan, self.kind.terms)
            self.plan = plan
            yield "bids"
        clock = [*clock, *[time.perf_counter()] * (3 - len(clock))]
        self.plan, self.updates = plan, self.store.deliveries(index)
        self._hold(plan)
        yield "awards"
        clock.append(time.perf_counter())
        self._collect(plan, resumed=resumed)
        clock.append(time.perf_counter())
        yield "updates"
        record = self._close(plan)
        started, asked, _, held, trained = clock
        now = time.perf_counter()
        self.timings.append(
            {"bids": asked - started, "decide": held - asked, "train": trained - held, "close": now - trained}
        )
        if self.progress is not None:
            self.progress(record)
        yield "settled"

    # the steps

    def _bids(self, index: int) -> Mapping[int, Bid]:
        call = self.kind.announcement(index)
        bids = self.owners.bids(call, self.kind.accepts)
        known = self.ledger.privacy_accounts(self.account_of(owner) for owner in bids)
        caps = {name: account.cap for name, account in known.items()}
        bids = {n: bid for n, bid in bids.items() if self._can_be_paid(bid, call, caps.get(self.account_of(n)))}
        if len(bids) < self.minimum_bids:
            raise TooFewBids
        return bids

    def _can_be_paid(self, bid: Bid, call: Announcement, cap: Cap | None) -> bool:
        """Whether her cap in the ledger, if she has one, can hold such a release at all: it is paid on record only."""
        if cap is None or not call.perturbation:
            return cap is None
        try:
            PrivacyAccount(cap).would_exceed(self.kind.side.guarantee(bid.privacy_budget, bid.data_size, call))
        except InvalidInput:
            return False
        return True

    def _hold(self, plan: RoundPlan) -> None:
        """Money in, prices in escrow."""
        if plan.deposit_id and self.deposits:
            self.ledger.deposit(plan.deposit_id, self.kind.buyer, plan.deposit_micros)
        wanted = [(self.kind.award(order), self.account_of(order.owner)) for order in plan.orders]
        named = [award if award.owner == account else replace(award, owner=account) for award, account in wanted]
        held = self.ledger.hold_many(named) if named else ()
        self.awards = {order.owner: award for order, award in zip(plan.orders, held, strict=True)}

    def _collect(self, plan: RoundPlan, *, resumed: bool) -> None:
        """Deliveries of all whose award is open, as far as they come."""
        kind = self.kind
        waiting = {
            order.owner: order
            for order in plan.orders
            if order.owner not in self.updates and self.awards[order.owner].state is AwardState.PENDING
        }
        call = kind.announcement(0 if kind.side.asks_once else plan.index)
        sent = on_wire(kind.parameters, kind.model)
        if resumed:
            before = [
                one for one in plan.orders if one.owner in self.updates or not (one.lasting or one.owner in waiting)
            ]
            self.owners.replay(call, before, sent, plan.bids)
            if waiting:
                self._receive(plan, waiting, self.owners.released(call, list(waiting.values())), voids=False)
        if not waiting and not (plan.bids and kind.side.asks_once):
            return
        answers = self.owners.train(call, list(waiting.values()), sent, plan.bids, self._proofs)
        again = self._receive(plan, waiting, answers, voids=True)
        if again:
            self._receive(plan, waiting, self.owners.released(call, again), voids=True, final=True)

    def _receive(
        self,
        plan: RoundPlan,
        waiting: dict[int, Order],
        answers: Iterator[Mapping[int, Delivery]],
        *,
        voids: bool,
        final: bool = False,
    ) -> list[Order]:
        """Check and store deliveries, void refused and bad ones; returns the orders that were carried out before."""
        again = []
        for batch in answers:
            delivered = {}
            for owner, answer in batch.items():
                order = waiting.get(owner)
                if order is None:
                    continue
                came = answer
                if isinstance(answer, Delivered):
                    came = self.kind.checked(order, answer.vector)
                if isinstance(came, Delivered):
                    delivered[owner] = came.vector
                elif isinstance(came, Refused) and came.replayed and not final:
                    again.append(order)
                elif isinstance(came, Bad | Refused) and voids:
                    left = self.kind.left(order) if isinstance(came, Bad) else None
                    end = Resolution(order.award, AwardState.VOIDED, came.reason, left)
                    (self.awards[owner],) = resolve_each(self.ledger, [end])
                    del waiting[owner]
            if delivered:
                self.store.save_deliveries(plan.index, delivered)
                self.updates.update(delivered)
                for owner in delivered:
                    del waiting[owner]
        return again

    def _close(self, plan: RoundPlan) -> RoundRecord:
        """Resolve the round's open awards, move the model by what counts, and store both."""
        kind, open_or_paid = self.kind, (AwardState.PENDING, AwardState.POSTED)
        frozen = {award.id for award in self.awards.values() if award.disputed}
        ends = [end for end in kind.resolutions(plan, self.updates, self.awards) if end.award_id not in frozen]
        resolved = {award.id: award for award in resolve_each(self.ledger, ends)}
        self.awards = {owner: resolved.get(award.id, award) for owner, award in self.awards.items()}
        counted = {
            owner: update
            for owner, update in self.updates.items()
            if self.awards[owner].state in open_or_paid or self._in_a_sum(plan)
        }
        record = kind.judged(kind.close(plan, counted, self.awards))
        owners = self.owners.state() if self.store.durable else b""
        after = Checkpoint(plan.index + 1, kind.parameters, tuple(kind.history), kind.notes, owners, kind.best)
        self.store.save_round(record, after)
        self.records.append(record)
        self.plan, self.awards, self.updates = None, {}, {}
        return record

    @staticmethod
    def _in_a_sum(plan: RoundPlan) -> bool:
        """Whether deliveries are parts of a sum: what is in it cannot be taken out again."""
        return any(order.share for order in plan.orders)

    def _proofs(self, orders: Sequence[Order], seen: Mapping[int, Head]) -> Mapping[str, HoldReceipt]:
        """That prices are in escrow, from the head on that each owner goes by, unless it is another log's."""
        awards = [order.award for order in orders]
        since = {order.award: seen[order.owner] for order in orders if order.owner in seen}
        try:
            return self.ledger.hold_receipts(awards, since)
        except InvalidInput:
            _log.warning("somebody goes by a head that is not of this ledger")
        return self.ledger.hold_receipts(awards, {award: head for award, head in since.items() if self._is_ours(head)})

    def _is_ours(self, head: Head) -> bool:
        try:
            return self.ledger.head(head.size) == head
        except InvalidInput:
            return False


def new_task(ledger: Ledger | None, task: str) -> Ledger:
    """The ledger (or one in memory) for a run of a task that it does not know yet; IdReused if it does.

    A second run under the same name would meet its own ids: what it reports as paid would have been paid before.
    """
    books = MemoryLedger() if ledger is None else ledger
    if books.has_task(task):
        raise IdReused(f"this ledger has entries of a task {task!r}: give this run a name of its own")
    return books


def resolve_each(ledger: Ledger, ends: Sequence[Resolution]) -> list[Award]:
    """Resolve awards, together if possible; what the ledger refuses ends alone, and the others as they should.

    An award that was resolved before stays as it is. One whose release would pass its owner's registered cap is void,
    and the release is not booked: her own account at home has the last word. One in dispute stays in escrow, with how
    it would have ended as its reason; what left its owner's machine is charged all the same.
    """
    if not ends:
        return []
    try:
        return list(ledger.resolve_many(ends))
    except (PrivacyBudgetExhausted, SettlementError) as refusal:
        if len(ends) > 1:
            half = len(ends) // 2
            return [*resolve_each(ledger, ends[:half]), *resolve_each(ledger, ends[half:])]
        known = ledger.award(ends[0].award_id)
        if known.state is not AwardState.PENDING:
            return [known]
        if isinstance(refusal, Frozen):
            end = ends[0]
            if end.release is not None:
                with suppress(PrivacyBudgetExhausted):
                    ledger.release(end.release)
            told = f"in dispute, else {end.state}{f': {end.reason}' if end.reason else ''}"
            return [replace(known, reason=told, disputed=True)]
        if isinstance(refusal, PrivacyBudgetExhausted):
            return [ledger.void(known.id, ends[0].reason or f"past the registered cap: {refusal}")]
        raise
