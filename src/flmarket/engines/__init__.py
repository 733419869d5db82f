"""Engines drive the market loop with real updates: in one process here, over a network elsewhere."""

from flmarket.engines.jdp import JdpResult, JdpTraining
from flmarket.engines.jdp_privacy import JointPrivacy, LocalPerturbation
from flmarket.engines.owners import OwnerPool, PrivacyCap
from flmarket.engines.sampled import SampledResult, SampledTraining
from flmarket.engines.simulation import LocalTraining, OpenRound, RunState, Simulation, SimulationRun
from flmarket.engines.stackelberg import StackelbergResult, StackelbergTraining

__all__ = [
    "JdpResult",
    "JdpTraining",
    "JointPrivacy",
    "LocalPerturbation",
    "LocalTraining",
    "OpenRound",
    "OwnerPool",
    "PrivacyCap",
    "RunState",
    "SampledResult",
    "SampledTraining",
    "Simulation",
    "SimulationRun",
    "StackelbergResult",
    "StackelbergTraining",
]
