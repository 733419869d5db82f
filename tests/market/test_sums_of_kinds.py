"""Sums in the kinds of market other than auctions: the same contract, and what each kind makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from masked_owners import MaskedOwners
from power_cuts import PowerCut, cut

from flmarket.engines import MemoryOwners
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError, FlmarketError, InvalidInput
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import FileStore, MemoryStore, Rounds
from flmarket.market.kind import Refused
from flmarket.market.owner import guarded
from flmarket.market.summing import VOID
from flmarket.privacy import RecordLevel, SimulationNoise, ZCdp, clip_l2, rho_of_epsilon
from flmarket.privacy.secure_sum import SecureAggregation, SumTerms, agreed, encode, loss

KINDS = {
    "sampling": {
        "task": {"name": "t", "rounds": 3, "budget_per_round": 20.0},
        "training": {"local_steps": 2, "batch_size": 16},
        "sampling": {"costs": [1.0, 4.0], "first_rate": 0.2, "epsilon": 2.0},
    },
    "reward": {"task": {"name": "t", "rounds": 3, "learning_rate": 0.2}, "reward": {"reward": 50.0}},
    "joint": {
        "task": {"name": "t", "rounds": 3},
        "training": {"local_steps": 2, "batch_size": 16},
        "joint": {"budget": 100.0, "costs": [1.0, 4.0], "epsilon": 20.0, "validation": 50, "aggregation": "average"},
    },
}
GONE, AT = 2, 1  # who leaves, and in which round


def values_of(kind, **changes):
    data = {"name": "breast-cancer", "owners": 7, "partition": "equal"}
    values = {"kind": kind, "seed": 7, "trust": "secure-aggregation", "data": data, **KINDS[kind]}
    values["secure"] = {"survivors": 0.7}
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change
    return values


def spec_of(kind, **changes):
    return MarketConfig.parse(values_of(kind, **changes)).spec()


def silent(made, gone, at):
    """Owners of whom some are silent from a round on: at their input, when everybody has counted on them."""

    class Leaving(made):
        def train(self, call, orders, parameters, bids, prove):
            left = gone if orders and orders[0].round_index >= at else ()
            for number in left:
                guard = self.guard(number)
                guard.owner = replace(guard.owner, dropout=1.0)
            return super().train(call, orders, parameters, bids, prove)

    return Leaving


def played(spec, made=MemoryOwners):
    ledger = MemoryLedger()
    rounds = Rounds(spec.kind(), made(spec), ledger, MemoryStore())
    rounds.play()
    ledger.verify()
    assert not [award for award in ledger.awards() if award.state is AwardState.PENDING]
    ends = sorted((a.id, a.state, a.price_micros, a.reason, str(a.loss)) for a in ledger.awards())
    given = sorted((r.award_id, r.mechanism, str(r.guarantee)) for r in ledger.releases())
    charged = {n: record.account.books.rho for n, record in rounds.owners.records.items()}
    return rounds, ends, given, charged


@pytest.mark.parametrize("gone", [(), (GONE,), (0, 1, 2, 3)], ids=["all-stay", "one-goes", "void"])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_or_not_the_same_model_money_and_charges(kind, gone) -> None:
    spec = spec_of(kind)
    plain, masked = (played(spec, silent(made, gone, AT)) for made in (MemoryOwners, MaskedOwners))
    np.testing.assert_array_equal(masked[0].kind.parameters, plain[0].kind.parameters)
    assert masked[1:] == plain[1:]
    assert any(state is AwardState.POSTED for _, state, *_ in plain[1])


def test_a_sampled_step_is_that_of_clipped_updates_by_inverse_chances_up_to_noise() -> None:
    """At an ε so large that there is hardly any noise, against plain arithmetic."""
    spec = spec_of("sampling", sampling={"costs": [1.0, 4.0], "first_rate": 0.2, "epsilon": 1000.0})
    rounds = Rounds(spec.kind(), MemoryOwners(spec), MemoryLedger(), MemoryStore())
    start, expected = rounds.kind.parameters.copy(), np.zeros(rounds.kind.dimension)
    list(rounds.steps(0))
    raw = replace(spec, secure=None, epsilon=None)
    alone = Rounds(raw.kind(), MemoryOwners(raw), MemoryLedger(), MemoryStore())
    for step in alone.steps(0):
        if step == "updates":
            parts = dict(alone.updates)
    for owner, update in parts.items():
        expected += spec.weights[owner] / alone.kind.q[owner] * clip_l2(update, spec.clip)
    assert len(parts) >= 4
    assert rounds.kind.parameters == pytest.approx(start - expected, abs=0.2 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_loses_more_in_the_sum_than_she_sold(kind) -> None:
    spec = spec_of(kind)
    rounds, _, given, charged = played(spec)
    assert given
    once = {
        "sampling": lambda i: float(rho_of_epsilon(2.0, delta=1e-6)),
        "joint": lambda i: float(rho_of_epsilon(20.0, delta=1e-5)),
        "reward": lambda i: float(rounds.kind.game.rho[i]) / 3,
    }[kind]
    change = 2 * spec.clip / spec.records if kind == "reward" else None
    clip = spec.perturbation.clip if kind == "joint" else spec.clip
    for index, record in enumerate(rounds.records):
        again = spec.kind()
        again.terms = rounds.kind.terms
        plan = again.plan(index, {})
        assert {order.owner for order in plan.orders} <= set(record.bidders.tolist())
        for order in plan.orders:
            terms = SumTerms.from_json(order.share)
            lost = loss(terms, clip=clip, dimension=rounds.kind.dimension, change=change).rho
            assert lost <= once(order.owner) * (1 + 1e-9)
    paid = {i: sum(i in r.bidders[r.delivered] for r in rounds.records) for i in charged}
    assert charged == {i: pytest.approx(once(i) * paid[i]) for i in charged if paid[i]} | {
        i: 0.0 for i in charged if not paid[i]
    }


@pytest.mark.parametrize("kind", ["reward", "joint"])
def test_a_round_that_is_void_ends_only_the_awards_of_who_left(kind) -> None:
    spec = spec_of(kind)
    users = sorted(int(name.rsplit("/", 1)[1]) for name, *_ in played(spec)[1])
    gone = users[: len(users) // 2]
    rounds, ends, _, _ = played(spec, silent(MaskedOwners, gone, AT))
    states = {int(name.rsplit("/", 1)[1]): (state, reason) for name, state, _, reason, _ in ends}
    assert {states[i] for i in gone} == {(AwardState.EXPIRED, "missed round 1")}
    assert {states[i][0] for i in users if i not in gone} == {AwardState.POSTED}, "who stayed is paid"
    assert not rounds.records[1].weights.any()
    assert rounds.records[2].weights.any(), "the next sum is of who is left"
    once = {"reward": lambda i: float(rounds.kind.game.rho[i]) / 3, "joint": lambda i: float(rounds.kind.rho[0])}[kind]
    booked = {int(r.award_id.rsplit("/", 1)[1]): inner(r.guarantee).rho for r in rounds.ledger.releases()}
    assert booked == {i: pytest.approx(once(i) * (1 if i in gone else 2)) for i in users}, "without the void round"


@pytest.mark.parametrize("kind", ["reward", "joint"])
def test_with_too_few_left_for_a_sum_it_is_over_and_who_stayed_is_paid(kind) -> None:
    spec = spec_of(kind)
    users = sorted(int(name.rsplit("/", 1)[1]) for name, *_ in played(spec)[1])
    rounds, ends, _, _ = played(spec, silent(MemoryOwners, users[:-1], AT))
    assert [state for name, state, *_ in ends if name.endswith(f"/{users[-1]}")] == [AwardState.POSTED]
    assert len(rounds.records) == 2


@pytest.mark.parametrize("kind", ["reward", "joint"])
def test_if_no_sum_was_ever_opened_nobody_is_paid(kind) -> None:
    spec = spec_of(kind, task={**KINDS[kind]["task"], "rounds": 1})
    users = sorted(int(name.rsplit("/", 1)[1]) for name, *_ in played(spec)[1])
    gone = users[: len(users) // 2 + 1]
    _, ends, given, _ = played(spec, silent(MaskedOwners, gone, 0))
    assert not given
    reasons = {int(name.rsplit("/", 1)[1]): (state, reason) for name, state, _, reason, _ in ends}
    assert {reasons[i] for i in gone} == {(AwardState.EXPIRED, "missed round 0")}
    assert {reasons[i] for i in users if i not in gone} == {(AwardState.EXPIRED, VOID)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["save_plan", "save_deliveries", "save_round"])
def test_after_a_crash_the_same_model_and_the_same_books(kind, name, tmp_path, monkeypatch) -> None:
    spec, leaving = spec_of(kind), silent(MemoryOwners, (0, 1, 2), AT)
    expected, ends, given, _ = played(spec, leaving)
    ledger = MemoryLedger()
    with monkeypatch.context() as patch:
        cut(patch, FileStore, name, after=False, skip=1)
        with pytest.raises(PowerCut):
            Rounds(spec.kind(), leaving(spec), ledger, FileStore(tmp_path, synchronised=False)).play()
    again = Rounds(spec.kind(), leaving(spec), ledger, FileStore(tmp_path, synchronised=False))
    again.play()
    np.testing.assert_array_equal(again.kind.parameters, expected.kind.parameters)
    assert sorted((a.id, a.state, a.price_micros, a.reason, str(a.loss)) for a in ledger.awards()) == ends
    assert sorted((r.award_id, r.mechanism, str(r.guarantee)) for r in ledger.releases()) == given


def inner(event):
    """ρ of an update, or of a record, which the reward game sells."""
    return event.loss if isinstance(event, RecordLevel) else event


def like(event, rho):
    return RecordLevel(ZCdp(rho)) if isinstance(event, RecordLevel) else ZCdp(rho)


CHEATS = {
    "more weight": lambda order, t: replace(order, share=replace(t, weight=min(1.0, t.weight * 2)).to_json()),
    "half the noise": lambda order, t: replace(order, share=replace(t, noise=t.noise / 2).to_json()),
    "lower threshold": lambda order, t: replace(
        order, share=replace(t, threshold=t.threshold - 1, honest=t.honest - 1).to_json()
    ),
    "less loss": lambda order, t: replace(order, loss=like(order.loss, inner(order.loss).rho * 0.5)),
    "another unit": lambda order, t: replace(
        order, loss=inner(order.loss) if isinstance(order.loss, RecordLevel) else RecordLevel(order.loss)
    ),
    "no share": lambda order, t: replace(order, share=""),
    "fewer records": lambda order, t: replace(order, records=max(1, order.records // 2)),
}


@pytest.mark.parametrize(
    ("kind", "how"), [(k, how) for k in KINDS for how in CHEATS if k == "reward" or how != "fewer records"]
)
def test_the_guard_refuses_a_share_that_costs_more_than_it_says(kind, how) -> None:
    """In the reward game a mean of fewer records moves further with each of them."""
    spec = spec_of(kind)
    rounds = Rounds(spec.kind(), MemoryOwners(spec), MemoryLedger(), MemoryStore())
    for step in rounds.steps(0):
        if step == "awards":
            break
    # hers who has the least room
    order = max(rounds.plan.orders, key=lambda one: SumTerms.from_json(one.share).weight / np.sqrt(inner(one.loss).rho))
    guard = rounds.owners.guard(order.owner)
    guard.offer(rounds.kind.announcement(0), next(b for b in rounds.plan.bids if b.owner == order.owner))
    worse = CHEATS[how](order, SumTerms.from_json(order.share))
    assert isinstance(guarded(partial(guard.admit, worse, rounds.kind.parameters)), Refused)
    assert guard.account.books.releases == 0
    assert not isinstance(guarded(partial(guard.admit, order, rounds.kind.parameters)), Refused)


def test_neighbouring_records_stay_within_the_distance_that_noise_is_for() -> None:
    """Rounded by the same coins, whatever the two updates are that differ by one record's share."""
    rng, dimension, clip, change = np.random.default_rng(5), 300, 1.0, 0.02
    terms = agreed([0.5, 0.5], [0.1, 0.1], clip=clip, dimension=dimension, policy=SecureAggregation(), change=change)[0]

    class Silent(SimulationNoise):
        def whole_gaussian(self, size, *, scale):
            return np.zeros(size, dtype=np.int64)

    limit = np.sqrt(2 * terms.honest * terms.noise**2 * loss(terms, clip=clip, dimension=dimension, change=change).rho)
    for scale in (terms.scale, 8.0, 0.5):  # also where rounding is most of it
        coarse = replace(terms, scale=scale)
        worst = 0.0
        for trial in range(20):
            one = clip_l2(rng.normal(size=dimension), clip)
            step = rng.normal(size=dimension)
            other = one + change * step / np.linalg.norm(step)
            made = [
                encode(v, coarse, clip=clip, topic="t", source=Silent(np.random.default_rng(trial)), records=True)
                for v in (one, other)
            ]
            apart = (made[0].astype(np.int64) - made[1].astype(np.int64) + 2**31) % 2**32 - 2**31
            worst = max(worst, float(np.linalg.norm(apart)))
        assert worst <= scale * coarse.weight * change + 2 * np.sqrt(dimension)
        assert scale != terms.scale or worst <= limit


