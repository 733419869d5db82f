"""What callers may send: strict types, bounded sizes, nothing unknown. The API and the pages' forms use the same.

A task is a market file: the same sections with the same keys and defaults (`engines.config`), within limits. As there,
`task.budget_per_round` is in currency units; it must be a whole number of micro-units (a millionth of a unit), in which
all other money is counted here. Every ε is per round unless its name says total. Nothing that a caller names is opened
or imported: no files, no `package.module:Name`; data sets and models are those that the operator offers.

A task is played on one of two engines, one round at a time, with the same rows, the same ledger and the same endings.
The simulation is played by the worker, in this process (`work.rounds`). A Flower task is played by a run on a
SuperLink, which owners' SuperNodes are connected to (`work.flower`); the worker starts it and watches it. Without a
SuperLink such an order is refused rather than half served.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import numpy as np
from annotated_types import Le, MaxLen, MinLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from flmarket import aggregation, auctions, populations, privacy
from flmarket.aggregation import Trust, robust
from flmarket.broker.errors import Conflict
from flmarket.broker.settings import Settings
from flmarket.broker.tables import Rights, Role
from flmarket.engines import config
from flmarket.errors import InvalidInput
from flmarket.learning.data import Encoding
from flmarket.ledger import MICROS
from flmarket.market import kinds
from flmarket.privacy import PureDp, Unit
from flmarket.trust import TrustWords, task_words

# Total ε of a new owner until she sets her own: at worst somebody becomes 95 % sure of what was an even chance.
DEFAULT_CAP_TOTAL = 3.0
SIMULATION, FLOWER = "simulation", "flower"
OWN = "own-"  # how the names of data begin that only its buyer describes
MAX_MONEY = 10**15  # a billion currency units
MAX_OWNERS, MAX_ROUNDS, MAX_POINTS, MAX_DIMENSION = 2000, 1000, 32, 10**9
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
    return _pure_of(tuple(privacy.names()))


@lru_cache(maxsize=8)  # every reading of a stored order checks against it
def _pure_of(names: tuple[str, ...]) -> tuple[str, ...]:
    offered = ((name, privacy.get(name)) for name in names)
    pure = (name for name, one in offered if privacy.is_sound(one) and isinstance(one.guarantee(1.0), PureDp))
    return (config.RECOMMENDED, *pure)


_LINE = r"^[^\x00-\x1f\x7f]*$"  # of text, without signs that control
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=_LINE)]
PositiveMoney = Annotated[int, Field(ge=1, le=MAX_MONEY)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(ge=0.001, le=50, allow_inf_nan=False)]
TotalEpsilon = Annotated[float, Field(ge=0.001, le=10_000, allow_inf_nan=False)]
AuctionName = Annotated[str, _Listed(auctions.names)]
PopulationName = Annotated[str, _Listed(populations.names)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Request(BaseModel):
    """Strict: a string is not a number, `true` is not 1, an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class _Instead:
    """Another type for a field, and its default; without one it must be given."""

    annotation: Any
    default: Any = ...


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Within:
    """A section of the market file as a stranger may fill it in: strict types, the same defaults, and for some fields
    further limits, by name. Whoever reads it finds the section itself."""

    def __init__(self, check: Callable[[Any], Any] | None = None, /, **limits: Any) -> None:
        self._check, self._limits = check, limits

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        fields: dict[str, Any] = {}
        for name, field in source.model_fields.items():
            limit = self._limits.get(name, ())
            limits = limit if isinstance(limit, tuple) else (limit,)
            if get_origin(field.annotation) is tuple:
                limits = (Strict(False), *limits)  # JSON has lists
            if isinstance(limit, _Instead):
                fields[name] = limit.annotation, limit.default
            elif limits:
                annotation: Any = field.annotation
                for one in (*field.metadata, *limits):  # None, where it is one of the types, passes all limits
                    annotation = Annotated[annotation, one]
                fields[name] = annotation, field.default
        about = {"__doc__": source.__doc__, "__module__": __name__}
        schema = handler.generate_schema(create_model(source.__name__, __base__=(source, _Strict), **about, **fields))
        return schema if self._check is None else core_schema.no_info_after_validator_function(self._check, schema)


