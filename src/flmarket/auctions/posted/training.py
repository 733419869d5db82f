"""Fit a menu to bidders by gradient descent on the error bound itself. Needs torch; running a menu does not.

Every owner's choice is softened by a temperature that falls during training: an even chance where two options are worth
the same to her. Every step sees fresh profiles. At temperature τ a sale comes and goes within a band of width τ, over
which the mean ε slides from one option to the other, so the jumps of the true objective have a slope whose integral is
right, and as τ falls the gradient tends to that of the hard objective. Whatever comes out, the auction stays exactly
truthful, rational and within budget: training moves only how much accuracy the money buys.

The objective is the error bound of the aggregation that the buyer uses: `opt-aggr`, `conventional` or, where only a sum
is seen, `secure-opt`. With several sources, the mean of its ratios to that of the untrained menu.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from flmarket import aggregation as rules
from flmarket.aggregation import HasNoiseEnergy, error_bound
from flmarket.auctions.learned.training.market import Source
from flmarket.auctions.posted.mechanism import PostedAuction, Queue
from flmarket.auctions.posted.menu import (
    CATALOGUE,
    INPUTS,
    KNOTS,
    LINEAR,
    MONEY_RANGE,
    AnyMenu,
    NetworkMenu,
    Sales,
    Seen,
    moving_inputs,
)
from flmarket.bids import BidProfile, FloatArray
from flmarket.errors import InvalidInput

# A round in which nobody sells has no finite bound; it counts as a very bad one, so that the search avoids it.
NOBODY = 60.0
# Training looks at every eighth ε of the catalogue, another eighth in every step; towards the end at every fourth.
COARSE, FINER, FROM = 8, 4, 0.7
OBJECTIVES = ("opt-aggr", "conventional", "secure-opt")
_HIDDEN = (48, 48)
_RELATIVE_STEP = 1e-4
_REPORTS = 20


@dataclass(frozen=True)
class Progress:
    """The state of a training: the loss on validation profiles, with every owner's exact best choice."""

    step: int
    loss: float
    menu: NetworkMenu


@dataclass(frozen=True)
class Objective:
    """The error bound of what is sold, under one rule of aggregation."""

    name: str = "opt-aggr"
    dimension: int = 1
    perturbation: HasNoiseEnergy | None = None

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise InvalidInput("aggregation", self.name, f"one of {', '.join(OBJECTIVES)}")

    def bound(self, epsilon: FloatArray, size: FloatArray) -> FloatArray:
        """ERR of each profile, infinite where nobody sells."""
        noise: dict[str, Any] = {"dimension": self.dimension, "perturbation": self.perturbation}
        rule = rules.get(self.name) if self.name == "conventional" else rules.get(self.name, **noise)
        trust: Any = getattr(rule, "trust", "local")
        return error_bound(rule.weights(epsilon, size), epsilon, size, trust=trust, **noise)

    def soft(self, epsilon: torch.Tensor, sold: torch.Tensor, size: FloatArray) -> torch.Tensor:
        """The same, differentiable: `sold` are the chances of a sale, `epsilon` the mean ε."""
        if self.name != "conventional":  # the best weights leave out who sells next to nothing by themselves
            return _Slopes.apply(epsilon, size, self)  # type: ignore[no-any-return, no-untyped-call]
        share = torch.from_numpy(size / size.sum(axis=-1, keepdims=True)).to(epsilon.dtype)
        weight = share * sold
        weight = weight / weight.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        each = (epsilon / sold.clamp_min(1e-6)).clamp_min(CATALOGUE[0])  # of those who sell
        energy = 8.0 * self.dimension / each**2
        bias = (weight - share).abs().sum(dim=-1)
        return ((weight**2 * energy).sum(dim=-1) + bias**2).clamp(max=NOBODY)


