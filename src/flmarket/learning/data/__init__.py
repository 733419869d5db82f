"""A data set as arrays, with all that turned raw columns into them: scaling, categories, names of features and classes.

A model that learned from these features is of use only with the same `Encoding`, so it is part of the value. Scaling
comes from the training records only; what is learned from test records would leak into training. What would break a
comparison: another split. Splits are drawn from fixed seeds, so a name means the same records everywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import InvalidInput
from flmarket.learning.predict import one_hot

__all__ = ["DataSet", "Encoding", "Pool", "Records", "Scaling", "Table", "stratified_split"]

Table = Mapping[str, NDArray[Any]] | NDArray[np.void]  # columns by name
Scaling = Literal["standard", "unit", "none"]


@dataclass(frozen=True, eq=False)
class Encoding:
    """Raw columns to features: each number less its `offset` over its `scale`, then a column for every category.

    `clipped` keeps scaled numbers within 0 and 1. A value that is none of the categories gets zeros.
    """

    numbers: tuple[str, ...]
    offset: FloatArray
    scale: FloatArray
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    clipped: bool = False

    @classmethod
    def fit(
        cls, table: Table, numbers: Iterable[str], categories: Mapping[str, Sequence[str]], scaling: Scaling
    ) -> "Encoding":
        """Scaling by these records: "standard" to mean 0 and deviation 1, "unit" to the range 0 to 1, or "none"."""
        names = tuple(numbers)
        known = {name: tuple(map(str, sorted(values))) for name, values in categories.items()}
        raw = _stacked(table, names)
        offset, scale = np.zeros(len(names)), np.ones(len(names))
        if scaling == "standard":
            offset, scale = raw.mean(axis=0), raw.std(axis=0)
        elif scaling == "unit":
            offset = raw.min(axis=0)
            scale = raw.max(axis=0) - offset
        scale[scale == 0] = 1.0  # a constant becomes zero
        return cls(names, offset, scale, known, clipped=scaling == "unit")

    @classmethod
    def even(cls, names: Sequence[str], scale: float = 1.0) -> "Encoding":
        """All columns divided by one number, as the pixels of an image."""
        return cls(tuple(names), np.zeros(len(names)), np.full(len(names), scale))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features, in order."""
        return self.numbers + tuple(f"{name}={value}" for name, known in self.categories.items() for value in known)

    def encode(self, table: Table) -> FloatArray:
        """Features (records, features) of raw columns."""
        scaled = (_stacked(table, self.numbers) - self.offset) / self.scale
        if self.clipped:
            np.clip(scaled, 0.0, 1.0, out=scaled)
        columns = [one_hot(table[name], known) for name, known in self.categories.items()]
        return np.concatenate([scaled, *columns], axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "numbers": list(self.numbers),
            "offset": self.offset.tolist(),
            "scale": self.scale.tolist(),
            "categories": {name: list(known) for name, known in self.categories.items()},
            "clipped": self.clipped,
        }


