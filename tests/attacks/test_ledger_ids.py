"""One ledger, many tasks and callers: an id met again is the same fact, or an error; never a payment that was not made.

A buyer posts the same order twice under two names, runs one again, or reuses an id with other content; in every case
what a run reports as paid is what the ledger moved for it.
"""

import dataclasses

import numpy as np
import pytest

from flmarket import auctions
from flmarket.aggregation import robust
from flmarket.engines import JdpTraining, MemoryOwners, SampledTraining, StackelbergTraining
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput, SettlementError
from flmarket.learning import LocalTraining, SoftmaxRegression, load
from flmarket.learning.partition import equal
from flmarket.ledger import Award, AwardState, EntryKind, MemoryLedger, Release, Resolution
from flmarket.market import MemoryStore, Rounds
from flmarket.privacy import PureDp, RecordLevel, ZCdp
from flmarket.privacy.joint import LocalPerturbation

OWNERS = 8


def auction(name, seed=0):
    values = {
        "task": {"name": name, "rounds": 3, "bidders_per_round": 6, "budget_per_round": 1000.0},
        "data": {"name": "breast-cancer", "owners": OWNERS, "partition": "equal"},
        "mechanism": {"auction": "all-in-capped"},
        "owners": {"dropout": 0.1, "faulty": 0.1},
        "seed": seed,
    }
    return MarketConfig.parse(values).simulation()


def sampling(name, seed=0):
    data = load("breast-cancer")
    split = equal(np.random.default_rng(0), len(data.y_train), OWNERS)
    q, r = np.linspace(0.2, 0.9, OWNERS), np.linspace(1.0, 3.0, OWNERS)
    return SampledTraining(
        data=data, partition=split, costs=r / 2, participation=q, payment=r, rounds=4, local_steps=1, l2=0.01,
        seed=seed, name=name,
    )  # fmt: skip


def reward(name, seed=0):
    data = load("breast-cancer")
    split, values = equal(np.random.default_rng(0), len(data.y_train), OWNERS), np.linspace(1, 5, OWNERS)
    return StackelbergTraining(
        data=data, partition=split, privacy_values=values, weight=20.0, rounds=3, reward=8.0, seed=seed, name=name
    )


def joint(name, seed=0):
    data = load("breast-cancer")
    return JdpTraining(
        data=data, partition=equal(np.random.default_rng(0), len(data.y_train), OWNERS),
        costs=np.linspace(1, 9, OWNERS), budget=200.0, auction=auctions.get("m1"),
        model=SoftmaxRegression(30, 2, local=LocalTraining(steps=1)),
        aggregation=robust.get("average"), perturbation=LocalPerturbation(clip=1.0), epsilon=500.0, rounds=2,
        validation=50, seed=seed, name=name,
    )  # fmt: skip


KINDS = {"auction": auction, "sampling": sampling, "reward": reward, "joint": joint}


def reported(result):
    """What the run says it paid."""
    if isinstance(result.__class__.__dict__.get("spent_micros"), property):
        return result.spent_micros
    if hasattr(result, "paid_micros"):
        return int(result.paid_micros.sum())
    return result.market_result().spent_micros


