"""Training a cleared menu: soft clearing with a gradient, and the best lie in closed form.

**Clearing with a gradient.** Multipliers are those of the auction as deployed: owners take their best choice, found
by bisection without a gradient. A soft market, in which choices are a softmax of the owner's surplus (temperature ×
her full cost), has a smooth spending, whose implicit derivative is used at that point. Clearing the soft market
itself would flatter the network: it sells a part of the owner at the margin, where the deployed market stops short of
her.

**The best lie.** If prices come from data sizes alone, a report (valuation, ε̄) acts only through the demand κ(x)
that it shows the market, and what it brings is x·w·κ(x) at the multiplier it causes. Among all demands that end at a
given ε the steady one, "I sell exactly ε whatever the price", brings the highest multiplier, since any other makes
the market spend more on the way. So the best lie about everything is found over two numbers, the ε sold and the
records offered, on a grid that misses little: no ascent over valuations is needed.

Tensors here have the sub-bids first, (M+1, K, F, n): K profiles, the F owners whose point of view is taken, and the n
owners of the market. Sums over few sub-bids are then long vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flmarket.auctions.learned.network import Inputs, forward
from flmarket.auctions.learned.settings import Settings
from flmarket.auctions.learned.training.data import FINE, Batch, interpolate

__all__ = ["Cleared", "best_commitment", "clear", "commitment_utility"]

Parameters = dict[str, torch.Tensor]
_TOP = 9.0  # the logarithm of the largest multiplier looked at
MARGIN = 2.0  # by which soft choices lean towards selling nothing, in units of the temperature


@dataclass(frozen=True)
class Cleared:
    """Outcome of honest bids, all (K, n): expected ε of soft choices, and ε of the best choice with the derivative of
    that; utility over budget of the best choice, multiplier, pay."""

    epsilon: torch.Tensor
    sold: torch.Tensor
    utility: torch.Tensor
    multiplier: torch.Tensor
    paid: torch.Tensor


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
    paid = x * share * (chance * price).sum(dim=0)
    best, soft = surplus.max(dim=0), (chance * grid).sum(dim=0) * batch.privacy
    sold = best.indices / settings.items * batch.privacy
    return Cleared(soft, sold + (soft - soft.detach()), best.values, x, paid)


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
