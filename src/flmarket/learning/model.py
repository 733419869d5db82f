"""Models: what owners train at home and buyers take away, whatever computes it.

A `Model` is a value. It holds shapes and how local work is done (`LocalTraining`), never parameters: those are one flat
vector of float64 that is passed in and handed back, and named arrays in the model's own number type wherever they
leave (`travel`: Flower's ArrayRecord, a `state_dict`, safetensors). All randomness comes from the generators given,
one an owner, so what she trains does not depend on who else is present. `models` is the registry; it takes anything
that builds a `Model` or a `torch.nn.Module` for so many features and classes.

`SoftmaxRegression` is the convex model of the papers' experiments: logistic regression for two classes (features + 1
parameters), softmax regression otherwise ((features + 1) · classes). Its loss is the mean cross-entropy plus
l2/2 · ‖weights‖²; biases are penalised only if asked for. It trains many owners in one call: owners of few records are
stacked by size, so that one matrix product serves them all; owners of many are a block of their own, a view. Whatever
is computed per block uses an owner's own rows in a shape that depends on her size alone, so her result does not change,
to the last bit, with her company. One product over all records would not have that property.

Local work is mini-batch gradient descent, with momentum that starts from zero in every call. Mini-batches are drawn
without replacement: an owner walks through her records in random order, and again in a new order when fewer than a
batch are left. An owner with no more records than a batch uses all of them at every step. `fedsgd` (one gradient) and
`fedavg` (several steps) give the same work as updates that a server subtracts. McMahan et al., Communication-Efficient
Learning of Deep Networks from Decentralized Data, AISTATS 2017, Algorithm 1; Reddi et al., ICLR 2021, for the
pseudo-gradient.

What would break it: what was trained reveals records, so it is an intermediate value, never a message. And features of
wildly different scale: the gradient's norm then says more about units than about data, and clipping acts on the wrong
thing; the loaders in `data` scale for that reason.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike
from scipy.special import expit, softmax

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.learning.data import Pool, Records
from flmarket.privacy.events import checked_number, checked_positive, checked_whole
from flmarket.registry import Registry

Optimizer = Literal["sgd", "adam"]
STACK_BELOW = 32  # records; measured: stacking wins clearly at 8, is even at 32 to 64
BLOCK_VALUES = 1 << 16  # values gathered at a time: half a megabyte, which stays in the cache of a core
GRADIENT_VALUES = 1 << 22  # of single records' gradients at a time: 32 megabytes


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """What an owner does with her records in a round: `steps`, or `epochs` instead (passes over her records).

    `batch_size=None` is all of her records at every step; an epoch drops the rest that fills no batch.
    """

    steps: int = 1
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float = 0.1
    momentum: float = 0.0
    optimizer: Optimizer = "sgd"

    def __post_init__(self) -> None:
        checked_whole("steps", self.steps, 1)
        for name in ("epochs", "batch_size"):
            if getattr(self, name) is not None:
                checked_whole(name, getattr(self, name), 1)
        if self.epochs is not None and self.steps != 1:
            raise InvalidInput("epochs, steps", (self.epochs, self.steps), "one of the two")
        checked_positive("learning_rate", self.learning_rate)
        if checked_number("momentum", self.momentum, 0.0, 1.0) == 1.0:
            raise InvalidInput("momentum", self.momentum, "a number from 0 to below 1")
        if self.optimizer not in ("sgd", "adam") or (self.optimizer == "adam" and self.momentum):
            raise InvalidInput("optimizer", self.optimizer, '"sgd", or "adam" without momentum')

    @property
    def is_gradient(self) -> bool:
        """Whether it comes to one gradient on all records: FedSGD."""
        return self.optimizer == "sgd" and self.epochs is None and self.steps == 1 and self.batch_size is None

    def plan(self, records: ArrayLike) -> tuple[IntArray, IntArray]:
        """How many steps an owner of so many records takes, and how many records each step uses; element by element."""
        own = np.asarray(records, dtype=np.int64)
        size = own if self.batch_size is None else np.minimum(own, self.batch_size)
        return (np.full_like(own, self.steps) if self.epochs is None else self.epochs * (own // size)), size


@runtime_checkable
class Model(Protocol):
    """What a market needs of a model; parameters are float64 and flat.

    More is used where a model has it: `train_many(parameters, data, rngs)`, local work of many owners at once;
    `accuracies(candidates, data)`, of many parameter vectors; `dtype`, its own numbers (float64 if not); `local`, the
    `LocalTraining` that it does, looked up in every call (`at_rate` swaps it); `predict(parameters, x)`, the classes of
    records without labels, which is what makes a bought model of use.

    Markets that protect single records need `record_gradients(parameters, data)` too: the gradient of each record's own
    loss, (records, p), not clipped, NaN in a record's row if it has none.
    """

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Named shapes, in the order in which they lie in the flat vector."""

    def initial(self, seed: int | Generator = 0) -> FloatArray:
        """Where training starts."""

    def train(self, parameters: ArrayLike, data: Records, rng: Generator) -> FloatArray:
        """Where one owner's local work ends; her update is the difference."""

    def evaluate(self, parameters: ArrayLike, data: Records) -> dict[str, float]:
        """At least "accuracy", "balanced_accuracy" and "loss"."""


