"""The Stackelberg reward game with its training, simulated in one process (STACK: Hu and Gong 2020).

The server announces R (its best one by default), users answer with the equilibrium's zCDP budgets ρ, and those with
ρ > 0 train for T rounds: each releases the mean of her m per-record gradients, every one clipped to L, plus Gaussian
noise σ_i = (L/m)√(2T/ρ_i); the server averages and steps. Each release is charged ρ_i/T to its user's account before it
leaves. R is deposited once, shares ρ_i R/Σρ wait in escrow while training runs and are posted once after the last
round. R is announced in whole micro-units and shares round down; the remainder stays with the server.

Assumes that the loss is softmax regression, whose per-record gradient is residual ⊗ (x, 1). Its norm is
‖residual‖·√(‖x‖² + 1), so clipping is one weight per record and no per-record gradient is ever formed.

What would break it: ρ protects one *record* against replacement, not a user's whole data set. The paper asks for an
L-smooth loss, which bounds no gradient (docs/errata.md E5). Users at the margin of the equilibrium offer tiny ρ, and
with the paper's equal weights their noise is everybody's; `weighting="rho"` weighs by inverse variance. The noise is
NumPy's: right in distribution and not safe to release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, softmax

from flmarket.bids import checked_array
from flmarket.errors import InvalidInput
from flmarket.games import Equilibrium, Stackelberg
from flmarket.games.stackelberg import NoiseAccount
from flmarket.learning import DataSet, Partition, Purpose, SoftmaxRegression, stream
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
from flmarket.privacy import GaussianZCdp, PrivacyAccount, ZCdp, as_noise_source, gaussian_epsilon
from flmarket.privacy.events import ROUNDING_ALLOWANCE, checked_number

__all__ = ["StackelbergResult", "StackelbergTraining", "clipped_gradients"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Weighting = Literal["equal", "rho"]
Progress = Callable[[RoundRecord], None]

_SERVER = "buyer"


def clipped_gradients(
    model: SoftmaxRegression, params: FloatArray, x: FloatArray, y: IntArray, clip: float
) -> FloatArray:
    """Means over records of per-record gradients clipped to L2 norm `clip`; x (k, m, features), y (k, m).

    A record whose gradient cannot be had (a class that the model lacks, an overflow) counts as zero, by itself: were
    the whole mean lost, one record would move it by far more than 2·clip/m.
    """
    blocks, records = y.shape
    with np.errstate(over="ignore", invalid="ignore"):
        scores = model.scores(params, x)
        if model.outputs == 1:
            residual, fits = expit(scores) - y[..., None], y < 2
        else:
            residual, fits = softmax(scores, axis=-1), y < model.outputs
            residual[np.arange(blocks)[:, None], np.arange(records), np.where(fits, y, 0)] -= 1.0
        norm = np.linalg.norm(residual, axis=-1) * np.sqrt(np.einsum("kmf,kmf->km", x, x) + 1.0)
    residual *= (clip / np.maximum(norm, clip) / records)[..., None]
    residual[~(fits & np.isfinite(norm))] = 0.0
    weights = (np.swapaxes(residual, -1, -2) @ x).reshape(blocks, -1)  # class by class, then the biases
    return np.concatenate([weights, residual.sum(axis=-2)], axis=-1)


@dataclass(frozen=True, eq=False)
class StackelbergResult:
    """A finished training; arrays per user, zeros for those who stayed out, no rounds if everybody did.

    `spent_rho` is what her account says. `epsilon` is the ε at `spec.delta` of all of her Gaussian releases together.
    `rounds` list those who take part. As everywhere under "gaussian-zcdp" their ε fields hold ρ; everybody is paid in
    the last one, and the error bound is the noise alone: its expected squared norm in the server's average.
    """

    spec: StackelbergTraining
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
        rounds = self.rounds or tuple(_record(self, index, self.parameters) for index in range(spec.rounds))
        return MarketResult(
            task, Stackelberg.name, spec.weighting, "gaussian-zcdp", spec.data.name, spec.seed, rounds, statements,
            self.parameters, float(np.mean(spec.data.y_test == np.bincount(spec.data.y_train).argmax())),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class StackelbergTraining:
    """Who owns what, who values privacy how much, and the training that the reward buys.

    The partition deals equal shares: sizes may differ by one, and everybody trains on as many records as the smallest.
    `weight` is the server's λ, `clip` its L; `reward=None` announces R*, `weighting` is how the server averages.
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
        self.game()  # its own checks, before anything runs

    @property
    def records(self) -> int:
        """m: how many records each user trains on."""
        return int(self.partition.sizes.min())

    @property
    def model(self) -> SoftmaxRegression:
        """The model that is trained; its dimension is the game's d."""
        return SoftmaxRegression(self.data.features, self.data.n_classes)

    def game(self) -> Stackelberg:
        """The game whose equilibrium is played."""
        return Stackelberg(
            self.privacy_values, records=self.records, dimension=self.model.dimension, rounds=self.rounds,
            learning_rate=self.learning_rate, weight=self.weight, clip=self.clip, cost=self.cost,
            noise_account=self.noise_account,
        )  # fmt: skip

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
            weights[users] = rho / rho.sum() if self.weighting == "rho" else 1.0 / rho.size
        paid, releases, start = payments_to_micros(outcome.payments, micros), users * 0, self.model.initial()
        return StackelbergResult(self, outcome, micros, paid, nothing, releases, sigma, epsilon, weights, start)

    def run(self, progress: Progress | None = None, ledger: Ledger | None = None) -> StackelbergResult:
        """Announce, collect ρ, train, pay; at R = 0 nobody takes part, nothing is trained and nobody is paid.

        `ledger` must not have this task yet.
        """
        terms, books = self.announced(), new_task(ledger, self.name)
        users = np.flatnonzero(terms.rho > 0).tolist()
        if not users:
            return terms
        books.deposit(f"{self.name}/reward", _SERVER, terms.reward_micros)
        awards = {i: award_id(self.name, 0, i) for i in users}
        books.hold_many(
            Award(award, 0, _SERVER, owner_account(i), terms.epsilon.item(i), terms.paid_micros.item(i))
            for i, award in awards.items()
        )
        # accounts count in units of 2⁻¹⁰⁰, each charge rounded up: room for that, and for no more
        accounts = {i: PrivacyAccount(ZCdp(float(terms.rho[i]) + self.rounds * 2.0**-100)) for i in users}
        rounds, parameters = _train(terms, accounts, progress)
        given = {i: Release(award, GaussianZCdp.name, ZCdp(terms.rho.item(i))) for i, award in awards.items()}
        ends = resolve_each(books, [Resolution(awards[i], AwardState.POSTED, "", given[i]) for i in users])
        books.verify()
        for i, account in accounts.items():
            terms.spent_rho[i], terms.releases[i] = account.spent, account.releases
        paid = terms.paid_micros.copy()  # past a registered cap, one award alone is void
        paid[users] *= [end.state is AwardState.POSTED for end in ends]
        states, reasons = tuple(end.state for end in ends), tuple(end.reason for end in ends)
        rounds[-1] = replace(rounds[-1], state=states, reason=reasons)
        return replace(terms, paid_micros=paid, parameters=parameters, rounds=tuple(rounds))


