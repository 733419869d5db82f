"""PyTorch modules as models: the two networks of the JDP paper, a dense one, and anybody's."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from xor_data import write_network, xor_data

import flmarket
from flmarket.errors import InvalidInput, UnknownName
from flmarket.learning import (
    LocalTraining,
    Model,
    OwnerStreams,
    Purpose,
    Records,
    accuracies,
    from_named,
    load,
    load_parameters,
    models,
    save_parameters,
    to_named,
    train_many,
    updates,
)
from flmarket.learning.model import visits
from flmarket.learning.networks import Dense, Network, network
from flmarket.learning.torch_model import TorchModel

NAMES = ["mnist-cnn", "cifar-cnn"]
MNIST_CNN, CIFAR_CNN = network("mnist-cnn"), network("cifar-cnn")


def trainer(name: str, threads: int = 1, **local: object) -> TorchModel:
    how = LocalTraining(**{"momentum": 0.9, "learning_rate": 0.001, "batch_size": 32} | local)  # type: ignore[arg-type]
    made = models.get(name, local=how, threads=threads)
    assert isinstance(made, TorchModel)
    return made


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def clients(network: Network, sizes: list[int], seed: int = 0) -> list[Records]:
    rng = np.random.default_rng(seed)
    xs = [rng.random((n, network.features)) for n in sizes]
    return [Records(x, rng.integers(0, 10, len(x))) for x in xs]


def streams(owners: list[int]) -> OwnerStreams:
    return OwnerStreams(3, 1, owners, Purpose.BATCHES)


def template(model: TorchModel) -> Network:
    assert isinstance(model.template, Network)
    return model.template


def layers(network: Network, flat: NDArray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parts, vector = [], torch.from_numpy(flat.astype(np.float32))
    for weights, biases in network.shapes():
        for shape in (weights, biases):
            count = int(np.prod(shape))
            parts.append(vector[:count].view(shape))
            vector = vector[count:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def module(name: str) -> nn.Sequential:
    """The same network from PyTorch's own layers, in PyTorch's own layout."""
    if name == "mnist-cnn":
        blocks = [nn.Conv2d(1, 8, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 16, 5), nn.MaxPool2d(2), nn.ReLU()]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 50), nn.ReLU(), nn.Linear(50, 10))
    channels, blocks = [3, 16, 16, 32, 32, 64, 64], []
    for k in range(6):
        blocks += [nn.Conv2d(channels[k], channels[k + 1], 3, padding=1), nn.ReLU()]
        blocks += [nn.MaxPool2d(2)] if k in (0, 1, 3) else []
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(1024, 10))


def loaded(name: str, network: Network, flat: NDArray) -> nn.Sequential:
    """`module` with the weights of a flat vector."""
    peer = module(name)
    trainable = [layer for layer in peer if isinstance(layer, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for layer, (weights, biases) in zip(trainable, layers(network, flat), strict=True):
            layer.weight.copy_(weights.movedim(-1, 1) if weights.ndim == 4 else weights)
            layer.bias.copy_(biases)
    return peer


def flattened(peer: nn.Sequential) -> NDArray:
    parts = []
    for layer in peer:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weights = layer.weight.movedim(1, -1) if layer.weight.ndim == 4 else layer.weight
            parts += [weights.detach().reshape(-1), layer.bias.detach()]
    return torch.cat(parts).numpy()


def pixels(network: Network, x: NDArray) -> torch.Tensor:
    """Images as PyTorch has them: channels, rows, columns, contiguous."""
    height, width, channels = network.image
    nhwc = ((x - network.mean) / network.deviation).reshape(-1, height, width, channels)
    return torch.from_numpy(np.ascontiguousarray(nhwc.transpose(0, 3, 1, 2)).astype(np.float32))


def start(network: Network, seed: int = 5) -> NDArray:
    """A start whose last layer is not zero, so that every layer has a gradient at once."""
    rng = np.random.default_rng(seed)
    return (flat := network.initial(rng)) + rng.normal(scale=0.02, size=flat.size)


@pytest.mark.parametrize(("network", "dimension"), [(MNIST_CNN, 16_784), (CIFAR_CNN, 82_330)])
def test_dimension_by_hand(network: Network, dimension: int) -> None:
    # (5·5·1+1)·8 + (5·5·8+1)·16 + 257·50 + 51·10; 28·16 + 145·16 + 145·32 + 289·32 + 289·64 + 577·64 + 1025·10
    assert network.initial(np.random.default_rng(0)).size == dimension
    assert trainer("mnist-cnn" if network is MNIST_CNN else "cifar-cnn").dimension == dimension


@pytest.mark.parametrize("name", NAMES)
def test_is_a_model(name: str) -> None:
    model = trainer(name)
    assert isinstance(model, Model)
    first, again = model.initial(1), model.initial(np.random.default_rng(1))
    assert first.dtype == np.float64
    np.testing.assert_array_equal(first, again)
    found = model.evaluate(first, clients(template(model), [30])[0])
    assert found["loss"] == pytest.approx(np.log(10))  # all classes equally likely at the start


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_accuracy_are_those_of_pytorch_layers(name: str) -> None:
    model = trainer(name)
    data = clients(template(model), [333])[0]
    vectors = np.stack([start(template(model), seed) for seed in range(3)])
    with torch.no_grad():
        scores = [loaded(name, template(model), row)(pixels(template(model), data.x)) for row in vectors]
    losses = [float(nn.functional.cross_entropy(s, torch.from_numpy(data.y))) for s in scores]
    found = [model.evaluate(row, data) for row in vectors]
    np.testing.assert_allclose([each["loss"] for each in found], losses, rtol=1e-5)
    right = [float((s.argmax(1).numpy() == data.y).mean()) for s in scores]
    np.testing.assert_allclose(accuracies(model, vectors, data), right, atol=1 / 333 + 1e-9)  # ties by rounding
    assert [each["accuracy"] for each in found] == accuracies(model, vectors, data).tolist()


def peer_training(name: str, model: TorchModel, flat: NDArray, data: Records, rng: np.random.Generator) -> NDArray:
    """torch.optim.SGD on PyTorch's layers over the same batches, with dropout masks drawn here."""
    peer, local = loaded(name, template(model), flat), model.local
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 63)))
    optimiser = torch.optim.SGD(peer.parameters(), lr=local.learning_rate, momentum=local.momentum)
    images, labels = pixels(template(model), data.x), torch.from_numpy(data.y)
    batch = min(len(data), local.batch_size or len(data))
    for rows in visits(rng, len(data), local.steps, batch):
        hidden = peer[:-1](images[rows])
        if name == "mnist-cnn":
            kept = torch.empty(batch, 50).bernoulli_(0.5, generator=generator)
            hidden = torch.where(kept > 0, 2 * hidden, 0.0)
        loss = nn.functional.cross_entropy(peer[-1](hidden), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return flattened(peer)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_torch_optim(name: str) -> None:
    model = trainer(name, learning_rate=0.05, momentum=0.8, batch_size=16, steps=4)
    data, flat = clients(template(model), [40, 9]), start(template(model))
    ours = train_many(model, flat, data, streams([4, 2]))
    for i, rng in enumerate(streams([4, 2])):
        peer = peer_training(name, model, flat, data[i], rng)
        assert np.abs(peer - flat).max() > 0.01  # it moved, so the next line says something
        np.testing.assert_allclose(ours[i], peer, atol=2e-5)


def test_a_step_is_the_slope_of_the_loss() -> None:
    model = trainer("cifar-cnn", learning_rate=1.0, momentum=0.0, batch_size=64, steps=1)
    data, flat = clients(CIFAR_CNN, [64])[0], start(CIFAR_CNN)
    gradient = flat.astype(np.float32) - model.train(flat, data, streams([0])[0])
    direction = gradient / np.linalg.norm(gradient)
    h = 1e-2
    up, down = (model.evaluate(flat + way * h * direction, data)["loss"] for way in (1, -1))
    assert (up - down) / (2 * h) == pytest.approx(np.linalg.norm(gradient), rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_does_not_depend_on_who_is_beside_her_nor_on_threads(name: str) -> None:
    sizes, owners = [40, 7, 33, 64], [11, 3, 70, 8]
    model, threaded = (trainer(name, threads, learning_rate=0.01, batch_size=16, epochs=1) for threads in (1, 2))
    data = clients(template(model), sizes)
    starts = np.stack([start(template(model), seed) for seed in range(4)])
    together = model.train_many(starts, data, streams(owners))
    for i, owner in enumerate(owners):
        np.testing.assert_array_equal(together[i], model.train(starts[i], data[i], streams([owner])[0]))
    order = [2, 0, 3, 1]
    again = threaded.train_many(starts[order], [data[i] for i in order], streams([owners[i] for i in order]))
    np.testing.assert_array_equal(again, together[order])
    large = clients(template(model), [300], seed=9)[0]
    np.testing.assert_array_equal(accuracies(threaded, starts, large), accuracies(model, starts, large))


def test_an_epoch_drops_what_fills_no_batch_and_a_small_client_uses_all() -> None:
    data, flat = clients(MNIST_CNN, [70, 5]), start(MNIST_CNN)
    epochs = trainer("mnist-cnn", epochs=2).train_many(flat, data, streams([0, 1]))
    for i, steps in enumerate((4, 2)):
        same = trainer("mnist-cnn", steps=steps).train(flat, data[i], streams([i])[0])
        np.testing.assert_array_equal(epochs[i], same)


def test_dropout_keeps_half_and_doubles_it_from_the_clients_own_stream() -> None:
    dense = MNIST_CNN.layers[2]
    assert isinstance(dense, Dense)
    mask = dense.mask(2_000, torch.Generator().manual_seed(1))
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert float(mask.mean()) == pytest.approx(1.0, abs=5 / np.sqrt(100_000))
    data = clients(MNIST_CNN, [10])[0]
    model = trainer("mnist-cnn")  # all ten records at once: only dropout is random
    one, other = (model.train(start(MNIST_CNN), data, streams([owner])[0]) for owner in (1, 2))
    assert np.abs(one - other).max() > 1e-6


def test_global_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    torch.set_num_threads(2)
    data = clients(MNIST_CNN, [10])[0]
    for model in (trainer("mnist-cnn"), TorchModel(dropping, 784, 10)):
        accuracies(model, model.train(model.initial(5), data, streams([1])[0]), data)
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.random.get_rng_state(), before)


def test_torch_loads_when_first_used() -> None:
    code = (
        "import sys, flmarket.learning as l; assert 'torch' not in sys.modules; "
        "l.models.get('mnist-cnn'); assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert flmarket.learning.TorchModel is TorchModel
    with pytest.raises(AttributeError, match="TorchModle"):
        flmarket.learning.TorchModle  # noqa: B018


def test_a_diverged_model_has_infinite_loss() -> None:
    found = trainer("mnist-cnn").evaluate(start(MNIST_CNN) * 1e30, clients(MNIST_CNN, [5])[0])
    assert found["loss"] == np.inf
    assert 0 <= found["accuracy"] <= 1


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda features, classes: nn.Linear(features + 1, classes), "takes records of 2 features"),
        (lambda features, classes: nn.Linear(features, classes + 1), r"scores of shape \(2, 3\)"),
        (lambda inputs, outputs: nn.Linear(inputs, outputs), r"TypeError.*build\(features, classes\)"),
        (lambda features, classes: 1 / 0, "ZeroDivisionError"), (lambda features, classes: None, "NoneType"),
    ],
)  # fmt: skip
def test_a_network_that_does_not_fit_is_refused_when_it_is_made(monkeypatch, build, complaint) -> None:
    monkeypatch.setattr(models, "_entries", dict(models._entries))
    models.register("own", build)
    with pytest.raises(InvalidInput, match=complaint):
        models.get("own", features=2, classes=3)


