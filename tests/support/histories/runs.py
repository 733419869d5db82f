"""A run: services, people, faults; and the verdict on what came of it."""

import asyncio
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import closing
from pathlib import Path

from . import checker, people, plants
from .services import Service, connect, fork, plagued

SERVICES, BUYERS, OWNERS = 3, 2, 2


def prepare(url):
    """Parties and their keys; and whatever services need, read once for all."""
    import uvicorn.protocols.http.auto  # noqa: F401
    from uvicorn.loops import auto  # noqa: F401

    import flmarket.broker.app
    import flmarket.broker.demo
    import flmarket.cli.parties  # noqa: F401
    from flmarket.broker.core import Broker
    from flmarket.broker.office import parties
    from flmarket.broker.settings import Settings
    from flmarket.learning import load

    load("breast-cancer", None, download=False)
    broker = Broker.open(Settings(database_url=url, run_worker=False))
    made = []
    for role in ["buyer"] * BUYERS + ["owner"] * OWNERS + ["operator"]:
        party = parties.create_party(broker, None, role=role, name=f"first {role}")
        made.append((role, party.id, parties.issue_key(broker, None, party.id, label="first").key))
    broker.close()
    return made


def final(url):
    """The tables, by the driver alone."""
    with closing(connect(url)) as connection:

        def rows(query):
            return [tuple(row) for row in connection.execute(query).fetchall()]

        return checker.Final(
            entries=rows("SELECT seq, kind, ref, debit, credit, amount_micros FROM ledger_entries ORDER BY seq"),
            tasks=rows("SELECT id, buyer_id, name, state FROM broker_tasks"),
            parties=[name for (name,) in rows("SELECT name FROM broker_parties") if not name.startswith("first")],
            keys=[label for (label,) in rows("SELECT label FROM broker_keys") if label != "first"],
            bids=[
                (*one, bool(on))
                for *one, on in rows("SELECT task_id, party_id, privacy_budget, active FROM broker_bids")
            ],
        )  # fmt: skip


def books(url):
    """Everything that is wrong with the books, in words."""
    from flmarket.simulator.watch import verdict

    wrong = []
    with closing(connect(url)) as connection:
        verdict(connection, broke=lambda rule, message: wrong.append(f"{rule}: {message}"))
    return wrong


def run(url, *, seconds, seed, folder, share=0.3, plant=None):
    """Play it all; returns what happened, with `wrong` as the verdict."""
    assert threading.active_count() == 1, "a process with threads cannot be forked safely"
    began, rng, file = time.monotonic(), random.Random(seed), Path(folder) / "history.jsonl"
    parties = prepare(url)
    planted = plants.PLANTS[plant] if plant else lambda: None
    services = [Service(url, f"{folder}/service-{n}.log", planted) for n in range(SERVICES)]
    for service in services:
        service.start()
    for service in services:
        service.ready()
    said, say = os.pipe()
    crowd = fork()
    if crowd == 0:
        code, ports = 1, [service.port for service in services]
        try:
            asyncio.run(people.use(parties, ports, seed=seed, seconds=seconds, file=file, share=share, say=say))
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)
    os.close(say)
    os.read(said, 1)  # everybody has begun
    faults = plagued(services, calm=lambda: bool(select.select([said], [], [], 0)[0]), rng=rng)
    code = os.waitstatus_to_exitcode(os.waitpid(crowd, 0)[1])
    assert code == 0, f"the people's process ended with {code}"
    for service in services:
        service.kill(signal.SIGTERM)
    with file.open(encoding="utf-8") as lines:
        events = [json.loads(line) for line in lines]
    ops, tables, judged = checker.operations(events), final(url), time.process_time()
    wrong = checker.check(events, tables) + books(url)
    wrong += [
        f"verify: {op.value or op.outcome}" for op in ops if op.what == "verify" and not (op.value or {}).get("ok")
    ]
    states = [state for *_, state in tables.tasks]
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        **json.loads(file.with_suffix(".summary.json").read_text()),
        "operations": len(ops),
        "ends": {end: sum(op.outcome == end for op in ops) for end in ("ok", "fail", "unknown")},
        "retried": len({event["op"] for event in events if event["attempt"]}),
        "faults": dict(faults),
        "tasks": {state: states.count(state) for state in sorted(set(states))},
        "entries": len(tables.entries),
        "judged_in": round(time.process_time() - judged, 2),
        "wrong": wrong,
    }
