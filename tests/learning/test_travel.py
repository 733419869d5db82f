"""Models on their way to another machine: the text is the model, and a stranger's text is only a text."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from xor_data import write_network

from flmarket.errors import InvalidInput, UnknownName
from flmarket.learning import (
    LocalTraining,
    Model,
    OwnerStreams,
    Purpose,
    Records,
    SoftmaxRegression,
    at_rate,
    built,
    described,
    models,
    updates,
)
from flmarket.learning.torch_model import TorchModel

LOCAL = LocalTraining(steps=3, batch_size=4, learning_rate=0.30000000000000004, momentum=0.9)


@pytest.fixture(autouse=True)
def _own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(models, "_entries", dict(models._entries))


class Net(nn.Module):
    """A user's class, with settings of its own and dropout."""

    def __init__(self, features: int, classes: int, width: int = 3, shares: tuple[float, ...] = (0.5,)) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(features, width), nn.Dropout(shares[0]))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@dataclass
class Mine:
    """A user's model without PyTorch; its local work is not asked for by the factory."""

    features: int
    classes: int
    size: int = 4
    local: LocalTraining = field(default_factory=LocalTraining, init=False)

    @property
    def tensors(self):
        return {"at": (self.size,)}

    def initial(self, seed=0):
        return np.zeros(self.size)

    def train(self, parameters, data, rng):
        return parameters - self.local.learning_rate * data.x.mean()

    def evaluate(self, parameters, data):
        return {"accuracy": 0.0, "balanced_accuracy": 0.0, "loss": 0.0}


def made(name: str, **settings: object) -> Model:
    return models.get(models.admit(name), **{"features": 4, "classes": 3, "local": LOCAL} | settings)


CASES = {
    "softmax": lambda: SoftmaxRegression(4, 3),
    "softmax by name": lambda: made("softmax", l2=np.float64(0.25), penalise_biases=True, shape=(2, 2)),
    "mlp": lambda: made("mlp", hidden=(5, 2), threads=2),
    "adam": lambda: made("mlp", local=LocalTraining(epochs=2, optimizer="adam")),
    "mnist": lambda: models.get("mnist-cnn", local=LOCAL),
    "cifar": lambda: models.get("cifar-cnn", features=3072, classes=10, local=LOCAL, shape=(32, 32, 3)),
    "a class": lambda: made("net", width=np.int64(5), shares=(0.25,), shape=(2, 2)),
    "a file": lambda: made(write_network(Path.cwd())),
    "another rate": lambda: at_rate(made("net"), 0.01),
    "no network": lambda: at_rate(made("mine", size=3), 0.01),
}


def some(model: Model) -> Records:
    rng = np.random.default_rng(0)
    return Records(rng.random((9, model.features)), rng.integers(0, model.classes, 9))


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_the_model(case: str) -> None:
    models.register("net", Net)
    models.register("mine", Mine)
    model = CASES[case]()
    text = described(model)
    assert len(text) <= 2_000
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    again = built(text, allow=["my_xor_network:build"])
    assert type(again) is type(model)
    assert described(again) == text
    assert described(pickle.loads(pickle.dumps(model))) == text
    assert again.tensors == model.tensors
    assert again.local == model.local
    np.testing.assert_array_equal(again.initial(7), model.initial(7))
    start, rngs = model.initial(7), OwnerStreams(1, 2, [3], Purpose.BATCHES)
    np.testing.assert_array_equal(*(updates(each, start, [some(model)], rngs) for each in (again, model)))
    if isinstance(model, SoftmaxRegression):
        assert again == model


