"""Payouts as a file for the bank: what is in it, what is left out and why, and that it moves nothing."""

import re
from decimal import Decimal
from xml.etree import ElementTree

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict, Forbidden
from flmarket.broker.office import operator, payouts, transfers
from flmarket.broker.settings import Settings
from flmarket.errors import InvalidInput

OURS, ANNAS, BERTS = "DE89370400440532013000", "GB29NWBK60161331926819", "FR1420041010050500013M02606"

# what pain.001.001.09 asks for, in its order: those marked ? may be absent, + may repeat
ORDER = {
    "Document": ["CstmrCdtTrfInitn"],
    "CstmrCdtTrfInitn": ["GrpHdr", "PmtInf+"],
    "GrpHdr": ["MsgId", "CreDtTm", "NbOfTxs", "CtrlSum?", "InitgPty"],
    "PmtInf": [
        "PmtInfId", "PmtMtd", "NbOfTxs?", "CtrlSum?", "PmtTpInf?", "ReqdExctnDt", "Dbtr", "DbtrAcct", "DbtrAgt",
        "ChrgBr?", "CdtTrfTxInf+",
    ],
    "CdtTrfTxInf": ["PmtId", "Amt", "Cdtr?", "CdtrAcct?", "RmtInf?"],
    "InitgPty": ["Nm"], "Dbtr": ["Nm"], "Cdtr": ["Nm"], "DbtrAcct": ["Id"], "CdtrAcct": ["Id"], "Id": ["IBAN"],
    "DbtrAgt": ["FinInstnId"], "PmtId": ["EndToEndId"], "Amt": ["InstdAmt"], "RmtInf": ["Ustrd"], "ReqdExctnDt": ["Dt"],
    "PmtTpInf": ["SvcLvl"], "SvcLvl": ["Cd"], "FinInstnId": ["BICFI?", "Othr?"], "Othr": ["Id"],
}  # fmt: skip
LONGEST = {"MsgId": 35, "PmtInfId": 35, "EndToEndId": 35, "Nm": 140, "Ustrd": 140, "IBAN": 34}


def check(node, parent=""):
    """Element order, presence and lengths, as the message definition has them."""
    tag = node.tag.removeprefix(f"{{{transfers.NAMESPACE}}}")
    assert node.tag != tag, "every element is in the namespace"
    children = [child.tag.removeprefix(f"{{{transfers.NAMESPACE}}}") for child in node]
    if not children:
        assert node.text
        assert len(node.text) <= LONGEST.get(tag, 35)
        return
    assert node.text is None or not node.text.strip()
    pattern = "".join(
        f"(?:{one.rstrip('?+')} ){'+' if one.endswith('+') else '?' if one.endswith('?') else ''}"
        for one in ORDER[tag if parent != "Othr" else "Othr"]
    )
    assert re.fullmatch(pattern, "".join(f"{child} " for child in children)), (tag, children)
    for child in node:
        check(child, tag)


@pytest.fixture
def bank(tmp_path, joined):
    """(broker, desk, Anna, Bert); payouts of both are booked."""
    settings = Settings(
        database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, currency="EUR", payout_iban=OURS,
        payout_name="Market desk <& co>",
    )  # fmt: skip
    broker = Broker.open(settings)
    desk, anna, bert = (
        joined(broker, "operator", "Dora"),
        joined(broker, "buyer", "Anna"),
        joined(broker, "buyer", "Bert"),
    )
    yield broker, desk, anna, bert
    broker.close()


def pay(bank, who, micros, **more):
    return payouts.pay_out(bank[0], bank[1].party, who.party.id, micros, **more)


def test_the_file_is_what_banks_take_and_adds_up(bank):
    broker, desk, anna, bert = bank
    transfers.set_iban(broker, anna.party, anna.party.id, "gb29 nwbk 6016 1331 9268 19")
    transfers.set_iban(broker, desk.party, bert.party.id, BERTS)
    made = [pay(bank, anna, 12_340_000, reference="May <b>&\u00e9 \u4f60 7"), pay(bank, bert, 990_000)]
    sent = pay(bank, bert, 5_000_000)
    payouts.mark_sent(broker, desk.party, sent.id)
    root = ElementTree.fromstring(transfers.transfer_file(broker, desk.party))
    check(root)
    space = {"": transfers.NAMESPACE}
    amounts = [Decimal(one.text) for one in root.findall(".//InstdAmt", space)]
    assert amounts == [Decimal("12.34"), Decimal("0.99")]
    assert {one.get("Ccy") for one in root.findall(".//InstdAmt", space)} == {"EUR"}
    assert {Decimal(one.text) for one in root.findall(".//CtrlSum", space)} == {sum(amounts)}
    assert {one.text for one in root.findall(".//NbOfTxs", space)} == {"2"}
    assert [one.text for one in root.findall(".//EndToEndId", space)] == [one.id for one in made]
    assert [one.text for one in root.findall(".//CdtrAcct//IBAN", space)] == [ANNAS, BERTS]
    assert root.find(".//DbtrAcct//IBAN", space).text == OURS
    assert root.find(".//Ustrd", space).text == "May b é 7"
    assert root.find(".//Dbtr/Nm", space).text == "Market desk co"
    again = ElementTree.fromstring(transfers.transfer_file(broker, desk.party))
    ids = {one.find(".//MsgId", space).text for one in (root, again)}
    assert len(ids) == 1, "a bank can tell that it had this file"
    assert broker.books.ledger.balance(anna.party.id) == 10**12 - 12_340_000, "the file moved nothing"
    pay(bank, bert, 10_000)
    assert ElementTree.fromstring(transfers.transfer_file(broker, desk.party)).find(".//MsgId", space).text not in ids


