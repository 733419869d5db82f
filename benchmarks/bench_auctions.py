"""Auctions in batches and at size, against the printed algorithm as a plain Python loop per auction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, best_of
from flmarket import BidProfile, Valuations, auctions


def plain_m1(cost: list[float], size: list[float], budget: float) -> dict[int, float]:
    """M1 as one would type it from the paper."""
    order = sorted(range(len(cost)), key=lambda i: cost[i] / size[i])
    total, winners = 0.0, []
    for i in order:
        if cost[i] / size[i] > budget / (total + size[i]):
            break
        winners.append(i)
        total += size[i]
    price = budget / total if total else 0.0
    if len(winners) < len(cost):
        loser = order[len(winners)]
        price = min(price, cost[loser] / size[loser])
    return {i: price * size[i] for i in winners}


def run() -> Iterator[Row]:
    """A million auctions of ten owners in one call, and one auction of a million owners."""
    rng = np.random.default_rng(0)
    bids = BidProfile.sample(rng, 1_000_000, 10, "jdp")
    budget = bids.full_cost.sum(-1) * rng.uniform(0.1, 2.0, 1_000_000)
    costs, sizes = bids.full_cost[:20_000].tolist(), bids.data_size[:20_000].tolist()
    some = list(zip(costs, sizes, budget[:20_000].tolist(), strict=True))
    peer = best_of(lambda: [plain_m1(*one) for one in some]) / len(some)
    for name in ("m1", "all-in", "fairquery", "m2"):
        ours = best_of(lambda name=name: auctions.get(name).run(bids, budget), 1) / 1_000_000
        known = ("plain Python M1", peer) if name == "m1" else ("none (see m1)", None)
        yield Row(f"{name}, a million auctions of 10", "auction", ours, *known)
    n = 1_000_000
    large = BidProfile(
        Valuations(rng.integers(0, 4, n), rng.uniform(0.5, 1.5, n)), rng.uniform(0.5, 2, n), rng.integers(1, 1000, n)
    )
    total = float(large.full_cost.sum()) * 0.3
    cost, size = large.full_cost.tolist(), large.data_size.tolist()
    peer = best_of(lambda: plain_m1(cost, size, total), 1)
    for name in ("m1", "all-in", "m2"):
        ours = best_of(lambda name=name: auctions.get(name).run(large, total), 1)
        known = ("plain Python M1", peer) if name == "m1" else ("none (see m1)", None)
        yield Row(f"{name}, one auction of a million", "auction", ours, *known)
    yield from run_posted(rng)


def run_posted(rng: np.random.Generator) -> Iterator[Row]:
    """posted: a batch, a single round of ten owners, and one auction of 100,000."""
    auction = auctions.get("posted")
    bids = BidProfile.sample(rng, 10_000, 10, "flm22-iid")
    budget = 0.5 * bids.full_cost.sum(-1)
    ours = best_of(lambda: auction.run(bids, budget)) / 10_000
    yield Row("posted, 10,000 auctions of 10", "auction", ours, "none (see m1)", None)
    rounds = [(bids[i], budget[i]) for i in range(100)]
    ours = best_of(lambda: [auction.run(*one) for one in rounds]) / 100
    yield Row("posted, one auction of 10 at a time", "auction", ours, "none (see m1)", None)
    n = 100_000
    valuations = Valuations(rng.integers(0, 4, n), rng.uniform(0.5, 1.5, n))
    large = BidProfile(valuations, rng.uniform(0.5, 2, n), rng.integers(1, 1000, n))
    total = 0.5 * float(large.full_cost.sum())
    ours = best_of(lambda: auction.run(large, total), 2)
    yield Row("posted, one auction of 100,000", "auction", ours, "none (see m1)", None)
