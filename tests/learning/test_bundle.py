"""A model one can use: raw records in, the reported accuracy out; and nothing that a stranger's zip says is run."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from xor_data import write_network, xor_data

from flmarket.engines import run
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError, FlmarketError, InvalidInput, UnknownName
from flmarket.learning import LocalTraining, SoftmaxRegression, models
from flmarket.learning import predict as standalone
from flmarket.learning.travel import Bundle, pack, read_raw
from flmarket.ledger import Head, Receipt
from flmarket.report.model_card import model_zip
from flmarket.trust import OWNERS_HERE


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(models, "_entries", dict(models._entries))


def write_table(path: Path, rows: int, seed: int) -> None:
    """Raw columns of wild scales, a category whose values look like numbers in part, and three classes."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pressure", "site", "grade", "share"])
        for _ in range(rows):
            kind = int(rng.integers(3))
            site = ("2.50", "north", "7")[int(rng.integers(3))]
            writer.writerow(
                [repr(1e5 + 300 * kind + float(rng.normal()) * 90), site, f"g{kind}", repr(float(rng.random()) * 1e-3)]
            )


def bought(market: dict, out: Path, base: Path = Path()) -> tuple[Bundle, float]:
    """A market played, its bundle read back, and the accuracy that it reports."""
    spec, kept = MarketConfig.parse(market).spec(base=base), []
    result = run(spec, finished=kept.append)
    rounds = kept[0]
    played = len(rounds.records)
    out.write_bytes(model_zip(rounds.kind, spec.data, rounds.ledger, OWNERS_HERE, rounds_played=played))
    return Bundle.read(out, allow=["my_xor_network:build"]), result.accuracy[-1]


TASK = {"rounds": 4, "bidders_per_round": 8, "budget_factor": 1.0}
OWNERS = {"privacy_budget": [6.0, 8.0]}


def test_raw_records_of_the_test_file_give_the_reported_accuracy_bit_for_bit(tmp_path):
    write_table(tmp_path / "train.csv", 300, 0)
    write_table(tmp_path / "test.csv", 121, 1)
    data = {"train": "train.csv", "test": "test.csv", "label": "grade", "owners": 10, "partition": "equal"}
    bundle, accuracy = bought({"task": TASK, "data": data, "owners": OWNERS}, tmp_path / "m.zip", tmp_path)
    raw = read_raw(tmp_path / "test.csv")
    assert np.mean(bundle.right(raw["grade"], bundle.predict(raw))) == accuracy > 0.5
    assert bundle.card["accuracy"]["last"]["accuracy"] == accuracy
    # an oracle of its own: the weights applied by hand to columns scaled by hand
    with (tmp_path / "train.csv").open() as file:
        train = np.array([[float(row["pressure"]), float(row["share"])] for row in csv.DictReader(file)])
    columns = np.array([[float(p), float(s)] for p, s in zip(raw["pressure"], raw["share"], strict=True)])
    sites = np.stack([raw["site"] == site for site in ("2.50", "7", "north")], axis=1)
    x = np.concatenate([(columns - train.mean(0)) / train.std(0), sites], axis=1)
    named = bundle.weights()
    by_hand = (x @ named["weights"].T + named["biases"]).argmax(1)
    np.testing.assert_array_equal(by_hand, bundle.predict(raw))
    # and raw columns without the scaling are what they were before: useless
    unscaled = (np.concatenate([columns, sites], axis=1) @ named["weights"].T + named["biases"]).argmax(1)
    assert np.mean(bundle.right(raw["grade"], unscaled)) < 0.5
    # receipts come along and hold
    kept = json.loads(bundle.files["receipts.json"])
    assert len(kept["receipts"]) == bundle.card["bill"]["awards"]["posted"] > 0
    for one in kept["receipts"][:3]:
        Receipt.from_dict(one).check(Head.from_dict(kept["head"]))


