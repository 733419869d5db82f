"""Releases that choose a random direction near the owner's own: what sphere, privunit and their kin share.

Such mechanisms are made for unit vectors. A clipped vector v with ρ = ‖v‖/C < 1 is first put on a sphere, in one of
two ways. Both keep it unbiased, and neither spends privacy, as what follows is ε-private for all unit vectors:

- *round* (Duchi, Jordan, Wainwright 2018): take v/‖v‖ with probability (1 + ρ)/2, else −v/‖v‖. The release of v is a
  mixture of two laws, each within e^ε of every other release, hence so is the mixture. The sign adds C² − ‖v‖² to the
  noise energy.
- *lift*: take (v/C, √(1 − ρ²)), a unit vector with one more coordinate, and drop that coordinate of the release, which
  is post-processing. Nothing random is added. With the best cap (see `caps`) the covariance of z is a multiple of the
  identity, whatever u is, and then the noise energy does not depend on v at all.

With any source but a simulated one the point is chosen among public candidates (see `candidates`, which has the
argument for finite precision): ε-DP down to the last bit. In simulation it is drawn from the same law directly, which
is faster, for many owners at once, and private for ideal real numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray, checked_array
from flmarket.privacy.candidates import chance, choose
from flmarket.privacy.caps import Cap, Law, coin, draw
from flmarket.privacy.clipping import clip_l2
from flmarket.privacy.events import ROUNDING_ALLOWANCE, PureDp, checked_number
from flmarket.privacy.noise import NoiseSource, SimulationNoise
from flmarket.privacy.perturbation import (
    checked_clip,
    checked_dimension,
    positive_epsilon,
    release_epsilon,
    release_source,
)

__all__ = ["Directional", "Plan", "delivered", "unit_vectors"]

# A larger ε is served as this one: more private than asked, and no better, as noise stops falling long before.
LARGEST_EPSILON = 64.0
_BLOCK = 2**16  # numbers handled at a time, so that they stay in the processor's cache
_CACHED_EPSILONS = 64
_NO_DIRECTION = 1e-100


@dataclass(frozen=True)
class Plan:
    """Everything that follows from ε and the dimension: the caps, and who lifts (the others round)."""

    cap: Cap
    lift: NDArray[np.bool_]

    def take(self, index: NDArray[np.intp]) -> Plan:
        """The plans at these positions."""
        return Plan(self.cap.take(index), self.lift[index])


@dataclass(frozen=True)
class Directional:
    """Clip to L2 norm `clip`, put on a sphere, choose a direction. Subclasses say which law and which cap."""

    clip: float = 1.0
    name: ClassVar[str]
    norm: ClassVar[Literal["l1", "l2"]] = "l2"
    sound: ClassVar[bool] = True
    # Whether points lie on the unit sphere; else they are standard normal.
    on_sphere: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", checked_clip(self.clip))

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """Private versions of vectors (..., p), each with its own ε."""
        source = release_source(self, rng)
        clipped = clip_l2(vectors, self.clip)
        eps = release_epsilon(epsilon, clipped.shape[:-1]).ravel()
        ball = (clipped / self.clip).reshape(eps.size, -1)
        plan = self.plan(eps, ball.shape[1])
        if isinstance(source, SimulationNoise):
            return self._simulated(ball, plan, source.generator()).reshape(clipped.shape)
        return self._chosen(ball, plan, delivered(eps), source).reshape(clipped.shape)

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """E‖output − clipped input‖² of the worst input within the clip; ∞ where ε = 0."""
        ends = (self.energy(epsilon, dimension, norm=norm) for norm in (0.0, self.clip))  # linear in norm²
        return np.asarray(np.maximum(*ends))

    def energy(self, epsilon: ArrayLike, dimension: int, *, norm: float) -> FloatArray:
        """E‖output − clipped input‖² of an input of this L2 norm (at most the clip)."""
        size, radius = checked_dimension(dimension), checked_number("norm", norm, 0.0, self.clip) / self.clip
        eps = checked_array("epsilon", epsilon)
        energy = np.full(eps.shape, np.inf)
        sells = eps > 0
        if sells.any():
            energy[sells] = self._energy(self.plan(eps[sells], size), size, radius) * self.clip**2
        return energy

    def guarantee(self, epsilon: float) -> PureDp:
        """Pure ε-DP."""
        return PureDp(positive_epsilon(epsilon))

    def plan(self, epsilon: FloatArray, dimension: int) -> Plan:
        """Caps for a one-dimensional array of ε > 0."""
        distinct, position = np.unique(epsilon, return_inverse=True)
        if distinct.size <= _CACHED_EPSILONS:
            return _cached_plan(self, tuple(distinct.tolist()), dimension).take(position)
        return self._solved(delivered(distinct), dimension).take(position)

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        raise NotImplementedError

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        raise NotImplementedError

    def _energy(self, plan: Plan, dimension: int, radius: float) -> FloatArray:
        """With squared length E[t²] along the input, and the rest spread evenly across."""
        across = (1 - plan.cap.square) / dimension if self.on_sphere else 1.0
        lifted = plan.cap.square * radius**2 + across * (dimension - radius**2)
        return np.asarray(np.where(plan.lift, lifted, 1.0) / plan.cap.mean**2 - radius**2)

    def _drawn(self, plan: Plan, dimension: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Along, across, and the factor that makes the release unbiased."""
        along, across = draw(self._law(dimension, plan.lift), plan.cap, rng)
        return along, across, self.clip / plan.cap.mean

    def _simulated(self, ball: FloatArray, plan: Plan, rng: np.random.Generator) -> FloatArray:
        along, across, gain = self._drawn(plan, ball.shape[1], rng)
        radius = _radius(ball)
        slope, height = _on_a_sphere(ball, plan.lift, coin(rng, (1 - radius) / 2), radius)
        out = np.empty_like(ball)
        step = max(1, _BLOCK // ball.shape[1])
        for first in range(0, len(ball), step):
            rows = slice(first, first + step)
            noise = rng.standard_normal(ball[rows].shape)
            extra = rng.standard_normal(height[rows].shape) * plan.lift[rows]
            overlap = slope[rows] * np.einsum("ij,ij->i", noise, ball[rows]) + extra * height[rows]
            part = across[rows]
            if self.on_sphere:
                rest = np.einsum("ij,ij->i", noise, noise) + extra**2 - overlap**2
                part = part / np.sqrt(np.maximum(rest, 1e-300))
            noise *= (part * gain[rows])[:, None]
            np.multiply(ball[rows], (slope[rows] * (along[rows] - part * overlap) * gain[rows])[:, None], out=out[rows])
            out[rows] += noise
        return out

    def _chosen(self, ball: FloatArray, plan: Plan, epsilon: FloatArray, source: NoiseSource) -> FloatArray:
        """The release that may leave a machine."""
        out, units = np.empty_like(ball), unit_vectors(ball, plan.lift, source)
        gain = self.clip / plan.cap.mean
        for lift, size in ((True, ball.shape[1] + 1), (False, ball.shape[1])):
            rows = np.flatnonzero(plan.lift == lift)
            if rows.size:
                points = choose(
                    units[rows, :size], plan.cap.take(rows), epsilon[rows], source, normal=not self.on_sphere
                )
                out[rows] = points[:, : ball.shape[1]] * gain[rows, None]
        return out


def unit_vectors(ball: FloatArray, lift: NDArray[np.bool_], source: NoiseSource) -> FloatArray:
    """Each row on the sphere, with one coordinate more; it is 0 for those that are not lifted."""
    radius = _radius(ball)
    minus = [not up and chance(source, one) for up, one in zip(lift, ((1 - radius) / 2).tolist(), strict=True)]
    slope, height = _on_a_sphere(ball, lift, np.array(minus), radius)
    return np.hstack([ball * slope[:, None], height[:, None]])


def _radius(ball: FloatArray) -> FloatArray:
    return np.asarray(np.minimum(np.sqrt(np.einsum("ij,ij->i", ball, ball)), 1.0))


def _on_a_sphere(
    ball: FloatArray, lift: NDArray[np.bool_], minus: NDArray[np.bool_], radius: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Factor and last coordinate that turn each row into a unit vector; rows without a direction are given one."""
    lost = (radius < _NO_DIRECTION) & ~lift
    ball[lost] = 0.0
    ball[lost, 0] = 1.0
    length = np.where(lost | lift, 1.0, radius)
    slope = np.where(minus & ~lift, -1.0, 1.0) / length
    return slope, np.where(lift, np.sqrt((1 - radius) * (1 + radius)), 0.0)


def delivered(epsilon: FloatArray) -> FloatArray:
    """A little less than asked for, and no more than the largest."""
    return np.minimum(epsilon, LARGEST_EPSILON) * (1 - ROUNDING_ALLOWANCE)


@lru_cache(maxsize=4096)
def _cached_plan(mechanism: Directional, epsilon: tuple[float, ...], dimension: int) -> Plan:
    return mechanism._solved(delivered(np.array(epsilon)), dimension)