def test_on_another_machine_it_is_the_same_to_the_last_bit() -> None:
    model = made(write_network(Path.cwd()))
    code = (
        "import sys; from flmarket.learning import built; m = built(sys.argv[1], ['my_xor_network:build'])\n"
        "print(m.initial(5).tobytes().hex())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, described(model)], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == model.initial(5).tobytes().hex()


def test_softmax_travels_without_pytorch() -> None:
    code = (
        "import sys; from flmarket.learning import *; built(described(SoftmaxRegression(4, 3)))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_models_that_the_registry_did_not_make_are_refused_with_the_remedy() -> None:
    class Special(SoftmaxRegression):
        pass

    for model in (TorchModel(lambda: nn.Linear(4, 3), 4, 3), Mine(4, 3), Special(4, 3)):
        with pytest.raises(InvalidInput, match=r"models\.register"):
            described(model)
    models.register("net", Net)
    for settings in ({"shares": (object(),)}, {"shares": (0.1,) * 700}, {"shares": (float("nan"),)}):
        model = TorchModel(lambda: nn.Linear(4, 3), 4, 3, origin=("net", settings))
        with pytest.raises(InvalidInput, match="settings"):
            described(model)


def test_paths_are_imported_only_if_this_machine_allows_them() -> None:
    name = write_network(Path.cwd(), "planted")
    (Path.cwd() / "planted.py").write_text("raise SystemExit('ran')")
    text = changed(name=name, settings={})
    for allow in ((), [name.upper()], "planted:build planted", ["planted"]):
        with pytest.raises(UnknownName):
            built(text, allow)
    assert "planted" not in sys.modules
    made(write_network(Path.cwd()))  # admitted by this machine's user for something else
    with pytest.raises(UnknownName):
        built(changed(name="my_xor_network:build", settings={}))


def changed(**fields: object) -> str:
    about = json.loads(described(made("mlp", hidden=[5]))) | fields
    return json.dumps(about, sort_keys=True, separators=(",", ":"))


def local(**fields: object) -> dict[str, object]:
    return json.loads(described(made("mlp")))["local"] | fields


HOSTILE = {
    "wide": {"settings": {"hidden": [10**9]}},
    "two wide": {"settings": {"hidden": [100_000, 100_000]}},
    "many": {"settings": {"hidden": [9_999] * 300}},
    "features": {"features": 10**8},
    "more than 64 bits": {"name": "net", "settings": {"width": 10**30}},
    "a network of the user's": {"name": "net", "settings": {"width": 10**8}},
    "no network": {"name": "mine", "settings": {"size": 10**12}},
    "softmax": {"name": "softmax", "settings": {}, "features": 10**7, "classes": 50},
    "settings no factory takes": {"settings": {"depth": 3}},
    "settings of another type": {"settings": {"hidden": 5}},
    "what the factory raises": {"name": "net", "settings": {"width": "x"}},
    "a field twice": {"settings": {"features": 9}},
    "no settings": {"settings": []},
    "truth": {"name": "softmax", "settings": {"penalise_biases": 1}},
    "a default": {"name": "softmax", "settings": {"l2": 0.0}},
    "negative": {"features": -4},
    "a fraction": {"features": 4.0},
    "truth as number": {"classes": True},
    "one class": {"classes": 1},
    "shape": {"shape": [4, 2]},
    "shapes": {"shape": [[4]]},
    "empty shape": {"shape": []},
    "long shape": {"shape": [1] * 8 + [4]},
    "unknown": {"name": "nope"},
    "no name": {"name": None},
    "empty": {"name": ""},
    "code": {"name": "os:system"},
    "another field": {"code": "import os"},
    "local": {"local": {"steps": 1}},
    "steps": {"local": local},
    "other network": {"name": "mnist-cnn", "settings": {}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_text_is_refused_at_once(case: str) -> None:
    models.register("net", Net)
    models.register("mine", Mine)
    texts = [changed(**HOSTILE[case])] if case != "steps" else [
        changed(local=local(**fields))
        for fields in (
            {"steps": 10**9}, {"steps": 0}, {"steps": 1.5}, {"epochs": 5}, {"epochs": 10**6, "steps": 1},
            {"batch_size": "all"}, {"learning_rate": "fast"}, {"learning_rate": True}, {"learning_rate": -1},
            {"momentum": None}, {"momentum": 1}, {"optimizer": "lbfgs"}, {"optimizer": []}, {"steps": None},
            {"learning_rate": 10**400},
        )
    ]  # fmt: skip
    for text in texts:
        began = time.process_time()
        with pytest.raises(InvalidInput):
            built(text)
        assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 1999, '{"name":NaN}', '{"name":1e999}', "x" * 3000, 5, None, b"{}"]
)
def test_what_is_no_description_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput, match="model"):
        built(text)


def test_a_model_has_one_text() -> None:
    """Spaces, another order or a field twice would let two texts, with two fingerprints, be one model."""
    text = described(made("mlp"))
    twice = text.replace('"features":4', '"features":9,"features":4')
    for other in (text.replace(",", ", "), " " + text, json.dumps(json.loads(text)), twice):
        assert json.loads(other) == json.loads(text)
        with pytest.raises(InvalidInput, match="canonical"):
            built(other)
