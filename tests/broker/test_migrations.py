"""The migrations make the tables that the code uses, on both databases; and they can be taken back."""

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, String, Table, inspect, text

from flmarket.broker.database import _MIGRATIONS, Database
from flmarket.broker.models import Base, PartyRow, TaskRow


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
