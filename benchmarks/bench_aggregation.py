"""opt-aggr in closed form against the solver route: cvxpy with OSQP, one problem at a time."""

from __future__ import annotations

from collections.abc import Iterator

import cvxpy as cp
import numpy as np

from benchmarks.measure import Row, best_of
from flmarket import aggregation
from flmarket.aggregation import error_bound


def solve_with_osqp(eps: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The same quadratic programme as a user would write it, in its sparse form."""
    wins, shares = eps > 0, size / size.sum()
    lam, gap = cp.Variable(wins.sum(), nonneg=True), cp.Variable(wins.sum())
    objective = cp.sum(cp.multiply(8 / eps[wins] ** 2, cp.square(lam))) + cp.square(cp.sum(gap) + shares[~wins].sum())
    constraints = [cp.sum(lam) == 1, gap >= lam - shares[wins], gap >= shares[wins] - lam]
    cp.Problem(cp.Minimize(objective), constraints).solve(solver=cp.OSQP)
    weights = np.zeros(eps.size)
    weights[wins] = np.maximum(lam.value, 0)
    return weights / weights.sum()


def problems(rng: np.random.Generator, rows: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Random privacy losses with three in ten losing, and heavy-tailed sizes."""
    eps = rng.uniform(0.1, 2.0, (rows, n))
    eps[rng.random(eps.shape) < 0.3] = 0.0
    eps[:, 0] = 1.0
    return eps, np.ceil(10 + 100 * rng.lognormal(0, 2, (rows, n)))


def run() -> Iterator[Row]:
    """n = 10 in a batch of 100,000; then single problems up to a million owners."""
    rng, rule = np.random.default_rng(0), aggregation.get("opt-aggr")
    eps, size = problems(rng, 100_000, 10)
    ours = best_of(lambda: rule.weights(eps, size)) / len(eps)
    sample = range(100)
    peer = best_of(lambda: [solve_with_osqp(eps[i], size[i]) for i in sample], 2) / len(sample)
    yield Row("opt-aggr, n=10, batch of 100,000", "problem", ours, "cvxpy + OSQP", peer)
    solver_bound = np.mean([error_bound(solve_with_osqp(eps[i], size[i]), eps[i], size[i]) for i in sample])
    our_bound = error_bound(rule.weights(eps[:100], size[:100]), eps[:100], size[:100]).mean()
    assert our_bound <= solver_bound * (1 + 1e-9), "faster but worse is not faster"
    for n in (100, 1000):
        eps, size = problems(rng, 1, n)
        peer = best_of(lambda eps=eps, size=size: solve_with_osqp(eps[0], size[0]), 2)
        ours = best_of(lambda eps=eps, size=size: rule.weights(eps, size))
        yield Row(f"opt-aggr, one problem of n={n:,}", "problem", ours, "cvxpy + OSQP", peer)
    for n in (100_000, 1_000_000):
        eps, size = problems(rng, 1, n)
        ours = best_of(lambda eps=eps, size=size: rule.weights(eps, size))
        yield Row(f"opt-aggr, one problem of n={n:,}", "problem", ours, "out of the solver's reach", None)
