"""A market described by a file or a spec, played through Flower on this machine: in this process, or on Ray.

The same apps, messages, guard and strategy as in a deployment; what is simulated is the network, and the owners' noise,
which is the seeded one unless `secure_noise` is set. With seeded noise a run equals the simulation engine's, award for
award and parameter for parameter.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from flmarket.bids import FloatArray
from flmarket.engines.config import MarketConfig
from flmarket.engines.flower.client import OwnerGuard, client_app
from flmarket.engines.flower.inprocess import InProcessGrid
from flmarket.engines.flower.messages import MASKED, TRAIN, unpack, unpack_vector
from flmarket.engines.flower.ray_runtime import play_on_ray
from flmarket.engines.flower.strategy import KindStrategy
from flmarket.engines.memory import Spec
from flmarket.ledger import Ledger, MemoryLedger
from flmarket.market import FileStore, Owner, RoundRecord
from flmarket.market.kind import Order, ReleasedUpdate
from flmarket.market.kinds import SamplingSpec
from flmarket.market.owner import Guard, drops_out, guarded, spoilt
from flmarket.market.record import Journal


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
