"""Odd input, sessions that end, browsers without scripts: what people read then, and what does not happen."""

import re

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.office import operator, parties, payouts, tasks
from flmarket.broker.stamps import now
from flmarket.broker.tables import Check, PayoutRow, TaskRow
from flmarket.broker.web.pages.rendering import Chart, Column
from flmarket.broker.web.pages.stills import still


@pytest.fixture
def desk(small, joined, serve):
    """(broker, operator, buyer, owner, enter); enter(person) gives a client and `send`, which posts with the token."""
    people = {role: joined(small, role, name) for role, name in
              (("operator", "Dora"), ("buyer", "Bert"), ("owner", "Anna"))}  # fmt: skip
    clients = []
    with serve(create_app(broker=small)) as address:

        def enter(person):
            client = httpx.Client(base_url=address, timeout=30)
            clients.append(client)
            assert client.post("/sign-in", data={"key": person.key}).status_code == 303
            csrf = re.search(r'name="csrf_token" value="([^"]+)"', client.get("/account").text)[1]
            return client, lambda path, **fields: client.post(path, data={"csrf_token": csrf} | fields)

        yield small, *people.values(), enter
        for client in clients:
            client.close()


def error(answer, field):
    found = re.search(rf'id="{field}-error">(?:<svg.*?</svg>)?([^<]*)', answer.text, re.S)
    return found and found[1]


AMOUNTS = {
    "-1": "At least 0.000001 units.", "0": "At least 0.000001 units.", "999999999999": "At most 1,000,000,000 units.",
    "1e30": "at most six decimals", "NaN": "at most six decimals", "1,5": "at most six decimals",
    "0.0000001": "at most six decimals", "": "at most six decimals",
}  # fmt: skip


@pytest.mark.parametrize("typed", AMOUNTS)
def test_amounts_are_refused_in_words(desk, typed):
    broker, who, buyer, _, enter = desk
    _, send = enter(who)
    for path, party, field in (("deposits", "buyer", "amount"), ("payouts", "payee", "payout-amount")):
        answer = send(f"/operator/{path}", **{party: buyer.party.id}, amount=typed, confirmed="yes")
        assert answer.status_code == 422
        assert AMOUNTS[typed] in error(answer, field)
        assert f'value="{typed}"' in answer.text
    assert broker.books.ledger.balance(buyer.party.id) == 10**12


def test_a_refusal_is_beside_what_it_is_about(desk):
    broker, who, buyer, owner, enter = desk
    _, send = enter(who)
    turned = send("/operator/payouts", payee=buyer.party.id, amount="1", reference="a\u202eb")
    assert turned.status_code == 422, "before it is asked about"
    assert error(turned, "reference") == "This should be without invisible signs."
    assert error(turned, "payout-amount") is None
    long = send("/operator/payouts", payee=buyer.party.id, amount="1", reference="x" * 81)
    assert error(long, "reference") == "At most 80 characters."
    wrong = send("/operator/deposits", buyer=owner.party.id, amount="5", confirmed="yes")
    assert wrong.status_code == 422
    assert "Anna is no buyer" in wrong.text
    assert error(send("/operator/parties", role="king", party_name="K"), "role") == "One of buyer, owner, operator."
    for nobody in ("p_none", "", "../../etc"):
        assert send("/operator/deposits", buyer=nobody, amount="5", confirmed="yes").status_code == 404
    assert payouts.list_payouts(broker, who.party).items == ()


def test_what_an_operator_typed_outlives_her_session(desk):
    _, who, buyer, owner, enter = desk
    client, send = enter(who)
    client.cookies.clear()
    for path, fields, shown in (
        ("/operator/deposits", {"buyer": buyer.party.id, "amount": "12.5"}, ['value="12.5"', "<h1>Bert</h1>"]),
        (
            "/operator/payouts",
            {"payee": owner.party.id, "amount": "3", "reference": "r 7"},
            ['value="3"', 'value="r 7"'],
        ),
        ("/operator/parties", {"role": "buyer", "party_name": "Cleo"}, ['value="Cleo"']),
        (f"/operator/parties/{owner.party.id}/close", {"confirmed": "yes"}, ["<h1>Anna</h1>"]),
        ("/account/keys", {"label": "nightly"}, ['value="nightly"']),
    ):
        client.cookies.clear()
        answer = send(path, **fields)
        assert answer.status_code == 303
        way = httpx.URL(answer.headers["location"]).params["next"]
        assert "confirmed" not in way
        back = client.post("/sign-in", data={"key": who.key, "next": way})
        text = client.get(back.headers["location"]).text
        for one in shown:
            assert one in text, (path, one)
    assert parties.party_of_key(desk[0], owner.key).id == owner.party.id, "nobody was closed"


