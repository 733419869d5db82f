"""The migrations make the tables that the code uses, on both databases, and keep what older versions stored."""

import io

import numpy as np
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from power_cuts import PowerCut, cut
from sqlalchemy import JSON, Boolean, Float, LargeBinary, MetaData, String, Table, inspect, select, text

from flmarket.broker.core import Broker
from flmarket.broker.database import _MIGRATIONS, Database
from flmarket.broker.office import disputes, offers, statements, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import DecisionRequest, DisputeRequest, order_of
from flmarket.broker.settings import Settings
from flmarket.broker.tables import ApiKey, Base, PartyRow, RoundRow, TaskRow
from flmarket.broker.work.rounds import SqlStore
from flmarket.broker.work.worker import Worker


def migrate(database, revision):
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def tables_of(connection):
    """The broker's tables as they are in the database, those that others refer to first."""
    found = MetaData()
    found.reflect(connection, only=lambda name, _: name.startswith("broker_") and name != "broker_version")
    return {table.name: table for table in found.sorted_tables}


def take_back(database, revision, folder):
    """As an older version has it: what that one had no place for is gone."""
    then = Database(f"sqlite:///{folder}/then.db")
    migrate(then, revision)
    with then.engine.connect() as connection:
        old = tables_of(connection)
    then.close()
    with database.engine.begin() as connection:
        for name, table in reversed(tables_of(connection).items()):
            if name not in old:
                table.drop(connection)
                continue
            if name == "broker_tasks" and revision < "0006":
                for row in connection.execute(select(table.c.id, table.c.spec)).all():
                    connection.execute(table.update().where(table.c.id == row.id).values(spec=flat(row.spec)))
            for index in table.indexes:
                if index.name not in {one.name for one in old[name].indexes}:
                    index.drop(connection)
            for column in set(table.columns.keys()) - set(old[name].columns.keys()):
                connection.execute(text(f"ALTER TABLE {name} DROP COLUMN {column}"))
        connection.execute(text(f"UPDATE broker_version SET version_num = '{revision}'"))


def flat(order):
    """An order in the broker's own keys, as before version 0006; what those could not say is lost."""
    task, owners, broker = order["task"], order["owners"], order["broker"]

    def only(section, *keys):
        return {key: section[key] for key in keys}

    return {
        "name": task["name"],
        "engine": broker["engine"],
        "data": only(order["data"], "owners", "partition", "sigma", "minimum", "concentration")
        | {"name": order["data"]["name"] or "breast-cancer"},
        "owners": only(owners, "valuations", "dropout", "faulty")
        | only(broker, "simulated", "open", "minimum_bids")
        | {key: {"low": owners[key][0], "high": owners[key][1]} for key in ("rate", "privacy_budget")}
        | {"privacy_cap_total": min(owners["privacy_cap"] or 10_000.0, 10_000.0)},
        "mechanism": only(order["mechanism"], "auction", "aggregation", "perturbation", "clip"),
        "training": only(order["training"], "local_steps", "batch_size", "local_learning_rate", "average")
        | {"learning_rate": task["learning_rate"]},
        "rounds": task["rounds"],
        "bidders_per_round": task["bidders_per_round"],
        "budget_micros_per_round": round(task["budget_per_round"] * 1_000_000),
        "round_seconds": broker["round_seconds"],
        "deadline_seconds": broker["deadline_seconds"],
        "seed": order["seed"],
    }


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
    database.close()


def test_a_market_of_the_first_version_is_kept(url):
    """Parties whom other rows refer to stay as they are."""
    database = Database(url)
    migrate(database, "0001")
    with database.engine.begin() as connection:
        connection.execute(text("INSERT INTO broker_parties VALUES ('p_1', 'owner', 'Anna', 1, true)"))
        connection.execute(text("INSERT INTO broker_keys VALUES ('k_1', 'p_1', 'first', 'x', 1, NULL)"))
    migrate(database, "head")
    with database.read() as session:
        party = session.get_one(PartyRow, "p_1")
        assert (party.name, party.node_id, party.owner_number) == ("Anna", None, None)
        assert session.scalars(select(ApiKey.party_id)).all() == ["p_1"]
    database.close()


