from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flmarket.errors import InvalidInput
from flmarket.privacy import ExponentialRelease, SecureNoise, exponential

SCORES = np.array([0.0, 1.0, 3.0, 3.0])


def chi_square(picks: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(picks, minlength=expected.size)
    return float(stats.chisquare(counts, expected * counts.sum()).pvalue)


def test_hand_worked():
    # exp(ε·s/2Δ) with ε = 2 ln 2, Δ = 1 is 2^s: weights 1, 2, 8, 8
    p = exponential.probabilities(SCORES, epsilon=2 * np.log(2), sensitivity=1.0)
    np.testing.assert_allclose(p, np.array([1, 2, 8, 8]) / 19, rtol=1e-14)


def test_privacy_holds_exactly_when_every_score_moves(rng):
    """Moving every score by up to Δ changes no probability by more than e^ε, and the bound is reached."""
    worst = 0.0
    for _ in range(200):
        scores, move = rng.normal(size=5), rng.choice([-1.0, 1.0], size=5)
        before, after = (exponential.probabilities(s, epsilon=0.7, sensitivity=1.0) for s in (scores, scores + move))
        worst = max(worst, np.abs(np.log(before / after)).max())
    assert 0.5 < worst <= 0.7 * (1 + 1e-12)


@pytest.mark.parametrize("secure", [False, True])
def test_frequencies(secure, rng):
    n = 8_000 if secure else 200_000
    source = SecureNoise() if secure else rng
    picks = exponential.select(np.tile(SCORES, (n, 1)), epsilon=1.0, sensitivity=1.0, rng=source)
    assert picks.shape == (n,)
    assert chi_square(picks, exponential.probabilities(SCORES, epsilon=1.0, sensitivity=1.0)) > 1e-12
    # the check sees a forgotten factor 2 and a doubled sensitivity
    for wrong in (0.5, 2.0):
        assert chi_square(picks, exponential.probabilities(SCORES, epsilon=wrong, sensitivity=1.0)) < 1e-12


def test_mixed_epsilon_in_one_batch(rng):
    eps = np.array([0.1, 4.0])
    picks = exponential.select(np.tile(SCORES, (50_000, 2, 1)), epsilon=eps, sensitivity=1.0, rng=rng)
    for owner in range(2):
        expected = exponential.probabilities(SCORES, epsilon=eps[owner], sensitivity=1.0)
        assert chi_square(picks[:, owner], expected) > 1e-9


@pytest.mark.parametrize(
    ("scores", "epsilon", "expected"),
    [
        ([-1e6, 0.0], 1e4, [0.0, 1.0]),
        ([-1e6, -1e6], 1e4, [0.5, 0.5]),
        ([1e300, -1e300], 1e12, [1.0, 0.0]),
        ([1e6, 1e6 + 1], 1e-12, [0.5, 0.5]),
    ],
)
def test_extremes_do_not_overflow(scores, epsilon, expected, rng):
    p = exponential.probabilities(scores, epsilon=epsilon, sensitivity=1.0)
    np.testing.assert_allclose(p, expected, atol=1e-9)
    assert exponential.select(scores, epsilon=epsilon, sensitivity=1.0, rng=rng) in (0, 1)


def test_same_seed_same_choice():
    scores = np.zeros((100, 7))
    first, second = (
        exponential.select(scores, epsilon=1.0, sensitivity=1.0, rng=np.random.default_rng(3)) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)


def test_guarantee():
    assert exponential.guarantee(0.5) == ExponentialRelease(0.5)


@pytest.mark.parametrize(
    "bad",
    [
        {"scores": [np.nan, 1.0]},
        {"scores": 1.0},
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": [1.0, 1.0, 1.0]},
        {"sensitivity": 0.0},
        {"sensitivity": np.inf},
    ],
)
def test_bad_input(bad, rng):
    arguments = {"scores": SCORES, "epsilon": 1.0, "sensitivity": 1.0, **bad}
    with pytest.raises(InvalidInput):
        exponential.probabilities(**arguments)
    with pytest.raises(InvalidInput):
        exponential.select(**arguments, rng=rng)
