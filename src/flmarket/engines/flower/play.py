"""A market described by a file or a spec, played through Flower on this machine: in this process, or on Ray.

The same apps, messages, guard and strategy as in a deployment; what is simulated is the network, and the owners' noise,
which is the seeded one unless `secure_noise` is set. With seeded noise a run equals the simulation engine's, award for
award and parameter for parameter.

`InProcessGrid` is a grid without a network: the same apps, called one node after the other. For trying things out
without Ray, and for tests that need faults at exact moments. Messages and answers are the same as elsewhere; an
exception in an app becomes an error reply, as in Flower. What it does not show is concurrency.

On Ray, Flower's simulation runtime, every wait has an end. Flower starts the server's app in one thread and waits in
another for Ray's workers. When Ray dies or never starts, messages stay unanswered and that second wait has no end. Here
the strategy plays on a grid that listens: its exchanges end by their own deadlines, and if none of an exchange's
messages was answered by an owner's app, Ray is gone and `RayFailed` ends the run. An owner always answers, if only by a
refusal or an error of her own. Flower's wait goes on in a thread of its own, which is given `PATIENCE` seconds after
the end and then left behind. What would break it: a Ray that hangs in native code keeps that thread, and Python waits
for it when the process ends; end the process by a signal then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flmarket.bids import FloatArray
from flmarket.engines.config import MarketConfig
from flmarket.engines.flower import QUIET
from flmarket.engines.flower.client import OwnerGuard, client_app
from flmarket.engines.flower.messages import MASKED, TRAIN, unpack, unpack_vector
from flmarket.engines.flower.strategy import GridAround, KindStrategy
from flmarket.engines.memory import Spec
from flmarket.errors import FlmarketError
from flmarket.ledger import Ledger, MemoryLedger
from flmarket.market import FileStore, Owner, RoundRecord
from flmarket.market.kind import Order, ReleasedUpdate
from flmarket.market.kinds import SamplingSpec
from flmarket.market.owner import Guard, drops_out, guarded, spoilt
from flmarket.market.record import Journal

PATIENCE = 60.0
_log = logging.getLogger(__name__)
_FIRST_NODE = 1_000


class RayFailed(FlmarketError):
    """Ray did not start, or died during a run; what is settled stays settled, and the folder can be played on."""


class ListeningGrid(GridAround):
    """A grid that raises `RayFailed` once a whole exchange went unanswered, or when `gone` is set."""

    def __init__(self, grid: Grid, gone: threading.Event) -> None:
        super().__init__(grid)
        self._gone = gone
        self._sent = self._heard = 0
        self._said = ""

    def get_node_ids(self) -> Iterable[int]:
        """Nodes, which Flower lists whether Ray lives or not."""
        self._check_gone()
        return super().get_node_ids()

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


class InProcessGrid(Grid):
    """`nodes` many copies of one app, each with her own `partition-id`, as in Flower's simulation."""

    def __init__(
        self, app: ClientApp, nodes: int, node_config: Callable[[int], Mapping[str, str | int]] | None = None
    ) -> None:
        self.app = app
        self.contexts = {
            _FIRST_NODE + i: Context(
                run_id=1,
                node_id=_FIRST_NODE + i,
                node_config={"partition-id": i, "num-partitions": nodes, **(node_config(i) if node_config else {})},
                state=RecordDict(),
                run_config={},
            )
            for i in range(nodes)
        }
        self._answers: dict[str, Message] = {}
        # Flower's `Message` asks the process who it is; its simulation sets the same three.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID

    def set_run(self, run: Run) -> None:
        """There is only one run."""

    @property
    def run(self) -> Run:
        """The one run."""
        return Run.create_empty(1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As `Message(...)`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes are there."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver, and keep the answers until they are pulled."""
        identifiers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = identifier = str(uuid4())
            identifiers.append(identifier)
            for answer in self.answer(message):
                self._answers[identifier] = answer
        return identifiers

    def answer(self, message: Message) -> list[Message]:
        """What comes back; tests override this to lose, delay or change messages."""
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return [self.app(message, context)]
        except Exception as error:
            return [Message(Error(code=0, reason=type(error).__name__), reply_to=message)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answers that are there."""
        return [self._answers.pop(identifier) for identifier in list(message_ids) if identifier in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Both at once; nothing is late in one process."""
        return list(self.pull_messages(self.push_messages(list(messages))))


@dataclass(frozen=True, eq=False)
class FlowerRun:
    """What a run leaves behind. `seconds` holds the time of each round that this call played, by step."""

    records: tuple[RoundRecord, ...]
    parameters: FloatArray
    ledger: Ledger
    seconds: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class Dealer:
    """Deals owners out of a stored spec by their node's `partition-id`. Small, so that it travels with the app."""

    spec_file: Path
    records: Path
    secure_noise: bool = False

    def __call__(self, context: Context) -> Owner:
        """The owner of this node."""
        return _dealt(self, int(context.node_config["partition-id"]))


@lru_cache(maxsize=4096)
def _dealt(dealer: Dealer, number: int) -> Owner:
    return _stored_spec(dealer.spec_file).owner(
        number, dealer.records / f"owner-{number}", seeded=not dealer.secure_noise
    )


class FailingGuard(OwnerGuard):
    """For simulations: owners fail as often as their market's file says. It puts a step outside the guard."""

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer, or drop out."""
        owner = self.owner_of(context)
        if owner.simulated and owner.dropout and message.metadata.message_type in (TRAIN, MASKED):
            order = guarded(lambda: unpack(Order, message))
            if isinstance(order, Order) and drops_out(owner, order):
                raise ConnectionError("simulated drop-out")
        return super().__call__(message, context, call_next)

    def work(self, guard: Guard, order: Order, message: Message) -> ReleasedUpdate:
        """What she sends instead of what she should, now and when she is asked for it again."""
        owner = guard.owner
        if owner.simulated and (owner.faulty or owner.adversary is not None):
            guard.journal = cast(Journal, _Spoilt(guard.journal, owner, unpack_vector(message)))
        return super().work(guard, order, message)


class _Spoilt:
    """A journal that keeps, and lets go, what a misbehaving owner sends in the place of what her guard made."""

    def __init__(self, journal: Journal, owner: Owner, parameters: FloatArray) -> None:
        self._journal, self._owner, self._parameters = journal, owner, parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    def keep(self, order: Order, vector: FloatArray) -> FloatArray:
        """See `Journal`."""
        return self._journal.keep(order, spoilt(self._owner, order, ReleasedUpdate(vector), self._parameters))


def store_spec(spec: Spec, folder: Path) -> Path:
    """Write a spec where a `Dealer` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.pickle"
    if isinstance(spec, SamplingSpec):  # functions, which owners have no use for and pickles do not take
        rate = None if spec.any_model is None else partial(float, 1.0)
        spec = replace(spec, learning_rate=rate, offer=None)
    path.write_bytes(pickle.dumps(spec))
    _stored_spec.cache_clear()
    _dealt.cache_clear()
    return path


@lru_cache(maxsize=4)
def _stored_spec(path: Path) -> Spec:
    # written by `simulate` of this process or its parent, in a folder of the user's choice
    spec: Spec = pickle.loads(path.read_bytes())  # noqa: S301
    return spec


def simulate(
    market: MarketConfig | Spec,
    folder: Path,
    *,
    ledger: Ledger | None = None,
    backend: Literal["in-process", "ray"] = "in-process",
    secure_noise: bool = False,
    progress: Callable[[RoundRecord], None] | None = None,
    bid_seconds: float = 60.0,
    train_seconds: float = 600.0,
    **strategy: Any,
) -> FlowerRun:
    """Play a market; `folder` gets the owners' records and the server's state, and a run there goes on if cut off."""
    spec = market.spec() if isinstance(market, MarketConfig) else market
    books = MemoryLedger() if ledger is None else ledger
    spec_file = store_spec(spec, folder)
    store = FileStore(folder / "server", synchronised=False)
    played = KindStrategy(
        spec.kind(), books, store, nodes=spec.partition.owners, progress=progress,
        bid_seconds=bid_seconds, train_seconds=train_seconds, **strategy,
    )  # fmt: skip
    app = client_app(Dealer(spec_file, folder / "owners", secure_noise), guard=FailingGuard)
    if backend == "in-process":
        played.start(InProcessGrid(app, spec.partition.owners))
    else:
        play_on_ray(played, app, spec.partition.owners)
    books.verify()
    return FlowerRun(tuple(played.records), played.kind.parameters, books, tuple(played.timings))
