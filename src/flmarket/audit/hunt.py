"""Keeps the best misreport found for every owner, per kind of lie, and a count of everything that was tried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flmarket.audit.trials import Awards, Reports, Trials
from flmarket.bids import FloatArray

__all__ = ["DIMENSIONS", "FIELDS", "KNOTS", "Hunt"]


# what a bid consists of, and the kinds of lie that are told apart: about one field, or about several at once
FIELDS = ("value", "privacy_budget", "data_size")
DIMENSIONS = ("value_only", "privacy_budget", "data_size", "joint")
KNOTS = 6  # points of a reshaped valuation, beside (0, 0)


@dataclass
class _Best:
    gain: FloatArray
    utility: FloatArray
    reports: Reports


class Hunt:
    """All searches against one batch of trials report here."""

    def __init__(self, trials: Trials, rng: np.random.Generator, joint_fields: tuple[str, ...] = FIELDS) -> None:
        self.trials, self.rng, self.joint_fields = trials, rng, joint_fields
        self.tried: Counter[tuple[str, str]] = Counter()
        rows = len(trials.rows)
        # an owner whose honest award breaks her own cap has no honest utility to compare with: that is no regret
        # but a broken rule, reported under rationality
        self.comparable = np.isfinite(trials.honest.utility)
        self._honest = np.where(self.comparable, trials.honest.utility, np.inf)
        self.best = {name: _Best(np.zeros(rows), trials.honest.utility.copy(), _own(trials)) for name in DIMENSIONS}

    def attempt(self, dimension: str, search: str, reports: Reports) -> Awards:
        """Try one report in every row."""
        awards = self.trials.run(reports)
        self.tried[dimension, search] += 1
        best, gain = self.best[dimension], awards.utility - self._honest
        better = gain > best.gain
        if better.any():
            best.gain[better], best.utility[better] = gain[better], awards.utility[better]
            _copy(reports, best.reports, better)
        return awards


def _own(trials: Trials) -> Reports:
    """A writable copy of the truth, with room for tables (all zero: the owner's own)."""
    truth, rows = trials.truth, len(trials.rows)
    return Reports(
        truth.kind.copy(),
        truth.rate.copy(),
        truth.privacy_budget.copy(),
        truth.data_size.copy(),
        np.zeros((rows, KNOTS + 1)),
        np.zeros((rows, KNOTS + 1)),
    )


def _copy(source: Reports, target: Reports, where: NDArray[np.bool_]) -> None:
    for name in ("kind", "rate", "privacy_budget", "data_size"):
        getattr(target, name)[where] = np.broadcast_to(getattr(source, name), where.shape)[where]
    assert target.grid is not None
    assert target.values is not None
    target.grid[where] = 0.0 if source.grid is None else source.grid[where]
    target.values[where] = 0.0 if source.values is None else source.values[where]