@dataclass(frozen=True, eq=False)
class Records:
    """What one owner trains on, or a model is tested with: features (n, f) and classes (n,)."""

    x: FloatArray
    y: IntArray

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Pool(Sequence[Records]):
    """Many owners' records, one after the other: owner k's are the rows from offsets[k] to offsets[k + 1]."""

    x: FloatArray
    y: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        bounds = np.asarray(self.offsets)
        if bounds.ndim != 1 or bounds.size < 2 or not np.issubdtype(bounds.dtype, np.integer):
            raise InvalidInput("offsets", self.offsets, "whole numbers, one more than there are owners")
        if bounds[0] != 0 or bounds[-1] != len(self.y):
            raise InvalidInput("offsets", (bounds[0], bounds[-1]), f"offsets from 0 to the {len(self.y)} records")
        bad = np.flatnonzero(np.diff(bounds) < 1)
        if bad.size:
            raise InvalidInput("offsets", f"no records for owner {bad[0]}", "at least one record for each owner")
        object.__setattr__(self, "offsets", bounds.astype(np.int64))

    @classmethod
    def of(cls, owners: Sequence[Records]) -> "Pool":
        """The same owners' records in one table; a pool stays as it is."""
        if isinstance(owners, Pool):
            return owners
        if not owners:
            raise InvalidInput("data", "nobody", "the records of at least one owner")
        shapes = {own.x.shape[1:] for own in owners}
        if len(shapes) > 1 or any(own.y.shape != own.x.shape[:1] for own in owners):
            raise InvalidInput("data", shapes, "equally many features for all owners, and a class for each record")
        bounds = np.cumsum([0, *(len(own) for own in owners)])
        if len(owners) == 1:  # a view: nothing to copy
            return cls(owners[0].x, owners[0].y, bounds)
        return cls(np.concatenate([own.x for own in owners]), np.concatenate([own.y for own in owners]), bounds)

    @property
    def sizes(self) -> IntArray:
        """Records of each owner."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Records: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Records]: ...
    def __getitem__(self, index: int | slice) -> Records | Sequence[Records]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = range(len(self))[index]
        own = slice(self.offsets[k], self.offsets[k + 1])
        return Records(self.x[own], self.y[own])


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test records with integer classes; arrays are read-only.

    Features are numbers in a flat row for each record; `shape` says what a row is (an image's height, width and
    channels), for models that need to know. `encoding` is None where nobody knows how the features came about.
    `validation` are records that choose among models, and neither train nor test any.
    """

    name: str
    x_train: FloatArray
    y_train: IntArray
    x_test: FloatArray
    y_test: IntArray
    classes: tuple[str, ...]
    source: str = ""
    licence: str = ""
    encoding: Encoding | None = None
    shape: tuple[int, ...] = ()
    validation: Records | None = None

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
        if self.encoding is not None and len(self.encoding.features) != self.features:
            raise InvalidInput("encoding", f"{len(self.encoding.features)} features", f"{self.features}, as in x_train")
        if self.shape and int(np.prod(self.shape)) != self.features:
            raise InvalidInput("shape", self.shape, f"a shape of {self.features} values")

    @property
    def features(self) -> int:
        """Values per record."""
        return int(self.x_train.shape[1])

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What the features are called; numbered where nobody named them."""
        return tuple(f"x{i}" for i in range(self.features)) if self.encoding is None else self.encoding.features

    @property
    def baseline_accuracy(self) -> float:
        """Test accuracy of always answering the most frequent class of the training records."""
        return float(np.mean(self.y_test == np.bincount(self.y_train).argmax()))

    def centred(self, at: float) -> "DataSet":
        """The same with one number taken from every feature; the encoding says so. What is common to all records then
        takes less of a gradient that is clipped."""
        if not np.isfinite(at):
            raise InvalidInput("centre", at, "a finite number")
        if self.encoding is not None and (self.encoding.categories or self.encoding.clipped):
            raise InvalidInput("centre", at, "data of numbers alone, that are not clipped")
        encoding = self.encoding
        if encoding is not None:
            encoding = replace(encoding, offset=encoding.offset + at * encoding.scale)
        held = None if self.validation is None else Records(self.validation.x - at, self.validation.y)
        return replace(self, x_train=self.x_train - at, x_test=self.x_test - at, encoding=encoding, validation=held)

    def holding_out(self, count: int, rng: np.random.Generator) -> "DataSet":
        """The same with `count` of its test records put aside as `validation`, drawn at random."""
        if not 1 <= count < len(self.y_test):
            raise InvalidInput("validation", count, f"from 1 to {len(self.y_test) - 1}, fewer than the test records")
        order = rng.permutation(len(self.y_test))
        kept, aside = np.sort(order[count:]), np.sort(order[:count])
        held = Records(self.x_test[aside], self.y_test[aside])
        return replace(self, x_test=self.x_test[kept], y_test=self.y_test[kept], validation=held)

    @property
    def train(self) -> Records:
        """The training records."""
        return Records(self.x_train, self.y_train)

    @property
    def test(self) -> Records:
        """The test records."""
        return Records(self.x_test, self.y_test)


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


def _stacked(table: Table, names: Sequence[str]) -> FloatArray:
    if not names:
        first = next(iter(table.values())) if isinstance(table, Mapping) else table
        return np.empty((len(first), 0))
    return np.stack([table[name] for name in names], axis=1).astype(np.float64, copy=False)
