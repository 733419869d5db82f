"""The service over HTTP: errors, keys, cookies, limits, streams."""

import asyncio
import json
import logging
import re
import threading

import httpx
import pytest
from fastapi import APIRouter, Depends
from sqlalchemy import select, update
from starlette.routing import Match, Route

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.office import sessions, statements, tasks
from flmarket.broker.settings import Settings
from flmarket.broker.tables import ApiKey, AuditLog, IdempotentCall, SessionRow, SignInLink
from flmarket.broker.web.routes import OneThreadRoute
from flmarket.broker.work.worker import Worker

API = "/api/v1"


def body(order, **changes):
    return order(**changes).model_dump(mode="json")


def test_problems_name_the_field_and_never_echo_what_was_sent(http, small, joined, order):
    buyer = joined(small, "buyer")
    sent = body(order) | {"rounds": True, "surprise": "a-secret-value", "seed": "7"}
    answer = http.post(f"{API}/tasks", headers=buyer.headers, json=sent)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert {one["field"] for one in answer.json()["errors"]} == {"rounds", "surprise", "seed"}
    assert "a-secret-value" not in answer.text
    nested = http.post(f"{API}/tasks", headers=buyer.headers, json=body(order) | {"data": {"owners": 0}})
    assert nested.json()["errors"][0]["field"] == "data.owners"
    for raw in (b"{", b'{"name": NaN}', b"\xff", b"[]", b"1" * 5000):
        headers = buyer.headers | {"Content-Type": "application/json"}
        assert http.post(f"{API}/tasks", headers=headers, content=raw).status_code in (400, 422)
    not_found = http.get(f"{API}/tasks/t_nothere", headers=buyer.headers)
    assert (not_found.status_code, not_found.json()["title"]) == (404, "Not found")
    assert http.get("/nowhere", headers={"Accept": "application/json"}).status_code == 404
    assert http.put(f"{API}/tasks", headers=buyer.headers, json={}).status_code == 405


def test_every_answer_has_strict_headers(http):
    for path in ("/healthz", f"{API}/me", f"{API}/openapi.json", "/nowhere"):
        headers = http.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


def test_writes_can_be_repeated(http, small, joined, order):
    buyer, other = joined(small, "buyer"), joined(small, "buyer")
    headers = buyer.headers | {"Idempotency-Key": "one"}
    first = http.post(f"{API}/tasks", headers=headers, json=body(order))
    again = http.post(f"{API}/tasks", headers=headers, json=body(order))
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert http.get(f"{API}/me/account", headers=buyer.headers).json()["escrow_micros"] == first.json()["escrow_micros"]
    changed = http.post(f"{API}/tasks", headers=headers, json=body(order, rounds=2))
    assert (changed.status_code, changed.json()["title"]) == (422, "Idempotency key reused")
    # the key is the party's own
    theirs = http.post(f"{API}/tasks", headers=other.headers | {"Idempotency-Key": "one"}, json=body(order))
    assert theirs.status_code == 201
    assert theirs.json()["id"] != first.json()["id"]
    # after an error the key is free
    second = buyer.headers | {"Idempotency-Key": "two"}
    for _ in range(2):
        poor = http.post(f"{API}/tasks", headers=second, json=body(order, budget_per_round=10**8))
        assert poor.status_code == 409
    fine = http.post(f"{API}/tasks", headers=second, json=body(order))
    assert fine.status_code == 201
    malformed = buyer.headers | {"Idempotency-Key": "a key with spaces"}
    assert http.post(f"{API}/tasks", headers=malformed, json=body(order)).status_code == 422


def test_a_repetition_while_the_first_is_under_way_is_refused(http, small, joined, order, monkeypatch):
    buyer = joined(small, "buyer")
    entered, leave = threading.Event(), threading.Event()
    original = tasks.require

    def slow(*args):
        entered.set()
        assert leave.wait(30)
        original(*args)

    monkeypatch.setattr(tasks, "require", slow)  # with which posting begins
    headers, answers = buyer.headers | {"Idempotency-Key": "same"}, []
    thread = threading.Thread(
        target=lambda: answers.append(http.post(f"{API}/tasks", headers=headers, json=body(order)).status_code)
    )
    thread.start()
    assert entered.wait(30)
    assert http.post(f"{API}/tasks", headers=headers, json=body(order)).status_code == 409
    leave.set()
    thread.join()
    assert answers == [201]
    assert http.post(f"{API}/tasks", headers=headers, json=body(order)).status_code == 201


