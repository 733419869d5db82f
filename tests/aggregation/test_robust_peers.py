"""The rules we compare with, against brute force, a general optimiser, and Flower's own functions."""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import minimize

from flmarket import InvalidInput
from flmarket.aggregation import robust

RULES = ("average", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")


def uploads(seed, m=9, p=4):
    return np.random.default_rng(seed).normal(size=(m, p))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_against_brute_force(name, seed):
    vectors, size = uploads(seed), np.random.default_rng(seed).integers(1, 9, 9).astype(float)
    settings = {"adversaries": 2} if name in ("trimmed-mean", "krum", "multi-krum") else {}
    made = robust.get(name, **settings).combine(vectors, size)
    np.testing.assert_allclose(made.average, brute(name, vectors, size), atol=1e-6)
    assert made.shares.sum() == pytest.approx(1.0)
    assert (made.shares >= 0).all()


def brute(name, vectors, size):
    m = len(vectors)
    if name == "average":
        return sum(d * v for d, v in zip(size, vectors, strict=True)) / size.sum()
    if name == "median":
        return np.array([sorted(column)[m // 2] for column in vectors.T])
    if name == "trimmed-mean":
        return np.array([np.mean(sorted(column)[2 : m - 2]) for column in vectors.T])
    if name == "geometric-median":

        def distances(point):
            return float(size @ np.linalg.norm(vectors - point, axis=1))

        starts = [*vectors, vectors.mean(axis=0)]
        found = [minimize(distances, s, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}) for s in starts]
        return min(found, key=lambda result: result.fun).x
    scores = []
    for i in range(m):  # the cheapest set of m − f − 2 others
        near = [np.sum((vectors[i] - vectors[j]) ** 2) for j in range(m) if j != i]
        scores.append(min(sum(chosen) for chosen in combinations(near, m - 2 - 2)))
    order = np.argsort(scores)
    return vectors[order[: 1 if name == "krum" else m - 2]].mean(axis=0)


@pytest.mark.parametrize("seed", range(3))
def test_against_flower(seed):
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    vectors = uploads(seed, m=11, p=6)
    results = [([v.copy()], 1) for v in vectors]
    pairs = {
        "krum": flower.aggregate_krum(results, num_malicious=2, to_keep=0),
        "multi-krum": flower.aggregate_krum(results, num_malicious=2, to_keep=9),
        "median": flower.aggregate_median(results),
        "trimmed-mean": flower.aggregate_trimmed_avg(results, proportiontocut=2 / 11 + 1e-9),
    }
    for name, theirs in pairs.items():
        settings = {} if name == "median" else {"adversaries": 2}
        ours = robust.get(name, **settings).combine(vectors, np.ones(11)).average
        np.testing.assert_allclose(ours, theirs[0], atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", [name for name in RULES if name != "average"])
def test_two_of_nine_cannot_move_it_far_and_can_move_the_average_anywhere(name):
    honest = uploads(7)
    settings = {"adversaries": 2} if name in ("trimmed-mean", "krum", "multi-krum") else {}
    attacked = honest.copy()
    attacked[:2] = 1e30
    made = robust.get(name, **settings).combine(attacked, np.ones(9)).average
    assert np.abs(made).max() < 2 * np.abs(honest[2:]).max()
    assert np.abs(robust.get("average").combine(attacked, np.ones(9)).average).min() > 1e29


@pytest.mark.parametrize("name", RULES)
def test_equal_uploads_come_out_unchanged_and_order_does_not_matter(name):
    made = robust.get(name).combine(np.full((7, 3), 2.5), np.ones(7)).average
    np.testing.assert_allclose(made, 2.5)
    vectors, order = uploads(3), np.random.default_rng(0).permutation(9)
    one, two = (robust.get(name).combine(vectors[o], np.ones(9)).average for o in (np.arange(9), order))
    np.testing.assert_allclose(one, two, atol=1e-8)


def test_geometric_median_that_is_an_upload():
    """A heavy client is the median herself; the start of the iteration is another point."""
    vectors, size = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [5.0, 5.0]]), np.array([1.0, 1.0, 1.0, 9.0])
    np.testing.assert_allclose(robust.get("geometric-median").combine(vectors, size).average, [5.0, 5.0], atol=1e-6)
    # and one where the coordinate median, the start, is an upload but not the answer
    triangle = np.array([[0.0, 0.0], [1.0, 0.2], [2.0, -8.0], [0.2, 3.0], [1.5, 7.0]])
    expected = brute("geometric-median", triangle, np.ones(5))
    np.testing.assert_allclose(
        robust.get("geometric-median").combine(triangle, np.ones(5)).average, expected, atol=1e-6
    )


def test_geometric_median_where_nothing_pulls():
    """The iteration starts on an upload, and the others balance out."""
    for points in ([[0.0], [1.0], [2.0]], [[0, 0], [1, 1], [-1, -1], [1, -1], [-1, 1]], [[3.0]], [[2.0], [2.0]]):
        made = robust.get("geometric-median").combine(np.array(points, dtype=float), np.ones(len(points)))
        np.testing.assert_array_equal(made.average, np.median(points, axis=0))
        assert made.shares.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(8))
def test_geometric_median_on_a_line_is_the_weighted_median(seed):
    rng = np.random.default_rng(seed)
    points, size = rng.integers(-9, 10, 9).astype(float), rng.integers(1, 9, 9).astype(float)
    order = np.argsort(points)
    total = np.cumsum(size[order])
    middle = points[order][total >= total[-1] / 2][0]
    found = robust.get("geometric-median").combine(points[:, None], size).average[0]
    assert size @ np.abs(points - found) == pytest.approx(size @ np.abs(points - middle), rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_geometric_median_among_grid_points(seed):
    """Uploads that coincide, lie on lines and are often the median: no point found by a general method is better."""
    rng = np.random.default_rng(100 + seed)
    vectors, size = rng.integers(-2, 3, (6, 2)).astype(float), rng.integers(1, 5, 6).astype(float)
    found = robust.get("geometric-median").combine(vectors, size).average
    candidates = [brute("geometric-median", vectors, size), *vectors]
    least = min(float(size @ np.linalg.norm(vectors - point, axis=1)) for point in candidates)
    assert size @ np.linalg.norm(vectors - found, axis=1) <= least * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "settings", "m"),
    [
        ("trimmed-mean", {"adversaries": 3}, 6),
        ("krum", {"adversaries": 2}, 6),
        ("multi-krum", {"adversaries": 1, "keep": 8}, 7),
        ("krum", {"adversaries": -1}, 6),
        ("trimmed-mean", {"adversaries": 1.5}, 6),
    ],
)
def test_too_many_adversaries_are_refused(name, settings, m):
    with pytest.raises(InvalidInput):
        robust.get(name, **settings).combine(uploads(0, m=m), np.ones(m))


@pytest.mark.parametrize("name", RULES)
def test_uploads_that_are_not_numbers_are_refused(name):
    vectors = uploads(0)
    vectors[3, 1] = np.nan
    with pytest.raises(InvalidInput):
        robust.get(name).combine(vectors, np.ones(9))
