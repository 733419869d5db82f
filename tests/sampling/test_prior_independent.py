"""Algorithm 1: never over budget, truthful at every step, close to the prior-based optimum, fast enough."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flmarket.errors import InvalidInput, MechanismViolation
from flmarket.experiments.samp import average_participation, learning_curve
from flmarket.sampling import (
    Discrete,
    OptimalSampling,
    PriorIndependent,
    TruncatedExponential,
    Uniform,
    misreport_gains,
    utility,
)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 60),
    share=st.floats(0.01, 3.0),
    fraction=st.floats(0.0, 0.5),
    pseudo=st.sampled_from([0.0, 0.1, 1.0]),
    adversarial=st.booleans(),
)
def test_whatever_the_costs_the_budget_holds(seed, n, share, fraction, pseudo, adversarial):
    rng = np.random.default_rng(seed)
    costs = rng.choice([0.001, 0.5, 2.0], n) if adversarial else rng.uniform(0.01, 2.0, n)
    if adversarial:
        costs = np.sort(costs)[::-1]  # cheap clients last, when the budget is short
    budget = share * n
    mechanism = PriorIndependent(budget, 2.0, n, fraction, pseudo_count=pseudo)
    spent = 0.0
    for cost in costs:
        q, r = mechanism.report(float(cost))
        spent += q * r
        assert 0 <= q <= 1
        assert r >= cost
        assert spent <= budget * (1 + 1e-12)
    assert mechanism.phase == "finished"
    assert mechanism.remaining_budget == pytest.approx(budget - spent, abs=1e-9 * budget)


def test_every_step_is_truthful_and_rational(rng):
    mechanism = PriorIndependent(0.9 * 300, 3.0, 300, 0.1, resolution=64)
    costs = TruncatedExponential(0.5, 3, 0.6).sample(rng, 300)
    probe = np.linspace(0.01, 3.0, 150)
    for cost in costs:
        schedule = mechanism.offer()
        assert misreport_gains(schedule, probe, probe).max() <= 1e-9
        assert utility(schedule, probe).min() >= -1e-12
        q, r = mechanism.offer()
        taken = mechanism.report(float(cost))
        assert taken == (float(q(cost)), float(r(cost)))


def test_the_incremental_solution_is_the_prior_based_one_of_the_counts(rng):
    """With the true support as grid and no pseudo-count, each schedule is Theorem 2 on the counts so far."""
    support = np.array([1.0, 2.0, 2.5, 4.0])
    costs = Discrete(support, [0.3, 0.3, 0.3, 0.1]).sample(rng, 200)
    costs[:4] = support
    mechanism = PriorIndependent(400.0, 4.0, 200, 0.1, grid=support, pseudo_count=0.0)
    left = 400.0
    for index, cost in enumerate(costs):
        if mechanism.phase == "updating":
            counts = np.array([(costs[:index] == c).sum() for c in support])
            expected = OptimalSampling(support, counts / index, left / (200 - index))
            q, r = mechanism.offer().offer(support)
            np.testing.assert_allclose(q, expected.participation, rtol=1e-9)
            np.testing.assert_allclose(r, expected.payment, rtol=1e-9)
        q, r = mechanism.report(float(cost))
        left -= q * r
    assert mechanism.served == 200


@pytest.mark.parametrize("costs", [Uniform(1, 4), TruncatedExponential(1, 4, 0.7)])
def test_it_approaches_the_prior_based_optimum(costs):
    ratio, uniform = learning_curve([30, 300, 3000], costs, budget_per_client=1.5, draws=4)
    gap = ratio.mean(axis=0) - 1
    assert gap[0] > gap[1] > gap[2]
    assert abs(gap[2]) < 0.015
    assert uniform - 1 > 2 * gap[2]


def test_mean_spending_is_the_budget(rng):
    """Expected spending over runs: all of the budget is used, none exceeded."""
    spent = []
    for _ in range(1000):
        mechanism = PriorIndependent(30.0, 3.0, 20, 0.2, resolution=16)
        spent.append(mechanism.run(rng.uniform(0.5, 3.0, 20)).expected_payment)
    assert max(spent) <= 30.0 * (1 + 1e-12)
    assert np.mean(spent) > 0.97 * 30.0


def test_a_finer_grid_changes_little():
    curves = [
        learning_curve([2000], Uniform(1, 4), budget_per_client=1.5, draws=1, resolution=k)[0].item()
        for k in (128, 512, 2048)
    ]
    assert abs(curves[1] - curves[2]) < 2e-3
    assert abs(curves[0] - curves[2]) < 1e-2


def test_time_grows_with_the_clients_not_with_their_square(rng):
    """A client costs O(grid), not O(clients so far): ten times as many take about ten times as long."""

    def seconds(n):
        mechanism = PriorIndependent(1.5 * n, 4.0, n, 0.01)
        costs = rng.uniform(1, 4, n)
        start = time.process_time()
        mechanism.run(costs)
        return time.process_time() - start

    seconds(200)
    assert seconds(10_000) < 30 * seconds(1000)


def test_offers_end_with_the_clients():
    mechanism = PriorIndependent(2.0, 1.0, 2)
    mechanism.run([0.5, 0.6])
    with pytest.raises(MechanismViolation):
        mechanism.offer()
    with pytest.raises(MechanismViolation):
        mechanism.report(0.5)


def test_a_refused_report_changes_nothing():
    mechanism = PriorIndependent(5.0, 2.0, 10, 0.1)
    mechanism.report(1.0)
    before = (mechanism.served, mechanism.remaining_budget, mechanism.offer())
    for bad in (2.5, 0.0, np.nan):
        with pytest.raises(InvalidInput):
            mechanism.report(bad)
    assert (mechanism.served, mechanism.remaining_budget, mechanism.offer()) == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"budget": 0.0}, "budget"),
        ({"c_max": -1.0}, "c_max"),
        ({"n": 0}, "n"),
        ({"fraction": 1.5}, "fraction"),
        ({"initial_participation": 0.0}, "initial_participation"),
        ({"fraction": 0.5, "initial_participation": 0.9}, "initial_participation"),
        ({"resolution": 1}, "resolution"),
        ({"grid": [1.0, 1.5]}, "grid"),
        ({"pseudo_count": -1.0}, "pseudo_count"),
        ({"worst_case": "average"}, "worst_case"),
    ],
)
def test_bad_input(changes, field):
    with pytest.raises(InvalidInput) as error:
        PriorIndependent(**{"budget": 5.0, "c_max": 2.0, "n": 10, **changes})
    assert error.value.field == field


def test_erratum_samp_algorithm_1_checks_the_wrong_worst_case():
    """Line 8 asks whether a client of cost c_max can be paid; the cheapest is paid more, and Proposition 2 fails."""
    # two clients of cost 1: the first is explored at q = 0.6; then φ = (1, 3), and the second has q = 1.2/(1.366√φ)
    settings = {"budget": 2.4, "c_max": 2.0, "n": 2, "fraction": 0.5, "grid": [1.0, 2.0]}
    printed = PriorIndependent(**settings, worst_case="printed").run([1.0, 1.0])
    assert printed.expected_payment == pytest.approx(1.2 + 1.2 / (1 + 3**0.5) * 2 * (1 + 3**-0.5))
    assert printed.expected_payment > 2.4 * 1.07
    repaired = PriorIndependent(**settings).run([1.0, 1.0])
    assert repaired.expected_payment <= 2.4
    schedule = OptimalSampling([1, 2], [0.5, 0.5], 1.7)
    paid = schedule.participation * schedule.payment
    assert paid[0] > 1.7 > paid[1]  # expected payments fall in the cost


def test_erratum_samp_maximum_likelihood_never_serves_the_dearest():
    """Nobody has reported c_max yet: as printed its q is 0, though 1/q must mean something for every client."""
    settings = {"budget": 10.0, "c_max": 2.0, "n": 20, "fraction": 0.1, "grid": [1.0, 1.5, 2.0]}
    printed, repaired = PriorIndependent(**settings, pseudo_count=0.0), PriorIndependent(**settings)
    for mechanism in (printed, repaired):
        mechanism.run([1.0, 1.5, 1.0, 1.5])
    assert printed.offer().offer(2.0)[0] == 0
    assert repaired.offer().offer(2.0)[0] > 0


def test_series_of_the_figures():
    known = [OptimalSampling.from_distribution(Uniform(1, 2), budget) for budget in (0.5, 1.8, 3.0)]
    assert [mechanism.case for mechanism in known] == [1, 2, 3]
    assert all((np.diff(mechanism.offer(np.linspace(1, 2, 11))[0]) <= 0).all() for mechanism in known)
    for family in ("uniform", "exponential"):
        series = average_participation(
            [2.0, 3.0, 4.0], family=family, budget_per_client=1.0, minimum=1.0, maximum=10.0, clients=300
        )
        complete, optimal, online, uniform = series.values()
        assert (np.diff(optimal) < 0).all()
        assert (complete > optimal).all()
        assert (optimal > uniform).all()
        assert (online > uniform).all()
    with pytest.raises(InvalidInput):
        average_participation([9.0], budget_per_client=1.0, minimum=1.0, maximum=10.0)
