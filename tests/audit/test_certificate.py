"""The bound covers what it says, by simulation and by an exact law; and a planted one that is too small does not."""

import math

import numpy as np
import pytest
from scipy import stats

from flmarket.audit import Certificate, audit, certify
from flmarket.errors import InvalidInput


def bound(scores, alpha):
    return certify(scores, population="p", search="strong", alpha=alpha).regret


@pytest.mark.parametrize(("profiles", "alpha"), [(19, 0.05), (50, 0.1), (99, 0.01), (10, 0.3)])
def test_coverage_is_what_the_beta_law_says(profiles, alpha):
    """Of uniform scores the k-th smallest covers a Beta(k, m + 1 − k) share, of mean k/(m + 1) ≥ 1 − α."""
    rng = np.random.default_rng(0)
    drawn = rng.random((4000, profiles))
    covered = np.array([bound(row, alpha) for row in drawn])  # P(R ≤ r) of a uniform R is r itself
    rank = next(k for k in range(1, profiles + 1) if k / (profiles + 1) >= 1 - alpha - 1e-12)
    law = stats.beta(rank, profiles + 1 - rank)
    assert stats.kstest(covered, law.cdf).pvalue > 1e-4
    assert covered.mean() == pytest.approx(rank / (profiles + 1), abs=5 * covered.std() / math.sqrt(4000))
    plain = np.quantile(drawn, 1 - alpha, axis=1)  # the sample's own quantile promises too much
    assert plain.mean() < 1 - alpha - 0.3 / (profiles + 1)


def test_mostly_zero_regrets_are_covered_too():
    rng = np.random.default_rng(1)
    scores = np.where(rng.random((3000, 40)) < 0.9, 0.0, rng.exponential(size=(3000, 40)))
    new = np.where(rng.random(3000) < 0.9, 0.0, rng.exponential(size=3000))
    missed = np.mean([value > bound(row, 0.1) for row, value in zip(scores, new, strict=True)])
    assert missed <= 0.1 + 4 * math.sqrt(0.1 * 0.9 / 3000)


def test_too_few_profiles_certify_nothing():
    assert bound(np.zeros(18), 0.05) == math.inf
    assert bound(np.zeros(19), 0.05) == 0.0
    nothing = certify(np.zeros(3), population="p", search="quick")
    assert "too few" in str(nothing)
    assert Certificate.from_dict(nothing.to_dict()) == nothing


def test_from_an_audit():
    report = audit("all-in", "jdp", profiles=20, owners=4, private=["value"])
    scores = np.array(report.truthful.profile_regret)
    assert scores.max() == report.truthful.overall.max_regret_over_cost
    assert (scores > 0).mean() == report.truthful.overall.profiles_with_gain
    made = certify(scores, population="jdp", search="quick", alpha=0.05)
    assert made.regret == scores.max()
    assert "at most 5%" in str(made)
    assert "profile_regret" not in report.to_dict()["truthful"]


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_alpha_is_a_probability(alpha):
    with pytest.raises(InvalidInput, match="alpha"):
        bound(np.zeros(9), alpha)
