"""An owner's side: offers, bids, statement, and what an ε means."""

from __future__ import annotations

from dataclasses import dataclass

from flmarket.broker.services.views.parties import PartyView

__all__ = [
    "BidHelpView",
    "BidView",
    "EpsilonWords",
    "OfferPage",
    "OfferView",
    "PrivacyView",
    "ReleaseView",
    "StatementView",
]


@dataclass(frozen=True)
class BidView:
    """An owner's standing bid."""

    task_id: str
    slot: int
    kind: str
    rate: float | None
    grid: tuple[float, ...] | None
    values: tuple[float, ...] | None
    privacy_budget: float
    data_size: int
    placed_at: str
    active: bool


@dataclass(frozen=True)
class OfferView:
    """A task as owners see it: what is asked, what is paid at most, and their own place and bid in it.

    `place` says where records and noise are.
    """

    task_id: str
    name: str
    state: str
    place: str
    data: str
    auction: str
    truthful: str
    aggregation: str
    perturbation: str
    dimension: int
    rounds: int
    rounds_done: int
    budget_micros_per_round: int
    bidders_per_round: int
    places_free: int
    deadline_at: str
    slot: int | None
    records: int | None
    bid: BidView | None


@dataclass(frozen=True)
class OfferPage:
    """Some offers, newest first."""

    items: tuple[OfferView, ...]
    next: str | None


@dataclass(frozen=True)
class PrivacyView:
    """An owner's privacy over her lifetime: total ε spent, cap and what is left."""

    cap_epsilon_total: float
    spent_epsilon_total: float
    left_epsilon_total: float
    words: str


@dataclass(frozen=True)
class ReleaseView:
    """One award of an owner; `epsilon` is of this round, `epsilon_total` of all her releases in the list up to it.

    `place` says where records and noise are in this task.
    """

    task_id: str
    task_name: str
    place: str
    index: int
    epsilon: float
    epsilon_total: float
    records: float
    price_micros: int
    paid_micros: int
    state: str
    reason: str
    award_id: str
    at: str


@dataclass(frozen=True)
class StatementView:
    """What an owner sold and earned."""

    party: PartyView
    privacy: PrivacyView
    earned_micros: int
    awards: int
    deliveries: int
    releases: tuple[ReleaseView, ...]


@dataclass(frozen=True)
class EpsilonWords:
    """What an ε means, for people: how much surer a suspicion can become."""

    epsilon: float
    odds_factor: float
    certainty_from_half: float
    words: str


@dataclass(frozen=True)
class BidHelpView:
    """What a bid would have earned on a population, a round; and over `rounds` of them, no further than her cap goes.

    `epsilon` is about everything she will have given up at most then, in total: what she gave up before included.
    `rounds_paid_most` is how many of the rounds her cap lets her be paid for, `expected_payment_micros_total` what they
    bring together.
    """

    auction: str
    population: str
    profiles: int
    wins: float
    mean_epsilon_if_won: float
    mean_payment_micros_if_won: int
    mean_cost_micros_if_won: int
    mean_payment_micros: int
    truthful: str
    rounds: int
    rounds_paid_most: int
    expected_payment_micros_total: int
    spent_epsilon_total: float
    left_epsilon_total: float
    epsilon: EpsilonWords
    words: str
