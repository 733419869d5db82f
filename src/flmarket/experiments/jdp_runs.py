"""One training of JDP's figures: a setting and a seed in, an accuracy out, each measured once and kept.

Finished runs are kept in the output folder (`Job.kept`), so an interrupted figure goes on where it stopped, and figures
share the runs they have in common. Raise `VERSION` when the engine changes what a setting means.

Runs of one seed share records, partition, starting point and noise, whatever the rule or the attack, so differences
between curves are paired. Everybody who bids is chosen (equal costs, ample budget): the figures are about training, and
Figure 2 is about selection.

Every record is protected (`unit="record"`): its gradient is clipped at each of `steps` steps on all of a client's
records in each of `rounds` rounds, and `epsilon` is what all of them together cost it, at δ = 1e-5. Settings are chosen
with `tuning`, which measures on training records that no client holds, and with seeds that no figure uses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flmarket import auctions
from flmarket.aggregation import robust
from flmarket.bids import FloatArray
from flmarket.engines import JdpTraining
from flmarket.experiments.items import Job
from flmarket.learning import DataSet, LocalTraining, Model, Purpose, adversaries, load, models, partition, stream
from flmarket.learning.adversaries import Adversary
from flmarket.privacy.joint import LocalPerturbation, upload_epsilon

RUNS = "jdp-runs"  # folder of finished runs inside the output folder
VERSION = 3
DELTA = 1e-5
CHOICES = ("leave-one-out", "leave-k-out", "partition")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that decides a run but the seed; `rule` settings beyond the usual are pairs of name and value.

    `epsilon` is one record's (or, for another `unit`, one client's) over all rounds. `factor`, if not 1, is how much
    the adversary boosts her step.
    """

    data: str = "mnist"
    model: str = "softmax"
    clients: int = 20
    records_per_client: int = 300
    rounds: int = 4
    steps: int = 1
    learning_rate: float = 0.5
    momentum: float = 0.0
    clip: float = 1.0
    epsilon: float = 8.0
    unit: Literal["client", "record"] = "record"
    rule: str = "average"
    sensitivity: Literal["record", "client", "paper"] = "paper"
    options: tuple[tuple[str, int], ...] = ()
    adversary: str | None = None
    adversaries: int = 0
    factor: float = 1.0
    target: int = 2
    validation: int = 500
    test: int = 2000
    tuning: bool = False

    @property
    def epsilon_per_round(self) -> float:
        """Of one upload."""
        return upload_epsilon(self.epsilon, DELTA, self.rounds)

    def aggregation(self) -> robust.RobustAggregation:
        """The rule; ours choose with ε_E = ε_L, as in the paper."""
        given: dict[str, Any] = dict(self.options)
        if self.rule in CHOICES:
            given |= {"epsilon": self.epsilon_per_round, "validation": self.validation, "sensitivity": self.sensitivity}
        return robust.get(self.rule, **given)

    def attack(self) -> Adversary | None:
        """Who attacks, if anybody."""
        if self.adversary is None or self.adversaries == 0:
            return None
        given: dict[str, Any] = {"target": self.target} if self.adversary in ("dirty-label", "scaled-update") else {}
        return adversaries.get(self.adversary, **given, **({} if self.factor == 1 else {"factor": self.factor}))

    def local_model(self, data: DataSet) -> Model:
        """Softmax regression, or a network with as many threads as this process may use."""
        local = LocalTraining(
            learning_rate=self.learning_rate, batch_size=None, steps=self.steps, momentum=self.momentum
        )  # fmt: skip
        allowed = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(allowed) if allowed.isdigit() else os.cpu_count() or 1
        return models.get(self.model, features=data.features, classes=data.n_classes, local=local, threads=threads)


@dataclass(frozen=True)
class Measured:
    """What a run leaves behind; ε's are the account's, for one record (or one client) at δ = 1e-5."""

    accuracy: float
    included: float | None  # how often an adversary's upload counted
    epsilon_per_round: float
    epsilon_total: float


def accuracies(job: Job, title: str, lines: Mapping[str, Sequence[Setting]], runs: range) -> dict[str, FloatArray]:
    """Accuracy of every line's settings, (runs, settings) each; seed by seed, so that an early look is a fair one."""
    found: dict[Setting, list[float]] = {setting: [] for line in lines.values() for setting in line}  # each once
    for done, seed in enumerate(runs):
        for place, setting in enumerate(found):
            job.step(f"{title}: run {done * len(found) + place + 1} of {len(runs) * len(found)}")
            found[setting].append(measure(job, setting, seed).accuracy)
    return {label: np.stack([np.array(found[one]) for one in line], axis=1) for label, line in lines.items()}


def measure(job: Job, setting: Setting, seed: int) -> Measured:
    """One run, or what it left behind."""
    key = {"version": VERSION, "seed": seed, "setting": asdict(setting)}
    return Measured(**job.kept(RUNS, key, lambda: asdict(_run(setting, seed, job.data_dir))))


def _run(setting: Setting, seed: int, data_dir: Path | None) -> Measured:
    data = _subset(setting.data, data_dir, setting.clients * setting.records_per_client, setting, seed)
    attack = setting.attack()
    result = JdpTraining(
        data=data,
        partition=partition.equal(stream(seed, purpose=Purpose.PARTITION), len(data.y_train), setting.clients),
        costs=np.ones(setting.clients),
        budget=1e6,
        auction=auctions.get("m1"),
        model=setting.local_model(data),
        aggregation=setting.aggregation(),
        perturbation=LocalPerturbation(clip=setting.clip, unit=setting.unit, delta=DELTA),
        epsilon=setting.epsilon_per_round,
        adversary=attack,
        adversaries=0 if attack is None else setting.adversaries,
        mixing=setting.rule in CHOICES,  # the others are the usual methods, as usually run
        rounds=setting.rounds,
        validation=setting.validation,
        seed=seed,
    ).run()
    included = result.adversaries_included
    privacy = result.privacy
    return Measured(
        result.accuracy, None if np.isnan(included) else included, privacy.client_per_round, privacy.client_total
    )


def _subset(name: str, data_dir: Path | None, records: int, setting: Setting, seed: int) -> DataSet:
    """Random records for training and for the server, other ones for every seed."""
    data = _loaded(name, data_dir)
    draw = np.random.default_rng((seed, 20230101))
    train, wanted = draw.permutation(len(data.y_train)), setting.validation + setting.test
    x, y = (data.x_train, data.y_train) if setting.tuning else (data.x_test, data.y_test)
    test = train[records : records + wanted] if setting.tuning else draw.permutation(len(y))[:wanted]
    mine = train[:records]
    return DataSet(data.name, data.x_train[mine], data.y_train[mine], x[test], y[test], data.classes)


@lru_cache(maxsize=2)
def _loaded(name: str, data_dir: Path | None) -> DataSet:
    return load(name, data_dir)
