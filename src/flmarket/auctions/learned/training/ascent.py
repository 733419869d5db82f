"""Misreports by ascent, for networks whose prices look at the owners' asks.

Every owner of every profile lies about her own bid while all others stay honest; all K·n lies climb at once. A lie is
a factor on the valuation, on ε̄ and on the data size (the last two at most 1: more than there is cannot be
delivered). Each step moves along the sign of the gradient, by a length that shrinks, and the best lie seen is kept;
the next visit to the same profile starts from it, and a second start is drawn afresh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flmarket.auctions.learned.network import Inputs, Offer, forward
from flmarket.auctions.learned.settings import Settings
from flmarket.auctions.learned.training.data import Batch

__all__ = ["Honest", "climb", "honest_outcome", "lying_utility"]

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
