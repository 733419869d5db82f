"""Theorem 2 against a general convex solver, against a fine discretisation, and by hand."""

import cvxpy as cp
import numpy as np
import pytest
from scipy.integrate import quad

from flmarket.sampling import (
    CompleteInformation,
    Discrete,
    Empirical,
    Histogram,
    OptimalSampling,
    TruncatedExponential,
    Uniform,
    UniformSampling,
)
from flmarket.sampling.distributions import discrete_spend
from flmarket.sampling.mechanisms import CostNodes

HISTOGRAM = Histogram([1, 2, 3, 4], [0.1, 0.8, 0.1])  # irregular: the density jumps up at 2


def random_instance(rng, *, regular=None):
    while True:
        size = int(rng.integers(2, 13))
        support = np.cumsum(rng.exponential(1.0, size) + 0.05) + rng.uniform(0, 2)
        mass = rng.dirichlet(np.full(size, rng.choice([0.3, 1.0, 5.0]))) + 1e-3
        mass /= mass.sum()
        virtual = discrete_spend(support, mass) / mass
        if regular is None or bool((np.diff(virtual) > 0).all()) is regular:
            return support, mass


def budget_of_case(support, mass, case, rng):
    spend = discrete_spend(support, mass)
    virtual = OptimalSampling(support, mass, 1.0).virtual_cost
    first = np.sqrt(virtual[0]) * float(mass @ np.sqrt(virtual))
    return {
        1: first * rng.uniform(0.05, 0.99),
        2: first + (spend.sum() - first) * rng.uniform(0.02, 0.98),
        3: spend.sum() * rng.uniform(1.0, 1.5),
    }[case]


def solver_optimum(support, mass, budget):
    """min Σ f/q over monotone q with Theorem 1's payments written out, not with virtual costs."""
    unit = min(1.0, budget / support[-1])  # the solver sees q / unit, which is of order 1
    q = cp.Variable(mass.size)
    rents = [cp.sum(cp.multiply(q[k + 1 :], np.diff(support)[k:])) for k in range(mass.size - 1)]
    paid = cp.sum(cp.multiply(mass * support, q)) + sum(f * rent for f, rent in zip(mass[:-1], rents, strict=True))
    constraints = [paid <= budget / unit, q <= 1 / unit, q[:-1] >= q[1:]]
    problem = cp.Problem(cp.Minimize(mass @ cp.inv_pos(q)), constraints)
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
    return problem.value / unit, q.value * unit


@pytest.mark.parametrize("case", [1, 2, 3])
@pytest.mark.parametrize("regular", [True, False])
def test_no_monotone_mechanism_of_the_same_budget_is_better(rng, case, regular):
    for _ in range(34):
        support, mass = random_instance(rng, regular=regular)
        budget = budget_of_case(support, mass, case, rng)
        mechanism = OptimalSampling(support, mass, budget)
        best, q = solver_optimum(support, mass, budget)
        assert mechanism.case == case
        assert mechanism.objective == pytest.approx(best, rel=1e-8)
        np.testing.assert_allclose(mechanism.participation, q, atol=2e-4)
        assert (np.diff(mechanism.participation) <= 1e-15).all()
        assert mechanism.participation.max() <= 1
        paid = float(mass @ (mechanism.participation * mechanism.payment))
        assert paid == pytest.approx(mechanism.expected_payment, rel=1e-12)
        assert paid <= budget * (1 + 1e-12)
        if case < 3:
            assert paid == pytest.approx(budget, rel=1e-12)


def test_by_hand():
    """Costs 1 and 2, equally likely: φ = (1, 3). B̄ = ½: q = ½/(√φ·(1 + √3)/2)."""
    mechanism = OptimalSampling([1, 2], [0.5, 0.5], 0.5)
    np.testing.assert_allclose(mechanism.virtual_cost, [1, 3])
    np.testing.assert_allclose(mechanism.participation, [1 / (1 + 3**0.5), 1 / (3 + 3**0.5)])
    np.testing.assert_allclose(mechanism.payment, [1 + 3**-0.5, 2])
    # B̄ = 1.7 lies between √1·(1 + √3)/2 and 2: the cheap client surely, the dear one with what is left, 1.2 of 1.5
    mechanism = OptimalSampling([1, 2], [0.5, 0.5], 1.7)
    assert (mechanism.case, mechanism.threshold) == (2, 1.0)
    np.testing.assert_allclose(mechanism.participation, [1, 0.8])
    np.testing.assert_allclose(mechanism.payment, [1.8, 2])


