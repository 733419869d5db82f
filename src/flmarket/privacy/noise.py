"""Where noise comes from: a fast seeded source for simulation, a vetted one for what leaves a machine.

A source *adds* noise to values instead of handing noise out. That is what lets the secure one round the value
to a grid and add exact discrete noise inside OpenDP: `value + float_noise` leaks the value through the low
bits, however good the noise (Mironov, "On significance of the least significant bits for differential
privacy", CCS 2012).

Contract of every source, for queries whose values move by at most `sensitivity` (L1, L2, L∞ in turn):
`add_laplace` is (sensitivity/scale)-DP, `add_gaussian` is sensitivity²/(2·scale²)-zCDP, and `noisy_argmax` is
(2·sensitivity/scale)-DP. `SimulationNoise` keeps it for ideal real numbers only. Mechanisms that choose instead of
adding use `below` for the choice and `generator` for what they choose from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput

__all__ = ["NoiseSource", "SimulationNoise", "as_noise_source"]


@runtime_checkable
class NoiseSource(Protocol):
    """Adds noise to vectors of shape (..., p); `scale` has shape (...) or is one number for all vectors."""

    def add_laplace(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values plus independent Laplace noise of the given scale in each coordinate."""

    def add_gaussian(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values plus independent Gaussian noise of standard deviation `scale` in each coordinate."""

    def noisy_argmax(self, scores: FloatArray, *, scale: ArrayLike, sensitivity: float) -> NDArray[np.intp]:
        """The index (last axis) of the largest score after Gumbel noise of the given scale."""

    def below(self, bound: int) -> int:
        """A whole number from 0 to bound − 1, each with exactly the same probability."""

    def generator(self) -> np.random.Generator:
        """For randomness that may be public: what it draws must not be combined with a value by arithmetic."""


class SimulationNoise:
    """Seeded NumPy noise. Fast and repeatable, and for simulation only.

    Not private against anyone who sees the output bits: the generator is predictable from its outputs, and
    floating point sums reveal which inputs are possible. Use `SecureNoise` for whatever leaves a machine.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        if not isinstance(rng, np.random.Generator):
            raise InvalidInput("rng", rng, "a numpy.random.Generator")
        self._rng = rng

    def add_laplace(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values plus Laplace noise; `sensitivity` plays no part here."""
        del sensitivity
        return values + self._rng.laplace(size=values.shape) * per_vector(scale, values)[..., None]

    def add_gaussian(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values plus Gaussian noise; `sensitivity` plays no part here."""
        del sensitivity
        return values + self._rng.standard_normal(values.shape) * per_vector(scale, values)[..., None]

    def noisy_argmax(self, scores: FloatArray, *, scale: ArrayLike, sensitivity: float) -> NDArray[np.intp]:
        """Gumbel-max in floating point; `sensitivity` plays no part here."""
        del sensitivity
        with np.errstate(over="ignore"):  # a score so far behind that it cannot win may overflow to −∞
            relative = (scores - scores.max(axis=-1, keepdims=True)) / per_vector(scale, scores)[..., None]
        return np.asarray((relative + self._rng.gumbel(size=scores.shape)).argmax(axis=-1))

    def below(self, bound: int) -> int:
        """By rejection, from as many bits as the bound has."""
        return next(number for number in self._numbers(bound.bit_length()) if number < bound)

    def generator(self) -> np.random.Generator:
        """The seeded generator itself."""
        return self._rng

    def _numbers(self, bits: int) -> Iterator[int]:
        while True:
            yield int.from_bytes(self._rng.bytes((bits + 7) // 8), "little") >> -bits % 8


def as_noise_source(rng: np.random.Generator | NoiseSource) -> NoiseSource:
    """A generator becomes simulation noise; a source stays what it is; anything else is refused."""
    if isinstance(rng, np.random.Generator):
        return SimulationNoise(rng)
    if isinstance(rng, NoiseSource) and not isinstance(rng, type):
        return rng
    raise InvalidInput("rng", rng, "a numpy.random.Generator (simulation) or a noise source such as SecureNoise()")


def per_vector(scale: ArrayLike, values: FloatArray) -> FloatArray:
    """Positive finite scales, one for each vector of `values`."""
    array = np.asarray(scale, dtype=np.float64)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise InvalidInput("scale", scale, "finite numbers greater than 0")
    try:
        return np.broadcast_to(array, values.shape[:-1])
    except ValueError:
        raise InvalidInput("scale", array.shape, f"one number per vector, {values.shape[:-1]}") from None
