"""Independent oracles: the printed algorithms written as plainly as possible, and critical bids by bisection."""

import itertools

import numpy as np
import pytest

from flmarket import STEP, BidProfile, Valuations, auctions


def capped_oracle(cost, weight, budget):
    """M1 as printed: try every prefix size, largest first."""
    order = sorted(range(len(cost)), key=lambda i: (cost[i] / weight[i], i))
    for m in range(len(cost), 0, -1):
        total = sum(weight[i] for i in order[:m])
        if cost[order[m - 1]] / weight[order[m - 1]] <= budget / total:
            price = budget / total
            if m < len(cost):
                price = min(price, cost[order[m]] / weight[order[m]])
            return {i: weight[i] * price for i in order[:m]}
    return {}


def all_in_oracle(cost, weight, budget):
    """All-in as printed: go through everybody, taking whoever the unit payment covers."""
    winners, price = [], 0.0
    for i in sorted(range(len(cost)), key=lambda i: (cost[i] / weight[i], i)):
        share = budget / sum(weight[j] for j in [*winners, i])
        if cost[i] / weight[i] <= share:
            winners, price = [*winners, i], share
    return {i: weight[i] * price for i in winners}


def m2_winners(cost, size, budget):
    order = sorted(range(len(cost)), key=lambda i: (cost[i] / size[i], i))
    greedy, paid = [], 0.0
    for i in order:
        if paid + cost[i] > budget:
            break
        greedy.append(i)
        paid += cost[i]
    affordable = [i for i in range(len(cost)) if cost[i] <= budget]
    if not affordable:
        return set()
    largest = max(affordable, key=lambda i: (size[i], -i))
    return set(greedy) if sum(size[i] for i in greedy) >= size[largest] else {largest}


def random_cases(rng, count):
    for case in range(count):
        n = int(rng.integers(1, 9))
        if case % 3 == 0:  # small whole numbers: many ties
            cost, size = rng.integers(1, 6, n).astype(float), rng.integers(1, 5, n).astype(float)
            budget = float(rng.integers(0, 20))
        else:
            cost, size = rng.uniform(1, 1000, n), rng.integers(1, 1000, n).astype(float)
            budget = rng.uniform(0.02, 1.3) * cost.sum()
        yield (cost / size) * size, size, budget  # as BidProfile recomputes it, to the last digit


@pytest.mark.parametrize(
    ("name", "weight", "capped"),
    [
        ("m1", "size", True),
        ("all-in", "privacy", False),
        ("all-in-capped", "privacy", True),
        ("fairquery", "one", True),
    ],
)
def test_proportional_share(name, weight, capped, rng):
    for cost, size, budget in random_cases(rng, 600):
        privacy = rng.uniform(0.5, 2.0, cost.size) if weight == "privacy" else np.ones(cost.size)
        bids = BidProfile(Valuations(STEP, cost / size), privacy, size)
        weights = {"size": size, "privacy": size * privacy, "one": np.ones(cost.size)}[weight]
        expected = (capped_oracle if capped else all_in_oracle)(cost, weights, budget)
        outcome = auctions.get(name).run(bids, budget)
        assert set(np.flatnonzero(outcome.winners)) == set(expected)
        for i, pay in expected.items():
            assert outcome.payment[i] == pytest.approx(pay, rel=1e-12)


def test_m2_winners_and_critical_bids(rng):
    for cost, size, budget in random_cases(rng, 900):
        outcome = auctions.get("m2").run(BidProfile(Valuations(STEP, cost / size), 1.0, size), budget)
        winners = m2_winners(cost, size, budget)
        assert set(np.flatnonzero(outcome.winners)) == winners
        for i in winners:
            low, high = cost[i], budget + 1.0
            for _ in range(60):
                middle = (low + high) / 2
                trial = cost.copy()
                trial[i] = middle
                low, high = (middle, high) if i in m2_winners(trial, size, budget) else (low, middle)
            assert outcome.payment[i] == pytest.approx(low, rel=1e-9)


