"""A posted schedule: report a cost c, take part with probability q(c), be paid r(c) each time you do.

SAMP Theorem 1: if q is non-increasing and r(c) = c + (1/q(c)) ∫_c^{c_max} q(z) dz, no report serves a client better
than her true cost, and nobody loses by taking part. Both schedules here apply that formula to the q they post, exactly:
the steps sum, the lines integrate in closed form. Truthfulness is thus a property of the object, whatever made its q.

Reports below the lowest node get the lowest node's terms. Where q = 0 nothing is ever paid, and r is the cost itself.
What would break it: a cost above the highest node, which is refused; and clients who choose their reports after seeing
terms that depend on each other's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray
from flmarket.sampling.distributions import checked_reports


class Posted(Protocol):
    """Anything that answers a reported cost with terms."""

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """The participation probability and the payment per participation for each reported cost."""


class Schedule:
    """Terms over costs. Unpacks into its two functions: ``q, r = schedule``."""

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost."""
        raise NotImplementedError

    def participation_at(self, cost: ArrayLike) -> FloatArray:
        """q(c): the probability of taking part."""
        return self.offer(cost)[0]

    def payment_at(self, cost: ArrayLike) -> FloatArray:
        """r(c): the payment each time the client takes part."""
        return self.offer(cost)[1]

    def __iter__(self) -> Iterator[object]:
        yield self.participation_at
        yield self.payment_at


@dataclass(frozen=True, eq=False)
class StepSchedule(Schedule):
    """A menu: a report gets the terms of the lowest listed cost that is not below it."""

    cost: FloatArray
    participation: FloatArray
    payment: FloatArray

    @classmethod
    def truthful(cls, cost: FloatArray, participation: FloatArray) -> "StepSchedule":
        """With the payments of Theorem 1 (for discrete costs, equation 16)."""
        return cls(cost, participation, _with_rent(cost, participation, (cost[1:] - cost[:-1]) * participation[1:]))

    @classmethod
    def constant(cls, maximum: float, participation: float) -> "StepSchedule":
        """The same q for everybody, paid the highest cost."""
        return cls(np.array([maximum]), np.array([participation]), np.array([maximum]))

    @property
    def largest_expected_payment(self) -> float:
        """q·r of the cheapest client: q(c)c + ∫_c q falls in c, so nobody is paid more in expectation."""
        return float(self.participation[0] * self.payment[0])

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost."""
        at = np.searchsorted(self.cost, checked_reports(cost, float(self.cost[-1])))
        return np.asarray(self.participation[at]), np.asarray(self.payment[at])


@dataclass(frozen=True, eq=False)
class LinearSchedule(Schedule):
    """q is linear between listed costs."""

    cost: FloatArray
    participation: FloatArray
    payment: FloatArray

    @classmethod
    def truthful(cls, cost: FloatArray, participation: FloatArray) -> "LinearSchedule":
        """With the payments of Theorem 1."""
        trapezia = np.diff(cost) * (participation[1:] + participation[:-1]) / 2
        return cls(cost, participation, _with_rent(cost, participation, trapezia))

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost."""
        c = np.maximum(checked_reports(cost, float(self.cost[-1])), self.cost[0])
        right = np.maximum(np.searchsorted(self.cost, c), 1)
        q = np.interp(c, self.cost, self.participation)
        q_right, c_right = self.participation[right], self.cost[right]
        rent_right = q_right * (self.payment[right] - c_right)
        rent = rent_right + (c_right - c) * (q + q_right) / 2
        return np.asarray(q), np.asarray(c + rent / np.where(q > 0, q, 1.0))


def _with_rent(cost: FloatArray, participation: FloatArray, cells: FloatArray) -> FloatArray:
    """r at the nodes, given ∫q over each cell between them."""
    payment = cost.copy()
    payment[:-1] += cells[::-1].cumsum()[::-1] / np.where(participation > 0, participation, 1.0)[:-1]
    return payment


def utility(posted: Posted, cost: ArrayLike, reported: ArrayLike | None = None) -> FloatArray:
    """Expected utility per round of reporting `reported` (default: the truth) at these true costs; broadcasts.

    Is it truthful, is it rational? The utility of any report at any true cost, for anything that posts terms.

    A client of cost c who reports c' takes part with probability q(c') and is paid r(c') each time: u = q(c')(r(c') −
    c) per round. Incentive compatibility: c' = c is best. Individual rationality: u ≥ 0 then. (SAMP section 2.)
    """
    true_cost = np.asarray(cost, dtype=np.float64)
    q, r = posted.offer(true_cost if reported is None else reported)
    return np.asarray(q * (r - true_cost))


def misreport_gains(posted: Posted, cost: ArrayLike, reported: ArrayLike) -> FloatArray:
    """The most that any of the reports gains over the truth, one number per true cost (vectors in, vector out)."""
    true_cost = np.atleast_1d(np.asarray(cost, dtype=np.float64))
    q, r = posted.offer(np.atleast_1d(np.asarray(reported, dtype=np.float64)))
    best = np.max(q * (r - true_cost[:, None]), axis=1)
    return np.asarray(best - utility(posted, true_cost))
