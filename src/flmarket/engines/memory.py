"""Owners in this process: all orders of a round in one call, each behind her own guard. And markets played with them.

The owner, the guard and its order of steps are those of a node (`flmarket.market.owner`); what is batched is training,
where an owner's result does not depend, to the last bit, on who is trained beside her. Every random draw comes from a
stream named by (seed, purpose, round, owner). The noise is NumPy's: right in distribution, fast, and **not** safe to
release; a node uses the secure source.

What would break it: a bid is computed again only when the owner's account has changed, so a side whose bid depends on
anything else that changes between rounds needs `MemoryOwners` of its own.
"""

from __future__ import annotations

import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from flmarket.bids import FloatArray
from flmarket.learning import DataSet, Partition
from flmarket.ledger import Ledger
from flmarket.market.kind import (
    Announcement,
    Bid,
    Delivered,
    Delivery,
    MarketKind,
    MarketResult,
    Order,
    OwnerStatement,
    Refused,
    RoundRecord,
    Silent,
    Task,
    kinds,
    release_id,
)
from flmarket.market.kinds.auction import AuctionKind, AuctionSpec
from flmarket.market.kinds.joint import JdpResult, JointSpec
from flmarket.market.kinds.reward import RewardSpec, StackelbergResult
from flmarket.market.kinds.sampling import SampledResult, SampledRound, SamplingSpec
from flmarket.market.owner import Guard, Owner, PrivacyCap, Work, drops_out, guarded, spoilt
from flmarket.market.record import MemoryRecord, Offer
from flmarket.market.round import Prove, Rounds, new_task
from flmarket.market.store import MemoryStore, RoundStore
from flmarket.privacy import PrivacyAccount, rho_of_epsilon
from flmarket.privacy.secure_sum import SumTerms

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
Progress = Callable[[RoundRecord], None]
Finished = Callable[[Rounds], None]  # is shown the rounds once they are played: kind, ledger, records


class Spec(Protocol):
    """A market described: its kind, and its owners as a partition deals them."""

    @property
    def name(self) -> str:
        """The task's, which every id begins with."""

    @property
    def data(self) -> DataSet:
        """What owners hold and the buyer evaluates on."""

    @property
    def partition(self) -> Partition:
        """Who holds which records."""

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""

    def kind(self, buyer: str = "buyer") -> MarketKind:
        """The market as the round plays it."""

    def owner(self, number: int, record: Path = Path(), *, seeded: bool = True) -> Owner:
        """One of the owners; her record, if it is kept on disk, at `record`. Not `seeded`, her noise is secure."""


