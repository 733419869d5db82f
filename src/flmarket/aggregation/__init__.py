"""Aggregation: privacy losses and data sizes in, weights out. `get(name)` builds a rule, `error_bound` judges it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from numpy.typing import ArrayLike

from flmarket.aggregation.bound import FloatArray, HasNoiseEnergy, data_shares, error_bound, release_energy
from flmarket.aggregation.optimal import OptAggr
from flmarket.aggregation.rules import BiasOpt, Conventional, VarOpt
from flmarket.registry import Registry

__all__ = [
    "Aggregation",
    "BiasOpt",
    "Conventional",
    "HasNoiseEnergy",
    "OptAggr",
    "VarOpt",
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


_registry: Registry[Aggregation] = Registry("aggregation")
get = _registry.get
names = _registry.names
register = _registry.register


class _IgnoresNoise:
    """Builds a rule that does not look at the noise, whatever noise settings it is given."""

    def __init__(self, rule: type[Conventional] | type[BiasOpt]) -> None:
        self._rule = rule

    def __call__(
        self, clip: float = 1.0, dimension: int = 1, perturbation: HasNoiseEnergy | None = None
    ) -> Aggregation:
        return self._rule()


register("conventional", _IgnoresNoise(Conventional))
register("bias-opt", _IgnoresNoise(BiasOpt))
register("var-opt", VarOpt)
register("opt-aggr", OptAggr)