class _Models(Registry[Model]):
    """The registry of models: `get(name, features=…, classes=…, local=…)`; a bare module is wrapped."""

    def get(self, name: str, **settings: Any) -> Model:
        """The model of that name; `shape` and `threads` may be given too."""
        made = self.made(name, **settings)
        if not isinstance(made, Model):
            from flmarket.learning.torch_model import wrapped  # torch: only for those who ask for a network

            made = wrapped(name, made, partial(_made_again, name, settings), settings)
        with suppress(AttributeError):  # no room for it: then it cannot be described
            object.__setattr__(made, "origin", (name, settings))
        return made

    def made(self, name: str, **settings: Any) -> object:
        """What the factory itself returns."""
        try:
            return super().get(name, **settings)
        except FlmarketError:
            raise
        except Exception as error:  # a function of somebody else's: whatever it raises
            found = f"{name}, which raised {type(error).__name__}: {error}"
            raise InvalidInput("model", found, "build(features, classes) that returns a torch.nn.Module") from error


def _made_again(name: str, settings: Mapping[str, Any]) -> object:
    """A function of this module, so that a model can be pickled; the process may be another."""
    return models.made(models.admit(name), **settings)


models = _Models("model", "flmarket.models", offers=("features", "classes", "local", "shape", "threads"))


def dimension(model: Model) -> int:
    """Length of a model's parameter vector."""
    return sum(math.prod(shape) for shape in model.tensors.values())


def train_many(model: Model, parameters: ArrayLike, data: Sequence[Records], rngs: Sequence[Generator]) -> FloatArray:
    """Where each owner's local work ends, (owners, p), from a common start (p,) or her own (owners, p)."""
    together = getattr(model, "train_many", None)
    if together is not None:
        return np.asarray(together(parameters, data, rngs))
    starts = checked_parameters(parameters, dimension(model), rows=owners_of(data, rngs))
    return np.stack([model.train(start, data[i], rngs[i]) for i, start in enumerate(starts)])


def updates(model: Model, parameters: ArrayLike, data: Sequence[Records], rngs: Sequence[Generator]) -> FloatArray:
    """What a server subtracts for each owner, (owners, p): the mean gradient where softmax regression's local work is
    one step on all records, else start minus end. An owner's row is the same bits whoever else is there."""
    if isinstance(model, SoftmaxRegression) and model.local.is_gradient:
        pool = Pool.of(data)
        return model.owner_gradients(np.asarray(parameters), pool.x, pool.y, pool.offsets)
    return np.asarray(parameters, dtype=np.float64) - train_many(model, parameters, data, rngs)


def at_rate(model: Model, learning_rate: float) -> Model:
    """The same model with another local learning rate."""
    return with_local(model, replace(local_training(model), learning_rate=learning_rate))


def local_training(model: Model) -> LocalTraining:
    """What the model does at an owner's; models that train in their own way do not say."""
    local = getattr(model, "local", None)
    if not isinstance(local, LocalTraining):
        raise InvalidInput("model", type(model).__name__, "a model with a field `local`, its LocalTraining")
    return local


def with_local(model: Model, local: LocalTraining) -> Model:
    """The same model with other local work."""
    changed = copy.copy(model)  # not built anew: a network takes a while
    object.__setattr__(changed, "local", local)
    return changed


