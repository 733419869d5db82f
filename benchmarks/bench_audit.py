"""Looking for lies: a batch of misreports in one call of the mechanism, against one call for each misreport.

The peer tries the same kind of lies (her value scaled, all others fixed) one by one, as one would write it first.
The strong rows are whole searches on 1,000 profiles of 10 owners, given for 500 lies by each; the peer's time is that
of a few hundred lies, times as many. Where owners are shown menus, one profile in 16 is searched and the others' menus
settle all lies at once. They are given in processor time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, best_of
from flmarket import BidProfile, auctions
from flmarket.audit import STRENGTHS, audit, private_fields
from flmarket.audit.trials import draw
from flmarket.audit.truthfulness import LieSearch, measure_truthfulness

STRONG_PROFILES, LIES = 1_000, 500
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
    sample = draw("flm22-iid", STRONG_PROFILES, None, (0.1, 2.0), np.random.default_rng(1))
    for name in ("m1", "all-in", "m2-bf", "posted"):
        auction, made = auctions.get(name), 0

        def search(auction: auctions.Auction = auction, name: str = name) -> None:
            nonlocal made
            hard = LieSearch(auction, name, STRENGTHS["strong"], private_fields(auction), seed=0, draws=1)
            made = measure_truthfulness(hard, sample).search.misreports_per_owner

        ours = best_of(search, 1, clock=time.process_time) * LIES / made
        tried = plain_search(name, bids, budget)
        peer = best_of(lambda name=name: plain_search(name, bids, budget), 1, clock=time.process_time) / tried
        what = f"strong search of {name}, {STRONG_PROFILES:,} profiles of {sample.bids.n} owners"
        everybody = STRONG_PROFILES * sample.bids.n * LIES
        yield Row(what, f"{LIES} lies by each", ours, "one call per misreport", peer * everybody)
