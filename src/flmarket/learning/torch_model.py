"""PyTorch networks as models: any `torch.nn.Module`, a small dense network, and the two of the JDP paper.

`TorchModel` trains the parameters that require a gradient and no others, so a frozen backbone with a new head, or
adapters, send only what is new. Buffers never leave, nor do they move: layers with running statistics (batch norm) use
those that the module came with, in training as in testing. The module is given a batch of records and answers with a
score for each class.

An owner's training is mini-batch descent on the mean cross-entropy in the module's own number type, without memory of
the last call. Her generator gives the batches and, by its first draw, the seed of all that torch draws (dropout), so
the same generator gives the same result; torch's global generator is left as it was found. Owners are trained one
after the other, each on one core. `threads` of them may run at a time, in networks that draw from no global generator:
those of this module. That is not for want of trying: `torch.func.vmap` over clients is slower than a loop in the
channels-last layout for both convolutional networks, grouped convolutions are slower for the larger and about even for
the smaller (benchmarks/bench_neural.py), and `torch.compile` did not pay when tried. Splitting one client's convolution
over cores is avoided, as it slows down severalfold whenever another process has one of them.

What would break it: a learning rate that makes training diverge: the parameters come back as they are, infinite or not
a number, and the next call refuses them.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import InvalidInput, needed
from flmarket.learning.data import Records
from flmarket.learning.model import (
    LocalTraining,
    balanced_accuracy,
    checked_parameters,
    checked_records,
    dimension,
    owners_of,
    visits,
)
from flmarket.learning.networks import Network, network
from flmarket.privacy.events import checked_whole

with needed("torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

T = TypeVar("T")
R = TypeVar("R")
AT_ONCE = 250  # records in evaluation: the widest layer's values for as many images stay near the cache
_TYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
_GLOBAL = threading.Lock()  # whoever seeds torch's global generator has it alone


@dataclass(frozen=True, eq=False)
class TorchModel:
    """A `torch.nn.Module`, or a function that builds one afresh, as a `Model`.

    A function starts from weights drawn anew for each seed, a module from its own (a pre-trained one). `shape` is what
    the module takes a record as, if not as a flat row.
    """

    module: nn.Module | Callable[[], nn.Module]
    features: int
    classes: int
    local: LocalTraining = field(default_factory=LocalTraining)
    shape: tuple[int, ...] = ()
    threads: int = 1
    name: str = ""
    origin: tuple[str, Mapping[str, Any]] | None = field(default=None, repr=False)
    template: nn.Module = field(init=False, repr=False)
    tensors: Mapping[str, tuple[int, ...]] = field(init=False, repr=False)
    dtype: np.dtype[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checked_whole("threads", self.threads, 1)
        module = self._built(0)
        trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
        if not trained:
            raise InvalidInput("module", type(module).__name__, "at least one parameter that requires a gradient")
        types = {part.dtype for part in trained.values()}
        if len(types) > 1 or not types <= set(_TYPES):
            raise InvalidInput("module", ", ".join(map(str, types)), "trained parameters of one float type")
        object.__setattr__(self, "template", copy.deepcopy(module))
        object.__setattr__(self, "tensors", {name: tuple(part.shape) for name, part in trained.items()})
        object.__setattr__(self, "dtype", np.dtype(_TYPES[types.pop()]))

    @property
    def dimension(self) -> int:
        """Length of the parameter vector."""
        return dimension(self)

    def initial(self, seed: int | np.random.Generator = 0) -> FloatArray:
        """Where training starts: drawn from the seed, or what a given module holds."""
        rng = np.random.default_rng(seed)
        if isinstance(self.template, Network):
            return self.template.initial(rng)
        module = self._built(int(rng.integers(1 << 63)))
        return np.concatenate([_numbers(part) for part in module.parameters() if part.requires_grad])

    def train(self, parameters: ArrayLike, data: Records, rng: np.random.Generator) -> FloatArray:
        """Where one owner's local work ends."""
        return np.asarray(self.train_many(parameters, [data], [rng])[0])

    def train_many(
        self, parameters: ArrayLike, data: Sequence[Records], rngs: Sequence[np.random.Generator]
    ) -> FloatArray:
        """Where each owner's local work ends, (owners, p), from a common start (p,) or her own (owners, p)."""
        starts = checked_parameters(parameters, self.dimension, rows=owners_of(data, rngs))
        return np.stack(self._each(lambda i: self._descend(starts[i], data[i], rngs[i]), range(len(data))))

    def record_gradients(self, parameters: ArrayLike, data: Records) -> FloatArray:
        """The gradient of each record's own loss, (records, p), without dropout; NaN where there is no such class."""
        start = checked_parameters(parameters, self.dimension, rows=1)
        for part in self.template.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats:
                raise InvalidInput("module", type(part).__name__, "layers in which records do not meet each other")
        inputs, labels, fits = self._any_records(data)
        work = self._mapped if self._maps else self._looped
        rows = self._each(lambda row: work(row, inputs, labels), start)[0]
        rows[~fits] = np.nan
        return rows

    def clipped_sum(self, parameters: FloatArray, data: Records, clip: float) -> FloatArray | None:
        """The sum of records' clipped gradients by the network's own short cut; None where it has none."""
        if not isinstance(self.template, Network):
            return None
        inputs, labels, fits = self._any_records(data)

        def work(vector: FloatArray) -> FloatArray:
            module, leaves = self._holding(vector)
            for leaf in leaves:
                leaf.requires_grad_(False)
            assert isinstance(module, Network)
            return module.eval().clipped_sum(inputs, labels, torch.from_numpy(fits), clip)

        return self._each(work, parameters[None])[0]

    def _any_records(self, data: Records) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        """Inputs and labels, and whose label is a class; others are called 0."""
        x, y = checked_records(data.x, data.y, self.features, None)
        fits = (y >= 0) & (y < self.classes)
        return self._inputs(x), torch.from_numpy(np.where(fits, y, 0)), fits

    @cached_property
    def _maps(self) -> bool:
        """Whether `vmap` can take the module, tried without anybody's records: not with operations in place."""
        try:
            inputs = self._inputs(np.zeros((2, self.features)))
            self._mapped(np.zeros(self.dimension), inputs, torch.zeros(2, dtype=torch.int64))
        except InvalidInput:
            raise
        except Exception:  # several of PyTorch's own, for several reasons
            return False
        return True

    def _mapped(self, vector: FloatArray, inputs: Tensor, labels: Tensor) -> FloatArray:
        module, leaves = self._holding(vector)
        module.eval()
        trained = dict(zip(self.tensors, (leaf.detach() for leaf in leaves), strict=True))

        def loss(trained: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
            scores = torch.func.functional_call(module, trained, (record[None],))
            return functional.cross_entropy(self._checked(scores, 1), label[None])

        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(trained, inputs, labels)
        return np.asarray(torch.cat([found[name].flatten(1) for name in trained], dim=1).double().numpy())

    def _looped(self, vector: FloatArray, inputs: Tensor, labels: Tensor) -> FloatArray:
        module, leaves = self._holding(vector)
        module.eval()
        rows = np.empty((len(labels), self.dimension))
        with _seeded(0):
            for i, row in enumerate(rows):
                loss = functional.cross_entropy(self._checked(module(inputs[i : i + 1]), 1), labels[i : i + 1])
                row[:] = np.concatenate([_numbers(part) for part in _slopes(loss, leaves)])
        return rows

    def evaluate(self, parameters: ArrayLike, data: Records) -> dict[str, float]:
        """Accuracy, balanced accuracy and mean cross-entropy, without dropout; infinite where scores overflow."""
        start = checked_parameters(parameters, self.dimension, rows=1)
        scores, labels = self._each(lambda row: self._scores(row, data), start)[0]
        guessed = scores.argmax(1)
        sums = [
            float(functional.cross_entropy(some, truth, reduction="sum"))
            for some, truth in zip(torch.split(scores, AT_ONCE), torch.split(labels, AT_ONCE), strict=True)
        ]
        return {
            "accuracy": int((guessed == labels).sum()) / len(labels),
            "balanced_accuracy": balanced_accuracy(labels.numpy(), guessed.numpy()),
            "loss": float(np.nan_to_num(sum(sums) / len(labels), nan=np.inf, posinf=np.inf)),
        }

    def predict(self, parameters: ArrayLike, x: ArrayLike) -> IntArray:
        """The class with the highest score; a tie goes to the lower class."""
        start, rows = checked_parameters(parameters, self.dimension, rows=1), np.asarray(x, dtype=np.float64)
        unknown = Records(rows, np.zeros(len(rows), dtype=np.int64))
        return np.asarray(self._each(lambda row: self._scores(row, unknown), start)[0][0].argmax(1).numpy())

    def accuracies(self, candidates: ArrayLike, data: Records) -> FloatArray:
        """Share of the records that each parameter vector gets right, (k,)."""

        def right(row: FloatArray) -> float:
            scores, labels = self._scores(row, data)
            return int((scores.argmax(1) == labels).sum()) / len(labels)

        return np.array(self._each(right, checked_parameters(candidates, self.dimension)))

    def _built(self, seed: int) -> nn.Module:
        """The module, or one built with weights drawn from the seed."""
        if isinstance(self.module, nn.Module):
            return self.module
        with _seeded(seed):
            module: object = self.module()
        if not isinstance(module, nn.Module):
            raise InvalidInput("module", type(module).__name__, "a torch.nn.Module")
        return module

    def _holding(self, vector: FloatArray) -> tuple[nn.Module, list[nn.Parameter]]:
        """A module of one's own that holds the vector, and its trained parameters; frozen ones are shared."""
        frozen = {id(part): part for part in self.template.parameters() if not part.requires_grad}
        module = copy.deepcopy(self.template, dict(frozen))
        leaves = [part for part in module.parameters() if part.requires_grad]
        flat, start = torch.from_numpy(vector.astype(self.dtype)), 0
        for leaf in leaves:
            leaf.data = flat[start : start + leaf.numel()].view(leaf.shape)
            start += leaf.numel()
        return module, leaves

    def _inputs(self, x: FloatArray) -> Tensor:
        with np.errstate(over="ignore"):
            rows = torch.from_numpy(x.astype(self.dtype))
        return rows.reshape(-1, *self.shape) if self.shape else rows

    def _descend(self, start: FloatArray, data: Records, rng: np.random.Generator) -> FloatArray:
        """One owner's local training."""
        x, y = checked_records(data.x, data.y, self.features, self.classes)
        seed = int(rng.integers(1 << 63))
        module, leaves = self._holding(start)
        module.train()
        for part in module.modules():
            if getattr(part, "track_running_stats", False):
                part.eval()
        steps, batch = (int(k) for k in self.local.plan(len(y)))
        step = _STEPS[self.local.optimizer](leaves, self.local)
        if isinstance(module, Network):  # has a generator of its own
            module.generator.manual_seed(seed)
        with nullcontext() if isinstance(module, Network) else _seeded(seed):
            for rows in visits(rng, len(y), steps, batch):
                scores = self._checked(module(self._inputs(x[rows])), len(rows))
                gradients = _slopes(functional.cross_entropy(scores, torch.from_numpy(y[rows])), leaves)
                with torch.no_grad():
                    step(gradients)
        return np.concatenate([_numbers(leaf) for leaf in leaves])

    def _scores(self, vector: FloatArray, data: Records) -> tuple[Tensor, Tensor]:
        """Every record's scores, and the labels."""
        x, y = checked_records(data.x, data.y, self.features, self.classes)
        module, _ = self._holding(vector)
        module.eval()
        with torch.inference_mode():
            parts = [
                self._checked(module(self._inputs(x[i : i + AT_ONCE])), len(x[i : i + AT_ONCE]))
                for i in range(0, len(x), AT_ONCE)
            ]
            return torch.cat(parts), torch.tensor(y)  # a copy: data sets are read-only

    def _checked(self, scores: object, records: int) -> Tensor:
        if not isinstance(scores, Tensor) or tuple(scores.shape) != (records, self.classes):
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InvalidInput("module's answer", found, f"scores of shape {(records, self.classes)}")
        return scores

    def _each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results in order; worker threads have their own count of torch threads, so the caller's stays."""
        with ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            return list(workers.map(work, items))


def wrapped(name: str, made: object, build: Callable[[], Any], settings: Mapping[str, Any]) -> TorchModel:
    """What a registered factory made, if it is a module; `build` makes another."""
    if not isinstance(made, nn.Module):
        raise InvalidInput("model", f"{name}, which makes {type(made).__name__}", "a Model or a torch.nn.Module")
    known = {key: settings[key] for key in ("local", "shape", "threads") if key in settings}
    again = build()
    features, classes = settings["features"], settings["classes"]
    model = TorchModel(made if again is made else build, features, classes, name=name, **known)
    try:  # on records of nothing, before anybody is paid for training it
        model.evaluate(model.initial(), Records(np.zeros((2, features)), np.zeros(2, np.int64)))
    except InvalidInput:
        raise
    except Exception as error:  # a module of somebody else's: whatever it raises
        accepted = f"a module that takes records of {features} features ({error})"
        raise InvalidInput("model", name, accepted) from error
    return model


_MAKERS = {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace, torch.empty_strided),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}


