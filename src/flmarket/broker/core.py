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
from flmarket.broker.keys import KeyCache
from flmarket.broker.metrics import Metrics
from flmarket.broker.recent import Recent
from flmarket.broker.settings import Settings
from flmarket.broker.simulations import Simulations

__all__ = ["Broker", "Party", "Role", "require"]

Role = Literal["buyer", "owner", "operator"]


@dataclass(frozen=True)
class Party:
    """Who is asking."""

    id: str
    role: Role
    name: str


def require(party: Party, *roles: Role) -> None:
    """Forbidden unless the party has one of the roles."""
    if party.role not in roles:
        raise Forbidden(f"this is for {' and '.join(f'{role}s' for role in roles)}; {party.id} is a {party.role}")


@dataclass(frozen=True)
class Broker:
    """Everything a service function needs."""

    settings: Settings
    database: Database
    books: Books
    keys: KeyCache[Party]
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
            KeyCache(settings.key_cache_seconds),
            Simulations(settings.data_dir, settings.data_sets),
            Metrics(),
        )

    def close(self) -> None:
        """Give all connections back."""
        self.books.close()
        self.database.close()
