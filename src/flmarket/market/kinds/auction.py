"""The auction: bids every round, any registered auction, market weights, payment on delivery (FL-Market v1 and v2).

Every round some of those who can sell are drawn, the auction picks winners among their bids and prices them, winners
release a private update, and the server moves by their weighted mean. A mechanism's outcome is checked before any money
moves: it may not spend more than the budget, ask for more privacy than was offered, or pay a loser.

With secure aggregation winners' weights and the noise that all of them share are settled with the plan, and an order's
loss is what its owner loses in the sum: at most the ρ of the ε that she sold, less where others' noise protects her
better. Deliveries make sense only added up modulo 2^b; if fewer came than the threshold the round is void, nobody is
paid and no release is booked. Winners who stay are paid for what they sold, whatever weight they had.

With `RecordNoise` the unit is one record instead of the whole update: she clips every record's gradient and noises
every step (`descent`), bids and awards say so, and her account counts records. The two are two products: nobody sells
both from one account.

What would break it: a budget that depends on reports could be moved by a lie, so `budget_factor` takes the costs that
were drawn for the bidders, not what they report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket import privacy
from flmarket.aggregation import Aggregation, Trust, data_shares, error_bound
from flmarket.aggregation.robust import RobustAggregation
from flmarket.bids import Auction, BidProfile, FloatArray, IntArray
from flmarket.errors import InvalidInput, MechanismViolation
from flmarket.learning import DataSet, LocalTraining, Model, Partition, Purpose, Records, SoftmaxRegression, stream
from flmarket.ledger import MICROS, Award, AwardState, Release, payments_to_micros, to_micros
from flmarket.market import summing
from flmarket.market.descent import checked_local
from flmarket.market.kind import (
    NOISE_MARGIN,
    Announcement,
    Bid,
    Currency,
    Order,
    RawUpdate,
    ReleasedUpdate,
    RoundPlan,
    RoundRecord,
    Task,
    cost,
    profile,
    say,
)
from flmarket.market.owner import Owner, OwnerSide, PrivacyCap, Work
from flmarket.privacy import (
    ApproxDp,
    Cap,
    DistributedGaussian,
    Event,
    NoiseSource,
    Perturbation,
    PrivacyAccount,
    PureDp,
    RecordLevel,
    RecordNoise,
    Uncapped,
    Unit,
    Unprotected,
    ZCdp,
    rho_of_epsilon,
    unit_of,
)
from flmarket.privacy.secure_sum import SecureAggregation

# Beyond these a bid is a mistake or mischief: records an owner holds, and what all her privacy costs.
LARGEST_HOLDING = 10**9
LARGEST_COST = 1e12
# an award may exceed the offered privacy budget by floating-point rounding only
_ROUNDING = 1e-9
# and a vector its clip by that of float32, if nothing is added to it
_PRECISION = 1e-6


@dataclass(frozen=True, kw_only=True)
class AuctionTerms:
    """What a buyer decides: the task, the mechanisms and what is trained. Owners come by themselves.

    `average` evaluates the mean of the latter half of all models so far instead of the last one: free post-processing
    that evens out the noise.
    `secure` makes the sum of a round's updates all that anybody sees; the perturbation is then `distributed-gaussian`.
    `normalised` updates are scaled to the clip, short ones too: only their direction is sold.
    """

    task: Task
    auction: Auction
    aggregation: Aggregation
    perturbation: Perturbation
    model: Model | None = None
    average: bool = False
    seed: int = 0
    secure: SecureAggregation | None = None
    normalised: bool = False

    def __post_init__(self) -> None:
        if self.secure is not None:
            noise = self.perturbation
            if not isinstance(noise, DistributedGaussian) or noise.delta != DistributedGaussian.delta:
                raise InvalidInput("perturbation", noise, f"{DistributedGaussian.name} as it stands, in sums")
            if isinstance(self.aggregation, RobustAggregation):
                raise InvalidInput("aggregation", self.aggregation.name, "one by weights: nobody sees single updates")
        if self.normalised and isinstance(self.perturbation, RecordNoise):
            raise InvalidInput("normalised", True, "false where records are protected: their gradients are clipped")

    @property
    def name(self) -> str:
        """The task's, which every id begins with."""
        return self.task.name

    @property
    def trust(self) -> Trust:
        """The trust model."""
        return "local" if self.secure is None else "secure-aggregation"

    @property
    def unprotected(self) -> bool:
        """Whether updates leave without any noise that promises something."""
        return isinstance(self.perturbation.guarantee(1.0), Unprotected)

    @property
    def trained(self) -> Model:
        """What is trained."""
        if self.model is None:
            raise InvalidInput("model", None, "what is trained")
        return self.model

    @property
    def records(self) -> tuple[int, int]:
        """Features and classes of the records that it takes; 0 if only those who hold them can read them."""
        return 0, 0

    def full_cost(self, bidders: IntArray) -> float:
        """What was drawn as the full cost of these bidders, where an experiment drew it."""
        raise InvalidInput("budget_factor", self.task.budget_factor, "a budget in money: nobody's costs are known here")

    @property
    def held_out(self) -> Records | None:
        """Records of the buyer's own that choose the best of all rounds' models, if she has any."""
        return None

    def measured(self, parameters: FloatArray) -> dict[str, float]:
        """How good a model is on records of the buyer's own, if she has any."""
        return {}


