"""Local training of many clients' convolutional networks, and evaluation of many parameter vectors: a `LocalModel`.

A client's training is mini-batch gradient descent with momentum on the mean cross-entropy, in 32-bit floats, starting
without velocity in every call. Mini-batches come from her NumPy generator, dropout from a torch generator seeded by
its first draw, so nothing reads or changes torch's global generator.

Clients are trained one after the other, `threads` of them at a time, each on one core. That is not for want of trying:
`torch.func.vmap` over clients is slower than a loop in the channels-last layout for both networks, grouped convolutions
are slower for the larger and about even, or a little faster, for the smaller (benchmarks/bench_neural.py measures all
three), and `torch.compile` did not pay when tried. A loop also makes a client's result the same to the last bit whoever
is trained beside her and however many threads there are. Splitting one client's convolution over cores is avoided, as
it slows down severalfold whenever another process has one of them.

What would break it: pixels that are not scaled to 0 to 1, as the networks' centring assumes; and a learning rate that
makes training diverge: the parameters come back as they are, infinite or not a number, and the next call refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional

from flmarket.errors import InvalidInput
from flmarket.learning.local_model import check_descent, checked_clients, checked_parameters
from flmarket.learning.neural.architectures import Architecture, architecture
from flmarket.learning.updates import visits

__all__ = ["ClientTrainer"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
T = TypeVar("T")
R = TypeVar("R")

IMAGES_AT_ONCE = 250  # in evaluation: the widest layer's values for as many images stay near the cache


@dataclass(frozen=True)
class ClientTrainer:
    """A named network as a `LocalModel`; give `epochs` (passes over a client's records) or `steps`, not both.

    A client with no more records than a batch uses all of them at every step. An epoch drops the rest that fills no
    batch, as `fedavg` does. Learning rate and momentum are the paper's; a handful of steps needs a larger rate.
    """

    architecture: str
    _: KW_ONLY
    learning_rate: float = 0.001
    momentum: float = 0.9
    batch_size: int = 32
    epochs: int | None = None
    steps: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        self.network  # noqa: B018 - an unknown name is refused before anything runs
        check_descent(self.learning_rate, self.momentum, self.batch_size, epochs=self.epochs, steps=self.steps)
        if type(self.threads) is not int or self.threads < 1:
            raise InvalidInput("threads", self.threads, "a whole number of at least 1")

    @property
    def network(self) -> Architecture:
        """The network that is trained."""
        return architecture(self.architecture)

    @property
    def dimension(self) -> int:
        """p, the length of a parameter vector."""
        return self.network.dimension

    def initial(self, rng: np.random.Generator) -> FloatArray:
        """Random weights, zero biases, shape (p,)."""
        return self.network.initial(rng)

    def train(
        self,
        parameters: ArrayLike,
        xs: Sequence[FloatArray],
        ys: Sequence[IntArray],
        rngs: Sequence[np.random.Generator],
    ) -> FloatArray:
        """Each client's parameters after local training; see `LocalModel.train`."""
        network = self.network
        sizes = checked_clients(xs, ys, rngs, features=network.features, classes=network.classes)
        start = checked_parameters(parameters, network.dimension, clients=len(sizes))
        trained = self._each(lambda i: self._descend(start[i], xs[i], ys[i], rngs[i]), range(len(sizes)))
        return np.stack(trained)

    def accuracy(self, parameters: ArrayLike, x: FloatArray, y: IntArray) -> FloatArray:
        """Share of the records that each parameter vector gets right, (k,)."""
        return self._mean(parameters, x, y, lambda scores, labels: (scores.argmax(1) == labels).sum())

    def loss(self, parameters: ArrayLike, x: FloatArray, y: IntArray) -> FloatArray:
        """Mean cross-entropy of each parameter vector without dropout, (k,); infinite where scores overflow."""
        means = self._mean(parameters, x, y, lambda scores, y: functional.cross_entropy(scores, y, reduction="sum"))
        return np.nan_to_num(means, nan=np.inf, posinf=np.inf)

    def _descend(self, start: FloatArray, x: FloatArray, y: IntArray, rng: np.random.Generator) -> FloatArray:
        """One client's local training."""
        network = self.network
        dropout = torch.Generator().manual_seed(int(rng.integers(1 << 63)))
        batch = min(len(y), self.batch_size)
        steps = self.steps or (self.epochs or 0) * (len(y) // batch)
        flat = torch.from_numpy(start.astype(np.float32))
        layers = [(weights.requires_grad_(), biases.requires_grad_()) for weights, biases in network.split(flat)]
        leaves = [leaf for layer in layers for leaf in layer]
        velocities = [torch.zeros_like(leaf) for leaf in leaves]
        for rows in visits(rng, len(y), steps, batch):
            scores = network.scores(layers, network.images(x[rows]), network.dropout_masks(batch, dropout))
            loss = functional.cross_entropy(scores, torch.from_numpy(y[rows].astype(np.int64)))
            gradients = torch.autograd.grad(loss, leaves)
            with torch.no_grad():
                for leaf, velocity, gradient in zip(leaves, velocities, gradients, strict=True):
                    velocity.mul_(self.momentum).add_(gradient)
                    leaf.sub_(velocity, alpha=self.learning_rate)  # a view: this moves `flat`
        return flat.numpy().astype(np.float64)

    def _mean(
        self, parameters: ArrayLike, x: FloatArray, y: IntArray, total: Callable[[Tensor, Tensor], Tensor]
    ) -> FloatArray:
        """The records' mean of something that `total` sums over a batch, for each parameter vector."""
        network = self.network
        rows = checked_parameters(parameters, network.dimension)
        checked_clients([x], [y], [np.random.default_rng()], features=network.features, classes=network.classes)
        images, labels = network.images(x), torch.from_numpy(y.astype(np.int64))

        def mean(row: FloatArray) -> float:
            layers = network.split(torch.from_numpy(row.astype(np.float32)))
            with torch.inference_mode():
                sums = [
                    float(total(network.scores(layers, some), truth))
                    for some, truth in zip(
                        *(torch.split(part, IMAGES_AT_ONCE) for part in (images, labels)), strict=True
                    )
                ]
            return sum(sums) / len(y)

        return np.array(self._each(mean, rows))

    def _each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results in order; worker threads have their own count of torch threads, so the caller's stays."""
        with ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            return list(workers.map(work, items))
