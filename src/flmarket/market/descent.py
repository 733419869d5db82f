"""Descent that protects records: each one's gradient clipped, noise at every step; for auctions and joint training.

Several owners at once, each as if she were alone: steps are taken together where the model can (softmax regression has
its records' gradients in closed form), and every owner draws from her own source. Everything after the noise, rate and
momentum included, is done to what is private already. `privacy.additive` says what the noise is worth.

What would break it: local work that the account does not count, that is batches, another optimizer, or steps that
depend on records; `checked_local` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput
from flmarket.learning import DataSet, LocalTraining, Model, Records, clipped_gradients, local_training
from flmarket.privacy import NoiseSource, clip_l2
from flmarket.privacy.events import ROUNDING_ALLOWANCE


def checked_local(model: Model, data: DataSet, clip: float) -> LocalTraining:
    """The local work of a model that can protect records, tried on records of zeros; else InvalidInput."""
    local = local_training(model)
    if (local.batch_size, local.optimizer) != (None, "sgd"):
        what = "all records at every step (no batch_size), by sgd, where records are protected"
        raise InvalidInput("local training", local, what)
    nobody = Records(np.zeros_like(data.x_train[:1]), np.zeros(1, dtype=np.int64))
    clipped_gradients(model, model.initial(0), [nobody], clip)
    return local


def reach(local: LocalTraining) -> float:
    """How far a step of length 1 carries, with momentum at most."""
    return local.learning_rate / (1 - local.momentum)


def descend(
    model: Model,
    starts: FloatArray,
    data: Sequence[Records] | None,
    noises: Sequence[NoiseSource],
    *,
    clip: float,
    sizes: Sequence[int],
    scale: Sequence[Callable[[int, int], float]],
) -> FloatArray:
    """Where each owner's noised steps end, (owners, p), from her own start.

    `sizes` are the numbers of records, `scale` says σ of each owner's steps, for so many records and steps. Without
    `data`: noise only, as if nothing had been learned.
    """
    local = local_training(model)
    if data is not None and [len(own) for own in data] != list(sizes):
        raise InvalidInput("records", [len(own) for own in data], f"{list(sizes)}, which the noise is for")
    steps = [int(local.plan(size)[0]) for size in sizes]
    sigmas = [sigma(k, n) * (1 + ROUNDING_ALLOWANCE) for sigma, k, n in zip(scale, sizes, steps, strict=True)]
    at, velocity = np.array(starts, dtype=np.float64), np.zeros_like(starts)
    for step in range(max(steps)):
        moving = [i for i, count in enumerate(steps) if step < count]
        means = np.zeros((len(moving), at.shape[1]))
        if data is not None:
            means = clipped_gradients(model, at[moving], [data[i] for i in moving], clip)
        for mean, i in zip(means, moving, strict=True):
            sensitivity = 2 * clip / sizes[i]
            slope = noises[i].add_gaussian(clip_l2(mean, clip), scale=sigmas[i], sensitivity=sensitivity)
            velocity[i] = local.momentum * velocity[i] + slope
            at[i] = at[i] - local.learning_rate * velocity[i]
    return at
