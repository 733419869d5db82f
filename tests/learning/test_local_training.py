"""Softmax regression trained by many owners at once, against a plain loop over owners and steps."""

import numpy as np
import pytest

from flmarket.errors import ConfigError, InvalidInput
from flmarket.learning import (
    LocalTraining,
    Model,
    Records,
    SoftmaxRegression,
    accuracies,
    from_named,
    load_parameters,
    save_parameters,
    to_named,
    train_many,
)
from flmarket.learning.model import visits

SIZES = (40, 7, 40, 25)


def clients(seed=0, features=5, classes=3):
    rng = np.random.default_rng(seed)
    return [Records(rng.normal(size=(size, features)), rng.integers(0, classes, size)) for size in SIZES]


def trainer(**local):
    return SoftmaxRegression(5, 3, local=LocalTraining(**{"momentum": 0.9, "batch_size": 32} | local))


def generators():
    return [np.random.default_rng((9, i)) for i in range(len(SIZES))]


@pytest.mark.parametrize("amount", [{"epochs": 2}, {"steps": 7}])
@pytest.mark.parametrize("common", [True, False])
def test_training_equals_a_loop(amount, common):
    model = trainer(learning_rate=0.2, momentum=0.8, batch_size=8, **amount)
    start = np.random.default_rng(1).normal(size=(4, model.dimension))
    start = start[0] if common else start
    found = model.train_many(start, clients(), generators())
    for i, (own, rng) in enumerate(zip(clients(), generators(), strict=True)):
        theta, velocity = (start if common else start[i]).copy(), 0.0
        batch = min(8, len(own))
        for rows in visits(rng, len(own), amount.get("steps") or amount["epochs"] * (len(own) // batch), batch):
            velocity = 0.8 * velocity + model.block_gradients(theta, own.x[None, rows], own.y[None, rows])[0]
            theta = theta - 0.2 * velocity
        np.testing.assert_allclose(found[i], theta, rtol=1e-10, atol=1e-12)


def test_an_owner_is_the_same_bits_alone_and_together():
    model = trainer(epochs=3, batch_size=8)
    start = np.random.default_rng(3).normal(size=model.dimension)
    together = model.train_many(start, clients(), generators())
    own_starts = model.train_many(np.broadcast_to(start, (4, len(start))), clients(), generators())
    np.testing.assert_array_equal(together, own_starts)
    for own, rng, result in zip(clients(), generators(), together, strict=True):
        np.testing.assert_array_equal(model.train(start, own, rng), result)


class Plain:
    """A model with the four things that a model must have, and no more."""

    tensors = {"weights": (3, 5), "biases": (3,)}  # noqa: RUF012

    def __init__(self):
        self.inner = trainer(steps=2)
        self.initial, self.train, self.evaluate = self.inner.initial, self.inner.train, self.inner.evaluate


def test_a_model_without_the_batched_ways_works_too():
    plain = Plain()
    assert isinstance(plain, Model)
    ends = train_many(plain, np.zeros(18), clients(), generators())
    np.testing.assert_array_equal(ends, plain.inner.train_many(np.zeros(18), clients(), generators()))
    np.testing.assert_array_equal(accuracies(plain, ends, clients()[0]), accuracies(plain.inner, ends, clients()[0]))


def test_it_learns_and_measures_many_at_once():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 5))
    data = Records(x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1))
    model = trainer(epochs=20)
    assert isinstance(model, Model)
    start = model.initial(rng)
    end = model.train(start, data, rng)
    accuracy = accuracies(model, [start, end], data)
    assert accuracy.shape == (2,)
    assert accuracy[1] > 0.8 > accuracy[0]
    before, after = model.evaluate(start, data), model.evaluate(end, data)
    assert before["loss"] == pytest.approx(np.log(3))
    assert after["loss"] < 0.5
    assert after["accuracy"] == accuracy[1]
    assert 0.5 < after["balanced_accuracy"] <= 1


@pytest.mark.parametrize("classes", [2, 4])
def test_accuracies_equal_the_models_own(classes):
    rng = np.random.default_rng(classes)
    model, data = SoftmaxRegression(6, classes), Records(rng.normal(size=(50, 6)), rng.integers(0, classes, 50))
    rows = rng.normal(size=(7, model.dimension))
    expected = [model.evaluate(row, data)["accuracy"] for row in rows]
    np.testing.assert_allclose(accuracies(model, rows, data), expected)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1, "steps": 2}, "epochs, steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"momentum": 1.0}, "momentum"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": np.nan}, "learning_rate"),
        ({"optimizer": "adagrad"}, "optimizer"),
        ({"optimizer": "adam", "momentum": 0.5}, "optimizer"),
    ],
)
def test_bad_settings_are_refused(changes, field):
    with pytest.raises(InvalidInput, match=field):
        LocalTraining(**changes)
    with pytest.raises(InvalidInput, match="optimizer"):
        SoftmaxRegression(5, 3, local=LocalTraining(optimizer="adam"))


@pytest.mark.parametrize("broken", ["features", "labels", "classes", "generators", "parameters", "nan", "nobody"])
def test_bad_input_is_refused(broken):
    model, data, rngs = trainer(epochs=1), clients(), generators()
    start = np.zeros(model.dimension)
    if broken == "features":
        data[1] = Records(data[1].x[:, :4], data[1].y)
    elif broken == "labels":
        data[2] = Records(data[2].x, data[2].y[:-1])
    elif broken == "classes":
        data[0] = Records(data[0].x, data[0].y + 1)
    elif broken == "generators":
        rngs = rngs[:-1]
    elif broken == "parameters":
        start = np.zeros((3, model.dimension))
    elif broken == "nobody":
        data = rngs = []
    else:
        start[0] = np.nan
    with pytest.raises(InvalidInput):
        model.train_many(start, data, rngs)


# --- named arrays ---------------------------------------------------------------------------------------------------


def test_parameters_travel_by_name(tmp_path):
    model = SoftmaxRegression(5, 3)
    flat = np.random.default_rng(0).normal(size=model.dimension)
    named = to_named(model, flat)
    assert {name: part.shape for name, part in named.items()} == model.tensors
    np.testing.assert_array_equal(named["weights"].ravel(), flat[:15])
    np.testing.assert_array_equal(from_named(model, dict(reversed(named.items()))), flat)
    save_parameters(model, flat, tmp_path / "model.safetensors", {"task": "t1"})
    np.testing.assert_array_equal(load_parameters(model, tmp_path / "model.safetensors"), flat)


def test_names_that_are_not_the_models_own_are_refused(tmp_path):
    model = SoftmaxRegression(5, 3)
    named = to_named(model, np.zeros(18))
    for wrong, complaint in (
        ({"weights": named["weights"]}, "tensors"),
        (named | {"more": np.zeros(1)}, "tensors"),
        (named | {"biases": np.zeros(4)}, "biases"),
        (named | {"biases": np.full(3, np.inf)}, "finite"),
        (named | {"biases": ["a", "b", "c"]}, "biases"),
    ):
        with pytest.raises(InvalidInput, match=complaint):
            from_named(model, wrong)
    with pytest.raises(InvalidInput, match="parameters"):
        to_named(model, np.zeros(17))
    (tmp_path / "broken.safetensors").write_bytes(b"no model")
    for name in ("broken.safetensors", "missing.safetensors"):
        with pytest.raises(ConfigError, match="model file"):
            load_parameters(model, tmp_path / name)
