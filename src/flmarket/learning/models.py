"""Models as flat parameter vectors, with the gradients of many owners in one call.

A model is a value: it holds its shape, never its parameters, so the same object serves buyer, broker and
owners. `SoftmaxRegression` is the convex model of the papers' experiments: logistic regression for two
classes (features + 1 parameters), softmax regression otherwise ((features + 1) · classes). Its loss is the
mean cross-entropy plus l2/2 · ‖weights‖², biases not penalised.

What would break it: features of wildly different scale (the gradient's norm then says more about units than
about data, and clipping acts on the wrong thing). The loaders in `data` scale for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from flmarket.errors import InvalidInput
from flmarket.learning.blocks import checked_offsets, equal_blocks

__all__ = ["Model", "SoftmaxRegression", "accuracy", "balanced_accuracy", "owner_gradients"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@runtime_checkable
class Model(Protocol):
    """What local training and evaluation need to know about a model."""

    @property
    def dimension(self) -> int:
        """Length of the parameter vector."""

    def initial(self) -> FloatArray:
        """Where training starts."""

    def check(self, params: ArrayLike, x: ArrayLike, y: ArrayLike) -> tuple[FloatArray, FloatArray, IntArray]:
        """The same as arrays that fit the model, or a typed error."""

    def loss(self, params: FloatArray, x: FloatArray, y: IntArray) -> float:
        """Mean loss over the records."""

    def predict(self, params: FloatArray, x: FloatArray) -> IntArray:
        """The class of each record."""

    def block_gradients(self, params: FloatArray, x: FloatArray, y: IntArray) -> FloatArray:
        """Mean gradient of each of k equally large blocks, shape (k, dimension).

        x: (k, m, features); y: (k, m); params: (dimension,) for all blocks, or (k, dimension). Already
        checked.
        """


@dataclass(frozen=True)
class SoftmaxRegression:
    """Softmax regression; parameters are the weights class by class, then the biases."""

    features: int
    classes: int
    l2: float = 0.0

    def __post_init__(self) -> None:
        if self.features < 1:
            raise InvalidInput("features", self.features, "at least 1")
        if self.classes < 2:
            raise InvalidInput("classes", self.classes, "at least 2")
        if not (np.isfinite(self.l2) and self.l2 >= 0):
            raise InvalidInput("l2", self.l2, "a finite number of at least 0")

    @property
    def outputs(self) -> int:
        """Scores per record: one decides between two classes, otherwise one for each class."""
        return 1 if self.classes == 2 else self.classes

    @property
    def dimension(self) -> int:
        """Length of the parameter vector."""
        return (self.features + 1) * self.outputs

    def initial(self) -> FloatArray:
        """All zeros: the loss is convex, so the start does not matter."""
        return np.zeros(self.dimension)

    def check(self, params: ArrayLike, x: ArrayLike, y: ArrayLike) -> tuple[FloatArray, FloatArray, IntArray]:
        """The same as arrays that fit, or a typed error. Features are not searched for NaN: too slow."""
        params, x = np.asarray(params, dtype=np.float64), np.asarray(x, dtype=np.float64)
        labels = np.asarray(y)
        if params.shape != (self.dimension,) or not np.isfinite(params).all():
            raise InvalidInput("params", params, f"{self.dimension} finite numbers")
        if x.ndim != 2 or x.shape[1] != self.features or not len(x):
            raise InvalidInput("x", x.shape, f"one or more records of {self.features} features")
        if labels.shape != (len(x),) or not np.issubdtype(labels.dtype, np.integer):
            raise InvalidInput("y", f"{labels.dtype} {labels.shape}", f"{len(x)} whole numbers, one a record")
        if labels.min() < 0 or labels.max() >= self.classes:
            raise InvalidInput("y", (labels.min(), labels.max()), f"classes from 0 to {self.classes - 1}")
        return params, x, labels.astype(np.int64, copy=False)

    def scores(self, params: FloatArray, x: FloatArray) -> FloatArray:
        """Linear scores (..., m, outputs) of records (..., m, features)."""
        weights, biases = self._split(params)
        return np.asarray(x @ np.swapaxes(weights, -1, -2) + biases[..., None, :])

    def loss(self, params: FloatArray, x: FloatArray, y: IntArray) -> float:
        """Mean cross-entropy plus the penalty."""
        params, x, y = self.check(params, x, y)
        scores = self.scores(params, x)
        if self.outputs == 1:
            losses = np.logaddexp(0.0, scores[:, 0]) - y * scores[:, 0]
        else:
            scores -= scores.max(axis=-1, keepdims=True)
            losses = np.log(np.exp(scores).sum(axis=-1)) - scores[np.arange(len(y)), y]
        weights, _ = self._split(params)
        return float(losses.mean() + 0.5 * self.l2 * np.square(weights).sum())

    def predict(self, params: FloatArray, x: FloatArray) -> IntArray:
        """The class with the highest score; a tie goes to the lower class."""
        params, x, _ = self.check(params, x, np.zeros(len(x), dtype=np.int64))
        scores = self.scores(params, x)
        return (scores[:, 0] > 0).astype(np.int64) if self.outputs == 1 else np.argmax(scores, axis=-1)

    def accuracy(self, params: FloatArray, x: FloatArray, y: IntArray) -> float:
        """Share of records whose class is predicted."""
        return accuracy(y, self.predict(params, x))

    def balanced_accuracy(self, params: FloatArray, x: FloatArray, y: IntArray) -> float:
        """Mean recall over the classes in y: rare classes count as much as common ones."""
        return balanced_accuracy(y, self.predict(params, x))

    def block_gradients(self, params: FloatArray, x: FloatArray, y: IntArray) -> FloatArray:
        """Mean gradient of each block; see `Model.block_gradients`."""
        blocks, records = y.shape
        error = self.scores(params, x)
        if self.outputs == 1:
            error = expit(error, out=error) - y[..., None]
        else:
            error -= error.max(axis=-1, keepdims=True)
            np.exp(error, out=error)
            error /= error.sum(axis=-1, keepdims=True)
            error[np.arange(blocks)[:, None], np.arange(records), y] -= 1.0
        error /= records
        gradients = np.empty((blocks, self.dimension))
        weights, biases = self._split(gradients)
        np.matmul(np.swapaxes(error, -1, -2), x, out=weights)
        error.sum(axis=-2, out=biases)
        if self.l2:
            weights += self.l2 * self._split(params)[0]
        return gradients

    def owner_gradients(self, params: FloatArray, x: FloatArray, y: IntArray, offsets: ArrayLike) -> FloatArray:
        """Mean gradient of every owner, shape (owners, dimension); records lie owner by owner."""
        return owner_gradients(self, params, x, y, offsets)

    def _split(self, params: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Views of the weights (..., outputs, features) and the biases (..., outputs)."""
        count = self.outputs * self.features
        weights = params[..., :count].reshape(*params.shape[:-1], self.outputs, self.features)
        return weights, params[..., count:]


def owner_gradients(model: Model, params: FloatArray, x: FloatArray, y: IntArray, offsets: ArrayLike) -> FloatArray:
    """Mean gradient of every owner under any model; records lie owner by owner."""
    params, x, y = model.check(params, x, y)
    bounds = checked_offsets(offsets, len(y))
    gradients = np.empty((len(bounds) - 1, model.dimension))
    for owners, x_block, y_block in equal_blocks(x, y, bounds):
        gradients[owners] = model.block_gradients(params, x_block, y_block)
    return gradients


def accuracy(truth: ArrayLike, predicted: ArrayLike) -> float:
    """Share of records that are right."""
    return float(np.mean(np.asarray(truth) == np.asarray(predicted)))


def balanced_accuracy(truth: ArrayLike, predicted: ArrayLike) -> float:
    """Mean recall over the classes that occur in `truth`."""
    truth = np.asarray(truth)
    counts = np.bincount(truth)
    right = np.bincount(truth[truth == np.asarray(predicted)], minlength=len(counts))
    return float(np.mean(right[counts > 0] / counts[counts > 0]))