def test_bad_arguments() -> None:
    model, data = trainer("mnist-cnn"), clients(MNIST_CNN, [4])[0]
    rng = streams([0])[0]
    with pytest.raises(InvalidInput, match="parameters"):
        model.train(np.zeros(3), data, rng)
    with pytest.raises(InvalidInput, match="finite"):
        model.train(start(MNIST_CNN) * np.nan, data, rng)
    with pytest.raises(InvalidInput, match="784"):
        model.train(start(MNIST_CNN), Records(data.x[:, :700], data.y), rng)
    with pytest.raises(InvalidInput, match="classes from 0 to 9"):
        model.evaluate(start(MNIST_CNN), Records(data.x, data.y + 10))
    with pytest.raises(InvalidInput, match="threads"):
        trainer("mnist-cnn", threads=0)
    with pytest.raises(InvalidInput, match="30 features"):
        models.get("mnist-cnn", features=30, classes=2)
    with pytest.raises(UnknownName, match="mnist-cnn"):
        models.get("mnist")


# --- anybody's module -----------------------------------------------------------------------------------------------


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))


class Adapted(nn.Module):
    """A frozen backbone with batch norm, and a head to be trained: transfer learning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 3)
        self.register_buffer("offset", torch.ones(4))
        self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x + self.offset))


def blobs(n: int, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return Records(rng.normal(size=(n, 4)) + 3 * np.eye(4)[y], y)


def test_only_what_requires_a_gradient_is_trained_and_sent() -> None:
    torch.manual_seed(0)
    module = Adapted()
    before = copy.deepcopy(module.state_dict())
    model = TorchModel(module, 4, 3, LocalTraining(steps=40, batch_size=16, learning_rate=0.3))
    assert dict(model.tensors) == {"head.weight": (3, 32), "head.bias": (3,)}
    flat = model.initial()
    np.testing.assert_array_equal(flat[:96].reshape(3, 32), module.head.weight.detach().numpy())
    end = model.train(flat, blobs(200), np.random.default_rng(0))
    assert model.evaluate(end, blobs(200, 1))["accuracy"] > 0.9 > model.evaluate(flat, blobs(200, 1))["accuracy"]
    for name, part in module.state_dict().items():  # nothing of the user's module moved, running statistics included
        assert torch.equal(part, before[name]), name


def test_the_same_generator_gives_the_same_result_with_dropout() -> None:
    data = clients(MNIST_CNN, [40, 30])
    model = TorchModel(dropping, 784, 10, LocalTraining(steps=5, batch_size=8), threads=2)
    flat = model.initial(3)
    np.testing.assert_array_equal(flat, model.initial(3))
    assert not np.array_equal(flat, model.initial(4))
    torch.manual_seed(1)
    one = model.train_many(flat, data, streams([1, 2]))
    torch.manual_seed(2)
    np.testing.assert_array_equal(one, model.train_many(flat, data, streams([1, 2])))
    np.testing.assert_array_equal(one[1], model.train(flat, data[1], streams([2])[0]))
    small = Records(data[0].x[:8], data[0].y[:8])  # one batch: only dropout differs between two owners
    assert not np.array_equal(*model.train_many(flat, [small, small], streams([1, 2])))


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.7}])
def test_optimizers_are_those_of_torch(settings: dict[str, object]) -> None:
    data = blobs(60)
    local = LocalTraining(steps=6, learning_rate=0.05, **settings)  # type: ignore[arg-type]
    model = models.get("mlp", features=4, classes=3, local=local, hidden=[5])
    flat = model.initial(1)
    peer = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.utils.vector_to_parameters(torch.from_numpy(flat.astype(np.float32)), peer.parameters())
    kinds = {"adam": lambda p: torch.optim.Adam(p, lr=0.05), "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.7)}
    optimiser = kinds[local.optimizer](peer.parameters())
    for _ in range(6):
        optimiser.zero_grad()
        nn.functional.cross_entropy(
            peer(torch.from_numpy(data.x.astype(np.float32))), torch.from_numpy(data.y)
        ).backward()
        optimiser.step()
    expected = nn.utils.parameters_to_vector(peer.parameters()).detach().numpy()
    np.testing.assert_allclose(model.train(flat, data, np.random.default_rng(0)), expected, atol=1e-6)


def test_numbers_leave_in_the_models_own_type(tmp_path: Path) -> None:
    model = models.get("mlp", features=4, classes=3)
    flat = model.train(model.initial(0), blobs(20), np.random.default_rng(0))
    named = to_named(model, flat)
    assert list(named) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {part.dtype for part in named.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(from_named(model, named), flat)  # trained numbers are float32: nothing is lost
    peer = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    peer.load_state_dict({name: torch.from_numpy(part) for name, part in named.items()})
    save_parameters(model, flat, tmp_path / "m.safetensors")
    np.testing.assert_array_equal(load_parameters(model, tmp_path / "m.safetensors"), flat)
    double = TorchModel(lambda: nn.Linear(4, 3).double(), 4, 3)
    assert to_named(double, double.initial())["weight"].dtype == np.float64


@pytest.mark.parametrize("make", [lambda: models.get("mlp", features=4, classes=3), lambda: trainer("mnist-cnn")])
def test_models_can_be_pickled(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.initial(2), model.initial(2))
    assert dict(again.tensors) == dict(model.tensors)


def test_modules_that_cannot_serve_are_refused() -> None:
    frozen = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(InvalidInput, match="requires a gradient"):
        TorchModel(frozen, 4, 3)
    with pytest.raises(InvalidInput, match=r"torch\.nn\.Module"):
        TorchModel(lambda: 3, 4, 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidInput, match="float type"):
        TorchModel(nn.Linear(4, 3).to(torch.bfloat16), 4, 3)
    with pytest.raises(InvalidInput, match="float type"):
        TorchModel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).double()), 4, 3)
    for odd in (nn.Linear(4, 2), nn.LSTM(4, 3)):
        with pytest.raises(InvalidInput, match="module's answer"):
            TorchModel(odd, 4, 3).evaluate(TorchModel(odd, 4, 3).initial(), blobs(5))
    with pytest.raises(InvalidInput, match="hidden"):
        models.get("mlp", features=4, classes=3, hidden=[0])
    with pytest.raises(InvalidInput, match="depth"):
        models.get("mlp", features=4, classes=3, depth=2)


def test_images_can_come_in_their_shape() -> None:
    model = TorchModel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), 16, 3, shape=(1, 4, 4))
    rng = np.random.default_rng(0)
    data = Records(rng.normal(size=(10, 16)), rng.integers(0, 3, 10))
    assert model.evaluate(model.train(model.initial(), data, rng), data)["loss"] > 0


def test_owners_learn_xor_with_a_network_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What softmax regression cannot: plain federated averaging of several owners' updates."""
    name = write_network(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(models, "_entries", dict(models._entries))
    data = xor_data()
    owners = [Records(data.x_train[i::5], data.y_train[i::5]) for i in range(5)]

    def learned(name: str) -> float:
        local = LocalTraining(steps=20, batch_size=16, learning_rate=0.3)
        model = models.get(models.admit(name), features=2, classes=2, local=local)
        parameters = model.initial(0)
        for r in range(30):
            rngs = OwnerStreams(0, r, range(5), Purpose.BATCHES)
            parameters = parameters - updates(model, parameters, owners, rngs).mean(axis=0)
        return model.evaluate(parameters, data.test)["accuracy"]

    assert learned(name) >= 0.95
    assert learned("mlp") >= 0.95
    assert learned("softmax") < 0.7


@pytest.mark.realdata
def test_eight_clients_learn_mnist(data_dir: Path) -> None:
    data = load("mnist", data_dir, download=False)
    model = trainer("mnist-cnn", learning_rate=0.03, epochs=1)
    parameters = model.initial(0)
    owners = [Records(data.x_train[i : i + 500], data.y_train[i : i + 500]) for i in range(0, 4_000, 500)]
    for r in range(4):
        parameters = model.train_many(parameters, owners, OwnerStreams(0, r, range(8), Purpose.BATCHES)).mean(axis=0)
    test = Records(data.x_test[:2_000], data.y_test[:2_000])
    assert model.evaluate(parameters, test)["accuracy"] > 0.75
