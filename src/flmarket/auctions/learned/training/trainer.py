"""Training this project's networks: an augmented Lagrangian, with checkpoints that resume to the same weights.

    C(θ) = n·objective + Σ_i φ_i·rgt_i + ρ/2·(Σ_i rgt_i)²

Regret is over the owner's full cost; nobody is paid below cost by construction. Profiles follow from (seed, epoch)
alone, so a resumed run sees what an uninterrupted one sees. The papers' own networks: `training.papers`.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flmarket.aggregation import Aggregation, Conventional
from flmarket.auctions.learned.mechanism import LearnedAuction
from flmarket.auctions.learned.network import Settings, first_parameters
from flmarket.auctions.learned.training import Preset, Schedule, market
from flmarket.auctions.learned.training.market import (
    Batch,
    Source,
    Training,
    bound_and_empty,
    error_bound_loss,
    make_batch,
)
from flmarket.bids import Auction, BidProfile, FloatArray

Lie = tuple[float, float, float]  # factors on value, ε̄ and data size
VALUE_LIES: tuple[Lie, ...] = tuple((v, 1.0, 1.0) for v in (0.0, 0.3, 0.7, 0.9, 1.1, 1.4, 2.0))
LIES: tuple[Lie, ...] = (
    *VALUE_LIES[1:],
    *((0.0, e, d) for e in (0.5, 0.75, 1.0) for d in (0.3, 0.5, 0.7, 0.85, 1.0)),
    *((1.0, 1.0, d) for d in (0.5, 0.75, 0.9)),
)


@dataclass(frozen=True)
class Deployed:
    """Means over held-out profiles; `empty` is the share of rounds in which nobody sells (left out of the bound)."""

    bound: float
    empty: float
    regret: float  # best of the lies tried, over full cost
    below_cost: float  # what payments fall short of cost, over full cost
    spent: float


def measure(
    auction: Auction,
    bids: BidProfile,
    budget: FloatArray,
    *,
    lies: Sequence[Lie] = LIES,
    liars: int = 100,
    draws: int = 1,
    rule: Aggregation | None = None,
    seed: int = 0,
) -> Deployed:
    """`bids` (profiles, n); lies are tried in the first `liars` profiles. The bound is OptAggr's, or that of `rule`.

    An auction as deployed, measured on held-out profiles while it trains: error bound, rounds without a sale, regret.

    The lies tried are few and fixed: value, ε̄ and data size scaled alone, and commitments to sell a part for nothing
    asked. This is a gauge for early stopping and model choice, not an audit; `flmarket audit` searches much harder.
    """
    outcome = auction.run(bids, budget, rng=np.random.default_rng(seed))
    bound, empty = bound_and_empty(outcome.epsilon, bids.data_size, rule)
    utility, cost = bids.utility(outcome), np.maximum(bids.full_cost, 1e-300)
    below = float(np.mean(np.maximum(-utility, 0.0) / cost))
    regret = _regret(auction, bids[:liars], budget[:liars], lies, draws, seed)
    spent = float(np.mean(outcome.spent / np.maximum(budget, 1e-300)))
    return Deployed(bound, empty, regret, below, spent)


def _regret(
    auction: Auction, bids: BidProfile, budget: FloatArray, lies: Sequence[Lie], draws: int, seed: int
) -> float:
    rows, n = bids.shape
    profile, owner = np.repeat(np.arange(rows), n), np.tile(np.arange(n), rows)
    many, money, at = bids[profile], budget[profile], (np.arange(rows * n), owner)
    own = many.valuations[at].reshape((rows * n,))

    def utility(value: float, privacy: float, size: float) -> FloatArray:
        told = BidProfile(own.scaled(value), many.privacy_budget[at] * privacy, many.data_size[at] * size)
        seen = many.with_reports(owner, told)
        total = np.zeros(rows * n)
        for draw in range(draws):
            outcome = auction.run(seen, money, rng=np.random.default_rng((seed, draw)))
            total += outcome.payment[at] - told.data_size * own.per_record(outcome.epsilon[at])
        return total / draws

    honest = utility(1.0, 1.0, 1.0)
    best = np.max([utility(*lie) for lie in lies], axis=0)
    return float(np.mean(np.maximum(best - honest, 0.0) / np.maximum(many.full_cost[at], 1e-300)))


# how much held-out regret over cost weighs against the held-out error bound when the best epoch is chosen
REGRET_WEIGHT = 10.0


@dataclass(frozen=True)
class Epoch:
    """What an epoch left behind."""

    epoch: int
    loss: float
    objective: float
    train_regret: float
    deployed: Deployed
    score: float
    best: bool
    seconds: float


class Trainer(Training):
    """One training run."""

    preset: Preset[Settings, Schedule]
    _KEPT = ("epoch", "updates", "best_score", "best_epoch", "best", "multipliers", "lies")

    def __init__(
        self, preset: Preset[Settings, Schedule], source: Source, *, seed: int = 0, validation: int = 600
    ) -> None:
        first = first_parameters(preset.settings, np.random.default_rng((seed, 0)))
        super().__init__(preset, source, seed, validation, first)
        self.multipliers = torch.full((source.owners,), preset.schedule.regret.multiplier)
        self.lies: dict[int, torch.Tensor] = {}
        self.epoch, self.best_score, self.best_epoch, self.updates = 0, math.inf, 0, 0
        self.best = {key: value.detach().clone() for key, value in self.parameters.items()}

    # ---- one batch ----

    def terms(self, batch: Batch, temperature: float, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The objective and the regret (n,) of one batch."""
        settings, schedule = self.preset.settings, self.preset.schedule
        cost = batch.cost.clamp_min(1e-9)
        if settings.clearing:
            cleared = market.clear(settings, self.parameters, batch, temperature)
            # ConvlAggr weighs a little ε as much as a lot, so that the mean of a soft choice between nothing and
            # something would look worse than either
            epsilon = cleared.sold if schedule.objective == "conventional" else cleared.epsilon
            utility = cleared.utility
            count = max(2, math.ceil(schedule.misreports / settings.items))
            factors = torch.cat([torch.ones(1), torch.linspace(0.9, 0.15, count - 1)])
            item, part = market.best_commitment(settings, self.parameters, batch, cleared.multiplier, factors)
            lying = market.commitment_utility(settings, self.parameters, batch, temperature, item, part)
        else:
            honest = market.honest_outcome(settings, self.parameters, batch, temperature)
            epsilon, utility = honest.epsilon, honest.utility
            lie = self._search(batch, temperature, index)
            lying = market.lying_utility(settings, self.parameters, batch, lie, temperature)
        regret = (torch.relu(lying - utility) / cost).mean(dim=0)
        if schedule.objective == "privacy":
            objective = -(batch.size * epsilon).sum(dim=-1).mean()
        else:
            objective = error_bound_loss(epsilon, batch.size, conventional=schedule.objective == "conventional")
        return objective, regret

    def _search(self, batch: Batch, temperature: float, index: int) -> torch.Tensor:
        """Two starts, the last visit's lie and a fresh one, half of the steps each."""
        settings, schedule = self.preset.settings, self.preset.schedule
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch * 1009 + index)
        fresh = torch.randn((*batch.size.shape, 3), generator=rng) * 0.3
        fresh[..., 1:] = -fresh[..., 1:].abs()
        warm = self.lies.get(index, torch.zeros_like(fresh))
        half = max(1, schedule.misreports // 2)
        found = [
            market.climb(settings, self.parameters, batch, start, temperature, steps=half, length=schedule.step)
            for start in (warm, fresh)
        ]
        better = found[1][1] > found[0][1]
        self.lies[index] = torch.where(better[..., None], found[1][0], found[0][0])
        return self.lies[index]

    def step(self, batch: Batch, temperature: float, index: int = 0) -> tuple[float, float, float]:
        """One update; returns loss, objective and mean regret."""
        objective, regret = self.terms(batch, temperature, index)
        rho = self.preset.schedule.regret.rho_at(self.epoch)
        loss = self.source.owners * objective + (self.multipliers * regret).sum() + 0.5 * rho * regret.sum() ** 2
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), 10.0)
        self.optimiser.step()
        self.updates += 1
        if self.updates % self.preset.schedule.update_every == 0:
            self.multipliers += rho * regret.detach()
        return loss.item(), objective.item(), regret.mean().item()

    # ---- epochs ----

    def run(self, *, until: int | None = None) -> Iterator[Epoch]:
        """Train epoch by epoch, up to the schedule's number (or `until`) or until validation stops improving."""
        schedule = self.preset.schedule
        last = schedule.epochs if until is None else min(until, schedule.epochs)
        while self.epoch < last and not self.stopped:
            yield self._one_epoch()

    @property
    def stopped(self) -> bool:
        """Whether validation has not improved for as long as the schedule's patience."""
        patience = self.preset.schedule.patience
        return patience > 0 and self.epoch - self.best_epoch > patience

    def _one_epoch(self) -> Epoch:
        schedule, settings, began = self.preset.schedule, self.preset.settings, time.perf_counter()
        done = self.epoch / max(schedule.epochs - 1, 1)
        for group in self.optimiser.param_groups:
            group["lr"] = schedule.rate * (schedule.rate_end / schedule.rate) ** done
        temperature = settings.temperature * schedule.warm_up ** max(0.0, 1.0 - 2.0 * done)
        # menus meet fresh profiles every epoch; lies that start from the last visit need the same ones again
        rng = np.random.default_rng((self.seed, 2, self.epoch if settings.clearing else 0))
        figures = []
        for index in range(schedule.batches):
            batch = make_batch(*self.source.draw(rng, schedule.profiles))
            figures.append(self.step(batch, temperature, index))
        self.epoch += 1
        deployed = self.measure(self.parameters)
        score = deployed.bound + REGRET_WEIGHT * (deployed.regret + deployed.below_cost) + 20.0 * deployed.empty
        better = score < self.best_score
        if better:
            self.best_score, self.best_epoch = score, self.epoch
            self.best = {key: value.detach().clone() for key, value in self.parameters.items()}
        loss, objective, regret = np.mean(figures, axis=0).tolist()
        return Epoch(self.epoch, loss, objective, regret, deployed, score, better, time.perf_counter() - began)

    def measure(self, parameters: dict[str, torch.Tensor]) -> Deployed:
        """The auction as deployed, on held-out profiles."""
        draws = 1 if self.preset.settings.clearing else 4
        rule = Conventional() if self.preset.schedule.objective == "conventional" else None
        return measure(self.auction(parameters), *self.held_out, liars=40, draws=draws, rule=rule, seed=self.seed)

    def auction(self, parameters: dict[str, torch.Tensor] | None = None) -> LearnedAuction:
        """The best network so far (or the given one), as it is deployed."""
        chosen = self.best if parameters is None else parameters
        weights = {key: value.detach().numpy().copy() for key, value in chosen.items()}
        return LearnedAuction(self.preset.settings, weights, self.preset.name)

    # ---- checkpoints ----

    def state(self) -> dict[str, Any]:
        """Where training stands, and the best network so far."""
        return {name: getattr(self, name) for name in self._KEPT}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        for name in self._KEPT:
            setattr(self, name, state[name])


def append_metrics(path: Path, epoch: Epoch) -> None:
    """One line of a CSV per epoch."""
    figures = asdict(epoch)
    row = {**{k: v for k, v in figures.items() if k != "deployed"}, **figures["deployed"]}
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)
