"""`posted-private`: as `posted`, when data sizes are private too.

An owner's menu now prices every (ε, records): p(ε) per record, for as many of her records as she likes up to what may
be spent on her. It depends on the owners served before her and on a prior for the size of a data set, never on her own
report or on any later one, so misstating value, privacy budget and size, alone or jointly, is useless: a smaller size
only removes options, a larger one offers what she cannot deliver. (Were a later owner's size to move an earlier price,
she could steer what is left for her.) Owners are served in the order listed, since any other would have to use sizes.

What is lost against public sizes: nobody knows who holds most of the data, so money cannot be kept for her.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flmarket.auctions.posted.menu import CATALOGUE, Menu, Pricing, Situation, load_menu
from flmarket.bids import EXACT, BidProfile, FloatArray, Guarantees, Outcome, Valuations, checked_budget
from flmarket.errors import InvalidInput

__all__ = ["PostedPrivateSizes", "posted_private"]


_CHUNK_ENTRIES = 500_000
_GUARANTEES = Guarantees(
    truthful=EXACT,
    rational=EXACT,
    budget_feasible=EXACT,
    source="taxation principle (Hammond 1979); proof in docs/posted.md",
)


@dataclass(frozen=True)
class PostedPrivateSizes:
    """Sequential menus over (ε, records), in the order listed; `prior_size` is a typical number of records."""

    menu: Menu
    prior_size: float = 100.0
    name: str = "posted-private"
    guarantees: Guarantees = _GUARANTEES
    private_fields: tuple[str, ...] = ("value", "privacy_budget", "data_size")

    def __post_init__(self) -> None:
        if not (np.isfinite(self.prior_size) and self.prior_size > 0):
            raise InvalidInput("prior_size", self.prior_size, "a positive number of records")

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic. The outcome says how many records each sells."""
        n = bids.n
        money = checked_budget(budget, bids.shape[:-1]).reshape(-1)
        valuations, privacy = bids.valuations.reshape((-1, n)), bids.privacy_budget.reshape(-1, n)
        size = bids.data_size.reshape(-1, n)
        out = np.empty((3, *size.shape))
        rows = max(1, _CHUNK_ENTRIES // CATALOGUE.size)
        for start in range(0, len(size), rows):
            part = slice(start, start + rows)
            out[:, part] = self._serve(valuations[part], privacy[part], size[part], money[part])
        epsilon, payment, records = (values.reshape(bids.shape) for values in out)
        return Outcome(epsilon, payment, records=records)

    def _serve(
        self, valuations: Valuations, privacy: FloatArray, size: FloatArray, money: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        rows, n = size.shape
        epsilon, payment, records = np.zeros(size.shape), np.zeros(size.shape), np.zeros(size.shape)
        left = np.arange(n, 0, -1.0)
        # mean size so far: the prior counts as one more owner
        expected = (self.prior_size + np.cumsum(size, axis=-1) - size) / np.arange(1.0, n + 1)
        situation = Situation(
            share_of_rest=np.broadcast_to(1.0 / left[:, None], (n, rows)),
            share_of_all=np.full((n, rows), 1.0 / n),
            rest=np.broadcast_to(left[:, None] / n, (n, rows)),
            value_per_record=Situation.typical_values(valuations.per_record(1.0).T),
        )
        pricing, declined = Pricing(self.menu, situation), np.zeros(rows)
        for owner in range(n):
            per_record = money / (expected[:, owner] * left[owner])
            with np.errstate(divide="ignore", over="ignore"):  # see `Pricing.offers`
                price = pricing.offers(owner, np.log(per_record), declined / n, 0.0)
            allowed = money * (1.0 / left[owner]) ** self.menu.reserve
            chosen = _best_choice(valuations[:, owner], privacy[:, owner], size[:, owner], price, allowed)
            epsilon[:, owner], payment[:, owner], records[:, owner] = chosen
            money, declined = np.maximum(money - chosen[1], 0.0), declined + (chosen[0] <= 0)
        return epsilon, payment, records


def _best_choice(
    valuations: Valuations, privacy: FloatArray, size: FloatArray, price: FloatArray, allowed: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(ε, payment, records) that each owner likes best, (0, 0, 0) where nothing is worth its cost."""
    rows = len(size)
    value = valuations.reshape((rows, 1)).per_record(CATALOGUE)
    fits = np.divide(allowed[:, None], price, out=np.full(price.shape, np.inf), where=price > 0)
    sold = np.minimum(size[:, None], fits)
    margin = np.where((privacy[:, None] >= CATALOGUE) & (sold > 0), price - value, -np.inf)
    with np.errstate(invalid="ignore"):
        surplus = np.where(np.isfinite(margin), margin * sold, -np.inf)
    pick, row = CATALOGUE.size - 1 - surplus[:, ::-1].argmax(axis=-1), np.arange(rows)
    sells = surplus[row, pick] >= 0
    records = np.where(sells, sold[row, pick], 0.0)
    paid = np.minimum(records * np.where(sells, price[row, pick], 0.0), allowed)
    return np.where(sells, CATALOGUE[pick], 0.0), paid, records


def posted_private(menu: str | Menu = "general", prior_size: float = 100.0) -> PostedPrivateSizes:
    """The auction with a shipped menu by name, a menu file, or a `Menu`."""
    return PostedPrivateSizes(menu if isinstance(menu, Menu) else load_menu(menu), prior_size)