def test_ironing_by_hand():
    """φ of (1, 2, 3) with masses (.45, .05, .5): 1, 11, 4. The last two pool at (.55 + 2)/.55."""
    distribution = Discrete([1, 2, 3], [0.45, 0.05, 0.5])
    np.testing.assert_allclose(distribution.virtual_cost([1, 2, 3], ironed=False), [1, 11, 4])
    pooled = (0.05 * 11 + 0.5 * 4) / 0.55
    np.testing.assert_allclose(distribution.virtual_cost([1, 2, 3]), [1, pooled, pooled])


def test_the_budget_decides_the_case_continuously():
    support, mass = [1.0, 2.0, 4.0, 5.0], [0.1, 0.4, 0.3, 0.2]
    mechanisms = [OptimalSampling(support, mass, budget) for budget in np.linspace(0.01, 8, 4000)]
    assert np.unique([m.case for m in mechanisms]).tolist() == [1, 2, 3]
    steps = np.diff(np.stack([m.participation for m in mechanisms]), axis=0)
    assert steps.min() >= -1e-12
    assert steps.max() < 0.01


@pytest.mark.parametrize("budget", [0.5, 1.6, 1.8, 2.5])
def test_uniform_costs_by_the_formula(budget):
    """φ = 2c − 1 on [1, 2]: κ by quadrature of the repaired H, q = min(1, κ/√φ), r by quadrature of Theorem 1."""

    def spent(level):
        return quad(lambda c: (2 * c - 1) * min(1, level / np.sqrt(2 * c - 1)), 1, 2, limit=200, epsabs=1e-12)[0]

    from scipy.optimize import brentq

    level = brentq(lambda k: spent(k) - budget, 1e-6, 10, xtol=1e-13) if budget < 2 else 10.0
    mechanism = OptimalSampling.from_distribution(Uniform(1, 2), budget)
    cost = np.linspace(1, 2, 23)

    def exact(c):
        return np.minimum(1, level / np.sqrt(2 * c - 1))

    q, r = mechanism.offer(cost)
    np.testing.assert_allclose(q, exact(cost), atol=1e-6)
    rent = [quad(exact, c, 2, limit=200)[0] for c in cost]
    np.testing.assert_allclose(r, cost + rent / exact(cost), atol=1e-6)
    assert mechanism.expected_payment == pytest.approx(min(budget, 2.0), rel=1e-12)


@pytest.mark.parametrize("budget", [0.4, 1.5, 2.2, 3.0])
@pytest.mark.parametrize(
    "costs", [Uniform(1, 4), TruncatedExponential(1, 4, 0.7), HISTOGRAM], ids=["uniform", "exponential", "histogram"]
)
def test_continuous_costs_against_a_fine_discretisation(costs, budget):
    edges = np.linspace(costs.minimum, costs.maximum, 30_001)
    fine = OptimalSampling(edges[1:], np.diff(costs.cdf(edges)), budget)
    mechanism = OptimalSampling.from_distribution(costs, budget)
    assert mechanism.case == fine.case
    assert mechanism.objective == pytest.approx(fine.objective, rel=2e-6)
    assert mechanism.expected_payment == pytest.approx(fine.expected_payment, rel=1e-6)
    probe = np.linspace(1.01, 3.99, 37) + 1e-4
    np.testing.assert_allclose(mechanism.offer(probe)[0], fine.offer(probe)[0], atol=1e-3)


