"""Engines: how owners are reached, in this process (`memory`) or through Flower (`flower`), and market files."""

from flmarket.engines.memory import (
    JdpTraining,
    MemoryOwners,
    SampledTraining,
    Simulation,
    Spec,
    StackelbergTraining,
    play,
    run,
)
from flmarket.learning import LocalTraining
from flmarket.market import PrivacyCap
from flmarket.market.kinds.joint import JdpResult
from flmarket.market.kinds.reward import StackelbergResult
from flmarket.market.kinds.sampling import SampledResult
from flmarket.privacy.joint import JointPrivacy, LocalPerturbation

__all__ = [
    "JdpResult",
    "JdpTraining",
    "JointPrivacy",
    "LocalPerturbation",
    "LocalTraining",
    "MemoryOwners",
    "PrivacyCap",
    "SampledResult",
    "SampledTraining",
    "Simulation",
    "Spec",
    "StackelbergResult",
    "StackelbergTraining",
    "play",
    "run",
]
