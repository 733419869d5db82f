import dataclasses

import numpy as np
import pytest

from flmarket import InvalidInput
from flmarket.engines import MemoryOwners, StackelbergTraining
from flmarket.games import verify_equilibrium
from flmarket.learning import DataSet, Purpose, load, partition, stream
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import MemoryStore, Rounds, owner_account
from flmarket.market.kinds import reward
from flmarket.privacy import PrivacyAccount, RecordLevel
from flmarket.privacy.composition import ApproxTotal
from flmarket.privacy.events import ZCdp
from flmarket.report import check_guarantees


def spec(users=20, **changes):
    data = changes.pop("data", None) or load("breast-cancer")
    split = partition.equal(stream(0, purpose=Purpose.PARTITION), len(data.y_train), users)
    values = np.random.default_rng(1).uniform(1, 5, users)
    settings = {"weight": 20.0, "rounds": 12, "reward": 8.0} | changes
    return StackelbergTraining(data=data, partition=split, **{"privacy_values": values} | settings)


def flat_data(records=40, features=200):
    """All-zero records of both classes in turn: with two users of even shares the gradient of a mean is 0."""
    x, y = np.zeros((records, features)), np.arange(records) % 2
    return DataSet("flat", x, y, x[:4], y[:4], ("no", "yes"))


def noise_excess(training):
    """Standard errors by which the variance of the releases' noise misses (L/m)²·2T/ρ_i, user by user.

    Zero features make the weights' gradient zero: what moves the weights is noise alone.
    """
    result, seen = training.run(), {}
    # one user at a time carries all of the weight, so that the step is her release
    for user in np.flatnonzero(result.rho > 0):
        kind = training.kind()
        kind.terms = {"values": np.asarray(training.privacy_values).tolist()}
        kind._game = kind.terms, dataclasses.replace(kind.game, weights=np.eye(result.rho.size)[user])
        kind.asks = lambda index: index == 0
        store = MemoryStore()
        store.terms = lambda kind=kind: kind.terms
        Rounds(kind, MemoryOwners(training), MemoryLedger(), store).play()
        noise = kind.parameters[: training.data.features] / training.learning_rate / np.sqrt(training.rounds)
        expected = (training.clip / training.records) ** 2 * 2 * training.rounds / result.rho[user]
        seen[user] = (np.mean(noise**2) / expected - 1) / np.sqrt(2 / noise.size)
    return np.array(list(seen.values()))


def test_the_noise_has_the_variance_that_rho_asks_for():
    training = spec(users=2, data=flat_data(features=4000), privacy_values=[1.0, 1.5], clip=0.5, rounds=6)
    assert np.abs(noise_excess(training)).max() < 4


def test_half_the_noise_would_be_noticed(monkeypatch):
    training = spec(users=2, data=flat_data(features=4000), privacy_values=[1.0, 1.5], clip=0.5, rounds=6)
    whole = reward._scale
    monkeypatch.setattr(reward, "_scale", lambda *terms: whole(*terms) / 2)
    assert np.abs(noise_excess(training)).min() > 10


@pytest.mark.parametrize("cost", ["linear", "quadratic", "exponential"])
def test_accounts_end_at_rho_and_nobody_gains_by_another_rho(cost):
    training = spec(cost=cost, rounds=7)
    result = training.run()
    assert verify_equilibrium(training.game(), result.rho, reward=8.0) < 1e-8
    np.testing.assert_allclose(result.spent_rho, result.rho, rtol=1e-12)
    np.testing.assert_array_equal(result.releases, np.where(result.rho > 0, 7, 0))


def test_an_owner_without_room_for_her_rho_is_not_in_the_game():
    """Her account at home has the last word: she bids what it allows, and an order beyond that is refused."""
    training, owners = spec(), MemoryOwners(spec())
    who = int(np.flatnonzero(training.announced().rho > 0)[0])
    owners.record(who).account.books = PrivacyAccount(RecordLevel(ZCdp(training.announced().rho[who] * 0.9)))
    ledger = MemoryLedger()
    Rounds(training.kind(), owners, ledger, MemoryStore()).play()
    ends = {award.owner: award.state for award in ledger.awards()}
    assert ends.pop(owner_account(who)) is AwardState.VOIDED
    assert set(ends.values()) == {AwardState.POSTED}
    assert owners.record(who).account.books.spent == 0.0