@pytest.mark.parametrize("costs", [Uniform(1, 4), TruncatedExponential(1, 4, 0.7), HISTOGRAM])
def test_the_budget_holds_when_costs_are_drawn(costs, rng):
    mechanism = OptimalSampling.from_distribution(costs, 1.5)
    q, r = mechanism.offer(costs.sample(rng, 200_000))
    spread = np.std(q * r) / 200_000**0.5
    assert np.mean(q * r) == pytest.approx(1.5, abs=5 * spread)
    assert np.mean(1 / q) == pytest.approx(mechanism.objective, rel=5e-3)


def test_points_of_no_mass():
    """Inside the support they are served as the next point; behind the last one with mass nobody is served."""
    mechanism = OptimalSampling([1, 2, 3, 4], [0.5, 0.0, 0.5, 0.0], 1.0)
    bare = OptimalSampling([1, 3], [0.5, 0.5], 1.0)
    np.testing.assert_allclose(mechanism.participation, [*bare.participation[[0, 1, 1]], 0])
    np.testing.assert_allclose(mechanism.payment, [*bare.payment[[0, 1, 1]], 4])
    assert mechanism.objective == pytest.approx(bare.objective)
    assert mechanism.expected_payment == pytest.approx(1.0)
    # a budget that serves all who have mass, but not those without
    plenty = OptimalSampling([1, 2, 3, 4], [0.5, 0.0, 0.5, 0.0], 3.5)
    np.testing.assert_allclose(plenty.participation, [1, 1, 1, 0])


def test_the_yardsticks_bracket_the_optimum(rng):
    for _ in range(50):
        support, mass = random_instance(rng)
        budget = float(rng.uniform(0.05, 1.2) * support[-1])
        optimal, uniform, complete = (
            kind(support, mass, budget) for kind in (OptimalSampling, UniformSampling, CompleteInformation)
        )
        assert complete.objective <= optimal.objective * (1 + 1e-12) <= uniform.objective * (1 + 2e-12)
        assert uniform.expected_payment <= budget * (1 + 1e-12)
        assert complete.expected_payment == pytest.approx(min(budget, float(mass @ support)))
        q, r = complete.offer(support)
        np.testing.assert_allclose(q, complete.participation)
        np.testing.assert_allclose(r, support)


def test_a_very_skewed_distribution_is_solved():
    costs = TruncatedExponential(0.01, 100, 0.25)
    mechanism = OptimalSampling.from_distribution(costs, 0.3)
    assert mechanism.expected_payment == pytest.approx(0.3, rel=1e-9)
    assert (np.diff(mechanism.participation) <= 0).all()


def test_one_cost_only():
    mechanism = OptimalSampling([2.0], [1.0], 1.0)
    assert mechanism.participation == [0.5]
    assert mechanism.payment == [2.0]


def test_an_empirical_distribution_is_the_discrete_one_of_its_counts(rng):
    samples = rng.choice([1.0, 2.5, 4.0], size=100, p=[0.2, 0.5, 0.3])
    empirical = Empirical(samples)
    np.testing.assert_array_equal(empirical.support, [1.0, 2.5, 4.0])
    counts = [(samples == c).mean() for c in empirical.support]
    one = OptimalSampling.from_distribution(empirical, 1.0)
    np.testing.assert_allclose(one.participation, OptimalSampling(empirical.support, counts, 1.0).participation)


def test_nodes_carry_exact_expectations(rng):
    """Σ mass·q and Σ spend·q are E[q] and E[q·r] of the interpolated schedule, to quadrature accuracy."""
    nodes = CostNodes.of(TruncatedExponential(1, 4, 0.7))
    q = np.sort(rng.random(nodes.cost.size))[::-1]
    from flmarket.sampling import LinearSchedule

    schedule = LinearSchedule.truthful(nodes.cost, q)
    draws = TruncatedExponential(1, 4, 0.7).ppf((np.arange(2_000_000) + 0.5) / 2_000_000)
    participation, payment = schedule.offer(draws)
    assert nodes.mass @ q == pytest.approx(participation.mean(), rel=1e-6)
    assert nodes.spend @ q == pytest.approx((participation * payment).mean(), rel=1e-6)
