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

from flmarket.auctions.posted.menu import CATALOGUE, Menu, Situation, load_menu
from flmarket.bids import EXACT, BidProfile, Guarantees, Outcome, Valuations, checked_budget

__all__ = ["PostedAuction", "Queue", "posted"]

FloatArray = NDArray[np.float64]

# Up to so many owners are served one by one; beyond, in so many blocks.
MAX_STEPS = 400
_CHUNK_ENTRIES = 500_000

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
        size, n = queue.size, queue.size.shape[-1]
        total = _or_one(size.sum(axis=-1, keepdims=True))
        rest = _or_one(np.cumsum(size[:, ::-1], axis=-1)[:, ::-1])  # records of this owner and all after her
        share_of_all = size / total
        epsilon, payment = np.empty(size.shape), np.empty(size.shape)
        money, declined = budget[:, None], np.zeros((len(size), 1))
        log_values, voices = np.zeros((len(size), 1)), np.zeros((len(size), 1))
        edges = np.linspace(0, n, min(n, MAX_STEPS) + 1).astype(np.int64).tolist()
        for first, last in pairwise(edges):
            own, left, shape = size[:, first:last], rest[:, first : first + 1], share_of_all[:, first:last]
            typical = np.where(voices > 0, np.exp(log_values / np.maximum(voices, 1.0)), 0.0)
            facts = (money / left, own / left, shape, declined, left / total, typical)
            situation = Situation(*(np.broadcast_to(fact, own.shape) for fact in facts))
            offers = self.menu.offers(situation, own, queue.catalogue)
            # a block keeps money back for later ones by its share; within it, everybody may take hers by records
            block = _or_one(own.sum(axis=-1, keepdims=True))
            allowed = money * (block / left) ** self.menu.reserve * (own / block)
            chosen, paid = queue.best_choice(first, last, offers, allowed)
            epsilon[:, first:last], payment[:, first:last] = chosen, paid
            money = np.maximum(money - paid.sum(axis=-1, keepdims=True), 0.0)
            declined = declined + np.where(chosen > 0, 0.0, shape).sum(axis=-1, keepdims=True)
            speaks, said = queue.log_values(first, last)
            log_values, voices = log_values + said, voices + speaks
        return queue.unsorted(epsilon), queue.unsorted(payment)


def _or_one(records: FloatArray) -> FloatArray:
    """Numbers to divide by: where there are no records, nothing is offered whatever the quotient."""
    return np.where(records > 0, records, 1.0)


class Queue:
    """Owners of each row in the order of service, and what every ε of the catalogue (or every k-th) costs them."""

    def __init__(self, valuations: Valuations, privacy_budget: FloatArray, size: FloatArray, *, every: int = 1) -> None:
        # nobody sells more than the largest privacy budget: the rest of the catalogue need not be priced
        useful = int(np.searchsorted(CATALOGUE, privacy_budget.max(), side="right"))
        self.catalogue = slice(0, max(useful, 1), every)
        self._epsilon = CATALOGUE[self.catalogue]
        self.order = np.argsort(-size, axis=-1, kind="stable")
        row = np.arange(len(size))[:, None]
        self.size, self._privacy = size[row, self.order], privacy_budget[row, self.order]
        self._valuations = valuations[row, self.order]
        self._value_at_one = self._valuations.per_record(1.0)
        # short queues are priced once; a long one block by block, to bound the memory
        self._cost = self._costs(0, size.shape[-1]) if size.shape[-1] <= MAX_STEPS else None

    def _costs(self, first: int, last: int) -> FloatArray:
        """What each owner loses at every ε; infinite beyond what she sells."""
        size, privacy = self.size[:, first:last, None], self._privacy[:, first:last, None]
        values = self._valuations[:, first:last].reshape((len(size), last - first, 1)).per_record(self._epsilon)
        return np.where((privacy >= self._epsilon) & (size > 0), size * values, np.inf)

    def best_choice(
        self, first: int, last: int, offers: FloatArray, allowed: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(ε, payment) that these owners like best; (0, 0) where nothing is worth its cost. Ties: the larger ε."""
        cost = self._costs(first, last) if self._cost is None else self._cost[:, first:last]
        np.minimum(offers, allowed[..., None], out=offers)
        surplus = offers - cost
        pick = surplus.shape[-1] - 1 - surplus[..., ::-1].argmax(axis=-1)
        at = (*np.ogrid[: pick.shape[0], : pick.shape[1]], pick)
        sells = surplus[at] >= 0
        return np.where(sells, self._epsilon[pick], 0.0), np.where(sells, offers[at], 0.0)

    def log_values(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """How many of these owners put a value on a record at ε = 1, and the sum of its logarithms."""
        values = self._value_at_one[:, first:last]
        counts = values > 0
        logs = np.log(np.where(counts, values, 1.0))
        return counts.sum(axis=-1, keepdims=True).astype(np.float64), logs.sum(axis=-1, keepdims=True)

    def unsorted(self, values: FloatArray) -> FloatArray:
        """Values in the owners' original order."""
        out = np.empty_like(values)
        np.put_along_axis(out, self.order, values, axis=-1)
        return out


def posted(menu: str | Menu = "general") -> PostedAuction:
    """The auction with a shipped menu by name, a menu file, or a `Menu`."""
    return PostedAuction(menu if isinstance(menu, Menu) else load_menu(menu))
