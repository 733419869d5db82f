"""A market described in a file: `market.toml` in, a ready `Simulation` out.

Every key is checked before anything runs; unknown keys are refused, so that a typing mistake cannot silently fall back
to a default. `docs/how-to.md` has an annotated example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict, TypeVar, Unpack

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from flmarket import aggregation, auctions, privacy
from flmarket.aggregation import Trust, robust
from flmarket.bids import BidProfile, FloatArray, Kind, Valuations
from flmarket.engines.memory import JdpTraining, SampledTraining, Simulation, Spec, StackelbergTraining
from flmarket.errors import ConfigError, first_problem
from flmarket.files import read_toml
from flmarket.learning import (
    DataSet,
    LocalTraining,
    Model,
    Partition,
    Purpose,
    datasets,
    dimension,
    from_files,
    models,
    partition,
    stream,
)
from flmarket.learning import adversaries as attacks
from flmarket.learning.adversaries import Adversary
from flmarket.learning.data import Scaling
from flmarket.ledger import to_micros
from flmarket.market import PrivacyCap, Task, kinds
from flmarket.market.descent import reach
from flmarket.market.kinds.sampling import decaying_rate
from flmarket.populations import read_bids
from flmarket.privacy import RecordNoise
from flmarket.privacy.joint import LocalPerturbation, upload_epsilon
from flmarket.privacy.secure_sum import SecureAggregation
from flmarket.sampling import TruncatedExponential, Uniform
from flmarket.sampling.prior_independent import terms

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _ordered(span: tuple[float, float]) -> tuple[float, float]:
    if span[0] > span[1]:
        raise ValueError("a smaller number, then a larger one")
    return span


def _or_none(value: Any) -> Any:
    return math.inf if value is None else value


Range = Annotated[tuple[NonNegative, NonNegative], AfterValidator(_ordered)]
# A cap, or none: inf in TOML, null in JSON, which has no infinity.
Cap = Annotated[
    float,
    Field(gt=0, allow_inf_nan=True),
    BeforeValidator(_or_none),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}], "default": None}),
]


class Section(BaseModel):
    """One section; frozen, and a key that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Source(TypedDict, total=False):
    """Where a market's data is: the folder of registered sets, the market file's own, or `data` in place of both."""

    data_dir: str | Path | None
    base: Path
    data: DataSet | None


class Dealt(TypedDict):
    """What every kind of market has: who holds what, and under which seed, cap and trust."""

    data: DataSet
    partition: Partition
    seed: int
    cap: PrivacyCap
    secure: SecureAggregation | None


RECOMMENDED = "recommended"
DEFAULT_DATA = "breast-cancer"
# kinds of market that need no more of a round's updates than their sum
SUMMED = ("auction", "sampling", "reward", "joint")
T = TypeVar("T")

Family = Literal["linear", "quadratic", "sqrt", "exponential", "step"]


class TaskSection(Section):
    """What the buyer wants and pays."""

    name: str = "task"
    rounds: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 60
    bidders_per_round: Annotated[int, Field(ge=1, le=10_000_000, strict=True)] = 10
    budget_per_round: NonNegative | None = None
    budget_factor: NonNegative | None = None
    learning_rate: Positive = 0.1
    last_learning_rate: Positive | None = None


