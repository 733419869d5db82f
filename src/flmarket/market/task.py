"""What a buyer posts and what a round leaves behind: frozen values, no behaviour beyond arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import InvalidInput
from flmarket.ledger import AwardState
from flmarket.privacy import Unit

Currency = Literal["epsilon", "rho"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A buyer's order: train this long, with these mechanisms, within this much money a round.

    The budget of a round is either an amount (`budget_micros`) or, for experiments, `budget_factor` times the sum of
    what the simulation drew as the bidders' full costs. Exactly one of the two is given. Neither depends on what
    bidders report: a budget that did could be moved by a lie, which voids every claim of truthfulness.

    The server's rate falls from `learning_rate` to `last_learning_rate`, by the same factor every round, if that is
    given: what noise did in early rounds later ones correct, and late ones then add little of their own.
    """

    name: str = "task"
    rounds: int = 50
    bidders_per_round: int = 10
    budget_micros: int | None = None
    budget_factor: float | None = None
    learning_rate: float = 0.1
    last_learning_rate: float | None = None

    def rate(self, index: int) -> float:
        """The server's rate in a round."""
        if self.last_learning_rate is None or self.rounds == 1:
            return self.learning_rate
        share = min(index, self.rounds - 1) / (self.rounds - 1)
        return float(self.learning_rate * (self.last_learning_rate / self.learning_rate) ** share)

    def __post_init__(self) -> None:
        for name, limit in (("rounds", 1_000_000), ("bidders_per_round", 10_000_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InvalidInput(name, value, f"a whole number from 1 to {limit:,}")
        if (self.budget_micros is None) == (self.budget_factor is None):
            given = (self.budget_micros, self.budget_factor)
            raise InvalidInput("budget", given, "either budget_micros or budget_factor, not both")
        if self.budget_micros is not None and (
            isinstance(self.budget_micros, bool) or not isinstance(self.budget_micros, int) or self.budget_micros < 0
        ):
            raise InvalidInput("budget_micros", self.budget_micros, "a whole number of at least 0")
        if self.budget_factor is not None and not (np.isfinite(self.budget_factor) and self.budget_factor >= 0):
            raise InvalidInput("budget_factor", self.budget_factor, "a finite number of at least 0")
        if not (np.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidInput("learning_rate", self.learning_rate, "a positive number")
        last = self.last_learning_rate
        if last is not None and not (np.isfinite(last) and last > 0):
            raise InvalidInput("last_learning_rate", last, "a positive number")


@dataclass(frozen=True)
class RoundRecord:
    """One round as it happened. Arrays run over the round's bidders; a loser has a loss of 0 and no state.

    `loss` is what each release gave away, in `currency`: pure ε, or ρ of zero-concentrated privacy. ∞ is a release
    without noise, whatever the currency. `unit` says what it is for: an owner's whole update, or any one record.
    """

    index: int
    bidders: NDArray[np.int64]
    data_size: NDArray[np.float64]
    loss: NDArray[np.float64]
    price_micros: NDArray[np.int64]
    state: tuple[AwardState | None, ...]
    reason: tuple[str, ...]
    weights: NDArray[np.float64]
    budget_micros: int
    error_bound: float
    metrics: dict[str, float] = field(default_factory=dict)
    currency: Currency = "epsilon"
    unit: Unit = "update"

    @property
    def epsilon(self) -> NDArray[np.float64]:
        """`loss` where it is an ε; an error where it is ρ."""
        if self.currency != "epsilon":
            raise InvalidInput("epsilon", self.currency, "a round whose losses are pure ε; read `loss` for others")
        return self.loss

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> RoundRecord:
        """What `to_dict` wrote."""
        whole = {name: np.array(saved[name], dtype=np.int64) for name in ("bidders", "price_micros")}
        if "epsilon" in saved:  # as it was called before
            saved = {("loss" if name == "epsilon" else name): value for name, value in saved.items()}
        real = {name: np.array(saved[name], dtype=np.float64) for name in ("data_size", "loss", "weights")}
        states = tuple(None if state is None else AwardState(state) for state in saved["state"])
        return cls(**{**saved, **whole, **real, "state": states, "reason": tuple(saved["reason"])})

    @property
    def delivered(self) -> NDArray[np.bool_]:
        """Who delivered and was paid."""
        return np.array([state is AwardState.POSTED for state in self.state], dtype=bool)

    @property
    def spent_micros(self) -> int:
        """What was paid out, which leaves out voided and expired awards."""
        return int(self.price_micros[self.delivered].sum())

    @property
    def valid(self) -> bool:
        """Whether anything was delivered: a round of no winners trains nothing."""
        return bool(self.delivered.any())


@dataclass(frozen=True)
class OwnerStatement:
    """What one owner sold and earned over the whole task; losses are in the currency of its rounds."""

    owner: int
    data_size: int
    bids: int
    releases: int
    refusals: int
    paid_micros: int
    loss_total: float
    loss_cap: float


@dataclass(frozen=True)
class MarketResult:
    """A finished task: every round, every owner's statement, and the model."""

    task: Task
    mechanism: str
    aggregation: str
    perturbation: str
    data_set: str
    seed: int
    rounds: tuple[RoundRecord, ...]
    owners: tuple[OwnerStatement, ...]
    parameters: NDArray[np.float64]
    baseline_accuracy: float
    trust: str = "local"
    delta: float = 0.0  # at which owners' totals are an ε: their cap's; they are then less than the sum of losses

    @property
    def currency(self) -> Currency:
        """What losses are counted in."""
        return self.rounds[0].currency if self.rounds else "epsilon"

    @property
    def unit(self) -> Unit:
        """What losses are for: an owner's whole update, or any one of her records."""
        return self.rounds[0].unit if self.rounds else "update"

    @property
    def accuracy(self) -> list[float]:
        """Test accuracy after each round."""
        return [record.metrics["accuracy"] for record in self.rounds]

    @property
    def spent_micros(self) -> int:
        """All payments."""
        return sum(record.spent_micros for record in self.rounds)

    @property
    def budget_micros(self) -> int:
        """All budgets."""
        return sum(record.budget_micros for record in self.rounds)