class MemoryOwners:
    """All owners of a described market."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.numbers: Sequence[int] = np.asarray(getattr(spec, "ids", range(spec.partition.owners))).tolist()
        self.records: dict[int, MemoryRecord] = {}
        self.refusals = Counter[int]()
        self._guards: dict[int, Guard] = {}
        self._standing: dict[int, Bid] = {}
        self._stale = set(self.numbers)
        self._call: Announcement | None = None

    def guard(self, number: int) -> Guard:
        """An owner's guard, made when it is first needed."""
        if number not in self._guards:
            owner = self.spec.owner(number)
            self.records[number] = record = MemoryRecord(PrivacyAccount(owner.cap))
            self._guards[number] = Guard(owner, record)
        return self._guards[number]

    def bids(self, call: Announcement, accepts: Callable[[Bid], bool]) -> Mapping[int, Bid]:
        """Everybody's bid as far as it is accepted."""
        same = replace(call, round_index=0)
        if self._call != same:
            self._call, self._stale = same, set(self.numbers)
        same = self._call or same  # one object in all rounds, so that guards know it again
        for number in self._stale:
            bid = self.proposed(number, same)
            if bid is not None and accepts(bid):
                self._standing[number] = bid
            else:
                self._standing.pop(number, None)
        self._stale.clear()
        return dict(self._standing)

    def proposed(self, number: int, call: Announcement) -> Bid | None:
        """What one owner would bid now, if anything."""
        answer = guarded(partial(self.guard(number).proposed, call))
        return None if isinstance(answer, Refused) else answer

    def train(
        self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, bids: Sequence[Bid], prove: Prove
    ) -> Iterator[Mapping[int, Delivery]]:
        """Admit, train together, finish."""
        for bid in bids:
            self.guard(bid.owner).offer(call, bid)
        answers: dict[int, Delivery] = {}
        works: list[Work] = []
        for order in orders:
            guard = self.guard(order.owner)
            if drops_out(guard.owner, order):
                answers[order.owner] = Silent()
                continue
            admitted = guarded(partial(guard.admit, order, parameters))
            self._stale.add(order.owner)
            if isinstance(admitted, Refused):
                answers[order.owner] = admitted
                self.refusals[order.owner] += 1
            else:
                works.append(admitted)
        for work, raw in zip(works, _trained(works), strict=True):
            vector = self._guards[work.owner.number].finish(work, raw)
            answers[work.owner.number] = Delivered(spoilt(work.owner, work.order, vector, parameters))
        if orders and orders[0].share:
            self._take_back(orders, [work.order for work in works])
        yield answers

    def _take_back(self, orders: Sequence[Order], stayed: Sequence[Order]) -> None:
        """What owners do who mask their parts of a sum that is void, if enough of them sign that it is."""
        terms = SumTerms.from_json(orders[0].share)
        if terms.contributors - terms.honest < len(stayed) < terms.threshold:
            for order in stayed:
                self.guard(order.owner).account.take_back(release_id(order))

    def replay(self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, bids: Sequence[Bid]) -> None:
        """Offers, accounts and own models come out as they were; what is released again is not looked at."""
        for bid in bids:
            self.guard(bid.owner).offer(call, bid)
        for _ in self.train(call, orders, parameters, (), lambda orders, seen: {}):
            pass

    def released(self, call: Announcement, orders: Sequence[Order]) -> Iterator[Mapping[int, Delivery]]:
        """What is still known of releases before; nothing in a process that was not there."""
        answers: dict[int, Delivery] = {}
        for order in orders:
            guard = self.guard(order.owner)
            found = guarded(partial(guard.release, order))
            if not isinstance(found, Refused):
                answers[order.owner] = Delivered(spoilt(guard.owner, order, found, guard.owner.x[:0]))
        yield answers

    def state(self) -> bytes:
        """Accounts, standing offers and own models of those who have any."""
        books, arrays = {}, dict[str, FloatArray]()
        for number, record in self.records.items():
            offers = [offer.to_json() for (_, at), offer in record.journal.offers.items() if at == 0]
            if record.account.books.releases or offers:
                books[str(number)] = {"account": record.account.books.state_dict(), "offers": offers}
            arrays |= {f"{number}|{at}|{task}": own for (task, at), own in record.journal.own.items()}
        buffer = io.BytesIO()
        np.savez(buffer, np.array(json.dumps({"books": books, "own": list(arrays)})), *arrays.values())
        return buffer.getvalue()

    def restore(self, state: bytes) -> None:
        """Go on from what `state` gave."""
        with np.load(io.BytesIO(state), allow_pickle=False) as saved:
            about, *arrays = (saved[name] for name in saved.files)
        kept = json.loads(str(about))
        for number, one in kept["books"].items():
            record = self.record(int(number))
            record.account.books = PrivacyAccount.from_state_dict(one["account"])
            for offer in one["offers"]:
                record.journal.make_offer(Offer.from_json(offer))
        for name, own in zip(kept["own"], arrays, strict=True):
            number, at, task = name.split("|", 2)
            self.record(int(number)).journal.own[task, int(at)] = own
        self._stale = set(self.numbers)

    def record(self, number: int) -> MemoryRecord:
        """An owner's account and journal."""
        self.guard(number)
        return self.records[number]


def _trained(works: list[Work]) -> Sequence[object]:
    """Raw updates of all, together if possible; None for whom training fails."""
    if not works:
        return []
    side = kinds.of(works[0].call.market).side
    try:
        return list(side.train(works))
    except Exception:
        if len(works) == 1:
            _log.exception("training failed: an update of nothing leaves")
            return [None]
        return [one for work in works for one in _trained([work])]


def play(
    spec: Spec, *, ledger: Ledger | None = None, store: RoundStore | None = None, progress: Progress | None = None,
    finished: Finished | None = None,
) -> tuple[Rounds, MemoryOwners]:  # fmt: skip
    """Play a described market with its owners in this process. Without a store, `ledger` must not have the task yet."""
    books = new_task(ledger, spec.name) if store is None or ledger is None else ledger
    owners = MemoryOwners(spec)
    rounds = Rounds(spec.kind(), owners, books, MemoryStore() if store is None else store, progress=progress)
    rounds.play()
    if finished is not None:
        finished(rounds)
    return rounds, owners


