"""A task's market on Flower: the auction of `engines.flower`, among registered owners, within their registered caps.

Bids come from the owners' nodes, each cut by the owner's own guard. Here they are cut once more, to what the cap that
she registered with this broker still allows over all its tasks. Both caps hold: she may have sold elsewhere, and the
broker need not believe her guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from flmarket.engines import Simulation
from flmarket.engines.flower.auction import AuctionMarket
from flmarket.engines.flower.kinds import RoundPlan
from flmarket.engines.flower.messages import Bid
from flmarket.market.owner import LEAST_EPSILON

__all__ = ["TaskMarket", "TooFewBids"]


class TooFewBids(Exception):
    """The round waits: fewer owners bid than the task asks for."""


class TaskMarket(AuctionMarket):
    """`left` gives the privacy that owners may still sell, by number; `planned` is called with a round's plan."""

    def __init__(
        self,
        spec: Simulation,
        *,
        minimum_bids: int,
        left: Callable[[list[int]], Mapping[int, float]],
        planned: Callable[[RoundPlan], None],
    ) -> None:
        super().__init__(spec, buyer=spec.task.name)  # the account that pays
        self._minimum, self._left, self._planned = minimum_bids, left, planned

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Decide on what the registered caps allow; TooFewBids, and nothing decided, if that is not enough."""
        left = self._left(list(bids))
        cut = {
            owner: replace(bid, privacy_budget=min(bid.privacy_budget, left[owner]))
            for owner, bid in bids.items()
            if left[owner] >= LEAST_EPSILON
        }
        if len(cut) < self._minimum:
            raise TooFewBids
        plan = super().plan(index, cut)
        self._planned(plan)
        return plan
