"""What FL-Market's two papers share: who takes part in a figure, error bounds with their floor, and training runs.

The papers' own networks take part where trained weights for the population ship, and are left out where not; a figure
says who is missing, and how far the others were trained, and a claim about who is missing is undecided. This project's
networks stand beside them, as `cleared-menu`. `posted`, fitted to the population, takes part in every figure too, and
the first best (a buyer who knows every cost) is the floor: no auction that must leave owners a rent reaches it.

Error bounds are kept per profile: auctions are compared on the same ones, on those in which both bought somebody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

import flmarket
from flmarket import auctions
from flmarket.aggregation import error_bound
from flmarket.aggregation import get as get_rule
from flmarket.auctions import learned
from flmarket.audit import first_best
from flmarket.bids import Auction, BidProfile, FloatArray, Guarantees, Outcome
from flmarket.engines.config import MarketConfig
from flmarket.errors import FlmarketError, MissingDependency
from flmarket.experiments import bound_summary
from flmarket.experiments.items import Job, line
from flmarket.experiments.verdicts import Estimate, Finding, missing
from flmarket.learning import DataSet
from flmarket.report import Curve

FIRST_BEST = "first best"
LEARNED = (*learned.PAPERS, *learned.DEFAULTS)
RUNS = "market-runs"  # folder of finished trainings inside the output folder
VERSION = 1  # of what a kept training means


def contenders(population: str, names: Sequence[str]) -> dict[str, Auction]:
    """The auctions among `names` that exist for a population, those trained on it where there are such, by name."""
    found: dict[str, Auction] = {}
    for name in names:
        tuned = name in LEARNED or name == "posted"
        try:
            found[name] = auctions.get(f"{name}:{population}" if tuned and ":" not in name else name)
        except MissingDependency:
            raise
        except (FlmarketError, FileNotFoundError, TypeError):  # unknown, or no weights for this population
            continue
    return found


def no_weights(*names: str) -> Finding:
    """What there is to say about auctions that are not there."""
    return missing(f"weights of {' and '.join(names)} not shipped")


def without(names: Sequence[str], found: Mapping[str, object]) -> str:
    """A remark on who is missing, and on how far the papers' networks were trained that are there."""
    absent = [name for name in names if name not in found]
    text = [f"Weights of {', '.join(absent)} are not shipped for this population."] if absent else []
    papers = [f"{name} {one.training}" for name, one in found.items() if isinstance(one, learned.PaperAuction)]
    return " ".join(text + ([f"Trained: {', '.join(papers)}."] if papers else []))


def profiles(job: Job, population: str, owners: int = 10) -> BidProfile:
    """Fresh profiles for every seed."""
    rng = np.random.default_rng((job.seeds.start, owners))
    return BidProfile.sample(rng, (500 if job.quick else 2000) * len(job.seeds), owners, population)


@dataclass(frozen=True, eq=False)
class BoundCurve:
    """Error bounds (points, profiles), ∞ where nobody sold."""

    auction: str
    rule: str
    values: FloatArray

    @property
    def label(self) -> str:
        """As it stands in a plot."""
        return f"{self.auction} · {self.rule}" if self.rule else self.auction

    @property
    def mean(self) -> FloatArray:
        """Over the auctions in which somebody sold; ∞ if nobody ever did."""
        return np.array([bound_summary(row)[0] for row in self.values])

    @property
    def empty(self) -> NDArray[np.bool_]:
        """Where nobody sold."""
        return np.isinf(self.values)


def bounds(
    bids: BidProfile,
    budgets: Sequence[FloatArray],
    entrants: Mapping[str, Auction],
    rules: Sequence[str],
    *,
    dimension: int = 1,
) -> list[BoundCurve]:
    """Every auction with every aggregation on the same profiles, a budget per profile at each point."""
    points: dict[tuple[str, str], list[FloatArray]] = {}
    for name, auction in entrants.items():
        for place, budget in enumerate(budgets):
            outcome = auction.run(bids, budget, rng=np.random.default_rng(place))
            sold = np.where(outcome.participation > 0, outcome.epsilon, 0.0)
            for rule in rules:
                weights = get_rule(rule, dimension=dimension).weights(sold, bids.data_size)
                bound = error_bound(weights, sold, bids.data_size, dimension=dimension)
                points.setdefault((name, rule), []).append(bound)
    return [BoundCurve(name, rule, np.array(rows)) for (name, rule), rows in points.items()]


def floor(job: Job, bids: BidProfile, budgets: Sequence[FloatArray]) -> BoundCurve:
    """The first best on the first few profiles."""
    count = min(50 if job.quick else 1000, len(bids.data_size))
    # all budgets in one call: the solver's effort hardly depends on how many profiles it has
    many = bids[np.tile(np.arange(count), len(budgets))]
    found = first_best(many, np.concatenate([budget[:count] for budget in budgets]))[1]
    return BoundCurve(FIRST_BEST, "", found.reshape(len(budgets), count))


