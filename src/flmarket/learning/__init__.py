"""Learning: data sets, who holds which records, models, and the updates that owners compute.

Everything here is what happens at home, before privacy: nothing is clipped, noised or sent. The core needs NumPy and
SciPy only; the two bundled data sets need scikit-learn (the `app` extra), Parquet files need pyarrow (`parquet`), and
`TorchModel`, which loads when first used, needs torch (`torch`).
"""

from typing import Any

from flmarket.learning import datasets, partition
from flmarket.learning.data import DataSet, Encoding, Pool, Records
from flmarket.learning.data.files import from_files
from flmarket.learning.datasets import load, names
from flmarket.learning.model import (
    LocalTraining,
    Model,
    SoftmaxRegression,
    accuracies,
    accuracy,
    at_rate,
    balanced_accuracy,
    clipped_gradients,
    dimension,
    fedavg,
    fedsgd,
    local_training,
    models,
    train_many,
    updates,
)
from flmarket.learning.partition import Partition
from flmarket.learning.streams import OwnerStreams, Purpose, stream
from flmarket.learning.travel import built, described, from_named, load_parameters, save_parameters, to_named


def __getattr__(name: str) -> Any:
    """`flmarket.learning.TorchModel` without importing torch for those who do not use it."""
    if name == "TorchModel":
        from flmarket.learning.torch_model import TorchModel

        return TorchModel
    raise AttributeError(f"module 'flmarket.learning' has no attribute {name!r}")


__all__ = [
    "DataSet",
    "Encoding",
    "LocalTraining",
    "Model",
    "OwnerStreams",
    "Partition",
    "Pool",
    "Purpose",
    "Records",
    "SoftmaxRegression",
    "accuracies",
    "accuracy",
    "at_rate",
    "balanced_accuracy",
    "built",
    "clipped_gradients",
    "datasets",
    "described",
    "dimension",
    "fedavg",
    "fedsgd",
    "from_files",
    "from_named",
    "load",
    "load_parameters",
    "local_training",
    "models",
    "names",
    "partition",
    "save_parameters",
    "stream",
    "to_named",
    "train_many",
    "updates",
]
