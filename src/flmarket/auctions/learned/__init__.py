"""Learned auctions: RegretNet, M-RegretNet, MURBA and DM-RegretNet as four settings of one network family."""

from __future__ import annotations

from flmarket.auctions.learned.mechanism import LearnedAuction
from flmarket.auctions.learned.settings import Settings
from flmarket.auctions.learned.weights import load, weight_names

__all__ = ["DEFAULTS", "LearnedAuction", "Settings", "learned_auction", "load", "weight_names"]

# the weights that a bare name stands for
DEFAULTS = {
    "regretnet": "flm22-iid",
    "m-regretnet": "flm22-iid",
    "murba": "flm21-low",
    "dm-regretnet": "flm22-iid",
}


def learned_auction(auction: str, weights: str | None = None) -> LearnedAuction:
    """The auction with its default weights, with those of another population, or with those of a file."""
    chosen = DEFAULTS[auction] if weights is None else weights
    name = auction if chosen == DEFAULTS[auction] else f"{auction}:{chosen}"
    return load(auction, chosen, name=name)