class DataSection(Section):
    """Which data, and how it is spread over owners.

    A registered name or `package.module:load`; or one's own files, relative to the market file: CSV or Parquet with the
    column of the classes, or npz. `centre` is taken from every feature after scaling. `validation` of the test records,
    drawn by the seed, choose the best of the models and test none.
    """

    name: str | None = None
    train: str | None = None
    test: str | None = None
    label: str | None = None
    scaling: Scaling | None = None
    centre: Annotated[float, Field(ge=-1e9, le=1e9)] = 0.0
    validation: Annotated[int, Field(ge=0, strict=True)] = 0
    owners: Annotated[int, Field(ge=1, le=10_000_000, strict=True)] = 60
    partition: Literal["power-law", "dirichlet", "equal"] = "power-law"
    sigma: NonNegative = 2.0
    minimum: Annotated[int, Field(ge=1, strict=True)] = 3
    concentration: Positive = 0.5

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.train is None and (self.test, self.label, self.scaling) != (None, None, None):
            raise ValueError("train with test, label and scaling: they are for one's own files")
        return self

    @property
    def registered(self) -> str:
        """The registered data set, unless it comes from files."""
        return self.name or DEFAULT_DATA

    def load(self, data_dir: str | Path | None, base: Path) -> DataSet:
        """The data; `base` is the market file's folder."""
        if self.train is None:
            return datasets.load(datasets.admit(self.registered), data_dir)
        train, test = (None if name is None else base / name for name in (self.train, self.test))
        assert train is not None
        return from_files(train, test, label=self.label, scaling=self.scaling, name=self.name or "")

    def taken(self, data: DataSet, seed: int) -> DataSet:
        """The data, centred, with its validation records put aside."""
        if self.centre:
            data = data.centred(self.centre)
        if not self.validation:
            return data
        return data.holding_out(self.validation, stream(seed, purpose=Purpose.EVALUATION))

    def split(self, data: DataSet, seed: int) -> Partition:
        """Deal the training records out to owners."""
        rng = stream(seed, purpose=Purpose.PARTITION)
        if self.partition == "equal":
            return partition.equal(rng, len(data.y_train), self.owners)
        if self.partition == "dirichlet":
            return partition.dirichlet(
                rng, data.y_train, self.owners, concentration=self.concentration, minimum=self.minimum
            )
        return partition.iid_power_law(rng, len(data.y_train), self.owners, sigma=self.sigma, minimum=self.minimum)


class DataFile(Section):
    """A file that makes somebody's own table a data set of that name: `[data]` without what is said of owners.

    For whoever offers data to others, who then name it and never a path.
    """

    name: str
    train: str
    test: str | None = None
    label: str | None = None
    scaling: Scaling | None = None
    folder: Path = Path()

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text names such a file."""
        return text.endswith(".toml")

    @classmethod
    def load(cls, path: str | Path) -> DataFile:
        """Read one; its name is the file's unless it says another, and its paths begin in its folder."""
        place = Path(path).expanduser().absolute()
        values = read_toml(place, "data file")
        if "folder" in values:
            raise ConfigError(f"{place.name}: folder", values["folder"], "left out: paths begin in the file's own")
        try:
            return cls.model_validate({"name": place.stem, **values, "folder": place.parent})
        except ValidationError as error:
            raise first_problem(error, place.name, cls) from None

    def read(self) -> DataSet:
        """The data."""
        files = {key: getattr(self, key) for key in ("name", "train", "test", "label", "scaling")}
        return DataSection(**{key: value for key, value in files.items() if value is not None}).load(None, self.folder)


class OwnersSection(Section):
    """What owners ask: drawn from ranges (FL-Market's by default), or read from a file of bids."""

    valuations: tuple[Family, ...] = ("linear", "quadratic", "sqrt", "exponential")
    rate: Range = (0.5, 1.5)
    privacy_budget: Range = (0.5, 2.0)
    bids: str | None = None
    privacy_cap: Cap = math.inf
    privacy_cap_delta: Probability = 0.0
    dropout: Probability = 0.0
    faulty: Probability = 0.0

    def profile(self, sizes: Any, seed: int, base: Path) -> BidProfile:
        """One bid per owner, with the data sizes that the partition gave her."""
        if self.bids is not None:
            own = read_bids(base / self.bids)
            if own.n != len(sizes):
                raise ConfigError("owners.bids", f"{own.n} bids", f"one for each of the {len(sizes)} owners")
            return BidProfile(own.valuations, own.privacy_budget, sizes)
        rng = stream(seed, purpose=Purpose.BIDS)
        codes = np.array([Kind[name.upper()] for name in self.valuations])
        kind = codes[rng.integers(0, len(codes), len(sizes))]
        valuations = Valuations(kind, rng.uniform(*self.rate, len(sizes)))
        return BidProfile(valuations, rng.uniform(*self.privacy_budget, len(sizes)), sizes)


