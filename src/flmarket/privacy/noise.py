"""Where noise comes from: a fast seeded source for simulation, a vetted one for what leaves a machine.

A source *adds* noise to values instead of handing noise out. That is what lets the secure one round the value
to a grid and add exact discrete noise inside OpenDP: `value + float_noise` leaks the value through the low
bits, however good the noise (Mironov, "On significance of the least significant bits for differential
privacy", CCS 2012).

Contract of every source, for queries whose values move by at most `sensitivity` (L1, L2, L∞ in turn):
`add_laplace` is (sensitivity/scale)-DP, `add_gaussian` is sensitivity²/(2·scale²)-zCDP, and `noisy_argmax` is
(2·sensitivity/scale)-DP. `whole_gaussian` hands noise out, because whole numbers have no low bits that tell: what it is
added to must be whole numbers, too. `SimulationNoise` keeps it for ideal real numbers only. Mechanisms that choose
instead of adding use `below` for the choice and `generator` for what they choose from.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import floor, log2
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput, needed


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


@runtime_checkable
class WholeNoise(NoiseSource, Protocol):
    """A source that also has noise for whole numbers, as sums need it (`secure_sum`)."""

    def whole_gaussian(self, size: int, *, scale: float) -> NDArray[np.int64]:
        """Discrete Gaussian noise by itself: whole numbers k, each as likely as exp(−k²/(2·scale²)) is large."""


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

    def whole_gaussian(self, size: int, *, scale: float) -> NDArray[np.int64]:
        """By a table of the distribution; where that is long, a rounded normal, alike to one part in 24·scale²."""
        if scale > _TABLE_SCALE:
            return np.rint(self._rng.standard_normal(size) * scale).astype(np.int64)
        reach = int(12 * scale) + 2
        numbers = np.arange(-reach, reach + 1)
        chances = np.exp(-0.5 * (numbers / scale) ** 2)
        return np.asarray(numbers[np.searchsorted(np.cumsum(chances / chances.sum()), self._rng.random(size))])

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
    if isinstance(rng, SimulationNoise | SecureNoise):  # the usual ones: to look for a protocol's methods takes longer
        return rng
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


_TABLE_SCALE = 1000.0
_GRID_BITS = 50
_FIRST_WIDENING = 2.0**-40
_LAST_WIDENING = 2.0**-10


class SecureNoise:
    """Cannot be seeded and keeps no state. About 10 (Laplace) to 20 (Gaussian) µs a coordinate; NumPy: 0.1.

    Noise that may leave a machine: exact samplers on the operating system's randomness.

    Laplace and Gaussian noise, and the exponential mechanism, are OpenDP's. Mechanisms that choose one of many public
    points (see `candidates`) draw one exactly uniform whole number here, and nothing else that is secret.

    OpenDP rounds each value to a grid and adds discrete Laplace or discrete Gaussian noise in exact arithmetic, so no
    low bits leak. Rounding widens the sensitivity a little; OpenDP's own privacy map says by how much. Before a
    measurement is used its map is compared with the promise of `NoiseSource`, and the scale is widened (by about
    p·2⁻⁵⁰) until the map is within it. A promise that cannot be met is an error, never a silent overshoot.

    The grid is 2⁻⁵⁰ of the smaller of scale and sensitivity: OpenDP's default (2⁻¹⁰⁷⁴) is three to four times slower
    and no safer. For (ε, δ) promises computed for the continuous Gaussian: on so fine a grid the discrete Gaussian's
    probabilities equal those of a rounded continuous one up to a factor 1 ± p·2⁻⁹⁰, far below the widening of 2⁻⁴⁰.

    Assumes: the values really are within `sensitivity` of each other (the mechanisms clip first), and nobody observes
    timing or memory. OpenDP marks these constructors "contrib": their proofs are written, not all are vetted.
    """

    def __init__(self) -> None:
        _opendp()

    def add_laplace(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values on a grid plus discrete Laplace noise; (sensitivity/scale)-DP by OpenDP's own map."""
        return self._add("laplace", values, scale, sensitivity)

    def add_gaussian(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values on a grid plus discrete Gaussian noise; sensitivity²/(2·scale²)-zCDP by OpenDP's own map."""
        return self._add("gaussian", values, scale, sensitivity)

    def whole_gaussian(self, size: int, *, scale: float) -> NDArray[np.int64]:
        """OpenDP's exact sampler, around zeros."""
        return np.array(_whole(float(scale), size)([0] * size), dtype=np.int64)

    def noisy_argmax(self, scores: FloatArray, *, scale: ArrayLike, sensitivity: float) -> NDArray[np.intp]:
        """OpenDP's noisy max with exactly compared Gumbel noise."""
        rows = scores.reshape(-1, scores.shape[-1])
        picks = [
            _measurement("noisy-max", one_scale, sensitivity, rows.shape[1])(row.tolist())
            for row, one_scale in zip(rows, per_vector(scale, scores).ravel().tolist(), strict=True)
        ]
        return np.array(picks, dtype=np.intp).reshape(scores.shape[:-1])

    def below(self, bound: int) -> int:
        """By rejection, on the operating system's randomness."""
        return secrets.randbelow(bound)

    def generator(self) -> np.random.Generator:
        """Freshly seeded with 256 bits. Fast and not cryptographic, which public randomness need not be."""
        return np.random.Generator(np.random.SFC64(secrets.randbits(256)))

    @staticmethod
    def _add(kind: str, values: FloatArray, scale: ArrayLike, sensitivity: float) -> FloatArray:
        scales = per_vector(scale, values).ravel().tolist()
        noisy = np.empty((len(scales), values.shape[-1]))
        for index, (row, one_scale) in enumerate(zip(values.reshape(noisy.shape), scales, strict=True)):
            noisy[index] = _measurement(kind, one_scale, sensitivity, row.size)(row.tolist())
        return noisy.reshape(values.shape)


def _opendp() -> Any:
    with needed("secure", "opendp"):
        import opendp.prelude as dp
    dp.enable_features("contrib")
    return dp


@lru_cache(maxsize=256)
def _whole(scale: float, size: int) -> Callable[[list[int]], Any]:
    """Discrete Gaussian noise on whole numbers; its map is checked to be that of this scale."""
    dp = _opendp()
    domain = dp.vector_domain(dp.atom_domain(T="i64"), size=size)
    measurement = dp.m.make_gaussian(domain, dp.l2_distance(T="i64"), scale=scale)
    if not measurement.map(1) <= 0.5 / scale**2 * (1 + 1e-9):
        raise InvalidInput("scale", scale, "a scale at which OpenDP's map is that of discrete Gaussian noise")
    within: Callable[[list[int]], Any] = measurement
    return within


@lru_cache(maxsize=256)
def _measurement(kind: str, scale: float, sensitivity: float, size: int) -> Callable[[list[float]], Any]:
    """A measurement whose own privacy map keeps the promise made for `scale` and `sensitivity`."""
    if not 0 < sensitivity < np.inf:
        raise InvalidInput("sensitivity", sensitivity, "a finite number greater than 0")
    promise = sensitivity / scale if kind == "laplace" else (sensitivity / scale) ** 2 / 2
    widening = _FIRST_WIDENING
    while widening <= _LAST_WIDENING:
        measurement = _build(kind, scale * (1 + widening), sensitivity, size)
        if measurement.map(sensitivity) <= promise:
            within: Callable[[list[float]], Any] = measurement
            return within
        widening *= 2
    raise InvalidInput("scale", scale, f"a scale at which OpenDP's map stays within {promise:.6g} for {size} values")


def _build(kind: str, scale: float, sensitivity: float, size: int) -> Any:
    dp = _opendp()
    domain = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=size)
    if kind == "noisy-max":
        space = (domain, dp.linf_distance(T=float))
        # The zCDP output measure selects Gumbel noise, that is the exponential mechanism itself.
        return dp.m.make_noisy_max(*space, dp.zero_concentrated_divergence(), scale=scale)
    grid = floor(log2(min(scale, sensitivity))) - _GRID_BITS
    if kind == "laplace":
        return dp.m.make_laplace(domain, dp.l1_distance(T=float), scale=scale, k=grid)
    return dp.m.make_gaussian(domain, dp.l2_distance(T=float), scale=scale, k=grid)
