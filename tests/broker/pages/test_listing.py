"""Tasks for everybody: terms that both sides can sign, what strangers may watch, and tasks side by side."""

import hashlib
import json
import re

import httpx
import pytest
from sqlalchemy import update

from flmarket.broker.app import create_app
from flmarket.broker.errors import Conflict
from flmarket.broker.office import listing, offers, statements, tasks
from flmarket.broker.tables import TaskRow
from flmarket.broker.work.worker import Worker
from flmarket.report.formatting import money


@pytest.fixture
def scene(small, joined, order, cheap_bid, play, serve):
    """A market with a played and an open task, a client, and the people; the buyer has a secret seed."""
    buyer, owner = joined(small, "buyer", "Orchard Labs"), joined(small, "owner", "Anna")
    played = tasks.post_task(small, buyer.party, order(rounds=2, seed=918273, bidders_per_round=12)).id
    offers.place_bid(small, owner.party, played, cheap_bid())
    play(small)
    named = {"purpose": "Triage of biopsies", "named": True}
    open_ = tasks.post_task(small, buyer.party, order(budget_per_round=77.0, name="Open & <b>new</b>", **named)).id
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield small, client, buyer, owner, played, open_


def test_the_terms_are_public_and_their_hash_is_that_of_the_file(scene):
    broker, client, _, _, played, open_ = scene
    for task in (played, open_):
        page = client.get(f"/market/{task}")
        assert page.status_code == 200
        text = client.get(f"/market/{task}/terms.json").content
        digest = hashlib.sha256(text).hexdigest()
        assert digest in page.text
        assert listing.listing(broker, None, task).terms_hash == digest
        terms = json.loads(text)
        assert terms["privacy"]["trust"] == "simulated at the broker"
        assert "simulated at the broker" in page.text
        assert "seed" not in terms["order"], "whoever knows the seed can take the noise off"
        assert "918273" not in text.decode()
    assert "Orchard Labs" not in client.get(f"/market/{played}").text
    page = client.get(f"/market/{open_}").text
    assert "Orchard Labs" in page
    assert "Triage of biopsies" in page
    assert "<b>new</b>" not in page
    assert client.get("/market/t_nothing").status_code == 404


def test_terms_never_change_and_those_of_older_versions_are_worked_out(scene):
    broker, _, _, _, played, _ = scene
    before = listing.terms_text(broker, played)
    with broker.database.write() as session:
        session.execute(update(TaskRow).values(name="renamed"))
    assert listing.terms_text(broker, played) == before
    with broker.database.write() as session:
        session.execute(update(TaskRow).values(name="test", listing=None))
    assert listing.terms_text(broker, played) == before


def test_an_owner_accepts_terms_and_no_others(scene, cheap_bid):
    broker, client, _, owner, played, open_ = scene
    right, wrong = (listing.listing(broker, None, task).terms_hash for task in (open_, played))
    with pytest.raises(Conflict, match="not the terms"):
        offers.place_bid(broker, owner.party, open_, cheap_bid(terms=wrong))
    assert offers.place_bid(broker, owner.party, open_, cheap_bid()).terms is None
    assert offers.place_bid(broker, owner.party, open_, cheap_bid(terms=right)).terms == right
    assert client.post("/sign-in", data={"key": owner.key}).status_code == 303
    csrf = re.search(r'name="csrf_token" value="([^"]+)"', client.get("/owner/bid").text)[1]
    form = {"csrf_token": csrf, "task": open_, "epsilon": "1", "kind": "linear", "rate": "2", "records": ""}
    assert client.post("/owner/bid", data=form).status_code == 422
    assert client.post("/owner/bid", data=form | {"accept": "on"}).status_code == 303
    bid = offers.my_bid(broker, owner.party, open_)
    assert (bid.rate, bid.terms) == (2.0, right)


def test_strangers_watch_counts_and_sums_only(scene):
    broker, client, buyer, _, played, _ = scene
    page = client.get(f"/market/{played}/live").text
    stream = client.get(f"/market/{played}/stream").text
    mine = tasks.round_detail(broker, buyer.party, played, 1)
    accuracy = f"{tasks.get_task(broker, buyer.party, played).accuracy:.3f}"
    secrets = [one.owner for one in mine.awards] + ["Anna", "Orchard", buyer.party.id, accuracy, "accuracy 0"]
    for text in (page, stream):
        assert "Round 2 of 2" in text
        assert not [secret for secret in secrets if secret in text]
    assert "event: finished" in stream
    events = json.dumps([one.data for one in listing.public_events(broker, played, after=0)])
    assert not re.search("accuracy|epsilon|slot|owner|loss|error", events)
    assert f"{mine.round.spent_micros}" in events, "what was paid in all is public"


