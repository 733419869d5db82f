"""What an owner's machine remembers: her privacy account, and a journal of offers made, releases begun and released.

The journal is a SQLite file beside the account, because a deployed ClientApp lives for one message only. An offer
stands once it is made: asked again, she repeats it. A release is claimed before it is charged and before any record is
touched; the claim is unique, so of two requests at the same time one is refused. One vector is kept for it, the first,
because handing out the same bytes again gives nothing more away: that is how a buyer whose server crashed gets what the
owner had already paid for with privacy. Only the latest `KEPT` vectors of a task stay; what is dropped becomes an empty
one, which is not the same as none: a release that never got a vector can still be answered, one that was dropped
cannot. Of each task's ledger the largest head is kept that a proof of escrow has shown.

What she has said in a masked sum (`flmarket.market.masking`) is there before it leaves, on disk and not only with the
system: a mask that was used, and a set of survivors that was signed, must not be forgotten. Each state takes the place
of the one that it follows from, so of two answers at the same time one is not given.

The file is safe against the end of the process at any moment. A power failure may cost its last rows, which costs no
privacy: without an offer an order is refused, and a charged award is known to the account, which is synchronised.

What would break it: restoring the file from a backup, which forgets claims. The account is a file of its own and
would then have to be restored to a *later* state, or not at all.

Opening and closing a database costs several synchronisations of the disk, more than a whole release; where one process
serves many messages the files stay open, those of as many records as the process may have files for (`room`, half of
its limit, which is raised as far as the system lets it). A file that was moved or replaced is opened again.
`MemoryRecord` is for owners who live and end with a process: simulated ones.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput
from flmarket.files import keep_private, start_database, start_databases, whole_file
from flmarket.ledger import DurableAccount, Head, ReplayRefused
from flmarket.ledger.owner_account import account_image
from flmarket.market.kind import Announcement, Bid, Order, release_id
from flmarket.privacy import Cap, Event, PrivacyAccount, PureDp, ZCdp

KEPT = 8
FEWEST_OPEN, MOST_OPEN = 64, 10_000  # records that stay open
_FILES = 6  # that two databases with a write-ahead log have open
_VERSION = 5
# Version 1 had no heads and no deadlines, version 3 no masks, version 4 no chains. Offers of versions 1 and 2 were for
# announcements with other terms: they are made again.
_SCHEMA = """
drop table if exists offers;
create table offers (task text, round integer, body text not null, primary key (task, round));
create table if not exists releases (id text primary key, task text not null, terms text not null, vector blob);
alter table releases add column until real not null default 0;
update releases set vector = x'' where vector is null;
create table heads (task text primary key, size integer not null, head text not null);
"""
_MASKS = """
create table if not exists masks (id text primary key, task text not null, state blob not null, masked blob)
"""
_CHAINS = "create table if not exists chains (task text primary key, links blob not null)"


@dataclass(frozen=True)
class Offer:
    """What she offered, for which announcement, and the head of the buyer's ledger that she goes by, if she saw one."""

    call: Announcement
    bid: Bid
    seen: Head | None

    def to_json(self) -> str:
        """For a file."""
        seen = None if self.seen is None else self.seen.to_dict()
        return f'{{"call": {_text(self.call)}, "bid": {json.dumps(self.bid.to_dict())}, "seen": {json.dumps(seen)}}}'

    @classmethod
    def from_json(cls, body: str) -> Offer:
        """What `to_json` wrote."""
        offer = json.loads(body)
        seen = None if offer["seen"] is None else Head.from_dict(offer["seen"])
        return cls(Announcement(**offer["call"]), Bid.from_dict(offer["bid"]), seen)


@lru_cache(maxsize=32)
def _text(call: Announcement) -> str:
    return json.dumps(asdict(call))


@dataclass(frozen=True)
class Mask:
    """Her state in a masked sum (`flmarket.market.masking.Masker.state`) and her masked input as it left, if it did."""

    state: bytes
    masked: bytes = b""


