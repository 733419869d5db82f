"""What happened is told: with its transaction or not at all, signed, at least once, never into private networks."""

import base64
import email
import email.policy
import hashlib
import hmac
import json
import socket
import threading

import pytest
from power_cuts import PowerCut, cut
from receivers import mail_server, webhook_receiver
from sqlalchemy import select

from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict, Forbidden, KeyReused, NotFound
from flmarket.broker.office import notices, offers, payouts, statements, tasks
from flmarket.broker.requests import HookRequest
from flmarket.broker.settings import Settings
from flmarket.broker.tables import Notice
from flmarket.broker.work import deliveries, rounds
from flmarket.broker.work.deliveries import Deliveries, NotDelivered, post, reachable
from flmarket.broker.work.worker import Worker
from flmarket.client.webhooks import BadSignature, sign, verify


@pytest.fixture
def telling(url):
    """A broker that may post to this machine and does not wait long."""
    settings = {"webhook_allow": ("127.0.0.1",), "notice_first_rest": 0.001, "notice_tries": 5}
    made = Broker.open(Settings(database_url=url, run_worker=False, **settings))
    yield made
    made.close()


@pytest.fixture
def quick(tmp_path):
    settings = {"webhook_allow": ("127.0.0.1",), "notice_first_rest": 0.001, "notice_tries": 3}
    made = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, **settings))
    yield made
    made.close()


def outbox(broker):
    return Deliveries(broker, threading.Event(), lambda _connection: None)


def empty(broker, rounds=60):
    """Until nothing waits any more."""
    sender = outbox(broker)
    for _ in range(rounds):
        sender.run()
        with broker.database.read() as session:
            if not session.scalars(select(Notice).where(Notice.state == "waiting")).all():
                return
        threading.Event().wait(0.02)
    raise AssertionError("something waits for ever")


def hook(broker, person, address, *events):
    wanted = {"address": address} | ({"events": list(events)} if events else {})
    return notices.create_hook(broker, person.party, person.party.id, HookRequest(**wanted))


def by_hand(secret, headers, body):
    """The signature as the specification says it, without the code under test."""
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


def test_a_task_is_told_to_its_people_though_the_receiver_fails_first(telling, joined, order, cheap_bid, play):
    buyer, owner, other = (joined(telling, role) for role in ("buyer", "owner", "owner"))
    statements.set_cap(telling, owner.party, 2.05)
    with webhook_receiver(answers=[500, 0, 302]) as (address, got):
        hers, his = hook(telling, owner, address), hook(telling, buyer, address)
        hook(telling, other, address)
        task = tasks.post_task(telling, buyer.party, order(rounds=2, bidders_per_round=12))
        offers.place_bid(telling, owner.party, task.id, cheap_bid())
        play(telling)
        assert got == []
        empty(telling)
    messages = [json.loads(body) for _, body in got]
    told = {(one["party_id"], one["event"], one["data"].get("award_id", "")) for one in messages}
    paid = [one for one in statements.statement(telling, owner.party).releases if one.paid_micros]
    assert len(paid) == 2
    assert told == {
        *((owner.party.id, event, one.award_id) for one in paid for event in ("award", "payment")),
        (owner.party.id, "cap", ""),
        (owner.party.id, "task.ended", ""),
        (buyer.party.id, "task.ended", ""),
    }
    assert len(got) == len(told) + 3, "three attempts failed, and were made again"
    bill = next(one["data"] for one in messages if one["party_id"] == buyer.party.id)
    done = tasks.get_task(telling, buyer.party, task.id)
    assert (bill["spent_micros"], bill["refunded_micros"]) == (done.spent_micros, done.refunded_micros)
    prices = {one["data"]["award_id"]: one["data"]["price_micros"] for one in messages if one["event"] == "payment"}
    assert prices == {one.award_id: one.paid_micros for one in paid}
    seller = next(one["data"] for one in messages if (one["party_id"], one["event"]) == (owner.party.id, "task.ended"))
    assert "spent_micros" not in seller, "what the task cost is its buyer's to know"
    secrets = {owner.party.id: hers.secret, buyer.party.id: his.secret}
    for headers, body in got:
        secret = secrets[json.loads(body)["party_id"]]
        assert verify(secret, headers, body) == headers["webhook-id"] == json.loads(body)["id"]
        assert headers["webhook-signature"] == by_hand(secret, headers, body)
    assert all(one.state == "sent" for one in notices.list_notices(telling, owner.party).items)


