"""Data that no line separates, and a network of one's own that learns it, as a file of a user's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flmarket.learning import DataSet

NETWORK = """\
import torch


def build(features, classes):
    return torch.nn.Sequential(
        torch.nn.Linear(features, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, classes),
    )
"""


def xor_data(records: int = 500, seed: int = 0) -> DataSet:
    """Points of a square, called by whether their signs agree; a fifth as many again to test with."""
    x = np.random.default_rng(seed).uniform(-1, 1, size=(records + records // 5, 2))
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    return DataSet("xor", x[:records], y[:records], x[records:], y[records:], ("differ", "agree"))


def write_network(folder: Path, module: str = "my_xor_network") -> str:
    """The user's file; returns the name to give as a model. The folder must be looked in (the current one is)."""
    (folder / f"{module}.py").write_text(NETWORK)
    return f"{module}:build"
