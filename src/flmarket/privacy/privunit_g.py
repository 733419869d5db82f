"""PrivUnitG: PrivUnit with a standard normal point in place of a uniform point of the sphere.

The component along the owner's direction is a normal number, made to lie beyond γ with the right probability; the rest
is plain Gaussian noise (Asi, Feldman, Talwar 2022, arXiv:2205.02466). γ = m, the best cap of the normal law (see
`caps`), depends on ε only. There the component along has variance 1 like all others: the noise is white, and with
lifting (see `directional`) its energy is

    p · C² / m²      for every input.

That is within a factor 1 + O(1/p) of privunit. (An edge below m would save at most C²/(4p).) Needs no incomplete beta
function and no normalisation, hence a little faster. Despite the Gaussian noise it is ε-DP with δ = 0: noise is not
added to v, v only tilts the odds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray
from flmarket.privacy.caps import Law, NormalLaw, best_cap
from flmarket.privacy.directional import Directional, Plan

__all__ = ["PrivUnitG"]


@dataclass(frozen=True)
class PrivUnitG(Directional):
    """The best cap of the normal law; vectors inside the ball are lifted."""

    name: ClassVar[str] = "privunit-g"
    on_sphere: ClassVar[bool] = False

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        return NormalLaw()

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        return Plan(best_cap(NormalLaw(), epsilon), np.ones(epsilon.shape, dtype=bool))
