"""Client sampling with private costs (SAMP): private costs in, participation probabilities and payments out."""

from flmarket.sampling.distributions import (
    CostDistribution,
    Discrete,
    Empirical,
    Histogram,
    TruncatedExponential,
    Uniform,
)
from flmarket.sampling.mechanisms import (
    CompleteInformation,
    FedAvgConstants,
    LinearSchedule,
    OptimalSampling,
    Posted,
    Schedule,
    StepSchedule,
    UniformSampling,
    convergence_bound,
    misreport_gains,
    utility,
)
from flmarket.sampling.prior_independent import SCHEMES, PriorIndependent, SampledClients, terms

__all__ = [
    "SCHEMES",
    "CompleteInformation",
    "CostDistribution",
    "Discrete",
    "Empirical",
    "FedAvgConstants",
    "Histogram",
    "LinearSchedule",
    "OptimalSampling",
    "Posted",
    "PriorIndependent",
    "SampledClients",
    "Schedule",
    "StepSchedule",
    "TruncatedExponential",
    "Uniform",
    "UniformSampling",
    "convergence_bound",
    "misreport_gains",
    "terms",
    "utility",
]
