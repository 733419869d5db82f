"""The same guards in SQLite, said so that it checks them faster (in `sql`). Nothing changes in PostgreSQL."""

from importlib.resources import files

from alembic import op
from sqlalchemy import Connection

from flmarket.ledger.owner_account import statements

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_GUARDS = "SELECT name FROM sqlite_master WHERE tbl_name = 'ledger_entries' AND sql IS NOT NULL AND type <> 'table'"


def upgrade() -> None:
    """Say them anew."""
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        for part in _script("0002"):
            connection.exec_driver_sql(part)


def downgrade() -> None:
    """Say them as they were: in the words of version 0001."""
    connection = op.get_bind()
    if connection.dialect.name != "sqlite":
        return
    for part in _script("0002"):
        if "CREATE" in part:
            kind, name = _made(part)
            connection.exec_driver_sql(f"DROP {kind} {name}")
    there = _guards(connection)
    for part in _script("0001"):
        kind, name = _made(part)
        if kind != "TABLE" and name.startswith("ledger_entries") and name not in there:
            connection.exec_driver_sql(part)


def _script(version: str) -> list[str]:
    name = f"{version}_sqlite_up.sql"
    return list(statements((files("flmarket.ledger.migrations") / "sql" / name).read_text(encoding="utf-8")))


def _made(statement: str) -> tuple[str, str]:
    """What a CREATE statement makes: TABLE, INDEX or TRIGGER, and its name."""
    words = statement[statement.index("CREATE") :].split()
    kind, name = words[2:4] if words[1] == "UNIQUE" else words[1:3]
    return kind, name


def _guards(connection: Connection) -> set[str]:
    return {str(row[0]) for row in connection.exec_driver_sql(_GUARDS)}