class _Slopes(torch.autograd.Function):
    """A bound and its slopes in every ε, by small steps: of optimal weights these are exact to the first order."""

    @staticmethod
    def forward(ctx: Any, epsilon: torch.Tensor, size: FloatArray, objective: Objective) -> torch.Tensor:
        at = np.maximum(epsilon.detach().double().numpy(), 1e-6)
        rows, n = at.shape
        if objective.name == "opt-aggr" and objective.perturbation is None:
            weights = rules.OptAggr(dimension=objective.dimension).weights(at, size)
            bound = error_bound(weights, at, size, dimension=objective.dimension)
            slopes = -16.0 * objective.dimension * weights**2 / at**3  # the envelope theorem
        else:
            moved = at * (1.0 + _RELATIVE_STEP * np.concatenate([np.zeros((1, n)), np.eye(n)])[:, None, :])
            all_bounds = objective.bound(moved.reshape(-1, n), np.tile(size, (n + 1, 1))).reshape(n + 1, rows)
            bound = all_bounds[0]
            slopes = ((all_bounds[1:] - bound) / (_RELATIVE_STEP * at.T)).T
        counts = bound < NOBODY
        ctx.slopes = torch.from_numpy(np.where(counts[:, None], slopes, 0.0)).to(epsilon.dtype)
        return torch.from_numpy(np.minimum(bound, NOBODY)).to(epsilon.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[:, None] * ctx.slopes, None, None


class SoftChoice(torch.autograd.Function):
    """(mean ε, mean payment, chance of a sale) of an owner who chooses softly between all options and none."""

    @staticmethod
    def forward(
        ctx: Any,
        log_price: torch.Tensor,
        limit: torch.Tensor,
        cost: torch.Tensor,
        scale: torch.Tensor,
        eps: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`scale` is the temperature in money; whatever is dearer than `limit` is offered at that."""
        price = log_price.clamp(max=60.0).exp_()
        capped = price >= limit[:, None]
        price = torch.minimum(price, limit[:, None])
        worth = (price - cost) / scale[:, None]
        top = worth.amax(dim=1).clamp_min(0.0)
        chance = (worth - top[:, None]).exp_()
        chance /= (chance.sum(dim=1) + torch.exp(-top))[:, None]
        ctx.save_for_backward(price, chance, capped, scale, eps)
        return chance @ eps, (chance * price).sum(dim=1), chance.sum(dim=1)

    @staticmethod
    def backward(
        ctx: Any, by_epsilon: torch.Tensor, by_payment: torch.Tensor, by_sale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """The slopes of all three in prices and in the limit."""
        price, chance, capped, scale, eps = ctx.saved_tensors
        gain = by_epsilon[:, None] * eps + by_payment[:, None] * price + by_sale[:, None]
        mean = (chance * gain).sum(dim=1, keepdim=True)
        by_price = chance * ((gain - mean) / scale[:, None] + by_payment[:, None])
        return (by_price * price).masked_fill(capped, 0.0), (by_price * capped).sum(dim=1), None, None, None


def _heights() -> FloatArray:
    """From the height at ε = 1 and the slopes of all intervals to the heights at the knots.

    Trained so, slopes beyond the largest ε̄ that training sees stay as they were: prices go on rising there.
    """
    log = np.log(KNOTS)
    low, high = log[:-1], log[1:]
    return np.column_stack([np.ones(len(log)), np.clip(log[:, None], low, high) - np.clip(0.0, low, high)])


class Trainer:
    """Sources of profiles to train on, and the error bound of a menu on others of theirs."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        objective: Objective | None = None,
        unit: float | None = None,
        explorers: int = 0,
        profiles: int = 384,
        held_out: int = 600,
        seed: int = 0,
    ) -> None:
        if not sources or profiles < 2 * len(sources):
            raise InvalidInput("sources, profiles", (len(sources), profiles), "a source, and two profiles for each")
        self._sources, self._objective = sources, objective or Objective()
        self._shape = NetworkMenu(_first_layers(np.random.default_rng((seed, 2))), 0.25, explorers, unit)
        histories = [one.history for one in sources if one.history is not None]
        if histories and len(sources) == 1:
            self._shape = replace(self._shape, seen=Seen.of(histories[0]))
        self._profiles, self._rng = profiles // len(sources), np.random.default_rng((seed, 0))
        rng = np.random.default_rng((seed, 1))
        self._held_out = [source.draw(rng, held_out) for source in sources]
        self._scales = [self._bound(LINEAR, *drawn) for drawn in self._held_out]

    def _bound(self, menu: AnyMenu, bids: BidProfile, budget: FloatArray) -> float:
        bound = self._objective.bound(PostedAuction(menu).run(bids, budget).epsilon, bids.data_size)
        return float(np.minimum(bound, NOBODY).mean())

    def loss(self, menu: AnyMenu) -> float:
        """The mean error bound on validation profiles; over several sources, the mean of its ratios to `LINEAR`'s."""
        bounds = [self._bound(menu, *drawn) for drawn in self._held_out]
        if len(bounds) == 1:
            return bounds[0]
        return float(np.mean([bound / scale for bound, scale in zip(bounds, self._scales, strict=True)]))

    def train(
        self,
        *,
        steps: int = 2400,
        start: NetworkMenu | None = None,
        rate: float = 4e-3,
        temperature: tuple[float, float] = (0.05, 0.005),
    ) -> Iterator[Progress]:
        """Improve a menu by Adam; its state about twenty times on the way, the last one at the end."""
        begin = self._shape if start is None else start
        shape = replace(self._shape, layers=begin.layers, reserve=begin.reserve)
        layers, reserve = _tensors(shape)
        descent = torch.optim.Adam([*layers, reserve], lr=rate, betas=(0.9, 0.98))
        first, last = temperature
        for step in range(steps):
            done = step / steps
            warm, cool = min(1.0, (step + 1) / 30), 0.02 ** max(0.0, (done - 0.4) / 0.6)
            descent.param_groups[0]["lr"] = rate * warm * cool
            tau, spacing = first * (last / first) ** min(1.0, done / FROM), COARSE if done < FROM else FINER
            descent.zero_grad()
            for source, scale in zip(self._sources, self._scales, strict=True):
                weight = 1.0 if len(self._sources) == 1 else 1.0 / (scale * len(self._sources))
                (weight * self._soft_loss(layers, reserve, source, tau, spacing)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([*layers, reserve], 1.0)
            descent.step()
            if (step + 1) % max(1, steps // _REPORTS) == 0 or step + 1 == steps:
                menu = _menu(shape, layers, reserve)
                yield Progress(step + 1, self.loss(menu), menu)

    def _soft_loss(
        self, layers: list[torch.Tensor], reserve: torch.Tensor, source: Source, tau: float, spacing: int
    ) -> torch.Tensor:
        bids, budget = source.draw(self._rng, self._profiles)
        levels = slice(int(self._rng.integers(spacing)), None, spacing)
        epsilon, sold, queue = self.served(layers, reserve, bids, budget, tau, levels)
        return self._objective.soft(epsilon.T, sold.T, queue.size.T).mean()

    def served(
        self,
        layers: list[torch.Tensor],
        reserve: torch.Tensor,
        bids: BidProfile,
        budget: FloatArray,
        tau: float,
        levels: slice,
    ) -> tuple[torch.Tensor, torch.Tensor, Queue]:
        """Mean ε and chance of a sale of everybody in order of service, (n, rows)."""
        unit, explorers = self._shape.unit, self._shape.explorers
        queue = Queue(bids, explorers=explorers, levels=levels)
        situation = queue.situation(budget)
        catalogue = CATALOGUE[queue.catalogue]
        basis = np.maximum(0.0, _tents(catalogue)) @ _heights()

        def tensor(values: FloatArray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

        eps, curve = tensor(catalogue), tensor(basis.T)
        known, typical, share, share_of_all, rest, size = map(
            tensor,
            (*situation.scale(unit), situation.share_of_rest, situation.share_of_all, np.log(queue.rest), queue.size),
        )
        fixed = tensor(np.stack(situation.inputs(unit), axis=-1))
        cost = tensor(np.minimum(queue.costs, 1e30))
        money = tensor(budget)
        scale = tau * size * money / tensor(queue.rest[0])
        kept = torch.sigmoid(reserve)
        nothing = torch.zeros(len(budget))
        sales, epsilon, sold = Sales(nothing, nothing, nothing), [], []
        for turn in range(len(size)):
            log_money = money.clamp_min(1e-12).log() - rest[turn]
            measured = (log_money - typical[turn]).clamp(-MONEY_RANGE, MONEY_RANGE) * known[turn]
            moving = torch.stack(moving_inputs(torch.log, measured, share[turn], sales), dim=1)
            values = torch.cat([moving, fixed[turn]], dim=1)
            for layer in layers[:-1]:
                values = torch.relu(torch.addmm(layer[0], values, layer[1:]))
            values = torch.addmm(layers[-1][0], values, layers[-1][1:])
            log_price = values @ curve + (log_money + size[turn].log())[:, None]
            limit = money * share[turn] ** kept
            chosen, paid, sells = SoftChoice.apply(log_price, limit, cost[turn], scale[turn], eps)  # type: ignore[no-untyped-call]
            money = (money - paid).clamp_min(0.0)
            each = (chosen / sells.clamp_min(1e-6)).clamp_min(CATALOGUE[0])
            sales = Sales(
                sales.declined + share_of_all[turn] * (1.0 - sells),
                sales.noise + 8.0 * (share_of_all[turn] / each) ** 2 * sells,
                sales.squares + chosen**2,
            )
            epsilon.append(chosen)
            sold.append(sells)
        return torch.stack(epsilon), torch.stack(sold), queue


def _tents(epsilon: FloatArray) -> FloatArray:
    """How much each ε has of each knot's height."""
    log = np.log(KNOTS)
    return np.stack([np.interp(np.log(epsilon), log, row) for row in np.eye(len(log))], axis=-1)


def _first_layers(rng: np.random.Generator) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Near `LINEAR`, whatever the inputs."""
    widths, layers = (len(INPUTS), *_HIDDEN, len(KNOTS)), []
    for inputs, outputs in itertools.pairwise(widths):
        layers.append(rng.uniform(-1.0, 1.0, (inputs + 1, outputs)) / np.sqrt(inputs))
    layers[-1] *= 0.1
    layers[-1][0] = np.log(0.9) + np.log(KNOTS)
    layers[-1][1:] = layers[-1][1:] @ _heights().T
    return _rows(layers)


def _rows(layers: Sequence[FloatArray]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """To six digits, which is more than matters and keeps files small."""
    return tuple(tuple(tuple(float(f"{x:.6g}") for x in row) for row in layer) for layer in layers)


def _tensors(menu: NetworkMenu) -> tuple[list[torch.Tensor], torch.Tensor]:
    layers = [np.array(layer) for layer in menu.layers]
    layers[-1] = layers[-1] @ np.linalg.inv(_heights()).T
    share = np.clip(menu.reserve, 1e-3, 1.0 - 1e-3)
    made = [torch.tensor(layer, dtype=torch.float32, requires_grad=True) for layer in layers]
    return made, torch.tensor(float(np.log(share / (1.0 - share))), requires_grad=True)


def _menu(shape: NetworkMenu, layers: Sequence[torch.Tensor], reserve: torch.Tensor) -> NetworkMenu:
    found = [layer.detach().double().numpy() for layer in layers]
    found[-1] = found[-1] @ _heights().T
    return replace(shape, layers=_rows(found), reserve=float(torch.sigmoid(reserve.detach())))
