"""A data set as arrays, and the few steps that turn raw columns into features.

Scaling statistics come from the training records only; what is learned from test records would leak into
training. What would break a comparison: another split. Splits are drawn from fixed seeds, so a name means the
same records everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.errors import InvalidInput

__all__ = ["DataSet", "one_hot", "standardised", "stratified_split"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test records with integer classes; arrays are read-only."""

    name: str
    x_train: FloatArray
    y_train: IntArray
    x_test: FloatArray
    y_test: IntArray
    classes: tuple[str, ...]
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise InvalidInput("classes", self.classes, "at least two")
        for part in ("train", "test"):
            x = np.ascontiguousarray(getattr(self, f"x_{part}"), dtype=np.float64).view()
            y = np.asarray(getattr(self, f"y_{part}"))
            if x.ndim != 2 or 0 in x.shape:
                raise InvalidInput(f"x_{part}", x.shape, "a table of one or more records and features")
            if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
                raise InvalidInput(f"y_{part}", f"{y.dtype} {y.shape}", f"{len(x)} whole numbers")
            if y.min() < 0 or y.max() >= len(self.classes):
                raise InvalidInput(f"y_{part}", (y.min(), y.max()), f"classes from 0 to {len(self.classes) - 1}")
            if not np.isfinite(x).all():
                raise InvalidInput(f"x_{part}", "NaN or infinity", "finite numbers")
            y = y.astype(np.int64)
            x.flags.writeable = y.flags.writeable = False
            object.__setattr__(self, f"x_{part}", x)
            object.__setattr__(self, f"y_{part}", y)
        if self.x_train.shape[1] != self.x_test.shape[1]:
            raise InvalidInput("x_test", self.x_test.shape, f"{self.x_train.shape[1]} features, as in x_train")

    @property
    def features(self) -> int:
        """Values per record."""
        return int(self.x_train.shape[1])

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)


def stratified_split(labels: ArrayLike, *, test_share: float, seed: int) -> tuple[IntArray, IntArray]:
    """Shuffled record indices for training and test with (nearly) equal class shares."""
    labels = np.asarray(labels)
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cut = round(len(members) * test_share)
        test.append(members[:cut])
        train.append(members[cut:])
    return rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))


def standardised(x_train: FloatArray, x_test: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Both less the training records' mean, divided by their deviation; a constant becomes zero."""
    mean, deviation = x_train.mean(axis=0), x_train.std(axis=0)
    deviation[deviation == 0] = 1.0
    return (x_train - mean) / deviation, (x_test - mean) / deviation


def one_hot(values: NDArray[np.str_], categories: NDArray[np.str_]) -> FloatArray:
    """A column for each of the sorted categories; a value that is none of them gets zeros."""
    codes = np.minimum(np.searchsorted(categories, values), len(categories) - 1)
    encoded = np.zeros((len(values), len(categories)))
    encoded[np.arange(len(values)), codes] = categories[codes] == values
    return encoded