def test_a_false_file_would_be_noticed(bank):
    broker, desk, anna, _ = bank
    transfers.set_iban(broker, anna.party, anna.party.id, ANNAS)
    pay(bank, anna, 10_000)
    text = transfers.transfer_file(broker, desk.party)
    turned = re.sub(r"(<NbOfTxs>.*?</NbOfTxs>)(\s*)(<CtrlSum>.*?</CtrlSum>)", r"\3\2\1", text, count=1)
    assert turned != text
    with pytest.raises(AssertionError):
        check(ElementTree.fromstring(turned))
    with pytest.raises(AssertionError):
        check(ElementTree.fromstring(text.replace("ChrgBr", "Charges")))


def test_what_is_left_out_says_why(bank):
    broker, desk, anna, bert = bank
    transfers.set_iban(broker, anna.party, anna.party.id, ANNAS)
    pay(bank, anna, 10_000 + 1)
    pay(bank, bert, 10_000)
    found = transfers.transfers(broker, desk.party)
    assert found.ready == ()
    assert [(one.name, why) for one, why in found.left_out] == [
        ("Anna", "it is not a whole number of cents"), ("Bert", "no account is known"),
    ]  # fmt: skip
    with pytest.raises(Conflict, match="no payout can be sent now"):
        transfers.transfer_file(broker, desk.party)


@pytest.mark.parametrize(
    "typed", ["DE89370400440532013001", "DE8937040044", "12", "<script>", "DE89 3704\u202e", "X" * 60]
)
def test_a_slip_of_the_pen_is_noticed(bank, typed):
    broker, _, anna, _ = bank
    with pytest.raises(InvalidInput, match="IBAN"):
        transfers.set_iban(broker, anna.party, anna.party.id, typed)


def test_nobody_changes_where_somebody_elses_money_goes(bank):
    broker, desk, anna, bert = bank
    with pytest.raises(Forbidden):
        transfers.set_iban(broker, anna.party, bert.party.id, ANNAS)
    with pytest.raises(Forbidden):
        transfers.transfers(broker, anna.party)
    transfers.set_iban(broker, bert.party, bert.party.id, BERTS)
    line = operator.audit_log(broker, desk.party, about="Bert").items[0]
    assert (line.party, line.action, line.detail) == ("Bert", "bank.set", "ends with 2606")


def test_from_the_account_to_the_bank_on_pages(bank, serve):
    broker, desk, anna, _ = bank
    with serve(create_app(broker=broker)) as address:
        clients = {}
        for who in (desk, anna):
            client = clients[who.party.role] = httpx.Client(base_url=address, timeout=30)
            client.post("/sign-in", data={"key": who.key})
            client.csrf = re.search(r'name="csrf_token" value="([^"]+)"', client.get("/account").text)[1]

        def send(role, path, **fields):
            return clients[role].post(path, data={"csrf_token": clients[role].csrf} | fields)

        wrong = send("buyer", "/account/bank", iban="DE89370400440532013001")
        assert wrong.status_code == 422
        assert "check digits" in wrong.text
        assert 'value="DE89370400440532013001"' in wrong.text
        assert send("buyer", "/account/bank", iban=ANNAS).status_code == 303
        made = pay(bank, anna, 2_500_000)
        text = clients["operator"].get("/operator/payouts").text
        assert "2.50" in text
        assert ANNAS in text
        file = re.search(r'name="file" value="(\w+)"', text)[1]
        answer = clients["operator"].get("/operator/payouts.xml")
        assert answer.headers["content-disposition"] == 'attachment; filename="payouts.xml"'
        check(ElementTree.fromstring(answer.text))
        assert "Note that 1 payout of the file were sent?" in send("operator", "/operator/payouts/sent", file=file).text
        late = pay(bank, anna, 10_000)
        stale = send("operator", "/operator/payouts/sent", file=file, confirmed="yes")
        assert stale.status_code == 409, "a payout that was in no file is not noted as sent"
        assert {payouts.get_payout(broker, desk.party, one.id).state for one in (made, late)} == {"booked"}
        file = re.search(r'name="file" value="(\w+)"', clients["operator"].get("/operator/payouts").text)[1]
        assert send("operator", "/operator/payouts/sent", file=file, confirmed="yes").status_code == 303
        assert {payouts.get_payout(broker, desk.party, one.id).state for one in (made, late)} == {"sent"}
        assert "Nothing waits." in clients["operator"].get("/operator/payouts").text
        path = f"/operator/parties/{anna.party.id}"
        assert (
            f"Send payouts of Anna to {BERTS}?"
            in send("operator", "/operator/bank", party=anna.party.id, iban=BERTS).text
        )
        assert ANNAS in clients["operator"].get(path).text
        for client in clients.values():
            client.close()


@pytest.mark.parametrize("limit", [1, 2, 4, 8])
def test_payouts_of_one_moment_are_not_lost_between_pages(bank, monkeypatch, limit):
    broker, desk, anna, _ = bank
    made = set()
    for at, number in ((1, 1), (2, 2), (3, 3), (4, 2)):
        monkeypatch.setattr(payouts, "now", lambda at=at: at)
        made |= {pay(bank, anna, 10_000).id for _ in range(number)}
    seen, before = [], None
    while not seen or before is not None:
        page = payouts.list_payouts(broker, desk.party, limit=limit, before=before)
        seen, before = [*seen, *(one.id for one in page.items)], page.next
    assert len(seen) == len(made) == 8
    assert set(seen) == made
