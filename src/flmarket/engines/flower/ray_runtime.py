"""Flower's simulation runtime, Ray, with an end to every wait.

Flower starts the server's app in one thread and waits in another for Ray's workers. When Ray dies or never starts,
messages stay unanswered and that second wait has no end. Here the strategy plays on a grid that listens: its exchanges
end by their own deadlines, and if none of an exchange's messages was answered by an owner's app, Ray is gone and
`RayFailed` ends the run. An owner always answers, if only by a refusal or an error of her own. Flower's wait goes on in
a thread of its own, which is given `PATIENCE` seconds after the end and then left behind.

What would break it: a Ray that hangs in native code keeps that thread, and Python waits for it when the process ends;
end the process by a signal then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run

from flmarket.errors import FlmarketError

if TYPE_CHECKING:
    from flmarket.engines.flower.strategy import KindStrategy

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
PATIENCE = 60.0
_log = logging.getLogger(__name__)


class RayFailed(FlmarketError):
    """Ray did not start, or died during a run; what is settled stays settled, and the folder can be played on."""


class ListeningGrid(Grid):
    """A grid that raises `RayFailed` once a whole exchange went unanswered, or when `gone` is set."""

    def __init__(self, grid: Grid, gone: threading.Event) -> None:
        self._grid, self._gone = grid, gone
        self._sent = self._heard = 0
        self._said = ""

    def set_run(self, run: Run) -> None:
        """Of the grid itself."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Of the grid itself."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As `Message(...)`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Nodes, which Flower lists whether Ray lives or not."""
        self._check_gone()
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, if the exchange before was answered."""
        self.check_heard()
        sent = list(self._grid.push_messages(messages))
        self._sent, self._heard, self._said = len(sent), 0, ""
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answers that are there, and who gave them: an owner's app, or Flower in its place."""
        self._check_gone()
        found = list(self._grid.pull_messages(message_ids))
        for answer in found:
            if answer.has_error() and answer.error.code != ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                self._said = str(answer.error.reason)
            else:
                self._heard += 1
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Both at once, as the grid itself does it."""
        self.check_heard()
        return self._grid.send_and_receive(messages, timeout=timeout)

    def check_heard(self) -> None:
        """Raise if nobody answered the exchange before."""
        self._check_gone()
        if self._sent and not self._heard:
            said = f"; Flower says: {self._said[:200]}" if self._said else " by the deadline"
            raise RayFailed(f"none of {self._sent} simulated owners answered{said}")

    def _check_gone(self) -> None:
        if self._gone.is_set():
            raise RayFailed("Flower's simulation ended before the market did")


def play_on_ray(played: KindStrategy, app: ClientApp, owners: int, *, patience: float | None = None) -> None:
    """Play a market with so many simulated owners; raises what the strategy raises, or `RayFailed`."""
    os.environ.update(QUIET)
    patience = PATIENCE if patience is None else patience
    server, gone, over = ServerApp(), threading.Event(), threading.Event()
    failures: list[BaseException] = []  # the strategy's own first: Flower repeats it in words only

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        listening = ListeningGrid(grid, gone)
        try:
            played.start(listening)
            listening.check_heard()
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            over.set()

    runtime = threading.Thread(target=_simulate, args=(server, app, owners, gone, failures), daemon=True)
    runtime.start()
    try:
        while not over.wait(0.05) and not gone.is_set():
            pass
        over.wait(patience)  # if Ray ended first, the strategy hears of it at its next look
        runtime.join(patience)
    finally:
        gone.set()
    if runtime.is_alive():
        _shut_down(patience)
        runtime.join(1.0)
    if failures:
        raise failures[0]
    if not over.is_set():
        raise RayFailed("Flower's simulation ended, and the market's server does not come back")
    if runtime.is_alive():
        _log.warning("the market is over, but Ray does not end; its thread is left behind")


def _simulate(
    server: ServerApp, app: ClientApp, owners: int, gone: threading.Event, failures: list[BaseException]
) -> None:
    """Flower's own loop; `gone` tells the strategy that nobody carries messages any more."""
    from flwr.simulation import run_simulation

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    settings: dict[str, Any] = {"client_resources": resources, "init_args": {"log_to_driver": False}}
    try:
        run_simulation(server, app, owners, backend_config=settings)
    except BaseException as error:
        if not failures:
            while error.__cause__ is not None:
                error = error.__cause__
            failures.append(RayFailed(f"Flower's simulation failed: {error}"))
    finally:
        gone.set()


def _shut_down(patience: float) -> None:
    """Ask Ray to end, which wakes threads that wait for its answers; do not wait for ever for that either."""

    def shut_down() -> None:
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()

    thread = threading.Thread(target=shut_down, daemon=True)
    thread.start()
    thread.join(patience)
