"""Oracles and fixtures of the privacy tests; nothing here uses the code under test."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)


@pytest.fixture(scope="session")
def exact_gaussian_delta() -> Callable[..., mpmath.mpf]:
    """δ of the Gaussian mechanism as Balle & Wang print it, with 80 digits."""

    def delta(sigma: float, epsilon: float, sensitivity: float = 1.0) -> mpmath.mpf:
        with mpmath.workdps(80):
            mu = mpmath.mpf(sensitivity) / mpmath.mpf(sigma)
            eps = mpmath.mpf(epsilon)
            return mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)

    return delta
