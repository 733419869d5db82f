"""The market as everybody sees it, and what a budget would buy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Catalogue",
    "ExplorePoint",
    "ExploreView",
    "MarketTask",
    "MarketView",
    "MechanismView",
]


@dataclass(frozen=True)
class MarketTask:
    """What everybody may know of a task; `place` says where records and noise are."""

    id: str
    name: str
    state: str
    place: str
    data: str
    auction: str
    aggregation: str
    perturbation: str
    rounds: int
    rounds_done: int
    budget_micros_per_round: int
    owners: int
    open: bool
    mine: bool


@dataclass(frozen=True)
class MarketView:
    """The market at a glance. Of all `releases`, `releases_simulated` were made by the broker in owners' stead."""

    tasks: tuple[MarketTask, ...]
    tasks_running: int
    tasks_finished: int
    rounds_settled: int
    paid_micros: int
    releases: int
    releases_simulated: int
    owners: int


@dataclass(frozen=True)
class MechanismView:
    """An auction and what it claims."""

    name: str
    truthful: str
    rational: str
    budget_feasible: str
    source: str
    assumes: str


@dataclass(frozen=True)
class Catalogue:
    """The names that a task may use."""

    auctions: tuple[MechanismView, ...]
    aggregations: tuple[str, ...]
    perturbations: tuple[str, ...]
    populations: tuple[str, ...]
    data_sets: tuple[str, ...]


@dataclass(frozen=True)
class ExplorePoint:
    """What one budget a round buys on average over drawn rounds of this task's owners."""

    budget_micros: int
    error_bound: float | None
    spent_micros: int
    winners: float
    mean_epsilon: float
    failed: str
    accuracy: float | None


@dataclass(frozen=True)
class ExploreView:
    """Budgets compared, from the mechanism's own model."""

    auction: str
    aggregation: str
    perturbation: str
    dimension: int
    bidders: int
    profiles: int
    full_cost_micros: int
    baseline_accuracy: float
    points: tuple[ExplorePoint, ...]
