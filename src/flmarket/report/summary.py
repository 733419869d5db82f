"""A run in numbers, ready for strict JSON: what scripts and later comparisons read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.ledger import AwardState
from flmarket.report.formatting import finite_or_none
from flmarket.report.guarantees import check_guarantees
from flmarket.report.tally import Tally

if TYPE_CHECKING:
    from flmarket.market import MarketResult

__all__ = ["summarize"]

_SCHEMA = 1  # raised when a key changes its meaning


def summarize(result: MarketResult) -> dict[str, Any]:
    """Plain Python values only; what is infinite or was not measured is None."""
    tally = Tally.of(result)
    accuracy = [finite_or_none(record.metrics.get("accuracy", np.nan)) for record in result.rounds]
    spent, budget = result.spent_micros, result.budget_micros
    return {
        "schema": _SCHEMA,
        "task": result.task.name,
        "mechanism": result.mechanism,
        "aggregation": result.aggregation,
        "perturbation": result.perturbation,
        "data_set": result.data_set,
        "seed": int(result.seed),
        "rounds": tally.rounds,
        "accuracy": accuracy,
        "final_accuracy": accuracy[-1],
        "baseline_accuracy": finite_or_none(result.baseline_accuracy),
        "spent_micros": int(spent),
        "budget_micros": int(budget),
        "fraction_of_budget_used": spent / budget if budget else 0.0,
        # what was awarded, delivered or not: an update voided on arrival has left its owner all the same
        "epsilon_per_round_max": float(tally.epsilon.max(initial=0.0)),
        "epsilon_total_max": float(max((owner.epsilon_total for owner in result.owners), default=0.0)),
        "owners": len(result.owners),
        "owners_paid": sum(owner.paid_micros > 0 for owner in result.owners),
        "refusals": int(sum(owner.refusals for owner in result.owners)),
        "awards": {
            "posted": tally.states(AwardState.POSTED),
            "voided": tally.states(AwardState.VOIDED),
            "expired": tally.states(AwardState.EXPIRED),
        },
        "invalid_rounds": sum(not record.valid for record in result.rounds),
        "error_bound": [finite_or_none(record.error_bound) for record in result.rounds],
        "guarantees": {check.key: check.holds for check in check_guarantees(result)},
    }
