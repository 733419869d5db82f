"""The table of docs/posted.md: mean error bound per auction and population. `python -m benchmarks.error_bounds`."""

from __future__ import annotations

import numpy as np

from flmarket import aggregation, auctions, populations
from flmarket.aggregation import error_bound

POPULATIONS = ("flm22-iid", "flm22-niid", "flm21-low", "flm21-high")
AUCTIONS = (
    "posted", "posted:flm22-iid", "posted:flm22-niid", "posted:flm21-low", "posted:flm21-high", "posted:linear",
    "cleared-menu:flm22-iid", "cleared-menu:flm22-niid", "cleared-menu:flm21-low", "cleared-menu:flm21-high",
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


def private_sizes(population: str, profiles: int = 3000, seed: int = 7, prior_size: float = 126.0) -> dict[str, float]:
    """posted-private by both readings of the bound: what was bought is all there is; or true shares and sampling."""
    rng = np.random.default_rng(seed)
    bids = populations.get(population).sample(rng, profiles, 10)
    budget = rng.uniform(0.1, 2.0, profiles) * bids.full_cost.sum(axis=-1)
    outcome = auctions.get("posted-private", prior_size=prior_size).run(bids, budget)
    assert outcome.records is not None
    epsilon, sold = outcome.epsilon, outcome.records
    weights = aggregation.get("opt-aggr").weights(epsilon, np.maximum(sold, 1e-9))
    naive = error_bound(weights, epsilon, np.maximum(sold, 1e-9))
    honest = error_bound(weights, epsilon, bids.data_size, records=sold, record_variance=1.0)
    return {
        "bought taken for all": float(naive[np.isfinite(naive)].mean()),
        "true shares, sampling variance": float(honest[np.isfinite(honest)].mean()),
        "records bought": float((sold.sum(axis=-1) / bids.data_size.sum(axis=-1)).mean()),
        "budget spent": float((outcome.spent / budget).mean()),
    }


def main() -> None:
    """Print the table in Markdown, and what private sizes cost."""
    print(f"| auction | {' | '.join(POPULATIONS)} |\n| --- |{' --: |' * len(POPULATIONS)}")
    for name in AUCTIONS:
        cells = (mean_bound(name, population) for population in POPULATIONS)
        row = (f"{mean:.3f} ± {se:.3f}" + (f" ({empty:.1%} empty)" if empty > 0 else "") for mean, se, empty in cells)
        print(f"| `{name}` | {' | '.join(row)} |", flush=True)
    for population in POPULATIONS[:2]:
        figures = ", ".join(f"{what} {value:.3f}" for what, value in private_sizes(population).items())
        print(f"\nposted-private on {population}: {figures}")


if __name__ == "__main__":
    main()
