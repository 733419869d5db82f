"""The migrations make the tables that the code uses, on both databases; and they can be taken back."""

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from power_cuts import PowerCut, cut
from sqlalchemy import MetaData, String, Table, inspect, text

from flmarket.broker.core import Broker
from flmarket.broker.database import _MIGRATIONS, Database
from flmarket.broker.office import disputes, offers, statements, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import DecisionRequest, DisputeRequest, order_of
from flmarket.broker.settings import Settings
from flmarket.broker.tables import Base, PartyRow, TaskRow
from flmarket.broker.work.rounds import SqlStore
from flmarket.broker.work.worker import Worker


def migrate(database, revision, direction=command.upgrade):
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        direction(config, revision)


def test_migrations_and_models_agree(url):
    database = Database(url)
    database.upgrade()
    database.upgrade()  # again changes nothing
    ours = {table.name for table in Base.metadata.tables.values()}

    def only_ours(thing, name, kind, _reflected, _compared):
        return kind != "table" or name in ours

    with database.engine.connect() as connection:
        options = {"version_table": "broker_version", "include_object": only_ours}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
    migrate(database, "base", command.downgrade)
    assert not ours & set(inspect(database.engine).get_table_names())
    database.close()


def test_a_market_of_the_first_version_is_kept(url):
    """Parties whom other rows refer to stay as they are, there and back."""
    database = Database(url)
    migrate(database, "0001")
    with database.engine.begin() as connection:
        connection.execute(text("INSERT INTO broker_parties VALUES ('p_1', 'owner', 'Anna', 1, true)"))
        connection.execute(text("INSERT INTO broker_keys VALUES ('k_1', 'p_1', 'first', 'x', 1, NULL)"))
    migrate(database, "head")
    with database.read() as session:
        party = session.get_one(PartyRow, "p_1")
        assert (party.name, party.node_id, party.owner_number) == ("Anna", None, None)
    migrate(database, "0001", command.downgrade)
    with database.engine.begin() as connection:
        assert connection.execute(text("SELECT id, name FROM broker_parties")).all() == [("p_1", "Anna")]
        assert connection.execute(text("SELECT party_id FROM broker_keys")).all() == [("p_1",)]
    database.close()


def test_a_market_of_the_second_version_goes_on(url, joined, order, cheap_bid, monkeypatch):
    """Cut off in a round whose buyer then cancels, taken back to the tables of that version, and opened again."""
    broker = Broker.open(Settings(database_url=url, run_worker=False))
    buyer, owner = joined(broker, "buyer").party, joined(broker, "owner").party
    task = tasks.post_task(broker, buyer, order())
    offers.place_bid(broker, owner, task.id, cheap_bid())
    with monkeypatch.context() as patch:
        cut(patch, SqlStore, "save_round", after=False, skip=1)
        with pytest.raises(PowerCut):
            Worker(broker).run_until_idle()
    tasks.cancel_task(broker, buyer, task.id)
    broker.close()
    database = Database(url)
    migrate(database, "0002", command.downgrade)
    assert "broker_checks" not in inspect(database.engine).get_table_names()
    assert "token" not in {column["name"] for column in inspect(database.engine).get_columns("broker_leases")}
    with database.engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM broker_leases")).scalar() == 1
        connection.execute(text("UPDATE broker_leases SET expires_at = 0"))
    database.close()
    again = Broker.open(broker.settings)
    Worker(again).run_until_idle()
    done = tasks.get_task(again, buyer, task.id)
    assert (done.state, done.rounds_done) == ("cancelled", 2)
    assert reconcile(again.database.engine) == ()
    again.close()


def test_tasks_keep_the_auction_that_they_were_posted_with(url):
    """The learned auctions of this project gave their names back to the papers' mechanisms."""
    database = Database(url)
    migrate(database, "0002")
    with database.engine.begin() as connection:
        connection.execute(text("INSERT INTO broker_parties VALUES ('p_1', 'buyer', 'Anna', 1, true, NULL, NULL)"))
        tasks = Table("broker_tasks", MetaData(), autoload_with=connection)
        must = {c.name: "x" if isinstance(c.type, String) else 0 for c in tasks.columns if not c.nullable}
        must |= {"buyer_id": "p_1", "classes": []}
        for place, auction in enumerate(("dm-regretnet", "m-regretnet:flm22-niid", "posted")):
            spec = {"name": "t", "mechanism": {"auction": auction, "clip": 1.0}}
            connection.execute(tasks.insert().values(must | {"id": f"t_{place}", "spec": spec}))
    migrate(database, "head")
    with database.read() as session:
        kept = [session.get_one(TaskRow, f"t_{place}").spec["mechanism"] for place in range(3)]
    assert [one["auction"] for one in kept] == ["cleared-menu", "menu-lottery:flm22-niid", "posted"]
    assert all(one["clip"] == 1.0 for one in kept)
    database.close()


