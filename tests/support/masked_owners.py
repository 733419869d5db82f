"""Owners in this process whose parts of a sum are masked as between machines, by direct calls.

Model, awards and money are those of `MemoryOwners`, to the bit, which adds parts as they are: this is for trying out
the protocol without Flower, and for measuring it. Owners train one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from flmarket.bids import FloatArray
from flmarket.engines.memory import MemoryOwners
from flmarket.market.kind import Announcement, Bid, Delivery, Order, Refused
from flmarket.market.masking import AFTER, INPUT, Reply
from flmarket.market.masking.broker import summed
from flmarket.market.masking.guarding import SumGuard, public_identity
from flmarket.market.owner import drops_out, guarded
from flmarket.market.round import Prove
from flmarket.market.store import MemoryStore


class MaskedOwners(MemoryOwners):
    """All owners of a described market. A process that ends takes a sum under way with it; the next one begins anew."""

    def train(
        self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, bids: Sequence[Bid], prove: Prove
    ) -> Iterator[Mapping[int, Delivery]]:
        """Ask stage by stage, if only a sum is to be seen."""
        if not any(order.share for order in orders):
            yield from super().train(call, orders, parameters, bids, prove)
            return
        for bid in bids:
            self.guard(bid.owner).offer(call, bid)
        wanted = {order.owner: order for order in orders}

        def ask(stage: str, questions: Mapping[int, bytes]) -> Iterator[Mapping[int, Reply | Refused]]:
            answers: dict[int, Reply | Refused] = {}
            for number, question in questions.items():
                guard, order = self.guard(number), wanted[number]
                if stage in (INPUT, *AFTER) and drops_out(guard.owner, order):
                    continue
                answer = partial(SumGuard(guard).answer, order, stage, question, parameters)
                answers[number] = found = guarded(answer)
                self._stale.add(number)
                self.refusals[number] += isinstance(found, Refused)
            yield answers

        identities = {number: public_identity(self.guard(number).owner) for number in wanted}
        yield from summed(call, orders, identities, MemoryStore(), ask)
