"""Tasks posted when this project's learned auctions had the papers' names keep the auction they were posted with."""

import json

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0005", "0004"

# as of this revision
NEW_NAMES = {
    "dm-regretnet": "cleared-menu",
    "murba": "cleared-menu-20",
    "m-regretnet": "menu-lottery",
    "regretnet": "single-lottery",
}


def upgrade() -> None:
    """Apply."""
    tasks, bind = sa.table("broker_tasks", sa.column("id", sa.String), sa.column("spec", sa.JSON)), op.get_bind()
    for row in bind.execute(sa.select(tasks.c.id, tasks.c.spec)).all():
        spec = json.loads(row.spec) if isinstance(row.spec, str) else dict(row.spec)
        mechanism = dict(spec.get("mechanism") or {})
        name, colon, variant = str(mechanism.get("auction", "")).partition(":")
        if name in NEW_NAMES:
            spec["mechanism"] = mechanism | {"auction": f"{NEW_NAMES[name]}{colon}{variant}"}
            bind.execute(sa.update(tasks).where(tasks.c.id == row.id).values(spec=spec))
