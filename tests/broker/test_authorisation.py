"""Every route × every party × own and foreign objects. A route without an entry here fails the test."""

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.office import (
    audits,
    disputes,
    evaluations,
    notices,
    offers,
    parties,
    payouts,
    sessions,
    statements,
    tasks,
    users,
)
from flmarket.broker.requests import AuditRequest, DisputeRequest, EvaluationRequest, HookRequest, UserRequest
from flmarket.broker.settings import Settings
from flmarket.broker.work.worker import Worker

API = "/api/v1"
# The objects belong to `buyer` (task, key, audit) and `owner` (a place in the task); the task has ended.
PARTIES = ("buyer", "other buyer", "owner", "other owner", "operator")


def everybody(status):
    return dict.fromkeys(PARTIES, status)


def only(*names, status=200, others=403):
    return {name: status if name in names else others for name in PARTIES}


BUYERS, OWNERS = ("buyer", "other buyer"), ("owner", "other owner")
OWN_TASK = only("buyer", "operator", others=404)
OPERATOR = only("operator")

MATRIX = {
    "DELETE /session": everybody(204),
    "GET /me": everybody(200),
    "GET /me/account": everybody(200),
    "PUT /me/bank": everybody(200),
    "GET /me/keys": everybody(200),
    "POST /me/keys": everybody(201),
    "DELETE /me/keys/{key_id}": only("buyer", others=404),
    "GET /me/sessions": everybody(200),
    "DELETE /me/sessions/{session_id}": only("buyer", status=204, others=404),
    "GET /me/users": everybody(200),
    "POST /me/users": everybody(201),
    "PUT /me/users/{user_id}": only("buyer", others=404),
    "DELETE /me/users/{user_id}": only("buyer", others=404),
    "GET /me/hooks": everybody(200),
    "POST /me/hooks": everybody(201),
    "POST /me/hooks/{hook_id}/test": only("buyer", status=202, others=404),
    "DELETE /me/hooks/{hook_id}": only("buyer", others=404),
    "GET /me/notices": everybody(200),
    "GET /market": everybody(200),
    "GET /catalogue": everybody(200),
    "GET /listings/{task_id}": everybody(200),
    "GET /listings/{task_id}/terms": everybody(200),
    "GET /ledger": everybody(200),
    "GET /ledger/head": everybody(200),
    "POST /tasks": only(*BUYERS, status=201),
    "GET /tasks": only(*BUYERS, "operator"),
    "GET /tasks/{task_id}": OWN_TASK,
    "POST /tasks/{task_id}/cancel": only("buyer", "operator", status=409) | {"other buyer": 404},
    "GET /tasks/{task_id}/rounds": OWN_TASK,
    "GET /tasks/{task_id}/rounds/{index}": OWN_TASK,
    "GET /tasks/{task_id}/rounds/{index}/receipts": OWN_TASK | {"owner": 200},
    "GET /tasks/{task_id}/bill": OWN_TASK,
    "GET /tasks/{task_id}/bill.csv": OWN_TASK,
    "GET /tasks/{task_id}/invoice.pdf": OWN_TASK,
    "GET /tasks/{task_id}/model": only("buyer") | {"other buyer": 404},
    "GET /tasks/{task_id}/events": OWN_TASK,
    "POST /explore": only(*BUYERS),
    "GET /evaluations": only(*BUYERS),
    "POST /evaluations": only(*BUYERS, status=201),
    "DELETE /evaluations/{set_id}": only("buyer", status=204) | {"other buyer": 404},
    "GET /offers": only(*OWNERS, "operator"),
    "GET /offers/{task_id}": only("owner", "operator") | {"other owner": 404},
    "GET /offers/{task_id}/bid": only("owner") | {"other owner": 404},
    "PUT /offers/{task_id}/bid": only("owner", status=409) | {"other owner": 404},
    "DELETE /offers/{task_id}/bid": only("owner") | {"other owner": 404},
    "GET /me/statement": only(*OWNERS),
    "GET /me/statement.csv": only(*OWNERS),
    "GET /me/statement.pdf": only(*OWNERS),
    "POST /disputes": only(*BUYERS, *OWNERS, status=404) | {"owner": 201},
    "GET /disputes": everybody(200),
    "GET /disputes/{dispute_id}": only("buyer", "owner", "operator", others=404),
    "POST /disputes/{dispute_id}/decision": OPERATOR,
    "GET /me/privacy": only(*OWNERS),
    "PUT /me/privacy": only(*OWNERS),
    "POST /bid-help": only(*OWNERS),
    "POST /audits": everybody(202),
    "GET /audits": everybody(200),
    "GET /audits/{audit_id}": only("buyer", "operator", others=404),
    "GET /operator/status": OPERATOR,
    "GET /operator/parties": OPERATOR,
    "POST /operator/parties": only("operator", status=201),
    "POST /operator/parties/{party_id}/close": OPERATOR,
    "POST /operator/parties/{party_id}/reopen": OPERATOR,
    "PUT /operator/parties/{party_id}/node": only("operator", status=409),  # a buyer has no node
    "DELETE /operator/parties/{party_id}/node": OPERATOR,
    "POST /operator/parties/{party_id}/keys": only("operator", status=201),
    "POST /operator/parties/{party_id}/users": only("operator", status=201),
    "POST /operator/parties/{party_id}/hooks": only("operator", status=201),
    "POST /operator/parties/{party_id}/deposits": only("operator", status=201),
    "POST /operator/parties/{party_id}/payouts": only("operator", status=201),
    "GET /operator/payouts": OPERATOR,
    "GET /operator/runs/{task_id}": only("operator", status=404),  # it is no Flower task
    "GET /operator/payouts.csv": OPERATOR,
    "GET /operator/payouts.xml": only("operator", status=409),  # this market has no currency
    "PUT /operator/parties/{party_id}/bank": OPERATOR,
    "POST /operator/payouts/{payout_id}/sent": OPERATOR,
    "GET /operator/audit-log": OPERATOR,
    "POST /operator/ledger/verify": OPERATOR,
}
# Open to strangers on purpose.
PUBLIC = {"POST /api/v1/session", "GET /healthz", "GET /readyz", "GET /metrics"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory, joined, order, cheap_bid, serve):
    settings = Settings(database_url=f"sqlite:///{tmp_path_factory.mktemp('matrix')}/b.db", run_worker=False)
    broker = Broker.open(settings)
    people = {name: joined(broker, name.rpartition(" ")[2], name) for name in PARTIES}
    buyer, owner = people["buyer"].party, people["owner"].party
    task = tasks.post_task(broker, buyer, order(rounds=1, bidders_per_round=12))
    offers.place_bid(broker, owner, task.id, cheap_bid())
    Worker(broker).run_until_idle()
    spare = parties.issue_key(broker, buyer, buyer.id, label="spare")
    audit = audits.start_audit(broker, buyer, AuditRequest(auction="m1", profiles=1))
    sessions.redeem_link(broker, sessions.make_link(broker, buyer.id))
    victim = joined(broker, "buyer", "victim").party.id
    complaint = DisputeRequest(award_id=statements.statement(broker, owner).releases[0].award_id, reason="too little")
    own = {"name": "mine", "table": "a,label\n" + "1,x\n0,y\n" * 6}
    own["schema"] = {"columns": [{"name": "a"}], "classes": ["x", "y"]}
    ids = {
        "payout_id": payouts.pay_out(broker, people["operator"].party, victim, 1).id,
        "session_id": sessions.list_sessions(broker, buyer).items[0].id,
        "user_id": users.add_user(broker, buyer, buyer.id, UserRequest(name="Cleo", email="cleo@example.org")).id,
        "hook_id": notices.create_hook(broker, buyer, buyer.id, HookRequest(address="https://example.org/")).hook.id,
        "task_id": task.id,
        "set_id": evaluations.add_set(broker, buyer, EvaluationRequest.model_validate(own)).id,
        "key_id": spare.id,
        "audit_id": audit.id,
        "dispute_id": disputes.open_dispute(broker, owner, complaint).id,
        "party_id": victim,
        "index": 0,
    }
    post = order(rounds=1).model_dump(mode="json")
    bid = {"valuation": {"kind": "linear", "rate": 1.0}, "privacy_budget": 1.0}
    bodies = {
        "POST /me/keys": {},
        "POST /tasks": post,
        "POST /evaluations": own,
        "POST /explore": {"task": post, "budgets_micros": [10**8], "profiles": 1},
        "PUT /offers/{task_id}/bid": bid,
        "PUT /me/privacy": {"cap_epsilon_total": 50.0},
        "POST /bid-help": {"bid": bid, "profiles": 5},
        "POST /audits": {"auction": "m1", "profiles": 1},
        "POST /disputes": complaint.model_dump(),
        "POST /disputes/{dispute_id}/decision": {"decision": "pay", "note": "as it was agreed"},
        "POST /operator/parties": {"role": "owner", "name": "new"},
        "PUT /operator/parties/{party_id}/node": {"node_id": "5"},
        "POST /operator/parties/{party_id}/keys": {},
        "PUT /operator/parties/{party_id}/bank": {"iban": "DE89370400440532013000"},
        "PUT /me/bank": {"iban": "DE89370400440532013000"},
        "POST /me/users": lambda n: {"name": "Anna", "email": f"anna{n}@example.org"},
        "PUT /me/users/{user_id}": {"rights": "viewer"},
        "POST /operator/parties/{party_id}/users": {"name": "Bert", "email": "bert@example.org"},
        "POST /me/hooks": {"address": "https://example.org/hook"},
        "POST /operator/parties/{party_id}/hooks": {"address": "https://example.org/hook"},
        "POST /operator/parties/{party_id}/deposits": {"amount_micros": 1},
        "POST /operator/parties/{party_id}/payouts": {"amount_micros": 1},
    }
    app = create_app(broker=broker)
    with serve(app) as address, httpx.Client(base_url=address + API, timeout=60) as http:
        yield app, http, people, ids, bodies
    broker.close()


