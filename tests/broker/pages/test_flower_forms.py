"""What the pages offer once the service knows a SuperLink: owners' nodes, and tasks on owners' own machines."""

import re
from contextlib import ExitStack, closing

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.office import parties, sessions, tasks
from flmarket.broker.settings import Settings


@pytest.fixture
def market(tmp_path, joined, serve):
    """market(superlink) gives (broker, enter); enter(role) registers somebody and signs her in."""
    with ExitStack() as stack:

        def make(superlink):
            settings = Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, superlink=superlink)
            broker = stack.enter_context(closing(Broker.open(settings)))
            url = stack.enter_context(serve(create_app(broker=broker)))

            def enter(role):
                person = joined(broker, role).party
                client = stack.enter_context(httpx.Client(base_url=url, timeout=30))
                assert client.get(sessions.link_path(sessions.make_link(broker, person.id))).status_code == 303
                return client, person

            return broker, enter

        yield make


def send(client, page, path, **fields):
    """Post a form with the token, and the key against doubles, that the page holds."""
    text = client.get(page).text
    for name in ("csrf_token", "idempotency_key"):
        found = re.search(rf'name="{name}" value="([^"]+)"', text)
        fields |= {name: found[1]} if found else {}
    return client.post(path, data=fields)


def test_the_operator_binds_a_node(market, joined):
    broker, enter = market("broker")
    client, _ = enter("operator")
    owner = joined(broker, "owner", "Anna").party
    path, form = f"/operator/parties/{owner.id}", {"owner": owner.id, "node_id": "77"}
    assert "Let SuperNode 77 sell for Anna?" in send(client, path, "/operator/nodes", **form).text
    assert parties.my_view(broker, owner).node_id is None
    assert send(client, path, "/operator/nodes", **form, confirmed="yes").status_code == 303
    assert parties.my_view(broker, owner).node_id == "77"
    assert "node 77" in client.get("/operator").text
    other = joined(broker, "owner", "Berta").party
    for node_id in ("77", "-1", "", "1" * 21, "١"):
        answer = send(
            client, f"/operator/parties/{other.id}", "/operator/nodes", owner=other.id, node_id=node_id, confirmed="yes"
        )
        assert answer.status_code == 422
        assert 'id="node_id-error"' in answer.text
    assert parties.my_view(broker, other).node_id is None


def test_without_a_superlink_nothing_of_it_is_offered(market):
    _, enter = market("")
    assert "/operator/nodes" not in enter("operator")[0].get("/operator").text
    assert 'name="engine"' not in enter("buyer")[0].get("/tasks/new").text


def test_a_buyer_chooses_owners_own_machines(market):
    broker, enter = market("broker")
    client, buyer = enter("buyer")
    fields = {
        "name": "At home", "data": "breast-cancer", "owners": "10", "auction": "posted", "aggregation": "opt-aggr",
        "perturbation": "recommended", "budget": "10", "rounds": "2", "bidders": "5", "learning_rate": "0.2",
        "clip": "0.5", "round_seconds": "0", "deadline_days": "7", "seed": "0", "engine": "flower",
    }  # fmt: skip
    assert send(client, "/tasks/new", "/tasks/new", **fields).status_code == 303
    (task,) = tasks.list_tasks(broker, buyer).items
    assert task.request["broker"]["engine"] == "flower"
    assert "on owners’ own machines" in client.get(f"/tasks/{task.id}").text
    answer = send(client, "/tasks/new", "/tasks/new", **(fields | {"engine": "magic"}))
    assert answer.status_code == 422
    assert 'id="engine-error"' in answer.text


def test_owners_machines_are_the_normal_way_and_a_simulation_is_to_try(market):
    _, enter = market("broker")
    client, _ = enter("buyer")
    text = client.get("/tasks/new").text
    offered = re.search(r'<select id="engine".*?</select>', text, re.S)[0]
    assert re.findall(r'<option value="(\w+)"( selected)?>([^<]+)', offered) == [
        ("flower", " selected", "on owners’ own machines"),
        ("simulation", "", "simulated at the broker, to try it out"),
    ]