@dataclass(frozen=True, kw_only=True)
class AuctionSpec(AuctionTerms):
    """The terms, and who owns what and bids how: a whole market that can be played here.

    `bids` holds one bid per owner of `partition`; its data sizes are the owners' record counts. Without a `model` it is
    softmax regression with the local work of `local`: one gradient, or start minus end. A perturbation that promises
    nothing (`Unprotected`) takes owners without a cap, and counts as unbounded with them.
    """

    data: DataSet
    partition: Partition
    bids: BidProfile
    cap: PrivacyCap = field(default_factory=PrivacyCap)
    local: LocalTraining = field(default_factory=LocalTraining)
    dropout: float = 0.0
    faulty: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bids.shape != (self.partition.owners,):
            raise InvalidInput("bids", self.bids.shape, f"one bid for each of the {self.partition.owners} owners")
        if self.partition.order.size != len(self.data.y_train):
            raise InvalidInput("partition", self.partition.order.size, f"{len(self.data.y_train)} records")
        if not (0 <= self.dropout <= 1 and 0 <= self.faulty <= 1 and self.dropout + self.faulty <= 1):
            raise InvalidInput("dropout, faulty", (self.dropout, self.faulty), "probabilities that sum to at most 1")
        if isinstance(self.perturbation, RecordNoise):
            checked_local(self.trained, self.data, self.perturbation.clip)
        if self.unprotected and self.cap.epsilon < np.inf:
            raise InvalidInput("privacy cap", self.cap.epsilon, f"none: {self.perturbation.name} promises nothing")
        # refused where no account of this currency can hold such a release
        PrivacyAccount(self.owners_cap).would_exceed(self.perturbation.guarantee(1.0))

    @property
    def owners_cap(self) -> Cap:
        """What every owner's account is capped at."""
        if self.unprotected:
            return Uncapped()
        if isinstance(self.perturbation, RecordNoise):
            return self.cap.records
        return self.cap.cap if self.secure is None else self.cap.gaussian

    @property
    def trained(self) -> Model:
        """What is trained."""
        return self.model or SoftmaxRegression(self.data.features, self.data.n_classes, local=self.local)

    @property
    def records(self) -> tuple[int, int]:
        """Features and classes of the data."""
        return self.data.features, self.data.n_classes

    def full_cost(self, bidders: IntArray) -> float:
        """What was drawn for them, not what they report."""
        return float(self.bids[bidders[bidders < self.bids.n]].full_cost.sum())

    @property
    def held_out(self) -> Records | None:
        """What the data puts aside."""
        return self.data.validation

    def measured(self, parameters: FloatArray) -> dict[str, float]:
        """On the test records."""
        return self.trained.evaluate(parameters, self.data.test)

    def kind(self, buyer: str = "buyer") -> AuctionKind:
        """The market as the round plays it."""
        return AuctionKind(self, buyer)

    def owner(self, number: int, record: Path = Path(), *, seeded: bool = True) -> Owner:
        """Owner `number` with the records that the partition deals her."""
        own, rows = self.bids[[number]], self.partition.records(number)
        return Owner(
            number=number, x=self.data.x_train[rows], y=self.data.y_train[rows], valuation=own.valuations,
            privacy_budget=float(own.privacy_budget[0]), cap=self.owners_cap, trust=(self.trust,), record=record,
            model=self.trained, classes=self.data.n_classes, allow_raw=self.unprotected,
            simulation_seed=self.seed if seeded else None, dropout=self.dropout, faulty=self.faulty,
        )  # fmt: skip


