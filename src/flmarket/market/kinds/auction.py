"""The auction: bids every round, any registered auction, market weights, payment on delivery (FL-Market v1 and v2).

Every round some of those who can sell are drawn, the auction picks winners among their bids and prices them, winners
release a private update, and the server moves by their weighted mean. A mechanism's outcome is checked before any money
moves: it may not spend more than the budget, ask for more privacy than was offered, or pay a loser.

What would break it: a budget that depends on reports could be moved by a lie, so `budget_factor` takes the costs that
were drawn for the bidders, not what they report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.aggregation import Aggregation, error_bound
from flmarket.aggregation.robust import RobustAggregation
from flmarket.bids import Auction, BidProfile, FloatArray, IntArray
from flmarket.errors import InvalidInput, MechanismViolation
from flmarket.learning import (
    DataSet,
    LocalTraining,
    Model,
    Partition,
    Purpose,
    SoftmaxRegression,
    stream,
)
from flmarket.ledger import MICROS, Award, AwardState, Release, payments_to_micros, to_micros
from flmarket.market.kind import NOISE_MARGIN, Announcement, Bid, MarketKind, Order, RoundPlan, cost, profile, say
from flmarket.market.owner import Owner, OwnerSide, PrivacyCap
from flmarket.market.task import RoundRecord, Task
from flmarket.privacy import Perturbation, PrivacyAccount, PureDp, Uncapped, Unprotected

__all__ = ["AuctionKind", "AuctionSpec", "cleared"]

# Beyond these a bid is a mistake or mischief: records an owner holds, and what all her privacy costs.
LARGEST_HOLDING = 10**9
LARGEST_COST = 1e12
# an award may exceed the offered privacy budget by floating-point rounding only
_ROUNDING = 1e-9
# and a vector its clip by that of float32, if nothing is added to it
_PRECISION = 1e-6


@dataclass(frozen=True, kw_only=True)
class AuctionSpec:
    """Who owns what, who bids how, and the mechanisms between them.

    `bids` holds one bid per owner of `partition`; its data sizes are the owners' record counts. `average` evaluates the
    mean of the latter half of all models so far instead of the last one: free post-processing that evens out the noise.
    Without a `model` it is softmax regression with the local work of `local`: one gradient, or start minus end. A
    perturbation that promises nothing (`Unprotected`) takes owners without a cap, and counts as unbounded with them.
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
        if self.unprotected and self.cap.epsilon < np.inf:
            raise InvalidInput("privacy cap", self.cap.epsilon, f"none: {self.perturbation.name} promises nothing")
        # refused where no account of this currency can hold such a release
        PrivacyAccount(self.cap.cap).would_exceed(self.perturbation.guarantee(1.0))

    @property
    def name(self) -> str:
        """The task's, which every id begins with."""
        return self.task.name

    @property
    def unprotected(self) -> bool:
        """Whether updates leave without any noise that promises something."""
        return isinstance(self.perturbation.guarantee(1.0), Unprotected)

    @property
    def trained(self) -> Model:
        """What is trained."""
        return self.model or SoftmaxRegression(self.data.features, self.data.n_classes, local=self.local)

    def kind(self, buyer: str = "buyer") -> AuctionKind:
        """The market as the round plays it."""
        return AuctionKind(self, buyer)

    def owner(self, number: int, record: Path = Path(), *, seeded: bool = True) -> Owner:
        """Owner `number` with the records that the partition deals her."""
        own, rows = self.bids[[number]], self.partition.records(number)
        return Owner(
            number=number, x=self.data.x_train[rows], y=self.data.y_train[rows], valuation=own.valuations,
            privacy_budget=float(own.privacy_budget[0]), cap=Uncapped() if self.unprotected else self.cap.cap,
            record=record, model=self.trained, classes=self.data.n_classes, allow_raw=self.unprotected,
            simulation_seed=self.seed if seeded else None, dropout=self.dropout, faulty=self.faulty,
        )  # fmt: skip


@dataclass(frozen=True)
class _Cleared:
    """An auction's outcome as it is awarded: arrays over the bidders, ε = 0 for losers, `records` sold."""

    records: FloatArray
    epsilon: FloatArray
    price_micros: IntArray
    winners: NDArray[np.bool_]