def _train(
    terms: StackelbergResult, accounts: dict[int, PrivacyAccount], progress: Progress | None
) -> tuple[list[RoundRecord], FloatArray]:
    spec, parameters, rounds = terms.spec, terms.parameters, []
    rows = np.stack([spec.partition.records(i)[: spec.records] for i in accounts])
    x, y = spec.data.x_train[rows], spec.data.y_train[rows]
    for index in range(spec.rounds):
        updates = clipped_gradients(spec.model, parameters, x, y, spec.clip)
        step = np.zeros(parameters.size)
        for (i, account), update in zip(accounts.items(), updates, strict=True):
            account.compose(ZCdp(float(terms.rho[i]) / spec.rounds))
            source = as_noise_source(stream(spec.seed, index, i, purpose=Purpose.NOISE))
            scale = float(terms.sigma[i]) * (1 + ROUNDING_ALLOWANCE)
            step += terms.weights[i] * source.add_gaussian(
                update, scale=scale, sensitivity=2 * spec.clip / spec.records
            )
        parameters = parameters - spec.learning_rate * step
        rounds.append(_record(terms, index, parameters))
        if progress is not None:
            progress(rounds[-1])
    return rounds, parameters


def _record(terms: StackelbergResult, index: int, parameters: FloatArray) -> RoundRecord:
    spec, users, paying = terms.spec, np.flatnonzero(terms.rho > 0), index == terms.spec.rounds - 1
    weights, paid = terms.weights[users], terms.paid_micros[users] * int(paying)
    noise = spec.model.dimension * float(np.sum((weights * terms.sigma[users]) ** 2)) if users.size else float("inf")
    evaluated = (parameters, spec.data.x_test, spec.data.y_test)
    metrics = {name: getattr(spec.model, name)(*evaluated) for name in ("accuracy", "balanced_accuracy", "loss")}
    return RoundRecord(
        index, users, np.full(users.size, float(spec.records)), terms.rho[users] / spec.rounds, paid,
        (AwardState.POSTED,) * users.size, ("",) * users.size, weights, terms.reward_micros * int(paying), noise,
        metrics,
    )  # fmt: skip