def _absent(why: str) -> BeforeValidator:
    """For keys that market files have and tasks may not."""

    def refuse(value: Any) -> None:
        if value is not None:
            raise ValueError(why)

    return BeforeValidator(refuse, json_schema_input_type=None)


def _limit(holds: Callable[[Any], bool], accepted: str) -> AfterValidator:
    """A limit that no type says."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(accepted)
        return value

    return AfterValidator(check)


def _small_settings(section: config.ModelSection) -> config.ModelSection:
    """A model's own settings may be anything: this bounds what they can cost."""
    given = section.model_extra or {}
    if reserved := given.keys() & {"features", "classes", "local", "shape", "threads"}:
        raise ValueError(f"without {', '.join(sorted(reserved))}: that is not for the buyer to say")
    values = [one for value in given.values() for one in (value if isinstance(value, list) else [value])]
    texts = [one for one in values if isinstance(one, str) and len(one) <= 80]
    numbers = [one for one in values if isinstance(one, int | float) and abs(one) <= 1024]  # not NaN
    if not len(texts) + len(numbers) == len(values) <= 16:
        raise ValueError("at most 16 settings: numbers up to 1024, short texts, or lists of them")
    return section


def _few_and_short(settings: dict[str, Any]) -> bool:
    short = all(isinstance(one, str | int | float) and len(str(one)) <= 80 for one in settings.values())
    return short and len(settings) <= 16


def _section() -> Any:
    return Field(default={}, validate_default=True)  # made like one that was sent


