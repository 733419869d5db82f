"""Database migrations of the ledger, by Alembic. `flmarket.ledger.store.migrate` runs them."""
