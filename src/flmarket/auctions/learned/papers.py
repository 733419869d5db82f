"""RegretNet, M-RegretNet, DM-RegretNet (FL-Market 2022 §V) and MURBA (2021 §5.2), as printed, in plain NumPy.

Two fully connected networks with tanh see every owner's M sub-bids, ε̄ and data size side by side, and the budget.
One puts out, for each owner, the probabilities z_i0..z_iM of losing or of selling a sub-bid (softmax); the other a
softmax of budget fractions p: owner i is paid p_i·B, whatever is drawn, and also if she sells nothing.

| auction | sub-bids of ε̄ | what is sold | fractions |
| --- | --- | --- | --- |
| RegretNet | 1 | one draw from z_i | n owners and a dummy |
| M-RegretNet | m/M, m = 1..M | one draw from z_i | n owners and a dummy |
| DM-RegretNet | m/M, m = 1..M | argmax of z_i (2022 Alg. 3) | n owners and a dummy |
| MURBA | 1/m, m = 1..M (2021 Alg. 5) | the mean of z_i | n owners: all of B is paid |

Within budget for any weights. Rational and truthful only as far as training reached: an owner may be paid less than her
cost. The networks serve the number of owners and the currency that they were trained for.

The papers do not say in which units the inputs stand. Here: values per record, ε̄, n·W_i, and the budget per record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.auctions.learned.network import checked_fields, mlp, softmax
from flmarket.bids import APPROXIMATE, EXACT, BidProfile, FloatArray, Guarantees, Outcome, checked_budget, slices
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_whole

FAMILY = "paper"  # marks the settings in a weight file

_CHUNK_ENTRIES = 200_000
_TINY = 1e-300
_FAR = 1e12  # a number so large says the same to a tanh as any larger one


@dataclass(frozen=True)
class PaperSettings:
    """The shape of one of the papers' networks."""

    items: int = 8  # M
    grid: Literal["even", "harmonic"] = "even"
    sold: Literal["drawn", "argmax", "mean"] = "drawn"
    dummy: bool = True
    owners: int = 10
    hidden: tuple[int, ...] = (100, 100)

    def __post_init__(self) -> None:
        for name, allowed in (("grid", ("even", "harmonic")), ("sold", ("drawn", "argmax", "mean"))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(name, getattr(self, name), f"one of {', '.join(allowed)}")
        checked_whole("items", self.items, 1, 64)
        checked_whole("owners", self.owners, 1, 1000)

    @property
    def fractions(self) -> FloatArray:
        """The parts of ε̄ that may be sold, ascending, 0 first."""
        m = np.arange(1, self.items + 1)
        return np.concatenate([[0.0], m / self.items if self.grid == "even" else 1.0 / m[::-1]])

    @property
    def inputs(self) -> int:
        """Nodes of the input layer: M values, ε̄ and the share of records of every owner, and the budget."""
        return self.owners * (self.items + 2) + 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"family": FAMILY, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PaperSettings:
        """The inverse of `to_dict`; unknown fields are refused."""
        return cls(**checked_fields(cls, {key: value for key, value in values.items() if key != "family"}))


_MURBA = PaperSettings(grid="harmonic", sold="mean", dummy=False)
# what each of the papers' names stands for
SHAPES = {
    "regretnet": PaperSettings(items=1),
    "m-regretnet": PaperSettings(),
    "dm-regretnet": PaperSettings(sold="argmax"),
    "dm-regretnet-convl": PaperSettings(sold="argmax"),
    "murba": replace(_MURBA, items=20),
    "murba-15": replace(_MURBA, items=15),
    "murba-10": replace(_MURBA, items=10),
}


def first_parameters(settings: PaperSettings, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """Where training starts: normal weights of variance 1 / (width of the layer below), no bias."""
    n = settings.owners
    ends = {"allocation": n * (settings.items + 1), "payment": n + settings.dummy}
    made: dict[str, NDArray[np.float32]] = {}
    for name, end in ends.items():
        for layer, (below, above) in enumerate(pairwise((settings.inputs, *settings.hidden, end))):
            made[f"{name}.{layer}.weight"] = rng.normal(0.0, below**-0.5, (below, above)).astype(np.float32)
            made[f"{name}.{layer}.bias"] = np.zeros(above, dtype=np.float32)
    return made


def inputs_of(settings: PaperSettings, bids: BidProfile, budget: FloatArray) -> FloatArray:
    """What the networks see of profiles of shape (rows, n): (rows, inputs)."""
    rows, n = bids.shape
    epsilon = bids.privacy_budget[..., None] * settings.fractions[1:]
    with np.errstate(over="ignore"):
        value = np.minimum(bids.valuations.reshape((rows, n, 1)).per_record(epsilon), _FAR)
    records = np.maximum(bids.data_size.sum(axis=-1, keepdims=True), _TINY)
    each = np.concatenate([value, bids.privacy_budget[..., None], (n * bids.data_size / records)[..., None]], axis=-1)
    with np.errstate(over="ignore"):
        money = np.minimum(budget[:, None] / records, _FAR)
    return np.concatenate([each.reshape(rows, -1), money], axis=-1)


def outputs(xp: Any, settings: PaperSettings, parameters: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
    """Both networks, in NumPy or torch: logits of z (rows, n, M+1), and of the fractions (rows, n + dummy)."""
    logits, fractions = (mlp(parameters, name, x, xp.tanh) for name in ("allocation", "payment"))
    return logits.reshape(len(x), settings.owners, settings.items + 1), fractions


@dataclass(frozen=True)
class PaperAuction:
    """One of the papers' networks with its weights."""

    settings: PaperSettings
    parameters: Mapping[str, Any]
    name: str = "paper"
    source: str = "trained by flmarket train-auction; docs/learned.md"
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    # what a market has to know: it settles for what is delivered, and cannot pay these
    pays_losers = True

    @property
    def guarantees(self) -> Guarantees:
        """The budget holds for any weights; truthfulness and rationality are what training reached."""
        return Guarantees(APPROXIMATE, APPROXIMATE, EXACT, self.source)

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch. Without `rng` a lottery is settled at its median."""
        n, settings = bids.n, self.settings
        if n != settings.owners:
            accepted = f"{settings.owners} owners, the number {self.name} was trained for"
            raise InvalidInput("bids", f"{n} owners", accepted)
        money = checked_budget(budget, bids.shape[:-1]).reshape(-1)
        chance, share = self.lottery(bids, money)
        privacy = bids.privacy_budget.reshape(-1, n)
        if settings.sold == "mean":
            part = chance @ settings.fractions
        elif settings.sold == "argmax":
            part = settings.fractions[chance.argmax(axis=-1)]
        else:
            ticket = np.full((len(money), n, 1), 0.5) if rng is None else rng.random((len(money), n, 1))
            part = settings.fractions[(np.cumsum(chance, axis=-1)[..., :-1] <= ticket).sum(axis=-1)]
        return Outcome((part * privacy).reshape(bids.shape), (share * money[:, None]).reshape(bids.shape))

    @property
    def training(self) -> str:
        """How far it was trained, for a remark."""
        if "iterations" not in self.provenance:
            return "of unknown training"
        return "{iterations:,} of the paper's {scheduled:,} iterations".format(**self.provenance)

    def lottery(self, bids: BidProfile, money: FloatArray) -> tuple[FloatArray, FloatArray]:
        """z (rows, n, M+1) and the fractions of the budget (rows, n), for budgets (rows,)."""
        flat, parts = bids.flat, []
        for part in slices(len(money), _CHUNK_ENTRIES // self.settings.inputs):
            seen = inputs_of(self.settings, flat[part], money[part])
            logits, pay = outputs(np, self.settings, self.parameters, seen)
            parts.append((softmax(np, logits), softmax(np, pay)[:, : bids.n]))
        return np.concatenate([z for z, _ in parts]), np.concatenate([share for _, share in parts])
