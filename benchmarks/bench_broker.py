"""The broker on loopback: a thousand owners' first bids, and reads of a task, the market's page and an owner's own,
against an empty endpoint.

Server and clients share the machine. The peer is a FastAPI application whose only route returns `{}`, served and asked
in the same way: the difference is what keys, rights, limits and the database cost.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import numpy as np

from benchmarks.measure import Row

OWNERS, READS, CLIENTS = 1000, 2000, 8
TURNS = 5  # ours and the peer's are asked by turns, so that whatever else the machine does falls on both
PEOPLE = 20  # signed in
RATE = 200.0  # reads a second, offered whether or not the last one was answered
Request = tuple[str, str, dict[str, str], bytes | None]


class Taken(NamedTuple):
    """Seconds in all, and of each request."""

    seconds: float
    times: np.ndarray

    @property
    def each(self) -> float:
        """Seconds for one, several being asked at once."""
        return self.seconds / len(self.times)

    @property
    def median(self) -> float:
        """Of one request."""
        return float(np.median(self.times))

    @property
    def p99(self) -> float:
        """What one in a hundred takes longer than."""
        return float(np.quantile(self.times, 0.99))


def serve_broker(url: str, port: int) -> None:
    """The broker as a process."""
    import uvicorn

    from flmarket.broker.app import create_app
    from flmarket.broker.settings import Settings

    settings = Settings(
        database_url=url, requests_per_second=1e6, request_burst=10**6, anonymous_requests_per_second=1e6,
        anonymous_burst=10**6, sign_ins_per_minute=1e4,
    )  # fmt: skip
    uvicorn.run(create_app(settings, alone=True), port=port, ws="none", log_level="error", access_log=False)


def serve_peer(url: str, port: int) -> None:
    """An application with nothing to do."""
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()

    @app.get("/readyz")
    @app.get("/empty")
    @app.put("/empty")
    def empty() -> dict[str, str]:
        return {}

    uvicorn.run(app, port=port, ws="none", log_level="error", access_log=False)


@contextmanager
def served(target: Callable[[str, int], None], url: str) -> Iterator[int]:
    """A server in a process of its own; yields its port once it is ready."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=target, args=(url, port), daemon=True)
    process.start()
    try:
        for _ in range(1200):
            try:
                if (
                    ask(http.client.HTTPConnection("127.0.0.1", port, timeout=5), ("GET", "/readyz", {}, None))[0]
                    == 200
                ):
                    break
            except OSError:
                pass
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.join()


