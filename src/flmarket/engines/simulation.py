"""The simulation engine: a whole market in one process, seeded.

Runs the same market loop as a deployment, with owners' data in memory. All winners' gradients of a round are computed
at once. Every random draw comes from a stream named by (seed, purpose, round, owner), so a result depends neither on
the order of owners nor on how the work is split. The noise is NumPy's: right in distribution, fast, and **not** safe
to release; a deployment uses the secure source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.aggregation import Aggregation
from flmarket.bids import Auction, BidProfile
from flmarket.engines.owners import OwnerPool, PrivacyCap
from flmarket.errors import InvalidInput, PrivacyBudgetExhausted
from flmarket.learning import (
    DataSet,
    LocalTraining,
    Model,
    OwnerStreams,
    Partition,
    Pool,
    Purpose,
    SoftmaxRegression,
    dimension,
    fedsgd,
    stream,
    train_many,
)
from flmarket.ledger import AwardState, Ledger, to_micros
from flmarket.market import Market, MarketResult, OwnerStatement, Round, RoundRecord, Task, new_task, owner_account
from flmarket.privacy import Perturbation, PrivacyAccount

__all__ = ["LocalTraining", "OpenRound", "RunState", "Simulation", "SimulationRun"]

FloatArray = NDArray[np.float64]
Progress = Callable[[RoundRecord], None]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A market to simulate: who owns what, who bids how, and the mechanisms between them.

    `bids` holds one bid per owner of `partition`; its data sizes are the owners' record counts. `average` evaluates the
    mean of the latter half of all models so far instead of the last one: free post-processing that evens out the noise.
    Without a `model` it is softmax regression with the local work of `local`: one gradient, or start minus end.
    """

    task: Task
    data: DataSet
    partition: Partition
    bids: BidProfile
    auction: Auction
    aggregation: Aggregation
    perturbation: Perturbation
    cap: PrivacyCap = field(default_factory=PrivacyCap)
    local: LocalTraining = field(default_factory=LocalTraining)
    model: Model | None = None
    average: bool = False
    dropout: float = 0.0
    faulty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bids.shape != (self.partition.owners,):
            raise InvalidInput("bids", self.bids.shape, f"one bid for each of the {self.partition.owners} owners")
        if self.partition.order.size != len(self.data.y_train):
            raise InvalidInput("partition", self.partition.order.size, f"{len(self.data.y_train)} records")
        if not (0 <= self.dropout <= 1 and 0 <= self.faulty <= 1 and self.dropout + self.faulty <= 1):
            raise InvalidInput("dropout, faulty", (self.dropout, self.faulty), "probabilities that sum to at most 1")

    def run(self, ledger: Ledger | None = None, progress: Progress | None = None) -> MarketResult:
        """Play every round; `progress` is called with each round's record. `ledger` must not have this task yet."""
        return SimulationRun(self, new_task(ledger, self.task.name)).play(progress)


@dataclass(frozen=True)
class OpenRound:
    """Who bids what in a round that is about to be cleared, and the buyer's budget for it."""

    index: int
    bidders: NDArray[np.int64]
    bids: BidProfile
    budget_micros: int


@dataclass(frozen=True)
class RunState:
    """A run after some rounds, as values that can be stored; with the same `Simulation`, all later rounds follow.

    `history` is empty unless models are averaged. `accounts` are the owners' privacy accounts (`state_dict`).
    """

    parameters: FloatArray
    history: tuple[FloatArray, ...]
    accounts: tuple[dict[str, Any], ...]
    offers: tuple[int, ...]
    refusals: tuple[int, ...]


