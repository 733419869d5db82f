"""Attacks on the service by strangers, buyers and holders of stolen keys, over HTTP or on its real tables.

Each one worked before: a crowd of explorers that stops the health check, sessions that outlive their key, a key that is
accepted for ever because it was being checked while it was revoked, streams to somebody whom the operator has closed,
work that strangers make the service do before they are counted, and names by which two buyers recognise an owner.
"""

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import argon2
import httpx
import numpy as np
import pytest
from brokers import serving
from sqlalchemy import select, text, update

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.errors import Unauthenticated
from flmarket.broker.office import explore, ledger, offers, parties, sessions, statements, tasks
from flmarket.broker.requests import BidRequest, Valuation
from flmarket.broker.settings import Settings
from flmarket.broker.tables import ApiKey, RoundRow, Slot
from flmarket.broker.work.rounds import SqlStore, award_round, open_round
from flmarket.broker.work.worker import Worker
from flmarket.ledger import Award, AwardState, LedgerCorrupt, Receipt, Release, Resolution
from flmarket.market import Checkpoint, RoundRecord, award_id
from flmarket.privacy import PureDp

API = "/api/v1"


def broker_at(folder, **changes):
    return contextlib.closing(
        Broker.open(Settings(database_url=f"sqlite:///{folder}/b.db", **{"run_worker": False} | changes))
    )


# A crowd of heavy requests


FORM = (
    "data=breast-cancer&owners=12&auction=posted&aggregation=opt-aggr&perturbation=recommended&clip=0.5&rounds=1"
    "&learning_rate=0.2&bidders=5&budget=20&round_seconds=0&deadline_days=1&seed=0"
)
HEAVY = {
    "explore": ("buyer", "POST", f"{API}/explore"),
    "bid help": ("owner", "POST", f"{API}/bid-help"),
    "explorer page": ("buyer", "GET", f"/tasks/new/explore?{FORM}"),
    "helper page": ("owner", "GET", "/owner/bid/help?epsilon=1&kind=linear&rate=1"),
    "form": ("buyer", "GET", "/tasks/new"),
    "bid form": ("owner", "GET", "/owner/bid"),
}


@pytest.mark.parametrize("kind", HEAVY)
def test_a_crowd_of_heavy_requests_by_one_party_stops_nobody(small, joined, order, monkeypatch, kind):
    """Forty-five at once, none of which ends by itself: the service answers everybody else all the same."""
    role, method, path = HEAVY[kind]
    leave, real = threading.Event(), explore.require
    attacker, others = joined(small, role), [joined(small, "buyer"), joined(small, "owner")]

    def stuck(party, *roles):
        assert party.id != attacker.party.id or leave.wait(60)
        real(party, *roles)

    monkeypatch.setattr(explore, "require", stuck)  # with which both begin
    bodies = {
        "explore": {"task": order(rounds=1).model_dump(mode="json"), "budgets_micros": [10**8], "profiles": 1},
        "bid help": {"bid": {"valuation": {"rate": 1.0}, "privacy_budget": 0.5}, "profiles": 5},
    }
    body = bodies.get(kind)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(create_app(broker=small)))
        many = httpx.Client(base_url=address, timeout=120, limits=httpx.Limits(max_connections=60))
        http, crowd = stack.enter_context(many), stack.enter_context(ThreadPoolExecutor(45))
        key = attacker.headers if path.startswith(API) else {}
        if not key:
            assert http.post(f"{API}/session", json={"key": attacker.key}).status_code == 201

        def ask(_):
            return http.request(method, path, json=body, headers=key)

        asked = [crowd.submit(ask, i) for i in range(45)]
        try:
            until = time.monotonic() + 15
            while sum(one.done() for one in asked) < 43 and time.monotonic() < until:
                time.sleep(0.05)
            with httpx.Client(base_url=address, timeout=20) as client:
                assert client.get("/healthz").status_code == 200
                assert client.get("/readyz").status_code == 200
                assert client.get(f"{API}/me", headers=attacker.headers).status_code == 200
                mine = client.post(f"{API}/explore", json=bodies["explore"], headers=others[0].headers)
                assert mine.status_code == 200
                helped = client.post(f"{API}/bid-help", json=bodies["bid help"], headers=others[1].headers)
                assert helped.status_code == 200
        finally:
            leave.set()
        answers = [one.result() for one in asked]
    refused = [one for one in answers if one.status_code == 429]
    if "form" in kind:  # the page itself comes at once, without what takes long
        assert not refused
    else:
        assert len(refused) >= 40
        assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
        assert any(one.status_code == 200 for one in answers)


