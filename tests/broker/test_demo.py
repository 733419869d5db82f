"""The seeded market: every state to look at, and money that adds up."""

from flmarket.broker.core import Broker
from flmarket.broker.demo import is_empty, seed_demo
from flmarket.broker.office import ledger, market, parties, sessions, statements, tasks
from flmarket.broker.settings import Settings
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
    for _ in range(12):
        worker.step()
    view = market.overview(broker, None)
    assert {task.state for task in view.tasks} == {"finished", "running", "cancelled"}
    assert view.tasks_running == 3
    desk, clinic = people[-1].party, people[2].party
    assert statements.statement(broker, clinic).earned_micros > 0
    done = next(task for task in tasks.list_tasks(broker, desk).items if task.state == "finished")
    assert done.accuracy > done.baseline_accuracy + 0.15
    check = ledger.verify(broker, desk)
    assert check.ok, check.message
    broker.close()
