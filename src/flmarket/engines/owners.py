"""Simulated data owners: what they hold, what they ask, and the guard that stands between their data and a release.

Each owner keeps her valuation, her privacy budget a round and her lifetime account over the whole task. She bids no
more privacy than her account still allows, checks every award against it before anything leaves, and refuses
otherwise; the broker cannot override that. An owner whose account is used up stays away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import BidProfile
from flmarket.errors import InvalidInput
from flmarket.privacy import ApproxDp, Perturbation, PrivacyAccount, PureDp

__all__ = ["OwnerPool", "PrivacyCap"]

# Below this an owner has, in effect, nothing left to sell, and noise would drown the release.
LEAST_EPSILON = 1e-3
# What "no cap" means to an account, which must have one.
UNLIMITED = 1e9


@dataclass(frozen=True)
class PrivacyCap:
    """The most privacy an owner gives up over her lifetime: ε in total, at δ (0 for pure ε)."""

    epsilon: float = math.inf
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise InvalidInput("privacy cap", self.epsilon, "a total ε above 0")
        if not 0 <= self.delta < 1:
            raise InvalidInput("privacy cap δ", self.delta, "a probability below 1")

    def account(self) -> PrivacyAccount:
        """A fresh account with this cap."""
        limit = min(self.epsilon, UNLIMITED)
        return PrivacyAccount(ApproxDp(limit, self.delta) if self.delta > 0 else PureDp(limit))


class OwnerPool:
    """All owners of a simulated market, numbered from 0."""

    def __init__(self, bids: BidProfile, perturbation: Perturbation, cap: PrivacyCap) -> None:
        if len(bids.shape) != 1:
            raise InvalidInput("bids", bids.shape, "one profile of all owners, shape (n,)")
        self.bids, self.perturbation, self.cap = bids, perturbation, cap
        self.accounts = [cap.account() for _ in range(bids.n)]
        self.offers = np.zeros(bids.n, dtype=np.int64)
        self.refusals = np.zeros(bids.n, dtype=np.int64)
        self._affordable = np.full(bids.n, self._left(0))

    def eligible(self) -> NDArray[np.int64]:
        """Owners who still have privacy to sell."""
        sells = np.minimum(self._affordable, self.bids.privacy_budget) >= LEAST_EPSILON
        return np.flatnonzero(sells & (self.bids.data_size > 0))

    def bid(self, owners: ArrayLike) -> BidProfile:
        """The bids of these owners, each privacy budget cut to what the owner's account allows."""
        chosen = np.asarray(owners)
        self.offers[chosen] += 1
        offer = np.minimum(self.bids.privacy_budget[chosen], self._affordable[chosen])
        return BidProfile(self.bids.valuations[chosen], offer, self.bids.data_size[chosen])

    def use_account(self, owner: int, account: PrivacyAccount) -> None:
        """Give an owner an account of her own, e.g. one restored from storage or with another cap."""
        self.accounts[owner] = account
        self._affordable[owner] = self._left(owner)

    def release(
        self, owner: int, epsilon: float, update: NDArray[np.float64], rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """The owner's private update; raises PrivacyBudgetExhausted, with nothing released, past her cap.

        The account is charged before the noise is drawn: a crash in between loses privacy budget, never privacy.
        """
        try:
            self.accounts[owner].compose(self.perturbation.guarantee(epsilon))
        except Exception:
            self.refusals[owner] += 1
            raise
        self._affordable[owner] = self._left(owner)
        return self.perturbation.privatize(update, epsilon, rng)

    def _left(self, owner: int) -> float:
        account = self.accounts[owner]
        if isinstance(account.cap, ApproxDp):
            return account.affordable(guarantee=self.perturbation.guarantee)
        return account.affordable()
