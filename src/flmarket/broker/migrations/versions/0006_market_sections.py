"""Orders get the sections of a market file; a task remembers the shapes of its model, so that any model can be sold."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0006", "0005"

_MICROS = 1_000_000
_BROKER = ("simulated", "open", "minimum_bids")  # keys that were among the owners'


# As they were when this revision came, for keys that still older orders do not have.
_DEFAULTS: dict[str, Any] = {
    "name": "task",
    "engine": "simulation",
    "data": {"name": "breast-cancer", "owners": 40, "partition": "power-law", "sigma": 0.5, "minimum": 3}
    | {"concentration": 0.5},
    "owners": {"simulated": True, "open": True, "minimum_bids": 1, "valuations": ["linear", "quadratic", "sqrt"]}
    | {"rate": {"low": 0.5, "high": 1.5}, "privacy_budget": {"low": 0.5, "high": 2.0}, "privacy_cap_total": 1000.0}
    | {"dropout": 0.0, "faulty": 0.0},
    "mechanism": {"auction": "posted", "aggregation": "opt-aggr", "perturbation": "recommended", "clip": 1.0},
    "training": {"learning_rate": 0.1, "local_steps": 1, "batch_size": None, "local_learning_rate": 0.1}
    | {"average": True},
    "rounds": 40,
    "bidders_per_round": 20,
    "budget_micros_per_round": 0,
    "round_seconds": 0.0,
    "deadline_seconds": 7 * 86_400,
    "seed": 0,
}


def upgrade() -> None:
    """Apply."""
    op.add_column("broker_tasks", sa.Column("tensors", sa.JSON(), server_default="[]", nullable=False))
    op.add_column("broker_tasks", sa.Column("dtype", sa.String(length=16), server_default="float64", nullable=False))
    types = {"id": sa.String, "spec": sa.JSON, "tensors": sa.JSON, "features": sa.Integer, "dimension": sa.Integer}
    tasks, bind = sa.table("broker_tasks", *(sa.column(name, kind) for name, kind in types.items())), op.get_bind()
    for row in bind.execute(sa.select(tasks.c.id, tasks.c.spec, tasks.c.features, tasks.c.dimension)).all():
        spec = _sections(json.loads(row.spec) if isinstance(row.spec, str) else dict(row.spec))
        outputs = row.dimension // (row.features + 1)  # all of them were softmax regressions
        tensors = [["weights", [outputs, row.features]], ["biases", [outputs]]]
        bind.execute(sa.update(tasks).where(tasks.c.id == row.id).values(spec=spec, tensors=tensors))


def _sections(order: dict[str, Any]) -> dict[str, Any]:
    """With every key that the sections of this revision have, so that later defaults change nothing."""
    old: dict[str, Any] = {
        key: {**default, **order.get(key, {})} if isinstance(default, dict) else order.get(key, default)
        for key, default in _DEFAULTS.items()
    }
    owners, mechanism, training = dict(old["owners"]), dict(old["mechanism"]), dict(old["training"])
    learning_rate = training.pop("learning_rate")
    played = {key: owners.pop(key) for key in _BROKER}
    spans = {key: [owners[key]["low"], owners[key]["high"]] for key in ("rate", "privacy_budget")}
    cap = owners.pop("privacy_cap_total")
    return {
        "kind": "auction",
        "seed": old["seed"],
        "task": {
            "name": old["name"],
            "rounds": old["rounds"],
            "bidders_per_round": old["bidders_per_round"],
            "budget_per_round": old["budget_micros_per_round"] / _MICROS,
            "budget_factor": None,
            "learning_rate": learning_rate,
        },
        "data": {"train": None, "test": None, "label": None, "scaling": None, **old["data"]},
        "owners": {**owners, **spans, "bids": None, "privacy_cap": cap, "privacy_cap_delta": 0.0},
        "mechanism": {**mechanism, "bound_dimension": "model"},
        "model": {"name": "softmax"},
        "training": {"local_epochs": None, "momentum": None, "optimizer": "sgd", **training},
        "broker": {
            "engine": old["engine"],
            **played,
            "round_seconds": old["round_seconds"],
            "deadline_seconds": old["deadline_seconds"],
        },
    }
