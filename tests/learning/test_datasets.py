"""Loaders on small files made here, good and bad; the real files are in test_realdata.py."""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flmarket.errors import ConfigError, DataUnavailable, InvalidInput, MissingDependency, UnknownName
from flmarket.learning import DataSet, Encoding, Pool, Records, datasets, from_files, load, names, predict
from flmarket.learning.data import stratified_split

# --- the value type and its helpers -------------------------------------------------------------------------------


def small(**changes: object) -> DataSet:
    parts = {
        "name": "toy",
        "x_train": np.zeros((3, 2)),
        "y_train": np.array([0, 1, 1]),
        "x_test": np.ones((1, 2)),
        "y_test": np.array([1]),
        "classes": ("no", "yes"),
    }
    return DataSet(**(parts | changes))  # type: ignore[arg-type]


def test_data_sets_are_checked_and_read_only() -> None:
    data = small()
    assert (data.features, data.n_classes) == (2, 2)
    assert (data.x_train.dtype, data.y_train.dtype) == (np.float64, np.int64)
    with pytest.raises(ValueError, match="read-only"):
        data.x_train[0, 0] = 1
    for bad in (
        {"x_train": np.full((3, 2), np.nan)},
        {"x_train": np.zeros(3)},
        {"x_test": np.zeros((1, 3))},
        {"y_train": np.array([0, 1])},
        {"y_train": np.array([0, 1, 2])},
        {"y_test": np.array([-1])},
        {"y_test": np.array([0.5])},
        {"classes": ("only",)},
    ):
        with pytest.raises(InvalidInput):
            small(**bad)


def test_split_keeps_class_shares_and_loses_nothing() -> None:
    labels = np.repeat([0, 1, 2], [100, 50, 11])
    train, test = stratified_split(labels, test_share=0.2, seed=1)
    assert sorted([*train, *test]) == list(range(161))
    assert np.bincount(labels[test]).tolist() == [20, 10, 2]
    assert not np.array_equal(np.sort(train), train)


TABLE = {"a": np.array([0.0, 2.0]), "b": np.array([5.0, 5.0]), "c": np.array(["y", "x"])}


def test_an_encoding_learns_from_training_records_only() -> None:
    encoding = Encoding.fit(TABLE, ["a", "b"], {"c": ["y", "x"]}, "standard")
    assert encoding.features == ("a", "b", "c=x", "c=y")
    assert encoding.encode(TABLE).tolist() == [[-1, 0, 0, 1], [1, 0, 1, 0]]
    unseen = {"a": np.array([4.0]), "b": np.array([6.0]), "c": np.array(["z"])}
    assert encoding.encode(unseen).tolist() == [[3, 1, 0, 0]]
    about = {"encoding": json.loads(json.dumps(encoding.to_dict())), "features": encoding.features}
    assert predict.encode(about, unseen).tolist() == [[3, 1, 0, 0]]  # as it travels with a model
    unit = Encoding.fit(TABLE, ["a"], {}, "unit")
    assert unit.encode({"a": np.array([-1.0, 1.0, 9.0])}).tolist() == [[0], [0.5], [1]]


def test_a_pool_is_its_owners() -> None:
    own = [Records(np.full((n, 2), float(n)), np.zeros(n, dtype=np.int64)) for n in (3, 1)]
    pool = Pool.of(own)
    assert [len(each) for each in pool] == [3, 1]
    assert pool[-1].x.tolist() == [[1, 1]]
    assert [len(each) for each in pool[:1]] == [3]
    assert Pool.of(pool) is pool
    with pytest.raises(InvalidInput, match="one owner"):
        Pool.of([])
    with pytest.raises(InvalidInput, match="features"):
        Pool.of([own[0], Records(np.zeros((2, 3)), np.zeros(2, dtype=np.int64))])


def test_names_and_unknown_names() -> None:
    assert names() == (
        "bank-marketing", "breast-cancer", "cifar10", "debian-sections", "digits", "emnist", "fashion-mnist", "mnist",
        "nsl-kdd",
    )  # fmt: skip
    with pytest.raises(UnknownName, match="did you mean 'mnist'"):
        load("mnits")


