"""`LearnedAuction`: a trained network as an auction, in plain NumPy.

The network's offers become outcomes in one of three ways. Whatever its weights, the auction is within budget
(payments are shares of the budget that sum to at most 1, and a menu never asks for more than its share), pays losers
nothing, and, where the settings say so, pays nobody less than her reported cost. How truthful it is depends on the
training: each weight file carries the regret that was measured.

Sampled auctions draw one outcome per owner, with its payment. Without a generator each lottery is settled at its
median, which keeps the call deterministic; draws then have to come from `rng`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flmarket.auctions.learned.clearing import clear_market
from flmarket.auctions.learned.network import Inputs, Offer, Parameters, forward
from flmarket.auctions.learned.settings import Settings
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
)
from flmarket.errors import InvalidInput

__all__ = ["LearnedAuction", "inputs_of", "sub_bids"]


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
        """Budget and, where built in, rationality hold for any weights; truthfulness is what training reached."""
        rational = EXACT if self.settings.rational else APPROXIMATE
        return Guarantees(APPROXIMATE, rational, EXACT, self.source)

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; `rng` draws the outcomes of sampled auctions."""
        n = bids.n
        if self.settings.owners is not None and n != self.settings.owners:
            raise InvalidInput(
                "bids", f"{n} owners", f"{self.settings.owners} owners, the number that {self.name} was trained for"
            )
        money = checked_budget(budget, bids.shape[:-1]).reshape(-1)
        if self.settings.deployment == "sampled":
            epsilon, paid = self._sampled(bids, money, rng)
        else:
            epsilon, paid = self._deterministic(bids, money)
        payment = np.where(epsilon > 0, paid * money[:, None], 0.0)
        return Outcome(epsilon.reshape(bids.shape), payment.reshape(bids.shape))

    def offers(self, bids: BidProfile, budget: FloatArray) -> tuple[Offer, Inputs, FloatArray]:
        """The network's offers to profiles of shape (rows, n), what it saw, and the privacy losses on offer."""
        inputs, epsilon = inputs_of(self.settings, bids, budget)
        return forward(np, self.settings, self.parameters, inputs), inputs, epsilon

    def _chunks(self, bids: BidProfile, money: FloatArray) -> Any:
        n = bids.n
        flat = BidProfile(
            bids.valuations.reshape((-1, n)), bids.privacy_budget.reshape(-1, n), bids.data_size.reshape(-1, n)
        )
        rows = max(1, _CHUNK_ENTRIES // (n * (self.settings.items + 1)))
        for start in range(0, len(money), rows):
            part = slice(start, start + rows)
            some = flat[part] if len(money) > rows else flat
            yield *self.offers(some, money[part]), some, money[part]

    def _deterministic(self, bids: BidProfile, money: FloatArray) -> tuple[FloatArray, FloatArray]:
        parts = []
        for offer, inputs, epsilon, some, budget in self._chunks(bids, money):
            if self.settings.clearing:
                item, paid = clear_market(offer.share, offer.price, inputs.ask, offer.caution)
                parts.append((_pick(epsilon, item), paid))
            elif self.settings.deployment == "argmax":
                item = self._choice_logits(offer, inputs).argmax(axis=-1)
                parts.append((_pick(epsilon, item), offer.share * _pick(offer.price, item)))
            else:
                mean, paid = self._expected(offer, inputs, epsilon)
                # a mean of fair sub-bids may cost more than it is paid where the valuation is concave
                fair = paid * budget[:, None] >= some.cost(mean) if self.settings.rational else np.True_
                parts.append((np.where(fair, mean, 0.0), paid))
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _choice_logits(self, offer: Offer, inputs: Inputs) -> FloatArray:
        """Logits over sub-bids; those that do not cover the reported cost are out, where that is promised."""
        surplus = offer.share[..., None] * offer.price - inputs.ask
        if offer.logits is None:
            logits = surplus / (self.settings.temperature * np.maximum(inputs.ask[..., -1:], _TINY))
        else:
            logits = np.array(offer.logits, dtype=np.float64) / self.settings.temperature
        if self.settings.rational:
            sellable = (surplus >= 0) & (offer.share[..., None] > 0)
            sellable[..., 0] = True
            logits = np.where(sellable, logits, -np.inf)
        return np.asarray(logits)

    def _probabilities(self, offer: Offer, inputs: Inputs) -> FloatArray:
        logits = self._choice_logits(offer, inputs)
        weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(weight / weight.sum(axis=-1, keepdims=True))

    def _expected(self, offer: Offer, inputs: Inputs, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The mean of the lottery as one sure outcome (FL-Market 2021 Alg. 5), paid by the menu at that mean.

        The mean *payment* would be more than the menu's wherever prices bend upwards: an owner could ask for a mixture.
        """
        mean = (self._probabilities(offer, inputs) * epsilon).sum(axis=-1)
        if offer.logits is not None:  # the papers pay the whole share
            return mean, offer.share
        items = self.settings.items
        place = np.divide(mean * items, inputs.privacy, out=np.zeros(mean.shape), where=inputs.privacy > 0)
        low = np.minimum(place.astype(np.int64), items - 1)
        left, right = _pick(offer.price, low), _pick(offer.price, low + 1)
        return mean, offer.share * (left + (place - low) * (right - left))

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
        parts = []
        for offer, inputs, epsilon, *_ in self._chunks(bids, money):
            chance = self._probabilities(offer, inputs)
            parts.append((np.cumsum(chance, axis=-1), epsilon, offer.share[..., None] * offer.price))
        cumulative, epsilons, paid = (np.concatenate([part[i] for part in parts]) for i in range(3))
        made = (cumulative, epsilons, paid)
        if cumulative.size <= _KEEP_ENTRIES:
            self._last["lottery"] = (bids, money.copy(), made)
        return made


def _pick(values: FloatArray, item: IntArray) -> FloatArray:
    return np.take_along_axis(values, item[..., None], axis=-1)[..., 0]
