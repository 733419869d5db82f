"""Owners of equal size stacked, so that one matrix product serves them all.

Records lie one owner after the other; `offsets` tell where each begins. Owners with few records are many, and
a loop over them costs more than the arithmetic: they are stacked by size. Owners with many records are few
(the sizes add up to the records), and stacking would copy their data for nothing: each is a block of its own,
a view.

Whatever is computed per block uses an owner's own rows in a shape that depends on her size alone, so her
result does not change, to the last bit, with who else is present. One product over all records would not have
that property.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.errors import InvalidInput

__all__ = ["checked_offsets", "equal_blocks"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

STACK_BELOW = 32  # records; measured: stacking wins clearly at 8, is even at 32 to 64
BLOCK_VALUES = 1 << 16  # values gathered at a time: half a megabyte, which stays in the cache of a core


def checked_offsets(offsets: ArrayLike, records: int) -> IntArray:
    """Offsets from 0 to `records`, at least one record an owner, or a typed error."""
    bounds = np.asarray(offsets)
    if bounds.ndim != 1 or bounds.size < 2 or not np.issubdtype(bounds.dtype, np.integer):
        raise InvalidInput("offsets", offsets, "whole numbers, one more than there are owners")
    if bounds[0] != 0 or bounds[-1] != records:
        raise InvalidInput("offsets", (bounds[0], bounds[-1]), f"offsets from 0 to the {records} records")
    bad = np.flatnonzero(np.diff(bounds) < 1)
    if bad.size:
        raise InvalidInput("offsets", f"no records for owner {bad[0]}", "at least one record for each owner")
    return bounds.astype(np.int64)


def equal_blocks(
    x: FloatArray, y: IntArray, offsets: IntArray, owners: IntArray | None = None
) -> Iterator[tuple[IntArray, FloatArray, IntArray]]:
    """Yield (owners, x (k, m, features), y (k, m)) until each owner, or each of those named, was in one."""
    chosen = np.arange(len(offsets) - 1) if owners is None else owners
    sizes = np.diff(offsets)[chosen]
    for size in np.unique(sizes[sizes < STACK_BELOW]):
        alike = chosen[sizes == size]
        step = max(1, BLOCK_VALUES // (int(size) * x.shape[1]))
        for first in range(0, len(alike), step):
            some = alike[first : first + step]
            rows = offsets[some, None] + np.arange(size)
            yield some, x[rows], y[rows]
    for owner in chosen[sizes >= STACK_BELOW]:
        own = slice(offsets[owner], offsets[owner + 1])
        yield np.array([owner]), x[None, own], y[None, own]