@pytest.mark.parametrize("name", ["bank-marketing", "cifar10", "emnist", "fashion-mnist", "mnist", "nsl-kdd"])
def test_without_files_and_network_the_error_says_what_to_do(name: str) -> None:
    with pytest.raises(DataUnavailable, match=r"FLMARKET_DATA"):
        load(name, download=False)


# --- bundled --------------------------------------------------------------------------------------------------------


def test_breast_cancer() -> None:
    data = load("breast-cancer")
    assert data.x_train.shape == (398, 30)
    assert data.x_test.shape == (171, 30)
    assert np.bincount(np.concatenate([data.y_train, data.y_test])).tolist() == [212, 357]
    assert np.allclose(data.x_train.mean(axis=0), 0, atol=1e-12)
    assert np.allclose(data.x_train.std(axis=0), 1)
    assert not np.allclose(data.x_test.mean(axis=0), 0, atol=1e-3)
    assert np.array_equal(data.x_train, load("breast-cancer").x_train)


def test_digits() -> None:
    data = load("digits")
    assert data.x_train.shape == (1258, 64)
    assert data.x_test.shape == (539, 64)
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    assert np.bincount(data.y_test).min() >= 50


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    for name in ("breast-cancer", "digits"):
        with pytest.raises(MissingDependency, match=r"flmarket\[app\]"):
            load(name)


def test_importing_needs_neither_scikit_learn_nor_pandas() -> None:
    code = "import sys, flmarket.learning; print({'sklearn', 'pandas', 'torch'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


# --- NSL-KDD --------------------------------------------------------------------------------------------------------


def connection(label: str, service: str = "http", duration: float = 0) -> str:
    numbers = ["0"] * 37
    return ",".join([str(duration), "tcp", service, "SF", *numbers, label, "21"])


def write_kdd(directory: Path, train: list[str], test: list[str]) -> Path:
    (directory / "KDDTrain+.txt").write_text("\n".join(train) + "\n")
    (directory / "KDDTest+.txt.gz").write_bytes(gzip.compress(("\n".join(test) + "\n").encode()))
    return directory


def test_nsl_kdd_families_cover_forty_labels() -> None:
    assert len(datasets.FAMILY) == 40
    assert np.bincount(list(datasets.FAMILY.values())).tolist() == [1, 11, 6, 15, 7]


def test_nsl_kdd_encoding(tmp_path: Path) -> None:
    write_kdd(
        tmp_path,
        [connection("normal", "http", 2), connection("smurf", "ftp", 6), connection("xterm", "http", 4)],
        [connection("mscan", "gopher", 100), connection("spy", "ftp", 3)],
    )
    data = load("nsl-kdd", tmp_path)
    assert data.y_train.tolist() == [0, 1, 4]
    assert data.y_test.tolist() == [2, 3]
    assert data.features == 38 + 1 + 2 + 1
    assert data.x_train[:, 0].tolist() == [0, 1, 0.5]
    assert data.x_test[:, 0].tolist() == [1, 0.25]  # 100 is beyond the training range
    assert data.x_train[:, 39:41].tolist() == [[0, 1], [1, 0], [0, 1]]  # ftp, http
    assert data.x_test[:, 39:41].tolist() == [[0, 0], [1, 0]]  # a service that training never saw


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (connection("normal") + ",1", "43"),
        (connection("normal")[:-3], "43"),
        (connection("normal").replace("0,tcp", "zero,tcp"), "43"),
        (connection("normal").replace("0,tcp", "nan,tcp"), "finite"),
        (connection("gremlin"), "gremlin"),
        ("", "empty"),
    ],
)
def test_malformed_nsl_kdd(tmp_path: Path, line: str, complaint: str) -> None:
    lines = [connection("normal"), line] if line else []
    with pytest.raises(ConfigError, match=complaint) as caught:
        load("nsl-kdd", write_kdd(tmp_path, lines, [connection("normal")]))
    assert "KDDTrain+.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Bank Marketing -------------------------------------------------------------------------------------------------

BANK_HEADER = (
    '"age";"job";"marital";"education";"default";"housing";"loan";"contact";"month";"day_of_week";"duration";'
    '"campaign";"pdays";"previous";"poutcome";"emp.var.rate";"cons.price.idx";"cons.conf.idx";"euribor3m";'
    '"nr.employed";"y"'
)


