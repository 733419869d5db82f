from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from flmarket.errors import InvalidInput
from flmarket.ledger import AwardState
from flmarket.market import MarketResult
from flmarket.report import summarize

KEYS = {
    "mechanism", "aggregation", "perturbation", "data_set", "seed", "rounds", "accuracy", "final_accuracy",
    "baseline_accuracy", "spent_micros", "budget_micros", "fraction_of_budget_used", "epsilon_per_round_max",
    "epsilon_total_max", "owners", "owners_paid", "awards", "invalid_rounds", "error_bound", "guarantees",
}  # fmt: skip


def test_numbers_agree_with_the_result(normal: MarketResult) -> None:
    summary = summarize(normal)
    assert summary.keys() >= KEYS
    assert summary["accuracy"] == normal.accuracy
    assert summary["final_accuracy"] == normal.accuracy[-1]
    assert summary["spent_micros"] == sum(owner.paid_micros for owner in normal.owners)
    assert summary["fraction_of_budget_used"] == normal.spent_micros / normal.budget_micros
    assert summary["epsilon_per_round_max"] == max(float(record.epsilon.max()) for record in normal.rounds)
    assert summary["epsilon_total_max"] == max(owner.loss_total for owner in normal.owners)
    assert summary["awards"]["posted"] == sum(owner.releases for owner in normal.owners)
    assert summary["invalid_rounds"] == 0
    assert all(summary["guarantees"].values())


def test_is_strict_json_with_infinite_bounds_and_caps(troubled: MarketResult) -> None:
    summary = json.loads(json.dumps(summarize(troubled), allow_nan=False))
    missing = [bound is None for bound in summary["error_bound"]]
    assert missing == [not np.isfinite(record.error_bound) for record in troubled.rounds]
    assert sum(missing) == summary["invalid_rounds"] >= 3
    states = [state for record in troubled.rounds for state in record.state]
    for name in ("posted", "voided", "expired"):
        assert summary["awards"][name] == states.count(AwardState(name)) > 0
    assert summary["refusals"] > 0
    assert all(summary["guarantees"].values())


def test_unmeasured_accuracy_is_null(normal: MarketResult) -> None:
    bare = replace(normal, rounds=tuple(replace(record, metrics={}) for record in normal.rounds))
    assert summarize(bare)["final_accuracy"] is None


def test_refuses_a_run_without_rounds(normal: MarketResult) -> None:
    with pytest.raises(InvalidInput, match="rounds"):
        summarize(replace(normal, rounds=()))


def test_import_is_cheap() -> None:
    code = "import sys, flmarket.report; print([m for m in ('matplotlib', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
