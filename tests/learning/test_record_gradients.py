"""Means of clipped gradients of single records: what markets that protect records release, for any model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import approx_fprime
from torch import nn

from flmarket.errors import InvalidInput
from flmarket.learning import Model, Pool, Records, SoftmaxRegression, clipped_gradients, models
from flmarket.learning.torch_model import TorchModel

SIZES = [1, 7, 7, 40, 3]
CLIPS = [0.3, 1.5, 100.0]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def owners(features: int, classes: int, sizes: list[int] = SIZES, seed: int = 0) -> list[Records]:
    rng = np.random.default_rng(seed)
    return [Records(rng.normal(size=(m, features)) * 2, rng.integers(0, classes, m)) for m in sizes]


def clipped(gradients: NDArray, clip: float) -> NDArray:
    """The mean, one record at a time."""
    return np.mean([g * min(1.0, clip / np.linalg.norm(g)) for g in gradients], axis=0)


class InPlace(nn.Module):
    """Writes into a tensor that is no batch, which `vmap` cannot; takes one way or the other by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(x), 4)
        out[:, :] = x
        return self.layer(out) if float(x.sum()) > 0 else self.layer(-out)


class Named(nn.Module):
    """Looks features up: a value that is no row of the table raises, for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(x.abs().long()).flatten(1))


def frozen_backbone() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.GELU(), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    return net


NETWORKS = {
    "mlp": lambda: models.get("mlp", features=4, classes=3, hidden=[5]),
    "partly frozen, running statistics": lambda: TorchModel(frozen_backbone, 4, 3),
    "tied": lambda: TorchModel(lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 3)), 4, 3),
    "images": lambda: TorchModel(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2, 3)), 4, 3,
        shape=(1, 2, 2),
    ),
    "not for vmap": lambda: TorchModel(InPlace, 4, 3),
    "double": lambda: TorchModel(lambda: nn.Linear(4, 3).double(), 4, 3),
}  # fmt: skip


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("classes", [2, 4])
def test_softmax_equals_slopes_taken_by_differences(classes: int, clip: float) -> None:
    model = SoftmaxRegression(5, classes)
    params, data = np.random.default_rng(1).normal(size=model.dimension), owners(5, classes)
    data[1].x[0], data[1].x[1] = 0.0, 60.0  # only the biases have a gradient; residuals are 0 or 1
    slopes = [
        np.array([approx_fprime(params, model.loss, 1e-7, own.x[[i]], own.y[[i]]) for i in range(len(own))])
        for own in data
    ]
    expected = [clipped(part, clip) for part in slopes]
    np.testing.assert_allclose(clipped_gradients(model, params, data, clip), expected, atol=2e-5)


@pytest.mark.parametrize("penalise_biases", [False, True])
def test_the_penalty_is_nobodys_record(penalise_biases: bool) -> None:
    """It is added whole, after clipping: public, so it moves nothing that a record moves."""
    plain = SoftmaxRegression(4, 3)
    params, data = np.random.default_rng(1).normal(size=plain.dimension), owners(4, 3)
    more = clipped_gradients(replace(plain, l2=0.3, penalise_biases=penalise_biases), params, data, 0.5)
    penalised = params if penalise_biases else np.concatenate([params[:12], np.zeros(3)])
    np.testing.assert_allclose(more - clipped_gradients(plain, params, data, 0.5), [0.3 * penalised] * 5, atol=1e-12)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_equal_autograd_one_record_at_a_time(name: str, clip: float) -> None:
    model = NETWORKS[name]()
    module, params = model._built(0), model.initial(0)
    trained = [part for part in module.parameters() if part.requires_grad]
    nn.utils.vector_to_parameters(torch.from_numpy(params.astype(model.dtype)), trained)
    module.eval()
    expected = []
    for own in (data := owners(4, 3)):
        rows = []
        for x, y in zip(own.x.astype(model.dtype), own.y, strict=True):
            scores = module(torch.from_numpy(x).reshape(1, *(model.shape or (4,))))
            loss = nn.functional.cross_entropy(scores, torch.tensor([y]))
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]).double().numpy())
        expected.append(clipped(np.array(rows), clip))
    assert model._maps == (name != "not for vmap")
    np.testing.assert_allclose(clipped_gradients(model, params, data, clip), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: SoftmaxRegression(4, 3), NETWORKS["mlp"], NETWORKS["not for vmap"]])
def test_an_owner_has_the_same_bits_in_any_company(make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = make(), owners(4, 3)
    params = np.random.default_rng(2).normal(size=model.dimension)
    together = clipped_gradients(model, params, Pool.of(data), 0.5)
    assert np.array_equal(together, clipped_gradients(model, params, data, 0.5))
    for k in ([0], [3], [4, 1], [1, 2]):
        assert np.array_equal(clipped_gradients(model, params, [data[i] for i in k], 0.5), together[k])
    monkeypatch.setattr("flmarket.learning.model.GRADIENT_VALUES", 1)  # one record at a time
    np.testing.assert_allclose(clipped_gradients(model, params, data, 0.5), together, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["mnist-cnn", "cifar-cnn"])
def test_the_networks_short_cut_is_the_sum_of_what_vmap_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outer products and patches against one gradient after the other; records that cannot count do not count."""
    model = models.get(name)
    rng = np.random.default_rng(4)
    x, y = rng.random((12, model.features)), rng.integers(0, 10, 12)
    params = model.initial(0) + 0.05 * rng.normal(size=model.dimension)  # the last layer starts at zero
    x[3], y[5], x[7] = np.nan, 10, 1e30
    short = [clipped_gradients(model, params, [Records(x, y)], clip)[0] for clip in CLIPS]
    monkeypatch.setattr(TorchModel, "clipped_sum", lambda *_: None)
    for found, clip in zip(short, CLIPS, strict=True):
        expected = clipped_gradients(model, params, [Records(x, y)], clip)[0]
        assert np.linalg.norm(expected) > 0.1
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6 * np.abs(expected).max())


