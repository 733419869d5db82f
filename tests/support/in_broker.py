"""A market as a broker's task, played by its worker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import undefer

from flmarket.broker.core import Broker, Party
from flmarket.broker.office import parties, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import TaskRequest
from flmarket.broker.settings import Settings
from flmarket.broker.tables import Lease, TaskRow
from flmarket.broker.work.worker import Worker


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[Broker]:
    """A broker on the database in this folder, without a worker."""
    broker = Broker.open(Settings(database_url=f"sqlite:///{folder}/b.db", run_worker=False, **settings))
    try:
        yield broker
    finally:
        broker.close()


def posted(broker: Broker, market: dict[str, Any]) -> str:
    """The id of a task; its buyer has what it takes."""
    person = parties.create_party(broker, None, role="buyer", name="buyer")
    parties.deposit(broker, None, person.id, 10**15)
    return tasks.post_task(broker, Party(person.id, "buyer", "buyer"), TaskRequest.model_validate(market)).id


def played_on(broker: Broker) -> None:
    """Whoever was at work before is gone; everything that is due is played."""
    with broker.database.write() as session:
        session.execute(update(Lease).values(expires_at=0))
    worker = Worker(broker)
    worker.run_until_idle()
    worker.stop()


def finished(broker: Broker, task_id: str) -> TaskRow:
    """The row of a task that has come to its end."""
    with broker.database.read() as session:
        row = session.get_one(TaskRow, task_id, options=[undefer(TaskRow.parameters)])
    assert (row.state, row.error) == ("finished", "")
    return row


def books_agree(broker: Broker) -> None:
    """The ledger follows its rules, and the tables follow the ledger."""
    broker.books.ledger.verify()
    assert reconcile(broker.database.engine) == ()


@contextmanager
def played_in_broker(folder: Path, market: dict[str, Any], **settings: Any) -> Iterator[tuple[Broker, TaskRow]]:
    """The broker and the task's row once it is finished; the books are in order."""
    with opened(folder, **settings) as broker:
        task = posted(broker, market)
        Worker(broker).run_until_idle()
        books_agree(broker)
        yield broker, finished(broker, task)
