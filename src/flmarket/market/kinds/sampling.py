"""The sampling engine: FedAvg in which each client takes part with her posted probability and is paid when she does.

SAMP (Liao, Luo, Feng, Zhang), section 3: in every round client n takes part independently with probability q_n, is paid
r_n, makes E local steps, and the model moves by the unbiased Σ_n (w_n/q_n)·1[n takes part]·(update of n), w_n being her
share of the records. (q, r) come from any mechanism of `flmarket.sampling`. The loss is softmax regression with an ℓ₂
penalty μ on *all* parameters, biases too, because the convergence bound needs μ-strong convexity.

**Budget.** Σ q_n r_n in expectation; one round's bill varies. `hard_cap_micros` bounds it surely: participants come in
a random order, and one is kept only while the payments before her leave room for c_max, the most that anyone can
be paid. Whoever is turned away neither works nor is paid.

- Truthful and rational as before, exactly, if the terms of others do not depend on her report (`OptimalSampling`,
  `UniformSampling`): whether she is kept depends on who is drawn before her and their payments, never on her own report
  or payment, so all her utilities shrink by the same factor k_n. Under `PriorIndependent` a report moves the terms of
  later clients, hence k_n a little: exact no more.
- No longer unbiased: her expected weight is k_n·w_n, not w_n (k_n ≤ 1 is not divided out), so steps are shorter and, as
  k_n differs between clients, slightly tilted. No convergence bound is claimed then (it is reported as ∞).
- Up to c_max of the cap stays unused.

What would break it: raw updates reach the server here, no privacy mechanism is in between. A client of q = 0 is never
heard: the aggregate is then unbiased for the others only, and the bound is ∞.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import checked_array
from flmarket.errors import InvalidInput
from flmarket.learning import DataSet, OwnerStreams, Partition, Purpose, SoftmaxRegression, fedavg
from flmarket.ledger import Award, AwardState, Ledger, Resolution, to_micros
from flmarket.market import award_id, new_task, owner_account
from flmarket.sampling import FedAvgConstants, convergence_bound

__all__ = [
    "SampledClient",
    "SampledResult",
    "SampledRound",
    "SampledTraining",
    "decaying_rate",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BUYER = "buyer"


def decaying_rate(first: float, *, l2: float, local_steps: int) -> Callable[[int], float]:
    """2/(μ(γ + Er)), the fall of the theory's rate over rounds r, with γ such that it starts at `first`."""
    if not (np.isfinite(first) and first > 0):
        raise InvalidInput("first", first, "a finite number above 0")
    return lambda index: 2.0 / (2.0 / first + l2 * local_steps * index)


@dataclass(frozen=True, eq=False)
class SampledRound:
    """One round. `loss` is F on all training records, penalty included; `bound` limits E[loss] − min F."""

    index: int
    participants: IntArray
    turned_away: IntArray
    spent_micros: int
    learning_rate: float
    loss: float
    accuracy: float
    bound: float


@dataclass(frozen=True)
class SampledClient:
    """What one client was promised and got over all rounds."""

    client: int
    cost: float
    participation: float
    payment_micros: int
    rounds: int
    paid_micros: int

    @property
    def utility(self) -> float:
        """Payments minus costs."""
        return self.paid_micros / 1e6 - self.rounds * self.cost


