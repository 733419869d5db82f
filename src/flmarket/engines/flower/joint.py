"""Robust joint-DP learning on Flower: costs are reported once, clients chosen once, uploads combined robustly.

The training is that of `flmarket.engines.jdp`: chosen clients train, clip and add noise (M3), the server combines the
uploads (M4 or another rule), and every client mixes the public model with her own parameters (M5), which stay on her
machine. Prices wait in escrow from the first round and are posted after the last. A client who misses a round is out
and not paid, as one is who sends nonsense.

The server's validation records are as in the simulation, and so is its own randomness: seeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.aggregation.robust import Combined
from flmarket.engines.flower.kinds import NOISE_MARGIN, RoundPlan
from flmarket.engines.flower.messages import Announcement, Bid, Order
from flmarket.engines.flower.owner import joint_noise
from flmarket.engines.jdp import AboveThreshold, JdpRun, JdpTraining
from flmarket.engines.jdp_privacy import LocalPerturbation
from flmarket.errors import InvalidInput
from flmarket.learning import Purpose, stream
from flmarket.ledger import Award, AwardState, MemoryLedger, Release, Resolution
from flmarket.market import RoundRecord, award_id, owner_account
from flmarket.privacy import GaussianRelease

__all__ = ["JointMarket", "perturbation_name"]

FloatArray = NDArray[np.float64]
# The cost of somebody who does not take part: beyond any budget.
_STAYS_OUT = 1e12


def perturbation_name(noise: LocalPerturbation | None) -> str:
    """How messages name M3's choices (`owner.joint_noise` reads it); empty without noise."""
    return "" if noise is None else noise.name