def call(i: int, answer: str) -> str:
    text = ";".join(f'"{value}"' for value in ("admin.", "single", "x", "no", "no", "no", "cell", "may", "mon"))
    return f'{20 + i};{text};{1000 + i};1;999;0;"none";1.1;93.9;-36.4;4.8;5191;"{answer}"'


def write_bank(directory: Path, lines: list[str]) -> Path:
    (directory / "bank-additional-full.csv").write_text("\n".join(lines) + "\n")
    return directory


def test_bank_marketing_drops_the_duration(tmp_path: Path) -> None:
    calls = [call(i, "yes" if i % 5 == 0 else "no") for i in range(50)]
    data = load("bank-marketing", write_bank(tmp_path, [BANK_HEADER, *calls]))
    assert data.x_train.shape == (40, 9 + 10)
    assert data.y_test.sum() == 2
    varying = np.flatnonzero(np.ptp(data.x_train, axis=0))
    assert varying.tolist() == [0]  # only the age differs between these calls, apart from the duration
    assert not (np.diff(data.x_train[:, 0]) > 0).all()  # shuffled


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "header"),
        ([BANK_HEADER.replace(";", ",")], "valid CSV"),
        ([BANK_HEADER.replace("euribor3m", "libor")], "header with euribor3m"),
        ([BANK_HEADER], "0 records"),
        ([BANK_HEADER, *[call(i, "no") for i in range(20)]], "0 yes"),
        ([BANK_HEADER, *[call(i, "maybe") for i in range(20)]], "maybe"),
        ([BANK_HEADER, *[call(i, "yes") + ";1" for i in range(20)]], "line 2"),
        ([BANK_HEADER, *[call(i, "no" if i % 2 else "yes").replace("5191", "many") for i in range(20)]], "numbers"),
        ([BANK_HEADER, *[call(i, "no" if i % 2 else "yes").replace("5191", "nan") for i in range(20)]], "finite"),
    ],
)
def test_malformed_bank_marketing(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        load("bank-marketing", write_bank(tmp_path, lines))


# --- idx images -----------------------------------------------------------------------------------------------------


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(directory: Path, **changes: bytes) -> Path:
    rng = np.random.default_rng(0)
    contents = {
        "train-images-idx3-ubyte": idx(rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)),
        "train-labels-idx1-ubyte": idx(np.arange(20, dtype=np.uint8) % 10),
        "t10k-images-idx3-ubyte": idx(np.full((5, 28, 28), 51, dtype=np.uint8)),
        "t10k-labels-idx1-ubyte": idx(np.arange(5, dtype=np.uint8)),
    }
    for name, content in (contents | {k.replace("_", "-"): v for k, v in changes.items()}).items():
        (directory / f"{name}.gz").write_bytes(gzip.compress(content))
    return directory


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_images(tmp_path: Path, name: str) -> None:
    data = load(name, write_mnist(tmp_path))
    assert data.x_train.shape == (20, 784)
    assert np.array_equal(data.x_test, np.full((5, 784), 0.2))
    assert data.y_test.tolist() == [0, 1, 2, 3, 4]
    assert data.n_classes == 10


def test_emnist_is_read_upright_and_never_downloaded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (50, 28, 28), dtype=np.uint8)
    for part, count in (("train", 50), ("test", 4)):
        (tmp_path / f"emnist-balanced-{part}-images-idx3-ubyte").write_bytes(idx(stored[:count]))
        (tmp_path / f"emnist-balanced-{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 47))
    data = load("emnist", tmp_path)
    assert (data.x_train.shape, data.n_classes, data.classes[46]) == ((50, 784), 47, "t")
    np.testing.assert_allclose(data.x_test[3].reshape(28, 28), stored[3].T / 255.0)  # files have columns first
    (tmp_path / "emnist-balanced-test-labels-idx1-ubyte").unlink()
    with pytest.raises(DataUnavailable, match="emnist-balanced-test-labels"):
        load("emnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train_images_idx3_ubyte", b""),
        ("train_images_idx3_ubyte", b"<html>"),
        ("train_images_idx3_ubyte", idx(np.zeros((19, 28, 28), np.uint8))),
        ("train_images_idx3_ubyte", idx(np.zeros((20, 32, 32), np.uint8))),
        ("train_images_idx3_ubyte", idx(np.zeros((20, 28, 28), np.uint8))[:-1]),
        ("train_labels_idx1_ubyte", idx(np.full(20, 10, np.uint8))),
        ("t10k_labels_idx1_ubyte", idx(np.zeros((5, 1), np.uint8))),
        ("t10k_labels_idx1_ubyte", idx(np.zeros(0, np.uint8))),
    ],
)
def test_malformed_idx(tmp_path: Path, file: str, content: bytes) -> None:
    with pytest.raises(ConfigError):
        load("mnist", write_mnist(tmp_path, **{file: content}))


