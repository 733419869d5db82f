"""The tensors that are sold, by name, the one vector that they make in a market, and records as its unit of privacy.

A Flower app exchanges named arrays. Of these a buyer asks for some: adapters, a head, or all that are trained. In the
market they are one vector, in the order and shapes of a listing that buyer and owner both hold. An announcement says
the listing's digest and the configuration that training gets, so that neither can change between bid and order.

Normalisation layers keep running means and variances beside what they learn. They are statistics of records, no
descent moves them, and the mean of noised variances can be negative: they are never sold, whoever asks.

What would break it: an app whose arrays change from round to round. Names, shapes and types are fixed by the first.

Any one record as the unit of privacy behind a Flower app: the guard takes the steps itself.

What one record does to a train function of somebody's own cannot be bounded from outside: the function may look at
another record because of it, train longer, or stop. So where a buyer pays for ε of a record the app's `train` is not
called. The app says what is trained (`model`, a `torch.nn.Module` that gives scores for classes) and on what
(`records`), and the guard descends on the mean cross-entropy: all records at every step, each one's gradient clipped,
noise in every step (`market.descent`). How many steps, at which rate, is announced: what they bid for is what they do.

What would break it: a module that lets one record's gradient depend on another. Layers with batch statistics use the
ones that came with the order; a module that has none to use is refused, which is an update of nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray
from flmarket.engines.flower.messages import LONGEST_TEXT, numbers
from flmarket.errors import InvalidInput
from flmarket.learning import LocalTraining, Records
from flmarket.learning.datasets import as_records
from flmarket.market import Announcement
from flmarket.market.descent import reach
from flmarket.market.owner import LARGEST_PARAMETER
from flmarket.privacy import RecordNoise

if TYPE_CHECKING:
    from torch import nn

    from flmarket.learning.torch_model import TorchModel

FLOATS = ("float16", "float32", "float64")
TENSORS, UPDATE = "tensors", "update"  # records of an order and of its answer
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
LONGEST_LISTING = 1_000_000  # characters
MOST_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Tensors:
    """Names, shapes and number types, in the order in which they lie in the vector."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InvalidInput("release", "nothing", "one or more tensors")
        for name, dtype in self.dtypes.items():
            if is_buffer(name):
                raise InvalidInput("release", name, "no running statistics: they are never sold")
            if dtype not in FLOATS:
                raise InvalidInput(f"tensor {name}", dtype, f"numbers of type {', '.join(FLOATS)}")
        if not 1 <= self.dimension <= MOST_PARAMETERS:
            raise InvalidInput("parameters", self.dimension, f"1 to {MOST_PARAMETERS:,}")

    @classmethod
    def chosen(cls, arrays: ArrayRecord, release: Sequence[str] | None) -> Tensors:
        """Those that patterns name (`fc.*`, `lora_*`); without patterns all of floating point but statistics.

        A pattern that fits no name as a whole is tried on what follows a dot, since wrappers put words before names
        (`base_model.model.fc.lora_A.default.weight`). One that names nothing that can be sold is an error: a buyer who
        misspells a name buys nothing.
        """
        sellable = [name for name, one in arrays.items() if one.dtype in FLOATS and not is_buffer(name)]
        if isinstance(release, str) or not all(isinstance(pattern, str) for pattern in release or ()):
            raise InvalidInput("release", release, "a list of patterns")
        wanted = set(sellable if release is None else ())
        for pattern in release or ():
            named = _named(pattern, arrays)
            wanted |= named & set(sellable)
            if not named & set(sellable):
                odd = [f"{name} ({one.dtype})" for name, one in arrays.items() if name in named]
                what = f"only {', '.join(odd)}, which is not sold" if odd else "no tensor"
                raise InvalidInput("release", f"{pattern!r}: {what}", f"patterns of {', '.join(sellable)}"[:2000])
        found = cls.of(arrays, [name for name in sellable if name in wanted])
        if len(found.text) > LONGEST_LISTING:
            what = f"names and shapes of at most {LONGEST_LISTING:,} characters in all: release fewer tensors"
            raise InvalidInput("release", f"{len(found.shapes)} tensors, {len(found.text):,} characters", what)
        return found

    @classmethod
    def of(cls, arrays: ArrayRecord, names: Sequence[str]) -> Tensors:
        """These arrays of a record."""
        shapes = {name: tuple(int(length) for length in arrays[name].shape) for name in names}
        return cls(shapes, {name: arrays[name].dtype for name in names})

    @classmethod
    def parsed(cls, text: str) -> Tensors:
        """What `text` wrote, as it came from a stranger."""
        try:
            rows = json.loads(text)
            found = cls({name: tuple(shape) for name, shape, _ in rows}, {name: dtype for name, _, dtype in rows})
            lengths = [length for shape in found.shapes.values() for length in shape]
            good = all(type(length) is int and length >= 0 for length in lengths) and len(found.shapes) == len(rows)
            if not good or found.text != text:
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise InvalidInput("tensors", len(text), "a listing of names, shapes and number types") from None
        return found

    @property
    def text(self) -> str:
        """The listing, in one way only."""
        rows = [[name, list(shape), self.dtypes[name]] for name, shape in self.shapes.items()]
        return json.dumps(rows, separators=(",", ":"))

    @property
    def dimension(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def flat(self, arrays: Mapping[str, Array]) -> FloatArray:
        """The vector of a record that has them, whatever else it has; any float type will do."""
        parts = []
        for name, shape in self.shapes.items():
            if name not in arrays:
                raise InvalidInput("tensors", ", ".join(arrays)[:500], f"{name}, and all others that are sold")
            part = numbers(f"tensor {name}", arrays[name], math.prod(shape), FLOATS)
            if part.shape != shape:
                raise InvalidInput(f"tensor {name}", part.shape, f"shape {shape}")
            parts.append(part.ravel())
        return np.concatenate(parts)

    def named(self, vector: FloatArray, dtype: str | None = None) -> dict[str, Array]:
        """The vector as arrays, of their own number types or all of one."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])[:-1]
        parts = zip(self.shapes.items(), np.split(vector, ends), strict=True)
        return {
            name: Array(part.reshape(shape).astype(dtype or self.dtypes[name]))  # a scalar stays one
            for (name, shape), part in parts
        }


def _named(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that fit a pattern as a whole; if there are none, those of which an end after a dot does."""
    all_names = list(names)
    if pattern in all_names:
        return {pattern}
    whole = {name for name in all_names if fnmatchcase(name, pattern)}
    return whole or {name for name in all_names if any(fnmatchcase(end, pattern) for end in _ends(name))}


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(1, len(parts))]


