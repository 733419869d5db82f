"""The two convolutional networks of the JDP paper, and the sum of their records' clipped gradients.

They are those of Zhang et al., A Robust Game-Theoretical Federated Learning Framework with Joint
Differential Privacy, TKDE: two convolutions and two dense layers with dropout for MNIST, six convolutions with
max-pooling for CIFAR-10. The paper does not print widths. These are small on purpose: noise for privacy grows with the
number of parameters, and channel counts in multiples of eight fill a processor's vector registers. The CIFAR-10 network
pools after its first, second and fourth convolution: 3 instead of 10 million multiplications an image for pooling after
every second one. Of three placings tried it was the cheapest and the least accurate: 53 % on the test images after five
passes over the subset's 10,000, against 56 % (every second) and 54 % (first, third, sixth); one seed, rate 0.01. A
convolution's weights lie in the vector as (out, row, column, in). Seen as (out, in, row, column) that is PyTorch's
"channels last" layout without a copy, and so is an image whose colours lie together, which is how a `DataSet` has them;
pooling is several times faster in it.

`Network.clipped_sum` is what privacy for one record costs. A record's gradient in a layer is the slope of its loss in
what the layer gives out, times what the layer was given: an outer product for a dense layer, so its norm is a product
of two norms and it is never formed (Goodfellow 2015); a short sum of them for a convolution, which is formed. Slopes
are PyTorch's in the network's own number type; norms, weights and sums are in double precision, so that clipping holds
to the last digits. On one core that is 2.5 times as fast as `vmap` of `grad` for MNIST's network and up to twice for
CIFAR-10's, most of whose weights are convolutions'.

What would break it: pixels that are not scaled to 0 to 1, as the networks' centring assumes, or images in another order
(all red, all green, all blue), which have the right number of values and train to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput, needed

with needed("torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional


class Rows:
    """Gradients of b records in one layer as they are, (b, weights) and (b, biases)."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    def squares(self) -> Tensor:
        """Each gradient's squared length, (b,)."""
        found: Tensor = sum(torch.linalg.vecdot(part, part) for part in self.parts)
        return found

    def weighted(self, shares: Tensor) -> list[Tensor]:
        """Their weighted sum, weights and biases; those of share 0 may be anything."""
        return [shares @ part for part in self._counted(shares)]

    def _counted(self, shares: Tensor) -> Sequence[Tensor]:
        if shares.all():
            return self.parts
        return [torch.where(shares[:, None] > 0, part, 0.0) for part in self.parts]  # 0 · ∞ is not 0


class Outer(Rows):
    """The same as slopes ⊗ (given, 1)."""

    def squares(self) -> Tensor:
        """Each gradient's squared length, (b,): a product."""
        given, slopes = (torch.linalg.vecdot(part, part) for part in self.parts)
        found: Tensor = slopes * (given + 1)
        return found

    def weighted(self, shares: Tensor) -> list[Tensor]:
        """Their weighted sum, weights and biases; those of share 0 may be anything."""
        given, slopes = self._counted(shares)
        return [(slopes * shares[:, None]).T @ given, shares @ slopes]


class Convolution(nn.Module):
    """Square convolution, max-pooling of 2 × 2 where asked, then ReLU; weights are (out, row, column, in)."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, padding: int, pool: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, kernel, kernel, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.padding, self.pool = padding, pool

    def forward(self, x: Tensor) -> Tensor:
        """Images (b, in, h, w) to images."""
        return self.shaped(self.affine(x))

    def affine(self, x: Tensor) -> Tensor:
        """What is linear in the weights."""
        return functional.conv2d(x, self.weight.movedim(-1, 1), self.bias, padding=self.padding)

    def shaped(self, x: Tensor) -> Tensor:
        """The rest; pooling first, as ReLU commutes with it and has less to do after."""
        return functional.relu(functional.max_pool2d(x, 2) if self.pool else x)

    def gradients(self, given: Tensor, slope: Tensor) -> Rows:
        """Records' gradients from what the layer was given and the loss's slope in what `affine` gave out."""
        kernel, inputs = self.weight.shape[2:]
        lying = functional.pad(given, (self.padding,) * 4).movedim(1, -1).contiguous()
        (b, high, wide, _), (image, row, column, _) = slope.movedim(1, -1).shape, lying.stride()
        patches = lying.as_strided((b, high, wide, kernel, kernel * inputs), (image, row, column, row, 1))
        places = slope.flatten(2)
        rows = torch.bmm(places, patches.reshape(b, high * wide, -1))  # (b, out, row · column · in)
        return Rows(rows.flatten(1).double(), places.sum(2).double())


class Dense(nn.Module):
    """Affine map; unless it is the last, ReLU and dropout with the given share of units silenced in training."""

    def __init__(self, inputs: int, outputs: int, *, dropout: float = 0.0, last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.dropout, self.last = dropout, last

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(b, in), or images to be flattened, to (b, out)."""
        x = self.affine(x)
        if self.last or not (self.training and self.dropout):
            return self.shaped(x)
        return functional.relu(x) * self.mask(len(x), generator)

    def affine(self, x: Tensor) -> Tensor:
        """What is linear in the weights."""
        return functional.linear(x.flatten(1), self.weight, self.bias)

    def shaped(self, x: Tensor) -> Tensor:
        """The rest, without dropout."""
        return x if self.last else functional.relu(x)

    def gradients(self, given: Tensor, slope: Tensor) -> Outer:
        """Records' gradients from what the layer was given and the loss's slope in what `affine` gave out."""
        return Outer(given.flatten(1).double(), slope.double())

    def mask(self, records: int, generator: torch.Generator) -> Tensor:
        """What the units are multiplied by in one training step: 0, or 1 / share kept."""
        kept = 1 - self.dropout
        return torch.empty(records, len(self.bias)).bernoulli_(kept, generator=generator).div_(kept)


