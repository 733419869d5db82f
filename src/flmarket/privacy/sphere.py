"""The ℓ2-sphere mechanism: a random point of the right half of a sphere, or, less often, of the wrong half.

Clip to ‖v‖₂ ≤ C and round onto the sphere (see `directional`); then, with probability e^ε/(1 + e^ε), release a uniform
point of the half sphere around it, else of the other half, on the radius B that makes this unbiased:

    B = C · coth(ε/2) · √π · Γ((p+1)/2) / Γ(p/2).

Duchi, Jordan, Wainwright 2018 ("Minimax optimal procedures for locally private estimation", arXiv:1604.02390, section
4.2.3). It is the cap mechanism of `caps` with one pair of candidates. The noise energy is B² − ‖v‖², at most
B² ≈ (π/2)·p·C²·coth²(ε/2). Good for ε up to about 1; beyond, B stops falling and privunit is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray
from flmarket.privacy.caps import Law, SphereLaw, half_cap
from flmarket.privacy.directional import Directional, Plan

__all__ = ["Sphere"]


@dataclass(frozen=True)
class Sphere(Directional):
    """Half spheres; vectors inside the ball are rounded onto the sphere."""

    name: ClassVar[str] = "sphere"

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        return SphereLaw(dimension)

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        return Plan(half_cap(SphereLaw(dimension), epsilon), np.zeros(epsilon.shape, dtype=bool))
