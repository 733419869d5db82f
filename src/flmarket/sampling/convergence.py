"""What sampling costs in accuracy: the convergence bound of FedAvg with independent participation (SAMP Proposition 1).

With L-smooth, μ-strongly convex losses, E local steps, gradient norms G_n, gradient variances σ_n², equal weights 1/N
and the rate η_r = 2/(max(8L, μE) + μr), after R rounds

    E[F(w_R)] − F* ≤ (1/R) (Σ s_n/q_n + β),     s_n = 8LE G_n² / (μ²N²),
    β = (2L/(μ²E)) D + (12L²/(μ²E)) Γ + (L·max(8L, μE)/(2μE)) ‖w₀ − w*‖²,   D = Σ(σ_n/N)² + 8E² ΣG_n²/N.

The paper prints 4L²/(μE) in the last term, which is this one when 8L ≥ μE and too small otherwise (it follows Li et
al., ICLR 2020, Theorem 1, with γ = max(8L/μ, E)). What would break it: a model that is not strongly convex, for example
a deep network, or softmax regression without an ℓ₂ penalty. The bound is for comparing mechanisms, it is far from
tight.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_number


def convergence_bound(participation: ArrayLike, scale: ArrayLike, *, beta: float, rounds: int) -> float:
    """(1/R)(Σ s_n/q_n + β) for participation q_n and scales s_n (a number or one per client)."""
    q = checked_array("participation", participation)
    if q.max() > 1:
        raise InvalidInput("participation", float(q.max()), "probabilities")
    s = checked_array("scale", scale)
    checked_number("beta", beta, 0.0, 1e300)
    checked_number("rounds", rounds, 1, 1e12)
    if q.min() <= 0:
        return float("inf")
    return float((np.sum(s / q) + beta) / rounds)


@dataclass(frozen=True, eq=False)
class FedAvgConstants:
    """The learning problem's constants; `gradient_norms` are the G_n."""

    smoothness: float
    strong_convexity: float
    local_steps: int
    gradient_norms: FloatArray
    gradient_deviations: FloatArray
    heterogeneity: float
    initial_distance: float

    def __init__(
        self,
        *,
        smoothness: float,
        strong_convexity: float,
        local_steps: int,
        gradient_norms: ArrayLike,
        gradient_deviations: ArrayLike = 0.0,
        heterogeneity: float = 0.0,
        initial_distance: float = 1.0,
    ) -> None:
        mu = checked_number("strong_convexity", strong_convexity, 1e-12, 1e12)
        norms = np.atleast_1d(checked_array("gradient_norms", gradient_norms))
        deviations = checked_array("gradient_deviations", gradient_deviations)
        if deviations.shape not in ((), norms.shape):
            raise InvalidInput("gradient_deviations", deviations.shape, f"one number, or shape {norms.shape}")
        values = {
            "strong_convexity": mu,
            "smoothness": checked_number("smoothness", smoothness, mu, 1e12),
            "local_steps": int(checked_number("local_steps", local_steps, 1, 1e9)),
            "gradient_norms": norms,
            "gradient_deviations": np.broadcast_to(deviations, norms.shape),
            "heterogeneity": checked_number("heterogeneity", heterogeneity, 0.0, 1e12),
            "initial_distance": checked_number("initial_distance", initial_distance, 0.0, 1e12),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def scale(self) -> FloatArray:
        """s_n, one per client."""
        factor = 8 * self.smoothness * self.local_steps / (self.strong_convexity * self.gradient_norms.size) ** 2
        return np.asarray(factor * self.gradient_norms**2)

    @property
    def beta(self) -> float:
        """The part of the bound that no sampling changes."""
        smooth, mu, steps, n = self.smoothness, self.strong_convexity, self.local_steps, self.gradient_norms.size
        noise = np.sum((self.gradient_deviations / n) ** 2) + 8 * steps**2 * np.mean(self.gradient_norms**2)
        start = smooth * max(8 * smooth, mu * steps) / (2 * mu * steps) * self.initial_distance**2
        return float(2 * smooth / (mu**2 * steps) * (noise + 6 * smooth * self.heterogeneity) + start)

    def learning_rate(self, round_index: int) -> float:
        """η_r of the bound, for r = 0, 1, ...; constant within a round."""
        smooth, mu = self.smoothness, self.strong_convexity
        return 2.0 / (max(8 * smooth, mu * self.local_steps) + mu * round_index)

    def bound(self, participation: ArrayLike, rounds: int) -> float:
        """The right-hand side of Proposition 1."""
        return convergence_bound(participation, self.scale, beta=self.beta, rounds=rounds)
