"""One lie in full: everybody's bids, the budget, both outcomes and what each is worth to the liar, to be replayed.

A replay runs the two auctions again, alone, and recomputes the utilities from the outcomes. For a mechanism that draws
random numbers it averages over `draws` generators seeded (seed, 0), (seed, 1), …, the same ones for truth and lie.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flmarket import auctions
from flmarket.audit.trials import Awards, Reports, Trials
from flmarket.bids import Auction, BidProfile, FloatArray, Kind, Valuations


@dataclass(frozen=True)
class Bid:
    """One owner's bid in plain numbers."""

    kind: str
    rate: float
    privacy_budget: float
    data_size: float
    full_cost: float
    grid: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Result:
    """What one report brings the owner."""

    epsilon: float
    payment: float
    participation: float
    utility: float
    others_epsilon: tuple[float, ...]
    others_payment: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """Her gain against the truth as one part of her report moves, the rest staying as in the lie."""

    field: str  # what is multiplied: "value", "privacy_budget", "data_size", or "all fields"
    factor: tuple[float, ...]
    gain: tuple[float, ...]  # −inf where she would sell what she does not have
    epsilon: tuple[float, ...]


@dataclass(frozen=True)
class Example:
    """The best lie found in an audit (with gain 0 if none paid), ready to be replayed."""

    mechanism: str
    bids: tuple[Bid, ...]
    budget: float
    owner: int
    dimension: str
    lie: Bid
    honest: Result
    lying: Result
    gain: float
    gain_over_cost: float
    seed: int = 0
    draws: int = 1
    curve: Curve | None = None

    @property
    def profile(self) -> BidProfile:
        """The true bids."""
        return bids_of(self.bids)

    @property
    def reported(self) -> BidProfile:
        """The bids with the lie in place of the truth."""
        changed = list(self.bids)
        changed[self.owner] = self.lie
        return bids_of(changed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def bids_of(bids: tuple[Bid, ...] | list[Bid]) -> BidProfile:
    """A profile of shape (n,) from plain bids."""
    parts = [
        Valuations([int(Kind[bid.kind.upper()])], [bid.rate], grid=[bid.grid], values=[bid.values])
        if bid.grid
        else Valuations([int(Kind[bid.kind.upper()])], [bid.rate])
        for bid in bids
    ]
    return BidProfile(
        Valuations.concatenate(parts), [bid.privacy_budget for bid in bids], [bid.data_size for bid in bids]
    )


def plain_bids(profile: BidProfile) -> tuple[Bid, ...]:
    """A profile of shape (n,) as plain bids."""
    table, cost = profile.valuations, profile.full_cost
    terms, made = (table.rate, profile.privacy_budget, profile.data_size, cost), []
    for i in range(profile.n):
        kind = Kind(int(table.kind[i]))
        points = (table.grid, table.values) if kind is Kind.TABULATED else (None, None)
        grid, values = (() if part is None else tuple(part[i].tolist()) for part in points)
        rate, limit, size, full_cost = (float(part[i]) for part in terms)
        made.append(Bid(kind.name.lower(), rate, limit, size, full_cost, grid, values))
    return tuple(made)


def describe(
    mechanism: Auction, name: str, bids: BidProfile, budget: float, owner: int, reports: Reports, dimension: str,
    *, seed: int, draws: int,
) -> Example:  # fmt: skip
    """Run truth and lie alone (bids of shape (1, n), reports of one row) and write everything down."""
    trials = Trials(mechanism, bids, np.array([budget]), np.array([owner]), seed=(seed,), draws=draws)
    lying = trials.run(reports)
    seen = trials.profile(reports)
    honest = _result(trials, trials.honest, bids)
    gain = float(lying.utility[0]) - _finite(trials.honest.utility[0])
    return Example(
        mechanism=name,
        bids=plain_bids(bids[0]),
        budget=float(budget),
        owner=owner,
        dimension=dimension,
        lie=plain_bids(seen[0])[owner],
        honest=honest,
        lying=_result(trials, lying, seen),
        gain=gain,
        gain_over_cost=gain / max(float(trials.cost[0]), 1e-300),
        seed=seed,
        draws=draws,
        curve=_curve(trials, reports, dimension),
    )


def _result(trials: Trials, awards: Awards, seen: BidProfile) -> Result:
    rng = np.random.default_rng((*trials.seed, 0, 0))
    outcome = trials.mechanism.run(seen, trials.budget, rng=rng)
    got = (awards.epsilon, awards.payment, awards.participation, awards.utility)
    epsilon, payment, share, utility = (float(part[0]) for part in got)
    others = (tuple(part[0].tolist()) for part in (outcome.epsilon, outcome.payment))
    return Result(epsilon, payment, share, utility, *others)


def _curve(trials: Trials, lie: Reports, dimension: str) -> Curve:
    """121 reports on both sides of the truth, reaching past the lie."""
    field = {"value_only": "value", "joint": "all fields"}.get(dimension, dimension)
    truth = trials.truth
    if field == "all fields":  # along the line (in logarithms) from the truth, 0, to the lie, 1, and half as far beyond
        position = np.linspace(-0.5, 1.5, 121)
        ratio = {
            "value": _ratio(lie.rate, truth.rate),
            "privacy_budget": _ratio(lie.privacy_budget, truth.privacy_budget),
            "data_size": _ratio(lie.data_size, truth.data_size),
        }
        points = [truth.times(**{name: base**t for name, base in ratio.items()}) for t in position]
    else:
        seen = trials.profile(lie).full_cost[0, trials.owner[0]]
        at = {
            "value": float(seen / max(float(trials.cost[0]), 1e-300)),
            "privacy_budget": float(_ratio(lie.privacy_budget, truth.privacy_budget)),
            "data_size": float(_ratio(lie.data_size, truth.data_size)),
        }[field]
        end = max(2.0, min(1.25 * at, 6.0))
        position = np.unique(np.concatenate([np.linspace(0.0, end, 121), [1.0, min(at, end)]]))
        same_shape = field != "value" or (lie.kind[0] == truth.kind[0] and lie.grid is None)
        points = [
            truth.times(**{field: t}) if same_shape or at == 0 else lie.times(value=t / at) for t in position.tolist()
        ]
    honest = _finite(trials.honest.utility[0])
    awards = [trials.run(report) for report in points]
    return Curve(
        field,
        tuple(position.tolist()),
        tuple(float(award.utility[0]) - honest for award in awards),
        tuple(float(award.epsilon[0]) for award in awards),
    )


def _finite(utility: float) -> float:
    """An honest owner asked for more than her cap takes no part: worth 0, and reported as a broken rule elsewhere."""
    return float(utility) if np.isfinite(utility) else 0.0


def _ratio(lie: FloatArray, truth: FloatArray) -> float:
    return float(lie[0] / truth[0]) if truth[0] > 0 and lie[0] > 0 else 1.0


def replay(example: Example, mechanism: Auction | None = None) -> Example:
    """Run both auctions again from the numbers alone; a mechanism that is not registered must be given."""
    chosen = auctions.get(example.mechanism) if mechanism is None else mechanism
    profile, lie = example.profile, example.lie
    kind = np.array([int(Kind[lie.kind.upper()])], dtype=np.int8)
    terms = (np.array([term]) for term in (lie.rate, lie.privacy_budget, lie.data_size))
    reports = Reports(kind, *terms, *(np.array([points]) if points else None for points in (lie.grid, lie.values)))
    return describe(
        chosen, example.mechanism, profile[None], example.budget, example.owner, reports, example.dimension,
        seed=example.seed, draws=example.draws,
    )  # fmt: skip
