"""M4 and M5: probabilities, frequencies, privacy of the choice, and the average that comes out."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from flmarket import InvalidInput
from flmarket.aggregation import robust
from flmarket.aggregation.robust import SENSITIVITIES, ExponentialChoice, LeaveKOut, LeaveOneOut, Partition, mix
from flmarket.audit.privacy import audit_choice, crafted_scores, exact_epsilon, sampled_epsilon
from flmarket.privacy import ExponentialRelease


def rule(**changes):
    return ExponentialChoice(**{"epsilon": 1.0, "validation": 100} | changes)


@pytest.mark.parametrize(
    ("changes", "scores", "weights"),
    [
        # exp(ε·y/(2Δ)); Δ = 1/(m−1) with m = 3: ε = 2 ln 2 gives 2^(2y)
        ({"sensitivity": "paper", "epsilon": 2 * np.log(2)}, [0.5, 1.0, 0.0], [2, 4, 1]),
        # Δ = 1: 2^y
        ({"sensitivity": "client", "epsilon": 2 * np.log(2)}, [1.0, 0.0, 1.0], [2, 1, 2]),
        # Δ = 1/10 with 10 records: 3^(10 y)
        ({"sensitivity": "record", "epsilon": 2 * np.log(3), "validation": 10}, [0.5, 0.4, 0.3], [9, 3, 1]),
    ],
)
def test_probabilities_worked_by_hand(changes, scores, weights):
    found = rule(**changes).probabilities(scores, clients=3)
    np.testing.assert_allclose(found, np.array(weights) / np.sum(weights), rtol=1e-12)


def test_a_choice_worked_by_hand():
    """Sizes 1, 2, 3 with values 6, 3, 2; leaving out each in turn: 12/5, 12/4, 12/3."""
    seen = []

    def score(candidates):
        seen.append(candidates[:, 0].copy())
        return np.array([0.0, 1.0, 0.5])

    chooser = rule(sensitivity="paper", epsilon=2 * np.log(2))
    made = chooser.combine([[6.0], [3.0], [2.0]], [1, 2, 3], score=score, rng=np.random.default_rng(0))
    np.testing.assert_allclose(seen[0], [12 / 5, 12 / 4, 12 / 3])
    np.testing.assert_allclose(made.choice.probabilities, np.array([1, 4, 2]) / 7)
    index = made.choice.index
    assert made.average[0] == pytest.approx([12 / 5, 12 / 4, 12 / 3][index])
    assert made.total_size == [5, 4, 3][index]
    np.testing.assert_allclose(made.shares, [[0, 0.4, 0.6], [0.25, 0, 0.75], [1 / 3, 2 / 3, 0]][index])


@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_frequencies_of_100_000_draws(sensitivity):
    scores, n = np.array([0.5, 0.62, 0.55, 0.6, 0.0]), 100_000
    chooser = rule(sensitivity=sensitivity, epsilon=0.8, validation=40)
    picks = chooser.draw(np.broadcast_to(scores, (n, 5)), 5, np.random.default_rng(1))
    counts = np.bincount(picks, minlength=5)
    expected = chooser.probabilities(scores, 5)
    assert stats.chisquare(counts, expected * n).pvalue > 1e-6
    for wrong in (0.5, 2.0):  # a forgotten factor 2, either way, is seen
        cheat = dataclasses.replace(chooser, epsilon=0.8 * wrong).probabilities(scores, 5)
        assert stats.chisquare(counts, cheat * n).pvalue < 1e-6


def test_combine_draws_from_its_own_probabilities():
    scores = np.array([0.2, 0.9, 0.5])
    chooser, generator = rule(sensitivity="client", epsilon=3.0), np.random.default_rng(2)
    made = [chooser.combine(np.eye(3), [1, 1, 1], score=lambda _: scores, rng=generator) for _ in range(4000)]
    counts = np.bincount([one.choice.index for one in made], minlength=3)
    assert stats.chisquare(counts, made[0].choice.probabilities * 4000).pvalue > 1e-6


def test_log_probabilities_are_the_logarithms():
    scores = np.array([0.5, 0.62, 0.0])
    np.testing.assert_allclose(np.exp(rule().log_probabilities(scores, 3)), rule().probabilities(scores, 3))
    assert rule(epsilon=1e6).log_probabilities(scores, 3)[2] == pytest.approx(-0.62 * 1e6 * 50)


def test_extreme_scores_and_epsilon_do_not_overflow():
    chooser = rule(epsilon=1e12, validation=10**9)
    np.testing.assert_array_equal(chooser.probabilities([0.0, 1.0, 1.0], 3), [0, 0.5, 0.5])
    assert chooser.draw([0.0, 1.0, 0.0], 3, np.random.default_rng(0)) == 1
    np.testing.assert_allclose(rule(epsilon=1e-12).probabilities([0.0, 1.0], 2), 0.5)


@pytest.mark.parametrize(("sensitivity", "changed"), [("record", "record"), ("client", "client")])
def test_privacy_audit_passes_for_the_sound_sensitivities(sensitivity, changed):
    for epsilon in (0.2, 1.0):
        chooser = rule(sensitivity=sensitivity, epsilon=epsilon, validation=200)
        seen = audit_choice(chooser, changed, 20, rng=np.random.default_rng(3))
        assert seen.as_asked
        assert seen.holds
        assert seen.epsilon_exact > 0.85 * epsilon  # the pair is close to the worst there is


def test_erratum_e10_what_the_papers_sensitivity_really_gives():
    """Asked for ε = ½ with m = 20, one client moves the choice by e^7.5; by the general bound up to e^9.5."""
    seen = audit_choice(rule(sensitivity="paper", epsilon=0.5), "client", 20, rng=np.random.default_rng(4))
    assert not seen.as_asked
    assert seen.holds
    assert seen.epsilon_promised == pytest.approx(9.5)
    assert seen.epsilon_exact == pytest.approx(7.489, abs=1e-3)
    assert seen.epsilon_lower > 6.0  # from samples alone
    record = audit_choice(rule(sensitivity="paper", epsilon=0.5), "record", 20, rng=np.random.default_rng(4))
    assert record.as_asked  # 100 records: far more private for them than asked
    assert record.epsilon_promised == pytest.approx(0.5 * 19 / 100)


@pytest.mark.parametrize("sensitivity", ["record", "client"])
def test_a_choice_that_counts_on_half_the_sensitivity_is_caught(sensitivity, monkeypatch):
    whole = ExponentialChoice.delta_y
    monkeypatch.setattr(ExponentialChoice, "delta_y", lambda self, clients: whole(self, clients) / 4)
    chooser = rule(sensitivity=sensitivity, epsilon=1.0)
    seen = audit_choice(chooser, sensitivity, 20, rng=np.random.default_rng(5))
    assert not seen.as_asked
    assert seen.epsilon_lower > 1.0


def test_the_crafted_pairs_are_what_they_say():
    one, two = crafted_scores("client", 20, 50)
    assert set(np.abs(one - two)) == {0.0, 1.0}
    one, two = crafted_scores("record", 20, 50)
    np.testing.assert_allclose(np.abs(one - two), 1 / 50)
    assert exact_epsilon(np.log([0.5, 0.5]), np.log([0.25, 0.75])) == pytest.approx(np.log(2))


def test_a_bound_from_samples_is_rarely_above_the_truth():
    draw = np.random.default_rng(6)
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.6, 0.1])
    found = [
        sampled_epsilon(draw.choice(3, 2000, p=p), draw.choice(3, 2000, p=q), failure_probability=0.05)
        for _ in range(200)
    ]
    assert np.mean(np.array(found) > np.log(2)) <= 0.05
    assert np.median(found) > 0.4


def test_the_guarantee_says_what_is_protected():
    assert rule(epsilon=0.3, validation=50).guarantee("record", 20) == ExponentialRelease(0.3)
    assert rule(epsilon=0.3, sensitivity="client").guarantee("client", 20) == ExponentialRelease(0.3)
    assert rule(epsilon=0.3, validation=50).guarantee("client", 20).epsilon == pytest.approx(15.0)
    assert rule(epsilon=0.3, validation=50, sensitivity="client").guarantee("record", 20).epsilon == pytest.approx(
        0.006
    )


def test_mixing_is_the_papers_formula(rng):
    made = robust.get("average").combine(rng.normal(size=(5, 3)), [1, 2, 3, 4, 5])
    own, size = rng.normal(size=(4, 3)), np.array([1.0, 2.0, 7.0, 0.5])
    expected = (made.average * made.total_size + size[:, None] * own) / (made.total_size + size)[:, None]
    np.testing.assert_allclose(mix(made, own, size), expected)


def test_a_clear_adversary_is_left_out_under_record_and_not_under_client():
    """Accuracy 0.9 without her and 0.8 with: e^{ε·0.1·|V|/2} against e^{0.05 ε}."""
    scores = np.full(20, 0.8)
    scores[7] = 0.9
    assert rule(validation=1000).probabilities(scores, 20)[7] > 0.999
    assert rule(validation=1000, sensitivity="client").probabilities(scores, 20)[7] < 0.06
    assert rule(validation=1000, sensitivity="paper").probabilities(scores, 20)[7] == pytest.approx(
        np.exp(0.95) / (np.exp(0.95) + 19)
    )


def test_erratum_e19_a_smaller_epsilon_does_not_keep_the_adversary_out():
    """m = 20, Δ = 1/19; the one group without her leads by 3 points."""
    scores = np.full(20, 0.90)
    scores[4] = 0.93
    out = [rule(sensitivity="paper", epsilon=e).probabilities(scores, 20)[4] for e in (1e-9, 1.0, 10.0, 100.0)]
    assert out[0] == pytest.approx(1 / 20)
    assert out[1] == pytest.approx(0.0654, abs=1e-4)
    assert out[2] == pytest.approx(0.476, abs=1e-3)
    assert (np.diff(out) > 0).all()


def test_erratum_e21_the_adversary_is_in_all_groups_but_one():
    members = LeaveOneOut().members(20, None)
    assert (members.sum(axis=0) == 19).all()


@pytest.mark.parametrize(
    "changes", [{"epsilon": 0.0}, {"epsilon": np.inf}, {"validation": 0}, {"validation": 1.5}, {"sensitivity": "none"}]
)
def test_bad_settings_are_refused(changes):
    with pytest.raises(InvalidInput):
        rule(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"vectors": [[np.nan], [0.0]]},
        {"vectors": [[1.0]], "data_size": [1]},
        {"data_size": [1, 0]},
        {"data_size": [1, 2, 3]},
        {"score": lambda c: np.full(len(c), 1.5)},
        {"score": lambda c: np.full(len(c), np.nan)},
        {"score": lambda c: np.zeros(len(c) + 1)},
        {"score": None},
        {"rng": None},
    ],
)
def test_bad_uploads_and_scores_are_refused(changes):
    given = {
        "vectors": [[1.0], [0.0]],
        "data_size": [1, 1],
        "score": lambda c: np.zeros(len(c)),
        "rng": np.random.default_rng(0),
    } | changes
    with pytest.raises(InvalidInput):
        rule().combine(given.pop("vectors"), given.pop("data_size"), **given)


@pytest.mark.parametrize(
    ("name", "grouping"),
    [("leave-one-out", LeaveOneOut()), ("leave-k-out", LeaveKOut(3, 9)), ("partition", Partition(4))],
)
def test_names(name, grouping):
    settings = {"leave-k-out": {"k": 3, "count": 9}, "partition": {"size": 4}}.get(name, {})
    made = robust.get(name, epsilon=1.0, validation=10, sensitivity="client", **settings)
    assert (made.name, made.grouping, made.sensitivity) == (name, grouping, "client")
    assert name in robust.names()