def _cookies(address, key):
    with httpx.Client(base_url=address, timeout=30) as client:
        assert client.post(f"{API}/session", json={"key": key}).status_code == 201
        return dict(client.cookies)


# Keys and sessions that should be dead


def test_a_stolen_session_dies_with_its_key_and_mints_no_others(http, small, joined):
    person = joined(small, "owner")
    stolen = parties.issue_key(small, None, person.party.id, label="stolen")
    signed_in = http.post(f"{API}/session", json={"key": stolen.key}).json()
    csrf = {"X-CSRF-Token": signed_in["csrf"]}
    assert http.post(f"{API}/me/keys", json={"label": "fine"}, headers=csrf).status_code == 201
    parties.revoke_key(small, person.party, stolen.id)
    assert http.post(f"{API}/me/keys", json={"label": "mine for ever"}, headers=csrf).status_code == 401
    assert http.get(f"{API}/me").status_code == 401
    assert http.get("/owner").status_code == 303  # to the sign-in form
    assert "mine for ever" not in [one.label for one in parties.list_keys(small, person.party).items]


def test_a_key_revoked_while_it_mints_mints_nothing(small, joined):
    """The request was let in; the key was revoked before it came to writing."""
    person = joined(small, "owner")
    caller = parties.party_of_key(small, person.key)
    (key,) = parties.list_keys(small, person.party).items
    parties.revoke_key(small, person.party, key.id)
    with pytest.raises(Unauthenticated):
        parties.issue_key(small, caller, caller.id, label="late")
    with pytest.raises(Unauthenticated):
        sessions.start_session(small, caller, "sign-in.key")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_key_that_is_checked_while_it_is_revoked_is_dead_afterwards(small, joined, legacy):
    person, alive = joined(small, "owner"), []
    for attempt in range(40):
        key = parties.issue_key(small, None, person.party.id, label=f"{attempt}")
        if legacy:
            _make_legacy(small, key)
        begin = threading.Barrier(3)

        def use(key=key, begin=begin):
            begin.wait()
            for _ in range(4):
                with contextlib.suppress(Unauthenticated):
                    parties.party_of_key(small, key.key)

        users = [threading.Thread(target=use) for _ in range(2)]
        for user in users:
            user.start()
        begin.wait()
        time.sleep(0.002 * (attempt % 4))
        parties.revoke_key(small, person.party, key.id)
        for user in users:
            user.join()
        with contextlib.suppress(Unauthenticated):
            parties.party_of_key(small, key.key)
            alive.append(attempt)
    assert alive == []


def _make_legacy(broker, key):
    """The hash that the first version stored."""
    hasher = argon2.PasswordHasher(time_cost=1, memory_cost=8 * 1024, parallelism=1)
    with broker.database.write() as session:
        hashed = hasher.hash(key.key.removeprefix("flm_").partition("_")[2])
        session.execute(update(ApiKey).where(ApiKey.id == key.id).values(hash=hashed))