@dataclass(frozen=True, eq=False)
class SampledResult:
    """A finished run. `expected_micros` is Σ q·r, a round's expected bill without a hard cap.

    `bound_applies` says whether the rounds' bounds are for the learning rate that was used.
    """

    data_set: str
    seed: int
    rounds: tuple[SampledRound, ...]
    clients: tuple[SampledClient, ...]
    expected_micros: float
    parameters: FloatArray
    name: str
    scheme: str
    budget_micros: int | None
    hard_cap_micros: int | None
    bound_applies: bool
    initial_loss: float
    baseline_accuracy: float

    @property
    def spent_micros(self) -> int:
        """Everything paid."""
        return sum(record.spent_micros for record in self.rounds)

    @property
    def loss(self) -> FloatArray:
        """The training loss after each round."""
        return np.array([record.loss for record in self.rounds])


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledTraining:
    """Federated training under posted terms (q, r), one entry per client of `partition` in each array.

    `learning_rate` is a function of the round; None is the paper's 2/(max(8L, μE) + μr), the one the bound is for.
    `ids` name the clients in random streams and accounts, so that reordering clients changes nothing. `c_max`, the
    highest cost the mechanism accepts, is needed with a hard cap: truthful payments never exceed it. `name` is the
    task's in the ledger; `scheme` and `budget_micros`, what the terms were meant to cost a round, are for the report.
    """

    data: DataSet
    partition: Partition
    costs: ArrayLike
    participation: ArrayLike
    payment: ArrayLike
    rounds: int = 100
    local_steps: int = 5
    batch_size: int | None = 32
    l2: float = 1e-3
    learning_rate: Callable[[int], float] | None = None
    hard_cap_micros: int | None = None
    c_max: float | None = None
    ids: ArrayLike | None = None
    seed: int = 0
    name: str = "sampling"
    scheme: str = ""
    budget_micros: int | None = None

    def __post_init__(self) -> None:
        n = self.partition.owners
        for name in ("costs", "participation", "payment"):
            array = checked_array(name, getattr(self, name))
            if array.shape != (n,):
                raise InvalidInput(name, array.shape, f"one number for each of the {n} clients")
            object.__setattr__(self, name, array)
        ids = np.arange(n) if self.ids is None else np.asarray(self.ids)
        if ids.shape != (n,) or not np.issubdtype(ids.dtype, np.integer) or np.unique(ids).size < n or ids.min() < 0:
            raise InvalidInput("ids", self.ids, f"{n} different whole numbers from 0")
        object.__setattr__(self, "ids", ids.astype(np.int64))
        if np.max(self.participation) > 1:
            raise InvalidInput("participation", float(np.max(self.participation)), "probabilities")
        if self.partition.order.size != len(self.data.y_train) or self.partition.sizes.min() < 1:
            raise InvalidInput("partition", self.partition.order.size, "every training record once, nobody without any")
        if self.rounds < 1 or self.local_steps < 1 or (self.batch_size is not None and self.batch_size < 1):
            raise InvalidInput("rounds, local_steps, batch_size", (self.rounds, self.local_steps), "at least 1")
        if not (np.isfinite(self.l2) and self.l2 > 0):
            raise InvalidInput("l2", self.l2, "a number above 0: the bound needs a strongly convex loss")
        if self.hard_cap_micros is not None:
            if self.c_max is None or float(np.max(self.payment)) > self.c_max * (1 + 1e-9):
                raise InvalidInput("c_max", self.c_max, "with a hard cap: the mechanism's highest cost, paid at most")
            if self.hard_cap_micros < to_micros("c_max", self.c_max):
                raise InvalidInput("hard_cap_micros", self.hard_cap_micros, "at least c_max, or nobody can be paid")

    @property
    def model(self) -> SoftmaxRegression:
        """What is trained."""
        return SoftmaxRegression(self.data.features, self.data.n_classes, self.l2, penalise_biases=True)

    @property
    def weights(self) -> FloatArray:
        """w_n: shares of the records."""
        return np.asarray(self.partition.sizes / self.partition.order.size)

    @property
    def gradient_norms(self) -> FloatArray:
        """G_n from the data alone: the largest gradient of the cross-entropy, and the penalty's at ‖w*‖'s limit."""
        norms = np.sqrt((1.0 if self.model.outputs == 1 else 2.0) * self._mean_squares)
        return np.asarray(norms + np.sqrt(2 * self.l2 * np.log(self.data.n_classes)))

    @property
    def constants(self) -> FedAvgConstants:
        """Constants for the rate and β from the data alone; they hold while ‖params‖ ≤ √(2 log K/μ), as ‖w*‖ is.

        L from the trace of the records' second moments, σ_n ≤ G_n, ‖w*‖ and Γ from F(w*) ≤ F(0) = log K. The G_n are
        replaced by their weighted mean square, which puts w_n for the paper's 1/N in β; `bound` does so in s_n.
        """
        n, start, w, norms = self.partition.owners, np.log(self.data.n_classes), self.weights, self.gradient_norms
        return FedAvgConstants(
            smoothness=float((0.25 if self.model.outputs == 1 else 0.5) * self._mean_squares.max() + self.l2),
            strong_convexity=self.l2,
            local_steps=self.local_steps,
            gradient_norms=np.full(n, np.sqrt(w @ norms**2)),
            gradient_deviations=n * w * norms,
            heterogeneity=float(start),
            initial_distance=float(np.sqrt(2 * start / self.l2)),
        )

    def bound(self, rounds: int) -> float:
        """SAMP Proposition 1 with weights w_n: E[F] − min F after so many rounds is at most this. ∞ with a hard cap."""
        if self.hard_cap_micros is not None:
            return float("inf")
        known = self.constants
        scale = 8 * known.smoothness * self.local_steps * (self.weights * self.gradient_norms / self.l2) ** 2
        return convergence_bound(self.participation, scale, beta=known.beta, rounds=rounds)

    @property
    def _mean_squares(self) -> FloatArray:
        """Mean of ‖(record, 1)‖² per client; the bias is a feature of 1."""
        squares = np.square(self.data.x_train).sum(axis=1)[self.partition.order] + 1.0
        return np.asarray(np.add.reduceat(squares, self.partition.offsets[:-1]) / self.partition.sizes)

    def run(
        self, progress: Callable[[SampledRound], None] | None = None, ledger: Ledger | None = None
    ) -> SampledResult:
        """Play every round; `progress` is called with each round's record. `ledger` must not have this task yet."""
        return SampledRun(self, new_task(ledger, self.name)).play(progress)


