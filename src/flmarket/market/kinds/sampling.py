"""Client sampling: each client takes part with her posted probability and is paid when she does (FedAvg).

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

**In a sum** (`secure`) nobody sees single updates. Two sums without noise that differ by one client would show hers,
and the broker sets the weights, so every sum has noise: `epsilon` is what a client sells in every round in which she is
drawn, at the same price for all. Her update is clipped to `clip`; her weight in the sum is w_n/q_n over that of all who
are drawn, and the step is scaled back, so that it is Σ (w_n/q_n)·update of those who stayed, and noise. It is unbiased
up to clipping and void rounds (fewer than two drawn, or too few who stayed), so no convergence bound is claimed.

What would break it: without `secure`, raw updates reach the server here, no privacy mechanism is in between, and the
guard lets that happen only for owners who said so in their own configuration. A client of q = 0 is never heard: the
aggregate is then unbiased for the others only, and the bound is ∞. So it is for a model of one's own: the theory is for
this loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flmarket.aggregation import Trust
from flmarket.bids import FloatArray, IntArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.learning import (
    DataSet,
    LocalTraining,
    Model,
    OwnerStreams,
    Partition,
    Purpose,
    SoftmaxRegression,
    at_rate,
    stream,
    train_many,
)
from flmarket.ledger import Award, Release, to_micros
from flmarket.market import summing
from flmarket.market.kind import Announcement, Bid, Order, RoundPlan, RoundRecord, say
from flmarket.market.owner import UNASKED, UNLIMITED, Owner, PrivacyCap, Streams, Work
from flmarket.privacy import Cap, DistributedGaussian, Event, PureDp, Uncapped, Unprotected, ZCdp, rho_of_epsilon
from flmarket.privacy.events import checked_number
from flmarket.privacy.secure_sum import SecureAggregation
from flmarket.sampling import FedAvgConstants, convergence_bound

# (q, r) for reported costs
Terms = Callable[[FloatArray], tuple[FloatArray, FloatArray]]


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
    trust: Trust = "local"

    @property
    def spent_micros(self) -> int:
        """Everything paid."""
        return sum(record.spent_micros for record in self.rounds)

    @property
    def loss(self) -> FloatArray:
        """The training loss after each round."""
        return np.array([record.loss for record in self.rounds])


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingSpec:
    """Federated training under posted terms (q, r), one entry per client of `partition` in each array.

    `learning_rate` is a function of the round; None is the paper's 2/(max(8L, μE) + μr), the one the bound is for.
    `ids` name the clients in random streams and accounts, so that reordering clients changes nothing. `c_max`, the
    highest cost the mechanism accepts, is needed with a hard cap: truthful payments never exceed it. `name` is the
    task's in the ledger; `scheme` and `budget_micros`, what the terms were meant to cost a round, are for the report.
    `offer` maps reported costs to (q, r); without it the given ones stand. `any_model` instead of softmax regression
    needs a rate of its own, and no convergence is claimed for it. With `secure` only sums are seen, and a client sells
    `epsilon` of her whole update, clipped to `clip`, in every round in which she takes part; `cap` is for her life.
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
    offer: Terms | None = None
    any_model: Model | None = None
    secure: SecureAggregation | None = None
    epsilon: float | None = None
    clip: float = 1.0
    cap: PrivacyCap = field(default_factory=PrivacyCap)

    def __post_init__(self) -> None:
        n = self.partition.owners
        if (self.secure is None) != (self.epsilon is None):
            what = "with secure aggregation, and only there: two sums without noise would show who is in one alone"
            raise InvalidInput("epsilon", self.epsilon, what)
        if self.secure is not None:
            checked_number("epsilon", self.epsilon, 1e-3, 1e3)
            checked_number("clip", self.clip, 1e-12, 1e12)
            _ = self.cap.gaussian  # refused where no account can hold such noise
        if self.any_model is not None and self.learning_rate is None:
            raise InvalidInput("learning_rate", None, "a rate: the theory's is for softmax regression only")
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

    @cached_property
    def softmax(self) -> SoftmaxRegression:
        """The strongly convex model of the theory."""
        local = LocalTraining(steps=self.local_steps, batch_size=self.batch_size)
        return SoftmaxRegression(self.data.features, self.data.n_classes, self.l2, penalise_biases=True, local=local)

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.softmax if self.any_model is None else self.any_model

    @property
    def rate(self) -> Callable[[int], float]:
        """The local rate of each round."""
        return self.learning_rate or self.constants.learning_rate

    def kind(self, buyer: str = "buyer") -> SamplingKind:
        """The market as the round plays it."""
        return SamplingKind(self, buyer)

    def place(self, number: int) -> int:
        """Where client `number` stands in the arrays."""
        return int(np.flatnonzero(np.asarray(self.ids) == number)[0])

    def owner(self, number: int, record: Path = Path(), *, seeded: bool = True) -> Owner:
        """Client `number` with the records that the partition deals her."""
        place, raw = self.place(number), self.secure is None
        rows = self.partition.records(place)
        return Owner(
            number=number, x=self.data.x_train[rows], y=self.data.y_train[rows],
            privacy_budget=UNLIMITED if self.epsilon is None else self.epsilon, trust=(self.trust,),
            valuation=UNASKED, cap=Uncapped() if raw else self.cap.gaussian, record=record, allow_raw=raw,
            value=float(np.asarray(self.costs)[place]), classes=self.data.n_classes, model=self.model,
            simulation_seed=self.seed if seeded else None,
        )  # fmt: skip

    @property
    def trust(self) -> Trust:
        """The trust model."""
        return "local" if self.secure is None else "secure-aggregation"

    @property
    def weights(self) -> FloatArray:
        """w_n: shares of the records."""
        return np.asarray(self.partition.sizes / self.partition.order.size)

    @property
    def gradient_norms(self) -> FloatArray:
        """G_n from the data alone: the largest gradient of the cross-entropy, and the penalty's at ‖w*‖'s limit."""
        norms = np.sqrt((1.0 if self.softmax.outputs == 1 else 2.0) * self._mean_squares)
        return np.asarray(norms + np.sqrt(2 * self.l2 * np.log(self.data.n_classes)))

    @property
    def constants(self) -> FedAvgConstants:
        """Constants for the rate and β from the data alone; they hold while ‖params‖ ≤ √(2 log K/μ), as ‖w*‖ is.

        L from the trace of the records' second moments, σ_n ≤ G_n, ‖w*‖ and Γ from F(w*) ≤ F(0) = log K. The G_n are
        replaced by their weighted mean square, which puts w_n for the paper's 1/N in β; `bound` does so in s_n.
        """
        n, start, w, norms = self.partition.owners, np.log(self.data.n_classes), self.weights, self.gradient_norms
        return FedAvgConstants(
            smoothness=float((0.25 if self.softmax.outputs == 1 else 0.5) * self._mean_squares.max() + self.l2),
            strong_convexity=self.l2,
            local_steps=self.local_steps,
            gradient_norms=np.full(n, np.sqrt(w @ norms**2)),
            gradient_deviations=n * w * norms,
            heterogeneity=float(start),
            initial_distance=float(np.sqrt(2 * start / self.l2)),
        )

    def bound(self, rounds: int) -> float:
        """SAMP Proposition 1 with weights w_n: E[F] − min F after so many rounds is at most this. ∞ with a hard cap."""
        if self.hard_cap_micros is not None or self.any_model is not None or self.secure is not None:
            return float("inf")
        known = self.constants
        scale = 8 * known.smoothness * self.local_steps * (self.weights * self.gradient_norms / self.l2) ** 2
        return convergence_bound(self.participation, scale, beta=known.beta, rounds=rounds)

    @property
    def _mean_squares(self) -> FloatArray:
        """Mean of ‖(record, 1)‖² per client; the bias is a feature of 1."""
        squares = np.square(self.data.x_train).sum(axis=1)[self.partition.order] + 1.0
        return np.asarray(np.add.reduceat(squares, self.partition.offsets[:-1]) / self.partition.sizes)

    def result(self, kind: SamplingKind, records: Sequence[RoundRecord]) -> SampledResult:
        """A finished run in this market's own terms."""
        data, ids, taken = self.data, np.asarray(self.ids), np.zeros(self.partition.owners, dtype=np.int64)
        rounds = []
        for record in records:
            taken[np.isin(ids, record.bidders[record.delivered])] += 1
            away = np.sort(ids[kind.turned_away[record.index]])
            metrics = record.metrics
            rounds.append(
                SampledRound(
                    record.index, np.sort(record.bidders[record.delivered]), away, record.spent_micros,
                    float(kind.rate(record.index)), metrics["objective"], metrics["accuracy"], record.error_bound,
                )
            )  # fmt: skip
        terms = zip(ids, np.asarray(self.costs), kind.q, kind.price, taken, strict=True)
        clients = tuple(
            SampledClient(int(i), float(c), float(q), int(r), int(k), int(r) * int(k)) for i, c, q, r, k in terms
        )
        start = kind.model.initial(stream(self.seed, purpose=Purpose.BATCHES))
        return SampledResult(
            data_set=data.name,
            seed=self.seed,
            rounds=tuple(rounds),
            clients=clients,
            expected_micros=float(kind.q @ kind.price),
            parameters=kind.parameters,
            name=self.name,
            scheme=self.scheme,
            budget_micros=self.budget_micros,
            hard_cap_micros=self.hard_cap_micros,
            bound_applies=self.learning_rate is None and self.hard_cap_micros is None and self.secure is None,
            initial_loss=kind.objective(start),
            baseline_accuracy=data.baseline_accuracy,
            trust=self.trust,
        )


