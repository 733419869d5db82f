"""Convolutional models that clients train at home, with PyTorch (the `torch` extra).

The only part of `flmarket.learning` that imports torch; `import flmarket.learning` does not load it.
"""

from flmarket.errors import MissingDependency

try:
    from flmarket.learning.neural.architectures import CIFAR_CNN, MNIST_CNN, Architecture
    from flmarket.learning.neural.trainer import ClientTrainer
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependency("torch", "torch") from None

__all__ = ["CIFAR_CNN", "MNIST_CNN", "Architecture", "ClientTrainer"]
