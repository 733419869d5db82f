"""Noise that may leave a machine: exact samplers on the operating system's randomness.

Laplace and Gaussian noise, and the exponential mechanism, are OpenDP's. Mechanisms that choose one of many public
points (see `candidates`) draw one exactly uniform whole number here, and nothing else that is secret.

OpenDP rounds each value to a grid and adds discrete Laplace or discrete Gaussian noise in exact arithmetic,
so no low bits leak. Rounding widens the sensitivity a little; OpenDP's own privacy map says by how much.
Before a measurement is used its map is compared with the promise of `NoiseSource`, and the scale is widened
(by about p·2⁻⁵⁰) until the map is within it. A promise that cannot be met is an error, never a silent
overshoot.

The grid is 2⁻⁵⁰ of the smaller of scale and sensitivity: OpenDP's default (2⁻¹⁰⁷⁴) is three to four times
slower and no safer. For (ε, δ) promises computed for the continuous Gaussian: on so fine a grid the discrete
Gaussian's probabilities equal those of a rounded continuous one up to a factor 1 ± p·2⁻⁹⁰, far below the
widening of 2⁻⁴⁰.

Assumes: the values really are within `sensitivity` of each other (the mechanisms clip first), and nobody
observes timing or memory. OpenDP marks these constructors "contrib": their proofs are written, not all are
vetted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import lru_cache
from math import floor, log2
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput, MissingDependency
from flmarket.privacy.noise import per_vector

__all__ = ["SecureNoise"]

_GRID_BITS = 50
_FIRST_WIDENING = 2.0**-40
_LAST_WIDENING = 2.0**-10


class SecureNoise:
    """Cannot be seeded and keeps no state. About 10 (Laplace) to 20 (Gaussian) µs a coordinate; NumPy: 0.1."""

    def __init__(self) -> None:
        _opendp()

    def add_laplace(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values on a grid plus discrete Laplace noise; (sensitivity/scale)-DP by OpenDP's own map."""
        return self._add("laplace", values, scale, sensitivity)

    def add_gaussian(self, values: FloatArray, *, scale: ArrayLike, sensitivity: float) -> FloatArray:
        """Values on a grid plus discrete Gaussian noise; sensitivity²/(2·scale²)-zCDP by OpenDP's own map."""
        return self._add("gaussian", values, scale, sensitivity)

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
    try:
        import opendp.prelude as dp
    except ImportError:
        raise MissingDependency("opendp", "secure") from None
    dp.enable_features("contrib")
    return dp


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
            return measurement  # type: ignore[no-any-return]
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
