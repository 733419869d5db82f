"""Numbers as people read them: one place decides digits, so that cards, captions and tables agree."""

import math
from collections.abc import Iterable, Mapping

from flmarket.ledger import MICROS


def finite_or_none(value: float) -> float | None:
    """A float for strict JSON, which has neither infinity nor NaN."""
    return float(value) if math.isfinite(value) else None


def significant(value: float, digits: int = 3) -> str:
    """Three significant digits without an exponent as long as that stays readable."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if not -5 <= exponent <= 8:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def epsilon(value: float | None) -> str:
    """A privacy loss with two decimals, or more where two would hide it; None is an infinite one, as in JSON."""
    if value is None:
        return "∞"
    if not math.isfinite(value) or 0 < abs(value) < 0.1:
        return significant(value)
    return f"{value:,.2f}"


def rate(value: float | None) -> str:
    """An accuracy, with three decimals."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(share: float) -> str:
    """A share as a percentage with at most one decimal; never rounds up to a full 100 %."""
    if not math.isfinite(share):
        return "–"
    value = share * 100
    if 99.95 <= value < 100:
        return "99.9 %"
    return f"{value:.0f} %" if value == round(value) else f"{value:,.1f} %"


def money_decimals(amounts: Iterable[int]) -> int:
    """Decimals that show the largest of some amounts to about four digits, so that a column lines up."""
    largest = max((abs(amount) for amount in amounts), default=0)
    if largest == 0 or largest >= MICROS:
        return 2
    return min(6, 3 - math.floor(math.log10(largest / MICROS)))


def money(micros: int, decimals: int | None = None) -> str:
    """An amount rounded down for reading; the exact one is `ledger.format_micros`."""
    places = money_decimals([micros]) if decimals is None else decimals
    sign, amount = ("−", -micros) if micros < 0 else ("", micros)
    # integers throughout: a displayed amount must never be more than what was paid
    fraction = f"{amount % MICROS:06d}"[:places]
    return f"{sign}{amount // MICROS:,}.{fraction}"


def adding_up(total_micros: int, parts: Mapping[str, int]) -> list[tuple[str, str]]:
    """The parts of a total by name, each rounded down for reading like the total itself; and what that leaves out, as a
    part of its own, so that the figures that people see add up."""
    places = money_decimals([total_micros])
    step = 10 ** (6 - places)
    missing = total_micros // step - sum(micros // step for micros in parts.values())
    shown = [(name, money(micros, places)) for name, micros in parts.items()]
    return [*shown, ("rounded down in these", money(missing * step, places))] if missing else shown


def count(number: int, noun: str) -> str:
    """'1 owner', '1,200 owners'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
