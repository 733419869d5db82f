"""What every registered perturbation must do, checked on each by name; a new one is covered by registering it.

The checks are functions so that planted cheats can be put through them at the end of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from flmarket import privacy
from flmarket.errors import InvalidInput, UnknownName
from flmarket.privacy import LaplaceL1, Perturbation, SecureNoise

P = 6
DRAWS = 20_000
DIRECTION = np.array([0.5, -0.3, 0.1, 0.05, 0.0, -0.05])  # L1 norm 1.0


def order_of(mechanism: Perturbation) -> int:
    return 1 if mechanism.norm == "l1" else 2


def clipped(mechanism: Perturbation, vector: np.ndarray) -> np.ndarray:
    return vector * min(1.0, mechanism.clip / np.linalg.norm(vector, ord=order_of(mechanism)))


def energy_of(mechanism: Perturbation, epsilon, vector: np.ndarray) -> np.ndarray:
    """The closed form for this very input, where a mechanism has one; else the one that holds for all inputs."""
    if hasattr(mechanism, "energy"):
        return mechanism.energy(epsilon, vector.size, norm=float(np.linalg.norm(clipped(mechanism, vector))))
    return mechanism.noise_energy(epsilon, vector.size)


def errors(mechanism: Perturbation, vector: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    out = mechanism.privatize(np.tile(vector, (DRAWS, 1)), epsilon, rng)
    assert out.shape == (DRAWS, vector.size)
    return out - clipped(mechanism, vector)


def check_unbiased(mechanism, rng, epsilon=2.0):
    error = errors(mechanism, 0.8 * mechanism.clip * DIRECTION, epsilon, rng)
    score = error.mean(axis=0) / error.std(axis=0) * np.sqrt(DRAWS)
    assert (np.abs(score) < 5).all(), score


def check_clip(mechanism, rng, epsilon=2.0):
    """A huge vector comes out with the clipped vector as its mean."""
    error = errors(mechanism, 1e6 * mechanism.clip * DIRECTION, epsilon, rng)
    score = error.mean(axis=0) / error.std(axis=0) * np.sqrt(DRAWS)
    assert (np.abs(score) < 5).all(), score


def check_energy(mechanism, rng, epsilon=2.0):
    vector = 0.8 * mechanism.clip * DIRECTION
    energies = (errors(mechanism, vector, epsilon, rng) ** 2).sum(axis=1)
    expected = float(energy_of(mechanism, epsilon, vector))
    assert expected <= float(mechanism.noise_energy(epsilon, P)) * (1 + 1e-12)
    assert abs(energies.mean() - expected) < 5 * energies.std() / np.sqrt(DRAWS), (energies.mean(), expected)


def check_mixed_epsilon(mechanism, rng):
    """Owners with different ε in one batch are treated as if each were alone."""
    eps, vector = np.array([0.3, 2.0, 9.0]), 0.8 * mechanism.clip * DIRECTION
    together = mechanism.privatize(np.tile(vector, (DRAWS, 3, 1)), eps, rng)
    for owner, one in enumerate(eps):
        alone = mechanism.privatize(np.tile(vector, (DRAWS, 1)), one, rng)
        for coordinate in (0, P - 1):
            assert stats.ks_2samp(together[:, owner, coordinate], alone[:, coordinate]).pvalue > 1e-7


def check_independent(mechanism, rng):
    """Noise of different owners, and of different rounds, is uncorrelated."""
    out = mechanism.privatize(np.zeros((DRAWS, 2, P)), 1.0, rng)
    for first, second in ((out[:, 0], out[:, 1]), (out[:-1, 0], out[1:, 0])):
        for coordinate in range(P):
            correlation = np.corrcoef(first[:, coordinate], second[:, coordinate])[0, 1]
            assert abs(correlation) < 5 / np.sqrt(DRAWS)


CHECKS = [check_unbiased, check_clip, check_energy, check_mixed_epsilon, check_independent]


@pytest.fixture(params=[(name, clip) for name in privacy.names() for clip in (1.0, 0.01)], ids=str)
def mechanism(request) -> Perturbation:
    name, clip = request.param
    return privacy.get(name, clip=clip)


@pytest.mark.parametrize("check", CHECKS)
def test_contract(mechanism, check, rng):
    check(mechanism, rng)


def test_is_a_perturbation_that_knows_its_name(mechanism):
    assert isinstance(mechanism, Perturbation)
    assert mechanism.name in privacy.names()
    assert mechanism.norm in ("l1", "l2")
    assert type(privacy.get(mechanism.name)) is type(mechanism)


@pytest.mark.parametrize("shape", [(P,), (1, P), (4, P), (2, 3, P), (3, 1)])
def test_shapes(mechanism, shape, rng):
    out = mechanism.privatize(np.zeros(shape), 1.0, rng)
    assert out.shape == shape
    assert out.dtype == np.float64
    assert np.isfinite(out).all()
    assert mechanism.privatize(np.zeros(shape), np.ones(shape[:-1]), rng).shape == shape


def test_same_seed_same_output(mechanism):
    vectors, eps = np.ones((5, P)), np.linspace(0.5, 3, 5)
    outs = [mechanism.privatize(vectors, eps, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert not np.array_equal(outs[0], outs[2])


def test_input_is_not_changed(mechanism, rng):
    vectors = np.full((3, P), 7.0)
    mechanism.privatize(vectors, 1.0, rng)
    np.testing.assert_array_equal(vectors, 7.0)


def test_energy_falls_with_epsilon_and_is_infinite_at_zero(mechanism):
    energy = mechanism.noise_energy([0.0, 0.1, 1.0, 10.0], P)
    assert np.isinf(energy[0])
    assert (np.diff(energy[1:]) < 0).all()
    assert np.isfinite(energy[1:]).all()
    np.testing.assert_allclose(privacy.signal_to_noise(mechanism, [0.0, 1.0], P)[0], 0.0)
    assert privacy.signal_to_noise(mechanism, 1.0, P) == pytest.approx(
        mechanism.clip**2 / float(mechanism.noise_energy(1.0, P))
    )
    assert np.isinf(mechanism.noise_energy(0.0, P))


def test_guarantee_is_an_event_that_costs_more_with_epsilon(mechanism):
    account = privacy.PrivacyAccount(privacy.ApproxDp(100.0, 1e-5))
    costs = []
    for eps in (0.1, 1.0, 3.0):
        event = mechanism.guarantee(eps)
        assert privacy.event_from_dict(privacy.event_to_dict(event)) == event
        fresh = privacy.PrivacyAccount(account.cap)
        fresh.compose(event)
        costs.append(fresh.spent)
    assert 0 < costs[0] < costs[1] < costs[2]


@pytest.mark.parametrize("epsilon", [0.0, -1.0, np.nan, np.inf, [1.0, 0.0], [1.0, 1.0, 1.0], "much"])
def test_bad_epsilon_is_refused(mechanism, epsilon, rng):
    with pytest.raises(InvalidInput, match="epsilon"):
        mechanism.privatize(np.zeros((2, P)), epsilon, rng)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, np.nan])
def test_no_guarantee_for_nothing(mechanism, epsilon):
    with pytest.raises(InvalidInput, match="epsilon"):
        mechanism.guarantee(epsilon)


@pytest.mark.parametrize("vectors", [[[np.nan] * P], [[np.inf] * P], 3.0])
def test_bad_vectors_are_refused(mechanism, vectors, rng):
    with pytest.raises(InvalidInput, match="vectors"):
        mechanism.privatize(vectors, 1.0, rng)


@pytest.mark.parametrize("dimension", [0, -1, 1.5, True])
def test_bad_dimension_is_refused(mechanism, dimension):
    with pytest.raises(InvalidInput, match="dimension"):
        mechanism.noise_energy(1.0, dimension)


@pytest.mark.parametrize("clip", [0.0, -1.0, np.nan, np.inf, "1"])
@pytest.mark.parametrize("name", privacy.names())
def test_bad_clip_is_refused(name, clip):
    with pytest.raises(InvalidInput):
        privacy.get(name, clip=clip)


def test_a_missing_source_of_noise_is_refused(mechanism):
    with pytest.raises(InvalidInput, match="rng"):
        mechanism.privatize(np.zeros(P), 1.0, None)


@pytest.mark.parametrize("name", privacy.names())
def test_secure_source_has_the_same_energy(name):
    mechanism, n = privacy.get(name), 1500
    out = mechanism.privatize(np.tile(DIRECTION, (n, 1)), np.tile([1.0, 4.0], n // 2), SecureNoise())
    energies = ((out - clipped(mechanism, DIRECTION)) ** 2).sum(axis=1).reshape(-1, 2)
    expected = energy_of(mechanism, [1.0, 4.0], DIRECTION)
    assert (np.abs(energies.mean(axis=0) - expected) < 7 * energies.std(axis=0) / np.sqrt(n / 2)).all()


def test_unknown_name_suggests_one():
    with pytest.raises(UnknownName, match="laplace-l1"):
        privacy.get("laplace")


# --- planted cheats: each must be caught by the check named beside it, or the checks are worth nothing


@dataclass(frozen=True)
class HalfNoise(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return super().privatize(vectors, 2 * np.asarray(epsilon), rng)


@dataclass(frozen=True)
class NoClip(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return np.asarray(vectors) + super().privatize(np.zeros_like(vectors), epsilon, rng)


@dataclass(frozen=True)
class Biased(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return super().privatize(vectors, epsilon, rng) + 0.1 * self.clip


@dataclass(frozen=True)
class SharedNoise(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        array = np.asarray(vectors)
        one = super().privatize(np.zeros((array.shape[0], array.shape[-1])), 1.0, rng)
        return array + one.reshape(array.shape[0], *[1] * (array.ndim - 2), array.shape[-1])


@dataclass(frozen=True)
class AverageEpsilon(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return super().privatize(vectors, np.mean(epsilon), rng)


@dataclass(frozen=True)
class NoNoise(LaplaceL1):
    def privatize(self, vectors, epsilon, rng):
        return privacy.clip_l1(vectors, self.clip)


@pytest.mark.parametrize(
    ("cheat", "check"),
    [
        (HalfNoise, check_energy),
        (NoClip, check_clip),
        (Biased, check_unbiased),
        (SharedNoise, check_independent),
        (AverageEpsilon, check_mixed_epsilon),
        (NoNoise, check_energy),
    ],
)
def test_cheats_are_caught(cheat, check, rng):
    check(LaplaceL1(), np.random.default_rng(20260101))
    with pytest.raises(AssertionError):
        check(cheat(), rng)
