"""The broker's ledger as a Flower run sees it: the market's names translated, each call durable when it returns.

Unlike `books.TaskLedger`, which collects a round's calls because a simulated round can be played again from its bids,
this one passes them on: after a crash a run goes on from its stored plan, and finds on the ledger how far it came. The
round's rows follow what was booked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from flmarket.broker.books import task_award
from flmarket.broker.work.round_rows import Winner
from flmarket.ledger import Award, AwardState, Head, HoldReceipt, Ledger, Release, Resolution

__all__ = ["RunLedger"]


class RunLedger:
    """The part of the ledger protocol that `MarketStrategy` uses.

    `held` is called with a round's winners once their prices are in escrow, `delivered` before it settles.
    """

    def __init__(
        self,
        ledger: Ledger,
        task_id: str,
        account_of: Callable[[int], str],
        *,
        held: Callable[[Sequence[Winner]], None],
        delivered: Callable[[int], None],
    ) -> None:
        self._ledger, self._task_id, self._account_of = ledger, task_id, account_of
        self._held, self._delivered = held, delivered

    def deposit(self, id: str, account: str, amount_micros: int) -> None:
        """A round's budget is in the task's account since the task was posted: nothing to bring in."""

    def hold_many(self, awards: Iterable[Award]) -> tuple[Award, ...]:
        """Put a round's prices from the task's account into escrow, all or none."""
        named = [task_award(award, self._task_id, self._account_of) for award in awards]
        made = self._ledger.hold_many([award for _, award in named])
        self._held([Winner(owner, award.epsilon, award.price_micros) for owner, award in named])
        return made

    def head(self, size: int | None = None) -> Head:
        """Of the broker's ledger, which owners go by."""
        return self._ledger.head(size)

    def hold_receipts(
        self, award_ids: Iterable[str], since: Head | Mapping[str, Head] | None = None
    ) -> dict[str, HoldReceipt]:
        """That prices are in escrow."""
        return self._ledger.hold_receipts(award_ids, since)

    def release(self, release: Release) -> None:
        """Enter what an owner gave away; refused past her registered cap."""
        self._ledger.release(release)

    def award(self, award_id: str) -> Award:
        """As it is now."""
        return self._ledger.award(award_id)

    def void(self, award_id: str, reason: str) -> Award:
        """Back to the task."""
        return self._ledger.void(award_id, reason)

    def resolve_many(self, resolutions: Iterable[Resolution]) -> tuple[Award, ...]:
        """Pay, void and expire, all or none."""
        ends = list(resolutions)
        if any(one.state is not AwardState.VOIDED for one in ends):
            self._delivered(sum(one.state is AwardState.POSTED for one in ends))
        return self._ledger.resolve_many(ends)