def cleared(auction: Auction, bids: BidProfile, budget_micros: int, rng: np.random.Generator | None = None) -> _Cleared:
    """Run an auction and check what it says; MechanismViolation, and nothing awarded, if it breaks its bounds."""
    outcome = auction.run(bids, budget_micros / MICROS, rng=rng)
    if (outcome.epsilon > bids.privacy_budget * (1 + _ROUNDING)).any():
        raise MechanismViolation(f"{auction.name} asks for more privacy than was offered: nothing was awarded")
    if outcome.records is not None and (np.floor(outcome.records[outcome.winners]) < 1).any():
        raise MechanismViolation(f"{auction.name} buys less than one record: nothing was awarded")
    payment = outcome.payment
    if getattr(auction, "pays_losers", False):  # as printed; there is no delivery to pay for, so it is not paid
        payment = np.where(outcome.winners, payment, 0.0)
    if (payment[~outcome.winners] > 0).any():
        raise MechanismViolation(f"{auction.name} pays owners who sell nothing: nothing was awarded")
    sold = bids.data_size if outcome.records is None else np.floor(outcome.records)
    epsilon = np.minimum(outcome.epsilon, bids.privacy_budget)
    return _Cleared(np.asarray(sold), epsilon, payments_to_micros(payment, budget_micros), outcome.winners)


class AuctionSide(OwnerSide):
    """She bids her valuation, and releases once for every award."""


