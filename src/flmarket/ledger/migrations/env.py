"""What Alembic runs: the connection comes from `flmarket.ledger.store`, inside its transaction."""

from alembic import context

from flmarket.ledger.store import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    transactional_ddl=False,  # the caller's transaction holds everything
)
context.run_migrations()