class MechanismSection(Section):
    """Auction, aggregation and noise by name. `bound_dimension = 1` is the papers' error bound.

    "recommended" is the perturbation of least noise for the model's size at the owners' median privacy budget. With
    secure aggregation it is the noise that all have in common, and `opt-aggr` stands for `secure-opt`.
    `unit = "record"` protects any one record instead of the whole update: every record's gradient is clipped to `clip`,
    every local step noised; ε of bids, awards and caps is then for a record, at `delta`.
    """

    auction: str = "posted"
    aggregation: str = "opt-aggr"
    perturbation: str = "recommended"
    clip: Positive = 1.0
    bound_dimension: Literal["model"] | Annotated[int, Field(ge=1)] = "model"
    unit: Literal["update", "record"] = "update"
    delta: Annotated[float, Field(gt=0, lt=0.5)] = 1e-5

    def rule(self, trust: Trust) -> str:
        """The aggregation; in sums the usual one is that of sums, whether it was left out or stored with an order."""
        return "secure-opt" if trust != "local" and self.aggregation == "opt-aggr" else self.aggregation

    @model_validator(mode="after")
    def _noise_of_its_unit(self) -> Self:
        if self.unit == "record" and self.perturbation not in (RECOMMENDED, RecordNoise.name):
            raise ValueError(f'perturbation = "{RecordNoise.name}", or none, with unit = "record": others hide updates')
        return self

    def record_noise(self, local: LocalTraining) -> RecordNoise:
        """The noise that protects records in this local work."""
        steps = local.steps if local.epochs is None else local.epochs  # on all records an epoch is a step
        return RecordNoise(clip=self.clip, delta=self.delta, steps=steps, rate=reach(local))


class TrainingSection(Section):
    """What owners compute, and whether the buyer averages models.

    `normalised` updates are scaled to the clip, short ones too: what is sold is a direction.
    """

    local_steps: Annotated[int, Field(ge=1, strict=True)] = 1
    local_epochs: Annotated[int, Field(ge=1, strict=True)] | None = None
    batch_size: Annotated[int, Field(ge=1, strict=True)] | None = None
    local_learning_rate: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    average: bool = False
    normalised: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is descent by so many steps, without momentum."""
        return self.local_epochs is None and not self.momentum and self.optimizer == "sgd"

    def local(self, momentum: float = 0.0) -> LocalTraining:
        """What an owner does with her records in a round; `momentum` unless the file says otherwise."""
        usual = momentum if self.optimizer == "sgd" else 0.0
        return LocalTraining(
            steps=self.local_steps,
            epochs=self.local_epochs,
            batch_size=self.batch_size,
            learning_rate=self.local_learning_rate,
            momentum=usual if self.momentum is None else self.momentum,
            optimizer=self.optimizer,
        )


class SecureSection(Section):
    """With `trust = "secure-aggregation"`: how many of a round's sellers must stay, and how many may collude.

    With fewer than `survivors` of them the round is void; the noise is sized for as many, less `colluders`, who may
    show theirs to the broker. Both are shares of the sellers.
    """

    survivors: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    colluders: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def policy(self) -> SecureAggregation:
        """As markets take it."""
        return SecureAggregation(survivors=self.survivors, colluders=self.colluders)


class ModelSection(Section):
    """What is learned: a registered name or `package.module:build`; any other key is a setting of that model."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "softmax"

    def check_name(self) -> None:
        """Refuse an unknown name before any data is read."""
        models.admit(self.name)

    @property
    def settings(self) -> dict[str, Any]:
        """The model's own settings; a typed error for one that the market gives itself."""
        given = dict(self.model_extra or {})
        if taken := given.keys() & {"features", "classes", "local"}:
            raise ConfigError(f"model.{min(taken)}", given[min(taken)], "left out: it follows from data and training")
        return given

    def build(self, data: DataSet, local: LocalTraining, *, threads: int = 1) -> Model:
        """The model for the data's features and classes."""
        given = self.settings
        return models.get(
            models.admit(self.name),
            **{"shape": data.shape, "threads": threads} | given,
            features=data.features,
            classes=data.n_classes,
            local=local,
        )


class BrokerSection(Section):
    """How a broker plays the task; whoever plays it otherwise has no use for this.

    With `open`, registered owners may take places; with `simulated`, places that nobody took bid as `[owners]` draws
    them, else they stay empty and a round waits for `minimum_bids`. `round_seconds` is the least time a round takes.
    What the model is for (`purpose`) everybody may read, and with `named` who buys it. `evaluation` is a set of the
    buyer's own that the model is tested on.
    """

    engine: Literal["simulation", "flower"] = "simulation"
    open: bool = True
    simulated: bool = True
    minimum_bids: Annotated[int, Field(ge=1, strict=True)] = 1
    round_seconds: NonNegative = 0.0
    deadline_seconds: Annotated[int, Field(ge=10, strict=True)] = 7 * 86_400
    purpose: Annotated[str, Field(max_length=500)] = ""
    named: bool = False
    evaluation: Annotated[str, Field(max_length=40)] = ""


