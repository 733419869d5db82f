from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import check_grad

from flmarket.errors import InvalidInput
from flmarket.learning import Model, SoftmaxRegression, balanced_accuracy, load


def problem(
    seed: int, sizes: list[int], features: int, classes: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return rng.normal(size=(offsets[-1], features)), rng.integers(0, classes, offsets[-1]), offsets


def plain_gradient(
    model: SoftmaxRegression, params: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One owner, one record and one class at a time, from the textbook."""
    outputs = 1 if model.classes == 2 else model.classes
    weights = params[: outputs * model.features].reshape(outputs, model.features)
    biases = params[outputs * model.features :]
    d_weights, d_biases = np.zeros_like(weights), np.zeros_like(biases)
    for record, label in zip(x, y, strict=True):
        scores = [float(weights[c] @ record + biases[c]) for c in range(outputs)]
        if outputs == 1:
            errors = [1 / (1 + np.exp(-scores[0])) - label]
        else:
            total = sum(np.exp(s) for s in scores)
            errors = [np.exp(s) / total - (c == label) for c, s in enumerate(scores)]
        for c, error in enumerate(errors):
            d_weights[c] += error * record / len(y)
            d_biases[c] += error / len(y)
    return np.concatenate([(d_weights + model.l2 * weights).ravel(), d_biases])


def test_sizes_of_the_papers_models() -> None:
    assert SoftmaxRegression(30, 2).dimension == 31
    assert SoftmaxRegression(122, 5).dimension == 615
    assert SoftmaxRegression(784, 10).dimension == 7850
    assert isinstance(SoftmaxRegression(1, 2), Model)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize(("l2", "biases"), [(0.0, False), (0.3, False), (0.3, True)])
def test_gradient_is_the_slope_of_the_loss(classes: int, l2: float, biases: bool) -> None:
    x, y, offsets = problem(classes, [40], 5, classes)
    model = SoftmaxRegression(5, classes, l2, penalise_biases=biases)
    params = np.random.default_rng(0).normal(size=model.dimension)
    error = check_grad(lambda p: model.loss(p, x, y), lambda p: model.owner_gradients(p, x, y, offsets)[0], params)
    assert error < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.one_of(st.integers(1, 6), st.integers(30, 70)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(2, 5),
    st.sampled_from([0.0, 0.1]),
)
def test_owner_gradients_equal_a_plain_loop(
    seed: int, sizes: list[int], features: int, classes: int, l2: float
) -> None:
    x, y, offsets = problem(seed, sizes, features, classes)
    model = SoftmaxRegression(features, classes, l2)
    params = np.random.default_rng(seed + 1).normal(size=model.dimension)
    expected = [plain_gradient(model, params, x[a:b], y[a:b]) for a, b in pairwise(offsets)]
    assert np.allclose(model.owner_gradients(params, x, y, offsets), expected, atol=1e-12)


@pytest.mark.parametrize(("name", "l2"), [("breast-cancer", 0.01), ("digits", 0.01)])
def test_scikit_learns_optimum_is_ours(name: str, l2: float) -> None:
    from sklearn.linear_model import LogisticRegression

    data = load(name)
    model = SoftmaxRegression(data.features, data.n_classes, l2)
    theirs = LogisticRegression(C=1 / (l2 * len(data.y_train)), tol=1e-8, max_iter=5000)
    theirs.fit(data.x_train, data.y_train)
    params = np.concatenate([theirs.coef_.ravel(), theirs.intercept_])
    gradient = model.owner_gradients(params, data.x_train, data.y_train, [0, len(data.y_train)])[0]
    assert np.abs(gradient).max() < 1e-5
    assert (
        np.abs(model.owner_gradients(model.initial(), data.x_train, data.y_train, [0, 100, len(data.y_train)])).max()
        > 1e-2
    )
    assert np.array_equal(model.predict(params, data.x_test), theirs.predict(data.x_test))


@pytest.mark.parametrize(("name", "rate", "least"), [("breast-cancer", 0.5, 0.93), ("digits", 2.0, 0.9)])
def test_central_training_learns(name: str, rate: float, least: float) -> None:
    data = load(name)
    model = SoftmaxRegression(data.features, data.n_classes)
    params = model.initial()
    for _ in range(150):
        params = params - rate * model.owner_gradients(params, data.x_train, data.y_train, [0, len(data.y_train)])[0]
    found = model.evaluate(params, data.test)
    assert min(found["accuracy"], found["balanced_accuracy"]) >= least


def test_an_owners_gradient_is_the_same_bits_whoever_else_is_there() -> None:
    sizes = [1, 3, 3, 40, 1, 31, 32, 200, 3, 31]
    for features, classes in ((122, 5), (30, 2), (7, 3)):
        x, y, offsets = problem(0, sizes, features, classes)
        model = SoftmaxRegression(features, classes)
        params = np.random.default_rng(1).normal(size=model.dimension)
        together = model.owner_gradients(params, x, y, offsets)
        for k in range(len(sizes)):
            own = slice(offsets[k], offsets[k + 1])
            alone = model.owner_gradients(params, x[own].copy(), y[own], [0, sizes[k]])[0]
            assert np.array_equal(alone, together[k])


def test_large_scores_neither_overflow_nor_warn() -> None:
    for classes in (2, 4):
        x, y, offsets = problem(0, [20], 3, classes)
        model = SoftmaxRegression(3, classes)
        params = np.full(model.dimension, 1e6) * np.arange(model.dimension)
        assert np.isfinite(model.loss(params, x, y))
        assert np.isfinite(model.owner_gradients(params, x, y, offsets)).all()


def test_balanced_accuracy_counts_classes_not_records() -> None:
    assert balanced_accuracy([0, 0, 0, 2], [0, 0, 0, 0]) == 0.5
    from sklearn.metrics import balanced_accuracy_score

    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 4, 50), rng.integers(0, 4, 50)
    assert balanced_accuracy(truth, predicted) == pytest.approx(balanced_accuracy_score(truth, predicted))


@pytest.mark.parametrize("offsets", [[0, 2, 2, 5], [0, 3], [1, 5], [0, 4, 3, 5], [0.0, 5.0], [5], [[0, 5]]])
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    x, y, _ = problem(0, [5], 2, 2)
    model = SoftmaxRegression(2, 2)
    with pytest.raises(InvalidInput, match="offsets"):
        model.owner_gradients(model.initial(), x, y, offsets)


def test_an_owner_without_records_is_named() -> None:
    x, y, _ = problem(0, [5], 2, 2)
    with pytest.raises(InvalidInput, match="owner 1"):
        SoftmaxRegression(2, 2).owner_gradients(np.zeros(3), x, y, [0, 2, 2, 5])


def test_values_that_do_not_fit_are_refused() -> None:
    x, y, offsets = problem(0, [5], 2, 3)
    model = SoftmaxRegression(2, 3)
    zeros = model.initial()
    for params, records, labels in (
        (zeros[:-1], x, y),
        (zeros + np.nan, x, y),
        (zeros, x[:, :1], y),
        (zeros, x, y[:-1]),
        (zeros, x, y - 3),
        (zeros, x, y + 3),
        (zeros, x, y + 0.5),
    ):
        with pytest.raises(InvalidInput):
            model.owner_gradients(params, records, labels, offsets)
    for features, classes, l2 in ((0, 2, 0.0), (1, 1, 0.0), (1, 2, -1.0), (1, 2, np.nan)):
        with pytest.raises(InvalidInput):
            SoftmaxRegression(features, classes, l2)


def test_many_small_owners() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 11, 100_000)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    x, y = rng.normal(size=(offsets[-1], 8)), rng.integers(0, 3, offsets[-1])
    model = SoftmaxRegression(8, 3)
    params = rng.normal(size=model.dimension)
    gradients = model.owner_gradients(params, x, y, offsets)
    for k in (0, 500, 99_999):
        own = slice(offsets[k], offsets[k + 1])
        assert np.allclose(gradients[k], plain_gradient(model, params, x[own], y[own]))
    whole = model.owner_gradients(params, x, y, [0, offsets[-1]])[0]
    assert np.allclose(sizes @ gradients / sizes.sum(), whole)