def ask(connection: http.client.HTTPConnection, request: Request) -> tuple[int, bytes]:
    """One request on an open connection."""
    method, path, headers, body = request
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def load(port: int, requests: Sequence[Request], *, rate: float | None = None) -> tuple[float, np.ndarray]:
    """All requests by several clients at once: seconds in all, and each request's seconds.

    With a rate, a request is due when it is due: its time counts from then, also if its client was still waiting.
    """
    shares = [range(k, len(requests), CLIENTS) for k in range(CLIENTS)]
    taken: list[list[float]] = [[] for _ in shares]

    def client(share: range, times: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in share:
            due = time.perf_counter() if rate is None else started + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            status, body = ask(connection, requests[number])
            times.append(time.perf_counter() - due)
            assert status < 300, body

    threads = [threading.Thread(target=client, args=pair) for pair in zip(shares, taken, strict=True)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(len, taken)) == len(requests), "a client failed"
    return time.perf_counter() - started, np.concatenate([np.array(times) for times in taken])


def by_turns(
    port: int, requests: Sequence[Request], peer: int, alike: Request, *, rate: float | None = None
) -> tuple[Taken, Taken]:
    """Ours and as many of the peer's."""
    size = len(requests) // TURNS
    turns = [requests[k : k + size] for k in range(0, len(requests), size)]
    taken = [(load(port, turn, rate=rate), load(peer, [alike] * len(turn), rate=rate)) for turn in turns]
    ours, theirs = (
        Taken(sum(seconds for seconds, _ in side), np.concatenate([times for _, times in side]))
        for side in zip(*taken, strict=True)
    )
    return ours, theirs


def sign_in(port: int, key: str) -> str:
    """The cookie of a new session."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(
        "POST", "/sign-in", urlencode({"key": key}), {"Content-Type": "application/x-www-form-urlencoded"}
    )
    answer = connection.getresponse()
    return (answer.getheader("Set-Cookie") or "").partition(";")[0]


def prepare(url: str) -> tuple[str, str, list[str]]:
    """A task for a thousand registered owners; returns its id, the buyer's key and the owners' keys."""
    from flmarket.broker.core import Broker, Party
    from flmarket.broker.office import parties, tasks
    from flmarket.broker.office.parties import format_key, hash_secret
    from flmarket.broker.requests import TaskRequest
    from flmarket.broker.settings import Settings
    from flmarket.broker.stamps import new_secret, now
    from flmarket.broker.tables import ApiKey, PartyRow
    from flmarket.privacy import PureDp

    broker = Broker.open(Settings(database_url=url, run_worker=False))
    buyer = parties.create_party(broker, None, role="buyer", name="buyer")
    parties.deposit(broker, None, buyer.id, 10**12)
    key = parties.issue_key(broker, None, buyer.id, label="bench").key
    secret = new_secret()
    with broker.database.write() as session:
        names = [f"p_bench{k}" for k in range(OWNERS)]
        session.add_all([PartyRow(id=name, role="owner", name=name, created_at=now()) for name in names])
        session.flush()
        hashes = [hash_secret(broker.secrets.keys, f"k_{k}", secret) for k in range(OWNERS)]
        session.add_all(
            [
                ApiKey(id=f"k_{k}", party_id=f"p_bench{k}", label="", hash=hashed, created_at=now())
                for k, hashed in enumerate(hashes)
            ]
        )
    for name in names:
        broker.books.ledger.register_cap(name, PureDp(100.0))
    order = TaskRequest.model_validate(
        {
            "task": {"name": "a thousand owners", "rounds": 1, "bidders_per_round": OWNERS, "budget_per_round": 1000},
            "data": {"name": "digits", "owners": OWNERS, "partition": "equal"},
            "broker": {"simulated": False, "minimum_bids": OWNERS},
        }
    )
    task = tasks.post_task(broker, Party(buyer.id, "buyer", "buyer"), order)
    broker.close()
    return task.id, key, [format_key(f"k_{k}", secret) for k in range(OWNERS)]


def run() -> Iterator[Row]:
    """Bids, the round they make, and reads."""
    peer_name = "empty FastAPI endpoint"
    body = json.dumps({"valuation": {"kind": "linear", "rate": 1.0}, "privacy_budget": 1.0}).encode()
    typed = {"Content-Type": "application/json"}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder)}/broker.db"
        task, key, keys = prepare(url)
        path, mine = f"/api/v1/tasks/{task}", {"Authorization": f"Bearer {key}"}
        with served(serve_broker, url) as port, served(serve_peer, "") as peer:
            bids = [("PUT", f"/api/v1/offers/{task}/bid", typed | {"Authorization": f"Bearer {k}"}, body) for k in keys]
            ours, theirs = by_turns(port, bids, peer, ("PUT", "/empty", typed, body))
            cleared = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            while json.loads(ask(connection, ("GET", path, mine, None))[1])["rounds_done"] < 1:
                time.sleep(0.02)
            round_seconds = time.perf_counter() - cleared
            yield Row("1,000 owners bid, 8 at a time", "bid", ours.each, peer_name, theirs.each)
            yield Row("the same, slowest 1 % (p99)", "bid", ours.p99, peer_name, theirs.p99)
            yield Row("their round, from bids to settlement", "round", round_seconds, "none", None)
            ours, theirs = by_turns(port, [("GET", path, mine, None)] * READS, peer, ("GET", "/empty", {}, None))
            yield Row("read a task over HTTP, 8 at a time", "read", ours.each, peer_name, theirs.each)
            yield Row("the same, slowest 1 % (p99)", "read", ours.p99, peer_name, theirs.p99)
            signed_in = [{"Cookie": sign_in(port, one)} for one in keys[:PEOPLE]]
            for what, reads in (
                ("task", [("GET", path, mine, None)]),
                ("market's page", [("GET", "/", {}, None)]),
                ("market's page, signed in", [("GET", "/", cookie, None) for cookie in signed_in]),
                ("owner's own page, signed in", [("GET", "/owner", cookie, None) for cookie in signed_in]),
            ):
                load(port, reads * (READS // 20 // len(reads)))  # not counted: the first ones compile statements
                asked = reads * (READS // len(reads))
                ours, theirs = by_turns(port, asked, peer, ("GET", "/empty", {}, None), rate=RATE)
                yield Row(
                    f"read the {what}, {RATE:.0f} a second: median", "read", ours.median, peer_name, theirs.median
                )
                yield Row("the same, slowest 1 % (p99)", "read", ours.p99, peer_name, theirs.p99)