def test_what_was_altered_is_refused():
    """The example of the Standard Webhooks specification; then cheats."""
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    headers = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert verify(secret, headers, body, now=1614265331.0)
    cheats = [
        (secret, headers, body.replace(b"24", b"25"), 1614265331.0),
        (secret, headers, body + b" ", 1614265331.0),
        (secret, headers | {"webhook-id": "msg_other"}, body, 1614265331.0),
        (secret, headers | {"webhook-timestamp": "1614265331"}, body, 1614265331.0),
        (secret, headers | {"webhook-signature": "v1,AAAA v1a,xx"}, body, 1614265331.0),
        (secret, {}, body, 1614265331.0),
        ("whsec_" + base64.b64encode(b"another").decode(), headers, body, 1614265331.0),
        (secret, headers, body, 1614265330.0 + 301),  # said again, later
        ("whsec_%%", headers, body, 1614265331.0),
    ]
    for given_secret, given, content, at in cheats:
        with pytest.raises(BadSignature):
            verify(given_secret, given, content, now=at)


def test_a_notice_stands_or_falls_with_its_transaction(quick, joined, order, cheap_bid, monkeypatch):
    buyer, owner = joined(quick, "buyer"), joined(quick, "owner")
    hook(quick, owner, "https://example.org/x")
    task = tasks.post_task(quick, buyer.party, order(rounds=1, bidders_per_round=12))
    offers.place_bid(quick, owner.party, task.id, cheap_bid())
    worker = Worker(quick)
    events = lambda: sorted(one.event for one in notices.list_notices(quick, owner.party).items)  # noqa: E731

    with monkeypatch.context() as patch:
        cut(patch, rounds, "announce_caps", after=False, skip=0)  # the last thing in the round's transaction
        with pytest.raises(PowerCut):
            worker.run_until_idle()
    worker.stop()
    assert events() == ["award"]
    Worker(quick).run_until_idle()
    assert events() == ["award", "payment", "task.ended"]


def test_cut_off_after_it_was_taken_it_comes_again_under_the_same_id(quick, joined, monkeypatch):
    buyer = joined(quick, "buyer")
    with webhook_receiver() as (address, got):
        made = hook(quick, buyer, address)
        notices.try_hook(quick, buyer.party, made.hook.id)
        with monkeypatch.context() as patch:
            patch.setattr(Deliveries, "_note", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                outbox(quick).run()
        empty(quick)
    assert len(got) == 2
    assert len({headers["webhook-id"] for headers, _ in got}) == 1


def test_one_that_fails_rests_longer_and_longer_and_holds_nobody_up(quick, joined, monkeypatch):
    clock = type("Clock", (), {"ms": 1_800_000_000_000, "time_ns": lambda self: self.ms * 1_000_000})()
    monkeypatch.setattr("flmarket.broker.stamps.time", clock)
    broken, fine = joined(quick, "buyer"), joined(quick, "owner")
    with webhook_receiver(answers=[503] * 100) as (bad, tried), webhook_receiver() as (good, got):
        made, other = hook(quick, broken, bad), hook(quick, fine, good)
        first = notices.try_hook(quick, broken.party, made.hook.id).id
        clock.ms += 1
        notices.try_hook(quick, broken.party, made.hook.id)
        notices.try_hook(quick, fine.party, other.hook.id)
        sender, rests = outbox(quick), []
        for _ in range(3):
            sender.run()
            with quick.database.read() as session:
                row = session.get_one(Notice, first)
                rests.append(row.next_at - clock.ms)
            clock.ms = row.next_at
        assert len(got) == 1
        assert rests == [1, 2, 4]
        assert (row.state, row.tries, row.error) == ("given up", 3, "it answered with 503, not with 2xx")
        assert [headers["webhook-id"] for headers, _ in tried] == [first] * 3
        assert notices.list_hooks(quick, broken.party).items[0].failing
        notices.remove_hook(quick, broken.party, made.hook.id)
        sender.run()
        assert len(tried) == 3, "what waits for a hook that was removed is not sent"
    with pytest.raises(NotFound):
        notices.try_hook(quick, broken.party, made.hook.id)


PRIVATE = (
    "127.0.0.1", "10.1.2.3", "192.168.0.9", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "::1", "fd00::1", "fe80::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_webhooks_do_not_lead_into_the_operators_network(address, monkeypatch):
    resolve(monkeypatch, address)
    with pytest.raises(NotDelivered, match="private"):
        reachable("innocent.example", 443, (), secure=True)
    with pytest.raises(NotDelivered, match="private"):
        reachable("innocent.example", 443, ("10.99.0.0/16", "other.example"), secure=True)


def resolve(monkeypatch, *addresses):
    made = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 443)) for one in addresses]
    monkeypatch.setattr(deliveries.socket, "getaddrinfo", lambda *_a, **_k: made)


def test_public_and_allowed_addresses(monkeypatch):
    resolve(monkeypatch, "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946")
    assert len(reachable("example.org", 443, (), secure=True)) == 2
    with pytest.raises(NotDelivered, match="https"):
        reachable("example.org", 80, (), secure=False)
    resolve(monkeypatch, "93.184.216.34", "10.0.0.5")  # one of them is enough to be refused
    with pytest.raises(NotDelivered, match="private"):
        reachable("example.org", 443, (), secure=True)
    resolve(monkeypatch, "10.0.0.5")
    assert reachable("hooks.internal", 80, ("10.0.0.0/24",), secure=False) == ["10.0.0.5"]
    assert reachable("hooks.internal", 80, ("hooks.internal",), secure=False) == ["10.0.0.5"]


