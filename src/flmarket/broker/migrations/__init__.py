"""Alembic migrations of the broker's tables."""
