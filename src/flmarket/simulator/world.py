"""What a simulated world is made of: its chance, its time, its disks, its markets.

Every decision of a simulated run is drawn from one seed, and what was broken is counted, so that it can be left out.

Each purpose has a stream of its own: how often one thing is asked does not change what is drawn for another. A fault
that happens is remembered as (fault, how many times that question had been asked). A run with the same seed in which
some of them are `spared` is how a failure is made small (`torture`).

`Swarm` is what a seed makes of all this: which faults there are in this run at all, and how often. Half of them are
left out of any one run, because faults hide each other: a network that loses everything never shows what a doubled
message does (Groce et al., Swarm Testing, ISSTA 2012).

Time as a simulated run has it: it passes when somebody sleeps, and what is due happens meanwhile.

`running` puts this clock in the place of the `time` module in every module of this package that reads it, so nothing
has to be told which clock to use, and none can be forgotten. `skew` is how wrong the clock of the machine at work is.

What would break it: a module that says `from time import …`, or another thread that reads the time while a run is on.

Markets and owners as small as they come, of every kind: two features, two classes, three parameters.

Disks and databases that fail as real ones do: before a write, after it, in the middle; by an error or for good.

`Disk` is one machine's: once it has crashed, everything on it is dead until the machine starts again, whatever code
still runs. `FailingConnection` stands between an owner's files and SQLite, so a crash can come between any two
statements; `FailingStore` tears the files of a round; `FailingLedger` loses calls or their answers; `failing_engine`
does the same to every statement of a database that is reached through SQLAlchemy.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import random
import sqlite3
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from flmarket import aggregation, auctions, privacy
from flmarket.aggregation import robust
from flmarket.bids import BidProfile, FloatArray, Kind, Valuations
from flmarket.engines import Spec
from flmarket.learning import DataSet, LocalTraining, Partition, SoftmaxRegression
from flmarket.ledger import Ledger, LedgerUnavailable
from flmarket.market import AuctionSpec, JointSpec, RewardSpec, SamplingSpec, Task
from flmarket.market.store import _HEADER, FileStore
from flmarket.privacy import Cap, PureDp, RecordLevel, Uncapped, ZCdp
from flmarket.privacy.joint import LocalPerturbation
from flmarket.simulator.watch import Watch

if TYPE_CHECKING:
    from sqlalchemy import Engine

_Item = TypeVar("_Item")
Fault = tuple[str, int]

# The faults there are, and the most often each happens when it is asked about: at every call of a store, every
# statement of a database, every message, every turn.
FAULTS: dict[str, float] = {
    "server crash": 0.02,
    "ledger error": 0.02,
    "disk full": 0.02,
    "torn write": 0.02,
    "message lost": 0.25,
    "message doubled": 0.2,
    "message delayed": 0.3,
    "message late": 0.1,
    "node crash": 0.02,
    "node error": 0.02,
    "node away": 0.1,
    "clock jump": 0.1,
    "journal restored": 0.05,
    "server restored": 0.03,
    "hostile server": 0.3,
    "hostile owner": 0.4,
    "cap changed": 0.15,
    "cap registered": 0.1,
    "posted twice": 0.1,
    "worker paused": 0.1,
    "database error": 0.01,
    "database crash": 0.01,
    "cancelled": 0.1,
    "withdrawn": 0.1,
}


class Crash(BaseException):
    """The power fails here. Not an Exception: nothing in a program may handle it."""


@dataclass(frozen=True)
class Swarm:
    """Which faults a run has, how often each happens, and how much is played."""

    rates: Mapping[str, float]
    owners: int = 4
    tasks: int = 12
    turns: int = 220

    @classmethod
    def of(cls, seed: int) -> Swarm:
        """What the seed makes of it."""
        draw = random.Random(f"{seed}/swarm")
        rates = {name: most * 10 ** draw.uniform(-1.5, 0) for name, most in FAULTS.items() if draw.random() < 0.5}
        return cls(rates, owners=draw.randint(2, 6), tasks=draw.randint(4, 16), turns=draw.randint(120, 400))


@dataclass
class Chance:
    """The decisions of one run. While it is `quiet`, nothing breaks any more."""

    seed: int
    rates: Mapping[str, float]
    spared: frozenset[Fault] = frozenset()
    quiet: bool = False
    fired: list[Fault] = field(default_factory=list)
    _asked: Counter[str] = field(default_factory=Counter)
    _streams: dict[str, random.Random] = field(default_factory=dict)

    def stream(self, purpose: str) -> random.Random:
        """The draws for one purpose."""
        if purpose not in self._streams:
            self._streams[purpose] = random.Random(f"{self.seed}/{purpose}")
        return self._streams[purpose]

    def happens(self, fault: str) -> bool:
        """Whether this fault happens now."""
        rate = self.rates.get(fault, 0.0)
        if self.quiet or not rate:
            return False
        self._asked[fault] += 1
        here = fault, self._asked[fault]
        if self.stream(fault).random() >= rate or here in self.spared:
            return False
        self.fired.append(here)
        return True

    def choice(self, purpose: str, among: Sequence[_Item]) -> _Item:
        """One of these."""
        return self.stream(purpose).choice(among)

    def uniform(self, purpose: str, low: float, high: float) -> float:
        """A number between two."""
        return self.stream(purpose).uniform(low, high)


_BEGIN = 1_800_000_000.0  # seconds since 1970: any moment will do


class Clock:
    """Virtual seconds, and what is to happen at which of them. It has the functions of `time` that are in use here."""

    perf_counter = staticmethod(time.perf_counter)  # how long a step takes is measured, not simulated
    process_time = staticmethod(time.process_time)

    def __init__(self) -> None:
        self.now, self.skew = 0.0, 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, moment: float, what: Callable[[], None]) -> None:
        """Let something happen then."""
        heapq.heappush(self._due, (moment, next(self._number), what))

    def sleep(self, seconds: float) -> None:
        """Let time pass; what is due happens in order."""
        until = self.now + max(0.0, seconds)
        while self._due and self._due[0][0] <= until:
            moment, _, what = heapq.heappop(self._due)
            self.now = max(self.now, moment)
            what()
        self.now = max(self.now, until)

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return self.now

    def time(self) -> float:
        """Seconds since 1970, as the machine at work believes."""
        return _BEGIN + self.now + self.skew

    def time_ns(self) -> int:
        """The same in whole nanoseconds."""
        return int(self.time() * 1e9)


@contextmanager
def running(clock: Clock) -> Iterator[None]:
    """Every module of this package goes by this clock, and says nothing in the log."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("flmarket.")]
    reading = [module for module in ours if getattr(module, "time", None) is time and module.__name__ != __name__]
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    for module in reading:
        vars(module)["time"] = clock
    try:
        yield
    finally:
        for module in reading:
            vars(module)["time"] = time
        logging.disable(before)


