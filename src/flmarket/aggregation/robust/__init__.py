"""Robust aggregation: one vector from many clients, a few of whom may lie. `get(name, ...)` builds a rule.

JDP's choice among groups (`leave-one-out`, `leave-k-out`, `partition`) takes `epsilon`, `validation` and `sensitivity`;
its peers take `adversaries` where they need to know how many to expect, and nothing otherwise.
"""

from __future__ import annotations

from flmarket.aggregation.robust.base import Choice, Combined, RobustAggregation, Score, mix
from flmarket.aggregation.robust.groupings import Grouping, LeaveKOut, LeaveOneOut, Partition, coverage
from flmarket.aggregation.robust.peers import (
    ROBUST,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    TrimmedMean,
    WeightedAverage,
)
from flmarket.aggregation.robust.selection import SENSITIVITIES, ExponentialChoice, Sensitivity
from flmarket.registry import Registry

__all__ = [
    "SENSITIVITIES",
    "Choice",
    "Combined",
    "CoordinateMedian",
    "ExponentialChoice",
    "GeometricMedian",
    "Grouping",
    "Krum",
    "LeaveKOut",
    "LeaveOneOut",
    "MultiKrum",
    "Partition",
    "RobustAggregation",
    "Score",
    "Sensitivity",
    "TrimmedMean",
    "WeightedAverage",
    "about",
    "admit",
    "coverage",
    "get",
    "mix",
    "names",
    "register",
]

_registry: Registry[RobustAggregation] = Registry("robust aggregation", "flmarket.robust_aggregations")
get = _registry.get
names = _registry.names
register = _registry.register
admit = _registry.admit
about = _registry.about


def _leave_one_out(*, epsilon: float, validation: int, sensitivity: Sensitivity = "record") -> RobustAggregation:
    return ExponentialChoice(epsilon=epsilon, validation=validation, sensitivity=sensitivity)


def _leave_k_out(
    *, epsilon: float, validation: int, sensitivity: Sensitivity = "record", k: int = 2, count: int = 40
) -> RobustAggregation:
    return ExponentialChoice(
        epsilon=epsilon,
        validation=validation,
        sensitivity=sensitivity,
        grouping=LeaveKOut(k, count),
        name="leave-k-out",
    )


def _partition(
    *, epsilon: float, validation: int, sensitivity: Sensitivity = "record", size: int = 5
) -> RobustAggregation:
    return ExponentialChoice(
        epsilon=epsilon, validation=validation, sensitivity=sensitivity, grouping=Partition(size), name="partition"
    )


register("leave-one-out", _leave_one_out, about="Everybody but one, chosen by accuracy with the exponential mechanism.")
register("leave-k-out", _leave_k_out, about="Everybody but k, chosen by accuracy with the exponential mechanism.")
register("partition", _partition, about="One of several groups, chosen by accuracy with the exponential mechanism.")
for _rule in (WeightedAverage, *ROBUST):
    register(_rule.name, _rule)
