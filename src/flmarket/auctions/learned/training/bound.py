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


def optimal_bound(epsilon: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """ERR with optimal weights, shape (K,), differentiable in ε."""
    result: torch.Tensor = _OptimalBound.apply(epsilon.clamp_min(_LEAST), share)  # type: ignore[no-untyped-call]
    return result


def conventional_bound(epsilon: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """ERR with the data shares as weights, shape (K,): no bias, and a little of everybody's ε is needed."""
    return (8.0 * share**2 / epsilon.clamp_min(_LEAST) ** 2).sum(dim=-1)


def error_bound_loss(
    epsilon: torch.Tensor, share: torch.Tensor, cap: float = 20.0, *, conventional: bool = False
) -> torch.Tensor:
    """The mean bound of OptAggr or ConvlAggr, its tail beyond `cap` tamed."""
    bound = (conventional_bound if conventional else optimal_bound)(epsilon, share)
    return torch.where(bound < cap, bound, cap * (1.0 + torch.log(bound.clamp_min(cap) / cap))).mean()
