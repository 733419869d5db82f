"""Masked sums: a broker learns the sum of owners' numbers and nothing else. See `terms`, `masker` and `broker`."""

from flmarket.market.masking.broker import DONE, Reply, Summing, exchange
from flmarket.market.masking.masker import AFTER, AGREE, INPUT, KEYS, SHARES, STAGES, UNMASK, VOID, VOIDED, Masker
from flmarket.market.masking.terms import COMPLETE, MaskTerms

__all__ = [
    "AFTER",
    "AGREE",
    "COMPLETE",
    "DONE",
    "INPUT",
    "KEYS",
    "SHARES",
    "STAGES",
    "UNMASK",
    "VOID",
    "VOIDED",
    "MaskTerms",
    "Masker",
    "Reply",
    "Summing",
    "exchange",
]
