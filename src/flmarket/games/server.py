"""The server's side: accuracy grows with everybody's ρ, and R is what it costs (STACK equations 9, 11, 17).

With participants S, κ = m²/(2dη²TL²) (the paper leaves out the clip L, that is, has L = 1) and ρ_i = R·x_i,

    U(R) = (λ/2)[1 + g(R)] − R,     g(R) = exp(−(1/|S|) Σ_S log(1 + 1/(X_i R))),     X_i = κ x_i.

Three accounts of the noise:

- `"printed"`: the above. It charges the server the noise of single users, as if the model did not average them. R is
  split among |S| users, so U *falls* as users join: the paper's Figure 3 shows the opposite and does not follow from
  its equations (docs/errata.md E18).
- `"averaged"`: line 6 of the paper's Algorithm 1 moves the model by η/|S| times the sum, so a user's noise arrives
  divided by |S|: the same formula with |S|²X_i. Both trends of Figure 3 follow.
- `"pooled"`: the noise of the average that the server applies when users weigh in proportion to ρ_i (inverse variance,
  the aggregation rule "var-opt"): Σ w_i²σ_i² ∝ 1/Σρ, the same formula with one X = κ Σx_i. Figure 3's trends follow.

Linear costs: x does not depend on R. Writing g(R) = R·exp(mean(log X_i − log(1 + X_i R))) is exact down to R = 0, where

    U'(R) = (λ/2) exp(mean(log X_i − log(1 + X_i R)))·mean(1/(1 + X_i R)) − 1

decreases strictly, so there is one maximiser: 0 if (λ/2)·(geometric mean of X) ≤ 1, else the root of U', which lies
below λ/2 because U(R) < λ − R and U(0) = λ/2. (The paper has U(0) = 0 and always an interior optimum: E6.)

Other costs: concavity is not proved. U is searched over (0, λ/2) on a logarithmic grid, the best bracket is refined,
and R = 0 is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar

__all__ = ["NoiseAccount", "accuracy_term", "linear_gradient", "linear_optimum", "noisy_units", "searched_optimum"]

FloatArray = NDArray[np.float64]
NoiseAccount = Literal["printed", "averaged", "pooled"]


def accuracy_term(scaled_rho: FloatArray, account: NoiseAccount) -> float:
    """g at privacy budgets scaled by κ, over those who take part (ρ > 0); 0 if nobody does."""
    scaled = noisy_units(scaled_rho, account)
    return float(np.exp(-np.mean(np.log1p(1.0 / scaled)))) if scaled.size else 0.0


def noisy_units(scaled_rho: FloatArray, account: NoiseAccount) -> FloatArray:
    """What the mean of g runs over: every participant, her noise divided or not, or all of them pooled into one."""
    taking_part = scaled_rho[scaled_rho > 0]
    if account == "pooled":
        return np.atleast_1d(taking_part.sum())[: taking_part.size]
    return taking_part * float(taking_part.size) ** 2 if account == "averaged" else taking_part


def linear_gradient(scaled: FloatArray, weight: float, reward: float) -> float:
    """U'(R) for linear costs; `scaled` are the X_i of `noisy_units`."""
    level = np.exp(np.mean(np.log(scaled) - np.log1p(scaled * reward)))
    return float(weight / 2 * level * np.mean(1.0 / (1.0 + scaled * reward)) - 1.0)


def linear_optimum(scaled: FloatArray, weight: float) -> float:
    """R* for linear costs."""
    if linear_gradient(scaled, weight, 0.0) <= 0:
        return 0.0
    return float(
        brentq(lambda reward: linear_gradient(scaled, weight, reward), 0.0, weight / 2, xtol=1e-300, rtol=1e-14)
    )


def searched_optimum(utility: Callable[[float], float], weight: float, *, points: int = 97) -> float:
    """The best R in [0, λ/2] by grid and refinement, 0 included."""
    grid = weight / 2 * np.logspace(-9, 0, points)
    values = np.array([utility(float(reward)) for reward in grid])
    best = int(np.argmax(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    found = minimize_scalar(
        lambda log_reward: -utility(float(np.exp(log_reward))),
        bounds=(np.log(low), np.log(high)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(np.exp(found.x)) if -found.fun > weight / 2 else 0.0
