"""One lie as a story in numbers: who she is, what honesty earns, what she says instead, what that earns."""

from __future__ import annotations

from flmarket.audit import Bid, Example
from flmarket.report.formatting import epsilon, percent, significant

__all__ = ["tell"]


def tell(example: Example) -> list[str]:
    """The worst example as a few sentences."""
    truth, lie, honest, lying = example.bids[example.owner], example.lie, example.honest, example.lying
    who = f"Owner {example.owner + 1}"
    told = [
        f"{who} of {len(example.bids)} holds {_records(truth.data_size)}, allows a privacy loss of at most "
        f"{epsilon(truth.privacy_budget)} this round, and that would cost her {significant(truth.full_cost, 4)}. "
        f"The buyer has {significant(example.budget, 4)} to spend.",
        f"If everybody is honest, {_award(honest.epsilon, honest.payment)}; her profit is "
        f"{significant(honest.utility, 4)}.",
    ]
    if example.gain <= 0:
        told.append("Whatever else we let her report, with all other bids unchanged, she did no better than that.")
        return told
    told.append(f"Instead she reports {_difference(truth, lie)}. Now {_award(lying.epsilon, lying.payment)}.")
    sold = min(lie.data_size, truth.data_size)
    cost = lying.payment - lying.utility
    less = f" for the {_records(sold)} she sells" if sold < truth.data_size else ""
    told.append(
        f"What she gives up truly costs her {significant(cost, 4)}{less}, so her profit is "
        f"{significant(lying.utility, 4)}: "
        f"{significant(example.gain, 4)} more than by telling the truth, "
        f"or {percent(example.gain_over_cost)} of her cost."
    )
    return told


def _records(size: float) -> str:
    return "1 record" if size == 1 else f"{size:,.6g} records"


def _award(eps: float, payment: float) -> str:
    if eps <= 0:
        return "she is not selected" + (f" (and still paid {significant(payment, 4)})" if payment > 0 else "")
    return f"she sells a privacy loss of {epsilon(eps)} this round and is paid {significant(payment, 4)}"


def _difference(truth: Bid, lie: Bid) -> str:
    parts = []
    if (lie.rate, lie.kind, lie.values) != (truth.rate, truth.kind, truth.values):
        shape = "" if lie.kind == truth.kind else f" (and a {lie.kind} cost curve where hers is {truth.kind})"
        parts.append(f"a cost of {significant(lie.full_cost, 4)} instead of {significant(truth.full_cost, 4)}{shape}")
    if lie.privacy_budget != truth.privacy_budget:
        parts.append(
            f"a privacy limit of {epsilon(lie.privacy_budget)} this round instead of {epsilon(truth.privacy_budget)}"
        )
    if lie.data_size != truth.data_size:
        parts.append(f"{_records(lie.data_size)} instead of {truth.data_size:,.6g}")
    return " and ".join(parts) or "the truth"
