"""The market loop: bids → auction → awards in escrow → deliveries → aggregation → settlement.

Engine-agnostic and free of I/O: an engine brings bids and updates, the market decides and moves the money. A round goes
one way, `clear` then `deliver` or `void` per award, then `close`; what is not delivered by then expires. A mechanism's
outcome is checked before any money moves: it may not spend more than the budget, ask for more privacy than was offered,
or pay a loser. Updates are checked on arrival; a bad one voids its award and does not touch the others. What left an
owner's machine is booked as a release with the end of its award, paid or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.aggregation import Aggregation, HasNoiseEnergy, error_bound
from flmarket.aggregation.robust import RobustAggregation
from flmarket.bids import Auction, BidProfile
from flmarket.errors import InvalidInput, MechanismViolation, PrivacyBudgetExhausted, SettlementError
from flmarket.ledger import (
    EXPIRY,
    MICROS,
    Award,
    AwardState,
    IdReused,
    Ledger,
    MemoryLedger,
    Release,
    Resolution,
    payments_to_micros,
)
from flmarket.market.task import RoundRecord
from flmarket.privacy import Perturbation

__all__ = ["Market", "Round", "award_id", "new_task", "owner_account", "resolve_each"]

FloatArray = NDArray[np.float64]

# an award may exceed the offered privacy budget by floating-point rounding only
_ROUNDING = 1e-9


def owner_account(owner: int) -> str:
    """The ledger account of an owner."""
    return f"owner-{owner}"


def award_id(task: str, round_index: int, owner: int) -> str:
    """One award per task, round and owner: repeating a round's clearing cannot pay twice."""
    return f"{task}/{round_index}/{owner}"


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
    and the release is not booked: her own account at home has the last word.
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
        if isinstance(refusal, PrivacyBudgetExhausted):
            return [ledger.void(known.id, ends[0].reason or f"past the registered cap: {refusal}")]
        raise


@dataclass
class Round:
    """A cleared round under way: awards by owner, and the updates delivered so far. `data_size`: records sold."""

    index: int
    bidders: NDArray[np.int64]
    data_size: FloatArray
    epsilon: FloatArray
    price_micros: NDArray[np.int64]
    budget_micros: int
    awards: dict[int, str]
    updates: dict[int, FloatArray] = field(default_factory=dict)
    closed: bool = False


