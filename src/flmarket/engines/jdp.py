"""Robust joint-DP federated learning, simulated in one process (JDP: Zhang et al., TKDE 2023).

Clients bid a cost; an auction picks who trains and at what price (M1, M2, m2-bf or posted); prices wait in escrow. Each
round the chosen clients train, clip and add noise (M3), the server combines the uploads robustly (M4, or any other
rule), and every client mixes the public result with her own parameters (M5). Training stops after `rounds`, or once the
public model reaches an accuracy on the server's validation records. Then the awards are posted.

Adversaries are drawn among the chosen clients, as in the paper. Validation records are taken from the data set's test
records; the rest of those measures accuracy and decides nothing.

Stopping looks at validation records too, so it is done by AboveThreshold (Dwork and Roth 2014, Theorem 3.23), which
costs `stop_epsilon` once, however many rounds it takes.

What would break it: a client may send anything. Uploads that are not finite numbers void her award and she is out; a
finite one is taken, and limiting what it does is the rule's business. A client whose own training overflows (under very
strong noise it can) keeps the parameters she started the round with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.aggregation.robust import Choice, ExponentialChoice, RobustAggregation, mix
from flmarket.bids import Auction, BidProfile, Kind, Valuations, checked_array
from flmarket.engines.jdp_privacy import JointPrivacy, LocalPerturbation, account_of
from flmarket.errors import InvalidInput
from flmarket.learning import (
    DataSet,
    Model,
    OwnerStreams,
    Partition,
    Pool,
    Purpose,
    Records,
    accuracies,
    stream,
    train_many,
)
from flmarket.learning.adversaries import Adversary
from flmarket.ledger import MICROS, Award, AwardState, Ledger, Release, Resolution, payments_to_micros, to_micros
from flmarket.market import (
    MarketResult,
    OwnerStatement,
    RoundRecord,
    Task,
    award_id,
    new_task,
    owner_account,
    resolve_each,
)
from flmarket.privacy import Event, GaussianRelease, PrivacyAccount, PureDp, ZCdp
from flmarket.privacy.composition import zcdp_rho
from flmarket.privacy.events import checked_number

__all__ = ["JdpResult", "JdpTraining", "Selection"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Progress = Callable[[RoundRecord], None]

_SERVER = "buyer"


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
class JdpTraining:
    """Who holds what at which cost, and everything that is done with it.

    `epsilon` is ε_L, for one upload; `perturbation=None` sends parameters as they are, and nobody is protected.
    `validation` counts the server's records. M2 may owe more than `budget` (docs/errata.md E8); that is refused unless
    `allow_overspending`.
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

    def __post_init__(self) -> None:
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

    def run(self, progress: Progress | None = None, ledger: Ledger | None = None) -> JdpResult:
        """Select, hold the prices, train, pay; if nobody is chosen nothing is trained and nobody is paid.

        `ledger` must not have this task yet.
        """
        chosen, books = self.select(), new_task(ledger, self.name)
        books.deposit(f"{self.name}/budget", _SERVER, max(chosen.budget_micros, int(chosen.paid_micros.sum())))
        books.hold_many(
            Award(
                award_id(self.name, 0, i), 0, _SERVER, owner_account(i), float(chosen.epsilon[i]),
                int(chosen.paid_micros[i]),
            )
            for i in chosen.clients.tolist()
        )  # fmt: skip
        return JdpRun(self, chosen, books).play(progress)


@dataclass(frozen=True, eq=False)
class JdpResult:
    """A finished training.

    `rounds` are in the market's terms: ε fields hold ρ (zCDP of one upload), everybody is paid in the last. `included`
    (rounds, chosen clients) says whose upload counted. `personal` are the clients' own mixed models, which never leave.
    """

    spec: JdpTraining
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
            task, spec.auction.name, spec.aggregation.name, "gaussian-zcdp", spec.data.name, spec.seed, self.rounds,
            statements, self.parameters,
            float(np.mean(spec.data.y_test == np.bincount(spec.data.y_train).argmax())),
        )  # fmt: skip