def test_keys_of_the_first_version_work_and_are_hashed_anew(small, joined):
    person = joined(small, "owner")
    (listed,) = parties.list_keys(small, person.party).items
    key = type("Key", (), {"id": listed.id, "key": person.key})
    _make_legacy(small, key)
    forged = person.key[:-1] + ("a" if person.key[-1] != "a" else "b")
    with pytest.raises(Unauthenticated):
        parties.party_of_key(small, forged)
    assert parties.party_of_key(small, person.key) == person.party
    with small.database.read() as session:
        assert "argon2" not in session.get_one(ApiKey, listed.id).hash
    assert parties.party_of_key(small, person.key) == person.party


@pytest.mark.parametrize("end", ["closed", "revoked", "signed out"])
def test_a_stream_ends_with_the_right_to_see_it(tmp_path, joined, order, end):
    with broker_at(tmp_path, stream_poll_seconds=0.02, run_worker=True) as broker:
        buyer, desk = joined(broker, "buyer"), joined(broker, "operator")
        (key,) = parties.list_keys(broker, buyer.party).items
        task = tasks.post_task(broker, buyer.party, order(rounds=500, round_seconds=0.3, budget_per_round=1))
        with serving(create_app(broker=broker)) as address:
            cookies = _cookies(address, buyer.key)
            page = end == "signed out"
            path = f"/tasks/{task.id}/stream" if page else f"{API}/tasks/{task.id}/events"
            headers = {} if page else buyer.headers
            client = httpx.Client(base_url=address, timeout=30, cookies=cookies)
            with client, client.stream("GET", path, headers=headers) as stream:
                lines = stream.iter_lines()
                next(line for line in lines if line.startswith("event: "))
                if end == "closed":
                    parties.set_active(broker, desk.party, buyer.party.id, active=False)
                elif end == "revoked":
                    parties.revoke_key(broker, buyer.party, key.id)
                else:
                    sessions.sign_out(broker, buyer.party, cookies["flmarket_session"])
                known = max(one.id for one in tasks.events(broker, desk.party, task.id, limit=1000))
                for line in lines:  # else: it goes on for as long as the task
                    told = int(line[4:]) if line.startswith("id: ") else 0
                    assert told <= known + 3, "the stream went on"


# What strangers can make the service do


def test_strangers_cause_no_slow_hashing(tmp_path, joined, monkeypatch):
    """Guesses are counted before milliseconds are spent on them, also for keys with a hash of the first version."""
    slow = []
    verify = argon2.PasswordHasher.verify
    monkeypatch.setattr(argon2.PasswordHasher, "verify", lambda *args: slow.append(1) or verify(*args))
    with broker_at(tmp_path, anonymous_burst=5, anonymous_requests_per_second=0.001) as broker:
        person = joined(broker, "owner")
        (listed,) = parties.list_keys(broker, person.party).items
        with serving(create_app(broker=broker)) as address, httpx.Client(base_url=address, timeout=30) as client:

            def guess(key):
                return client.get(f"{API}/me", headers={"Authorization": f"Bearer {key}"}).status_code

            unknown = [guess(f"flm_{'a' * 16}_{'b' * 43}") for _ in range(30)]
            assert len(slow) == 0
            assert set(unknown) == {401, 429}
            _make_legacy(broker, type("Key", (), {"id": listed.id, "key": person.key}))
            known = [guess(person.key[:-2] + f"{i:02d}") for i in range(30)]
            assert len(slow) <= 5
            assert set(known) <= {401, 429}


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_header_does_not_make_somebody_on_this_machine_a_stranger_each_time(tmp_path):
    """The service as it is started: whoever sits on loopback claims another address with every guess."""
    port = _free_port()
    command = [sys.executable, "-c", "from flmarket.cli import main; main()", "serve", "--port", str(port)]
    command += ["--db", f"sqlite:///{tmp_path}/b.db"]
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path) as service:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
                _wait_for(client)
                codes = [
                    client.post(
                        f"{API}/session", json={"key": "flm_a_b"}, headers={"X-Forwarded-For": f"198.51.100.{i}"}
                    ).status_code
                    for i in range(45)
                ]
        finally:
            service.terminate()
    assert codes.count(429) >= 10
    assert stat.S_IMODE(os.stat(tmp_path / "b.db").st_mode) == 0o600


