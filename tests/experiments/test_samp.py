import dataclasses
import json

import numpy as np
import pytest

from flmarket.errors import DataUnavailable
from flmarket.experiments import samp
from flmarket.experiments.items import Job
from flmarket.learning import SoftmaxRegression, load


def without_images(name, data_dir=None, download=True):
    if name != "digits":
        raise DataUnavailable(name)
    return load(name)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(
        samp, "QUICK",
        dataclasses.replace(samp.QUICK, records=400, clients=12, rounds=4, population=40, learners=(20, 80)),
    )  # fmt: skip
    monkeypatch.setattr(samp, "RUNS", (1, 1))
    monkeypatch.setattr(samp, "load", without_images)


def test_every_item_has_its_files_figures_and_a_verdict(tiny, tmp_path):
    job = Job(tmp_path, quick=True, seeds=range(2))
    made = [work(job) for work in samp.ITEMS.values()]
    items = [item for one in made for item in (one if isinstance(one, tuple) else (one,))]
    assert [item.key for item in items] == [
        "samp-q",
        "samp-average-q",
        "samp-prior",
        "samp-loss-digits-uniform",  # once, although two data sets are missing
        "samp-loss-digits-exponential",
    ]
    for item in items:
        assert item.verdict in ("reproduced", "differs", "undecided")
        assert all((tmp_path / name).stat().st_size > 100 for name in item.files)
        assert json.loads(json.dumps(item.numbers, allow_nan=False))
    assert items[0].verdict == items[1].verdict == "reproduced"  # exact, at any scale
    assert "stands in for mnist" in items[-1].note
    assert set(items[-1].numbers["loss"]) == set(samp.SCHEMES)


def test_all_mechanisms_of_figure_4_know_the_same_support(tiny, tmp_path):
    """Told c_max = 10 where costs end at 2.5, uniform sampling looked four times worse than it is."""
    item = samp.fig4(Job(tmp_path, quick=True, seeds=range(2)))
    assert item.numbers["uniform"]["uniform"][0] == pytest.approx(1 / 2.5)
    assert item.numbers["exponential"]["uniform"][0] == pytest.approx(1 / 10)


@dataclasses.dataclass
class Planted:
    loss: np.ndarray
    rounds: tuple = (dataclasses.make_dataclass("R", ["accuracy"])(0.5),)
    spent_micros: int = 0


@pytest.mark.parametrize(
    ("levels", "order", "ratio"),
    [
        ((0.4, 0.47, 0.48, 0.5), "reproduced", "reproduced"),  # 94 %
        ((0.5, 0.49, 0.48, 0.47), "differs", "differs"),
        ((0.4, 0.49, 0.48, 0.5), "reproduced", "differs"),  # 98 %
    ],
)
def test_verdicts_follow_the_numbers(tiny, tmp_path, monkeypatch, levels, order, ratio):
    def planted(data, family, scale, seed):
        noise = np.random.default_rng(seed).normal(0, 0.001, len(levels))
        return {n: Planted(np.full(4, v + e)) for n, v, e in zip(samp.SCHEMES, levels, noise, strict=True)}

    monkeypatch.setattr(samp, "_paired_runs", planted)
    monkeypatch.setattr(samp, "_least_loss", lambda data: 0.1)
    data = dataclasses.replace(load("digits"), name="mnist")
    uniform, exponential = (
        samp._training(Job(tmp_path, True, range(20)), data, "", family) for family in ("uniform", "exponential")
    )
    verdicts = {check.key: check.verdict for check in uniform.checks}
    assert (verdicts["order"], verdicts["ratio"]) == (order, ratio)
    assert "ratio" not in {check.key for check in exponential.checks}  # printed for Figure 2 only


def test_the_least_loss_is_a_minimum():
    data = load("digits")
    model = SoftmaxRegression(data.features, data.n_classes, samp.L2, penalise_biases=True)
    least = samp._least_loss(data)
    rng = np.random.default_rng(0)
    for _ in range(5):
        assert model.loss(rng.normal(0, 0.5, model.dimension), data.x_train, data.y_train) > least
    assert 0 < least < 0.1
