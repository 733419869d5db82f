"""Auctions: a budget and bids in, privacy losses and payments out. `get(name)` builds one."""

from __future__ import annotations

from flmarket.auctions.learned import DEFAULTS as _LEARNED
from flmarket.auctions.learned import PAPERS as _PAPERS
from flmarket.auctions.learned import LearnedAuction, PaperAuction, learned_auction, weight_names
from flmarket.auctions.posted import PostedAuction, PostedPrivateSizes, posted, posted_private
from flmarket.auctions.single_minded import BudgetFeasibleKnapsack, GreedyKnapsack, ProportionalShare
from flmarket.bids import EXACT, NONE, Auction, Guarantees
from flmarket.registry import Registry

__all__ = [
    "Auction",
    "BudgetFeasibleKnapsack",
    "GreedyKnapsack",
    "LearnedAuction",
    "PaperAuction",
    "PostedAuction",
    "PostedPrivateSizes",
    "ProportionalShare",
    "about",
    "admit",
    "get",
    "known",
    "names",
    "register",
]

_SINGLE_MINDED = (
    "single-minded owners whose privacy budget and data size are not private, and a budget set before bids are seen"
)

_registry: Registry[Auction] = Registry("auction", "flmarket.auctions")
get = _registry.get
names = _registry.names
known = _registry.__contains__
register = _registry.register
admit = _registry.admit
about = _registry.about

register(
    "all-in",
    lambda: ProportionalShare(
        "all-in",
        weight="privacy",
        capped=False,
        guarantees=Guarantees(
            NONE, EXACT, EXACT, "FL-Market 2021 Alg. 4, 2022 Alg. 4. The papers' truthfulness fails: docs/errata.md E3"
        ),
    ),
    about="Proportional share. A lie can pay; kept for comparison.",
)
for _name, _weight, _source, _about in (
    (
        "all-in-capped",
        "privacy",
        "All-in with M1's price, the fix of docs/errata.md E3",
        "Proportional share, with the price capped by the first loser.",
    ),
    ("m1", "records", "Zhang et al. (JDP) Alg. 1", "Buys whole owners by cost per record."),
    (
        "fairquery",
        "owners",
        "Ghosh and Roth, Selling Privacy at Auction, EC 2011, Alg. 1",
        "One price for all who sell.",
    ),
):
    register(
        _name,
        lambda name=_name, weight=_weight, source=_source: ProportionalShare(
            name, weight=weight, capped=True, guarantees=Guarantees(EXACT, EXACT, EXACT, source, _SINGLE_MINDED)
        ),
        about=_about,
    )
register("m2", GreedyKnapsack, about="Myerson’s prices; may overspend the budget.")
register(
    "posted",
    posted,
    variants=True,
    about="Each owner gets a price list and takes what suits her; no lie pays, whatever her costs look like.",
)
register("posted-private", posted_private, variants=True, about="The same when data sizes are private too.")
register("m2-bf", BudgetFeasibleKnapsack, about="Buys whole owners like a knapsack, within the budget.")
# the papers' networks serve ten owners only, so they are there for those who ask by name
for _name in (*_LEARNED, *_PAPERS):
    register(
        _name,
        lambda weights=None, name=_name: learned_auction(name, weights),
        variants=True,
        about="Fitted to one population of owners; there a lie gains little.",
        listed=_name in _LEARNED and bool(weight_names(_name)),
    )
