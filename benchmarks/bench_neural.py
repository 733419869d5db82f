"""Twenty clients' convolutional networks trained for a while, against the usual loop over `nn.Module`s and other ways.

Every way takes the same steps on the same batches and the three peers must end at the same scores; only ours spends
time on dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from benchmarks.measure import Row, best_of
from flmarket.learning import LocalTraining, Records, accuracies, models
from flmarket.learning.networks import CIFAR_CNN, MNIST_CNN, Convolution, Network, network
from flmarket.learning.torch_model import TorchModel

CLIENTS, BATCH, STEPS, RATE, MOMENTUM = 20, 32, 4, 0.01, 0.9
CANDIDATES, VALIDATION = 25, 1_000


def split(peer: Network, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of parameter vectors (..., p), layer by layer."""
    shapes = [shape for layer in peer.shapes() for shape in layer]
    parts = flat.split([int(np.prod(shape)) for shape in shapes], dim=-1)
    views = [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]
    return list(zip(views[::2], views[1::2], strict=True))


def images(peer: Network, x: np.ndarray) -> Tensor:
    """Rows of pixels as centred images (b, channels, height, width)."""
    centred = (torch.from_numpy(x.astype(np.float32)) - peer.mean) / peer.deviation
    return centred.reshape(-1, *peer.image).movedim(-1, 1)


class Module(nn.Module):
    """A network from PyTorch's own layers in its own layout."""

    def __init__(self, network: Network, flat: np.ndarray) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for layer, (weights, biases) in zip(network.layers, split(network, torch.from_numpy(flat)), strict=True):
            if isinstance(layer, Convolution):
                outputs, kernel, _, inputs = weights.shape
                own: nn.Module = nn.Conv2d(inputs, outputs, kernel, padding=layer.padding)
                blocks += [own, nn.ReLU(), *([nn.MaxPool2d(2)] if layer.pool else [])]
                weights = weights.movedim(-1, 1)
            else:
                own = nn.Linear(weights.shape[1], weights.shape[0])
                blocks += [nn.Flatten(), own, *([] if layer.last else [nn.ReLU()])]
            own.weight.data.copy_(weights)
            own.bias.data.copy_(biases)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.blocks(x)


def plain_loop(network: Network, start: np.ndarray, x: Tensor, y: Tensor) -> list[Module]:
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


def by_vmap(network: Network, start: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`torch.func`: the gradient of one client's loss, mapped over clients; x are rows of pixels."""
    names = [name for name, _ in network.named_parameters()]
    network.eval()  # no dropout, as in the other peers

    def loss(flat: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        parts = dict(zip(names, (part for layer in split(network, flat) for part in layer), strict=True))
        return functional.cross_entropy(functional_call(network, parts, (rows,)), labels)

    return descend(start, lambda flat: vmap(grad(loss))(flat, x, y))


def by_groups(network: Network, start: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """One grouped convolution for all clients, channels last; dense layers as batched matrix products."""
    stacked = torch.stack([images(network, own.numpy()) for own in x])
    pixels = stacked.movedim(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)

    def scores(layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        h = pixels
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
        losses = functional.cross_entropy(scores(split(network, flat)).flatten(0, 1), y.flatten(), reduction="sum")
        return torch.autograd.grad(losses / BATCH, flat)[0]

    return descend(start, slope)


def run() -> Iterator[Row]:
    """Training by four ways, then evaluating many parameter vectors."""
    torch.set_num_threads(1)
    for name in (MNIST_CNN, CIFAR_CNN):
        yield from training(name)
        yield evaluation(name)


def ours_of(name: str, threads: int = 1) -> TorchModel:
    """Our way, with so many clients at a time."""
    local = LocalTraining(learning_rate=RATE, momentum=MOMENTUM, batch_size=BATCH, steps=STEPS)
    made = models.get(name, local=local, threads=threads)
    assert isinstance(made, TorchModel)
    return made


def training(name: str) -> Iterator[Row]:
    """Twenty clients, a batch of records each, so that all ways see the same batches."""
    rng, peer = np.random.default_rng(0), network(name)
    data = [Records(rng.random((BATCH, peer.features)), rng.integers(0, 10, BATCH)) for _ in range(CLIENTS)]
    first = peer.initial(rng)
    start = (first + rng.normal(scale=0.02, size=first.size)).astype(np.float32)
    one, two = ours_of(name), ours_of(name, 2)
    rngs = [np.random.default_rng(i) for i in range(CLIENTS)]
    unit, per = "step of a client", STEPS * CLIENTS
    ours = best_of(lambda: one.train_many(start, data, rngs)) / per
    x = torch.stack([torch.from_numpy(own.x.astype(np.float32)) for own in data])
    y = torch.from_numpy(np.stack([own.y for own in data]))
    contiguous = torch.stack([images(peer, own.x) for own in data]).contiguous()
    copies = torch.from_numpy(start).expand(CLIENTS, -1)
    plain = best_of(lambda: plain_loop(peer, start, contiguous, y)) / per
    what = f"{name}, {CLIENTS} clients, batches of {BATCH}"
    yield Row(what, unit, ours, "plain PyTorch loop over clients", plain)
    scores = plain_loop(peer, start, contiguous, y)[3](contiguous[3])
    for way in (by_vmap, by_groups):
        same = Module(peer, way(peer, copies, x, y)[3].detach().numpy())(contiguous[3])
        assert (same - scores).abs().max() < 1e-3, "all must compute the same"
    for title, way in (("torch.func.vmap over clients", by_vmap), ("grouped convolutions", by_groups)):
        yield Row(what, unit, ours, title, best_of(lambda way=way: way(peer, copies, x, y), 2) / per)
    torch.set_num_threads(2)
    plain = best_of(lambda: plain_loop(peer, start, contiguous, y)) / per
    torch.set_num_threads(1)
    ours = best_of(lambda: two.train_many(start, data, rngs)) / per
    yield Row(f"{what}, two threads", unit, ours, "plain PyTorch loop, two threads", plain)


def evaluation(name: str) -> Row:
    """Candidates of an aggregation, scored on a validation set."""
    rng, peer = np.random.default_rng(1), network(name)
    data = Records(rng.random((VALIDATION, peer.features)), rng.integers(0, 10, VALIDATION))
    candidates = np.stack([peer.initial(rng) for _ in range(CANDIDATES)]).astype(np.float32)
    model, pixels = ours_of(name), images(peer, data.x).contiguous()

    def plain() -> list[float]:
        with torch.no_grad():
            return [float((Module(peer, row)(pixels).argmax(1).numpy() == data.y).mean()) for row in candidates]

    ours = best_of(lambda: accuracies(model, candidates, data), 2) / CANDIDATES
    what = f"{name}, accuracy on {VALIDATION:,} images"
    return Row(what, "candidate", ours, "plain PyTorch loop", best_of(plain, 2) / CANDIDATES)
