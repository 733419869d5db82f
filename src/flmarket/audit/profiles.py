"""The profiles and budgets that a mechanism is audited on: random ones of a population, and crafted ones with ties.

A budget is a factor times the sum of the profile's full costs v(ε̄, d), the factor uniform on a range, as in FL-Market
2022. Random profiles almost surely have no ties, and rules are often broken exactly there; hence the crafted ones.
Breaks if a population's full costs are all zero: there is then no scale for a budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flmarket import populations
from flmarket.bids import BidProfile, FloatArray, IntArray, Valuations
from flmarket.errors import InvalidInput

__all__ = ["Sample", "crafted_ties", "draw", "flat"]

MAX_PROFILES = 1_000_000


@dataclass(frozen=True)
class Sample:
    """Profiles of shape (profiles, n) with a budget each."""

    bids: BidProfile
    budget: FloatArray

    def __len__(self) -> int:
        return len(self.budget)

    def __getitem__(self, index: slice | IntArray) -> Sample:
        return Sample(self.bids[index], self.budget[index])


def draw(
    population: str | BidProfile,
    profiles: int,
    owners: int | None,
    budget_factor: tuple[float, float],
    rng: np.random.Generator,
) -> Sample:
    """Random profiles of a named population; given profiles are taken as they are, repeated up to `profiles`."""
    if isinstance(profiles, bool) or not isinstance(profiles, int | np.integer) or not 1 <= profiles <= MAX_PROFILES:
        raise InvalidInput("profiles", profiles, f"a whole number from 1 to {MAX_PROFILES:,}")
    low, high = budget_factor
    if not 0 <= low <= high < np.inf:
        raise InvalidInput("budget_factor", budget_factor, "two finite numbers 0 ≤ low ≤ high")
    if isinstance(population, BidProfile):
        given = flat(population)
        bids = given[np.arange(profiles) % given.shape[0]]
    else:
        bids = populations.get(population).sample(rng, profiles, owners)
    return Sample(bids, rng.uniform(low, high, profiles) * bids.full_cost.sum(axis=-1))


def flat(bids: BidProfile) -> BidProfile:
    """The same profiles with all batch axes in one: shape (profiles, n)."""
    n, table = bids.n, bids.valuations
    points = None if table.grid is None else (-1, n, table.grid.shape[-1])
    return BidProfile(
        Valuations(
            table.kind.reshape(-1, n),
            table.rate.reshape(-1, n),
            grid=None if table.grid is None or points is None else table.grid.reshape(points),
            values=None if table.values is None or points is None else table.values.reshape(points),
        ),
        bids.privacy_budget.reshape(-1, n),
        bids.data_size.reshape(-1, n),
    )


def crafted_ties(sample: Sample, rng: np.random.Generator) -> Sample:
    """The same profiles with ties: twins, all alike, equal unit costs, a budget of exactly all costs, a budget of 0."""
    rows, n = sample.bids.shape
    source = np.tile(np.arange(n), (rows, 1))
    size_from = source.copy()
    mode = np.arange(rows) % 5
    first = rng.integers(0, n, rows)
    second = (first + rng.integers(1, max(n, 2), rows)) % n
    twins = np.isin(mode, (0, 3, 4))
    source[twins, second[twins]] = size_from[twins, second[twins]] = first[twins]
    alike = mode == 1
    source[alike] = size_from[alike] = first[alike, None]
    # the same value per record and the same ε̄, each with her own number of records
    source[mode == 2] = first[mode == 2, None]

    at, bids = (np.arange(rows)[:, None], source), sample.bids
    table = bids.valuations
    valuations = Valuations(
        table.kind[at],
        table.rate[at],
        grid=None if table.grid is None else table.grid[at],
        values=None if table.values is None else table.values[at],
    )
    tied = BidProfile(valuations, bids.privacy_budget[at], bids.data_size[np.arange(rows)[:, None], size_from])
    budget = np.select([mode == 3, mode == 4], [tied.full_cost.sum(axis=-1), 0.0], sample.budget)
    return Sample(tied, budget)
