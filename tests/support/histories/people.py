"""Buyers, owners and an operator who use the services over HTTP, and write down what they saw.

Everybody does one thing after the other; several act for the same party. Whoever gets no answer asks again with the
same key, at another service perhaps, or gives up. Amounts, names and values are used once, so that the checker can tell
effects apart.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import httpx

from .checker import ENDED
from .services import Proxy

LEAST_TIMEOUT, MOST_TIMEOUT = 1.0, 10.0
MOST_TASKS = 2  # of a buyer, under way
MICROS = 10**6
ANSWERED_A_SECOND = 4  # writes, at least


class Recorder:
    """The history, as it happens."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.writes = 0  # that were answered
        self._numbers = itertools.count()

    def new(self) -> int:
        """Another operation."""
        return next(self._numbers)

    def note(self, kind: str, op: int, attempt: int, **more: Any) -> None:
        """Invoked, or ended."""
        self.events.append({"type": kind, "op": op, "attempt": attempt, "at": time.monotonic(), **more})

    def counts(self) -> dict[str, int]:
        """Attempts by their end."""
        named = {event["op"]: event["what"] for event in self.events if event["type"] == "invoke"}
        ends = collections.Counter(
            f"{named[event['op']]}: {event['type']}" for event in self.events if event["type"] != "invoke"
        )
        return dict(sorted(ends.items()))


