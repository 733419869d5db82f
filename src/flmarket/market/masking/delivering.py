"""A round's masked sum told as deliveries, the way the round takes them: all at once, and only their sum says anything.

Whatever reaches owners comes in as one function that asks (`AskOwners`): Flower's grid, or a call in the same process.
What each stage left is stored before the next begins, so a server that ends is followed by one that goes on: owners
repeat what they have said. The survivor with the least number is booked as having delivered the whole sum, the others
as having delivered zeros, because nobody knows more. If the sum is void, those who answered to the last have delivered
empty vectors: they stayed, and there is nothing to see (`flmarket.market.summing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from flmarket.errors import InvalidInput, SumVoid
from flmarket.market.kind import Announcement, Delivered, Delivery, Order, Refused, ReleasedUpdate
from flmarket.market.masking.broker import Reply, Summing, exchange
from flmarket.market.masking.guarding import mask_terms
from flmarket.market.owner import MASKING
from flmarket.market.store import RoundStore

_log = logging.getLogger(__name__)
# stage and questions by owner → answers or refusals by owner, as they come
AskOwners = Callable[[str, Mapping[int, bytes]], Iterable[Mapping[int, Reply | Refused]]]


def summed(
    call: Announcement, orders: Sequence[Order], identities: Mapping[int, bytes], store: RoundStore, ask: AskOwners
) -> Iterator[Mapping[int, Delivery]]:
    """Play a round's sum, or go on with it, and tell it as deliveries in one batch."""
    if not orders:
        return
    index, told = orders[0].round_index, dict[int, Delivery]()

    def asked(stage: str, questions: Mapping[int, bytes]) -> Iterator[Mapping[int, Reply]]:
        for batch in ask(stage, questions):
            told.update({owner: answer for owner, answer in batch.items() if isinstance(answer, Refused)})
            yield {owner: answer for owner, answer in batch.items() if not isinstance(answer, Refused)}

    try:
        summing = _begun(call, orders, identities, store.exchange(index))
    except SumVoid as void:
        _log.warning("round %s of %s is void: %s", index, call.task, void)
        return
    exchange(summing, asked, lambda state: store.save_exchange(index, state))
    size = 0 if summing.is_void else call.parameters
    delivered = dict.fromkeys(summing.survivors, np.zeros(size))
    if not summing.is_void:
        delivered[summing.survivors[0]] = summing.total.astype(np.float64)
    told.update({owner: Delivered(ReleasedUpdate(vector)) for owner, vector in delivered.items()})
    out = () if summing.is_void else summing.survivors  # a dealer who voids a sum has answered to the last, too
    told.update({one.owner: Refused(MASKING, str(one)) for one in summing.problems if one.owner not in out})
    yield told


def _begun(call: Announcement, orders: Sequence[Order], identities: Mapping[int, bytes], state: bytes) -> Summing:
    known = {order.owner: identities[order.owner] for order in orders if order.owner in identities}
    try:
        if state:
            return Summing.restore(state)
        return Summing(mask_terms(call, orders[0], known))
    except InvalidInput as problem:
        raise SumVoid(str(problem)) from None
