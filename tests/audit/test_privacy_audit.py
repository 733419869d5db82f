"""Sound perturbations pass; each planted fault is caught, by the bound, by the law, or by both."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from flmarket import InvalidInput, privacy
from flmarket.audit import audit_privacy, audit_releases
from flmarket.audit.privacy import measurable_epsilon
from flmarket.privacy import GaussianL2, GaussianRelease, LaplaceL1, PureDp, clip_l1, clip_l2

TRIALS = 12_000


def look(perturbation, epsilon=1.0, dimension=16, seed=0, trials=TRIALS):
    return audit_privacy(perturbation, epsilon, dimension, trials, 0.001, np.random.default_rng(seed))


def noisy(centre, scale, rng):
    return centre + rng.laplace(size=np.shape(centre)) * scale


@dataclass(frozen=True)
class HalfNoise(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return noisy(clip_l1(vectors, self.clip), self.clip / epsilon, rng)


@dataclass(frozen=True)
class NoClip(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return noisy(np.asarray(vectors), 2 * self.clip / epsilon, rng)


@dataclass(frozen=True)
class WrongClip(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return noisy(clip_l2(vectors, self.clip), 2 * self.clip / epsilon, rng)


@dataclass(frozen=True)
class SameSeed(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return super().privatize(vectors, epsilon, np.random.default_rng(7))


@dataclass(frozen=True)
class SameRow(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        one = rng.laplace(size=np.shape(vectors)[-1]) * 2 * self.clip / epsilon
        return clip_l1(vectors, self.clip) + one


@dataclass(frozen=True)
class HalfGaussian(GaussianL2):
    def privatize(self, vectors, epsilon, rng):
        centre = clip_l2(vectors, self.clip)
        return centre + rng.standard_normal(np.shape(vectors)) * float(self.sigma(epsilon)) / 2


@pytest.mark.parametrize("name", privacy.names())
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_ours_pass(name, epsilon):
    found = look(privacy.get(name, clip=2.0), epsilon, seed=1)
    assert found.findings == ()
    assert found.holds
    assert found.epsilon_lower <= found.epsilon_claimed


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_the_bound_is_nearly_tight_for_laplace(epsilon):
    found = look(LaplaceL1(), epsilon)
    assert 0.6 * epsilon < found.epsilon_lower <= epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_half_the_noise_is_caught(epsilon):
    found = look(HalfNoise(), epsilon)
    assert any("less noise than stated" in text for text in found.findings)
    assert found.law.energy_measured == pytest.approx(found.law.energy_stated / 4, rel=0.1)
    if epsilon <= 2:
        assert any("gives away" in text for text in found.findings)


def test_half_the_gaussian_noise_is_caught_by_the_bound_itself():
    found = look(HalfGaussian(), 2.0)
    assert found.mu_lower > found.mu_claimed
    assert any("Gaussian DP" in text for text in found.findings)


def test_a_forgotten_clip_is_caught():
    found = look(NoClip())
    assert found.epsilon_lower > 3
    assert any("not the clipped input" in text for text in found.findings)


def test_an_l2_clip_under_laplace_noise_is_caught_by_the_bound():
    found = look(WrongClip())
    assert found.epsilon_lower > 1.2
    assert "all coordinates" in found.pair


@pytest.mark.parametrize("fault", [SameSeed, SameRow])
def test_a_reused_seed_is_caught(fault):
    assert any("reused" in text for text in look(fault()).findings)


def test_one_dimension_and_json():
    found = look(LaplaceL1(clip=3.0), 1.0, dimension=1)
    assert found.holds
    json.dumps(found.to_dict(), allow_nan=False)


def test_low_bits_of_simulated_noise_are_not_private():
    """Mironov 2012, found by the audit itself; the same mechanism passes when only the leading digits are looked at."""
    quiet, loud = (
        audit_privacy(LaplaceL1(clip=3.0), 1.0, 1, TRIALS, 0.001, np.random.default_rng(0), low_bits=low_bits)
        for low_bits in (False, True)
    )
    assert quiet.holds
    assert loud.epsilon_lower > 1.5


def test_more_trials_can_show_more():
    assert measurable_epsilon(1_000, 0.01) < measurable_epsilon(100_000, 0.01) < np.log(100_000)


@pytest.mark.parametrize(
    "settings", [{"epsilon": 0.0}, {"trials": 10}, {"failure_probability": 0.7}, {"dimension": 10**9}]
)
def test_bad_input_is_named(settings):
    with pytest.raises(InvalidInput):
        audit_privacy(LaplaceL1(), **{"epsilon": 1.0, **settings})


def test_releases_on_two_neighbours_are_judged_by_the_promise():
    """Gaussian noise of multiplier 1 at distance 1: μ = 1 by hand; shown is a little less, and twice that is caught."""
    rng, shift = np.random.default_rng(0), np.array([0.6, 0.8, 0.0])
    noise = rng.standard_normal((2, 8000, 3))
    sound = audit_releases(noise[0] + shift, noise[1], GaussianRelease(1.0), failure_probability=0.001)
    assert sound.holds
    assert (sound.mu_claimed, sound.trials, sound.delta) == (1.0, 8000, 1e-5)
    assert 0.8 < sound.mu_lower < 1.0
    caught = audit_releases(noise[0] + 2 * shift, noise[1], GaussianRelease(1.0), failure_probability=0.001)
    assert not caught.holds
    assert "μ" in caught.findings[-1]
    pure = audit_releases(noise[0] + 3 * shift, noise[1], PureDp(1.0))  # a promise that Gaussian noise cannot keep
    assert pure.epsilon_lower > 1.0 == pure.epsilon_claimed
    assert not pure.holds
    for bad in (noise[1][:99], noise[1][:, :2]):
        with pytest.raises(InvalidInput, match="releases"):
            audit_releases(noise[0], bad, PureDp(1.0))
    with pytest.raises(InvalidInput, match="failure_probability"):
        audit_releases(noise[0], noise[1], PureDp(1.0), failure_probability=0.7)
