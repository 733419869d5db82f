"""Words against what is so: a service that simulates, an owner near her cap, reports of runs on one machine.

Nobody here breaks in. The attack is a sentence that lets an owner sell what she would not have sold: that her records
stay with her when the broker has them, that an update is harmless when it is the last of many, that a bid will be paid
when her cap forbids it.
"""

import contextlib
import html
import json
import math
import re
import warnings

import httpx
import pytest
from brokers import serving

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker, Party
from flmarket.broker.office import offers, parties, statements, tasks
from flmarket.broker.settings import Settings
from flmarket.broker.work.worker import Worker
from flmarket.ledger import Award, AwardState, Release, Resolution
from flmarket.privacy import PureDp

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what typer takes from click
    from flmarket.cli.app import app

API = "/api/v1"

# What may be said of owners' own machines only.
FALSE = re.compile(
    r"at home|stays? home|(?:left|leave|leaves) (?:your|her|their) machine|your machine|some simulated", re.I
)
BROKER_HOLDS = "the broker holds all records"


def text_of(answer):
    assert answer.status_code == 200, answer.text[:300]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", answer.text)))


def spend(broker, buyer, owner, epsilon):
    """The owner has released so much: on the ledger, which counts for life."""
    parties.deposit(broker, None, buyer.id, 1)
    award = Award(f"before/{owner.id}", 0, buyer.id, owner.id, epsilon, 1)
    broker.books.ledger.hold(award)
    release = Release(award.id, "privunit", PureDp(epsilon))
    broker.books.ledger.resolve_many([Resolution(award.id, AwardState.POSTED, "", release)])


@contextlib.contextmanager
def signed_in(address, person):
    with httpx.Client(base_url=address, timeout=60) as client:
        assert client.post(f"{API}/session", json={"key": person.key}).status_code == 201
        yield client


def test_an_owner_near_her_cap_reads_the_worst_case_of_all_she_sold(small, joined, order):
    """Spent 11.99 of 12, a task of 14 rounds: the odds are those of 12, and nothing is promised beyond 0.01."""
    buyer, owner = joined(small, "buyer"), joined(small, "owner")
    statements.set_cap(small, owner.party, 12.0)
    spend(small, buyer.party, owner.party, 11.99)
    task = tasks.post_task(small, buyer.party, order(rounds=14))
    bid = {"valuation": {"kind": "linear", "rate": 0.01}, "privacy_budget": 0.5, "data_size": 10}
    with serving(create_app(broker=small)) as address, signed_in(address, owner) as client:
        view = client.post(f"{API}/bid-help", json={"bid": bid}, headers=owner.headers).json()
        assert view["epsilon"]["epsilon"] == pytest.approx(12.0)
        assert view["epsilon"]["certainty_from_half"] == pytest.approx(math.exp(12) / (1 + math.exp(12)))
        assert view["mean_epsilon_if_won"] <= 0.01 + 1e-9
        many = client.post(f"{API}/bid-help", json={"bid": bid, "rounds": 14}, headers=owner.headers).json()
        assert many["rounds_paid_most"] <= 1
        assert many["expected_payment_micros_total"] <= many["mean_payment_micros_if_won"]
        shown = text_of(
            client.get("/owner/bid/help", params={"task": task.id, "epsilon": 0.5, "kind": "linear", "rate": 0.01})
        )
        assert " 50.0 %" not in shown
        assert "more than 99.99 %" in shown
        assert re.search(r"be paid for [01] at most|not have sold in a single round", shown), shown
        page = text_of(client.get("/owner"))
        assert "more than 99.99 %" in page
    words = statements.privacy(small, owner.party).words
    assert "in total" in words
    assert "sure" in words


def test_an_owner_at_her_cap_is_promised_nothing(small, joined, order):
    buyer, owner = joined(small, "buyer"), joined(small, "owner")
    statements.set_cap(small, owner.party, 4.0)
    spend(small, buyer.party, owner.party, 4.0)
    task = tasks.post_task(small, buyer.party, order(rounds=14))
    bid = {"valuation": {"kind": "linear", "rate": 0.01}, "privacy_budget": 0.5}
    with serving(create_app(broker=small)) as address, signed_in(address, owner) as client:
        view = client.post(f"{API}/bid-help", json={"bid": bid}, headers=owner.headers).json()
        promised = ("wins", "mean_payment_micros", "mean_payment_micros_if_won", "mean_epsilon_if_won")
        assert [view[name] for name in promised] == [0] * 4
        assert "cap is reached" in view["words"]
        shown = text_of(
            client.get("/owner/bid/help", params={"task": task.id, "epsilon": 0.5, "kind": "linear", "rate": 0.01})
        )
        assert "nothing is paid" in shown


def test_what_is_promised_under_a_cap_is_what_is_paid(small, joined, order, cheap_bid):
    """An owner with room for three rounds bids in ten: the helper's most is what the market buys of her, or more."""
    buyer, owner = joined(small, "buyer"), joined(small, "owner")
    statements.set_cap(small, owner.party, 1.6)
    bid = cheap_bid(0.5)
    from flmarket.broker.office import explore
    from flmarket.broker.requests import BidHelpRequest

    view = explore.bid_help(small, owner.party, BidHelpRequest(bid=bid, rounds=10, profiles=50))
    assert view.rounds_paid_most == 3
    task = tasks.post_task(small, buyer.party, order(rounds=10, bidders_per_round=12))
    offers.place_bid(small, owner.party, task.id, bid)
    worker = Worker(small)
    worker.run_until_idle()
    worker.stop()
    sold = [one.epsilon for one in statements.statement(small, owner.party).releases if one.state == "posted"]
    assert sum(sold) <= 1.6 * (1 + 1e-9)
    assert sum(epsilon >= 0.5 * (1 - 1e-9) for epsilon in sold) <= view.rounds_paid_most