class MemoryAccount:
    """`DurableAccount` without a file: a `PrivacyAccount` that counts each release once."""

    def __init__(self, books: PrivacyAccount) -> None:
        self.books = books
        self._charged: dict[str, Event | None] = {}

    @property
    def cap(self) -> Cap:
        """See `DurableAccount`."""
        return self.books.cap

    def would_exceed(self, guarantee: Event, releases: int = 1) -> bool:
        """See `DurableAccount`."""
        return self.books.would_exceed(guarantee, releases)

    def affordable(
        self,
        guarantee: Callable[[float], Event] = PureDp,
        *,
        releases: int = 1,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """See `DurableAccount`."""
        return self.books.affordable(releases, guarantee=guarantee, least=least, most=most)

    def charge(self, award_id: str, buyer: str, guarantee: Event) -> None:
        """See `DurableAccount`."""
        if award_id in self._charged:
            raise ReplayRefused(f"{award_id} was charged before")
        self.books.compose(guarantee)
        self._charged[award_id] = guarantee

    def released(self, award_id: str) -> bool:
        """See `DurableAccount`."""
        return award_id in self._charged

    def take_back(self, award_id: str) -> None:
        """See `DurableAccount`."""
        lost = self._charged.get(award_id)
        if isinstance(lost, ZCdp):
            self.books.take_back(lost)
            self._charged[award_id] = None


class MemoryJournal:
    """`OwnerJournal` in dictionaries, for who ends with the process; of vectors only the latest stays."""

    def __init__(self) -> None:
        self.offers: dict[tuple[str, int], Offer] = {}
        self.own: dict[tuple[str, int], FloatArray] = {}
        self.masks: dict[str, Mask] = {}
        self.links: dict[str, bytes] = {}
        self._claims: set[str] = set()
        self._latest: tuple[Order, FloatArray] | None = None

    def offer(self, task: str, round_index: int) -> Offer | None:
        """See `OwnerJournal`."""
        return self.offers.get((task, round_index))

    def make_offer(self, offer: Offer) -> Offer:
        """See `OwnerJournal`."""
        return self.offers.setdefault((offer.call.task, offer.call.round_index), offer)

    def claim(self, order: Order, seconds: float) -> bool:
        """See `OwnerJournal`."""
        new = not self.claimed(release_id(order))
        self._claims.add(release_id(order))
        return new

    def claimed(self, release: str) -> bool:
        """See `OwnerJournal`."""
        return release in self._claims

    def given_up(self, order: Order) -> bool:
        """See `OwnerJournal`; what begins in this process ends in it."""
        return False

    def keep(self, order: Order, vector: FloatArray) -> FloatArray:
        """See `OwnerJournal`."""
        self._latest = order, vector
        return vector

    def released(self, order: Order) -> FloatArray | None:
        """See `OwnerJournal`."""
        return self._latest[1] if self._latest is not None and self._latest[0] == order else None

    def head(self, task: str) -> Head | None:
        """See `OwnerJournal`; she takes the market's word."""
        return None

    def saw(self, task: str, head: Head) -> None:
        """See `OwnerJournal`; she takes the market's word."""

    def mask(self, release: str) -> Mask | None:
        """See `OwnerJournal`."""
        return self.masks.get(release)

    def keep_mask(self, order: Order, before: Mask | None, after: Mask, chains: bytes | None = None) -> bool:
        """See `OwnerJournal`."""
        stands = self.mask(release_id(order)) == before
        if stands:
            self.masks[release_id(order)] = after
            if chains is not None:
                self.links[order.task] = chains
        return stands

    def chains(self, task: str) -> bytes:
        """See `OwnerJournal`."""
        return self.links.get(task, b"")

    def own_model(self, task: str, round_index: int) -> FloatArray | None:
        """See `OwnerJournal`."""
        return self.own.get((task, round_index))

    def keep_own_model(self, task: str, round_index: int, parameters: FloatArray) -> None:
        """See `OwnerJournal`."""
        self.own[task, round_index] = parameters
        self.own.pop((task, round_index - 2), None)


class MemoryRecord:
    """An account and a journal that end with the process."""

    def __init__(self, account: PrivacyAccount) -> None:
        self.account, self.journal = MemoryAccount(account), MemoryJournal()


class OwnerJournal:
    """One owner's offers and releases, in one file. Every method is one transaction; safe for several threads."""

    def __init__(self, path: Path, *, synchronised: bool = True) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        start_database(path, _image, sync=synchronised)
        keep_private(path)
        self._connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
        self._connection.execute(f"pragma synchronous = {'normal' if synchronised else 'off'}")
        if self._connection.execute("pragma user_version").fetchone()[0] < _VERSION:
            self._connection.execute("pragma journal_mode = wal")
            _migrate(self._connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def offer(self, task: str, round_index: int) -> Offer | None:
        """The offer made for a round, if any."""
        query = "select body from offers where task = ? and round = ?"
        with self._lock, self._connection as connection:
            row = connection.execute(query, (task, round_index)).fetchone()
        return None if row is None else Offer.from_json(str(row[0]))

    def make_offer(self, offer: Offer) -> Offer:
        """Record an offer and return the one that stands: the first."""
        task, round_index, body = offer.call.task, offer.call.round_index, offer.to_json()
        with self._lock, self._connection as connection:
            made = connection.execute(
                "insert or ignore into offers values (?, ?, ?)", (task, round_index, body)
            ).rowcount
        if made == 1:
            return offer
        standing = self.offer(task, round_index)
        assert standing is not None
        return standing

    def claim(self, order: Order, seconds: float) -> bool:
        """Begin a release that takes so long at most; False if it was begun before, by whomever."""
        with self._lock, self._connection as connection:
            made = connection.execute(
                "insert or ignore into releases values (?, ?, ?, null, ?)",
                (release_id(order), order.task, _terms(order), time.time() + seconds),
            ).rowcount
        return made == 1

    def claimed(self, release: str) -> bool:
        """Whether a release was begun."""
        with self._lock, self._connection as connection:
            return connection.execute("select 1 from releases where id = ?", (release,)).fetchone() is not None

    def given_up(self, order: Order) -> bool:
        """Whether a release was begun under these terms, and its time has passed without a vector."""
        query = "select 1 from releases where id = ? and terms = ? and vector is null and until < ?"
        with self._lock, self._connection as connection:
            return connection.execute(query, (release_id(order), _terms(order), time.time())).fetchone() is not None

    def keep(self, order: Order, vector: FloatArray) -> FloatArray:
        """Keep what is about to leave, and return what may: the first that was kept. Vectors of earlier rounds go."""
        release, kept = release_id(order), vector.tobytes()
        with self._lock, self._connection as connection:
            first = connection.execute(
                "update releases set vector = ? where id = ? and vector is null", (kept, release)
            ).rowcount
            if not first:
                (kept,) = connection.execute("select vector from releases where id = ?", (release,)).fetchone()
            connection.execute(
                "update releases set vector = x'' where length(vector) > 0 and task = "
                "(select task from releases where id = ?1) and rowid not in (select rowid from releases where task = "
                "(select task from releases where id = ?1) and length(vector) > 0 order by rowid desc limit ?2)",
                (release, KEPT),
            )
        return np.frombuffer(kept, dtype=np.float64)

    def released(self, order: Order) -> FloatArray | None:
        """The vector that left under exactly these terms, if it is still kept."""
        query = "select vector from releases where id = ? and terms = ?"
        with self._lock, self._connection as connection:
            row = connection.execute(query, (release_id(order), _terms(order))).fetchone()
        return None if row is None or not row[0] else np.frombuffer(row[0], dtype=np.float64)

    def head(self, task: str) -> Head | None:
        """The largest head of a task's ledger that a proof has shown."""
        with self._lock, self._connection as connection:
            row = connection.execute("select head from heads where task = ?", (task,)).fetchone()
        return None if row is None else Head.from_dict(json.loads(row[0]))

    def saw(self, task: str, head: Head) -> None:
        """Remember a head that a proof has shown."""
        with self._lock, self._connection as connection:
            connection.execute(
                "insert into heads values (?, ?, ?) on conflict (task) do update set size = excluded.size, "
                "head = excluded.head where excluded.size > heads.size",
                (task, head.size, json.dumps(head.to_dict())),
            )

    def mask(self, release: str) -> Mask | None:
        """What she has said in a masked sum so far."""
        with self._lock, self._connection as connection:
            row = connection.execute("select state, masked from masks where id = ?", (release,)).fetchone()
        return None if row is None else Mask(row[0], row[1] or b"")

    def keep_mask(self, order: Order, before: Mask | None, after: Mask, chains: bytes | None = None) -> bool:
        """Put what she is about to say in the place of what she said before; False if that is not there any more.

        With it goes what she shares with other owners from then on, if that changes. Synchronised with the disk. Of
        masked inputs the latest `KEPT` of a task stay.
        """
        release, values = release_id(order), (after.state, after.masked or None)
        with self._lock:
            self._connection.execute("pragma synchronous = full")
            try:
                with self._connection as connection:
                    if before is None:
                        made = "insert or ignore into masks (state, masked, id, task) values (?, ?, ?, ?)"
                        changed = connection.execute(made, (*values, release, order.task)).rowcount
                    else:
                        made = "update masks set state = ?, masked = ? where id = ? and state = ?"
                        changed = connection.execute(made, (*values, release, before.state)).rowcount
                    if changed and chains is not None:
                        connection.execute("insert or replace into chains values (?, ?)", (order.task, chains))
                    connection.execute(
                        "update masks set masked = null where masked is not null and task = ?1 and rowid not in "
                        "(select rowid from masks where task = ?1 and masked is not null order by rowid desc limit ?2)",
                        (order.task, KEPT),
                    )
            finally:
                self._connection.execute("pragma synchronous = normal")
        return changed == 1

    def chains(self, task: str) -> bytes:
        """What she shares with owners whom she has met in a task's sums."""
        with self._lock, self._connection as connection:
            row = connection.execute("select links from chains where task = ?", (task,)).fetchone()
        return b"" if row is None else bytes(row[0])

    def own_model(self, task: str, round_index: int) -> FloatArray | None:
        """Her own model as training left it in a round, if it is still kept."""
        path = self._own(task, round_index)
        return np.asarray(np.load(path, allow_pickle=False)) if path.exists() else None

    def keep_own_model(self, task: str, round_index: int, parameters: FloatArray) -> None:
        """Keep it, and the one of the round before, so that a round can be repeated. It never leaves."""
        path = self._own(task, round_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, private=True) as handle:
            np.save(handle, parameters, allow_pickle=False)
        self._own(task, round_index - 2).unlink(missing_ok=True)

    def _own(self, task: str, round_index: int) -> Path:
        stem = self.path.name.removesuffix(".journal.sqlite")
        return self.path.with_name(f"{stem}.own") / f"{quote(task, safe='')}-{round_index}.npy"


def _migrate(connection: sqlite3.Connection) -> None:
    """Bring a file to this version, whole or not at all, whoever else tries at the same time."""
    connection.isolation_level = None
    try:
        connection.execute("begin immediate")
        (version,) = connection.execute("pragma user_version").fetchone()
        steps = [*_SCHEMA.strip().split(";\n")] if version < 2 else ["delete from offers"] * (version < 3)
        for statement in (*steps, _MASKS, _CHAINS):
            connection.execute(statement)
        connection.execute(f"pragma user_version = {_VERSION}")
        connection.execute("commit")
    except BaseException:
        if connection.in_transaction:
            connection.execute("rollback")
        raise
    finally:
        connection.isolation_level = "DEFERRED"


@lru_cache(maxsize=1)
def _image() -> bytes:
    """A journal's file on which nothing is."""
    with closing(sqlite3.connect(":memory:")) as connection:
        _migrate(connection)
        return connection.serialize()


def _terms(order: Order) -> str:
    return json.dumps(order.to_dict(), sort_keys=True)


@dataclass(frozen=True)
class DiskRecord:
    """Both files, and which ones they are."""

    account: DurableAccount
    journal: OwnerJournal
    files: tuple[int, int]

    def close(self) -> None:
        """Close both."""
        self.account.close()
        self.journal.close()


# what a guard takes, kept on a disk or ending with the process
Journal = MemoryJournal | OwnerJournal
OwnerRecord = MemoryRecord | DiskRecord

_lock = threading.Lock()
_open: OrderedDict[Path, DiskRecord] = OrderedDict()


def open_record(path: Path, cap: Cap, *, synchronised: bool = True) -> DiskRecord:
    """The record at `path`.account.sqlite and `path`.journal.sqlite, started with this cap if there is none.

    Not `synchronised`, it survives the end of the process and no power failure: enough where noise is seeded.
    """
    with _lock:
        record = _open.pop(path, None)
        if record is not None and record.files != _files(path):
            record.close()
            record = None
        if record is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            images: dict[Path, Callable[[], bytes]] = {_journal(path): _image}
            images[_account(path)] = lambda: account_image(cap)
            start_databases(images, sync=synchronised)  # both names for one wait for the disk
            journal = OwnerJournal(_journal(path), synchronised=synchronised)
            account = DurableAccount.open(_account(path), cap, synchronised=synchronised)
            record = DiskRecord(account, journal, _files(path))
        _open[path] = record
        while len(_open) > room():
            _open.popitem(last=False)[1].close()
    if record.account.cap != cap:
        raise InvalidInput("cap", cap, f"the account's own cap {record.account.cap}")
    return record


@lru_cache(maxsize=1)
def room() -> int:
    """How many records stay open: half of the files that the process may open are theirs."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_OPEN
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _FILES * MOST_OPEN if most == resource.RLIM_INFINITY else min(2 * _FILES * MOST_OPEN, most)
    if files != resource.RLIM_INFINITY and files < wanted:
        with suppress(OSError, ValueError):  # it may be refused, and then stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if files == resource.RLIM_INFINITY else min(MOST_OPEN, max(FEWEST_OPEN, files // (2 * _FILES)))


def close_records() -> None:
    """Close all files, as the end of the process does."""
    with _lock:
        while _open:
            _open.popitem()[1].close()


@lru_cache(maxsize=MOST_OPEN)
def _account(path: Path) -> Path:
    return path.with_suffix(".account.sqlite")


@lru_cache(maxsize=MOST_OPEN)
def _journal(path: Path) -> Path:
    return path.with_suffix(".journal.sqlite")


def _files(path: Path) -> tuple[int, int]:
    """Which files these are now; −1 for one that is not there."""
    return _file(_account(path)), _file(_journal(path))


def _file(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1
