"""Mechanisms compute in floating point; what is paid is whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flmarket.errors import InvalidInput, MechanismViolation
from flmarket.ledger import format_micros, payments_to_micros, to_micros


def test_money_rounds_down():
    assert to_micros("budget", 1.2345678) == 1_234_567
    assert payments_to_micros([0.1234567, 0.0], 200_000).tolist() == [123_456, 0]
    for bad in (-1.0, float("nan"), float("inf"), 1e300, True, "7"):
        with pytest.raises(InvalidInput, match="budget"):
            to_micros("budget", bad)


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50), st.integers(1, 10**12))
def test_payments_that_use_the_whole_budget_still_fit(shares, budget):
    if sum(shares) <= 0:
        return
    payment = np.array(shares) / sum(shares) * (budget / 1e6)
    micros = payments_to_micros(payment, budget)
    assert micros.sum() <= budget
    assert (micros >= 0).all()
    assert (micros <= payment * 1e6 + 1e-3).all()


def test_overspending_is_refused_whole():
    with pytest.raises(MechanismViolation, match=r"3\.00 exceed the budget of 2\.00"):
        payments_to_micros([1.5, 1.5], 2_000_000)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0, -1e-9, 1e300])
def test_what_is_no_amount_is_refused_whole(bad):
    for payment in ([bad], [1.0, bad, 0.0], np.array([[bad], [1.0]])):
        with pytest.raises(MechanismViolation, match="no amount of money"):
            payments_to_micros(payment, 10**12)
    with pytest.raises(InvalidInput, match="payment"):
        payments_to_micros(["x"], 10**12)
    assert payments_to_micros([], 0).tolist() == []
    assert payments_to_micros([-0.0], 0).tolist() == [0]


def test_dust_is_taken_from_the_largest_payments_and_from_nobody_who_gets_nothing():
    """By hand: what is above the budget by rounding alone goes from all alike, and the rest from the largest."""
    assert payments_to_micros([5e-6, 6e-6], 10).tolist() == [5, 5]
    assert payments_to_micros([5e-6, 7e-6, 0.0], 11).tolist() == [5, 6, 0]
    billion = np.array([10**9 + 1, 0, 10**9 + 2, 10**9 + 1]) / 1e6
    assert payments_to_micros(billion, 3 * 10**9).tolist() == [10**9, 0, 10**9, 10**9]
    assert payments_to_micros([1.0, 0.5], 1_500_000).tolist() == [1_000_000, 500_000]
    with pytest.raises(MechanismViolation):
        payments_to_micros([5e-6, 7e-6], 10)
    with pytest.raises(MechanismViolation):
        payments_to_micros(billion + 1e-6, 3 * 10**9)


def test_the_most_that_is_money():
    most = 2**62
    assert to_micros("budget", 0) == 0
    assert to_micros("budget", np.float64(most / 1e6)) == most
    assert payments_to_micros([most / 1e6], most).tolist() == [most]
    with pytest.raises(InvalidInput, match="budget"):
        to_micros("budget", most * 1.000001 / 1e6)
    with pytest.raises(MechanismViolation, match="no amount"):
        payments_to_micros([most * 1.000001 / 1e6], most)


def test_amounts_read_well():
    assert format_micros(1_234_567_890) == "1,234.56789"
    assert format_micros(-2_500_000) == "-2.50"
    assert format_micros(0) == "0.00"
