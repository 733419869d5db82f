"""The values that cross a ledger's boundary (`memory.Ledger`), and its errors.

Money moves by double entry: every line takes a whole number of micro-units from one account and adds it to another, so
none is made or lost. An award holds its price in escrow and is resolved exactly once: posted (paid to the owner),
voided (back to the buyer) or expired (back to the buyer after the deadline). The privacy that an owner gave up for an
award stands in the same journal, between the hold and the payment.

An award that is in dispute is frozen: a hold of nothing under the id `<award>/dispute` stands in the journal, and while
it is open the award is resolved by nobody but whoever decides, who ends both in one call.

Calls carry an id chosen by the caller; repeating a call with the same content changes nothing, and with other content
is an error. Each call happens whole or not at all, the `_many` calls included. All lines form one log in which every
entry names the hash of its predecessor (`entry`), and a tree over it proves single entries (`merkle`, `receipt`).

Money is in integer micro-units (a millionth of the currency unit), so that sums are exact. Mechanisms compute in
floating point; this is the one place where their payments become money. A payment rounds down, and what the rounding
leaves stays with the buyer.
"""

import time
from dataclasses import dataclass
from enum import StrEnum
from math import floor, inf, isfinite
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import IntArray
from flmarket.errors import FlmarketError, InvalidInput, MechanismViolation, SettlementError
from flmarket.privacy import Event, ExponentialRelease, PureDp, Unprotected

MICROS = 1_000_000
MAX_MICROS = 2**62
# The sum of n floating-point payments may pass the budget by rounding alone; more than this share is overspending.
_ROUNDING = 1e-9


def to_micros(name: str, amount: float) -> int:
    """A positive or zero amount of currency units as micro-units, rounded down."""
    if isinstance(amount, bool) or not isinstance(amount, int | float | np.number):
        raise InvalidInput(name, amount, "an amount of money")
    if not isfinite(amount) or not 0 <= amount * MICROS <= MAX_MICROS:
        raise InvalidInput(name, amount, "a finite amount of money of at least 0")
    return floor(amount * MICROS)


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


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


class LedgerCorrupt(SettlementError):
    """The stored log is not what was written; `seq` is the first bad entry, None if the entries themselves are good."""

    exit_code = 9

    def __init__(self, message: str, seq: int | None = None) -> None:
        self.seq = seq
        super().__init__(message if seq is None else f"entry {seq}: {message}")


class HoldNotProven(SettlementError):
    """What was shown does not prove that a price is in escrow.

    `part` is what is wrong: "award" (another award, party, price or privacy loss), "entry", "inclusion", "head" (its
    last hash), or "consistency" (the log does not continue the one that was seen before).
    """

    exit_code = 9

    def __init__(self, part: Literal["award", "entry", "inclusion", "head", "consistency"], message: str) -> None:
        self.part = part
        super().__init__(message)


class IdReused(SettlementError):
    """An id that the ledger has with other content (another amount, party, price, privacy loss, kind of entry, task).

    Nothing was booked: a call repeated with the same content succeeds, one with other content never does.
    """


class ReplayRefused(SettlementError):
    """A release for an award that this owner has released for already; nothing more may leave."""

    exit_code = 10


class Frozen(SettlementError):
    """The award is in dispute: its price stays in escrow until that is decided (`Ledger.decide`)."""


class LedgerUnavailable(FlmarketError):
    """The database did not answer, or the connection broke. The call may have happened: repeat it with the same id."""

    exit_code = 11


BANK = "bank"  # where deposits come from: the outside world, the only account that may be negative
ESCROW = "escrow"
FEES = "fees"  # what the broker keeps
NOTHING = PureDp(0.0)  # the loss of an award that sells no privacy: a refund, an escrow


def dispute_of(award_id: str) -> str:
    """The id under which an award is frozen."""
    return f"{award_id}/dispute"


def as_loss(value: Event | float) -> Event:
    """A privacy loss as the event that it is; a plain number is a pure ε, and past all sense (∞) no promise at all."""
    if isinstance(value, Event):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidInput("loss", value, "a privacy event, or a pure ε of at least 0")
    return PureDp(float(value)) if value <= 1e18 else Unprotected()


def epsilon_of(loss: Event) -> float:
    """The pure ε of a loss, ∞ if it is unprotected.

    Others have none: a ρ is none, and the ε of an (ε, δ) or of noise depends on a δ, so whoever shows those reads the
    loss itself. An error, because a number that is silently something else is how a ρ came to be shown as an ε.
    """
    if isinstance(loss, Unprotected):
        return inf
    if isinstance(loss, PureDp | ExponentialRelease):
        return loss.epsilon
    # also of one for a record: its ε is another product's
    raise InvalidInput("epsilon", loss, "a loss that is a pure ε; read `loss` for others")


class AwardState(StrEnum):
    """Where an award stands; the last three are final."""

    PENDING = "pending"
    POSTED = "posted"
    VOIDED = "voided"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Transfer:
    """One movement of money: `amount_micros` from the debited to the credited account."""

    id: str
    debit: str
    credit: str
    amount_micros: int


@dataclass(frozen=True, init=False)
class Award:
    """A promise to pay an owner for one release at a privacy loss, resolved once.

    `loss` is what she sells, as an event: `PureDp(0.5)`, `ZCdp(0.1)`, `Unprotected()`, … A plain number means a pure ε.
    `disputed`: somebody wanted to resolve it and found that it is in dispute (`market.resolve_each`); `reason` is then
    how it would have ended.
    """

    id: str
    round_index: int
    buyer: str
    owner: str
    loss: Event
    price_micros: int
    state: AwardState
    reason: str
    disputed: bool

    def __init__(
        self,
        id: str,
        round_index: int,
        buyer: str,
        owner: str,
        loss: Event | float,
        price_micros: int,
        state: AwardState = AwardState.PENDING,
        reason: str = "",
        disputed: bool = False,
    ) -> None:
        values = self.__dict__  # which is not frozen, and there are thousands in a round
        values["id"], values["round_index"], values["buyer"], values["owner"] = id, round_index, buyer, owner
        values["loss"], values["price_micros"] = as_loss(loss), price_micros
        values["state"], values["reason"], values["disputed"] = state, reason, disputed

    def ended(self, state: AwardState, reason: str) -> "Award":
        """The same award, resolved."""
        made = object.__new__(Award)
        values = made.__dict__
        values.update(self.__dict__)
        values["state"], values["reason"] = state, reason
        return made

    @property
    def epsilon(self) -> float:
        """Her loss as a pure ε, ∞ if nothing protects her; an error for any other loss (`epsilon_of`)."""
        return epsilon_of(self.loss)


@dataclass(frozen=True)
class Release:
    """What an owner gave away for an award: the mechanism's name and its guarantee. At most one for an award."""

    award_id: str
    mechanism: str
    guarantee: Event


@dataclass(frozen=True)
class Resolution:
    """How one award of a batch ends, with the release that it pays for if it was delivered."""

    award_id: str
    state: AwardState
    reason: str = ""
    release: Release | None = None
