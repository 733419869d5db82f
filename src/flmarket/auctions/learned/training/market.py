"""What training needs to know of the market: profiles, what they sell as a loss, and the best lie with a gradient.

**Misreports by ascent**, for networks whose prices look at the owners' asks. Every owner of every profile lies about
her own bid while all others stay honest; all K·n lies climb at once. A lie is a factor on the valuation, on ε̄ and on
the data size (the last two at most 1: more than there is cannot be delivered). Each step moves along the sign of the
gradient, by a length that shrinks, and the best lie seen is kept; the next visit to the same profile starts from it,
and a second start is drawn afresh.

For a cleared menu there is a soft clearing with a gradient, and the best lie in closed form.

**Clearing with a gradient.** Multipliers are those of the auction as deployed: owners take their best choice, found by
bisection without a gradient. A soft market, in which choices are a softmax of the owner's surplus (temperature × her
full cost), has a smooth spending, whose implicit derivative is used at that point. Clearing the soft market itself
would flatter the network: it sells a part of the owner at the margin, where the deployed market stops short of her.

**The best lie.** If prices come from data sizes alone, a report (valuation, ε̄) acts only through the demand κ(x) that
it shows the market, and what it brings is x·w·κ(x) at the multiplier it causes. Among all demands that end at a given ε
the steady one, "I sell exactly ε whatever the price", brings the highest multiplier, since any other makes the market
spend more on the way. So the best lie about everything is found over two numbers, the ε sold and the records offered,
on a grid that misses little: no ascent over valuations is needed.

Tensors here have the sub-bids first, (M+1, K, F, n): K profiles, the F owners whose point of view is taken, and the n
owners of the market. Sums over few sub-bids are then long vector operations.

Where training profiles come from, a batch of them as tensors, and the error bound of what they sell as a loss.

A source is a named population or a broker's own history: one profile of past bids, of which owners are drawn without
repetition for each round. Valuations enter as tables over fractions of ε̄, so that any valuation can be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flmarket import populations
from flmarket.aggregation import Aggregation, OptAggr, error_bound
from flmarket.auctions.learned.network import Inputs, Offer, Settings, curve_position, forward
from flmarket.bids import BidProfile, FloatArray
from flmarket.errors import ConfigError, InvalidInput
from flmarket.files import whole_file

FINE = 64  # points of a valuation's table


@dataclass(frozen=True)
class Source:
    """Draws profiles of `owners` bidders, with budgets: a factor times all costs, or one fixed amount of money."""

    population: str | None = None
    history: BidProfile | None = None
    owners: int = 10
    factor: tuple[float, float] = (0.1, 2.0)
    budget: float | None = None

    def __post_init__(self) -> None:
        if (self.population is None) == (self.history is None):
            raise InvalidInput("source", (self.population, self.history), "a population or a history of bids")
        if self.history is not None and self.history.n < self.owners:
            raise InvalidInput("owners", self.owners, f"at most the {self.history.n} bids of the history")

    def draw(self, rng: np.random.Generator, profiles: int) -> tuple[BidProfile, np.ndarray]:
        """Profiles of shape (profiles, owners) and their budgets."""
        if self.population is not None:
            bids = populations.get(self.population).sample(rng, profiles, self.owners)
        else:
            assert self.history is not None
            total = self.history.n
            rows = np.argsort(rng.random((profiles, total)), axis=-1)[:, : self.owners]
            bids = self.history[rows]
        if self.budget is not None:
            return bids, np.full(profiles, self.budget)
        return bids, rng.uniform(*self.factor, profiles) * bids.full_cost.sum(axis=-1)


@dataclass(frozen=True)
class Batch:
    """K profiles of n owners: sizes in shares of all records, ε̄, and cost over budget at fractions 0..1 of ε̄."""

    size: torch.Tensor  # (K, n)
    privacy: torch.Tensor  # (K, n)
    table: torch.Tensor  # (K, n, FINE + 1): the cost of selling everything at that fraction, over the budget

    @property
    def cost(self) -> torch.Tensor:
        """Full cost over budget, (K, n)."""
        return self.table[..., -1]

    def positions(self, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the sub-bids lie between the knots of a price curve, (K, n, M+1)."""
        interval, into = curve_position(settings, self.privacy.numpy())
        return torch.as_tensor(interval), torch.as_tensor(into).to(self.table.dtype)

    def asks(self, items: int, privacy: torch.Tensor | float = 1.0) -> torch.Tensor:
        """True cost over budget of sub-bids m·(privacy·ε̄)/M, shape (…, M+1); `privacy` is a fraction of ε̄."""
        grid = torch.arange(items + 1, dtype=self.table.dtype) / items
        at = (grid * privacy[..., None] if isinstance(privacy, torch.Tensor) else grid * privacy) * FINE
        return interpolate(self.table, at)


