"""The worker's side of Flower tasks: a run is at work on each, is started again if it is gone, and its task is closed.

A look at a task costs one transaction. Nothing is known beyond the database but the commands that this process has
started; after a crash the next worker finds a run that is still going, or starts another. A run counts as gone when its
process has ended, or has not renewed its tenancy, or did not begin in time. It is started again a few times as long as
no round is settled, then the task fails: what was delivered is paid, the other awards are voided, the rest refunded.
A SuperLink that does not answer fails nobody's task; it is asked again until the task's deadline.

The worker ends a task that nobody is at work on any more: in order (`close_task`), or because it keeps failing
(`give_up`). A round that is given up still pays for what was delivered: an owner whose update was checked and stored
has released it, whether a model came of it or not. Every step may be repeated after a crash.

What Flower said of a task's run is for the operator: the command that asked for it (`asked`), a file of ours
(`run-<attempt>.log`) that is there whether or not a SuperLink answers; and the run itself (`said`), for which the
SuperLink is asked (`flwr log`), which may take seconds and may fail; then its own words say why.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker
from flmarket.broker.office.operator import note
from flmarket.broker.office.runs import ENDED, SUBMITTED
from flmarket.broker.requests import order_of, without_invisible
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import Release, RoundRow, TaskRow
from flmarket.broker.work.flower.files import copy_app, remove_secrets, save_for_run, task_folder
from flmarket.broker.work.flower.tenancy import at_work, run_of
from flmarket.broker.work.holders import Replaced
from flmarket.broker.work.rounds import SqlStore, begin, end_task, ending, open_awards
from flmarket.ledger import AwardState, Resolution
from flmarket.market import resolve_each

log = logging.getLogger("flmarket.broker")

_LOOK_MS, _TROUBLE_MS = 1_000, 10_000
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 5_000, 60_000  # between one start and the next
_COMMAND_SECONDS, _PATIENCE = 120.0, 5.0
_SECONDS = 20.0
_LOOKED_AT = 3  # attempts
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass
class _Command:
    """`flwr run`, under way."""

    attempt: int
    process: subprocess.Popen[bytes]
    log: Path
    begun: float


class FlowerRuns:
    """All Flower tasks of a worker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._starting: dict[str, _Command] = {}
        self._stopping: list[subprocess.Popen[bytes]] = []
        self._seen: dict[str, int] = {}

    def look(self, task_id: str) -> None:
        """See to one task, and say when to look again."""
        try:
            pause = self._look(task_id)
        except Replaced:
            raise
        except Exception:  # e.g. the database is away; a run that is at work goes on meanwhile
            log.exception("task %s: its Flower run could not be seen to", task_id)
            pause = _TROUBLE_MS
        with self.broker.database.write() as session:
            session.get_one(TaskRow, task_id).next_at = now() + pause

    def join(self) -> None:
        """Wait a little for commands under way. They, and runs, go on without this process."""
        for process in (*(command.process for command in self._starting.values()), *self._stopping):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)

    def _look(self, task_id: str) -> int:
        self._stopping = [process for process in self._stopping if process.poll() is None]
        if not self._started(task_id):
            return _LOOK_MS
        with self.broker.database.write() as session:
            task, run = session.get_one(TaskRow, task_id), run_of(session, task_id)
            begin(session, task)
            if task.rounds_done > run.rounds_done:
                run.rounds_done, run.tries = task.rounds_done, 0
            self._count(session, task)
            state = ending(session, task)
            start_by = run.submitted_at + int(1000 * self.broker.settings.flower_start_seconds)
            if at_work(run) or (run.state == SUBMITTED and state is None and now() < start_by):
                return _LOOK_MS
            lost = run.tries >= self.broker.settings.flower_tries
            if state is not None or lost:
                run.attempt, run.state, run.holder = run.attempt + 1, ENDED, ""  # a run that comes late is not let in
            wait = run.submitted_at + min(_LONGEST_PAUSE_MS, _FIRST_PAUSE_MS << min(run.tries, 10)) - now()
        if state is not None or lost:
            self._seen.pop(task_id, None)
        if state is not None:
            close_task(self.broker, task_id, state)
        elif lost:
            times = f"its Flower run ended {run.tries} times without settling a round"
            give_up(self.broker, task_id, f"{times}: {run.error}" if run.error else times)
        elif run.submitted_at and wait > 0:
            return min(wait, _TROUBLE_MS)
        elif not self.broker.settings.superlink:
            log.warning("task %s needs a SuperLink, which this service was started without", task_id)
            return _TROUBLE_MS
        else:
            self._start(task_id)
        return _LOOK_MS

    def _start(self, task_id: str) -> None:
        """Ask Flower for a run; the answer is looked at later."""
        settings = self.broker.settings
        with self.broker.database.write() as session:
            run = run_of(session, task_id)
            former, run.run_id = "" if run.state == ENDED else run.run_id, ""
            run.attempt, run.tries, run.state, run.submitted_at = run.attempt + 1, run.tries + 1, SUBMITTED, now()
            note(session, None, "flower.start", task_id, detail=f"attempt {run.attempt}")
        path = save_for_run(settings, task_id)
        if former:  # gone already, but for one that hangs and would keep its folder's lock
            self._stopping.append(_flwr(path.parent / "stop.log", "stop", former, settings.superlink))
        config = {"broker": str(path), "task": task_id, "attempt": run.attempt}
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        said = path.parent / f"run-{run.attempt}.log"
        app = str(copy_app(path.parent))
        process = _flwr(said, "run", app, settings.superlink, "--format", "json", "--run-config", overrides)
        self._starting[task_id] = _Command(run.attempt, process, said, time.monotonic())

    def _started(self, task_id: str) -> bool:
        """Whether no command is under way for the task; one that has ended is looked at."""
        command = self._starting.get(task_id)
        if command is None:
            return True
        if command.process.poll() is None:
            if time.monotonic() - command.begun < _COMMAND_SECONDS:
                return False
            command.process.kill()
            command.process.wait()
        del self._starting[task_id]
        said = command.log.read_text(encoding="utf-8", errors="replace")
        run_id = str(_answer(said).get("run-id") or "") if command.process.returncode == 0 else ""
        if not run_id:
            log.warning("task %s: Flower started no run, see %s", task_id, command.log)
        with self.broker.database.write() as session:
            run = run_of(session, task_id)
            if run.attempt == command.attempt:
                run.run_id, run.error = run_id, "" if run_id else _last_words(said)
                if not run_id and run.state == SUBMITTED:  # not the task's fault: it does not count
                    run.state, run.tries = ENDED, run.tries - 1
        return True

    def _count(self, session: Session, task: TaskRow) -> None:
        """Rounds that a run has settled since the last look, for the metrics."""
        first = self._seen.setdefault(task.id, task.rounds_done)
        if first < task.rounds_done:
            for index in range(first, task.rounds_done):
                ended = select(Release).where(Release.task_id == task.id, Release.index == index)
                row = session.get_one(RoundRow, (task.id, index))
                self.broker.metrics.count_round(row, session.scalars(ended))
            self._seen[task.id] = task.rounds_done


