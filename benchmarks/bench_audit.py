"""Looking for lies: a batch of misreports in one call of the mechanism, against one call for each misreport.

The peer tries the same kind of lies (her value scaled, all others fixed) one by one, as one would write it first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, best_of
from flmarket import BidProfile, auctions
from flmarket.audit import audit

PROFILES, PEER_PROFILES, FACTORS = 40, 2, np.geomspace(0.1, 10.0, 20)


def plain_search(name: str, bids: BidProfile, budget: np.ndarray) -> int:
    """Every owner of every profile tries every factor; returns how many misreports that were."""
    auction, tried = auctions.get(name), 0
    for row in range(len(budget)):
        profile, money = bids[row], float(budget[row])
        honest = profile.utility(auction.run(profile, money))
        for owner in range(profile.n):
            for factor in FACTORS.tolist():
                scale = np.ones(profile.n)
                scale[owner] = factor
                told = BidProfile(profile.valuations.scaled(scale), profile.privacy_budget, profile.data_size)
                _ = profile.utility(auction.run(told, money))[owner] - honest[owner]
                tried += 1
    return tried


def run() -> Iterator[Row]:
    """Time per misreport, for a mechanism that is cheap to run and for one that is not."""
    bids = BidProfile.sample(np.random.default_rng(0), PEER_PROFILES, 10, "flm22-iid")
    budget = 0.5 * bids.full_cost.sum(axis=-1)
    for name in ("m1", "posted"):
        report = audit(name, profiles=PROFILES, seed=0)
        search = report.truthful.search
        misreports = search.misreports_per_owner * search.owners_per_profile * search.profiles
        ours = best_of(lambda name=name: audit(name, profiles=PROFILES, seed=0), 1) / misreports
        tried = plain_search(name, bids, budget)
        peer = best_of(lambda name=name: plain_search(name, bids, budget), 1) / tried
        yield Row(f"audit of {name}, everything included", "misreport", ours, "one call per misreport", peer)