def run(
    spec: Spec, *, ledger: Ledger | None = None, progress: Progress | None = None, finished: Finished | None = None
) -> MarketResult:
    """Play a described market of any kind, and tell it as a market: rounds, and every owner's statement."""
    rounds, owners = play(spec, ledger=ledger, progress=progress, finished=finished)
    bids, paid = Counter[int](), Counter[int]()
    for record in rounds.records:
        bids.update(record.bidders.tolist())
        came = record.delivered
        for owner, price in zip(record.bidders[came].tolist(), record.price_micros[came].tolist(), strict=True):
            paid[owner] += price
    cap, trust = getattr(spec, "cap", PrivacyCap()), getattr(spec, "trust", "local")
    secure = trust != "local"  # losses in a sum are counted in ρ, and so is what caps them
    statements = tuple(
        OwnerStatement(
            owner=i,
            data_size=size,
            bids=bids[i],
            releases=books.releases,
            refusals=owners.refusals[i],
            paid_micros=paid[i],
            loss_total=books.rho if secure else books.spent,
            loss_cap=float(rho_of_epsilon(cap.epsilon, delta=cap.delta)) if secure and cap.delta else cap.epsilon,
        )
        for i, size in enumerate(spec.partition.sizes.tolist())
        for books in (owners.record(i).account.books,)
    )
    kind, parts = rounds.kind, {name: getattr(spec, name, None) for name in ("auction", "aggregation", "perturbation")}
    names = {name: getattr(part, "name", "") for name, part in parts.items()}
    whole = Task(name=spec.name, rounds=kind.rounds, bidders_per_round=spec.partition.owners, budget_micros=0)
    return MarketResult(
        getattr(spec, "task", whole), names["auction"] if kind.name == AuctionKind.name else kind.name,
        names["aggregation"], names["perturbation"], spec.data.name, spec.seed, tuple(rounds.records), statements,
        kind.buyers_model, spec.data.baseline_accuracy, trust, cap.delta,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Simulation(AuctionSpec):
    """An auction market that can be played in this process."""

    def run(
        self, ledger: Ledger | None = None, progress: Progress | None = None, finished: Finished | None = None
    ) -> MarketResult:
        """Play every round; `progress` is called with each round's record. `ledger` must not have this task yet."""
        return run(self, ledger=ledger, progress=progress, finished=finished)


class _Training(Generic[_Result]):
    """A market that is played in this process and told in its own terms, where nobody may take part."""

    def result(self, kind: Any, records: Sequence[RoundRecord], owners: Mapping[int, MemoryRecord]) -> _Result:
        raise NotImplementedError

    def run(
        self, progress: Progress | None = None, ledger: Ledger | None = None, finished: Finished | None = None
    ) -> _Result:
        """Play every round; `progress` is called with each round's record. `ledger` must not have this task yet."""
        spec: Any = self
        rounds, owners = play(spec, ledger=ledger, progress=progress, finished=finished)
        return self.result(rounds.kind, rounds.records, owners.records)


@dataclass(frozen=True, kw_only=True, eq=False)
class StackelbergTraining(RewardSpec, _Training[StackelbergResult]):
    """A reward game that can be played in this process: announce, collect ρ, train, pay."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JdpTraining(JointSpec, _Training[JdpResult]):
    """A joint-DP training that can be played in this process: select, hold the prices, train, pay."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledTraining(SamplingSpec):
    """A sampling market that can be played in this process."""

    def run(
        self,
        progress: Callable[[SampledRound], None] | None = None,
        ledger: Ledger | None = None,
        finished: Finished | None = None,
    ) -> SampledResult:
        """Play every round; `progress` is called with each round's record. `ledger` must not have this task yet."""
        owners, kind = MemoryOwners(self), self.kind()
        tell = None if progress is None else lambda record: progress(self.result(kind, [record]).rounds[0])
        rounds = Rounds(kind, owners, new_task(ledger, self.name), MemoryStore(), progress=tell)
        result = self.result(kind, rounds.play())
        if finished is not None:
            finished(rounds)
        return result