class SimulationRun:
    """The state of one run: the model, the owners, the books.

    `round` plays one round; a service that shows or stores what happens in between calls its steps, `open`, `clear`,
    `collect` and `close`. A round is a function of the spec and the state before it, so one that was cut off can be
    played again: on a ledger that takes repeated calls, it ends as it would have.
    """

    def __init__(self, spec: Simulation, ledger: Ledger) -> None:
        self.spec, self.ledger = spec, ledger
        self.model: Model = spec.model or SoftmaxRegression(spec.data.features, spec.data.n_classes, local=spec.local)
        self.parameters = self.model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        self.history: list[FloatArray] = []
        self.owners = OwnerPool(spec.bids, spec.perturbation, spec.cap)
        self.market = Market(
            task=spec.task.name,
            auction=spec.auction,
            aggregation=spec.aggregation,
            ledger=ledger,
            dimension=self.parameters.size,
            clip=spec.perturbation.clip,
            perturbation=spec.perturbation,
        )

    def play(self, progress: Progress | None) -> MarketResult:
        """All rounds from the first to the last."""
        records = []
        for index in range(self.spec.task.rounds):
            record = self.round(index)
            if progress is not None:
                progress(record)
            records.append(record)
        spec = self.spec
        return MarketResult(
            spec.task,
            spec.auction.name,
            spec.aggregation.name,
            spec.perturbation.name,
            spec.data.name,
            spec.seed,
            tuple(records),
            self.statements(),
            self.buyers_model(),
            self.baseline_accuracy(),
        )

    def baseline_accuracy(self) -> float:
        """Test accuracy of always answering the most frequent class of the training records."""
        data = self.spec.data
        classes = np.bincount(data.y_test, minlength=data.n_classes)
        return float(classes[np.bincount(data.y_train).argmax()] / classes.sum())

    def round(self, index: int) -> RoundRecord:
        """One round from bids to settlement, and the model after it."""
        opened = self.open(index)
        if opened is None:
            return self.skip(index)
        round_ = self.clear(opened)
        self.collect(round_)
        return self.close(round_)

    def open(self, index: int, among: ArrayLike | None = None) -> OpenRound | None:
        """Draw the round's bidders (only from `among`, if given) and take their bids; None if nobody can sell."""
        spec = self.spec
        eligible = self.owners.eligible()
        if among is not None:
            eligible = np.intersect1d(eligible, np.asarray(among, dtype=np.int64))
        if eligible.size == 0:
            return None
        draw = stream(spec.seed, index, purpose=Purpose.PARTICIPATION)
        bidders = np.sort(draw.choice(eligible, min(spec.task.bidders_per_round, eligible.size), replace=False))
        bids = self.owners.bid(bidders)
        budget = spec.task.budget_micros
        if spec.task.budget_factor is not None:
            budget = to_micros("budget", spec.task.budget_factor * float(spec.bids[bidders].full_cost.sum()))
        assert budget is not None
        return OpenRound(index, bidders, bids, budget)

    def clear(self, opened: OpenRound) -> Round:
        """Deposit the budget, run the auction and hold every winner's price in escrow."""
        self.ledger.deposit(f"{self.spec.task.name}/{opened.index}/budget", self.market.buyer, opened.budget_micros)
        rng = stream(self.spec.seed, opened.index, purpose=Purpose.AUCTION)
        return self.market.clear(opened.index, opened.bidders, opened.bids, opened.budget_micros, rng=rng)

    def close(self, round_: Round) -> RoundRecord:
        """Settle, step the model and evaluate it."""
        record, aggregate = self.market.close(round_)
        if record.valid:
            self.parameters = self.parameters - self.spec.task.learning_rate * aggregate
        return self.measured(record)

    def skip(self, index: int) -> RoundRecord:
        """A round that nobody joins: the model stays as it is."""
        return self.measured(_empty_round(index))

    def state(self) -> RunState:
        """Everything that later rounds depend on."""
        pool = self.owners
        return RunState(
            self.parameters,
            tuple(self.history),
            tuple(account.state_dict() for account in pool.accounts),
            tuple(pool.offers.tolist()),
            tuple(pool.refusals.tolist()),
        )

    def restore(self, state: RunState) -> None:
        """Go on from a stored state; raises InvalidInput if it is not one of this simulation."""
        pool = self.owners
        length = dimension(self.model)
        if state.parameters.shape != (length,) or len(state.accounts) != pool.bids.n:
            found = (state.parameters.shape, len(state.accounts))
            raise InvalidInput("state", found, f"{length} parameters and {pool.bids.n} accounts")
        for owner, account in enumerate(state.accounts):
            pool.use_account(owner, PrivacyAccount.from_state_dict(account))
        self.parameters, self.history = state.parameters, list(state.history)
        pool.offers = np.array(state.offers, dtype=np.int64)
        pool.refusals = np.array(state.refusals, dtype=np.int64)

    def collect(self, round_: Round) -> None:
        """Winners train, guard and deliver; some drop out or send nonsense if the simulation says so."""
        spec, winners = self.spec, np.array(sorted(round_.awards), dtype=np.int64)
        if winners.size == 0:
            return
        records, offsets = self.sold_records(round_, winners)
        x, y = spec.data.x_train[records], spec.data.y_train[records]
        if isinstance(self.model, SoftmaxRegression) and self.model.local.is_gradient:
            updates = fedsgd(self.model, self.parameters, x, y, offsets)
        else:
            rngs = OwnerStreams(spec.seed, round_.index, winners.tolist(), Purpose.BATCHES)
            updates = self.parameters - train_many(self.model, self.parameters, Pool(x, y, offsets), rngs)
        epsilon = dict(zip(round_.bidders.tolist(), round_.epsilon.tolist(), strict=True))
        for owner, update in zip(winners.tolist(), updates, strict=True):
            fate = stream(spec.seed, round_.index, owner, purpose=Purpose.PARTICIPATION).random()
            if fate < spec.dropout:
                continue  # silence: the award expires when the round closes
            rng = stream(spec.seed, round_.index, owner, purpose=Purpose.NOISE)
            try:
                private = self.owners.release(owner, epsilon[owner], update, rng)
            except PrivacyBudgetExhausted as refusal:
                self.market.void(round_, owner, f"refused: {refusal}")
                continue
            broken = fate < spec.dropout + spec.faulty
            self.market.deliver(round_, owner, np.full_like(private, np.nan) if broken else private)

    def sold_records(self, round_: Round, winners: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The records that winners train on: all of theirs, or as many as they sold (they lie in random order)."""
        records, offsets = self.spec.partition.select(winners)
        sizes = np.diff(offsets)
        by_owner = dict(zip(round_.bidders.tolist(), round_.data_size.tolist(), strict=True))
        sold = np.minimum(sizes, np.array([by_owner[owner] for owner in winners.tolist()], dtype=np.int64))
        position = np.arange(len(records)) - np.repeat(offsets[:-1], sizes)
        return records[position < np.repeat(sold, sizes)], np.concatenate([[0], np.cumsum(sold)])

    def measured(self, record: RoundRecord) -> RoundRecord:
        """The record with the buyer's model evaluated after the round."""
        if self.spec.average:
            self.history.append(self.parameters)
        return replace(record, metrics=self.model.evaluate(self.buyers_model(), self.spec.data.test))

    def buyers_model(self) -> FloatArray:
        """The model that the buyer gets: the last one, or the mean of the latter half."""
        if not self.history:
            return self.parameters
        return np.asarray(np.mean(self.history[len(self.history) // 2 :], axis=0))

    def statements(self) -> tuple[OwnerStatement, ...]:
        """What each owner sold and earned so far."""
        pool, paid = self.owners, Counter[str]()
        for award in self.ledger.awards(state=AwardState.POSTED):
            if award.id.startswith(f"{self.spec.task.name}/"):  # her account may hold what other tasks paid
                paid[award.owner] += award.price_micros
        return tuple(
            OwnerStatement(
                owner=i,
                data_size=int(pool.bids.data_size[i]),
                bids=int(pool.offers[i]),
                releases=pool.accounts[i].releases,
                refusals=int(pool.refusals[i]),
                paid_micros=paid[owner_account(i)],
                epsilon_total=pool.accounts[i].spent,
                epsilon_cap=pool.cap.epsilon,
            )
            for i in range(pool.bids.n)
        )


def _empty_round(index: int) -> RoundRecord:
    """A round that nobody can join: every owner has sold all the privacy she will."""
    nobody = np.empty(0)
    owners = np.empty(0, dtype=np.int64)
    return RoundRecord(index, owners, nobody, nobody, owners, (), (), nobody, 0, float("inf"))
