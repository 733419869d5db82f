"""What FL-Market's two papers share: who takes part in a figure, error bounds with their floor, and training runs.

The papers' own networks take part where trained weights for the population ship, and are left out where not; a figure
says who is missing, and how far the others were trained. This project's networks stand beside them, as `cleared-menu`.
`posted`, fitted to the population, takes part in every figure too, and the first best (a buyer who knows every cost) is
the floor: no auction that must leave owners a rent reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket import auctions
from flmarket.aggregation import error_bound
from flmarket.aggregation import get as get_rule
from flmarket.auctions import learned
from flmarket.audit import first_best
from flmarket.bids import Auction, BidProfile, Guarantees, Outcome
from flmarket.engines.config import MarketConfig
from flmarket.errors import FlmarketError, MissingDependency
from flmarket.experiments.compare import bound_summary
from flmarket.learning import DataSet
from flmarket.market import MarketResult
from flmarket.report import Curve, CurveSet, write_curves

__all__ = [
    "FIRST_BEST",
    "LEARNED",
    "BoundCurve",
    "DrawnBudget",
    "bounds",
    "clearly_positive",
    "contenders",
    "curve_set",
    "dearer",
    "few_tests",
    "finite_mean",
    "floor",
    "mean_and_se",
    "paired",
    "ratio",
    "runs",
    "without",
    "written",
]  # fmt: skip

FloatArray = NDArray[np.float64]
FIRST_BEST = "first best"
LEARNED = (*learned.PAPERS, *learned.DEFAULTS)
_CLEAR = 2.0  # standard errors


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


def without(names: Sequence[str], found: Mapping[str, object]) -> str:
    """A remark on who is missing, and on how far the papers' networks were trained that are there."""
    missing = [name for name in names if name not in found]
    text = [f"No trained weights of {', '.join(missing)} for this population."] if missing else []
    papers = [f"{name} {one.training}" for name, one in found.items() if isinstance(one, learned.PaperAuction)]
    return " ".join(text + ([f"Trained: {', '.join(papers)}."] if papers else []))


@dataclass(frozen=True)
class BoundCurve:
    """The mean error bound at each budget; `invalid` is the share of auctions in which nobody sold."""

    auction: str
    rule: str
    mean: FloatArray
    se: FloatArray
    invalid: FloatArray

    @property
    def label(self) -> str:
        """As it stands in a plot."""
        return f"{self.auction} · {self.rule}" if self.rule else self.auction


def bounds(
    bids: BidProfile,
    budgets: Sequence[FloatArray],
    entrants: Mapping[str, Auction],
    rules: Sequence[str],
    *,
    seed: int = 0,
) -> list[BoundCurve]:
    """Every auction with every aggregation on the same profiles, a budget per profile at each point."""
    points: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for name, auction in entrants.items():
        for place, budget in enumerate(budgets):
            outcome = auction.run(bids, budget, rng=np.random.default_rng((seed, place)))
            sold = np.where(outcome.participation > 0, outcome.epsilon, 0.0)
            for rule in rules:
                weights = get_rule(rule).weights(sold, bids.data_size)
                points.setdefault((name, rule), []).append(bound_summary(error_bound(weights, sold, bids.data_size)))
    return [
        BoundCurve(name, rule, *(np.array(column) for column in zip(*values, strict=True)))
        for (name, rule), values in points.items()
    ]


def floor(bids: BidProfile, budgets: Sequence[FloatArray], *, profiles: int) -> BoundCurve:
    """The first best on the first few profiles."""
    count = min(profiles, len(bids.data_size))
    # all budgets in one call: the solver's effort hardly depends on how many profiles it has
    many = bids[np.tile(np.arange(count), len(budgets))]
    found = first_best(many, np.concatenate([budget[:count] for budget in budgets]))[1].reshape(len(budgets), count)
    values = [bound_summary(row) for row in found]
    mean, se, invalid = (np.array(column) for column in zip(*values, strict=True))
    return BoundCurve(FIRST_BEST, "", mean, se, invalid)


