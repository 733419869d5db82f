from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flmarket.errors import InvalidInput
from flmarket.learning import Partition
from flmarket.learning.partition import _levelled, dirichlet, equal, iid_power_law
from flmarket.populations import NSL_KDD_CLASS_COUNTS, dirichlet_sizes, log_normal_sizes

seeds = st.integers(0, 2**32 - 1)


def assert_exact(part: Partition, records: int, owners: int, minimum: int) -> None:
    assert part.owners == owners
    assert sorted(part.order.tolist()) == list(range(records))
    assert part.sizes.sum() == records
    assert part.sizes.min() >= minimum
    again = np.concatenate([part.records(k) for k in range(owners)])
    assert np.array_equal(again, part.order)


@given(seeds, st.integers(1, 12), st.integers(1, 5), st.integers(0, 200), st.floats(0, 3))
def test_iid_assigns_each_record_once(seed: int, owners: int, minimum: int, spare: int, sigma: float) -> None:
    records = owners * minimum + spare
    part = iid_power_law(np.random.default_rng(seed), records, owners, sigma=sigma, minimum=minimum)
    assert_exact(part, records, owners, minimum)


@given(
    seeds,
    st.integers(1, 12),
    st.integers(1, 4),
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.sampled_from([0.01, 0.1, 0.5, 5.0, 100.0]),
)
def test_dirichlet_assigns_each_record_once(
    seed: int, owners: int, minimum: int, counts: list[int], concentration: float
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    if len(labels) < owners * minimum:
        with pytest.raises(InvalidInput):
            dirichlet(np.random.default_rng(seed), labels, owners, minimum=minimum)
        return
    rng = np.random.default_rng(seed)
    part = dirichlet(rng, labels, owners, concentration=concentration, minimum=minimum)
    assert_exact(part, len(labels), owners, minimum)


@given(seeds, st.integers(1, 50), st.integers(0, 200))
def test_equal_sizes_differ_by_at_most_one(seed: int, owners: int, spare: int) -> None:
    part = equal(np.random.default_rng(seed), owners + spare, owners)
    assert_exact(part, owners + spare, owners, 1)
    assert np.ptp(part.sizes) <= 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.data())
def test_levelling_is_taking_from_the_largest_one_by_one(sizes: list[int], data: st.DataObject) -> None:
    take = data.draw(st.integers(0, sum(sizes)))
    plain = list(sizes)
    for _ in range(take):
        plain[plain.index(max(plain))] -= 1
    levelled = _levelled(np.array(sizes), take)
    assert sorted(levelled.tolist()) == sorted(plain)
    assert (levelled <= sizes).all()


def test_sizes_agree_with_the_populations_of_bidders() -> None:
    """A bid's data size and the records behind it come from the same draw."""
    labels = np.repeat(np.arange(5), NSL_KDD_CLASS_COUNTS)
    iid = iid_power_law(np.random.default_rng(0), labels, 1000)
    assert np.array_equal(iid.sizes, log_normal_sizes(np.random.default_rng(0), 1000, len(labels)))
    niid = dirichlet(np.random.default_rng(0), labels, 1000)
    drawn = dirichlet_sizes(np.random.default_rng(0), 1000, NSL_KDD_CLASS_COUNTS)
    assert drawn.sum() == niid.sizes.sum() == len(labels)
    # the few owners without a record are given one from the largest holdings, each side in its own order
    assert np.abs(drawn - niid.sizes).max() <= 5


def test_dirichlet_is_the_less_even_the_smaller_the_concentration() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 20_000)

    def unevenness(part: Partition) -> float:
        shares = np.stack(
            [np.bincount(labels[part.records(k)], minlength=10) / part.sizes[k] for k in range(part.owners)]
        )
        return float(shares.std(axis=0).mean())

    spread = [
        unevenness(dirichlet(np.random.default_rng(1), labels, 50, concentration=c)) for c in (0.1, 0.5, 10, 1000)
    ]
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < 0.03 < 0.2 < spread[0]
    assert unevenness(equal(np.random.default_rng(1), labels, 50)) < 0.03


def test_select_gathers_owners_in_the_order_asked_for() -> None:
    part = iid_power_law(np.random.default_rng(3), 500, 20, minimum=1)
    rows, offsets = part.select([7, 2, 7])
    for i, owner in enumerate((7, 2, 7)):
        assert np.array_equal(rows[offsets[i] : offsets[i + 1]], part.records(owner))


def test_a_generator_in_the_same_state_gives_the_same_partition() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 300)
    for make in (iid_power_law, dirichlet, equal):
        one, other = make(np.random.default_rng(5), labels, 9), make(np.random.default_rng(5), labels, 9)
        assert np.array_equal(one.order, other.order)
        assert np.array_equal(one.offsets, other.offsets)


def test_from_owners_and_read_only() -> None:
    part = Partition.from_owners([2, 0, 2, 0], owners=3)
    assert part.sizes.tolist() == [2, 0, 2]
    assert part.records(2).tolist() == [0, 2]
    with pytest.raises(ValueError, match="read-only"):
        part.order[0] = 1


@pytest.mark.parametrize(
    ("order", "offsets"),
    [([0, 1], [0, 1]), ([0, 1], [1, 2]), ([0, 0], [0, 2]), ([0, 2], [0, 2]), ([0, 1], [0, 2, 1]), ([0.5, 1], [0, 2])],
)
def test_a_partition_that_is_none_is_refused(order: list[int], offsets: list[int]) -> None:
    with pytest.raises(InvalidInput):
        Partition(np.array(order), np.array(offsets))


def test_settings_that_make_no_sense_are_refused() -> None:
    rng = np.random.default_rng(0)
    for call in (
        lambda: iid_power_law(rng, 99, 10),
        lambda: iid_power_law(rng, 100, 10, sigma=-1.0),
        lambda: iid_power_law(rng, 100, 10, minimum=0),
        lambda: equal(rng, 3, 4),
        lambda: equal(rng, 3, 0),
        lambda: dirichlet(rng, [0, 1], 2, concentration=0.0),
        lambda: dirichlet(rng, [-1, 1], 2),
        lambda: dirichlet(rng, [0.5, 1.0], 2),
        lambda: equal(rng, 4, 2).records(2),
        lambda: equal(rng, 4, 2).select([2]),
    ):
        with pytest.raises(InvalidInput):
            call()


def test_a_hundred_thousand_owners_take_seconds_at_most() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 300_000)
    start = time.perf_counter()
    part = dirichlet(np.random.default_rng(0), labels, 100_000, concentration=0.1)
    assert part.sizes.min() == 1
    assert time.perf_counter() - start < 10
