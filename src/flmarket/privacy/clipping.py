"""Norm clipping: what makes one owner's influence finite.

A vector g becomes g·min(1, C/‖g‖), so that any two clipped vectors are at most 2C apart. That distance is the
sensitivity every mechanism here is calibrated to, and it must hold for the numbers as stored, not only on
paper. Rounding could push a norm past C by a few units in the last place; the bound used internally is
therefore smaller by a margin that covers the worst rounding of a p-term sum. The price is a relative
shrinkage of about p·2⁻⁵⁰ for vectors at the bound; vectors strictly inside are returned unchanged, and
clipping twice changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput

__all__ = ["checked_vectors", "clip_l1", "clip_l2"]


def clip_l1(vectors: ArrayLike, bound: float) -> FloatArray:
    """Scale each vector (last axis) so that its L1 norm is at most `bound`."""
    return _clip(vectors, bound, order=1)


def clip_l2(vectors: ArrayLike, bound: float) -> FloatArray:
    """Scale each vector (last axis) so that its L2 norm is at most `bound`."""
    return _clip(vectors, bound, order=2)


def checked_vectors(vectors: ArrayLike) -> FloatArray:
    """Finite float vectors of shape (..., p) with p ≥ 1, or a typed error."""
    try:
        array = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput("vectors", vectors, "an array of numbers of shape (..., p)") from None
    if array.ndim == 0 or array.size == 0:
        raise InvalidInput("vectors", array.shape, "at least one vector of at least one coordinate")
    if not np.isfinite(array).all():
        raise InvalidInput("vectors", array[~np.isfinite(array)][0], "finite coordinates")
    return array


def _clip(vectors: ArrayLike, bound: float, *, order: int) -> FloatArray:
    array = checked_vectors(vectors)
    if not (np.ndim(bound) == 0 and 1e-300 <= float(bound) <= 1e300):
        raise InvalidInput("bound", bound, "a number from 1e-300 to 1e300")
    margin = (array.shape[-1] + 8) * 2.0**-51
    # Work on g / max|g|: squaring neither overflows for 1e300 nor vanishes for 1e-300.
    largest = np.abs(array).max(axis=-1, keepdims=True)
    unit = np.divide(array, largest, out=np.zeros_like(array), where=largest > 0)
    norm = np.linalg.norm(unit, ord=order, axis=-1, keepdims=True)
    room = np.divide(bound, norm, out=np.full_like(norm, np.inf), where=norm > 0)
    inside = largest <= room * (1 - margin)
    if inside.all():
        return array.copy()
    # Twice the margin, so that the result counts as inside when it is clipped again.
    shrunk = unit * np.where(inside, 0.0, room * (1 - 2 * margin))
    return np.where(inside, array, shrunk)
