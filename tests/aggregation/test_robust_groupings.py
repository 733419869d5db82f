"""Groups of clients and their sums, against a loop over groups."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flmarket import InvalidInput
from flmarket.aggregation.robust import LeaveKOut, LeaveOneOut, Partition, coverage


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_sums_equal_a_loop(clients, dimension, seed):
    rng = np.random.default_rng(seed)
    weighted = rng.normal(size=(clients, dimension))
    for grouping in (LeaveOneOut(), LeaveKOut(1, 5), LeaveKOut(clients - 1, 4), Partition(min(3, clients))):
        members = grouping.members(clients, rng)
        expected = np.array([sum(weighted[i] for i in np.flatnonzero(group)) for group in members])
        np.testing.assert_allclose(grouping.sums(weighted, members), expected, atol=1e-12)
        assert members.any(axis=1).all()


def test_leave_one_out_leaves_each_out_once():
    members = LeaveOneOut().members(6, None)
    np.testing.assert_array_equal(members.sum(axis=1), 5)
    np.testing.assert_array_equal(~members, np.eye(6, dtype=bool))


def test_a_huge_upload_does_not_destroy_the_group_without_it():
    """Total minus own would: 1e20 swallows everybody else's digits."""
    weighted = np.array([[1.0], [2.0], [1e20], [4.0]])
    grouping = LeaveOneOut()
    sums = grouping.sums(weighted, grouping.members(4, None))
    assert sums[2, 0] == 7.0
    assert (weighted.sum(axis=0) - weighted)[2, 0] != 7.0


def test_leave_k_out_draws_different_groups_of_the_right_size(rng):
    for clients, k, count in ((20, 10, 60), (8, 2, 20), (30, 3, 40)):
        members = LeaveKOut(k, count).members(clients, rng)
        assert members.shape == (count, clients)
        np.testing.assert_array_equal(members.sum(axis=1), clients - k)
        assert len(np.unique(members, axis=0)) == count
    assert len(LeaveKOut(2, 100).members(6, None)) == comb(6, 2)  # all there are: nothing to draw


def test_leave_k_out_favours_nobody(rng):
    out = sum((~LeaveKOut(4, 10).members(12, rng)).sum(axis=0) for _ in range(400))
    expected = 400 * 10 * 4 / 12
    assert np.abs(out - expected).max() < 5 * np.sqrt(expected)


def test_partition_deals_everybody_once(rng):
    for clients, size, groups in ((60, 5, 12), (60, 30, 2), (61, 15, 4), (7, 7, 1), (9, 5, 1)):
        members = Partition(size).members(clients, rng)
        assert len(members) == groups
        np.testing.assert_array_equal(members.sum(axis=0), 1)
        assert members.sum(axis=1).min() >= size
    first, second = (Partition(5).members(20, np.random.default_rng(s)) for s in (0, 1))
    assert (first != second).any()


def test_coverage_against_counting(rng):
    grouping, trials = LeaveKOut(5, 6), 4000
    free = [(~grouping.members(10, rng)[:, :2]).all(axis=1).any() for _ in range(trials)]
    assert np.mean(free) == pytest.approx(coverage(10, 2, grouping), abs=0.04)
    assert np.mean(free) > coverage(10, 2, grouping) - 0.02
    assert coverage(10, 6, grouping) == 0.0
    assert coverage(10, 1, LeaveKOut(1, 10)) == pytest.approx(1 - 0.9**10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeaveOneOut().members(1, None),
        lambda: LeaveKOut(0, 5),
        lambda: LeaveKOut(2, 0),
        lambda: LeaveKOut(2.0, 5),
        lambda: LeaveKOut(3, 5).members(3, np.random.default_rng(0)),
        lambda: LeaveKOut(3, 5).members(10, None),
        lambda: Partition(0),
        lambda: Partition(6).members(5, np.random.default_rng(0)),
        lambda: Partition(2).members(5, None),
    ],
)
def test_bad_input_is_refused(make):
    with pytest.raises(InvalidInput):
        make()
