"""How time grows with size, plotted: `python -m benchmarks.growth`. Writes out/growth-owners and out/growth-batch.

Processor seconds of one thread for one auction of n owners, for a batch of auctions of ten owners, and for the weights
of opt-aggr; a straight line of slope 1 on these axes is proportional growth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.bench_auctions import plain_m1
from benchmarks.scale import draw_bids
from flmarket import BidProfile, aggregation, auctions
from flmarket.report import Curve, CurveSet, write_curves

OWNERS = (100, 1_000, 10_000, 100_000, 1_000_000)
BATCHES = (1, 100, 10_000, 1_000_000)
NAMES = ("m1", "all-in", "m2-bf", "posted")
SLOW = {"posted": 10_000}  # largest batch: ten sequential offers an auction make it 20 times dearer than m1


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds, the better of two."""
    times = []
    for _ in range(2):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return max(min(times), 1e-7)


def by_owners() -> list[Curve]:
    """One auction of n owners, and the printed M1 as a plain loop beside it."""
    found: dict[str, list[float]] = {}
    for n in OWNERS:
        bids = draw_bids(n, np.random.default_rng(n))
        budget = 0.3 * float(bids.full_cost.sum())
        for name in NAMES:
            auction = auctions.get(name)
            found.setdefault(name, []).append(seconds(lambda a=auction, b=bids, m=budget: a.run(b, m)))
        epsilon = auctions.get("all-in").run(bids, budget).epsilon
        rule = aggregation.get("opt-aggr")
        found.setdefault("opt-aggr weights", []).append(
            seconds(lambda r=rule, e=epsilon, b=bids: r.weights(e, b.data_size))
        )
        costs, sizes = bids.full_cost.tolist(), bids.data_size.tolist()
        found.setdefault("m1 as a plain loop", []).append(
            seconds(lambda c=costs, s=sizes, m=budget: plain_m1(c, s, m))
        )  # fmt: skip
    x = tuple(float(np.log10(n)) for n in OWNERS)
    return [Curve(name, x, tuple(values)) for name, values in found.items()]


def by_batch() -> list[Curve]:
    """Batches of auctions of ten owners, in one call."""
    curves = []
    for name in NAMES:
        sizes = [size for size in BATCHES if size <= SLOW.get(name, max(BATCHES))]
        values, auction = [], auctions.get(name)
        for size in sizes:
            bids = BidProfile.sample(np.random.default_rng(0), size, 10, "flm22-iid")
            budget = 0.5 * bids.full_cost.sum(axis=-1)
            values.append(seconds(lambda a=auction, b=bids, m=budget: a.run(b, m)))
        curves.append(Curve(name, tuple(float(np.log10(size)) for size in sizes), tuple(values)))
    return curves


def main() -> None:
    """Measure and draw."""
    out = Path(os.environ.get("OUT", "out"))
    with threadpool_limits(1):
        for stem, label, curves in (
            ("growth-owners", "owners in one auction (log10)", by_owners()),
            ("growth-batch", "auctions of ten owners in one call (log10)", by_batch()),
        ):
            for curve in curves:
                print(stem, curve.label, [f"{value:.3g}" for value in curve.mean], flush=True)
            title = f"Processor seconds against {label.removesuffix(' (log10)')}"
            print(write_curves(CurveSet(title, label, "seconds, log scale", tuple(curves)), out, stem, log_y=True))


if __name__ == "__main__":
    main()
