"""A market as a broker's task, played by its worker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flmarket.broker.core import Broker, Party
from flmarket.broker.office import parties, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import TaskRequest
from flmarket.broker.settings import Settings
from flmarket.broker.tables import TaskRow
from flmarket.broker.work.worker import Worker


@contextmanager
def played_in_broker(folder: Path, market: dict[str, Any], **settings: Any) -> Iterator[tuple[Broker, TaskRow]]:
    """The broker and the task's row once it is finished; the books are in order."""
    broker = Broker.open(Settings(database_url=f"sqlite:///{folder}/b.db", run_worker=False, **settings))
    try:
        person = parties.create_party(broker, None, role="buyer", name="buyer")
        parties.deposit(broker, None, person.id, 10**15)
        buyer = Party(person.id, "buyer", "buyer")
        task = tasks.post_task(broker, buyer, TaskRequest.model_validate(market))
        Worker(broker).run_until_idle()
        with broker.database.read() as session:
            row = session.get_one(TaskRow, task.id)
            assert (row.state, row.error) == ("finished", "")
            broker.books.ledger.verify()
            assert reconcile(broker.database.engine) == ()
            yield broker, row
    finally:
        broker.close()
