"""Any one record as the unit of privacy behind a Flower app: the guard takes the steps itself.

What one record does to a train function of somebody's own cannot be bounded from outside: the function may look at
another record because of it, train longer, or stop. So where a buyer pays for ε of a record the app's `train` is not
called. The app says what is trained (`model`, a `torch.nn.Module` that gives scores for classes) and on what
(`records`), and the guard descends on the mean cross-entropy: all records at every step, each one's gradient clipped,
noise in every step (`market.descent`). How many steps, at which rate, is announced: what they bid for is what they do.

What would break it: a module that lets one record's gradient depend on another. Layers with batch statistics use the
ones that came with the order; a module that has none to use is refused, which is an update of nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput
from flmarket.flower.tensors import TENSORS, UPDATE, AppModel, Tensors
from flmarket.learning import LocalTraining, Records
from flmarket.learning.datasets import as_records
from flmarket.market import Announcement
from flmarket.market.descent import reach
from flmarket.privacy import RecordNoise

if TYPE_CHECKING:
    from torch import nn

    from flmarket.learning.torch_model import TorchModel

MOST_STEPS = 1000  # each of them draws noise for all parameters, also where training failed
WHY = (
    "this owner's app sells whole updates: what one record does to a train function cannot be bounded from outside; "
    "owner_guard(model=…, records=…) lets the guard take the steps itself"
)


@dataclass(frozen=True)
class RecordTerms:
    """The steps that a buyer of records' privacy announces, and the δ of every ε in this market."""

    local: LocalTraining
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.local != LocalTraining(**self._steps) or self.local.steps > MOST_STEPS:
            what = f"at most {MOST_STEPS} steps, learning_rate and momentum: all records at every step, plain descent"
            raise InvalidInput("local", self.local, what)
        self.noise(1.0)

    @property
    def _steps(self) -> dict[str, Any]:
        local = self.local
        return {"steps": local.steps, "learning_rate": local.learning_rate, "momentum": local.momentum}

    @property
    def said(self) -> dict[str, Any]:
        """What an announcement says of them."""
        return {"unit": RecordNoise.unit, "delta": self.delta, "local": self._steps}

    @classmethod
    def announced(cls, settings: str) -> RecordTerms | None:
        """Those of an announcement; None if it is for whole updates. InvalidInput for nonsense."""
        said = json.loads(settings)
        if "unit" not in said:
            return None
        try:
            return cls(LocalTraining(**said["local"]), said["delta"])
        except (KeyError, TypeError):
            raise InvalidInput("settings", settings[:200], "the steps that protect records") from None

    def noise(self, clip: float) -> RecordNoise:
        """As the buyer counts on it."""
        return RecordNoise(clip=clip, delta=self.delta, steps=self.local.steps, rate=reach(self.local))


@dataclass(frozen=True)
class RecordWork:
    """What an app gives the guard: a module, made anew or the same every time, and how this node's records are read.

    Records are `(x, y)` arrays, or a data set of PyTorch's with such items, in random order.
    """

    model: Callable[[], nn.Module]
    records: Callable[[Context], Any]

    def bound(self, tensors: Tensors, arrays: ArrayRecord, terms: RecordTerms, context: Context) -> StepModel:
        """The module with the arrays of an order, where the listed tensors are trained and nothing else."""
        module = self.model()
        module.load_state_dict(arrays.to_torch_state_dict())
        for name, part in module.named_parameters():
            part.requires_grad_(name in tensors.shapes)
        found = {name: tuple(part.shape) for name, part in module.named_parameters() if part.requires_grad}
        if list(found.items()) != list(tensors.shapes.items()):
            raise InvalidInput("tensors", list(tensors.shapes)[:20], f"parameters of the module, {list(found)[:20]}")
        return StepModel(tensors.shapes, local=terms.local, module=module, source=lambda: self.records(context))


@dataclass(frozen=True, eq=False)
class StepModel(AppModel):
    """What the guard trains: a module's listed tensors, by steps of plain descent. Without a module it only counts."""

    local: LocalTraining = field(default_factory=LocalTraining)
    module: nn.Module | None = None
    source: Callable[[], Any] | None = None
    network: TorchModel | None = field(default=None, init=False)

    def read(self, count: int) -> Records:
        """The node's first records as rows; only now is it known what shape one has."""
        import torch

        from flmarket.learning.torch_model import TorchModel

        if self.module is None or self.source is None:
            raise InvalidInput("model", None, "the module of an order")
        x, y = as_records(self.source())
        if len(y) < count:
            raise InvalidInput("records", len(y), f"the {count} that the owner's file says")
        shape = x.shape[1:]
        with torch.no_grad():
            scores = self.module.eval()(torch.zeros((1, *shape), dtype=next(self.module.parameters()).dtype))
        classes, given = int(scores.shape[-1]), shape if len(shape) > 1 else ()
        found = TorchModel(self.module, math.prod(shape), classes, self.local, given)
        object.__setattr__(self, "network", found)
        return Records(x[:count].reshape(count, -1), y[:count].astype(np.int64))

    def record_gradients(self, parameters: ArrayLike, data: Records) -> FloatArray:
        """The gradient of each record's own loss."""
        if self.network is None:
            raise InvalidInput("model", None, "records that were read")
        return self.network.record_gradients(parameters, data)


def counting(call: Announcement) -> AppModel | None:
    """What the app, or the guard, trains for an announcement, before its order is there; None if that is another's."""
    if TENSORS not in json.loads(call.settings):
        return None
    terms, tensors = RecordTerms.announced(call.settings), {UPDATE: (call.parameters,)}
    return AppModel(tensors) if terms is None else StepModel(tensors, local=terms.local)
