"""`posted`: exactly truthful, rational and within budget, for any valuation.

Owners are served one after another, the largest data set first (ties: lower index), if the menu asks for it after a few
of the smallest. Each is shown a menu, a price for every ε of a catalogue, that depends on data sizes, on the money and
records left, and on what earlier owners said and did; never on her own report. The broker takes her best choice on it.
Hence (docs/posted.md has the proof, with each assumption named):

* truthful: her report only selects from a menu it cannot move, and truth selects the best;
* rational: selling nothing at price 0 is on every menu;
* within budget: no menu offers more than what is left.

Assumes that data sizes are public or verified, and that an owner cares about her own ε and payment only. In very large
auctions owners are served in blocks: a block's menus depend on earlier blocks only, and each owner of a block may be
paid at most her share by records of the money left, so the three properties hold unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flmarket.auctions.posted.menu import CATALOGUE, AnyMenu, NetworkMenu, Sales, Situation, load_menu
from flmarket.bids import EXACT, BidProfile, FloatArray, Guarantees, IntArray, Outcome, checked_budget, in_parts
from flmarket.privacy.events import checked_positive

DEFAULT_MENU = "general"

# Up to so many owners are served one by one; beyond, in so many blocks.
MAX_STEPS = 400
_CHUNK_ENTRIES = 1_000_000

_PRIVATE_SIZES = Guarantees(EXACT, EXACT, EXACT, "taxation principle (Hammond 1979); proof in docs/posted.md")
_GUARANTEES = replace(
    _PRIVATE_SIZES, assumes="data sizes are public or verified, and the budget is set before bids are seen"
)


@dataclass(frozen=True)
class PostedAuction:
    """Sequential menus from the largest to the smallest owner, but for the menu's explorers."""

    menu: AnyMenu
    name: str = "posted"
    guarantees: Guarantees = _GUARANTEES
    ceiling: float | None = None  # the most that any menu offers for a record and unit of ε
    # what an owner may misstate without gaining; the data size is public
    private_fields: tuple[str, ...] = ("value", "privacy_budget")

    def __post_init__(self) -> None:
        if self.ceiling is not None:
            checked_positive("ceiling", self.ceiling)

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic."""
        if isinstance(self.menu, NetworkMenu) and self.menu.seen is not None:
            self.menu.seen.warn_if_unlike(bids)

        def served(some: BidProfile, money: FloatArray) -> tuple[FloatArray, FloatArray]:
            return self.serve(Queue(some, explorers=self.menu.explorers), money)

        return Outcome(*in_parts(bids, budget, _CHUNK_ENTRIES // (bids.n * CATALOGUE.size), served))

    def menus(self, bids: BidProfile, budget: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """What each owner may choose from, whatever she reports: every ε, (items,), and its prices, (rows, n, items).

        For audits: the best item of her menu is the most that any report can bring her. `bids` has shape (rows, n).
        """
        queue = Queue(bids, explorers=self.menu.explorers)
        epsilon = CATALOGUE[queue.catalogue]
        shown = np.empty((*queue.size.shape, epsilon.size))
        self.serve(queue, checked_budget(budget, bids.shape[:-1]), shown=shown)
        return epsilon, np.stack([queue.unsorted(item) for item in np.moveaxis(shown, -1, 0)], axis=-1)

    def serve(
        self, queue: Queue, budget: FloatArray, *, shown: FloatArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """(ε, payment) of everybody in the queue, shape (rows, n), given each row's budget; menus go to `shown`."""
        situation = queue.situation(budget)
        pricing = self.menu.pricing(situation, scalar=queue.scalar)
        limit = queue.by_turn(queue.block_share**self.menu.reserve * queue.share_of_block)
        share_of_all, rest = queue.by_turn(situation.share_of_all), queue.by_turn(queue.rest)
        epsilon, payment = np.empty(queue.size.shape), np.empty(queue.size.shape)
        money: Any = budget if len(budget) > 1 else float(budget[0])
        sales = Sales(*[0.0 * money] * 3)
        with np.errstate(divide="ignore", over="ignore"):  # see `Pricing.offers`
            log_records = queue.by_turn(np.log(queue.size))
            for first, turn in queue.turns:
                log_money = queue.log(money / rest[first])
                offers = pricing.offers(turn, log_money, sales, log_records[turn], queue.catalogue)
                if self.ceiling is not None:
                    most = self.ceiling * queue.size[turn]
                    np.minimum(offers, most[..., None] * CATALOGUE[queue.catalogue], out=offers)
                chosen, paid = queue.best_choice(turn, offers, money * limit[turn])
                epsilon[turn], payment[turn] = chosen, paid
                if shown is not None:
                    shown[turn] = offers
                if isinstance(turn, slice):  # shares of a block may add up to more than 1 by rounding
                    paid = np.minimum(paid.sum(axis=0), money)
                money, sales = money - paid, sales.after(share_of_all[turn], chosen)
        return queue.unsorted(epsilon), queue.unsorted(payment)


