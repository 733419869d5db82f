"""What a cost, a support and its probabilities may be, in one place."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_number

__all__ = ["checked_bounds", "checked_cost", "checked_masses", "checked_reports", "checked_support"]


SMALLEST_COST, LARGEST_COST = 1e-12, 1e12


def checked_cost(name: str, value: float) -> float:
    """One positive cost within the limits of the library, or a typed error."""
    return checked_number(name, value, SMALLEST_COST, LARGEST_COST)


def checked_support(support: ArrayLike) -> FloatArray:
    """Strictly increasing positive costs, or a typed error."""
    array = checked_array("support", support, minimum=SMALLEST_COST)
    if array.ndim != 1 or (np.diff(array) <= 0).any() or array[-1] > LARGEST_COST:
        raise InvalidInput("support", support, f"a vector of strictly increasing costs up to {LARGEST_COST:g}")
    return array


def checked_masses(probabilities: ArrayLike, size: int) -> FloatArray:
    """Probabilities of `size` points that sum to 1, or a typed error. Rounding is divided out; below 1e-100 is none."""
    array = checked_array("probabilities", probabilities)
    if array.shape != (size,):
        raise InvalidInput("probabilities", array.shape, f"one probability for each of {size} costs")
    total = float(array.sum())
    if abs(total - 1.0) > 1e-6:
        raise InvalidInput("probabilities", total, "numbers that sum to 1")
    return np.where(array > 1e-100, array / total, 0.0)


def checked_bounds(minimum: float, maximum: float) -> None:
    """Refuse bounds that are not positive costs in ascending order."""
    checked_cost("minimum", minimum)
    checked_cost("maximum", maximum)
    if not minimum < maximum:
        raise InvalidInput("maximum", maximum, f"more than the minimum, {minimum:g}")


def checked_reports(cost: ArrayLike, maximum: float) -> FloatArray:
    """Reported costs as an array: positive, and no more than the highest cost the mechanism knows."""
    array = np.asarray(cost, dtype=np.float64)
    if not ((array > 0) & (array <= maximum)).all():
        outside = array[~((array > 0) & (array <= maximum))]
        raise InvalidInput("cost", float(outside.flat[0]), f"a positive cost of at most {maximum:g}")
    return array
