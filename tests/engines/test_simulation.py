import dataclasses

import numpy as np
import pytest
from power_cuts import swap

from flmarket import InvalidInput, auctions
from flmarket.engines import Simulation
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError, PrivacyBudgetExhausted, UnknownName
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import Guard, owner_account


def config(**changes):
    values = {
        "task": {"rounds": 8, "bidders_per_round": 12, "budget_factor": 0.8},
        "data": {"name": "breast-cancer", "owners": 20, "partition": "power-law", "sigma": 0.5, "minimum": 5},
        "mechanism": {"auction": "all-in-capped"},
    }
    for section, part in changes.items():
        values[section] = values.get(section, {}) | part if isinstance(part, dict) else part
    return MarketConfig.parse(values)


def played(ledger=None, **changes):
    return config(**changes).simulation().run(ledger)


def test_the_same_seed_gives_the_same_market():
    one, two, other = played(), played(), played(seed=1)
    np.testing.assert_array_equal(one.parameters, two.parameters)
    assert one.owners == two.owners
    assert one.spent_micros != other.spent_micros


def test_money_is_conserved_and_within_every_budget():
    ledger = MemoryLedger()
    result = played(ledger, owners={"dropout": 0.2, "faulty": 0.1})
    ledger.verify()
    assert sum(o.paid_micros for o in result.owners) == result.spent_micros
    assert ledger.balance("buyer") == result.budget_micros - result.spent_micros
    assert all(r.spent_micros <= r.budget_micros for r in result.rounds)
    states = [s for r in result.rounds for s in r.state if s]
    assert {AwardState.POSTED, AwardState.VOIDED, AwardState.EXPIRED} == set(states)
    assert AwardState.PENDING not in states
    paid = [o for o in result.owners if o.paid_micros]
    assert all(ledger.balance(owner_account(o.owner)) == o.paid_micros for o in paid)


def test_every_delivery_was_paid_at_least_its_cost():
    """Up to the micro-unit that rounding down may take."""
    spec = config().simulation()
    for record in spec.run().rounds:
        cost = spec.bids[record.bidders].cost(record.epsilon)
        assert (record.price_micros[record.delivered] >= cost[record.delivered] * 1e6 - 1).all()


def test_nobody_passes_her_cap_and_the_market_outlives_her():
    result = played(
        task={"rounds": 30, "budget_factor": 2.0}, owners={"privacy_cap": 4.0, "privacy_budget": [0.5, 2.0]}
    )
    totals = np.array([o.loss_total for o in result.owners])
    assert totals.max() <= 4.0 * (1 + 1e-12)
    assert (totals > 3.9).any()
    assert len(result.rounds) == 30
    assert result.rounds[-1].bidders.size == 0  # everybody has sold all she will
    assert result.rounds[-1].metrics["accuracy"] == result.rounds[-2].metrics["accuracy"]


def test_a_refused_award_is_voided_and_the_round_goes_on(monkeypatch):
    spec, honest = config().simulation(), Guard.admit

    def stubborn(self, order, *rest):
        if order.owner % 2:
            raise PrivacyBudgetExhausted("no")
        return honest(self, order, *rest)

    swap(monkeypatch, Guard, "admit", stubborn)
    for record in spec.run().rounds:
        for owner, state, reason in zip(record.bidders, record.state, record.reason, strict=True):
            assert state is None or (state is AwardState.VOIDED) == bool(owner % 2)
            assert state is not AwardState.VOIDED or reason.startswith("refused")


def test_accuracy_is_well_above_the_majority_class():
    """The story of the demo: 31 parameters at ε ≤ 2 a round remain learnable under Laplace noise."""
    final = []
    for seed in range(3):
        result = played(
            seed=seed,
            task={"rounds": 60, "bidders_per_round": 40, "budget_factor": 1.0},
            data={"owners": 60, "minimum": 3},
        )
        assert result.baseline_accuracy == pytest.approx(0.626, abs=0.01)
        final.append(np.mean(result.accuracy[-5:]))
    assert np.mean(final) > 0.85
    assert min(final) > result.baseline_accuracy + 0.1


def test_updates_do_not_depend_on_who_else_bids(monkeypatch):
    """Streams are named by (seed, round, owner): an owner's release is the same alone and in company."""
    spec = config(mechanism={"auction": "all-in"}, task={"budget_factor": 2.0}).simulation()
    seen = {}
    honest = Guard.finish

    def spy(self, work, raw):
        private = honest(self, work, raw)
        seen.setdefault(work.owner.number, []).append(private)
        return private

    swap(monkeypatch, Guard, "finish", spy)
    everybody = dataclasses.replace(spec, task=dataclasses.replace(spec.task, rounds=1, bidders_per_round=20))
    everybody.run()
    few = dataclasses.replace(spec, task=dataclasses.replace(spec.task, rounds=1, bidders_per_round=5))
    few.run()
    both = [pair for pair in seen.values() if len(pair) == 2]
    assert len(both) == 5
    for first, second in both:
        np.testing.assert_allclose(first, second, rtol=1e-12)


