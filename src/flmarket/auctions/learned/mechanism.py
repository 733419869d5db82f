"""`LearnedAuction`: a trained network as an auction, in plain NumPy.

The network's offers become outcomes in one of two ways: cleared against the budget, or by a lottery. Whatever its
weights, the auction is within budget (payments are shares of the budget that sum to at most 1, and a menu never asks
for more than its share), pays losers nothing, and pays nobody less than her reported cost. How truthful it is depends
on the training: each weight file carries the regret that was measured.

Sampled auctions draw one outcome per owner, with its payment. Without a generator each lottery is settled at its
median, which keeps the call deterministic; draws then have to come from `rng`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.auctions.learned.network import Inputs, Offer, Parameters, Settings, forward, softmax
from flmarket.auctions.single_minded import last_true
from flmarket.bids import (
    APPROXIMATE,
    EXACT,
    BidProfile,
    FloatArray,
    Guarantees,
    IntArray,
    Outcome,
    Valuations,
    checked_budget,
    in_parts,
    slices,
)

_LEAST = np.finfo(np.float64).tiny


def demand_steps(cost: FloatArray, price: FloatArray) -> tuple[FloatArray, IntArray]:
    """The multipliers at which an owner moves to a larger sub-bid, and that sub-bid; shapes (..., M).

    `cost` and `price` have shape (..., M+1), 0 at index 0. A step that is never taken has multiplier ∞.
    """
    items = cost.shape[-1] - 1
    index = np.arange(items + 1)
    at = np.zeros((*cost.shape[:-1], 1), dtype=np.int64)
    steps, targets = np.empty((*at.shape[:-1], items)), np.empty((*at.shape[:-1], items), dtype=np.int64)
    for step in range(items):
        more_price = price - np.take_along_axis(price, at, axis=-1)
        more_cost = cost - np.take_along_axis(cost, at, axis=-1)
        ahead = (index > at) & (more_price > 0)
        rate = np.divide(more_cost, more_price, out=np.full(cost.shape, np.inf), where=ahead)
        # of equally good edges the longest, so that an owner of no cost sells all at once
        best = items - rate[..., ::-1].argmin(axis=-1)[..., None]
        steps[..., step] = np.take_along_axis(rate, best, axis=-1)[..., 0]
        at = np.where(np.isfinite(steps[..., step : step + 1]), best, at)
        targets[..., step] = at[..., 0]
    return np.maximum.accumulate(steps, axis=-1), targets


def clear_market(
    share: FloatArray, price: FloatArray, cost: FloatArray, caution: FloatArray
) -> tuple[IntArray, FloatArray]:
    """(sub-bid, share of the budget paid) of every owner; arrays (rows, n) and (rows, n, M+1), cost over budget.

    Clearing a menu: raise every price by one multiplier until the budget is spent, and cap it for each owner's sake.

    Owner i is offered B·x·w_i·κ_i(ε) for a privacy loss ε, with a share w_i and a price curve κ_i ≤ 1 that the network
    sets, and takes what she likes best. Her demand κ_i(x) never falls as the multiplier x grows, so the spending x·Σ_j
    w_j κ_j(x) grows too, and there is a largest x at which the budget suffices. Each owner i gets her own,

        x_i = sup{ x : x·( Σ_j w_j κ_j(x) + c_i·w_i·(1 − κ_i(x)) ) ≤ 1 },      0 ≤ c_i ≤ 1:

    the market is cleared as if she sold the share c_i of what she keeps back.

    * **Within budget**, whatever the weights: the bracket is at least the true spending, so x_i ≤ x, the multiplier
      that clears the market; spending rises with x, hence Σ_i x_i w_i κ_i(x_i) ≤ x Σ_i w_i κ_i(x) ≤ 1.
    * **Rational**: nothing at price 0 is on every menu.
    * **Truthful** at c_i = 1 in valuation and ε̄ (up to the grid of sub-bids) if w and κ come from data sizes: then x_i
      does not depend on what she reports. At c_i < 1 she can gain by selling less, as anybody in a market can who is
      not small; the training's regret penalty decides how far c_i may fall.

    κ_i(x) is a step function whose steps are the edges of the lower convex hull of her costs over κ. So x_i is found
    exactly: sort all steps of all owners, and locate each owner's multiplier between two of them by bisection.
    """
    rows, n = share.shape
    with np.errstate(divide="ignore", over="ignore"):
        unit = cost / np.maximum(share, _LEAST)[..., None]
    steps, targets = demand_steps(unit, np.where(share[..., None] > 0, price, 0.0))
    reached = np.take_along_axis(price, targets, axis=-1)
    demand = np.concatenate([np.zeros((rows, n, 1)), reached], axis=-1)  # κ after 0, 1, … of her steps
    rise = (share[..., None] * np.diff(demand, axis=-1)).reshape(rows, -1)

    flat = steps.reshape(rows, -1)
    order = np.argsort(flat, axis=-1, kind="stable")
    sorted_steps = np.take_along_axis(flat, order, axis=-1)
    count = flat.shape[-1]
    total = np.concatenate([np.zeros((rows, 1)), np.cumsum(np.take_along_axis(rise, order, axis=-1), axis=-1)], axis=-1)
    # steps at the same multiplier stand or fall together: positions are those of the last of equals
    last = np.broadcast_to(np.arange(count), flat.shape).copy()
    last[:, :-1][sorted_steps[:, :-1] == sorted_steps[:, 1:]] = count
    last = np.minimum.accumulate(last[:, ::-1], axis=-1)[:, ::-1]
    rank = np.empty_like(last)
    np.put_along_axis(rank, order, last, axis=-1)
    rank = rank.reshape(steps.shape)
    at_row = np.arange(rows)[:, None]

    def spending(k: IntArray) -> tuple[FloatArray, IntArray]:
        """Σ_j w_j κ_j + c_i w_i (1 − κ_i) after k steps, and how many of them are her own."""
        own = (rank < k[..., None]).sum(axis=-1)
        kept = 1.0 - np.take_along_axis(demand, own[..., None], axis=-1)[..., 0]
        return total[at_row, k] + caution * share * kept, own

    def whole(k: IntArray) -> IntArray:
        return np.where(k > 0, last[at_row, np.maximum(k - 1, 0)] + 1, 0)

    def affordable(k: IntArray) -> NDArray[np.bool_]:
        group = whole(k)
        multiplier = sorted_steps[at_row, np.maximum(group - 1, 0)]
        with np.errstate(invalid="ignore"):
            return np.asarray((group == 0) | (np.isfinite(multiplier) & (multiplier * spending(group)[0] <= 1.0)))

    k = whole(last_true(affordable, np.zeros((rows, n), dtype=np.int64), count))
    spent, own = spending(k)
    following = np.where(k < count, sorted_steps[at_row, np.minimum(k, count - 1)], np.inf)
    multiplier = np.minimum(following, 1.0 / np.maximum(spent, _LEAST))
    item = np.where(own > 0, np.take_along_axis(targets, np.maximum(own - 1, 0)[..., None], axis=-1)[..., 0], 0)
    taken = np.take_along_axis(demand, own[..., None], axis=-1)[..., 0]
    paid = np.where(item > 0, np.where(np.isfinite(multiplier), multiplier, 0.0) * share * taken, 0.0)
    return item, paid


_CHUNK_ENTRIES = 40_000
_KEEP_ENTRIES = 5_000_000
_TINY = 1e-300
_FAR = 1e12  # an ask so many times the budget is out of reach, whatever it is exactly


def sub_bids(valuations: Valuations, privacy: FloatArray, items: int) -> tuple[FloatArray, FloatArray]:
    """Privacy losses m·ε̄/M and what a record costs at each, shape (..., n, M+1)."""
    epsilon = privacy[..., None] * (np.arange(items + 1) / items)
    return epsilon, valuations.reshape((*privacy.shape, 1)).per_record(epsilon)


def inputs_of(settings: Settings, bids: BidProfile, budget: FloatArray) -> tuple[Inputs, FloatArray]:
    """What the network sees of profiles of shape (rows, n) with budgets (rows,), and the privacy losses on offer."""
    epsilon, value = sub_bids(bids.valuations, bids.privacy_budget, settings.items)
    size = bids.data_size
    share = size / np.maximum(size.sum(axis=-1, keepdims=True), _TINY)
    with np.errstate(over="ignore", divide="ignore"):
        ask = np.minimum(size[..., None] * value / np.maximum(budget, _TINY)[:, None, None], _FAR)
    return Inputs(share, _without_last_bits(ask), bids.privacy_budget), epsilon


def _without_last_bits(values: FloatArray) -> FloatArray:
    """Rounded to 40 bits, so that asks that tie in one currency tie in every other: the last bits are noise."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(mantissa * 2.0**40) / 2.0**40, exponent))


