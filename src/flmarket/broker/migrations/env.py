"""Alembic's entry: migrates the broker's tables on the connection it is given."""

from alembic import context

from flmarket.broker.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table="broker_version",  # the ledger, in the same database, has its own
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