def test_the_networks_short_cut_keeps_to_the_clip_whatever_a_record_holds() -> None:
    model, clip, m = models.get("mnist-cnn"), 0.7, 9
    rng = np.random.default_rng(3)
    x, y = rng.random((m, 784)), rng.integers(0, 10, m)
    params = model.initial(0) + 0.05 * rng.normal(size=model.dimension)
    before = clipped_gradients(model, params, [Records(x, y)], clip)[0]
    for feature, label in BAD:
        other, labels = x.copy(), y.copy()
        other[4], labels[4] = feature, label
        after = clipped_gradients(model, params, [Records(other, labels)], clip)[0]
        assert np.isfinite(after).all()
        assert np.linalg.norm(after - before) <= 2 * clip / m * (1 + 1e-12)
        assert np.linalg.norm(after) > 0.01


BAD = [(1e308, 0), (np.nan, 1), (np.inf, 0), (1e30, 2), (0.0, 3), (0.0, -1), (1e160, 9), (100.0, 0)]


@pytest.mark.parametrize(
    "make", [lambda: SoftmaxRegression(4, 3), lambda: SoftmaxRegression(4, 2), *NETWORKS.values(),
             lambda: TorchModel(Named, 4, 3)]
)  # fmt: skip
def test_one_record_moves_the_mean_by_its_share_only_whatever_it_holds(make) -> None:
    model: Model = make()
    rng, clip, m = np.random.default_rng(3), 0.7, 9
    own = owners(4, 2, [m])[0]
    for feature, label in [*BAD, *zip(rng.normal(size=6) * 1000, rng.integers(0, 2, 6), strict=True)]:
        params = model.initial(0) + rng.normal(size=model.initial(0).size)
        x, y = own.x.copy(), own.y.copy()
        x[4], y[4] = feature, label
        before, after = (clipped_gradients(model, params, [each], clip)[0] for each in (own, Records(x, y)))
        assert np.isfinite(after).all()
        assert np.linalg.norm(after - before) <= 2 * clip / m * (1 + 1e-12)
        assert min(np.linalg.norm(before), np.linalg.norm(after)) > 0.01  # the others still count


def test_a_record_that_makes_the_model_raise_counts_as_zero_and_moves_no_bit_of_the_others() -> None:
    model, own = TorchModel(Named, 4, 3), owners(4, 3, [6])[0]
    x = np.clip(own.x, -4, 4)
    params = model.initial(0)
    gradients = model.record_gradients(params, Records(x, own.y))
    x[2] = 77.0
    with pytest.raises(IndexError):
        model.record_gradients(params, Records(x, own.y))
    kept = np.delete(gradients, 2, axis=0)
    expected = (0.1 / np.linalg.norm(kept, axis=1) / 6) @ kept
    np.testing.assert_allclose(clipped_gradients(model, params, [Records(x, own.y)], 0.1)[0], expected, rtol=1e-12)


@dataclass(frozen=True)
class Mine:
    """Somebody's own model, without PyTorch: one number, its square distance."""

    features: int = 1
    classes: int = 2
    tensors = {"at": (1,)}  # noqa: RUF012

    def initial(self, seed=0):
        return np.zeros(1)

    def train(self, parameters, data, rng):
        return parameters

    def evaluate(self, parameters, data):
        return {"accuracy": 0.0, "balanced_accuracy": 0.0, "loss": 0.0}


class Slopes(Mine):
    def record_gradients(self, parameters, data):
        return parameters - data.x


def test_models_of_ones_own_give_their_records_gradients_or_are_refused() -> None:
    data = [Records(np.array([[1.0], [-3.0]]), np.array([0, 1]))]
    assert clipped_gradients(Slopes(), [0.5], data, 1.0)[0, 0] == pytest.approx((-0.5 + 1.0) / 2, rel=1e-12)
    with pytest.raises(InvalidInput, match="record_gradients") as refused:
        clipped_gradients(Mine(), [0.5], data, 1.0)
    assert refused.value.value == "Mine"


def test_what_fails_for_any_record_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    data = owners(1, 2)
    monkeypatch.setattr(Slopes, "record_gradients", lambda self, parameters, data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clipped_gradients(Slopes(), [0.5], data, 1.0)
    monkeypatch.setattr(Slopes, "record_gradients", lambda self, parameters, data: data.x[:1])  # right for one record
    with pytest.raises(InvalidInput, match="shape"):
        clipped_gradients(Slopes(), [0.5], data[:1], 1.0)


def test_what_makes_no_sense_is_refused() -> None:
    mixing = TorchModel(lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)), 4, 3)
    with pytest.raises(InvalidInput, match="BatchNorm1d") as refused:
        clipped_gradients(mixing, mixing.initial(), owners(4, 3), 1.0)
    assert refused.value.field == "module"
    for model in (SoftmaxRegression(4, 3), NETWORKS["mlp"]()):
        start, data = model.initial(), owners(4, 3)
        for clip in (0.0, -1.0, np.nan, np.inf):
            with pytest.raises(InvalidInput, match="clip"):
                clipped_gradients(model, start, data, clip)
        with pytest.raises(InvalidInput, match="parameters"):
            clipped_gradients(model, start[1:], data, 1.0)
        for bad in ([], owners(5, 3), [Records(np.empty((0, 4)), np.empty(0, dtype=np.int64))]):
            with pytest.raises(InvalidInput):
                clipped_gradients(model, start, bad, 1.0)