def test_tasks_side_by_side(scene):
    _, client, _, _, played, open_ = scene
    page = client.get("/market/compare", params={"task": [played, open_]}).text
    rows = {
        re.sub("<.*?>", "", name): (differs, re.findall(r'class="wraps">([^<]*)', cells))
        for differs, name, cells in re.findall(
            r'<tr( class="differs")?><th scope="row"[^>]*>(.*?)</th>(.*?)</tr>', page
        )
    }
    assert rows["Budget, differs"][1] == ["100.00 units for a round", "77.00 units for a round"]
    assert rows["Trust"] == ("", ["simulated at the broker"] * 2)
    assert rows["Delivered, differs"][1][1] == "0 of 0 updates of the last 0 rounds"
    chooser = client.get("/market/compare", params={"task": played}).text
    assert "Choose two to four" in chooser
    assert re.findall(r'"checkbox" name="task" value="(\w+)"( checked)?', chooser) == [
        (open_, ""),
        (played, " checked"),
    ]
    assert "No task by that name" in client.get("/market/compare", params={"q": "nowhere"}).text
    assert "/market/compare" in client.get("/").text
    assert client.get("/market/compare", params={"task": [played, "t_none"]}).status_code == 404


def test_the_helper_says_what_the_task_itself_has_paid(scene, order, cheap_bid):
    broker, client, buyer, owner, _, open_ = scene
    begun = tasks.post_task(broker, buyer.party, order(rounds=9, bidders_per_round=12)).id
    offers.place_bid(broker, owner.party, begun, cheap_bid())
    worker = Worker(broker)
    while tasks.get_task(broker, buyer.party, begun).rounds_done < 2:
        worker.step()
    worker.stop()
    assert client.post("/sign-in", data={"key": owner.key}).status_code == 303
    sold = [one for one in statements.statement(broker, owner.party).releases if one.task_id == begun]
    mean = sum(one.paid_micros for one in sold) // len(sold)
    asked = {"epsilon": "0.5", "kind": "linear", "rate": "1", "records": ""}
    text = re.sub("<.*?>", "", client.get("/owner/bid/help", params=asked | {"task": begun}).text)
    assert f"In this task you were paid {len(sold)} times so far, {money(mean)} a round on average." in text
    assert "you were paid" not in client.get("/owner/bid/help", params=asked | {"task": open_}).text


def test_a_task_like_another(scene):
    """The form comes filled in as for the other task; posting it gives the same order, but for the seed."""
    _, client, buyer, _, _, open_ = scene
    assert client.post("/sign-in", data={"key": buyer.key}).status_code == 303
    text = client.get(f"/tasks/new?like={open_}").text
    fields = dict(re.findall(r'<input[^>]* name="(\w+)"[^>]* value="([^"]*)"', text))
    assert (fields["budget"], fields["rounds"], fields["bidders"], fields["owners"]) == ("77", "3", "8", "12")
    assert fields["seed"] == "0"
    assert fields["purpose"] == "Triage of biopsies"
    assert re.search(r'name="named" value="on" checked', text)
    assert client.get("/tasks/new?like=t_nothing").status_code == 404


def test_the_facts_of_a_task(scene):
    broker, client, buyer, owner, played, _ = scene
    found = listing.listing(broker, None, played)
    rounds = tasks.rounds(broker, buyer.party, played).items
    assert (found.rounds_looked_at, found.updates_awarded) == (2, sum(one.winners for one in rounds))
    assert found.updates_delivered == sum(one.delivered for one in rounds)
    assert found.locked_micros == 0, "the rest went back"
    sold = {}
    for one in rounds:
        for award in tasks.round_detail(broker, buyer.party, played, one.index).awards:
            sold[award.owner] = sold.get(award.owner, 0.0) + (award.epsilon if award.state == "posted" else 0.0)
    assert found.epsilon_most_total == pytest.approx(max(sold.values()))
    assert found.receipts == sum(one.winners for one in rounds)
    came = f"{found.updates_delivered} of {found.updates_awarded}"
    for page in (f"/market/{played}", f"/market/{played}/live"):
        assert found.terms_hash[:12] in client.get(page).text
        assert f"<dt>Delivered</dt><dd><b>{came}</b>" in client.get(page).text
    api = client.get(f"/api/v1/listings/{played}", headers=owner.headers).json()
    assert api["terms_hash"] == found.terms_hash


@pytest.mark.parametrize(("limit", "start"), [(None, 0), (3, 0), (3, 3), (100, 2)])
def test_awards_by_the_page(scene, limit, start):
    broker, _, buyer, _, played, _ = scene
    whole = tasks.round_detail(broker, buyer.party, played, 0).awards
    assert [one.owner for one in whole] == sorted(one.owner for one in whole)
    some = tasks.round_detail(broker, buyer.party, played, 0, limit=limit, start=start).awards
    assert some == whole[start:][:limit]
