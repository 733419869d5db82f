"""The Stackelberg reward game with its training (STACK: Hu and Gong 2020).

The server announces R (its best one by default), users answer with the equilibrium's zCDP budgets ρ, and those with
ρ > 0 train for T rounds: each releases the mean of her m per-record gradients, every one clipped to L, plus Gaussian
noise σ_i = (L/m)√(2T/ρ_i); the server averages and steps. Each release is charged ρ_i/T to its user's account before it
leaves. R is deposited once, shares ρ_i R/Σρ wait in escrow while training runs and are posted once after the last
round. R is announced in whole micro-units and shares round down; the remainder stays with the server.

**In a sum** (`secure`) the users share one noise: of what a record can do to the weighted mean, 2Lλ_i/m, each loses
ρ_i/T at most. `weighting="rho"` are then the weights of least noise, λ_i ∝ √ρ_i, behind which everybody loses exactly
what she sold. The game is the same: its account of noise is that of separate releases, which a sum is never worse than.
In a void round nobody's share ends but those of who left; with too few left for a sum the game is over, and who stayed
is paid.

What would break it: ρ protects one *record* against replacement, not a user's whole data set. The paper asks for an
L-smooth loss, which bounds no gradient (docs/errata.md E5). Users at the margin of the equilibrium offer tiny ρ, and
with the paper's equal weights their noise is everybody's; `weighting="rho"` weighs by inverse variance. The noise is
NumPy's: right in distribution and not safe to release.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from flmarket.aggregation import Trust
from flmarket.bids import FloatArray, IntArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.games import Equilibrium, NoiseAccount, Stackelberg, family, noise_scale
from flmarket.learning import (
    DataSet,
    Model,
    Partition,
    Purpose,
    SoftmaxRegression,
    clipped_gradients,
    dimension,
    stream,
)
from flmarket.ledger import MICROS, Award, AwardState, Release, payments_to_micros, to_micros
from flmarket.market import summing
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
from flmarket.market.owner import COUNTS_UPDATES, UNASKED, UNLIMITED, Owner, OwnerSide, PrivacyCap, Work, holds_noise
from flmarket.privacy import (
    Cap,
    DistributedGaussian,
    Event,
    GaussianZCdp,
    NoiseSource,
    RecordLevel,
    Unit,
    ZCdp,
    clip_l2,
    epsilon_of_rho,
    gaussian_epsilon,
    unit_of,
)
from flmarket.privacy.events import ROUNDING_ALLOWANCE, checked_number
from flmarket.privacy.secure_sum import SecureAggregation

Weighting = Literal["equal", "rho"]
# The value of privacy of somebody who does not take part: so high that no reward moves her.
_STAYS_OUT = 1e12
_LEAST_VALUE = 1e-9


@dataclass(frozen=True, eq=False)
class StackelbergResult:
    """A finished training; arrays per user, zeros for those who stayed out, no rounds if everybody did.

    `spent_rho` is what her account says. `epsilon` is the ε at `spec.delta` of all of her Gaussian releases together.
    `rounds` list those who take part, with losses in ρ; everybody is paid in the last one, and the error bound is the
    noise alone: its expected squared norm in the server's average.
    """

    spec: RewardSpec
    outcome: Equilibrium
    reward_micros: int
    paid_micros: IntArray
    spent_rho: FloatArray
    releases: IntArray
    sigma: FloatArray
    epsilon: FloatArray
    weights: FloatArray
    parameters: FloatArray
    rounds: tuple[RoundRecord, ...] = ()

    @property
    def rho(self) -> FloatArray:
        """Each user's privacy budget over all rounds (zCDP)."""
        return self.outcome.rho

    @property
    def utilities(self) -> FloatArray:
        """Each user's money received minus her privacy cost."""
        game = self.spec.game()
        return self.paid_micros / MICROS - game.cost_family.cost(game.privacy_values, self.rho)

    @property
    def server_utility(self) -> float:
        """The game's (λ/2)(1 + g) − R at the equilibrium: foreseen, not measured."""
        return self.outcome.server_utility

    def over_rounds(self, metric: str = "accuracy") -> list[float]:
        """The model's "accuracy", "balanced_accuracy" or "loss" on the test records after each round."""
        return [record.metrics[metric] for record in self.rounds]

    def market_result(self) -> MarketResult:
        """The run in the market's terms, for `report`; if nobody took part, rounds in which nothing happens."""
        spec = self.spec
        statements = tuple(
            OwnerStatement(i, spec.records, sent, sent, 0, int(self.paid_micros[i]), self.spent_rho.item(i), cap)
            for i, (sent, cap) in enumerate(zip(self.releases.tolist(), self.rho.tolist(), strict=True))
        )
        task = Task(
            name=spec.name, rounds=spec.rounds, bidders_per_round=self.rho.size, budget_micros=self.reward_micros,
            learning_rate=spec.learning_rate,
        )  # fmt: skip
        rounds = self.rounds or tuple(_empty(self, index) for index in range(spec.rounds))
        return MarketResult(
            task, Stackelberg.name, spec.weighting,
            GaussianZCdp.name if spec.secure is None else DistributedGaussian.name, spec.data.name, spec.seed, rounds,
            statements, self.parameters, spec.data.baseline_accuracy, spec.trust,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardSpec:
    """Who owns what, who values privacy how much, and the training that the reward buys.

    The partition deals equal shares: sizes may differ by one, and everybody trains on as many records as the smallest.
    `weight` is the server's λ, `clip` its L; `reward=None` announces R*, `weighting` is how the server averages.
    `any_model` instead of softmax regression must give per-record gradients (`flmarket.learning.clipped_gradients`).
    With `secure` only sums are seen.
    """

    data: DataSet
    partition: Partition
    privacy_values: ArrayLike
    weight: float
    learning_rate: float = 0.1
    rounds: int = 500
    clip: float = 1.0
    cost: str = "linear"
    reward: float | None = None
    noise_account: NoiseAccount = "printed"
    weighting: Weighting = "equal"
    delta: float = 1e-5
    seed: int = 0
    name: str = "task"
    cap: PrivacyCap = field(default_factory=PrivacyCap)
    any_model: Model | None = None
    secure: SecureAggregation | None = None

    def __post_init__(self) -> None:
        values = checked_array("privacy_values", self.privacy_values)
        object.__setattr__(self, "privacy_values", values)
        if values.shape != (self.partition.owners,):
            raise InvalidInput("privacy_values", values.shape, f"one for each of the {self.partition.owners} owners")
        if self.partition.order.size != len(self.data.y_train):
            raise InvalidInput("partition", self.partition.order.size, f"{len(self.data.y_train)} records")
        if np.ptp(self.partition.sizes) > 1:
            raise InvalidInput("partition", self.partition.sizes, "equal shares: sizes that differ by at most one")
        if type(self.rounds) is not int or self.weighting not in ("equal", "rho"):
            raise InvalidInput("rounds, weighting", (self.rounds, self.weighting), "a whole number; 'equal' or 'rho'")
        checked_number("delta", self.delta, 1e-30, 0.5)
        to_micros("reward", 0.0 if self.reward is None else self.reward)
        _ = self.cap.records  # refused where no account can hold such noise
        self.game()  # its own checks, before anything runs

    @property
    def trust(self) -> Trust:
        """The trust model."""
        return "local" if self.secure is None else "secure-aggregation"

    @property
    def records(self) -> int:
        """m: how many records each user trains on."""
        return int(self.partition.sizes.min())

    @property
    def model(self) -> Model:
        """The model that is trained; its dimension is the game's d."""
        return self.any_model or SoftmaxRegression(self.data.features, self.data.n_classes)

    def kind(self, buyer: str = "buyer") -> RewardKind:
        """The market as the round plays it."""
        return RewardKind(self, buyer)

    def owner(self, number: int, record: Path = Path(), *, seeded: bool = True) -> Owner:
        """User `number` with the records that the partition deals her."""
        rows = self.partition.records(number)[: self.records]
        return Owner(
            number=number, x=self.data.x_train[rows], y=self.data.y_train[rows], privacy_budget=UNLIMITED,
            valuation=UNASKED, cap=self.cap.records, record=record, model=self.model,
            value=float(np.asarray(self.privacy_values)[number]), cost=self.cost, classes=self.data.n_classes,
            trust=(self.trust,), simulation_seed=self.seed if seeded else None,
        )  # fmt: skip

    def game(self) -> Stackelberg:
        """The game whose equilibrium is played."""
        return Stackelberg(
            self.privacy_values, records=self.records, dimension=dimension(self.model), rounds=self.rounds,
            learning_rate=self.learning_rate, weight=self.weight, clip=self.clip, cost=self.cost,
            noise_account=self.noise_account,
        )  # fmt: skip

    def weights(self, rho: FloatArray) -> FloatArray:
        """How the server weighs users of these ρ: equally, or with the least noise that they allow together."""
        least = rho if self.secure is None else np.sqrt(rho)
        return least / least.sum() if self.weighting == "rho" else np.full(rho.size, 1.0 / rho.size)

    def announced(self) -> StackelbergResult:
        """R, everybody's answer and what follows from it, before any training."""
        game = self.game()
        micros = to_micros("reward", game.optimal_reward() if self.reward is None else self.reward)
        outcome = game.outcome(micros / MICROS)
        users, rho = outcome.participants, outcome.rho[outcome.participants]
        sigma, epsilon, weights, nothing = np.zeros((4, game.n))
        if rho.size:
            sigma[users] = game.noise_scale(rho)
            epsilon[users] = gaussian_epsilon(sigma=1.0 / np.sqrt(2.0 * rho), delta=self.delta)
            if self.secure is not None:  # proven of sums is ρ, which means a little more ε than a Gaussian's
                epsilon[users] = epsilon_of_rho(rho, delta=self.delta)
            weights[users] = self.weights(rho)
        paid, releases, start = (
            payments_to_micros(outcome.payments, micros),
            users * 0,
            self.model.initial(stream(self.seed, purpose=Purpose.BATCHES)),
        )
        return StackelbergResult(self, outcome, micros, paid, nothing, releases, sigma, epsilon, weights, start)

    def result(self, kind: RewardKind, records: Sequence[RoundRecord], owners: Mapping[int, Any]) -> StackelbergResult:
        """A finished run in this market's own terms; `owners` has every user's account."""
        game = kind.game
        if not records or not (game.rho > 0).any():
            return game
        for i in np.flatnonzero(game.rho > 0).tolist():
            account = owners[i].account.books
            game.spent_rho[i], game.releases[i] = account.spent, account.releases
        paid = game.paid_micros * 0
        paid[records[-1].bidders] = records[-1].price_micros * records[-1].delivered
        return replace(game, paid_micros=paid, parameters=kind.parameters, rounds=tuple(records))


class RewardSide(OwnerSide):
    """She reports her value of privacy once, and every round releases the mean of her clipped per-record gradients.

    The noise is for one record's share of that mean, so the clip of every record is the guard's own work.
    """

    asks_once = lasting = True

    def stays_out(
        self, *, value: float | None, allow_raw: bool, cap: Cap, trust: Sequence[str], call: Announcement | None = None
    ) -> str:
        """Without a value to report, or an account that holds Gaussian noise for records."""
        if value is None:
            return "no value is given"
        return holds_noise(cap) or ("" if unit_of(cap) == "record" else COUNTS_UPDATES)

    def unit(self, call: Announcement) -> Unit:
        """Any one record."""
        return "record"

    def bid(self, owner: Owner, call: Announcement) -> Bid:
        """Her value of privacy; her budget is ρ over all rounds."""
        least = owner.least_epsilon**2 / 2  # ρ of a pure ε
        return self.reported(owner, call, budget=owner.privacy_budget, least=least)

    def amount(self, loss: Event, call: Announcement | None = None) -> float:
        """ρ over all rounds, of a record."""
        if not isinstance(loss, RecordLevel) or not isinstance(loss.loss, ZCdp):
            raise InvalidInput("loss", loss, "ρ of a record")
        return loss.loss.rho

    def guarantee(self, amount: float, records: int, call: Announcement) -> Event:
        """One round's share of ρ, for one record."""
        name = DistributedGaussian.name if summing.is_secure(call) else GaussianZCdp.name
        if call.perturbation != name:
            raise InvalidInput("perturbation", call.perturbation, name)
        return _of_record(amount / call.rounds)

    def given(self, order: Order, call: Announcement) -> Event:
        """In a sum, if that is what a record of hers loses there at least."""
        once = super().given(order, call)
        return summing.given(order, call, once, change=_change(order, call)) if summing.is_secure(call) else once

    def whole(self, call: Announcement, cap: Cap, records: int) -> tuple[Callable[[float], Event], int]:
        """ρ is for all rounds."""
        return _of_record, 1

    def is_sound(self, call: Announcement) -> bool:
        """The noise source adds it to a lattice."""
        return True

    def asked(self, owner: Owner, bid: Bid, order: Order, call: Announcement) -> float:
        """What ρ costs her, by her value and her family of costs."""
        return _cost(owner.cost, bid.rate, self.amount(order.loss, call))

    def train(self, works: Sequence[Work]) -> FloatArray:
        """Means of clipped per-record gradients."""
        first = works[0]
        return clipped_gradients(first.model, first.parameters, [work.records for work in works], first.call.clip)

    def privatise(self, work: Work, raw: RawUpdate, noise: NoiseSource) -> ReleasedUpdate:
        """σ for ρ over all rounds; one of m records moves the mean by at most 2·clip/m.

        A mean is no longer than the clip. What makes it longer is a penalty that the buyer announced, and beside a
        large one a record's share would be rounded up to whatever the last bit is worth: so the sum is clipped, too.
        """
        if summing.is_secure(work.call):
            return summing.share(work.order, raw, clip=work.call.clip, noise=noise, records=True)
        rho, call, clipped = self.amount(work.order.loss, work.call), work.call, clip_l2(raw, work.call.clip)
        scale = _scale(rho, call.rounds, work.order.records, call.clip) * (1 + ROUNDING_ALLOWANCE)
        return ReleasedUpdate(noise.add_gaussian(clipped, scale=scale, sensitivity=_change(work.order, call)))


def _change(order: Order, call: Announcement) -> float:
    """How far replacing one record moves a mean of clipped gradients."""
    return 2 * call.clip / order.records


# What follows from terms that are the same in every round.


@lru_cache(maxsize=4096)
def _cost(name: str, value: float, rho: float) -> float:
    return float(family(name).cost(np.array([value]), np.array([rho]))[0])


@lru_cache(maxsize=4096)
def _scale(rho: float, rounds: int, records: int, clip: float) -> float:
    return float(noise_scale(rho, rounds=rounds, records=records, clip=clip))


@lru_cache(maxsize=4096)
def _of_record(rho: float) -> RecordLevel:
    return RecordLevel(ZCdp(rho))


class RewardKind(summing.LastingKind):
    """A `RewardSpec` as the round plays it: values are reported once, shares held until the end.

    An owner who misses a round loses her share (it expires) and is not asked again; the others' weights are scaled up
    to sum to 1.
    """

    name = "reward"
    side = RewardSide()
    unit = "record"

    def __init__(self, spec: RewardSpec, buyer: str = "buyer") -> None:
        model = spec.model
        start = model.initial(stream(spec.seed, purpose=Purpose.BATCHES))
        super().__init__(spec.name, spec.rounds, model, start, buyer)
        self.validation = spec.data.validation
        self.spec, self._model_text, self.policy, self.records = spec, say(model), spec.secure, spec.records
        self._noise = GaussianZCdp.name if spec.secure is None else DistributedGaussian.name
        self._game: tuple[dict[str, Any], StackelbergResult] | None = None

    @property
    def game(self) -> StackelbergResult:
        """R, everybody's ρ and share, at the reported values."""
        if self._game is None or self._game[0] is not self.terms:
            spec, values = self.spec, self.terms.get("values", self.spec.privacy_values)
            if not np.array_equal(values, spec.privacy_values):
                spec = replace(spec, privacy_values=values)
            self._game = self.terms, spec.announced()
        return self._game[1]

    def announcement(self, index: int) -> Announcement:
        """The game's clip bounds each record's gradient."""
        data = self.spec.data
        return Announcement(
            task=self.task, buyer=self.buyer, market=self.name, round_index=0, rounds=self.rounds,
            features=data.features, classes=data.n_classes, model=self._model_text, parameters=self.dimension,
            learning_rate=self.spec.learning_rate, perturbation=self._noise, clip=self.spec.clip,
            settings=json.dumps(summing.said(self.policy), sort_keys=True), trust=self.spec.trust,
        )  # fmt: skip

    def accepts(self, bid: Bid) -> bool:
        """A value of privacy that the game can be solved for."""
        solvable = _LEAST_VALUE <= bid.rate < _STAYS_OUT and bid.data_size >= self.records
        return solvable and bid.unit == self.unit

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """The same orders every round; owners whose share is gone are passed over."""
        if not self.terms:
            owners = range(self.spec.partition.owners)
            self.terms = {"values": [bids[i].rate if i in bids else _STAYS_OUT for i in owners]}
        game, spec = self.game, self.spec
        users = [i for i in np.flatnonzero(game.rho > 0).tolist() if i not in self.out]
        orders = tuple(
            self.order(
                index, i, loss=_of_record(float(game.rho[i])), price_micros=int(game.paid_micros[i]),
                records=self.records, learning_rate=spec.learning_rate, share=share,
            )
            for i, share in self._shares(users).items()
        )  # fmt: skip
        return RoundPlan(index, f"{self.task}/reward", game.reward_micros, orders) if orders else RoundPlan(index)

    def _shares(self, users: Sequence[int]) -> dict[int, str]:
        """Everybody's share of a round's sum, if there is one; nobody, if they are too few for it."""
        if self.policy is None:
            return dict.fromkeys(users, "")
        if not summing.has_company(self.policy, len(users)):
            return {}
        rho, spec = self.game.rho[list(users)], self.spec
        parts = summing.shares(
            spec.weights(rho).tolist(), (rho / self.rounds).tolist(), clip=spec.clip, dimension=self.dimension,
            policy=self.policy, change=2 * spec.clip / self.records,
        )  # fmt: skip
        return {i: share for i, (_, share) in zip(users, parts, strict=True)}

    @property
    def done(self) -> bool:
        """Too few are left for a sum."""
        return bool(self.notes.get("done", False))

    def largest_norm(self, order: Order) -> float:
        """The clip, and noise at its very longest."""
        return float(self.spec.clip + NOISE_MARGIN * float(self.game.sigma[order.owner]) * np.sqrt(self.dimension))

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """One step of the server."""
        spec, game, last = self.spec, self.game, bool(plan.orders) and self.last(plan, updates, awards)
        users = np.array([order.owner for order in plan.orders], dtype=np.int64)
        came = np.array([order.owner in updates for order in plan.orders], dtype=bool)
        weights = np.where(came, game.weights[users], 0.0) if users.size else np.zeros(0)
        if came.any() and not came.all():
            weights = weights / weights.sum()
        step, noise = np.zeros(self.dimension), float("inf")
        if self.policy is not None:
            weights = np.zeros(users.size)
            if plan.orders and summing.opens(plan, updates):
                found = summing.opened(plan, updates, dimension=self.dimension)
                weights = np.array([found.weights.get(owner, 0.0) for owner in users.tolist()])
                step, noise = found.mean, found.energy
            done = last and plan.index + 1 < self.rounds
            self.notes = {**self.notes, **self.remember(plan, updates, awards), "done": done}
        elif came.any():
            for owner, weight in zip(users.tolist(), weights.tolist(), strict=True):
                if owner in updates:
                    step += weight * updates[owner]
            noise = self.dimension * float(np.sum((weights * game.sigma[users]) ** 2))
        self.parameters = self.parameters - spec.learning_rate * step
        ends = [awards[order.owner] for order in plan.orders]
        shown = tuple(  # an award that runs on is shown as delivered
            AwardState.POSTED if ok and a.state is AwardState.PENDING else a.state
            for ok, a in zip(came.tolist(), ends, strict=True)
        )
        return RoundRecord(
            plan.index, users, np.full(users.size, float(self.records)), game.rho[users] / self.rounds,
            game.paid_micros[users] * int(last), shown, tuple(a.reason for a in ends), weights,
            plan.deposit_micros * int(last), noise, self.model.evaluate(self.parameters, spec.data.test), "rho",
            self.unit,
        )  # fmt: skip

    def given(self, order: Order, rounds: int) -> Release | None:
        """What so many releases gave away; none, nothing."""
        if rounds == 0:
            return None
        rho = self.side.amount(order.loss, self.announcement(0))
        return Release(order.award, self._noise, _of_record(rho * rounds / self.rounds))


def _empty(terms: StackelbergResult, index: int) -> RoundRecord:
    """A round that nobody plays."""
    spec, nobody, owners = terms.spec, np.empty(0), np.empty(0, dtype=np.int64)
    metrics = spec.model.evaluate(terms.parameters, spec.data.test)
    budget = terms.reward_micros * int(index == spec.rounds - 1)
    return RoundRecord(
        index, owners, nobody, nobody, owners, (), (), nobody, budget, float("inf"), metrics, "rho", RewardKind.unit
    )
