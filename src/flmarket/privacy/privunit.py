"""PrivUnit: a random point of a spherical cap around the owner's direction, or, less often, of the rest of the sphere.

The cap has the size that gives the least noise for this ε and dimension (see `caps`, which has the derivation and the
papers). No unbiased ε-private release of unit vectors of a large family has less noise (Asi,
Feldman, Talwar 2022, arXiv:2205.02466).

Vectors inside the ball are rounded onto the sphere or lifted by one coordinate (see `directional`), whichever has the
smaller worst case at this ε and dimension p. With m the mean of the best cap in the dimension D of the sphere:

    lifted (D = p + 1):   p/(p+1) · (1/m² − 1) · C²      for every input but for O(1/M), as the noise is nearly white
    rounded (D = p):      C²/m² − ‖v‖²

Rounding is chosen where ε is below about 1.8/√p (0.53 for p = 10, 0.07 for p = 650; 1.04 for p = 1), lifting elsewhere.
The worst case is never above that of the sphere mechanism, which is the same with γ = 0 and rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray
from flmarket.privacy.caps import Law, SphereLaw, best_cap
from flmarket.privacy.directional import Directional, Plan

__all__ = ["PrivUnit"]


@dataclass(frozen=True)
class PrivUnit(Directional):
    """The best cap of the sphere."""

    name: ClassVar[str] = "privunit"

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        return SphereLaw(dimension + lift.astype(np.int64))

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        lifted, rounded = (best_cap(SphereLaw(size), epsilon) for size in (dimension + 1, dimension))
        everyone = Plan(lifted, np.ones(epsilon.shape, dtype=bool))
        worst = np.maximum(*(self._energy(everyone, dimension, radius) for radius in (0.0, 1.0)))
        lift = worst <= 1 / rounded.mean**2
        return Plan(lifted.where(lift, rounded), lift)
