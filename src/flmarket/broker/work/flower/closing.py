"""How the worker ends a task that nobody is at work on any more: in order, or because it keeps failing.

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
from flmarket.broker.work.flower.files import remove_secrets
from flmarket.broker.work.rounds import SqlStore
from flmarket.ledger import AwardState, Resolution
from flmarket.market import resolve_each

__all__ = ["close_task", "give_up"]

log = logging.getLogger("flmarket.broker")


def close_task(broker: Broker, task_id: str, state: str, error: str = "") -> None:
    """Undo what was held without asking anybody to deliver, and end the task."""
    end_task(broker, task_id, state, error)
    remove_secrets(broker.settings.flower_folder, task_id)


def give_up(broker: Broker, task_id: str, error: str) -> None:
    """Pay for what was delivered in the round under way, and end the task as failed."""
    log.warning("task %s failed: %s", task_id, error)
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
    kind = broker.simulations.build(task_id, order_of(task.spec)).kind(buyer=task_id)
    store = SqlStore(broker, task_id, kind, {})
    plan, delivered = store.plan(task.rounds_done), store.deliveries(task.rounds_done)
    awards = open_awards(broker, task_id)
    resolve_each(
        broker.books.ledger,
        [
            Resolution(order.award, AwardState.POSTED, "", kind.left(order))
            for order in (() if plan is None else plan.orders)
            if order.owner in delivered and order.owner in awards and awards[order.owner].state is AwardState.PENDING
        ],
    )
    close_task(broker, task_id, "failed", error)