# --- CIFAR-10 -------------------------------------------------------------------------------------------------------


def pictures(n: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 32, 32, 3), np.uint8), rng.permutation(np.arange(n) % 10).astype(np.uint8)


def test_cifar10_npz(tmp_path: Path) -> None:
    (x_train, y_train), (x_test, y_test) = pictures(30, 0), pictures(10, 1)
    np.savez(tmp_path / "cifar10.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    data = load("cifar10", tmp_path)
    assert data.x_train.shape == (30, 3072)
    assert np.array_equal(data.x_train[7].reshape(32, 32, 3) * 255, x_train[7])
    assert np.array_equal(data.y_test, y_test)


def test_cifar10_archive_gives_the_first_of_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "BATCH_BYTES", 20 * 3073)
    monkeypatch.setattr(datasets, "TRAIN_PER_CLASS", 3)
    monkeypatch.setattr(datasets, "TEST_PER_CLASS", 1)
    batches = {name: pictures(20, i) for i, name in enumerate(datasets.BATCHES)}
    write_archive(tmp_path, batches)
    data = load("cifar10", tmp_path)
    everything = [pair for name in datasets.BATCHES[:5] for pair in zip(*batches[name], strict=True)]
    seen = dict.fromkeys(range(10), 0)
    expected = []
    for image, label in everything:
        if seen[int(label)] < 3:
            seen[int(label)] += 1
            expected.append((image, label))
    assert data.y_train.tolist() == [label for _, label in expected]
    assert np.array_equal(data.x_train.reshape(-1, 32, 32, 3) * 255, [image for image, _ in expected])
    assert np.bincount(data.y_test).tolist() == [1] * 10
    write_archive(tmp_path, dict(list(batches.items())[:5]))
    with pytest.raises(ConfigError, match=r"test_batch.bin"):
        load("cifar10", tmp_path)


