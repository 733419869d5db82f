"""The operator's desk: parties found, closed and let in again, money in and out once, a log that names people."""

import csv
import io
import re
import sys
from types import SimpleNamespace

import httpx
import pytest
from power_cuts import PowerCut, cut

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict, Unauthenticated
from flmarket.broker.office import operator, parties, payouts
from flmarket.broker.office import reconcile as reconciliation
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.settings import Settings
from flmarket.broker.tables import PayoutRow
from flmarket.broker.work.worker import Worker


@pytest.fixture
def desk(small, joined, serve):
    """(broker, operator, client signed in, send): `send` confirms unless told otherwise."""
    who = joined(small, "operator", "Dora")
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert client.post("/sign-in", data={"key": who.key}).status_code == 303
        csrf = re.search(r'name="csrf_token" value="([^"]+)"', client.get("/operator").text)[1]

        def send(path, **fields):
            return client.post(path, data={"csrf_token": csrf, "confirmed": "yes"} | fields)

        yield small, who, client, send


def test_parties_are_found_by_name_and_come_by_the_page(desk, joined):
    broker, who, client, _ = desk
    made = [parties.create_party(broker, None, role="buyer", name=f"Clinic {i:03d}") for i in range(60)]
    joined(broker, "owner", "100% Öl_Werk")
    assert parties.list_parties(broker, who.party, search="clinic 05").total == 10
    assert [one.name for one in parties.list_parties(broker, who.party, search="100%").items] == ["100% Öl_Werk"]
    assert parties.list_parties(broker, who.party, search="%").total == 1, "signs of SQL are signs"
    pages = [client.get("/operator", params={"q": "Clinic", "page": n}).text for n in (1, 2, 3)]
    seen = [name for text in pages for name in re.findall(r"/operator/parties/(p_\w+)", text)]
    assert sorted(seen) == sorted(one.id for one in made)
    assert "Nobody by that name" in client.get("/operator", params={"q": "nowhere"}).text
    found = client.get("/api/v1/operator/parties", params={"search": "CLINIC 059"}, headers=who.headers).json()
    assert [one["name"] for one in found["items"]] == ["Clinic 059"]


def test_a_reload_registers_nobody_twice(desk):
    broker, who, client, send = desk
    form = {"role": "buyer", "party_name": "Bert", "idempotency_key": "form-7"}
    first, second = send("/operator/parties", **form), send("/operator/parties", **form)
    assert first.status_code == 303
    assert first.headers["location"] == second.headers["location"]
    assert parties.list_parties(broker, who.party, search="Bert").total == 1
    assert "Registered." in client.get(first.headers["location"]).text
    assert send("/operator/parties", **(form | {"party_name": "Berta"})).status_code == 303  # edited: somebody else
    assert send("/operator/parties", role="buyer", party_name="a\u202eb").status_code == 422


def test_money_goes_in_and_out_once_and_only_when_confirmed(desk):
    broker, who, client, send = desk
    bert = parties.create_party(broker, None, role="buyer", name="Bert").id
    form = {"buyer": bert, "amount": "12.5", "idempotency_key": "d1"}
    asked = send("/operator/deposits", confirmed="", **form)
    assert "Book 12.50 units as paid in by Bert?" in asked.text
    assert broker.books.ledger.balance(bert) == 0
    for _ in range(2):
        assert send("/operator/deposits", **form).status_code == 303
    assert broker.books.ledger.balance(bert) == 12_500_000
    out = {"payee": bert, "amount": "2.5", "idempotency_key": "w1", "reference": "=INV 7"}
    assert "Pay out 2.50 units to Bert?" in send("/operator/payouts", confirmed="", **out).text
    for _ in range(2):
        assert send("/operator/payouts", **out).status_code == 303
    assert broker.books.ledger.balance(bert) == 10_000_000
    too_much = send("/operator/payouts", payee=bert, amount="11")
    assert too_much.status_code == 422
    assert "Bert has 10.00, less than 11.00" in too_much.text
    assert 'value="11"' in too_much.text
    (row,) = csv.DictReader(io.StringIO(client.get("/operator/payouts.csv").text))
    assert row["iban"] == ""
    assert (row["name"], row["amount"], row["state"], row["reference"]) == ("Bert", "2.50", "booked", "'=INV 7")
    assert send(f"/operator/payouts/{row['payout']}/sent").status_code == 303
    assert payouts.list_payouts(broker, who.party).items[0].state == "sent"
    assert reconcile(broker.database.engine) == ()
    with broker.database.write() as session:  # a row that says more than the ledger did
        session.get_one(PayoutRow, row["payout"]).amount_micros += 1
    assert [one.rule for one in reconcile(broker.database.engine)] == ["payout"]
    assert broker.books.ledger.verify()


