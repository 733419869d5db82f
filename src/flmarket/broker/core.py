"""The broker as one object: settings, database, books, caches and counters. Services take it first, a `Party` second.

Services open their own short transactions instead of taking a session, because the ledger writes through a connection
of its own: on SQLite, a ledger call inside somebody's open write would wait for itself.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import undefer

from flmarket.broker.books import Books
from flmarket.broker.database import Database
from flmarket.broker.errors import Forbidden
from flmarket.broker.requests import SchemaRequest, TaskRequest, order_of
from flmarket.broker.settings import Settings
from flmarket.broker.tables import EvaluationSet, Fact, Release, Rights, Role, RoundRow, Secret, TaskRow, vector
from flmarket.engines import Simulation, Spec
from flmarket.engines.config import DataFile, DataSection
from flmarket.errors import ConfigError, FlmarketError, InvalidInput
from flmarket.learning import DataSet, datasets, dimension, models

_KEPT = 16  # simulations


@dataclass(frozen=True)
class Party:
    """Who is asking; `key_id` is the key that she, or the session she is in, came with. A key has all rights of its
    party; of a person who signed in as herself, `user_id` and `rights` say who she is and what she may."""

    id: str
    role: Role
    name: str
    key_id: str | None = field(default=None, compare=False)
    user_id: str | None = field(default=None, compare=False)
    rights: Rights = field(default="admin", compare=False)


def require(party: Party, *roles: Role) -> None:
    """Forbidden unless the party has one of the roles."""
    if party.role not in roles:
        raise Forbidden(f"this is for {' and '.join(f'{role}s' for role in roles)}; {party.id} is a {party.role}")


def require_admin(party: Party, *, of: str | None = None) -> None:
    """Forbidden unless she may act on her party's people, keys and hooks; `of` another party only operators may."""
    if party.rights != "admin":
        raise Forbidden(f"this is for your organisation's admins; you are a {party.rights}")
    if of not in (None, party.id):
        require(party, "operator")


@dataclass(frozen=True)
class Secrets:
    """What only the service knows: under `keys` it hashes API keys, under `pseudonyms` it names owners to buyers."""

    keys: bytes = field(repr=False)
    pseudonyms: bytes = field(repr=False)


_ROUND_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)
_EPSILON = (0.1, 0.25, 0.5, 1, 1.5, 2, 3, 5, 8, 13)


class Metrics:
    """What the service counts. Labels are few and bounded: route templates, never addresses, ids or names.

    Rounds, money and ε are counted by the process that works the queue, since it was started.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram, gauge = partial(Histogram, registry=self.registry), partial(Gauge, registry=self.registry)
        self.requests = counter("flmarket_http_requests_total", "Requests answered.", ["method", "route", "status"])
        self.latency = histogram("flmarket_http_seconds", "Time to answer.", ["method", "route"])
        self.rounds = counter("flmarket_rounds_total", "Rounds settled.", ["outcome"])
        whole = "From a round's opening to its settlement, pauses included."
        self.round_seconds = histogram("flmarket_round_seconds", whole, buckets=_ROUND_SECONDS)
        self.step_seconds = histogram("flmarket_step_seconds", "Work on one step of a simulated round.", ["step"])
        possible = "What rounds that are over could have cost, in micro-units."
        self.budget = counter("flmarket_budget_micros_total", possible)
        self.paid = counter("flmarket_paid_micros_total", "Paid to owners, in micro-units.")
        self.awards = counter("flmarket_awards_total", "Awards that ended.", ["state"])
        cost = "What one paid award cost its owner, for one round or for all of its task."
        self.epsilon = histogram("flmarket_epsilon", cost, ["per"], buckets=_EPSILON)
        self.unbounded = counter("flmarket_unbounded_awards_total", "Paid awards whose privacy loss nothing bounds.")
        self.tasks = gauge("flmarket_tasks", "Tasks by state.", ["state"])
        self.escrow = gauge("flmarket_escrow_micros", "What tasks under way still hold, in micro-units.")
        self.findings = gauge("flmarket_books_findings", "Where books disagreed when they were last compared.")
        self.compared = gauge("flmarket_books_compared_seconds", "When that was, since 1970; 0 for never.")
        self.notices = counter("flmarket_notices_total", "Attempts at webhooks and mails.", ["kind", "outcome"])
        self.streams = gauge("flmarket_event_streams", "Open event streams.")

    def count_round(self, row: RoundRow, ended: Iterable[Release], *, lasting: bool = False) -> None:
        """A round is over, and with it these awards; `lasting`: they are for all rounds of their task."""
        self.rounds.labels(row.state).inc()
        if row.closed_at is not None:
            self.round_seconds.observe(max(0, row.closed_at - row.opened_at) / 1000)
        self.budget.inc(row.budget_micros)
        self.paid.inc(row.spent_micros)
        epsilon = self.epsilon.labels("task" if lasting else "round")
        for one in ended:
            self.awards.labels(one.state).inc()
            if one.state == "posted" and math.isfinite(one.epsilon):
                epsilon.observe(one.epsilon)
            elif one.state == "posted":
                self.unbounded.inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


Value = TypeVar("Value")


class Recent:
    """What everybody may see, worked out once a second at most, however many ask: for answers that do not depend on who
    asks. While one thread works out a new value, the others that ask for it wait instead of doing the same work."""

    def __init__(self, seconds: float = 1.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._lock = threading.RLock()  # a value may be made of others
        self._values: dict[Hashable, tuple[float, Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value, made anew if it is too old. Use few keys: none is ever dropped."""
        found = self._values.get(key)
        if found is None or found[0] <= self._clock():
            with self._lock:
                found = self._values.get(key)
                if found is None or found[0] <= self._clock():
                    value = make()
                    found = self._values[key] = (self._clock() + self.seconds, value)
        result: Value = found[1]
        return result


