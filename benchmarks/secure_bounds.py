"""Unequal budgets in one sum: the error bound by number of owners, against equal treatment and against local noise.

    python -m benchmarks.secure_bounds

Owners offer ε ∈ U(0.5, 2) a round and sell by `posted` at a budget of all their costs; 7,850 parameters, L = 1.
*secure-opt*: everybody's weight follows what she sold. *equal*: all who sold are treated as the most careful one, with
weights by data. *local*: opt-aggr over privunit-g at the same ε, every update private by itself.
"""

from __future__ import annotations

import numpy as np

from flmarket import aggregation, auctions, privacy
from flmarket.aggregation import Conventional, OptAggr, SecureOpt, error_bound
from flmarket.bids import BidProfile
from flmarket.privacy.secure_sum import SecureAggregation

DIMENSION = 7850


def bounds(owners: int, profiles: int = 30, seed: int = 0) -> dict[str, float]:
    """Median error bounds of the three."""
    bids = BidProfile.sample(np.random.default_rng(seed), profiles, owners, "flm22-iid")
    sold = auctions.get("posted").run(bids, bids.full_cost.sum(axis=-1)).epsilon
    common, own = privacy.get("distributed-gaussian"), privacy.get("privunit-g")
    excess, size = SecureAggregation().excess, bids.data_size
    least = np.where(sold > 0, sold, np.inf).min(axis=-1, keepdims=True)
    equal = np.where(sold > 0, least, 0.0)
    secure = {"clip": 1.0, "dimension": DIMENSION, "perturbation": common, "trust": "secure-aggregation"}
    best = SecureOpt(dimension=DIMENSION, perturbation=common, excess=excess).weights(sold, size)
    alone = OptAggr(dimension=DIMENSION, perturbation=own).weights(sold, size)
    found = {
        "secure-opt": error_bound(best, sold, size, excess=excess, **secure),
        "equal": error_bound(Conventional().weights(equal, size), equal, size, excess=excess, **secure),
        "local": error_bound(alone, sold, size, 1.0, DIMENSION, perturbation=own),
    }
    return {name: float(np.median(value[np.isfinite(value)])) for name, value in found.items()}


def main() -> None:
    """Print the table of docs/secure-aggregation.md."""
    assert "secure-opt" in aggregation.names()
    print("| owners | secure-opt | equal treatment | local | local / secure-opt |")
    print("| --: | --: | --: | --: | --: |")
    for owners in (10, 30, 100, 300, 1000):
        found = bounds(owners)
        ratio = found["local"] / found["secure-opt"]
        print(f"| {owners:,} | " + " | ".join(f"{value:.4g}" for value in found.values()) + f" | {ratio:.1f} |")


if __name__ == "__main__":
    main()
