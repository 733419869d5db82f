"""A run's bids as flat columns, one entry a bid, so that every figure in the report is one expression over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import InvalidInput
from flmarket.ledger import AwardState

if TYPE_CHECKING:
    from flmarket.market import MarketResult

__all__ = ["LOST", "Tally"]

LOST = ""  # the state of a bid that won nothing


@dataclass(frozen=True)
class Tally:
    """All bids of all rounds. `position` counts rounds from 0 in the order they are listed."""

    rounds: int
    position: IntArray
    owner: IntArray
    epsilon: FloatArray
    price_micros: IntArray
    weight: FloatArray
    state: NDArray[np.str_]

    @classmethod
    def of(cls, result: MarketResult) -> Tally:
        """Flatten a result; a run without a single round has nothing to report."""
        records = result.rounds
        if not records:
            raise InvalidInput("rounds", 0, "a result with at least one finished round")
        sizes = [len(record.bidders) for record in records]
        states = [str(state) if state is not None else LOST for record in records for state in record.state]
        return cls(
            rounds=len(records),
            position=np.repeat(np.arange(len(records), dtype=np.int64), sizes),
            owner=np.concatenate([record.bidders for record in records]).astype(np.int64),
            epsilon=np.concatenate([record.epsilon for record in records]).astype(np.float64),
            price_micros=np.concatenate([record.price_micros for record in records]).astype(np.int64),
            weight=np.concatenate([record.weights for record in records]).astype(np.float64),
            state=np.array(states, dtype="U8"),
        )

    @cached_property
    def posted(self) -> NDArray[np.bool_]:
        """Bids that delivered and were paid."""
        return np.asarray(self.state == AwardState.POSTED.value)

    @cached_property
    def returned(self) -> NDArray[np.bool_]:
        """Awards whose price went from escrow back to the buyer."""
        return np.isin(self.state, (AwardState.VOIDED.value, AwardState.EXPIRED.value))

    @cached_property
    def awarded(self) -> NDArray[np.bool_]:
        """Bids that won, whatever became of them."""
        return np.asarray((self.epsilon > 0) | (self.state != LOST))

    def states(self, state: AwardState) -> int:
        """How many awards ended in a state."""
        return int((self.state == state.value).sum())

    def per_round(self, values: IntArray, where: NDArray[np.bool_]) -> IntArray:
        """Exact sums by round of some of the bids."""
        totals = np.zeros(self.rounds, dtype=np.int64)
        np.add.at(totals, self.position[where], values[where])
        return totals
