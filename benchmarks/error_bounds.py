"""The table of docs/posted.md: mean error bound per auction and population. `python -m benchmarks.error_bounds`."""

from __future__ import annotations

import numpy as np

from flmarket import aggregation, auctions, populations
from flmarket.aggregation import error_bound

POPULATIONS = ("flm22-iid", "flm22-niid", "flm21-low", "flm21-high")
AUCTIONS = (
    "posted", "posted:flm22-iid", "posted:flm22-niid", "posted:flm21-low", "posted:flm21-high", "posted:linear",
    "all-in", "all-in-capped", "m1",
)  # fmt: skip


def mean_bound(auction: str, population: str, profiles: int = 5000, seed: int = 7) -> tuple[float, float, float]:
    """Mean, standard error and share of auctions in which nobody sold; budget factor uniform in (0.1, 2)."""
    rng = np.random.default_rng(seed)
    bids = populations.get(population).sample(rng, profiles, 10)
    budget = rng.uniform(0.1, 2.0, profiles) * bids.full_cost.sum(axis=-1)
    epsilon = auctions.get(auction).run(bids, budget).epsilon
    bound = error_bound(aggregation.get("opt-aggr").weights(epsilon, bids.data_size), epsilon, bids.data_size)
    sold = bound[np.isfinite(bound)]
    return float(sold.mean()), float(sold.std() / np.sqrt(sold.size)), 1 - sold.size / profiles


def main() -> None:
    """Print the table in Markdown."""
    print(f"| auction | {' | '.join(POPULATIONS)} |\n| --- |{' --: |' * len(POPULATIONS)}")
    for name in AUCTIONS:
        cells = (mean_bound(name, population) for population in POPULATIONS)
        row = (f"{mean:.3f} ± {se:.3f}" + (f" ({empty:.1%} empty)" if empty > 0 else "") for mean, se, empty in cells)
        print(f"| `{name}` | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
