"""Client sampling on Flower: costs are reported once, terms (q, r) posted, participants drawn and paid every round.

The engine is SAMP's (`flmarket.engines.sampled`): unbiased weights w/q, E local steps, a payment each time an owner
takes part. What differs from the simulation: a participant is paid when her update arrives, not when she is drawn; one
who fails is not paid, and the step is biased by her absence. Updates leave **without noise**. The guard lets that
happen only for owners who said so in their own configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.engines.flower.kinds import RoundPlan, deliver_or_expire, plain_award
from flmarket.engines.flower.messages import Announcement, Bid, Order
from flmarket.engines.sampled import BUYER, SampledRun, SampledTraining
from flmarket.engines.sampled_config import SamplingSection
from flmarket.errors import InvalidInput
from flmarket.ledger import Award, MemoryLedger, Release, Resolution
from flmarket.market import RoundRecord, award_id
from flmarket.sampling.prior_independent import terms

__all__ = ["SamplingMarket", "Terms", "posted_terms"]

FloatArray = NDArray[np.float64]
Terms = Callable[[FloatArray], tuple[FloatArray, FloatArray]]


def posted_terms(section: SamplingSection, budget_per_client: float) -> Terms:
    """What a market file offers for reported costs: the terms of its scheme, at its budget."""
    distribution = section.cost_distribution()

    def offer(costs: FloatArray) -> tuple[FloatArray, FloatArray]:
        found = terms(section.scheme, costs, distribution, budget_per_client, fraction=section.fraction)
        return found.participation, found.payment

    return offer


class SamplingMarket:
    """A `SampledTraining` played by real owners. `offer` maps reported costs to (q, r); None takes the spec's."""

    def __init__(self, spec: SampledTraining, offer: Terms | None = None) -> None:
        self.spec, self.offer, self.task, self.buyer, self.rounds = spec, offer, spec.name, BUYER, spec.rounds
        self.parameters, self.history = spec.model.initial(), list[FloatArray]()
        self.terms: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}

    @property
    def done(self) -> bool:
        """All rounds are played."""
        return False

    @property
    def dimension(self) -> int:
        """Length of an update."""
        return self.spec.model.dimension

    def asks(self, index: int) -> bool:
        """Costs are reported once."""
        return not self.terms

    def announcement(self, index: int) -> Announcement:
        """No noise is asked for, so none is named."""
        rate = self.spec.learning_rate or self.spec.constants.learning_rate
        return Announcement(
            task=self.task, buyer=self.buyer, market="sampling", round_index=0, rounds=self.rounds,
            features=self.spec.data.features, classes=self.spec.data.n_classes, perturbation="", clip=0.0,
            parameters=self.dimension, steps=self.spec.local_steps, batch_size=self.spec.batch_size or 0,
            learning_rate=max(float(rate(i)) for i in range(self.rounds)), l2=self.spec.l2,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A cost for which there are terms, and the records that her weight counts on."""
        places = np.flatnonzero(np.asarray(self.spec.ids) == bid.owner)
        if not places.size or bid.data_size < self.spec.partition.sizes[places[0]]:
            return False
        try:
            return self.offer is None or bool(np.isfinite(self.offer(np.array([bid.rate]))).all())
        except InvalidInput:
            return False

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Settle the terms if they are not, then draw who takes part."""
        if not self.terms:
            self.terms = self._settled(bids)
        run = self._run()
        kept, _ = run.draw(index)
        rate = float(run.rate(index))
        orders = tuple(self._order(index, int(run.ids[k]), int(run.price[k]), k, rate) for k in kept.tolist())
        bill = int(run.price[kept].sum())
        return RoundPlan(index, f"{self.task}/{index}/bill", bill, orders, {"kept": kept.tolist()})

    def award(self, order: Order) -> Award:
        """One award per round and participant."""
        return plain_award(order)

    def largest_norm(self, order: Order) -> float:
        """Unknown: a raw update may be as long as the data makes it."""
        return float("inf")

    def release(self, order: Order) -> Release | None:
        """Raw updates promise nothing."""
        return None

    def left(self, order: Order) -> Release | None:
        """Nothing that a ledger could count."""
        return None

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """Paid on delivery."""
        return deliver_or_expire(plan, updates, awards)

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """Move by Σ (w/q)·update over those who delivered."""
        run, step = self._run(), np.zeros(self.dimension)
        kept = np.array(plan.memory["kept"], dtype=np.int64)
        ends = [awards[order.owner] for order in plan.orders]
        came = np.array([order.owner in updates for order in plan.orders], dtype=bool)
        weights = np.where(came, self.spec.weights[kept] / run.q[kept], 0.0) if kept.size else np.zeros(0)
        if came.any():
            step = weights[came] @ np.stack([updates[order.owner] for order in plan.orders if order.owner in updates])
        self.parameters = self.parameters - step
        data, model = self.spec.data, self.spec.model
        metrics = {
            "accuracy": model.accuracy(self.parameters, data.x_test, data.y_test),
            "loss": model.loss(self.parameters, data.x_test, data.y_test),
        }
        return RoundRecord(
            plan.index, run.ids[kept], self.spec.partition.sizes[kept].astype(np.float64), np.full(kept.size, np.inf),
            np.array([a.price_micros for a in ends], dtype=np.int64), tuple(a.state for a in ends),
            tuple(a.reason for a in ends), weights,
            plan.deposit_micros, float("inf"), metrics,
        )  # fmt: skip

    def _settled(self, bids: Mapping[int, Bid]) -> dict[str, Any]:
        """(q, r) for everybody who reported; whoever did not is never drawn."""
        ids = np.asarray(self.spec.ids).tolist()
        here = np.array([owner in bids for owner in ids], dtype=bool)
        q, r = np.asarray(self.spec.participation), np.asarray(self.spec.payment)
        if self.offer is not None and here.any():
            q, r = np.zeros(len(ids)), np.zeros(len(ids))
            costs = np.array([bids[owner].rate for owner in ids if owner in bids])
            q[here], r[here] = self.offer(costs)
        return {"participation": np.where(here, q, 0.0).tolist(), "payment": np.where(here, r, 0.0).tolist()}

    def _run(self) -> SampledRun:
        """The simulation engine's own draws and rates, under the settled terms."""
        spec = replace(self.spec, participation=self.terms["participation"], payment=self.terms["payment"])
        return SampledRun(spec, MemoryLedger())

    def _order(self, index: int, owner: int, price: int, position: int, rate: float) -> Order:
        return Order(
            award=award_id(self.task, index, owner), task=self.task, buyer=self.buyer, market="sampling",
            round_index=index, rounds=self.rounds, owner=owner, epsilon=float("inf"), price_micros=price,
            records=int(self.spec.partition.sizes[position]), features=self.spec.data.features,
            classes=self.spec.data.n_classes, perturbation="", clip=0.0, steps=self.spec.local_steps,
            batch_size=self.spec.batch_size or 0, learning_rate=rate, l2=self.spec.l2,
        )  # fmt: skip