class Counted(TorchFunctionMode):
    """While it is entered, tensors are made until they have so many numbers in all; then InvalidInput is raised.

    How many a call would make is asked of PyTorch's "meta" device first, which keeps none of them.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = self.left = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in _MAKERS:
            sizes = {key: value for key, value in given.items() if key not in ("generator", "pin_memory", "out")}
            try:
                self.left -= func(*args, **sizes | {"device": "meta"}).numel()
            except (RuntimeError, OverflowError):  # more than 64 bits can count
                self.left = -1
            if self.left < 0:
                raise InvalidInput("parameters", f"{func.__name__}{args}", f"at most {self.most:,}")
        return func(*args, **given)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's global generator seeded for a while, then as it was; one at a time."""
    with _GLOBAL:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def _slopes(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient; zeros for what the loss does not depend on."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, found, strict=True)]


def _numbers(part: Tensor) -> FloatArray:
    return part.detach().numpy().astype(np.float64).ravel()


def _sgd(leaves: Sequence[Tensor], local: LocalTraining) -> Callable[[Sequence[Tensor]], None]:
    """As `torch.optim.SGD`, whose first use takes seconds to import what compiles."""
    velocities = [torch.zeros_like(leaf) for leaf in leaves]

    def step(gradients: Sequence[Tensor]) -> None:
        for leaf, velocity, gradient in zip(leaves, velocities, gradients, strict=True):
            velocity.mul_(local.momentum).add_(gradient)
            leaf.sub_(velocity, alpha=local.learning_rate)

    return step


def _adam(leaves: Sequence[Tensor], local: LocalTraining) -> Callable[[Sequence[Tensor]], None]:
    """Kingma and Ba, ICLR 2015, Algorithm 1, with the usual β = (0.9, 0.999); as `torch.optim.Adam`."""
    means, squares = ([torch.zeros_like(leaf) for leaf in leaves] for _ in range(2))
    taken = 0

    def step(gradients: Sequence[Tensor]) -> None:
        nonlocal taken
        taken += 1
        for leaf, mean, square, gradient in zip(leaves, means, squares, gradients, strict=True):
            mean.lerp_(gradient, 0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            spread = square.sqrt().div_(math.sqrt(1 - 0.999**taken)).add_(1e-8)
            leaf.addcdiv_(mean, spread, value=-local.learning_rate / (1 - 0.9**taken))

    return step


_STEPS = {"sgd": _sgd, "adam": _adam}


# --- networks that come with the package ------------------------------------------------------------------------------


def mlp(
    features: int, classes: int, *, hidden: Sequence[int] = (32,), local: LocalTraining, threads: int = 1
) -> TorchModel:
    """Dense layers with ReLU between them."""
    for width in hidden:
        checked_whole("hidden", width, 1, 100_000)
    build = partial(_dense, (features, *hidden, classes))
    return TorchModel(build, features, classes, local, threads=threads, name="mlp")


def _dense(widths: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(name: str, *, local: LocalTraining, threads: int = 1) -> TorchModel:
    """A convolutional network by name, as a model."""
    made = network(name)
    return TorchModel(made, made.features, 10, local, threads=threads, name=name)