def test_epsilon_is_no_more_than_what_zcdp_alone_would_say():
    result = spec().run()
    taking_part = result.rho > 0
    zcdp = [ApproxTotal().plus(ZCdp(rho), 1).epsilon(1e-5) for rho in result.rho[taking_part]]
    assert (result.epsilon[taking_part] <= zcdp).all()
    assert (result.epsilon[taking_part] > 0.8 * np.array(zcdp)).all()
    assert (result.epsilon[~taking_part] == 0).all()


def test_each_is_paid_once_and_the_remainder_stays_with_the_server():
    ledger = MemoryLedger()
    result = spec(reward=1.0).run(ledger=ledger)
    ledger.verify()
    taking_part = np.flatnonzero(result.rho > 0)
    awards = list(ledger.awards())
    assert [a.state for a in awards] == [AwardState.POSTED] * taking_part.size
    assert [ledger.balance(owner_account(i)) for i in range(20)] == result.paid_micros.tolist()
    assert result.paid_micros.sum() <= result.reward_micros == 1_000_000
    assert ledger.balance("buyer") == result.reward_micros - result.paid_micros.sum() < 20
    np.testing.assert_allclose(result.paid_micros / 1e6, result.rho / result.rho.sum(), atol=1e-6)
    assert (result.utilities >= -1e-6).all()


def test_the_best_reward_is_announced_by_default():
    training = spec(reward=None, rounds=200)
    announced = training.announced()
    assert announced.reward_micros == int(training.game().optimal_reward() * 1e6) > 0
    assert announced.server_utility == pytest.approx(training.game().server_utility(training.game().optimal_reward()))


@pytest.mark.parametrize("changes", [{"reward": 0.0}, {"reward": 9e-7}, {"reward": None, "weight": 1e-3}])
def test_nobody_takes_part(changes):
    ledger = MemoryLedger()
    training = spec(**changes)
    result = training.run(ledger=ledger)
    assert not result.rho.any()
    assert not result.paid_micros.any()
    assert not result.parameters.any()
    assert result.rounds == ()
    assert result.server_utility == training.weight / 2
    assert not list(ledger.awards())
    assert all(check.holds for check in check_guarantees(result.market_result()))


def test_a_seed_gives_the_same_training_and_another_a_different_one():
    one, two, other = spec().run(), spec().run(), spec(seed=1).run()
    np.testing.assert_array_equal(one.parameters, two.parameters)
    assert one.over_rounds("loss") == two.over_rounds("loss") != other.over_rounds("loss")
    np.testing.assert_array_equal(one.rho, other.rho)


@pytest.mark.parametrize("weighting", ["equal", "rho"])
def test_with_generous_rho_training_beats_the_majority_class(weighting):
    seen = []
    result = spec(reward=200.0, rounds=60, learning_rate=0.3, weighting=weighting).run(progress=seen.append)
    market = result.market_result()
    assert seen == list(result.rounds)
    assert len(seen) == 60
    assert market.accuracy[-1] == result.over_rounds()[-1] > market.baseline_accuracy + 0.2
    assert market.spent_micros == result.paid_micros.sum()
    assert all(check.holds for check in check_guarantees(market))


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy_values": [1.0, 2.0]},
        {"privacy_values": np.zeros(20)},
        {"weighting": "size"},
        {"rounds": 0},
        {"rounds": 2.5},
        {"reward": -1.0},
        {"cost": "free"},
        {"noise_account": "none"},
        {"delta": 0.0},
        {"clip": 0.0},
        {"users": 1},
    ],
)
def test_bad_input_is_refused(changes):
    with pytest.raises(InvalidInput):
        spec(**changes)


def test_unequal_shares_are_refused():
    data = load("breast-cancer")
    split = partition.iid_power_law(np.random.default_rng(0), len(data.y_train), 10)
    with pytest.raises(InvalidInput, match="equal shares"):
        StackelbergTraining(data=data, partition=split, privacy_values=np.arange(1.0, 11.0), weight=20.0)