class World(ABC):
    """One run: `play` it, and look at `watch.broken`. What differs are the cast, its turns, and how it comes to an end.

    `begun` tasks were posted, `rounds` were played by the end.
    """

    turns: int

    def __init__(self, swarm: Swarm, folder: Path, chance: Chance) -> None:
        self.swarm, self.folder, self.chance = swarm, folder, chance
        self.clock, self.watch, self.story = Clock(), Watch(), list[str]()
        self.begun = self.rounds = 0

    def play(self) -> None:
        """All of it; ends early once something is broken."""
        with running(self.clock):
            try:
                self._begin()
                for _ in range(self.turns):
                    self._turn()
                    if self.watch.broken:
                        return
                self.chance.quiet = True
                self.tell("nobody", "breaks anything any more")
                self._settle()
            finally:
                self._leave()

    def tell(self, who: str, what: str) -> None:
        """For the story."""
        self.story.append(f"{self.clock.now:9.2f} s  {who}: {what}")

    def why(self, before: int) -> str:
        """What fired last, if anything has since so many had."""
        fired = self.chance.fired[before:]
        return f"{fired[-1][0]} {fired[-1][1]}" if fired else "for no reason"

    @abstractmethod
    def _begin(self) -> None:
        """The cast comes together."""

    @abstractmethod
    def _turn(self) -> None:
        """Somebody does something, and something may break."""

    @abstractmethod
    def _settle(self) -> None:
        """Nothing breaks any more: every task ends, and the log is sound."""

    @abstractmethod
    def _leave(self) -> None:
        """Close everything."""


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