def clipped_gradients(model: Model, parameters: ArrayLike, data: Sequence[Records], clip: float) -> FloatArray:
    """Each owner's mean of her records' gradients, every one clipped to L2 norm `clip` first, (owners, p).

    At common parameters (p,), or at each owner's own (owners, p).

    A record whose gradient cannot be had (a class that the model lacks, an overflow, a record that makes the model
    raise) counts as zero, by itself: replacing one of m records moves the mean by at most 2·clip/m, whatever it holds.
    That a model fails whatever the records hold is found with records of zeros, before any is touched, and raised.
    A model's `clipped_sum(parameters, data, clip)`, if it has one and does not answer None, is taken for the sum.
    """
    checked_positive("clip", clip)
    common = np.ndim(parameters) < 2
    starts = checked_parameters(parameters, dimension(model), rows=1 if common else len(data))
    if isinstance(model, SoftmaxRegression):
        return model.clipped_gradients(starts[0] if common else starts, Pool.of(data), clip)
    gradients = getattr(model, "record_gradients", None)
    if gradients is None:
        accepted = "a model with record_gradients(parameters, data), since every record's gradient is clipped here"
        raise InvalidInput("model", type(model).__name__, accepted)
    if not data or min(map(len, data)) < 1:
        raise InvalidInput("data", "nobody, or nothing of somebody", "one or more records of each owner")

    def found(start: FloatArray, x: FloatArray, y: IntArray) -> FloatArray:
        rows = np.require(gradients(start, Records(x, y)), np.float64, "W")
        if rows.shape != (len(y), start.size):
            raise InvalidInput("record_gradients", rows.shape, f"shape {(len(y), start.size)}")
        return rows

    size = starts.shape[1]
    found(starts[0], np.zeros((2, data[0].x.shape[1])), np.zeros(2, dtype=np.int64))
    short = getattr(model, "clipped_sum", lambda *_: None)
    at_once, means = max(1, min(128, GRADIENT_VALUES // size)), np.zeros((len(data), size))
    for mean, start, own in zip(means, np.broadcast_to(starts, means.shape), data, strict=True):
        at_start = partial(found, start)
        for first in range(0, len(own), at_once):
            part = Records(own.x[first : first + at_once], own.y[first : first + at_once])
            summed = short(start, part, clip)
            if summed is not None:
                mean += summed / len(own)
                continue
            rows = _each_by_itself(at_start, part.x, part.y)
            with np.errstate(over="ignore", invalid="ignore"):
                norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
            rows[~np.isfinite(norms)] = 0.0
            mean += (clip / np.fmax(norms, clip) / len(own)) @ rows
    return means


def _each_by_itself(found: Callable[[FloatArray, IntArray], FloatArray], x: FloatArray, y: IntArray) -> FloatArray:
    """Every record's gradient; records that make the model raise get zeros, and no other's bits are moved by them."""

    def fails(*which: Any) -> bool:
        try:
            found(*which)
        except Exception:  # whatever a model of somebody's own raises over a record
            return True
        return False

    try:
        return found(x, y)
    except Exception:
        bad = np.array([fails(x[i : i + 1], y[i : i + 1]) for i in range(len(y))])
    rows = found(np.where(bad[:, None], 0.0, x), np.where(bad, 0, y))
    rows[bad] = 0.0
    return rows


def accuracies(model: Model, candidates: ArrayLike, data: Records) -> FloatArray:
    """Share of the records that each of k parameter vectors (k, p) gets right, (k,)."""
    together = getattr(model, "accuracies", None)
    if together is not None:
        return np.asarray(together(candidates, data))
    return np.array([model.evaluate(row, data)["accuracy"] for row in checked_parameters(candidates, dimension(model))])


# --- checks -----------------------------------------------------------------------------------------------------------


def checked_parameters(parameters: ArrayLike, length: int, *, rows: int | None = None) -> FloatArray:
    """Finite parameter vectors (k, p) as a fresh array; a single (p,) is repeated `rows` times."""
    array = np.array(parameters, dtype=np.float64)
    found = 1 if array.ndim == 1 else len(array)
    count = found if rows is None else rows
    if array.ndim not in (1, 2) or array.shape[-1] != length or (array.ndim == 2 and found != count):
        raise InvalidInput("parameters", array.shape, f"({length},) or ({count}, {length})")
    if not np.isfinite(array).all():
        raise InvalidInput("parameters", array[~np.isfinite(array)][0], "finite numbers")
    return np.array(np.broadcast_to(array, (count, length)), order="C")  # rows in one piece: bits depend on it


def checked_records(x: ArrayLike, y: ArrayLike, features: int, classes: int | None) -> tuple[FloatArray, IntArray]:
    """Records that fit a model, or a typed error; without `classes` any will do. NaN is not looked for: too slow."""
    rows, labels = np.ascontiguousarray(x, dtype=np.float64), np.asarray(y)  # in one piece: bits depend on it
    if rows.ndim != 2 or rows.shape[1] != features or not len(rows):
        raise InvalidInput("x", rows.shape, f"one or more records of {features} features")
    if labels.shape != (len(rows),) or not np.issubdtype(labels.dtype, np.integer):
        raise InvalidInput("y", f"{labels.dtype} {labels.shape}", f"{len(rows)} whole numbers, one a record")
    if classes is not None and (labels.min() < 0 or labels.max() >= classes):
        raise InvalidInput("y", (labels.min(), labels.max()), f"classes from 0 to {classes - 1}")
    return rows, labels.astype(np.int64, copy=False)


def visits(rng: Generator, records: int, steps: int, size: int) -> IntArray:
    """Which records each step uses, shape (steps, size)."""
    if size >= records:
        return np.tile(np.arange(records), (steps, 1))
    per_pass = records // size
    passes = [
        rng.choice(records, min(per_pass, steps - done) * size, replace=False) for done in range(0, steps, per_pass)
    ]
    return np.concatenate(passes).reshape(steps, size)


def owners_of(data: Sequence[Records], rngs: Sequence[Generator]) -> int:
    """How many there are: each has a generator, or it is a typed error."""
    if not len(data) == len(rngs) >= 1:
        raise InvalidInput("rngs", f"{len(rngs)} generators", f"{len(data)}, one for each owner, and an owner at least")
    return len(data)


# --- softmax regression, many owners at once --------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxRegression:
    """Softmax regression; parameters are the weights class by class, then the biases.

    With `penalise_biases` the loss is l2-strongly convex, as convergence bounds need it.
    """

    name: ClassVar[str] = "softmax"
    features: int
    classes: int
    l2: float = 0.0
    local: LocalTraining = LocalTraining()
    penalise_biases: bool = False

    def __post_init__(self) -> None:
        if self.features < 1:
            raise InvalidInput("features", self.features, "at least 1")
        if self.classes < 2:
            raise InvalidInput("classes", self.classes, "at least 2")
        if type(self.l2) is bool or not (np.isfinite(self.l2) and self.l2 >= 0):
            raise InvalidInput("l2", self.l2, "a finite number of at least 0")
        if type(self.penalise_biases) is not bool:
            raise InvalidInput("penalise_biases", self.penalise_biases, "true or false")
        if self.local.optimizer != "sgd":
            raise InvalidInput("optimizer", self.local.optimizer, '"sgd" for softmax regression')

    @property
    def outputs(self) -> int:
        """Scores per record: one decides between two classes, otherwise one for each class."""
        return 1 if self.classes == 2 else self.classes

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Weights, then biases."""
        return {"weights": (self.outputs, self.features), "biases": (self.outputs,)}

    @property
    def dimension(self) -> int:
        """Length of the parameter vector."""
        return (self.features + 1) * self.outputs

    def initial(self, seed: int | Generator = 0) -> FloatArray:
        """All zeros: the loss is convex, so the start does not matter and nothing is drawn."""
        del seed
        return np.zeros(self.dimension)

    def train(self, parameters: ArrayLike, data: Records, rng: Generator) -> FloatArray:
        """Where one owner's local work ends."""
        return np.asarray(self.train_many(parameters, [data], [rng])[0])

    def train_many(self, parameters: ArrayLike, data: Sequence[Records], rngs: Sequence[Generator]) -> FloatArray:
        """Where each owner's local work ends, (owners, p), from a common start (p,) or her own (owners, p)."""
        start = checked_parameters(parameters, self.dimension, rows=owners_of(data, rngs))
        return _trained(self, start[0] if np.ndim(parameters) == 1 else start, Pool.of(data), self.local, rngs)

    def evaluate(self, parameters: ArrayLike, data: Records) -> dict[str, float]:
        """Accuracy, balanced accuracy and loss."""
        params, x, y = self.check(parameters, data.x, data.y)
        scores = self.scores(params, x)
        guessed = self._guessed(scores)
        return {
            "accuracy": accuracy(y, guessed),
            "balanced_accuracy": balanced_accuracy(y, guessed),
            "loss": self._loss(params, scores, y),
        }

    def accuracies(self, candidates: ArrayLike, data: Records) -> FloatArray:
        """Share of the records that each parameter vector gets right, (k,): the records are read once for all."""
        rows, outputs = checked_parameters(candidates, self.dimension), self.outputs
        x, y = checked_records(data.x, data.y, self.features, self.classes)
        weights, biases = rows[:, : outputs * self.features], rows[:, outputs * self.features :]
        scores = (x @ weights.reshape(-1, self.features).T).reshape(len(y), len(rows), outputs) + biases
        guessed = scores[..., 0] > 0 if outputs == 1 else scores.argmax(axis=-1)
        return np.asarray((guessed == y[:, None]).mean(axis=0))

    def check(self, params: ArrayLike, x: ArrayLike, y: ArrayLike) -> tuple[FloatArray, FloatArray, IntArray]:
        """The same as arrays that fit, or a typed error."""
        params = np.asarray(params, dtype=np.float64)
        if params.shape != (self.dimension,) or not np.isfinite(params).all():
            raise InvalidInput("params", params, f"{self.dimension} finite numbers")
        return params, *checked_records(x, y, self.features, self.classes)

    def scores(self, params: FloatArray, x: FloatArray) -> FloatArray:
        """Linear scores (..., m, outputs) of records (..., m, features)."""
        weights, biases = self._split(params)
        return np.asarray(x @ np.swapaxes(weights, -1, -2) + biases[..., None, :])

    def loss(self, params: FloatArray, x: FloatArray, y: IntArray) -> float:
        """Mean cross-entropy plus the penalty."""
        params, x, y = self.check(params, x, y)
        return self._loss(params, self.scores(params, x), y)

    def _loss(self, params: FloatArray, scores: FloatArray, y: IntArray) -> float:
        """The same for scores, which are spoilt."""
        if self.outputs == 1:
            losses = np.logaddexp(0.0, scores[:, 0]) - y * scores[:, 0]
        else:
            scores -= scores.max(axis=-1, keepdims=True)
            losses = np.log(np.exp(scores).sum(axis=-1)) - scores[np.arange(len(y)), y]
        weights, biases = self._split(params)
        loss = float(losses.mean() + 0.5 * self.l2 * np.square(weights).sum())
        return loss + 0.5 * self.l2 * float(np.square(biases).sum()) if self.penalise_biases else loss

    def predict(self, params: FloatArray, x: FloatArray) -> IntArray:
        """The class with the highest score; a tie goes to the lower class."""
        params, x, _ = self.check(params, x, np.zeros(len(x), dtype=np.int64))
        return self._guessed(self.scores(params, x))

    def _guessed(self, scores: FloatArray) -> IntArray:
        return (scores[:, 0] > 0).astype(np.int64) if self.outputs == 1 else np.argmax(scores, axis=-1)

    def block_gradients(self, params: FloatArray, x: FloatArray, y: IntArray) -> FloatArray:
        """Mean gradient of each of k equally large blocks, shape (k, dimension), already checked.

        x: (k, m, features); y: (k, m); params: (dimension,) for all blocks, or (k, dimension).
        """
        blocks, records = y.shape
        error = self.scores(params, x)
        if self.outputs == 1:
            error = expit(error, out=error) - y[..., None]
        else:
            error -= error.max(axis=-1, keepdims=True)
            np.exp(error, out=error)
            error /= error.sum(axis=-1, keepdims=True)
            error[np.arange(blocks)[:, None], np.arange(records), y] -= 1.0
        error /= records
        gradients = np.empty((blocks, self.dimension))
        weights, biases = self._split(gradients)
        np.matmul(np.swapaxes(error, -1, -2), x, out=weights)
        error.sum(axis=-2, out=biases)
        if self.l2:
            weights += self.l2 * self._split(params)[0]
        if self.l2 and self.penalise_biases:
            biases += self.l2 * self._split(params)[1]
        return gradients

    def owner_gradients(self, params: FloatArray, x: FloatArray, y: IntArray, offsets: ArrayLike) -> FloatArray:
        """Mean gradient of every owner, shape (owners, dimension); records lie owner by owner."""
        params, x, y = self.check(params, x, y)
        pool = Pool(x, y, np.asarray(offsets))
        gradients = np.empty((len(pool), self.dimension))
        for owners, x_block, y_block in _equal_blocks(pool, np.arange(len(pool))):
            gradients[owners] = self.block_gradients(params, x_block, y_block)
        return gradients

    def clipped_gradients(self, params: FloatArray, data: Pool, clip: float) -> FloatArray:
        """See `clipped_gradients`. A record's gradient is residual ⊗ (x, 1), of norm ‖residual‖·√(‖x‖² + 1).

        So clipping is one weight for each record, and no gradient of one is ever formed. The penalty's is nobody's
        record's: it is added whole.
        """
        x, y = checked_records(data.x, data.y, self.features, None)
        sizes, owners = data.sizes, len(data)
        if (sizes == sizes[0]).all():  # one block, and no copy
            means = self._clipped_block(params, x.reshape(owners, -1, self.features), y.reshape(owners, -1), clip)
        else:
            means = np.empty((owners, self.dimension))
            for some, x_block, y_block in _equal_blocks(Pool(x, y, data.offsets), np.arange(owners)):
                means[some] = self._clipped_block(params if params.ndim == 1 else params[some], x_block, y_block, clip)
        for place, (part, at) in enumerate(zip(self._split(means), self._split(params), strict=True)):
            if self.l2 and (self.penalise_biases or place == 0):
                part += self.l2 * at
        return means

    def _clipped_block(self, params: FloatArray, x: FloatArray, y: IntArray, clip: float) -> FloatArray:
        blocks, records = y.shape
        with np.errstate(over="ignore", invalid="ignore"):
            residual, fits = self.scores(params, x), (y >= 0) & (y < self.classes)
            if self.outputs == 1:
                expit(residual, out=residual)
                residual -= y[..., None]
            else:
                residual = softmax(residual, axis=-1)
                residual[np.arange(blocks)[:, None], np.arange(records), np.where(fits, y, 0)] -= 1.0
            norm = np.linalg.norm(residual, axis=-1) * np.sqrt(np.einsum("kmf,kmf->km", x, x) + 1.0)
        good = fits & np.isfinite(norm)
        residual *= (clip / np.maximum(norm, clip) / records)[..., None]
        if not good.all():
            residual[~good] = 0.0
            x = np.where(good[..., None], x, 0.0)  # zero times infinity is no number
        weights = (np.swapaxes(residual, -1, -2) @ x).reshape(blocks, -1)
        return np.concatenate([weights, residual.sum(axis=-2)], axis=-1)

    def _split(self, params: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Views of the weights (..., outputs, features) and the biases (..., outputs)."""
        count = self.outputs * self.features
        weights = params[..., :count].reshape(*params.shape[:-1], self.outputs, self.features)
        return weights, params[..., count:]


def fedsgd(model: SoftmaxRegression, params: FloatArray, x: FloatArray, y: IntArray, offsets: ArrayLike) -> FloatArray:
    """Every owner's mean gradient, shape (owners, dimension); records lie owner by owner."""
    return model.owner_gradients(params, x, y, offsets)


def fedavg(
    model: SoftmaxRegression,
    params: FloatArray,
    x: FloatArray,
    y: IntArray,
    offsets: ArrayLike,
    *,
    steps: int,
    learning_rate: float,
    batch_size: int | None = None,
    rngs: Sequence[Generator] | None = None,
) -> FloatArray:
    """Every owner's pseudo-gradient (start minus end) after `steps` local steps, shape (owners, dimension).

    rngs: one generator an owner, needed when an owner has more records than a batch. `OwnerStreams` makes them on
    demand.
    """
    params, x, y = model.check(params, x, y)
    local = LocalTraining(steps=steps, batch_size=batch_size, learning_rate=learning_rate)
    return np.asarray(params - _trained(model, params, Pool(x, y, np.asarray(offsets)), local, rngs))


def _trained(
    model: SoftmaxRegression, start: FloatArray, data: Pool, local: LocalTraining, rngs: Sequence[Generator] | None
) -> FloatArray:
    """Where every owner ends, (owners, p); those of as many steps and records a step go together."""
    x, y = checked_records(data.x, data.y, model.features, model.classes)
    data = Pool(x, y, data.offsets)
    (counts, batch), sizes = local.plan(data.sizes), data.sizes
    ends = np.empty((len(data), model.dimension))
    if rngs is None and (batch < sizes).any():
        raise InvalidInput("rngs", None, "a generator for each owner, to draw mini-batches")
    if rngs is not None and len(rngs) != len(data):
        raise InvalidInput("rngs", f"{len(rngs)} generators", f"{len(data)}, one for each owner")

    def descend(owners: IntArray, batches: Iterable[tuple[FloatArray, IntArray]]) -> None:
        here = start if start.ndim == 1 else start[owners]
        velocity: FloatArray | None = None
        for x_step, y_step in batches:
            gradient = model.block_gradients(here, x_step, y_step)
            velocity = gradient if velocity is None or not local.momentum else local.momentum * velocity + gradient
            here = here - local.learning_rate * velocity
        ends[owners] = here

    for steps in np.unique(counts).tolist():
        for owners, x_all, y_all in _equal_blocks(data, np.flatnonzero((counts == steps) & (batch == sizes))):
            descend(owners, repeat((x_all, y_all), steps))
        drawing = np.flatnonzero((counts == steps) & (batch < sizes))
        size = local.batch_size or 1
        at_once = max(1, BLOCK_VALUES // (size * (model.features + steps)))
        for first in range(0, len(drawing), at_once):
            owners = drawing[first : first + at_once]
            assert rngs is not None  # checked above; for the type checker
            own = [data.offsets[k] + visits(rngs[k], int(sizes[k]), steps, size) for k in owners]
            descend(owners, ((x[rows], y[rows]) for rows in np.stack(own, axis=1)))
    return ends


def _equal_blocks(data: Pool, chosen: IntArray) -> Iterator[tuple[IntArray, FloatArray, IntArray]]:
    """Yield (owners, x (k, m, features), y (k, m)) until each of the chosen owners was in one."""
    sizes = data.sizes[chosen]
    for size in np.unique(sizes[sizes < STACK_BELOW]):
        alike = chosen[sizes == size]
        step = max(1, BLOCK_VALUES // (int(size) * data.x.shape[1]))
        for first in range(0, len(alike), step):
            some = alike[first : first + step]
            rows = data.offsets[some, None] + np.arange(size)
            yield some, data.x[rows], data.y[rows]
    for owner in chosen[sizes >= STACK_BELOW]:
        own = slice(data.offsets[owner], data.offsets[owner + 1])
        yield np.array([owner]), data.x[None, own], data.y[None, own]


def accuracy(truth: ArrayLike, predicted: ArrayLike) -> float:
    """Share of records that are right."""
    return float(np.mean(np.asarray(truth) == np.asarray(predicted)))


def balanced_accuracy(truth: ArrayLike, predicted: ArrayLike) -> float:
    """Mean recall over the classes that occur in `truth`: rare classes count as much as common ones."""
    truth = np.asarray(truth)
    counts = np.bincount(truth)
    right = np.bincount(truth[truth == np.asarray(predicted)], minlength=len(counts))
    return float(np.mean(right[counts > 0] / counts[counts > 0]))


# --- the registered ones ----------------------------------------------------------------------------------------------

models.register("softmax", SoftmaxRegression, about="Softmax regression: convex, small, in NumPy")


def _mlp(
    *, features: int, classes: int, local: LocalTraining | None = None, hidden: Sequence[int] = (32,), threads: int = 1
) -> Model:
    from flmarket.learning import torch_model  # torch: only for those who ask for a network

    return torch_model.mlp(features, classes, hidden=hidden, local=local or LocalTraining(), threads=threads)


def _cnn(name: str) -> Callable[..., Model]:
    def build(
        *, features: int | None = None, classes: int | None = None, local: LocalTraining | None = None, threads: int = 1
    ) -> Model:
        from flmarket.learning import torch_model

        made = torch_model.cnn(name, local=local or LocalTraining(), threads=threads)
        wanted = (features or made.features, classes or made.classes)
        if wanted != (made.features, made.classes):
            accepted = f"a model for records of {wanted[0]} features in {wanted[1]} classes"
            raise InvalidInput("model", name, f"{accepted}; this one takes {made.features} and {made.classes}")
        return made

    return build


models.register("mlp", _mlp, about="Dense layers with ReLU between them (hidden = [32]), in PyTorch")
models.register("mnist-cnn", _cnn("mnist-cnn"), about="Two convolutions and dropout, for 28 by 28 pixels, in PyTorch")
models.register("cifar-cnn", _cnn("cifar-cnn"), about="Six convolutions, for 32 by 32 pixels in colour, in PyTorch")
