"""One round of a market at 1,000 to 1,000,000 owners, step by step: `python -m benchmarks.scale`.

The round is real but for the network: bids are drawn, an auction clears them, every winner's price goes into escrow,
each winner computes a gradient on ten records of 122 features, clips it and adds noise, the broker weighs and adds up
the releases as they arrive, and all awards are paid. Owners' work is done in chunks, one after the other on one core;
in a deployment it is spread over the owners. Times are processor seconds of one thread, which other programs on the
machine do not lengthen. Writes out/scale.json and a plot of the growth (out/scale.svg, .png, .csv).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from flmarket import BidProfile, Valuations, aggregation, auctions, privacy
from flmarket.learning import SoftmaxRegression, fedsgd
from flmarket.ledger import AwardState, MemoryLedger, Resolution, SqlLedger, payments_to_micros, to_micros
from flmarket.ledger.journal import Award
from flmarket.report import Curve, CurveSet, write_curves

SIZES = (1_000, 10_000, 100_000, 1_000_000)
RECORDS, FEATURES, CLASSES, CHUNK = 10, 122, 5, 5_000
STEPS = ("clear", "escrow", "owners: gradient", "owners: noise", "weights", "aggregate", "settle")
AUCTIONS = ("posted", "all-in", "m1")


class Clock:
    """Processor seconds by name of the step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        """Count what is done inside under this name."""
        start = time.process_time()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.process_time() - start


def draw_bids(owners: int, rng: np.random.Generator) -> BidProfile:
    """FL-Market's valuations and privacy budgets; sizes log-normal, at least ten records."""
    valuations = Valuations(rng.integers(0, 4, owners), rng.uniform(0.5, 1.5, owners))
    sizes = np.ceil(RECORDS + 100 * rng.lognormal(0.0, 1.0, owners))
    return BidProfile(valuations, rng.uniform(0.5, 2.0, owners), sizes)


def one_round(owners: int, auction_name: str, *, train: bool = True) -> dict[str, float]:
    """Seconds per step, the number of winners and the peak memory so far."""
    rng, clock = np.random.default_rng(0), Clock()
    bids = draw_bids(owners, rng)
    budget = to_micros("budget", 0.3 * float(bids.full_cost.sum()))
    auction = auctions.get(auction_name)
    with clock("clear"):
        outcome = auction.run(bids, budget / 1e6, rng=rng)
        price = payments_to_micros(outcome.payment, budget)
    winners = np.flatnonzero(outcome.winners)
    found: dict[str, float] = {"owners": owners, "winners": len(winners)}
    if train:
        _rest_of_the_round(clock, bids, outcome.epsilon, price, winners, budget, rng)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB; Linux counts in KiB
    return found | clock.seconds | {"peak_gib_so_far": peak}


def _rest_of_the_round(
    clock: Clock,
    bids: BidProfile,
    epsilon: np.ndarray,
    price: np.ndarray,
    winners: np.ndarray,
    budget: int,
    rng: np.random.Generator,
) -> None:
    ledger = MemoryLedger()
    ledger.deposit("budget", "buyer", budget)
    with clock("escrow"):
        ledger.hold_many(
            Award(f"task/0/{i}", 0, "buyer", f"owner-{i}", float(epsilon[i]), int(price[i])) for i in winners.tolist()
        )
    model = SoftmaxRegression(FEATURES, CLASSES)
    noise = privacy.get(privacy.recommend(model.dimension, 1.0).name)
    rule = aggregation.get("opt-aggr", dimension=model.dimension, perturbation=noise)
    with clock("weights"):
        weights = rule.weights(epsilon, bids.data_size)
    # every chunk sees the same records: what is timed is arithmetic, not drawing test data
    x, y = rng.normal(size=(CHUNK * RECORDS, FEATURES)), rng.integers(0, CLASSES, CHUNK * RECORDS)
    parameters, total = model.initial(), np.zeros(model.dimension)
    for start in range(0, len(winners), CHUNK):
        some = winners[start : start + CHUNK]
        records = slice(0, len(some) * RECORDS)
        with clock("owners: gradient"):
            gradients = fedsgd(model, parameters, x[records], y[records], np.arange(len(some) + 1) * RECORDS)
        with clock("owners: noise"):
            releases = noise.privatize(gradients, epsilon[some], rng)
        with clock("aggregate"):
            total += weights[some] @ releases
    assert np.isfinite(total).all()
    with clock("settle"):
        ledger.resolve_many(Resolution(f"task/0/{i}", AwardState.POSTED) for i in winners.tolist())
    assert ledger.balance("escrow") == 0
    assert sum(ledger.balances().values()) == 0


def durable(awards: int, folder: Path) -> dict[str, float]:
    """Seconds (of the clock: the disk counts) and bytes for a durable round of so many awards in SQLite."""
    path = folder / "scale.db"
    with SqlLedger(f"sqlite:///{path}") as ledger:
        ledger.deposit("budget", "buyer", 2 * awards)
        start = time.perf_counter()
        ledger.hold_many(Award(f"task/0/{i}", 0, "buyer", f"owner-{i}", 1.0, 1) for i in range(awards))
        held = time.perf_counter()
        ledger.resolve_many(Resolution(f"task/0/{i}", AwardState.POSTED) for i in range(awards))
        settled = time.perf_counter()
    used = sum(part.stat().st_size for part in folder.glob("scale.db*"))
    return {"awards": awards, "escrow": held - start, "settle": settled - held, "bytes": used}


def main() -> None:
    """Sizes given on the command line replace the default ones."""
    sizes = tuple(int(size) for size in sys.argv[1:]) or SIZES
    out = Path(os.environ.get("OUT", "out"))
    with threadpool_limits(1):
        rounds = [one_round(owners, "posted") for owners in sizes]
        clearing = {name: [one_round(n, name, train=False)["clear"] for n in sizes] for name in AUCTIONS[1:]}
    with tempfile.TemporaryDirectory() as folder:
        kept = durable(min(max(sizes), 100_000), Path(folder))
    print({key: round(value, 3) for key, value in kept.items()})
    for found in rounds:
        print({key: round(value, 3) for key, value in found.items()}, flush=True)
    print({name: [round(value, 3) for value in values] for name, values in clearing.items()})
    out.mkdir(parents=True, exist_ok=True)
    (out / "scale.json").write_text(json.dumps({"rounds": rounds, "clearing": clearing, "durable": kept}, indent=1))
    x = tuple(float(np.log10(size)) for size in sizes)
    curves = [Curve(step, x, tuple(max(found.get(step, 0.0), 1e-6) for found in rounds)) for step in STEPS]
    title = "Processor seconds of one round, one core, by step"
    print(
        write_curves(CurveSet(title, "owners (log10)", "seconds, log scale", tuple(curves)), out, "scale", log_y=True)
    )


if __name__ == "__main__":
    main()