class Settled:
    """What follows from something that does not change any more; the most recently used are kept."""

    def __init__(self, most: int = 1024) -> None:
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under a key, which names all that it follows from."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                known: Value = self._values[key]
                return known
        made = make()
        with self._lock:
            self._values[key] = made
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return made


class Simulations:
    """Data sets by name, and simulations built from orders, kept for a while because loading data and dealing it out
    takes longer than a round; safe to share between threads."""

    def __init__(self, settings: Settings, database: Database | None = None) -> None:
        self._settings, self._database = settings, database
        files = [name for name in settings.data_sets if DataFile.is_one(name)]
        self._files = {file.name: file for file in map(DataFile.load, files)}
        self.data_sets = (*self._files, *(datasets.admit(name) for name in settings.data_sets if name not in files))
        if twice := {name for name in self.data_sets if self.data_sets.count(name) > 1}:
            raise ConfigError("data_sets", min(twice), "every name once")
        for name in settings.models:
            models.admit(name)
        self._data = Recent(math.inf)  # each is read once
        self._own, self._built = Settled(_KEPT), Settled(_KEPT)

    def build(self, task_id: str, order: TaskRequest) -> Spec:
        """The simulation of an order; raises a typed error if it cannot be played."""
        data = self.data_of(order.data.registered, order.broker.evaluation)
        if order.model.name not in self.models:
            raise InvalidInput("model.name", order.model.name, f"one of {', '.join(self.models)}")
        key = order.model_dump_json(exclude={"task": {"name", "rounds", "budget_per_round"}, "broker": True})
        key += order.broker.evaluation

        def make() -> Spec:
            self._check_model(order, data)
            made = order.market_file(task_id).spec(data=data)
            made.kind()  # owners, model and market fit together
            return made

        found = self._built.get(key, make)
        if isinstance(found, Simulation):
            task = replace(found.task, name=task_id, budget_micros=order.budget_micros, rounds=order.task.rounds)
            return replace(found, task=task)
        return order.market_file(task_id).spec(data=data)

    def test_examples(self, spec: Mapping[str, Any]) -> int | None:
        """How many examples an order's accuracy is measured on; None if its data set is not offered any more."""
        try:
            return len(self.data_of_spec(spec).y_test)
        except FlmarketError:
            return None

    def data_of_spec(self, spec: Mapping[str, Any]) -> DataSet:
        """The data of an order as it is stored."""
        return self.data_of(
            spec["data"].get("name") or DataSection().registered, spec["broker"].get("evaluation") or ""
        )

    def data_of(self, name: str, evaluation: str = "") -> DataSet:
        """What a task trains and tests on; InvalidInput if there is no such thing any more.

        With a buyer's own test records instead of the data's; of her own data those are all that there is here.
        """
        if not evaluation:
            return self.offered(name)
        made = self._own.get(evaluation, lambda: self._read_own(evaluation))
        if made.name != name:
            raise InvalidInput("broker.evaluation", evaluation, f"a set with the columns of {name}")
        return made

    def offered(self, name: str) -> DataSet:
        """A data set that the operator offers."""
        if name not in self.data_sets:
            raise InvalidInput("data.name", name, f"one of {', '.join(self.data_sets)}")
        file = self._files.get(name)

        def load() -> DataSet:
            return datasets.load(name, self._settings.data_dir, download=False) if file is None else file.read()

        return self._data.get(name, load)

    def _read_own(self, evaluation: str) -> DataSet:
        row, whole = None, (undefer(EvaluationSet.x), undefer(EvaluationSet.y))
        if self._database is not None:
            with self._database.read() as session:
                row = session.get(EvaluationSet, evaluation, options=whole)
        if row is None:
            raise InvalidInput("broker.evaluation", evaluation, "an evaluation set of yours")
        y = np.frombuffer(row.y, dtype="<i4").astype(np.int64)
        x = vector(row.x).reshape(len(y), -1)
        if row.schema is None:
            return replace(self.offered(row.data), name=row.data, x_test=x, y_test=y, validation=None)
        schema = SchemaRequest.model_validate(row.schema)
        return DataSet(row.id, x, y, x, y, tuple(schema.classes), encoding=schema.encoding())

    @property
    def models(self) -> tuple[str, ...]:
        """What may be learned: all that is registered, and what the operator admitted."""
        return (*models.names(), *self._settings.models)

    def _check_model(self, order: TaskRequest, data: DataSet) -> None:
        """A typed error unless the model can be built and is not too large."""
        try:
            size = dimension(order.model.build(data, order.training.local()))
        except FlmarketError:
            raise
        except Exception as error:  # of a model that takes any settings, or of its framework
            raise InvalidInput("model", order.model.name, f"settings that it can be built with ({error})") from None
        if size > self._settings.max_dimension:
            raise InvalidInput("model", f"{size} parameters", f"at most {self._settings.max_dimension}")


