from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from flmarket.errors import InvalidInput
from flmarket.learning import OwnerStreams, Purpose, stream


def first(generator: np.random.Generator) -> int:
    return int(generator.integers(0, 2**63))


def test_a_stream_is_its_name() -> None:
    assert first(stream(7, 3, 5, purpose=Purpose.NOISE)) == first(stream(7, 3, 5, purpose=Purpose.NOISE))


def test_each_name_is_another_stream() -> None:
    owners = (None, 0, 1, 2**32 - 1)
    seeds = (0, 1, 2**32, 2**64, 2**128 - 1)
    names = list(product(seeds, (0, 1, 2**32 - 1), owners, Purpose))
    assert len({first(stream(s, r, o, purpose=p)) for s, r, o, p in names}) == len(names)


def test_neighbouring_streams_are_uncorrelated() -> None:
    rows = np.stack([stream(0, 0, k, purpose=Purpose.NOISE).normal(size=2000) for k in range(40)])
    correlation = np.corrcoef(rows) - np.eye(40)
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)


def test_codes_never_change() -> None:
    """Seeded results depend on them: a new purpose goes to the end."""
    assert [p.value for p in Purpose] == list(range(len(Purpose)))
    assert (Purpose.PARTITION, Purpose.BATCHES, Purpose.NOISE) == (0, 4, 5)
    assert first(stream(1, 2, 3, purpose=Purpose.BATCHES)) == first(
        np.random.default_rng(np.random.SeedSequence(1, spawn_key=(4, 2, 3)))
    )


@pytest.mark.parametrize(
    ("seed", "round_index", "owner"), [(-1, 0, 0), (2**128, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 1.5)]
)
def test_out_of_range_is_refused(seed: int, round_index: int, owner: int) -> None:
    with pytest.raises(InvalidInput):
        stream(seed, round_index, owner, purpose=Purpose.NOISE)


def test_owner_streams_are_made_on_demand_and_numpy_owners_are_welcome() -> None:
    streams = OwnerStreams(9, 4, np.array([30, 10, 20]), Purpose.BATCHES)
    expected = [first(stream(9, 4, k, purpose=Purpose.BATCHES)) for k in (30, 10, 20)]
    assert [first(g) for g in streams] == expected
    assert first(streams[np.int64(2)]) == expected[2]
    assert [first(g) for g in streams[1:]] == expected[1:]
    assert len(streams) == 3