def test_federated_averaging_and_model_averaging_run():
    result = played(training={"local_steps": 3, "batch_size": 4, "local_learning_rate": 0.5, "average": True})
    assert np.isfinite(result.parameters).all()
    assert len(result.accuracy) == 8


def test_gaussian_noise_needs_an_approximate_cap():
    noise = {"perturbation": "gaussian-l2", "auction": "all-in-capped"}
    result = played(mechanism=noise, owners={"privacy_cap": 10.0, "privacy_cap_delta": 1e-4})
    assert 0 < max(o.loss_total for o in result.owners) <= 10.0
    with pytest.raises(InvalidInput):
        played(mechanism=noise)


def test_owners_may_sell_part_of_their_records():
    result = played(
        mechanism={"auction": "posted-private"}, task={"budget_factor": 1.0}, data={"sigma": 2.0, "minimum": 2}, seed=1
    )
    sizes = np.array([o.data_size for o in result.owners])
    sold = [(r.bidders, r.data_size, r.delivered) for r in result.rounds]
    assert any((d[ok] < sizes[b][ok]).any() for b, d, ok in sold)
    assert all((d <= sizes[b]).all() for b, d, _ in sold)


def test_a_mechanism_that_overspends_stops_the_run_with_the_books_in_order():
    ledger = MemoryLedger()
    with pytest.raises(Exception, match="exceed the budget"):
        played(ledger, mechanism={"auction": "m2"}, task={"budget_factor": 0.4})
    ledger.verify()


@pytest.mark.parametrize(
    "changes", [{"dropout": 1.5}, {"dropout": 0.7, "faulty": 0.7}, {"bids": config().simulation().bids[:3]}]
)
def test_impossible_simulations_are_refused(changes):
    with pytest.raises(InvalidInput):
        dataclasses.replace(config().simulation(), **changes)


def test_names_are_checked_before_data_is_loaded(monkeypatch):
    monkeypatch.setattr("flmarket.learning.datasets.load", lambda *_: pytest.fail("data was loaded"))
    for part in ({"auction": "al-in"}, {"aggregation": "best"}, {"perturbation": "none"}):
        with pytest.raises(UnknownName):
            config(mechanism=part).simulation()
    with pytest.raises(UnknownName, match="softmax"):
        config(model={"name": "softmacs"}).simulation()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"task": {"rounds": 0}}, "task.rounds"),
        ({"task": {"rounds": 2.5}}, "task.rounds"),
        ({"task": {"budget_factor": None}}, "budget"),
        ({"task": {"budget_per_round": 5.0}}, "budget"),
        ({"task": {"budget_factor": -1.0}}, "budget_factor"),
        ({"task": {"budget_factor": float("nan")}}, "budget_factor"),
        ({"task": {"bugdet": 5.0}}, "bugdet"),
        ({"owners": {"rate": [1.0]}}, "owners.rate"),
        ({"owners": {"valuations": ["cubic"]}}, "owners.valuations"),
        ({"owners": {"dropout": 2.0}}, "owners.dropout"),
        ({"mechanism": {"clip": 0}}, "mechanism.clip"),
        ({"mechanism": {"bound_dimension": "all"}}, "bound_dimension"),
        ({"seed": -1}, "seed"),
        ({"extra": {}}, "extra"),
    ],
)
def test_configuration_errors_name_the_key(changes, key):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_bids_from_a_file(tmp_path):
    rows = "".join(f"linear,{1 + k / 10},1.0,1\n" for k in range(20))
    (tmp_path / "bids.csv").write_text("kind,rate,privacy_budget,data_size\n" + rows)
    spec = config(owners={"bids": "bids.csv"}).simulation(base=tmp_path)
    assert spec.bids.valuations.rate[3] == 1.3
    np.testing.assert_array_equal(spec.bids.data_size, spec.partition.sizes)
    with pytest.raises(ConfigError, match="20 bids"):
        config(owners={"bids": "bids.csv"}, data={"owners": 21}).simulation(base=tmp_path)


@pytest.mark.realdata
def test_paper_scale(data_dir):
    """FL-Market 2022's setting over real NSL-KDD: 1,000 owners, 10 bidders a round, 100 rounds."""
    from pathlib import Path

    spec: Simulation = MarketConfig.load(Path(__file__).parents[2] / "examples" / "flm22.toml").simulation(
        data_dir=data_dir
    )
    assert spec.partition.owners == 1000
    assert spec.partition.sizes.sum() == 125_973
    result = spec.run()
    assert len(result.rounds) == 100
    assert all(r.bidders.size == 10 for r in result.rounds)
    assert all(np.isfinite(r.error_bound) for r in result.rounds)
    assert result.spent_micros <= result.budget_micros
    assert auctions.get("all-in").name == result.mechanism
