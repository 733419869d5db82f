"""The broker as one object: settings, database, books and caches. Services take it first and a `Party` second.

Services open their own short transactions instead of taking a session, because the ledger writes through a connection
of its own: on SQLite, a ledger call inside somebody's open write would wait for itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from flmarket.broker.books import Books
from flmarket.broker.database import Database
from flmarket.broker.errors import Forbidden
from flmarket.broker.metrics import Metrics
from flmarket.broker.models import Secret
from flmarket.broker.recent import Recent
from flmarket.broker.settings import Settings
from flmarket.broker.simulations import Simulations

__all__ = ["Broker", "Party", "Role", "Secrets", "require"]

Role = Literal["buyer", "owner", "operator"]


@dataclass(frozen=True)
class Party:
    """Who is asking; `key_id` is the key that she, or the session she is in, came with."""

    id: str
    role: Role
    name: str
    key_id: str | None = field(default=None, compare=False)


def require(party: Party, *roles: Role) -> None:
    """Forbidden unless the party has one of the roles."""
    if party.role not in roles:
        raise Forbidden(f"this is for {' and '.join(f'{role}s' for role in roles)}; {party.id} is a {party.role}")


@dataclass(frozen=True)
class Secrets:
    """What only the service knows: under `keys` it hashes API keys, under `pseudonyms` it names owners to buyers."""

    keys: bytes = field(repr=False)
    pseudonyms: bytes = field(repr=False)


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

    @classmethod
    def open(cls, settings: Settings) -> Broker:
        """Connect, migrate, and check that the books can be read."""
        database = Database(settings.database_url)
        database.upgrade()
        return cls(
            settings,
            database,
            Books.open(settings.database_url),
            _secrets(database),
            Simulations(settings.data_dir, settings.data_sets),
            Metrics(),
        )

    def close(self) -> None:
        """Give all connections back."""
        self.books.close()
        self.database.close()


def _secrets(database: Database) -> Secrets:
    with database.read() as session:
        return Secrets(*(session.get_one(Secret, name).value for name in ("keys", "pseudonyms")))
