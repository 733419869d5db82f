"""Leases: which process works, one at a time, and proof that it still may.

A lease is one row, locked while it is taken, so that of two processes one gets it. Taking it gives a token, a number
that only grows; whoever writes under the lease checks in the same transaction that her token is the latest
(`database.fenced`). So a process that was thought dead, and wakes up after another has taken over, writes nothing.
A holder that stops renewing loses the lease when it runs out, or at once if its process is seen to be gone.

`Beside` is a thread beside the worker's, which writes under the worker's lease.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable

import psutil
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from flmarket.broker.core import Broker
from flmarket.broker.database import Database, fenced
from flmarket.broker.stamps import now
from flmarket.broker.tables import Lease
from flmarket.errors import FlmarketError

log = logging.getLogger("flmarket.broker")

_LONGEST = 64


class Replaced(FlmarketError):
    """Another process has the work, or it has ended: this one must stop and write nothing."""


class Held:
    """A process's claim to the lease `name`; `token` is 0 while it has none."""

    def __init__(self, database: Database, name: str, seconds: float) -> None:
        self.database, self.name, self.seconds = database, name, seconds
        self.holder, self.token = new_holder(), 0

    def take(self) -> bool:
        """Take the lease or renew it; False if another process has it."""
        self.token = self._taken()
        return self.token > 0

    def _taken(self) -> int:
        with self.database.read() as session:
            known = session.get(Lease, self.name)
        if known is not None and self._is_anothers(known):  # seen without a lock that would hold its holder up
            return 0
        try:
            with fenced(None), self.database.write() as session:
                lease = session.get(Lease, self.name, with_for_update=True)
                if lease is None:
                    lease = Lease(name=self.name, holder="", token=0, expires_at=0)
                    session.add(lease)
                    session.flush()
                if self._is_anothers(lease):
                    return 0
                if (lease.holder, lease.token) != (self.holder, self.token):
                    lease.holder, lease.token = self.holder, lease.token + 1
                lease.expires_at, token = now() + int(1000 * self.seconds), lease.token
        except IntegrityError:  # another process has made the row this moment
            return 0
        return token

    def renew(self) -> None:
        """More time for a lease that is still this process's. It is never taken anew: what lapsed stays lapsed."""
        mine = Lease.name == self.name, Lease.holder == self.holder, Lease.token == self.token
        with fenced(None), self.database.write() as session:
            session.execute(update(Lease).where(*mine).values(expires_at=now() + int(1000 * self.seconds)))

    def _is_anothers(self, lease: Lease) -> bool:
        return lease.holder != self.holder and lease.expires_at > now() and may_run(lease.holder)

    def check(self, connection: Connection) -> None:
        """Replaced unless the lease is still this process's; it stays so until the transaction ends."""
        found = connection.scalar(select(Lease.token).where(Lease.name == self.name).with_for_update(read=True))
        if not self.token or found != self.token:
            raise Replaced(f"another process has taken over the lease {self.name}")

    def give_back(self) -> None:
        """Let the next process have it at once."""
        with fenced(None), self.database.write() as session:
            lease = session.get(Lease, self.name, with_for_update=True)
            if lease is not None and (lease.holder, lease.token) == (self.holder, self.token):
                lease.holder, lease.expires_at = "", 0
        self.token = 0


def new_holder() -> str:
    """A name for this process that no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"[-_LONGEST:]


def may_run(holder: str) -> bool:
    """Whether the holder's process may still run; only known for processes of this machine."""
    host, _, rest = holder.partition(":")
    if host != socket.gethostname():
        return True
    try:
        return psutil.Process(int(rest.partition(":")[0])).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.NoSuchProcess, ValueError):
        return False
    except psutil.AccessDenied:
        return True


_PATIENCE = 3.0  # seconds for a thread to stop


class Beside:
    """What a thread does beside the worker's, which writes under the worker's lease: `check` says whether this process
    still may. What fails is begun again by whoever looks next."""

    failed = False  # the last time

    def __init__(self, broker: Broker, stop: threading.Event, check: Callable[[Connection], None]) -> None:
        self.broker, self.stop, self.check = broker, stop, check
        self._thread: threading.Thread | None = None

    def ensure_running(self) -> None:
        """Start the thread if there is work for it and it does not run."""
        raise NotImplementedError

    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], object], name: str) -> None:
        """Do the work in a thread."""
        self.failed = False
        self._thread = threading.Thread(target=self._guarded, args=(work,), name=f"flmarket-{name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait a little for the thread."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            with fenced(self.check):
                work()
        except Exception:
            self.failed = True
            if not self.stop.is_set():  # else the database was closed under it, as announced
                log.exception("%s failed; it is tried again", threading.current_thread().name)