OLD_ORDER = {
    "name": "triage",
    "engine": "simulation",
    "data": {"name": "digits", "owners": 9, "partition": "power-law", "sigma": 0.5, "minimum": 3, "concentration": 0.5},
    "owners": {
        "simulated": False, "open": True, "valuations": ["linear"], "rate": {"low": 0.5, "high": 1.5},
        "privacy_budget": {"low": 0.5, "high": 2.0}, "privacy_cap_total": 12.0, "dropout": 0.25, "faulty": 0.0,
        "minimum_bids": 2,
    },
    "mechanism": {"auction": "all-in", "aggregation": "opt-aggr", "perturbation": "recommended", "clip": 0.5},
    "training": {
        "learning_rate": 0.2, "local_steps": 2, "batch_size": None, "local_learning_rate": 0.3, "average": True,
    },
    "rounds": 7, "bidders_per_round": 5, "budget_micros_per_round": 290_001, "round_seconds": 1.5,
    "deadline_seconds": 86400, "seed": 3,
}  # fmt: skip


def test_orders_of_the_fifth_version_are_read(url):
    """Their keys were the broker's own; what they said stays, to the micro-unit, also when it is taken back."""
    database = Database(url)
    migrate(database, "0005")
    with database.engine.begin() as connection:
        connection.execute(text("INSERT INTO broker_parties VALUES ('p_1', 'buyer', 'Anna', 1, true, NULL, NULL)"))
        rows = Table("broker_tasks", MetaData(), autoload_with=connection)
        must = {c.name: "x" if isinstance(c.type, String) else 0 for c in rows.columns if not c.nullable}
        must |= {"buyer_id": "p_1", "classes": [], "id": "t_1", "spec": OLD_ORDER, "features": 64, "dimension": 650}
        connection.execute(rows.insert().values(must))
    migrate(database, "head")
    with database.read() as session:
        row = session.get_one(TaskRow, "t_1")
    order = order_of(row.spec)
    said = order.model_dump(mode="json")
    for section, value in row.spec.items():  # settings that have come since have their defaults
        known = {name: said[section][name] for name in value} if isinstance(value, dict) else said[section]
        assert known == value
    assert (order.budget_micros, order.task.rounds, order.task.name, order.seed) == (290_001, 7, "triage", 3)
    assert (order.task.learning_rate, order.training.local_learning_rate, order.training.average) == (0.2, 0.3, True)
    assert (order.owners.rate, order.owners.privacy_cap, order.owners.dropout) == ((0.5, 1.5), 12.0, 0.25)
    assert (order.broker.simulated, order.broker.minimum_bids, order.broker.round_seconds) == (False, 2, 1.5)
    assert (order.mechanism.auction, order.model.name, order.data.sigma) == ("all-in", "softmax", 0.5)
    assert (row.tensors, row.dtype) == ([["weights", [10, 64]], ["biases", [10]]], "float64")
    migrate(database, "0005", command.downgrade)
    with database.engine.begin() as connection:
        rows = Table("broker_tasks", MetaData(), autoload_with=connection)
        assert connection.execute(rows.select()).one().spec == OLD_ORDER
    database.close()


def test_awards_of_before_can_be_disputed_and_count(url, joined, order, cheap_bid, play):
    """What the eleventh version settled stays as it is, also when disputes are taken back, and counts from then on."""
    broker = Broker.open(Settings(database_url=url, run_worker=False))
    buyer, owner, desk = (joined(broker, role).party for role in ("buyer", "owner", "operator"))
    task = tasks.post_task(broker, buyer, order(rounds=2, bidders_per_round=12)).id
    offers.place_bid(broker, owner, task, cheap_bid())
    play(broker)
    kept = statements.statement(broker, owner)
    assert kept.reputation.ended == 2
    broker.close()
    database = Database(url)
    migrate(database, "0011", command.downgrade)
    assert "broker_disputes" not in inspect(database.engine).get_table_names()
    with database.engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM broker_releases")).scalar_one() >= 2
    database.close()
    again = Broker.open(Settings(database_url=url, run_worker=False))
    assert statements.statement(again, owner) == kept
    made = disputes.open_dispute(again, owner, DisputeRequest(award_id=kept.releases[0].award_id, reason="late"))
    disputes.decide(again, desk, made.id, DecisionRequest(decision="pay", note="it was paid"))
    assert reconcile(again.database.engine) == ()
    again.close()