class SamplingSide(summing.SumSide):
    """She reports her cost once; when she is drawn, her update leaves as it is, or as her share of a sum."""

    asks_once = True

    def stays_out(
        self, *, value: float | None, allow_raw: bool, cap: Cap, trust: Sequence[str], call: Announcement | None = None
    ) -> str:
        """Without a cost to report, or noise to add, unless it is for sums only."""
        if value is None:
            return "no value is given"
        if summing.SECURE in trust and not isinstance(cap, PureDp) and (call is None or summing.is_secure(call)):
            return ""
        if not allow_raw:
            return "allow_raw is not true, and updates would leave without noise"
        return "" if isinstance(cap, Uncapped) else "updates without noise are unbounded and fit under no cap"

    def bid(self, owner: Owner, call: Announcement) -> Bid:
        """Her cost of taking part; in a sum, also the most ε of a round."""
        budget = owner.privacy_budget if summing.is_secure(call) else float("inf")
        return self.reported(owner, call, budget=budget, least=owner.least_epsilon)

    def amount(self, loss: Event, call: Announcement | None = None) -> float:
        """Unbounded, if not in a sum."""
        if isinstance(loss, ZCdp) or (call is not None and summing.is_secure(call)):
            return super().amount(loss, call)
        if not isinstance(loss, Unprotected):
            raise InvalidInput("loss", loss, "none: updates leave without noise")
        return float("inf")

    def asked(self, owner: Owner, bid: Bid, order: Order, call: Announcement) -> float:
        """The cost that she reported."""
        return bid.rate

    def train(self, works: Sequence[Work]) -> FloatArray:
        """Start minus end, at the round's rate."""
        first, rngs = works[0], Streams(works)
        model = at_rate(first.model, first.order.learning_rate)
        return first.parameters - train_many(model, first.parameters, [work.records for work in works], rngs)


