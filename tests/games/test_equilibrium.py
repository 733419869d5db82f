"""Nash equilibria of the users' game: by hand, against best-response dynamics, and by certificate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flmarket.errors import InvalidInput, UnknownName
from flmarket.games import Stackelberg, best_deviations, families, linear_shares, verify_equilibrium

TRAINING = {"records": 1000, "dimension": 1000, "learning_rate": 0.1, "rounds": 500, "weight": 20.0}


def game(values, cost="linear", **changes):
    return Stackelberg(values, cost=cost, **{**TRAINING, **changes})


def algorithm_2(values):
    """As printed but for the strict inequality: one user at a time."""
    order = np.argsort(values, kind="stable")
    chosen = list(order[:2])
    for user in order[2:]:
        if not values[user] < (values[user] + values[chosen].sum()) / len(chosen):
            break
        chosen.append(user)
    rho = np.zeros(values.size)
    total = values[chosen].sum()
    rho[chosen] = (len(chosen) - 1) / total * (1 - (len(chosen) - 1) * values[chosen] / total)
    return rho


def test_two_users_by_hand():
    """ρ_i = Rν_j/(ν_1 + ν_2)²."""
    outcome = game([1.0, 3.0]).outcome(8.0)
    np.testing.assert_allclose(outcome.rho, [1.5, 0.5])
    np.testing.assert_allclose(outcome.payments, [6.0, 2.0])
    np.testing.assert_allclose(outcome.utilities, [4.5, 0.5])


def test_a_dear_user_stays_out():
    outcome = game([1.0, 1.0, 2.5]).outcome(4.0)
    assert outcome.participants.tolist() == [True, True, False]
    np.testing.assert_allclose(outcome.rho, [1.0, 1.0, 0.0])


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=40))
def test_the_vectorised_algorithm_2_is_the_printed_loop(values):
    values = np.array(values)
    np.testing.assert_allclose(game(values).equilibrium(3.0), 3.0 * algorithm_2(values), rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(0.01, 50.0), min_size=2, max_size=12),
    reward=st.floats(1e-3, 1e3),
    cost=st.sampled_from(["linear", "quadratic", "exponential"]),
)
def test_nobody_gains_by_deviating(values, reward, cost):
    played = game(values, cost)
    rho = played.equilibrium(reward)
    assert verify_equilibrium(played, rho, reward=reward) <= 1e-9 * reward
    outcome = played.outcome(reward)
    assert outcome.utilities.min() >= -1e-12 * reward
    assert outcome.payments.sum() == pytest.approx(reward)
    assert outcome.participants.sum() >= 2
    ordered = np.argsort(values, kind="stable")
    assert (np.diff(rho[ordered]) <= 1e-9 * rho.sum()).all()


def best_response_dynamics(played, reward):
    """The naive way: users reply in turn, from an even start, until nobody moves."""
    rho = played.cost_family.break_even(played.privacy_values, reward) / (4 * played.n)
    for _ in range(200):
        before = rho.copy()
        for user in range(played.n):
            rho[user] = best_deviations(played, rho, reward=reward)[0][user]
        if np.abs(rho - before).max() <= 1e-8 * rho.sum():
            break
    return rho


@pytest.mark.parametrize("cost", ["linear", "quadratic", "exponential"])
def test_best_response_dynamics_arrives_at_the_same_point(cost, rng):
    for n in (2, 3, 5):
        played = game(rng.uniform(1, 4, n), cost)
        rho = played.equilibrium(2.0)
        np.testing.assert_allclose(best_response_dynamics(played, 2.0), rho, atol=1e-6 * rho.sum())


@pytest.mark.parametrize("cost", ["linear", "quadratic", "exponential"])
def test_a_thousand_users_with_a_dense_search(cost, rng):
    played = game(rng.uniform(1, 5, 1000), cost)
    rho = played.equilibrium(5.0)
    assert verify_equilibrium(played, rho, reward=5.0, points=2001) <= 5e-9


@pytest.mark.parametrize("cost", ["linear", "quadratic", "exponential"])
def test_what_is_no_equilibrium_is_caught(cost, rng):
    played = game(rng.uniform(1, 5, 20), cost)
    rho = played.equilibrium(2.0)
    tilted = rho.copy()
    tilted[np.argmax(rho)] *= 0.5
    assert verify_equilibrium(played, tilted, reward=2.0) > 1e-3
    assert verify_equilibrium(played, np.zeros(20), reward=2.0) == 2.0  # alone, any ρ > 0 earns everything
    alone = np.zeros(20)
    alone[3] = 0.1
    assert verify_equilibrium(played, alone, reward=2.0) > 0.1


def test_best_deviations_know_the_closed_form(rng):
    """Linear costs: β(A) = √(RA/ν) − A, or nothing."""
    played = game(rng.uniform(1, 5, 9))
    profile = rng.uniform(0, 0.3, 9)
    others = profile.sum() - profile
    expected = np.maximum(np.sqrt(2.0 * others / played.privacy_values) - others, 0)
    choice, _ = best_deviations(played, profile, reward=2.0)
    np.testing.assert_allclose(choice, expected, atol=1e-6)


@given(values=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8), scale=st.sampled_from([1e-3, 7.0, 1e4]))
def test_units_do_not_matter(values, scale):
    """Reward and values in another currency: the same ρ."""
    values = np.array(values)
    one, two = game(values).equilibrium(2.0), game(values * scale).equilibrium(2.0 * scale)
    np.testing.assert_allclose(two, one, rtol=1e-9, atol=1e-12)


def test_equal_users_share_equally():
    for cost in families():
        outcome = game(np.full(7, 2.0), cost).outcome(3.0)
        np.testing.assert_allclose(outcome.payments, 3.0 / 7)


def test_no_reward_no_privacy():
    for cost in families():
        outcome = game([1.0, 2.0, 3.0], cost).outcome(0.0)
        assert not outcome.participants.any()
        np.testing.assert_array_equal(outcome.utilities, 0)
        assert outcome.server_utility == 10.0


def test_a_million_users(rng):
    values = rng.uniform(1, 5, 1_000_000)
    outcome = game(values).outcome(10.0)
    assert outcome.payments.sum() == pytest.approx(10.0)
    assert 100 < outcome.participants.sum() < 10_000
    others = outcome.rho.sum() - outcome.rho
    replies = np.maximum(np.sqrt(10.0 * others / values) - others, 0.0)  # equation 15
    np.testing.assert_allclose(replies, outcome.rho, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"privacy_values": [1.0]}, "privacy_values"),
        ({"privacy_values": [[1.0, 2.0]]}, "privacy_values"),
        ({"privacy_values": [1.0, 0.0]}, "privacy_values"),
        ({"privacy_values": [1.0, -2.0]}, "privacy_values"),
        ({"privacy_values": [1.0, np.nan]}, "privacy_values"),
        ({"records": 0}, "records"),
        ({"dimension": 0}, "dimension"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"rounds": 0}, "rounds"),
        ({"weight": 0.0}, "weight"),
        ({"clip": -1.0}, "clip"),
        ({"noise_account": "none"}, "noise_account"),
    ],
)
def test_bad_games(changes, field):
    with pytest.raises(InvalidInput) as error:
        Stackelberg(**{"privacy_values": [1.0, 2.0], **TRAINING, **changes})
    assert error.value.field == field


def test_bad_calls():
    with pytest.raises(UnknownName, match="quadratic"):
        game([1.0, 2.0], "quadratik")
    for reward in (-1.0, np.nan, np.inf):
        with pytest.raises(InvalidInput, match="reward"):
            game([1.0, 2.0]).equilibrium(reward)
    with pytest.raises(InvalidInput, match="rho"):
        verify_equilibrium(game([1.0, 2.0]), [1.0], reward=1.0)


def test_erratum_stack_algorithm_2_admits_a_user_who_offers_nothing():
    """ν = (1, 1, 2): 2 ≤ (2 + 1 + 1)/2 admits the third at ρ = 0; with her in S the printed utility is λ/2 − R."""
    values = np.array([1.0, 1.0, 2.0])
    assert values[2] <= (values[2] + values[:2].sum()) / 2
    total = values.sum()
    printed = 2 / total * (1 - 2 * values / total)
    assert printed[2] == 0
    shares, _ = linear_shares(values)
    assert (shares > 0).tolist() == [True, True, False]
    with np.errstate(divide="ignore"):
        collapsed = np.exp(-np.mean(np.log1p(1 / (100 * printed))))
    assert collapsed == 0
    assert game(values).server_utility(1.0) > 10.0 + 5.0


def test_erratum_stack_the_printed_exponential_cost_leaves_no_equilibrium():
    """e^{νρ} costs 1 at ρ → 0. Two users of ν = 1 and R = 1.5: somebody wants to leave every profile on a grid."""
    grid = np.append(0.0, np.logspace(-6, 0.5, 120))
    reward = 1.5
    a, b = np.meshgrid(grid, grid, indexing="ij")
    total = a + b
    paid = np.divide(a * reward, total, out=np.zeros(total.shape), where=total > 0)
    first = np.where(a > 0, paid - np.exp(a), 0.0)  # utility of the row player; the game is symmetric
    gain = np.maximum(first.max(axis=0, keepdims=True) - first, (first.max(axis=0, keepdims=True) - first).T)
    # one user alone wants ever less; that gain shrinks with the grid's first step but is never 0
    inside = gain[:, 2:][2:, :]
    assert inside.min() > 1e-3
    assert gain.min() > 0


@pytest.mark.parametrize("cost", ["linear", "quadratic", pytest.param("exponential", marks=pytest.mark.slow)])
def test_a_million_users_by_sampled_deviations(cost, rng):
    """Utilities from their definition at 300 deviations of 500 users: any, those who sell most, and the marginal."""
    n, reward = 1_000_000, 50.0
    values = rng.uniform(1, 5, n)
    played = game(values, cost)
    rho = played.equilibrium(reward)
    inside, total = np.flatnonzero(rho > 0), rho.sum()
    assert inside.size >= 2
    out = np.flatnonzero(rho == 0)
    marginal = np.concatenate([inside[np.argsort(values[inside])[-50:]], out[np.argsort(values[out])[:50]]])
    users = np.unique(np.concatenate([rng.integers(0, n, 300), inside[np.argsort(-rho[inside])[:100]], marginal]))
    spend = {
        "linear": lambda v, r: v * r,
        "quadratic": lambda v, r: v * r * r,
        "exponential": lambda v, r: np.expm1(v * r),
    }
    own, value = rho[users][:, None], values[users][:, None]
    # where a deviation may pay: around her own, around what others do on average, and up to what costs the reward
    most = {"linear": reward / value, "quadratic": np.sqrt(reward / value), "exponential": np.log1p(reward) / value}[
        cost
    ]
    factors = np.linspace(0.0, 1.0, 150)
    tried = np.concatenate(
        [most * factors**4, own * (0.5 + factors[::2]), 3 * total / n * factors[::2] + 0 * own], axis=1
    )

    def utility(r):
        return r * reward / (total - own + r) - spend[cost](value, r)

    assert (utility(tried).max(axis=1) - utility(own)[:, 0]).max() <= 1e-9 * reward
    assert utility(own).min() >= -1e-12 * reward
    # and a profile that is no equilibrium does not pass: everybody sells a tenth more
    more = 1.1 * own
    assert (utility(tried).max(axis=1) - utility(more)[:, 0]).max() > 1e-9 * reward