def test_the_script_inside_needs_numpy_alone(tmp_path):
    write_table(tmp_path / "train.csv", 200, 0)
    data = {"train": "train.csv", "label": "grade", "owners": 10, "partition": "equal"}
    bundle, _ = bought({"task": TASK, "data": data, "owners": OWNERS}, tmp_path / "m.zip", tmp_path)
    folder = tmp_path / "bought"
    folder.mkdir()
    for name, content in bundle.files.items():
        (folder / name).write_bytes(content)
    blocked = "import sys\nfor n in ('flmarket', 'scipy', 'safetensors', 'torch'): sys.modules[n] = None\n"
    code = blocked + f"import runpy; sys.argv = ['predict.py', {str(tmp_path / 'train.csv')!r}]\n"
    code += f"runpy.run_path({str(folder / 'predict.py')!r}, run_name='__main__')"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    raw = read_raw(tmp_path / "train.csv")
    assert done.stdout.split()[1:] == [bundle.classes[k] for k in bundle.predict(raw)]


@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_arrays_and_parquet(tmp_path, ending):
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=200)
    x = rng.normal(size=(200, 3)) * [1, 1e3, 1e-3] + y[:, None] * [2, 2e3, 2e-3]
    where = tmp_path / f"data.{ending}"
    if ending == "npz":
        np.savez(where, x=x, y=y)
        data = {"train": where.name, "scaling": "standard"}
    else:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y}), where)
        data = {"train": where.name, "test": where.name, "label": "y"}
    market = {"task": TASK, "data": {**data, "owners": 8, "partition": "equal"}, "owners": OWNERS}
    bundle, accuracy = bought(market, tmp_path / "m.zip", tmp_path)
    raw = read_raw(where)
    answers = bundle.predict(raw)
    if ending == "parquet":
        assert np.mean(bundle.right(raw["y"], answers)) == accuracy
    else:
        assert np.mean(answers == y) > 0.8


def test_a_network_of_ones_own_needs_leave_and_then_answers_alike(tmp_path):
    pytest.importorskip("torch")
    name, data = write_network(tmp_path), xor_data()
    config = MarketConfig.parse(
        {
            "task": {**TASK, "rounds": 2},
            "data": {"owners": 8, "partition": "equal"},
            "model": {"name": name},
            "training": {"local_epochs": 2, "batch_size": 16, "local_learning_rate": 0.3},
        }
    )
    spec, kept = config.spec(data=data), []
    result = run(spec, finished=kept.append)
    content = model_zip(kept[0].kind, data, kept[0].ledger, OWNERS_HERE, rounds_played=2)
    (tmp_path / "m.zip").write_bytes(content)
    raw = {"x0": data.x_test[:, 0], "x1": data.x_test[:, 1]}
    allowed = Bundle.read(tmp_path / "m.zip", allow=[name])
    assert abs(np.mean(allowed.predict(raw) == data.y_test) - result.accuracy[-1]) < 1e-6
    with pytest.raises(UnknownName, match="allows"):
        Bundle.read(tmp_path / "m.zip").predict(raw)


def test_the_best_model_is_chosen_on_validation_records_and_test_records_decide_nothing():
    market = {
        "task": {"rounds": 8, "bidders_per_round": 20, "budget_factor": 1.0, "learning_rate": 3.0},
        "data": {"owners": 30, "partition": "equal", "validation": 60},
        "owners": {"privacy_budget": [0.5, 1.0]},
    }
    spec, kept = MarketConfig.parse(market).spec(), []
    run(spec, finished=kept.append)
    kind, records = kept[0].kind, kept[0].records
    assert spec.data.validation is not None
    assert len(spec.data.validation) == 60
    assert len(spec.data.y_test) == 171 - 60
    told = [record.metrics["validation_accuracy"] for record in records]
    assert kind.notes["best_round"] == int(np.argmax(told))
    assert kind.notes["best_accuracy"] == max(told)
    assert kind.model.evaluate(kind.best, spec.data.validation)["accuracy"] == max(told)
    # the planted cheat, choosing by test records, would be another one here
    assert int(np.argmax([record.metrics["accuracy"] for record in records])) != kind.notes["best_round"]


