"""The second best against a cone solver: the inner problem, and the programme over all truthful mechanisms."""

import itertools

import cvxpy as cp
import numpy as np
import pytest

from flmarket import EXACT, BidProfile, Valuations, auctions
from flmarket.audit.yardsticks import (
    Envelope,
    bayesian_bound,
    best_price,
    first_best,
    least,
    optimal_bound,
    second_best,
)
from flmarket.bids import Kind
from flmarket.errors import InvalidInput
from flmarket.sampling.distributions import Discrete, Uniform

QUADRATIC = int(Kind.QUADRATIC)


def err(weight, s, share):
    noise = sum(8 * cp.quad_over_lin(w, x) for w, x in zip(weight, s, strict=True))
    return noise + cp.square(cp.norm1(weight - share))


def profile(rng, n, kinds=(0, 1, 2, 3)):
    return BidProfile(
        Valuations(rng.choice(kinds, n), rng.uniform(0.5, 1.5, n)), rng.uniform(0.5, 3, n), rng.uniform(1, 9, n)
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_inner_problem_is_solved_where_it_is_convex(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    bids = profile(rng, n, [QUADRATIC])
    price, rate, share = np.exp(rng.normal() * 2 - 4), rng.uniform(0.5, 1.5, n), bids.data_size / bids.data_size.sum()
    found = least(Envelope.of(bids[None]), rate[None, None], np.array([price]))
    s, weight = cp.Variable(n), cp.Variable(n)
    paid = cp.sum(cp.multiply(rate * bids.data_size, s))
    limits = [s >= 0, s <= bids.privacy_budget**2, weight >= 0, cp.sum(weight) == 1]
    problem = cp.Problem(cp.Minimize(err(weight, s, share) + price * paid), limits)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10)
    assert found.item() == pytest.approx(problem.value, rel=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_the_inner_problem_is_never_above_what_any_purchase_costs(seed):
    rng = np.random.default_rng(seed)
    bids = profile(rng, 4)
    rate, price = rng.uniform(0.5, 1.5, 4), np.exp(rng.normal() * 2 - 4)
    found = least(Envelope.of(bids[None]), rate[None, None], np.array([price])).item()
    levels = np.array(list(itertools.product(np.linspace(0, 1, 13), repeat=4)))[1:] * bids.privacy_budget
    mine = BidProfile(Valuations(bids.valuations.kind, rate), bids.privacy_budget, bids.data_size)
    bought = optimal_bound(levels, np.broadcast_to(bids.data_size, levels.shape))
    assert found <= (bought + price * mine.cost(levels).sum(axis=-1)).min() * (1 + 1e-9)


def truthful_optimum(support, chance, cap, size, budget):
    """All Bayesian truthful, rational mechanisms of two owners with costs α·d·s, by a cone programme."""
    k, share = len(support), size / size.sum()
    profiles = list(itertools.product(range(k), repeat=2))
    likely = np.array([chance[i] * chance[j] for i, j in profiles])
    s, weight, paid = cp.Variable((k * k, 2)), cp.Variable((k * k, 2)), cp.Variable((k, 2))
    sold = [
        [sum(chance[o] * s[t * k + o if i == 0 else o * k + t, i] for o in range(k)) for t in range(k)] for i in (0, 1)
    ]
    limits = [s >= 0, weight >= 0, cp.sum(weight, axis=1) == 1, *(s[:, i] <= cap[i] ** 2 for i in (0, 1))]
    for i, t in itertools.product((0, 1), range(k)):
        honest = paid[t, i] - support[t] * size[i] * sold[i][t]
        limits += [honest >= 0]
        limits += [honest >= paid[lie, i] - support[t] * size[i] * sold[i][lie] for lie in range(k) if lie != t]
    limits += [sum(chance[t] * paid[t, i] for t in range(k) for i in (0, 1)) <= budget]
    problem = cp.Problem(cp.Minimize(sum(p * err(weight[r], s[r], share) for r, p in enumerate(likely))), limits)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10)
    return problem.value, profiles, likely


@pytest.mark.parametrize(
    ("chance", "budget"),
    [((0.3, 0.4, 0.3), 1.0), ((0.3, 0.4, 0.3), 4.0), ((0.5, 0.1, 0.4), 1.5), ((0.2, 0.1, 0.7), 0.3)],
)
def test_the_bound_is_the_optimum_over_all_truthful_mechanisms(chance, budget):
    support, cap, size = np.array([0.5, 0.9, 1.5]), np.array([1.0, 1.4]), np.array([1.0, 2.0])
    optimum, profiles, likely = truthful_optimum(support, chance, cap, size, budget)
    law = Discrete(support, chance)
    virtual = law.virtual_cost(support[np.array(profiles)])[None]
    owners = Envelope.of(BidProfile(Valuations([[QUADRATIC] * 2], [[1.0] * 2]), cap[None], size[None]))
    price = best_price(owners, virtual, likely, np.array([budget]))
    bound = (least(owners, virtual, price) * likely).sum() - price[0] * budget
    assert bound == pytest.approx(optimum, rel=1e-6)
    plain = (least(owners, support[np.array(profiles)][None], price) * likely).sum() - price[0] * budget
    assert plain < 0.999 * optimum, "costs without the rent would pass for the bound"


def test_nobody_truthful_is_below_it_and_the_estimate_is_near():
    rng, law = np.random.default_rng(1), Uniform(0.5, 1.5)
    bids = BidProfile.sample(rng, 120, 10, "flm22-iid")
    public = BidProfile(Valuations(bids.valuations.kind, np.ones(bids.shape)), bids.privacy_budget, bids.data_size)
    budget = rng.uniform(0.3, 2, 120) * public.full_cost.sum(axis=-1)
    bound = bayesian_bound(bids, budget, law, rng=rng, draws=4)
    estimate = second_best(bids, budget, law)[1]
    posted = optimal_bound(auctions.get("posted").run(bids, budget).epsilon, bids.data_size)
    assert bound.mean() < estimate.mean() < posted.mean()
    truthful = [name for name in auctions.names() if auctions.get(name).guarantees.truthful == EXACT]
    kept = [name for name in truthful if auctions.get(name).guarantees.budget_feasible == EXACT]
    assert {"all-in-capped", "m1", "fairquery", "m2-bf", "posted", "posted-private"} <= set(kept)
    for name in kept:
        reached = optimal_bound(auctions.get(name).run(bids, budget).epsilon, bids.data_size)
        assert bound.mean() < reached.mean(), name  # ∞ where nobody sells
    assert (first_best(bids, budget)[1] <= estimate * (1 + 1e-6)).all()


def test_tables_have_no_rate():
    bids = BidProfile(Valuations.tabulated([[0.0, 1.0]] * 2, [[0.0, 1.0]] * 2), [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(InvalidInput, match="tabulated"):
        second_best(bids, 1.0, Uniform(0.5, 1.5))