def test_the_payout_hook_is_called_once_it_is_booked(tmp_path, joined, monkeypatch):
    calls, broken = [], []

    def send(payout):
        calls.append(payout)
        if broken:
            raise OSError("the bank is closed")

    monkeypatch.setitem(sys.modules, "some_bank", SimpleNamespace(send=send))
    url = f"sqlite:///{tmp_path}/b.db"
    broker = Broker.open(Settings(database_url=url, run_worker=False, payout_hook="some_bank:send", currency="EUR"))
    desk, bert = joined(broker, "operator").party, joined(broker, "buyer", "Bert").party
    made = payouts.pay_out(broker, desk, bert.id, 5, key="one")
    again = payouts.pay_out(broker, desk, bert.id, 5, key="one")
    assert made == again
    assert (made.state, made.currency, [one.id for one in calls]) == ("sent", "EUR", [made.id])
    broken.append(True)
    failed = payouts.pay_out(broker, desk, bert.id, 7, key="two")
    assert (failed.state, failed.note) == ("failed", "OSError: the bank is closed")
    broken.clear()
    assert payouts.pay_out(broker, desk, bert.id, 7, key="two").state == "sent"
    assert len(calls) == 3
    with pytest.raises(Conflict, match="another payout"):
        payouts.pay_out(broker, desk, bert.id, 8, key="two")
    assert broker.books.ledger.balance(bert.id) == 10**12 - 12
    broker.close()


@pytest.mark.parametrize("after", [False, True])
def test_a_payout_that_was_cut_off_is_booked_by_the_worker(small, joined, monkeypatch, after):
    """Nobody may repeat the request, and money that has left the books must be in the list."""
    desk, bert = joined(small, "operator").party, joined(small, "buyer", "Bert").party
    ledger = small.books.ledger
    with monkeypatch.context() as broken:
        cut(broken, ledger, "withdraw", after=after, skip=0)
        with pytest.raises(PowerCut):
            payouts.pay_out(small, desk, bert.id, 5, key="one")
    (left,) = payouts.list_payouts(small, desk).items
    assert left.state == "new"
    with small.database.write() as session:
        session.get_one(PayoutRow, left.id).created_at -= 60_000
    monkeypatch.setattr(reconciliation, "_BOOKING_MS", -1)
    found = [one.rule for one in reconcile(small.database.engine)]
    assert found == (["payout"] if after else [])
    worker = Worker(small)
    worker.step()
    worker.stop()
    assert payouts.get_payout(small, desk, left.id).state == "booked"
    assert ledger.balance(bert.id) == 10**12 - 5
    assert reconcile(small.database.engine) == ()
    assert payouts.pay_out(small, desk, bert.id, 5, key="one").id == left.id
    assert ledger.balance(bert.id) == 10**12 - 5


def test_a_slow_repetition_does_not_undo_that_a_payout_was_sent(small, joined, monkeypatch):
    desk, bert = joined(small, "operator").party, joined(small, "buyer", "Bert").party
    real = small.books.ledger.withdraw

    def slowly(*call):
        monkeypatch.setattr(small.books.ledger, "withdraw", real)
        made = payouts.pay_out(small, desk, bert.id, 5, key="one")
        assert payouts.mark_sent(small, desk, made.id).state == "sent"
        real(*call)

    monkeypatch.setattr(small.books.ledger, "withdraw", slowly)
    assert payouts.pay_out(small, desk, bert.id, 5, key="one").state == "sent"


def test_keys_are_replaced_and_links_let_in(desk, joined):
    broker, _, client, send = desk
    anna = joined(broker, "owner", "Anna")
    path = f"/operator/parties/{anna.party.id}"
    assert "Give Anna a new key?" in send(f"{path}/reissue", confirmed="").text
    assert parties.party_of_key(broker, anna.key).id == anna.party.id
    answer = send(f"{path}/reissue", idempotency_key="k1")
    key = re.search(r'id="new-key">([^<]+)', answer.text)[1]
    assert parties.party_of_key(broker, key).id == anna.party.id
    with pytest.raises(Unauthenticated):
        parties.party_of_key(broker, anna.key)
    assert send(f"{path}/reissue", idempotency_key="k1").status_code == 409, "a reload makes no other key"
    assert parties.party_of_key(broker, key).id == anna.party.id
    link = re.search(r'id="new-link">([^<]+)', send(f"{path}/invite").text)[1]
    assert httpx.get(client.base_url.join(link)).status_code == 303
    assert send(f"{path}/close").status_code == 303
    with pytest.raises(Unauthenticated):
        parties.party_of_key(broker, key)
    assert "Closed." in client.get(f"{path}?done=close").text
    assert send(f"{path}/reopen").status_code == 303
    assert parties.party_of_key(broker, key).id == anna.party.id
    assert send("/operator/parties/p_none/close").status_code == 404


def test_the_log_names_people_and_is_searched_by_name(desk):
    broker, who, client, send = desk
    bert = parties.create_party(broker, who.party, role="buyer", name="Bert Brecht").id
    send("/operator/deposits", buyer=bert, amount="1")
    line = operator.audit_log(broker, who.party, about="brecht").items[0]
    assert (line.party, line.action, line.about) == ("Dora", "deposit", "Bert Brecht")
    text = client.get("/operator/log", params={"q": "Brecht"}).text
    assert "booked a deposit" in text
    assert bert not in text
    assert "signed in" not in text
