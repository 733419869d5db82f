"""MNIST and Fashion-MNIST: 60,000 + 10,000 images of 28 by 28 pixels in ten classes, in the idx format.

LeCun, Bottou, Bengio, Haffner, Gradient-Based Learning Applied to Document Recognition, 1998; Xiao, Rasul,
Vollgraf, Fashion-MNIST, arXiv:1708.07747. Pixels are divided by 255 and flattened to 784 features.

What would break it: the two sets have the same file names, so the wrong directory would load without a
complaint. The small label files are therefore hashed, and those of the sister set are refused.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import ConfigError
from flmarket.learning.data.base import DataSet
from flmarket.learning.data.files import Locator, RemoteFile, Source, read_bytes

__all__ = ["FASHION_MNIST", "MNIST", "fashion_mnist", "mnist"]

TRAIN_X, TRAIN_Y = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_X, TEST_Y = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def _source(name: str, home: str, checksums: dict[str, str]) -> Source:
    return Source(name, tuple(RemoteFile(file, digest, f"{home}{file}.gz") for file, digest in checksums.items()))


MNIST = _source(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        TRAIN_X: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        TRAIN_Y: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        TEST_X: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        TEST_Y: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
FASHION_MNIST = _source(
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # no https there; the checksums protect
    {
        TRAIN_X: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        TRAIN_Y: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        TEST_X: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        TEST_Y: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def mnist(locator: Locator) -> DataSet:
    """Handwritten digits."""
    return _load(
        locator,
        MNIST,
        not_to_be=FASHION_MNIST,
        classes=tuple("0123456789"),
        citation="MNIST, LeCun, Cortes, Burges",
        licence="unstated; often given as CC BY-SA 3.0",
    )


def fashion_mnist(locator: Locator) -> DataSet:
    """Pieces of clothing."""
    return _load(
        locator,
        FASHION_MNIST,
        not_to_be=MNIST,
        classes=_FASHION_CLASSES,
        citation="Fashion-MNIST, Zalando Research",
        licence="MIT, copyright 2017 Zalando SE",
    )


def _load(
    locator: Locator,
    source: Source,
    *,
    not_to_be: Source,
    classes: tuple[str, ...],
    citation: str,
    licence: str,
) -> DataSet:
    paths = locator.locate(source)
    labels = {name: read_bytes(paths[name]) for name in (TRAIN_Y, TEST_Y)}
    sister = {file.name: file.sha256 for file in not_to_be.files}
    for name, content in labels.items():
        if hashlib.sha256(content).hexdigest() == sister[name]:
            raise ConfigError(str(paths[name]), f"the labels of {not_to_be.name}", f"those of {source.name}")
    y = {name: idx(content, paths[name], dimensions=1) for name, content in labels.items()}
    x = {name: idx(read_bytes(paths[name]), paths[name], dimensions=3) for name in (TRAIN_X, TEST_X)}
    for images, names in ((TRAIN_X, TRAIN_Y), (TEST_X, TEST_Y)):
        if x[images].shape[1:] != (28, 28) or len(x[images]) != len(y[names]) or not len(y[names]):
            raise ConfigError(str(paths[images]), x[images].shape, f"({len(y[names])}, 28, 28), one image a label")
        if y[names].max() >= len(classes):
            raise ConfigError(str(paths[names]), y[names].max(), f"labels from 0 to {len(classes) - 1}")
    return DataSet(
        source.name,
        x[TRAIN_X].reshape(-1, 784) / 255.0,
        y[TRAIN_Y].astype(np.int64),
        x[TEST_X].reshape(-1, 784) / 255.0,
        y[TEST_Y].astype(np.int64),
        classes=classes,
        source=citation,
        licence=licence,
    )


def idx(content: bytes, path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Parse an idx file: 0, 0, type 8 (bytes), the dimensions' number and sizes (32 bits), the values."""
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise ConfigError(str(path), content[:4], f"an idx file of bytes with {dimensions} dimensions")
    shape = tuple(int(k) for k in np.frombuffer(content, ">u4", dimensions, offset=4))
    if len(content) - header != math.prod(shape):
        raise ConfigError(str(path), f"{len(content) - header} values", f"{math.prod(shape)}, as its header says")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