def test_the_connection_goes_to_the_address_that_was_looked_at(monkeypatch):
    """A name that stands for something else the second time (DNS rebinding) changes nothing; nor does a proxy."""
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")
    with webhook_receiver() as (address, got):
        port = int(address.split(":")[2].split("/")[0])
        asked, real = [], socket.getaddrinfo

        def lookup(host, *rest, **more):
            asked.append(host)
            if host != "hooks.example":
                return real(host, *rest, **more)
            assert asked.count(host) == 1, "it was looked up again"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        post(f"http://hooks.example:{port}/x", b"{}", {}, allow=("127.0.0.0/8",))
        assert got[0][0]["Host"] == f"hooks.example:{port}"


def test_mail(tmp_path, joined):
    with mail_server(answers=["451 later"]) as (port, got):
        mail = {"smtp_host": "127.0.0.1", "smtp_port": port, "smtp_security": "none", "mail_from": "market@example.org"}
        url = f"sqlite:///{tmp_path}/b.db"
        broker = Broker.open(Settings(database_url=url, run_worker=False, notice_first_rest=0.001, **mail))
        buyer, desk = joined(broker, "buyer"), joined(broker, "operator")
        wanted = HookRequest(kind="email", address="anna@example.org", events=["payout"])
        with pytest.raises(Forbidden):
            notices.create_hook(broker, buyer.party, buyer.party.id, wanted)
        assert notices.create_hook(broker, desk.party, buyer.party.id, wanted).secret == ""
        made = payouts.pay_out(broker, desk.party, buyer.party.id, 12_340_000, reference="October")
        payouts.mark_sent(broker, desk.party, made.id)
        empty(broker)
        ((to, raw),) = got
        message = email.message_from_bytes(raw, policy=email.policy.default)
        assert (to, message["From"], message["Subject"]) == (
            "anna@example.org", "market@example.org", "A payout was sent to you",
        )  # fmt: skip
        assert "12.34" in message.get_content()
        assert "October" in message.get_content()
        assert notices.list_notices(broker, buyer.party).items[0].tries == 2
        broker.close()


@pytest.mark.parametrize(
    "address",
    ["ftp://example.org/", "https://user:pass@example.org/", "https://exa mple.org", "https://example.org/\r\nX: y",
     "//example.org", "https://example.org\\@10.0.0.1/"],
)  # fmt: skip
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match="https://"):
        HookRequest(address=address)


def test_hooks_have_a_limit_and_a_repetition_makes_one(quick, joined):
    buyer = joined(quick, "buyer")
    wanted = HookRequest(address="https://example.org/hook")
    first = notices.create_hook(quick, buyer.party, buyer.party.id, wanted, key="k")
    assert notices.create_hook(quick, buyer.party, buyer.party.id, wanted, key="k") == first
    assert len(notices.list_hooks(quick, buyer.party).items) == 1
    desk, mail = joined(quick, "operator"), HookRequest(kind="email", address="anna@example.org")
    with pytest.raises(Conflict, match="no mail"):
        notices.create_hook(quick, desk.party, buyer.party.id, mail)
    for _ in range(9):
        notices.create_hook(quick, buyer.party, buyer.party.id, wanted)
    with pytest.raises(Conflict, match="at most 10"):
        notices.create_hook(quick, buyer.party, buyer.party.id, wanted)


def test_a_key_of_one_trial_is_none_of_another_hooks(quick, joined):
    owner = joined(quick, "owner")
    first, second = (hook(quick, owner, f"https://a.example.org/{n}").hook.id for n in range(2))
    told = notices.try_hook(quick, owner.party, first, key="k")
    assert notices.try_hook(quick, owner.party, first, key="k") == told
    with pytest.raises(KeyReused):
        notices.try_hook(quick, owner.party, second, key="k")


DISPUTE = {"dispute_id": "dp_1", "task_id": "t_1", "round": 1, "price_micros": 2_500_000, "award_id": "t_1/1/3"}
DISPUTE |= {"state": "open", "opened_by": "buyer"}
DECIDED = {"state": "decided", "decision": "pay", "note": "Her machine’s log shows it.", "credited_micros": 2_500_000}


@pytest.mark.parametrize(
    ("event", "data", "subject", "said"),
    [
        ("dispute.opened", DISPUTE, "An award is disputed", ["2.50 EUR", "round 2", "t_1/1/3", "The buyer"]),
        ("dispute.decided", DISPUTE | DECIDED, "A dispute is decided", ["2.50 EUR", "for the owner", "log shows it"]),
        ("test", {}, "A test", ["notices look like"]),
    ],
)
def test_mails_say_what_happened(event, data, subject, said):
    told = deliveries.words(event, data, "EUR")
    assert told[0] == subject
    assert not [text for text in said if text not in told[1]]
