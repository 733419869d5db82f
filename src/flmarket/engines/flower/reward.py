"""The Stackelberg reward game on Flower: values are reported once, the reward announced, shares held until the end.

The game and its training are those of `flmarket.engines.stackelberg`. Everybody with ρ > 0 trains in every round; her
share waits in escrow from the first round and is posted after the last. An owner who misses a round loses her share
(it expires) and is not asked again; the others' weights are scaled up to sum to 1. ρ protects one *record*, and her
account must be in a currency that can hold it (ρ, or ε at a δ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.engines.flower.kinds import NOISE_MARGIN, RoundPlan
from flmarket.engines.flower.messages import Announcement, Bid, Order
from flmarket.engines.stackelberg import StackelbergResult, StackelbergTraining
from flmarket.ledger import Award, AwardState, Release, Resolution
from flmarket.market import RoundRecord, award_id, owner_account
from flmarket.privacy import ZCdp

__all__ = ["RewardMarket"]

FloatArray = NDArray[np.float64]
# The value of privacy of somebody who does not take part: so high that no reward moves her.
_STAYS_OUT = 1e12
_LEAST_VALUE = 1e-9


class RewardMarket:
    """A `StackelbergTraining` played by real owners; the values of privacy are those that they report."""

    def __init__(self, spec: StackelbergTraining, buyer: str = "buyer") -> None:
        self.spec, self.task, self.buyer, self.rounds = spec, spec.name, buyer, spec.rounds
        self.parameters, self.history = spec.model.initial(), list[FloatArray]()
        self.notes: dict[str, Any] = {}
        self._terms: dict[str, Any] = {}

    @property
    def terms(self) -> dict[str, Any]:
        """The reported values; the equilibrium follows from them."""
        return self._terms

    @terms.setter
    def terms(self, value: dict[str, Any]) -> None:
        self._terms = value
        self.__dict__.pop("game", None)

    @cached_property
    def game(self) -> StackelbergResult:
        """R, everybody's ρ and share, at the reported values."""
        return replace(self.spec, privacy_values=self._terms["values"]).announced()

    @property
    def done(self) -> bool:
        """All rounds are played."""
        return False

    @property
    def dimension(self) -> int:
        """Length of an update."""
        return self.spec.model.dimension

    def asks(self, index: int) -> bool:
        """Values are reported once."""
        return not self._terms

    def announcement(self, index: int) -> Announcement:
        """The game's clip bounds each record's gradient."""
        return Announcement(
            task=self.task, buyer=self.buyer, market="reward", round_index=0, rounds=self.rounds,
            features=self.spec.data.features, classes=self.spec.data.n_classes, perturbation="gaussian-zcdp",
            clip=self.spec.clip, parameters=self.dimension, steps=1, batch_size=0,
            learning_rate=self.spec.learning_rate, l2=0.0,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A value of privacy that the game can be solved for."""
        return _LEAST_VALUE <= bid.rate < _STAYS_OUT and bid.data_size >= self.spec.records

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """The same orders every round; owners whose share is gone are passed over."""
        if not self._terms:
            owners = range(self.spec.partition.owners)
            self.terms = {"values": [bids[i].rate if i in bids else _STAYS_OUT for i in owners]}
        users = np.flatnonzero(self.game.rho > 0).tolist()
        if not users:
            return RoundPlan(index)
        orders = tuple(self._order(index, owner) for owner in users)
        return RoundPlan(index, f"{self.task}/reward", self.game.reward_micros, orders)

    def award(self, order: Order) -> Award:
        """One award for all rounds; its ε is that of all releases together, at the game's δ."""
        epsilon = self.game.epsilon.item(order.owner)
        return Award(order.award, 0, self.buyer, owner_account(order.owner), epsilon, order.price_micros)

    def largest_norm(self, order: Order) -> float:
        """The clip, and noise at its very longest."""
        noise = float(self.game.sigma[order.owner]) * np.sqrt(self.dimension)
        return float(self.spec.clip + NOISE_MARGIN * noise)

    def release(self, order: Order) -> Release | None:
        """Booked once for all rounds, when the share is paid or lost."""
        return None

    def left(self, order: Order) -> Release | None:
        """The releases of the rounds so far, and this one."""
        return self._given(order, order.round_index + 1)

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """The share of whoever did not deliver expires; after the last round the others are paid."""
        ends = []
        for order in plan.orders:
            if awards[order.owner].state is not AwardState.PENDING:
                continue
            if order.owner not in updates:
                given = self._given(order, plan.index)
                ends.append(Resolution(order.award, AwardState.EXPIRED, f"missed round {plan.index}", given))
            elif plan.index == self.rounds - 1:
                ends.append(Resolution(order.award, AwardState.POSTED, "", self._given(order, self.rounds)))
        return ends

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """One step of the server."""
        last, ends = plan.index == self.rounds - 1, [awards[order.owner] for order in plan.orders]
        users = np.array([order.owner for order in plan.orders], dtype=np.int64)
        came = np.array([order.owner in updates for order in plan.orders], dtype=bool)
        weights = np.where(came, self.game.weights[users], 0.0) if users.size else np.zeros(0)
        if came.any() and not came.all():
            weights = weights / weights.sum()
        step = np.zeros(self.dimension)
        for owner, weight in zip(users.tolist(), weights.tolist(), strict=True):
            if owner in updates:
                step += weight * updates[owner]
        self.parameters = self.parameters - self.spec.learning_rate * step
        noise = self.dimension * float(np.sum((weights * self.game.sigma[users]) ** 2)) if came.any() else float("inf")
        model, test = self.spec.model, (self.parameters, self.spec.data.x_test, self.spec.data.y_test)
        metrics = {name: getattr(model, name)(*test) for name in ("accuracy", "balanced_accuracy", "loss")}
        open_ = AwardState.PENDING  # an award that runs on is shown as delivered
        shown = tuple(
            AwardState.POSTED if ok and a.state is open_ else a.state for ok, a in zip(came, ends, strict=True)
        )
        return RoundRecord(
            plan.index, users, np.full(users.size, float(self.spec.records)), self.game.rho[users] / self.rounds,
            self.game.paid_micros[users] * int(last), shown, tuple(a.reason for a in ends), weights,
            plan.deposit_micros * int(last), noise, metrics,
        )  # fmt: skip

    def _given(self, order: Order, rounds: int) -> Release | None:
        """What so many releases gave away; none, nothing."""
        if rounds == 0:
            return None
        return Release(order.award, order.perturbation, ZCdp(order.epsilon * rounds / self.rounds))

    def _order(self, index: int, owner: int) -> Order:
        spec = self.spec
        return Order(
            award=award_id(self.task, 0, owner), task=self.task, buyer=self.buyer, market="reward", round_index=index,
            rounds=self.rounds, owner=owner, epsilon=float(self.game.rho[owner]),
            price_micros=int(self.game.paid_micros[owner]), records=spec.records, features=spec.data.features,
            classes=spec.data.n_classes, perturbation="gaussian-zcdp", clip=spec.clip, steps=1, batch_size=0,
            learning_rate=spec.learning_rate, l2=0.0,
        )  # fmt: skip