class RewardSection(Section):
    """The reward game, with `kind = "reward"`: users' values of privacy, and what the server wants."""

    weight: Positive = 20.0
    privacy_values: Range = (1.0, 5.0)
    cost: Literal["linear", "quadratic", "exponential"] = "linear"
    noise_account: Literal["printed", "pooled", "averaged"] = "pooled"
    weighting: Literal["equal", "rho"] = "rho"
    reward: NonNegative | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class JointSection(Section):
    """Robust joint-DP learning, with `kind = "joint"`: one auction for the whole training, then robust rounds.

    `selection` is the auction that picks clients by their costs. Settings that the named aggregation does not take are
    refused. ε is `epsilon` for one upload, or `epsilon_total` for those of all rounds, of one `noise_unit`;
    `choice_epsilon` is for one choice, by default that of an upload, as in the paper.
    """

    selection: str = "m1"
    budget: NonNegative | None = None
    budget_factor: NonNegative | None = None
    allow_overspending: bool = False
    costs: Range = (1.0, 1000.0)
    model: str | None = None  # as `model.name`, which is where it belongs
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    threads: Annotated[int, Field(ge=1, le=256, strict=True)] = 1
    epsilon: Positive = 100.0
    epsilon_total: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=0.5)] = 1e-5
    clipped: Literal["update", "parameters"] = "update"
    calibration: Literal["analytic", "paper"] = "analytic"
    noise_unit: Literal["client", "record"] = "client"
    aggregation: str = "leave-one-out"
    choice_epsilon: Positive | None = None
    sensitivity: Literal["record", "client", "paper"] | None = None
    leave_out: Annotated[int, Field(ge=1, strict=True)] | None = None
    groups: Annotated[int, Field(ge=1, strict=True)] | None = None
    group_size: Annotated[int, Field(ge=1, strict=True)] | None = None
    expected_adversaries: Annotated[int, Field(ge=0, strict=True)] | None = None
    mixing: bool = True
    validation: Annotated[int, Field(ge=1, strict=True)] = 100
    stop_accuracy: Probability | None = None
    stop_epsilon: Positive = 1.0
    adversary: str | None = None
    adversaries: Annotated[int, Field(ge=0, strict=True)] | None = None
    adversary_target: Annotated[int, Field(ge=0, strict=True)] | None = None
    adversary_factor: Positive | None = None

    def upload(self, rounds: int) -> float:
        """ε of one upload of so many."""
        total = self.epsilon_total
        return self.epsilon if total is None else upload_epsilon(total, self.delta, rounds)

    def rule(self, rounds: int = 1) -> robust.RobustAggregation:
        """The aggregation with the settings that were given."""
        choice = {"epsilon": self.choice_epsilon or self.upload(rounds), "validation": self.validation}
        given: dict[str, Any] = {
            "sensitivity": self.sensitivity,
            "k": self.leave_out,
            "count": self.groups,
            "size": self.group_size,
            "adversaries": self.expected_adversaries,
        }
        settings = {name: value for name, value in given.items() if value is not None}
        if self.aggregation in ("leave-one-out", "leave-k-out", "partition"):
            settings |= choice
        return _built(robust.get, "joint.aggregation", self.aggregation, settings)

    def malicious(self) -> tuple[Adversary | None, int]:
        """The kind of adversary and how many there are; one if only the kind is given."""
        if self.adversary is None or self.adversaries == 0:
            return None, 0
        given = {"target": self.adversary_target, "factor": self.adversary_factor}
        settings = {name: value for name, value in given.items() if value is not None}
        made = _built(attacks.get, "joint.adversary", self.adversary, settings)
        return made, 1 if self.adversaries is None else self.adversaries

    def check_names(self) -> None:
        """Refuse unknown names and settings before any data is read."""
        if self.epsilon_total is not None and "epsilon" in self.model_fields_set:
            raise ConfigError(
                "joint.epsilon_total", self.epsilon_total, "epsilon for one upload, or this for all of them"
            )
        auctions.get(auctions.admit(self.selection))
        self.rule()
        self.malicious()

    def training(self, *, name: str, rounds: int, clip: float, model: Model, **dealt: Unpack[Dealt]) -> JdpTraining:
        """The training that the file describes; costs are drawn uniformly."""
        costs = stream(dealt["seed"], purpose=Purpose.BIDS).uniform(*self.costs, dealt["partition"].owners)
        adversary, count = self.malicious()
        budget = float(costs.sum()) * (self.budget_factor or 0.0) if self.budget is None else self.budget
        return JdpTraining(
            **dealt,
            costs=costs,
            budget=budget,
            auction=auctions.get(self.selection),
            model=model,
            aggregation=self.rule(rounds),
            perturbation=LocalPerturbation(
                clip=clip, delta=self.delta, clipped=self.clipped, calibration=self.calibration, unit=self.noise_unit
            ),
            epsilon=self.upload(rounds),
            adversary=adversary,
            adversaries=count,
            rounds=rounds,
            name=name,
            **self.model_dump(include={"mixing", "validation", "stop_accuracy", "stop_epsilon", "allow_overspending"}),
        )


