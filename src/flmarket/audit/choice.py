"""What a choice among groups gives away, exactly and from samples, on inputs made to give away most.

A choice has finitely many outcomes, so for two given inputs the loss is a finite maximum, the largest |ln P_u/P_v| over
single outcomes. From samples it is bounded from below: a set of outcomes is picked on one half of the draws, and its
two probabilities are bounded on the other half by Clopper–Pearson intervals.

Both look at one pair of inputs. They can refute a promise, never prove one; the pairs here are built so that a promise
which counts on too small a sensitivity fails.

The model that scores is one number θ that is right about a record x when |θ − x| ≤ ½. That is enough to move any
client's leave-one-out groups from all right to all wrong by one upload.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flmarket.aggregation.robust import ExponentialChoice
from flmarket.audit.privacy import rate_at_least, rate_at_most
from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput

Changed = Literal["record", "client"]


@dataclass(frozen=True)
class ChoiceAudit:
    """The loss of one choice when one validation record or one client's upload changes, per round."""

    changed: Changed
    epsilon_asked: float
    epsilon_promised: float  # by the rule's own `guarantee`
    epsilon_exact: float  # on the crafted pair
    epsilon_lower: float  # from samples of it

    @property
    def as_asked(self) -> bool:
        """Whether nothing was found against the ε asked for."""
        return max(self.epsilon_exact, self.epsilon_lower) <= self.epsilon_asked * (1 + 1e-9)

    @property
    def holds(self) -> bool:
        """Whether nothing was found against what the rule itself promises."""
        return max(self.epsilon_exact, self.epsilon_lower) <= self.epsilon_promised * (1 + 1e-9)


def audit_choice(
    rule: ExponentialChoice,
    changed: Changed,
    clients: int,
    *,
    trials: int = 100_000,
    failure_probability: float = 0.01,
    rng: np.random.Generator,
) -> ChoiceAudit:
    """Look at the worst pair of inputs known; a sound rule is accused with `failure_probability` at most."""
    u, v = crafted_scores(changed, clients, rule.validation)
    exact = exact_epsilon(rule.log_probabilities(u, clients), rule.log_probabilities(v, clients))
    draws = [rule.draw(np.broadcast_to(s, (trials, s.size)), clients, rng) for s in (u, v)]
    lower = sampled_epsilon(draws[0], draws[1], failure_probability=failure_probability)
    return ChoiceAudit(changed, rule.epsilon, rule.guarantee(changed, clients).epsilon, exact, lower)


def crafted_scores(changed: Changed, clients: int, validation: int) -> tuple[FloatArray, FloatArray]:
    """Scores of the leave-one-out groups before and after the change, computed from actual uploads and records."""
    if clients < 4 or validation < 2:
        raise InvalidInput("clients, validation", (clients, validation), "at least 4 clients and 2 records")
    # client 1 stands apart by so much that the groups with and without her are a whole unit apart
    uploads = np.zeros(clients)
    uploads[1] = clients - 1.0
    records = np.zeros(validation)
    if changed == "client":  # client 0 moves everybody's groups by a unit: from right to wrong, or wrong to right
        moved = uploads.copy()
        moved[0] = -uploads[1]
        return _accuracies(uploads, records), _accuracies(moved, records)
    records[: validation // 2] = 1.0  # one record goes over from those that fit the many to those that fit group 1
    replaced = records.copy()
    replaced[0] = 0.0
    return _accuracies(uploads, records), _accuracies(uploads, replaced)


def _accuracies(uploads: FloatArray, records: FloatArray) -> FloatArray:
    theta = np.array([np.delete(uploads, i).mean() for i in range(uploads.size)])
    return np.asarray((np.abs(theta[:, None] - records) <= 0.5).mean(axis=1))


def exact_epsilon(log_p: FloatArray, log_q: FloatArray) -> float:
    """The least ε for which two laws over the same outcomes, given by log probabilities, are e^ε-close."""
    return float(np.abs(log_p - log_q).max())


def sampled_epsilon(u: NDArray[np.intp], v: NDArray[np.intp], *, failure_probability: float) -> float:
    """A lower bound on ε from draws under two inputs, wrong with at most `failure_probability`; 0 if none is found."""
    outcomes, half = int(max(u.max(), v.max())) + 1, len(u) // 2
    best, event = 0.0, None
    for one, two, flipped in ((u, v, False), (v, u, True)):
        seen = [np.bincount(draws[:half], minlength=outcomes) + 0.5 for draws in (one, two)]
        order = np.argsort(-(seen[0] / seen[1]), kind="stable")
        for size in range(1, outcomes):  # likeliest ratios first: the Neyman–Pearson sets
            guess = _bound(one[:half], two[:half], order[:size], failure_probability)
            if guess > best:
                best, event = guess, (order[:size], flipped)
    if event is None:
        return 0.0
    chosen, flipped = event
    one, two = (v, u) if flipped else (u, v)
    return max(0.0, _bound(one[half:], two[half:], chosen, failure_probability))


def _bound(one: NDArray[np.intp], two: NDArray[np.intp], event: NDArray[np.intp], failure_probability: float) -> float:
    hits, misses = int(np.isin(one, event).sum()), int(np.isin(two, event).sum())
    likely, unlikely = (
        rate_at_least(hits, len(one), failure_probability / 2),
        rate_at_most(misses, len(two), failure_probability / 2),
    )
    return float(np.log(likely / unlikely)) if likely > 0 else -np.inf
