"""What an owner computes from her own records before anything is clipped, noised or sent.

`fedsgd`: one gradient at the current parameters. `fedavg`: E steps of local stochastic gradient descent,
returned as a pseudo-gradient (parameters at the start minus parameters at the end). Either way the server
moves to ``params - rate * average(updates)``, with rate 1 for `fedavg`. McMahan et al.,
Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017, Algorithm 1; Reddi et
al., ICLR 2021, for the pseudo-gradient.

Mini-batches are drawn without replacement: an owner walks through her records in random order, and again in a
new order when fewer than a batch are left. An owner with no more records than a batch uses all of them at
every step. An owner's update depends on her records and her generator only, not on who else is present or in
which order.

What would break it: the raw updates reveal records. They are an intermediate value, never a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.errors import InvalidInput
from flmarket.learning.blocks import BLOCK_VALUES, checked_offsets, equal_blocks
from flmarket.learning.models import Model, owner_gradients

__all__ = ["LearningRate", "fedavg", "fedsgd", "visits"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
LearningRate = float | Sequence[float] | FloatArray | Callable[[int], float]


def fedsgd(model: Model, params: FloatArray, x: FloatArray, y: IntArray, offsets: ArrayLike) -> FloatArray:
    """Every owner's mean gradient, shape (owners, dimension); records lie owner by owner."""
    return owner_gradients(model, params, x, y, offsets)


def fedavg(
    model: Model,
    params: FloatArray,
    x: FloatArray,
    y: IntArray,
    offsets: ArrayLike,
    *,
    steps: int,
    learning_rate: LearningRate,
    batch_size: int | None = None,
    rngs: Sequence[np.random.Generator] | None = None,
) -> FloatArray:
    """Every owner's pseudo-gradient after `steps` local steps, shape (owners, dimension).

    learning_rate: one number, one for each step, or a function of the step (0, 1, ...). batch_size: None for
    all records at every step. rngs: one generator an owner, needed when an owner has more records than a
    batch. `OwnerStreams` makes them on demand; in a list, no two owners may share one.
    """
    params, x, y = model.check(params, x, y)
    bounds = checked_offsets(offsets, len(y))
    sizes = np.diff(bounds)
    rates = _rates(learning_rate, steps)
    limit = int(sizes.max()) if batch_size is None else batch_size
    if limit < 1:
        raise InvalidInput("batch_size", batch_size, "at least 1, or None for all records")
    if rngs is None and sizes.max() > limit:
        raise InvalidInput("rngs", None, "a generator for each owner, to draw mini-batches")
    if rngs is not None and len(rngs) != len(sizes):
        raise InvalidInput("rngs", f"{len(rngs)} generators", f"{len(sizes)}, one for each owner")

    updates = np.empty((len(sizes), model.dimension))
    for owners, x_all, y_all in equal_blocks(x, y, bounds, np.flatnonzero(sizes <= limit)):
        updates[owners] = _descend(model, params, rates, [(x_all, y_all)] * steps)
    sampling = np.flatnonzero(sizes > limit)
    at_once = max(1, BLOCK_VALUES // (limit * (x.shape[1] + steps)))
    for first in range(0, len(sampling), at_once):
        owners = sampling[first : first + at_once]
        assert rngs is not None  # checked above; for the type checker
        rows = np.stack([bounds[k] + visits(rngs[k], int(sizes[k]), steps, limit) for k in owners], axis=1)
        updates[owners] = _descend(model, params, rates, ((x[batch], y[batch]) for batch in rows))
    return updates


def _descend(
    model: Model, params: FloatArray, rates: FloatArray, batches: Iterable[tuple[FloatArray, IntArray]]
) -> FloatArray:
    """Parameters at the start minus at the end, for k owners who step together."""
    local = params
    for rate, (x, y) in zip(rates, batches, strict=True):
        local = local - rate * model.block_gradients(local, x, y)
    return params - local


def visits(rng: np.random.Generator, records: int, steps: int, size: int) -> IntArray:
    """Which records each step uses, shape (steps, size)."""
    per_pass = records // size
    passes = [
        rng.choice(records, min(per_pass, steps - done) * size, replace=False) for done in range(0, steps, per_pass)
    ]
    return np.concatenate(passes).reshape(steps, size)


def _rates(learning_rate: LearningRate, steps: int) -> FloatArray:
    if steps < 1:
        raise InvalidInput("steps", steps, "at least 1")
    if callable(learning_rate):
        rates = np.array([learning_rate(step) for step in range(steps)], dtype=np.float64)
    else:
        rates = np.asarray(learning_rate, dtype=np.float64)
        if rates.shape not in ((), (steps,)):
            raise InvalidInput("learning_rate", rates.shape, f"one number, or one for each of {steps} steps")
        rates = np.broadcast_to(rates, (steps,))
    if not (np.isfinite(rates).all() and (rates > 0).all()):
        raise InvalidInput("learning_rate", learning_rate, "finite numbers above 0")
    return rates
