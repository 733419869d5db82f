"""Fit a menu to a population: the evolution strategy CMA-ES on the exact, hard objective.

The objective is the mean error bound (opt-aggr) over random profiles and budgets, with every owner taking her exact
best choice. It is piecewise constant in places and heavy-tailed, so gradients of a softened version mislead; a search
that only ranks candidates does not care. All candidates see the same profiles. Whatever comes out, the auction stays
exactly truthful, rational and within budget: training moves only how much accuracy the money buys.

CMA-ES after Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv:1604.00772), with its default constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flmarket import populations
from flmarket.aggregation import HasNoiseEnergy, OptAggr, error_bound
from flmarket.auctions.posted.mechanism import PostedAuction, Queue
from flmarket.auctions.posted.menu import LINEAR, Menu
from flmarket.bids import BidProfile, FloatArray
from flmarket.errors import InvalidInput

# A round in which nobody sells has no finite bound; it counts as a very bad one, so that the search avoids it.
NOBODY = 100.0
# Training looks at every fourth ε of the catalogue: four times faster, and the ranking of menus hardly notices.
COARSE = 4


@dataclass(frozen=True)
class Progress:
    """The state of a search after one generation."""

    generation: int
    evaluations: int
    best: float
    menu: Menu


class Trainer:
    """Profiles to train on, and the error bound of a menu on them.

    The bound is the papers' (Laplace noise, one coordinate) unless a perturbation and a dimension are given.
    """

    def __init__(
        self,
        population_names: Sequence[str],
        *,
        profiles: int = 3000,
        owners: int | None = None,
        factor: tuple[float, float] = (0.1, 2.0),
        seed: int = 0,
        dimension: int = 1,
        perturbation: HasNoiseEnergy | None = None,
    ) -> None:
        if not population_names or profiles < 1:
            raise InvalidInput("populations, profiles", (population_names, profiles), "at least one of each")
        rng = np.random.default_rng(seed)
        self._noise: dict[str, Any] = {"dimension": dimension, "perturbation": perturbation}
        self._sets = []
        for name in population_names:
            bids = populations.get(name).sample(rng, max(1, profiles // len(population_names)), owners)
            budget = rng.uniform(*factor, bids.shape[0]) * bids.full_cost.sum(axis=-1)
            queue = Queue(bids.valuations, bids.privacy_budget, bids.data_size, every=COARSE)
            scale = self._bound(PostedAuction(LINEAR), bids, queue, budget)
            self._sets.append((bids, queue, budget, scale))

    def loss(self, menu: Menu) -> float:
        """The mean error bound; over several populations, the mean of its ratio to that of the untrained menu."""
        auction = PostedAuction(menu)
        bounds = [self._bound(auction, bids, queue, budget) for bids, queue, budget, _ in self._sets]
        if len(bounds) == 1:
            return bounds[0]
        return float(np.mean([bound / scale for bound, (*_, scale) in zip(bounds, self._sets, strict=True)]))

    def _bound(self, auction: PostedAuction, bids: BidProfile, queue: Queue, budget: FloatArray) -> float:
        epsilon, _ = auction.serve(queue, budget)
        weights = OptAggr(**self._noise).weights(epsilon, bids.data_size)
        bound = error_bound(weights, epsilon, bids.data_size, **self._noise)
        return float(np.minimum(bound, NOBODY).mean())

    def train(
        self,
        *,
        start: Menu = LINEAR,
        unit: float | None = None,
        generations: int = 150,
        seed: int = 0,
        step: float = 0.1,
    ) -> Iterator[Progress]:
        """Improve a menu, generation by generation."""

        def build(values: FloatArray) -> Menu:
            return Menu.from_vector(values, unit=unit)

        rng = np.random.default_rng(seed)
        search = evolve(lambda values: self.loss(build(values)), start.to_vector(), step, rng)
        for generation, (mean, evaluations) in zip(range(1, generations + 1), search, strict=False):
            menu = build(mean)
            yield Progress(generation, evaluations, self.loss(menu), menu)


def evolve(
    loss: Callable[[FloatArray], float], start: FloatArray, step: float, rng: np.random.Generator
) -> Iterator[tuple[FloatArray, int]]:
    """CMA-ES: yields the mean of the search distribution and the number of evaluations, endlessly."""
    n = start.size
    offspring = 4 + int(3 * np.log(n))
    parents = offspring // 2
    weights = np.log(offspring / 2 + 0.5) - np.log(np.arange(1, parents + 1))
    weights /= weights.sum()
    effective = 1.0 / (weights**2).sum()
    c_sigma = (effective + 2) / (n + effective + 5)
    d_sigma = 1 + 2 * max(0.0, np.sqrt((effective - 1) / (n + 1)) - 1) + c_sigma
    c_path = (4 + effective / n) / (n + 4 + 2 * effective / n)
    c_one = 2 / ((n + 1.3) ** 2 + effective)
    c_mu = min(1 - c_one, 2 * (effective - 2 + 1 / effective) / ((n + 2) ** 2 + effective))
    expected = np.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))

    mean, covariance = start.astype(np.float64), np.eye(n)
    path, sigma_path, evaluations = np.zeros(n), np.zeros(n), 0
    for generation in range(1, 10**9):
        scale, basis = np.linalg.eigh(covariance)
        root = np.sqrt(np.maximum(scale, 1e-20))
        draws = rng.standard_normal((offspring, n)) * root @ basis.T
        order = np.argsort([loss(mean + step * draw) for draw in draws], kind="stable")[:parents]
        evaluations += offspring
        move = weights @ draws[order]
        mean = mean + step * move
        sigma_path = (1 - c_sigma) * sigma_path + np.sqrt(c_sigma * (2 - c_sigma) * effective) * (
            basis @ ((basis.T @ move) / root)
        )
        length = float(np.linalg.norm(sigma_path))
        steady = length / np.sqrt(1 - (1 - c_sigma) ** (2 * generation)) < (1.4 + 2 / (n + 1)) * expected
        path = (1 - c_path) * path + steady * np.sqrt(c_path * (2 - c_path) * effective) * move
        rank_mu = (weights[:, None] * draws[order]).T @ draws[order]
        keep = 1 - c_one - c_mu + (0.0 if steady else c_one * c_path * (2 - c_path))
        covariance = keep * covariance + c_one * np.outer(path, path) + c_mu * rank_mu
        step *= float(np.exp(min(1.0, (c_sigma / d_sigma) * (length / expected - 1))))
        yield mean, evaluations
