"""`owner.toml`: an owner's own configuration, on her own machine, and the only thing that her guard obeys.

    owner = 0                          # her number in the market, as the broker registered her
    data = "records.npz"               # x (records, features) and y (records,); or .csv, the class in the last column
    record = "record"                  # folder of her privacy account and her journal; keep it for ever

    [bid]
    valuation = "linear"               # linear, quadratic, sqrt, exponential, step
    rate = 1.0
    privacy_budget = 1.0               # the most ε in one round (in the reward game: ρ in one task)
    value = 1.0                        # her cost of taking part, or her value of privacy, in markets that ask for it

    [cap]
    epsilon = 10.0                     # over her lifetime, all buyers together; with delta, or rho instead
    # delta = 1e-6

Paths are relative to the file. There is no key for noise that is not secure.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flmarket.bids import Kind, Valuations
from flmarket.engines.flower.owner import Owner
from flmarket.errors import ConfigError
from flmarket.privacy import ApproxDp, PureDp, ZCdp

__all__ = ["OwnerFile", "read_records"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BidSection(_Section):
    """What she asks."""

    valuation: Literal["linear", "quadratic", "sqrt", "exponential", "step"] = "linear"
    rate: Positive = 1.0
    privacy_budget: Positive = 1.0
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class CapSection(_Section):
    """The most privacy she gives up over her lifetime."""

    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    rho: Positive | None = None

    @model_validator(mode="after")
    def _one_currency(self) -> Self:
        if (self.epsilon is None) == (self.rho is None) or (self.rho is not None and self.delta is not None):
            raise ValueError("give epsilon, epsilon and delta, or rho")
        return self

    def cap(self) -> PureDp | ZCdp | ApproxDp:
        """As her account takes it."""
        if self.rho is not None:
            return ZCdp(self.rho)
        assert self.epsilon is not None
        return PureDp(self.epsilon) if self.delta is None else ApproxDp(self.epsilon, self.delta)


class OwnerFile(_Section):
    """The whole file."""

    owner: Annotated[int, Field(ge=0, strict=True)]
    data: str
    record: str = "record"
    bid: BidSection = BidSection()
    cap: CapSection
    allow_raw: bool = False

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

    def owner_at(self, base: Path) -> Owner:
        """The owner, with her records read; `base` is the file's folder."""
        x, y = read_records(base / self.data)
        kind = int(Kind[self.bid.valuation.upper()])
        return Owner(
            number=self.owner, x=x, y=y, valuation=Valuations([kind], [self.bid.rate]),
            privacy_budget=self.bid.privacy_budget, cap=self.cap.cap(),
            record=base / self.record / f"owner-{self.owner}", value=self.bid.value, allow_raw=self.allow_raw,
        )  # fmt: skip


def read_records(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
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
