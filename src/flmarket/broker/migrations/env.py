"""Alembic's entry: migrates the broker's tables on the connection it is given."""

from alembic import context

# the ledger, in the same database, has a version of its own
context.configure(connection=context.config.attributes["connection"], version_table="broker_version")
with context.begin_transaction():
    context.run_migrations()
