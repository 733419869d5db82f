"""Training of learned auctions: what to train and how, this project's networks and the papers' own, by name.

All else in this package needs torch (extra `torch`), which running an auction does not.

Schedules carry the papers' symbols: T batches of K profiles an epoch, J steps of length γ for the misreports, learning
rate ψ, multipliers φ updated every Q batches, penalties ρ that grow by a step every so many epochs, temperature τ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from flmarket.auctions.learned.network import Settings
from flmarket.auctions.learned.papers import SHAPES, PaperSettings
from flmarket.errors import InvalidInput, UnknownName
from flmarket.privacy.events import checked_whole


@dataclass(frozen=True)
class Penalty:
    """One constraint of the augmented Lagrangian: first multiplier φ, first ρ, its growth."""

    multiplier: float = 1.0
    rho: float = 1.0
    growth: float = 0.0  # added to ρ at the end of every `every` epochs
    every: int = 1

    def rho_at(self, epoch: int) -> float:
        """ρ in the given epoch, counted from 0."""
        return self.rho + self.growth * (epoch // self.every)


@dataclass(frozen=True)
class Schedule:
    """How long, on what, and against which penalty of regret: this project's networks."""

    epochs: int = 40
    batches: int = 50  # T
    profiles: int = 128  # K
    misreports: int = 24  # J
    step: float = 0.1  # γ
    rate: float = 0.002  # ψ
    rate_end: float = 0.0002  # the learning rate falls to this, geometrically
    update_every: int = 10  # Q
    objective: str = "bound"  # "bound": ERR with opt-aggr; "conventional": of ConvlAggr; "privacy": −Σ W·E[ε]
    regret: Penalty = field(default_factory=Penalty)
    warm_up: float = 5.0  # soft choices start at this many times the deployed temperature and cool down
    patience: int = 0  # epochs without a better validation before stopping; 0: never stop early

    def __post_init__(self) -> None:
        if self.objective not in ("bound", "conventional", "privacy"):
            raise InvalidInput("objective", self.objective, "bound, conventional or privacy")
        _check_counts(self)


@dataclass(frozen=True)
class PaperSchedule:
    """How the papers train: FL-Market 2022 App. A by default."""

    epochs: int = 50
    batches: int = 100  # T
    profiles: int = 1024  # K
    parts: int = 1  # a batch is dealt out in so many parts, an iteration each: the same sample, steps, epochs and ρ
    misreports: int = 100  # J, in the 2021 paper R
    step: float = 0.1  # γ
    rate: float = 0.001  # ψ
    update_every: int = 10  # Q
    objective: str = "opt-aggr"  # ERR with "opt-aggr", "conventional" or "var-opt" weights; "privacy": −mean W·E[ε]
    weight: float | None = None  # of the objective; None: the number of owners
    over_cost: bool = True  # violations over the cost of what is sold; otherwise in money
    temperature: float | None = 0.125  # τ of the soft argmax; None: there is none
    regret: Penalty = Penalty(1.0, 1.0, growth=1.0)
    rational: Penalty = Penalty(1.0, 1.0, growth=1.0)
    determinism: Penalty | None = Penalty(1.0, 1.0)

    def __post_init__(self) -> None:
        if self.objective not in ("opt-aggr", "conventional", "var-opt", "privacy"):
            raise InvalidInput("objective", self.objective, "opt-aggr, conventional, var-opt or privacy")
        if self.parts < 1 or self.profiles % self.parts:
            raise InvalidInput("parts", self.parts, f"a whole number that divides the {self.profiles} profiles")
        _check_counts(self)


def _check_counts(schedule: Schedule | PaperSchedule) -> None:
    for name in ("epochs", "batches", "profiles", "misreports", "update_every"):
        checked_whole(name, getattr(schedule, name), 1)


S = TypeVar("S", Settings, PaperSettings)
T = TypeVar("T", Schedule, PaperSchedule)


@dataclass(frozen=True)
class Preset(Generic[S, T]):
    """A network and its training: one of this project's, or one of the papers'."""

    name: str
    settings: S
    schedule: T


_CLEARED_SCHEDULE = Schedule(
    epochs=20, batches=40, profiles=96, regret=Penalty(30.0, 1.0), warm_up=3.0, rate=0.004, patience=10
)
_LOTTERY = Settings(sees="all", clearing=False, dummy=True, temperature=0.05, hidden=(48, 48), embedding=12)
# With several sub-bids, lies steer prices that look at asks: a bent valuation, or an ε̄ so large that the first sub-bid
# is all there is. Prices from sizes alone leave nothing to steer.
_CURVE = replace(_LOTTERY, sees="sizes", temperature=0.01)
_LOTTERY_SCHEDULE = Schedule(
    epochs=20,
    batches=30,
    profiles=32,
    misreports=8,
    objective="privacy",
    regret=Penalty(2.0, 1.0, growth=0.2),
    patience=8,
)
# FL-Market 2022 footnote 3: neither a soft argmax nor its penalty, and E[ε] instead of the bound
_LOTTERIES = PaperSchedule(objective="privacy", temperature=None, determinism=None)
# FL-Market 2021 App. A
_FLM21 = PaperSchedule(
    epochs=100,
    profiles=1000,
    misreports=25,
    objective="var-opt",
    weight=1.0,
    over_cost=False,
    temperature=None,
    regret=Penalty(1.0, 1.0, growth=1.0, every=2),
    rational=Penalty(1.0, 4.0, growth=3.0, every=2),
    determinism=None,
)

_ALL = (
    Preset("cleared-menu", Settings(), _CLEARED_SCHEDULE),
    Preset("cleared-menu-convl", Settings(), replace(_CLEARED_SCHEDULE, objective="conventional")),
    Preset("cleared-menu-20", Settings(items=20), replace(_CLEARED_SCHEDULE, epochs=8, profiles=48, misreports=60)),
    Preset("menu-lottery", _CURVE, replace(_LOTTERY_SCHEDULE, epochs=12)),
    Preset("single-lottery", replace(_LOTTERY, items=1), _LOTTERY_SCHEDULE),
)
# FL-Market 2022: DM-RegretNet with OptAggr and with ConvlAggr, M-RegretNet, RegretNet; 2021: MURBA with VarOpt
_PAPERS = {
    "dm-regretnet": PaperSchedule(),
    "dm-regretnet-convl": PaperSchedule(objective="conventional"),
    "m-regretnet": _LOTTERIES,
    "regretnet": _LOTTERIES,
    "murba": _FLM21,
    "murba-15": _FLM21,
    "murba-10": _FLM21,
}
PRESETS = {one.name: one for one in _ALL}
PAPER_PRESETS = {name: Preset(name, SHAPES[name], schedule) for name, schedule in _PAPERS.items()}


def preset(name: str) -> Preset[Any, Any]:
    """One of the networks by name."""
    known: dict[str, Preset[Any, Any]] = {**PRESETS, **PAPER_PRESETS}
    if name not in known:
        raise UnknownName("preset", name, f"one of posted, {', '.join(known)}")
    return known[name]