def _wait_for(client):
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if client.get("/healthz").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("the service did not start")


def test_a_trusted_proxy_tells_its_clients_apart_and_only_it(tmp_path):
    def codes(proxies, forwarded):
        with (
            broker_at(tmp_path, sign_ins_per_minute=3, trusted_proxies=proxies) as broker,
            serving(create_app(broker=broker)) as address,
            httpx.Client(base_url=address, timeout=30) as client,
        ):
            return [
                client.post(f"{API}/session", json={"key": "x"}, headers={"X-Forwarded-For": said}).status_code
                for said in forwarded
            ]

    several = [f"203.0.113.{i}" for i in range(6)]
    assert 429 not in codes(("127.0.0.0/8",), several)
    # what a client wrote herself stands to the left of what the proxy saw, and is not believed
    assert codes(("127.0.0.1",), [f"{one}, 203.0.113.9" for one in several]).count(429) == 3
    assert codes(("192.0.2.1",), several).count(429) == 3


# Whom a buyer bought from


def _served_to(address, person, task_ids):
    """Every byte that the API and the pages serve to a buyer about her tasks and her account."""
    found = {}
    with httpx.Client(base_url=address, timeout=60, cookies=_cookies(address, person.key)) as client:
        paths = ["/me", "/me/account", "/me/keys", "/market", "/catalogue", "/ledger?limit=500", "/tasks", "/audits"]
        pages = ["/", "/tasks", "/tasks/new", "/ledger", "/audit", "/market/tasks", "/ledger/entries?q=posted"]
        for one in task_ids:
            paths += [f"/tasks/{one}", f"/tasks/{one}/rounds", f"/tasks/{one}/bill", f"/tasks/{one}/events"]
            pages += [f"/tasks/{one}", f"/tasks/{one}/live", f"/tasks/{one}/stream"]
            rounds = client.get(f"{API}/tasks/{one}/rounds").json()["items"]
            for index in range(len(rounds)):
                paths += [f"/tasks/{one}/rounds/{index}", f"/tasks/{one}/rounds/{index}/receipts"]
                pages += [f"/tasks/{one}/rounds/{index + 1}", f"/tasks/{one}/rounds/{index + 1}/receipts.json"]
        for path in [f"{API}{one}" for one in paths] + pages:
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text[:300])
            found[path] = answer.text
    return found


# which of two headlines a buyer's own accuracy gives her page: a word is common to two by chance, figures are compared
_VERDICT = re.compile(
    r'class="verdict \w+"|\b(?:Better|No better) than guessing\b|A larger budget, more rounds or less noise may help\.'
)


def _tokens(documents):
    """All words and figures: names, ids, hashes, amounts; not times, nor numbers so short that they coincide."""
    everything = re.sub(r'"path":\s*\[[^]]*\]', " ", "\n".join(documents.values()))  # nodes of a tree over all entries
    everything = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z?|\d\d:\d\d:\d\d|\b1[67]\d{11,14}\b", " ", everything)
    everything = _VERDICT.sub(" ", everything)
    return {token for token in re.findall(r"[\w.-]{3,}", everything) if not re.fullmatch(r"\d{3}", token)}


def _sell_in_simulation(broker, buyer, owner, order, bid):
    whole = {"auction": "all-in-capped"}  # posted sells at the ε of a public list
    task = tasks.post_task(broker, buyer, order(rounds=2, bidders_per_round=12, seed=bid["seed"], mechanism=whole))
    valuation = {"kind": "linear", "rate": bid["rate"]}
    request = BidRequest(valuation=Valuation(**valuation), privacy_budget=bid["epsilon"])
    offers.place_bid(broker, owner, task.id, request)
    worker = Worker(broker)
    worker.run_until_idle()
    worker.stop()
    return task.id


