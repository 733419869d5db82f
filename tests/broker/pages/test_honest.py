"""What pages say is so: tasks that nobody plays, models that know nothing, sums, messages, and what was typed."""

import csv
import io
import json
import re

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.office import ledger, offers, operator, statements, tasks
from flmarket.broker.office.runs import ENDED, SUBMITTED, WORKING
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import FlowerRun, TaskRow
from flmarket.broker.web.pages.rendering import said
from flmarket.errors import ConfigError
from flmarket.report.formatting import adding_up
from flmarket.trust import task_words


def token(client, page="/"):
    return re.search(r'name="csrf_token" value="([^"]+)"', client.get(page).text)[1]


@pytest.fixture
def enter(small, serve):
    """enter(person) gives a signed-in client of a server over `small`."""
    clients = []
    with serve(create_app(broker=small)) as address:

        def sign_in(person):
            client = httpx.Client(base_url=address, timeout=30)
            clients.append(client)
            if person is not None:
                assert client.post("/sign-in", data={"key": person.key}).status_code == 303
            return client

        yield sign_in
        for client in clients:
            client.close()


# a row that a worker and a run would leave, and what people must read then
RUNS = {
    "none": (None, "waiting", "waits for its run"),
    "asked": ({"attempt": 1, "state": SUBMITTED}, "starting", "waits for its run"),
    "refused": ({"attempt": 3, "state": ENDED, "error": "UNAVAILABLE"}, "unreachable", "waits for the SuperLink"),
    "again": ({"attempt": 4, "state": SUBMITTED, "error": "UNAVAILABLE"}, "unreachable", "waits for the SuperLink"),
    "gone": ({"attempt": 1, "state": WORKING, "run_id": "7", "expires_at": 1}, "silent", "its run is silent"),
    "failed": ({"attempt": 2, "state": ENDED, "run_id": "7", "error": "boom"}, "broken", "its run broke down"),
    "alone": ({"attempt": 1, "state": WORKING, "run_id": "7", "nodes": []}, "lonely", "waits for owners’ nodes"),
    "working": ({"attempt": 1, "state": WORKING, "run_id": "7", "nodes": [0]}, "working", ""),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_task_that_nobody_plays_does_not_look_alive(tmp_path, joined, order, serve, case):
    values, state, label = RUNS[case]
    settings = Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, superlink="somewhere")
    broker = Broker.open(settings)
    buyer, desk = joined(broker, "buyer"), joined(broker, "operator")
    task = tasks.post_task(broker, buyer.party, order(engine="flower")).id
    with broker.database.write() as session:
        session.get_one(TaskRow, task).state = "running"
        if values is not None:
            session.add(FlowerRun(task_id=task, **({"expires_at": now() + 60_000} | values)))
    run = tasks.get_task(broker, buyer.party, task).run
    assert (run.state, run.at_work) == (state, state == "working")
    assert run.detail == "", "what Flower said is for the operator"
    assert operator.status(broker, desk.party).runs[0].detail == (values or {}).get("error", "")
    with serve(create_app(broker=broker)) as address, httpx.Client(base_url=address, timeout=30) as client:
        front = client.get("/").text
        assert client.post("/sign-in", data={"key": buyer.key}).status_code == 303
        pages = {path: client.get(path).text for path in (f"/tasks/{task}", f"/tasks/{task}/live", "/tasks")}
        client.cookies.clear()
        assert client.post("/sign-in", data={"key": desk.key}).status_code == 303
        health = client.get("/operator/health").text
    broker.close()
    live = pages[f"/tasks/{task}/live"]
    if case == "working":
        assert 'data-live="Live"' in live
        assert "on time" in health
        return
    for text in (*pages.values(), front):
        assert label.lower() in text.lower()
    assert 'data-live="Live"' not in live
    assert "owners decide what to ask" not in live
    assert "on time" not in health
    assert "0 of 1" in health
    assert ("UNAVAILABLE" in health) == ((values or {}).get("error") == "UNAVAILABLE")
    assert "UNAVAILABLE" not in "".join(pages.values())