@dataclass(frozen=True)
class _Cleared:
    """An auction's outcome as it is awarded: arrays over the bidders, ε = 0 for losers, `records` sold."""

    records: FloatArray
    epsilon: FloatArray
    price_micros: IntArray
    winners: NDArray[np.bool_]


def cleared(auction: Auction, bids: BidProfile, budget_micros: int, rng: np.random.Generator | None = None) -> _Cleared:
    """Run an auction and check what it says; MechanismViolation, and nothing awarded, if it breaks its bounds."""
    outcome = auction.run(bids, budget_micros / MICROS, rng=rng)
    if (outcome.epsilon > bids.privacy_budget * (1 + _ROUNDING)).any():
        raise MechanismViolation(f"{auction.name} asks for more privacy than was offered: nothing was awarded")
    if outcome.records is not None and (np.floor(outcome.records[outcome.winners]) < 1).any():
        raise MechanismViolation(f"{auction.name} buys less than one record: nothing was awarded")
    payment = outcome.payment
    if getattr(auction, "pays_losers", False):  # as printed; there is no delivery to pay for, so it is not paid
        payment = np.where(outcome.winners, payment, 0.0)
    if (payment[~outcome.winners] > 0).any():
        raise MechanismViolation(f"{auction.name} pays owners who sell nothing: nothing was awarded")
    sold = bids.data_size if outcome.records is None else np.floor(outcome.records)
    epsilon = np.minimum(outcome.epsilon, bids.privacy_budget)
    return _Cleared(np.asarray(sold), epsilon, payments_to_micros(payment, budget_micros), outcome.winners)


@lru_cache(maxsize=32)
def _records(clip: float, settings: str) -> RecordNoise:
    """The noise as an announcement says it; raises InvalidInput if it says something else."""
    try:
        said = json.loads(settings)
        if said["unit"] != RecordNoise.unit:
            raise ValueError
        return RecordNoise(clip=clip, delta=said["delta"])
    except (KeyError, TypeError, ValueError):
        raise InvalidInput("settings", settings, 'unit = "record" and a delta') from None


