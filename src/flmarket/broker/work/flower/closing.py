"""How the worker ends a task that nobody is at work on any more: in order, or because it keeps failing.

A round that is given up still pays for what was delivered: an owner whose update was checked and stored has released
it, whether a model came of it or not. All else is voided, and the rest of the escrow goes back (`endings`). Every step
may be repeated after a crash.
"""

import logging
from dataclasses import replace

from flmarket.broker.core import Broker
from flmarket.broker.requests import order_of
from flmarket.broker.tables import TaskRow
from flmarket.broker.work.endings import end_task, open_awards
from flmarket.broker.work.flower.files import remove_secrets
from flmarket.broker.work.rounds import SqlStore
from flmarket.ledger import AwardState, Resolution
from flmarket.market import resolve_each

log = logging.getLogger("flmarket.broker")


def close_task(broker: Broker, task_id: str, state: str, error: str = "") -> None:
    """Undo what was held without asking anybody to deliver, and end the task."""
    end_task(broker, task_id, state, error)
    remove_secrets(broker.settings.flower_folder, task_id)


def give_up(broker: Broker, task_id: str, error: str) -> None:
    """Pay for what was delivered, and end the task as failed.

    That is the round under way; where awards run over all rounds, also whoever delivered in every round that is over:
    her award would have ended otherwise, and it is not her who fails.
    """
    log.warning("task %s failed: %s", task_id, error)
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
    kind = broker.simulations.build(task_id, order_of(task.spec)).kind(buyer=task_id)
    store, done, lasting = SqlStore(broker, task_id, kind, {}), task.rounds_done, kind.side.lasting
    plan, delivered = store.plan(done) or (store.plan(0) if lasting else None), store.deliveries(done)
    ends, awards = [], open_awards(broker, task_id)
    for order in () if plan is None else plan.orders:
        last = done if order.owner in delivered else done - 1
        if (order.owner in delivered or (lasting and done)) and awards[order.owner].state is AwardState.PENDING:
            left = kind.left(replace(order, round_index=last))
            ends.append(Resolution(order.award, AwardState.POSTED, "", left))
    resolve_each(broker.books.ledger, ends)
    close_task(broker, task_id, "failed", error)
