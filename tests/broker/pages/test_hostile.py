"""Odd input, sessions that end, browsers without scripts: what people read then, and what does not happen."""

import json
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from sqlalchemy import event, exc

from flmarket.broker.app import create_app
from flmarket.broker.office import ledger, operator, parties, payouts, tasks
from flmarket.broker.stamps import now
from flmarket.broker.tables import Check, PayoutRow, TaskRow
from flmarket.broker.web.pages.rendering import Chart, Column, still
from flmarket.broker.work.worker import Worker
from flmarket.ledger import ESCROW


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


def test_numbers_of_more_digits_than_python_reads_are_refused_in_words(desk):
    _, _, buyer, _, enter = desk
    _, send = enter(buyer)
    digits = "9" * 5000
    assert "It is not JSON" in send("/ledger/receipt", receipt=f"[{digits}]").text
    answer = send("/tasks/data", set_name="mine", table="a,label", schema=f'{{"columns": {digits}}}')
    assert answer.status_code == 422
    assert "The example shows what it looks like." in error(answer, "schema")


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


# --- a database that fails, once or for good --------------------------------------------------------------------------


@contextmanager
def failing(broker, *, at, times=1):
    """The database fails at its `at`-th statement from now on, so many times; yields how many statements there were."""
    seen = [0]

    def strike(*_):
        seen[0] += 1
        if at <= seen[0] < at + times:
            raise exc.OperationalError("statement", None, sqlite3.OperationalError("disk I/O error"))

    engines = broker.database.engine, broker.books.ledger.engine
    for engine in engines:
        event.listen(engine, "before_cursor_execute", strike)
    try:
        yield seen
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", strike)


ORDER = {
    "kind": "auction", "name": "A task", "data": "breast-cancer", "owners": "10", "auction": "posted",
    "aggregation": "opt-aggr", "perturbation": "recommended", "clip": "0.5", "learning_rate": "0.2", "rounds": "1",
    "bidders": "5", "budget": "20", "round_seconds": "0", "deadline_days": "1", "seed": "0",
}  # fmt: skip


def test_a_fault_of_the_database_is_no_refusal_and_the_form_can_be_sent_again(desk):
    """Wherever it strikes while a task is posted: nobody is told that nothing was charged, and sent again the
    form is done once."""
    broker, _, buyer, _, enter = desk
    _, send = enter(buyer)
    had, at = broker.books.ledger.balance(buyer.party.id), 0
    while True:
        at += 1
        form = ORDER | {"name": f"Task {at}", "idempotency_key": f"form-{at}"}
        with failing(broker, at=at) as seen:
            answer = send("/tasks/new", **form)
        if seen[0] < at:
            break
        if answer.status_code == 303 and "/sign-in" not in answer.headers["location"]:
            continue  # what failed was tried again, or did not matter
        assert answer.status_code == 503, (at, answer.text)
        assert "look before you send it again" in answer.text
        assert not re.search("nothing was charged|disk I/O|ledger’s database|OperationalError", answer.text), at
        again = send("/tasks/new", **form)
        assert again.status_code == 303, (at, again.text)
        assert send("/tasks/new", **form).headers["location"] == again.headers["location"]
    assert at > 10, "the database was hardly asked"
    posted = tasks.list_tasks(broker, buyer.party).items
    assert sorted(one.name for one in posted) == sorted(f"Task {number}" for number in range(1, at + 1))
    assert {one.state for one in posted} == {"queued"}
    spent = sum(broker.books.ledger.balance(one.id) for one in posted)
    assert spent == at * 20_000_000
    assert broker.books.ledger.balance(buyer.party.id) == had - spent
    assert broker.books.ledger.balance(ESCROW) == 0