class Disk:
    """Where one machine keeps things; `crash` and `error` name the faults that it has."""

    def __init__(self, chance: Chance, crash: str, error: str) -> None:
        self.chance, self.crash, self.error = chance, crash, error
        self.dead = self.spared = False

    def before(self, failure: Callable[[], Exception]) -> None:
        """Something is about to be read or written."""
        if self.dead:
            raise Crash
        if not self.spared and self.chance.happens(self.error):
            raise failure()
        self.cut()

    def cut(self) -> None:
        """A moment at which the power can fail."""
        if self.dead or (not self.spared and self.chance.happens(self.crash)):
            self.dead = True
            raise Crash


class FailingConnection:
    """A SQLite connection on such a disk; what was not committed when it died was never written."""

    def __init__(self, real: sqlite3.Connection, disk: Disk) -> None:
        self.real, self.disk = real, disk

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """One statement; a COMMIT may succeed and the power fail right after it."""
        self.disk.before(_disk_error)
        done = self.real.execute(statement, *values)
        if statement == "COMMIT":
            self.disk.cut()
        return done

    def __enter__(self) -> FailingConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.disk.dead:
            return
        if kind is not None:
            self.real.rollback()
            return
        if not self.real.in_transaction:
            return
        try:
            self.disk.before(_disk_error)
        except sqlite3.OperationalError:
            self.real.rollback()
            raise
        self.real.commit()
        self.disk.cut()

    @property
    def in_transaction(self) -> bool:
        """See SQLite; nothing is, on a machine that is gone."""
        return not self.disk.dead and self.real.in_transaction

    def close(self) -> None:
        """Close the file; what is not committed is gone."""
        self.real.close()


def _disk_error() -> Exception:
    return sqlite3.OperationalError("disk I/O error")


class FailingStore(FileStore):
    """A folder on such a disk: files are left half written, and records of the log cut off."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        super().__init__(folder, synchronised=False)
        self.disk = disk

    def _write(self, name: str, content: bytes) -> None:
        self._tear(self.folder / f"{name}.part", content, mode="wb")
        super()._write(name, content)
        self.disk.cut()

    def _read(self, name: str) -> dict[str, Any] | None:
        self.disk.before(_no_room)
        return super()._read(name)

    def save_deliveries(self, index: int, vectors: Mapping[int, FloatArray]) -> None:
        """See `FileStore`."""
        first = min(vectors)
        body = np.ascontiguousarray(vectors[first]).tobytes()
        self._tear(self.folder / f"updates-{index:06d}.log", _HEADER.pack(first, len(body), 0) + body, mode="ab")
        super().save_deliveries(index, vectors)
        self.disk.cut()

    def tidy(self, next_round: int) -> None:
        """See `FileStore`."""
        self.disk.cut()
        super().tidy(next_round)

    def _tear(self, path: Path, content: bytes, *, mode: str) -> None:
        """Before a write: perhaps part of it lands, and that is all."""
        full, torn = self.disk.chance.happens("disk full"), self.disk.chance.happens("torn write")
        if full or torn:
            with path.open(mode) as handle:
                handle.write(content[: self.disk.chance.stream("torn").randrange(len(content))])
        if torn:
            self.disk.dead = True
            raise Crash
        if full:
            raise _no_room()
        self.disk.cut()


def _no_room() -> Exception:
    return OSError(errno.ENOSPC, "no space left on device")


class FailingLedger:
    """A ledger behind a connection that breaks: a call does not arrive, or its answer does not."""

    def __init__(self, real: Ledger, disk: Disk) -> None:
        self._real, self._disk = real, disk

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._disk.before(_unavailable)
            found = method(*args, **kwargs)
            self._disk.before(_unavailable)
            return found

        return call


def failing(real: Ledger, disk: Disk) -> Ledger:
    """The ledger as a program on such a machine has it."""
    return cast(Ledger, FailingLedger(real, disk))


def _unavailable() -> Exception:
    return LedgerUnavailable("the connection broke")


def failing_engine(engine: Engine, disk: Disk) -> None:
    """Every statement and every commit of an engine may fail, or the power with it."""
    dialect: Any = engine.dialect
    execute, commit = dialect.do_execute, dialect.do_commit

    def do_execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        disk.before(_disk_error)
        execute(cursor, statement, parameters, context)

    def do_commit(connection: Any) -> None:
        disk.before(_disk_error)
        commit(connection)
        disk.before(_disk_error)

    dialect.do_execute, dialect.do_commit = do_execute, do_commit
