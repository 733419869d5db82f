"""Every kind of market as a small file, for every model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

DATA = {"name": "breast-cancer", "owners": 4, "partition": "equal"}
MARKETS: dict[str, dict[str, Any]] = {
    "auction": {
        "task": {"name": "t", "rounds": 3, "bidders_per_round": 3, "budget_per_round": 1500.0, "learning_rate": 0.3},
        "owners": {"dropout": 0.2, "faulty": 0.1, "privacy_cap": 4.0},
        "mechanism": {"auction": "all-in-capped", "perturbation": "sphere"},
        "training": {"local_steps": 2, "batch_size": 16, "average": True},
    },
    "sampling": {
        "task": {"name": "t", "rounds": 3, "budget_per_round": 6.0},
        "training": {"local_steps": 2, "batch_size": 16},
        "sampling": {"costs": [1.0, 4.0], "hard_cap": 12.0, "first_rate": 0.2},
    },
    "reward": {"task": {"name": "t", "rounds": 3, "learning_rate": 0.2}, "reward": {"reward": 5.0}},
    "joint": {
        "task": {"name": "t", "rounds": 3},
        "training": {"local_steps": 2, "batch_size": 16},
        "joint": {"budget": 100.0, "costs": [1.0, 4.0], "epsilon": 20.0, "validation": 50, "aggregation": "median"},
    },
}
MODELS: dict[str, dict[str, Any]] = {"softmax": {}, "mlp": {"name": "mlp", "hidden": [4]}}
CASES = [(kind, model) for kind in MARKETS for model in MODELS]


def market(kind: str, model: str = "softmax", **changes: dict[str, Any]) -> dict[str, Any]:
    """A market file of three rounds, with changes to its sections."""
    if model != "softmax":
        pytest.importorskip("torch")
    values: dict[str, Any] = copy.deepcopy({"kind": kind, "seed": 7, "data": DATA, **MARKETS[kind]})
    if MODELS[model]:
        values["model"] = MODELS[model]
    if (kind, model) == ("joint", "mlp"):  # noise for each record, at every step, on all of them
        values["joint"]["noise_unit"], values["training"] = "record", {"local_steps": 2}
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change
    return values