@dataclass(frozen=True)
class LearnedAuction:
    """A network with its weights."""

    settings: Settings
    parameters: Parameters
    name: str = "learned"
    source: str = "trained by flmarket train-auction; docs/learned.md"
    _last: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def guarantees(self) -> Guarantees:
        """Budget and rationality hold for any weights; truthfulness is what training reached."""
        return Guarantees(APPROXIMATE, EXACT, EXACT, self.source)

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; `rng` draws the outcomes of sampled auctions."""
        if self.settings.clearing:
            return Outcome(*in_parts(bids, budget, self._rows(bids), self._cleared))
        money = checked_budget(budget, bids.shape[:-1]).reshape(-1)
        epsilon, paid = self._sampled(bids, money, rng)
        payment = np.where(epsilon > 0, paid * money[:, None], 0.0)
        return Outcome(epsilon.reshape(bids.shape), payment.reshape(bids.shape))

    def offers(self, bids: BidProfile, budget: FloatArray) -> tuple[Offer, Inputs, FloatArray]:
        """The network's offers to profiles of shape (rows, n), what it saw, and the privacy losses on offer."""
        inputs, epsilon = inputs_of(self.settings, bids, budget)
        return forward(np, self.settings, self.parameters, inputs), inputs, epsilon

    def _rows(self, bids: BidProfile) -> int:
        """How many profiles are handled at a time."""
        return _CHUNK_ENTRIES // (bids.n * (self.settings.items + 1))

    def _cleared(self, bids: BidProfile, money: FloatArray) -> tuple[FloatArray, FloatArray]:
        offer, inputs, epsilon = self.offers(bids, money)
        item, paid = clear_market(offer.share, offer.price, inputs.ask, offer.caution)
        sold = _pick(epsilon, item)
        return sold, np.where(sold > 0, paid * money[:, None], 0.0)

    def _chances(self, offer: Offer, inputs: Inputs) -> FloatArray:
        """Of every sub-bid; those that do not cover the reported cost are out."""
        surplus = offer.share[..., None] * offer.price - inputs.ask
        sellable = (surplus >= 0) & (offer.share[..., None] > 0)
        sellable[..., 0] = True
        logits = surplus / (self.settings.temperature * np.maximum(inputs.ask[..., -1:], _TINY))
        return np.asarray(softmax(np, np.where(sellable, logits, -np.inf)))

    def _sampled(
        self, bids: BidProfile, money: FloatArray, rng: np.random.Generator | None
    ) -> tuple[FloatArray, FloatArray]:
        cumulative, epsilon, paid = self._lottery(bids, money)
        ticket = np.full((*epsilon.shape[:2], 1), 0.5) if rng is None else rng.random((*epsilon.shape[:2], 1))
        item = (cumulative[..., :-1] <= ticket).sum(axis=-1)
        return _pick(epsilon, item), _pick(paid, item)

    def _lottery(self, bids: BidProfile, money: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Cumulative chances, privacy losses and payments of every sub-bid; kept for further draws on the same bids."""
        known = self._last.get("lottery")  # read once: another thread may replace it
        if known is not None and known[0] is bids and np.array_equal(known[1], money):
            made: tuple[FloatArray, FloatArray, FloatArray] = known[2]
            return made
        parts, flat = [], bids.flat
        for part in slices(len(money), self._rows(bids)):
            offer, inputs, epsilon = self.offers(flat[part], money[part])
            chance = self._chances(offer, inputs)
            parts.append((np.cumsum(chance, axis=-1), epsilon, offer.share[..., None] * offer.price))
        cumulative, epsilons, paid = (np.concatenate([part[i] for part in parts]) for i in range(3))
        made = (cumulative, epsilons, paid)
        if cumulative.size <= _KEEP_ENTRIES:
            self._last["lottery"] = (bids, money.copy(), made)
        return made


def _pick(values: FloatArray, item: IntArray) -> FloatArray:
    return np.take_along_axis(values, item[..., None], axis=-1)[..., 0]