def moved(ledger):
    """What left escrow for owners, from the raw entries."""
    lines = [entry.line for entry in ledger.entries()]
    return sum(one.amount_micros for one in lines if one.debit == "escrow" and one.credit.startswith("owner-"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_same_order_twice_is_paid_twice(empty, kind):
    """Two buyers with equal tasks and seeds: equal amounts, parties, rounds. Only the task tells them apart."""
    first = reported(kind("hospital-a").run(ledger=empty))
    assert first == moved(empty) > 0
    second = reported(kind("hospital-b").run(ledger=empty))
    assert second == first
    assert moved(empty) == first + second
    assert empty.balance("escrow") == 0
    empty.verify()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_second_run_under_one_name_is_refused_and_moves_nothing(empty, kind, seed):
    kind("hospital-a").run(ledger=empty)
    before = (empty.head(), dict(empty.balances()))
    with pytest.raises(SettlementError, match="hospital-a"):
        kind("hospital-a", seed).run(ledger=empty)
    assert (empty.head(), dict(empty.balances())) == before


def test_names_that_begin_alike_are_different_tasks_unless_their_ids_could_meet(empty):
    sampling("a").run(ledger=empty)
    empty.register_cap("owner-100", PureDp(3.0))  # a cap is no task, whatever its owner is called
    assert reported(sampling("ab").run(ledger=empty)) == reported(sampling("owner-100").run(ledger=empty)) > 0
    joint("b/0").run(ledger=empty)  # "b/0/budget" is also what a task "b" calls its first round's budget
    with pytest.raises(SettlementError, match="'b'"):
        auction("b").run(ledger=empty)
    for name in ("", "A", "a%", "_", "\0", "\ud800"):
        assert not empty.has_task(name)


def test_statements_count_one_task_not_what_the_account_holds(empty):
    one, two = (auction(name).run(ledger=empty) for name in ("x", "y"))
    assert [o.paid_micros for o in one.owners] == [o.paid_micros for o in two.owners]
    assert sum(o.paid_micros for o in two.owners) == two.spent_micros
    assert all(empty.balance(f"owner-{o.owner}") == 2 * o.paid_micros for o in one.owners)


def first_round(spec, ledger):
    """A driver that knows nothing of the ledger's past plays the first round; returns what it says it paid."""
    (record,) = Rounds(spec.kind(), MemoryOwners(spec), ledger, MemoryStore()).play(1)
    return record.spent_micros


def test_a_round_played_again_with_other_prices_is_an_error(empty):
    """Past the check of the task: the ids themselves are bound to their content."""
    spec = sampling("task")
    first_round(spec, empty)
    size = empty.head().size
    assert first_round(spec, empty) == moved(empty)  # the same again: one round, once
    assert empty.head().size == size
    for other in (
        dataclasses.replace(spec, payment=np.asarray(spec.payment) * 2),
        dataclasses.replace(spec, payment=np.roll(np.asarray(spec.payment), 1)),
        dataclasses.replace(spec, seed=5),
    ):
        with pytest.raises(SettlementError, match="other terms"):
            first_round(other, empty)
    assert empty.head().size == size


@pytest.fixture
def book(empty):
    empty.deposit("d", "buyer", 1000)
    empty.hold(AWARD)
    return empty


AWARD = Award("t/0/1", 0, "buyer", "owner-1", 1.0, 300)
GIVEN = Release("t/0/1", "laplace-l1", PureDp(0.5))


def unchanged(book, call, error=SettlementError):
    before = (book.head(), dict(book.balances()))
    with pytest.raises(error):
        call()
    assert (book.head(), dict(book.balances())) == before


@pytest.mark.parametrize("name", ["deposit", "withdraw", "charge_fee"])
def test_a_transfer_is_bound_to_kind_account_and_amount(book, name):
    book.deposit("d2", "other", 1000)
    call = getattr(book, name)
    call("x", "buyer", 5)
    size = book.head().size
    call("x", "buyer", 5)
    assert book.head().size == size
    for args in (("x", "buyer", 6), ("x", "other", 5)):
        unchanged(book, lambda args=args: call(*args))
    for other in {"deposit", "withdraw", "charge_fee"} - {name}:
        unchanged(book, lambda other=other: getattr(book, other)("x", "buyer", 5))
    unchanged(book, lambda: book.hold(dataclasses.replace(AWARD, id="x")))
    unchanged(book, lambda: call("t/0/1", "buyer", 5))


@pytest.mark.parametrize(
    "change",
    [
        {"price_micros": 299},
        {"owner": "owner-2"},
        {"buyer": "b"},
        {"loss": PureDp(0.9)},
        {"loss": ZCdp(1.0)},
        {"round_index": 1},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("end", [None, *list(AwardState)[1:]])
def test_an_award_is_bound_to_its_terms_open_or_resolved(book, change, end):
    if end is not None:
        book.resolve_many([Resolution("t/0/1", end)])
    other = dataclasses.replace(AWARD, **change)
    unchanged(book, lambda: book.hold(other))
    unchanged(book, lambda: book.hold_many([dataclasses.replace(AWARD, id="new", price_micros=1), other]))
    twice = dataclasses.replace(AWARD, id="new", price_micros=1)
    unchanged(book, lambda: book.hold_many([twice, dataclasses.replace(twice, **change)]))
    assert book.hold(AWARD).state is (end or AwardState.PENDING)


@pytest.mark.parametrize("end", list(AwardState)[1:])
def test_an_end_is_bound_to_its_state_and_release(book, end):
    book.resolve_many([Resolution("t/0/1", end, "why", GIVEN)])
    size = book.head().size
    assert book.resolve_many([Resolution("t/0/1", end, "why", GIVEN)])[0].state is end
    assert book.head().size == size
    for other in list(AwardState)[1:]:
        if other is not end:
            unchanged(book, lambda other=other: book.resolve_many([Resolution("t/0/1", other, "why", GIVEN)]))
    for release in (
        Release("t/0/1", "laplace-l1", PureDp(0.4)),
        Release("t/0/1", "privunit", PureDp(0.5)),
        Release("t/0/1", "laplace-l1", ZCdp(0.5)),
    ):
        unchanged(book, lambda release=release: book.resolve_many([Resolution("t/0/1", end, "why", release)]))
        unchanged(book, lambda release=release: book.release(release))
    stray = Release("t/0/9", "laplace-l1", PureDp(0.5))
    unchanged(book, lambda: book.resolve_many([Resolution("t/0/1", end, "why", stray)]), InvalidInput)


def test_one_owner_at_her_cap_does_not_cost_the_others_their_pay(empty):
    """Her registered cap is spent elsewhere: her award alone is void, and her update does not count either."""
    spec = auction("elsewhere")
    spec = dataclasses.replace(spec, dropout=0.0, faulty=0.0, task=dataclasses.replace(spec.task, rounds=1))
    free = spec.run()
    paid = {int(i) for i in free.rounds[0].bidders[free.rounds[0].delivered]}
    first, *_ = sorted(paid)
    for owner in paid:
        empty.register_cap(f"owner-{owner}", PureDp(1e-6 if owner == first else 1e3))
    record = spec.run(ledger=empty).rounds[0]
    ended = dict(zip(record.bidders.tolist(), record.state, strict=True))
    assert ended[first] is AwardState.VOIDED
    assert {owner for owner, state in ended.items() if state is AwardState.POSTED} == paid - {first}
    assert record.weights[record.bidders == first] == 0
    assert record.spent_micros == moved(empty) > 0
    assert {one.award_id for one in empty.releases()} == {f"elsewhere/0/{owner}" for owner in paid - {first}}
    empty.verify()


def test_what_left_is_on_record_paid_or_not(empty):
    """A bad update was released all the same: its release stands beside the void, by value and not by the reason."""
    spec = auction("t")
    spec = dataclasses.replace(spec, dropout=0.0, faulty=1.0)
    spec.run(ledger=empty)
    lines = [entry.line for entry in empty.entries()]
    voided = {one.ref for one in lines if one.kind is EntryKind.VOIDED}
    assert voided
    assert {one.ref for one in lines if one.kind is EntryKind.RELEASE} == voided
    assert moved(empty) == 0


def test_a_capped_owner_cannot_be_paid_past_her_cap_by_a_new_task(empty):
    spec = reward("r")
    rho = spec.announced().rho
    for i in np.flatnonzero(rho > 0).tolist():
        empty.register_cap(f"owner-{i}", RecordLevel(ZCdp(float(rho[i]) * 1.5)))
    assert reported(spec.run(ledger=empty)) == moved(empty)
    again = reward("again").run(ledger=empty)
    assert reported(again) == 0
    assert set(again.rounds[-1].state) == {AwardState.VOIDED}
    assert moved(empty) == reported(spec.run())


@pytest.mark.parametrize("kind", [reward, joint])
def test_one_client_at_her_cap_does_not_cost_the_others_theirs_at_the_end_of_a_training(empty, kind):
    """In trainings that pay once, after the last round."""
    free = kind("t").run()
    sellers = sorted({award.owner for award in _awards(kind)})
    for name in sellers:
        cap = ZCdp(1e-9 if name == sellers[0] else 1e6)
        empty.register_cap(name, RecordLevel(cap) if kind is reward else cap)
    result = kind("t").run(ledger=empty)
    ended = {award.owner: award.state for award in empty.awards()}
    assert ended == {name: AwardState.VOIDED if name == sellers[0] else AwardState.POSTED for name in sellers}
    assert reported(result) == moved(empty) < reported(free)
    assert empty.privacy_spent(sellers[0]) == 0
    empty.verify()


def _awards(kind):
    books = MemoryLedger()
    kind("t").run(ledger=books)
    return books.awards()
