"""What callers may send: strict types, bounded sizes, nothing unknown. The API and the pages' forms use the same.

Money is in whole micro-units (a millionth of the currency unit). Every ε is per round unless its name says total.

A task is played on one of two engines, one round at a time, with the same rows, the same ledger and the same endings.
The simulation is played by the worker, in this process (`work.rounds`). A Flower task is played by a run on a
SuperLink, which owners' SuperNodes are connected to (`work.flower`); the worker starts it and watches it. Without a
SuperLink such an order is refused rather than half served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from flmarket import aggregation, auctions, populations, privacy
from flmarket.broker.errors import Conflict
from flmarket.broker.settings import Settings
from flmarket.broker.tables import TaskRow
from flmarket.engines.config import RECOMMENDED, MarketConfig
from flmarket.ledger import MICROS
from flmarket.privacy import PureDp

__all__ = [
    "DEFAULT_CAP_TOTAL",
    "FLOWER",
    "SIMULATION",
    "AuditRequest",
    "BidHelpRequest",
    "BidRequest",
    "CapRequest",
    "DepositRequest",
    "ExploreRequest",
    "KeyRequest",
    "NodeRequest",
    "PartyRequest",
    "SignInRequest",
    "TaskRequest",
    "Valuation",
    "check_engine",
    "engines",
    "order_of",
]

# Total ε of a new owner until she sets her own: at worst somebody becomes 95 % sure of what was an even chance.
DEFAULT_CAP_TOTAL = 3.0
SIMULATION, FLOWER = "simulation", "flower"
MAX_MONEY = 10**15  # a billion currency units
MAX_OWNERS, MAX_ROUNDS, MAX_POINTS = 2000, 1000, 32
_DAY = 86_400


Names = Callable[[], tuple[str, ...]]


@dataclass(frozen=True)
class _Listed:
    """One of the names that are registered now, in checks and in the API's description alike."""

    names: Names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.names())}

    def check(self, value: str) -> str:
        """The name, if it is one."""
        if value not in (known := self.names()):
            raise ValueError(f"one of {', '.join(known)}")
        return value