class SamplingSection(Section):
    """Client sampling with private costs, with `kind = "sampling"`; `task.budget_per_round` is in expectation.

    Costs per participation are drawn from a distribution on `costs`; an exponential one has `scale` (default: a fifth
    of the range). `hard_cap` bounds every round's bill. `first_rate` replaces the learning rate of the convergence
    theory, which is very small, by one that starts there and falls the same way. `epsilon`, with secure aggregation, is
    what a client sells in every round in which she is drawn.
    """

    scheme: Literal["optimal", "uniform", "complete", "prior-independent"] = "optimal"
    distribution: Literal["uniform", "exponential"] = "uniform"
    costs: Range = (0.5, 10.0)
    scale: Positive | None = None
    fraction: Probability = 0.05
    hard_cap: Positive | None = None
    l2: Positive = 0.01
    first_rate: Positive | None = None
    epsilon: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None

    def cost_distribution(self) -> Uniform | TruncatedExponential:
        """What the broker believes of a client's cost, and what clients' costs are drawn from."""
        low, high = self.costs
        if self.distribution == "uniform":
            return Uniform(low, high)
        return TruncatedExponential(low, high, (high - low) / 5 if self.scale is None else self.scale)

    def training(
        self, *, name: str, rounds: int, budget: float, local: LocalTraining, model: Model | None, clip: float,
        **dealt: Unpack[Dealt],
    ) -> SampledTraining:  # fmt: skip
        """The training that the file describes; everybody reports her true cost."""
        distribution, n = self.cost_distribution(), dealt["partition"].owners
        costs = np.asarray(distribution.sample(stream(dealt["seed"], purpose=Purpose.BIDS), n))
        clients = terms(self.scheme, costs, distribution, budget / n, fraction=self.fraction)
        rate = self.first_rate
        if model is not None and rate is None:
            what = "a rate to start with: the theory's is for softmax regression by plain descent"
            raise ConfigError("sampling.first_rate", rate, what)

        def offer(reported: FloatArray) -> tuple[FloatArray, FloatArray]:
            found = terms(self.scheme, reported, distribution, budget / n, fraction=self.fraction)
            return found.participation, found.payment

        return SampledTraining(
            **dealt,
            costs=costs,
            participation=clients.participation,
            payment=clients.payment,
            rounds=rounds,
            name=name,
            local_steps=local.steps,
            batch_size=local.batch_size,
            l2=self.l2,
            learning_rate=None if rate is None else decaying_rate(rate, l2=self.l2, local_steps=local.steps),
            hard_cap_micros=None if self.hard_cap is None else to_micros("hard_cap", self.hard_cap),
            c_max=distribution.maximum,
            scheme=self.scheme,
            budget_micros=to_micros("budget_per_round", budget),
            offer=offer,
            any_model=model,
            epsilon=self.epsilon,
            clip=clip,
        )


# Names of before, which market files still use.
_OLDER = {"stackelberg": "reward", "jdp": "joint"}


