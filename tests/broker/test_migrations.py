"""The migrations make the tables that the code uses, on both databases; and they can be taken back."""

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from flmarket.broker.database import _MIGRATIONS, Database
from flmarket.broker.models import Base


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
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert not ours & set(inspect(database.engine).get_table_names())
    database.close()
