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
    for task, spec in _orders():
        outputs = task.dimension // (task.features + 1)  # all of them were softmax regressions
        tensors = [["weights", [outputs, task.features]], ["biases", [outputs]]]
        _update(task.id, spec=_sections(spec), tensors=tensors)


def downgrade() -> None:
    """Take back. What orders could not say before is lost."""
    for task, spec in _orders():
        _update(task.id, spec=_flat(spec))
    op.drop_column("broker_tasks", "dtype")
    op.drop_column("broker_tasks", "tensors")


_tasks = sa.table(
    "broker_tasks",
    sa.column("id", sa.String),
    sa.column("spec", sa.JSON),
    sa.column("tensors", sa.JSON),
    sa.column("features", sa.Integer),
    sa.column("dimension", sa.Integer),
)


def _orders() -> list[tuple[Any, dict[str, Any]]]:
    rows = op.get_bind().execute(sa.select(_tasks.c.id, _tasks.c.spec, _tasks.c.features, _tasks.c.dimension)).all()
    return [(row, json.loads(row.spec) if isinstance(row.spec, str) else dict(row.spec)) for row in rows]


def _update(task_id: str, **values: Any) -> None:
    op.get_bind().execute(sa.update(_tasks).where(_tasks.c.id == task_id).values(**values))


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


def _flat(new: dict[str, Any]) -> dict[str, Any]:
    task, owners, broker = new["task"], new["owners"], new["broker"]
    spans = {key: {"low": owners[key][0], "high": owners[key][1]} for key in ("rate", "privacy_budget")}
    return {
        "name": task["name"],
        "engine": broker["engine"],
        "data": _only(new["data"], "owners", "partition", "sigma", "minimum", "concentration")
        | {"name": new["data"]["name"] or "breast-cancer"},
        "owners": _only(owners, "valuations", "dropout", "faulty")
        | _only(broker, *_BROKER)
        | {**spans, "privacy_cap_total": min(owners["privacy_cap"] or 10_000.0, 10_000.0)},
        "mechanism": _only(new["mechanism"], "auction", "aggregation", "perturbation", "clip"),
        "training": _only(new["training"], "local_steps", "batch_size", "local_learning_rate", "average")
        | {"learning_rate": task["learning_rate"]},
        "rounds": task["rounds"],
        "bidders_per_round": task["bidders_per_round"],
        "budget_micros_per_round": round(task["budget_per_round"] * _MICROS),
        "round_seconds": broker["round_seconds"],
        "deadline_seconds": broker["deadline_seconds"],
        "seed": new["seed"],
    }


def _only(section: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: section[key] for key in keys}