def cut_off(broker):
    """As if the service had died before it could keep an answer, long ago."""
    with broker.database.write() as session:
        session.execute(update(IdempotentCall).values(at=0, status=None, body=None))


def test_a_service_that_wakes_up_after_the_repetition_writes_nothing(broker, joined, serve, monkeypatch):
    """It was paused with a request in its hands, for so long that the same request was carried out elsewhere."""
    owner, entered, leave, answers = joined(broker, "owner"), threading.Event(), threading.Event(), []
    original = statements.require

    def paused(*args):
        if not entered.is_set():
            entered.set()
            assert leave.wait(30)
        original(*args)

    def put(cap, key):
        headers = owner.headers | {"Idempotency-Key": key}
        return http.put(f"{API}/me/privacy", headers=headers, json={"cap_epsilon_total": cap})

    monkeypatch.setattr(statements, "require", paused)  # with which setting a cap begins
    with serve(create_app(broker=broker)) as address, httpx.Client(base_url=address, timeout=30) as http:
        thread = threading.Thread(target=lambda: answers.append(put(50.0, "same")))
        thread.start()
        assert entered.wait(30)
        under_way = put(50.0, "same")
        assert (under_way.status_code, under_way.headers["retry-after"]) == (409, "1")
        cut_off(broker)
        assert put(50.0, "same").status_code == 200
        assert put(40.0, "later").status_code == 200
        leave.set()
        thread.join()
        assert (answers[0].status_code, answers[0].headers["retry-after"]) == (409, "1")
        assert http.get(f"{API}/me/privacy", headers=owner.headers).json()["cap_epsilon_total"] == 40.0
        assert put(50.0, "same").headers["idempotent-replayed"] == "true"  # and the key is not free again


def test_parties_and_keys_are_made_once_though_the_answer_was_lost(http, small, joined):
    desk = joined(small, "operator")
    headers = desk.headers | {"Idempotency-Key": "p"}
    made = [http.post(f"{API}/operator/parties", headers=headers, json={"role": "owner", "name": "Ada"}).json()]
    cut_off(small)
    made.append(http.post(f"{API}/operator/parties", headers=headers, json={"role": "owner", "name": "Ada"}).json())
    assert made[0] == made[1]
    cut_off(small)
    other = http.post(f"{API}/operator/parties", headers=headers, json={"role": "owner", "name": "Bea"})
    assert (other.status_code, other.json()["title"]) == (422, "Idempotency key reused")
    headers["Idempotency-Key"], path = "k", f"{API}/operator/parties/{made[0]['id']}/keys"
    assert http.post(path, headers=headers, json={"label": "laptop"}).status_code == 201
    cut_off(small)
    assert http.post(path, headers=headers, json={"label": "laptop"}).status_code == 409
    with small.database.read() as session:
        assert session.scalars(select(ApiKey.label).where(ApiKey.party_id == made[0]["id"])).all() == ["laptop"]


def test_what_is_read_together_is_of_one_moment(broker, joined):
    """A bill's sum and its lines come from two queries."""
    joined(broker, "buyer")
    with broker.database.read() as session:
        before = session.scalars(select(ApiKey.id)).all()
        joined(broker, "buyer")
        assert session.scalars(select(ApiKey.id)).all() == before


def test_a_new_key_is_shown_once_and_stored_nowhere(http, small, joined):
    owner = joined(small, "owner")
    headers = owner.headers | {"Idempotency-Key": "k"}
    made = http.post(f"{API}/me/keys", headers=headers, json={"label": "laptop"}).json()
    assert http.post(f"{API}/me/keys", headers=headers, json={"label": "laptop"}).status_code == 409
    assert http.get(f"{API}/me", headers={"Authorization": f"Bearer {made['key']}"}).json()["id"] == owner.party.id
    assert "key" not in http.get(f"{API}/me/keys", headers=owner.headers).json()["items"][1]
    secret = made["key"].rpartition("_")[2]
    with small.database.read() as session:
        hashes = session.scalars(select(ApiKey.hash)).all()
        assert all(one.startswith("hmac-sha256$") for one in hashes)
        kept = session.scalars(select(IdempotentCall.body)).all()
    assert not any(secret.encode() in (one or b"") for one in kept)
    assert http.delete(f"{API}/me/keys/{made['id']}", headers=owner.headers).status_code == 200
    assert http.get(f"{API}/me", headers={"Authorization": f"Bearer {made['key']}"}).status_code == 401