@pytest.mark.parametrize("weighting", ["rho", "equal"])
def test_a_shared_noise_is_less_than_everybodys_own(weighting) -> None:
    sums, own = (spec_of("reward", reward={"reward": 50.0, "weighting": weighting}) for _ in range(2))
    own = replace(own, secure=None)
    first, second = (played(spec)[0].records[0].error_bound for spec in (sums, own))
    assert first < second


REFUSED = [
    ("joint", {"joint": {"aggregation": "leave-one-out"}}, "to see each"),
    ("joint", {"joint": {"aggregation": "median"}}, "to see each"),
    ("joint", {"joint": {"noise_unit": "record"}, "training": {"batch_size": None}}, "cannot be shared"),
    ("joint", {"joint": {"clipped": "parameters"}}, "cannot be shared"),
    ("joint", {"joint": {"adversary": "label-flip", "adversaries": 1}}, "none in sums"),
    ("sampling", {"sampling": {"epsilon": None}}, "without noise"),
    ("reward", {"owners": {"privacy_cap": 3.0}}, "δ above 0"),
]


@pytest.mark.parametrize(("kind", "changes", "why"), REFUSED)
def test_what_a_sum_cannot_do_is_refused_with_its_reason(kind, changes, why) -> None:
    values = values_of(kind)
    for section, change in changes.items():
        merged = values.get(section, {}) | change
        values[section] = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises((ConfigError, InvalidInput), match=why):
        MarketConfig.parse(values).spec()


def test_epsilon_of_samples_is_for_sums_only() -> None:
    with pytest.raises(FlmarketError, match=r"sampling\.epsilon"):
        MarketConfig.parse(values_of("sampling") | {"trust": "local", "secure": {}})


@pytest.mark.parametrize("kind", KINDS)
def test_owners_who_admit_no_sums_stay_out(kind) -> None:
    spec = spec_of(kind)
    owner, call = spec.owner(0), spec.kind().announcement(0)
    assert owner.proposal(call) is not None
    assert replace(owner, trust=("local",)).proposal(call) is None