def test_a_market_of_the_second_version_goes_on(url, joined, order, cheap_bid, monkeypatch, tmp_path):
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
    take_back(database, "0002", tmp_path)
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


@pytest.mark.parametrize("former", ["a round without its plan", "a checkpoint without notes"])
def test_a_task_that_another_version_began_otherwise_ends_with_its_money_back(
    small, joined, order, cheap_bid, monkeypatch, former
):
    buyer, owner = joined(small, "buyer").party, joined(small, "owner").party
    before = small.books.ledger.balance(buyer.id)
    task = tasks.post_task(small, buyer, order())
    offers.place_bid(small, owner, task.id, cheap_bid())
    with monkeypatch.context() as patch:
        cut(patch, SqlStore, "save_round", after=False, skip=1)
        with pytest.raises(PowerCut):
            Worker(small).run_until_idle()
    with small.database.write() as session:
        session.execute(text("UPDATE broker_leases SET expires_at = 0"))
        row = session.get_one(RoundRow, (task.id, 1))
        if former == "a round without its plan":
            row.opened = {name: value for name, value in row.opened.items() if name != "plan"}
        else:
            saved, out = np.load(io.BytesIO(session.get_one(TaskRow, task.id).checkpoint)), io.BytesIO()
            np.savez(out, **{name: saved[name] for name in saved.files if name != "notes"})
            session.get_one(TaskRow, task.id).checkpoint = out.getvalue()
    Worker(small).run_until_idle()
    done = tasks.get_task(small, buyer, task.id)
    assert done.state == "failed"
    assert "cannot be played on" in done.error
    assert before - small.books.ledger.balance(buyer.id) == done.spent_micros > 0
    assert reconcile(small.database.engine) == ()


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
    """Their keys were the broker's own; what they said stays, to the micro-unit."""
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
    assert flat(row.spec) == OLD_ORDER
    database.close()


# --- rows in every table of every version -----------------------------------------------------------------------------

REVISIONS = [one.revision for one in ScriptDirectory(str(_MIGRATIONS)).walk_revisions()][::-1]
ORDERS = {"t_full": "dm-regretnet", "t_bare": "posted"}  # the first auction has another name since 0005


def fill(connection, revision, order):
    """Two rows in every table that has none: one with everything in it, one with as little as it may."""
    for name, table in tables_of(connection).items():
        if connection.execute(select(table)).first() is not None:
            continue  # secrets, which a migration makes
        for place, label in enumerate(("full", "bare")):
            row = {}
            for column in table.columns:
                if column.nullable and label == "bare":
                    continue
                if column.foreign_keys:
                    (key,) = column.foreign_keys
                    row[column.name] = f"{key.column.table.name[7]}_{label}"
                elif isinstance(column.type, JSON):
                    row[column.name] = [place, {"ε": 0.1}]
                elif isinstance(column.type, LargeBinary):
                    row[column.name] = bytes([0, 255, place])
                elif isinstance(column.type, Boolean):
                    row[column.name] = place == 0
                elif isinstance(column.type, String):
                    row[column.name] = (
                        f"{name[7]}_{label}" if column.name == "id" else f"{column.name} of {label}, ü"[:16]
                    )
                else:
                    row[column.name] = 0.1 + place if isinstance(column.type, Float) else 10 + place
            if name == "broker_tasks":
                auction = ORDERS[row["id"]] if revision < "0005" else "cleared-menu"
                old = OLD_ORDER | {"mechanism": OLD_ORDER["mechanism"] | {"auction": auction}}
                row |= {"spec": old if revision < "0006" else order, "dimension": 650, "features": 64}
            connection.execute(table.insert().values(row))


def contents(connection):
    """Every row of every table, by its key."""
    found = {}
    for name, table in tables_of(connection).items():
        keys = [column.name for column in table.primary_key]
        rows = connection.execute(select(table)).mappings().all()
        found[name] = {tuple(row[key] for key in keys): dict(row) for row in rows}
    return found


