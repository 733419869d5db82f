"""Learned auctions: this project's networks under names of their own, and the papers' as printed under theirs.

`cleared-menu` and its kin (`mechanism.py`) serve any number of owners, never pay below cost and have small regret.
`regretnet`, `m-regretnet`, `dm-regretnet` and `murba` (`papers.py`) are what FL-Market 2021 and 2022 print.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from flmarket.auctions.learned.mechanism import LearnedAuction
from flmarket.auctions.learned.network import Settings
from flmarket.auctions.learned.papers import SHAPES, PaperAuction, PaperSettings
from flmarket.auctions.learned.weights import load, weight_names
from flmarket.errors import ConfigError, UnknownName

__all__ = [
    "DEFAULTS", "FORMER_NAMES", "PAPERS", "LearnedAuction", "PaperAuction", "PaperSettings", "Settings",
    "learned_auction", "load", "weight_names",
]  # fmt: skip

# the weights that a bare name stands for: this project's networks
DEFAULTS = {
    "cleared-menu": "flm22-iid",
    "cleared-menu-20": "flm21-low",
    "cleared-menu-convl": "flm22-iid",
    "menu-lottery": "flm22-iid",
    "single-lottery": "flm22-iid",
}
# and the papers'
PAPERS = {
    "regretnet": "flm22-iid",
    "m-regretnet": "flm22-iid",
    "dm-regretnet": "flm22-iid",
    "dm-regretnet-convl": "flm22-iid",
    "murba": "flm21-low",
    "murba-15": "flm21-low",
    "murba-10": "flm21-low",
}
# what this project's networks were called when they had the papers' names
FORMER_NAMES = {
    "dm-regretnet": "cleared-menu",
    "dm-regretnet-convl": "cleared-menu-convl",
    "murba": "cleared-menu-20",
    "m-regretnet": "menu-lottery",
    "regretnet": "single-lottery",
}


def learned_auction(auction: str, weights: str | None = None) -> LearnedAuction | PaperAuction:
    """The auction with its default weights, with those of another population, or with those of a file."""
    paper = auction in PAPERS
    default = (PAPERS if paper else DEFAULTS)[auction]
    chosen = default if weights is None else weights
    name = auction if chosen == default else f"{auction}:{chosen}"
    try:
        found = load(auction, chosen, name=name)
    except UnknownName:
        if not paper:
            raise
        raise _not_trained(auction, chosen) from None
    if paper and isinstance(found, LearnedAuction):
        ours = FORMER_NAMES.get(auction, "cleared-menu")
        warnings.warn(
            f"{chosen} holds this project's {ours}, which used to be called {auction}; {auction} is the paper's "
            f"mechanism now. Say {ours} instead.",
            FutureWarning,
            stacklevel=4,
        )
    elif isinstance(found, PaperAuction) and not (paper and _is(found.settings, SHAPES[auction])):
        raise ConfigError("weights", chosen, f"a network of {auction}; this is another one, of the papers'")
    return found


def _is(found: PaperSettings, wanted: PaperSettings) -> bool:
    """Whether it is that mechanism, for whatever number of owners and width of network."""
    return replace(found, owners=wanted.owners, hidden=wanted.hidden) == wanted


def _not_trained(auction: str, population: str) -> UnknownName:
    """No other network is put in its place: say how to get it, and what else there is."""
    shipped = weight_names(auction)
    there = f"weights ship for {', '.join(shipped)}" if shipped else "none ship yet"
    ours = FORMER_NAMES.get(auction.partition("-1")[0], "cleared-menu")
    return UnknownName(
        f"weights of {auction}, the paper's network, for",
        population,
        f"a population with trained weights ({there}), or a .safetensors file; to train them: flmarket train-auction "
        f"{auction} --population {population} --checkpoints DIR --out FILE; this project's own network is {ours}",
    )
