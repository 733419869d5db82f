"""The server's reward: formula, derivative, optimum, corner, and the paper's trends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flmarket.errors import InvalidInput
from flmarket.experiments.stack import PAPER_SETTINGS, against_users, against_value_range
from flmarket.games import Stackelberg, linear_gradient, noise_multiplier, noise_scale

ACCOUNTS = ["printed", "averaged", "pooled"]


def game(values, **changes):
    return Stackelberg(values, **{**PAPER_SETTINGS, **changes})


def printed_utility(values, reward, weight=20.0, kappa=100.0):
    """Equations 17 and 18 with Algorithm 2's S, written out."""
    ordered = np.sort(values)
    size = max(k for k in range(2, len(values) + 1) if (k - 1) * ordered[k - 1] < ordered[:k].sum())
    chosen, total = ordered[:size], ordered[:size].sum()
    x = kappa * (size - 1) / total * (1 - (size - 1) * chosen / total)
    return weight / 2 * (1 + np.exp(-np.mean(np.log(1 + 1 / (x * reward))))) - reward


@given(values=st.lists(st.floats(0.1, 20.0), min_size=2, max_size=15), reward=st.floats(1e-3, 50.0))
def test_the_utility_is_the_printed_one(values, reward):
    assert game(values).server_utility(reward) == pytest.approx(printed_utility(np.array(values), reward), rel=1e-9)


def test_rewards_broadcast(rng):
    played = game(rng.uniform(1, 5, 10))
    rewards = np.array([[0.0, 1.0], [2.0, 3.0]])
    values = played.server_utility(rewards)
    assert values.shape == (2, 2)
    assert values[1, 0] == played.server_utility(2.0)
    assert values[0, 0] == 10.0


@pytest.mark.parametrize("account", ACCOUNTS)
@settings(max_examples=40)
@given(values=st.lists(st.floats(0.1, 20.0), min_size=2, max_size=15), reward=st.floats(1e-2, 20.0))
def test_derivative_and_concavity(account, values, reward):
    played = game(values, noise_account=account)
    step = 1e-4 * reward
    low, middle, high = (float(played.server_utility(reward + shift)) for shift in (-step, 0.0, step))
    slope, further = (linear_gradient(played._scaled, played.weight, at) for at in (reward, reward * 1.01))
    assert slope == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-5)
    assert further < slope
    assert middle >= (low + high) / 2 - 1e-12


@pytest.mark.parametrize("cost", ["linear", "quadratic", "exponential"])
@pytest.mark.parametrize("account", ACCOUNTS)
def test_the_optimum_beats_a_dense_grid(cost, account, rng):
    for n in (2, 7, 60):
        played = game(rng.uniform(1, 5, n), cost=cost, noise_account=account)
        best = played.optimal_reward()
        grid = np.linspace(0.0, 10.0, 2001)
        values = played.server_utility(grid)
        assert float(played.server_utility(best)) >= values.max() - 1e-12
        assert abs(best - grid[values.argmax()]) <= 0.005 + 1e-9


def test_the_optimum_solves_the_first_order_condition(rng):
    played = game(rng.uniform(1, 5, 100))
    assert linear_gradient(played._scaled, played.weight, played.optimal_reward()) == pytest.approx(0.0, abs=1e-9)
    assert played.outcome().reward == played.optimal_reward()


def test_averaged_optimum_in_closed_form():
    """Two users of ν = 1: each has X = κ/4 = 25, her noise arrives halved, so |S|²X = 100 for both."""
    assert game([1.0, 1.0], noise_account="averaged").optimal_reward() == pytest.approx((1000**0.5 - 1) / 100)


def test_pooled_optimum_in_closed_form():
    """One X: R* = (√(λX/2) − 1)/X. Two users of ν = 1: X = κ/2 = 50."""
    assert game([1.0, 1.0], noise_account="pooled").optimal_reward() == pytest.approx((500**0.5 - 1) / 50)


@pytest.mark.parametrize("cost", ["linear", "exponential"])
def test_buying_nothing_can_be_best(cost):
    """E6: where privacy is dear, U falls from λ/2 at once; R* = 0 and not the printed interior point."""
    played = game([1000.0, 2000.0], cost=cost)
    assert played.optimal_reward() == 0.0
    outcome = played.outcome()
    assert outcome.server_utility == 10.0
    assert not outcome.participants.any()
    assert np.all(played.server_utility(np.linspace(0.01, 20, 50)) < 10.0)