def _settled(database: Database, name: str, given: str) -> str:
    """What the market has settled for good under this name; `given` settles it unless that was done before."""
    with database.read() as session:
        known = session.get(Fact, name)
    if known is None and given:
        try:
            with database.write() as session:
                session.add(Fact(name=name, value=given))
        except IntegrityError:  # another process was first
            return _settled(database, name, given)
    if known is not None and given not in ("", known.value):
        raise ConfigError(f"setting {name}", given, f"{known.value}, which this market has settled on for good")
    return given if known is None else known.value


@dataclass(frozen=True)
class Broker:
    """Everything a service function needs."""

    settings: Settings
    database: Database
    books: Books
    secrets: Secrets
    simulations: Simulations
    metrics: Metrics
    wake: threading.Event = field(default_factory=threading.Event)
    recent: Recent = field(default_factory=Recent)
    settled: Settled = field(default_factory=Settled)
    currency: str = "units"

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Connect, migrate, and check that the books can be read."""
        database = Database(settings.database_url)
        database.upgrade()
        with database.read() as session:
            secrets = Secrets(*(session.get_one(Secret, name).value for name in ("keys", "pseudonyms")))
        currency = _settled(database, "currency", settings.currency) or cls.currency
        books = Books.open(settings.database_url)
        return cls(settings, database, books, secrets, Simulations(settings, database), Metrics(), currency=currency)

    def order(self, task: TaskRow) -> TaskRequest:
        """What a task was posted with, read once: it does not change."""
        return self.settled.get(("order", task.id), lambda: order_of(task.spec))

    def close(self) -> None:
        """Give all connections back."""
        self.books.close()
        self.database.close()
