"""The owner's side of any Flower app: a mod between her `train` and everybody else.

    app = ClientApp(mods=[owner_guard()])

It answers announcements and orders itself (`flmarket.market.owner` says by which rules) and calls the app's own train
function only for an order that was checked, claimed and charged. What that returns stops here: of its arrays the
difference to those that came is taken, clipped and made private; its metrics are dropped; if it raises, hangs, returns
numbers that are not finite or arrays of other shapes, noise around nothing leaves instead, of the same form. Everything
else that a server asks for, evaluation included, is refused.

All questions come as `train` messages: a mod sees only types for which the app has a function, and every app has that.

Whose machine it is says her `owner.toml` (`flmarket.engines.flower.files`), found by

    1 the node's configuration        flower-supernode --node-config 'owner-file="/home/me/owner.toml"'
    2 the environment                 FLMARKET_OWNER_FILE
    3 `owner_guard(tryout=…)`         for simulations, one file for all: an owner's number is then the `partition-id`

never by what a server sends. What would break it: code of the app that runs outside `train` (a lifespan, another mod
further out) and answers by itself, and an app without the guard: Flower runs the app that the *server* sends, so an
owner lets only apps start that she trusts (docs/flower.md, "What the guard cannot do").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from flmarket.bids import FloatArray
from flmarket.engines.flower.client import OwnerGuard, OwnerOf
from flmarket.engines.flower.files import OwnerFile, located
from flmarket.engines.flower.messages import RESERVED, Delivery, pack, unpack_escrow, unpack_text
from flmarket.errors import ConfigError, InvalidInput
from flmarket.flower.tensors import (
    LONGEST_LISTING,
    TENSORS,
    UPDATE,
    WHY,
    RecordTerms,
    RecordWork,
    Tensors,
    counting,
    settings,
)
from flmarket.market import Announcement, Order, Owner
from flmarket.market.kind import Refused, release_id
from flmarket.market.owner import Guard
from flmarket.privacy import unit_of

if TYPE_CHECKING:
    from torch import nn

ENVIRONMENT = "FLMARKET_OWNER_FILE"


def owner_guard(
    tryout: str | Path | None = None,
    *,
    model: Callable[[], nn.Module] | None = None,
    records: Callable[[Context], Any] | None = None,
    owner_of: Callable[[Context], Owner] | None = None,
) -> AppGuard:
    """The mod. `tryout` is an owner file for nodes without one of their own: a path, or `package:file` in the app.

    `model` and `records` are for markets in which ε is for any one record (`[cap] unit = "record"`): what is trained, a
    function that makes a `torch.nn.Module`, and what on, by the node's context: arrays `(x, y)` or a PyTorch data set.
    There the guard takes the steps itself, and `train` is not called. `owner_of` makes the owner in any other way.
    """
    if (model is None) != (records is None):
        raise InvalidInput("model, records", (model, records), "both, for markets that protect records, or neither")
    work = None if model is None or records is None else RecordWork(model, records)
    of = owner_of or (lambda context: owner_at(context, None if tryout is None else located(tryout)))
    return AppGuard(of, work=work)


class AppGuard(OwnerGuard):
    """The guard in front of an app's own train function; `work`: how it takes steps that protect records instead."""

    def __init__(self, owner_of: OwnerOf, *, work: RecordWork | None = None) -> None:
        super().__init__(owner_of)
        self.steps = work

    def declined(self, owner: Owner, call: Announcement) -> Refused | None:
        """Why this owner's app is not for what is announced, in words that the buyer's log shows."""
        asked = "update" if RecordTerms.announced(call.settings) is None else "record"
        if asked == "record" and self.steps is None:
            return Refused("unit", WHY)
        if asked != unit_of(owner.cap):
            words = f"ε is for the {asked} here, and this owner's account counts losses of the {unit_of(owner.cap)}"
            return Refused("unit", f'{words}: [cap] unit = "{asked}" in an owner.toml of its own is for that')
        return None

    def carried_out(
        self, guard: Guard, order: Order, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """The released update as named arrays, by the app's own train function, and nothing else of what it said."""
        text, escrow = unpack_text(message, TENSORS, LONGEST_LISTING), unpack_escrow(message)
        if text is None:
            raise InvalidInput(TENSORS, None, "a listing of the tensors that are sold")
        tensors, delivery = Tensors.parsed(text), Delivery(release=release_id(order), owner=guard.owner.number)
        own = {name: record for name, record in message.content.items() if name not in RESERVED | {TENSORS}}
        if not own:
            vector = guard.release(order)
        else:
            arrays, config = _parts(own)
            start = tensors.flat(arrays)
            if Tensors.of(arrays, list(tensors.shapes)) != tensors:
                raise InvalidInput(TENSORS, "others", "the listed ones")

            def compute() -> FloatArray:
                message.content = RecordDict({name: _copied(one) for name, one in own.items()})
                return _returned(call_next(message, context), tensors) - start

            terms = RecordTerms.announced(guard.ordered(order).settings)
            if terms is not None and self.steps is not None:
                model = self.steps.bound(tensors, arrays, terms, context)
                guard = Guard(replace(guard.owner, model=model, reads=model.read), guard.record)
            said = settings(tensors, config, None if terms is None else terms.said)
            vector = guard.train(order, start, escrow, compute, said)
        content = pack(delivery)
        content[UPDATE] = ArrayRecord(tensors.named(vector, "float32"))
        return Message(content, reply_to=message)


def _parts(own: Mapping[str, object]) -> tuple[ArrayRecord, ConfigRecord | None]:
    """The app's own records of an order: arrays, and perhaps a configuration."""
    arrays = [record for record in own.values() if isinstance(record, ArrayRecord)]
    configs = [record for record in own.values() if isinstance(record, ConfigRecord)]
    if len(arrays) != 1 or len(configs) > 1 or len(own) > 1 + len(configs):
        raise InvalidInput("content", sorted(own), "one record of arrays and at most one of configuration")
    return arrays[0], configs[0] if configs else None


def _copied(record: ArrayRecord | ConfigRecord | MetricRecord) -> ArrayRecord | ConfigRecord:
    """A record that a train function may change: in one process all owners of a round are sent the same."""
    return ArrayRecord(dict(record)) if isinstance(record, ArrayRecord) else ConfigRecord(dict(record))


def _returned(answer: Message, tensors: Tensors) -> FloatArray:
    """Where the app's training ended; whatever is wrong with it raises, behind the charge."""
    arrays, *more = answer.content.array_records.values()
    if more:
        raise InvalidInput("train", len(more) + 1, "one record of arrays in its answer")
    return tensors.flat(arrays)


# --- whose machine this is --------------------------------------------------------------------------------------------


def owner_at(context: Context, tryout: Path | None = None) -> Owner:
    """The owner of this node."""
    named = context.node_config.get("owner-file") or os.environ.get(ENVIRONMENT)
    if named:
        return _of_file(Path(str(named)), None)
    if tryout is not None and "partition-id" in context.node_config:
        return _of_file(tryout, int(context.node_config["partition-id"]))
    found = sorted(context.node_config)
    raise ConfigError("node configuration", found, f"owner-file, the path of an owner.toml; or {ENVIRONMENT}")


@lru_cache(maxsize=256)
def _of_file(path: Path, number: int | None) -> Owner:
    own = OwnerFile.load(path)
    if own.records is None:
        raise ConfigError(f"{path.name}: records", None, "how many records the app trains on")
    if number is not None:
        own = own.model_copy(update={"owner": number, "account": ""})
    return own.owner_at(path.parent, counting)