def write_archive(directory: Path, batches: dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
    with tarfile.open(directory / datasets.ARCHIVE, "w:gz") as archive:
        for name, (pixels, labels) in batches.items():
            planes = [
                np.concatenate([[y], x[..., 0].ravel(), x[..., 1].ravel(), x[..., 2].ravel()])
                for x, y in zip(pixels, labels, strict=True)
            ]
            content = np.array(planes, dtype=np.uint8).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_malformed_cifar10(tmp_path: Path) -> None:
    (x, y), path = pictures(10, 0), tmp_path / "cifar10.npz"
    for arrays in (
        {"x_train": x, "y_train": y, "x_test": x},
        {"x_train": x.reshape(10, -1), "y_train": y, "x_test": x, "y_test": y},
        {"x_train": x / 255.0, "y_train": y, "x_test": x, "y_test": y},
        {"x_train": x, "y_train": y + 1, "x_test": x, "y_test": y},
        {"x_train": x, "y_train": y[:5], "x_test": x, "y_test": y},
        {"x_train": np.array([{"pickled": "object"}]), "y_train": y, "x_test": x, "y_test": y},
    ):
        np.savez(path, **arrays)
        with pytest.raises(ConfigError):
            load("cifar10", tmp_path)
    for content in (b"", b"no archive", path.read_bytes()[:200]):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            load("cifar10", tmp_path)
    path.unlink()
    (tmp_path / datasets.ARCHIVE).write_bytes(b"no archive")
    with pytest.raises(ConfigError):
        load("cifar10", tmp_path)


# --- one's own files, code and torch data sets ------------------------------------------------------------------------


def people(n: int, seed: int = 0) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    age, city = rng.integers(20, 60, n), rng.choice(["Bonn", "Köln"], n)
    buys = np.where(age + 10 * (city == "Bonn") > 45, "yes", "no")
    return [["age", "city", "buys"], *([str(a), c, b] for a, c, b in zip(age, city, buys, strict=True))]


def write_csv(path: Path, rows: list[list[str]], delimiter: str = ",") -> Path:
    path.write_text("\n".join(delimiter.join(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_files_become_a_data_set(tmp_path: Path, delimiter: str) -> None:
    train = write_csv(tmp_path / "train.csv", people(50), delimiter)
    test = write_csv(
        tmp_path / "test.csv", [["buys", "city", "age"], ["no", "Wien", "40"], *[["yes", "Bonn", "50"]] * 9], delimiter
    )
    data = from_files(train, test, label="buys")
    assert data.name == "train"
    assert data.classes == ("no", "yes")
    assert data.feature_names == ("age", "city=Bonn", "city=Köln")
    assert data.x_train[:, 0].mean() == pytest.approx(0)
    assert data.y_test.tolist() == [0] + [1] * 9
    assert data.x_test[0, 1:].tolist() == [0, 0]  # a city that training never saw
    ages = np.array([float(row[0]) for row in people(50)[1:]])
    assert data.x_test[0, 0] == pytest.approx((40 - ages.mean()) / ages.std())
    assert data.encoding is not None
    raw = {"age": np.array([40.0]), "city": np.array(["Wien"])}
    np.testing.assert_array_equal(data.encoding.encode(raw)[0], data.x_test[0])


def test_without_a_test_file_a_fifth_is_put_aside(tmp_path: Path) -> None:
    rows = people(50)
    data = from_files(write_csv(tmp_path / "all.csv", rows), label="buys", scaling="none", name="mine")
    assert (data.name, len(data.train), len(data.test)) == ("mine", 40, 10)
    assert sorted([*data.x_train[:, 0], *data.x_test[:, 0]]) == sorted(float(row[0]) for row in rows[1:])
    again = from_files(tmp_path / "all.csv", label="buys", scaling="none")
    np.testing.assert_array_equal(again.x_test, data.x_test)


def test_classes_may_be_numbers(tmp_path: Path) -> None:
    rows = [["x", "y"], *([str(i), str([2, 10][i % 2])] for i in range(20))]
    data = from_files(write_csv(tmp_path / "n.csv", rows), label="y")
    assert data.classes == ("2", "10")  # in the order of numbers, not of texts


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows[1].__setitem__(0, ""), "age"),
        (lambda rows: rows[1].__setitem__(2, ""), "classes"),
        (lambda rows: rows[1].append("more"), "line 2"),
        (lambda rows: rows[0].__setitem__(1, "age"), "different column names"),
        (lambda rows: rows[0].__setitem__(2, "sells"), "buys"),
        (lambda rows: rows.__delitem__(slice(5, None)), "4 records"),
        (lambda rows: [row.__setitem__(2, "no") for row in rows[1:]], "1 different"),
        (lambda rows: [row.__setitem__(2, str(i)) for i, row in enumerate(rows[1:])], "30 different values in 30"),
        (lambda rows: [row.__setitem__(0, "NA" if i == 9 else f"{i}.5") for i, row in enumerate(rows[1:])], "NA among"),
        (
            lambda rows: [row.__setitem__(0, f"day {i}") for i, row in enumerate(rows[1:])],
            "different texts in 24 records",
        ),
        (lambda rows: rows[1].__setitem__(0, "1e200"), "age.*within"),
        (lambda rows: rows[0].__setitem__(0, ""), "none empty"),
        (lambda rows: [row.__delitem__(slice(0, 2)) for row in rows], "no column but the label"),
    ],
)
def test_csv_files_that_cannot_serve(tmp_path: Path, change: Any, complaint: str) -> None:
    rows = people(30)
    change(rows)
    with pytest.raises((ConfigError, InvalidInput), match=complaint) as caught:
        from_files(write_csv(tmp_path / "bad.csv", rows), label="buys")
    assert "\n" not in str(caught.value)


def test_test_files_that_do_not_fit_the_training_file(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "train.csv", people(30))
    for header, row, complaint in (
        (["age", "city", "buys"], ["40", "Bonn", "perhaps"], "perhaps"),
        (["age", "buys"], ["40", "yes"], "city"),
        (["age", "city", "buys"], ["old", "Bonn", "yes"], "age"),
        (["age", "city"], ["40", "Bonn"], "label"),
    ):
        test = write_csv(tmp_path / "test.csv", [header, *[row] * 10])
        with pytest.raises(ConfigError, match=complaint):
            from_files(train, test, label="buys")
    with pytest.raises(ConfigError, match="readable"):
        from_files(tmp_path / "nowhere.csv", label="buys")
    with pytest.raises(ConfigError, match=r"\.parquet"):
        from_files(tmp_path / "data.xlsx", label="buys")


@pytest.mark.parametrize(("encoding", "text"), [("latin-1", "Köln"), ("utf-16", "Bonn")])
def test_text_in_another_encoding_is_refused_and_not_guessed(tmp_path: Path, encoding: str, text: str) -> None:
    path = tmp_path / "old.csv"
    path.write_text("city,y\n" + f"{text},0\n{text},1\n" * 10, encoding=encoding)
    with pytest.raises(ConfigError, match="UTF-8"):
        from_files(path, label="y")


X, Y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"X": X, "Y": Y}, "it has X, Y"), ({"x": X, "y": Y[:10]}, "10 classes for 20 records"),
        ({"x": X, "y": Y * 10**9}, "the largest 1000000000"), ({"x": X, "y": np.eye(2)[Y]}, "numbered from 0"),
        ({"x": X, "y": np.array(["a", "b"])[Y]}, "numbered from 0"), ({"x": X, "y": Y - 1}, "numbered from 0"),
        ({"x": X[:, 0], "y": Y}, "records, features"), ({"x": np.float64(1), "y": Y}, "records, features"),
        ({"x": X.astype(str), "y": Y}, "numbers"), ({"x": X + 1j, "y": Y}, "numbers"),
        ({"x": np.where(X == 3, np.nan, X), "y": Y}, "NaN"), ({"x": X * 1e200, "y": Y}, "within"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_serve(tmp_path: Path, arrays: dict[str, Any], complaint: str) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ConfigError, match=complaint):
        from_files(tmp_path / "bad.npz")


