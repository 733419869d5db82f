"""Releases that choose a random direction near the owner's own: what sphere, privunit and their kin share.

Such mechanisms are made for unit vectors. A clipped vector v with ρ = ‖v‖/C < 1 is first put on a sphere, in one of
two ways. Both keep it unbiased, and neither spends privacy, as what follows is ε-private for all unit vectors:

- *round* (Duchi, Jordan, Wainwright 2018): take v/‖v‖ with probability (1 + ρ)/2, else −v/‖v‖. The release of v is a
  mixture of two laws, each within e^ε of every other release, hence so is the mixture. The sign adds C² − ‖v‖² to the
  noise energy.
- *lift*: take (v/C, √(1 − ρ²)), a unit vector with one more coordinate, and drop that coordinate of the release, which
  is post-processing. Nothing random is added. With the best cap (`candidates`) the covariance of z is a multiple of the
  identity, whatever u is, and then the noise energy does not depend on v at all.

With any source but a simulated one the point is chosen among public candidates (`candidates`, which has the
argument for finite precision): ε-DP down to the last bit. In simulation it is drawn from the same law directly, which
is faster, for many owners at once, and private for ideal real numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from flmarket.bids import FloatArray, slices
from flmarket.errors import InvalidInput
from flmarket.privacy.candidates import (
    Cap,
    Law,
    NormalLaw,
    Rotation,
    SphereLaw,
    best_cap,
    chance,
    choose,
    coin,
    draw,
    half_cap,
)
from flmarket.privacy.events import ROUNDING_ALLOWANCE, PureDp, checked_number, checked_whole
from flmarket.privacy.noise import NoiseSource, SimulationNoise
from flmarket.privacy.perturbation import (
    Clipping,
    checked_dimension,
    energy_where_sold,
    positive_epsilon,
    release_epsilon,
    release_source,
)

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
class Directional(Clipping):
    """Clip to L2 norm `clip`, put on a sphere, choose a direction. Subclasses say which law and which cap."""

    name: ClassVar[str]
    # Whether points lie on the unit sphere; else they are standard normal.
    on_sphere: ClassVar[bool] = True

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """Private versions of vectors (..., p), each with its own ε."""
        source, clipped = release_source(self, rng), self.clipped(vectors)
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
        return energy_where_sold(epsilon, lambda e: self._energy(self.plan(e, size), size, radius) * self.clip**2)

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
        for rows in slices(len(ball), _BLOCK // ball.shape[1]):
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


@dataclass(frozen=True)
class Sphere(Directional):
    """Half spheres; vectors inside the ball are rounded onto the sphere.

    The ℓ2-sphere mechanism: a random point of the right half of a sphere, or, less often, of the wrong half.

    Clip to ‖v‖₂ ≤ C and round onto the sphere; then, with probability e^ε/(1 + e^ε), release a
    uniform point of the half sphere around it, else of the other half, on the radius B that makes this unbiased:

        B = C · coth(ε/2) · √π · Γ((p+1)/2) / Γ(p/2).

    Duchi, Jordan, Wainwright 2018 ("Minimax optimal procedures for locally private estimation", arXiv:1604.02390,
    section 4.2.3). It is the cap mechanism (`candidates`) with a pair of candidates. The noise energy is B² − ‖v‖², at
    most B² ≈ (π/2)·p·C²·coth²(ε/2). Good for ε up to about 1; beyond, B stops falling and privunit is better.
    """

    name: ClassVar[str] = "sphere"

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        return SphereLaw(dimension)

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        return Plan(half_cap(SphereLaw(dimension), epsilon), np.zeros(epsilon.shape, dtype=bool))


@dataclass(frozen=True)
class PrivUnit(Directional):
    """The best cap of the sphere.

    PrivUnit: a random point of a spherical cap around the owner's direction, or, less often, of the rest of the sphere.

    The cap has the size that gives the least noise for this ε and dimension (`candidates`, which has the derivation and
    the papers). No unbiased ε-private release of unit vectors of a large family has less noise (Asi, Feldman, Talwar
    2022, arXiv:2205.02466).

    Vectors inside the ball are rounded onto the sphere or lifted by one coordinate, whichever has
    the smaller worst case at this ε and dimension p. With m the mean of the best cap in the dimension D of the sphere:

        lifted (D = p + 1):   p/(p+1) · (1/m² − 1) · C²    for every input but for O(1/M): the noise is nearly white
        rounded (D = p):      C²/m² − ‖v‖²

    Rounding is chosen where ε is below about 1.8/√p (0.53 for p = 10, 0.07 for p = 650; 1.04 for p = 1), lifting
    elsewhere. The worst case is never above that of the sphere mechanism, which is the same with γ = 0 and rounding.
    """

    name: ClassVar[str] = "privunit"

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        return SphereLaw(dimension + lift.astype(np.int64))

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        lifted, rounded = (best_cap(SphereLaw(size), epsilon) for size in (dimension + 1, dimension))
        everyone = Plan(lifted, np.ones(epsilon.shape, dtype=bool))
        worst = np.maximum(*(self._energy(everyone, dimension, radius) for radius in (0.0, 1.0)))
        lift = worst <= 1 / rounded.mean**2
        return Plan(lifted.where(lift, rounded), lift)


@dataclass(frozen=True)
class PrivUnitG(Directional):
    """The best cap of the normal law; vectors inside the ball are lifted.

    PrivUnitG: PrivUnit with a standard normal point in place of a uniform point of the sphere.

    The component along the owner's direction is a normal number, made to lie beyond γ with the right probability; the
    rest is plain Gaussian noise (Asi, Feldman, Talwar 2022, arXiv:2205.02466). γ = m, the best cap of the normal law
    (`candidates`), depends on ε only. There the component along has variance 1 like all others: the noise is white, and
    with lifting its energy is

        p · C² / m²      for every input.

    That is within a factor 1 + O(1/p) of privunit. (An edge below m would save at most C²/(4p).) Needs no incomplete
    beta function and no normalisation, hence a little faster. Despite the Gaussian noise it is ε-DP with δ = 0: noise
    is not added to v, v only tilts the odds.
    """

    name: ClassVar[str] = "privunit-g"
    on_sphere: ClassVar[bool] = False

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        return NormalLaw()

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        return Plan(best_cap(NormalLaw(), epsilon), np.ones(epsilon.shape, dtype=bool))


_LEAST_SIZE = 1024  # of the rotation that the projection is taken from
_PROJECTED_BLOCK = 2**18  # numbers held at a time


@dataclass(frozen=True)
class Sketch:
    """What leaves the owner's machine: the public seed of the projection and k numbers."""

    seed: int
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class ProjUnit(Directional):
    """The best cap of the sphere in `rank` dimensions, after a random projection.

    ProjUnit: PrivUnit on a random projection, so that a release is a seed and a few numbers, however large the model.

    Let u be the owner's unit vector (lifted) and G a k × (p+1) matrix of standard normals, public
    and drawn from a seed. The owner releases û, a PrivUnit release of Gu/‖Gu‖ in R^k; the buyer computes Gᵀû. By
    rotation invariance this is unbiased up to the factor c = m_k · E‖Gu‖, E‖Gu‖ = √2·Γ((k+1)/2)/Γ(k/2), and it is
    ε-private because G does not depend on the data (Asi, Feldman, Nelson, Nguyen, Talwar 2023, "Fast Optimal Locally
    Private Mean Estimation via Random Projections"). Against privunit k = 16 costs 0.5 % more noise at ε = 1, 2 % at ε
    = 2, 26 % at ε = 8.

    The rows of G are not independent: they are the first k of a nearly uniform rotation of D ≥ p + 1 coordinates (see
    `candidates`), times the length of a normal vector of D coordinates. For a given u, Gu is then normal all the same,
    and G costs D·log D in place of k·p. With t the PrivUnit component along and s = (D − k·E[t²])/(D − 1) the noise
    energy is

        (s·p·C² + (k·E[t²] − s)·‖v‖²)/c² − ‖v‖².

    Why not a single Hadamard transform: for sparse updates ‖Gu‖ would not be random, which leaves a bias of the order
    of 1/(4k), different for each input, and any unbiased fix must pay for the largest possible ‖Gu‖.

    `encode` makes the sketch and `decode` the estimate; both sides need the same NumPy stream (`SFC64`, `bytes` and
    `chisquare`; NumPy does not promise this across major versions). A real release by `privatize` is the one after the
    other. A simulated one draws Gᵀû from its law: given u it is (‖Gu‖·t)·u plus normal noise across u, with ‖Gu‖
    chi-distributed and independent of t.
    """

    rank: int = 16
    name: ClassVar[str] = "projunit"
    on_sphere: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_whole("rank", self.rank, 1, 65536)

    def encode(self, vector: ArrayLike, epsilon: float, rng: np.random.Generator | NoiseSource) -> Sketch:
        """A private sketch of one vector; `decode` of it has the law of `privatize`."""
        source = release_source(self, rng)
        ball = self.clipped(vector)[None, :] / self.clip
        if ball.ndim != 2:
            raise InvalidInput("vector", np.shape(vector), "one vector of shape (p,)")
        eps, seed = np.array([positive_epsilon(epsilon)]), source.below(2**128)
        plan, public = self.plan(eps, ball.shape[1]), self._projection(seed, 1, ball.shape[1])
        return Sketch(seed, tuple(self._numbers(ball, plan, delivered(eps), public, source)[0].tolist()))

    def decode(self, sketch: Sketch, dimension: int) -> FloatArray:
        """The unbiased estimate of the sketched vector, of `dimension` coordinates."""
        if len(sketch.numbers) != self.rank or not np.isfinite(sketch.numbers).all():
            raise InvalidInput("sketch", sketch, f"{self.rank} finite numbers")
        size = checked_dimension(dimension)
        return self._projection(sketch.seed, 1, size).back(np.array([sketch.numbers]))[0, :size]

    def _projection(self, seed: int | np.random.Generator, rows: int, dimension: int) -> _Projection:
        generator = np.random.Generator(np.random.SFC64(seed)) if isinstance(seed, int) else seed
        size = self._size(dimension)
        rotation = Rotation.draw(generator, (rows,), size)
        return _Projection(rotation, np.sqrt(generator.chisquare(size, (rows, 1))), self.rank)

    def _numbers(
        self, ball: FloatArray, plan: Plan, epsilon: FloatArray, public: _Projection, source: NoiseSource
    ) -> FloatArray:
        """What is sent: a PrivUnit release of each projected vector."""
        seen = public.forth(unit_vectors(ball, plan.lift, source))
        seen /= np.maximum(np.linalg.norm(seen, axis=1, keepdims=True), 1e-300)
        return choose(seen, plan.cap, epsilon, source, normal=False) * self._gain(plan)[:, None]

    def _chosen(self, ball: FloatArray, plan: Plan, epsilon: FloatArray, source: NoiseSource) -> FloatArray:
        out, everybody = np.empty_like(ball), np.arange(len(ball))
        for part in slices(len(ball), _PROJECTED_BLOCK // self._size(ball.shape[1])):
            rows = everybody[part]
            public = self._projection(source.generator(), rows.size, ball.shape[1])
            numbers = self._numbers(ball[rows], plan.take(rows), epsilon[rows], public, source)
            out[rows] = public.back(numbers)[:, : ball.shape[1]]
        return out

    def _law(self, dimension: int, lift: NDArray[np.bool_]) -> Law:
        return SphereLaw(self.rank)

    def _solved(self, epsilon: FloatArray, dimension: int) -> Plan:
        return Plan(best_cap(SphereLaw(self.rank), epsilon), np.ones(epsilon.shape, dtype=bool))

    def _mean_length(self) -> float:
        """E‖Gu‖."""
        return float(np.sqrt(2) * np.exp(gammaln((self.rank + 1) / 2) - gammaln(self.rank / 2)))

    def _gain(self, plan: Plan) -> FloatArray:
        return np.asarray(self.clip / (plan.cap.mean * self._mean_length()))

    def _size(self, dimension: int) -> int:
        """D."""
        return max(dimension + 1, _LEAST_SIZE, 2 * self.rank)

    def _across(self, plan: Plan, dimension: int) -> FloatArray:
        """The variance of each coordinate across u, before scaling; a little below 1, as rows of G are orthogonal."""
        size = self._size(dimension)
        return np.asarray((size - self.rank * plan.cap.square) / (size - 1))

    def _energy(self, plan: Plan, dimension: int, radius: float) -> FloatArray:
        lifted = self.rank * plan.cap.square * radius**2 + self._across(plan, dimension) * (dimension - radius**2)
        return np.asarray(lifted / (plan.cap.mean * self._mean_length()) ** 2 - radius**2)

    def _drawn(self, plan: Plan, dimension: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray, FloatArray]:
        along, _ = draw(self._law(dimension, plan.lift), plan.cap, rng)
        length = np.sqrt(rng.chisquare(self.rank, along.shape))
        return along * length, np.sqrt(self._across(plan, dimension)), self._gain(plan)


@dataclass(frozen=True)
class _Projection:
    """G, one for each row."""

    rotation: Rotation
    radius: FloatArray
    rank: int

    def forth(self, units: FloatArray) -> FloatArray:
        """Gu."""
        padded = np.zeros((len(units), self.rotation.signs.shape[-1]))
        padded[:, : units.shape[1]] = units
        return self.rotation.turn(padded)[:, : self.rank] * self.radius

    def back(self, numbers: FloatArray) -> FloatArray:
        """Gᵀ of these."""
        return self.rotation.back(numbers * self.radius)
