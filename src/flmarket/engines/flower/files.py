"""`owner.toml`: an owner's own configuration, on her own machine, and the only thing that her guard obeys.

    owner = 0                          # her number in the market, as the broker registered her
    account = "owner-0"                # hers in the buyer's ledger, where the price must be in escrow (default owner-N)
    data = "records.npz"               # x (records, features) and y (records,); or .csv, the class in the last column
    records = 600                      # instead of data: how many her own Flower app trains on (`flmarket.flower`)
    classes = 2                        # how many there are; without it she bids for tasks with any number of them
    record = "record"                  # folder of her privacy account and her journal; keep it for ever
    allow_raw = false                  # true: updates may leave without noise, which client sampling needs
    answer_seconds = 10.0              # every answer to an order leaves so long after it came; half is for training
    most_seconds = 600.0               # training that takes longer is given up
    trust = ["local", "secure-aggregation"]   # the second: masked sums, where others' noise protects her too
    identity = "identity.key"          # her Ed25519 key in masked sums: 32 bytes, hexadecimal; the public half in .pub
    peers = "peers.toml"               # other owners' public keys in masked sums, from anywhere but the broker
    least_honest = 2                   # in any masked sum so many owners at least do not collude with the broker
    models = ["my_models:build"]       # models besides the registered ones that she lets a buyer announce
    kinds = ["my_market:Raffle"]       # kinds of market besides the registered ones that she takes part in

    [bid]
    valuation = "linear"               # linear, quadratic, sqrt, exponential, step
    rate = 1.0
    privacy_budget = 1.0               # the most ε in one round (in the reward game: ρ in one task)
    least_epsilon = 0.001              # the least; with the cap it bounds how often anybody can ask
    least_records = 1
    minimum_price = 0.5                # the least money for one release, whatever the valuation says
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

import secrets
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from flmarket.bids import FloatArray, IntArray, Kind, Valuations
from flmarket.errors import ConfigError, InvalidInput, first_problem
from flmarket.files import read_toml, write_file
from flmarket.learning import LocalTraining, Model, models
from flmarket.learning.data.files import read_npz
from flmarket.market import Announcement, Owner, kinds
from flmarket.market.masking.primitives import KEY as _KEY
from flmarket.market.masking.primitives import identity_key
from flmarket.market.owner import LEAST_EPSILON
from flmarket.privacy import ApproxDp, Cap, PureDp, RecordLevel, Uncapped, ZCdp, cap_from_dict, event_to_dict

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]


IDENTITY, PEERS = "identity.key", "peers.toml"
LARGEST_OWNER = 2**62  # what a message can carry


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BidSection(_Section):
    """What she asks."""

    valuation: Literal["linear", "quadratic", "sqrt", "exponential", "step"] = "linear"
    rate: Positive = 1.0
    privacy_budget: Positive = 1.0
    least_epsilon: Positive = LEAST_EPSILON
    least_records: Count = 1
    minimum_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    value: Positive | None = None
    cost: Literal["linear", "quadratic", "exponential"] = "linear"


class CapSection(_Section):
    """The most privacy she gives up over her lifetime."""

    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    rho: Positive | None = None
    none: Literal[True] | None = None
    unit: Literal["update", "record"] = "update"

    @model_validator(mode="after")
    def _one_currency(self) -> Self:
        given = [name for name in ("epsilon", "rho", "none") if getattr(self, name) is not None]
        if len(given) != 1 or (self.delta is not None and given != ["epsilon"]):
            raise ValueError("epsilon, epsilon and delta, rho, or none = true")
        if self.unit == "record" and (self.none or (self.epsilon is not None and self.delta is None)):
            raise ValueError('epsilon with delta, or rho, for unit = "record": its noise is Gaussian')
        return self

    @classmethod
    def of(cls, cap: Cap) -> CapSection:
        """What `cap` gives back."""
        if isinstance(cap, RecordLevel):
            inner = cls.of(cap_from_dict(event_to_dict(cap.loss)))
            return cls(**inner.model_dump(exclude_none=True) | {"unit": "record"})
        if isinstance(cap, Uncapped):
            return cls(none=True)
        if isinstance(cap, ZCdp):
            return cls(rho=cap.rho)
        return cls(epsilon=cap.epsilon) if isinstance(cap, PureDp) else cls(epsilon=cap.epsilon, delta=cap.delta)

    def cap(self) -> Cap:
        """As her account takes it."""
        if self.none:
            return Uncapped()
        cap: PureDp | ZCdp | ApproxDp
        if self.rho is not None:
            cap = ZCdp(self.rho)
        else:
            assert self.epsilon is not None
            cap = PureDp(self.epsilon) if self.delta is None else ApproxDp(self.epsilon, self.delta)
        return RecordLevel(cap) if self.unit == "record" else cap


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

    def trained(self, call: Announcement) -> Model | None:
        """The model for what is announced."""
        return self.trainer(call.features, call.classes)

    def trainer(self, features: int, classes: int) -> Model | None:
        """The model for so many features and classes; None if it is a network for others."""
        local = LocalTraining(**self.model_dump(exclude={"kind"}, exclude_none=True))
        try:
            return models.get(self.kind, features=features, classes=classes, local=local)
        except InvalidInput:
            return None


class OwnerFile(_Section):
    """The whole file."""

    owner: Annotated[int, Field(ge=0, le=LARGEST_OWNER, strict=True)]
    account: str = ""
    data: str | None = None
    records: Count | None = None
    classes: Count | None = None
    record: str = "record"
    allow_raw: Annotated[bool, Field(strict=True)] = False
    answer_seconds: Seconds | None = None
    most_seconds: Seconds = 600.0
    trust: tuple[Literal["local", "secure-aggregation"], ...] = ("local",)
    identity: str = ""
    peers: str = ""
    least_honest: Count = 2
    bid: BidSection = BidSection()
    cap: CapSection
    models: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    model: ModelSection | None = None

    @model_validator(mode="after")
    def _one_holding(self) -> Self:
        if (self.data is None) == (self.records is None):
            raise ValueError("either data, a table of records, or records, how many her own app trains on")
        return self

    @classmethod
    def load(cls, path: str | Path) -> OwnerFile:
        """Read and check; the first problem becomes a one-line error that names the key."""
        try:
            own = cls.model_validate(read_toml(path, "owner file"))
        except ValidationError as error:
            raise first_problem(error, Path(path).name, cls) from None
        if own.records is not None:  # an app's updates are sold by auction, one by one: these sell nothing ever
            for key, value, sells, accepted in (
                ("bid.least_epsilon", own.bid.least_epsilon, own.bid.least_epsilon <= own.bid.privacy_budget,
                 f"at most bid.privacy_budget, {own.bid.privacy_budget:g}"),
                ("bid.least_records", own.bid.least_records, own.bid.least_records <= own.records,
                 f"at most records, {own.records}"),
                ("trust", own.trust, "local" in own.trust, "\"local\" among them"),
            ):  # fmt: skip
                if not sells:
                    raise ConfigError(f"{Path(path).name}: {key}", value, accepted)
        return own

    def to_toml(self) -> str:
        """The file's text, with the keys that were given."""
        return tomli_w.dumps(self.model_dump(exclude_unset=True, exclude_none=True))

    def stays_out(self) -> dict[str, str]:
        """By kind of market: why she takes no part in it; empty if she does."""
        value, raw, cap, trust = self.bid.value, self.allow_raw, self.cap.cap(), self.trust
        return {
            name: kinds.of(name).side.stays_out(value=value, allow_raw=raw, cap=cap, trust=trust)
            for name in kinds.names()
        }

    def owner_at(self, base: Path, trainer: Callable[[Announcement], Model | None] | None = None) -> Owner:
        """The owner, with her records read if she has a table; `base` is the file's folder.

        `trainer` is what she trains if only her own app can read them.
        """
        x, y = (np.empty((0, 0)), np.empty(0, np.int64)) if self.data is None else read_records(base / self.data)
        if trainer is None and self.model is not None:
            trainer = self.model.trained
        for one in self.kinds:
            kinds.admit(one)
        kind = int(Kind[self.bid.valuation.upper()])
        return Owner(
            number=self.owner, x=x, y=y, holds=self.records, valuation=Valuations([kind], [self.bid.rate]),
            value=self.bid.value, least_price=self.bid.minimum_price, most_seconds=self.most_seconds,
            privacy_budget=self.bid.privacy_budget, cap=self.cap.cap(), allow_raw=self.allow_raw,
            least_epsilon=self.bid.least_epsilon, least_records=self.bid.least_records, cost=self.bid.cost,
            account=self.account, classes=self.classes, answer_seconds=self.answer_seconds, trust=self.trust,
            identity=read_key(base / self.identity) if self.identity else b"", least_honest=self.least_honest,
            peers=read_peers(base / self.peers) if self.peers else None,
            record=base / self.record / f"owner-{self.owner}",
            trainer=trainer, allow=tuple(map(models.admit, self.models)),
        )  # fmt: skip


