"""Each rule is shown broken by a result that breaks it, and by that result only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flmarket.ledger import AwardState
from flmarket.market import MarketResult, RoundRecord
from flmarket.report import check_guarantees


def change_round(result: MarketResult, place: int, **changes: object) -> MarketResult:
    rounds = list(result.rounds)
    rounds[place] = replace(rounds[place], **changes)  # type: ignore[arg-type]
    return replace(result, rounds=tuple(rounds))


def change_owner(result: MarketResult, place: int, **changes: object) -> MarketResult:
    owners = list(result.owners)
    owners[place] = replace(owners[place], **changes)  # type: ignore[arg-type]
    return replace(result, owners=tuple(owners))


def winner(record: RoundRecord) -> int:
    return int(np.flatnonzero(record.delivered)[0])


def overspent(result: MarketResult) -> MarketResult:
    return change_round(result, 3, budget_micros=result.rounds[3].spent_micros - 1)


def left_open(result: MarketResult) -> MarketResult:
    record = result.rounds[2]
    losers = [i for i, state in enumerate(record.state) if state is None]
    state, epsilon = list(record.state), record.epsilon.copy()
    state[losers[0]], epsilon[losers[0]] = AwardState.PENDING, 0.1
    return change_round(result, 2, state=tuple(state), loss=epsilon)


def twice_in_a_round(result: MarketResult) -> MarketResult:
    record = result.rounds[2]
    losers = [i for i, state in enumerate(record.state) if state is None]
    bidders = record.bidders.copy()
    bidders[losers[0]] = bidders[winner(record)]
    return change_round(result, 2, bidders=bidders)


def above_cap(result: MarketResult) -> MarketResult:
    place = max(range(len(result.owners)), key=lambda i: result.owners[i].loss_total)
    return change_owner(result, place, loss_cap=result.owners[place].loss_total * 0.99)


def understated(result: MarketResult) -> MarketResult:
    place = max(range(len(result.owners)), key=lambda i: result.owners[i].loss_total)
    return change_owner(result, place, loss_total=0.0)


def underpaid(result: MarketResult) -> MarketResult:
    return change_owner(result, 5, paid_micros=result.owners[5].paid_micros - 1)


def forgotten(result: MarketResult) -> MarketResult:
    paid = max(result.owners, key=lambda owner: owner.paid_micros)
    return replace(result, owners=tuple(owner for owner in result.owners if owner is not paid))


def paid_loser(result: MarketResult) -> MarketResult:
    record = result.rounds[1]
    price = record.price_micros.copy()
    price[next(i for i, state in enumerate(record.state) if state is None)] = 5
    return change_round(result, 1, price_micros=price)


def weight_without_delivery(result: MarketResult) -> MarketResult:
    record = result.rounds[1]
    weights = record.weights.copy()
    loser = next(i for i, state in enumerate(record.state) if state is None)
    weights[loser], weights[winner(record)] = weights[winner(record)], 0.0
    return change_round(result, 1, weights=weights)


CHEATS: list[tuple[Callable[[MarketResult], MarketResult], str]] = [
    (overspent, "within_budget"),
    (left_open, "resolved_once"),
    (twice_in_a_round, "resolved_once"),
    (above_cap, "within_caps"),
    (understated, "within_caps"),
    (underpaid, "conserved"),
    (forgotten, "conserved"),
    (paid_loser, "losers_unpaid"),
    (weight_without_delivery, "weights_earned"),
]


def test_an_honest_run_keeps_every_rule(normal: MarketResult, troubled: MarketResult) -> None:
    for result in (normal, troubled):
        assert [check.key for check in check_guarantees(result) if not check.holds] == []


@pytest.mark.parametrize(("cheat", "key"), CHEATS, ids=[cheat.__name__ for cheat, _ in CHEATS])
def test_a_planted_violation_is_seen(
    normal: MarketResult, cheat: Callable[[MarketResult], MarketResult], key: str
) -> None:
    assert [check.key for check in check_guarantees(cheat(normal)) if not check.holds] == [key]


def test_details_name_the_culprit(normal: MarketResult) -> None:
    details = {check.key: check.detail for check in check_guarantees(overspent(normal))}
    assert "round 4" in details["within_budget"]
    details = {check.key: check.detail for check in check_guarantees(underpaid(normal))}
    assert "owner 5" in details["conserved"]