def interpolate(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """`table` (…, points) read at fractional positions `at` (…, q), linearly; differentiable in `at`."""
    at = at + torch.zeros_like(table[..., :1])  # to one shape
    table = table.expand(*at.shape[:-1], table.shape[-1])
    low = at.detach().floor().clamp(0, table.shape[-1] - 2)
    index = low.to(torch.int64)
    left, right = table.gather(-1, index), table.gather(-1, index + 1)
    return left + (at - low) * (right - left)


def make_batch(bids: BidProfile, budget: np.ndarray, dtype: torch.dtype = torch.float32) -> Batch:
    """Tensors of profiles of shape (K, n)."""
    epsilon = bids.privacy_budget[..., None] * (np.arange(FINE + 1) / FINE)
    value = bids.valuations.reshape((*bids.shape, 1)).per_record(epsilon)
    cost = bids.data_size[..., None] * value / np.maximum(budget, 1e-300)[:, None, None]
    share = bids.data_size / bids.data_size.sum(axis=-1, keepdims=True)
    return Batch(*(torch.tensor(x, dtype=dtype) for x in (share, bids.privacy_budget, cost)))


_LEAST = 1e-3  # the ε at which nothing counts as sold


def _bound(weights: torch.Tensor, epsilon: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """ERR of these weights."""
    return (8.0 * weights**2 / epsilon**2).sum(dim=-1) + (weights - share).abs().sum(dim=-1) ** 2


def optimal_bound(epsilon: torch.Tensor, share: torch.Tensor, *, least: float = _LEAST) -> torch.Tensor:
    """ERR with optimal weights, shape (K,), differentiable in ε; an ε below `least` counts as that.

    At the optimal weights λ the derivative of min_λ ERR(λ; ε) is that of ERR at fixed λ, dERR/dε_i = −2·8L²λ_i²/ε_i³
    (the envelope theorem). So no solver is differentiated: the weights are constants here.
    """
    sold, known = epsilon.clamp_min(least), share.detach()
    weights = OptAggr().weights(sold.detach().numpy(), known.numpy())
    return _bound(torch.as_tensor(weights).to(epsilon.dtype), sold, known)


def conventional_bound(epsilon: torch.Tensor, share: torch.Tensor, *, least: float = _LEAST) -> torch.Tensor:
    """ERR of ConvlAggr, shape (K,): weights are data shares among those who sell more than `least`.

    Losers have no voice, which is a bias. Where nobody sells, everybody counts as selling `least`.
    """
    sells = epsilon > least
    sells = sells | ~sells.any(dim=-1, keepdim=True)
    weights = share * sells
    weights = weights / weights.sum(dim=-1, keepdim=True)
    sold = torch.where(sells, epsilon.clamp_min(least), torch.ones_like(epsilon))
    return _bound(weights, sold, share)


def error_bound_loss(
    epsilon: torch.Tensor, share: torch.Tensor, cap: float = 20.0, *, conventional: bool = False
) -> torch.Tensor:
    """The mean bound of OptAggr or ConvlAggr.

    It has a heavy tail where hardly anybody sells; beyond `cap` it grows like a logarithm, so that such rounds pull
    without drowning the others.
    """
    bound = (conventional_bound if conventional else optimal_bound)(epsilon, share)
    return torch.where(bound < cap, bound, cap * (1.0 + torch.log(bound.clamp_min(cap) / cap))).mean()


class Training:
    """What trainings of all networks share: parameters, Adam, held-out profiles, and checkpoints.

    A subclass says what else has to be kept to go on as if nothing had happened (`state`, and its inverse `restore`).
    """

    def __init__(self, preset: Any, source: Source, seed: int, validation: int, first: Mapping[str, Any]) -> None:
        self.preset, self.source, self.seed = preset, source, seed
        self.parameters = {key: torch.tensor(value, requires_grad=True) for key, value in first.items()}
        self.optimiser = torch.optim.Adam(list(self.parameters.values()), lr=preset.schedule.rate)
        self.held_out = source.draw(np.random.default_rng((seed, 1)), validation)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""
        return {"preset": self.preset.name, "settings": self.preset.settings, "seed": self.seed}

    def state(self) -> dict[str, Any]:
        """What a subclass keeps."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Everything needed to go on; written whole or not at all."""
        kept = self.identity() | {"settings": self.preset.settings.to_dict(), "optimiser": self.optimiser.state_dict()}
        parameters = {key: value.detach() for key, value in self.parameters.items()}
        with whole_file(path) as file:
            torch.save(kept | {"parameters": parameters} | self.state(), file)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same training."""
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True)
            state["settings"] = type(self.preset.settings).from_dict(state["settings"])
        except Exception as error:
            raise ConfigError("checkpoint", str(path), f"a checkpoint of this command ({error})") from None
        if differing := [key for key, mine in self.identity().items() if state.get(key) != mine]:
            raise ConfigError("checkpoint", str(path), f"one of this training; it differs in {', '.join(differing)}")
        with torch.no_grad():
            for key, value in self.parameters.items():
                value.copy_(state["parameters"][key])
        self.optimiser.load_state_dict(state["optimiser"])
        self.restore(state)


def bound_and_empty(epsilon: FloatArray, size: FloatArray, rule: Aggregation | None = None) -> tuple[float, float]:
    """The mean error bound (OptAggr's, or that of `rule`), and the share of rounds without a sale, left out of it."""
    bound = error_bound((rule or OptAggr()).weights(epsilon, size), epsilon, size)
    sold = bound[np.isfinite(bound)]
    return float(sold.mean()) if sold.size else float("inf"), 1 - sold.size / bound.size


Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Honest:
    """Soft outcome of honest bids: expected ε and utility over budget (K, n)."""

    epsilon: torch.Tensor
    utility: torch.Tensor


def choice_chances(offer: Offer, ask: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Chances of every sub-bid and what it is paid over the budget, as `LearnedAuction` deploys them but soft."""
    paid = offer.share[..., None] * offer.price
    surplus = paid - ask
    sellable = surplus.detach() >= 0
    sellable[..., 0] = True
    logits = (surplus / (temperature * ask[..., -1:].clamp_min(1e-9))).masked_fill(~sellable, -torch.inf)
    return torch.softmax(logits, dim=-1), paid


def honest_outcome(settings: Settings, parameters: Parameters, batch: Batch, temperature: float) -> Honest:
    """Honest bids through the network."""
    ask = batch.asks(settings.items)
    offer = forward(torch, settings, parameters, Inputs(batch.size, ask, batch.privacy, batch.positions(settings)))
    chance, paid = choice_chances(offer, ask, temperature)
    grid = torch.arange(settings.items + 1, dtype=ask.dtype) / settings.items
    mean = (chance * grid).sum(dim=-1)
    return Honest(mean * batch.privacy, (chance * (paid - ask)).sum(dim=-1))


def lying_utility(
    settings: Settings, parameters: Parameters, batch: Batch, lie: torch.Tensor, temperature: float
) -> torch.Tensor:
    """True utility over budget (K, n) of owner f when she alone reports by `lie` (K, n, 3), logarithms of factors."""
    k, n = batch.size.shape
    items, factor = settings.items, lie.exp()
    true_cost = factor[..., 2:] * batch.asks(items, factor[..., 1])  # (K, F, M+1)
    told = torch.eye(n, dtype=lie.dtype)
    keep = 1.0 - told

    def with_lie(honest: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """(K, F, n, …) where owner f's own entry is replaced."""
        mask = told.reshape(1, n, n, *([1] * (honest.dim() - 2)))
        return honest[:, None] * (1.0 - mask) + own[:, :, None] * mask

    size = batch.size[:, None] * (keep + told * factor[..., 2:])
    share = (size / size.sum(dim=-1, keepdim=True)).reshape(k * n, n)
    privacy = with_lie(batch.privacy, batch.privacy * factor[..., 1]).reshape(k * n, n)
    ask = with_lie(batch.asks(items), factor[..., :1] * true_cost).reshape(k * n, n, items + 1)
    offer = forward(torch, settings, parameters, Inputs(share, ask, privacy, _position(settings, privacy)))
    chance, paid = choice_chances(offer, ask, temperature)
    own_chance, own_paid = (_own(x.reshape(k, n, n, items + 1)) for x in (chance, paid))
    return (own_chance * (own_paid - true_cost)).sum(dim=-1)


def _position(settings: Settings, privacy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`curve_position` with a gradient in ε̄."""
    knots = torch.tensor((0.0, *settings.knots), dtype=privacy.dtype)
    epsilon = privacy[..., None] * (torch.arange(settings.items + 1, dtype=privacy.dtype) / settings.items)
    interval = (torch.searchsorted(knots, epsilon.detach(), right=True) - 1).clamp(0, knots.numel() - 2)
    into = (epsilon - knots[interval]) / (knots[interval + 1] - knots[interval])
    return interval, into.clamp(max=1.0)


def _own(x: torch.Tensor) -> torch.Tensor:
    return torch.diagonal(x, dim1=1, dim2=2).movedim(-1, 1)


def climb(
    settings: Settings,
    parameters: Parameters,
    batch: Batch,
    start: torch.Tensor,
    temperature: float,
    *,
    steps: int,
    length: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best lie seen within `steps` steps from `start`, and its utility over budget."""
    frozen = {key: value.detach() for key, value in parameters.items()}
    lie = start.clone()
    best, best_lie = torch.full(start.shape[:2], -torch.inf), start.clone()
    for step in range(steps):
        lie.requires_grad_(True)
        utility = lying_utility(settings, frozen, batch, lie, temperature)
        (slope,) = torch.autograd.grad(utility.sum(), lie)
        with torch.no_grad():
            better = utility > best
            best, best_lie = torch.where(better, utility, best), torch.where(better[..., None], lie, best_lie)
            lie = lie.detach() + length * (0.1 ** (step / steps)) * slope.sign()
            lie[..., 0].clamp_(-4.0, 4.0)
            lie[..., 1:].clamp_(-3.0, 0.0)
    return best_lie.detach(), best.detach()


_TOP = 9.0  # the logarithm of the largest multiplier looked at
MARGIN = 2.0  # by which soft choices lean towards selling nothing, in units of the temperature


@dataclass(frozen=True)
class Cleared:
    """Outcome of honest bids, all (K, n): expected ε of soft choices, and ε of the best choice with the derivative of
    that; utility over budget of the best choice, multiplier."""

    epsilon: torch.Tensor
    sold: torch.Tensor
    utility: torch.Tensor
    multiplier: torch.Tensor


@dataclass(frozen=True)
class _Market:
    """Offers to n owners from F points of view: shares (K, F, n), prices and asks (M+1, K, F, n), scale (K, F, n)."""

    share: torch.Tensor
    price: torch.Tensor
    ask: torch.Tensor
    scale: torch.Tensor
    caution: torch.Tensor

    def demand(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Soft choices at multipliers x (K, F), and the expected price curve at them (K, F, n)."""
        logits = (x[..., None] * self.share * self.price - self.ask) / self.scale
        chance = torch.softmax(logits, dim=0)
        return chance, (chance * self.price).sum(dim=0)

    def root(self, counted: torch.Tensor, fixed: torch.Tensor, steps: int = 16) -> torch.Tensor:
        """The largest x (K, F) with x·(Σ_j counted_j w_j κ_j(x) + fixed) ≤ 1, hard choices, with a soft gradient."""
        with torch.no_grad():
            weight, offered = counted * self.share, self.share * self.price
            low, high = torch.zeros_like(fixed), torch.full_like(fixed, _TOP)
            for _ in range(steps):
                middle = 0.5 * (low + high)
                x = middle.exp()
                enough = x * ((weight * self.hard(x[..., None], offered)).sum(dim=-1) + fixed) <= 1
                low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
            root, inside = low.exp(), high < _TOP
        chance, mean = self.demand(root)
        spent = root * ((counted * self.share * mean).sum(dim=-1) + fixed)
        with torch.no_grad():
            spread = (chance * self.price**2).sum(dim=0) - mean**2
            slope = spent / root + root * (weight * self.share * spread / self.scale).sum(dim=-1)
        # a step of value 0 that carries the gradient of the implicit function
        return torch.where(inside, root - (spent - spent.detach()) / slope.clamp_min(1e-9), root)

    def hard(self, x: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
        """The price curve at every owner's best choice; one sub-bid at a time, which stays in the cache."""
        best = torch.zeros_like(x * self.share)
        taken = torch.zeros_like(best)
        for offer, ask, price in zip(offered[1:], self.ask[1:], self.price[1:], strict=True):
            surplus = (x * offer).sub_(ask)
            taken = torch.where(surplus > best, price, taken)
            best = torch.maximum(best, surplus)
        return taken


def _market(
    settings: Settings, parameters: Parameters, batch: Batch, share: torch.Tensor, temperature: float
) -> _Market:
    """The offers when data shares (K, F, n) are reported; asks and scales are the honest ones."""
    k, f, n = share.shape
    interval, into = (x[:, None].expand(k, f, n, -1).reshape(k * f, n, -1) for x in batch.positions(settings))
    inputs = Inputs(share.reshape(k * f, n), None, None, (interval, into))
    offer = forward(torch, settings, parameters, inputs)
    price = offer.price.movedim(-1, 0).reshape(settings.items + 1, k, f, n)
    ask = batch.asks(settings.items).movedim(-1, 0)[:, :, None].contiguous()
    scale = temperature * batch.cost.clamp_min(1e-9)[:, None]
    return _Market(offer.share.reshape(k, f, n), price, ask, scale, offer.caution.reshape(k, f, n))


def clear(settings: Settings, parameters: Parameters, batch: Batch, temperature: float) -> Cleared:
    """Honest bids through the network and the soft market."""
    market = _market(settings, parameters, batch, batch.size[:, None], temperature)
    n = batch.size.shape[-1]
    share, caution, price = market.share[:, 0], market.caution[:, 0], market.price[:, :, 0]
    # x_i counts the others in full, and of her own demand what caution leaves
    x = market.root(1.0 - torch.eye(n, dtype=share.dtype) * caution[..., None], caution * share)
    surplus = x * share * price - market.ask[:, :, 0]
    # an owner just at the price that would make her sell does not: the market stops short of her
    chance = torch.softmax(
        surplus / market.scale[:, 0] - MARGIN * (torch.arange(len(surplus)) > 0)[:, None, None], dim=0
    )
    grid = torch.arange(settings.items + 1, dtype=share.dtype)[:, None, None] / settings.items
    best, soft = surplus.max(dim=0), (chance * grid).sum(dim=0) * batch.privacy
    sold = best.indices / settings.items * batch.privacy
    return Cleared(soft, sold + (soft - soft.detach()), best.values, x)


def _lying_shares(size: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Data shares (K, F, n) when owner f of F = n reports `factor` (K, F) of her records."""
    n = size.shape[-1]
    told = size[:, None] * (1.0 + torch.eye(n, dtype=size.dtype) * (factor[..., None] - 1.0))
    return told / told.sum(dim=-1, keepdim=True)


def _of_self(x: torch.Tensor) -> torch.Tensor:
    """Owner f's own entry of (…, K, F, n): shape (…, K, F)."""
    return torch.diagonal(x, dim1=-2, dim2=-1)


@torch.no_grad()
def best_commitment(
    settings: Settings,
    parameters: Parameters,
    batch: Batch,
    honest: torch.Tensor,
    factors: torch.Tensor,
    points: int = 10,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every owner the sub-bid and the part of her records (of `factors`) to commit to; shapes (K, n).

    The market's demand is looked at in `points` places around the multipliers of `honest` bids, (K, n).
    """
    ask = batch.asks(settings.items)
    others = 1.0 - torch.eye(batch.size.shape[-1], dtype=ask.dtype)
    logs = honest.detach().log()[..., None] + torch.linspace(-0.7, 1.7, points, dtype=ask.dtype)
    best = torch.full_like(batch.size, -torch.inf)
    best_item, best_factor = torch.zeros_like(best, dtype=torch.int64), torch.ones_like(best)
    for factor in factors.tolist():
        shares = _lying_shares(batch.size, torch.full_like(batch.size, factor))
        market = _market(settings, parameters, batch, shares, 1.0)
        weight, offered = others * market.share, market.share * market.price
        looks = [(weight * market.hard(x[..., None], offered)).sum(dim=-1) for x in logs.exp().unbind(-1)]
        rest = torch.stack(looks, dim=-1)
        w, caution, price = _of_self(market.share), _of_self(market.caution), _of_self(market.price).movedim(0, -1)
        spoken = w[..., None] * (price + caution[..., None] * (1.0 - price))  # (K, n, M+1)
        x = _crossing(logs[:, :, None], torch.log(rest[:, :, None] + spoken[..., None] + 1e-12)).exp()
        value, item = (x * w[..., None] * price - factor * ask).max(dim=-1)
        better = value > best
        best = torch.where(better, value, best)
        best_item, best_factor = torch.where(better, item, best_item), torch.where(better, factor, best_factor)
    return best_item, best_factor


def _crossing(logs: torch.Tensor, spent: torch.Tensor) -> torch.Tensor:
    """The logarithm of x at which log x + `spent` crosses 0; demand is taken to be steady between places looked at."""
    count = ((logs + spent) <= 0).sum(dim=-1)
    index = count.clamp(1, logs.shape[-1]) - 1
    steady = -spent.gather(-1, index[..., None])[..., 0]  # where x·demand = 1 if demand stays as it is here
    following = logs.expand_as(spent).gather(-1, (index + 1).clamp_max(logs.shape[-1] - 1)[..., None])[..., 0]
    return torch.where(count == logs.shape[-1], steady, torch.minimum(steady, following))


def commitment_utility(
    settings: Settings,
    parameters: Parameters,
    batch: Batch,
    temperature: float,
    item: torch.Tensor,
    factor: torch.Tensor,
) -> torch.Tensor:
    """What such commitments bring, over the budget, (K, n), with its gradient."""
    market = _market(settings, parameters, batch, _lying_shares(batch.size, factor), temperature)
    w, caution = _of_self(market.share), _of_self(market.caution)
    price = _of_self(market.price).gather(0, item[None])[0]
    fixed = w * (price + caution * (1.0 - price))
    x = market.root(1.0 - torch.eye(batch.size.shape[-1], dtype=w.dtype), fixed)
    at = item.to(batch.table.dtype)[..., None] / settings.items * FINE
    return x * w * price - factor * interpolate(batch.table, at)[..., 0]
