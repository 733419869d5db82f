"""What a ledger is: the values that cross its boundary, and the protocol that every store keeps.

Money moves by double entry: every line takes a whole number of micro-units from one account and adds it to another, so
none is made or lost. An award holds its price in escrow and is resolved exactly once: posted (paid to the owner),
voided (back to the buyer) or expired (back to the buyer after the deadline). The privacy that an owner gave up for an
award stands in the same journal, between the hold and the payment.

Calls carry an id chosen by the caller; repeating a call with the same content changes nothing, and with other content
is an error. Each call happens whole or not at all, the `_many` calls included. All lines form one log in which every
entry names the hash of its predecessor (`entry`), and a tree over it proves single entries (`merkle`, `receipt`).

Money is in integer micro-units (a millionth of the currency unit), so that sums are exact. Mechanisms compute in
floating point; this is the one place where their payments become money. A payment rounds down, and what the rounding
leaves stays with the buyer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import floor, inf, isfinite
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import IntArray
from flmarket.errors import FlmarketError, InvalidInput, MechanismViolation, SettlementError
from flmarket.privacy import Cap, Event, ExponentialRelease, PrivacyAccount, PureDp, Unprotected

if TYPE_CHECKING:
    from flmarket.ledger.entry import Entry
    from flmarket.ledger.merkle import Head
    from flmarket.ledger.receipt import HoldReceipt, Receipt

__all__ = [
    "BANK",
    "ESCROW",
    "FEES",
    "MICROS",
    "NOTHING",
    "Award",
    "AwardState",
    "HoldNotProven",
    "IdReused",
    "Ledger",
    "LedgerCorrupt",
    "LedgerUnavailable",
    "Release",
    "ReplayRefused",
    "Resolution",
    "Transfer",
    "as_loss",
    "epsilon_of",
    "format_micros",
    "payments_to_micros",
    "to_micros",
]

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


class LedgerUnavailable(FlmarketError):
    """The database did not answer, or the connection broke. The call may have happened: repeat it with the same id."""

    exit_code = 11


BANK = "bank"  # where deposits come from: the outside world, the only account that may be negative
ESCROW = "escrow"
FEES = "fees"  # what the broker keeps
NOTHING = PureDp(0.0)  # the loss of an award that sells no privacy: a refund, an escrow


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
    """

    id: str
    round_index: int
    buyer: str
    owner: str
    loss: Event
    price_micros: int
    state: AwardState
    reason: str

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
    ) -> None:
        values = (id, round_index, buyer, owner, as_loss(loss), price_micros, state, reason)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

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


class Ledger(Protocol):
    """What the market needs of a ledger; every store passes the same tests."""

    def deposit(self, id: str, account: str, amount_micros: int) -> None:
        """Bring money in from outside."""

    def withdraw(self, id: str, account: str, amount_micros: int) -> None:
        """Pay money out to the outside."""

    def charge_fee(self, id: str, account: str, amount_micros: int) -> None:
        """Move a fee from a party to the broker."""

    def hold(self, award: Award) -> Award:
        """Put an award's price from the buyer's account into escrow."""

    def hold_many(self, awards: Iterable[Award]) -> tuple[Award, ...]:
        """Hold all of a round's awards or none."""

    def post(self, award_id: str) -> Award:
        """Delivery verified: pay the owner."""

    def void(self, award_id: str, reason: str) -> Award:
        """No delivery, or a bad one: return the price to the buyer."""

    def expire(self, award_id: str) -> Award:
        """The deadline passed: return the price to the buyer."""

    def resolve_many(self, resolutions: Iterable[Resolution]) -> tuple[Award, ...]:
        """Record releases and resolve awards, all of them or none: how a round settles."""

    def register_cap(self, owner: str, cap: Cap) -> None:
        """Set the most privacy that an owner sells over her lifetime; counts what she released before, too."""

    def release(self, release: Release) -> None:
        """Record what an owner gave away for an award; refused past her registered cap."""

    def award(self, award_id: str) -> Award:
        """One award as it stands."""

    def has_task(self, task: str) -> bool:
        """Whether any id of a deposit, fee, withdrawal or award begins with this name and a slash."""

    def awards(
        self, *, state: AwardState | None = None, owner: str | None = None, round_index: int | None = None
    ) -> Iterator[Award]:
        """All awards in the order they were made, or those that match."""

    def releases(self, owner: str | None = None) -> Iterator[Release]:
        """All releases, or one owner's, in the order they were recorded."""

    def cap(self, owner: str) -> Cap | None:
        """An owner's registered cap; None without one."""

    def privacy_spent(self, owner: str) -> float:
        """What an owner with a registered cap has spent of it, in its currency."""

    def privacy_accounts(self, owners: Iterable[str]) -> Mapping[str, PrivacyAccount]:
        """Of many owners at once: a copy of the account of each who registered a cap."""

    def balance(self, account: str) -> int:
        """Micro-units in an account; an account never used holds 0."""

    def balances(self) -> Mapping[str, int]:
        """All accounts ever used."""

    def transfers(self) -> Iterator[Transfer]:
        """All movements of money, oldest first."""

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The log, oldest first: entries `start` to before `stop`."""

    def head(self, size: int | None = None) -> Head:
        """What commits to the first `size` entries (default all): publish it, and the past cannot change unseen."""

    def receipt(self, award_id: str, size: int | None = None) -> Receipt:
        """All entries of an award with proofs that they are in the log of `size` entries; can be checked without it."""

    def hold_receipts(
        self, award_ids: Iterable[str], since: Head | Mapping[str, Head] | None = None
    ) -> dict[str, HoldReceipt]:
        """For each of these awards, all pending, a proof that its price is in escrow (`receipt.HoldReceipt`)."""

    def consistency(self, old_size: int, size: int | None = None) -> tuple[str, ...]:
        """Proof that the log of `size` entries (default all) begins with the log of `old_size` (`merkle`)."""

    def verify(self, known: Head | None = None) -> Head:
        """Replay the whole log; raise LedgerCorrupt naming the first bad entry, or return the head.

        With `known`, an earlier head: also check that the log still begins with what that head committed to.
        """