def lost(before, after, revision):
    """What is not as it was, beyond what the migrations say that they change."""
    for name, rows in before.items():
        if name == "broker_sessions" and revision < "0004":  # nobody knows which key they came from: they end
            yield from (f"{name} {key} is still there" for key in after[name])
            continue
        yield from (f"{name} {key} is new" for key in after[name].keys() - rows.keys())
        for key, row in rows.items():
            there = after[name].get(key, {})
            rewritten = {"spec"} if name == "broker_tasks" and revision < "0006" else set()
            yield from (f"{name} {key}.{one}" for one in row.keys() - rewritten if there.get(one) != row[one])
            wanted = Base.metadata.tables[name].columns
            for one in there.keys() - row.keys():  # a column that came since
                given = wanted[one].server_default
                default = None if given is None else given.arg
                plain = {None: None, "0": 0, "float64": "float64", "[]": there[one]}[default]
                if there[one] != plain or (plain is None and not wanted[one].nullable):
                    yield f"{name} {key}.{one} is {there[one]!r}"
    made = {"broker_secrets": 2}
    yield from (f"{name} has rows" for name in after.keys() - before.keys() if len(after[name]) != made.get(name, 0))


# on PostgreSQL, where each takes longer, from the first, the last, and the one before orders were written anew
VERSIONS = [("sqlite", one) for one in REVISIONS[:-1]]
VERSIONS += [("postgresql", one) for one in (REVISIONS[0], "0005", REVISIONS[-2])]


@pytest.mark.parametrize(("url", "revision"), VERSIONS, indirect=["url"])
def test_rows_of_every_version_are_kept(url, order, revision):
    database, newest = Database(url), order().model_dump(mode="json")
    migrate(database, revision)
    with database.engine.begin() as connection:
        fill(connection, revision, newest)
        before = contents(connection)
    assert all(before.values())
    database.upgrade()
    with database.engine.connect() as connection:
        after = contents(connection)
        assert connection.execute(text("SELECT version_num FROM broker_version")).scalar() == REVISIONS[-1]
    assert list(lost(before, after, revision)) == []
    assert {name: set(row) for name, rows in after.items() for row in rows.values()} == {
        table.name: set(table.columns.keys()) for table in Base.metadata.tables.values() if after[table.name]
    }
    with database.read() as session:  # and the service can read them
        for mapper in Base.registry.mappers:
            assert len(session.scalars(select(mapper.class_)).all()) == len(after[mapper.local_table.name])
        for task_id, auction in ORDERS.items():
            row = session.get_one(TaskRow, task_id)
            wanted = order_of(row.spec)
            if revision < "0006":
                renamed = "posted" if revision < "0005" and auction == "posted" else "cleared-menu"
                assert (wanted.mechanism.auction, wanted.budget_micros) == (renamed, 290_001)
                assert row.tensors == [["weights", [10, 64]], ["biases", [10]]]
            else:
                assert wanted == order()
    if database.is_sqlite:
        with database.engine.connect() as connection:
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
    database.close()


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        ("DELETE FROM broker_events WHERE id = 11", "broker_events"),
        ("UPDATE broker_bids SET rate = 0", ".rate"),
        ("UPDATE broker_leases SET token = 7", ".token"),
        ("INSERT INTO broker_facts VALUES ('currency', 'EUR')", "broker_facts has rows"),
    ],
)
def test_a_migration_that_harms_would_be_found(tmp_path, order, harm, found):
    database = Database(f"sqlite:///{tmp_path}/b.db")
    migrate(database, "0002")
    with database.engine.begin() as connection:
        fill(connection, "0002", None)
        before = contents(connection)
    database.upgrade()
    with database.engine.begin() as connection:
        connection.execute(text(harm))
        assert any(found in one for one in lost(before, contents(connection), "0002"))
    database.close()


def test_awards_of_before_can_be_disputed_and_count(url, joined, order, cheap_bid, play, tmp_path):
    """What the eleventh version settled stays as it is, and counts from then on."""
    broker = Broker.open(Settings(database_url=url, run_worker=False))
    buyer, owner, desk = (joined(broker, role).party for role in ("buyer", "owner", "operator"))
    task = tasks.post_task(broker, buyer, order(rounds=2, bidders_per_round=12)).id
    offers.place_bid(broker, owner, task, cheap_bid())
    play(broker)
    kept = statements.statement(broker, owner)
    assert kept.reputation.ended == 2
    broker.close()
    database = Database(url)
    take_back(database, "0011", tmp_path)
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
