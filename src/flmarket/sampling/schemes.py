"""The sampling schemes by name, and the terms (q, r) that each gives to clients with known costs.

One place for what a market file, the audit and the experiments call a scheme. "complete" is told the costs and spends
its budget on exactly these; "optimal" and "uniform" know the distribution; "prior-independent" knows c_max and learns
the rest from the reports, client by client. What would break the last: clients in an order that depends on their costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flmarket.errors import UnknownName
from flmarket.sampling.checks import checked_reports
from flmarket.sampling.distributions import TruncatedExponential, Uniform
from flmarket.sampling.mechanisms import CompleteInformation, OptimalSampling, UniformSampling
from flmarket.sampling.prior_independent import PriorIndependent, SampledClients
from flmarket.sampling.tabulated import Empirical

__all__ = ["SCHEMES", "known_scheme", "terms"]

PriorBased = OptimalSampling | UniformSampling | CompleteInformation

_KNOWN: dict[str, type[PriorBased]] = {
    "optimal": OptimalSampling,
    "uniform": UniformSampling,
    "complete": CompleteInformation,
}
SCHEMES = (*_KNOWN, "prior-independent")


def known_scheme(name: str, distribution: Uniform | TruncatedExponential, budget_per_client: float) -> PriorBased:
    """One of the schemes that post the same schedule to everybody."""
    if name not in _KNOWN:
        raise UnknownName("scheme", name, f"one of {', '.join(_KNOWN)}")
    return _KNOWN[name].from_distribution(distribution, budget_per_client)


def terms(
    name: str,
    costs: ArrayLike,
    distribution: Uniform | TruncatedExponential,
    budget_per_client: float,
    *,
    fraction: float = 0.05,
    rng: np.random.Generator | None = None,
) -> SampledClients:
    """Everybody's (q, r) if all report these costs; `budget_per_client` is for one round, in expectation.

    "prior-independent" serves clients as they come, or in an order that `rng` draws (SAMP Algorithm 1, line 10).
    """
    reports = np.atleast_1d(checked_reports(costs, distribution.maximum))
    if name == "prior-independent":
        order = np.arange(reports.size) if rng is None else rng.permutation(reports.size)
        budget, place = budget_per_client * reports.size, np.argsort(order)
        served = PriorIndependent(budget, distribution.maximum, reports.size, fraction).run(reports[order])
        return SampledClients(served.participation[place], served.payment[place])
    if name not in _KNOWN:
        raise UnknownName("scheme", name, f"one of {', '.join(SCHEMES)}")
    if name == "complete":
        return SampledClients(
            *CompleteInformation.from_distribution(Empirical(reports), budget_per_client).offer(reports)
        )
    return SampledClients(*known_scheme(name, distribution, budget_per_client).offer(reports))