def test_a_new_owners_cap_is_small_and_an_old_ones_is_kept(tmp_path):
    settings = Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False)
    with contextlib.closing(Broker.open(settings)) as broker:
        made = parties.create_party(broker, None, role="owner", name="Anna")
        anna = Party(made.id, made.role, made.name)
        cap = statements.privacy(broker, anna).cap_epsilon_total
        assert cap <= 4
        assert math.exp(cap) / (1 + math.exp(cap)) < 0.99
        assert "95 %" in statements.privacy(broker, anna).words
        statements.set_cap(broker, anna, 100.0)  # what the version before gave everybody
    with contextlib.closing(Broker.open(settings)) as broker:
        assert statements.privacy(broker, anna).cap_epsilon_total == 100.0


def test_a_service_that_simulates_says_so_to_everybody(small, joined, order, cheap_bid, capsys):
    """Plain `flmarket serve`: on no page and in no answer do records or noise seem to be elsewhere than there."""
    people = {role: joined(small, role) for role in ("buyer", "owner", "operator")}
    whole = tasks.post_task(small, people["buyer"].party, order(name="whole", rounds=1))
    mixed = tasks.post_task(small, people["buyer"].party, order(name="mixed", rounds=1, bidders_per_round=12))
    offers.place_bid(small, people["owner"].party, mixed.id, cheap_bid())
    helper = f"/owner/bid/help?task={whole.id}&epsilon=0.5&kind=linear&rate=1"
    paths = {
        None: ["/", "/sign-in", "/ledger"],
        "buyer": ["/", "/tasks", "/tasks/new", "/audit", "/ledger"],
        "owner": ["/", "/owner", "/owner/bid", helper, "/audit"],
        "operator": ["/", "/operator", "/tasks", "/ledger"],
    }
    for one in (whole.id, mixed.id):
        paths["buyer"] += [f"/tasks/{one}", f"/tasks/{one}/live", f"/tasks/{one}/rounds/1", f"/tasks/{one}/stream"]
    with serving(create_app(broker=small)) as address:
        before = [("owner", "/owner")]
        worker = Worker(small)
        for moment in ("before", "after"):
            for role, path in before if moment == "before" else [(r, p) for r, all in paths.items() for p in all]:
                with httpx.Client(base_url=address, timeout=60) as client:
                    if role:
                        assert client.post(f"{API}/session", json={"key": people[role].key}).status_code == 201
                    shown = text_of(client.get(path))
                    assert not FALSE.findall(shown), (role, path, FALSE.findall(shown))
                    if path in ("/", "/owner", "/tasks/new", f"/tasks/{whole.id}", helper):
                        assert BROKER_HOLDS in shown, (role, path)
                    if path.endswith("/live"):
                        assert "simulated at the broker" in shown
            if moment == "before":
                worker.run_until_idle()
                worker.stop()
        with signed_in(address, people["buyer"]) as client:
            assert "12, all simulated" in text_of(client.get(f"/tasks/{whole.id}"))
            assert "12: 1 registered, 11 simulated" in text_of(client.get(f"/tasks/{mixed.id}"))
        with signed_in(address, people["owner"]) as client:
            sold = client.get(f"{API}/me/statement").json()["releases"]
            assert {one["place"] for one in sold} == {"simulated at the broker"}
            assert "simulated at the broker" in client.get(f"{API}/me/statement.csv").text
        for arguments, role in ((["buyer", "task", whole.id], "buyer"), (["owner", "advise", *ADVISE], "owner")):
            said = run([*arguments, "--url", address, "--key", people[role].key], capsys)
            assert "simulated at the broker" in said
            assert not FALSE.findall(said)


ADVISE = ["--rate", "1", "--epsilon", "0.5"]


def run(arguments, capsys):
    """A command's output on one line."""
    app(arguments, standalone_mode=False)
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_task_on_owners_machines_says_so(tmp_path, joined, order):
    with contextlib.closing(
        Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, superlink="broker"))
    ) as broker:
        buyer = joined(broker, "buyer")
        task = tasks.post_task(broker, buyer.party, order(engine="flower"))
        with serving(create_app(broker=broker)) as address, signed_in(address, buyer) as client:
            shown = text_of(client.get(f"/tasks/{task.id}"))
            assert "stay on each owner’s own machine" in shown
            assert BROKER_HOLDS not in shown


RUNS = {
    "market": ["demo", "--rounds", "1", "--out"],
    "audit": ["audit", "m1", "--profiles", "2", "--owners", "3", "--search", "quick", "--report"],
    "sampling": ["audit", "sampling:optimal", "--profiles", "2", "--owners", "3", "--search", "quick", "--report"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_reports_and_commands_say_where_records_and_noise_are(tmp_path, kind, capsys):
    target = tmp_path if kind == "market" else tmp_path / "report.html"
    said = run([*RUNS[kind], str(target)], capsys)
    page = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", (tmp_path / "report.html").read_text())))
    needed = (
        ["one program holds all records", "one owner’s whole data set", "in total", "broker and a buyer"]
        if kind == "market"
        else ["there are no records and no noise", "per round", "broker or buyer"]
    )
    for text in (page, said):
        assert not FALSE.findall(text)
        assert [one for one in needed if one not in text] == []
    if kind == "market":
        app([*RUNS[kind], str(target), "--json"], standalone_mode=False)
        assert json.loads(capsys.readouterr().out)["words"]["simulated"] is True