def test_a_database_that_is_away_is_a_page_too_and_makes_no_receipt_false(desk, order, play):
    broker, who, buyer, owner, enter = desk
    task = tasks.post_task(broker, buyer.party, order(rounds=1))
    play(broker)
    client, send = enter(buyer)
    receipt = json.dumps(client.get(f"/tasks/{task.id}/rounds/1/receipts.json").json()[0])
    assert "This receipt is genuine" in send("/ledger/receipt", receipt=receipt).text
    _, ask = enter(who)
    _, sell = enter(owner)
    with failing(broker, at=1, times=10**9):
        for path in ("/tasks", "/", f"/market/{task.id}", "/ledger"):
            answer = client.get(path)
            assert answer.status_code == 503, path
            assert "does not answer just now" in answer.text
            assert answer.headers["retry-after"]
        assert "does not hold" not in send("/ledger/receipt", receipt=receipt).text
        assert ask("/operator/deposits", buyer=buyer.party.id, amount="5", confirmed="yes").status_code == 503
        assert sell("/owner/cap", cap="9").status_code == 503
    for at in range(1, 40):
        with failing(broker, at=at) as seen:
            answer = send("/ledger/receipt", receipt=receipt)
        assert "does not hold" not in answer.text, at
        assert answer.status_code in (200, 503)
        if seen[0] < at:
            break
    assert client.get("/tasks").status_code == 200


def test_a_form_that_is_sent_by_eight_hands_at_once_is_done_once(desk):
    broker, who, buyer, _, enter = desk
    _, operate = enter(who)
    _, order = enter(buyer)
    had = broker.books.ledger.balance(buyer.party.id)
    with ThreadPoolExecutor(8) as hands:
        for send, path, form in (
            (order, "/tasks/new", ORDER | {"idempotency_key": "f"}),
            (operate, "/operator/parties", {"role": "owner", "party_name": "Only one", "idempotency_key": "g"}),
            (
                operate,
                "/operator/deposits",
                {"buyer": buyer.party.id, "amount": "7", "confirmed": "y", "idempotency_key": "h"},
            ),
            (
                operate,
                "/operator/payouts",
                {"payee": buyer.party.id, "amount": "3", "confirmed": "y", "idempotency_key": "i"},
            ),
        ):
            answers = list(hands.map(lambda _, send=send, path=path, form=form: send(path, **form), range(8)))
            assert {one.status_code for one in answers} == {303}, [
                one.text for one in answers if one.status_code != 303
            ]
            assert len({one.headers["location"] for one in answers}) == 1
    assert len(tasks.list_tasks(broker, buyer.party).items) == 1
    assert parties.list_parties(broker, who.party, search="Only one").total == 1
    assert len(payouts.list_payouts(broker, who.party).items) == 1
    assert broker.books.ledger.balance(buyer.party.id) == had - 20_000_000 + 7_000_000 - 3_000_000


def test_a_buyer_who_stops_and_begins_again(desk):
    """Stopped twice, posted again from the old form and from a new one: every budget comes back once."""
    broker, who, buyer, _, enter = desk
    client, send = enter(buyer)
    had = broker.books.ledger.balance(buyer.party.id)
    form = ORDER | {"idempotency_key": "f", "rounds": "5"}
    task = send("/tasks/new", **form).headers["location"].split("/")[2]
    for _ in range(2):
        assert send(f"/tasks/{task}/cancel", confirmed="yes").status_code == 303
    Worker(broker).run_until_idle()
    assert send(f"/tasks/{task}/cancel", confirmed="yes").status_code in (303, 409)
    assert send("/tasks/new", **form).headers["location"] == f"/tasks/{task}/live", "an old form is that old task"
    assert tasks.get_task(broker, buyer.party, task).state == "cancelled"
    assert broker.books.ledger.balance(buyer.party.id) == had
    like = client.get(f"/tasks/new?like={task}").text
    key = re.search(r'name="idempotency_key" value="([^"]+)"', like)[1]
    other = send("/tasks/new", **form | {"idempotency_key": key}).headers["location"].split("/")[2]
    assert other != task
    assert broker.books.ledger.balance(buyer.party.id) == had - 100_000_000
    assert ledger.verify(broker, who.party).ok