def _or_one(records: FloatArray) -> FloatArray:
    """Numbers to divide by: where there are no records, nothing is offered whatever the quotient."""
    return np.where(records > 0, records, 1.0)


def _before(values: FloatArray) -> FloatArray:
    """The sum over all earlier turns."""
    total = np.zeros_like(values)
    total[1:] = values.cumsum(axis=0)[:-1]
    return total


class Queue:
    """Owners in the order of service, and what every ε of the catalogue (or of some `levels`) costs them.

    Arrays have owners first, then the rows of the batch, so that the numbers of a turn lie together; a batch of one
    row has no second axis.
    """

    def __init__(self, bids: BidProfile, *, explorers: int = 0, levels: slice = slice(None)) -> None:
        """`bids` has shape (rows, n)."""
        self._rows, n = bids.shape
        size = bids.data_size
        # nobody sells more than the largest privacy budget: the rest of the catalogue need not be priced
        useful = int(CATALOGUE.searchsorted(bids.privacy_budget.max(), side="right"))
        self.catalogue = slice(levels.start, max(useful, 1), levels.step)
        self._epsilon = CATALOGUE[self.catalogue]
        order = np.argsort(-size.T, axis=0, kind="stable")
        if early := min(explorers, n // 4):  # the smallest come first
            order = np.concatenate((order[-early:], order[:-early]))
        self._index: tuple[Any, IntArray] = (np.arange(self._rows), order) if self._rows > 1 else (0, order[:, 0])
        self.size, self._privacy = size[self._index], bids.privacy_budget[self._index]
        self._valuations = bids.valuations[self._index]
        self.rest = _or_one(self.size[::-1].cumsum(axis=0)[::-1])  # of this owner and all after her
        # short queues are priced once; a long one turn by turn, to bound the memory
        one_by_one = n <= MAX_STEPS
        self.scalar = one_by_one and self._rows == 1
        worth = self._worth(slice(0, n), np.append(self._epsilon, 1.0) if one_by_one else np.ones(1))
        # what is known before each turn; the first of a block speaks for what was known before it: nobody's report
        # moves her own block's menus
        self._known = {
            "next_share": np.append(self.size[1:], np.zeros_like(self.size[:1]), axis=0) / self.rest,
            "concentration": np.square(self.size)[::-1].cumsum(axis=0)[::-1] / np.square(self.rest),
            "value_per_record": Situation.typical(worth[..., -1]),
            "privacy_budget": Situation.typical(self._privacy),
            "full_cost": _before(self.size * self._valuations.per_record(self._privacy)),
        }
        self.turns: list[tuple[int, int | slice]]  # the first owner of a turn, and all of them
        self._cost: FloatArray | None = None
        left, block = self.rest, self.size
        if one_by_one:
            self.turns = [(owner, owner) for owner in range(n)]
            self._cost = self._costs(slice(0, n), worth[..., :-1])
        else:
            edges = np.linspace(0, n, MAX_STEPS + 1).astype(np.int64)
            self.turns = [(first, slice(first, last)) for first, last in pairwise(edges.tolist())]
            first, width = edges[:-1], np.diff(edges)
            self._known = {name: values[first].repeat(width, axis=0) for name, values in self._known.items()}
            left = self.rest[first].repeat(width, axis=0)
            block = np.add.reduceat(self.size, first, axis=0).repeat(width, axis=0)
        # shares of records: of each owner in her block, and of the block in what is left
        self._left, block = left, _or_one(block)
        self.share_of_block, self.block_share = self.size / block, np.minimum(block / left, 1.0)

    def situation(self, budget: FloatArray) -> Situation:
        """What menus look at, given each row's budget."""
        left, total = self._left, self.rest[0]
        money = np.maximum(budget if self._rows > 1 else budget[0], 1e-300)
        with np.errstate(over="ignore"):
            known = self._known | {"full_cost": self._known["full_cost"] / money}
        return Situation(self.size / left, self.size / total, left / total, **known)

    def by_turn(self, values: FloatArray) -> Any:
        """Values to be looked up turn by turn: plain floats if that is what a turn needs."""
        return values.tolist() if self.scalar else values

    def log(self, value: Any) -> Any:
        """NumPy's logarithm; for plain floats a plain float, which the arithmetic that follows is faster on."""
        return float(np.log(value)) if self.scalar else np.log(value)

    def _worth(self, turn: slice, epsilon: FloatArray) -> FloatArray:
        """What each ε is worth to each owner, a record."""
        return self._valuations[turn].reshape((*self.size[turn].shape, 1)).per_record(epsilon)

    def _costs(self, turn: slice, worth: FloatArray) -> FloatArray:
        """What each owner loses at every ε; infinite beyond what she sells."""
        size, privacy = self.size[turn, ..., None], self._privacy[turn, ..., None]
        return np.where((privacy >= self._epsilon) & (size > 0), size * worth, np.inf)

    @property
    def costs(self) -> FloatArray:
        """What each owner of a queue served one by one loses at every ε; infinite beyond what she sells."""
        assert self._cost is not None
        return self._cost

    def best_choice(self, turn: int | slice, offers: FloatArray, allowed: Any) -> tuple[Any, Any]:
        """(ε, payment) that these owners like best; (0, 0) where nothing is worth its cost. Ties: the larger ε."""
        cost = self._costs(turn, self._worth(turn, self._epsilon)) if isinstance(turn, slice) else self.costs[turn]
        np.minimum(offers, allowed if self.scalar else allowed[..., None], out=offers)
        surplus = offers - cost
        pick = surplus.shape[-1] - 1 - surplus[..., ::-1].argmax(axis=-1)
        if self.scalar:
            return (float(self._epsilon[pick]), float(offers[pick])) if surplus[pick] >= 0 else (0.0, 0.0)
        at = (*np.ix_(*map(np.arange, pick.shape)), pick)
        sells = surplus[at] >= 0
        return self._epsilon[pick] * sells, offers[at] * sells

    def unsorted(self, values: FloatArray) -> FloatArray:
        """Values in the owners' original order, rows first."""
        out = np.empty((self._rows, len(values)))
        out[self._index] = values
        return out


def posted(menu: str | AnyMenu = DEFAULT_MENU, ceiling: float | None = None) -> PostedAuction:
    """The auction with a shipped menu by name, a menu file, or a menu; if asked for, with a ceiling on its prices."""
    chosen = load_menu(menu) if isinstance(menu, str) else menu
    return PostedAuction(chosen, "posted" if menu == DEFAULT_MENU else f"posted:{chosen.name}", ceiling=ceiling)


_PRIVATE_CHUNK = 500_000


@dataclass(frozen=True)
class PostedPrivateSizes:
    """Sequential menus over (ε, records), in the order listed; `prior_size` is a typical number of records.

    `posted-private`: as `posted`, when data sizes are private too.

    An owner's menu now prices every (ε, records): p(ε) per record, for as many of her records as she likes up to what
    may be spent on her. It depends on the owners served before her and on a prior for the size of a data set, never on
    her own report or on any later one, so misstating value, privacy budget and size, alone or jointly, is useless: a
    smaller size only removes options, a larger one offers what she cannot deliver. (Were a later owner's size to move
    an earlier price, she could steer what is left for her.) Owners are served in the order listed, since any other
    would have to use sizes.

    What is lost against public sizes: nobody knows who holds most of the data, so money cannot be kept for her.
    """

    menu: AnyMenu
    prior_size: float = 100.0
    name: str = "posted-private"
    guarantees: Guarantees = _PRIVATE_SIZES
    private_fields: tuple[str, ...] = ("value", "privacy_budget", "data_size")

    def __post_init__(self) -> None:
        checked_positive("prior_size", self.prior_size)

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic. The outcome says how many records each sells."""
        epsilon, payment, records = in_parts(bids, budget, _PRIVATE_CHUNK // CATALOGUE.size, self._serve)
        return Outcome(epsilon, payment, records=records)

    def _serve(self, bids: BidProfile, money: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        rows, n = bids.shape
        epsilon, payment, records = np.zeros((3, rows, n))
        left = np.arange(n, 0, -1.0)
        # mean size so far: the prior counts as one more owner
        expected = (self.prior_size + np.cumsum(bids.data_size, axis=-1) - bids.data_size) / np.arange(1.0, n + 1)
        share = np.broadcast_to(1.0 / left[:, None], (n, rows))
        spoken = _before(bids.full_cost.T)
        with np.errstate(over="ignore"):
            situation = Situation(
                share_of_rest=share,
                share_of_all=np.full((n, rows), 1.0 / n),
                rest=np.broadcast_to(left[:, None] / n, (n, rows)),
                next_share=np.where(left[:, None] > 1, share, 0.0),
                concentration=share,
                value_per_record=Situation.typical(bids.valuations.per_record(1.0).T),
                privacy_budget=Situation.typical(bids.privacy_budget.T),
                full_cost=spoken / np.maximum(money, 1e-300),
            )
        pricing, sales = self.menu.pricing(situation), Sales(*[np.zeros(rows)] * 3)
        for owner in range(n):
            per_record = money / (expected[:, owner] * left[owner])
            with np.errstate(divide="ignore", over="ignore"):  # see `Pricing.offers`
                price = pricing.offers(owner, np.log(per_record), sales, 0.0)
            allowed = money * (1.0 / left[owner]) ** self.menu.reserve
            chosen = _best_choice(bids[:, owner], price, allowed)
            epsilon[:, owner], payment[:, owner], records[:, owner] = chosen
            money, sales = np.maximum(money - chosen[1], 0.0), sales.after(np.full(rows, 1.0 / n), chosen[0])
        return epsilon, payment, records


def _best_choice(
    owners: BidProfile, price: FloatArray, allowed: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(ε, payment, records) that each of these likes best, (0, 0, 0) where nothing is worth its cost."""
    rows = owners.n
    value = owners.valuations.reshape((rows, 1)).per_record(CATALOGUE)
    fits = np.divide(allowed[:, None], price, out=np.full(price.shape, np.inf), where=price > 0)
    sold = np.minimum(owners.data_size[:, None], fits)
    margin = np.where((owners.privacy_budget[:, None] >= CATALOGUE) & (sold > 0), price - value, -np.inf)
    with np.errstate(invalid="ignore"):
        surplus = np.where(np.isfinite(margin), margin * sold, -np.inf)
    pick, row = CATALOGUE.size - 1 - surplus[:, ::-1].argmax(axis=-1), np.arange(rows)
    sells = surplus[row, pick] >= 0
    records = np.where(sells, sold[row, pick], 0.0)
    paid = np.minimum(records * np.where(sells, price[row, pick], 0.0), allowed)
    return np.where(sells, CATALOGUE[pick], 0.0), paid, records


def posted_private(menu: str | AnyMenu = DEFAULT_MENU, prior_size: float = 100.0) -> PostedPrivateSizes:
    """The auction with a shipped menu by name, a menu file, or a menu."""
    return PostedPrivateSizes(load_menu(menu) if isinstance(menu, str) else menu, prior_size)