_WHOLE_MICROS = _limit(lambda amount: Decimal(repr(amount)) * MICROS % 1 == 0, "an amount with at most six decimals")
_SMALL_RANGE = _limit(lambda span: span[1] <= 1e6, "at most 1000000")
_SMALL_DIMENSION = _limit(lambda size: size == "model" or size <= MAX_DIMENSION, f"at most {MAX_DIMENSION}")
_SMALL_MARKET = _limit(_few_and_short, "at most 16 settings: numbers and short texts")
Budget = Annotated[float, Field(gt=0, le=MAX_MONEY // MICROS), _WHOLE_MICROS]
_NO_FILES = _absent("a data set that the operator offers: files stay where they are")


class TaskRequest(Request):
    """A buyer's order: the sections of a market file. What it may cost at most is taken into escrow, and what is not
    spent comes back: `rounds` × `budget_per_round` in an auction and in the operator's own kinds, `rounds` ×
    `sampling.hard_cap` where clients are sampled, `reward.reward` in the reward game, `joint.budget` in a joint market.
    In kinds other than auctions, and with secure aggregation, all owners are simulated: accounts here are in pure ε,
    which holds neither Gaussian noise nor updates without any."""

    kind: Annotated[str, _Listed(kinds.names)] = "auction"
    trust: Trust = "local"
    seed: Seed = 0
    task: Annotated[
        config.TaskSection,
        _Within(
            name=(MinLen(1), MaxLen(80), Field(pattern=_LINE)),
            rounds=Le(MAX_ROUNDS),
            bidders_per_round=Le(MAX_OWNERS),
            budget_per_round=_Instead(Budget | None, None),
            budget_factor=_absent("budget_per_round: a task's budget is set before bids are seen"),
            learning_rate=Le(1000),
        ),
    ]
    data: Annotated[
        config.DataSection,
        _Within(
            name=(MinLen(1), MaxLen(120)),
            train=_NO_FILES,
            test=_NO_FILES,
            label=_NO_FILES,
            scaling=_NO_FILES,
            owners=Le(MAX_OWNERS),
            sigma=Le(10),
            minimum=Le(10_000),
            concentration=Le(1000),
            validation=Le(100_000),
        ),
    ] = _section()
    owners: Annotated[
        config.OwnersSection,
        _Within(
            valuations=(MinLen(1), MaxLen(5)),
            rate=_SMALL_RANGE,
            privacy_budget=_SMALL_RANGE,
            bids=_absent("drawn bids, or those of registered owners: files stay where they are"),
        ),
    ] = _section()
    mechanism: Annotated[
        config.MechanismSection,
        _Within(
            auction=_Listed(auctions.names),
            aggregation=_Listed(aggregation.names),
            perturbation=_Listed(pure_perturbations),
            clip=Le(1000),
            bound_dimension=_SMALL_DIMENSION,
        ),
    ] = _section()
    model: Annotated[config.ModelSection, _Within(_small_settings, name=(MinLen(1), MaxLen(120)))] = _section()
    training: Annotated[
        config.TrainingSection,
        _Within(local_steps=Le(100), local_epochs=Le(100), batch_size=Le(10_000), local_learning_rate=Le(1000)),
    ] = _section()
    sampling: Annotated[config.SamplingSection, _Within(costs=_SMALL_RANGE, hard_cap=_Instead(Budget | None, None))] = (
        _section()
    )
    reward: Annotated[
        config.RewardSection, _Within(privacy_values=_SMALL_RANGE, reward=_Instead(Budget | None, None), weight=Le(1e9))
    ] = _section()
    joint: Annotated[
        config.JointSection,
        _Within(
            selection=_Listed(auctions.names),
            aggregation=_Listed(robust.names),
            budget=_Instead(Budget | None, None),
            budget_factor=_absent("joint.budget: a task's budget is set before costs are seen"),
            allow_overspending=_Instead(Literal[False], False),  # a task cannot cost more than its escrow
            costs=_SMALL_RANGE,
            model=_absent("model.name, which is where it belongs"),
            threads=Le(1),
            validation=Le(100_000),
        ),
    ] = _section()
    secure: Annotated[config.SecureSection, _Within()] = _section()
    market: Annotated[dict[str, Any], _SMALL_MARKET] = {}
    broker: Annotated[
        config.BrokerSection,
        _Within(
            minimum_bids=Le(MAX_OWNERS),
            round_seconds=Le(_DAY),
            deadline_seconds=Le(90 * _DAY),
            purpose=(MaxLen(500), Field(pattern=_LINE)),
        ),
    ] = _section()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind != "auction" and (self.broker.engine != SIMULATION or not self.broker.simulated):
            raise ValueError("broker.engine simulation and broker.simulated true: only auctions take registered owners")
        key, amount = self._most
        if amount is None:  # named like any other field that is missing
            why = PydanticCustomError("value_error", "Value error, an amount: what a task may cost is set aside")
            where = InitErrorDetails(type=why, loc=tuple(key.split(".")), input=None)
            raise ValidationError.from_exception_data("TaskRequest", [where])
        self.market_file("task")  # what holds for all market files
        return self

    @property
    def _most(self) -> tuple[str, float | None]:
        """The key that says what the task, or a round of it, may cost; and its amount."""
        return {
            "reward": ("reward.reward", self.reward.reward),
            "joint": ("joint.budget", self.joint.budget),
            "sampling": ("sampling.hard_cap", self.sampling.hard_cap),
        }.get(self.kind, ("task.budget_per_round", self.task.budget_per_round))

    @property
    def budget_micros(self) -> int:
        """A round's budget; the whole task's where that is one."""
        return round((self._most[1] or 0.0) * MICROS)

    @property
    def budget_micros_per_round(self) -> int | None:
        """What a round may cost at most; None where awards run over all rounds."""
        return None if self.lasting else self.budget_micros

    @property
    def escrow_micros(self) -> int:
        """What the buyer sets aside."""
        return self.budget_micros * (1 if self.lasting else self.task.rounds)

    @property
    def lasting(self) -> bool:
        """Whether awards run over all rounds and are paid after the last."""
        return kinds.of(self.kind).side.lasting

    @property
    def auction_name(self) -> str:
        """The auction that picks whom to buy from; "" in kinds without one."""
        return {"sampling": "", "reward": "", "joint": self.joint.selection}.get(self.kind, self.mechanism.auction)

    @property
    def aggregation_name(self) -> str:
        """How updates become one."""
        rules = {"sampling": "unbiased", "reward": f"{self.reward.weighting} weights", "joint": self.joint.aggregation}
        return rules.get(self.kind, self.mechanism.rule(self.trust))

    def with_budget(self, budget_micros: int) -> Self:
        """The same order at another budget."""
        task = self.task.model_copy(update={"budget_per_round": budget_micros / MICROS})
        return self.model_copy(update={"task": task})

    def market_file(self, task_id: str) -> config.MarketConfig:
        """The market file of the same order."""
        return config.MarketConfig(**dict(self) | {"task": self.task.model_copy(update={"name": task_id})})


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
    """A standing bid: valuation per record, the most ε a round, and how many of her records she offers. With `terms`,
    the hash of the task's terms, it is refused unless those are the task's, and she has accepted them."""

    valuation: Valuation
    privacy_budget: Epsilon
    data_size: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    terms: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


class CapRequest(Request):
    """The most ε that an owner will give up in total, over all tasks and for life: of her whole updates, or of any one
    record at `delta`. What is not said stays as it is; the unit is settled with the first release."""

    cap_epsilon_total: TotalEpsilon
    unit: Unit | None = None
    delta: Annotated[float, Field(ge=1e-12, le=0.01, allow_inf_nan=False)] | None = None


class ExploreRequest(Request):
    """Budgets a round to compare for a task, before posting it.

    `accuracy`: also train a little to estimate it. `second_best`: also say how far the auction is from that.
    """

    task: TaskRequest
    budgets_micros: Annotated[list[PositiveMoney], Field(min_length=1, max_length=24)]
    profiles: Annotated[int, Field(ge=1, le=200)] = 40
    accuracy: bool = False
    second_best: bool = False


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

    role: Role
    name: Name


class NodeRequest(Request):
    """An owner's SuperNode, and her number in markets over Flower; by default the next one, or the one she has."""

    node_id: Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,19})$", description="As Flower prints it, in digits.")]
    number: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


