"""Data sets by name.

| name | records | features | classes | files |
| --- | --- | --- | --- | --- |
| breast-cancer | 398 + 171 | 30 | 2 | none (in scikit-learn) |
| digits | 1,258 + 539 | 64 | 10 | none (in scikit-learn) |
| nsl-kdd | 125,973 + 22,544 | 122 | 5 | KDDTrain+.txt, KDDTest+.txt |
| bank-marketing | 32,950 + 8,238 | 62 | 2 | bank-additional-full.csv |
| mnist, fashion-mnist | 60,000 + 10,000 | 784 | 10 | four idx files |
| cifar10 | 10,000 + 2,000 (subset) | 3,072 | 10 | cifar10_subset_10k_2k.npz or cifar-10-binary.tar.gz |

Files may be gzipped. They are looked for in `data_dir/<name>`, `data_dir`, the same under the directory that
FLMARKET_DATA names, then in the cache (FLMARKET_CACHE, or the user's cache directory), then downloaded.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from flmarket.learning.data import bank_marketing, bundled, cifar10, images, nsl_kdd
from flmarket.learning.data.base import DataSet
from flmarket.learning.data.files import Locator
from flmarket.registry import Registry

__all__ = ["DataSet", "load", "names"]

_registry: Registry[DataSet] = Registry("data set")
_registry.register("breast-cancer", bundled.breast_cancer)
_registry.register("digits", bundled.digits)
_registry.register("nsl-kdd", nsl_kdd.load)
_registry.register("bank-marketing", bank_marketing.load)
_registry.register("mnist", images.mnist)
_registry.register("fashion-mnist", images.fashion_mnist)
_registry.register("cifar10", cifar10.load)

names = _registry.names


def load(name: str, data_dir: str | PathLike[str] | None = None, download: bool = True) -> DataSet:
    """The data set called `name`; `data_dir` is looked in first, `download=False` keeps off the network."""
    directory = None if data_dir is None else Path(data_dir).expanduser()
    return _registry.get(name, locator=Locator(directory, download))