def test_a_test_file_is_of_the_training_file_s_kind(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", x=X, y=Y)
    rows = write_csv(tmp_path / "rows.csv", people(30))
    for train, test in ((tmp_path / "arrays.npz", rows), (rows, tmp_path / "arrays.npz")):
        with pytest.raises(ConfigError, match=f"as {train.name} is"):
            from_files(train, test, label="buys")


def test_parquet_has_more_types_than_data_does(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from decimal import Decimal

    from pyarrow import parquet

    good = {"x": [Decimal(i) for i in range(20)], "y": Y.tolist(), "k": pa.array(["a", "b"] * 10).dictionary_encode()}
    parquet.write_table(pa.table(good), tmp_path / "good.parquet")
    data = from_files(tmp_path / "good.parquet", label="y", scaling="none")
    assert data.encoding is not None
    assert data.encoding.features == ("x", "k=a", "k=b")
    for column in ([[1, 2]] * 20, [{"a": 1}] * 20, [b"ab"] * 20):
        parquet.write_table(pa.table({"x": column, "y": Y.tolist()}), tmp_path / "bad.parquet")
        with pytest.raises(ConfigError, match="numbers or texts"):
            from_files(tmp_path / "bad.parquet", label="y")
    parquet.write_table(pa.table({"x": [1, 2], "y": [0, 1]}), tmp_path / "few.parquet")
    with pytest.raises(ConfigError, match="2 records"):
        from_files(tmp_path / "few.parquet", label="y")


def _no_disk() -> Any:
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("loader", "complaint"),
    [
        (_no_disk, "OSError: no disk"), (lambda part: None, "TypeError"), (lambda: None, "training, test"),
        (lambda: ([(X[0], 0), (X[0, :1], 1)],) * 2, "same shape"), (lambda: ((X, Y * 10**9),) * 2, "whole numbers"),
        (lambda: ((X, Y * 0.5),) * 2, "whole numbers"),
    ],
)  # fmt: skip
def test_a_loader_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, loader: Any, complaint: str) -> None:
    monkeypatch.setattr(datasets._registry, "_entries", dict(datasets._registry._entries))
    datasets.register("mine", loader)
    with pytest.raises(InvalidInput, match=f"mine.*{complaint}"):
        datasets.load("mine")