class AuctionSide(summing.SumSide):
    """She bids her valuation, and releases once for every award: a private update, a share of a sum, or noised steps.

    Bids are in ε, also where a loss in a sum is ρ.
    """

    def unit(self, call: Announcement) -> Unit:
        """By the noise that is announced; in sums it is of whole updates, whatever else is said."""
        return "record" if call.perturbation == RecordNoise.name and not summing.is_secure(call) else "update"

    def amount(self, loss: Event, call: Announcement | None = None) -> float:
        """ε: pure of an update, at the announced δ of a record, in a sum that of one release at the noise's δ.

        A loss of another unit than was announced is refused.
        """
        if isinstance(loss, ZCdp) or (call is not None and summing.is_secure(call)):
            return super().amount(loss, call)
        if call is not None and self.unit(call) != unit_of(loss):
            raise InvalidInput("loss", loss, f"a loss of the {self.unit(call)}, as was announced")
        if not isinstance(loss, RecordLevel):
            return OwnerSide.amount(self, loss, call)
        inner = loss.loss
        if not isinstance(inner, ApproxDp) or (call and inner.delta != _records(call.clip, call.settings).delta):
            raise InvalidInput("loss", loss, "ε of a record, at the announced δ")
        return inner.epsilon

    def guarantee(self, amount: float, records: int, call: Announcement) -> Event:
        """The perturbation's own."""
        if self.unit(call) == "record":
            return _records(call.clip, call.settings).guarantee(amount)
        return super().guarantee(amount, records, call)

    def whole(self, call: Announcement, cap: Cap, records: int) -> tuple[Callable[[float], Event], int]:
        """One release."""
        if self.unit(call) == "record":
            return _records(call.clip, call.settings).guarantee, 1
        return super().whole(call, cap, records)

    def is_sound(self, call: Announcement) -> bool:
        """The noise source adds records' noise to a lattice; others say it of themselves."""
        return self.unit(call) == "record" or super().is_sound(call)

    noises_itself = summing.SumSide.trains_itself

    def train(self, works: Sequence[Work]) -> FloatArray:
        """Raw updates; or, of records, what noised steps moved."""
        return self._moved(works) if self.unit(works[0].call) == "record" else super().train(works)

    def privatise(self, work: Work, raw: RawUpdate, noise: NoiseSource) -> ReleasedUpdate:
        """Clip (or scale to the clip), and noise; in a sum, her share of it, in whole numbers.

        Of records only ever an update of nothing comes here, which is steps of noise.
        """
        call = work.call
        if self.unit(call) == "record":
            return ReleasedUpdate(self._moved([work], blind=True)[0])
        if _normalises(call.settings):
            norm = float(np.linalg.norm(raw, ord=1 if _norm(call.perturbation) == "l1" else 2))
            raw = RawUpdate(raw * (call.clip / norm)) if norm > 0 else raw
        return super().privatise(work, raw, noise)

    def _moved(self, works: Sequence[Work], *, blind: bool = False) -> FloatArray:
        call, starts = works[0].call, np.stack([work.parameters for work in works])
        return starts - self.descended(works, starts, _records(call.clip, call.settings), blind=blind)


@lru_cache(maxsize=32)
def _normalises(settings: str) -> bool:
    return bool(json.loads(settings).get("normalised", False))


@lru_cache(maxsize=32)
def _norm(perturbation: str) -> str:
    return privacy.get(perturbation).norm


