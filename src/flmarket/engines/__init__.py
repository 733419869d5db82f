"""Engines drive the market loop with real updates: in one process here, over a network elsewhere."""

from flmarket.engines.owners import OwnerPool, PrivacyCap
from flmarket.engines.sampled import SampledResult, SampledTraining
from flmarket.engines.simulation import LocalTraining, Simulation
from flmarket.engines.stackelberg import StackelbergResult, StackelbergTraining

__all__ = [
    "LocalTraining",
    "OwnerPool",
    "PrivacyCap",
    "SampledResult",
    "SampledTraining",
    "Simulation",
    "StackelbergResult",
    "StackelbergTraining",
]
