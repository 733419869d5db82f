import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flmarket
from flmarket import EXPONENTIAL, LINEAR, QUADRATIC, SQRT, STEP, BidProfile, InvalidInput, Outcome, Valuations


def test_families_by_hand():
    v = Valuations([LINEAR, QUADRATIC, SQRT, EXPONENTIAL, STEP], [1.0, 2.0, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(v.per_record(4.0), [8.0, 32.0, 12.0, 4 * (np.e**4 - 1), 5.0])
    np.testing.assert_array_equal(v.per_record(0.0), np.zeros(5))


def test_cost_is_size_times_value_per_record():
    bids = BidProfile(Valuations([LINEAR, STEP], [0.5, 3.0]), [2.0, 1.0], [10, 4])
    np.testing.assert_allclose(bids.cost([2.0, 0.5]), [20.0, 12.0])
    np.testing.assert_allclose(bids.full_cost, [20.0, 12.0])


def test_everything_broadcasts_to_a_batch():
    bids = BidProfile(Valuations(LINEAR, 1.0), np.ones((3, 1)), np.arange(1.0, 6.0))
    assert bids.shape == (3, 5)
    assert bids.n == 5
    assert bids[1].shape == (5,)
    assert bids[:, :2].shape == (3, 2)


def test_tabulated_is_piecewise_linear_from_the_origin():
    v = Valuations.tabulated([1.0, 2.0], [[1.0, 5.0], [0.0, 2.0]])
    np.testing.assert_allclose(v.per_record([0.5, 0.5]), [0.5, 0.0])
    np.testing.assert_allclose(v.per_record([1.5, 1.5]), [3.0, 1.0])
    np.testing.assert_allclose(v.per_record([9.0, 9.0]), [5.0, 2.0])  # beyond the table the last value holds


@given(
    st.lists(st.floats(0.01, 2.0), min_size=1, max_size=6),
    st.lists(st.floats(0.0, 3.0), min_size=6, max_size=6),
    st.floats(0.0, 15.0),
)
def test_tabulated_agrees_with_numpy_interp(widths, rises, eps):
    grid, values = np.cumsum(widths), np.cumsum(rises[: len(widths)])
    expected = np.interp(eps, np.concatenate([[0.0], grid]), np.concatenate([[0.0], values]))
    np.testing.assert_allclose(Valuations.tabulated(grid, values).per_record(eps), expected, rtol=1e-12, atol=1e-12)


def test_tables_mix_with_families():
    mixed = Valuations.concatenate(
        [
            Valuations([LINEAR], [2.0]),
            Valuations.tabulated([1.0, 2.0, 3.0], [[1, 1, 4]]),
            Valuations.tabulated([1], [[2]]),
        ]
    )
    np.testing.assert_allclose(mixed.per_record([1.5, 2.5, 0.5]), [6.0, 2.5, 1.0])
    bids = BidProfile(mixed, 3.0, [1, 2, 3])
    np.testing.assert_allclose(bids.full_cost, [12.0, 8.0, 6.0])
    np.testing.assert_allclose(bids[1:].full_cost, [8.0, 6.0])


@given(st.integers(0, 4), st.floats(0, 10), st.floats(0, 5), st.floats(0, 5))
def test_valuations_never_decrease(kind, rate, one, other):
    v = Valuations(kind, rate)
    assert v.per_record(min(one, other)) <= v.per_record(max(one, other))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Valuations(LINEAR, -1.0),
        lambda: Valuations(LINEAR, float("nan")),
        lambda: Valuations(LINEAR, float("inf")),
        lambda: Valuations(LINEAR, "cheap"),
        lambda: Valuations(17, 1.0),
        lambda: Valuations(-1, 1.0),
        lambda: Valuations(0.5, 1.0),
        lambda: Valuations([], []),
        lambda: Valuations([0, 1], [1.0, 1.0, 1.0]),
        lambda: Valuations(flmarket.TABULATED, 1.0),
        lambda: Valuations.tabulated([2.0, 1.0], [1.0, 2.0]),
        lambda: Valuations.tabulated([1.0, 1.0], [1.0, 2.0]),
        lambda: Valuations.tabulated([1.0, 2.0], [2.0, 1.0]),
        lambda: Valuations.tabulated([0.0, 1.0], [1.0, 2.0]),
        lambda: Valuations.tabulated([1.0], [1.0, 2.0]),
        lambda: Valuations.tabulated(1.0, 2.0),
        lambda: BidProfile("no valuations", 1.0, 1.0),
        lambda: BidProfile(Valuations(LINEAR, 1.0), -1.0, 1.0),
        lambda: BidProfile(Valuations(LINEAR, 1.0), [1.0, 2.0], [1.0, 2.0, 3.0]),
        lambda: BidProfile(Valuations(LINEAR, 1.0), 1.0, float("nan")),
        lambda: BidProfile(Valuations(LINEAR, 1.0), [], 1.0),
        lambda: Outcome(np.array([1.0]), np.array([1.0, 2.0])),
        lambda: Outcome(np.array([1.0]), np.array([-1.0])),
        lambda: Outcome(np.array([1.0]), np.array([1.0]), np.array([2.0])),
    ],
)
def test_bad_values_are_refused_in_one_line(make):
    with pytest.raises(InvalidInput) as error:
        make()
    message = str(error.value)
    assert "\n" not in message
    assert "expected" in message


def test_values_cannot_be_changed_afterwards():
    source = np.array([1.0, 2.0])
    bids = BidProfile(Valuations(LINEAR, 1.0), source, [1, 1])
    source[0] = 99.0
    assert bids.privacy_budget[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        bids.privacy_budget[0] = 5.0


def test_no_privacy_loss_is_too_large_for_a_number():
    """e^1000 overflows: neither an owner to whom privacy is worth nothing nor one without records costs NaN for it."""
    bids = BidProfile(Valuations([EXPONENTIAL] * 3, [0.0, 2.0, 2.0]), 1000.0, [10.0, 0.0, 10.0])
    assert np.isfinite(bids.full_cost).all()
    np.testing.assert_array_equal(bids.full_cost[:2], 0.0)
    assert bids.full_cost[2] > 1e100


def test_utility_is_minus_infinity_beyond_the_privacy_budget():
    bids = BidProfile(Valuations([LINEAR, LINEAR], 1.0), [1.0, 1.0], [1, 1])
    utility = bids.utility(Outcome(np.array([1.0, 1.5]), np.array([3.0, 9.0])))
    np.testing.assert_array_equal(utility, [1.0, -np.inf])


def test_participation_defaults_to_the_winners():
    outcome = Outcome(np.array([[0.0, 1.0]]), np.array([[0.0, 2.0]]))
    np.testing.assert_array_equal(outcome.participation, [[0.0, 1.0]])
    np.testing.assert_array_equal(outcome.spent, [2.0])


def test_importing_the_package_is_enough():
    code = (
        "import flmarket, sys; print(flmarket.auctions.names(), flmarket.aggregation.names(), flmarket.privacy.names())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "opt-aggr" in done.stdout
    with pytest.raises(AttributeError, match="auction"):
        flmarket.auction  # noqa: B018
