"""Robust joint-DP federated learning (JDP: Zhang et al., TKDE 2023).

Clients bid a cost; an auction picks who trains and at what price (M1, M2, m2-bf or posted); prices wait in escrow. Each
round the chosen clients train, clip and add noise (M3), the server combines the uploads robustly (M4, or any other
rule), and every client mixes the public result with her own parameters (M5). Training stops after `rounds`, or once the
public model reaches an accuracy on the server's validation records. Then the awards are posted.

Adversaries are drawn among the chosen clients, as in the paper. Validation records are taken from the data set's test
records; the rest of those measures accuracy and decides nothing.

Stopping looks at validation records too, so it is done by AboveThreshold (Dwork and Roth 2014, Theorem 3.23), which
costs `stop_epsilon` once, however many rounds it takes.

**In a sum** (`secure`) M3 is possible: the sum of clipped updates has the noise that all share, each client's ε for an
upload is in the form of ρ, and the public model moves by their average, weighed by records. M4 is not: the exponential
mechanism scores groups of uploads, medians and Krum compare them, and a sum shows none. So only `average` is taken,
which one liar can move as far as the modulus allows; who fears liars takes the market with single uploads.

What would break it: a client may send anything. Uploads that are not finite numbers void her award and she is out; a
finite one is taken, and limiting what it does is the rule's business. A client whose own training overflows (under very
strong noise it can) keeps the parameters she started the round with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.aggregation import Trust
from flmarket.aggregation.robust import Choice, Combined, ExponentialChoice, RobustAggregation, WeightedAverage
from flmarket.bids import Auction, BidProfile, FloatArray, IntArray, Kind, Valuations, checked_array
from flmarket.errors import InvalidInput
from flmarket.learning import (
    DataSet,
    Model,
    Partition,
    Purpose,
    Records,
    accuracies,
    local_training,
    stream,
    train_many,
)
from flmarket.learning.adversaries import Adversary
from flmarket.ledger import MICROS, Award, AwardState, Release, payments_to_micros, to_micros
from flmarket.market import summing
from flmarket.market.descent import checked_local, reach
from flmarket.market.kind import (
    NOISE_MARGIN,
    Announcement,
    Bid,
    MarketResult,
    Order,
    OwnerStatement,
    RawUpdate,
    ReleasedUpdate,
    RoundPlan,
    RoundRecord,
    Task,
    say,
)
from flmarket.market.owner import UNASKED, Owner, PrivacyCap, Streams, Work, holds_noise
from flmarket.privacy import (
    ApproxDp,
    Cap,
    DistributedGaussian,
    Event,
    GaussianRelease,
    NoiseSource,
    PureDp,
    RecordLevel,
    Uncapped,
    Unit,
    Unprotected,
    ZCdp,
    rho_of_epsilon,
    unit_of,
)
from flmarket.privacy.composition import zcdp_rho
from flmarket.privacy.events import checked_number
from flmarket.privacy.joint import JointPrivacy, LocalPerturbation, account_of
from flmarket.privacy.secure_sum import SecureAggregation

# The cost of somebody who does not take part: beyond any budget.
_STAYS_OUT = 1e12


@dataclass(frozen=True, eq=False)
class Selection:
    """Who was chosen, what each sells and is paid; arrays per client of the market, zeros for those not chosen."""

    clients: IntArray
    adversaries: IntArray
    epsilon: FloatArray
    records: IntArray
    paid_micros: IntArray
    budget_micros: int


@dataclass(frozen=True, kw_only=True, eq=False)
class JointSpec:
    """Who holds what at which cost, and everything that is done with it.

    `epsilon` is ε_L, for one upload; `perturbation=None` sends parameters as they are, and nobody is protected.
    `validation` counts the server's records. M2 may owe more than `budget` (docs/errata.md E8); that is refused unless
    `allow_overspending`. With `secure` only sums are seen, which rules that compare uploads cannot work with.
    """

    data: DataSet
    partition: Partition
    costs: ArrayLike
    budget: float
    auction: Auction
    model: Model
    aggregation: RobustAggregation
    perturbation: LocalPerturbation | None
    epsilon: float = 1.0
    adversary: Adversary | None = None
    adversaries: int = 0
    mixing: bool = True
    rounds: int = 10
    validation: int = 500
    stop_accuracy: float | None = None
    stop_epsilon: float = 1.0
    allow_overspending: bool = False
    seed: int = 0
    name: str = "task"
    cap: PrivacyCap = field(default_factory=PrivacyCap)
    secure: SecureAggregation | None = None

    def __post_init__(self) -> None:
        if self.secure is not None:
            self._check_sums()
        costs = checked_array("costs", self.costs)
        object.__setattr__(self, "costs", costs)
        if costs.shape != (self.partition.owners,):
            raise InvalidInput("costs", costs.shape, f"one for each of the {self.partition.owners} clients")
        if self.partition.order.size != len(self.data.y_train):
            raise InvalidInput("partition", self.partition.order.size, f"{len(self.data.y_train)} records")
        if not 1 <= self.validation < len(self.data.y_test):
            raise InvalidInput("validation", self.validation, f"from 1 to {len(self.data.y_test) - 1} test records")
        if type(self.rounds) is not int or not 1 <= self.rounds <= 1_000_000:
            raise InvalidInput("rounds", self.rounds, "a whole number from 1 to 1,000,000")
        if self.adversaries < 0 or (self.adversaries > 0) != (self.adversary is not None):
            raise InvalidInput("adversaries", self.adversaries, "a number above 0 with an adversary, 0 without")
        if isinstance(self.aggregation, ExponentialChoice) and self.aggregation.validation != self.validation:
            raise InvalidInput("validation", self.validation, f"the rule's own, {self.aggregation.validation}")
        checked_number("epsilon", self.epsilon, 1e-9, 1e12)
        checked_number("stop_epsilon", self.stop_epsilon, 1e-9, 1e12)
        if self.stop_accuracy is not None:
            checked_number("stop_accuracy", self.stop_accuracy, 0.0, 1.0)
        to_micros("budget", self.budget)
        _ = self.perturbation is None or self.owners_cap  # refused where no account can hold such noise
        if self.perturbation is not None and self.perturbation.unit == "record":
            checked_local(self.model, self.data, self.perturbation.clip)

    @property
    def owners_cap(self) -> Cap:
        """What every client's account is capped at, in the unit that the noise protects."""
        return self.cap.records if _unit(self.perturbation) == "record" else self.cap.gaussian

    def _check_sums(self) -> None:
        """What cannot be done with a sum."""
        rule, noise = self.aggregation, self.perturbation
        if not isinstance(rule, WeightedAverage):
            what = f"{WeightedAverage().name} in sums: to choose among uploads, or to compare them, is to see each"
            raise InvalidInput("aggregation", rule.name, what)
        if noise is None or (noise.unit, noise.clipped) != ("client", "update"):
            what = "M3 of clipped updates, for clients: noise in every step, or none, cannot be shared in a sum"
            raise InvalidInput("perturbation", noise, what)
        if self.adversary is not None:
            raise InvalidInput("adversary", self.adversary.name, "none in sums: nobody could tell, and none is told")

    @property
    def trust(self) -> Trust:
        """The trust model."""
        return "local" if self.secure is None else "secure-aggregation"

    def bids(self) -> BidProfile:
        """A cost is for taking part at all, whatever the ε: a step."""
        sizes = self.partition.sizes.astype(np.float64)
        rate = np.divide(self.costs, sizes, out=np.zeros(sizes.shape), where=sizes > 0)
        return BidProfile(Valuations(np.full(sizes.shape, int(Kind.STEP)), rate), self.epsilon, sizes)

    def select(self) -> Selection:
        """Clear the auction and draw the adversaries; nothing is paid yet."""
        bids, budget = self.bids(), to_micros("budget", self.budget)
        outcome = self.auction.run(bids, budget / MICROS, rng=stream(self.seed, purpose=Purpose.AUCTION))
        clients = np.flatnonzero(outcome.winners)
        limit = int(np.ceil(outcome.spent * MICROS)) if self.allow_overspending else 0
        paid = payments_to_micros(outcome.payment, max(budget, limit))
        if self.adversaries > clients.size:
            raise InvalidInput("adversaries", self.adversaries, f"no more than the {clients.size} chosen clients")
        draw = stream(self.seed, purpose=Purpose.ADVERSARY)
        malicious = np.sort(draw.choice(clients, self.adversaries, replace=False)) if self.adversaries else clients[:0]
        sold = bids.data_size if outcome.records is None else np.floor(outcome.records)
        sold = np.where(outcome.winners, np.minimum(sold, bids.data_size), 0.0)
        return Selection(clients, malicious, outcome.epsilon, sold.astype(np.int64), paid, budget)

    @cached_property
    def selection(self) -> Selection:
        """`select`, once."""
        return self.select()

    def kind(self, buyer: str = "buyer") -> JointKind:
        """The market as the round plays it."""
        return JointKind(self, buyer)

    def owner(self, number: int, record: Path = Path(), *, seeded: bool = True) -> Owner:
        """Client `number` with the records that the partition deals her; malicious if she was drawn to be."""
        rows, raw = self.partition.records(number), self.perturbation is None
        labels = self.data.y_train[rows]
        adversary = self.adversary if self.adversaries and number in self.selection.adversaries else None
        if adversary is not None:
            labels = adversary.labels(labels, self.data.n_classes)
        return Owner(
            number=number, x=self.data.x_train[rows], y=labels, privacy_budget=self.epsilon, model=self.model,
            valuation=UNASKED, cap=Uncapped() if raw else self.owners_cap, record=record, allow_raw=raw,
            value=float(np.asarray(self.costs)[number]), classes=self.data.n_classes, adversary=adversary,
            trust=(self.trust,), simulation_seed=self.seed if seeded else None,
        )  # fmt: skip

    def result(self, kind: JointKind, records: Sequence[RoundRecord], owners: Mapping[int, Any]) -> JdpResult:
        """A finished run in this market's own terms; `owners` has every client's own model and account."""
        malicious = self.selection.adversaries  # of those who would be chosen; owners may have stayed out
        chosen = replace(kind.chosen, adversaries=malicious[np.isin(malicious, kind.chosen.clients)])
        clients = chosen.clients.tolist()
        rounds = tuple(records) if clients else ()
        personal = np.broadcast_to(kind.parameters, (len(clients), kind.dimension)).copy()
        total = float(kind.notes["total_size"])
        for place, i in enumerate(clients):
            own = owners[i].journal.own_model(self.name, len(rounds) - 1)
            if self.mixing and own is not None:  # M5, a last time
                share = chosen.records[i] / (total + chosen.records[i])
                personal[place] = kind.parameters + share * (own - kind.parameters)
        final = rounds[-1] if rounds else None
        voided = tuple(i for i in clients if final is not None and final.state[i] is not AwardState.POSTED)
        spent = {i: owners[i].account.books.releases * rho for i, rho in zip(clients, kind.rho.tolist(), strict=False)}
        included = np.array(kind.included if clients else [], dtype=bool).reshape(len(rounds), len(clients))
        return JdpResult(
            self, chosen, rounds, tuple(kind.choices if clients else ()), included, kind.parameters, personal,
            kind.privacy(), voided, kind.stopped, spent,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class JdpResult:
    """A finished training.

    `rounds` are in the market's terms: losses are ρ (zCDP of one upload), everybody is paid in the last. `included`
    (rounds, chosen clients) says whose upload counted. `personal` are the clients' own mixed models, which never leave.
    """

    spec: JointSpec
    selection: Selection
    rounds: tuple[RoundRecord, ...]
    choices: tuple[Choice | None, ...]
    included: NDArray[np.bool_]
    parameters: FloatArray
    personal: FloatArray
    privacy: JointPrivacy
    voided: tuple[int, ...] = ()
    stopped: bool = False
    spent_rho: dict[int, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Of the public model on the test records, at the end."""
        return self.rounds[-1].metrics["accuracy"] if self.rounds else float("nan")

    @property
    def adversaries_included(self) -> float:
        """How often an adversary's upload counted, as a share of rounds and adversaries; NaN without any."""
        who = np.isin(self.selection.clients, self.selection.adversaries)
        return float(self.included[:, who].mean()) if who.any() and len(self.included) else float("nan")

    def over_rounds(self, metric: str = "accuracy") -> list[float]:
        """The public model's "accuracy" or "loss" on the test records after each round."""
        return [record.metrics[metric] for record in self.rounds]

    def market_result(self) -> MarketResult:
        """The run in the market's terms, for `report`."""
        spec, chosen = self.spec, self.selection
        if spec.perturbation is None or not self.rounds:
            raise InvalidInput("run", self.rounds, "at least one round, with noise: a report states what was protected")
        paid = {i: 0 if i in self.voided else int(chosen.paid_micros[i]) for i in range(spec.partition.owners)}
        sent = {i: len(self.rounds) for i in chosen.clients.tolist()}
        statements = tuple(
            OwnerStatement(i, size, 1, sent.get(i, 0), 0, paid[i], self.spent_rho.get(i, 0.0), float("inf"))
            for i, size in enumerate(spec.partition.sizes.tolist())
        )
        task = Task(
            name=spec.name, rounds=len(self.rounds), bidders_per_round=spec.partition.owners,
            budget_micros=chosen.budget_micros,
        )  # fmt: skip
        return MarketResult(
            task, spec.auction.name, spec.aggregation.name,
            "gaussian-zcdp" if spec.secure is None else DistributedGaussian.name, spec.data.name, spec.seed,
            self.rounds, statements, self.parameters, spec.data.baseline_accuracy, spec.trust,
        )  # fmt: skip


@lru_cache(maxsize=32)
def _noise(clip: float, settings: str) -> LocalPerturbation:
    """M3 as an announcement says it; raises InvalidInput if it says something else."""
    try:
        said: Any = summing.unsaid(json.loads(settings))
        return LocalPerturbation(clip=clip, **said)
    except (TypeError, ValueError, AttributeError):
        raise InvalidInput("settings", settings, "M3's delta, clipped, calibration and unit") from None


def _unit(noise: LocalPerturbation | None) -> Unit:
    """What losses are for, as accounts count them; what nothing protects is whole."""
    return "record" if noise is not None and noise.unit == "record" else "update"


def _of_unit(noise: LocalPerturbation, loss: ApproxDp | GaussianRelease | ZCdp) -> Event:
    """A loss by this noise, of what the noise protects."""
    return RecordLevel(loss) if _unit(noise) == "record" else loss


class JointSide(summing.SumSide):
    """She reports her cost once; every round her parameters leave, clipped and noised (M3), and her own stay (M5)."""

    asks_once = lasting = True

    def stays_out(
        self, *, value: float | None, allow_raw: bool, cap: Cap, trust: Sequence[str], call: Announcement | None = None
    ) -> str:
        """Without a cost to report, or an account that holds Gaussian noise."""
        if value is None:
            return "no value is given"
        return holds_noise(cap)

    def unit(self, call: Announcement) -> Unit:
        """Her whole data set, or any one record, by the noise that is announced."""
        return _unit(_noise(call.clip, call.settings) if call.perturbation else None)

    def bid(self, owner: Owner, call: Announcement) -> Bid:
        """Her cost of taking part, and the most ε of one upload."""
        budget = owner.privacy_budget if call.perturbation else float("inf")
        return self.reported(owner, call, budget=budget, least=owner.least_epsilon)

    def sum_delta(self, call: Announcement | None) -> float:
        """The announced one."""
        return LocalPerturbation.delta if call is None else _noise(call.clip, call.settings).delta

    def amount(self, loss: Event, call: Announcement | None = None) -> float:
        """ε of one upload, at the announced δ."""
        if call is not None and summing.is_secure(call):
            return super().amount(loss, call)
        if call is not None and not call.perturbation and isinstance(loss, Unprotected):
            return float("inf")
        inner = loss.loss if isinstance(loss, RecordLevel) else loss
        if call is not None and call.perturbation and unit_of(loss) != self.unit(call):
            raise InvalidInput("loss", loss, f"a loss of the {self.unit(call)}, as was announced")
        if not isinstance(inner, ApproxDp) or (call and inner.delta != _noise(call.clip, call.settings).delta):
            raise InvalidInput("loss", loss, "ε of one upload, at the announced δ")
        return inner.epsilon

    def guarantee(self, amount: float, records: int, call: Announcement) -> Event:
        """What M3's noise promises for her whole data set, or for each record."""
        if call.perturbation != LocalPerturbation.name:
            raise InvalidInput("perturbation", call.perturbation, LocalPerturbation.name)
        if summing.is_secure(call):
            return super().guarantee(amount, records, call)
        noise = _noise(call.clip, call.settings)
        return _of_unit(noise, noise.guarantee(amount))

    def whole(self, call: Announcement, cap: Cap, records: int) -> tuple[Callable[[float], Event], int]:
        """An upload every round."""
        return lambda amount: self.guarantee(amount, records, call), call.rounds

    def is_sound(self, call: Announcement) -> bool:
        """The noise source adds it to a lattice."""
        return True

    def asked(self, owner: Owner, bid: Bid, order: Order, call: Announcement) -> float:
        """The cost that she reported."""
        return bid.rate

    noises_itself = summing.SumSide.trains_itself

    def train(self, works: Sequence[Work]) -> FloatArray:
        """Models after local training, each from the public one mixed with her own of the round before (M5)."""
        starts, call = np.stack([_start(work) for work in works]), works[0].call
        if self.noises_itself(call):
            trained = self.descended(works, starts, _noise(call.clip, call.settings))
        else:
            trained = train_many(works[0].model, starts, [work.records for work in works], Streams(works))
        overflowed = ~np.isfinite(trained).all(axis=1)
        trained[overflowed] = starts[overflowed]
        for work, own in zip(works, trained, strict=True):
            work.record.journal.keep_own_model(work.order.task, work.order.round_index, own)
        return trained

    def privatise(self, work: Work, raw: RawUpdate, noise: NoiseSource) -> ReleasedUpdate:
        """M3; in a sum, of what training moved."""
        if summing.is_secure(work.call):
            return super().privatise(work, RawUpdate(raw - work.parameters), noise)
        mechanism = _noise(work.call.clip, work.call.settings)
        if self.noises_itself(work.call):
            return ReleasedUpdate(self.descended([work], raw[None], mechanism, blind=True)[0])
        sigma = np.array([mechanism.scale(self.amount(work.order.loss, work.call), work.order.records)])
        return ReleasedUpdate(np.asarray(mechanism.upload(raw[None], work.parameters, sigma, [noise])[0]))

    def nothing(self, parameters: FloatArray) -> RawUpdate:
        """The model as it came."""
        return RawUpdate(parameters)


def _start(work: Work) -> FloatArray:
    """Where she starts: the public model, mixed with her own of the round before if the buyer says of how many."""
    order, public = work.order, work.parameters
    before = work.record.journal.own_model(order.task, order.round_index - 1) if order.total_size > 0 else None
    if before is None or before.shape != public.shape:
        return public
    return public + order.records / (order.total_size + order.records) * (before - public)


class JointKind(summing.LastingKind):
    """A `JointSpec` as the round plays it, at the costs that owners report.

    A client who misses a round is out and not paid, as one is who sends nonsense.
    """

    name = "joint"
    side = JointSide()

    def __init__(self, spec: JointSpec, buyer: str = "buyer") -> None:
        start = spec.model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        super().__init__(spec.name, spec.rounds, spec.model, start, buyer)
        self.spec, self._model_text, noise, self.policy = spec, say(spec.model), spec.perturbation, spec.secure
        self.unit = _unit(noise)
        self.notes = {"total_size": 0.0, "looks": 0, "done": False}
        self.choices: list[Choice | None] = []
        self.included: list[NDArray[np.bool_]] = []
        split = stream(spec.seed, purpose=Purpose.EVALUATION).permutation(len(spec.data.y_test))
        self._validation = self._test_records(split[: spec.validation])
        self.tested = self._test = self._test_records(split[spec.validation :])
        self._call = Announcement(
            task=self.task, buyer=self.buyer, market=self.name, round_index=0, rounds=self.rounds,
            features=spec.data.features, classes=spec.data.n_classes, model=self._model_text,
            parameters=self.dimension, learning_rate=0.0, perturbation="" if noise is None else noise.name,
            clip=0.0 if noise is None else noise.clip,
            settings="{}" if noise is None else json.dumps(noise.choices | summing.said(spec.secure), sort_keys=True),
            trust=spec.trust,
        )  # fmt: skip
        self._chosen: tuple[dict[str, Any], Selection] | None = None
        self._combined: tuple[tuple[int, ...], Combined | None] = ((-1,), None)
        self._stop: tuple[int, bool] = (-1, False)

    def _test_records(self, rows: IntArray) -> Records:
        data = self.spec.data
        return Records(data.x_test[rows], data.y_test[rows])

    @property
    def chosen(self) -> Selection:
        """Who is chosen at the reported costs."""
        if self._chosen is None or self._chosen[0] is not self.terms:
            costs = self.terms.get("costs", self.spec.costs)
            self._chosen = self.terms, replace(self.spec, costs=costs, adversary=None, adversaries=0).select()
        return self._chosen[1]

    def _steps(self, records: int) -> tuple[int, float]:
        """How many noised steps an upload consists of, and how far one of noise 1 goes."""
        if self.spec.perturbation is None or self.spec.perturbation.unit == "client":
            return 1, 1.0
        local = local_training(self.model)
        return int(local.plan(records)[0]), reach(local)

    @property
    def sigma(self) -> FloatArray:
        """The noise in each coordinate of the chosen clients' uploads; with momentum, at most."""
        noise, chosen, found = self.spec.perturbation, self.chosen, np.zeros(self.chosen.clients.size)
        if noise is None:
            return found
        for place, i in enumerate(chosen.clients):
            steps, reach = self._steps(int(chosen.records[i]))
            found[place] = reach * np.sqrt(steps) * noise.scale(float(chosen.epsilon[i]), int(chosen.records[i]), steps)
        return found

    @property
    def releases(self) -> list[GaussianRelease | ZCdp]:
        """What one upload of each chosen client gives away; empty without noise."""
        noise, chosen = self.spec.perturbation, self.chosen
        return [] if noise is None else [self._once(noise, float(chosen.epsilon[i])) for i in chosen.clients]

    def _once(self, noise: LocalPerturbation, epsilon: float) -> GaussianRelease | ZCdp:
        """What an upload of this ε gives away."""
        if self.policy is None:
            return noise.guarantee(epsilon)
        return ZCdp(float(rho_of_epsilon(epsilon, delta=noise.delta)))

    @property
    def rho(self) -> FloatArray:
        """The same as ρ; ∞ without noise."""
        found = [zcdp_rho(release) for release in self.releases]
        return np.array(found) if found else np.full(self.chosen.clients.size, np.inf)

    @property
    def done(self) -> bool:
        """The model is good enough, by the stopping rule, or nobody was chosen."""
        return bool(self.notes["done"]) or (bool(self.terms) and not self.chosen.clients.size)

    @property
    def stopped(self) -> bool:
        """Whether the stopping rule ended it, in its last round perhaps."""
        return bool(self.notes.get("stopped", self.notes["done"]))

    def announcement(self, index: int) -> Announcement:
        """M3's choices are part of the offer."""
        return self._call

    def accepts(self, bid: Bid) -> bool:
        """A cost, as much privacy as every upload takes, and the records that the market counts on."""
        sizes = self.spec.partition.sizes
        holds = bid.owner < sizes.size and bid.data_size >= sizes[bid.owner]
        sells = bid.privacy_budget >= self.spec.epsilon and bid.unit == self.unit
        return bool(0 < bid.rate < _STAYS_OUT and sells and holds)

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """The chosen clients; those who are out are passed over."""
        if not self.terms:
            owners = range(self.spec.partition.owners)
            self.terms = {"costs": [bids[i].rate if i in bids else _STAYS_OUT for i in owners]}
        spec, chosen = self.spec, self.chosen
        if not chosen.clients.size:
            return RoundPlan(index)
        total = float(self.notes["total_size"]) if spec.mixing and index else 0.0
        orders = tuple(
            self.order(
                index, i, price_micros=int(chosen.paid_micros[i]), records=int(chosen.records[i]), learning_rate=0.0,
                loss=self._upload_loss(float(chosen.epsilon[i])), total_size=total, share=share,
            )
            for i, share in self._shares([i for i in chosen.clients.tolist() if i not in self.out]).items()
        )  # fmt: skip
        if not orders:
            return RoundPlan(index)
        budget = max(chosen.budget_micros, int(chosen.paid_micros.sum()))
        return RoundPlan(index, f"{self.task}/budget", budget, orders)

    def _upload_loss(self, epsilon: float) -> Event:
        """What an order asks for."""
        noise = self.spec.perturbation
        if noise is None:
            return Unprotected()
        return self._once(noise, epsilon) if self.policy else _of_unit(noise, ApproxDp(epsilon, noise.delta))

    def _shares(self, clients: list[int]) -> dict[int, str]:
        """Everybody's share of a round's sum, if there is one, by records; nobody, if they are too few for it."""
        chosen, noise = self.chosen, self.spec.perturbation
        if self.policy is None or noise is None:
            return dict.fromkeys(clients, "")
        if not summing.has_company(self.policy, len(clients)):
            return {}
        size, rho = chosen.records[clients], [zcdp_rho(self._once(noise, float(chosen.epsilon[i]))) for i in clients]
        parts = summing.shares(
            (size / size.sum()).tolist(), rho, clip=noise.clip, dimension=self.dimension, policy=self.policy
        )
        return {i: share for i, (_, share) in zip(clients, parts, strict=True)}

    def bought(self, order: Order) -> Event:
        """The uploads of all rounds agreed on."""
        whole = self.given(order, self.rounds)
        return Unprotected() if whole is None else whole.guarantee

    def largest_norm(self, order: Order) -> float:
        """A model as long as any so far, and steps of the clip and of noise at its very longest since the first one."""
        noise = self.spec.perturbation
        if noise is None:
            return float("inf")
        steps, reach = self._steps(order.records)
        sigma = noise.scale(self.side.amount(order.loss, self._call), order.records, steps)
        step = reach * steps * (noise.clip + NOISE_MARGIN * sigma * np.sqrt(self.dimension))
        taken = order.round_index + 1 if noise.unit == "record" else 1
        return float(max(np.linalg.norm(self.parameters), self.notes.get("longest", 0.0)) + taken * step)

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """The public model becomes what the rule makes of the uploads."""
        spec, chosen, n = self.spec, self.chosen, self.spec.partition.owners
        reached = self._reached(plan, updates)
        last, combined = self.last(plan, updates, awards), self._combine(plan, updates)
        places = {owner: place for place, owner in enumerate(chosen.clients.tolist())}
        came = np.array([order.owner in updates for order in plan.orders], dtype=bool)
        shares = np.zeros(len(places))
        if combined is not None:
            longest = max(self.notes.get("longest", 0.0), float(np.linalg.norm(self.parameters)))
            self.parameters = combined.average
            shares[[places[order.owner] for order in plan.orders if order.owner in updates]] = combined.shares
            self.notes = {**self.notes, "total_size": combined.total_size, "longest": longest}
        self.choices.append(None if combined is None else combined.choice)
        self.included.append(shares > 0)
        over = last and plan.index + 1 < self.rounds
        self.notes = {**self.notes, "looks": plan.index + 1, "done": over, "stopped": reached}
        self.notes |= self.remember(plan, updates, awards)
        rho, weights, reasons = np.zeros(n), np.zeros(n), [""] * n
        shown: list[AwardState | None] = [None] * n
        rho[chosen.clients], weights[chosen.clients] = self.rho, shares
        for order, here in zip(plan.orders, came.tolist(), strict=True):
            award = awards[order.owner]
            runs_on = here and award.state is AwardState.PENDING  # shown as delivered
            shown[order.owner], reasons[order.owner] = AwardState.POSTED if runs_on else award.state, award.reason
        found = self.model.evaluate(self.parameters, self._test)
        noise = self._energy(plan, updates, shares)
        return RoundRecord(
            plan.index, np.arange(n), spec.partition.sizes.astype(np.float64), rho,
            chosen.paid_micros * int(last), tuple(shown), tuple(reasons), weights,
            chosen.budget_micros * int(last), noise, {name: found[name] for name in ("accuracy", "loss")}, "rho",
            self.unit,
        )  # fmt: skip

    def _energy(self, plan: RoundPlan, updates: Mapping[int, FloatArray], shares: FloatArray) -> float:
        """The expected squared norm of the noise in what the round made."""
        if self.policy is None:
            return self.dimension * float(np.sum((shares * self.sigma) ** 2))
        if not plan.orders or not summing.opens(plan, updates):
            return float("inf")
        return summing.opened(plan, updates, dimension=self.dimension).energy

    def privacy(self) -> JointPrivacy:
        """What the rounds agreed on give away."""
        spec, rule, noise, clients = self.spec, self.spec.aggregation, self.spec.perturbation, self.chosen.clients.size
        choice: Event | None = None
        if isinstance(rule, ExponentialChoice) and clients > 1:
            choice = rule.guarantee("record", clients)
        elif not isinstance(rule, ExponentialChoice):
            choice = PureDp(0.0)  # other rules never look at the validation records
        return account_of(
            rounds=spec.rounds,
            delta=1e-5 if noise is None else noise.delta,
            uploads=max(self.releases, key=zcdp_rho, default=None),
            choices=choice,
            stopping=None if spec.stop_accuracy is None else PureDp(spec.stop_epsilon),
            asked=spec.epsilon + (rule.epsilon if isinstance(rule, ExponentialChoice) else 0.0),
            unit="client" if noise is None else noise.unit,
        )

    def _combine(self, plan: RoundPlan, updates: Mapping[int, FloatArray]) -> Combined | None:
        """The uploads of one round combined, once; None if there are too few for the rule."""
        here = [order for order in plan.orders if order.owner in updates]
        of = plan.index, *(order.owner for order in here)  # the ledger may void an award whose upload came
        if self.policy is not None:
            return self._averaged(plan, updates) if here and summing.opens(plan, updates) else None
        if self._combined[0] != of:
            try:
                combined = self.spec.aggregation.combine(
                    np.array([updates[order.owner] for order in here]).reshape(-1, self.dimension),
                    np.array([order.records for order in here], dtype=np.float64),
                    score=self._accuracy,
                    rng=stream(self.spec.seed, plan.index, purpose=Purpose.AGGREGATION),
                )
            except InvalidInput:
                combined = None
            self._combined = (of, combined)
        return self._combined[1]

    def _averaged(self, plan: RoundPlan, updates: Mapping[int, FloatArray]) -> Combined:
        """The public model and the mean of what those who stayed moved."""
        found = summing.opened(plan, updates, dimension=self.dimension)
        here = [order for order in plan.orders if order.owner in updates]
        shares = np.array([found.weights[order.owner] for order in here])
        return Combined(self.parameters + found.mean, float(sum(order.records for order in here)), shares)

    def _accuracy(self, candidates: FloatArray) -> FloatArray:
        return accuracies(self.model, candidates, self._validation)

    def last(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> bool:
        """Whether this is the last round, after a look at the model that it makes and at who is left."""
        if plan.index == self.rounds - 1 or self._reached(plan, updates):
            return True
        return bool(plan.orders) and not self.goes_on(plan, updates, awards)

    def _reached(self, plan: RoundPlan, updates: Mapping[int, FloatArray]) -> bool:
        """Whether the model that the round makes is good enough, by the stopping rule; looked at once a round."""
        if self.spec.stop_accuracy is None or not plan.orders:
            return False
        if self._stop[0] == plan.index:
            return self._stop[1]
        combined, stops = self._combine(plan, updates), AboveThreshold(self.spec)
        model = self.parameters if combined is None else combined.average
        for _ in range(plan.index):
            stops.look(lambda: -np.inf)  # the draws of earlier rounds
        stops.look(lambda: float(self._accuracy(model[None])[0]))
        self._stop = plan.index, stops.reached
        return stops.reached

    def given(self, order: Order, rounds: int) -> Release | None:
        """What so many uploads gave away: k Gaussian releases are one of a √k-th of the noise."""
        noise = self.spec.perturbation
        if noise is None or rounds == 0:
            return None
        if isinstance(order.loss, ZCdp):
            return Release(order.award, DistributedGaussian.name, ZCdp(order.loss.rho * rounds))
        once = noise.guarantee(self.side.amount(order.loss, self._call)).noise_multiplier
        return Release(order.award, noise.name, _of_unit(noise, GaussianRelease(once / np.sqrt(rounds))))


class AboveThreshold:
    """Says once that a noisy accuracy passed a noisy threshold; ε-DP in total for one validation record."""

    def __init__(self, spec: JointSpec) -> None:
        self.reached, self._limit = False, spec.stop_accuracy
        self._draw = stream(spec.seed, purpose=Purpose.NOISE)
        self._unit = 1.0 / (spec.validation * spec.stop_epsilon)
        if self._limit is not None:
            self._limit += float(self._draw.laplace(scale=2 * self._unit))

    def look(self, accuracy: Callable[[], float]) -> None:
        """One more round; the accuracy is only computed when there is a threshold."""
        if self._limit is not None:
            self.reached = accuracy() + float(self._draw.laplace(scale=4 * self._unit)) >= self._limit
