"""Theorem 1: nobody gains by misreporting, nobody loses by taking part; and cheats are caught."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flmarket.errors import InvalidInput
from flmarket.sampling import (
    CompleteInformation,
    Histogram,
    OptimalSampling,
    StepSchedule,
    TruncatedExponential,
    Uniform,
    UniformSampling,
    misreport_gains,
    utility,
)

CONTINUOUS = [Uniform(1, 4), TruncatedExponential(1, 4, 0.7), Histogram([1, 2, 3, 4], [0.1, 0.8, 0.1])]


@st.composite
def discrete_instances(draw):
    size = draw(st.integers(1, 8))
    gaps = draw(st.lists(st.floats(0.01, 5.0), min_size=size, max_size=size))
    weights = np.array(draw(st.lists(st.floats(0.0, 1.0), min_size=size, max_size=size)))
    weights[draw(st.integers(0, size - 1))] += 0.1
    return np.cumsum(gaps), weights / weights.sum(), draw(st.floats(0.01, 30.0))


@given(case=discrete_instances())
def test_discrete_costs(case):
    support, mass, budget = case
    mechanism = OptimalSampling(support, mass, budget)
    cost = np.unique(np.append(support, np.linspace(0.005, support[-1], 60)))
    assert misreport_gains(mechanism, cost, cost).max() <= 1e-9
    assert utility(mechanism, cost).min() >= -1e-9


@pytest.mark.parametrize("costs", CONTINUOUS)
@pytest.mark.parametrize("budget", [0.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("kind", [OptimalSampling, UniformSampling])
def test_continuous_costs(costs, budget, kind, rng):
    mechanism = kind.from_distribution(costs, budget)
    true_cost = costs.sample(rng, 1000)
    reports = np.append(np.linspace(0.2, costs.maximum, 400), true_cost[:100])
    assert misreport_gains(mechanism, true_cost, reports).max() <= 1e-9
    assert utility(mechanism, true_cost).min() >= -1e-12


def test_utility_of_the_truth_is_the_integral_of_q():
    """u(c) = ∫_c^{c_max} q: for costs 1 and 2 at q = (1, 0.8), clients get 0.8 and 0."""
    mechanism = OptimalSampling([1, 2], [0.5, 0.5], 1.7)
    np.testing.assert_allclose(utility(mechanism, [1, 2]), [0.8, 0], atol=1e-12)
    np.testing.assert_allclose(utility(mechanism, 1.0, [1, 2]), [0.8, 0.8])
    np.testing.assert_allclose(utility(mechanism, 2.0, [1, 2]), [-0.2, 0], atol=1e-12)


def test_paying_costs_as_reported_is_caught():
    complete = CompleteInformation.from_distribution(Uniform(1, 4), 1.0)
    cost = np.linspace(1, 4, 50)
    assert misreport_gains(complete, cost, cost).max() > 0.1


def test_a_schedule_that_rises_is_caught():
    rising = StepSchedule.truthful(np.array([1.0, 2.0]), np.array([0.2, 0.8]))
    assert misreport_gains(rising, [1.0, 2.0], [1.0, 2.0]).max() > 0.1


def test_a_schedule_unpacks_into_its_functions():
    schedule = OptimalSampling([1, 2], [0.5, 0.5], 1.7).schedule
    q, r = schedule
    assert (float(q(1.5)), float(r(1.5))) == (pytest.approx(0.8), pytest.approx(2.0))


@pytest.mark.parametrize("cost", [2.0001, 0.0, -1.0, np.nan])
@pytest.mark.parametrize("kind", [OptimalSampling, UniformSampling, CompleteInformation])
def test_costs_beyond_the_support_are_refused(kind, cost):
    with pytest.raises(InvalidInput, match="cost"):
        kind([1, 2], [0.5, 0.5], 1.0).offer([1.0, cost])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([1, 2], [0.5, 0.5], 0.0), "budget_per_client"),
        (([1, 2], [0.5, 0.5], -1.0), "budget_per_client"),
        (([1, 2], [0.5, 0.5], np.nan), "budget_per_client"),
        (([2, 1], [0.5, 0.5], 1.0), "support"),
        (([1, 1], [0.5, 0.5], 1.0), "support"),
        (([0, 1], [0.5, 0.5], 1.0), "support"),
        (([-1, 1], [0.5, 0.5], 1.0), "support"),
        (([], [], 1.0), "support"),
        (([1, 2], [0.5, 0.6], 1.0), "probabilities"),
        (([1, 2], [1.5, -0.5], 1.0), "probabilities"),
        (([1, 2], [1.0], 1.0), "probabilities"),
    ],
)
def test_bad_input(arguments, field):
    with pytest.raises(InvalidInput) as error:
        OptimalSampling(*arguments)
    assert error.value.field == field


def test_erratum_samp_theorem_1_is_no_equivalence():
    """Costs on [1, 2]; q = ½ and r = 3 for everybody is truthful and rational, and not of Theorem 1's form (r = 2)."""
    generous = StepSchedule(np.array([2.0]), np.array([0.5]), np.array([3.0]))
    cost = np.linspace(1, 2, 20)
    assert misreport_gains(generous, cost, cost).max() <= 0
    assert utility(generous, cost).min() >= 0
    assert generous.offer(1.5)[1] != StepSchedule.truthful(np.array([2.0]), np.array([0.5])).offer(1.5)[1]


def test_erratum_samp_the_optimum_recruits_more_not_fewer(rng):
    """The text under Fig. 4 says the average q is lower than uniform sampling's. By Jensen it never is."""
    for _ in range(200):
        support = np.cumsum(rng.exponential(1.0, 6)) + 0.1
        mass = rng.dirichlet(np.ones(6))
        budget = rng.uniform(0.05, 1.0) * support[-1]
        optimal, uniform = OptimalSampling(support, mass, budget), UniformSampling(support, mass, budget)
        assert optimal.average_participation >= uniform.average_participation * (1 - 1e-12)
    strictly = OptimalSampling([1, 2], [0.5, 0.5], 0.5), UniformSampling([1, 2], [0.5, 0.5], 0.5)
    assert strictly[0].average_participation > strictly[1].average_participation + 0.03