def _sell_on_flower(broker, buyer, owner, order, bid):
    """What a run on owners' machines leaves on the books: places there are owners' numbers, which are for life."""
    number = parties.my_view(broker, owner).owner_number
    task = tasks.post_task(broker, buyer, order(engine="flower", rounds=2))
    award = Award(award_id(task.id, 0, number), 0, task.id, owner.id, bid["epsilon"], bid["price"])
    books = broker.books.ledger
    books.hold_many([award])
    with broker.database.write() as session:
        session.add(Slot(task_id=task.id, slot=number, records=bid["records"], party_id=owner.id))
        open_round(session, task.id, 0)
        session.get_one(RoundRow, (task.id, 0)).budget_micros = 10**8
        award_round(session, task.id, 0, {number: award})
    release = Release(award.id, "privunit-g", PureDp(bid["epsilon"]))
    reason = f"refused: {owner.id} has spent 2.718281 of 31.41592"
    books.resolve_many([Resolution(award.id, AwardState.VOIDED, reason, release)])
    one = np.ones(1)
    record = RoundRecord(
        index=0,
        bidders=np.array([number]),
        data_size=one * bid["records"],
        loss=one * bid["epsilon"],
        price_micros=np.array([bid["price"]]),
        weights=one * 0,
        state=(AwardState.VOIDED,),
        reason=(reason,),
        budget_micros=10**8,
        error_bound=np.inf,
    )
    kind = broker.simulations.build(task.id, order(engine="flower", rounds=2)).kind(buyer=task.id)
    SqlStore(broker, task.id, kind, {number: owner.id}).save_round(record, Checkpoint(1, one, [], {}))
    return task.id


@pytest.mark.parametrize("sell", [_sell_in_simulation, _sell_on_flower])
def test_two_buyers_cannot_tell_that_they_bought_from_the_same_owner(tmp_path, joined, order, sell):
    """Everything served to two buyers of one owner has nothing in common that a buyer of another owner does not see."""
    bids = [
        {"rate": 0.011, "epsilon": 0.913, "seed": 5, "price": 7_123_457, "records": 431},
        {"rate": 0.017, "epsilon": 0.717, "seed": 6, "price": 6_543_219, "records": 617},
        {"rate": 0.013, "epsilon": 0.819, "seed": 7, "price": 5_432_187, "records": 593},
    ]
    with broker_at(tmp_path, superlink="broker", stream_seconds=0.5) as broker:
        owner, other = joined(broker, "owner", "Lakeside Hospital"), joined(broker, "owner", "Hilltop Clinic")
        buyers = [joined(broker, "buyer", f"Buyer {name}") for name in ("Anders", "Brandt", "Clausen")]
        desk = joined(broker, "operator")
        parties.bind_node(broker, desk.party, owner.party.id, node_id="7654321", number=417)
        parties.bind_node(broker, desk.party, other.party.id, node_id="1234567", number=905)
        statements.set_cap(broker, owner.party, 31.41592)
        sold = [
            sell(broker, buyer.party, who.party, order, bid)
            for buyer, who, bid in zip(buyers, (owner, owner, other), bids, strict=True)
        ]
        with serving(create_app(broker=broker)) as address:
            served = [_served_to(address, buyer, [task]) for buyer, task in zip(buyers, sold, strict=True)]
        first, second, control = map(_tokens, served)
        everything = "\n".join("\n".join(one.values()) for one in served)
        for secret in (owner.party.id, "Lakeside", "7654321", "31.41592", "2.718281", "/417", "owner-417", "Owner 417"):
            assert secret not in everything, secret
        assert "spent_pico" not in everything
        linking = (first & second) - control
        assert linking == set()
        # and the books are those that were played
        spent = statements.privacy(broker, owner.party).spent_epsilon_total
        assert spent > 0.7