_ADDRESSES = {"webhook": r"https?://[^\s/@\\]+(/[!-~]*)?", "email": r"[!-?A-~]{1,64}@[A-Za-z0-9.-]{1,200}"}


class UserRequest(Request):
    """A person of a party, who signs in with the operator's identity provider."""

    name: Name
    email: Annotated[str, Field(max_length=254, pattern=f"^{_ADDRESSES['email']}$")]
    rights: Rights = "member"


class RightsRequest(Request):
    """What a person may do."""

    rights: Rights


class KeyRequest(Request):
    """A new API key."""

    label: Name = "key"


EventName = Literal[
    "cap", "award", "payment", "payout", "task.ended", "task.failed", "dispute.opened", "dispute.decided"
]
EVENTS: tuple[EventName, ...] = get_args(EventName)


class HookRequest(Request):
    """Whom to tell, an address that is posted to, or (the operator's to set) a mail address."""

    kind: Literal["webhook", "email"] = "webhook"
    address: Annotated[str, Field(min_length=3, max_length=500)]
    events: Annotated[list[EventName], Field(min_length=1, max_length=len(EVENTS))] = list(EVENTS)

    @model_validator(mode="after")
    def _is_address(self) -> Self:
        if not re.fullmatch(_ADDRESSES[self.kind], self.address):
            raise ValueError("https://host/path" if self.kind == "webhook" else "somebody@example.org")
        return self


class DepositRequest(Request):
    """Money that reached the operator from outside, to be booked to a buyer."""

    amount_micros: PositiveMoney


class ColumnRequest(Request):
    """A column of one's own data: numbers, which less `offset` over `scale` become a feature; or one of `values`."""

    name: Name
    unit: Annotated[str, Field(max_length=40, pattern=_LINE)] = ""
    offset: Annotated[float, Field(ge=-1e12, le=1e12)] = 0.0
    scale: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    values: Annotated[list[Name], Field(min_length=2, max_length=200)] | None = None


class SchemaRequest(Request):
    """What one's own data looks like: its columns, in order, and what labels there are."""

    columns: Annotated[list[ColumnRequest], Field(min_length=1, max_length=2000)]
    classes: Annotated[list[Name], Field(min_length=2, max_length=200)]

    @model_validator(mode="after")
    def _apart(self) -> Self:
        names = [one.name for one in self.columns]
        if len({*names, "label"}) != len(names) + 1:
            raise ValueError("columns of different names, none of them label")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("every class once")
        return self

    def encoding(self) -> Encoding:
        """Columns as features: numbers first, then categories."""
        numbers = [one for one in self.columns if one.values is None]
        categories = {one.name: tuple(sorted(one.values)) for one in self.columns if one.values is not None}
        offset, scale = (
            np.array([getattr(one, part) for one in numbers], dtype=np.float64) for part in ("offset", "scale")
        )
        return Encoding(tuple(one.name for one in numbers), offset, scale, categories)