def ratio(one: BoundCurve, other: BoundCurve) -> FloatArray:
    """The first bound over the second; not a number where one of them bought nobody."""
    both = np.isfinite(one.mean) & np.isfinite(other.mean)
    return np.asarray(np.divide(one.mean, other.mean, out=np.full(one.mean.shape, np.nan), where=both))


def finite_mean(values: FloatArray) -> float:
    """The mean of the finite ones."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def dearer(one: BoundCurve, other: BoundCurve) -> NDArray[np.bool_]:
    """Where the first is above the second by more than two standard errors of both."""
    with np.errstate(invalid="ignore"):  # ∞ − ∞ where neither buys anybody: not above
        return np.asarray(one.mean - other.mean > _CLEAR * np.hypot(one.se, other.se))


def curve_set(
    title: str, x_label: str, y_label: str, x: Sequence[float], curves: Sequence[BoundCurve], *, invalid: bool = False
) -> CurveSet:
    """Colour by auction, dash by aggregation."""
    names = list(dict.fromkeys(curve.auction for curve in curves))
    rules = list(dict.fromkeys(curve.rule for curve in curves))
    lines = tuple(
        Curve(
            curve.auction if invalid else curve.label,
            tuple(x),
            tuple((curve.invalid if invalid else curve.mean).tolist()),
            None if invalid else tuple(curve.se.tolist()),
            names.index(curve.auction),
            0 if invalid else rules.index(curve.rule),
        )
        for curve in curves
    )
    return CurveSet(title, x_label, y_label, lines)


def written(out_dir: Path, stem: str, curves: CurveSet, *, log_y: bool = False) -> tuple[str, ...]:
    """Write PNG, SVG and CSV; returns their names."""
    write_curves(curves, out_dir, stem, log_y=log_y)
    return tuple(f"{stem}.{kind}" for kind in ("png", "svg", "csv"))


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


def runs(
    config: MarketConfig, data: DataSet, auction: Auction, seeds: Sequence[int], *, least_share: float | None = None
) -> list[MarketResult]:
    """The market that `config` describes with this auction in it, once for each seed."""
    results = []
    for seed in seeds:
        simulation = config.model_copy(update={"seed": seed}).simulation(data=data)
        clearing = auction if least_share is None else DrawnBudget(auction, least_share)
        results.append(replace(simulation, auction=clearing).run())
    return results


def mean_and_se(values: ArrayLike) -> tuple[FloatArray, FloatArray | None]:
    """Over the first axis, the seeds; one seed has no standard error."""
    array = np.asarray(values, dtype=np.float64)
    error = np.asarray(array.std(axis=0, ddof=1) / np.sqrt(len(array))) if len(array) > 1 else None
    return np.asarray(array.mean(axis=0)), error


def paired(one: ArrayLike, other: ArrayLike) -> tuple[float, float]:
    """Mean and standard error of a difference between runs of the same seeds."""
    mean, error = mean_and_se(np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64))
    return float(mean), 0.0 if error is None else float(error)


def few_tests(data: DataSet, records: int) -> DataSet:
    """The same training records and a random part of the test records: every round is measured on them."""
    some = np.random.default_rng(0).permutation(len(data.y_test))[:records]
    return DataSet(data.name, data.x_train, data.y_train, data.x_test[some], data.y_test[some], data.classes)


def clearly_positive(what: str, gaps: Mapping[str, FloatArray]) -> tuple[bool, str]:
    """Whether paired differences, a value per seed for each auction, are positive together; and a sentence on them."""
    each = {name: paired(values, np.zeros(len(values))) for name, values in gaps.items()}
    mean, error = paired(np.mean(list(gaps.values()), axis=0), np.zeros(len(next(iter(gaps.values())))))
    listed = ", ".join(f"{name} {gap:+.3f} ± {se:.3f}" for name, (gap, se) in each.items())
    noise = ", within noise" if abs(mean) <= _CLEAR * error else ""
    return mean > _CLEAR * error, f"{what}: {listed}; together {mean:+.3f} ± {error:.3f}{noise}"