def _flwr(said: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Flower's command of this installation, in the background, with its words in a file."""
    from flmarket.engines.flower import QUIET

    scripts = Path(sys.executable).parent
    search = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"
    with said.open("wb") as output:
        return subprocess.Popen(  # noqa: S603 - our own interpreter's script, arguments from this module
            [str(scripts / "flwr"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | QUIET | {"PATH": search},
            start_new_session=True,
        )


def _answer(said: str) -> dict[str, Any]:
    """What `flwr --format json` answered, among what else it said; empty if it did not."""
    with suppress(ValueError):
        found = json.loads(said[said.index("{") :])
        return found if isinstance(found, dict) else {}
    return {}


def _last_words(said: str) -> str:
    """What Flower's command said when it started no run: the reason that it gave, or the end of it."""
    plain = _COLOURS.sub("", said)
    reason = _answer(plain).get("error-message")
    plain = reason if isinstance(reason, str) and reason.strip() else plain
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " ".join(lines[-3:])[-500:] or "Flower’s command ended without a word."


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


_LINES, _WIDEST, _MOST_BYTES = 200, 500, 1 << 18


def asked(settings: Settings, task_id: str, attempt: int) -> tuple[str, ...]:
    """The last lines of the command that asked for a run, or of the last one that said anything; none if it was never
    asked for, or elsewhere."""
    folder = task_folder(settings.flower_folder, task_id)
    said = (_tail(folder / f"run-{one}.log") for one in range(attempt, max(0, attempt - _LOOKED_AT), -1))
    return next(filter(None, said), ())


def said(settings: Settings, run_id: str) -> tuple[str, ...]:
    """The last lines of the run itself, as the SuperLink has them now, or why it does not give them."""
    if not settings.superlink or not run_id.isdigit():
        return ("There is no run to ask for.",)
    with tempfile.TemporaryDirectory(prefix="flmarket-log-") as folder:
        path = Path(folder) / "log"
        process = _flwr(path, "log", run_id, settings.superlink, "--show")
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return (*_tail(path), f"The SuperLink did not answer within {_SECONDS:.0f} seconds.")
        return _tail(path) or ("The run has said nothing.",)


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _MOST_BYTES))
            text = handle.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    plain = without_invisible(_HIDDEN.sub("", _COLOURS.sub("", text)))
    return tuple(line.rstrip()[:_WIDEST] for line in plain.splitlines() if line.strip())[-_LINES:]
