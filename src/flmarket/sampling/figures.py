"""The series behind SAMP's figures, as arrays.

Optimal q against cost (Fig. 1), average q against the mean cost (Fig. 4), and how the prior-independent objective
approaches the prior-based one (the claim of section 5).

The paper does not say how its cost distributions vary with their mean. Here `uniform` is uniform from c_min to 2·mean −
c_min, and `exponential` is truncated to [c_min, c_max]. Every mechanism knows where the costs end: uniform sampling and
the prior-independent mechanism are told the distribution's own highest cost, as the others are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import InvalidInput
from flmarket.sampling.distributions import TruncatedExponential, Uniform
from flmarket.sampling.mechanisms import CompleteInformation, OptimalSampling, UniformSampling
from flmarket.sampling.prior_independent import PriorIndependent

Family = Literal["uniform", "exponential"]


@dataclass(frozen=True, eq=False)
class ParticipationCurves:
    """q(c) and r(c): one row per budget."""

    cost: FloatArray
    budget_per_client: FloatArray
    participation: FloatArray
    payment: FloatArray
    case: IntArray


@dataclass(frozen=True, eq=False)
class AverageParticipation:
    """E[q] against the mean cost, one array per mechanism."""

    mean_cost: FloatArray
    complete_information: FloatArray
    prior_based: FloatArray
    prior_independent: FloatArray
    uniform: FloatArray


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """The prior-independent objective, mean 1/q, relative to the prior-based optimum, against the number of clients.

    `ratio` is the mean over draws of the clients and `spread` its standard error.
    """

    clients: IntArray
    ratio: FloatArray
    spread: FloatArray
    uniform_ratio: float


def participation_curves(
    distribution: Uniform | TruncatedExponential, budgets: Sequence[float], *, points: int = 201
) -> ParticipationCurves:
    """Fig. 1: the optimal q and r against the cost for several budgets per client."""
    cost = np.linspace(distribution.minimum, distribution.maximum, points)
    mechanisms = [OptimalSampling.from_distribution(distribution, budget) for budget in budgets]
    q, r = (np.stack(rows) for rows in zip(*(m.offer(cost) for m in mechanisms), strict=True))
    return ParticipationCurves(
        cost, np.asarray(budgets, dtype=np.float64), q, r, np.array([m.case for m in mechanisms], dtype=np.int64)
    )


def average_participation(
    means: Sequence[float],
    *,
    family: Family = "uniform",
    budget_per_client: float,
    minimum: float,
    maximum: float,
    clients: int = 1000,
    seed: int = 0,
) -> AverageParticipation:
    """Fig. 4: the average q of four mechanisms against the mean cost, all with the same support of costs."""
    rows = []
    for index, mean in enumerate(means):
        costs = _family(family, mean, minimum, maximum)
        rng = np.random.default_rng([seed, index])
        # exchangeable draws: their order is a random one
        online = PriorIndependent(budget_per_client * clients, costs.maximum, clients).run(costs.sample(rng, clients))
        known = (CompleteInformation, OptimalSampling, UniformSampling)
        told, best, even = (m.from_distribution(costs, budget_per_client).average_participation for m in known)
        rows.append((told, best, float(online.participation.mean()), even))
    return AverageParticipation(np.asarray(means, dtype=np.float64), *np.array(rows).T)


def learning_curve(
    clients: Sequence[int],
    distribution: Uniform | TruncatedExponential,
    *,
    budget_per_client: float,
    draws: int = 5,
    seed: int = 0,
    resolution: int = 512,
) -> LearningCurve:
    """Section 5: the prior-independent objective against N, exploring √N clients, over the prior-based optimum."""
    best = OptimalSampling.from_distribution(distribution, budget_per_client).objective
    ratio = np.empty((len(clients), draws))
    for index, n in enumerate(clients):
        for draw in range(draws):
            costs = distribution.sample(np.random.default_rng([seed, index, draw]), n)
            mechanism = PriorIndependent(
                budget_per_client * n, distribution.maximum, n, fraction=n**-0.5, resolution=resolution
            )
            ratio[index, draw] = mechanism.run(costs).objective / best
    uniform = UniformSampling.from_distribution(distribution, budget_per_client).objective
    spread = ratio.std(axis=1) / max(draws - 1, 1) ** 0.5
    return LearningCurve(np.asarray(clients, dtype=np.int64), ratio.mean(axis=1), spread, uniform / best)


def _family(family: Family, mean: float, minimum: float, maximum: float) -> Uniform | TruncatedExponential:
    if family == "exponential":
        return TruncatedExponential.of_mean(mean, minimum, maximum)
    if family != "uniform":
        raise InvalidInput("family", family, "'uniform' or 'exponential'")
    if not minimum < mean <= (minimum + maximum) / 2:
        raise InvalidInput("means", mean, f"more than {minimum:g} and at most {(minimum + maximum) / 2:g}")
    return Uniform(minimum, 2 * mean - minimum)