def pure_perturbations() -> tuple[str, ...]:
    """Sound randomizers with a pure ε, the currency of the owners' accounts here; and the recommended one."""
    offered = ((name, privacy.get(name)) for name in privacy.names())
    pure = (name for name, one in offered if privacy.is_sound(one) and isinstance(one.guarantee(1.0), PureDp))
    return (RECOMMENDED, *pure)


Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f]*$")]
Money = Annotated[int, Field(ge=0, le=MAX_MONEY)]
PositiveMoney = Annotated[int, Field(ge=1, le=MAX_MONEY)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(ge=0.001, le=50, allow_inf_nan=False)]
TotalEpsilon = Annotated[float, Field(ge=0.001, le=10_000, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Family = Literal["linear", "quadratic", "sqrt", "exponential", "step"]
AuctionName = Annotated[str, _Listed(auctions.names)]
AggregationName = Annotated[str, _Listed(aggregation.names)]
PerturbationName = Annotated[str, _Listed(pure_perturbations)]
PopulationName = Annotated[str, _Listed(populations.names)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Request(BaseModel):
    """Strict: a string is not a number, `true` is not 1, an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Span(Request):
    """A range to draw from."""

    low: NonNegative
    high: NonNegative

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is at most high")
        return self


class DataNeed(Request):
    """Which data the model learns, and how it lies with its owners."""

    name: Annotated[str, Field(min_length=1, max_length=40)] = "breast-cancer"
    owners: Annotated[int, Field(ge=1, le=MAX_OWNERS)] = 40
    partition: Literal["power-law", "dirichlet", "equal"] = "power-law"
    sigma: Annotated[float, Field(ge=0, le=10)] = 0.5
    minimum: Annotated[int, Field(ge=1, le=10_000)] = 3
    concentration: Annotated[float, Field(gt=0, le=1000)] = 0.5


class OwnersNeed(Request):
    """Who may sell. `simulated`: places that no registered owner took bid as drawn here; else they stay empty.

    `privacy_cap_total` is what each simulated owner gives up at most: a setting of the simulation, no advice.
    """

    simulated: bool = True
    open: bool = True
    valuations: Annotated[list[Family], Field(min_length=1, max_length=5)] = ["linear", "quadratic", "sqrt"]
    rate: Span = Span(low=0.5, high=1.5)
    privacy_budget: Span = Span(low=0.5, high=2.0)
    privacy_cap_total: TotalEpsilon = 1000.0
    dropout: Probability = 0.0
    faulty: Probability = 0.0
    minimum_bids: Annotated[int, Field(ge=1, le=MAX_OWNERS)] = 1


class Mechanism(Request):
    """Auction, aggregation and noise by name."""

    auction: AuctionName = "posted"
    aggregation: AggregationName = "opt-aggr"
    perturbation: PerturbationName = RECOMMENDED
    clip: Annotated[float, Field(gt=0, le=1000)] = 1.0


class Training(Request):
    """What owners compute, and whether the buyer gets the mean of the latter half of all models."""

    learning_rate: Annotated[float, Field(gt=0, le=1000)] = 0.1
    local_steps: Annotated[int, Field(ge=1, le=100)] = 1
    batch_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    local_learning_rate: Annotated[float, Field(gt=0, le=1000)] = 0.1
    average: bool = True


class TaskRequest(Request):
    """A buyer's order. `rounds` × `budget_micros_per_round` is taken into escrow; what is not spent comes back."""

    name: Name
    engine: Literal["simulation", "flower"] = "simulation"
    data: DataNeed = DataNeed()
    owners: OwnersNeed = OwnersNeed()
    mechanism: Mechanism = Mechanism()
    training: Training = Training()
    rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] = 40
    bidders_per_round: Annotated[int, Field(ge=1, le=MAX_OWNERS)] = 20
    budget_micros_per_round: PositiveMoney
    round_seconds: Annotated[float, Field(ge=0, le=_DAY)] = 0.0
    deadline_seconds: Annotated[int, Field(ge=10, le=90 * _DAY)] = 7 * _DAY
    seed: Seed = 0

    @property
    def escrow_micros(self) -> int:
        """What the buyer sets aside."""
        return self.rounds * self.budget_micros_per_round

    def market(self, task_id: str) -> MarketConfig:
        """The same order as the engine reads it."""
        return MarketConfig.parse(
            {
                "seed": self.seed,
                "task": {
                    "name": task_id,
                    "rounds": self.rounds,
                    "bidders_per_round": self.bidders_per_round,
                    "budget_per_round": self.budget_micros_per_round / MICROS,
                    "learning_rate": self.training.learning_rate,
                },
                "data": self.data.model_dump(),
                "owners": {
                    "valuations": self.owners.valuations,
                    "rate": [self.owners.rate.low, self.owners.rate.high],
                    "privacy_budget": [self.owners.privacy_budget.low, self.owners.privacy_budget.high],
                    "privacy_cap": self.owners.privacy_cap_total,
                    "dropout": self.owners.dropout,
                    "faulty": self.owners.faulty,
                },
                "mechanism": self.mechanism.model_dump(),
                "training": self.training.model_dump(exclude={"learning_rate"}),
            },
            source="task",
        )


class Valuation(Request):
    """What a privacy loss of one record is worth: a family and its rate, or a table of points."""

    kind: Literal["linear", "quadratic", "sqrt", "exponential", "step", "tabulated"] = "linear"
    rate: NonNegative | None = None
    grid: Annotated[list[Epsilon], Field(min_length=1, max_length=MAX_POINTS)] | None = None
    values: Annotated[list[NonNegative], Field(min_length=1, max_length=MAX_POINTS)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "tabulated":
            if self.grid is None or self.values is None or self.rate is not None:
                raise ValueError("a table has grid and values, and no rate")
            if len(self.grid) != len(self.values):
                raise ValueError("grid and values have equally many points")
        elif self.rate is None or self.grid is not None or self.values is not None:
            raise ValueError("a family has a rate, and neither grid nor values")
        return self


class BidRequest(Request):
    """A standing bid: valuation per record, the most ε a round, and how many of her records she offers."""

    valuation: Valuation
    privacy_budget: Epsilon
    data_size: Annotated[int, Field(ge=1, le=10_000_000)] | None = None


class CapRequest(Request):
    """The most ε that an owner will give up in total, over all tasks and for life."""

    cap_epsilon_total: TotalEpsilon


class ExploreRequest(Request):
    """Budgets a round to compare for a task, before posting it. `accuracy`: also train a little to estimate it."""

    task: TaskRequest
    budgets_micros: Annotated[list[PositiveMoney], Field(min_length=1, max_length=24)]
    profiles: Annotated[int, Field(ge=1, le=200)] = 40
    accuracy: bool = False


class BidHelpRequest(Request):
    """A bid to try against a population before placing it, for so many rounds."""

    bid: BidRequest
    rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] = 1
    auction: AuctionName = "posted"
    population: PopulationName = "flm22-iid"
    budget_factor: Annotated[float, Field(gt=0, le=10)] = 0.5
    profiles: Annotated[int, Field(ge=1, le=1000)] = 300


class AuditRequest(Request):
    """A run of the auditor."""

    auction: AuctionName
    population: PopulationName = "flm22-iid"
    profiles: Annotated[int, Field(ge=1, le=500)] = 100
    owners: Annotated[int, Field(ge=2, le=100)] | None = None
    seed: Seed = 0


class PartyRequest(Request):
    """Somebody new."""

    role: Literal["buyer", "owner", "operator"]
    name: Name


class NodeRequest(Request):
    """An owner's SuperNode, and her number in markets over Flower; by default the next one, or the one she has."""

    node_id: Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,19})$", description="As Flower prints it, in digits.")]
    number: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


class KeyRequest(Request):
    """A new API key."""

    label: Name = "key"


class DepositRequest(Request):
    """Money that reached the operator from outside, to be booked to a buyer."""

    amount_micros: PositiveMoney


class SignInRequest(Request):
    """An API key, exchanged for a session cookie."""

    key: Annotated[str, Field(min_length=1, max_length=200)]


def engines(settings: Settings) -> tuple[str, ...]:
    """What this broker runs."""
    return (SIMULATION, FLOWER) if settings.superlink else (SIMULATION,)


def check_engine(settings: Settings, name: str) -> None:
    """Conflict unless this broker can run the engine."""
    offered = engines(settings)
    if name not in offered:
        raise Conflict(f"this broker does not run {name} tasks; it runs {', '.join(offered)}")


def order_of(row: TaskRow) -> TaskRequest:
    """The order that a task was posted with."""
    return TaskRequest.model_validate_json(json.dumps(row.spec))