def test_every_act_is_asked_about_first(desk, order):
    broker, who, buyer, _, enter = desk
    made = payouts.pay_out(broker, who.party, buyer.party.id, 5_000_000)
    task = tasks.post_task(broker, buyer.party, order())
    _, send = enter(who)
    asked = send(f"/operator/payouts/{made.id}/sent")
    assert "Note that 5.00 units were sent to Bert?" in asked.text
    assert payouts.get_payout(broker, who.party, made.id).state == "booked"
    assert send(f"/operator/payouts/{made.id}/sent", confirmed="yes").status_code == 303
    assert payouts.get_payout(broker, who.party, made.id).state == "sent"
    _, send = enter(buyer)
    assert "Stop test after the round at hand?" in send(f"/tasks/{task.id}/cancel").text
    with broker.database.read() as session:
        assert not session.get_one(TaskRow, task.id).cancel_requested
    assert send(f"/tasks/{task.id}/cancel", confirmed="yes").status_code == 303


def test_too_much_at_once_is_a_page_for_people_and_a_problem_for_programs(desk):
    _, who, _, _, enter = desk
    client, send = enter(who)
    answer = send("/ledger/receipt", receipt="x" * 300_000)
    assert answer.status_code == 413
    assert "<h1>That is too large</h1>" in answer.text
    assert "At most 256 KiB" in answer.text
    assert "Dora" in answer.text, "she is still signed in"
    api = client.post("/api/v1/session", content=b"x" * 300_000)
    assert api.json()["title"] == "Too large"


def test_an_audit_that_is_refused_says_why_without_scripts(desk):
    _, _, buyer, _, enter = desk
    _, send = enter(buyer)
    answer = send("/audit", auction="magic", population="flm22-iid", profiles="20")
    assert answer.status_code == 422
    assert "The audit was not started." in answer.text


def test_the_operator_is_told_what_to_see_to(desk):
    broker, who, buyer, _, enter = desk
    client, _ = enter(who)
    assert operator.status(broker, who.party).alerts == ()
    assert "To be seen to" not in client.get("/operator").text
    old = now() - 4 * 86_400_000
    with broker.database.write() as session:
        session.add(Check(name="reconcile", at=now(), findings=[{"rule": "bill", "subject": "t", "message": "off"}]))
        values = {"party_id": buyer.party.id, "amount_micros": 1, "reference": "", "note": ""}
        session.add(PayoutRow(id="w_1", state="booked", created_at=old, **values))
        session.add(PayoutRow(id="w_2", state="sent", created_at=old, **values))
        session.add(PayoutRow(id="w_3", state="failed", created_at=now(), **values))
        session.add(PayoutRow(id="w_4", state="booked", created_at=now(), **values))
    told = [one.text for one in operator.status(broker, who.party).alerts]
    assert told == [
        "Bills and ledger do not agree in 1 place.",
        "2 payouts could not be sent, or waited for three days.",
    ]
    text = client.get("/operator/health").text
    for one in told:
        assert one in text
    for path in re.findall(r'<li><a href="([^"]+)"', text):
        assert client.get(path).status_code == 200, path


def test_a_mistake_of_the_markets_is_a_page_that_gives_nothing_away(desk, monkeypatch):
    _, _, buyer, _, enter = desk
    client, _ = enter(buyer)
    monkeypatch.setattr(tasks, "list_tasks", lambda *_args, **_options: 1 / 0)
    answer = client.get("/tasks")
    assert answer.status_code == 500
    assert "Something went wrong here" in answer.text
    assert "Bert" in answer.text, "she is still signed in"
    assert "ZeroDivision" not in answer.text


def chart(rows, **options):
    columns = (Column("Round"), Column("Paid", draw="bars"), Column("Budget", colour="ink", draw="step"))
    return Chart(title="t", unit="u", x="round", columns=columns, rows=rows, options=options)


def test_a_picture_without_scripts_is_to_scale():
    seen = still(chart([(1, 5.0, 10.0), (2, None, 10.0), (3, 10.0, 10.0)], floor="0"))
    assert (seen.left, seen.right, seen.low, seen.high) == (1, 3, 0, 10)
    bars, line = seen.lines
    assert [(x + width / 2, y, height) for x, y, width, height in bars.bars] == [(0, 500, 500), (1000, 0, 1000)]
    assert line.points == "0,0 500,0 1000,0"
    log = still(chart([(1, 1.0, 100.0), (2, 10.0, 1.0)], scale="log"))
    assert [y for _, y, _, _ in log.lines[0].bars] == [1000, 500]
    assert still(chart([])) is None
    assert still(chart([(1, None, None), (2, None, None)])) is None
    flat = still(chart([(1, 3.0, 3.0), (2, 3.0, 3.0)]))
    assert flat.lines[1].points == "0,1000 1000,1000"


def test_charts_are_there_without_scripts(desk, order, play):
    broker, _, buyer, _, enter = desk
    task = tasks.post_task(broker, buyer.party, order())
    play(broker)
    client, _ = enter(buyer)
    text = client.get(f"/tasks/{task.id}").text
    assert text.count('class="still"') == 2
    points = re.search(r'<polyline class="s-blue line" points="([^"]+)"', text)[1].split()
    assert len(points) == 3
