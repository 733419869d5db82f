"""A buyer's task: rounds, awards, bill, receipts, model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flmarket.broker.schemas import TaskRequest

__all__ = [
    "AwardView",
    "BillLine",
    "BillView",
    "EventView",
    "ModelFile",
    "ReceiptPage",
    "ReceiptView",
    "RoundDetail",
    "RoundPage",
    "RoundView",
    "TaskPage",
    "TaskView",
]


@dataclass(frozen=True)
class TaskView:
    """A buyer's task."""

    id: str
    buyer_id: str
    name: str
    state: str
    request: TaskRequest
    rounds: int
    rounds_done: int
    escrow_micros: int
    spent_micros: int
    refunded_micros: int
    perturbation: str
    dimension: int
    baseline_accuracy: float
    accuracy: float | None
    error_bound: float | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    deadline_at: str
    error: str


@dataclass(frozen=True)
class TaskPage:
    """Some tasks, newest first."""

    items: tuple[TaskView, ...]
    next: str | None


@dataclass(frozen=True)
class RoundView:
    """One round. States: open (bids taken), awarded (prices in escrow), settled, empty (nobody sold)."""

    index: int
    state: str
    bids: int
    winners: int
    delivered: int
    budget_micros: int
    spent_micros: int
    error_bound: float | None
    accuracy: float | None
    balanced_accuracy: float | None
    loss: float | None
    opened_at: str
    closed_at: str | None


@dataclass(frozen=True)
class RoundPage:
    """Rounds, oldest first; `next` is the index to go on from."""

    items: tuple[RoundView, ...]
    next: int | None


@dataclass(frozen=True)
class AwardView:
    """One winner of a round. To a buyer `owner` is a name that is good in this task only; her place (`slot`) and why
    an award was voided are for the operator."""

    slot: int | None
    owner: str
    epsilon: float
    records: float
    weight: float
    price_micros: int
    state: str
    reason: str
    award_id: str


@dataclass(frozen=True)
class RoundDetail:
    """A round with its awards."""

    round: RoundView
    awards: tuple[AwardView, ...]


@dataclass(frozen=True)
class BillLine:
    """One round on the bill."""

    index: int
    budget_micros: int
    spent_micros: int
    deliveries: int


@dataclass(frozen=True)
class BillView:
    """Escrow = spent + refunded + left, to the micro-unit."""

    task_id: str
    name: str
    state: str
    escrow_micros: int
    spent_micros: int
    refunded_micros: int
    left_micros: int
    lines: tuple[BillLine, ...]


@dataclass(frozen=True)
class ReceiptView:
    """An award's entries in the ledger's log with proofs; `document` can be checked without the broker.

    An owner's is a `flmarket.ledger.Receipt`, a buyer's a `flmarket.ledger.SealedReceipt`.
    """

    award_id: str
    state: str
    epsilon: float
    price_micros: int
    document: dict[str, Any]


@dataclass(frozen=True)
class ReceiptPage:
    """Receipts of one round."""

    items: tuple[ReceiptView, ...]


@dataclass(frozen=True)
class EventView:
    """Something that happened in a task; `id` grows."""

    id: int
    kind: str
    at: str
    data: dict[str, Any]


@dataclass(frozen=True)
class ModelFile:
    """A trained model as a file."""

    name: str
    media_type: str
    content: bytes