@pytest.mark.parametrize(("accuracy", "tone"), [(0.60, "warn"), (0.66, "warn"), (0.72, "good"), (None, "idle")])
def test_a_model_no_better_than_guessing_is_no_success(small, joined, order, enter, accuracy, tone):
    """114 test examples: luck alone reaches 1.645·√(0.63·0.37/114) = 0.074 more than the 0.63 of the larger class."""
    buyer = joined(small, "buyer")
    task = tasks.post_task(small, buyer.party, order()).id
    with small.database.write() as session:
        row = session.get_one(TaskRow, task)
        row.state, row.rounds_done, row.accuracy, row.baseline_accuracy = "finished", 3, accuracy, 0.63
    view = tasks.get_task(small, buyer.party, task)
    assert view.margin == pytest.approx(1.645 * (0.63 * 0.37 / view.test_examples) ** 0.5)
    client = enter(buyer)
    for path in ("/tasks", f"/tasks/{task}"):
        assert f'class="state {tone}">finished' in client.get(path).text
    assert ("No better than guessing" in client.get(f"/tasks/{task}").text) == (tone == "warn")
    # what everybody sees says nothing of an accuracy that is the buyer's
    assert 'class="state idle">finished' in enter(None).get("/").text


@pytest.mark.parametrize(
    ("total", "parts", "left"),
    [
        (900_000_000, [886_283_141, 13_716_859], "0.01"),
        (900_000_000, [886_280_000, 13_720_000], None),
        (100, [33, 33, 34], None),
        (3_000_000, [999_999, 999_999, 1_000_002], "0.02"),
        (0, [0, 0], None),
    ],
)
def test_what_is_shown_adds_up(total, parts, left):
    shown = adding_up(total, {str(i): part for i, part in enumerate(parts)})
    amounts = [float(text.replace(",", "")) for _, text in shown]
    assert sum(amounts) == pytest.approx(total / 1e6, abs=1e-9)
    assert [text for _, text in shown[len(parts) :]] == ([] if left is None else [left])


def test_the_bill_adds_up_on_the_page_and_in_the_file(small, joined, order, play, enter):
    buyer = joined(small, "buyer")
    task = tasks.post_task(small, buyer.party, order()).id
    play(small)
    client = enter(buyer)
    text = client.get(f"/tasks/{task}").text
    bill = text[text.index('id="bill"') : text.index('id="terms"')]
    *parts, total = [float(one.replace(",", "")) for one in re.findall(r'class="num"[^>]*>([\d.,]+)<', bill)]
    assert total == 300.0
    assert sum(parts) == pytest.approx(total, abs=1e-9)
    rows = list(csv.DictReader(io.StringIO(client.get(f"/tasks/{task}/bill.csv").text)))
    micros = [round(float(row["amount"]) * 1e6) for row in rows]
    assert rows[-1]["what"] == "deposit"
    assert sum(micros[:-1]) == micros[-1] == 300_000_000


def test_messages_speak_the_fields_unit_and_keep_what_was_typed(small, joined, enter):
    buyer = joined(small, "buyer")
    client = enter(buyer)
    csrf = token(client)
    form = {
        "name": "A name", "kind": "auction", "data": "breast-cancer", "owners": "10", "auction": "posted",
        "aggregation": "opt-aggr", "perturbation": "recommended", "clip": "0.5", "learning_rate": "0.2", "rounds": "1",
        "bidders": "5", "budget": "20", "round_seconds": "0", "deadline_days": "1", "seed": "0",
    }  # fmt: skip
    for field, value, message in (
        ("deadline_days", "4000", "At most 90 days."),
        ("deadline_days", "0", "At least 10 seconds."),
        ("round_seconds", "1e9", "At most 86,400 seconds."),
        ("budget", "-3", "More than 0 units."),
        ("name", "a\u202eb", "without invisible signs"),
        ("name", "x" * 81, "At most 80 characters."),
    ):
        answer = client.post("/tasks/new", data=form | {"csrf_token": csrf, field: value})
        assert answer.status_code == 422
        text = re.search(rf'id="{field}-error">(?:<svg.*?</svg>)?([^<]*)', answer.text)[1]
        assert message in text, (field, value, text)
        assert not re.search(r"[\^\\$]|\(epsilon=|Input", text)
        assert f'value="{value}"' in answer.text or "\u202e" in value
        assert 'value="A name"' in answer.text or field == "name"


