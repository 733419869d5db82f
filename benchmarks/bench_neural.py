"""Twenty clients' convolutional networks trained for a while, against the usual loop over `nn.Module`s and other ways.

Every way takes the same steps on the same batches and the three peers must end at the same scores; only ours spends
time on dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from benchmarks.measure import Row, best_of
from flmarket.learning.neural import CIFAR_CNN, MNIST_CNN, Architecture, ClientTrainer
from flmarket.learning.neural.architectures import Convolution, Layer

CLIENTS, BATCH, STEPS, RATE, MOMENTUM = 20, 32, 4, 0.01, 0.9
CANDIDATES, VALIDATION = 25, 1_000


class Module(nn.Module):
    """A network from PyTorch's own layers in its own layout."""

    def __init__(self, network: Architecture, flat: np.ndarray) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for layer, (weights, biases) in zip(network.layers, network.split(torch.from_numpy(flat)), strict=True):
            if isinstance(layer, Convolution):
                own: nn.Module = nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, padding=layer.padding)
                blocks += [own, nn.ReLU(), *([nn.MaxPool2d(2)] if layer.pool else [])]
                weights = weights.movedim(-1, 1)
            else:
                own = nn.Linear(layer.inputs, layer.outputs)
                blocks += [nn.Flatten(), own, *([] if layer.last else [nn.ReLU()])]
            own.weight.data.copy_(weights)
            own.bias.data.copy_(biases)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.blocks(x)


def plain_loop(network: Architecture, start: np.ndarray, x: Tensor, y: Tensor) -> list[Module]:
    """One `nn.Module` and one `torch.optim.SGD` a client."""
    modules = []
    for i in range(CLIENTS):
        module = Module(network, start)
        optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
        for _ in range(STEPS):
            optimiser.zero_grad()
            functional.cross_entropy(module(x[i]), y[i]).backward()
            optimiser.step()
        modules.append(module)
    return modules


def descend(flat: Tensor, slope: Callable[[Tensor], Tensor]) -> Tensor:
    """Momentum on the stacked parameters of all clients."""
    velocity = torch.zeros_like(flat)
    for _ in range(STEPS):
        velocity = MOMENTUM * velocity + slope(flat)
        flat = flat - RATE * velocity
    return flat


def by_vmap(network: Architecture, start: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`torch.func`: the gradient of one client's loss, mapped over clients."""

    def loss(flat: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(network.scores(network.split(flat), images), labels)

    return descend(start, lambda flat: vmap(grad(loss))(flat, x, y))


def by_groups(network: Architecture, start: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """One grouped convolution for all clients, channels last; dense layers as batched matrix products."""
    images = x.movedim(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)

    def scores(layers: list[Layer]) -> Tensor:
        h = images
        for layer, (weights, biases) in zip(network.layers, layers, strict=True):
            if isinstance(layer, Convolution):
                filters = weights.flatten(0, 1).movedim(-1, 1)
                h = functional.conv2d(h, filters, biases.flatten(), padding=layer.padding, groups=CLIENTS)
                h = functional.relu(functional.max_pool2d(h, 2) if layer.pool else h)
            else:
                h = h.unflatten(1, (CLIENTS, -1)).flatten(2).movedim(1, 0) if h.ndim == 4 else h
                h = torch.baddbmm(biases[:, None], h, weights.movedim(1, 2))
                h = h if layer.last else functional.relu(h)
        return h

    def slope(flat: Tensor) -> Tensor:
        flat = flat.detach().requires_grad_()
        losses = functional.cross_entropy(scores(stacked(network, flat)).flatten(0, 1), y.flatten(), reduction="sum")
        return torch.autograd.grad(losses / BATCH, flat)[0]

    return descend(start, slope)


def stacked(network: Architecture, flat: Tensor) -> list[Layer]:
    """Like `Architecture.split`, for many parameter vectors at once."""
    sizes = [size for layer in network.layers for size in (int(np.prod(layer.shape)), layer.outputs)]
    parts = flat.split(sizes, dim=1)
    return [(parts[2 * k].unflatten(1, layer.shape), parts[2 * k + 1]) for k, layer in enumerate(network.layers)]


def run() -> Iterator[Row]:
    """Training by four ways, then evaluating many parameter vectors."""
    torch.set_num_threads(1)
    for network in (MNIST_CNN, CIFAR_CNN):
        yield from training(network)
        yield evaluation(network)


def training(network: Architecture) -> Iterator[Row]:
    """Twenty clients, a batch of records each, so that all ways see the same batches."""
    rng = np.random.default_rng(0)
    xs = [rng.random((BATCH, network.features)) for _ in range(CLIENTS)]
    ys = [rng.integers(0, 10, BATCH) for _ in range(CLIENTS)]
    start = (network.initial(rng) + rng.normal(scale=0.02, size=network.dimension)).astype(np.float32)
    one, two = (
        ClientTrainer(network.name, learning_rate=RATE, momentum=MOMENTUM, batch_size=BATCH, steps=STEPS, threads=k)
        for k in (1, 2)
    )
    rngs = [np.random.default_rng(i) for i in range(CLIENTS)]
    unit, per = "step of a client", STEPS * CLIENTS
    ours = best_of(lambda: one.train(start, xs, ys, rngs)) / per
    # full batches, but in another order each step, which a mean does not notice
    x = torch.stack([network.images(own) for own in xs])
    y = torch.from_numpy(np.stack(ys))
    contiguous, copies = x.contiguous(), torch.from_numpy(start).expand(CLIENTS, -1)
    peer = best_of(lambda: plain_loop(network, start, contiguous, y)) / per
    what = f"{network.name}, {CLIENTS} clients, batches of {BATCH}"
    yield Row(what, unit, ours, "plain PyTorch loop over clients", peer)
    scores = plain_loop(network, start, contiguous, y)[3](contiguous[3])
    for way in (by_vmap, by_groups):
        same = network.scores(network.split(way(network, copies, x, y)[3]), x[3])
        assert (same - scores).abs().max() < 1e-3, "all must compute the same"
    for name, way in (("torch.func.vmap over clients", by_vmap), ("grouped convolutions", by_groups)):
        yield Row(what, unit, ours, name, best_of(lambda way=way: way(network, copies, x, y), 2) / per)
    torch.set_num_threads(2)
    peer = best_of(lambda: plain_loop(network, start, contiguous, y)) / per
    torch.set_num_threads(1)
    ours = best_of(lambda: two.train(start, xs, ys, rngs)) / per
    yield Row(f"{what}, two threads", unit, ours, "plain PyTorch loop, two threads", peer)


def evaluation(network: Architecture) -> Row:
    """Candidates of an aggregation, scored on a validation set."""
    rng = np.random.default_rng(1)
    x, y = rng.random((VALIDATION, network.features)), rng.integers(0, 10, VALIDATION)
    candidates = np.stack([network.initial(rng) for _ in range(CANDIDATES)]).astype(np.float32)
    trainer = ClientTrainer(network.name, steps=1)
    images = network.images(x).contiguous()

    def peer() -> list[float]:
        with torch.no_grad():
            return [float((Module(network, row)(images).argmax(1).numpy() == y).mean()) for row in candidates]

    ours = best_of(lambda: trainer.accuracy(candidates, x, y), 2) / CANDIDATES
    what = f"{network.name}, accuracy on {VALIDATION:,} images"
    return Row(what, "candidate", ours, "plain PyTorch loop", best_of(peer, 2) / CANDIDATES)
