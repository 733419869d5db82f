"""The error bound as a loss: exact OptAggr forward, the envelope theorem backward.

At the optimal weights λ the derivative of min_λ ERR(λ; ε) is that of ERR at fixed λ: dERR/dε_i = −2·8L²λ_i²/ε_i³. So no
solver is differentiated. The bound has a heavy tail where hardly anybody sells; beyond `cap` it grows like a logarithm,
so that such rounds pull without drowning the others.
"""

from __future__ import annotations

from typing import Any

import torch

from flmarket.aggregation import OptAggr

__all__ = ["conventional_bound", "error_bound_loss", "optimal_bound"]

_LEAST = 1e-3  # the ε at which nothing counts as sold


class _OptimalBound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, epsilon: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        weights = torch.as_tensor(OptAggr().weights(epsilon.detach().numpy(), share.detach().numpy()))
        weights = weights.to(epsilon.dtype)
        ctx.save_for_backward(epsilon, weights)
        variance = (8.0 * weights**2 / epsilon**2).sum(dim=-1)
        return variance + (weights - share).abs().sum(dim=-1) ** 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        epsilon, weights = ctx.saved_tensors
        return gradients[0][..., None] * (-16.0 * weights**2 / epsilon**3), None


def optimal_bound(epsilon: torch.Tensor, share: torch.Tensor, *, least: float = _LEAST) -> torch.Tensor:
    """ERR with optimal weights, shape (K,), differentiable in ε; an ε below `least` counts as that."""
    result: torch.Tensor = _OptimalBound.apply(epsilon.clamp_min(least), share)  # type: ignore[no-untyped-call]
    return result


def conventional_bound(epsilon: torch.Tensor, share: torch.Tensor, *, least: float = _LEAST) -> torch.Tensor:
    """ERR of ConvlAggr, shape (K,): weights are data shares among those who sell more than `least`.

    Losers have no voice, which is a bias. Where nobody sells, everybody counts as selling `least`.
    """
    sells = epsilon > least
    sells = sells | ~sells.any(dim=-1, keepdim=True)
    weights = share * sells
    weights = weights / weights.sum(dim=-1, keepdim=True)
    sold = torch.where(sells, epsilon.clamp_min(least), torch.ones_like(epsilon))
    variance = (8.0 * weights**2 / sold**2).sum(dim=-1)
    return variance + (weights - share).abs().sum(dim=-1) ** 2


def error_bound_loss(
    epsilon: torch.Tensor, share: torch.Tensor, cap: float = 20.0, *, conventional: bool = False
) -> torch.Tensor:
    """The mean bound of OptAggr or ConvlAggr, its tail beyond `cap` tamed."""
    bound = (conventional_bound if conventional else optimal_bound)(epsilon, share)
    return torch.where(bound < cap, bound, cap * (1.0 + torch.log(bound.clamp_min(cap) / cap))).mean()
