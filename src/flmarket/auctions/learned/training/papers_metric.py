"""How the papers measure regret and rationality (2022 App. A, Table I; 2021 App. A, Table 1), and what that hides.

| figure | utilities | lies |
| --- | --- | --- |
| rgt, irv | of the soft allocation that training uses, over its expected cost c_i (MURBA: in money) | J steps |
| rgt_deployed, irv_deployed | of the auction as deployed, over the (expected) cost of what is sold | the same |
| noise | rgt of two independent draws of the same honest bids | none |

The published tables draw an allocation for the truth and another for the lie. For a lottery this is `noise`: an owner
who sells with probability z for a payment of her expected cost shows a "regret" of 1 − z without any lie
(docs/errata.md E22). The strong search is `flmarket.audit`; it divides by the cost of the whole bid, never less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from flmarket.auctions.learned.papers import PaperAuction
from flmarket.auctions.learned.training.papers import honest, lying, make_batch, search, terms
from flmarket.auctions.learned.training.presets import PaperSchedule
from flmarket.bids import Auction, BidProfile, FloatArray

__all__ = ["PapersMetric", "by_the_papers", "regret_of_two_draws"]


@dataclass(frozen=True)
class PapersMetric:
    """Means over owners and profiles; `worst` are the largest means of one owner, as in the 2021 paper's Table 1."""

    rgt: float
    irv: float
    worst_rgt: float
    worst_irv: float
    rgt_deployed: float
    irv_deployed: float
    noise: float
    profiles: int


def by_the_papers(
    auction: PaperAuction, schedule: PaperSchedule, bids: BidProfile, budget: FloatArray, *, seed: int = 0
) -> PapersMetric:
    """Everything that the papers' search finds about one of their networks, on profiles of shape (K, n)."""
    settings = auction.settings
    parameters = {
        key: torch.tensor(np.asarray(value), dtype=torch.float32) for key, value in auction.parameters.items()
    }
    batch = make_batch(settings, bids, budget)
    lie = search(settings, schedule, parameters, batch)
    with torch.no_grad():
        _, found = terms(settings, schedule, parameters, batch, lie)
        hard = replace(schedule, temperature=_HARD if settings.sold == "argmax" else None)
        told = honest(settings, hard, parameters, batch)
        gain = torch.relu(lying(settings, hard, parameters, batch, lie).utility.T - told.utility)
        below = torch.relu(-told.utility)
        scale = 1.0 / told.cost if schedule.over_cost else batch.size
        sells = told.cost > 1e-6 * batch.value[..., -1]  # where nothing is sold there is nothing to divide by
        rgt, irv = (float((value * scale)[sells].mean()) if sells.any() else 0.0 for value in (gain, below))
    drawn = settings.sold == "drawn"
    noise = regret_of_two_draws(auction, bids, budget, told.cost.double().numpy(), seed=seed) if drawn else 0.0
    soft, paid = found.regret, found.rational
    worst = float(soft.max()), float(paid.max())
    return PapersMetric(float(soft.mean()), float(paid.mean()), *worst, rgt, irv, noise, len(budget))


_HARD = 1e-4  # a soft argmax as cold as this is the argmax


def regret_of_two_draws(
    auction: Auction, bids: BidProfile, budget: FloatArray, cost: FloatArray, *, seed: int = 0
) -> float:
    """mean max(0, u of a second draw − u of a first one) / expected cost a record: what no lie at all "gains"."""
    first, second = (
        bids.utility(auction.run(bids, budget, rng=np.random.default_rng((seed, draw)))) / bids.data_size
        for draw in (1, 2)
    )
    return float(np.mean(np.maximum(second - first, 0.0) / np.maximum(cost, 1e-12)))
