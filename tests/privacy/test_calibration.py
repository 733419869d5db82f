from __future__ import annotations

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from flmarket.errors import InvalidInput
from flmarket.privacy import analytic_gaussian_sigma, classic_gaussian_sigma, gaussian_delta, gaussian_epsilon

epsilons = st.floats(-6, 3).map(lambda x: 10.0**x)
deltas = st.floats(-12, np.log10(0.5)).map(lambda x: min(0.5, 10.0**x))
cases = settings(max_examples=150, deadline=None)


@cases
@given(epsilon=epsilons, delta=deltas, sensitivity=st.floats(0.01, 100))
def test_sigma_never_overshoots_and_wastes_nothing(exact_gaussian_delta, epsilon, delta, sensitivity):
    sigma = float(analytic_gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=sensitivity))
    assert exact_gaussian_delta(sigma, epsilon, sensitivity) <= delta
    assert exact_gaussian_delta(sigma * (1 - 1e-9), epsilon, sensitivity) > delta


@cases
@given(sigma=st.floats(-3, 6).map(lambda x: 10.0**x), epsilon=epsilons)
def test_delta_is_accurate(exact_gaussian_delta, sigma, epsilon):
    exact = exact_gaussian_delta(sigma, epsilon)
    computed = float(gaussian_delta(sigma=sigma, epsilon=epsilon))
    if exact > mpmath.mpf("1e-290"):
        assert abs(computed / exact - 1) < 1e-11
    else:
        assert computed < 1e-280


@cases
@given(sigma=st.floats(-1, 5).map(lambda x: 10.0**x), delta=deltas)
def test_epsilon_is_the_least_that_holds(exact_gaussian_delta, sigma, delta):
    epsilon = float(gaussian_epsilon(sigma=sigma, delta=delta))
    assert exact_gaussian_delta(sigma, epsilon) <= delta
    if epsilon > 0:
        # ε is ill-conditioned where it is far below 1: δ then hardly depends on it.
        assert exact_gaussian_delta(sigma, max(0.0, epsilon * (1 - 1e-9) - 1e-11)) > delta or epsilon < 1e-10


def test_against_dp_accounting():
    pld = privacy_loss_distribution.from_gaussian_mechanism(1.7, value_discretization_interval=1e-5)
    assert float(gaussian_epsilon(sigma=1.7, delta=1e-6)) == pytest.approx(pld.get_epsilon_for_delta(1e-6), rel=1e-4)


def test_classic_formula_wastes_below_and_breaks_above():
    """The facts of experiment E9, at δ = 1e-5: asked for 1 it delivers 0.75, asked for 20 it delivers 25.4."""
    asked = np.array([1.0, 8.3, 8.5, 20.0])
    delivered = gaussian_epsilon(sigma=classic_gaussian_sigma(epsilon=asked, delta=1e-5), delta=1e-5)
    np.testing.assert_allclose(delivered[[0, 3]], [0.75, 25.44], atol=0.01)
    assert delivered[1] < 8.3
    assert delivered[2] > 8.5


def test_the_overshoot_check_sees_the_classic_formula_break(exact_gaussian_delta):
    assert exact_gaussian_delta(float(classic_gaussian_sigma(epsilon=20.0, delta=1e-5)), 20.0) > 1e-5


def test_vectorised_equals_one_by_one():
    eps, delta = np.geomspace(1e-6, 1e3, 7)[:, None], np.array([1e-12, 1e-5, 0.5])
    grid = analytic_gaussian_sigma(epsilon=eps, delta=delta)
    single = [[float(analytic_gaussian_sigma(epsilon=e, delta=d)) for d in delta] for e in eps[:, 0]]
    np.testing.assert_allclose(grid, single, rtol=1e-11)
    assert (np.diff(grid, axis=0) < 0).all()


@pytest.mark.parametrize("bad", [{"epsilon": 0.0}, {"epsilon": np.nan}, {"delta": 0.0}, {"delta": 1.0}])
def test_bad_input(bad):
    with pytest.raises(InvalidInput):
        analytic_gaussian_sigma(**{"epsilon": 1.0, "delta": 1e-5, **bad})
