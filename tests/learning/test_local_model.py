"""Softmax regression as a `LocalModel`, against a plain loop over clients and steps."""

import numpy as np
import pytest

from flmarket import InvalidInput
from flmarket.learning import SoftmaxRegression
from flmarket.learning.local_model import LocalModel, SoftmaxTrainer
from flmarket.learning.updates import visits

SIZES = (40, 7, 40, 25)


def clients(seed=0, features=5, classes=3):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(size, features)) for size in SIZES]
    return xs, [rng.integers(0, classes, size) for size in SIZES]


def generators():
    return [np.random.default_rng((9, i)) for i in range(len(SIZES))]


@pytest.mark.parametrize("amount", [{"epochs": 2}, {"steps": 7}])
@pytest.mark.parametrize("common", [True, False])
def test_training_equals_a_loop(amount, common):
    trainer = SoftmaxTrainer(5, 3, learning_rate=0.2, momentum=0.8, batch_size=8, **amount)
    xs, ys = clients()
    model = SoftmaxRegression(5, 3)
    start = np.random.default_rng(1).normal(size=(4, trainer.dimension))
    start = start[0] if common else start
    found = trainer.train(start, xs, ys, generators())
    for i, (x, y, rng) in enumerate(zip(xs, ys, generators(), strict=True)):
        theta, velocity = (start if common else start[i]).copy(), 0.0
        batch = min(8, len(y))
        for rows in visits(rng, len(y), amount.get("steps") or amount["epochs"] * (len(y) // batch), batch):
            velocity = 0.8 * velocity + model.block_gradients(theta, x[None, rows], y[None, rows])[0]
            theta = theta - 0.2 * velocity
        np.testing.assert_allclose(found[i], theta, rtol=1e-10, atol=1e-12)


def test_a_client_does_not_depend_on_the_others():
    trainer = SoftmaxTrainer(5, 3, epochs=3, batch_size=8)
    xs, ys = clients()
    together = trainer.train(trainer.initial(np.random.default_rng(0)), xs, ys, generators())
    for i in range(4):
        alone = trainer.train(np.zeros(trainer.dimension), xs[i : i + 1], ys[i : i + 1], generators()[i : i + 1])
        np.testing.assert_allclose(alone[0], together[i], rtol=1e-12, atol=1e-15)


def test_it_learns_and_measures_many_at_once():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 5))
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)
    trainer = SoftmaxTrainer(5, 3, epochs=20)
    assert isinstance(trainer, LocalModel)
    start = trainer.initial(rng)
    end = trainer.train(start, [x], [y], [rng])[0]
    accuracy, loss = trainer.accuracy([start, end], x, y), trainer.loss([start, end], x, y)
    assert accuracy.shape == loss.shape == (2,)
    assert accuracy[1] > 0.8 > accuracy[0]
    assert loss[0] == pytest.approx(np.log(3))
    assert loss[1] < 0.5


@pytest.mark.parametrize("classes", [2, 4])
def test_accuracy_equals_the_models_own(classes):
    rng = np.random.default_rng(classes)
    trainer, x, y = SoftmaxTrainer(6, classes, steps=1), rng.normal(size=(50, 6)), rng.integers(0, classes, 50)
    rows = rng.normal(size=(7, trainer.dimension))
    expected = [trainer.model.accuracy(row, x, y) for row in rows]
    np.testing.assert_allclose(trainer.accuracy(rows, x, y), expected)
    np.testing.assert_allclose(trainer.loss(rows, x, y), [trainer.model.loss(row, x, y) for row in rows])


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": None},
        {"epochs": 1, "steps": 1},
        {"epochs": 0},
        {"batch_size": 0},
        {"momentum": 1.0},
        {"learning_rate": 0.0},
        {"learning_rate": np.nan},
    ],
)
def test_bad_settings_are_refused(changes):
    with pytest.raises(InvalidInput):
        SoftmaxTrainer(5, 3, **{"epochs": 1} | changes)


@pytest.mark.parametrize("broken", ["features", "labels", "classes", "generators", "parameters", "nan"])
def test_bad_input_is_refused(broken):
    trainer = SoftmaxTrainer(5, 3, epochs=1)
    (xs, ys), rngs, start = clients(), generators(), np.zeros(trainer.dimension)
    if broken == "features":
        xs[1] = xs[1][:, :4]
    elif broken == "labels":
        ys[2] = ys[2][:-1]
    elif broken == "classes":
        ys[0] = ys[0] + 1
    elif broken == "generators":
        rngs = rngs[:-1]
    elif broken == "parameters":
        start = np.zeros((3, trainer.dimension))
    else:
        start[0] = np.nan
    with pytest.raises(InvalidInput):
        trainer.train(start, xs, ys, rngs)