class JdpRun:
    """The state of one training: the public model, everybody's own, the accounts, the books."""

    def __init__(self, spec: JdpTraining, chosen: Selection, books: Ledger) -> None:
        self.spec, self.chosen, self.books = spec, chosen, books
        self.clients = chosen.clients
        self.sizes = chosen.records[self.clients].astype(np.float64)
        split = stream(spec.seed, purpose=Purpose.EVALUATION).permutation(len(spec.data.y_test))
        self.validation, self.test = split[: spec.validation], split[spec.validation :]
        self.public = spec.model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        self.own = np.broadcast_to(self.public, (self.clients.size, self.public.size))
        self.alive = np.ones(self.clients.size, dtype=bool)
        self.voided: list[int] = []
        self.sigma = np.zeros(self.clients.size)
        self.releases: list[GaussianRelease] = []
        if spec.perturbation is not None and self.clients.size:
            self.sigma = spec.perturbation.sigma(chosen.epsilon[self.clients], self.sizes)
            self.releases = [GaussianRelease(float(s) / (2 * spec.perturbation.clip)) for s in self.sigma]
        # accounts count in units of 2⁻¹⁰⁰, each charge rounded up: room for that, and for no more
        self.accounts = [PrivacyAccount(ZCdp(spec.rounds * (zcdp_rho(r) + 2.0**-100))) for r in self.releases]
        owned = self.records()
        self.data: Sequence[Records] = Pool.of(owned) if owned else owned

    def records(self) -> list[Records]:
        """What each chosen client trains on: her own records, with the labels an adversary prefers."""
        spec, owned = self.spec, []
        for i, sold in zip(self.clients.tolist(), self.sizes.astype(int).tolist(), strict=True):
            rows = spec.partition.records(i)[:sold]
            labels = spec.data.y_train[rows]
            if i in self.chosen.adversaries and spec.adversary is not None:
                labels = spec.adversary.labels(labels, spec.data.n_classes)
            owned.append(Records(spec.data.x_train[rows], labels))
        return owned

    def play(self, progress: Progress | None) -> JdpResult:
        spec, stops = self.spec, AboveThreshold(self.spec)
        rounds: list[RoundRecord] = []
        choices: list[Choice | None] = []
        included: list[NDArray[np.bool_]] = []
        while self.clients.size and len(rounds) < spec.rounds and not stops.reached:
            shares, choice = self.round(len(rounds))
            rounds.append(self.record(len(rounds), shares))
            choices.append(choice)
            included.append(shares > 0)
            stops.look(lambda: float(self.accuracy(self.public[None], self.validation)[0]))
            if progress is not None:
                progress(rounds[-1])
        if rounds:
            rounds[-1] = self.paying(rounds[-1])
        self.books.verify()
        spent = {i: account.spent for i, account in zip(self.clients.tolist(), self.accounts, strict=False)}
        seen = np.array(included, dtype=bool).reshape(len(rounds), self.clients.size)
        return JdpResult(
            spec, self.chosen, tuple(rounds), tuple(choices), seen, self.public, np.array(self.own),
            self.privacy(spec.rounds), tuple(self.voided), stops.reached, spent,
        )  # fmt: skip

    def round(self, index: int) -> tuple[FloatArray, Choice | None]:
        """One round; returns how much each chosen client counted, and how the group was chosen."""
        spec, owners = self.spec, self.clients.tolist()
        rngs = OwnerStreams(spec.seed, index, owners, Purpose.BATCHES)
        trained = train_many(spec.model, self.own, self.data, rngs)
        overflowed = ~np.isfinite(trained).all(axis=1)
        trained[overflowed] = self.own[overflowed]
        uploads = self.uploads(index, trained)
        self.drop(~np.isfinite(uploads).all(axis=1) & self.alive, index + 1)
        present = np.flatnonzero(self.alive)
        combined = spec.aggregation.combine(
            uploads[present],
            self.sizes[present],
            score=lambda candidates: self.accuracy(candidates, self.validation),
            rng=stream(spec.seed, index, purpose=Purpose.AGGREGATION),
        )
        self.public = combined.average
        self.own = mix(combined, trained, self.sizes) if spec.mixing else np.broadcast_to(self.public, trained.shape)
        shares = np.zeros(len(owners))
        shares[present] = combined.shares
        return shares, combined.choice

    def uploads(self, index: int, trained: FloatArray) -> FloatArray:
        """Charge the accounts, clip, add noise; adversaries then send what they like."""
        spec, sent = self.spec, trained.copy()
        if spec.perturbation is not None:
            for account, release in zip(self.accounts, self.releases, strict=True):
                account.compose(release)
            rngs = list(OwnerStreams(spec.seed, index, self.clients.tolist(), Purpose.NOISE))
            sent = spec.perturbation.upload(trained, self.public, self.sigma, rngs)
        for place in np.flatnonzero(np.isin(self.clients, self.chosen.adversaries)).tolist():
            if spec.adversary is not None:
                draw = stream(spec.seed, index, int(self.clients[place]), purpose=Purpose.ADVERSARY)
                sent[place] = spec.adversary.upload(sent[place], self.public, draw)
        return sent

    def drop(self, bad: NDArray[np.bool_], uploads: int) -> None:
        for place in np.flatnonzero(bad).tolist():
            end = self.ending(place, AwardState.VOIDED, "an upload that is not finite numbers", uploads)
            resolve_each(self.books, [end])
            self.voided.append(int(self.clients[place]))
            self.alive[place] = False

    def ending(self, place: int, state: AwardState, reason: str, uploads: int) -> Resolution:
        """How a client's award ends, with what so many uploads gave away: one of a √k-th of the noise."""
        award, noise, release = award_id(self.spec.name, 0, int(self.clients[place])), self.spec.perturbation, None
        if noise is not None:
            guarantee = GaussianRelease(self.releases[place].noise_multiplier / np.sqrt(uploads))
            release = Release(award, noise.name, guarantee)
        return Resolution(award, state, reason, release)

    def accuracy(self, candidates: FloatArray, rows: IntArray) -> FloatArray:
        data = self.spec.data
        return accuracies(self.spec.model, candidates, Records(data.x_test[rows], data.y_test[rows]))

    def record(self, index: int, shares: FloatArray) -> RoundRecord:
        """The round in the market's terms; prices come in the last one."""
        spec, n = self.spec, self.spec.partition.owners
        rho, weights = np.zeros(n), np.zeros(n)
        rho[self.clients] = [zcdp_rho(release) for release in self.releases] or np.inf
        weights[self.clients] = shares
        state: list[AwardState | None] = [None] * n
        reason = [""] * n
        for i in self.clients.tolist():
            out = i in self.voided
            state[i], reason[i] = (AwardState.VOIDED, "not finite") if out else (AwardState.POSTED, "")
        noise = self.public.size * float(np.sum((shares * self.sigma) ** 2))
        found = spec.model.evaluate(self.public, Records(spec.data.x_test[self.test], spec.data.y_test[self.test]))
        metrics = {name: found[name] for name in ("accuracy", "loss")}
        nothing = np.zeros(n, dtype=np.int64)
        sizes = spec.partition.sizes.astype(np.float64)
        return RoundRecord(
            index, np.arange(n), sizes, rho, nothing, tuple(state), tuple(reason), weights, 0, noise, metrics
        )

    def paying(self, last: RoundRecord) -> RoundRecord:
        """The last round, with everybody paid who is still there; past a registered cap, one award alone is void."""
        present = np.flatnonzero(self.alive).tolist()
        ends = resolve_each(self.books, [self.ending(one, AwardState.POSTED, "", last.index + 1) for one in present])
        state, reason = list(last.state), list(last.reason)
        for place, end in zip(present, ends, strict=True):
            i = int(self.clients[place])
            state[i], reason[i] = end.state, end.reason
            if end.state is not AwardState.POSTED:
                self.voided.append(i)
        return replace(self.priced(last), state=tuple(state), reason=tuple(reason))

    def priced(self, last: RoundRecord) -> RoundRecord:
        """The last round with its prices."""
        return replace(last, price_micros=self.chosen.paid_micros, budget_micros=self.chosen.budget_micros)

    def privacy(self, rounds: int) -> JointPrivacy:
        spec, rule, noise = self.spec, self.spec.aggregation, self.spec.perturbation
        stopping = None if spec.stop_accuracy is None else PureDp(spec.stop_epsilon)
        choice: Event | None = None
        if isinstance(rule, ExponentialChoice) and self.clients.size > 1:
            choice = rule.guarantee("record", self.clients.size)
        elif not isinstance(rule, ExponentialChoice):
            choice = PureDp(0.0)  # other rules never look at the validation records
        return account_of(
            rounds=rounds,
            delta=1e-5 if noise is None else noise.delta,
            uploads=min(self.releases, key=lambda release: release.noise_multiplier, default=None),
            choices=choice,
            stopping=stopping,
            asked=spec.epsilon + (rule.epsilon if isinstance(rule, ExponentialChoice) else 0.0),
            unit="client" if noise is None else noise.unit,
        )


class AboveThreshold:
    """Says once that a noisy accuracy passed a noisy threshold; ε-DP in total for one validation record."""

    def __init__(self, spec: JdpTraining) -> None:
        self.reached, self._limit = False, spec.stop_accuracy
        self._draw = stream(spec.seed, purpose=Purpose.NOISE)
        self._unit = 1.0 / (spec.validation * spec.stop_epsilon)
        if self._limit is not None:
            self._limit += float(self._draw.laplace(scale=2 * self._unit))

    def look(self, accuracy: Callable[[], float]) -> None:
        """One more round; the accuracy is only computed when there is a threshold."""
        if self._limit is not None:
            self.reached = accuracy() + float(self._draw.laplace(scale=4 * self._unit)) >= self._limit
