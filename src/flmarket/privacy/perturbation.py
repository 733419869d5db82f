"""What every way of making an update private has in common.

A perturbation clips an owner's vector, randomises it so that its mean is the clipped vector, and knows three
things about itself: the clip, the energy of the noise it adds, and the promise it keeps. Sensitivity is never
an argument; it follows from the clip. How the randomness enters is the mechanism's own business: some add
noise, others choose a random point of a sphere.

A mechanism whose promise also holds in finite precision, for the bits that are sent, says so by `sound = True`. Others
are for simulation; with any other source of noise they are refused.

Assumes the local model: the owner perturbs before anything leaves her machine, and any two of her inputs are
neighbours, so two clipped vectors differ by at most twice the clip.

Norm clipping: what makes one owner's influence finite.

A vector g becomes g·min(1, C/‖g‖), so that any two clipped vectors are at most 2C apart. That distance is the
sensitivity every mechanism here is calibrated to, and it must hold for the numbers as stored, not only on
paper. Rounding could push a norm past C by a few units in the last place; the bound used internally is
therefore smaller by a margin that covers the worst rounding of a p-term sum. The price is a relative
shrinkage of about p·2⁻⁵⁰ for vectors at the bound; vectors strictly inside are returned unchanged, and
clipping twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.events import Checked, Event
from flmarket.privacy.noise import NoiseSource, SimulationNoise, as_noise_source


class UnsoundNoise(InvalidInput):
    """A mechanism that promises privacy for ideal real numbers only was asked to make a real release."""

    def __init__(self, name: str) -> None:
        super().__init__("perturbation", name, "simulated noise only: its low bits may reveal the input")


@runtime_checkable
class Perturbation(Protocol):
    """Clip, then randomise without bias. Immutable; all randomness comes from the argument."""

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def clip(self) -> float:
        """The largest norm that a vector keeps."""

    @property
    def norm(self) -> Literal["l1", "l2"]:
        """The norm that is clipped."""

    def privatize(self, vectors: ArrayLike, epsilon: ArrayLike, rng: np.random.Generator | NoiseSource) -> FloatArray:
        """Private versions of vectors (..., p), each with its own ε > 0 (shape (...) or one number)."""

    def noise_energy(self, epsilon: ArrayLike, dimension: int) -> FloatArray:
        """E‖output − clipped input‖² in closed form, of epsilon's shape; ∞ where ε = 0.

        Where it depends on the input, that of the worst input within the clip; such mechanisms also have
        `energy(epsilon, dimension, norm=...)`.
        """

    def guarantee(self, epsilon: float) -> Event:
        """What one release at this ε promises, for the account."""


@dataclass(frozen=True)
class Clipping(Checked):
    """What clips to a norm; sound in finite precision."""

    clip: float = 1.0
    norm: ClassVar[Literal["l1", "l2"]] = "l2"
    sound: ClassVar[bool] = True

    def clipped(self, vectors: ArrayLike) -> FloatArray:
        """The vectors, none longer than the clip."""
        return (clip_l1 if self.norm == "l1" else clip_l2)(vectors, self.clip)


def energy_where_sold(epsilon: ArrayLike, energy: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """The noise energy of each ε > 0, by a function of a vector of them; ∞ where ε = 0."""
    eps = checked_array("epsilon", epsilon)
    found, sells = np.full(eps.shape, np.inf), eps > 0
    if sells.any():
        found[sells] = energy(eps[sells])
    return found


def signal_to_noise(perturbation: Perturbation, epsilon: ArrayLike, dimension: int) -> FloatArray:
    """clip² / noise energy: the most signal that can get through, per release; 0 where ε = 0."""
    return np.asarray(perturbation.clip**2 / perturbation.noise_energy(epsilon, dimension))


def release_epsilon(epsilon: ArrayLike, batch: tuple[int, ...]) -> FloatArray:
    """Positive privacy losses, one for each vector of the batch, or a typed error."""
    array = checked_array("epsilon", epsilon)
    if (array == 0).any():
        raise InvalidInput("epsilon", 0.0, "privacy losses greater than 0: an owner with none cannot release")
    if not ((array >= 1e-30) & (array <= 1e30)).all():
        raise InvalidInput("epsilon", epsilon, "privacy losses from 1e-30 to 1e30")
    try:
        return np.broadcast_to(array, batch)
    except ValueError:
        raise InvalidInput("epsilon", array.shape, f"one number, or one for each vector {batch}") from None


def release_source(mechanism: Perturbation, rng: np.random.Generator | NoiseSource) -> NoiseSource:
    """The source of noise for a mechanism; one that is not sound in finite precision gets simulated noise only."""
    source = as_noise_source(rng)
    if not is_sound(mechanism) and not isinstance(source, SimulationNoise):
        raise UnsoundNoise(mechanism.name)
    return source


def is_sound(mechanism: Perturbation) -> bool:
    """Whether its promise holds for the very bits that leave a machine; a mechanism that does not say is not."""
    return getattr(mechanism, "sound", False) is True


def positive_epsilon(epsilon: float) -> float:
    """One positive, finite privacy loss, or a typed error."""
    if type(epsilon) is float and 1e-30 <= epsilon <= 1e30:
        return epsilon  # what the checks of arrays find too, in less time
    return float(release_epsilon(epsilon, ()))


def checked_dimension(dimension: int) -> int:
    """A whole number of coordinates of at least 1, or a typed error."""
    if isinstance(dimension, bool) or not isinstance(dimension, (int, np.integer)) or dimension < 1:
        raise InvalidInput("dimension", dimension, "a whole number of at least 1")
    return int(dimension)


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
    if 1e-140 <= bound <= 1e140:  # most vectors are clearly inside, and what rounds here is far from the margin
        with np.errstate(over="ignore"):
            lengths = np.sqrt(np.vecdot(array, array)) if order == 2 else np.abs(array).sum(axis=-1)
        if (lengths <= bound * (1 - 4 * margin)).all():
            return array.copy()
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
