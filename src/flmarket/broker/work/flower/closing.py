"""How the worker ends a Flower task that nobody is at work on: in order, or because its runs keep dying.

A round that is given up still pays for what was delivered: an owner whose update was checked and stored has released
it, whether a model came of it or not. All else is voided, and the rest of the escrow goes back (`endings`). Every step
may be repeated after a crash.
"""

from __future__ import annotations

import logging

from flmarket.broker.core import Broker
from flmarket.broker.requests import order_of
from flmarket.broker.tables import TaskRow
from flmarket.broker.work.endings import end_task, open_awards
from flmarket.broker.work.flower.files import remove_secrets, task_folder
from flmarket.ledger import AwardState, Release, Resolution
from flmarket.market import FileStore, resolve_each

__all__ = ["close_task", "give_up"]

log = logging.getLogger("flmarket.broker")


def close_task(broker: Broker, task_id: str, state: str, error: str = "") -> None:
    """Undo what a run held without asking anybody to deliver, and end the task."""
    end_task(broker, task_id, state, error)
    remove_secrets(broker.settings.flower_folder, task_id)


def give_up(broker: Broker, task_id: str, error: str) -> None:
    """Pay for what was delivered in the round under way, and end the task as failed."""
    log.warning("task %s failed: %s", task_id, error)
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
    noise = broker.simulations.build(task_id, order_of(task.spec)).perturbation
    delivered = _delivered(broker, task)
    due = [award for owner, award in open_awards(broker, task_id).items() if owner in delivered]
    resolve_each(
        broker.books.ledger,
        [
            Resolution(
                award.id, AwardState.POSTED, release=Release(award.id, noise.name, noise.guarantee(award.epsilon))
            )
            for award in due
            if award.state is AwardState.PENDING
        ],
    )
    close_task(broker, task_id, "failed", error)


def _delivered(broker: Broker, task: TaskRow) -> set[int]:
    """Who delivered, by the last run's folder."""
    folder = task_folder(broker.settings.flower_folder, task.id) / "server"
    return set(FileStore(folder).deliveries(task.rounds_done)) if folder.exists() else set()
