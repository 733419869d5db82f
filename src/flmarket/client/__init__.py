"""A Python client of the broker's API: `BrokerClient(url, key)`, with `wire`, the values it returns.

Needs httpx and pydantic (`flmarket[client]`), and nothing of the broker.

There is one method for each thing a buyer or an owner does. Every write carries an idempotency key, so a request that
was lost on the way is sent again without fear that it happens twice. Reads and writes are tried again when the broker
does not answer or asks to slow down; a refusal is not.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from flmarket.client import wire
from flmarket.client.wire import (
    Account,
    Audit,
    Bid,
    BidAdvice,
    Bill,
    BudgetPoint,
    Offer,
    Party,
    Privacy,
    Progress,
    Release,
    Round,
    Statement,
    Task,
)  # fmt: skip
from flmarket.errors import FlmarketError

__all__ = [
    "Account", "Audit", "Bid", "BidAdvice", "Bill", "BrokerClient", "BrokerRefused", "BrokerUnreachable", "BudgetPoint",
    "Offer", "Party", "Privacy", "Progress", "Release", "Round", "Statement", "Task",
]  # fmt: skip

T = TypeVar("T")

_AGAIN = (429, 502, 503, 504)
_LONGEST_WAIT = 10.0


class BrokerUnreachable(FlmarketError):
    """The broker did not answer, also not when asked again."""

    exit_code = 11


class BrokerRefused(FlmarketError):
    """The broker said no: `status` is HTTP's, `fields` maps each field that was not accepted to the reason."""

    exit_code = 12

    def __init__(self, status: int, detail: str, fields: Mapping[str, str] | None = None) -> None:
        self.status, self.detail, self.fields = status, detail, dict(fields or {})
        reasons = "; ".join(f"{field}: {reason}" for field, reason in self.fields.items())
        super().__init__(f"{detail} ({reasons})" if reasons else detail)


