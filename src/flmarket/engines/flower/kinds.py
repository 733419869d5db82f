"""What differs between markets, behind one face: who is asked, what is decided, what a closed round does.

A kind is told bids and updates and answers with plans and models. It talks to nobody and writes nothing; strategy,
ledger and store do that, the same way for every market. `plan` must be a function of the spec and the bids: it is
computed once, stored before any money moves, and read back after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flmarket.engines.flower.messages import Announcement, Bid, Order
from flmarket.ledger import EXPIRY, Award, AwardState, Release, Resolution
from flmarket.market import RoundRecord, owner_account

__all__ = [
    "NOISE_MARGIN",
    "MarketKind",
    "RoundPlan",
    "deliver_or_expire",
    "plain_award",
    "record_from_dict",
    "record_to_dict",
]

FloatArray = NDArray[np.float64]

# Noise longer than so many times its root mean square: never, for all practical purposes. The heaviest tail here is one
# coordinate of Laplace noise, P(|x| > 50·√2·b) = exp(−50·√2) < 1e-30.
NOISE_MARGIN = 50.0


@dataclass(frozen=True)
class RoundPlan:
    """A round decided: money to bring in, awards to hold, orders to send (by owner), and what the kind remembers."""

    index: int
    deposit_id: str = ""
    deposit_micros: int = 0
    orders: tuple[Order, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> RoundPlan:
        """What `to_dict` wrote."""
        return cls(**{**saved, "orders": tuple(Order(**order) for order in saved["orders"])})


class MarketKind(Protocol):
    """One market over many rounds.

    `parameters` is the model now; `history` earlier ones, if they are averaged; `terms` what holds for all rounds once
    it is settled (JSON-ready, empty before); `notes` what a closed round leaves for the next besides the model
    (JSON-ready, saved with it).
    """

    task: str
    buyer: str
    rounds: int
    parameters: FloatArray
    history: list[FloatArray]
    terms: dict[str, Any]
    notes: dict[str, Any]

    @property
    def done(self) -> bool:
        """Whether the market ended before its last round."""

    @property
    def dimension(self) -> int:
        """Length of an update."""

    def asks(self, index: int) -> bool:
        """Whether bids are collected in this round."""

    def announcement(self, index: int) -> Announcement:
        """What is announced to every node."""

    def accepts(self, bid: Bid) -> bool:
        """Whether one bid by itself makes sense; what does not is left out, so that nobody's bid stops a round."""

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Decide a round; `bids` is empty if none were asked for."""

    def award(self, order: Order) -> Award:
        """An order's award as the ledger holds it."""

    def largest_norm(self, order: Order) -> float:
        """The L2 norm that an honest delivery never passes (probability below 1e-20)."""

    def release(self, order: Order) -> Release | None:
        """What a delivery gives away, for the ledger; None if nothing, or if it is booked when the award resolves."""

    def left(self, order: Order) -> Release | None:
        """What has left the owner's machine for this award when its answer to this order is no good."""

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """How the round's open awards end."""

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """Move the model and say what happened; `awards` are resolved. Equal input and model, equal result."""


def plain_award(order: Order) -> Award:
    """The award of an order that pays for one round."""
    account = owner_account(order.owner)
    return Award(order.award, order.round_index, order.buyer, account, order.epsilon, order.price_micros)


def deliver_or_expire(
    plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
) -> list[Resolution]:
    """Open awards are posted if their update came, and expire if not."""
    pending = [order for order in plan.orders if awards[order.owner].state is AwardState.PENDING]
    return [
        Resolution(order.award, AwardState.POSTED)
        if order.owner in updates
        else Resolution(order.award, AwardState.EXPIRED, EXPIRY)
        for order in pending
    ]


def record_to_dict(record: RoundRecord) -> dict[str, Any]:
    """A round's record, JSON-ready."""
    plain = {name: getattr(record, name) for name in RoundRecord.__dataclass_fields__}
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in plain.items()}


def record_from_dict(saved: dict[str, Any]) -> RoundRecord:
    """What `record_to_dict` wrote."""
    whole = {name: np.array(saved[name], dtype=np.int64) for name in ("bidders", "price_micros")}
    real = {name: np.array(saved[name], dtype=np.float64) for name in ("data_size", "epsilon", "weights")}
    states = tuple(None if state is None else AwardState(state) for state in saved["state"])
    return RoundRecord(**{**saved, **whole, **real, "state": states, "reason": tuple(saved["reason"])})
