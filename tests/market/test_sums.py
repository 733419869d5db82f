"""Markets of which only sums are seen: what is paid, booked, charged and refused, and that the sum is the sum."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from power_cuts import PowerCut, cut

from flmarket.engines import MemoryOwners, play, run
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import FileStore, MemoryStore, Rounds
from flmarket.market.kind import Delivered, Refused
from flmarket.market.owner import guarded
from flmarket.market.summing import VOID
from flmarket.privacy import DistributedGaussian, PureDp, ZCdp, epsilon_of_rho, rho_of_epsilon
from flmarket.privacy.secure_sum import SumTerms, added, decode
from flmarket.report import summarize

SECURE = {
    "trust": "secure-aggregation", "seed": 3,
    "task": {"name": "t", "rounds": 3, "bidders_per_round": 12, "budget_factor": 2.0, "learning_rate": 0.5},
    "data": {"name": "breast-cancer", "owners": 12, "partition": "power-law", "sigma": 0.7},
    "owners": {"privacy_budget": [0.5, 2.0], "privacy_cap": 8.0, "privacy_cap_delta": 1e-5},
}  # fmt: skip


def spec_of(**changes):
    values = {name: dict(part) if isinstance(part, dict) else part for name, part in SECURE.items()}
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change
    return MarketConfig.parse(values).spec()


def started(spec):
    """A market at the point where its first orders are out."""
    rounds = Rounds(spec.kind(), MemoryOwners(spec), MemoryLedger(), MemoryStore())
    steps = rounds.steps(0)
    for step in steps:
        if step == "awards":
            break
    return rounds, steps


def test_losses_in_the_sum_are_booked_and_nobody_loses_more_than_she_sold() -> None:
    spec, ledger = spec_of(mechanism={"auction": "m1", "clip": 3.0}), MemoryLedger()  # which sells all of a budget
    rounds, owners = play(spec, ledger=ledger)
    ledger.verify()
    releases = list(ledger.releases())
    assert releases
    total: dict[int, float] = {}
    for record in rounds.records:
        assert record.currency == "rho"
        for owner, loss in zip(record.bidders.tolist(), record.loss.tolist(), strict=True):
            sold = float(spec.bids.privacy_budget[owner])
            assert loss <= float(rho_of_epsilon(sold, delta=DistributedGaussian.delta))
            total[owner] = total.get(owner, 0.0) + loss
    assert sum(r.guarantee.rho for r in releases) == pytest.approx(sum(total.values()))
    for owner, rho in total.items():
        books = owners.record(owner).account.books
        assert books.rho == pytest.approx(rho)
        assert books.spent == pytest.approx(float(epsilon_of_rho(rho, delta=1e-5)) if rho else 0.0)
    # unequal budgets: where noise is what matters, everybody's weight is what she sold
    first = rounds.records[0]
    sold = rho_of_epsilon(spec.bids.privacy_budget[first.bidders], delta=DistributedGaussian.delta)
    ratio = (first.loss / sold)[first.loss > 0]
    assert ratio.max() == pytest.approx(1.0, rel=1e-6)
    assert ratio.min() > 0.999


def test_a_summary_says_what_holds_and_towards_whom() -> None:
    facts = summarize(run(spec_of()))
    assert (facts["delta"], facts["aggregation"], facts["perturbation"]) == (1e-5, "secure-opt", "distributed-gaussian")
    assert 0 < facts["epsilon_total_max"] <= 8
    assert all(facts["guarantees"].values())


def test_the_step_is_the_decoded_sum_of_who_stayed() -> None:
    spec = spec_of(owners={"dropout": 0.12})
    rounds, steps = started(spec)
    before = rounds.kind.parameters.copy()
    assert next(steps) == "updates"
    orders = {order.owner: SumTerms.from_json(order.share) for order in rounds.plan.orders}
    came = dict(rounds.updates)
    assert 0 < len(came) < len(orders)
    inside = sum(orders[owner].weight for owner in came)
    total = np.zeros(rounds.kind.dimension, dtype=object)
    for vector in came.values():
        total = (total + vector.astype(np.int64).astype(object)) % 2**32
    assert np.array_equal(total.astype(np.uint64), added(came.values(), bits=32))
    mean = decode(total.astype(np.uint64), next(iter(orders.values())), topic="t/0") / inside
    list(steps)
    assert np.array_equal(rounds.kind.parameters, before - 0.5 * mean)


def test_where_too_few_stay_the_round_is_void_and_the_money_goes_back() -> None:
    spec, ledger = spec_of(owners={"dropout": 0.6}, secure={"survivors": 0.9}), MemoryLedger()
    start = spec.kind().parameters
    rounds, owners = play(spec, ledger=ledger)
    ledger.verify()
    assert np.array_equal(rounds.kind.parameters, start)
    ends = [(s, r) for record in rounds.records for s, r in zip(record.state, record.reason, strict=True) if s]
    assert {state for state, _ in ends} == {AwardState.EXPIRED}
    assert VOID in {reason for _, reason in ends}
    assert not list(ledger.releases())
    assert sum(award.price_micros for award in ledger.awards() if award.state is AwardState.POSTED) == 0
    # as many stayed as it takes to be sure that nobody opens it (n − T + c + 1): they count it no more
    stayed = [[r for r in record.reason if r == VOID] for record in rounds.records]
    assert all(len(one) >= 2 for one in stayed)
    assert {owners.record(i).account.books.releases for i in range(12)} == {0}


def test_with_too_few_left_to_be_sure_the_charge_stays() -> None:
    spec = spec_of(owners={"dropout": 0.8}, secure={"survivors": 0.6})
    rounds, owners = play(spec)
    left = sum(r == VOID for record in rounds.records for r in record.reason)
    assert left > 0
    assert sum(owners.record(i).account.books.releases for i in range(12)) == left


def test_a_sum_of_one_is_no_sum() -> None:
    spec = spec_of(task={"budget_factor": 0.02}, mechanism={"auction": "m1"})
    rounds, _ = play(spec)
    assert all(sum(s is not None for s in record.state) != 1 for record in rounds.records)


TAMPERED = {
    "more weight": lambda t: replace(t, weight=min(1.0, t.weight * 1.5)),
    "less noise": lambda t: replace(t, noise=t.noise * 0.5),
    "more honest": lambda t: replace(t, honest=t.honest + 1, threshold=t.threshold + 1),
    "lower threshold": lambda t: replace(t, threshold=t.threshold - 1, honest=t.honest - 1),
    "other modulus": lambda t: replace(t, bits=40),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_the_guard_refuses_a_share_that_costs_more_than_it_says(how) -> None:
    spec = spec_of()
    rounds, _ = started(spec)
    order, owners = rounds.plan.orders[0], rounds.owners
    guard = owners.guard(order.owner)
    call = rounds.kind.announcement(0)
    guard.offer(call, rounds.plan.bids[0])
    worse = replace(order, share=TAMPERED[how](SumTerms.from_json(order.share)).to_json())
    answer = guarded(partial(guard.admit, worse, rounds.kind.parameters))
    assert isinstance(answer, Refused)
    assert answer.code == "terms"
    assert guard.account.books.releases == 0


def test_the_guard_refuses_other_currencies_and_shares_where_there_are_none() -> None:
    spec = spec_of()
    rounds, _ = started(spec)
    order, owners = rounds.plan.orders[0], rounds.owners
    guard, call = owners.guard(order.owner), rounds.kind.announcement(0)
    guard.offer(call, rounds.plan.bids[0])
    for worse in (
        replace(order, loss=PureDp(1.0)),
        replace(order, loss=ZCdp(order.loss.rho * 0.99)),
        replace(order, share=""),
        replace(order, share="{}"),
        replace(order, share=json.dumps({"weight": float("nan")})),
    ):
        assert isinstance(guarded(partial(guard.admit, worse, rounds.kind.parameters)), Refused)
    assert guard.account.books.releases == 0
    assert not isinstance(guarded(partial(guard.admit, order, rounds.kind.parameters)), Refused)
    assert guard.account.books.rho == pytest.approx(order.loss.rho)


def test_an_owner_sells_into_sums_only_if_she_admits_it() -> None:
    spec = spec_of()
    owner, call = spec.owner(0), spec.kind().announcement(0)
    assert owner.proposal(call) is not None
    assert replace(owner, trust=("local",)).proposal(call) is None
    assert replace(owner, cap=PureDp(5.0)).proposal(call) is None


def test_what_is_no_part_of_a_sum_is_bad() -> None:
    rounds, _ = started(spec_of())
    order, kind = rounds.plan.orders[0], rounds.kind
    good = np.arange(kind.dimension, dtype=np.float64)
    assert isinstance(kind.checked(order, good), Delivered)
    for wrong in (good[1:], good + 0.5, good - 1, good + 2.0**32, np.full_like(good, np.nan)):
        assert not isinstance(kind.checked(order, wrong), Delivered)


def test_settings_of_sums_without_sums_are_refused() -> None:
    with pytest.raises(ConfigError, match="secure"):
        MarketConfig.parse({"task": {"name": "t", "budget_factor": 1.0}, "secure": {"survivors": 0.9}})


def test_a_median_of_what_nobody_sees_is_refused() -> None:
    with pytest.raises(Exception, match="by weights"):
        spec_of(mechanism={"aggregation": "median"})


@pytest.mark.parametrize("name", ["save_plan", "save_deliveries", "save_round"])
@pytest.mark.parametrize("after", [False, True])
def test_after_a_crash_the_same_model_and_the_same_books(tmp_path, monkeypatch, name, after) -> None:
    spec = spec_of()
    whole = MemoryLedger()
    expected, _ = play(spec, ledger=whole)
    with monkeypatch.context() as patch:
        ledger, folder = MemoryLedger(), tmp_path
        cut(patch, FileStore, name, after=after, skip=1)
        with pytest.raises(PowerCut):
            Rounds(spec.kind(), MemoryOwners(spec), ledger, FileStore(folder, synchronised=False)).play()
    again = Rounds(spec.kind(), MemoryOwners(spec), ledger, FileStore(folder, synchronised=False))
    again.play()
    assert np.array_equal(again.kind.parameters, expected.kind.parameters)
    assert {a.id: a.state for a in ledger.awards()} == {a.id: a.state for a in whole.awards()}
