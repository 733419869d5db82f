"""Client sampling with private costs (SAMP): private costs in, participation probabilities and payments out."""

from flmarket.sampling.convergence import FedAvgConstants, convergence_bound
from flmarket.sampling.distributions import (
    CostDistribution,
    Discrete,
    Empirical,
    Histogram,
    TruncatedExponential,
    Uniform,
)
from flmarket.sampling.mechanisms import CompleteInformation, OptimalSampling, UniformSampling
from flmarket.sampling.prior_independent import SCHEMES, PriorIndependent, SampledClients, terms
from flmarket.sampling.schedules import LinearSchedule, Posted, Schedule, StepSchedule, misreport_gains, utility

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
