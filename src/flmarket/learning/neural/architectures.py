"""Convolutional networks as values: layers with shapes, a flat parameter vector, and the forward pass.

The two networks of Zhang et al., A Robust Game-Theoretical Federated Learning Framework with Joint Differential
Privacy, TKDE: two convolutions and two dense layers with dropout for MNIST, six convolutions with max-pooling for
CIFAR-10. The paper does not print widths. These are small on purpose: noise for privacy grows with the number of
parameters, and channel counts in multiples of eight fill a processor's vector registers. The CIFAR-10 network pools
after its first, second and fourth convolution: 3 instead of 10 million multiplications an image for pooling after every
second one. Of three placings tried it was the cheapest and the least accurate: 53 % on the test images after five
passes over the subset's 10,000, against 56 % (every second) and 54 % (first, third, sixth); one seed, rate 0.01.

A convolution's weights lie in the vector as (out, row, column, in). Seen as (out, in, row, column) that is PyTorch's
"channels last" layout without a copy, and so is an image whose colours lie together, which is how a `DataSet` has
them; pooling is several times faster in it. What would break it: images in another order (all red, all green, all
blue) have the right number of values and train to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flmarket.errors import UnknownName

__all__ = ["CIFAR_CNN", "MNIST_CNN", "Architecture", "Convolution", "Dense", "architecture", "names"]

Layer = tuple[Tensor, Tensor]  # weights, biases


@dataclass(frozen=True)
class Convolution:
    """Square convolution, max-pooling of 2 × 2 where asked, then ReLU."""

    inputs: int
    outputs: int
    kernel: int
    padding: int
    pool: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The weights as they lie in the parameter vector."""
        return self.outputs, self.kernel, self.kernel, self.inputs

    def apply(self, x: Tensor, layer: Layer, mask: Tensor | None) -> Tensor:
        """Images (b, inputs, h, w) to images; pooling first, as ReLU commutes with it and has less to do after."""
        del mask
        x = functional.conv2d(x, layer[0].movedim(-1, 1), layer[1], padding=self.padding)
        return functional.relu(functional.max_pool2d(x, 2) if self.pool else x)


@dataclass(frozen=True)
class Dense:
    """Affine map; unless it is the last, ReLU and dropout with the given share of units silenced in training."""

    inputs: int
    outputs: int
    dropout: float = 0.0
    last: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The weights as they lie in the parameter vector."""
        return self.outputs, self.inputs

    def apply(self, x: Tensor, layer: Layer, mask: Tensor | None) -> Tensor:
        """(b, inputs), or images to be flattened, to (b, outputs)."""
        x = functional.linear(x.flatten(1), *layer)
        if self.last:
            return x
        return functional.relu(x) if mask is None else functional.relu(x) * mask


@dataclass(frozen=True)
class Architecture:
    """A network for images (height, width, channels) of ten classes; `mean` and `deviation` centre the pixels."""

    name: str
    image: tuple[int, int, int]
    mean: float
    deviation: float
    layers: tuple[Convolution | Dense, ...]

    @property
    def features(self) -> int:
        """Values per image."""
        return math.prod(self.image)

    @property
    def classes(self) -> int:
        """Scores per image."""
        return self.layers[-1].outputs

    @property
    def dimension(self) -> int:
        """Length of the parameter vector."""
        return sum(math.prod(layer.shape) + layer.outputs for layer in self.layers)

    def initial(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Normal weights of variance 2 / inputs, which keeps ReLU layers' scale (He et al., ICCV 2015).

        Biases are 0, and the last layer too, so that all classes start equally likely. On MNIST (20 clients, one seed,
        2,000 test images) that is ahead early on, 52 % after one round against 15 % or less with the last layer drawn
        like the others; after eight rounds it is ahead at rate 0.03 (92 to 87 %) and behind at 0.01 (84 to 86 %).
        """
        parts: list[NDArray[np.float64]] = []
        for layer in self.layers:
            inputs = math.prod(layer.shape[1:])
            parts += [rng.normal(scale=math.sqrt(2 / inputs), size=layer.outputs * inputs), np.zeros(layer.outputs)]
        parts[-2][:] = 0.0
        return np.concatenate(parts)

    def images(self, x: NDArray[np.float64]) -> Tensor:
        """Rows of pixels from 0 to 1 as centred images (b, channels, height, width)."""
        scaled = torch.from_numpy(x.astype(np.float32)).sub_(self.mean).div_(self.deviation)
        return scaled.reshape(-1, *self.image).movedim(-1, 1)

    def split(self, flat: Tensor) -> list[Layer]:
        """Views of the weights and biases in a parameter vector."""
        layers: list[Layer] = []
        start = 0
        for layer in self.layers:
            middle = start + math.prod(layer.shape)
            end = middle + layer.outputs
            layers.append((flat[start:middle].view(layer.shape), flat[middle:end]))
            start = end
        return layers

    def scores(
        self, parameters: Sequence[Layer], images: Tensor, masks: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """Scores (b, classes); masks, one a layer, are dropout's: none when evaluating."""
        for k, (layer, weights) in enumerate(zip(self.layers, parameters, strict=True)):
            images = layer.apply(images, weights, None if masks is None else masks[k])
        return images

    def dropout_masks(self, records: int, generator: torch.Generator) -> list[Tensor | None]:
        """What each layer's units are multiplied by in one training step: 0, or 1 / share kept."""
        return [
            torch.empty(records, layer.outputs)
            .bernoulli_(1 - layer.dropout, generator=generator)
            .div_(1 - layer.dropout)
            if isinstance(layer, Dense) and layer.dropout
            else None
            for layer in self.layers
        ]


MNIST_CNN = Architecture(
    "mnist-cnn",
    image=(28, 28, 1),
    mean=0.1307,
    deviation=0.3081,
    layers=(
        Convolution(1, 8, kernel=5, padding=0, pool=True),
        Convolution(8, 16, kernel=5, padding=0, pool=True),
        Dense(256, 50, dropout=0.5),
        Dense(50, 10, last=True),
    ),
)

CIFAR_CNN = Architecture(
    "cifar-cnn",
    image=(32, 32, 3),
    mean=0.4734,
    deviation=0.2516,
    layers=(
        Convolution(3, 16, kernel=3, padding=1, pool=True),
        Convolution(16, 16, kernel=3, padding=1, pool=True),
        Convolution(16, 32, kernel=3, padding=1, pool=False),
        Convolution(32, 32, kernel=3, padding=1, pool=True),
        Convolution(32, 64, kernel=3, padding=1, pool=False),
        Convolution(64, 64, kernel=3, padding=1, pool=False),
        Dense(1024, 10, last=True),
    ),
)

_ALL = {network.name: network for network in (MNIST_CNN, CIFAR_CNN)}


def names() -> list[str]:
    """The architectures' names."""
    return list(_ALL)


def architecture(name: str) -> Architecture:
    """The architecture of that name, or a typed error."""
    if name not in _ALL:
        raise UnknownName("architecture", name, " or ".join(_ALL))
    return _ALL[name]
