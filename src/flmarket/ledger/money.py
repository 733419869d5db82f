"""Money as integer micro-units (a millionth of the currency unit), so that sums are exact.

Mechanisms compute in floating point; this is the one place where their payments become money. A payment rounds down,
and what the rounding leaves stays with the buyer.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import IntArray
from flmarket.errors import InvalidInput, MechanismViolation

__all__ = ["MICROS", "format_micros", "payments_to_micros", "to_micros"]

MICROS = 1_000_000
MAX_MICROS = 2**62
# The sum of n floating-point payments may pass the budget by rounding alone; more than this share is overspending.
_ROUNDING = 1e-9


def to_micros(name: str, amount: float) -> int:
    """A positive or zero amount of currency units as micro-units, rounded down."""
    if isinstance(amount, bool) or not isinstance(amount, int | float | np.number):
        raise InvalidInput(name, amount, "an amount of money")
    if not math.isfinite(amount) or not 0 <= amount * MICROS <= MAX_MICROS:
        raise InvalidInput(name, amount, "a finite amount of money of at least 0")
    return math.floor(amount * MICROS)


def payments_to_micros(payment: ArrayLike, budget_micros: int) -> IntArray:
    """One round's payments as money, each rounded down; refused whole if one is none or they do not fit the budget."""
    try:
        exact = np.asarray(payment, dtype=np.float64) * MICROS
    except (TypeError, ValueError):
        raise InvalidInput("payment", type(payment).__name__, "an array of numbers") from None
    wrong = exact[~((exact >= 0) & (exact <= MAX_MICROS))]  # NaN is neither
    if wrong.size:
        raise MechanismViolation(f"a payment of {wrong.flat[0] / MICROS} is no amount of money: nothing was awarded")
    if exact.sum() > budget_micros * (1 + _ROUNDING) + 1:
        spent, limit = format_micros(int(exact.sum())), format_micros(budget_micros)
        raise MechanismViolation(f"payments of {spent} exceed the budget of {limit}: nothing was awarded")
    micros = np.floor(exact).astype(np.int64)
    excess = int(micros.sum()) - budget_micros
    if excess > 0:  # floating-point dust: taken from the largest payments, where it matters least
        largest = np.argsort(-micros, kind="stable")
        share, rest = divmod(excess, int((micros > 0).sum()))
        micros[micros > 0] -= share
        micros[largest[:rest]] -= 1
    return micros


def format_micros(amount: int) -> str:
    """1234567 → '1.234567'; trailing zeros beyond cents are dropped."""
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    fraction = f"{amount % MICROS:06d}".rstrip("0").ljust(2, "0")
    return f"{sign}{amount // MICROS:,}.{fraction}"