def test_the_corner_is_where_the_derivative_at_zero_vanishes():
    """Equal users: geometric mean of X = κ/(4ν) for two, so the corner is at ν = λκ/8 = 250."""
    assert game([249.0, 249.0]).optimal_reward() > 0
    assert game([251.0, 251.0]).optimal_reward() == 0.0


def test_a_tighter_clip_is_worth_as_much_as_less_noise():
    one, two = game([1.0, 2.0], clip=0.5), game([1.0, 2.0], records=2000)
    assert one.server_utility(1.0) == pytest.approx(two.server_utility(1.0))


@pytest.mark.parametrize("account", ACCOUNTS)
def test_participants_and_users_follow_figures_2_and_4(account):
    users = against_users([100, 250, 500, 1000], draws=20, noise_account=account)
    assert (np.diff(users.participants) > 0).all()
    assert (np.diff(users.user_utility) < 0).all()
    assert (np.diff(users.user_deviation) < 0).all()
    values = against_value_range([2, 4, 7, 10], draws=20, noise_account=account)
    assert (np.diff(values.participants) < 0).all()
    assert (np.diff(values.user_utility) > 0).all()
    assert (np.diff(values.user_deviation) > 0).all()
    assert users.axis == "users"
    assert values.x.tolist() == [2, 4, 7, 10]


@pytest.mark.parametrize(("account", "draws"), [("pooled", 20), ("averaged", 200)])
def test_the_server_follows_figure_3_if_noise_is_averaged(account, draws):
    users = against_users([100, 400, 1000], draws=draws, noise_account=account)
    assert (np.diff(users.server_utility) > 0).all()
    assert (np.diff(np.diff(users.server_utility) / np.diff(users.x)) < 0).all()  # diminishing
    values = against_value_range([2, 6, 10], draws=draws, noise_account=account)
    assert (np.diff(values.server_utility) < 0).all()


def test_erratum_stack_figure_3_does_not_follow_from_equation_17():
    """n users of ν = 1: X = κ(n − 1)/n² falls in n, so at every R the printed utility falls as users join."""
    sizes = [2, 3, 5, 20, 100]
    at_fixed_reward = [float(game(np.ones(n)).server_utility(1.0)) for n in sizes]
    at_best_reward = [game(np.ones(n)).outcome().server_utility for n in sizes]
    assert (np.diff(at_fixed_reward) < 0).all()
    assert (np.diff(at_best_reward) < 0).all()
    # and so it is in the paper's own setting, where the figure shows it rising in n and falling in ν_max
    users = against_users([100, 1000], draws=40)
    assert users.server_utility[1] < users.server_utility[0] - 0.5
    values = against_value_range([2, 10], draws=40)
    assert values.server_utility[1] > values.server_utility[0] + 0.5
    pooled = [game(np.ones(n), noise_account="pooled").outcome().server_utility for n in sizes]
    assert (np.diff(pooled) > 0).all()


def test_noise_for_a_budget():
    """L = 1, m = 1000, T = 500, ρ = 0.1: σ = 10⁻³·√10⁴ = 0.1."""
    assert float(noise_scale(0.1, rounds=500, records=1000)) == pytest.approx(0.1)
    rho = np.array([0.0, 0.01, 2.0])
    sigma = noise_scale(rho, rounds=500, records=[10, 100, 1000], clip=2.0)
    assert sigma[0] == np.inf
    moved = 2 * 2.0 / np.array([100, 1000])  # by one record, the mean of m gradients of at most 2
    np.testing.assert_allclose(500 * moved**2 / (2 * sigma[1:] ** 2), rho[1:])
    # per round: Gaussian of multiplier z costs 1/(2z²)
    np.testing.assert_allclose(500 / (2 * noise_multiplier(rho[1:], rounds=500) ** 2), rho[1:])
    np.testing.assert_allclose(game([1.0, 2.0]).noise_scale([0.1, 0.0]), [0.1, np.inf])


def test_the_noise_agrees_with_the_privacy_package():
    from flmarket.privacy import GaussianRelease, ZCdp
    from flmarket.privacy.composition import zcdp_rho

    z = float(noise_multiplier(0.3, rounds=500))
    assert 500 * zcdp_rho(GaussianRelease(z)) == pytest.approx(zcdp_rho(ZCdp(0.3)))


@pytest.mark.parametrize("call", [{"rho": -0.1}, {"rounds": 0}, {"records": 0}, {"clip": 0.0}])
def test_bad_noise(call):
    with pytest.raises(InvalidInput):
        noise_scale(**{"rho": 0.1, "rounds": 10, "records": 10, **call})