class BrokerClient:
    """A party at a broker. `key` is her API key; `retries` is how often to ask again."""

    def __init__(self, url: str, key: str, *, timeout: float = 30.0, retries: int = 4) -> None:
        self._retries = retries
        headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
        self._http = httpx.Client(base_url=url.rstrip("/") + "/api/v1", headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # anybody

    def me(self) -> wire.Party:
        """Who I am."""
        return _read(wire.Party, self._get("/me"))

    def account(self) -> wire.Account:
        """My money."""
        return _read(wire.Account, self._get("/me/account"))

    def audit(self, auction: str, *, population: str = "flm22-iid", profiles: int = 100, seed: int = 0) -> wire.Audit:
        """Start a run of the auditor."""
        body = {"auction": auction, "population": population, "profiles": profiles, "seed": seed}
        return _read(wire.Audit, self._write("POST", "/audits", body))

    def get_audit(self, audit_id: str) -> wire.Audit:
        """How far an audit is, or its verdict."""
        return _read(wire.Audit, self._get(f"/audits/{_part(audit_id)}"))

    def dispute(self, award_id: str, reason: str) -> wire.Dispute:
        """Dispute an award that I won or pay for; its price is frozen if it is still in escrow."""
        return _read(wire.Dispute, self._write("POST", "/disputes", {"award_id": award_id, "reason": reason}))

    def disputes(self) -> Iterator[wire.Dispute]:
        """Those about my awards, newest first."""
        return self._pages(wire.Dispute, "/disputes")

    # buyers

    def post_task(self, task: Mapping[str, Any], *, idempotency_key: str | None = None) -> wire.Task:
        """Post a task, which has the sections of a market file (docs/broker.md); its budget goes into escrow."""
        return _read(wire.Task, self._write("POST", "/tasks", task, idempotency_key))

    def tasks(self) -> Iterator[wire.Task]:
        """My tasks, newest first."""
        return self._pages(wire.Task, "/tasks")

    def task(self, task_id: str) -> wire.Task:
        """One task."""
        return _read(wire.Task, self._get(f"/tasks/{_part(task_id)}"))

    def cancel(self, task_id: str) -> wire.Task:
        """Stop a task after the round being played."""
        return _read(wire.Task, self._write("POST", f"/tasks/{_part(task_id)}/cancel"))

    def rounds(self, task_id: str) -> tuple[wire.Round, ...]:
        """All rounds so far."""
        return tuple(self._pages(wire.Round, f"/tasks/{_part(task_id)}/rounds", cursor="start"))

    def receipts(self, task_id: str, index: int) -> tuple[Mapping[str, Any], ...]:
        """The ledger's receipts of a round, as documents that can be checked without the broker: a buyer's by
        `flmarket.ledger.SealedReceipt`, an owner's by `flmarket.ledger.Receipt`."""
        path = f"/tasks/{_part(task_id)}/rounds/{int(index)}/receipts"
        return tuple(one.document for one in self._pages(wire.Receipt, path, cursor="start"))

    def bill(self, task_id: str) -> wire.Bill:
        """What was paid for."""
        return _read(wire.Bill, self._get(f"/tasks/{_part(task_id)}/bill"))

    def model(self, task_id: str, *, format: Literal["zip", "npz", "safetensors"] = "npz") -> bytes:
        """The trained model as a file's bytes: its weights, or a zip with all that it takes to use them."""
        return self._request("GET", f"/tasks/{_part(task_id)}/model", params={"format": format}).content

    def save_model(self, task_id: str, path: str | Path) -> Path:
        """The trained model as a file; its ending chooses the format."""
        target = Path(path)
        formats: dict[str, Literal["zip", "safetensors"]] = {".zip": "zip", ".safetensors": "safetensors"}
        content = self.model(task_id, format=formats.get(target.suffix, "npz"))
        target.write_bytes(content)
        return target

    def explore(
        self, task: Mapping[str, Any], budgets_micros: list[int], *, accuracy: bool = False, second_best: bool = False
    ) -> tuple[wire.BudgetPoint, ...]:
        """What different budgets a round would buy."""
        body = {"task": dict(task), "budgets_micros": budgets_micros, "accuracy": accuracy, "second_best": second_best}
        return _read(wire.Exploration, self._write("POST", "/explore", body)).points

    def follow(self, task_id: str, *, after: int = 0) -> Iterator[wire.Progress]:
        """What happens in a task, as it happens, until it has ended; goes on by itself when the connection breaks."""
        last, failures = after, 0
        while True:
            try:
                for event in self._stream(task_id, last):
                    failures = 0
                    if event.kind == "end":
                        return
                    last = event.id
                    yield event
            except httpx.TransportError as error:
                failures += 1
                if failures > self._retries:
                    raise BrokerUnreachable(f"the broker at {self._http.base_url} does not answer: {error}") from None
                time.sleep(min(0.2 * 2**failures, _LONGEST_WAIT))

    # owners

    def offers(self) -> Iterator[wire.Offer]:
        """Tasks that I can sell to."""
        return self._pages(wire.Offer, "/offers")

    def bid(
        self, task_id: str, valuation: Mapping[str, Any], *, privacy_budget: float, data_size: int | None = None
    ) -> wire.Bid:
        """Bid, or replace my bid: `valuation` is {kind, rate} or {kind: tabulated, grid, values}."""
        body = {"valuation": dict(valuation), "privacy_budget": privacy_budget, "data_size": data_size}
        return _read(wire.Bid, self._write("PUT", f"/offers/{_part(task_id)}/bid", body))

    def withdraw(self, task_id: str) -> wire.Bid:
        """Stay out of later rounds."""
        return _read(wire.Bid, self._write("DELETE", f"/offers/{_part(task_id)}/bid"))

    def statement(self) -> wire.Statement:
        """Everything I sold, earned and gave up."""
        whole = _read(wire.Statement, self._get("/me/statement"))
        while whole.next is not None:
            more = _read(wire.Statement, self._get("/me/statement", {"start": whole.next}))
            whole = replace(more, releases=(*whole.releases, *more.releases))
        return whole

    def statement_csv(self) -> str:
        """The same as a table."""
        return self._request("GET", "/me/statement.csv").text

    def privacy(self) -> wire.Privacy:
        """My total ε, spent and left."""
        return _read(wire.Privacy, self._get("/me/privacy"))

    def set_cap(self, cap_epsilon_total: float, *, unit: str | None = None, delta: float | None = None) -> wire.Privacy:
        """Set the most ε that I give up in total."""
        said = {"cap_epsilon_total": cap_epsilon_total, "unit": unit, "delta": delta}
        given = {name: value for name, value in said.items() if value is not None}
        return _read(wire.Privacy, self._write("PUT", "/me/privacy", given))

    def bid_help(
        self,
        valuation: Mapping[str, Any],
        *,
        privacy_budget: float,
        data_size: int | None = None,
        rounds: int = 1,
        auction: str = "posted",
        population: str = "flm22-iid",
    ) -> wire.BidAdvice:
        """What a bid would earn on a population, in so many rounds."""
        bid = {"valuation": dict(valuation), "privacy_budget": privacy_budget, "data_size": data_size}
        body = {"bid": bid, "rounds": rounds, "auction": auction, "population": population}
        return _read(wire.BidAdvice, self._write("POST", "/bid-help", body))

    # the wire

    def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        return self._request("GET", path, params=params).json()

    def _write(self, method: str, path: str, body: Mapping[str, Any] | None = None, key: str | None = None) -> Any:
        headers = {"Idempotency-Key": key or str(uuid.uuid4())}
        return self._request(method, path, body=body, headers=headers).json()

    def _pages(self, kind: type[T], path: str, *, cursor: str = "before") -> Iterator[T]:
        page = self._get(path)
        yield from (_read(kind, one) for one in page["items"])
        while page["next"] is not None:
            page = self._get(path, {cursor: page["next"]})
            yield from (_read(kind, one) for one in page["items"])

    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        content = None if body is None else dict(body)
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            wait = min(0.2 * 2**attempt, _LONGEST_WAIT)
            try:
                answer = self._http.request(method, path, params=params, json=content, headers=headers)
            except httpx.TransportError as error:
                if last:
                    address = self._http.base_url
                    raise BrokerUnreachable(f"the broker at {address} does not answer: {error}") from None
            else:
                if answer.is_success:
                    return answer
                asked = answer.headers.get("retry-after", "")
                if last or not (asked or answer.status_code in _AGAIN):
                    raise _refusal(answer)
                wait = min(float(asked), _LONGEST_WAIT) if asked.isdigit() else wait
            time.sleep(wait)
        raise AssertionError("unreachable")

    def _stream(self, task_id: str, last: int) -> Iterator[wire.Progress]:
        headers = {"Last-Event-ID": str(last), "Accept": "text/event-stream"}
        path = f"/tasks/{_part(task_id)}/events"
        with self._http.stream("GET", path, headers=headers, timeout=httpx.Timeout(30.0, read=60.0)) as answer:
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(":")
                    fields[name] = value.removeprefix(" ")
                elif fields:
                    if "event" in fields:
                        number, data = int(fields.get("id", last)), json.loads(fields.get("data", "{}"))
                        yield wire.Progress(number, fields["event"], data, data.get("at", ""))
                    fields = {}


def _part(identifier: str) -> str:
    return quote(identifier, safe="")


_readers: dict[type[Any], TypeAdapter[Any]] = {}


def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _readers:  # building one takes longer than a request
        _readers[kind] = TypeAdapter(kind)
    return _readers[kind]


def _read(kind: type[T], document: Any) -> T:
    """One of the API's values from JSON; fields that a newer broker adds are ignored."""
    try:
        value: T = _reader(kind).validate_python(document)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise BrokerRefused(200, f"an answer that this client does not know: {where} of {kind.__name__}") from None
    return value


def _refusal(answer: httpx.Response) -> BrokerRefused:
    try:
        problem = _reader(wire.Problem).validate_python(answer.json())
    except ValueError:
        return BrokerRefused(answer.status_code, f"HTTP status {answer.status_code}")
    return BrokerRefused(answer.status_code, problem.detail, {one.field: one.problem for one in problem.errors})