class Market:
    """What everybody knows: services, tasks, and whether things break."""

    def __init__(self, people: list[tuple[str, str, str]], addresses: list[str], rng: random.Random):
        self.people, self.addresses, self.rng, self.calm = people, addresses, rng, False
        self.record, self.used = Recorder(), set[float]()
        self.tasks: dict[str, str] = {}  # buyers' by task
        self.open: set[str] = set()
        self.latencies = collections.deque([0.3], maxlen=30)  # of what was answered
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(limits=limits, headers={"Connection": "close"}, trust_env=False)

    @property
    def timeout(self) -> float:
        """A few times what an answer takes: pauses are longer, if the machine is not too busy."""
        return min(MOST_TIMEOUT, max(LEAST_TIMEOUT, 4 * sorted(self.latencies)[len(self.latencies) // 2]))

    def once(self, low: float, high: float, digits: int) -> float:
        """A number that nobody else gets."""
        while (drawn := round(self.rng.uniform(low, high), digits)) in self.used:
            pass
        self.used.add(drawn)
        return drawn

    def of(self, role: str) -> list[tuple[str, str]]:
        """Parties of a role and their keys."""
        return [(party, key) for one, party, key in self.people if one == role]


class Client:
    """Somebody who does one thing after the other."""

    def __init__(self, market: Market, name: str, party: str, key: str) -> None:
        self.market, self.name, self.party, self.key = market, name, party, key
        self.rng = random.Random(f"{market.rng.random()}")

    async def do(
        self, what: str, method: str, path: str, body: Any = None, *, sure: bool = False, **about: Any
    ) -> dict[str, Any] | None:
        """One operation: what was answered, or None. `sure`: not before there is an answer."""
        record, op = self.market.record, self.market.record.new()
        headers = {"Authorization": f"Bearer {self.key}"}
        if method != "GET":
            headers["Idempotency-Key"] = f"{self.name}-{op}".replace(" ", "-")
        patience = 1 if method == "GET" else self.rng.choice((1, 3, 6, 12, 12))
        until = time.monotonic() + 120.0
        for attempt in itertools.count():
            began = time.monotonic()
            record.note("invoke", op, attempt, who=self.name, what=what, about={"party": self.party, **about})
            try:
                address = self.rng.choice(self.market.addresses)
                answer = await self.market.http.request(
                    method, address + path, headers=headers, json=body, timeout=30.0 if sure else self.market.timeout
                )
            except httpx.HTTPError:
                record.note("unknown", op, attempt)
            else:
                self.market.latencies.append(time.monotonic() - began)
                is_json = "json" in answer.headers.get("content-type", "")
                value = answer.json() if is_json else answer.text
                if answer.is_success:
                    record.writes += method != "GET"
                    record.note("ok", op, attempt, value=value)
                    return value
                # under way, as far as the service knows: it says when to ask again
                unknown = answer.status_code >= 500 or "retry-after" in answer.headers
                record.note("unknown" if unknown else "fail", op, attempt, status=answer.status_code, value=value)
                if not unknown:
                    return None
            if (not sure and attempt + 1 >= patience) or time.monotonic() > until:
                return None
            await asyncio.sleep(self.rng.uniform(0.05, 0.6))

    async def live(self) -> None:
        """While things break."""
        while not self.market.calm:
            await self.act()
            await asyncio.sleep(self.rng.uniform(0.0, 0.15))

    async def act(self) -> None:
        """One thing."""
        raise NotImplementedError


class Operator(Client):
    """Books deposits; looks at the log; lets people in."""

    async def act(self) -> None:
        """See `Client`."""
        chance = self.rng.random()
        if chance < 0.6:
            await self.deposit(self.rng.choice(self.market.of("buyer"))[0])
        elif chance < 0.75:
            await self.do("head", "GET", "/ledger/head")
        elif chance < 0.85:
            await self.do("ledger", "GET", "/ledger?limit=200")
        elif chance < 0.93:
            name = f"owner {self.market.record.new()}"
            await self.do("party", "POST", "/operator/parties", {"role": "owner", "name": name}, name=name)
        else:
            label = f"key {self.market.record.new()}"
            owner = self.rng.choice(self.market.of("owner"))[0]
            await self.do("key", "POST", f"/operator/parties/{owner}/keys", {"label": label}, name=label)

    async def deposit(self, buyer: str, *, sure: bool = False) -> None:
        """Money in."""
        amount = int(self.market.once(20 * MICROS, 400 * MICROS, 0))
        path = f"/operator/parties/{buyer}/deposits"
        about = {"party": buyer, "amount": amount}
        await self.do("deposit", "POST", path, {"amount_micros": amount}, sure=sure, **about)


class Buyer(Client):
    """Posts, cancels, looks at money, tasks and bills."""

    async def act(self) -> None:
        """See `Client`."""
        chance, mine = self.rng.random(), [task for task, buyer in self.market.tasks.items() if buyer == self.party]
        under_way = [task for task in mine if task in self.market.open]
        if chance < 0.25 and len(under_way) < MOST_TASKS:
            await self.post()
        elif chance < 0.3 and under_way:
            task = self.rng.choice(under_way)
            self.saw(await self.do("cancel", "POST", f"/tasks/{task}/cancel", task=task))
        elif chance < 0.7:
            await self.money()
        elif mine:
            task = self.rng.choice((under_way or mine)[-4:])
            if self.rng.random() < 0.5:
                self.saw(await self.do("task", "GET", f"/tasks/{task}"))
            else:
                await self.do("bill", "GET", f"/tasks/{task}/bill")

    async def money(self, *, sure: bool = False) -> None:
        """What is there."""
        await self.do("account", "GET", "/me/account", sure=sure)

    def saw(self, task: dict[str, Any] | None) -> None:
        """It may have ended."""
        if task is not None and task["state"] in ENDED:
            self.market.open.discard(task["id"])

    async def post(self) -> None:
        """A small task: some play by themselves, some wait for more owners than there are, until their deadline."""
        rng, name = self.rng, f"task {self.market.record.new()}"
        rounds, waits = rng.randint(1, 3), rng.random() < 0.15
        budget = self.market.once(1, 120, 6)
        order = {
            "seed": rng.randint(0, 2),
            "task": {"name": name, "rounds": rounds, "bidders_per_round": 8, "budget_per_round": budget},
            "data": {"name": "breast-cancer", "owners": 12, "minimum": 5},
            "owners": {"dropout": 0.1, "faulty": 0.1},
            "broker": {
                "round_seconds": rng.choice((0, 0.1, 0.5, 1.5)),
                "deadline_seconds": 10 if waits else 3600,
                "simulated": not waits,
                "minimum_bids": 12 if waits else 1,
            },
        }
        amount = -rounds * round(budget * MICROS)
        made = await self.do("post", "POST", "/tasks", order, name=name, amount=amount)
        if made is not None:
            self.market.tasks[made["id"]] = self.party
            self.market.open.add(made["id"])
            self.saw(made)


class Owner(Client):
    """Bids, withdraws, changes her cap, looks at her money and statement."""

    async def act(self) -> None:
        """See `Client`."""
        chance, task = self.rng.random(), self.rng.choice([*self.market.open, ""])
        if chance < 0.3 and task:
            value = self.market.once(0.02, 0.3, 12)
            bid = {"valuation": {"kind": "linear", "rate": 0.001}, "privacy_budget": value}
            await self.do("bid", "PUT", f"/offers/{task}/bid", bid, task=task, value=value)
        elif chance < 0.4 and task:
            await self.do("withdraw", "DELETE", f"/offers/{task}/bid", task=task)
        elif chance < 0.5 and task:
            bid = await self.do("read bid", "GET", f"/offers/{task}/bid", task=task)
            if bid is not None:
                bid["value"] = bid["privacy_budget"]
        elif chance < 0.6:
            value = self.market.once(3, 60, 12)
            await self.do("cap", "PUT", "/me/privacy", {"cap_epsilon_total": value}, value=value)
        elif chance < 0.7:
            said = await self.do("read cap", "GET", "/me/privacy")
            if said is not None:
                said["value"] = said["cap_epsilon_total"]
        else:
            await self.money()

    async def money(self, *, sure: bool = False) -> None:
        """What is there."""
        if sure or self.rng.random() < 0.7:
            await self.do("account", "GET", "/me/account", sure=sure)
        if sure or self.rng.random() < 0.4:
            await self.do("statement", "GET", "/me/statement", sure=sure)


async def use(
    people: list[tuple[str, str, str]],
    ports: list[int],
    *,
    seed: int,
    seconds: float,
    file: Path,
    share: float,
    say: int,
) -> None:
    """Everybody acts for so long; then all tasks are let end, everybody looks once more, and the history is written.

    `say` is told when it begins, and when things should break no more: not before enough was answered, if the machine
    is slow.
    """
    rng = random.Random(seed)
    proxies = [Proxy(port, rng, 0.0) for port in ports]
    market = Market(people, [await proxy.open() for proxy in proxies], rng)
    async with market.http:
        operators = [Operator(market, f"operator {n}", *market.of("operator")[0]) for n in range(2)]
        buyers = [Buyer(market, "buyer", *who) for who in market.of("buyer") for _ in range(2)]
        owners = [Owner(market, "owner", *who) for who in market.of("owner") for _ in range(2)]
        for n, one in enumerate((*buyers, *owners)):
            one.name = f"{one.name} {n}"
        await asyncio.gather(*(operators[0].deposit(party, sure=True) for party, _ in market.of("buyer")))
        for proxy in proxies:
            proxy.share = share
        os.write(say, b"b")
        lives = [asyncio.create_task(client.live()) for client in (*operators, *buyers, *owners)]
        began = time.monotonic()
        while (passed := time.monotonic() - began) < max(120.0, 3 * seconds):
            await asyncio.sleep(0.1)
            if passed > seconds and market.record.writes >= ANSWERED_A_SECOND * seconds:
                break
        market.calm = True
        for proxy in proxies:
            proxy.share = 0.0
        os.write(say, b"c")
        await asyncio.gather(*lives)
        await _end(market, operators[0], [*buyers, *owners])
        for proxy in proxies:
            await proxy.close()
    lost = sum((proxy.done for proxy in proxies), collections.Counter())
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(event) + "\n" for event in market.record.events)
    summary = {"attempts": market.record.counts(), "lost": dict(sorted(lost.items()))}
    file.with_suffix(".summary.json").write_text(json.dumps(summary))


async def _end(market: Market, operator: Operator, others: list[Buyer | Owner]) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        states, before = [], ""
        while before is not None:
            page = await operator.do("tasks", "GET", f"/tasks?limit=500{before}", sure=True)
            assert page is not None, "the services do not answer"
            states += [task["state"] for task in page["items"]]
            before = f"&before={page['next']}" if page["next"] else None
        if all(state in ENDED for state in states):
            break
        await asyncio.sleep(0.3)
    by_party = {one.party: one for one in others}.values()
    for one in by_party:
        await one.money(sure=True)
    for task, buyer in market.tasks.items():
        client = next(one for one in by_party if one.party == buyer)
        await client.do("task", "GET", f"/tasks/{task}", sure=True)
        await client.do("bill", "GET", f"/tasks/{task}/bill", sure=True)
    for one in by_party:
        await one.money(sure=True)
    await operator.do("head", "GET", "/ledger/head", sure=True)
    await operator.do("verify", "POST", "/operator/ledger/verify", sure=True)