def printed_m2_winners(cost, size, budget):
    """Algorithm 2 to the letter: compare the greedy set with the *next* client, then output the largest."""
    order = sorted(range(len(cost)), key=lambda i: (cost[i] / size[i], i))
    greedy, paid = [], 0.0
    for i in order:
        if paid + cost[i] > budget:
            break
        greedy.append(i)
        paid += cost[i]
    rest = order[len(greedy) :]
    if not rest or sum(size[i] for i in greedy) >= size[rest[0]]:
        return set(greedy)
    return {int(np.argmax(size))}


def test_erratum_e11_the_printed_m2_is_not_monotone():
    """Bidding less can turn a winner into a loser, so no payment makes the printed rule truthful."""
    size, budget = [3.0, 1.0, 1.0, 9.0], 3.0
    # unit costs .33, .9, 2, 3: greedy takes owners 0 and 1 (1.9); owner 2 does not fit and has less: both win
    assert 1 in printed_m2_winners([1.0, 0.9, 2.0, 27.0], size, budget)
    # owner 1 lowers her bid to 0: owner 2 now fits, the next is owner 3 with 9 > 5 records, who takes it all
    assert 1 not in printed_m2_winners([1.0, 0.0, 2.0, 27.0], size, budget)
    # the rule we ship compares with the largest affordable owner and keeps her
    assert 1 in m2_winners([1.0, 0.0, 2.0, 27.0], size, budget)


def fractional_value(cost, size, budget):
    """The best fractional purchase, one owner after the other."""
    value = 0.0
    for c, d in sorted(zip(cost, size, strict=True), key=lambda one: one[0] / one[1]):
        if c > budget:
            return value + d * budget / c
        value, budget = value + d, budget - c
    return value


def m2_bf_winners(cost, size, budget):
    """Chen, Gravin and Lu's deterministic knapsack mechanism, in plain words."""
    affordable = [i for i in range(len(cost)) if cost[i] <= budget]
    if not affordable:
        return set()
    star = max(affordable, key=lambda i: (size[i], -i))
    others = [i for i in affordable if i != star]
    fractional = fractional_value([cost[i] for i in others], [size[i] for i in others], budget)
    if (1 + 2**0.5) * size[star] >= fractional:
        return {star}
    winners, total = set(), 0.0
    for i in sorted(affordable, key=lambda i: (cost[i] / size[i], i)):
        if cost[i] / size[i] > budget / (total + size[i]):
            break
        winners.add(i)
        total += size[i]
    return winners


def most_records(cost, size, budget):
    """The integral optimum by trying all subsets."""
    return max(
        sum(size[i] for i in subset)
        for k in range(len(cost) + 1)
        for subset in itertools.combinations(range(len(cost)), k)
        if sum(cost[i] for i in subset) <= budget
    )


def test_m2_bf_winners_critical_bids_and_approximation(rng):
    both_cases = {"alone": 0, "many": 0}
    for cost, size, budget in random_cases(rng, 700):
        if rng.random() < 0.5:  # even sizes, so that the largest owner rarely dominates
            size = rng.uniform(50, 60, cost.size)
            cost = (cost / size) * size
        outcome = auctions.get("m2-bf").run(BidProfile(Valuations(STEP, cost / size), 1.0, size), budget)
        winners = m2_bf_winners(cost, size, budget)
        assert set(np.flatnonzero(outcome.winners)) == winners
        assert outcome.spent <= budget * (1 + 1e-12)
        if winners:
            both_cases["alone" if len(winners) == 1 else "many"] += 1
            assert size[list(winners)].sum() * (2 + 2**0.5) >= most_records(cost, size, budget) * (1 - 1e-12)
        for i in winners:
            low, high = cost[i], budget + 1.0
            for _ in range(50):
                middle = (low + high) / 2
                trial = cost.copy()
                trial[i] = middle
                low, high = (middle, high) if i in m2_bf_winners(trial, size, budget) else (low, middle)
            assert outcome.payment[i] == pytest.approx(low, rel=1e-9)
    assert min(both_cases.values()) > 50
