import dataclasses

import numpy as np
import pytest

from flmarket import InvalidInput
from flmarket.engines import MemoryOwners, SampledTraining
from flmarket.learning import Partition, load
from flmarket.learning.partition import dirichlet
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import FileStore, MemoryStore, Rounds, owner_account
from flmarket.sampling import OptimalSampling, Uniform

N, B, COSTS = 24, 1.2, Uniform(0.5, 4.0)
DATA = load("digits")
SPLIT = dirichlet(np.random.default_rng(1), DATA.y_train, N, concentration=0.5, minimum=5)
OPTIMAL = OptimalSampling.from_distribution(COSTS, B)


def training(**changes):
    costs = COSTS.sample(np.random.default_rng(2), N)
    q, r = OPTIMAL.offer(costs)
    spec = SampledTraining(
        data=DATA,
        partition=SPLIT,
        costs=costs,
        participation=q,
        payment=r,
        rounds=12,
        local_steps=3,
        batch_size=8,
        l2=0.01,
    )
    return dataclasses.replace(spec, **changes)


def aggregate(spec, places):
    """How far the model moves in a round in which these clients take part, at a rate of 0.1."""
    kind = dataclasses.replace(spec, learning_rate=lambda index: 0.1).kind()
    kind.draw = lambda index: (np.array(places), np.zeros(0, dtype=int))
    before = kind.parameters
    Rounds(kind, MemoryOwners(spec), MemoryLedger(), MemoryStore()).play(1)
    return before - kind.parameters


def test_the_weighted_aggregate_is_unbiased():
    spec = training(batch_size=None)  # all records: the update is the same whenever a client takes part
    run = spec.kind()
    full = aggregate(dataclasses.replace(spec, participation=np.ones(N)), range(N))
    # linear in the participants, so each client's update once is enough for thousands of rounds
    single = np.stack([aggregate(spec, [n]) for n in range(N)])
    draws = np.zeros((1500, N))
    for index, row in enumerate(draws):
        row[run.draw(index)[0]] = 1.0
    np.testing.assert_allclose(single[[0, 5, 9]].sum(axis=0), aggregate(spec, [0, 5, 9]), atol=1e-12)
    rounds = draws @ single
    error = rounds.mean(axis=0) - full
    scatter = rounds.std(axis=0) / np.sqrt(len(rounds))
    assert (np.abs(error) <= 5 * scatter + 1e-12).all()
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(full)
    # without 1/q it would be far off
    assert np.linalg.norm((draws @ (single * np.asarray(spec.participation)[:, None])).mean(axis=0) - full) > 0.3 * (
        np.linalg.norm(full)
    )


def test_every_participation_is_paid_exactly_once():
    ledger, spec = MemoryLedger(), training()
    result = spec.run(ledger=ledger)
    ledger.verify()
    assert all(award.state is AwardState.POSTED for award in ledger.awards())
    assert sum(1 for _ in ledger.awards()) == sum(len(record.participants) for record in result.rounds)
    for client, r in zip(result.clients, spec.payment, strict=True):
        assert client.payment_micros == int(np.floor(r * 1e6))
        assert client.rounds == sum(client.client in record.participants for record in result.rounds)
        assert (
            client.paid_micros == client.rounds * client.payment_micros == ledger.balance(owner_account(client.client))
        )
        assert client.utility >= -1e-6 * client.rounds  # rounding down is all that can be lost
    assert ledger.balance("buyer") == 0
    assert result.spent_micros == sum(client.paid_micros for client in result.clients)


def test_spending_is_the_budget_in_expectation():
    costs = COSTS.sample(np.random.default_rng(0), 200_000)
    q, r = OPTIMAL.offer(costs)
    assert np.mean(q * r) == pytest.approx(B, rel=0.01)  # over costs
    run = training().kind()  # over participation, for these costs
    bills = np.array([run.price[run.draw(index)[0]].sum() for index in range(1000)])
    expected = float(np.asarray(run.q) @ run.price)
    assert abs(bills.mean() - expected) < 4 * bills.std() / np.sqrt(1000)
    assert training(rounds=1).run().expected_micros == pytest.approx(expected)


def test_a_hard_cap_is_never_exceeded():
    cap = 12_000_000
    spec = training(hard_cap_micros=cap, c_max=4.0)
    result = spec.run()
    assert max(record.spent_micros for record in result.rounds) <= cap
    assert any(record.turned_away.size for record in result.rounds)
    assert all(np.isinf(record.bound) for record in result.rounds)
    run = spec.kind()
    for index in range(400):
        kept, away = run.draw(index)
        assert run.price[kept].sum() <= cap
        assert np.intersect1d(kept, away).size == 0