def test_sessions_need_their_token_for_writes(http, small, joined):
    owner = joined(small, "owner")
    signed_in = http.post(f"{API}/session", json={"key": owner.key})
    assert signed_in.status_code == 201
    cookie = signed_in.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    csrf = signed_in.json()["csrf"]
    assert http.get(f"{API}/me").json()["id"] == owner.party.id  # the client kept the cookie
    cap = {"cap_epsilon_total": 3.0}
    assert http.put(f"{API}/me/privacy", json=cap).status_code == 403
    assert http.put(f"{API}/me/privacy", json=cap, headers={"X-CSRF-Token": "x" + csrf}).status_code == 403
    assert http.put(f"{API}/me/privacy", json=cap, headers={"X-CSRF-Token": csrf}).status_code == 200
    with small.database.read() as session:
        (stored,) = session.scalars(select(SessionRow.id)).all()
    assert stored not in cookie  # only a hash is kept
    assert http.delete(f"{API}/session", headers={"X-CSRF-Token": csrf}).status_code == 204
    assert http.get(f"{API}/me").status_code == 401
    assert http.post(f"{API}/session", json={"key": owner.key + "x"}).status_code == 401


def test_secure_cookies_behind_https(tmp_path, serve, joined):
    settings = Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, secure_cookies=True)
    broker = Broker.open(settings)
    person = joined(broker, "owner")
    with serve(create_app(broker=broker)) as address:
        answer = httpx.post(f"{address}{API}/session", json={"key": person.key})
        assert "Secure" in answer.headers["set-cookie"]
    broker.close()


def test_limits_on_bodies_and_rates(tmp_path, serve, joined):
    settings = Settings(
        database_url=f"sqlite:///{tmp_path}/b.db",
        run_worker=False,
        max_body_bytes=1000,
        requests_per_second=0.001,
        request_burst=5,
        anonymous_requests_per_second=0.001,
        anonymous_burst=3,
        sign_ins_per_minute=2,
    )
    broker = Broker.open(settings)
    one, two = joined(broker, "buyer"), joined(broker, "buyer")
    with serve(create_app(broker=broker)) as address, httpx.Client(base_url=address) as http:
        large = http.post(f"{API}/tasks", headers=one.headers, content=b"x" * 1001)
        assert (large.status_code, large.headers["content-type"]) == (413, "application/problem+json")
        chunked = http.post(f"{API}/tasks", headers=one.headers, content=iter([b"x" * 600] * 3))
        assert chunked.status_code == 413
        codes = [http.get(f"{API}/me", headers=one.headers).status_code for _ in range(7)]
        assert codes == [200] * 5 + [429] * 2
        assert int(http.get(f"{API}/me", headers=one.headers).headers["retry-after"]) >= 1
        assert http.get(f"{API}/me", headers=two.headers).status_code == 200  # others are not held up
        assert [http.get(f"{API}/me").status_code for _ in range(4)] == [401] * 3 + [429]
        assert [http.post(f"{API}/session", json={"key": "x"}).status_code for _ in range(3)][-1] == 429
    broker.close()