class SampledRun:
    """The state of one run: the model and the books."""

    def __init__(self, spec: SampledTraining, ledger: Ledger) -> None:
        self.spec, self.ledger, self.model = spec, ledger, spec.model
        self.q, self.ids = np.asarray(spec.participation), np.asarray(spec.ids)
        self.price = np.array([to_micros("payment", r) for r in np.asarray(spec.payment).tolist()], dtype=np.int64)
        self.rate = spec.learning_rate or spec.constants.learning_rate
        self.first_bound = spec.bound(1)  # it falls as 1/rounds
        self.parameters = self.model.initial()
        self.taken = np.zeros(self.q.size, dtype=np.int64)

    def play(self, progress: Callable[[SampledRound], None] | None) -> SampledResult:
        records = []
        for index in range(self.spec.rounds):
            records.append(self.round(index))
            if progress is not None:
                progress(records[-1])
        terms = zip(self.ids, np.asarray(self.spec.costs), self.q, self.price, self.taken, strict=True)
        clients = tuple(
            SampledClient(int(i), float(c), float(q), int(r), int(k), int(r) * int(k)) for i, c, q, r, k in terms
        )
        spec, data = self.spec, self.spec.data
        return SampledResult(
            data_set=data.name,
            seed=spec.seed,
            rounds=tuple(records),
            clients=clients,
            expected_micros=float(self.q @ self.price),
            parameters=self.parameters,
            name=spec.name,
            scheme=spec.scheme,
            budget_micros=spec.budget_micros,
            hard_cap_micros=spec.hard_cap_micros,
            bound_applies=spec.learning_rate is None and spec.hard_cap_micros is None,
            initial_loss=self.model.loss(self.model.initial(), data.x_train, data.y_train),
            baseline_accuracy=float(np.mean(data.y_test == np.bincount(data.y_train).argmax())),
        )

    def round(self, index: int) -> SampledRound:
        data, rate = self.spec.data, float(self.rate(index))
        kept, away = self.draw(index)
        bill = self.pay(index, kept)
        self.parameters = self.parameters - self.aggregate(index, kept, rate)
        self.taken[kept] += 1
        return SampledRound(
            index,
            np.sort(self.ids[kept]),
            np.sort(self.ids[away]),
            bill,
            rate,
            self.model.loss(self.parameters, data.x_train, data.y_train),
            self.model.accuracy(self.parameters, data.x_test, data.y_test),
            self.first_bound / (index + 1),
        )

    def draw(self, index: int) -> tuple[IntArray, IntArray]:
        """Who takes part, and who was drawn but turned away at the hard cap; positions, not ids."""
        streams = OwnerStreams(self.spec.seed, index, self.ids.tolist(), Purpose.PARTICIPATION)
        chance, order = np.array([rng.random(2) for rng in streams]).T
        drawn = np.flatnonzero(chance < self.q)
        if self.spec.hard_cap_micros is None:
            return drawn, drawn[:0]
        assert self.spec.c_max is not None  # checked with the cap; for the type checker
        queue = drawn[np.argsort(order[drawn], kind="stable")]
        before = np.cumsum(self.price[queue]) - self.price[queue]
        fits = before <= self.spec.hard_cap_micros - to_micros("c_max", self.spec.c_max)
        return np.sort(queue[fits]), np.sort(queue[~fits])

    def pay(self, index: int, kept: IntArray) -> int:
        """Deposit the round's bill, hold all payments, post all payments."""
        bill = int(self.price[kept].sum())
        task, terms = self.spec.name, zip(self.ids[kept].tolist(), self.price[kept].tolist(), strict=True)
        self.ledger.deposit(f"{task}/{index}/bill", BUYER, bill)
        held = self.ledger.hold_many(
            Award(award_id(task, index, client), index, BUYER, owner_account(client), float("inf"), price)
            for client, price in terms
        )
        self.ledger.resolve_many(Resolution(award.id, AwardState.POSTED) for award in held)
        return bill

    def aggregate(self, index: int, kept: IntArray, rate: float) -> FloatArray:
        """Σ (w_n/q_n)·update over those who take part: what the model moves by."""
        if kept.size == 0:
            return np.zeros(self.model.dimension)
        spec = self.spec
        records, offsets = spec.partition.select(kept)
        updates = fedavg(
            self.model,
            self.parameters,
            spec.data.x_train[records],
            spec.data.y_train[records],
            offsets,
            steps=spec.local_steps,
            batch_size=spec.batch_size,
            learning_rate=rate,
            rngs=OwnerStreams(spec.seed, index, self.ids[kept].tolist(), Purpose.BATCHES),
        )
        return np.asarray((spec.weights[kept] / self.q[kept]) @ updates)
