"""CIFAR-10, a fixed subset: the first 1,000 training and 200 test images of each of ten classes.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. The whole set as float64 takes 1.5
GB, so the name stands for one subset that fits, the same whether it is read from an npz of the subset or cut
from the official archive. Pixels are divided by 255 and flattened to 3,072 features: row by row, the three
colours of a pixel together.

The archive in the binary format is read, not the one in the Python format: the latter is pickled, and
unpickling a file that a user was given runs whatever its author put there. What would break the subset's
meaning: an npz of other images under the same name; only its shape and classes are checked.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import ConfigError
from flmarket.learning.data.base import DataSet
from flmarket.learning.data.files import Locator, RemoteFile, Source, read_bytes

__all__ = ["CLASSES", "SOURCE", "load"]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_PER_CLASS, TEST_PER_CLASS = 1_000, 200
ARCHIVE = "cifar-10-binary.tar.gz"
BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
BATCH_BYTES = 10_000 * 3_073
SOURCE = Source(
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


def load(locator: Locator) -> DataSet:
    """Read the npz or cut the subset from the archive."""
    ((name, path),) = locator.locate(SOURCE).items()
    x_train, y_train, x_test, y_test = _from_archive(path) if name == ARCHIVE else _from_npz(path)
    return DataSet(
        "cifar10",
        x_train.reshape(len(x_train), -1) / 255.0,
        y_train.astype(np.int64),
        x_test.reshape(len(x_test), -1) / 255.0,
        y_test.astype(np.int64),
        classes=CLASSES,
        source="CIFAR-10, Krizhevsky 2009; first 1,000 + 200 images of each class",
        licence="unstated",
    )


def _from_npz(path: Path) -> tuple[Bytes, ...]:
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as stored:
            arrays = tuple(stored[key] for key in keys)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(str(path), str(error), f"an npz with {', '.join(keys)}") from None
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
    chosen = np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(len(CLASSES))])
    first: Bytes = records[np.sort(chosen)]
    return first


def _images(records: Bytes) -> tuple[Bytes, Bytes]:
    """Images (n, 32, 32, 3) and labels; the file has a label, then all red, all green, all blue."""
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]