class AuctionKind(summing.SumKind):
    """The terms as the round plays them: of a spec's bids and records only the buyer's own are used."""

    name = "auction"
    side = AuctionSide()

    def __init__(self, spec: AuctionTerms, buyer: str = "buyer") -> None:
        model = spec.trained
        start = model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        super().__init__(spec.task.name, spec.task.rounds, model, start, buyer)
        self.validation = spec.held_out
        self.spec, self._model_text, self.policy = spec, say(model), spec.secure
        if isinstance(spec.perturbation, RecordNoise):
            self.unit = "record"
        self._energy: dict[float, float] = {}  # of the noise at this round's ε
        self._settings = json.dumps(
            summing.said(spec.secure) | ({"normalised": True} if spec.normalised else {}) | _said(spec.perturbation),
            sort_keys=True,
        )

    def announcement(self, index: int) -> Announcement:
        """The task, this round, and the noise that will be asked for."""
        spec = self.spec
        features, classes = spec.records
        return Announcement(
            task=self.task, buyer=self.buyer, market=self.name, round_index=index, rounds=self.rounds,
            features=features, classes=classes, model=self._model_text, parameters=self.dimension,
            learning_rate=_rate(self.model), perturbation=spec.perturbation.name, clip=spec.perturbation.clip,
            settings=self._settings, trust=spec.trust,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A valuation and a cost that can be computed with."""
        try:
            with np.errstate(over="ignore"):
                whole = cost(bid, bid.privacy_budget, bid.data_size)
        except InvalidInput:
            return False
        sane = 1 <= bid.data_size <= LARGEST_HOLDING and bid.privacy_budget > 0 and whole <= LARGEST_COST
        return sane and bid.unit == self.unit

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """Draw the bidders, run the auction, and write down what every winner is asked to do."""
        if not bids:
            return RoundPlan(index)
        spec, owners = self.spec, np.array(sorted(bids), dtype=np.int64)
        draw = stream(spec.seed, index, purpose=Purpose.PARTICIPATION)
        bidders = np.sort(draw.choice(owners, min(spec.task.bidders_per_round, owners.size), replace=False))
        offered, budget = profile([bids[owner] for owner in bidders.tolist()]), spec.task.budget_micros
        if spec.task.budget_factor is not None:
            budget = to_micros("budget", spec.task.budget_factor * spec.full_cost(bidders))
        assert budget is not None
        found = cleared(spec.auction, offered, budget, stream(spec.seed, index, purpose=Purpose.AUCTION))
        rate, bought = _rate(self.model), found.epsilon[found.winners]
        if bought.size and self.unit == "update":
            energy = spec.perturbation.noise_energy(bought, self.dimension)
            self._energy = dict(zip(bought.tolist(), np.broadcast_to(energy, bought.shape).tolist(), strict=True))
        terms = self._bought(found)
        orders = tuple(
            self.order(
                index, int(bidders[k]), loss=loss, price_micros=int(found.price_micros[k]),
                records=int(found.records[k]), learning_rate=rate, share=share,
            )
            for k, (loss, share) in terms.items()
        )  # fmt: skip
        memory = {
            "bidders": bidders.tolist(), "data_size": found.records.tolist(), "epsilon": found.epsilon.tolist(),
            "price": np.where([k in terms for k in range(len(bidders))], found.price_micros, 0).tolist(),
        }  # fmt: skip
        return RoundPlan(index, f"{self.task}/{index}/budget", budget, orders, memory)

    def _bought(self, found: _Cleared) -> dict[int, tuple[Event, str]]:
        """What each winner loses, and her share of the sum where there is one; nobody in a sum of one."""
        spec, winners = self.spec, np.flatnonzero(found.winners)
        if spec.secure is None:
            return {k: (_loss(spec.perturbation, float(found.epsilon[k])), "") for k in winners.tolist()}
        if not summing.has_company(spec.secure, winners.size):
            return {}
        weights = spec.aggregation.weights(found.epsilon, found.records)[winners]
        rho = rho_of_epsilon(found.epsilon[winners], delta=DistributedGaussian.delta)
        parts = summing.shares(
            weights.tolist(), rho.tolist(), clip=spec.perturbation.clip, dimension=self.dimension, policy=spec.secure
        )
        return dict(zip(winners.tolist(), parts, strict=True))

    def bought(self, order: Order) -> Event:
        """The ε that was sold, or whatever is in an update that nothing protects."""
        return Unprotected() if self.spec.unprotected else order.loss

    def largest_norm(self, order: Order) -> float:
        """The clip, and noise at its very longest; rounded, perhaps to the model's own precision."""
        noise, epsilon = self.spec.perturbation, _epsilon(order)
        if isinstance(noise, RecordNoise):
            energy = float(noise.noise_energy(epsilon, self.dimension)) / order.records**2
            return float(noise.length + NOISE_MARGIN * np.sqrt(noise.steps * energy)) * (1 + _PRECISION)
        if epsilon not in self._energy:
            self._energy[epsilon] = float(noise.noise_energy(epsilon, self.dimension))
        return float(noise.clip + NOISE_MARGIN * np.sqrt(self._energy[epsilon])) * (1 + _PRECISION)

    def left(self, order: Order) -> Release | None:
        """The perturbation's own promise, good or bad; in a sum, what the order says."""
        noise = self.spec.perturbation
        if order.share:
            return Release(order.award, noise.name, order.loss)
        return Release(order.award, noise.name, noise.guarantee(_epsilon(order)))

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """Aggregate with the market's weights, step, and evaluate."""
        spec, saved = self.spec, plan.memory or {"bidders": [], "data_size": [], "epsilon": [], "price": []}
        bidders, price = (np.array(saved[name], dtype=np.int64) for name in ("bidders", "price"))
        sizes, epsilon = (np.array(saved[name], dtype=np.float64) for name in ("data_size", "epsilon"))
        final = [awards.get(owner) for owner in bidders.tolist()]
        paid = np.array([award is not None and award.state is AwardState.POSTED for award in final], dtype=bool)
        came = paid & np.array([owner in updates for owner in bidders.tolist()], dtype=bool)
        weights, bound, sold = np.zeros(len(bidders)), np.inf, np.where(came, epsilon, 0.0)
        currency: Currency = "epsilon" if spec.secure is None else "rho"
        given = {order.owner: order.loss.rho for order in plan.orders if isinstance(order.loss, ZCdp)}
        loss = np.array([given.get(owner, 0.0) for owner in bidders.tolist()]) if spec.secure else epsilon
        if came.any() and spec.secure is not None:
            weights, bound = self._summed(plan, bidders, sizes, updates)
        elif came.any():
            weights = self._moved(plan.index, bidders, sizes, sold, updates)
        if weights.any() and spec.secure is None:
            noise, clip = spec.perturbation, getattr(spec.perturbation, "length", spec.perturbation.clip)
            bound = float(error_bound(weights, sold, sizes, clip=clip, dimension=self.dimension, perturbation=noise))
        if spec.average:
            self.history.append(self.parameters)
        states = tuple(None if award is None else award.state for award in final)
        reasons = tuple("" if award is None else award.reason for award in final)
        return RoundRecord(
            plan.index, bidders, sizes, loss, price, states, reasons, weights, plan.deposit_micros, bound,
            self.measured(), currency, unit=self.unit,
        )  # fmt: skip

    def measured(self) -> dict[str, float]:
        """How good the buyer's model is now."""
        return self.spec.measured(self.buyers_model)

    def _moved(
        self, index: int, bidders: IntArray, sizes: FloatArray, epsilon: FloatArray, updates: Mapping[int, FloatArray]
    ) -> FloatArray:
        """Move the model by what came, which is where ε is not 0; everybody's weight, none if too few came."""
        rule, weights, step = self.spec.aggregation, np.zeros(len(bidders)), np.zeros(self.dimension)
        if isinstance(rule, RobustAggregation):
            came = epsilon > 0
            with suppress(InvalidInput):  # the updates were checked on arrival: it is their number
                combined = rule.combine(np.stack([updates[i] for i in bidders[came].tolist()]), sizes[came])
                weights[came], step = combined.shares, combined.average
        else:
            weights = rule.weights(epsilon, sizes)
            for owner, weight in zip(bidders.tolist(), weights.tolist(), strict=True):
                if weight > 0:
                    step += weight * updates[owner]
        self.parameters = self.parameters - self.spec.task.rate(index) * step
        return weights

    def _summed(
        self, plan: RoundPlan, bidders: IntArray, sizes: FloatArray, updates: Mapping[int, FloatArray]
    ) -> tuple[FloatArray, float]:
        """Open the sum, divide it by the weight that is in it, and step; weights, and the bound for who stayed."""
        found, clip = summing.opened(plan, updates, dimension=self.dimension), self.spec.perturbation.clip
        self.parameters = self.parameters - self.spec.task.rate(plan.index) * found.mean
        weights = np.array([found.weights.get(owner, 0.0) for owner in bidders.tolist()])
        return weights, found.energy + float(clip * np.abs(weights - data_shares(sizes)).sum()) ** 2


def _said(noise: Perturbation) -> dict[str, float | str]:
    """What an announcement says besides the noise's name and clip."""
    return {"delta": noise.delta, "unit": noise.unit} if isinstance(noise, RecordNoise) else {}


def _loss(noise: Perturbation, epsilon: float) -> Event:
    """What an award buys."""
    return RecordLevel(ApproxDp(epsilon, noise.delta)) if isinstance(noise, RecordNoise) else PureDp(epsilon)


def _epsilon(order: Order) -> float:
    return AuctionKind.side.amount(order.loss)


def _rate(model: Model) -> float:
    """The local rate that is announced; 1 for a model that has none of its own."""
    local = getattr(model, "local", None)
    return float(local.learning_rate) if isinstance(local, LocalTraining) else 1.0
