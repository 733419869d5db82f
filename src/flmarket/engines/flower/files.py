"""`owner.toml`: an owner's own configuration, on her own machine, and the only thing that her guard obeys.

    owner = 0                          # her number in the market, as the broker registered her
    account = "owner-0"                # hers in the buyer's ledger, where the price must be in escrow (default owner-N)
    data = "records.npz"               # x (records, features) and y (records,); or .csv, the class in the last column
    classes = 2                        # how many there are; without it she bids for tasks with any number of them
    record = "record"                  # folder of her privacy account and her journal; keep it for ever
    allow_raw = false                  # true: updates may leave without noise, which client sampling needs
    answer_seconds = 10.0              # every answer to an order leaves so long after it came; half is for training
    models = ["my_models:build"]       # models besides the registered ones that she lets a buyer announce
    kinds = ["my_market:Raffle"]       # kinds of market besides the registered ones that she takes part in

    [bid]
    valuation = "linear"               # linear, quadratic, sqrt, exponential, step
    rate = 1.0
    privacy_budget = 1.0               # the most ε in one round (in the reward game: ρ in one task)
    least_epsilon = 0.001              # the least; with the cap it bounds how often anybody can ask
    least_records = 1
    value = 1.0                        # her cost of taking part, or her value of privacy, in markets that ask for it
    cost = "linear"                    # how the value becomes a cost in reward games; or quadratic, exponential

    [cap]
    epsilon = 3.0                      # over her lifetime, all buyers together; with delta, or rho instead
    # delta = 1e-6
    # none = true                      # no cap: the only one under which updates without noise may leave

    [model]                            # what she trains at home in joint markets, if not the announced model
    kind = "softmax"                   # or mlp, mnist-cnn, cifar-cnn (the torch extra), package.module:build
    steps = 5                          # or epochs
    batch_size = 32
    learning_rate = 0.1
    momentum = 0.9

Paths are relative to the file. What is not said keeps her out of markets that need it (`stays_out`): without `value`
she takes part in auctions only. There is no key for noise that is not secure, and none for malice: an owner who has a
file is honest.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from flmarket.bids import FloatArray, IntArray, Kind, Valuations
from flmarket.errors import ConfigError, InvalidInput
from flmarket.learning import LocalTraining, Model, models
from flmarket.market import Owner, kinds
from flmarket.market.owner import LEAST_EPSILON
from flmarket.privacy import ApproxDp, Cap, PureDp, Uncapped, ZCdp

__all__ = ["BidSection", "CapSection", "ModelSection", "OwnerFile", "read_records"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9, strict=True)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BidSection(_Section):
    """What she asks."""

    valuation: Literal["linear", "quadratic", "sqrt", "exponential", "step"] = "linear"
    rate: Positive = 1.0
    privacy_budget: Positive = 1.0
    least_epsilon: Positive = LEAST_EPSILON
    least_records: Count = 1
    value: Positive | None = None
    cost: Literal["linear", "quadratic", "exponential"] = "linear"


class CapSection(_Section):
    """The most privacy she gives up over her lifetime."""

    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    rho: Positive | None = None
    none: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_currency(self) -> Self:
        given = [name for name in ("epsilon", "rho", "none") if getattr(self, name) is not None]
        if len(given) != 1 or (self.delta is not None and given != ["epsilon"]):
            raise ValueError("give epsilon, epsilon and delta, rho, or none = true")
        return self

    @classmethod
    def of(cls, cap: Cap) -> CapSection:
        """What `cap` gives back."""
        if isinstance(cap, Uncapped):
            return cls(none=True)
        if isinstance(cap, ZCdp):
            return cls(rho=cap.rho)
        return cls(epsilon=cap.epsilon) if isinstance(cap, PureDp) else cls(epsilon=cap.epsilon, delta=cap.delta)

    def cap(self) -> Cap:
        """As her account takes it."""
        if self.none:
            return Uncapped()
        if self.rho is not None:
            return ZCdp(self.rho)
        assert self.epsilon is not None
        return PureDp(self.epsilon) if self.delta is None else ApproxDp(self.epsilon, self.delta)


class ModelSection(_Section):
    """What she trains at home in joint-DP markets, where the server sees clipped and noised parameters only."""

    kind: Annotated[str, AfterValidator(models.admit)] = "softmax"  # her own file may name her own code
    steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count = 32
    learning_rate: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        return self

    def trainer(self, features: int, classes: int) -> Model | None:
        """The model for so many features and classes; None if it is a network for others."""
        local = LocalTraining(**self.model_dump(exclude={"kind"}, exclude_none=True))
        try:
            return models.get(self.kind, features=features, classes=classes, local=local)
        except InvalidInput:
            return None


class OwnerFile(_Section):
    """The whole file."""

    owner: Annotated[int, Field(ge=0, strict=True)]
    account: str = ""
    data: str
    classes: Count | None = None
    record: str = "record"
    allow_raw: Annotated[bool, Field(strict=True)] = False
    answer_seconds: Positive | None = None
    bid: BidSection = BidSection()
    cap: CapSection
    models: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    model: ModelSection | None = None

    @classmethod
    def load(cls, path: str | Path) -> OwnerFile:
        """Read and check; the first problem becomes a one-line error that names the key."""
        try:
            return cls.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError("owner file", str(path), f"a readable TOML file ({error})") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "file"
            raise ConfigError(f"{Path(path).name}: {key}", first.get("input"), first["msg"]) from None

    def to_toml(self) -> str:
        """The file's text, with the keys that were given."""
        return tomli_w.dumps(self.model_dump(exclude_unset=True, exclude_none=True))

    def stays_out(self) -> dict[str, str]:
        """By kind of market: why she takes no part in it; empty if she does."""
        value, raw, cap = self.bid.value, self.allow_raw, self.cap.cap()
        return {name: kinds.of(name).side.stays_out(value=value, allow_raw=raw, cap=cap) for name in kinds.names()}

    def owner_at(self, base: Path) -> Owner:
        """The owner, with her records read; `base` is the file's folder."""
        x, y = read_records(base / self.data)
        for one in self.kinds:
            kinds.admit(one)
        kind = int(Kind[self.bid.valuation.upper()])
        return Owner(
            number=self.owner, x=x, y=y, valuation=Valuations([kind], [self.bid.rate]), value=self.bid.value,
            privacy_budget=self.bid.privacy_budget, cap=self.cap.cap(), allow_raw=self.allow_raw,
            least_epsilon=self.bid.least_epsilon, least_records=self.bid.least_records, cost=self.bid.cost,
            account=self.account, classes=self.classes, answer_seconds=self.answer_seconds,
            record=base / self.record / f"owner-{self.owner}",
            trainer=None if self.model is None else self.model.trainer, allow=tuple(map(models.admit, self.models)),
        )  # fmt: skip


def read_records(path: Path) -> tuple[FloatArray, IntArray]:
    """Features and classes from an .npz or a .csv file."""
    try:
        if path.suffix == ".csv":
            table = np.loadtxt(path, delimiter=",", ndmin=2)
            x, y = table[:, :-1], table[:, -1]
        else:
            with np.load(path, allow_pickle=False) as saved:
                x, y = saved["x"], saved["y"]
        if (np.asarray(y) != np.floor(y)).any() or np.min(y, initial=0) < 0:
            raise ValueError("classes are whole numbers from 0")
        return np.ascontiguousarray(x, dtype=np.float64), np.asarray(y, dtype=np.int64)
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise ConfigError("data", str(path), f"an .npz with x and y, or a .csv of numbers ({error})") from None
