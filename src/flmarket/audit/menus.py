"""Mechanisms that say what each owner may choose from: then every lie is judged at once.

A mechanism may offer `menus(bids, budget) -> (epsilon (items,), payment (rows, n, items))`: what each owner can get by
any report whatsoever, beside nothing for nothing. If that is so, her regret is what the best item of her menu is truly
worth minus what truth got her: exact, no search. Whether it *is* so cannot be taken on the mechanism's word. Every
report that the audit does try (`truthfulness`) must lead to something that is on the menu shown to the truthful owner,
at the price it has there; if one does not, the menu counts for nothing and the search is made in full.

What this would miss: a mechanism whose menus are right on all profiles and lies tried, and wrong on others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.audit.trials import Awards, Sample, Trials
from flmarket.bids import Auction, BidProfile, FloatArray, IntArray

_EXACT = 1e-12
_CHUNK_ITEMS = 5_000_000


@runtime_checkable
class ShowsMenus(Auction, Protocol):
    """A mechanism whose outcome for an owner is a choice from a list that her own report cannot move."""

    def menus(self, bids: BidProfile, budget: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Privacy losses, (items,) and rising, and what each is paid for, (rows, n, items)."""


class NotOnTheMenu(Exception):
    """Somebody got, or could have got, what her menu does not say: it is none."""


@dataclass(frozen=True)
class Menus:
    """The menus of the lying owners of a batch of trials: `epsilon` (items,), `payment` (rows, items)."""

    epsilon: FloatArray
    payment: FloatArray

    @classmethod
    def of(cls, mechanism: ShowsMenus, sample: Sample, profile: IntArray, owner: IntArray) -> Menus:
        """Shown to these owners when everybody tells the truth; `profile` rises."""
        first, last = int(profile[0]), int(profile[-1])
        part = sample[first : last + 1]
        epsilon, payment = mechanism.menus(part.bids, part.budget)
        return cls(epsilon, payment[profile - first, owner])

    def best(self, trials: Trials) -> FloatArray:
        """The most that any choice from her menu is truly worth to the owner of each row; nothing is worth 0."""
        own = trials.own.reshape((len(trials.rows), 1))
        cost = trials.true_size[:, None] * own.per_record(self.epsilon)
        allowed = self.epsilon <= trials.true_privacy[:, None]
        return np.asarray(np.where(allowed, self.payment - cost, 0.0).max(axis=-1, initial=0.0))

    def lists(self, trials: Trials, awards: Awards) -> NDArray[np.bool_]:
        """Whether each award is on the menu (or worth −∞ to her, so that nobody cares)."""
        item = np.minimum(self.epsilon.searchsorted(awards.epsilon * (1 - _EXACT)), self.epsilon.size - 1)
        price = self.payment[trials.rows, item]
        same = np.abs(awards.payment - price) <= _EXACT * price
        listed = (np.abs(self.epsilon[item] - awards.epsilon) <= _EXACT * awards.epsilon) & same
        nothing = (awards.epsilon == 0) & (awards.payment == 0)
        return np.asarray(nothing | (listed & (awards.participation == 1)) | np.isneginf(awards.utility))


def rows_at_once(mechanism: ShowsMenus, sample: Sample) -> int:
    """How many profiles to ask for at a time, so that their menus fit in memory."""
    one = sample[:1]
    return max(1, _CHUNK_ITEMS // max(mechanism.menus(one.bids, one.budget)[1].size, 1))
