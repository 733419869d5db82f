"""Images: MNIST, Fashion-MNIST, EMNIST (28 by 28 pixels, idx format) and a fixed subset of CIFAR-10.

LeCun, Bottou, Bengio, Haffner, Gradient-Based Learning Applied to Document Recognition, 1998; Xiao, Rasul, Vollgraf,
Fashion-MNIST, arXiv:1708.07747; Cohen, Afshar, Tapson, van Schaik, EMNIST, arXiv:1702.05373 (the balanced split: 47
digits and letters, 112,800 + 18,800, 0.8 GB in memory; read for those who hold the files, never downloaded);
Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Pixels are divided by 255 and flattened: row by
row, the colours of a pixel together; EMNIST's files have columns first and are turned upright.

What would break the first two: they have the same file names, so the wrong directory would load without a complaint.
The small label files are therefore hashed, and those of the sister set are refused.

All of CIFAR-10 as float64 takes 1.5 GB, so the name stands for one subset that fits, the first 1,000 training and 200
test images of each class, the same whether it is read from an npz of the subset or cut from the official archive. The
archive in the binary format is read, not the one in the Python format: the latter is pickled, and unpickling a file
that a user was given runs whatever its author put there. What would break the subset's meaning: an npz of other images
under the same name; only its shape and classes are checked.
"""

from __future__ import annotations

import hashlib
import math
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import ConfigError
from flmarket.learning.data import DataSet, Encoding
from flmarket.learning.data.files import Locator, RemoteFile, Source, read_bytes
from flmarket.learning.data.tables import read_npz

__all__ = ["CIFAR10", "EMNIST", "FASHION_MNIST", "MNIST", "cifar10", "emnist", "fashion_mnist", "mnist"]

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
EMNIST = Source(
    "emnist",
    tuple(
        RemoteFile(f"emnist-balanced-{part}-{kind}-ubyte", "", "")
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ),
)
_EMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
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


def emnist(locator: Locator) -> DataSet:
    """Handwritten digits and letters, the balanced split."""
    return _load(
        replace(locator, download=False),
        EMNIST,
        classes=_EMNIST_CLASSES,
        citation="EMNIST, Cohen, Afshar, Tapson, van Schaik 2017; balanced split",
        licence="unstated; from NIST Special Database 19",
        columns_first=True,
    )


def _load(
    locator: Locator,
    source: Source,
    *,
    not_to_be: Source | None = None,
    classes: tuple[str, ...],
    citation: str,
    licence: str,
    columns_first: bool = False,
) -> DataSet:
    """A source of four files: training images and labels, test images and labels."""
    paths = locator.locate(source)
    train_x, train_y, test_x, test_y = (file.name for file in source.files)
    labels = {name: read_bytes(paths[name]) for name in (train_y, test_y)}
    sister = {} if not_to_be is None else {file.sha256: not_to_be.name for file in not_to_be.files}
    for name, content in labels.items():
        if other := sister.get(hashlib.sha256(content).hexdigest()):
            raise ConfigError(str(paths[name]), f"the labels of {other}", f"those of {source.name}")
    y = {name: idx(content, paths[name], dimensions=1) for name, content in labels.items()}
    x = {name: idx(read_bytes(paths[name]), paths[name], dimensions=3) for name in (train_x, test_x)}
    if columns_first:
        x = {name: images.transpose(0, 2, 1) for name, images in x.items()}
    for images, names in ((train_x, train_y), (test_x, test_y)):
        if x[images].shape[1:] != (28, 28) or len(x[images]) != len(y[names]) or not len(y[names]):
            raise ConfigError(str(paths[images]), x[images].shape, f"({len(y[names])}, 28, 28), one image a label")
        if y[names].max() >= len(classes):
            raise ConfigError(str(paths[names]), y[names].max(), f"labels from 0 to {len(classes) - 1}")
    return DataSet(
        source.name,
        x[train_x].reshape(-1, 784) / 255.0,
        y[train_y].astype(np.int64),
        x[test_x].reshape(-1, 784) / 255.0,
        y[test_y].astype(np.int64),
        classes=classes,
        source=citation,
        licence=licence,
        encoding=_pixels(28, 28, 1),
        shape=(28, 28, 1),
    )


