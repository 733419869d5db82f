"""Simulations built from orders, kept for a while: loading data and dealing it out takes longer than a round."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from flmarket.broker.requests import TaskRequest
from flmarket.engines import Simulation, SimulationRun
from flmarket.errors import InvalidInput
from flmarket.learning import DataSet, load
from flmarket.ledger import MemoryLedger

__all__ = ["Simulations"]

_KEPT = 16


class Simulations:
    """Data sets by name and simulations by order; safe to share between threads."""

    def __init__(self, data_dir: Path | None, data_sets: tuple[str, ...]) -> None:
        self._data_dir, self.data_sets = data_dir, data_sets
        self._data: dict[str, DataSet] = {}
        self._built: OrderedDict[str, Simulation] = OrderedDict()
        self._lock = threading.Lock()

    def build(self, task_id: str, order: TaskRequest) -> Simulation:
        """The simulation of an order; raises a typed error if it cannot be played."""
        if order.data.name not in self.data_sets:
            raise InvalidInput("data.name", order.data.name, f"one of {', '.join(self.data_sets)}")
        key = order.model_dump_json(exclude={"name", "deadline_seconds", "round_seconds"})
        with self._lock:
            found = self._built.get(key)
            if found is not None:
                self._built.move_to_end(key)
        if found is None:
            found = order.market(task_id).simulation(data=self._load(order.data.name))
            SimulationRun(found, MemoryLedger())  # owners, accounts and market fit together
            with self._lock:
                self._built[key] = found
                while len(self._built) > _KEPT:
                    self._built.popitem(last=False)
        budget = order.budget_micros_per_round
        return replace(found, task=replace(found.task, name=task_id, budget_micros=budget, rounds=order.rounds))

    def _load(self, name: str) -> DataSet:
        with self._lock:
            if name not in self._data:
                self._data[name] = load(name, self._data_dir, download=False)
            return self._data[name]