class MarketConfig(Section):
    """The whole file. `kind` is auction, sampling, reward or joint, or one that was registered; `market` has the
    settings of the latter."""

    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    kind: str = "auction"
    trust: Trust = "local"
    task: TaskSection
    data: DataSection = DataSection()
    owners: OwnersSection = OwnersSection()
    mechanism: MechanismSection = MechanismSection()
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()
    broker: BrokerSection = BrokerSection()
    secure: SecureSection = SecureSection()
    reward: RewardSection = RewardSection()
    joint: JointSection = JointSection()
    sampling: SamplingSection = SamplingSection()
    market: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _names_of_before(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        renamed = {_OLDER.get(key, key): value for key, value in values.items()}
        if len(renamed) < len(values):
            raise ValueError("reward and joint, not stackelberg and jdp beside them")
        mechanism = renamed.get("mechanism")
        if isinstance(mechanism, dict) and mechanism.get("auction") in ("stackelberg", "jdp", "sampling"):
            auction = mechanism["auction"]  # where the kind used to be said
            rest = {key: value for key, value in mechanism.items() if key != "auction"}
            renamed = {"kind": _OLDER.get(auction, auction)} | renamed | {"mechanism": rest}
        return renamed

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        kinds.admit(self.kind)
        given = (self.task.budget_per_round is not None) + (self.task.budget_factor is not None)
        if self.kind == "reward" and given:
            raise ValueError("no budget in the reward game: the reward is the budget")
        if self.kind == "joint":
            once = (self.joint.budget is not None) + (self.joint.budget_factor is not None)
            if given or once != 1:
                raise ValueError("one budget for the whole training: either joint.budget or joint.budget_factor")
        elif self.kind == "sampling":
            if self.task.budget_per_round is None or given != 1:
                raise ValueError("task.budget_per_round in the sampling market: what a round may cost in expectation")
        elif self.kind != "reward" and given != 1:
            raise ValueError("give either task.budget_per_round or task.budget_factor")
        if self.trust != "local" and self.kind not in SUMMED:
            raise ValueError(f"local trust: {self.kind} looks at single updates (sums are for {', '.join(SUMMED)})")
        if (self.kind == "sampling" and self.trust != "local") != (self.sampling.epsilon is not None):
            raise ValueError(
                'sampling.epsilon with kind = "sampling" and trust = "secure-aggregation", and only there: two sums '
                "without noise show whoever is in one of them alone"
            )
        if self.trust == "local" and self.secure.model_dump() != SecureSection().model_dump():  # orders store defaults
            raise ValueError('trust = "secure-aggregation" with secure: it has no meaning where trust is local')
        if self.market and self.kind in ("auction", "sampling", "reward", "joint"):
            raise ValueError(f"market is for kinds of one's own; {self.kind} has its own section")
        return self

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "market") -> MarketConfig:
        """Check a dictionary; the first problem becomes a one-line error that names the key."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise first_problem(error, source, cls) from None

    @classmethod
    def load(cls, path: str | Path) -> MarketConfig:
        """Read a TOML file."""
        return cls.parse(read_toml(path, "market file"), source=Path(path).name)

    def spec(self, **source: Unpack[Source]) -> Spec:
        """The market that the file describes."""
        if self.kind == "reward":
            return self.stackelberg_training(**source)
        if self.kind == "joint":
            return self.jdp_training(**source)
        if self.kind == "sampling":
            return self.sampled_training(**source)
        plain = self.simulation(**source)
        if self.kind == "auction":
            return plain
        try:
            described: Spec = kinds.of(self.kind).described(plain, **self.market)
        except TypeError as error:
            raise ConfigError("market", ", ".join(self.market), f"the settings of {self.kind} ({error})") from None
        return described

    def _dealt(self, source: Source) -> Dealt:
        """Load the data and deal it out."""
        found = source.get("data")
        if found is None:
            found = self.data.load(source.get("data_dir"), source.get("base", Path()))
        data = self.data.taken(found, self.seed)
        return {
            "data": data,
            "partition": self.data.split(data, self.seed),
            "seed": self.seed,
            "cap": PrivacyCap(self.owners.privacy_cap, self.owners.privacy_cap_delta),
            "secure": None if self.trust == "local" else self.secure.policy(),
        }

    def simulation(self, **source: Unpack[Source]) -> Simulation:
        """Draw the bids and build the mechanisms."""
        mechanism = self.mechanism
        auction = auctions.get(auctions.admit(mechanism.auction))  # names are checked before any data is read
        rule = mechanism.rule(self.trust)
        aggregation.get(aggregation.admit(rule))
        if mechanism.perturbation != RECOMMENDED and mechanism.unit == "update":
            privacy.get(privacy.admit(mechanism.perturbation))
        self.model.check_name()
        dealt, local = self._dealt(source), self.training.local()
        secure = dealt["secure"]
        bids = self.owners.profile(dealt["partition"].sizes, self.seed, source.get("base", Path()))
        model = self.model.build(dealt["data"], local)
        size = dimension(model)
        perturbation: privacy.Perturbation
        if mechanism.unit == "record":
            perturbation = mechanism.record_noise(local)
        else:
            noise = mechanism.perturbation
            if noise == RECOMMENDED and secure is None:
                noise = privacy.recommend(size, float(np.median(bids.privacy_budget))).name
            elif noise == RECOMMENDED:
                noise = privacy.DistributedGaussian.name
            perturbation = privacy.get(noise, clip=mechanism.clip)
        return Simulation(
            **dealt,
            task=self._task(),
            bids=bids,
            auction=auction,
            aggregation=aggregation.get(
                rule,
                clip=getattr(perturbation, "length", mechanism.clip),
                dimension=size if mechanism.bound_dimension == "model" else mechanism.bound_dimension,
                perturbation=perturbation if mechanism.bound_dimension == "model" else None,
                excess=1.0 if secure is None else secure.excess,
            ),
            perturbation=perturbation,
            local=local,
            model=model,
            average=self.training.average,
            dropout=self.owners.dropout,
            faulty=self.owners.faulty,
            normalised=self.training.normalised,
        )

    def _own_model(self, data: DataSet) -> Model | None:
        """None for softmax regression by plain descent, which the reward game and client sampling have themselves."""
        usual = self.model.name == "softmax" and not self.model.settings and self.training.is_plain
        return None if usual else self.model.build(data, self.training.local())

    def stackelberg_training(self, **source: Unpack[Source]) -> StackelbergTraining:
        """The reward game: users draw their values of privacy; everybody holds equally many records."""
        if self.data.partition != "equal":
            raise ConfigError("data.partition", self.data.partition, '"equal" in the reward game')
        self.model.check_name()
        dealt, game = self._dealt(source), self.reward
        return StackelbergTraining(
            **dealt,
            privacy_values=stream(self.seed, purpose=Purpose.BIDS).uniform(*game.privacy_values, self.data.owners),
            **game.model_dump(exclude={"privacy_values"}),
            rounds=self.task.rounds,
            name=self.task.name,
            learning_rate=self.task.learning_rate,
            clip=self.mechanism.clip,
            any_model=self._own_model(dealt["data"]),
        )

    def jdp_training(self, **source: Unpack[Source]) -> JdpTraining:
        """Robust joint-DP learning: clients draw their costs."""
        self.joint.check_names()  # before any data is read
        model = self.model if self.joint.model is None else ModelSection(name=self.joint.model)
        model.check_name()
        if self.data.validation:
            raise ConfigError("data.validation", self.data.validation, "joint.validation in this kind of market")
        dealt, local = self._dealt(source), self.training.local(self.joint.momentum)
        if local.batch_size is None and self.joint.noise_unit == "client":
            local = replace(local, batch_size=32)
        built = model.build(dealt["data"], local, threads=self.joint.threads)
        task, clip = self.task, self.mechanism.clip
        return self.joint.training(name=task.name, rounds=task.rounds, clip=clip, model=built, **dealt)

    def sampled_training(self, **source: Unpack[Source]) -> SampledTraining:
        """Client sampling: clients draw their costs and report them."""
        self.sampling.cost_distribution()  # refused before any data is read
        self.model.check_name()
        task, dealt, local = self.task, self._dealt(source), self.training.local()
        assert task.budget_per_round is not None  # checked with the file; for the type checker
        return self.sampling.training(
            name=task.name, rounds=task.rounds, budget=task.budget_per_round, local=local,
            model=self._own_model(dealt["data"]), clip=self.mechanism.clip, **dealt,
        )  # fmt: skip

    def _task(self) -> Task:
        given = self.task.model_dump(exclude={"budget_per_round"})
        budget = self.task.budget_per_round
        return Task(**given, budget_micros=None if budget is None else to_micros("budget_per_round", budget))


def _built(get: Callable[..., T], key: str, name: str, settings: dict[str, Any]) -> T:
    """Build by name; a setting that this one does not take, or lacks, is a mistake in the file."""
    try:
        return get(name, **settings)
    except TypeError:
        raise ConfigError(key, f"{name} with {', '.join(settings)}", "all settings that it needs") from None
