"""Experiments: the papers' tables and figures again (a module each), and here auctions × aggregations side by side.

On a population the measure is the error bound, averaged over random profiles and given per budget factor: cheap, and
what the papers plot. A rule for sums that nobody sees the parts of (`secure-opt`) is judged by the bound of such sums,
with as much noise energy in common as the papers' Laplace noise has at each owner. Where the law of rates is known, the
first `YARDSTICK` profiles are also held against the second best (`flmarket.audit`). On a data set the measure is test
accuracy over rounds of a whole simulated market.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flmarket import aggregation, auctions
from flmarket.aggregation import Trust, error_bound
from flmarket.audit import over_second_best, rate_law, second_best
from flmarket.bids import BidProfile
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput
from flmarket.learning import DataSet
from flmarket.market import MarketResult
from flmarket.report import Comparison, ComparisonRow, Curve, CurveSet

__all__ = ["FACTORS", "compare_learning", "compare_population", "learning_curves"]

YARDSTICK = 100  # profiles; the second best takes longer than most auctions
FACTORS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
Step = Callable[[str], None]


def compare_population(
    *,
    population: str,
    auction_names: Sequence[str],
    aggregation_names: Sequence[str],
    factors: Sequence[float] = FACTORS,
    profiles: int = 2000,
    owners: int | None = None,
    seed: int = 0,
    step: Step = lambda _: None,
) -> Comparison:
    """Mean error bound of every pair on the same profiles; rounds in which nobody is bought are counted apart."""
    if not 1 <= profiles <= 1_000_000:
        raise InvalidInput("profiles", profiles, "from 1 to 1,000,000")
    rules = {name: aggregation.get(aggregation.admit(name)) for name in aggregation_names}
    mechanisms = {name: auctions.get(auctions.admit(name)) for name in auction_names}
    bids = BidProfile.sample(np.random.default_rng(seed), profiles, owners, population)
    full_cost, rows = bids.full_cost.sum(axis=-1), []
    estimates = _second_best(bids[:YARDSTICK], full_cost[:YARDSTICK], factors, population)
    for auction_name, factor in product(mechanisms, factors):
        budget = factor * full_cost
        outcome = mechanisms[auction_name].run(bids, budget, rng=np.random.default_rng(seed))
        for rule_name, rule in rules.items():
            step(f"{auction_name} + {rule_name} at budget factor {factor:g}")
            weights = rule.weights(outcome.epsilon, bids.data_size)
            trust: Trust = getattr(rule, "trust", "local")
            bound = error_bound(weights, outcome.epsilon, bids.data_size, trust=trust)
            mean, error, invalid = bound_summary(bound)
            rows.append(
                ComparisonRow(
                    auction=auction_name,
                    aggregation=rule_name,
                    budget_factor=float(factor),
                    error_bound_mean=mean,
                    error_bound_se=error,
                    invalid_rate=invalid,
                    spent_share=float((outcome.spent / np.maximum(budget, 1e-300)).mean()),
                    winners_share=float(outcome.winners.mean()),
                    over_second_best=over_second_best(bound[:YARDSTICK], estimates[factor])
                    if estimates and trust == "local"
                    else None,
                )
            )
    return Comparison(f"Error bound on {population}", population, profiles, seed, tuple(rows))


def _second_best(
    bids: BidProfile, full_cost: NDArray[np.float64], factors: Sequence[float], population: str
) -> dict[float, NDArray[np.float64]]:
    """The estimate at each factor, in one call; empty where rates have no known law."""
    law = rate_law(population)
    if law is None:
        return {}
    many = bids[np.tile(np.arange(len(full_cost)), len(factors))]
    found = second_best(many, np.outer(factors, full_cost).ravel(), law)[1]
    return dict(zip(factors, found.reshape(len(factors), -1), strict=True))


def bound_summary(bound: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean and standard error over auctions in which somebody sold, and the share of the others; ∞ if nobody ever."""
    valid = bound[np.isfinite(bound)]
    if not valid.size:
        return float("inf"), 0.0, 1.0
    return float(valid.mean()), float(valid.std() / np.sqrt(valid.size)), 1.0 - valid.size / bound.size


def compare_learning(
    config: MarketConfig,
    data: DataSet,
    *,
    auction_names: Sequence[str],
    aggregation_names: Sequence[str],
    perturbation_names: Sequence[str] | None = None,
    seeds: Sequence[int],
    step: Step = lambda _: None,
) -> dict[str, list[MarketResult]]:
    """Whole markets with every combination, on the same owners and bids; results by label, one for each seed."""
    noises = tuple(perturbation_names or (config.mechanism.perturbation,))
    results: dict[str, list[MarketResult]] = {}
    for auction_name, rule_name, noise in product(auction_names, aggregation_names, noises):
        label = " + ".join([auction_name, rule_name, *([noise] if len(noises) > 1 else [])])
        choice = {"auction": auction_name, "aggregation": rule_name, "perturbation": noise}
        for seed in seeds:
            step(f"{label}, seed {seed}")
            mechanism = config.mechanism.model_copy(update=choice)
            variant = config.model_copy(update={"mechanism": mechanism, "seed": seed})
            results.setdefault(label, []).append(variant.simulation(data=data).run())
    return results


def learning_curves(results: dict[str, list[MarketResult]], metric: str = "accuracy") -> CurveSet:
    """A measure over rounds, mean and standard error over seeds, a curve for each label."""
    first = next(iter(results.values()))[0]
    rounds = range(1, len(first.rounds) + 1)
    curves = tuple(_curve(label, rounds, runs, metric) for label, runs in results.items())
    measure = metric.replace("_", " ")
    return CurveSet(f"{first.data_set}: {measure} over rounds", "round", measure, curves)


def _curve(label: str, rounds: Sequence[int], runs: list[MarketResult], metric: str) -> Curve:
    values = np.array([[record.metrics[metric] for record in run.rounds] for run in runs])
    spread = values.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else None
    return Curve(label, tuple(rounds), tuple(values.mean(axis=0)), None if spread is None else tuple(spread))
