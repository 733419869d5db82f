"""Where training profiles come from, a batch of them as tensors, and the error bound of what they sell as a loss.

A source is a named population or a broker's own history: one profile of past bids, of which owners are drawn without
repetition for each round. Valuations enter as tables over fractions of ε̄, so that any valuation can be trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flmarket import populations
from flmarket.aggregation import OptAggr
from flmarket.auctions.learned.network import Settings, curve_position
from flmarket.bids import BidProfile
from flmarket.errors import ConfigError, InvalidInput

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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a trainer's `save` wrote."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:
        raise ConfigError("checkpoint", str(path), f"a checkpoint of this command ({error})") from None
    return state
