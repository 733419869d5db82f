"""Aggregation: privacy losses and data sizes in, weights out. `get(name)` builds a rule, `error_bound` judges it.

The market offers every rule its `clip`, the model's `dimension`, the `perturbation`, and where updates are summed
unseen the `excess` of noise in the sum; a rule that has no use for one is built without it. A rule that also has
`combine` (`robust`: median, Krum, …) is given the updates themselves; its weights then only say what is expected of it.
"""

from typing import Protocol, runtime_checkable

from numpy.typing import ArrayLike

from flmarket.aggregation.robust import ROBUST
from flmarket.aggregation.rules import (
    TRUST,
    BiasOpt,
    Conventional,
    HasNoiseEnergy,
    OptAggr,
    SecureOpt,
    Trust,
    VarOpt,
    common_energy,
    data_shares,
    error_bound,
    release_energy,
)
from flmarket.bids import FloatArray
from flmarket.registry import Registry

__all__ = [
    "TRUST",
    "Aggregation",
    "BiasOpt",
    "Conventional",
    "HasNoiseEnergy",
    "OptAggr",
    "SecureOpt",
    "Trust",
    "VarOpt",
    "about",
    "admit",
    "common_energy",
    "data_shares",
    "error_bound",
    "get",
    "names",
    "register",
    "release_energy",
]


@runtime_checkable
class Aggregation(Protocol):
    """How much each owner's release counts."""

    @property
    def name(self) -> str:
        """The registered name."""

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """Rows sum to 1, 0 where ε = 0."""


_registry: Registry[Aggregation] = Registry(
    "aggregation", "flmarket.aggregations", offers=("clip", "dimension", "perturbation", "excess")
)
get = _registry.get
names = _registry.names
register = _registry.register
admit = _registry.admit
about = _registry.about

for _rule in (Conventional, BiasOpt, VarOpt, OptAggr, SecureOpt, *ROBUST):
    register(_rule.name, _rule)
