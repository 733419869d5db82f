"""Weights behind one common noise, against an interior-point solver, a grid, and what must hold of any rule."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flmarket import aggregation, privacy
from flmarket.aggregation import Conventional, OptAggr, SecureOpt, error_bound, release_energy
from flmarket.errors import InvalidInput


def least_by_solver(energy: np.ndarray, shares: np.ndarray, *, clip: float, excess: float) -> float:
    """min κS² + (LΣ|λ − W|)² over S and λ ≤ S/√σ, Σλ = 1, by Clarabel; in units of the least √σ."""
    wins = np.isfinite(energy)
    unit = np.sqrt(energy[wins].min())
    u = np.where(wins, unit / np.sqrt(np.where(wins, energy, 1.0)), 0.0)
    lam, s = cp.Variable(len(u), nonneg=True), cp.Variable(nonneg=True)
    bias = clip * cp.norm1(lam - shares)
    problem = cp.Problem(
        cp.Minimize(excess * unit**2 * cp.square(s) + cp.square(bias)), [cp.sum(lam) == 1, lam <= s * u]
    )
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return float(problem.value)


def profiles(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    epsilon = rng.uniform(0.05, 4.0, n) ** rng.choice([0.5, 1.0, 3.0])
    if rng.random() < 0.6:
        epsilon[rng.random(n) < rng.uniform(0.1, 0.7)] = 0.0  # losers
    epsilon[rng.integers(n)] = rng.uniform(0.1, 2.0)
    return epsilon, np.floor(np.exp(rng.normal(2, rng.choice([0.1, 2.0]), n))) + 1


@pytest.mark.parametrize("seed", range(60))
def test_is_the_solvers_optimum_losers_included(seed: int) -> None:
    rng = np.random.default_rng(seed)
    epsilon, sizes = profiles(rng, int(rng.integers(1, 25)))
    clip, excess, dimension = float(rng.choice([0.3, 1.0, 5.0])), float(rng.uniform(1, 2)), int(rng.choice([1, 20]))
    rule = SecureOpt(clip=clip, dimension=dimension, excess=excess)
    here = error_bound(
        rule.weights(epsilon, sizes), epsilon, sizes, clip, dimension, trust="secure-aggregation", excess=excess
    )
    energy = release_energy(epsilon, clip=clip, dimension=dimension)
    best = least_by_solver(energy, sizes / sizes.sum(), clip=clip, excess=excess)
    assert here == pytest.approx(best, rel=2e-7)


def test_by_hand() -> None:
    """Two equal owners, σ = 8/ε²: at ε = (1, 1) both keep 1/2 and the noise is what one half needs, 8/4."""
    rule = SecureOpt()
    assert rule.weights([1.0, 1.0], [5, 5]) == pytest.approx([0.5, 0.5])
    assert error_bound([0.5, 0.5], [1.0, 1.0], [5, 5], trust="secure-aggregation") == pytest.approx(2.0)
    assert rule.noise([1.0, 1.0], [5, 5]) == pytest.approx(np.sqrt(2.0))
    # a loser of half the data: her share is bias whatever the noise, F = S² + 4·D², D = 1/2 at S ≥ √8/2
    weights = rule.weights([1.0, 0.0], [5, 5])
    assert weights.tolist() == [1.0, 0.0]
    assert error_bound(weights, [1.0, 0.0], [5, 5], trust="secure-aggregation") == pytest.approx(8.0 + 1.0)


def test_a_batch_is_its_rows_and_nobody_means_the_data_shares() -> None:
    rng = np.random.default_rng(5)
    epsilon = rng.uniform(0, 2, (4, 3, 7)) * (rng.random((4, 3, 7)) < 0.6)
    epsilon[1, 2] = 0.0
    sizes = rng.integers(1, 50, (4, 3, 7))
    whole = SecureOpt().weights(epsilon, sizes)
    for at in np.ndindex(4, 3):
        assert np.array_equal(whole[at], SecureOpt().weights(epsilon[at], sizes[at]))
    assert whole[1, 2] == pytest.approx(sizes[1, 2] / sizes[1, 2].sum())
    assert np.isinf(SecureOpt().noise(epsilon, sizes)[1, 2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_properties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    epsilon, sizes = profiles(rng, int(rng.integers(1, 40)))
    rule = SecureOpt()
    weights = rule.weights(epsilon, sizes)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    assert not weights[epsilon == 0].any()
    order = rng.permutation(len(epsilon))
    assert rule.weights(epsilon[order], sizes[order]) == pytest.approx(weights[order], rel=1e-9)
    # nobody loses more than she sold: λ ≤ N·μ/(2L), μ = √8·L/√σ in the papers' Laplace energies
    energy = release_energy(epsilon)
    noise = float(rule.noise(epsilon, sizes))
    wins = epsilon > 0
    assert (weights[wins] * np.sqrt(energy[wins]) <= noise * (1 + 1e-9)).all()
    bound = error_bound(weights, epsilon, sizes, trust="secure-aggregation")
    for other in (Conventional(), OptAggr()):
        theirs = error_bound(other.weights(epsilon, sizes), epsilon, sizes, trust="secure-aggregation")
        assert bound <= theirs * (1 + 1e-9)


def test_is_registered_and_knows_its_excess() -> None:
    noise = privacy.get("distributed-gaussian", clip=0.5)
    rule = aggregation.get("secure-opt", clip=0.5, dimension=10, perturbation=noise, excess=1.5)
    assert isinstance(rule, SecureOpt)
    assert rule.excess == 1.5
    with pytest.raises(InvalidInput, match="trust"):
        error_bound([1.0], [1.0], [1], trust="central")  # type: ignore[arg-type]


def test_the_more_owners_the_better_and_local_wins_among_few() -> None:
    """Equal ε, p = 7,850: secure aggregation pays from about a dozen owners on."""
    noise, local = privacy.get("distributed-gaussian"), privacy.get("privunit-g")
    ratio = {}
    for n in (2, 8, 20, 100):
        epsilon, sizes = np.full(n, 1.0), np.ones(n)
        ours = SecureOpt(dimension=7850, perturbation=noise, excess=1.25).weights(epsilon, sizes)
        here = error_bound(ours, epsilon, sizes, 1.0, 7850, perturbation=noise, trust="secure-aggregation", excess=1.25)
        there = error_bound(np.full(n, 1 / n), epsilon, sizes, 1.0, 7850, perturbation=local)
        ratio[n] = float(here / there)
    assert ratio[2] > 1 > ratio[20] > ratio[100]


def test_where_records_are_protected_an_owner_of_many_weighs_more() -> None:
    """Noise for one record is the less the more records she has: no other weights have a smaller bound."""
    noise, epsilon, sizes = privacy.RecordNoise(), [1.0, 1.0, 0.5], [10, 200, 40]
    rule = SecureOpt(dimension=50, perturbation=noise)
    terms = {"dimension": 50, "perturbation": noise, "trust": "secure-aggregation"}
    least = error_bound(rule.weights(epsilon, sizes), epsilon, sizes, **terms)
    others = np.random.default_rng(0).dirichlet(np.ones(3), 2000)
    assert (error_bound(others, epsilon, sizes, **terms) >= least * (1 - 1e-9)).all()
