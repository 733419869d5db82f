"""Is it truthful, is it rational? The utility of any report at any true cost, for anything that posts terms.

A client of cost c who reports c' takes part with probability q(c') and is paid r(c') each time: u = q(c')(r(c') − c)
per round. Incentive compatibility: c' = c is best. Individual rationality: u ≥ 0 then. (SAMP section 2.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray
from flmarket.sampling.schedules import Posted

__all__ = ["misreport_gains", "utility"]


def utility(posted: Posted, cost: ArrayLike, reported: ArrayLike | None = None) -> FloatArray:
    """Expected utility per round of reporting `reported` (default: the truth) at these true costs; broadcasts."""
    true_cost = np.asarray(cost, dtype=np.float64)
    q, r = posted.offer(true_cost if reported is None else reported)
    return np.asarray(q * (r - true_cost))


def misreport_gains(posted: Posted, cost: ArrayLike, reported: ArrayLike) -> FloatArray:
    """The most that any of the reports gains over the truth, one number per true cost (vectors in, vector out)."""
    true_cost = np.atleast_1d(np.asarray(cost, dtype=np.float64))
    q, r = posted.offer(np.atleast_1d(np.asarray(reported, dtype=np.float64)))
    best = np.max(q * (r - true_cost[:, None]), axis=1)
    return np.asarray(best - utility(posted, true_cost))