class Network(nn.Module):
    """A network for images (height, width, channels) of ten classes; `mean` and `deviation` centre the pixels.

    Dropout draws from a generator of its own, so that several networks can be trained at a time.
    """

    def __init__(
        self, image: tuple[int, int, int], mean: float, deviation: float, layers: Sequence[Convolution | Dense]
    ) -> None:
        super().__init__()
        self.image, self.mean, self.deviation = image, mean, deviation
        self.layers = nn.ModuleList(layers)
        self.generator = torch.Generator()

    def __getstate__(self) -> dict[str, Any]:
        """Without the generator: every copy has its own."""
        return {key: value for key, value in self.__dict__.items() if key != "generator"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator()

    @property
    def features(self) -> int:
        """Values per image."""
        return math.prod(self.image)

    def initial(self, rng: np.random.Generator) -> FloatArray:
        """Normal weights of variance 2 / inputs, which keeps ReLU layers' scale (He et al., ICCV 2015).

        Biases are 0, and the last layer too, so that all classes start equally likely. On MNIST (20 clients, one seed,
        2,000 test images) that is ahead early on, 52 % after one round against 15 % or less with the last layer drawn
        like the others; after eight rounds it is ahead at rate 0.03 (92 to 87 %) and behind at 0.01 (84 to 86 %).
        """
        parts: list[FloatArray] = []
        for weights, biases in self.shapes():
            inputs = math.prod(weights[1:])
            parts += [rng.normal(scale=math.sqrt(2 / inputs), size=math.prod(weights)), np.zeros(biases)]
        parts[-2][:] = 0.0
        return np.concatenate(parts)

    def shapes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of each layer's weights and biases."""
        parts = [tuple(part.shape) for part in self.parameters()]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of pixels from 0 to 1 to scores."""
        x = ((x - self.mean) / self.deviation).reshape(-1, *self.image).movedim(-1, 1)
        for layer in self.layers:
            x = layer(x, self.generator) if isinstance(layer, Dense) else layer(x)
        return x

    def clipped_sum(self, x: Tensor, labels: Tensor, fits: Tensor, clip: float) -> FloatArray:
        """The sum of the records' gradients, each clipped to `clip`; those that do not fit, or overflow, count as 0."""
        x = ((x - self.mean) / self.deviation).reshape(-1, *self.image).movedim(-1, 1)
        layers = [layer for layer in self.layers if isinstance(layer, Convolution | Dense)]
        given, found = [], []
        for layer in layers:
            given.append(x.detach())
            x = layer.affine(x)
            found.append(x if x.requires_grad else x.requires_grad_())
            x = layer.shaped(x)
        loss = functional.cross_entropy(x, labels, reduction="sum")  # records do not meet: each slope is its own
        slopes = torch.autograd.grad(loss, found)
        with torch.no_grad():
            parts = [layer.gradients(a, g) for layer, a, g in zip(layers, given, slopes, strict=True)]
            squares = torch.stack([part.squares() for part in parts]).sum(0)
            weights = torch.where(fits & squares.isfinite(), clip / squares.sqrt().clamp(min=clip), 0.0)
            return np.concatenate([each.numpy().ravel() for part in parts for each in part.weighted(weights)])


MNIST_CNN, CIFAR_CNN = "mnist-cnn", "cifar-cnn"


def network(name: str) -> Network:
    """The convolutional network of that name, without weights."""
    if name == MNIST_CNN:
        layers: list[Convolution | Dense] = [
            Convolution(1, 8, kernel=5, padding=0, pool=True),
            Convolution(8, 16, kernel=5, padding=0, pool=True),
            Dense(256, 50, dropout=0.5),
            Dense(50, 10, last=True),
        ]
        return Network((28, 28, 1), 0.1307, 0.3081, layers)
    if name != CIFAR_CNN:
        raise InvalidInput("network", name, f"{MNIST_CNN} or {CIFAR_CNN}")
    widths, pooled = (3, 16, 16, 32, 32, 64, 64), (True, True, False, True, False, False)
    layers = [
        Convolution(inputs, outputs, kernel=3, padding=1, pool=pool)
        for inputs, outputs, pool in zip(widths, widths[1:], pooled, strict=False)
    ]
    return Network((32, 32, 3), 0.4734, 0.2516, [*layers, Dense(1024, 10, last=True)])
