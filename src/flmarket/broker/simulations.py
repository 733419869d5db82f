"""Simulations built from orders, kept for a while: loading data and dealing it out takes longer than a round."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from flmarket.broker.requests import TaskRequest
from flmarket.broker.settings import Settings
from flmarket.engines import Simulation, Spec
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.learning import DataSet, datasets, dimension, models

__all__ = ["Simulations"]

_KEPT = 16


class Simulations:
    """Data sets by name and simulations by order; safe to share between threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.data_sets = tuple(map(datasets.admit, settings.data_sets))
        for name in settings.models:
            models.admit(name)
        self._data: dict[str, DataSet] = {}
        self._built: OrderedDict[str, Spec] = OrderedDict()
        self._lock = threading.Lock()

    def build(self, task_id: str, order: TaskRequest) -> Spec:
        """The simulation of an order; raises a typed error if it cannot be played."""
        if order.data.registered not in self.data_sets:
            raise InvalidInput("data.name", order.data.registered, f"one of {', '.join(self.data_sets)}")
        if order.model.name not in self.models:
            raise InvalidInput("model.name", order.model.name, f"one of {', '.join(self.models)}")
        key = order.model_dump_json(exclude={"task": {"name", "rounds", "budget_per_round"}, "broker": True})
        with self._lock:
            found = self._built.get(key)
            if found is not None:
                self._built.move_to_end(key)
        if found is None:
            data = self._load(order.data.registered)
            self._check_model(order, data)
            found = order.market_file(task_id).spec(data=data)
            found.kind()  # owners, model and market fit together
            with self._lock:
                self._built[key] = found
                while len(self._built) > _KEPT:
                    self._built.popitem(last=False)
        if isinstance(found, Simulation):
            task = replace(found.task, name=task_id, budget_micros=order.budget_micros, rounds=order.task.rounds)
            return replace(found, task=task)
        return order.market_file(task_id).spec(data=self._load(order.data.registered))

    @property
    def models(self) -> tuple[str, ...]:
        """What may be learned: all that is registered, and what the operator admitted."""
        return (*models.names(), *self._settings.models)

    def _check_model(self, order: TaskRequest, data: DataSet) -> None:
        """A typed error unless the model can be built and is not too large."""
        try:
            size = dimension(order.model.build(data, order.training.local()))
        except FlmarketError:
            raise
        except Exception as error:  # of a model that takes any settings, or of its framework
            raise InvalidInput("model", order.model.name, f"settings that it can be built with ({error})") from None
        if size > self._settings.max_dimension:
            raise InvalidInput("model", f"{size} parameters", f"at most {self._settings.max_dimension}")

    def _load(self, name: str) -> DataSet:
        with self._lock:
            if name not in self._data:
                self._data[name] = datasets.load(name, self._settings.data_dir, download=False)
            return self._data[name]
