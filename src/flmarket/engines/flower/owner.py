"""An owner as her own machine sees her: data, valuation, caps, her record on disk, and what she computes.

Two ways to become one. `Owner.dealt` is for try-outs: number i of a market that a file describes, with the records
that its partition deals her; her noise may then be the seeded one, because the data is public anyway. An owner with
data of her own writes an `owner.toml` (see `files`), whose noise is always the secure one: no message can change that.

What would break it: `raw_update` reveals records. It is an intermediate value that only the guard may touch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import Kind, Valuations
from flmarket.engines.flower.messages import Announcement, Bid, Order
from flmarket.engines.jdp import JdpTraining
from flmarket.engines.jdp_privacy import LocalPerturbation
from flmarket.engines.owners import LEAST_EPSILON, UNLIMITED
from flmarket.engines.sampled import SampledTraining
from flmarket.engines.simulation import Simulation
from flmarket.engines.stackelberg import StackelbergTraining
from flmarket.errors import InvalidInput
from flmarket.learning import (
    Model,
    Purpose,
    Records,
    SoftmaxRegression,
    clipped_gradients,
    dimension,
    fedavg,
    fedsgd,
    stream,
)
from flmarket.learning.adversaries import Adversary
from flmarket.privacy import Cap, NoiseSource, PureDp, SecureNoise, SimulationNoise, Uncapped, ZCdp

__all__ = ["Owner", "Trainer", "joint_noise", "raw_update", "stays_out"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Trainer = Callable[[int, int], Model | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Owner:
    """Who she is, what she holds, what she asks and where her record lies.

    `privacy_budget` is the most she sells in one round (in the reward game: in one task, as ρ). `value` is her cost of
    taking part, or her value of privacy, in markets that ask for that; without it she stays out of them. `model` is
    what she trains in joint-DP markets, or `trainer` makes it for so many features and classes (None if it cannot).
    `allow_raw` lets updates leave without any noise, which sampling markets need; they count as unbounded, so it takes
    an account without a cap. `classes` is how many her records have, as she says; without it she bids for any number,
    because a bid must not depend on her records. `account` is hers in the buyer's ledger, if she knows it, and `cost`
    how a value of privacy becomes a cost in reward games.

    `least_epsilon` and `least_records` are the least that she sells at once: they bound how often anybody can ask.
    Training that takes `most_seconds` is given up; `answer_seconds` makes every answer to an order leave so long after
    it came, whatever training did (at most half of it is for training).

    For simulations only: `simulation_seed` makes her noise repeatable and unsafe, `adversary` makes her malicious,
    `dropout` and `faulty` are probabilities of failing on purpose.
    """

    number: int
    x: FloatArray
    y: IntArray
    valuation: Valuations
    privacy_budget: float
    cap: Cap
    record: Path
    value: float | None = None
    model: Model | None = None
    trainer: Trainer | None = None
    adversary: Adversary | None = None
    classes: int | None = None
    account: str = ""
    cost: str = "linear"
    least_epsilon: float = LEAST_EPSILON
    least_records: int = 1
    most_seconds: float = 600.0
    answer_seconds: float | None = None
    simulation_seed: int | None = None
    allow_raw: bool = False
    dropout: float = 0.0
    faulty: float = 0.0

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != (len(self.x),) or not np.isfinite(self.x).all():
            raise InvalidInput("data", (self.x.shape, self.y.shape), "finite features (n, f) and n classes")
        if self.valuation.shape != (1,):
            raise InvalidInput("valuation", self.valuation.shape, "the valuation of one owner")

    @classmethod
    def dealt(
        cls,
        market: Simulation | StackelbergTraining | SampledTraining | JdpTraining,
        number: int,
        folder: Path,
        *,
        seeded: bool = True,
    ) -> Owner:
        """Owner `number` of a described market; her record goes to `folder`."""
        if not 0 <= number < market.partition.owners:
            raise InvalidInput("owner", number, f"0 to {market.partition.owners - 1}")
        rows = market.partition.records(number)
        valuation, budget, value = Valuations([int(Kind.LINEAR)], [1.0]), UNLIMITED, None
        cap: Cap = ZCdp(UNLIMITED)
        dropout, faulty, cost = 0.0, 0.0, "linear"
        if isinstance(market, Simulation):
            own = market.bids[[number]]
            valuation, budget, cap = own.valuations, float(own.privacy_budget[0]), market.cap.account().cap
            dropout, faulty = market.dropout, market.faulty
        elif isinstance(market, StackelbergTraining):
            value, rows, cost = float(np.asarray(market.privacy_values)[number]), rows[: market.records], market.cost
        else:
            value = float(np.asarray(market.costs)[number])
        y, model, adversary = market.data.y_train[rows], None, None
        raw = isinstance(market, SampledTraining)
        if isinstance(market, JdpTraining):
            model, raw = market.model, market.perturbation is None
            adversary = market.adversary if number in market.select().adversaries else None
            y = y if adversary is None else adversary.labels(y, market.data.n_classes)
        if raw:
            cap = Uncapped()
        return cls(
            number=number, x=market.data.x_train[rows], y=y, valuation=valuation, model=model, adversary=adversary,
            privacy_budget=budget, cap=cap, record=folder / f"owner-{number}", value=value,
            simulation_seed=market.seed if seeded else None, allow_raw=raw,
            dropout=dropout, faulty=faulty, cost=cost, classes=market.data.n_classes,
        )  # fmt: skip

    @property
    def simulated(self) -> bool:
        """Whether her noise is seeded: repeatable, and not private."""
        return self.simulation_seed is not None

    def noise(self, order: Order) -> NoiseSource:
        """Where the noise of a release comes from."""
        if self.simulation_seed is None:
            return SecureNoise()
        return SimulationNoise(self.stream(order, Purpose.NOISE))

    def stream(self, order: Order, purpose: Purpose) -> np.random.Generator:
        """Her generator for one purpose in one round; drawn from the system unless she is simulated."""
        seed = secrets.randbits(128) if self.simulation_seed is None else self.simulation_seed
        return stream(seed, order.round_index, self.number, purpose=purpose)

    def local_model(self, features: int, classes: int) -> Model | None:
        """What she trains in a joint-DP market for so many features and classes, if she can."""
        if self.model is not None or self.trainer is None:
            return self.model
        return self.trainer(features, classes)

    def bid(self, call: Announcement) -> Bid | None:
        """What she asks if she takes part at all; the guard cuts it to what her account allows.

        By her configuration and by how many records and features she has, never by what is in them.
        """
        if len(self.y) < self.least_records or self.x.shape[1] != call.features:
            return None
        if self.classes is not None and self.classes > call.classes:
            return None
        trains = call.market != "joint" or self.local_model(call.features, call.classes) is not None
        if stays_out(call.market, value=self.value, allow_raw=self.allow_raw, trains=trains, cap=self.cap):
            return None
        budget, kind, rate = self.privacy_budget, int(Kind.LINEAR), self.value or 0.0
        if call.market == "sampling":
            budget = math.inf
        elif call.market == "auction":
            kind, rate = int(self.valuation.kind[0]), float(self.valuation.rate[0])
        least = self.least_epsilon**2 / 2 if call.market == "reward" else self.least_epsilon  # ρ of a pure ε
        if budget < least:
            return None
        grid = values = ()
        if call.market == "auction" and self.valuation.grid is not None and self.valuation.values is not None:
            grid, values = tuple(self.valuation.grid[0].tolist()), tuple(self.valuation.values[0].tolist())
        return Bid(
            owner=self.number, data_size=len(self.y), privacy_budget=budget, kind=kind, rate=rate, grid=grid,
            values=values, least_epsilon=least, least_records=self.least_records,
        )  # fmt: skip


def stays_out(market: str, *, value: float | None, allow_raw: bool, trains: bool, cap: Cap) -> str:
    """Why an owner takes no part in markets of a kind, by what her configuration says; empty if she does."""
    if market == "auction":
        return ""
    if value is None:
        return "no value is given"
    if market == "sampling":
        if not allow_raw:
            return "allow_raw is not true, and updates would leave without noise"
        return "" if isinstance(cap, Uncapped) else "updates without noise are unbounded and fit under no cap"
    if isinstance(cap, PureDp):
        return "a cap in ε alone cannot hold Gaussian noise: give delta with it, or rho instead"
    return "no model is given" if market == "joint" and not trains else ""


def raw_update(owner: Owner, order: Order, parameters: FloatArray) -> FloatArray:
    """What the order asks her to compute, before any privacy: softmax regression on the records she sold."""
    x, y = owner.x[: order.records], owner.y[: order.records]
    if order.market == "joint":
        return _trained(owner, order, parameters)
    model = SoftmaxRegression(order.features, order.classes)
    if order.market == "reward":
        return np.asarray(clipped_gradients(model, parameters, [Records(x, y)], order.clip)[0])
    if order.market == "sampling":
        model = SoftmaxRegression(order.features, order.classes, order.l2, penalise_biases=True)
    offsets, batch = np.array([0, len(y)]), order.batch_size or None
    if order.market == "auction" and order.steps == 1 and batch is None:
        return np.asarray(fedsgd(model, parameters, x, y, offsets)[0])
    return np.asarray(
        fedavg(
            model, parameters, x, y, offsets, steps=order.steps, batch_size=batch, learning_rate=order.learning_rate,
            rngs=[owner.stream(order, Purpose.BATCHES)],
        )[0]
    )  # fmt: skip


def _trained(owner: Owner, order: Order, public: FloatArray) -> FloatArray:
    """Her model after local training, from the public one mixed with her own of the round before (M5).

    Her own models are kept beside her record and never leave; the last two, so that a round can be repeated.
    """
    model = owner.local_model(order.features, order.classes)
    if model is None or dimension(model) != public.size:
        raise InvalidInput("model", public.size, "a model of the owner's own of as many parameters")
    folder = owner.record.with_suffix(".own")
    folder.mkdir(parents=True, exist_ok=True)
    stem = quote(order.task, safe="")
    before, after = folder / f"{stem}-{order.round_index - 1}.npy", folder / f"{stem}-{order.round_index}.npy"
    start = public
    if order.total_size > 0 and before.exists():
        share = order.records / (order.total_size + order.records)
        start = public + share * (np.load(before, allow_pickle=False) - public)
    x, y = owner.x[: order.records], owner.y[: order.records]
    trained = np.asarray(model.train(start, Records(x, y), owner.stream(order, Purpose.BATCHES)))
    if not np.isfinite(trained).all():
        trained = start
    part = after.with_suffix(".part")
    with part.open("wb") as handle:
        np.save(handle, trained, allow_pickle=False)
    part.replace(after)
    (folder / f"{stem}-{order.round_index - 2}.npy").unlink(missing_ok=True)
    return trained


def joint_noise(terms: Announcement | Order) -> LocalPerturbation:
    """M3 as a message names it (`joint.perturbation_name`); raises InvalidInput if it is none of M3's."""
    prefix, *choices = terms.perturbation.split("-")
    if prefix != "m3" or len(choices) != 3:
        raise InvalidInput("perturbation", terms.perturbation, "m3-clipped-calibration-unit")
    names: dict[str, Any] = dict(zip(("clipped", "calibration", "unit"), choices, strict=True))
    return LocalPerturbation(clip=terms.clip, delta=terms.delta, **names)