class AuctionKind(MarketKind):
    """An `AuctionSpec` as the round plays it: of its bids and records only the buyer's own are used."""

    name = "auction"
    side = AuctionSide()

    def __init__(self, spec: AuctionSpec, buyer: str = "buyer") -> None:
        model = spec.trained
        start = model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        super().__init__(spec.task.name, spec.task.rounds, model, start, buyer)
        self.spec, self._model_text = spec, say(model)
        self._energy: dict[float, float] = {}  # of the noise at this round's ε

    def announcement(self, index: int) -> Announcement:
        """The task, this round, and the noise that will be asked for."""
        spec = self.spec
        return Announcement(
            task=self.task, buyer=self.buyer, market=self.name, round_index=index, rounds=self.rounds,
            features=spec.data.features, classes=spec.data.n_classes, model=self._model_text, parameters=self.dimension,
            learning_rate=_rate(self.model), perturbation=spec.perturbation.name, clip=spec.perturbation.clip,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A valuation and a cost that can be computed with."""
        try:
            with np.errstate(over="ignore"):
                whole = cost(bid, bid.privacy_budget, bid.data_size)
        except InvalidInput:
            return False
        return 1 <= bid.data_size <= LARGEST_HOLDING and bid.privacy_budget > 0 and whole <= LARGEST_COST

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Draw the bidders, run the auction, and write down what every winner is asked to do."""
        if not bids:
            return RoundPlan(index)
        spec, owners = self.spec, np.array(sorted(bids), dtype=np.int64)
        draw = stream(spec.seed, index, purpose=Purpose.PARTICIPATION)
        bidders = np.sort(draw.choice(owners, min(spec.task.bidders_per_round, owners.size), replace=False))
        offered, budget = profile([bids[owner] for owner in bidders.tolist()]), spec.task.budget_micros
        if spec.task.budget_factor is not None:
            drawn = spec.bids[bidders[bidders < spec.bids.n]]  # what was drawn for them, not what they report
            budget = to_micros("budget", spec.task.budget_factor * float(drawn.full_cost.sum()))
        assert budget is not None
        found = cleared(spec.auction, offered, budget, stream(spec.seed, index, purpose=Purpose.AUCTION))
        rate, bought = _rate(self.model), found.epsilon[found.winners]
        if bought.size:
            energy = spec.perturbation.noise_energy(bought, self.dimension)
            self._energy = dict(zip(bought.tolist(), np.broadcast_to(energy, bought.shape).tolist(), strict=True))
        orders = tuple(
            self.order(
                index, int(bidders[k]), loss=PureDp(float(found.epsilon[k])), price_micros=int(found.price_micros[k]),
                records=int(found.records[k]), learning_rate=rate,
            )
            for k in np.flatnonzero(found.winners).tolist()
        )  # fmt: skip
        memory = {
            "bidders": bidders.tolist(), "data_size": found.records.tolist(), "epsilon": found.epsilon.tolist(),
            "price": found.price_micros.tolist(),
        }  # fmt: skip
        return RoundPlan(index, f"{self.task}/{index}/budget", budget, orders, memory)

    def award(self, order: Order) -> Award:
        """For the ε that was sold, or for whatever is in an update that nothing protects."""
        award = super().award(order)
        return replace(award, loss=Unprotected()) if self.spec.unprotected else award

    def largest_norm(self, order: Order) -> float:
        """The clip, and noise at its very longest; rounded, perhaps to the model's own precision."""
        noise, epsilon = self.spec.perturbation, _epsilon(order)
        if epsilon not in self._energy:
            self._energy[epsilon] = float(noise.noise_energy(epsilon, self.dimension))
        return float(noise.clip + NOISE_MARGIN * np.sqrt(self._energy[epsilon])) * (1 + _PRECISION)

    def left(self, order: Order) -> Release | None:
        """The perturbation's own promise, good or bad."""
        noise = self.spec.perturbation
        return Release(order.award, noise.name, noise.guarantee(_epsilon(order)))

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """Aggregate with the market's weights, step, and evaluate."""
        spec, saved = self.spec, plan.memory or {"bidders": [], "data_size": [], "epsilon": [], "price": []}
        bidders, price = (np.array(saved[name], dtype=np.int64) for name in ("bidders", "price"))
        sizes, epsilon = (np.array(saved[name], dtype=np.float64) for name in ("data_size", "epsilon"))
        final = [awards.get(owner) for owner in bidders.tolist()]
        paid = np.array([award is not None and award.state is AwardState.POSTED for award in final], dtype=bool)
        came = paid & np.array([owner in updates for owner in bidders.tolist()], dtype=bool)
        weights, bound, sold = np.zeros(len(bidders)), np.inf, np.where(came, epsilon, 0.0)
        if came.any():
            weights, step = self._aggregated(bidders, sizes, sold, came, updates)
            self.parameters = self.parameters - spec.task.learning_rate * step
        if weights.any():
            bound = float(
                error_bound(
                    weights,
                    sold,
                    sizes,
                    clip=spec.perturbation.clip,
                    dimension=self.dimension,
                    perturbation=spec.perturbation,
                )
            )
        if spec.average:
            self.history.append(self.parameters)
        states = tuple(None if award is None else award.state for award in final)
        reasons = tuple("" if award is None else award.reason for award in final)
        return RoundRecord(
            plan.index, bidders, sizes, epsilon, price, states, reasons, weights, plan.deposit_micros, bound,
            self.model.evaluate(self.buyers_model, spec.data.test),
        )  # fmt: skip

    def _aggregated(
        self,
        bidders: IntArray,
        sizes: FloatArray,
        epsilon: FloatArray,
        came: NDArray[np.bool_],
        updates: Mapping[int, FloatArray],
    ) -> tuple[FloatArray, FloatArray]:
        """Everybody's weight and the step; no weights if a robust rule has too few updates to work with."""
        rule, weights, step = self.spec.aggregation, np.zeros(len(bidders)), np.zeros(self.dimension)
        if isinstance(rule, RobustAggregation):
            try:
                combined = rule.combine(np.stack([updates[i] for i in bidders[came].tolist()]), sizes[came])
            except InvalidInput:  # the updates were checked on arrival: it is their number
                return weights, step
            weights[came] = combined.shares
            return weights, combined.average
        weights = rule.weights(epsilon, sizes)
        for owner, weight in zip(bidders.tolist(), weights.tolist(), strict=True):
            if weight > 0:
                step += weight * updates[owner]
        return weights, step


def _epsilon(order: Order) -> float:
    return AuctionKind.side.amount(order.loss)


def _rate(model: Model) -> float:
    """The local rate that is announced; 1 for a model that has none of its own."""
    local = getattr(model, "local", None)
    return float(local.learning_rate) if isinstance(local, LocalTraining) else 1.0
