from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest

from flmarket.errors import ConfigError
from flmarket.learning import DataSet, Purpose, SoftmaxRegression, datasets, fedsgd, load, stream
from flmarket.learning.data.files import Source, read_bytes
from flmarket.learning.partition import iid_power_law
from flmarket.populations import NSL_KDD_CLASS_COUNTS

pytestmark = pytest.mark.realdata


@pytest.fixture(scope="module")
def kdd(data_dir: Path) -> DataSet:
    return load("nsl-kdd", data_dir, download=False)


def test_nsl_kdd(kdd: DataSet) -> None:
    assert kdd.x_train.shape == (125_973, 122)
    assert kdd.x_test.shape == (22_544, 122)
    assert tuple(np.bincount(kdd.y_train)) == NSL_KDD_CLASS_COUNTS
    assert np.bincount(kdd.y_test).tolist() == [9711, 7460, 2421, 2885, 67]
    for x in (kdd.x_train, kdd.x_test):
        assert (x.min(), x.max()) == (0, 1)
        for first, last in ((38, 41), (41, 111), (111, 122)):
            assert (x[:, first:last].sum(axis=1) == 1).all()


def test_nsl_kdd_loads_in_seconds(data_dir: Path) -> None:
    start = time.process_time()
    load("nsl-kdd", data_dir, download=False)
    assert time.process_time() - start < 6  # 1.6 s here; the bound leaves room for slow machines


def test_softmax_regression_learns_nsl_kdd_from_ten_owners_a_round(kdd: DataSet) -> None:
    part = iid_power_law(stream(0, purpose=Purpose.PARTITION), kdd.y_train, 1000)
    model = SoftmaxRegression(kdd.features, kdd.n_classes)
    params = model.initial()
    for r in range(150):
        rows, offsets = part.select(stream(0, r, purpose=Purpose.PARTICIPATION).choice(1000, 10, replace=False))
        gradients = fedsgd(model, params, kdd.x_train[rows], kdd.y_train[rows], offsets)
        params = params - 0.5 * (np.diff(offsets) / offsets[-1]) @ gradients
    assert model.evaluate(params, kdd.train)["accuracy"] > 0.93
    assert model.evaluate(params, kdd.test)["accuracy"] > 0.71


def test_bank_marketing(data_dir: Path) -> None:
    data = load("bank-marketing", data_dir, download=False)
    assert data.x_train.shape == (32_950, 62)
    assert data.x_test.shape == (8_238, 62)
    assert np.bincount(np.concatenate([data.y_train, data.y_test])).tolist() == [36_548, 4_640]
    assert abs(data.y_train.mean() - data.y_test.mean()) < 1e-4


@pytest.mark.parametrize(("name", "mean"), [("mnist", 0.13066), ("fashion-mnist", 0.28604)])
def test_idx_images(data_dir: Path, name: str, mean: float) -> None:
    data = load(name, data_dir, download=False)
    assert data.x_train.shape == (60_000, 784)
    assert data.x_test.shape == (10_000, 784)
    assert data.x_train.mean() == pytest.approx(mean, abs=1e-5)
    if name == "mnist":
        counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert np.bincount(data.y_train).tolist() == counts
    else:
        assert np.bincount(data.y_train).tolist() == [6000] * 10


def test_one_mnist_is_not_taken_for_the_other(data_dir: Path) -> None:
    with pytest.raises(ConfigError, match="labels of mnist"):
        load("fashion-mnist", data_dir / "mnist", download=False)
    with pytest.raises(ConfigError, match="labels of fashion-mnist"):
        load("mnist", data_dir / "fashion-mnist", download=False)


def test_cifar10_subset(data_dir: Path) -> None:
    data = load("cifar10", data_dir, download=False)
    assert data.x_train.shape == (10_000, 3072)
    assert data.x_test.shape == (2_000, 3072)
    assert np.bincount(data.y_train).tolist() == [1000] * 10
    assert np.bincount(data.y_test).tolist() == [200] * 10


@pytest.mark.parametrize("source", [datasets.NSL_KDD, datasets.BANK_MARKETING, datasets.MNIST, datasets.FASHION_MNIST])
def test_pinned_checksums_are_those_of_the_files(data_dir: Path, source: Source) -> None:
    for file in source.files:
        content = read_bytes(data_dir / source.name / f"{file.name}.gz")
        assert hashlib.sha256(content).hexdigest() == file.sha256