def _pixels(height: int, width: int, channels: int) -> Encoding:
    """Pixels from 0 to 255 as numbers from 0 to 1."""
    names = [f"{r},{c},{k}" for r in range(height) for c in range(width) for k in range(channels)]
    return Encoding.even(names, 255.0)


def idx(content: bytes, path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Parse an idx file: 0, 0, type 8 (bytes), the dimensions' number and sizes (32 bits), the values."""
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise ConfigError(str(path), content[:4], f"an idx file of bytes with {dimensions} dimensions")
    shape = tuple(int(k) for k in np.frombuffer(content, ">u4", dimensions, offset=4))
    if len(content) - header != math.prod(shape):
        raise ConfigError(str(path), f"{len(content) - header} values", f"{math.prod(shape)}, as its header says")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


# --- CIFAR-10 --------------------------------------------------------------------------------------------------------

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_PER_CLASS, TEST_PER_CLASS = 1_000, 200
ARCHIVE = "cifar-10-binary.tar.gz"
BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
BATCH_BYTES = 10_000 * 3_073
CIFAR10 = Source(
    "cifar10",
    (
        RemoteFile(
            ARCHIVE,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",
        ),
    ),
    stand_ins=("cifar10_subset_10k_2k.npz", "cifar10.npz"),
)

Bytes = NDArray[np.uint8]


def cifar10(locator: Locator) -> DataSet:
    """Ten kinds of animals and vehicles, 32 by 32 pixels in colour; a fixed subset."""
    ((name, path),) = locator.locate(CIFAR10).items()
    x_train, y_train, x_test, y_test = _from_archive(path) if name == ARCHIVE else _from_npz(path)
    return DataSet(
        "cifar10",
        x_train.reshape(len(x_train), -1) / 255.0,
        y_train.astype(np.int64),
        x_test.reshape(len(x_test), -1) / 255.0,
        y_test.astype(np.int64),
        classes=CIFAR_CLASSES,
        source="CIFAR-10, Krizhevsky 2009; first 1,000 + 200 images of each class",
        licence="unstated",
        encoding=_pixels(32, 32, 3),
        shape=(32, 32, 3),
    )


def _from_npz(path: Path) -> tuple[Bytes, ...]:
    arrays = read_npz(path)
    if len(arrays) != 4:
        raise ConfigError(str(path), "x and y", "an npz with x_train, y_train, x_test, y_test")
    for images, labels in (arrays[:2], arrays[2:]):
        if images.dtype != np.uint8 or images.shape != (len(images), 32, 32, 3) or not len(images):
            raise ConfigError(str(path), f"{images.dtype} {images.shape}", "images of bytes (n, 32, 32, 3)")
        integer = np.issubdtype(labels.dtype, np.integer)
        if not integer or labels.shape != (len(images),) or labels.min() < 0 or labels.max() > 9:
            raise ConfigError(str(path), f"{labels.dtype} {labels.shape}", "one label from 0 to 9 an image")
    return arrays


def _from_archive(path: Path) -> tuple[Bytes, ...]:
    batches: dict[str, Bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                stream = archive.extractfile(member) if name in BATCHES and member.size == BATCH_BYTES else None
                if stream is not None:
                    batches[name] = np.frombuffer(stream.read(), np.uint8).reshape(-1, 3_073)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ConfigError(str(path), str(error), "CIFAR-10's archive in the binary format") from None
    if missing := [name for name in BATCHES if name not in batches]:
        raise ConfigError(str(path), sorted(batches), f"{', '.join(missing)} with 10,000 images each")
    train = _first_of_each(np.concatenate([batches[name] for name in BATCHES[:5]]), TRAIN_PER_CLASS)
    test = _first_of_each(batches[BATCHES[5]], TEST_PER_CLASS)
    return *_images(train), *_images(test)


def _first_of_each(records: Bytes, count: int) -> Bytes:
    """The first `count` records of each class, in the order of the file."""
    labels = records[:, 0]
    chosen = np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(len(CIFAR_CLASSES))])
    first: Bytes = records[np.sort(chosen)]
    return first


def _images(records: Bytes) -> tuple[Bytes, Bytes]:
    """Images (n, 32, 32, 3) and labels; the file has a label, then all red, all green, all blue."""
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]