def test_what_was_typed_outlives_the_session(small, joined, enter):
    buyer = joined(small, "buyer")
    client = enter(buyer)
    csrf = token(client)
    client.cookies.clear()
    typed = {"name": "Triage & co", "budget": "77.5", "kind": "auction", "csrf_token": csrf, "idempotency_key": "k"}
    answer = client.post("/tasks/new", data=typed)
    assert answer.status_code == 303
    assert csrf not in answer.headers["location"]
    way = httpx.URL(answer.headers["location"])
    back = client.post("/sign-in", data={"key": buyer.key, "next": way.params["next"]})
    text = client.get(back.headers["location"]).text
    assert 'value="Triage &amp; co"' in text
    assert 'value="77.5"' in text
    assert tasks.list_tasks(small, buyer.party).items == ()
    # in the meantime she signed in elsewhere: the old page's token is stale
    stale = client.post("/tasks/new", data=typed)
    assert stale.status_code == 403
    link = re.search(r'href="(/tasks/new\?[^"]+)"', stale.text)[1].replace("&amp;", "&")
    assert 'value="77.5"' in client.get(link).text


def test_a_cap_below_what_was_sold_is_refused_in_words(small, joined, order, cheap_bid, play, enter):
    buyer, owner = joined(small, "buyer"), joined(small, "owner")
    task = tasks.post_task(small, buyer.party, order(rounds=1, bidders_per_round=12))
    offers.place_bid(small, owner.party, task.id, cheap_bid())
    play(small)
    client = enter(owner)
    answer = client.post("/owner/cap", data={"csrf_token": token(client, "/owner"), "cap": "0.01"})
    assert answer.status_code == 422
    assert "You have given up ε = " in answer.text
    assert "PureDp" not in answer.text
    assert 'value="0.01"' in answer.text
    assert statements.privacy(small, owner.party).cap_epsilon_total == 100.0


def test_reasons_are_for_people():
    raw = (
        "past the registered cap: award t_abc/3/7: a release of PureDp(epsilon=0.7711223344) passes PureDp(epsilon=3.0)"
    )
    assert said(raw) == "past the registered cap: a release of ε = 0.771 passes ε = 3.00"
    assert said("ApproxDp(epsilon=1.5, delta=1e-05) is too much") == "ε = 1.50, δ = 0.0000100 is too much"
    assert said("nothing of the kind") == "nothing of the kind"


def test_a_receipt_verifies_however_it_was_downloaded(small, joined, order, cheap_bid, play, enter):
    buyer, owner, desk = joined(small, "buyer"), joined(small, "owner"), joined(small, "operator")
    task = tasks.post_task(small, buyer.party, order(rounds=1, bidders_per_round=12)).id
    offers.place_bid(small, owner.party, task, cheap_bid())
    play(small)
    stranger, found = enter(None), []
    for person in (buyer, owner, desk):
        path = f"/tasks/{task}/rounds/1/receipts.json"
        found.append(enter(person).get(path).json())
        api = stranger.get(f"/api/v1/tasks/{task}/rounds/0/receipts", headers=person.headers).json()
        found += [api, api["items"][0], api["items"][0]["document"]]
    head = ledger.head(small)
    found.append({"head": {"size": head.entries}, "receipts": found[0]})  # as in a model's zip
    for document in found:
        answer = stranger.post("/ledger/receipt", data={"receipt": json.dumps(document)}).text
        assert "genuine" in answer, answer[answer.index("<main") :][:3000]
    forged = [*found[0][:-1], found[0][-1] | {"price_micros": 1}]
    assert "does not hold" in stranger.post("/ledger/receipt", data={"receipt": json.dumps(forged)}).text
    for nothing in ([], {}, {"items": []}, [[[]]], 7):
        assert "not a receipt" in stranger.post("/ledger/receipt", data={"receipt": json.dumps(nothing)}).text


def test_a_simulation_never_wears_another_badge():
    assert task_words("simulation").badge == "simulated at the broker"
    assert task_words("simulation", trust="secure-aggregation").badge == "simulated at the broker"
    assert task_words("flower").badge == "on the owner’s machine"
    assert task_words("flower", trust="secure-aggregation").badge == "secure aggregation"


def test_the_currency_is_settled_once(tmp_path):
    url = f"sqlite:///{tmp_path}/b.db"
    for given, kept in (("", "units"), ("EUR", "EUR"), ("", "EUR"), ("EUR", "EUR")):
        broker = Broker.open(Settings(database_url=url, run_worker=False, currency=given))
        assert broker.currency == kept
        broker.close()
    with pytest.raises(ConfigError, match="EUR"):
        Broker.open(Settings(database_url=url, run_worker=False, currency="USD"))
