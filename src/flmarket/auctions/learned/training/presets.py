"""What to train and how: this project's networks, and the papers' own, as named presets.

`Schedule` carries the papers' symbols: T batches of K profiles an epoch, J steps of length γ for the misreports,
learning rate ψ, multipliers φ updated every Q batches, penalties ρ that grow by a step every so many epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flmarket.auctions.learned.settings import Settings
from flmarket.errors import InvalidInput, UnknownName

__all__ = ["PRESETS", "Penalty", "Preset", "Schedule", "preset"]


@dataclass(frozen=True)
class Penalty:
    """One constraint of the augmented Lagrangian: first multiplier φ, first ρ, its growth. φ = ρ = 0 leaves it out."""

    multiplier: float = 1.0
    rho: float = 1.0
    growth: float = 0.0  # added to ρ at the end of every `every` epochs
    every: int = 1

    def rho_at(self, epoch: int) -> float:
        """ρ in the given epoch, counted from 0."""
        return self.rho + self.growth * (epoch // self.every)


OFF = Penalty(0.0, 0.0)


@dataclass(frozen=True)
class Schedule:
    """How long, on what, and against which penalties."""

    epochs: int = 40
    batches: int = 50  # T
    profiles: int = 128  # K
    misreports: int = 24  # J
    step: float = 0.1  # γ
    rate: float = 0.002  # ψ
    rate_end: float = 0.0002  # the learning rate falls to this, geometrically
    update_every: int = 10  # Q
    objective: str = "bound"  # "bound": ERR with opt-aggr; "conventional": with data shares; "privacy": −Σ W·E[ε]
    weight: float | None = None  # of the objective; None: the number of owners
    regret_over: str = "full"  # "full" cost of the bid, "expected" cost of what is sold, or the "budget"
    regret: Penalty = field(default_factory=Penalty)
    rational: Penalty = OFF
    determinism: Penalty = OFF
    warm_up: float = 5.0  # soft choices start at this many times the deployed temperature and cool down
    patience: int = 0  # epochs without a better validation before stopping; 0: never stop early

    def __post_init__(self) -> None:
        if self.objective not in ("bound", "conventional", "privacy"):
            raise InvalidInput("objective", self.objective, "bound, conventional or privacy")
        if self.regret_over not in ("full", "expected", "budget"):
            raise InvalidInput("regret_over", self.regret_over, "full, expected or budget")
        for name in ("epochs", "batches", "profiles", "misreports", "update_every"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, getattr(self, name), "a whole number of at least 1")


@dataclass(frozen=True)
class Preset:
    """A network and its training."""

    name: str
    about: str
    settings: Settings
    schedule: Schedule


_CLEARED_SCHEDULE = Schedule(
    epochs=20, batches=40, profiles=96, regret=Penalty(30.0, 1.0), warm_up=3.0, rate=0.004, patience=10
)
_LOTTERY = Settings(
    deployment="sampled", sees="all", clearing=False, dummy=True, temperature=0.05, hidden=(48, 48), embedding=12
)
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
# FL-Market 2022 App. A: two hidden layers of 100 as printed (the published code has three)
_FLM22 = Schedule(
    epochs=50,
    batches=100,
    profiles=1024,
    misreports=100,
    step=0.1,
    rate=0.001,
    rate_end=0.001,
    regret=Penalty(1.0, 1.0, growth=1.0),
    rational=Penalty(1.0, 1.0, growth=1.0),
    determinism=Penalty(1.0, 1.0),
    warm_up=1.0,
    regret_over="expected",
)
_PAPER = Settings(
    head="shares", encoder="concatenated", sees="all", clearing=False, dummy=True, rational=False, owners=10,
    temperature=1.0, hidden=(100, 100), deployment="sampled", activation="tanh",
)  # fmt: skip
# FL-Market 2021 App. A
_FLM21 = replace(
    _FLM22,
    epochs=100,
    profiles=1000,
    misreports=25,
    regret=Penalty(1.0, 1.0, growth=1.0, every=2),
    rational=Penalty(1.0, 4.0, growth=3.0, every=2),
    determinism=OFF,
    weight=1.0,
    regret_over="budget",
)

_ALL = (
    Preset(
        "dm-regretnet",
        "menus cleared against the budget, argmax, error bound",
        Settings(),
        _CLEARED_SCHEDULE,
    ),
    Preset(
        "dm-regretnet-convl",
        "the same, trained for conventional aggregation",
        Settings(),
        replace(_CLEARED_SCHEDULE, objective="conventional"),
    ),
    Preset("regretnet", "one sub-bid, sampled", replace(_LOTTERY, items=1), _LOTTERY_SCHEDULE),
    Preset("m-regretnet", "eight sub-bids, sampled", _CURVE, replace(_LOTTERY_SCHEDULE, epochs=12)),
    Preset(
        "murba",
        "twenty sub-bids, cleared menus that pay out the whole budget, error bound",
        Settings(items=20),
        replace(_CLEARED_SCHEDULE, epochs=8, profiles=48, misreports=60),
    ),
    Preset(
        "flm22-dm-regretnet",
        "the paper's DM-RegretNet with OptAggr",
        replace(_PAPER, deployment="argmax", temperature=0.125),
        _FLM22,
    ),
    Preset(
        "flm22-m-regretnet",
        "the paper's M-RegretNet",
        _PAPER,
        replace(_FLM22, objective="privacy", weight=1.0, determinism=OFF),
    ),
    Preset(
        "flm22-regretnet",
        "the paper's RegretNet",
        replace(_PAPER, items=1),
        replace(_FLM22, objective="privacy", weight=1.0, determinism=OFF),
    ),
    *(
        Preset(
            f"flm21-murba-{items}",
            f"the paper's MURBA with M = {items}",
            replace(_PAPER, items=items, deployment="expected", dummy=False),
            _FLM21,
        )
        for items in (10, 15, 20)
    ),
)
PRESETS = {one.name: one for one in _ALL}


def preset(name: str) -> Preset:
    """A preset by name."""
    if name not in PRESETS:
        raise UnknownName("preset", name, f"one of posted, {', '.join(PRESETS)}")
    return PRESETS[name]
