"""The `[sampling]` section of a market file: which scheme, what clients' costs are like, a cap, and the loss."""

from __future__ import annotations

from typing import Literal

import numpy as np

from flmarket.engines.config_types import Positive, Probability, Range, Section
from flmarket.engines.sampled import SampledTraining, decaying_rate
from flmarket.learning import DataSet, LocalTraining, Partition, Purpose, stream
from flmarket.ledger import to_micros
from flmarket.sampling import TruncatedExponential, Uniform
from flmarket.sampling.prior_independent import terms

__all__ = ["SamplingSection"]


class SamplingSection(Section):
    """Client sampling with private costs, with `auction = "sampling"`; `task.budget_per_round` is in expectation.

    Costs per participation are drawn from a distribution on `costs`; an exponential one has `scale` (default: a fifth
    of the range). `hard_cap` bounds every round's bill. `first_rate` replaces the learning rate of the convergence
    theory, which is very small, by one that starts there and falls the same way.
    """

    scheme: Literal["optimal", "uniform", "complete", "prior-independent"] = "optimal"
    distribution: Literal["uniform", "exponential"] = "uniform"
    costs: Range = (0.5, 10.0)
    scale: Positive | None = None
    fraction: Probability = 0.05
    hard_cap: Positive | None = None
    l2: Positive = 0.01
    first_rate: Positive | None = None

    def cost_distribution(self) -> Uniform | TruncatedExponential:
        """What the broker believes of a client's cost, and what clients' costs are drawn from."""
        low, high = self.costs
        if self.distribution == "uniform":
            return Uniform(low, high)
        return TruncatedExponential(low, high, (high - low) / 5 if self.scale is None else self.scale)

    def training(
        self, *, data: DataSet, partition: Partition, rounds: int, budget: float, local: LocalTraining, seed: int,
        name: str,
    ) -> SampledTraining:  # fmt: skip
        """The training that the file describes; everybody reports her true cost."""
        distribution, n = self.cost_distribution(), partition.owners
        costs = np.asarray(distribution.sample(stream(seed, purpose=Purpose.BIDS), n))
        clients = terms(self.scheme, costs, distribution, budget / n, fraction=self.fraction)
        rate = self.first_rate
        return SampledTraining(
            data=data,
            partition=partition,
            costs=costs,
            participation=clients.participation,
            payment=clients.payment,
            rounds=rounds,
            local_steps=local.steps,
            batch_size=local.batch_size,
            l2=self.l2,
            learning_rate=None if rate is None else decaying_rate(rate, l2=self.l2, local_steps=local.steps),
            hard_cap_micros=None if self.hard_cap is None else to_micros("hard_cap", self.hard_cap),
            c_max=distribution.maximum,
            seed=seed,
            name=name,
            scheme=self.scheme,
            budget_micros=to_micros("budget_per_round", budget),
        )
