"""Auctions that sell single records' privacy: what is clipped, what is noised, what is counted, and never mixed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy import stats
from tiny_markets import market

from flmarket.engines import play, run
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError, InvalidInput
from flmarket.learning import LocalTraining, Records, SoftmaxRegression, clipped_gradients, models
from flmarket.ledger import MemoryLedger
from flmarket.market.descent import descend
from flmarket.market.kind import Refused
from flmarket.market.owner import guarded
from flmarket.privacy import (
    ApproxDp,
    GaussianRelease,
    PrivacyAccount,
    PureDp,
    RecordLevel,
    RecordNoise,
    SimulationNoise,
    ZCdp,
    cap_from_dict,
    event_from_dict,
    event_to_dict,
    gaussian_epsilon,
    unit_of,
)
from flmarket.report import check_guarantees

RECORD = {
    "mechanism": {"auction": "all-in", "unit": "record", "perturbation": "recommended"},
    "training": {"local_steps": 2, "batch_size": None, "average": True},
    "owners": {"privacy_cap": 8.0, "privacy_cap_delta": 1e-5, "dropout": 0.2, "faulty": 0.1},
}


def record_market(model: str = "softmax", **changes):
    values = market("auction", model, **RECORD)
    del values["training"]["batch_size"]
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change
    return MarketConfig.parse(values).spec()


# --- units are never added


def test_an_account_counts_one_unit():
    of_updates, of_records = PrivacyAccount(ApproxDp(8.0, 1e-5)), PrivacyAccount(RecordLevel(ApproxDp(8.0, 1e-5)))
    update, record = GaussianRelease(2.0), RecordLevel(GaussianRelease(2.0))
    of_updates.compose(update)
    of_records.compose(record, 3)
    assert of_records.spent == pytest.approx(float(gaussian_epsilon(sigma=2 / np.sqrt(3), delta=1e-5)))
    for account, other in ((of_updates, record), (of_records, update), (of_records, PureDp(0.1))):
        before = account.state_dict()
        for act in (account.compose, account.would_exceed):
            with pytest.raises(InvalidInput, match="no sum of both"):
                act(other)
        assert account.state_dict() == before
    again = PrivacyAccount.from_state_dict(of_records.state_dict())
    assert (again.cap, again.spent) == (of_records.cap, of_records.spent)
    assert unit_of(again.cap) == "record"
    assert of_records.affordable(guarantee=RecordNoise().guarantee) > 0
    with pytest.raises(InvalidInput, match="no sum of both"):
        of_records.affordable()


def test_written_and_read_again():
    for event in (RecordLevel(GaussianRelease(1.5)), RecordLevel(ApproxDp(1.0, 1e-5)), RecordLevel(ZCdp(0.1))):
        assert event_from_dict(event_to_dict(event)) == event
    inside = event_to_dict(RecordLevel(PureDp(1.0)))
    for bad in (
        {"kind": "record-level"},
        {"kind": "record-level", "loss": 1.0},
        {"kind": "record-level", "loss": inside},
        {"kind": "record-level", "loss": {"kind": "unprotected"}},
        {"kind": "record-level", "loss": event_to_dict(PureDp(1.0)), "more": 1},
    ):
        with pytest.raises(InvalidInput):
            event_from_dict(bad)
    with pytest.raises(InvalidInput):
        cap_from_dict(event_to_dict(RecordLevel(GaussianRelease(1.0))))


def test_an_owner_sells_one_product():
    """Her account decides: one for updates takes no part where records are sold, and the other way round."""
    records, updates = record_market(), MarketConfig.parse(market("auction")).spec()
    for sold, other in ((records, updates), (updates, records)):
        owner, call = sold.owner(0), other.kind().announcement(0)
        assert owner.proposal(sold.kind().announcement(0)).unit == unit_of(owner.cap)
        assert owner.proposal(call) is None
    # and an order in the other unit is refused before anything is charged
    rounds, owners = play(replace(records, dropout=0.0, faulty=0.0))
    guard, kind = owners.guard(0), rounds.kind
    call = kind.announcement(0)
    guard.offer(call, guard.proposed(call)) if guard.journal.offer("t", 0) is None else None
    spent = guard.account.books.spent
    loss = PureDp(0.5)
    order = kind.order(0, 0, loss=loss, price_micros=10**9, records=5, learning_rate=0.1)
    answer = guarded(partial(guard.admit, order, kind.parameters))
    assert isinstance(answer, Refused)
    assert guard.account.books.spent == spent


def test_in_a_sum_nothing_is_of_single_records_whatever_noise_is_named():
    kind = record_market().kind()
    call = kind.announcement(0)
    assert kind.side.unit(call) == "record"
    assert kind.side.unit(replace(call, trust="secure-aggregation")) == "update"


def test_a_cap_in_the_ledger_for_the_other_unit_keeps_an_owner_out():
    spec, ledger = record_market(), MemoryLedger()
    ledger.register_cap("owner-1", PureDp(5.0))
    ledger.register_cap("owner-2", RecordLevel(ApproxDp(8.0, 1e-5)))
    rounds, _ = play(spec, ledger=ledger)
    assert all(1 not in record.bidders for record in rounds.records)
    assert any(2 in record.bidders for record in rounds.records)
    assert 0 < ledger.privacy_spent("owner-2") <= 8.0 * (1 + 1e-9)


# --- what is clipped and what is noised


def test_one_record_moves_noiseless_steps_by_no_more_than_the_noise_is_for():
    rng, clip = np.random.default_rng(0), 0.7
    for steps in (1, 4):
        model = SoftmaxRegression(3, 4, local=LocalTraining(steps=steps, learning_rate=0.5))
        start = rng.normal(size=model.dimension)
        x, y = rng.normal(size=(9, 3)) * 50, rng.integers(4, size=9)
        means = clipped_gradients(model, start, [Records(x, y)], clip)[0]
        for _ in range(50):
            other_x, other_y = x.copy(), y.copy()
            other_x[4], other_y[4] = rng.normal(size=3) * 10.0 ** rng.uniform(-3, 6), rng.integers(4)
            moved = clipped_gradients(model, start, [Records(other_x, other_y)], clip)[0]
            assert np.linalg.norm(moved - means) <= 2 * clip / 9 * (1 + 1e-12)


@pytest.mark.parametrize("steps", [1, 5])
def test_the_noise_of_k_steps_is_that_of_one_release(steps):
    """σ of what leaves, against the closed form; half of it, the planted cheat, would be seen."""
    model = SoftmaxRegression(40, 10, local=LocalTraining(steps=steps, learning_rate=0.25))
    noise, records, epsilon = RecordNoise(clip=2.0, delta=1e-5), 12, 1.7
    start = np.zeros((1, model.dimension))
    scale = [partial(noise.scale, epsilon)]
    rng = np.random.default_rng(1)
    ends = [
        descend(model, start, None, [SimulationNoise(rng)], clip=2.0, sizes=[records], scale=scale)[0]
        for _ in range(60)
    ]
    sigma = 0.25 * np.sqrt(steps) * np.sqrt(steps) * 2 * 2.0 / records * noise.multiplier(epsilon)
    drawn = np.concatenate(ends) / sigma
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], drawn.size)
    assert low < np.square(drawn).sum() < high
    assert not low < np.square(drawn / 2).sum() < high
    assert float(gaussian_epsilon(sigma=noise.multiplier(epsilon), delta=1e-5)) == pytest.approx(epsilon)


def test_owners_together_are_owners_alone_to_the_last_bit():
    pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    local = LocalTraining(steps=3, learning_rate=0.1, momentum=0.5)
    networks = models.get("mlp", features=4, classes=3, hidden=[5], local=local)
    for model in (SoftmaxRegression(4, 3, l2=0.01, local=local), networks):
        data = [Records(rng.normal(size=(n, 4)), rng.integers(3, size=n)) for n in (5, 5, 40, 7)]
        starts = rng.normal(size=(4, model.initial(0).size))
        scale = [partial(RecordNoise().scale, 1.0)] * 4

        def sources():
            return [SimulationNoise(np.random.default_rng(i)) for i in range(4)]

        sizes = [len(own) for own in data]
        together = descend(model, starts, data, sources(), clip=1.0, sizes=sizes, scale=scale)
        for i in range(4):
            alone = descend(
                model, starts[[i]], [data[i]], [sources()[i]], clip=1.0, sizes=sizes[i : i + 1], scale=scale[:1]
            )
            np.testing.assert_array_equal(alone[0], together[i])


# --- the market


@pytest.mark.parametrize("model", ["softmax", "mlp"])
def test_flower_makes_no_difference(model, tmp_path):
    pytest.importorskip("flwr")
    from flmarket.engines.flower import simulate

    spec = record_market(model)
    rounds, _ = play(spec)
    on_flower = simulate(spec, tmp_path)
    np.testing.assert_array_equal(on_flower.parameters, rounds.kind.parameters)
    losses = [award.loss for award in on_flower.ledger.awards()]
    assert losses == [award.loss for award in rounds.ledger.awards()]
    assert losses
    assert all(isinstance(loss, RecordLevel) and loss.loss.delta == 1e-5 for loss in losses)
    assert all(isinstance(release.guarantee, RecordLevel) for release in on_flower.ledger.releases())


def test_records_sell_out_at_the_cap_and_say_what_they_are():
    spec = record_market(task={"rounds": 12, "bidders_per_round": 4}, owners={"privacy_budget": [3.0, 3.0]})
    result = run(spec)
    assert result.unit == "record"
    assert all(check.holds for check in check_guarantees(result))
    totals = [owner.loss_total for owner in result.owners]
    assert max(totals) <= 8.0 * (1 + 1e-9)
    assert max(totals) > 7.0
    sold = sum(int(record.delivered.sum()) for record in result.rounds)
    assert 0 < sold < 12 * 4  # ε adds up like noise, so there are more than two of 3.0 in 8.0, and an end


def test_settings_that_cannot_protect_records_are_refused():
    with pytest.raises(InvalidInput, match="no batch_size"):
        record_market(training={"batch_size": 8})
    with pytest.raises(ConfigError, match="gaussian-records"):
        record_market(mechanism={"perturbation": "laplace-l1"})
    with pytest.raises(ConfigError, match="privacy_cap_delta"):
        record_market(owners={"privacy_cap_delta": 0.0})
    with pytest.raises(InvalidInput, match="takes whole updates"):
        RecordNoise().privatize(np.zeros(3), 1.0, np.random.default_rng(0))


def test_weights_follow_the_noise_of_records():
    """An owner of twice the records has a quarter of the noise: var-opt gives her four times the weight."""
    from flmarket import aggregation

    rule = aggregation.get("var-opt", clip=1.0, dimension=10, perturbation=RecordNoise())
    np.testing.assert_allclose(rule.weights([1.0, 1.0], [10.0, 20.0]), [0.2, 0.8])
