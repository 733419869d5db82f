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


def test_amounts_read_well():
    assert format_micros(1_234_567_890) == "1,234.56789"
    assert format_micros(-2_500_000) == "-2.50"
    assert format_micros(0) == "0.00"
