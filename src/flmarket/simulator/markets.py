"""Markets and owners as small as they come, of every kind: two features, two classes, three parameters."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Literal

import numpy as np

from flmarket import aggregation, auctions, privacy
from flmarket.aggregation import robust
from flmarket.bids import BidProfile, Kind, Valuations
from flmarket.engines import Spec
from flmarket.learning import DataSet, LocalTraining, Partition, SoftmaxRegression
from flmarket.market import AuctionSpec, JointSpec, RewardSpec, SamplingSpec, Task
from flmarket.privacy import Cap, PureDp, RecordLevel, Uncapped, ZCdp
from flmarket.privacy.joint import LocalPerturbation

KINDS = ("auction", "auction", "sampling", "reward", "joint")
RECORDS = 4


@lru_cache(maxsize=16)
def data_of(owners: int) -> DataSet:
    """So many owners' records, and some to test with."""
    rng = np.random.default_rng(owners)
    x = rng.normal(size=(RECORDS * owners + 12, 2))
    y = (x.sum(axis=1) > 0).astype(np.int64)
    y[:2] = y[-2:] = 0, 1
    train = RECORDS * owners
    return DataSet("points", x[:train], y[:train], x[train:], y[train:], ("below", "above"))


@lru_cache(maxsize=16)
def dealt(owners: int) -> Partition:
    """Equal shares, in order."""
    return Partition(np.arange(RECORDS * owners), RECORDS * np.arange(owners + 1))


def market(draw: random.Random, kind: str, name: str, owners: int) -> Spec:
    """A market of this kind; what it offers is drawn."""
    data, partition, rounds, seed = data_of(owners), dealt(owners), draw.randint(1, 4), draw.randint(0, 9)
    if kind == "reward":
        return RewardSpec(
            data=data, partition=partition, privacy_values=np.ones(owners), weight=10.0, rounds=rounds, name=name,
            reward=draw.choice((0.5, 2.0, 5.0)), seed=seed,
        )  # fmt: skip
    if kind == "joint":
        unit: Literal["client", "record"] = "client" if draw.random() < 0.5 else "record"
        local = LocalTraining(steps=1, batch_size=None if unit == "record" else 2)
        return JointSpec(
            data=data, partition=partition, costs=np.full(owners, 1.0), budget=draw.choice((3.0, 20.0)),
            auction=auctions.get("m1"), model=SoftmaxRegression(2, 2, local=local), rounds=rounds, name=name,
            aggregation=robust.get("median"), perturbation=LocalPerturbation(unit=unit), epsilon=1.0,
            validation=4, seed=seed, stop_accuracy=draw.choice((None, None, 0.6)),
        )  # fmt: skip
    if kind == "sampling":
        return SamplingSpec(
            data=data, partition=partition, costs=np.ones(owners), participation=np.full(owners, 0.7),
            payment=np.full(owners, 2.0), rounds=rounds, local_steps=1, batch_size=None, name=name, seed=seed,
        )  # fmt: skip
    noise = privacy.get(draw.choice(("laplace-l1", "sphere", "privunit")), clip=1.0)
    bids = BidProfile(Valuations(np.full(owners, int(Kind.LINEAR)), np.ones(owners)), 1.0, np.full(owners, RECORDS))
    return AuctionSpec(
        task=Task(
            name=name, rounds=rounds, bidders_per_round=draw.randint(1, owners),
            budget_micros=draw.choice((0, 700_000, 3_000_000, 50_000_000)),
        ),
        data=data, partition=partition, bids=bids, perturbation=noise, seed=seed,
        auction=auctions.get(draw.choice(("all-in-capped", "m1", "all-in", "fairquery"))),
        aggregation=aggregation.get(draw.choice(("opt-aggr", "conventional", "median"))),
    )  # fmt: skip


def drawn_cap(draw: random.Random, like: Cap | None = None) -> Cap:
    """A cap: in ε, in ρ, in ρ of a record, or none for who sells updates as they are; of the same sort as `like`."""
    sort = draw.choice((PureDp, ZCdp, RecordLevel, Uncapped)) if like is None else type(like)
    if sort is Uncapped:
        return Uncapped()
    if sort is PureDp:
        return PureDp(draw.choice((0.5, 2.0, 10.0)))
    rho = ZCdp(draw.choice((0.05, 0.5, 5.0)))
    return RecordLevel(rho) if sort is RecordLevel else rho
