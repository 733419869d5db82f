"""Data sets by name, from one's own files, or from one's own code.

| name | records | features | classes | files |
| --- | --- | --- | --- | --- |
| breast-cancer | 398 + 171 | 30 | 2 | none (in scikit-learn) |
| digits | 1,258 + 539 | 64 | 10 | none (in scikit-learn) |
| nsl-kdd | 125,973 + 22,544 | 122 | 5 | KDDTrain+.txt, KDDTest+.txt |
| bank-marketing | 32,950 + 8,238 | 62 | 2 | bank-additional-full.csv |
| mnist, fashion-mnist | 60,000 + 10,000 | 784 | 10 | four idx files |
| emnist | 112,800 + 18,800 | 784 | 47 | four idx files of the balanced split; not downloaded |
| cifar10 | 10,000 + 2,000 (subset) | 3,072 | 10 | cifar10_subset_10k_2k.npz or cifar-10-binary.tar.gz |

Files may be gzipped. They are looked for in `data_dir/<name>`, `data_dir`, the same under the directory that
FLMARKET_DATA names, then in the cache (FLMARKET_CACHE, or the user's cache directory), then downloaded.

A loader of one's own (`register`, an entry point in the group `flmarket.data`, or `package.module:load`) takes nothing,
or a `locator`, and returns a `DataSet`, or (training, test), each (x, y) as arrays or any PyTorch `Dataset` of pairs.

The two that come inside scikit-learn's wheel need no download, so the demo uses them. Breast Cancer Wisconsin
(Diagnostic) is standardised; Digits' pixels, 0 to 16, are scaled to [0, 1]. Both are split 70/30 by class with a fixed
seed, since neither has a split of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.errors import InvalidInput, MissingDependency
from flmarket.learning.data import DataSet, Encoding, FloatArray, IntArray, images, stratified_split, tables
from flmarket.learning.data.files import Locator
from flmarket.learning.data.tables import from_files
from flmarket.registry import Registry

__all__ = ["DataSet", "about", "admit", "as_data_set", "from_files", "load", "names", "register"]

SPLIT_SEED = 20_220
TEST_SHARE = 0.3

_registry: Registry[Any] = Registry("data set", "flmarket.data", offers=("locator",))
names = _registry.names
register = _registry.register
admit = _registry.admit
about = _registry.about


def load(name: str, data_dir: str | PathLike[str] | None = None, download: bool = True) -> DataSet:
    """The data set called `name`; `data_dir` is looked in first, `download=False` keeps off the network."""
    directory = None if data_dir is None else Path(data_dir).expanduser()
    return as_data_set(name, _registry.get(name, locator=Locator(directory, download)))


def as_data_set(name: str, loaded: Any, classes: Sequence[str] | None = None) -> DataSet:
    """What a loader returned, as a `DataSet`: one already, or (training, test) as arrays or PyTorch data sets."""
    if isinstance(loaded, DataSet):
        return loaded
    try:
        (x_train, y_train), (x_test, y_test) = (_arrays(part) for part in loaded)
    except (TypeError, ValueError) as error:
        raise InvalidInput(name, type(loaded).__name__, f"a DataSet, or (training, test) records ({error})") from None
    known = classes or getattr(loaded[0], "classes", None)
    most = int(max(y_train.max(initial=0), y_test.max(initial=0))) + 1
    return DataSet(
        name,
        x_train.reshape(len(x_train), -1),
        y_train,
        x_test.reshape(len(x_test), -1),
        y_test,
        classes=tuple(map(str, range(most) if known is None else known)),
        shape=x_train.shape[1:] if x_train.ndim > 2 else (),
    )


def _arrays(part: Any) -> tuple[FloatArray, IntArray]:
    """Features and classes of (x, y), or of anything that has a length and (x, y) items."""
    if isinstance(part, tuple) and len(part) == 2:
        x, y = part
    else:
        x, y = zip(*(part[i] for i in range(len(part))), strict=True)
        x = np.stack([np.asarray(record) for record in x])
    return np.asarray(x, dtype=np.float64), np.asarray(y)


@register("breast-cancer", about="Malignant or benign from 30 measurements of cell nuclei")
def _breast_cancer() -> DataSet:
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        raise MissingDependency("scikit-learn", "app") from None
    found = load_breast_cancer()
    features, y = [str(name) for name in found.feature_names], found.target
    train, test = stratified_split(y, test_share=TEST_SHARE, seed=SPLIT_SEED)
    columns = [dict(zip(features, found.data[rows].T, strict=True)) for rows in (train, test)]
    encoding = Encoding.fit(columns[0], features, {}, "standard")
    return DataSet(
        "breast-cancer",
        encoding.encode(columns[0]),
        y[train],
        encoding.encode(columns[1]),
        y[test],
        classes=("malignant", "benign"),
        source="Wolberg, Mangasarian, Street 1995, UCI data set 17, as bundled with scikit-learn",
        licence="CC BY 4.0",
        encoding=encoding,
    )


@register("digits", about="Ten handwritten digits of 8 by 8 pixels")
def _digits() -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependency("scikit-learn", "app") from None
    x, y = load_digits(return_X_y=True)
    train, test = stratified_split(y, test_share=TEST_SHARE, seed=SPLIT_SEED)
    return DataSet(
        "digits",
        x[train] / 16.0,
        y[train].astype(np.int64),
        x[test] / 16.0,
        y[test].astype(np.int64),
        classes=tuple("0123456789"),
        source="Alpaydin, Kaynak 1998, UCI data set 80 (test part), as bundled with scikit-learn",
        licence="CC BY 4.0",
        encoding=Encoding.even([f"{row},{column}" for row in range(8) for column in range(8)], 16.0),
        shape=(8, 8, 1),
    )


register("nsl-kdd", tables.nsl_kdd)
register("bank-marketing", tables.bank_marketing)
register("mnist", images.mnist)
register("fashion-mnist", images.fashion_mnist)
register("emnist", images.emnist)
register("cifar10", images.cifar10)
