"""`posted`: exactly truthful, rational and within budget, for any valuation.

Owners are served one after another, the largest data set first (ties: lower index). Each is shown a menu, a price for
every ε of a catalogue, that depends on data sizes, on the money and records left, and on what earlier owners said and
did; never on her own report. The broker takes her best choice on it. Hence (docs/posted.md has the proof, with each
assumption named):

* truthful: her report only selects from a menu it cannot move, and truth selects the best;
* rational: selling nothing at price 0 is on every menu;
* within budget: no menu offers more than what is left.

Assumes that data sizes are public or verified, and that an owner cares about her own ε and payment only. In very large
auctions owners are served in blocks: a block's menus depend on earlier blocks only, and each owner of a block may be
paid at most her share by records of the money left, so the three properties hold unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.auctions.posted.menu import CATALOGUE, Menu, Pricing, Situation, load_menu
from flmarket.bids import EXACT, BidProfile, Guarantees, Outcome, Valuations, checked_budget

__all__ = ["PostedAuction", "Queue", "posted"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

DEFAULT_MENU = "general"

# Up to so many owners are served one by one; beyond, in so many blocks.
MAX_STEPS = 400
_CHUNK_ENTRIES = 1_000_000

_GUARANTEES = Guarantees(
    truthful=EXACT,
    rational=EXACT,
    budget_feasible=EXACT,
    source="taxation principle (Hammond 1979); proof in docs/posted.md",
    assumes="data sizes are public or verified",
)


@dataclass(frozen=True)
class PostedAuction:
    """Sequential menus from the largest to the smallest owner."""

    menu: Menu
    name: str = "posted"
    guarantees: Guarantees = _GUARANTEES
    # what an owner may misstate without gaining; the data size is public
    private_fields: tuple[str, ...] = ("value", "privacy_budget")

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic."""
        n = bids.n
        money = checked_budget(budget, bids.shape[:-1]).reshape(-1)
        valuations, privacy = bids.valuations.reshape((-1, n)), bids.privacy_budget.reshape(-1, n)
        size = bids.data_size.reshape(-1, n)
        epsilon, payment = np.empty(size.shape), np.empty(size.shape)
        rows = max(1, _CHUNK_ENTRIES // (n * CATALOGUE.size))
        for start in range(0, len(size), rows):
            part = slice(start, start + rows)
            queue = Queue(valuations[part], privacy[part], size[part])
            epsilon[part], payment[part] = self.serve(queue, money[part])
        return Outcome(epsilon.reshape(bids.shape), payment.reshape(bids.shape))

    def serve(self, queue: Queue, budget: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(ε, payment) of everybody in the queue, given each row's budget."""
        pricing = Pricing(self.menu, queue.situation)
        reserved = queue.block_share**self.menu.reserve * queue.share_of_block
        epsilon, payment = np.empty(queue.size.shape), np.empty(queue.size.shape)
        money, declined = budget[:, None], np.zeros((len(budget), 1))
        for turn in queue.turns:
            left = queue.rest[:, turn.start : turn.start + 1]
            offers = pricing.offers(turn, money / left, declined, queue.size[:, turn], queue.catalogue)
            chosen, paid = queue.best_choice(turn, offers, money * reserved[:, turn])
            epsilon[:, turn], payment[:, turn] = chosen, paid
            money = np.maximum(money - paid.sum(axis=-1, keepdims=True), 0.0)
            lost = queue.situation.share_of_all[:, turn] * (chosen <= 0)
            declined = declined + lost.sum(axis=-1, keepdims=True)
        return queue.unsorted(epsilon), queue.unsorted(payment)


def _or_one(records: FloatArray) -> FloatArray:
    """Numbers to divide by: where there are no records, nothing is offered whatever the quotient."""
    return np.where(records > 0, records, 1.0)


class Queue:
    """Owners of each row in the order of service, and what every ε of the catalogue (or every k-th) costs them."""

    def __init__(self, valuations: Valuations, privacy_budget: FloatArray, size: FloatArray, *, every: int = 1) -> None:
        n = size.shape[-1]
        # nobody sells more than the largest privacy budget: the rest of the catalogue need not be priced
        useful = int(np.searchsorted(CATALOGUE, privacy_budget.max(), side="right"))
        self.catalogue = slice(0, max(useful, 1), every)
        self._epsilon = CATALOGUE[self.catalogue]
        self.order = np.argsort(-size, axis=-1, kind="stable")
        row = np.arange(len(size))[:, None]
        self.size, self._privacy = size[row, self.order], privacy_budget[row, self.order]
        self._valuations = valuations[row, self.order]
        edges = np.linspace(0, n, min(n, MAX_STEPS) + 1).astype(np.int64)
        self.turns = [slice(first, last) for first, last in pairwise(edges.tolist())]
        self.rest = _or_one(np.cumsum(self.size[:, ::-1], axis=-1)[:, ::-1])  # of this owner and all after her
        self._divide(edges)
        # short queues are priced once; a long one turn by turn, to bound the memory
        self._cost = self._costs(slice(0, n)) if n <= MAX_STEPS else None

    def _divide(self, edges: IntArray) -> None:
        """Shares of records: of each owner in her block, of the block in what is left, and what menus look at."""
        lengths = np.diff(edges)
        left = np.repeat(self.rest[:, edges[:-1]], lengths, axis=-1)  # records left when the block is served
        block = np.repeat(_or_one(np.add.reduceat(self.size, edges[:-1], axis=-1)), lengths, axis=-1)
        total = _or_one(self.size.sum(axis=-1, keepdims=True))
        self.share_of_block, self.block_share = self.size / block, np.minimum(block / left, 1.0)
        # the first of a block speaks for what was known before it: nobody's report moves her own block's menus
        typical = Situation.typical_values(self._valuations.per_record(1.0))
        known = np.repeat(typical[:, edges[:-1]], lengths, axis=-1)
        self.situation = Situation(self.size / left, self.size / total, left / total, known)

    def _costs(self, turn: slice) -> FloatArray:
        """What each owner loses at every ε; infinite beyond what she sells."""
        size, privacy = self.size[:, turn, None], self._privacy[:, turn, None]
        values = self._valuations[:, turn].reshape((*size.shape[:2], 1)).per_record(self._epsilon)
        return np.where((privacy >= self._epsilon) & (size > 0), size * values, np.inf)

    def best_choice(self, turn: slice, offers: FloatArray, allowed: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(ε, payment) that these owners like best; (0, 0) where nothing is worth its cost. Ties: the larger ε."""
        cost = self._costs(turn) if self._cost is None else self._cost[:, turn]
        np.minimum(offers, allowed[..., None], out=offers)
        surplus = (offers - cost).reshape(allowed.size, -1)
        each, last = np.arange(allowed.size), surplus.shape[-1] - 1
        pick = last - surplus[:, ::-1].argmax(axis=-1)
        sells = surplus[each, pick] >= 0
        epsilon = self._epsilon[pick] * sells
        payment = offers.reshape(surplus.shape)[each, pick] * sells
        return epsilon.reshape(allowed.shape), payment.reshape(allowed.shape)

    def unsorted(self, values: FloatArray) -> FloatArray:
        """Values in the owners' original order."""
        out = np.empty_like(values)
        np.put_along_axis(out, self.order, values, axis=-1)
        return out


def posted(menu: str | Menu = DEFAULT_MENU) -> PostedAuction:
    """The auction with a shipped menu by name, a menu file, or a `Menu`."""
    chosen = menu if isinstance(menu, Menu) else load_menu(menu)
    return PostedAuction(chosen, "posted" if menu == DEFAULT_MENU else f"posted:{chosen.name}")
