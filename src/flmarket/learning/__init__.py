"""Learning: data sets, who holds which records, models, and the updates that owners compute.

Everything here is what happens at home, before privacy: nothing is clipped, noised or sent. The core needs
NumPy and SciPy only; the two bundled data sets need scikit-learn (the `app` extra), and the convolutional models in
`flmarket.learning.neural`, which load when first used, need torch (the `torch` extra).
"""

from importlib import import_module
from types import ModuleType

from flmarket.learning import datasets, partition
from flmarket.learning.datasets import DataSet, load, names
from flmarket.learning.models import Model, SoftmaxRegression, accuracy, balanced_accuracy, owner_gradients
from flmarket.learning.partition import Partition
from flmarket.learning.streams import OwnerStreams, Purpose, stream
from flmarket.learning.updates import fedavg, fedsgd


def __getattr__(name: str) -> ModuleType:
    """`flmarket.learning.neural` without importing torch for those who do not use it."""
    if name == "neural":
        return import_module("flmarket.learning.neural")
    raise AttributeError(f"module 'flmarket.learning' has no attribute {name!r}")


__all__ = [
    "DataSet",
    "Model",
    "OwnerStreams",
    "Partition",
    "Purpose",
    "SoftmaxRegression",
    "accuracy",
    "balanced_accuracy",
    "datasets",
    "fedavg",
    "fedsgd",
    "load",
    "names",
    "owner_gradients",
    "partition",
    "stream",
]
