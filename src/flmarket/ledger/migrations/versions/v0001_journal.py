"""The journal: entries, accounts, inner nodes of the tree, and the triggers that guard them (in `sql`)."""

from importlib.resources import files

from alembic import op

from flmarket.ledger.owner_account import statements

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make everything."""
    _run("up")


def downgrade() -> None:
    """Drop everything: the whole journal is lost."""
    _run("down")


def _run(direction: str) -> None:
    """Run this step's script for this database, one statement at a time where the driver wants that."""
    connection = op.get_bind()
    name = f"0001_{connection.dialect.name}_{direction}.sql"
    script = (files("flmarket.ledger.migrations") / "sql" / name).read_text(encoding="utf-8")
    # PostgreSQL's driver takes a whole script, and reads a percent sign as a parameter
    for part in statements(script) if connection.dialect.name == "sqlite" else [script.replace("%", "%%")]:
        connection.exec_driver_sql(part)
