"""What the client returns. Fields that a newer broker adds are ignored; `raw` of a task holds everything it said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = [
    "Account",
    "Audit",
    "Bid",
    "BidAdvice",
    "Bill",
    "BudgetPoint",
    "Offer",
    "Privacy",
    "Progress",
    "Release",
    "Round",
    "Statement",
    "Task",
    "read",
]

T = TypeVar("T")


def read(kind: type[T], document: Mapping[str, Any]) -> T:
    """The fields of `kind` from a JSON object."""
    return kind(**{one.name: document[one.name] for one in fields(kind) if one.name in document})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Account:
    """A party's money, in micro-units."""

    account: str
    balance_micros: int
    escrow_micros: int


@dataclass(frozen=True)
class Task:
    """A buyer's task."""

    id: str
    name: str
    state: str
    rounds: int
    rounds_done: int
    escrow_micros: int
    spent_micros: int
    refunded_micros: int
    perturbation: str
    baseline_accuracy: float
    accuracy: float | None
    error_bound: float | None
    error: str
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("finished", "cancelled", "expired", "failed")


@dataclass(frozen=True)
class Round:
    """One round."""

    index: int
    state: str
    bids: int
    winners: int
    delivered: int
    budget_micros: int
    spent_micros: int
    error_bound: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Bill:
    """Escrow = spent + refunded + left."""

    task_id: str
    state: str
    escrow_micros: int
    spent_micros: int
    refunded_micros: int
    left_micros: int
    lines: tuple[Mapping[str, int], ...]


@dataclass(frozen=True)
class BudgetPoint:
    """What one budget a round buys."""

    budget_micros: int
    error_bound: float | None
    spent_micros: int
    winners: float
    mean_epsilon: float
    accuracy: float | None
    failed: str


@dataclass(frozen=True)
class Bid:
    """A standing bid."""

    task_id: str
    slot: int
    kind: str
    rate: float | None
    privacy_budget: float
    data_size: int
    active: bool


@dataclass(frozen=True)
class Offer:
    """A task to sell to; `place` says where records and noise are."""

    task_id: str
    name: str
    state: str
    place: str
    data: str
    auction: str
    truthful: str
    rounds: int
    rounds_done: int
    budget_micros_per_round: int
    places_free: int
    slot: int | None
    records: int | None


@dataclass(frozen=True)
class Privacy:
    """Total ε over an owner's lifetime."""

    cap_epsilon_total: float
    spent_epsilon_total: float
    left_epsilon_total: float
    words: str


@dataclass(frozen=True)
class Release:
    """One award: ε of the round, and the owner's total after it; `place` says where records and noise are."""

    task_id: str
    task_name: str
    place: str
    index: int
    epsilon: float
    epsilon_total: float
    price_micros: int
    paid_micros: int
    state: str
    reason: str
    award_id: str
    at: str


@dataclass(frozen=True)
class Statement:
    """What an owner sold and earned."""

    privacy: Privacy
    earned_micros: int
    awards: int
    deliveries: int
    releases: tuple[Release, ...]


@dataclass(frozen=True)
class BidAdvice:
    """What a bid would earn, as far as the owner's cap goes, and what all she gave up means with it, in total."""

    wins: float
    mean_epsilon_if_won: float
    mean_payment_micros_if_won: int
    mean_payment_micros: int
    rounds_paid_most: int
    expected_payment_micros_total: int
    words: str
    epsilon_words: str


@dataclass(frozen=True)
class Audit:
    """A run of the auditor."""

    id: str
    state: str
    auction: str
    progress: float
    note: str
    claims: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Progress:
    """Something that happened in a task."""

    id: int
    kind: str
    data: Mapping[str, Any]