def test_whether_the_cap_turns_a_client_away_does_not_depend_on_her_own_terms():
    spec = training(hard_cap_micros=12_000_000, c_max=4.0)
    for client in (0, 7):
        q, r = np.array(spec.participation), np.array(spec.payment)
        q[client], r[client] = 1.0, 0.5
        low = dataclasses.replace(spec, participation=q, payment=r).kind()
        high = dataclasses.replace(spec, participation=q, payment=np.where(np.arange(N) == client, 4.0, r)).kind()
        kept = [(client in low.draw(i)[0], client in high.draw(i)[0]) for i in range(150)]
        assert all(a == b for a, b in kept)
        assert 0 < sum(a for a, _ in kept) < 150


def test_the_same_seed_gives_the_same_run_in_any_order_of_clients():
    spec = training()
    one, two, other = spec.run(), spec.run(), dataclasses.replace(spec, seed=1).run()
    np.testing.assert_array_equal(one.parameters, two.parameters)
    assert one.spent_micros != other.spent_micros
    order = np.random.default_rng(3).permutation(N)
    records, offsets = SPLIT.select(order)
    moved = dataclasses.replace(
        spec,
        partition=Partition(records, offsets),
        costs=np.asarray(spec.costs)[order],
        participation=np.asarray(spec.participation)[order],
        payment=np.asarray(spec.payment)[order],
        ids=order,
    ).run()
    np.testing.assert_allclose(moved.parameters, one.parameters, atol=1e-10)
    assert [r.spent_micros for r in moved.rounds] == [r.spent_micros for r in one.rounds]
    assert sorted(moved.clients, key=lambda c: c.client) == list(one.clients)


def test_the_loss_is_strongly_convex_and_its_gradient_right():
    model, rng = training().model, np.random.default_rng(0)
    x, y, params = DATA.x_train[:40], DATA.y_train[:40], rng.normal(size=training().model.dimension)
    gradient = model.block_gradients(params, x[None], y[None])[0]
    for place in (0, 300, model.dimension - 1):  # weights and a bias
        step = np.zeros(model.dimension)
        step[place] = 1e-5
        slope = (model.loss(params + step, x, y) - model.loss(params - step, x, y)) / 2e-5
        assert gradient[place] == pytest.approx(slope, abs=1e-6)
    same = np.zeros(model.dimension)
    same[-10:] = 1.0  # shifts all scores alike: only the penalty bends here
    bend = model.loss(same, x, y) + model.loss(-same, x, y) - 2 * model.loss(0 * same, x, y)
    assert bend == pytest.approx(0.01 * 10)


def test_the_bound_holds_and_falls_and_the_rate_is_the_papers():
    seen = []
    spec = training()
    result = spec.run(progress=seen.append)
    assert [record.loss for record in seen] == [record.loss for record in result.rounds]
    for record in result.rounds:
        assert record.bound == pytest.approx(spec.bound(record.index + 1))
        assert record.loss <= record.bound  # min F ≥ 0
        assert record.learning_rate == spec.constants.learning_rate(record.index)
    assert result.loss[-1] < result.loss[0]
    assert np.isinf(training(participation=np.r_[0.0, np.ones(N - 1)]).bound(1))
    assert training(participation=np.full(N, 0.5)).bound(1) > training(participation=np.ones(N)).bound(1)


def test_a_round_without_anybody_changes_nothing():
    result = training(participation=np.zeros(N), rounds=2).run()
    assert result.spent_micros == 0
    assert not result.parameters.any()


@pytest.mark.parametrize(
    "bad",
    [
        {"participation": np.full(N, 1.5)},
        {"participation": np.full(N, -0.1)},
        {"payment": np.ones(N - 1)},
        {"costs": np.full(N, np.nan)},
        {"l2": 0.0},
        {"rounds": 0},
        {"batch_size": 0},
        {"ids": np.zeros(N, dtype=int)},
        {"hard_cap_micros": 10_000_000},
        {"hard_cap_micros": 10_000_000, "c_max": 0.6},
        {"hard_cap_micros": 1_000_000, "c_max": 4.0},
    ],
)
def test_bad_input_is_refused(bad):
    with pytest.raises(InvalidInput):
        training(**bad)


@pytest.mark.parametrize("cut_off", [False, True])
def test_bids_stand_though_nobody_is_drawn_in_the_first_round(cut_off, tmp_path):
    """Bids for all rounds are made once; who is drawn first in the second round has bid all the same."""
    spec, ledger, store = training(rounds=3), MemoryLedger(), FileStore(tmp_path)
    kind = spec.kind()
    kind.draw = lambda index: (np.arange(3 * index), np.zeros(0, dtype=int))
    rounds = Rounds(kind, MemoryOwners(spec), ledger, store)
    if cut_off:  # after the plan, and what was bid is in the plan alone
        steps = rounds.steps(rounds.resume())
        assert [next(steps), next(steps)] == ["open", "bids"]
        rounds = Rounds(kind, MemoryOwners(spec), ledger, store)
    assert [record.state for record in rounds.play()] == [(AwardState.POSTED,) * count for count in (0, 3, 6)]
