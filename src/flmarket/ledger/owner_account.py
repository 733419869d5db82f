"""An owner's durable privacy account: one SQLite file beside her data that outlives runs, buyers and crashes.

The guard charges it before noise is drawn. `charge` returns only once the release is on disk (write-ahead log, synced
at every commit), so a crash afterwards loses privacy budget, never privacy: what left is always on record. An award is
charged once; asking again, for any buyer, is refused. Every charge reads what the file says inside a transaction that
allows one writer at a time, so several processes may share a file.

A charge is taken back (`take_back`) only by adding to the file that it does not count: its award stays used.

It counts what it is told and guards against mistakes and greedy servers, not against the owner: whoever can write the
file can empty it. The file must not lie on a network file system, where SQLite's locks are not reliable.
"""

import json
import math
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from flmarket.errors import ConfigError, InvalidInput, PrivacyBudgetExhausted
from flmarket.files import keep_private, start_database
from flmarket.ledger.entry import canonical
from flmarket.ledger.journal import ReplayRefused, now_us
from flmarket.ledger.rules import checked_name
from flmarket.privacy import Cap, Event, PrivacyAccount, PureDp, cap_from_dict, event_from_dict, event_to_dict

_Value = TypeVar("_Value")
_APPLICATION = 0x464C4D41  # "FLMA" in the file's header
_VERSION = 1
_WAIT_SECONDS = 30.0
_HEADER = (  # whose file it is, which version, whether it has the youngest table, and how many
    "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master WHERE name = 'returned'), "
    "(SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
)
_RETURNED = "CREATE TABLE IF NOT EXISTS returned (award_id TEXT PRIMARY KEY, time_us INTEGER NOT NULL) STRICT"
_COUNTED = (  # releases after a number that were not taken back
    "SELECT number, award_id, buyer, guarantee, time_us FROM releases "
    "WHERE number > ? AND award_id NOT IN (SELECT award_id FROM returned) ORDER BY number"
)


@dataclass(frozen=True)
class ChargedRelease:
    """One release on record: for which award and buyer, when, and what it gave away."""

    award_id: str
    buyer: str
    guarantee: Event
    time_us: int