ODD = (
    "", "%00", "%0a", "%E2%80%AE", "%ED%A0%80", "%FF", "a" * 3000, "-1", "99999999999999999999999", "NaN", "1e999",
    "<script>alert(1)</script>", "%27%20OR%201%3D1--", "{{7*7}}", "..%2f..%2fetc%2fpasswd", "%5C%5Cevil.example",
)  # fmt: skip
ASKED = {
    None: ["/?q=", "/?page=", "/market/@", "/market/@/live", "/market/compare?task=", "/ledger?before=",
           "/sign-in?next=", "/sign-in/@", "/@", "/market/tasks?page="],
    "buyer": ["/tasks?q=", "/tasks?page=", "/tasks/@", "/tasks/!/rounds/@", "/tasks/!/stream?after=",
              "/tasks/new?like=", "/tasks/new/explore?budget=", "/tasks/new/explore?hidden=",
              "/tasks/!/rounds/1/receipts.json?award=", "/disputes/new?award=", "/audit/@"],
    "owner": ["/owner?cap=", "/owner?page=", "/owner/bid?task=", "/owner/bid/help?epsilon=", "/owner/bid/help?rate="],
    "operator": ["/operator?q=", "/operator?page=", "/operator/log?before=", "/operator/log?q=", "/operator/parties/@",
                 "/operator/runs/@", "/operator/payouts?before=", "/ledger?q=", "/disputes?before="],
}  # fmt: skip


@pytest.mark.parametrize("role", ASKED)
def test_odd_addresses_are_answered_in_words(desk, order, play, role):
    broker, who, buyer, owner, enter = desk
    task = tasks.post_task(broker, buyer.party, order(rounds=1))
    play(broker)
    person = {"buyer": buyer, "owner": owner, "operator": who}.get(role)
    client, _ = enter(buyer if person is None else person)
    if person is None:
        client.cookies.clear()
    for pattern in ASKED[role]:
        for odd in ODD:
            path = pattern.replace("!", task.id)
            answer = client.get(path.replace("@", odd) if "@" in path else path + odd)
            assert answer.status_code < 500, (path, odd)
            assert "<script>alert(1)" not in answer.text
            assert not re.search("Traceback|Input should|type=", re.sub("(?s)<.*?>", "", answer.text)), (path, odd)
            assert "evil" not in answer.headers.get("location", "")


def chart(rows, **options):
    columns = (Column("Round"), Column("Paid", draw="bars"), Column("Budget", colour="ink", draw="step"))
    return Chart(title="t", unit="u", columns=columns, rows=rows, options=options)


def test_a_picture_without_scripts_is_to_scale():
    seen = still(chart([(1, 5.0, 10.0), (2, None, 10.0), (3, 10.0, 10.0)], floor="0"))
    assert [seen[one] for one in ("left", "right", "low", "high")] == [1, 3, 0, 10]
    bars, line = seen["lines"]
    assert [(x + width / 2, y, height) for x, y, width, height in bars["bars"]] == [(0, 500, 500), (1000, 0, 1000)]
    assert line["points"] == "0,0 500,0 1000,0"
    log = still(chart([(1, 1.0, 100.0), (2, 10.0, 1.0)], scale="log"))
    assert [y for _, y, _, _ in log["lines"][0]["bars"]] == [1000, 500]
    assert still(chart([])) is None
    assert still(chart([(1, None, None), (2, None, None)])) is None
    flat = still(chart([(1, 3.0, 3.0), (2, 3.0, 3.0)]))
    assert flat["lines"][1]["points"] == "0,1000 1000,1000"


def test_charts_are_there_without_scripts(desk, order, play):
    broker, _, buyer, _, enter = desk
    task = tasks.post_task(broker, buyer.party, order())
    play(broker)
    client, _ = enter(buyer)
    text = client.get(f"/tasks/{task.id}").text
    assert text.count('class="still"') == 2
    points = re.search(r'<polyline class="s-blue line" points="([^"]+)"', text)[1].split()
    assert len(points) == 3
