"""The seeded market: every state to look at, and money that adds up."""

from dataclasses import replace

from sqlalchemy import func, select

from flmarket.broker import demo
from flmarket.broker.core import Broker
from flmarket.broker.demo import is_empty, seed_demo
from flmarket.broker.office import ledger, market, parties, payouts, sessions, statements, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.settings import Settings
from flmarket.broker.tables import Release, RoundRow
from flmarket.broker.work.worker import Worker


def test_the_demo_is_alive(tmp_path):
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/demo.db", run_worker=False))
    assert is_empty(broker)
    people = seed_demo(broker, round_seconds=0.05)
    assert not is_empty(broker)
    assert [one.party.role for one in people] == ["buyer", "buyer", "owner", "owner", "owner", "operator"]
    for one in people:
        assert parties.party_of_key(broker, one.key) == one.party
        assert sessions.redeem_link(broker, one.link.rpartition("/")[2]).view.party.id == one.party.id
    worker = Worker(broker)
    for _ in range(20):
        worker.step()
    view = market.overview(broker, None)
    assert {task.state for task in view.tasks} == {"finished", "running", "cancelled"}
    assert view.tasks_running == len(demo.SERIES)
    assert {task.kind for task in view.tasks} == {"auction", "sampling", "reward", "joint"}
    desk, clinic = people[-1].party, people[2].party
    assert statements.statement(broker, clinic).earned_micros > 0
    done = next(task for task in tasks.list_tasks(broker, desk).items if task.state == "finished")
    assert done.accuracy > done.baseline_accuracy + 0.15
    check = ledger.verify(broker, desk)
    assert check.ok, check.message
    broker.close()


HOUR_MS = 3_600_000


def test_a_stranger_after_an_hour_finds_a_living_market(tmp_path, monkeypatch):
    """An hour of the market's own time, in which tasks end, caps are used up and a visitor breaks what he can."""
    clock = FakeClock()
    monkeypatch.setattr("flmarket.broker.stamps.time", clock)
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/demo.db", run_worker=False))
    quick = {"data": {"owners": 12, "sigma": 0.5}, "training": {"average": False}}
    series = tuple(
        replace(one, rounds=3, bidders=4, order=one.order if "kind" in one.order else {**one.order, **quick})
        for one in demo.SERIES
    )
    people = [demo._join(broker, "buyer", name) for name, _ in demo._BUYERS]
    people += [demo._join(broker, "owner", name, 0.25) for name, _ in demo._OWNERS]
    people.append(demo._join(broker, "operator", demo._DESK))
    market_ = demo.Demo(broker, people, series=series, round_seconds=240.0)
    life = []
    worker, began, checked = Worker(broker), clock.ms, 0
    desk, buyer = people[-1].party, people[0].party
    while clock.ms < began + HOUR_MS:
        market_.tend()
        while worker.step():
            pass
        clock.ms += 48_000
        minutes = (clock.ms - began) // 60_000
        if minutes > 16 and minutes // 10 > checked:
            checked = minutes // 10
            _vandalise(broker, desk, buyer, checked)
            life.append(_signs_of_life(broker, since=clock.ms - 15 * 60_000))
    market_.tend()
    assert len(life) >= 4
    assert all(one["settled"] > 0 and one["sold_by_registered"] > 0 for one in life), life
    assert [one.party.role for one in market_.people] == [one.party.role for one in people]
    assert market_.people[2:5] != tuple(people[2:5]), "nobody's cap was used up: this hour shows too little"
    for one in market_.people:
        assert sessions.redeem_link(broker, one.link.rpartition("/")[2]).view.party.id == one.party.id
    view = market.overview(broker, None)
    assert view.tasks_running == len(series)
    posted = [task.name for task in tasks.list_tasks(broker, desk).items]
    assert all(one.number(3) in posted for one in series), posted
    owners = [one.party for one in market_.people if one.party.role == "owner"]
    assert all(statements.privacy(broker, owner).left_epsilon_total > 0 for owner in owners)
    assert ledger.verify(broker, desk).ok
    assert reconcile(broker.database.engine) == ()
    worker.stop()
    broker.close()
    again = Broker.open(broker.settings)  # as after kill -9
    found = demo.find_demo(again)
    assert {one.party.id for one in found} == {one.party.id for one in market_.people}
    assert [one.party.id for one in found if one.party.role != "owner"] == [people[i].party.id for i in (0, 1, -1)]
    assert parties.party_of_key(again, found[0].key).id == found[0].party.id
    again.close()


class FakeClock:
    """The hour that the market's stamps are read from."""

    def __init__(self):
        self.ms = 1_800_000_000_000

    def time_ns(self):
        self.ms += 1  # no two things happen at once
        return self.ms * 1_000_000


def _vandalise(broker, desk, buyer, turn):
    """What a visitor who is everybody can do to the market."""
    if turn % 2:
        for task in tasks.list_tasks(broker, buyer).items:
            if task.state in ("queued", "running"):
                tasks.cancel_task(broker, buyer, task.id)
        parties.set_active(broker, desk, buyer.id, active=False)
    else:
        parties.reissue_key(broker, desk, buyer.id)  # her links end too
        payouts.pay_out(broker, desk, buyer.id, broker.books.ledger.balance(buyer.id))


def _signs_of_life(broker, since):
    with broker.database.read() as session:
        settled = select(func.count()).where(RoundRow.state == "settled", RoundRow.closed_at > since)
        sold = select(func.count()).where(Release.party_id.is_not(None), Release.at > since, Release.state == "posted")
        return {"settled": session.scalar(settled), "sold_by_registered": session.scalar(sold)}
