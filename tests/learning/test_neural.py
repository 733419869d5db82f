from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import flmarket
from flmarket.errors import InvalidInput, UnknownName
from flmarket.learning import OwnerStreams, Purpose, load
from flmarket.learning.local_model import LocalModel
from flmarket.learning.neural import CIFAR_CNN, MNIST_CNN, Architecture, ClientTrainer
from flmarket.learning.updates import visits

NAMES = ["mnist-cnn", "cifar-cnn"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def clients(network: Architecture, sizes: list[int], seed: int = 0) -> tuple[list[NDArray], list[NDArray]]:
    rng = np.random.default_rng(seed)
    return [rng.random((n, network.features)) for n in sizes], [rng.integers(0, 10, n) for n in sizes]


def streams(owners: list[int]) -> OwnerStreams:
    return OwnerStreams(3, 1, owners, Purpose.BATCHES)


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


def loaded(name: str, network: Architecture, flat: NDArray) -> nn.Sequential:
    """`module` with the weights of a flat vector."""
    peer, layers = module(name), network.split(torch.from_numpy(flat.astype(np.float32)))
    trainable = [layer for layer in peer if isinstance(layer, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for layer, (weights, biases) in zip(trainable, layers, strict=True):
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


def pixels(network: Architecture, x: NDArray) -> torch.Tensor:
    """Images as PyTorch has them: channels, rows, columns, contiguous."""
    height, width, channels = network.image
    nhwc = ((x - network.mean) / network.deviation).reshape(-1, height, width, channels)
    return torch.from_numpy(np.ascontiguousarray(nhwc.transpose(0, 3, 1, 2)).astype(np.float32))


def start(network: Architecture, seed: int = 5) -> NDArray:
    """A start whose last layer is not zero, so that every layer has a gradient at once."""
    rng = np.random.default_rng(seed)
    return network.initial(rng) + rng.normal(scale=0.02, size=network.dimension)


@pytest.mark.parametrize(("network", "dimension"), [(MNIST_CNN, 16_784), (CIFAR_CNN, 82_330)])
def test_dimension_by_hand(network: Architecture, dimension: int) -> None:
    # (5·5·1+1)·8 + (5·5·8+1)·16 + 257·50 + 51·10; 28·16 + 145·16 + 145·32 + 289·32 + 289·64 + 577·64 + 1025·10
    assert ClientTrainer(network.name, epochs=1).dimension == network.dimension == dimension


@pytest.mark.parametrize("name", NAMES)
def test_is_a_local_model(name: str) -> None:
    trainer = ClientTrainer(name, steps=1)
    assert isinstance(trainer, LocalModel)
    first, again = trainer.initial(np.random.default_rng(1)), trainer.initial(np.random.default_rng(1))
    assert first.dtype == np.float64
    np.testing.assert_array_equal(first, again)
    x, y = clients(trainer.network, [30])
    assert trainer.loss(first, x[0], y[0]) == pytest.approx(np.log(10))  # all classes equally likely at the start


@pytest.mark.parametrize("name", NAMES)
def test_scores_loss_and_accuracy_are_those_of_pytorch_layers(name: str) -> None:
    trainer = ClientTrainer(name, steps=1)
    network = trainer.network
    x, y = (part[0] for part in clients(network, [333]))
    vectors = np.stack([start(network, seed) for seed in range(3)])
    with torch.no_grad():
        scores = [loaded(name, network, row)(pixels(network, x)) for row in vectors]
    losses = [float(nn.functional.cross_entropy(s, torch.from_numpy(y))) for s in scores]
    np.testing.assert_allclose(trainer.loss(vectors, x, y), losses, rtol=1e-5)
    right = [float((s.argmax(1).numpy() == y).mean()) for s in scores]
    np.testing.assert_allclose(trainer.accuracy(vectors, x, y), right, atol=1 / 333 + 1e-9)  # ties by rounding


def peer_training(trainer: ClientTrainer, flat: NDArray, x: NDArray, y: NDArray, rng: np.random.Generator) -> NDArray:
    """torch.optim.SGD on PyTorch's layers over the same batches, with dropout masks drawn here."""
    network = trainer.network
    peer = loaded(trainer.architecture, network, flat)
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 63)))
    optimiser = torch.optim.SGD(peer.parameters(), lr=trainer.learning_rate, momentum=trainer.momentum)
    images, labels, batch = pixels(network, x), torch.from_numpy(y), min(len(y), trainer.batch_size)
    for rows in visits(rng, len(y), trainer.steps, batch):
        hidden = peer[:-1](images[rows])
        if trainer.architecture == "mnist-cnn":
            kept = torch.empty(batch, 50).bernoulli_(0.5, generator=generator)
            hidden = torch.where(kept > 0, 2 * hidden, 0.0)
        loss = nn.functional.cross_entropy(peer[-1](hidden), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return flattened(peer)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_torch_optim(name: str) -> None:
    trainer = ClientTrainer(name, learning_rate=0.05, momentum=0.8, batch_size=16, steps=4)
    xs, ys = clients(trainer.network, [40, 9])
    flat = start(trainer.network)
    ours = trainer.train(flat, xs, ys, streams([4, 2]))
    for i, rng in enumerate(streams([4, 2])):
        peer = peer_training(trainer, flat, xs[i], ys[i], rng)
        assert np.abs(peer - flat).max() > 0.01  # it moved, so the next line says something
        np.testing.assert_allclose(ours[i], peer, atol=2e-5)


def test_a_step_is_the_slope_of_the_loss() -> None:
    trainer = ClientTrainer("cifar-cnn", learning_rate=1.0, momentum=0.0, batch_size=64, steps=1)
    xs, ys = clients(trainer.network, [64])
    flat = start(trainer.network)
    gradient = flat.astype(np.float32) - trainer.train(flat, xs, ys, streams([0]))[0]
    direction = gradient / np.linalg.norm(gradient)
    h = 1e-2
    up, down = trainer.loss(np.stack([flat + h * direction, flat - h * direction]), xs[0], ys[0])
    assert (up - down) / (2 * h) == pytest.approx(np.linalg.norm(gradient), rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_does_not_depend_on_who_is_beside_her_nor_on_threads(name: str) -> None:
    sizes, owners = [40, 7, 33, 64], [11, 3, 70, 8]
    trainer = ClientTrainer(name, learning_rate=0.01, batch_size=16, epochs=1)
    xs, ys = clients(trainer.network, sizes)
    starts = np.stack([start(trainer.network, seed) for seed in range(4)])
    together = trainer.train(starts, xs, ys, streams(owners))
    for i, owner in enumerate(owners):
        alone = trainer.train(starts[i], [xs[i]], [ys[i]], streams([owner]))
        np.testing.assert_array_equal(together[i], alone[0])
    order = [2, 0, 3, 1]
    threaded = ClientTrainer(name, learning_rate=0.01, batch_size=16, epochs=1, threads=2)
    shuffled = [[part[i] for i in order] for part in (xs, ys, owners)]
    again = threaded.train(starts[order], shuffled[0], shuffled[1], streams(shuffled[2]))
    np.testing.assert_array_equal(again, together[order])
    x, y = clients(trainer.network, [300], seed=9)
    np.testing.assert_array_equal(threaded.loss(starts, x[0], y[0]), trainer.loss(starts, x[0], y[0]))


def test_an_epoch_drops_what_fills_no_batch_and_a_small_client_uses_all() -> None:
    xs, ys = clients(MNIST_CNN, [70, 5])
    flat = start(MNIST_CNN)
    epochs = ClientTrainer("mnist-cnn", epochs=2).train(flat, xs, ys, streams([0, 1]))
    for i, steps in enumerate((4, 2)):
        same = ClientTrainer("mnist-cnn", steps=steps).train(flat, [xs[i]], [ys[i]], streams([i]))
        np.testing.assert_array_equal(epochs[i], same[0])


def test_dropout_keeps_half_and_doubles_it_from_the_clients_own_stream() -> None:
    first, second, dense, last = MNIST_CNN.dropout_masks(2_000, torch.Generator().manual_seed(1))
    assert first is None
    assert second is None
    assert last is None
    assert set(dense.unique().tolist()) == {0.0, 2.0}
    assert float(dense.mean()) == pytest.approx(1.0, abs=5 / np.sqrt(100_000))
    assert CIFAR_CNN.dropout_masks(3, torch.Generator()) == [None] * 7
    xs, ys = clients(MNIST_CNN, [10])
    trainer = ClientTrainer("mnist-cnn", steps=1)  # all ten records at once: only dropout is random
    one, other = (trainer.train(start(MNIST_CNN), xs, ys, streams([owner])) for owner in (1, 2))
    assert np.abs(one - other).max() > 1e-6


def test_global_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    torch.set_num_threads(2)
    xs, ys = clients(MNIST_CNN, [10])
    trainer = ClientTrainer("mnist-cnn", steps=1)
    trainer.accuracy(trainer.train(start(MNIST_CNN), xs, ys, streams([1])), xs[0], ys[0])
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.random.get_rng_state(), before)


def test_torch_loads_when_first_used() -> None:
    code = (
        "import sys, flmarket.learning as l; assert 'torch' not in sys.modules; "
        "l.neural.ClientTrainer('mnist-cnn', steps=1); assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert flmarket.learning.neural.ClientTrainer is ClientTrainer
    with pytest.raises(AttributeError, match="nural"):
        flmarket.learning.nural  # noqa: B018


def test_a_diverged_model_has_infinite_loss() -> None:
    x, y = (part[0] for part in clients(MNIST_CNN, [5]))
    trainer = ClientTrainer("mnist-cnn", steps=1)
    assert trainer.loss(start(MNIST_CNN) * 1e30, x, y).tolist() == [np.inf]
    assert 0 <= trainer.accuracy(start(MNIST_CNN) * 1e30, x, y)[0] <= 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"momentum": 1.0}, "momentum"),
        ({"batch_size": 0}, "batch_size"),
        ({"threads": 0}, "threads"),
        ({"epochs": 1}, "epochs, steps"),
    ],
)
def test_bad_settings(options: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        ClientTrainer("mnist-cnn", **{"steps": 1, **options})
    with pytest.raises(UnknownName, match="mnist-cnn"):
        ClientTrainer("mnist", steps=1)


def test_bad_arguments() -> None:
    trainer = ClientTrainer("mnist-cnn", steps=1)
    xs, ys = clients(MNIST_CNN, [4])
    with pytest.raises(InvalidInput, match="parameters"):
        trainer.train(np.zeros(3), xs, ys, streams([0]))
    with pytest.raises(InvalidInput, match="784"):
        trainer.train(start(MNIST_CNN), [xs[0][:, :700]], ys, streams([0]))
    with pytest.raises(InvalidInput, match="classes from 0 to 9"):
        trainer.accuracy(start(MNIST_CNN), xs[0], ys[0] + 10)


@pytest.mark.realdata
def test_eight_clients_learn_mnist(data_dir: Path) -> None:
    data = load("mnist", data_dir, download=False)
    trainer = ClientTrainer("mnist-cnn", learning_rate=0.03, epochs=1)
    parameters = trainer.initial(np.random.default_rng(0))
    xs, ys = np.split(data.x_train[:4_000], 8), np.split(data.y_train[:4_000], 8)
    for r in range(4):
        parameters = trainer.train(parameters, xs, ys, OwnerStreams(0, r, range(8), Purpose.BATCHES)).mean(axis=0)
    assert trainer.accuracy(parameters, data.x_test[:2_000], data.y_test[:2_000])[0] > 0.75