def gaps(lower: BoundCurve, higher: BoundCurve, points: Sequence[float], what: str = "") -> dict[str, Estimate]:
    """By how much the first bound is below the second at each point, on profiles in which both bought somebody."""
    found = {}
    for x, ours, theirs in zip(points, lower.values, higher.values, strict=True):
        both = np.isfinite(ours) & np.isfinite(theirs)
        if both.sum() > 1:
            found[f"{what} at {x:g}".strip()] = Estimate.of(theirs[both] - ours[both])
    return found


def fall(curve: BoundCurve, first: int, last: int) -> Estimate:
    """By how much a bound is lower at one point than at another, on profiles in which somebody sold at both."""
    both = np.isfinite(curve.values[first]) & np.isfinite(curve.values[last])
    return Estimate.of(curve.values[first][both] - curve.values[last][both])


def lines(x: Sequence[float], curves: Sequence[BoundCurve], *, empty: bool = False) -> list[Curve]:
    """Colour by auction, dash by aggregation; `empty`: the shares of auctions in which nobody sold, once each."""
    names = list(dict.fromkeys(curve.auction for curve in curves))
    rules = list(dict.fromkeys(curve.rule for curve in curves))
    if empty:
        last = [curve for curve in curves if curve.rule == rules[-1]]
        return [line(c.auction, x, c.empty.mean(axis=1), names.index(c.auction), 0) for c in last]
    return [_bound_line(c, x, names.index(c.auction), rules.index(c.rule)) for c in curves]


def _bound_line(curve: BoundCurve, x: Sequence[float], color: int, dash: int) -> Curve:
    mean, error, _ = zip(*(bound_summary(row) for row in curve.values), strict=True)
    return Curve(curve.label, tuple(x), mean, error, color, dash)


def labelled(x: Sequence[float], values: Mapping[str, FloatArray], entrants: Sequence[str]) -> list[Curve]:
    """Lines through (runs, points) called "auction · rule": colour by auction, dash by rule."""
    rules = list(dict.fromkeys(label.split(" · ")[1] for label in values))
    found = []
    for label, rows in values.items():
        name, rule = label.split(" · ")
        color = list(entrants).index(name) if name in entrants else len(entrants)
        found.append(line(label, x, rows, color, rules.index(rule)))
    return found


@dataclass(frozen=True)
class DrawnBudget:
    """An auction whose budget is a random share of the announced one: the papers draw B̄ afresh each round.

    The share is drawn before the auction runs and is the same for every mechanism of one seed and round.
    """

    inner: Auction
    least_share: float

    @property
    def name(self) -> str:
        """The inner auction's."""
        return self.inner.name

    @property
    def guarantees(self) -> Guarantees:
        """The inner auction's."""
        return self.inner.guarantees

    @property
    def pays_losers(self) -> bool:
        """Whether the inner auction does, which a market has to know."""
        return bool(getattr(self.inner, "pays_losers", False))

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Draw the share, then clear."""
        draw = np.random.default_rng(0) if rng is None else rng
        share = draw.uniform(self.least_share, 1.0)
        return self.inner.run(bids, np.asarray(budget, dtype=np.float64) * share, rng=draw)


def trained(
    job: Job, config: MarketConfig, data: DataSet, auction: Auction, runs: range, *, least_share: float | None = None
) -> dict[str, FloatArray]:
    """The market that `config` describes with this auction in it, once for each seed: arrays with a row per run.

    `accuracy` after each round, `spent` in currency units, and `privacy`, Σ ε·records delivered. Kept when finished.
    """

    def play() -> dict[str, list[object]]:
        found: dict[str, list[object]] = {"accuracy": [], "spent": [], "privacy": []}
        for seed in runs:
            simulation = config.model_copy(update={"seed": seed}).simulation(data=data)
            clearing = auction if least_share is None else DrawnBudget(auction, least_share)
            result = replace(simulation, auction=clearing).run()
            found["accuracy"].append(result.accuracy)
            found["spent"].append(result.spent_micros / 1e6)
            sold = (record.epsilon[record.delivered] @ record.data_size[record.delivered] for record in result.rounds)
            found["privacy"].append(float(sum(sold)))
        return found

    setting = {
        "version": [flmarket.__version__, VERSION],
        "market": config.model_dump(mode="json"),
        "auction": [auction.name, auction.guarantees.source, least_share],
        "tests": len(data.y_test),
        "seeds": [runs.start, runs.stop],
    }
    return {what: np.array(values) for what, values in job.kept(RUNS, setting, play).items()}


def few_tests(data: DataSet, records: int) -> DataSet:
    """The same training records and a random part of the test records: every round is measured on them."""
    some = np.random.default_rng(0).permutation(len(data.y_test))[:records]
    return DataSet(data.name, data.x_train, data.y_train, data.x_test[some], data.y_test[some], data.classes)