def test_a_model_no_better_than_its_baseline_says_so(tmp_path):
    market = {
        "task": {"rounds": 1, "bidders_per_round": 5, "budget_factor": 1.0},
        "data": {"owners": 30, "partition": "equal"},
        "owners": {"privacy_budget": [0.002, 0.003]},
    }
    bundle, _ = bought(market, tmp_path / "m.zip")
    assert bundle.card["accuracy"]["last"]["better_than_baseline"] is False
    assert bundle.files["MODEL_CARD.md"].decode().splitlines()[2].startswith("**Not shown to be better")


# --- strangers' files ------------------------------------------------------------------------------------------------


@pytest.fixture
def files() -> dict[str, bytes]:
    """A good model, file by file."""
    data = xor_data(50)
    model = SoftmaxRegression(2, 2, local=LocalTraining())
    content = pack(model, data, last=np.array([1.0, -1.0, 0.5]), card={"task": "t"}, text="")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(files: dict[str, bytes], path: Path = Path("hostile.zip"), **how) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **how) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tensors(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


GOOD = {"dtype": "F64", "shape": [1, 2], "data_offsets": [0, 16]}
BIAS = {"dtype": "F64", "shape": [1], "data_offsets": [16, 24]}


def test_a_good_one_is_read(files):
    bundle = Bundle.read(zipped(files))
    np.testing.assert_array_equal(bundle.predict(np.array([[1.0, 0.0], [-3.0, 0.0]])), [1, 0])


@pytest.mark.parametrize("name", ["../evil.py", "/etc/passwd", "model.json/../../x", "weights.pkl", "a\\..\\b", "sub/"])
def test_names_that_lead_elsewhere(files, name):
    with pytest.raises(ConfigError, match="the files"):
        Bundle.read(zipped({**files, name: b"x"}))
    assert sorted(os.listdir()) == ["hostile.zip"]


def test_twice_the_same_name(files):
    path = zipped(files)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model.json", b"{}")
    with pytest.raises(ConfigError, match="once each"):
        Bundle.read(path)


def test_a_bomb_is_not_unpacked(files, monkeypatch):
    monkeypatch.setitem(standalone.LIMITS, "card.json", 1000)
    with pytest.raises(ConfigError, match="1000"):
        Bundle.read(zipped({**files, "card.json": b" " * 100_000}))
    # and one whose directory lies about its size
    path = zipped({**files, "card.json": b" " * 100_000})
    raw = path.read_bytes()
    path.write_bytes(raw.replace((100_000).to_bytes(4, "little"), (10).to_bytes(4, "little")))
    with pytest.raises(ConfigError):
        Bundle.read(path)


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"\x00" * 7,
        (1 << 62).to_bytes(8, "little") + b"{}",
        tensors(b"[1]"),
        tensors(b"{" * 2000),
        tensors(b'{"a":' * 5000 + b"1" + b"}" * 5000),
        tensors({"weights": GOOD}, bytes(16)),
        tensors({"weights": GOOD, "biases": BIAS, "more": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "shape": [2, 1]}, "biases": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "shape": [1, 1 << 40]}, "biases": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "data_offsets": [0, 1 << 60]}, "biases": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "data_offsets": [-16, 0]}, "biases": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "data_offsets": [8, 24]}, "biases": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "data_offsets": ["0", "16"]}, "biases": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "dtype": "O"}, "biases": BIAS}, bytes(24)),
        tensors({"weights": {**GOOD, "dtype": []}, "biases": BIAS}, bytes(24)),
        tensors({"weights": 3, "biases": BIAS}, bytes(24)),
        tensors({"weights": GOOD, "biases": BIAS}, bytes(24) + b"more"),
        tensors({"weights": GOOD, "biases": BIAS}, bytes(23)),
        tensors({"weights": GOOD, "biases": BIAS}, np.array([np.nan, 1, 2]).tobytes()),
        pickle.dumps({"weights": np.zeros((1, 2))}),
    ],
)
def test_weights_that_are_none(files, weights):
    with pytest.raises(ConfigError):
        Bundle.read(zipped({**files, "weights.safetensors": weights}))