class Market:
    """One task's market: mechanisms, a ledger, and the rules between them."""

    def __init__(
        self,
        *,
        task: str,
        auction: Auction,
        aggregation: Aggregation,
        ledger: Ledger,
        dimension: int,
        clip: float = 1.0,
        perturbation: HasNoiseEnergy | None = None,
        buyer: str = "buyer",
    ) -> None:
        self.task, self.buyer, self.ledger = task, buyer, ledger
        self.auction, self.aggregation = auction, aggregation
        self.dimension, self.clip, self.perturbation = dimension, clip, perturbation

    def clear(
        self,
        index: int,
        bidders: ArrayLike,
        bids: BidProfile,
        budget_micros: int,
        *,
        rng: np.random.Generator | None = None,
    ) -> Round:
        """Run the auction and put every winner's price into escrow; on any error nothing is awarded."""
        owners = np.asarray(bidders, dtype=np.int64)
        if bids.shape != owners.shape or owners.ndim != 1 or len(np.unique(owners)) != owners.size:
            raise InvalidInput("bidders", owners.shape, f"one distinct owner per bid, shape {bids.shape}")
        outcome = self.auction.run(bids, budget_micros / MICROS, rng=rng)
        if (outcome.epsilon > bids.privacy_budget * (1 + _ROUNDING)).any():
            raise MechanismViolation(f"{self.auction.name} asks for more privacy than was offered: nothing was awarded")
        if outcome.records is not None and (np.floor(outcome.records[outcome.winners]) < 1).any():
            raise MechanismViolation(f"{self.auction.name} buys less than one record: nothing was awarded")
        payment = outcome.payment
        if getattr(
            self.auction, "pays_losers", False
        ):  # as printed; there is no delivery to pay for, so it is not paid
            payment = np.where(outcome.winners, payment, 0.0)
        if (payment[~outcome.winners] > 0).any():
            raise MechanismViolation(f"{self.auction.name} pays owners who sell nothing: nothing was awarded")
        epsilon = np.minimum(outcome.epsilon, bids.privacy_budget)
        price = payments_to_micros(payment, budget_micros)
        available = self.ledger.balance(self.buyer)
        if int(price.sum()) > available:
            raise SettlementError(f"{self.buyer} holds {available} micro-units, round {index} needs {price.sum()}")
        awards = {owner: award_id(self.task, index, owner) for owner in owners[outcome.winners].tolist()}
        self.ledger.hold_many(
            Award(awards[owner], index, self.buyer, owner_account(owner), epsilon_, price_)
            for owner, epsilon_, price_ in zip(owners.tolist(), epsilon.tolist(), price.tolist(), strict=True)
            if owner in awards
        )
        sold = bids.data_size if outcome.records is None else np.floor(outcome.records)
        return Round(index, owners, np.asarray(sold), epsilon, price, budget_micros, awards)

    def deliver(self, round_: Round, owner: int, update: ArrayLike) -> bool:
        """Take an owner's update; False, and her award voided, if it is not a finite vector of the right length."""
        award = self._pending(round_, owner)
        problem = ""
        try:
            vector = np.asarray(update, dtype=np.float64)
        except (TypeError, ValueError):
            vector, problem = np.empty(0), "not a vector of numbers"
        if not problem and vector.shape != (self.dimension,):
            problem = f"shape {vector.shape} instead of ({self.dimension},)"
        elif not problem and not np.isfinite(vector).all():
            problem = "not finite"
        if problem:
            end = Resolution(award.id, AwardState.VOIDED, f"bad update: {problem}", self._release(award))
            resolve_each(self.ledger, [end])
            return False
        round_.updates[owner] = vector
        return True

    def void(self, round_: Round, owner: int, reason: str) -> None:
        """An owner refuses or drops out: her award goes back to the buyer."""
        self.ledger.void(self._pending(round_, owner).id, reason)

    def close(self, round_: Round) -> tuple[RoundRecord, FloatArray]:
        """Aggregate what was delivered, pay for it, expire the rest; returns the record and the aggregate update."""
        if round_.closed:
            raise SettlementError(f"round {round_.index} is closed already")
        settled, owners = self._settle(round_), round_.bidders.tolist()
        final = [settled.get(owner) for owner in owners]
        paid = {owner for owner, end in settled.items() if end.state is AwardState.POSTED}
        delivered = np.array([owner in paid and owner in round_.updates for owner in owners], dtype=bool)
        epsilon = np.where(delivered, round_.epsilon, 0.0)
        weights, aggregate, bound = np.zeros(len(epsilon)), np.zeros(self.dimension), np.inf
        if delivered.any():
            weights, aggregate = self._aggregated(round_, delivered, epsilon)
        if weights.any():
            bound = float(
                error_bound(
                    weights,
                    epsilon,
                    round_.data_size,
                    clip=self.clip,
                    dimension=self.dimension,
                    perturbation=self.perturbation,
                )
            )
        round_.closed = True
        record = RoundRecord(
            round_.index,
            round_.bidders,
            round_.data_size,
            round_.epsilon,
            round_.price_micros,
            tuple(award.state if award else None for award in final),
            tuple(award.reason if award else "" for award in final),
            weights,
            round_.budget_micros,
            bound,
        )
        return record, aggregate

    def _aggregated(
        self, round_: Round, delivered: NDArray[np.bool_], epsilon: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Everybody's weight and the aggregate; no weights if a robust rule has too few updates to work with."""
        weights, aggregate = np.zeros(len(epsilon)), np.zeros(self.dimension)
        if isinstance(self.aggregation, RobustAggregation):
            uploads = np.stack([round_.updates[owner] for owner in round_.bidders[delivered].tolist()])
            try:
                combined = self.aggregation.combine(uploads, round_.data_size[delivered])
            except InvalidInput:  # the updates were checked on arrival: it is their number
                return weights, aggregate
            weights[delivered] = combined.shares
            return weights, combined.average
        weights = self.aggregation.weights(epsilon, round_.data_size)
        for owner, weight in zip(round_.bidders, weights, strict=True):
            if weight > 0:
                aggregate += weight * round_.updates[int(owner)]
        return weights, aggregate

    def _settle(self, round_: Round) -> dict[int, Award]:
        """Every award as it ends, by owner: all that are still open are resolved in one call."""
        awards = {owner: self.ledger.award(identifier) for owner, identifier in round_.awards.items()}
        ends = [
            Resolution(award.id, AwardState.POSTED, release=self._release(award))
            if owner in round_.updates
            else Resolution(award.id, AwardState.EXPIRED, EXPIRY)
            for owner, award in awards.items()
            if owner in round_.updates or award.state is AwardState.PENDING
        ]
        ended = {award.id: award for award in resolve_each(self.ledger, ends)}
        return {owner: ended.get(award.id, award) for owner, award in awards.items()}

    def _release(self, award: Award) -> Release | None:
        """What an update for this award gives away, if the market knows its noise."""
        if not isinstance(self.perturbation, Perturbation):
            return None
        return Release(award.id, self.perturbation.name, self.perturbation.guarantee(award.epsilon))

    def _pending(self, round_: Round, owner: int) -> Award:
        if round_.closed or owner not in round_.awards:
            raise SettlementError(f"owner {owner} has no award in round {round_.index} that is still open")
        award = self.ledger.award(round_.awards[owner])
        if owner in round_.updates or award.state is not AwardState.PENDING:
            state = "delivered" if owner in round_.updates else award.state
            raise SettlementError(f"award {award.id} is {state} already")
        return award