def read_key(path: Path) -> bytes:
    """A key of 32 bytes from a file in hexadecimal."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "identity", str(path), f"a file with 64 hexadecimal digits ({type(error).__name__})"
        ) from None
    if len(key) != _KEY:
        raise ConfigError("identity", str(path), "a file with 64 hexadecimal digits")
    return key


def read_peers(path: Path) -> dict[int, bytes]:
    """Public keys by owner, from a file with lines like `3 = "…64 hexadecimal digits…"`."""
    try:
        found = {int(owner): bytes.fromhex(key) for owner, key in tomllib.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("peers", str(path), f"a TOML file of keys by owner ({error})") from None
    if any(len(key) != _KEY for key in found.values()):
        raise ConfigError("peers", str(path), "keys of 64 hexadecimal digits")
    return found


def write_identity(folder: Path) -> bytes:
    """A new key for masked sums in `folder`, kept if there is one; returns its public half."""
    path = folder / IDENTITY
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, secrets.token_bytes(_KEY).hex(), sync=True, private=True)
    public = identity_key(read_key(path))
    (folder / f"{IDENTITY}.pub").write_text(public.hex(), encoding="ascii")
    return public


def write_peers(path: Path, keys: Mapping[int, bytes]) -> None:
    """What `read_peers` reads."""
    path.write_text("".join(f'{owner} = "{key.hex()}"\n' for owner, key in sorted(keys.items())), encoding="ascii")


def read_records(path: Path) -> tuple[FloatArray, IntArray]:
    """Features and classes from an .npz or a .csv file."""
    try:
        if path.suffix == ".csv":
            table = np.loadtxt(path, delimiter=",", ndmin=2)
            x, y = table[:, :-1], table[:, -1]
        else:
            x, y = read_npz(path)
        if (np.asarray(y) != np.floor(y)).any() or np.min(y, initial=0) < 0:
            raise ValueError("classes are whole numbers from 0")
        return np.ascontiguousarray(x, dtype=np.float64), np.asarray(y, dtype=np.int64)
    except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
        raise ConfigError("data", str(path), f"an .npz with x and y, or a .csv of numbers ({error})") from None


def located(file: str | Path) -> Path:
    """A path, or `package:file` in a Flower app; a drive's letter is no package."""
    package, colon, name = str(file).partition(":")
    if not colon or len(package) == 1:
        return Path(file)
    try:
        return Path(str(resources.files(package) / name))
    except (ImportError, ValueError):
        raise ConfigError("file", str(file), "a path, or package:file with a package of the app") from None