def changed(files: dict[str, bytes], **values) -> dict[str, bytes]:
    about = {**json.loads(files["model.json"]), **values}
    return {**files, "model.json": json.dumps(about).encode()}


ENCODING = {"numbers": ["x0", "x1"], "offset": [0.0, 0.0], "scale": [1.0, 1.0], "categories": {}, "clipped": False}


@pytest.mark.parametrize(
    "values",
    [
        {"format": "other"},
        {"version": 99},
        {"features": []},
        {"features": ["x0", 1]},
        {"features": "xy"},
        {"classes": ["one"]},
        {"tensors": {"weights": [1, -2], "biases": [1]}},
        {"tensors": {"weights": [1, 3], "biases": [1]}},
        {"tensors": [1]},
        {"rule": "whatever I like"},
        {"rule": "largest score"},
        {"use": "best"},
        {"use": None},
        {"shape": None},
        {"model": "os.system"},
        {"model": {}},
        {"encoding": {**ENCODING, "scale": [0.0, 1.0]}},
        {"encoding": {**ENCODING, "scale": [True, 1.0]}},
        {"encoding": {**ENCODING, "offset": [0.0]}},
        {"encoding": {**ENCODING, "offset": [10**400, 0.0]}},
        {"encoding": {**ENCODING, "numbers": ["x0"]}},
        {"encoding": {**ENCODING, "categories": {"c": ["b", "a"]}}},
        {"encoding": {**ENCODING, "categories": {"c": 3}}},
        {"encoding": {**ENCODING, "categories": []}},
        {"encoding": 3},
    ],
)
def test_a_manifest_that_does_not_fit(files, values):
    with pytest.raises(ConfigError, match=r"model\.json"):
        Bundle.read(zipped(changed(files, **values)))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"NaN", b'{"a": NaN}', b"[" * 100_000, pickle.dumps({})])
def test_json_that_is_none(files, content):
    for name in ("model.json", "card.json"):
        with pytest.raises(ConfigError):
            Bundle.read(zipped({**files, name: content}))


def test_code_is_never_run(files, tmp_path):
    """An import path in a manifest, and a script in the zip, are texts."""
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    named = json.loads(files["model.json"])["model"] | {"name": "evil:build"}
    hostile = changed(files, model=named)
    bundle = Bundle.read(zipped({**hostile, "predict.py": b"raise SystemExit('ran')"}))
    with pytest.raises(UnknownName):
        bundle.predict(np.zeros((1, 2)))
    assert "evil" not in sys.modules


def test_what_is_no_zip_and_what_is_cut_short(files):
    path = zipped(files)
    for content in (b"", b"PK", path.read_bytes()[:-30], pickle.dumps([1])):
        Path("cut.zip").write_bytes(content)
        with pytest.raises(ConfigError, match="zip"):
            Bundle.read("cut.zip")
    with pytest.raises(ConfigError):
        Bundle.read("nowhere.zip")


def test_records_that_do_not_fit(files):
    bundle = Bundle.read(zipped(files))
    for records in (
        {"x0": np.array(["1"])},
        {"x0": np.array(["1"]), "x1": np.array([""])},
        {"x0": np.array(["1"]), "x1": np.array(["north"])},
        {"x0": np.array([1.0]), "x1": np.array([np.inf])},
        np.zeros((3, 5)),
        np.array([["a", "b"]]),
    ):
        with pytest.raises(FlmarketError):
            bundle.predict(records)
    with pytest.raises(InvalidInput, match="checkpoint"):
        bundle.predict(np.zeros((1, 2)), "best")
    np.savez("objects.npz", x=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match="records"):
        read_raw("objects.npz")
