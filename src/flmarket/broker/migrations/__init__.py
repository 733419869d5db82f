"""Alembic migrations of the broker's tables. They only go forward: to go back, a backup is restored."""
