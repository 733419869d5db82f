"""What is particular to each mechanism: closed forms, and that the factor 2 of replace-one is there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flmarket.errors import InvalidInput
from flmarket.privacy import (
    ApproxDp,
    GaussianL2,
    GaussianRelease,
    GaussianZCdp,
    LaplaceL1,
    PrivacyAccount,
    PureDp,
    ZCdp,
    gaussian_delta,
)


def test_laplace_energy_and_guarantee():
    assert float(LaplaceL1(clip=3.0).noise_energy(2.0, 5)) == pytest.approx(5 * 8 * 9 / 4)
    assert LaplaceL1(clip=3.0).guarantee(0.7) == PureDp(0.7)


def test_laplace_law_has_scale_twice_clip_over_epsilon(rng):
    out = LaplaceL1(clip=0.5).privatize(np.zeros((100_000, 1)), 2.0, rng)[:, 0]
    assert stats.kstest(out, stats.laplace(scale=0.5).cdf).pvalue > 1e-9
    assert stats.kstest(out, stats.laplace(scale=0.25).cdf).pvalue < 1e-9  # the factor 2 forgotten


def test_laplace_worst_case_ratio():
    """At the two ends of the L1 ball the log-likelihood ratio reaches ε and does not pass it."""
    clip, eps = 2.0, 0.9
    scale = np.sqrt(float(LaplaceL1(clip).noise_energy(eps, 1)) / 2)
    x = np.linspace(-20, 20, 4001)
    ratio = stats.laplace.logpdf(x, clip, scale) - stats.laplace.logpdf(x, -clip, scale)
    assert np.abs(ratio).max() == pytest.approx(eps, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(epsilon=st.floats(-6, 3).map(lambda x: 10.0**x), clip=st.floats(0.01, 100))
def test_gaussian_delivers_its_delta_at_sensitivity_twice_clip(exact_gaussian_delta, epsilon, clip):
    mechanism = GaussianL2(clip=clip, delta=1e-6)
    sigma = float(np.sqrt(mechanism.noise_energy(epsilon, 1)))
    assert exact_gaussian_delta(sigma, epsilon, 2 * clip) <= 1e-6 * (1 + 1e-9)
    assert gaussian_delta(sigma=sigma, epsilon=epsilon, sensitivity=2 * clip) == pytest.approx(1e-6, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(epsilon=st.floats(-6, 3).map(lambda x: 10.0**x), delta=st.floats(-12, -0.5).map(lambda x: 10.0**x))
def test_one_gaussian_release_fits_a_cap_of_its_own_promise(epsilon, delta):
    account = PrivacyAccount(ApproxDp(epsilon, delta))
    account.compose(GaussianL2(delta=delta).guarantee(epsilon))
    assert account.would_exceed(GaussianL2(delta=delta).guarantee(epsilon))


def test_zcdp_mechanism_reads_rho():
    mechanism = GaussianZCdp(clip=0.5)
    assert float(mechanism.noise_energy(0.125, 3)) == pytest.approx(3 * 1.0 / 0.25)
    assert mechanism.guarantee(0.125) == GaussianRelease(2.0)
    account = PrivacyAccount(ZCdp(1.0))
    account.compose(mechanism.guarantee(0.1), 10)
    assert account.spent == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, np.nan, [1e-5, 1e-6]])
def test_bad_delta(delta):
    with pytest.raises(InvalidInput, match="delta"):
        GaussianL2(delta=delta)
