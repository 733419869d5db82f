"""Our numbers beside other people's. docs/peers.md is held to what is here, and every check is seen to fail."""

import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the peers, while they are imported
    from peer_values import BYZFL_GEOMETRIC_MEDIAN, every, uploads

    VALUES = every()

PAGE = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", VALUES, ids=[f"{value.peer}: {value.what}" for value in VALUES])
def test_the_two_agree_and_a_planted_error_does_not(value):
    ours = np.asarray(value.ours(), dtype=float)
    assert value.agrees(ours), (value.theirs(), ours)
    assert not value.agrees(ours * (1 + 3 * value.rtol) + 3 * value.rtol * float(np.abs(ours).max()))
    assert not value.agrees(ours * 0.9)
    assert not value.agrees(ours * 1.1)


def test_there_are_enough_of_them():
    peers = Counter(value.peer for value in VALUES)
    assert len(peers) >= 8
    assert len(VALUES) >= 60


def test_the_page_lists_them_as_they_are():
    """Peer and number of values, in the first table of the page."""
    said = {name.strip(): int(count) for name, count in re.findall(r"^\| ([^|]+) \| (\d+) \|", PAGE, re.MULTILINE)}
    assert said == Counter(value.peer for value in VALUES)


def test_byzfl_stops_before_it_is_at_the_median():
    """Where we differ: ours has the smaller sum of distances, which is what a geometric median is about."""
    from flmarket.aggregation import robust

    x = uploads()
    ours = robust.get("geometric-median").combine(x, np.ones(len(x))).average
    away = lambda point: np.linalg.norm(x - point, axis=1).sum()  # noqa: E731
    assert away(ours) < away(np.array(BYZFL_GEOMETRIC_MEDIAN)) * (1 - 1e-6)


def test_krum_in_the_papers_counts_one_neighbour_more_or_less():
    """Blanchard et al. sum over m − f − 2 others; a rule of m − f − 1 chooses otherwise here."""
    from flmarket.aggregation import robust

    x = np.random.default_rng(31).normal(size=(7, 2))
    square = ((x[:, None] - x[None]) ** 2).sum(axis=2)

    def chosen(others):
        return int(np.argmin(np.sort(square, axis=1)[:, 1 : 1 + others].sum(axis=1)))

    ours = robust.get("krum", adversaries=2).combine(x, np.ones(7)).average
    np.testing.assert_array_equal(ours, x[chosen(7 - 2 - 2)])