class JointMarket:
    """A `JdpTraining` played by real owners, at the costs that they report."""

    def __init__(self, spec: JdpTraining, buyer: str = "buyer") -> None:
        self.spec, self.task, self.buyer, self.rounds = spec, spec.name, buyer, spec.rounds
        self.parameters = spec.model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        self.history: list[FloatArray] = []
        self.notes: dict[str, Any] = {"total_size": 0.0, "looks": 0, "done": False}
        self._terms: dict[str, Any] = {}
        self._combined: tuple[int, Combined | None] = (-1, None)

    @property
    def terms(self) -> dict[str, Any]:
        """The reported costs; who is chosen follows from them."""
        return self._terms

    @terms.setter
    def terms(self, value: dict[str, Any]) -> None:
        self._terms = value
        self.__dict__.pop("run", None)

    @cached_property
    def run(self) -> JdpRun:
        """The simulation engine's own selection, records and measures, at the reported costs."""
        spec = replace(self.spec, costs=self._terms["costs"], adversary=None, adversaries=0)
        return JdpRun(spec, spec.select(), MemoryLedger())

    @property
    def dimension(self) -> int:
        """Length of an upload."""
        return self.parameters.size

    @property
    def done(self) -> bool:
        """The model is good enough: the stopping rule said so."""
        return bool(self.notes["done"])

    def asks(self, index: int) -> bool:
        """Costs are reported once."""
        return not self._terms

    def announcement(self, index: int) -> Announcement:
        """M3's choices are part of the offer."""
        noise = self.spec.perturbation
        return Announcement(
            task=self.task, buyer=self.buyer, market="joint", round_index=0, rounds=self.rounds,
            features=self.spec.data.features, classes=self.spec.data.n_classes, perturbation=perturbation_name(noise),
            clip=0.0 if noise is None else noise.clip, delta=0.0 if noise is None else noise.delta,
            parameters=self.dimension, steps=1, batch_size=0, learning_rate=0.0, l2=0.0,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A cost, as much privacy as every upload takes, and the records that the market counts on."""
        sizes = self.spec.partition.sizes
        holds = bid.owner < sizes.size and bid.data_size >= sizes[bid.owner]
        return bool(0 < bid.rate < _STAYS_OUT and bid.privacy_budget >= self.spec.epsilon and holds)

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """The chosen clients; those who are out are passed over."""
        if not self._terms:
            owners = range(self.spec.partition.owners)
            self.terms = {"costs": [bids[i].rate if i in bids else _STAYS_OUT for i in owners]}
        chosen = self.run.chosen
        if not chosen.clients.size:
            return RoundPlan(index)
        budget = max(chosen.budget_micros, int(chosen.paid_micros.sum()))
        orders = tuple(self._order(index, owner) for owner in chosen.clients.tolist())
        return RoundPlan(index, f"{self.task}/budget", budget, orders)

    def award(self, order: Order) -> Award:
        """One award for all rounds."""
        return Award(order.award, 0, self.buyer, owner_account(order.owner), order.epsilon, order.price_micros)

    def largest_norm(self, order: Order) -> float:
        """The public model, the clip, and noise at its very longest."""
        if not order.perturbation:
            return float("inf")
        noise = joint_noise(order)
        sigma = float(noise.sigma(order.epsilon, order.records))
        return float(np.linalg.norm(self.parameters) + noise.clip + NOISE_MARGIN * sigma * np.sqrt(self.dimension))

    def release(self, order: Order) -> Release | None:
        """Booked once for all rounds, when the price is paid or lost."""
        return None

    def left(self, order: Order) -> Release | None:
        """The uploads of the rounds so far, and this one."""
        return self._given(order, order.round_index + 1)

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """Who did not deliver is out; after the last round, by number or by the stopping rule, the others are paid."""
        ends, last = [], self._last(plan, updates)
        for order in plan.orders:
            if awards[order.owner].state is not AwardState.PENDING:
                continue
            if order.owner not in updates:
                given = self._given(order, plan.index)
                ends.append(Resolution(order.award, AwardState.EXPIRED, f"missed round {plan.index}", given))
            elif last:
                ends.append(Resolution(order.award, AwardState.POSTED, "", self._given(order, plan.index + 1)))
        return ends

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """The public model becomes what the rule makes of the uploads."""
        last, combined = self._last(plan, updates), self._combine(plan, updates)
        run, shares = self.run, np.zeros(len(plan.orders))
        came = np.array([order.owner in updates for order in plan.orders], dtype=bool)
        if combined is not None:
            self.parameters = combined.average
            shares[came] = combined.shares
            self.notes = {**self.notes, "total_size": combined.total_size}
        self.notes = {**self.notes, "looks": plan.index + 1, "done": last and plan.index + 1 < self.rounds}
        run.public, run.voided = self.parameters, []
        record = run.record(plan.index, shares)
        record = run.priced(record) if last else record
        states, reasons = list(record.state), list(record.reason)
        for order, here in zip(plan.orders, came.tolist(), strict=True):
            award = awards[order.owner]
            runs_on = here and award.state is AwardState.PENDING  # shown as delivered
            states[order.owner], reasons[order.owner] = AwardState.POSTED if runs_on else award.state, award.reason
        return replace(record, state=tuple(states), reason=tuple(reasons))

    def _combine(self, plan: RoundPlan, updates: Mapping[int, FloatArray]) -> Combined | None:
        """The uploads of one round combined, once; None if there are too few for the rule."""
        if self._combined[0] != plan.index:
            here = [order for order in plan.orders if order.owner in updates]
            try:
                combined = self.spec.aggregation.combine(
                    np.array([updates[order.owner] for order in here]).reshape(-1, self.dimension),
                    np.array([order.records for order in here], dtype=np.float64),
                    score=lambda candidates: self.run.accuracy(candidates, self.run.validation),
                    rng=stream(self.spec.seed, plan.index, purpose=Purpose.AGGREGATION),
                )
            except InvalidInput:
                combined = None
            self._combined = (plan.index, combined)
        return self._combined[1]

    def _last(self, plan: RoundPlan, updates: Mapping[int, FloatArray]) -> bool:
        """Whether this is the last round, after a look at the model that it makes."""
        if plan.index == self.rounds - 1:
            return True
        combined, stops = self._combine(plan, updates), AboveThreshold(self.spec)
        model = self.parameters if combined is None else combined.average
        for _ in range(plan.index):
            stops.look(lambda: -np.inf)  # the draws of earlier rounds
        stops.look(lambda: float(self.run.accuracy(model[None], self.run.validation)[0]))
        return stops.reached

    def _given(self, order: Order, rounds: int) -> Release | None:
        """What so many uploads gave away: k Gaussian releases are one of a √k-th of the noise."""
        if not order.perturbation or rounds == 0:
            return None
        once = joint_noise(order).guarantee(order.epsilon, order.records).noise_multiplier
        return Release(order.award, order.perturbation, GaussianRelease(once / np.sqrt(rounds)))

    def _order(self, index: int, owner: int) -> Order:
        spec, chosen, call = self.spec, self.run.chosen, self.announcement(0)
        return Order(
            award=award_id(self.task, 0, owner), task=self.task, buyer=self.buyer, market="joint", round_index=index,
            rounds=self.rounds, owner=owner, epsilon=float(chosen.epsilon[owner]),
            price_micros=int(chosen.paid_micros[owner]), records=int(chosen.records[owner]),
            features=spec.data.features, classes=spec.data.n_classes, perturbation=call.perturbation, clip=call.clip,
            delta=call.delta, steps=1, batch_size=0, learning_rate=0.0, l2=0.0,
            total_size=float(self.notes["total_size"]) if spec.mixing and index else 0.0,
        )  # fmt: skip