def test_every_route_is_in_the_matrix(scene):
    app = scene[0]
    found = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    assert found - PUBLIC == {entry.replace(" ", f" {API}", 1) for entry in MATRIX}


@pytest.mark.parametrize("entry", list(MATRIX))
def test_who_may_do_what(scene, entry):
    _, http, people, ids, bodies = scene
    method, path = entry.split(" ")
    path = path.format(**ids)
    body = bodies.get(entry)
    body = body(99) if callable(body) else body
    assert http.request(method, path, json=body).status_code == 401
    wrong = {"Authorization": "Bearer flm_aaaa_bbbb"}
    assert http.request(method, path, json=body, headers=wrong).status_code == 401
    # the one who may comes last, because she may change things
    for name in sorted(PARTIES, key=lambda one: MATRIX[entry][one] < 300):
        body = bodies[entry](PARTIES.index(name)) if callable(bodies.get(entry)) else body
        answer = http.request(method, path, json=body, headers=people[name].headers)
        assert answer.status_code == MATRIX[entry][name], (name, answer.text)


@pytest.mark.parametrize("entry", [entry for entry in MATRIX if "{" in entry])
def test_what_does_not_exist_looks_like_what_is_foreign(scene, entry):
    _, http, people, ids, bodies = scene
    method, path = entry.split(" ")
    path = path.format(**{name: 77 if name == "index" else "x_nothing" for name in ids})
    for name in PARTIES:
        expected = 403 if MATRIX[entry][name] == 403 else 404
        answer = http.request(method, path, json=bodies.get(entry), headers=people[name].headers)
        assert answer.status_code == expected, (name, answer.text)
