from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from flmarket.errors import InvalidInput
from flmarket.learning import (
    LocalTraining,
    OwnerStreams,
    Pool,
    Purpose,
    Records,
    SoftmaxRegression,
    at_rate,
    dimension,
    fedavg,
    fedsgd,
    load,
    models,
    stream,
    train_many,
    updates,
)
from flmarket.learning.partition import dirichlet

SIZES = [1, 4, 4, 9, 33, 50, 120, 4]
OWNERS = [11, 3, 70, 8, 0, 41, 5, 6]


def problem(classes: int = 3) -> tuple[SoftmaxRegression, NDArray, NDArray, NDArray, NDArray]:
    rng = np.random.default_rng(2)
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    x, y = rng.normal(size=(offsets[-1], 6)), rng.integers(0, classes, offsets[-1])
    model = SoftmaxRegression(6, classes, l2=0.01)
    return model, rng.normal(size=model.dimension), x, y, offsets


def streams(owners: list[int] = OWNERS) -> OwnerStreams:
    return OwnerStreams(1, 2, owners, Purpose.BATCHES)


def plain_fedavg(
    model: SoftmaxRegression,
    params: NDArray,
    x: NDArray,
    y: NDArray,
    rng: np.random.Generator,
    *,
    steps: int,
    batch_size: int,
    rate: float,
) -> NDArray:
    """One owner at a time: walk through the records in random order, start anew when a batch does not fit."""
    local, queue = params.copy(), np.empty(0, dtype=int)
    for step in range(steps):
        if len(y) <= batch_size:
            batch = np.arange(len(y))
        else:
            if len(queue) < batch_size:
                batches_left = min(len(y) // batch_size, steps - step)
                queue = rng.choice(len(y), batches_left * batch_size, replace=False)
            batch, queue = queue[:batch_size], queue[batch_size:]
        gradient = model.owner_gradients(local, x[batch], y[batch], [0, len(batch)])[0]
        local = local - rate * gradient
    return params - local


def test_fedsgd_is_the_owners_gradients() -> None:
    model, params, x, y, offsets = problem()
    assert np.array_equal(fedsgd(model, params, x, y, offsets), model.owner_gradients(params, x, y, offsets))


@pytest.mark.parametrize("classes", [2, 3])
def test_one_full_step_is_gradient_descent(classes: int) -> None:
    model, params, x, y, _ = problem(classes)
    update = fedavg(model, params, x, y, [0, len(y)], steps=1, learning_rate=0.3)[0]
    gradient = model.owner_gradients(params, x, y, [0, len(y)])[0]
    assert np.allclose(params - update, params - 0.3 * gradient, atol=1e-14)


def test_full_batches_are_plain_descent_for_every_owner() -> None:
    model, params, x, y, offsets = problem()
    updates = fedavg(model, params, x, y, offsets, steps=7, learning_rate=0.3)
    for k, update in enumerate(updates):
        own, local = slice(offsets[k], offsets[k + 1]), params
        for _ in range(7):
            local = local - 0.3 * model.owner_gradients(local, x[own], y[own], [0, SIZES[k]])[0]
        assert np.allclose(update, params - local, atol=1e-12)


@pytest.mark.parametrize("batch_size", [1, 4, 8, 32, 50, 1000])
@pytest.mark.parametrize("classes", [2, 3])
def test_batched_equals_a_plain_loop_over_owners(batch_size: int, classes: int) -> None:
    model, params, x, y, offsets = problem(classes)
    found = fedavg(model, params, x, y, offsets, steps=9, batch_size=batch_size, learning_rate=0.3, rngs=streams())
    for k, owner in enumerate(OWNERS):
        own = slice(offsets[k], offsets[k + 1])
        rng = stream(1, 2, owner, purpose=Purpose.BATCHES)
        plain = plain_fedavg(model, params, x[own], y[own], rng, steps=9, batch_size=batch_size, rate=0.3)
        assert np.allclose(found[k], plain, atol=1e-12)


def test_an_update_is_the_same_bits_in_any_company_and_order() -> None:
    model, params, x, y, offsets = problem()
    settings = {"steps": 6, "batch_size": 8, "learning_rate": 0.2}
    together = fedavg(model, params, x, y, offsets, rngs=streams(), **settings)
    for chosen in ([0], [6], [5, 4], [7, 6, 5, 4, 3, 2, 1, 0], [2, 6, 3]):
        rows = np.concatenate([np.arange(offsets[k], offsets[k + 1]) for k in chosen])
        bounds = np.concatenate([[0], np.cumsum([SIZES[k] for k in chosen])])
        rngs = streams([OWNERS[k] for k in chosen])
        some = fedavg(model, params, x[rows], y[rows], bounds, rngs=rngs, **settings)
        assert np.array_equal(some, together[chosen])


def test_memory_bound_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params, x, y, offsets = problem()
    settings = {"steps": 3, "batch_size": 4, "learning_rate": 0.2}
    before = fedavg(model, params, x, y, offsets, rngs=streams(), **settings)
    monkeypatch.setattr("flmarket.learning.model.BLOCK_VALUES", 1)
    assert np.array_equal(before, fedavg(model, params, x, y, offsets, rngs=streams(), **settings))


def test_another_round_draws_other_batches() -> None:
    model, params, x, y, offsets = problem()
    one, other = (
        fedavg(
            model, params, x, y, offsets, steps=3, batch_size=8, learning_rate=0.2,
            rngs=OwnerStreams(1, r, OWNERS, Purpose.BATCHES),
        )
        for r in (2, 3)
    )  # fmt: skip
    large = np.array(SIZES) > 8
    assert (one[large] != other[large]).any(axis=1).all()
    assert np.array_equal(one[~large], other[~large])


def test_a_pass_uses_each_record_once() -> None:
    """With a tiny rate the parameters hardly move, so the steps of one pass add up to the full gradient."""
    _, _, x, y, _ = problem()
    x, y, model = x[:120], y[:120], SoftmaxRegression(6, 3)
    start = model.initial()
    settings = {"steps": 12, "batch_size": 10, "learning_rate": 1e-9, "rngs": streams([0])}
    update = fedavg(model, start, x, y, [0, 120], **settings)[0]
    assert np.allclose(update / 12e-9, model.owner_gradients(start, x, y, [0, 120])[0], atol=1e-6)


def test_settings_that_make_no_sense_are_refused() -> None:
    model, params, x, y, offsets = problem()
    good = {"steps": 3, "batch_size": 4, "learning_rate": 0.1, "rngs": streams()}
    for bad in (
        {"steps": 0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": np.nan},
        {"learning_rate": -1.0},
        {"rngs": None},
        {"rngs": streams([1])},
    ):
        with pytest.raises(InvalidInput):
            fedavg(model, params, x, y, offsets, **(good | bad))
    with pytest.raises(InvalidInput, match="y"):
        fedsgd(model, params, x, y - 1, offsets)
    with pytest.raises(InvalidInput, match="owner 0"):
        fedavg(model, params, x, y, np.concatenate([[0], offsets]), **(good | {"rngs": streams([9, *OWNERS])}))


def test_federated_averaging_learns_digits_from_unlike_owners() -> None:
    data = load("digits")
    part = dirichlet(stream(0, purpose=Purpose.PARTITION), data.y_train, 20)
    model = SoftmaxRegression(data.features, data.n_classes)
    params = model.initial()
    for r in range(30):
        owners = stream(0, r, purpose=Purpose.PARTICIPATION).choice(20, 8, replace=False)
        rows, offsets = part.select(owners)
        updates = fedavg(
            model, params, data.x_train[rows], data.y_train[rows], offsets,
            steps=10, batch_size=16, learning_rate=0.5, rngs=OwnerStreams(0, r, owners, Purpose.BATCHES),
        )  # fmt: skip
        params = params - np.diff(offsets) / offsets[-1] @ updates
    assert model.evaluate(params, data.test)["accuracy"] > 0.9


# --- what a server subtracts, for any model ---------------------------------------------------------------------------

GRADIENT, STEPS = (
    LocalTraining(learning_rate=0.3),
    LocalTraining(steps=3, batch_size=4, learning_rate=0.2, momentum=0.9),
)


class Plain:
    """A model of somebody's own, with the four methods alone."""

    tensors = {"weights": (1, 6), "biases": (1,)}  # noqa: RUF012

    def __init__(self, local=STEPS):
        self.local = local

    def initial(self, seed=0):
        return np.zeros(7)

    def train(self, parameters, data, rng):
        return SoftmaxRegression(6, 2, local=self.local).train(parameters, data, rng)

    def evaluate(self, parameters, data):
        return SoftmaxRegression(6, 2).evaluate(parameters, data)


@pytest.mark.parametrize("local", [GRADIENT, STEPS])
@pytest.mark.parametrize(
    "make",
    [
        lambda local: SoftmaxRegression(6, 2, local=local),
        lambda local: SoftmaxRegression(6, 2, l2=0.1, penalise_biases=True, local=local),
        lambda local: models.get("mlp", features=6, classes=2, local=local, hidden=[3]),
        lambda local: Plain(),
    ],
)
def test_updates_are_the_same_bits_for_one_owner_alone_as_for_many(make, local: LocalTraining) -> None:
    _, _, x, y, offsets = problem(2)
    model, pool = make(local), Pool(x, y, offsets)
    start = np.random.default_rng(1).normal(size=dimension(model))
    together = updates(model, start, pool, streams())
    if isinstance(model, SoftmaxRegression) and local.is_gradient:
        assert np.array_equal(together, fedsgd(model, start, x, y, offsets))
    else:
        assert np.array_equal(together, start - train_many(model, start, pool, streams()))
    assert np.array_equal(together, updates(model, start, list(pool), streams()))
    for k, owner in enumerate(OWNERS):
        own = [Records(np.asfortranarray(pool[k].x), pool[k].y)]  # read from a file of columns, say
        assert np.array_equal(updates(model, start, own, streams([owner])), together[[k]])


def test_another_rate_is_the_same_model_otherwise() -> None:
    _, _, x, y, offsets = problem(2)
    made = [
        SoftmaxRegression(6, 2, l2=0.1, local=STEPS),
        models.get("mlp", features=6, classes=2, local=STEPS, hidden=[3]),
        Plain(),
    ]
    for model in made:
        slower = at_rate(model, 0.05)
        assert slower.local == replace(STEPS, learning_rate=0.05)
        assert model.local is STEPS
        fresh = Plain(slower.local) if isinstance(model, Plain) else replace(model, local=slower.local)
        found, expected = (
            updates(each, np.ones(dimension(model)), Pool(x, y, offsets), streams()) for each in (slower, fresh)
        )
        assert np.array_equal(found, expected)
        with pytest.raises(InvalidInput, match="learning_rate"):
            at_rate(model, 0.0)
    with pytest.raises(InvalidInput, match="local"):
        at_rate(Plain(None), 0.1)