def test_a_task_can_be_followed(tmp_path, serve, joined, order):
    settings = Settings(database_url=f"sqlite:///{tmp_path}/b.db", stream_poll_seconds=0.02, max_streams_per_party=1)
    broker = Broker.open(settings)
    buyer = joined(broker, "buyer")
    with (
        serve(create_app(broker=broker)) as address,
        httpx.Client(base_url=address + API, headers=buyer.headers, timeout=60) as http,
    ):
        assert http.get(f"{address}/readyz").json() == {"status": "ready"}
        task_id = http.post("/tasks", json=body(order, round_seconds=0.2)).json()["id"]
        kinds, last = [], 0
        with http.stream("GET", f"/tasks/{task_id}/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert http.get(f"/tasks/{task_id}/events").status_code == 429  # one stream a party here
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    kinds.append(line[7:])
                if line.startswith("id: "):
                    assert int(line[4:]) > last
                    last = int(line[4:])
                if line.startswith("data: "):
                    json.loads(line[6:])
        assert kinds == ["queued", "running", *["open", "bids", "awards", "updates", "settled"] * 3, "finished", "end"]
        rest = http.get(f"/tasks/{task_id}/events", headers={"Last-Event-ID": str(last - 1)}).text
        assert re.findall(r"event: (\w+)", rest) == ["finished", "end"]
        assert http.get(f"/tasks/{task_id}/model").headers["content-disposition"].endswith('.npz"')
    broker.close()


def test_metrics_and_readiness(http, small, joined, order):
    buyer = joined(small, "buyer")
    tasks.post_task(small, buyer.party, order())
    Worker(small).run_until_idle()
    http.get(f"{API}/tasks/t_some-id-or-other", headers=buyer.headers)
    text = http.get("/metrics").text
    assert 'flmarket_tasks{state="finished"} 1.0' in text
    assert 'flmarket_rounds_total{outcome="settled"} 3.0' in text
    assert 'route="/api/v1/tasks/{task_id}",status="404"' in text
    assert "t_some-id" not in text  # routes, never ids
    assert http.get("/healthz").json() == {"status": "ok"}


def test_no_secret_reaches_a_log(http, small, joined, caplog):
    caplog.set_level(logging.DEBUG)
    person = joined(small, "owner")
    token = sessions.make_link(small, person.party.id)
    csrf = http.post(f"{API}/session", json={"key": person.key}).json()["csrf"]
    made = http.post(f"{API}/me/keys", headers=person.headers, json={"label": "x"}).json()["key"]
    http.get(f"{API}/me", headers={"Authorization": f"Bearer {made}x"})
    http.get(f"{API}/audits", params={"token": token})
    cookie = http.cookies["flmarket_session"]
    service = "\n".join(
        record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))
    )
    assert "/api/v1/me/keys 201" in service  # the log is on
    assert person.party.id in service
    with small.database.read() as session:
        lines = " ".join(f"{row.action} {row.target} {row.detail}" for row in session.scalars(select(AuditLog)))
        assert session.scalars(select(SignInLink.id)).one() != token
    for secret in (person.key, made, cookie, token, csrf):
        assert secret[-16:] not in service
        assert secret[-16:] not in lines


def test_the_description_covers_every_route(http):
    described = http.get(f"{API}/openapi.json").json()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], (method, path)
            if path.startswith(API) and not (path.endswith("/session") and method == "post"):
                assert operation["security"], (method, path)
            if method in ("post", "put", "delete") and not path.endswith("/session"):
                names = {parameter["name"] for parameter in operation["parameters"]}
                assert "Idempotency-Key" in names, (method, path)


@pytest.mark.parametrize("header", ["Basic abc", "Bearer", "Bearer x y", "bearer flm_a_b", "Bearer flm_é_x"])
def test_bad_credentials_are_refused(http, header):
    assert http.get(f"{API}/me", headers={"Authorization": header.encode()}).status_code == 401


def test_the_way_by_the_first_part_leads_where_all_routes_in_order_do(tmp_path):
    """The oracle is Starlette's own search, one route after the other."""
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/broker.db", run_worker=False))
    routes = [route for route in app.router.routes if isinstance(route, Route)]
    paths = {re.sub(r"\{\w+(:path)?\}", "x1", route.path) for route in routes}
    paths |= {f"{path}/" for path in paths} | {path.upper() for path in paths}
    paths |= {"/", "//", "///", "/api", "/api/", f"{API}", f"{API}/", f"{API}//me", f"{API}me", f"{API}/{API}/me", "/ä"}
    for path in sorted(paths):
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            scope = {"type": "http", "path": path, "root_path": "", "method": method, "headers": []}
            in_order = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
            near = app.router.middleware_stack.find(scope)
            assert near is None or near[0] is in_order, (method, path)
            if in_order is not None and not in_order.path.startswith("/{"):
                assert near is not None, (method, path)
    app.state.broker.close()


def test_a_request_is_answered_in_one_thread_which_is_not_the_loops(tmp_path, serve):
    """Who asks, the work and a refusal: the same thread; where something waits there, that is an error."""
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/broker.db", run_worker=False))
    seen = []
    router = APIRouter(route_class=OneThreadRoute)

    async def who():
        seen.append(threading.get_ident())

    async def waits():
        await asyncio.sleep(0)

    @router.post("/one", dependencies=[Depends(who)])
    def one(body: dict[str, int]) -> dict[str, int]:
        seen.append(threading.get_ident())
        return body

    @router.get("/loop")
    async def loop() -> None:
        await asyncio.sleep(0)
        seen.append(threading.get_ident())

    @router.get("/wrong", dependencies=[Depends(waits)])
    def wrong() -> None: ...

    app.router.routes[:0] = router.routes
    with serve(app) as address, httpx.Client(base_url=address, timeout=30) as http:
        assert http.post("/one", json={"a": 1}).json() == {"a": 1}
        assert http.get("/loop").status_code == 200
        assert http.get("/wrong").status_code == 500
    assert seen[0] == seen[1] != seen[2]
    app.state.broker.close()
