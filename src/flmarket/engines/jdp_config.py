"""The `[jdp]` section of a market file: client selection, noise, robust aggregation and adversaries, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from flmarket import auctions
from flmarket.aggregation import robust
from flmarket.engines.config_types import NonNegative, Positive, Probability, Range, Section
from flmarket.engines.jdp import JdpTraining
from flmarket.engines.jdp_privacy import LocalPerturbation
from flmarket.errors import ConfigError
from flmarket.learning import DataSet, Model, Partition, Purpose, stream
from flmarket.learning import adversaries as attacks
from flmarket.learning.adversaries import Adversary

__all__ = ["JdpSection"]

T = TypeVar("T")


class JdpSection(Section):
    """Robust joint-DP learning, with `auction = "jdp"`: one auction for the whole training, then robust rounds.

    `selection` is the auction that picks clients by their costs. Settings that the named aggregation does not take are
    refused. ε is `epsilon` for one upload and `choice_epsilon` for one choice (by default the same, as in the paper).
    """

    selection: str = "m1"
    budget: NonNegative | None = None
    budget_factor: NonNegative | None = None
    allow_overspending: bool = False
    costs: Range = (1.0, 1000.0)
    model: str | None = None  # as `model.name`, which is where it belongs
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    threads: Annotated[int, Field(ge=1, le=256, strict=True)] = 1
    epsilon: Positive = 100.0
    delta: Annotated[float, Field(gt=0, lt=0.5)] = 1e-5
    clipped: Literal["update", "parameters"] = "update"
    calibration: Literal["analytic", "paper"] = "analytic"
    noise_unit: Literal["client", "record"] = "client"
    aggregation: str = "leave-one-out"
    choice_epsilon: Positive | None = None
    sensitivity: Literal["record", "client", "paper"] | None = None
    leave_out: Annotated[int, Field(ge=1, strict=True)] | None = None
    groups: Annotated[int, Field(ge=1, strict=True)] | None = None
    group_size: Annotated[int, Field(ge=1, strict=True)] | None = None
    expected_adversaries: Annotated[int, Field(ge=0, strict=True)] | None = None
    mixing: bool = True
    validation: Annotated[int, Field(ge=1, strict=True)] = 100
    stop_accuracy: Probability | None = None
    stop_epsilon: Positive = 1.0
    adversary: str | None = None
    adversaries: Annotated[int, Field(ge=0, strict=True)] | None = None
    adversary_target: Annotated[int, Field(ge=0, strict=True)] | None = None
    adversary_factor: Positive | None = None

    def rule(self) -> robust.RobustAggregation:
        """The aggregation with the settings that were given."""
        choice = {"epsilon": self.choice_epsilon or self.epsilon, "validation": self.validation}
        given: dict[str, Any] = {
            "sensitivity": self.sensitivity,
            "k": self.leave_out,
            "count": self.groups,
            "size": self.group_size,
            "adversaries": self.expected_adversaries,
        }
        settings = {name: value for name, value in given.items() if value is not None}
        if self.aggregation in ("leave-one-out", "leave-k-out", "partition"):
            settings |= choice
        return _built(robust.get, "jdp.aggregation", self.aggregation, settings)

    def malicious(self) -> tuple[Adversary | None, int]:
        """The kind of adversary and how many there are; one if only the kind is given."""
        if self.adversary is None or self.adversaries == 0:
            return None, 0
        given = {"target": self.adversary_target, "factor": self.adversary_factor}
        settings = {name: value for name, value in given.items() if value is not None}
        made = _built(attacks.get, "jdp.adversary", self.adversary, settings)
        return made, 1 if self.adversaries is None else self.adversaries

    def check_names(self) -> None:
        """Refuse unknown names and settings before any data is read."""
        auctions.get(auctions.admit(self.selection))
        self.rule()
        self.malicious()

    def training(
        self, *, data: DataSet, partition: Partition, rounds: int, clip: float, model: Model, seed: int, name: str
    ) -> JdpTraining:
        """The training that the file describes; costs are drawn uniformly."""
        costs = stream(seed, purpose=Purpose.BIDS).uniform(*self.costs, partition.owners)
        adversary, count = self.malicious()
        budget = float(costs.sum()) * (self.budget_factor or 0.0) if self.budget is None else self.budget
        return JdpTraining(
            data=data,
            partition=partition,
            costs=costs,
            budget=budget,
            auction=auctions.get(self.selection),
            model=model,
            aggregation=self.rule(),
            perturbation=LocalPerturbation(
                clip=clip,
                delta=self.delta,
                clipped=self.clipped,
                calibration=self.calibration,
                unit=self.noise_unit,
            ),
            epsilon=self.epsilon,
            adversary=adversary,
            adversaries=count,
            mixing=self.mixing,
            rounds=rounds,
            validation=self.validation,
            stop_accuracy=self.stop_accuracy,
            stop_epsilon=self.stop_epsilon,
            allow_overspending=self.allow_overspending,
            seed=seed,
            name=name,
        )


def _built(get: Callable[..., T], key: str, name: str, settings: dict[str, Any]) -> T:
    """Build by name; a setting that this one does not take, or lacks, is a mistake in the file."""
    try:
        return get(name, **settings)
    except TypeError:
        raise ConfigError(key, f"{name} with {', '.join(settings)}", "all settings that it needs") from None