def test_a_column_of_names_is_no_category(tmp_path: Path) -> None:
    rows = [["who", "y"], *([f"person {i}", str(i % 2)] for i in range(1300))]
    with pytest.raises(ConfigError, match="1040 different texts"):
        from_files(write_csv(tmp_path / "who.csv", rows), label="y")


def test_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = people(50)
    columns = {name: list(values) for name, values in zip(rows[0], zip(*rows[1:], strict=True), strict=True)}
    columns["age"] = [int(age) for age in columns["age"]]
    parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    ours = from_files(tmp_path / "all.parquet", label="buys")
    same = from_files(write_csv(tmp_path / "all.csv", rows), label="buys")
    np.testing.assert_array_equal(ours.x_train, same.x_train)
    np.testing.assert_array_equal(ours.y_test, same.y_test)
    parquet.write_table(pyarrow.table(columns | {"age": [None, *columns["age"][1:]]}), tmp_path / "gap.parquet")
    with pytest.raises(ConfigError, match="missing"):
        from_files(tmp_path / "gap.parquet", label="buys")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="Parquet"):
        from_files(tmp_path / "bad.parquet", label="buys")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"flmarket\[parquet\]"):
        from_files(tmp_path / "all.parquet", label="buys")


def test_npz_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4, 4, 1)), rng.integers(0, 3, 40)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = from_files(tmp_path / "a.npz")
    assert (data.features, data.shape, data.n_classes, len(data.test)) == (16, (4, 4, 1), 3, 8)
    both = from_files(tmp_path / "a.npz", tmp_path / "a.npz")
    np.testing.assert_array_equal(both.x_train, x.reshape(40, 16))
    np.savez(tmp_path / "four.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    scaled = from_files(tmp_path / "four.npz", scaling="standard")
    assert scaled.x_train.std(axis=0) == pytest.approx(1)
    np.savez(tmp_path / "bad.npz", x=x, y=y + 0.5)
    with pytest.raises(ConfigError, match="classes"):
        from_files(tmp_path / "bad.npz")
    np.savez(tmp_path / "half.npz", x=x)
    with pytest.raises(ConfigError, match="x and y"):
        from_files(tmp_path / "half.npz")


class Pictures:
    """What torch.utils.data.Dataset asks for, and what torchvision's have: length, items, classes."""

    classes = ("cat", "dog")

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[NDArray[np.float32], int]:
        return np.full((1, 2, 3), i / self.n, dtype=np.float32), i % 2


def test_loaders_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets._registry, "_entries", dict(datasets._registry._entries))
    datasets.register("pictures", lambda: (Pictures(20), Pictures(6)))
    data = load("pictures")
    assert (data.name, data.classes, data.shape, data.features) == ("pictures", ("cat", "dog"), (1, 2, 3), 6)
    assert data.y_test.tolist() == [0, 1] * 3
    assert "pictures" in names()

    @datasets.register("arrays", about="Made up")
    def arrays() -> object:
        return (np.zeros((3, 2)), [0, 1, 2]), (np.ones((1, 2)), [1])

    assert load("arrays").n_classes == 3
    assert datasets.about("arrays") == "Made up"
    datasets.register("found", lambda locator: small(name=str(locator.data_dir)))
    assert load("found", tmp_path).name == str(tmp_path)
    datasets.register("odd", lambda: 7)
    with pytest.raises(InvalidInput, match="odd"):
        load("odd")


def test_torch_data_sets() -> None:
    torch = pytest.importorskip("torch")
    parts = [torch.utils.data.TensorDataset(torch.rand(n, 5), torch.arange(n) % 3) for n in (12, 6)]
    data = datasets.as_data_set("tensors", parts)
    assert (data.features, data.n_classes, len(data.train), len(data.test)) == (5, 3, 12, 6)


def test_every_data_set_has_a_line_for_catalogues() -> None:
    assert all(datasets.about(name) for name in names())