class EvaluationRequest(Request):
    """Records to test models on: CSV with a header, a column `label`, and the columns of the data set `data`; or, with
    `schema`, those of data that only owners' machines hold."""

    model_config = ConfigDict(populate_by_name=True)

    name: Name
    data: Annotated[str, Field(max_length=120)] = ""
    table: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    schema_: SchemaRequest | None = Field(default=None, alias="schema")


class BankRequest(Request):
    """Where payouts go; nowhere if it is empty."""

    iban: Annotated[str, Field(max_length=60)]


class PayoutRequest(Request):
    """Money of a buyer or an owner, to be withdrawn and sent; `reference` is for the bank."""

    amount_micros: PositiveMoney
    reference: Annotated[str, Field(max_length=80, pattern=_LINE)] = ""


Said = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]


class DisputeRequest(Request):
    """What somebody does not agree with: an award of hers, as pages and answers call it, and why. What she says is for
    the operator alone."""

    award_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}/[0-9]{1,7}/[A-Za-z0-9_-]{1,40}$")]
    reason: Said


class DecisionRequest(Request):
    """Who gets an award's price, pay (its owner) or refund (the buyer), and why; both sides read the note."""

    decision: Literal["pay", "refund"]
    note: Said


class SignInRequest(Request):
    """An API key, exchanged for a session cookie."""

    key: Annotated[str, Field(min_length=1, max_length=200)]


def engines(settings: Settings) -> tuple[str, ...]:
    """What this broker runs."""
    return (SIMULATION, FLOWER) if settings.superlink else (SIMULATION,)


def check_playable(settings: Settings, order: TaskRequest) -> None:
    """A typed error unless this broker can play the order's kind of market on its engine."""
    engine, offered = order.broker.engine, engines(settings)
    if engine not in offered:
        raise Conflict(f"this broker does not run {engine} tasks; it runs {', '.join(offered)}")
    if order.kind == "auction" and order.mechanism.unit == "record" and order.broker.open and engine != FLOWER:
        what = "false in a simulated task for unit = 'record': registered owners sell records on their own machines"
        raise InvalidInput("broker.open", True, what)
    if order.trust != "local" and engine == FLOWER:
        what = "local in a Flower task: registered owners' caps have no room for shared noise; simulated tasks can sum"
        raise InvalidInput("trust", order.trust, what)
    if order.trust != "local" and order.broker.open:
        what = "false in a task for sums: registered owners' caps are in ε alone, which has no room for shared noise"
        raise InvalidInput("broker.open", True, what)
    if engine == FLOWER and not order.broker.open:
        raise InvalidInput("broker.open", False, "true in a Flower task: its owners are registered ones")


_UNSEEN = re.compile("[\\u0080-\\u009f\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff]")


def without_invisible(text: str) -> str:
    """Somebody's text without signs that nobody sees."""
    return _UNSEEN.sub("", text)


def check_visible(field: str, text: str) -> None:
    """A typed error for a name with signs that nobody sees, some of which turn the text around them (U+202E)."""
    if _UNSEEN.search(text):
        raise InvalidInput(field, text.encode("ascii", "backslashreplace").decode(), "without invisible signs")


def public_terms(order: TaskRequest) -> dict[str, Any]:
    """What everybody may know of an order, as the API says it."""
    return {
        "place": trust_of(order).place,
        "trust": order.trust,
        "data": order.data.registered,
        "auction": order.auction_name,
        "aggregation": order.aggregation_name,
        "budget_micros_per_round": order.budget_micros_per_round,
    }


def trust_of(order: TaskRequest) -> TrustWords:
    """Where an order's records and noise are, for which unit its losses are, and against whom they hold."""
    return task_words(order.broker.engine, order.kind, order.mechanism.unit, order.trust)


def order_of(spec: Mapping[str, Any]) -> TaskRequest:
    """The order that a task was posted with, from its row or its view."""
    return TaskRequest.model_validate(spec)
