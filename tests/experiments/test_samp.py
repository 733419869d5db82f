import dataclasses
import json

import pytest

from flmarket import InvalidInput
from flmarket.errors import DataUnavailable
from flmarket.experiments import samp
from flmarket.learning import load


def without_images(name, data_dir=None):
    if name != "digits":
        raise DataUnavailable(name)
    return load(name)


@pytest.fixture
def tiny(monkeypatch):
    scale = dataclasses.replace(
        samp.QUICK, records=400, clients=12, rounds=4, population=40, learners=(20, 80), draws=1,
        data_sets=("mnist", "fashion-mnist"),
    )  # fmt: skip
    monkeypatch.setattr(samp, "QUICK", scale)
    monkeypatch.setattr(samp, "load", without_images)


def test_every_item_has_its_files_figures_and_a_verdict(tiny, tmp_path):
    steps = []
    items = samp.reproduce(tmp_path, quick=True, seeds=2, data_dir=None, step=steps.append)
    assert [item.key for item in items] == [
        "samp-q",
        "samp-average-q",
        "samp-prior",
        "samp-loss-digits-uniform",  # once, although two data sets are missing
        "samp-loss-digits-exponential",
    ]
    assert steps
    for item in items:
        assert item.verdict in ("reproduced", "differs")
        assert item.files
        assert all((tmp_path / name).stat().st_size > 100 for name in item.files)
        assert json.loads(json.dumps(item.numbers, allow_nan=False))
    assert items[0].verdict == items[1].verdict == "reproduced"  # exact, at any scale
    assert "mnist was not available" in items[-1].reason


def test_verdicts_follow_the_numbers(tiny, tmp_path, monkeypatch):
    def turned(data, family, scale, seed):
        runs = paired(data, family, scale, seed)
        return {**runs, samp.COMPLETE: runs[samp.UNIFORM], samp.UNIFORM: runs[samp.COMPLETE]}

    def item():
        return samp._training(tmp_path, load("digits"), "", "uniform", samp.QUICK, 1, lambda _: None)

    paired = samp._paired_runs
    one = item()
    monkeypatch.setattr(samp, "_paired_runs", turned)
    other = item()
    assert one.numbers["loss"][samp.UNIFORM] == other.numbers["loss"][samp.COMPLETE]
    assert not (one.verdict == other.verdict == "reproduced")
    for found in (one, other):
        loss = found.numbers["loss"]
        ordered = loss[samp.COMPLETE] <= loss[samp.OPTIMAL] <= loss[samp.UNIFORM]
        assert found.verdict == ("reproduced" if ordered else "differs")


def test_no_seeds_are_refused(tmp_path):
    with pytest.raises(InvalidInput):
        samp.reproduce(tmp_path, quick=True, seeds=0, data_dir=None, step=lambda _: None)