def startable(arrays: object, release: Sequence[str] | None) -> Tensors:
    """What is sold of the arrays that training starts from; InvalidInput if owners could do nothing with them."""
    if not isinstance(arrays, ArrayRecord):
        what = "an ArrayRecord, such as ArrayRecord(model.state_dict())"
        raise InvalidInput("initial_arrays", type(arrays).__name__, what)
    tensors = Tensors.chosen(arrays, release)
    for name in (name for name, one in arrays.items() if one.dtype in FLOATS):
        if np.isnan(arrays[name].numpy()).any():
            raise InvalidInput("initial_arrays", f"NaN in {name}", "numbers, in tensors that are not sold too")
    if not (np.abs(tensors.flat(arrays)) <= LARGEST_PARAMETER).all():
        what = f"numbers within ±{LARGEST_PARAMETER:g}: owners take no others"
        raise InvalidInput("initial_arrays", f"larger ones in {', '.join(tensors.shapes)}"[:200], what)
    return tensors


def twins(arrays: ArrayRecord, tensors: Tensors) -> list[list[str]]:
    """Groups of names with the same numbers, as tied weights have, of which others are sold than the last alone.

    Loading a state dict fills tied weights once for each name: what the last says is what stays.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, one in arrays.items():
        if one.dtype in FLOATS and all(one.shape) and np.ptp(one.numpy()) > 0:
            groups.setdefault((one.dtype, tuple(one.shape), one.data), []).append(name)
    return [names for names in groups.values() if set(names[:-1]) & set(tensors.shapes)]


def is_buffer(name: str) -> bool:
    """Whether a tensor of that name is a normalisation layer's statistics, which are never sold."""
    return name.rsplit(".", 1)[-1] in BUFFERS


def settings(tensors: Tensors, config: ConfigRecord | None, records: Mapping[str, Any] | None = None) -> str:
    """What an announcement says beyond its fields: the listing's digest, the configuration that training gets, and
    where records are protected (`RecordTerms.said`) the steps that protect them."""
    values = dict(config or {})
    try:
        said = {"config": values, "tensors": hashlib.sha256(tensors.text.encode()).hexdigest(), **(records or {})}
        text = json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)
        json.dumps(values, ensure_ascii=False).encode()  # half a character, which no message can carry
        for one in values.values():
            if any(
                isinstance(number, int) and abs(number) >= 2**63 for number in (one if isinstance(one, list) else [one])
            ):
                raise ValueError
    except (TypeError, ValueError):
        what = "finite numbers, whole ones of 64 bits, texts, truth values, and lists of them"
        raise InvalidInput("train_config", values, what) from None
    if len(text) > LONGEST_TEXT:
        raise InvalidInput("train_config", f"{len(text)} characters", f"at most {LONGEST_TEXT} with everything around")
    return text


@dataclass(frozen=True, eq=False)
class AppModel:
    """What a ClientApp trains, as a market knows it: named tensors, and where they stand. Nobody else can train it."""

    tensors: Mapping[str, tuple[int, ...]]
    start: FloatArray | None = None
    dtype: str = "float32"

    def initial(self, seed: int | np.random.Generator = 0) -> FloatArray:
        """The arrays that the buyer began with."""
        return np.zeros(sum(math.prod(shape) for shape in self.tensors.values())) if self.start is None else self.start

    def train(self, parameters: ArrayLike, data: Records, rng: np.random.Generator) -> FloatArray:
        """Only the app can."""
        raise InvalidInput("model", "what a ClientApp trains", "its own app")

    def evaluate(self, parameters: ArrayLike, data: Records) -> dict[str, float]:
        """Only the buyer's `evaluate_fn` can."""
        return {}


def merged(arrays: ArrayRecord, tensors: Tensors, vector: FloatArray) -> ArrayRecord:
    """A record with its sold tensors replaced; all others are the same objects."""
    return ArrayRecord({**dict(arrays.items()), **tensors.named(vector)})


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Single numbers of a metric record."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


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
