"""The auction market on Flower: bids every round, any registered auction, market weights, exact settlement.

The rules are those of `flmarket.market` and the arithmetic that of the simulation engine, whose run object clears,
settles and evaluates here too; so equal bids and seeds give equal awards, round by round. A round is cleared on a
scratch ledger first. The result is stored, and only then does money move in the real one, by calls that may be
repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.engines.flower.kinds import NOISE_MARGIN, RoundPlan, deliver_or_expire, plain_award
from flmarket.engines.flower.messages import Announcement, Bid, Order, profile
from flmarket.engines.simulation import OpenRound, Simulation, SimulationRun
from flmarket.errors import InvalidInput
from flmarket.learning import Purpose, stream
from flmarket.ledger import Award, MemoryLedger, Release, Resolution, to_micros
from flmarket.market import Round, RoundRecord

__all__ = ["AuctionMarket"]

FloatArray = NDArray[np.float64]

# Beyond these a bid is a mistake or mischief: records an owner holds, and what all her privacy costs.
LARGEST_HOLDING = 10**9
LARGEST_COST = 1e12


class AuctionMarket:
    """A `Simulation` played by real owners: of its bids and records only the public ones of the buyer are used."""

    def __init__(self, spec: Simulation, buyer: str = "buyer") -> None:
        self.spec, self.task, self.buyer, self.rounds = spec, spec.task.name, buyer, spec.task.rounds
        self._run = SimulationRun(spec, MemoryLedger())
        self._run.market.buyer = buyer
        self.terms: dict[str, Any] = {}  # every round is settled by itself
        self.notes: dict[str, Any] = {}

    @property
    def parameters(self) -> FloatArray:
        """The model now."""
        return self._run.parameters

    @parameters.setter
    def parameters(self, value: FloatArray) -> None:
        self._run.parameters = value

    @property
    def history(self) -> list[FloatArray]:
        """Earlier models, if they are averaged."""
        return self._run.history

    @history.setter
    def history(self, value: list[FloatArray]) -> None:
        self._run.history = value

    @property
    def done(self) -> bool:
        """All rounds are played."""
        return False

    @property
    def dimension(self) -> int:
        """Length of an update."""
        return self._run.parameters.size

    @property
    def buyers_model(self) -> FloatArray:
        """The model that the buyer gets."""
        return self._run.buyers_model()

    def asks(self, index: int) -> bool:
        """Bids are collected every round."""
        return True

    def announcement(self, index: int) -> Announcement:
        """The task, this round, and the noise that will be asked for."""
        return Announcement(
            task=self.task, buyer=self.buyer, market="auction", round_index=index, rounds=self.rounds,
            features=self.spec.data.features, classes=self.spec.data.n_classes,
            perturbation=self.spec.perturbation.name, clip=self.spec.perturbation.clip, parameters=self.dimension,
            steps=self.spec.local.steps, batch_size=self.spec.local.batch_size or 0,
            learning_rate=self.spec.local.learning_rate, l2=0.0,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A valuation and a cost that can be computed with."""
        try:
            with np.errstate(over="ignore"):
                cost = float(profile([bid]).full_cost[0])
        except InvalidInput:
            return False
        return 1 <= bid.data_size <= LARGEST_HOLDING and bid.privacy_budget > 0 and cost <= LARGEST_COST

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Draw the bidders, run the auction, and write down what every winner is asked to do."""
        if not bids:
            return RoundPlan(index)
        owners = np.array(sorted(bids), dtype=np.int64)
        draw = stream(self.spec.seed, index, purpose=Purpose.PARTICIPATION)
        bidders = np.sort(draw.choice(owners, min(self.spec.task.bidders_per_round, owners.size), replace=False))
        offered = profile([bids[owner] for owner in bidders.tolist()])
        budget = self.spec.task.budget_micros
        if self.spec.task.budget_factor is not None:
            drawn = self.spec.bids[bidders[bidders < self.spec.bids.n]]  # what the file drew, not what they report
            budget = to_micros("budget", self.spec.task.budget_factor * float(drawn.full_cost.sum()))
        assert budget is not None
        scratch = SimulationRun(self.spec, MemoryLedger())
        scratch.market.buyer = self.buyer
        cleared = scratch.clear(OpenRound(index, bidders, offered, budget))
        orders = tuple(self._order(cleared, position) for position in range(bidders.size))
        memory = {
            "bidders": cleared.bidders.tolist(), "data_size": cleared.data_size.tolist(),
            "epsilon": cleared.epsilon.tolist(), "price": cleared.price_micros.tolist(),
        }  # fmt: skip
        deposit = f"{self.task}/{index}/budget"
        return RoundPlan(index, deposit, budget, tuple(order for order in orders if order is not None), memory)

    def award(self, order: Order) -> Award:
        """One award per round and winner."""
        return plain_award(order)

    def largest_norm(self, order: Order) -> float:
        """The clip, and noise at its very longest."""
        energy = float(self.spec.perturbation.noise_energy(order.epsilon, self.dimension))
        return float(self.spec.perturbation.clip + NOISE_MARGIN * np.sqrt(energy))

    def release(self, order: Order) -> Release | None:
        """The perturbation's own promise."""
        return Release(order.award, order.perturbation, self.spec.perturbation.guarantee(order.epsilon))

    def left(self, order: Order) -> Release | None:
        """The same, good or bad."""
        return self.release(order)

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """Paid on delivery."""
        return deliver_or_expire(plan, updates, awards)

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """Aggregate with the market's weights and evaluate."""
        if not plan.memory:
            return self._run.skip(plan.index)
        saved = plan.memory
        round_ = Round(
            plan.index, np.array(saved["bidders"], dtype=np.int64), np.array(saved["data_size"], dtype=np.float64),
            np.array(saved["epsilon"], dtype=np.float64), np.array(saved["price"], dtype=np.int64),
            plan.deposit_micros, {order.owner: order.award for order in plan.orders}, dict(updates),
        )  # fmt: skip
        self._run.market.ledger = _Resolved(awards)  # type: ignore[assignment]
        return self._run.close(round_)

    def _order(self, cleared: Round, position: int) -> Order | None:
        owner, local, spec = int(cleared.bidders[position]), self.spec.local, self.spec
        if owner not in cleared.awards:
            return None
        return Order(
            award=cleared.awards[owner], task=self.task, buyer=self.buyer, market="auction", round_index=cleared.index,
            rounds=self.rounds, owner=owner, epsilon=float(cleared.epsilon[position]),
            price_micros=int(cleared.price_micros[position]), records=int(cleared.data_size[position]),
            features=spec.data.features, classes=spec.data.n_classes, perturbation=spec.perturbation.name,
            clip=spec.perturbation.clip, steps=local.steps, batch_size=local.batch_size or 0,
            learning_rate=local.learning_rate, l2=0.0,
        )  # fmt: skip


class _Resolved:
    """What `Market.close` asks of a ledger when all awards are resolved already."""

    def __init__(self, awards: Mapping[int, Award]) -> None:
        self._awards = {award.id: award for award in awards.values()}

    def award(self, award_id: str) -> Award:
        """As it ended."""
        return self._awards[award_id]

    def resolve_many(self, resolutions: Iterable[Resolution]) -> tuple[Award, ...]:
        """As they ended: nothing is left to resolve."""
        return tuple(self._awards[one.award_id] for one in resolutions)