class SamplingKind(summing.SumKind):
    """A `SamplingSpec` as the round plays it."""

    name = "sampling"
    side = SamplingSide()

    def __init__(self, spec: SamplingSpec, buyer: str = "buyer") -> None:
        model = spec.model
        start = model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        super().__init__(spec.name, spec.rounds, model, start, buyer)
        self.validation = spec.data.validation
        self.spec, self.rate, self._model_text, self.policy = spec, spec.rate, say(model), spec.secure
        self._highest = max(float(self.rate(i)) for i in range(self.rounds))
        self._first_bound = spec.bound(1)  # it falls as 1/rounds
        self.turned_away: dict[int, IntArray] = {}  # by round, those who were drawn and not kept
        self._settled_numbers: tuple[dict[str, Any], FloatArray, IntArray] = (
            {},
            np.zeros(0),
            np.zeros(0, dtype=np.int64),
        )

    @property
    def q(self) -> FloatArray:
        """Everybody's chance to take part in a round, under the settled terms."""
        return self._numbers()[1]

    @property
    def price(self) -> IntArray:
        """What everybody is paid when she takes part."""
        return self._numbers()[2]

    def _numbers(self) -> tuple[dict[str, Any], FloatArray, IntArray]:
        if self._settled_numbers[0] is not self.terms:
            q = np.array(self.terms.get("participation", self.spec.participation), dtype=np.float64)
            payment = np.asarray(self.terms.get("payment", self.spec.payment)).tolist()
            price = np.array([to_micros("payment", r) for r in payment], dtype=np.int64)
            self._settled_numbers = self.terms, q, price
        return self._settled_numbers

    def announcement(self, index: int) -> Announcement:
        """No noise is named, unless it is a sum's."""
        spec, data, summed = self.spec, self.spec.data, self.policy is not None
        return Announcement(
            task=self.task, buyer=self.buyer, market=self.name, round_index=0, rounds=self.rounds,
            features=data.features, classes=data.n_classes, model=self._model_text, parameters=self.dimension,
            learning_rate=self._highest, perturbation=DistributedGaussian.name if summed else "",
            clip=spec.clip if summed else 0.0, settings=json.dumps(summing.said(self.policy), sort_keys=True),
            trust=spec.trust,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A cost for which there are terms, the records that her weight counts on, and privacy for all rounds."""
        places = np.flatnonzero(np.asarray(self.spec.ids) == bid.owner)
        if not places.size or bid.data_size < self.spec.partition.sizes[places[0]]:
            return False
        if self.spec.epsilon is not None and bid.privacy_budget < self.spec.epsilon:
            return False
        try:
            return self.spec.offer is None or bool(np.isfinite(self.spec.offer(np.array([bid.rate]))).all())
        except InvalidInput:
            return False

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Settle the terms if they are not, then draw who takes part."""
        if not self.terms:
            self.terms = self._settled(bids)
        kept, self.turned_away[index] = self.draw(index)
        if self.policy is not None and not summing.has_company(self.policy, kept.size):
            kept = kept[:0]  # drawn, and not enough for a sum
        price, sizes, ids, shares = self.price, self.spec.partition.sizes, np.asarray(self.spec.ids), self._shares(kept)
        loss = Unprotected() if self.policy is None else ZCdp(self._rho)
        rate = float(self.rate(index))
        orders = tuple(
            self.order(
                index, int(ids[k]), loss=loss, price_micros=int(price[k]), records=int(sizes[k]), learning_rate=rate,
                share=share,
            )
            for k, share in zip(kept.tolist(), shares, strict=True)
        )  # fmt: skip
        return RoundPlan(index, f"{self.task}/{index}/bill", int(price[kept].sum()), orders, {"kept": kept.tolist()})

    @property
    def _rho(self) -> float:
        """What each client sells in a round, in a sum."""
        return float(rho_of_epsilon(self.spec.epsilon or 0.0, delta=DistributedGaussian.delta))

    def _shares(self, kept: IntArray) -> list[str]:
        """Everybody's share of the sum, if there is one: w/q over that of all who take part."""
        if self.policy is None or not kept.size:
            return [""] * kept.size
        weights, spec = self.spec.weights[kept] / self.q[kept], self.spec
        found = summing.shares(
            (weights / weights.sum()).tolist(), [self._rho] * kept.size, clip=spec.clip, dimension=self.dimension,
            policy=self.policy,
        )  # fmt: skip
        return [share for _, share in found]

    def left(self, order: Order) -> Release | None:
        """In a sum what she sold; without noise there is nothing to count."""
        return Release(order.award, DistributedGaussian.name, order.loss) if order.share else None

    def draw(self, index: int) -> tuple[IntArray, IntArray]:
        """Who takes part, and who was drawn but turned away at the hard cap; places, not ids."""
        spec, price = self.spec, self.price
        streams = OwnerStreams(spec.seed, index, np.asarray(spec.ids).tolist(), Purpose.PARTICIPATION)
        chance, order = np.array([rng.random(2) for rng in streams]).T
        drawn = np.flatnonzero(chance < self.q)
        if spec.hard_cap_micros is None:
            return drawn, drawn[:0]
        assert spec.c_max is not None  # checked with the cap; for the type checker
        queue = drawn[np.argsort(order[drawn], kind="stable")]
        before = np.cumsum(price[queue]) - price[queue]
        fits = before <= spec.hard_cap_micros - to_micros("c_max", spec.c_max)
        return np.sort(queue[fits]), np.sort(queue[~fits])

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """Move by Σ (w/q)·update over those who delivered; whoever fails is missing, and the step biased by that."""
        spec, kept = self.spec, np.array(plan.memory["kept"], dtype=np.int64)
        ends = [awards[order.owner] for order in plan.orders]
        came = np.array([order.owner in updates for order in plan.orders], dtype=bool)
        weights = np.where(came, spec.weights[kept] / self.q[kept], 0.0) if kept.size else np.zeros(0)
        if not summing.opens(plan, updates):
            weights = np.zeros(kept.size)
        elif came.any() and self.policy is not None:
            found = summing.opened(plan, updates, dimension=self.dimension)
            self.parameters = self.parameters - weights.sum() * found.mean
        elif came.any():
            moved = np.stack([updates[order.owner] for order in plan.orders if order.owner in updates])
            self.parameters = self.parameters - np.asarray(weights[came] @ moved)
        metrics = self.model.evaluate(self.parameters, spec.data.test)
        metrics["objective"] = self.objective(self.parameters)
        return RoundRecord(
            plan.index, np.asarray(spec.ids)[kept], spec.partition.sizes[kept].astype(np.float64),
            np.full(kept.size, np.inf if self.policy is None else self._rho),
            np.array([a.price_micros for a in ends], dtype=np.int64),
            tuple(a.state for a in ends), tuple(a.reason for a in ends), weights, plan.deposit_micros,
            self._first_bound / (plan.index + 1), metrics, "epsilon" if self.policy is None else "rho",
        )  # fmt: skip

    def objective(self, parameters: FloatArray) -> float:
        """F: the loss on all training records, penalty included."""
        data = self.spec.data
        if isinstance(self.model, SoftmaxRegression):
            return self.model.loss(parameters, data.x_train, data.y_train)
        return self.model.evaluate(parameters, data.train)["loss"]

    def _settled(self, bids: Mapping[int, Bid]) -> dict[str, Any]:
        """(q, r) for everybody who reported; whoever did not is never drawn."""
        spec, ids = self.spec, np.asarray(self.spec.ids).tolist()
        here = np.array([owner in bids for owner in ids], dtype=bool)
        q, r = np.asarray(spec.participation), np.asarray(spec.payment)
        if spec.offer is not None and here.any():
            q, r = np.zeros(len(ids)), np.zeros(len(ids))
            q[here], r[here] = spec.offer(np.array([bids[owner].rate for owner in ids if owner in bids]))
        return {"participation": np.where(here, q, 0.0).tolist(), "payment": np.where(here, r, 0.0).tolist()}