class DurableAccount:
    """A `PrivacyAccount` in a file. Safe for several threads and processes; close it when done."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """Use `open`."""
        self._connection, self.path = connection, path
        self._lock = threading.RLock()
        self._account: PrivacyAccount | None = None
        self._cap_number = self._number = self._returned = 0
        self._version: int | None = None  # of the file, by what `_account` was read from

    @classmethod
    def open(cls, path: str | Path, cap: Cap | None = None, *, synchronised: bool = True) -> "DurableAccount":
        """Open an account, or start one with this cap if there is no file yet.

        A cap given for an existing account must be its own: `change_cap` changes it. None takes what the file says. Not
        `synchronised`, a power failure may lose it: for owners who are simulated.
        """
        path = Path(path)
        if cap is None and not path.exists():
            raise ConfigError("privacy account", str(path), "a file that exists, or a cap to start one with")
        if cap is not None:
            PrivacyAccount(cap)  # refuses what is no cap before a file is made
            start_database(path, lambda: account_image(cap), sync=synchronised)
        keep_private(path)
        try:
            connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigError("privacy account", str(path), f"a file that can be opened ({error})") from None
        account = cls(connection, path)
        try:
            account._prepare(cap, synchronised=synchronised)
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise ConfigError("privacy account", str(path), f"an account's SQLite file ({error})") from None
            raise
        return account

    @property
    def cap(self) -> Cap:
        """The most that may ever be given away."""
        return self._current().cap

    @property
    def spent(self) -> float:
        """The total so far in the cap's currency."""
        return self._current().spent

    @property
    def remaining(self) -> float:
        """The cap minus what is spent, never below 0."""
        return self._current().remaining

    def would_exceed(self, guarantee: Event, releases: int = 1) -> bool:
        """Whether so many such releases would go past the cap. Records nothing."""
        return self._current().would_exceed(guarantee, releases)

    def affordable(
        self,
        guarantee: Callable[[float], Event] = PureDp,
        *,
        releases: int = 1,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """The largest ε up to `most` of which so many further releases still fit; 0 if not even `least` does."""
        return self._current().affordable(releases, guarantee=guarantee, least=least, most=most)

    def released(self, award_id: str) -> bool:
        """Whether this award has been charged."""
        with self._lock:
            return bool(self._connection.execute("SELECT 1 FROM releases WHERE award_id = ?", (award_id,)).fetchone())

    def charge(self, award_id: str, buyer: str, guarantee: Event) -> None:
        """Record a release that is about to happen; on any error nothing is recorded and nothing may leave.

        Raises PrivacyBudgetExhausted past the cap, ReplayRefused for an award that has been charged before.
        """
        checked_name("award_id", award_id)
        checked_name("buyer", buyer)
        text = canonical(event_to_dict(guarantee))
        with self._lock:
            with self._writing():
                if self.released(award_id):
                    raise ReplayRefused(f"award {award_id} was released for already: nothing was released again")
                account, version = self._current(), self._version
                if account.would_exceed(guarantee):
                    raise PrivacyBudgetExhausted(
                        f"award {award_id} for {guarantee} would pass the cap {self.cap} "
                        f"({self.remaining:.6g} left): nothing was released"
                    )
                number = self._connection.execute(
                    "INSERT INTO releases (time_us, award_id, buyer, guarantee) VALUES (?, ?, ?, ?) RETURNING number",
                    (now_us(), award_id, buyer, text),
                ).fetchone()[0]
            # Nobody wrote between that look at the file and the commit, and a version tells what others write: so what
            # was read is what the file has, but for this release.
            account.compose(self._read(text, event_from_dict))
            self._number, self._version = number, version

    def take_back(self, award_id: str) -> None:
        """Count a release no more, because nobody can ever see it; nothing else is ever released for its award."""
        with self._writing():
            if self.released(award_id):
                added = "INSERT OR IGNORE INTO returned (award_id, time_us) VALUES (?, ?)"
                self._connection.execute(added, (award_id, now_us()))

    def change_cap(self, cap: Cap) -> None:
        """Set another cap; refused if what was given away already does not fit it."""
        fresh = PrivacyAccount(cap)
        with self._writing():
            for release in self.releases():
                fresh.compose(release.guarantee)
            _add_cap(self._connection, cap)

    def releases(self) -> Iterator[ChargedRelease]:
        """Everything on record that counts, oldest first."""
        with self._lock:
            rows = self._connection.execute(_COUNTED, (0,)).fetchall()
        return (
            ChargedRelease(award, buyer, self._read(text, event_from_dict), at) for _, award, buyer, text, at in rows
        )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> "DurableAccount":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(self, cap: Cap | None, *, synchronised: bool) -> None:
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if synchronised else 'OFF'}")
        if self._connection.execute(_HEADER).fetchone()[:3] != (_APPLICATION, _VERSION, 1):
            with self._writing():
                application, version, _, tables = self._connection.execute(_HEADER).fetchone()
                if not tables and not application and cap is not None:
                    _start(self._connection)
                    _add_cap(self._connection, cap)
                elif (application, version) != (_APPLICATION, _VERSION):
                    raise ConfigError("privacy account", str(self.path), f"an owner's account, version {_VERSION}")
                self._connection.execute(_RETURNED)  # files of before have none
        self._connection.execute("PRAGMA journal_mode = WAL")
        if cap is not None and cap != self.cap:
            raise InvalidInput("cap", cap, f"the account's own cap {self.cap}, or none; change_cap changes it")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that holds the file's only write lock from its start."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
                self._version = None  # SQLite counts what others write
            except BaseException:
                self._account = None
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _current(self) -> PrivacyAccount:
        """The account as the file has it now: the latest cap, and every release."""
        with self._lock:
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            if self._account is not None and version == self._version:
                return self._account
            number, cap = self._connection.execute(
                "SELECT number, cap FROM caps ORDER BY number DESC LIMIT 1"
            ).fetchone()
            (returned,) = self._connection.execute("SELECT count(*) FROM returned").fetchone()
            if self._account is None or (number, returned) != (self._cap_number, self._returned):
                self._account = PrivacyAccount(self._read(cap, cap_from_dict))
                self._cap_number, self._returned, self._number = number, returned, 0
            for number, _, _, text, _ in self._connection.execute(_COUNTED, (self._number,)):
                self._account.compose(self._read(text, event_from_dict))
                self._number = number
            self._version = version
            return self._account

    def _read(self, text: str, meaning: Callable[[Any], _Value]) -> _Value:
        try:
            return meaning(json.loads(text))
        except ValueError as error:
            raise ConfigError("privacy account", str(self.path), f"intact records ({error})") from None


def _start(connection: sqlite3.Connection) -> None:
    """The tables of an account in an empty database."""
    schema = files("flmarket.ledger.migrations") / "sql" / "owner_account.sql"
    for statement in (*statements(schema.read_text(encoding="utf-8")), _RETURNED):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def _add_cap(connection: sqlite3.Connection, cap: Cap) -> None:
    text = canonical(event_to_dict(cap))
    connection.execute("INSERT INTO caps (time_us, cap) VALUES (?, ?)", (now_us(), text))


@lru_cache(maxsize=1)
def _tables() -> bytes:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _start(connection)
        return connection.serialize()


def account_image(cap: Cap) -> bytes:
    """An account's file on which nothing is but its cap; refuses what is no cap."""
    PrivacyAccount(cap)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.deserialize(_tables())
        _add_cap(connection, cap)
        return connection.serialize()


def statements(script: str) -> Iterator[str]:
    """The statements of a script for SQLite, one at a time: `executescript` would commit first."""
    part = ""
    for line in script.splitlines(keepends=True):
        part += line
        if part.strip() and sqlite3.complete_statement(part):
            yield part
            part = ""