def test_a_buyer_cannot_find_owners_by_searching_the_ledger(small, joined, order, cheap_bid):
    """A search that matches what is not shown tells an id letter by letter."""
    buyer, owner = joined(small, "buyer"), joined(small, "owner")
    task = tasks.post_task(small, buyer.party, order(rounds=1, bidders_per_round=12))
    offers.place_bid(small, owner.party, task.id, cheap_bid())
    worker = Worker(small)
    worker.run_until_idle()
    worker.stop()
    assert statements.statement(small, owner.party).deliveries == 1
    assert ledger.entries(small, owner.party, search=owner.party.id).items
    for length in (4, 8, len(owner.party.id)):
        assert not ledger.entries(small, buyer.party, search=owner.party.id[:length]).items
    assert ledger.entries(small, buyer.party, search=task.id).items


def test_receipts_hold_without_telling_the_buyer_who_sold(small, joined, order, cheap_bid):
    """The buyer's and the owner's receipts show the same entries; hers opens them, and neither can be forged."""
    from flmarket.ledger import SealedReceipt

    buyer, owner = joined(small, "buyer"), joined(small, "owner")
    task = tasks.post_task(small, buyer.party, order(rounds=1, bidders_per_round=12))
    offers.place_bid(small, owner.party, task.id, cheap_bid())
    worker = Worker(small)
    worker.run_until_idle()
    worker.stop()
    (own,) = tasks.receipts(small, owner.party, task.id, 0).items
    opened = Receipt.from_dict(json.loads(json.dumps(own.document)))
    award, release = opened.check(small.books.ledger.head())
    assert award.owner == owner.party.id
    assert release is not None
    sealed = [
        SealedReceipt.from_dict(json.loads(json.dumps(one.document)))
        for one in tasks.receipts(small, buyer.party, task.id, 0).items
    ]
    for one in sealed:
        one.check(small.books.ledger.head())
    hashes = [entry["entry"]["hash"] for entry in own.document["proofs"]]
    (same,) = [one for one in sealed if [entry.hash for entry in one.entries] == hashes]
    assert (same.epsilon, same.price_micros, same.state) == (award.epsilon, award.price_micros, "posted")
    forged = same.to_dict()
    forged["entries"][0]["hash"] = "0" * 64
    with pytest.raises(LedgerCorrupt):
        SealedReceipt.from_dict(forged).check()
    with serving(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=30) as client:

        def answer(document):
            return client.post("/ledger/receipt", data={"receipt": json.dumps(document)}).text

        assert "This receipt is genuine" in answer(same.to_dict())
        assert "This receipt is genuine" in answer(own.document)
        assert "does not hold" in answer(same.to_dict() | {"price_micros": 1})  # the proofs are right, the price is not
        assert "does not hold" in answer(same.to_dict() | {"owner": "owner-aaaaaaaa"})
        assert "does not hold" in answer(forged)


# Files, and markets of the version before


def test_the_database_is_for_its_user_alone(tmp_path):
    path = tmp_path / "b.db"
    path.touch(mode=0o644)  # as the version before made it
    path.chmod(0o644)
    before = os.umask(0o022)
    try:
        with broker_at(tmp_path) as broker:
            parties.create_party(broker, None, role="owner", name="Anna")
            modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.glob("b.db*")}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes


def test_secrets_differ_and_are_shown_nowhere(tmp_path, joined):
    with broker_at(tmp_path) as broker:
        with broker.database.read() as session:
            stored = session.execute(text("SELECT name, value FROM broker_secrets")).all()
            hashes = session.scalars(select(ApiKey.hash)).all()
        assert {len(value) for _, value in stored} == {32}
        assert len({bytes(value) for _, value in stored}) == len(stored) == 2
        assert all(
            bytes(value).hex() not in repr(broker) and repr(bytes(value)) not in repr(broker) for _, value in stored
        )
        assert not any("argon2" in one for one in hashes)
