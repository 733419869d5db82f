"""Models that clients train at home, many clients in one call: what the engines need of a model, whatever computes it.

A `LocalModel` turns flat parameter vectors and every client's records into the parameters each client ends with.
Records come as a `DataSet` has them (one flat row of features each), so an image model reshapes inside. It is a value:
parameters are passed in and handed back, never held, and all randomness comes from the generators given, one a client,
so a client's result does not depend on who else is present.

`SoftmaxTrainer` is softmax regression by mini-batch gradient descent with momentum, in NumPy. Momentum starts from
zero in every call: a round begins where the last one ended, without its velocity.

What would break it: the trained parameters reveal records. They are an intermediate value, never a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.errors import InvalidInput
from flmarket.learning.models import SoftmaxRegression
from flmarket.learning.updates import visits

__all__ = ["LocalModel", "SoftmaxTrainer", "check_descent", "checked_clients", "checked_parameters"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@runtime_checkable
class LocalModel(Protocol):
    """Local training and evaluation of m clients at once; all parameters are float64 and flat."""

    @property
    def dimension(self) -> int:
        """p, the length of a parameter vector."""

    def initial(self, rng: np.random.Generator) -> FloatArray:
        """Where training starts, shape (p,)."""

    def train(
        self,
        parameters: ArrayLike,
        xs: Sequence[FloatArray],
        ys: Sequence[IntArray],
        rngs: Sequence[np.random.Generator],
    ) -> FloatArray:
        """Each client's parameters after local training, (m, p), from a common start (p,) or her own (m, p).

        xs[i] (records, features), ys[i] (records,) and rngs[i] belong to client i; sizes may differ.
        """

    def accuracy(self, parameters: ArrayLike, x: FloatArray, y: IntArray) -> FloatArray:
        """Share of the records that each of k parameter vectors (k, p) gets right, shape (k,)."""

    def loss(self, parameters: ArrayLike, x: FloatArray, y: IntArray) -> FloatArray:
        """Mean loss of each of k parameter vectors (k, p), shape (k,)."""


@dataclass(frozen=True)
class SoftmaxTrainer:
    """Softmax regression as a `LocalModel`; give `epochs` (passes over a client's records) or `steps`, not both.

    A client with no more records than a batch uses all of them at every step. An epoch drops the rest that fills no
    batch, as `fedavg` does.
    """

    features: int
    classes: int
    learning_rate: float = 0.1
    momentum: float = 0.9
    batch_size: int = 32
    epochs: int | None = None
    steps: int | None = None
    l2: float = 0.0

    def __post_init__(self) -> None:
        check_descent(self.learning_rate, self.momentum, self.batch_size, epochs=self.epochs, steps=self.steps)
        self.model  # noqa: B018 - its own checks, before anything runs

    @property
    def model(self) -> SoftmaxRegression:
        """The regression that is trained."""
        return SoftmaxRegression(self.features, self.classes, self.l2)

    @property
    def dimension(self) -> int:
        """p."""
        return self.model.dimension

    def initial(self, rng: np.random.Generator) -> FloatArray:
        """All zeros: the loss is convex, so the start does not matter and nothing is drawn."""
        del rng
        return self.model.initial()

    def train(
        self,
        parameters: ArrayLike,
        xs: Sequence[FloatArray],
        ys: Sequence[IntArray],
        rngs: Sequence[np.random.Generator],
    ) -> FloatArray:
        """Each client's parameters after local training; see `LocalModel.train`."""
        sizes = checked_clients(xs, ys, rngs, features=self.features, classes=self.classes)
        local = checked_parameters(parameters, self.dimension, clients=len(sizes))
        batch = np.minimum(sizes, self.batch_size)
        steps = np.full(len(sizes), self.steps) if self.epochs is None else self.epochs * (sizes // batch)
        for size, count in sorted({*zip(batch.tolist(), steps.tolist(), strict=True)}):  # those who can step together
            alike = np.flatnonzero((batch == size) & (steps == count)).tolist()
            rows = np.stack([visits(rngs[i], int(sizes[i]), count, size) for i in alike], axis=1)
            local[alike] = self._descend(local[alike], [xs[i] for i in alike], [ys[i] for i in alike], rows)
        return local

    def _descend(
        self, start: FloatArray, xs: Sequence[FloatArray], ys: Sequence[IntArray], rows: IntArray
    ) -> FloatArray:
        """`rows` (steps, clients, batch) says which records each step of each client uses."""
        model, local, velocity = self.model, start, np.zeros_like(start)
        for visited in rows:
            x = np.stack([own[chosen] for own, chosen in zip(xs, visited, strict=True)])
            y = np.stack([own[chosen] for own, chosen in zip(ys, visited, strict=True)])
            velocity = self.momentum * velocity + model.block_gradients(local, x, y)
            local = local - self.learning_rate * velocity
        return local

    def accuracy(self, parameters: ArrayLike, x: FloatArray, y: IntArray) -> FloatArray:
        """Share of the records that each parameter vector gets right, (k,)."""
        rows, outputs = checked_parameters(parameters, self.dimension), self.model.outputs
        self.model.check(rows[0], x, y)
        # one product for all of them: the records are read once, not once for each
        weights, biases = rows[:, : outputs * self.features], rows[:, outputs * self.features :]
        scores = (x @ weights.reshape(-1, self.features).T).reshape(len(y), len(rows), outputs) + biases
        guessed = scores[..., 0] > 0 if outputs == 1 else scores.argmax(axis=-1)
        return np.asarray((guessed == y[:, None]).mean(axis=0))

    def loss(self, parameters: ArrayLike, x: FloatArray, y: IntArray) -> FloatArray:
        """Mean cross-entropy of each parameter vector, (k,)."""
        return np.array([self.model.loss(row, x, y) for row in checked_parameters(parameters, self.dimension)])


def check_descent(
    learning_rate: float, momentum: float, batch_size: int, *, epochs: int | None, steps: int | None
) -> None:
    """A typed error unless these describe mini-batch descent with momentum for so many epochs or steps."""
    if not (np.isfinite(learning_rate) and learning_rate > 0):
        raise InvalidInput("learning_rate", learning_rate, "a finite number above 0")
    if not 0 <= momentum < 1:
        raise InvalidInput("momentum", momentum, "a number from 0 to below 1")
    for name, value in (("batch_size", batch_size), ("epochs", epochs), ("steps", steps)):
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidInput(name, value, "a whole number of at least 1")
    if (epochs is None) == (steps is None):
        raise InvalidInput("epochs, steps", (epochs, steps), "one of the two")


def checked_parameters(parameters: ArrayLike, dimension: int, *, clients: int | None = None) -> FloatArray:
    """Finite parameter vectors (k, p) as a fresh array; a single (p,) is repeated for `clients`."""
    array = np.array(parameters, dtype=np.float64)
    rows = 1 if array.ndim == 1 else len(array)
    count = rows if clients is None else clients
    if array.ndim not in (1, 2) or array.shape[-1] != dimension or (array.ndim == 2 and rows != count):
        raise InvalidInput("parameters", array.shape, f"({dimension},) or ({count}, {dimension})")
    if not np.isfinite(array).all():
        raise InvalidInput("parameters", array[~np.isfinite(array)][0], "finite numbers")
    return np.array(np.broadcast_to(array, (count, dimension)))


def checked_clients(
    xs: Sequence[FloatArray],
    ys: Sequence[IntArray],
    rngs: Sequence[np.random.Generator],
    *,
    features: int,
    classes: int,
) -> IntArray:
    """Records per client, or a typed error if what was given does not belong together."""
    if not len(xs) == len(ys) == len(rngs) >= 1:
        raise InvalidInput("clients", (len(xs), len(ys), len(rngs)), "equally many xs, ys and rngs, at least one")
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if x.ndim != 2 or x.shape[1] != features or not len(x):
            raise InvalidInput(f"xs[{i}]", x.shape, f"one or more records of {features} features")
        if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
            raise InvalidInput(f"ys[{i}]", f"{y.dtype} {y.shape}", f"{len(x)} whole numbers, one a record")
        if y.min() < 0 or y.max() >= classes:
            raise InvalidInput(f"ys[{i}]", (y.min(), y.max()), f"classes from 0 to {classes - 1}")
    return np.array([len(y) for y in ys])
