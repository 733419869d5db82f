"""Joint-DP training end to end: selection, noise, accounts, robust rounds, money."""

import dataclasses
import json

import numpy as np
import pytest
from dp_accounting import dp_event, pld

from flmarket import InvalidInput, auctions
from flmarket.aggregation import robust
from flmarket.audit import audit_releases
from flmarket.cli.markets import run_market
from flmarket.engines import JdpTraining, MemoryOwners
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError, MechanismViolation
from flmarket.learning import (
    DataSet,
    LocalTraining,
    Purpose,
    Records,
    SoftmaxRegression,
    adversaries,
    clipped_gradients,
    load,
    models,
    partition,
    stream,
)
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import Guard, MemoryStore, Rounds, descent, owner_account
from flmarket.market.kinds import joint
from flmarket.market.owner import Work
from flmarket.market.record import MemoryRecord
from flmarket.privacy import (
    ApproxDp,
    ExponentialRelease,
    GaussianRelease,
    PrivacyAccount,
    PureDp,
    RecordLevel,
    ZCdp,
    analytic_gaussian_sigma,
    classic_gaussian_sigma,
    gaussian_epsilon,
)
from flmarket.privacy.joint import LocalPerturbation, account_of, upload_epsilon
from flmarket.report import check_guarantees


@pytest.fixture(scope="module")
def digits():
    return load("digits")


DIMENSION = 3000


class Still:
    """A model that never learns: whatever leaves a client is what she was given, plus noise."""

    tensors = {"weights": (DIMENSION,)}  # noqa: RUF012
    local = LocalTraining(steps=3, learning_rate=1.0)

    def record_gradients(self, parameters, data):
        return np.zeros((len(data.y), DIMENSION))

    def initial(self, seed):
        return np.zeros(DIMENSION)

    def train(self, parameters, data, rng):
        return np.array(parameters)

    def evaluate(self, parameters, data):
        return {"accuracy": 0.5, "loss": 1.0}


@pytest.fixture
def spec(digits):
    def make(clients=12, rule="leave-one-out", auction="m1", adversary=None, **changes):
        split = partition.equal(stream(0, purpose=Purpose.PARTITION), len(digits.y_train), clients)
        chooses = rule in ("leave-one-out", "leave-k-out", "partition")
        settings = changes.pop("settings", {}) | ({"epsilon": 1.0, "validation": 150} if chooses else {})
        given = {
            "data": digits,
            "partition": split,
            "costs": np.random.default_rng(1).uniform(1, 100, clients),
            "budget": 2000.0,
            "auction": auctions.get(auction),
            "model": SoftmaxRegression(64, 10, local=LocalTraining(steps=5, batch_size=32, momentum=0.9)),
            "aggregation": robust.get(rule, **settings),
            "perturbation": LocalPerturbation(clip=1.0),
            "epsilon": 500.0,
            "adversary": adversary,
            "adversaries": 0 if adversary is None else 1,
            "rounds": 4,
            "validation": 150,
        }
        return JdpTraining(**given | changes)

    return make


# --- M3


def noise_excess(training):
    """Standard errors by which the variance of the noise in the average misses Σ w²σ²; steps of rate 1 by hand."""
    result, noise = training.run(), training.perturbation
    span = 2 * noise.clip / (training.partition.sizes[0] if noise.unit == "record" else 1)
    rule = analytic_gaussian_sigma if noise.calibration == "analytic" else classic_gaussian_sigma
    once = float(rule(epsilon=training.epsilon, delta=noise.delta, sensitivity=span))
    steps = 3 if noise.unit == "record" else 1  # each has √3 of the noise: three times the variance in all
    expected = (once * steps) ** 2 / training.partition.owners
    moved = result.parameters / np.sqrt(len(result.rounds))
    return (np.mean(moved**2) / expected - 1) / np.sqrt(2 / moved.size)


@pytest.mark.parametrize("unit", ["client", "record"])
@pytest.mark.parametrize("calibration", ["analytic", "paper"])
def test_the_noise_has_the_variance_that_epsilon_asks_for(spec, unit, calibration, monkeypatch):
    noise = LocalPerturbation(clip=0.5, unit=unit, calibration=calibration)
    training = spec(rule="average", model=Still(), mixing=False, perturbation=noise, epsilon=2.0, clients=17)
    # steps of the public model only add up if nothing is clipped away: Still starts each round from the public model
    assert abs(noise_excess(training)) < 4
    whole = LocalPerturbation.scale
    monkeypatch.setattr(LocalPerturbation, "scale", lambda *given: whole(*given) / 2)
    assert abs(noise_excess(training)) > 10  # half the noise is noticed


def test_sigma_by_hand():
    paper = LocalPerturbation(clip=3.0, calibration="paper", delta=1e-5)
    assert paper.scale(2.0, 100) == pytest.approx(np.sqrt(2 * np.log(1.25e5)) * 6 / 2)
    record = dataclasses.replace(paper, unit="record")
    assert record.scale(2.0, 100, steps=4) == pytest.approx(2 * paper.scale(2.0, 100) / 100)
    assert record.guarantee(2.0) == paper.guarantee(2.0)  # the same promise, for another unit
    assert paper.guarantee(2.0).noise_multiplier == pytest.approx(paper.scale(2.0, 100) / 6)


def test_update_and_parameters_are_clipped_around_the_right_centre():
    parameters, public = np.array([[13.0, 4.0]]), np.array([10.0, 0.0])
    silent = np.array([1e-12])
    rngs = [np.random.default_rng(0)]
    update = LocalPerturbation(clip=1.0).upload(parameters, public, silent, rngs)
    np.testing.assert_allclose(update, [[10.6, 0.8]], atol=1e-9)
    whole = LocalPerturbation(clip=1.0, clipped="parameters").upload(parameters, public, silent, rngs)
    np.testing.assert_allclose(whole, parameters / np.linalg.norm(parameters), atol=1e-9)


# --- the account


def test_accounts_end_at_what_was_released(spec):
    result = spec().run()
    multiplier = result.spec.perturbation.scale(500.0, 1) / 2
    for spent in result.spent_rho.values():
        assert spent == pytest.approx(4 * 0.5 / multiplier**2, rel=1e-12)
    privacy = result.privacy
    assert privacy.client_per_round == pytest.approx(500.0, rel=1e-6)
    assert privacy.client_total == pytest.approx(float(gaussian_epsilon(sigma=multiplier / 2, delta=1e-5)), rel=1e-6)
    assert privacy.client_total < 4 * 500  # better than adding up
    assert privacy.record_per_round == pytest.approx(1.0, rel=1e-3)
    assert privacy.record_total <= 4.0
    assert privacy.paper_per_round == 501.0


def test_a_client_without_room_for_her_uploads_is_not_chosen(spec):
    """Her account at home has the last word: what it does not hold for all rounds she does not offer."""
    training = spec()
    owners, ledger, who = MemoryOwners(training), MemoryLedger(), int(training.selection.clients[3])
    owners.record(who).account.books = PrivacyAccount(ZCdp(1e-3))
    Rounds(training.kind(), owners, ledger, MemoryStore()).play()
    assert owner_account(who) not in {award.owner for award in ledger.awards()}
    assert owners.record(who).account.books.spent == 0.0


def test_erratum_e9_the_papers_sigma_breaks_its_promise_at_large_epsilon(spec):
    noise = LocalPerturbation(calibration="paper")
    assert spec(perturbation=noise, epsilon=20.0, rounds=1).run().privacy.client_per_round == pytest.approx(
        25.4, abs=0.1
    )
    assert spec(perturbation=noise, epsilon=1.0, rounds=1).run().privacy.client_per_round < 1.0


# --- one record


def by_record(**changes):
    return {
        "model": SoftmaxRegression(64, 10, local=LocalTraining(steps=3, learning_rate=1.0, momentum=0.5)),
        "perturbation": LocalPerturbation(unit="record"),
        "epsilon": upload_epsilon(8.0, 1e-5, 4),
    } | changes


def test_a_record_keeps_its_epsilon_over_all_steps_and_rounds(spec):
    """dp-accounting composes every noisy step of every round on its own; ours is one number."""
    training = spec(**by_record(), clients=12)
    result = training.run()
    assert result.privacy.unit == "record"
    assert result.privacy.client_total == pytest.approx(8.0, rel=1e-6)
    assert "Any one record" in result.privacy.sentences()[0]
    records = int(result.selection.records[0])
    step = training.perturbation.scale(training.epsilon, records, 3) / (2 * training.perturbation.clip / records)
    accountant = pld.PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(step), count=3 * 4)
    assert accountant.get_epsilon(1e-5) == pytest.approx(8.0, rel=1e-3)
    assert result.accuracy > 0.5  # and something is learnt: 75 records each, 12 clients


def uploads_of(training, records, count):
    """What leaves one client over so many rounds that all start alike, as her guard lets it out."""
    kind, owner = training.kind(), training.owner(0)
    owner = dataclasses.replace(owner, x=records.x, y=records.y, model=training.model)
    call = kind.announcement(0)
    loss, cap = ApproxDp(training.epsilon, training.perturbation.delta), ZCdp(1e9)
    if training.perturbation.unit == "record":
        loss, cap = RecordLevel(loss), RecordLevel(cap)
    first = kind.order(0, 0, price_micros=1, records=len(records.y), learning_rate=0.0, loss=loss, total_size=0.0)
    start = np.zeros(kind.dimension)
    for index in range(count):
        record = MemoryRecord(PrivacyAccount(cap))
        guard = Guard(owner, record)
        work = Work(owner, call, dataclasses.replace(first, round_index=index), start, training.model, record)
        yield guard.finish(work, kind.side.train([work])[0])


def audited(training, neighbours, trials):
    """The audit of one client's upload, on neighbours that differ in one record."""
    sent = (np.array(list(uploads_of(training, records, trials))) for records in neighbours)
    promised = training.perturbation.guarantee(training.epsilon)
    return audit_releases(*sent, promised, delta=training.perturbation.delta, failure_probability=0.001)


@pytest.fixture
def worst():
    """A training by one client, and her worst neighbours: one record, whose clipped gradient points the other way."""
    model = SoftmaxRegression(2, 2, local=LocalTraining(steps=3, learning_rate=1e-4))
    tiny = DataSet("tiny", np.full((4, 2), 1e-3), np.array([0, 1, 0, 1]), np.ones((8, 2)), np.arange(8) % 2, ("a", "b"))
    training = JdpTraining(
        data=tiny, partition=partition.equal(np.random.default_rng(0), 4, 1), costs=[1.0], budget=10.0,
        auction=auctions.get("m1"), model=model, aggregation=robust.get("average"),
        perturbation=LocalPerturbation(unit="record", clip=1.0), epsilon=4.0, validation=4,
    )  # fmt: skip
    neighbours = []
    for label in (0, 1):
        x, y = tiny.x_train.copy(), tiny.y_train.copy()
        x[0], y[0] = 40.0, label
        neighbours.append(Records(x, y))
    return training, neighbours


def test_an_audit_of_the_upload_finds_no_more_than_is_promised_for_a_record(worst):
    found = audited(*worst, 2400)
    assert found.holds, found.findings
    assert 0.7 * found.mu_claimed < found.mu_lower <= found.mu_claimed  # nearly all of it: these are the worst


@pytest.mark.parametrize("cheat", ["no clip of a record", "half the noise", "noise of one step", "twice the records"])
def test_an_audit_of_the_upload_catches(worst, cheat, monkeypatch):
    whole = LocalPerturbation.scale
    if cheat == "no clip of a record":
        monkeypatch.setattr(descent, "clipped_gradients", lambda *given: clipped_gradients(*given[:3], 1e9))
        monkeypatch.setattr(descent, "clip_l2", lambda vector, clip: vector)
    shorter = {
        "half the noise": lambda *given: whole(*given) / 2,
        "noise of one step": lambda self, epsilon, records, steps: whole(self, epsilon, records, 1),
        "twice the records": lambda self, epsilon, records, steps: whole(self, epsilon, 2 * records, steps),
    }
    if cheat in shorter:
        monkeypatch.setattr(LocalPerturbation, "scale", shorter[cheat])
    found = audited(*worst, 1200)
    assert not found.holds
    assert found.mu_lower > found.mu_claimed


def test_where_records_are_protected_nobody_elses_training_leaves(spec, digits):
    """A training function of an app's own is not asked: what it computes has no clip. If training fails, noise."""
    training = spec(**by_record(), clients=12, rounds=1)
    kind, owner = training.kind(), training.owner(0)
    guard, call = Guard(owner, MemoryRecord(PrivacyAccount(RecordLevel(ZCdp(1e9))))), kind.announcement(0)
    guard.bid(call)
    loss = RecordLevel(ApproxDp(training.epsilon, 1e-5))
    order = kind.order(
        0, 0, price_micros=10**9, records=len(owner.y), learning_rate=0.0, loss=loss, total_size=0.0
    )  # fmt: skip
    asked = []
    guard.train(order, kind.parameters, compute=lambda: asked.append(1) or np.full(kind.dimension, 1e6))
    assert not asked
    work = Work(owner, call, order, kind.parameters, training.model, guard.record)
    sent = np.array(guard.finish(work, None))
    assert sent.shape == kind.parameters.shape
    assert np.count_nonzero(sent - kind.parameters) > 0.99 * sent.size


@pytest.mark.parametrize(
    ("local", "said"),
    [(LocalTraining(steps=3, batch_size=16), "all records"), (LocalTraining(steps=3, optimizer="adam"), "sgd")],
)
def test_local_work_that_no_record_level_promise_covers_is_refused(spec, local, said):
    pytest.importorskip("torch")
    model = models.get("mlp", features=64, classes=10, local=local)
    with pytest.raises(InvalidInput, match=said):
        spec(**by_record(model=model))
    with pytest.raises(InvalidInput, match="record_gradients"):
        spec(**by_record(model=Trained()))


class Trained(Still):
    """It says how it trains, and has no gradients to clip."""

    local = LocalTraining()
    record_gradients = None


def test_the_papers_network_is_trained_with_every_record_protected(spec):
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 10
    images = rng.random((40, 784)) * 0.2 + np.eye(10).repeat(80, axis=1)[labels][:, :784]
    data = DataSet("stripes", images[:20], labels[:20], images[20:], labels[20:], tuple("0123456789"))
    model = models.get("mnist-cnn", features=784, classes=10, local=LocalTraining(steps=2, learning_rate=0.5))
    training = spec(
        **by_record(model=model), data=data, clients=2, rounds=2, rule="median", validation=10,
        partition=partition.equal(rng, 20, 2), costs=[1.0, 1.0],
    )  # fmt: skip
    result = training.run()
    assert np.isfinite(result.parameters).all()
    assert result.privacy.client_total == pytest.approx(
        float(
            gaussian_epsilon(
                sigma=LocalPerturbation().guarantee(training.epsilon).noise_multiplier / np.sqrt(2), delta=1e-5
            )
        ),
        rel=1e-6,
    )


def test_erratum_e20_one_record_moves_a_trained_model_by_more_than_2c_over_d(digits):
    """Clip the result of training to C, replace one of d records: the distance is not bounded by 2C/d."""
    local = LocalTraining(learning_rate=0.5, momentum=0.9, batch_size=50, steps=40)
    model = SoftmaxRegression(64, 10, local=local)
    x, y = digits.x_train[:50].copy(), digits.y_train[:50].copy()
    clip, moved = 1.0, []
    for replaced in (False, True):
        if replaced:
            x[0], y[0] = 10 * np.abs(x[0]) + 5, (y[0] + 5) % 10
        trained = model.train(np.zeros(model.dimension), Records(x, y), np.random.default_rng(0))
        moved.append(robust_clip(trained, clip))
    assert np.linalg.norm(moved[0] - moved[1]) > 5 * 2 * clip / 50


def robust_clip(vector, clip):
    return vector * min(1.0, clip / np.linalg.norm(vector))


def test_what_is_not_protected_is_said(spec):
    nothing = spec(perturbation=None, rounds=1).run()
    assert nothing.privacy.client_total == np.inf
    assert "no protection" in nothing.privacy.sentences()[0]
    with pytest.raises(InvalidInput):
        nothing.market_result()
    peer = spec(rule="median", rounds=2).run().privacy
    assert peer.record_total == 0.0  # a median never looks at the validation records
    stopping = spec(rule="median", rounds=2, stop_accuracy=1.0).run().privacy
    assert stopping.record_total == pytest.approx(1.0, rel=1e-3)
    unknown = account_of(rounds=3, delta=1e-5, uploads=None, choices=None, stopping=None, asked=1.0)
    assert "not protected" in unknown.sentences()[1]


def test_account_of_by_hand():
    made = account_of(
        rounds=9,
        delta=1e-5,
        uploads=GaussianRelease(3.0),
        choices=ExponentialRelease(0.1),
        stopping=PureDp(0.2),
        asked=2.0,
    )
    assert made.client_total == pytest.approx(float(gaussian_epsilon(sigma=1.0, delta=1e-5)))
    assert made.record_per_round == pytest.approx(0.1, rel=1e-3)
    assert 9 * 0.1**2 / 8 < made.record_total <= 9 * 0.1 + 0.2


# --- M4, M5 in the loop


def test_mixing_keeps_a_clients_own_parameters(spec):
    training = spec(rounds=1)
    result = training.run()
    plain = dataclasses.replace(training, mixing=False).run()
    np.testing.assert_array_equal(result.parameters, plain.parameters)  # the first public model is the same
    assert (plain.personal == plain.parameters).all()
    size = training.partition.sizes[result.selection.clients].astype(float)
    total = (size * result.included[0]).sum()
    own = (result.personal * (total + size)[:, None] - result.parameters * total) / size[:, None]
    data = [Records(*digits_of(training, i)) for i in result.selection.clients]
    rngs = [stream(0, 0, int(i), purpose=Purpose.BATCHES) for i in result.selection.clients]
    trained = training.model.train_many(np.zeros(650), data, rngs)
    np.testing.assert_allclose(own, trained, atol=1e-9)


def digits_of(training, client):
    rows = training.partition.records(client)
    return training.data.x_train[rows], training.data.y_train[rows]


@pytest.mark.parametrize("name", adversaries.names())
def test_the_choice_keeps_an_adversary_out_who_would_ruin_the_average(spec, name):
    attack = adversaries.get(name, **({"factor": 25.0} if name not in ("dirty-label", "label-flip") else {}))
    ours = spec(adversary=attack, rounds=12, perturbation=None).run()
    average = spec(adversary=attack, rounds=12, perturbation=None, rule="average", mixing=False).run()
    assert ours.selection.adversaries.size == 1
    assert average.adversaries_included == 1.0
    if name not in ("dirty-label", "label-flip"):
        assert ours.accuracy > average.accuracy + (0.3 if name == "sign-flip" else 0.02)
        assert ours.adversaries_included < 0.5
    else:
        assert ours.accuracy > average.accuracy - 0.03
        assert ours.adversaries_included < 0.95


def test_adversaries_train_on_other_labels_and_others_on_their_own(spec):
    training = spec(adversary=adversaries.get("dirty-label", target=7))
    chosen = training.select()
    for i, y in ((i, training.owner(int(i)).y) for i in chosen.clients):
        honest = training.data.y_train[training.partition.records(int(i))]
        np.testing.assert_array_equal(y, np.full_like(y, 7) if i in chosen.adversaries else honest)


def test_the_validation_records_are_not_the_test_records(spec):
    training = spec()
    kind, known = training.kind(), {record.tobytes(): i for i, record in enumerate(training.data.x_test)}
    validation, test = ({known[record.tobytes()] for record in part.x} for part in (kind._validation, kind._test))
    assert not validation & test
    assert len(kind._validation) == 150
    assert len(kind._validation) + len(kind._test) == len(training.data.y_test)


def test_a_seed_gives_the_same_training_and_another_a_different_one(spec):
    one, two, other = spec().run(), spec().run(), spec(seed=1).run()
    np.testing.assert_array_equal(one.parameters, two.parameters)
    assert one.over_rounds() == two.over_rounds()
    assert (one.parameters != other.parameters).any()


def test_training_that_overflows_is_not_sent(spec):
    class Explodes(Still):
        def train_many(self, parameters, data, rngs):
            made = np.array(np.broadcast_to(parameters, (len(data), DIMENSION)))
            made[::2] = np.inf
            return made

    result = spec(model=Explodes()).run()
    assert np.isfinite(result.parameters).all()
    assert result.voided == ()


# --- money


def test_everybody_is_paid_once_when_training_stops(spec):
    ledger = MemoryLedger()
    result = spec(budget=300.0).run(ledger=ledger)
    chosen = result.selection
    awards = list(ledger.awards())
    assert 1 < chosen.clients.size < 12
    assert [award.state for award in awards] == [AwardState.POSTED] * chosen.clients.size
    assert [ledger.balance(owner_account(i)) for i in range(12)] == chosen.paid_micros.tolist()
    assert ledger.balance("buyer") == 300_000_000 - chosen.paid_micros.sum()
    assert (chosen.paid_micros[chosen.clients] >= np.floor(result.spec.costs[chosen.clients] * 1e6) - 1).all()
    market = result.market_result()
    assert market.spent_micros == chosen.paid_micros.sum()
    assert all(check.holds for check in check_guarantees(market)), check_guarantees(market)


class NotANumber(adversaries.DirtyLabel):
    def upload(self, honest, public, rng):
        return np.full_like(honest, np.nan)


def test_an_upload_of_no_numbers_voids_its_award_and_touches_nobody_else(spec):
    ledger = MemoryLedger()
    result = spec(adversary=NotANumber()).run(ledger=ledger)
    (bad,) = result.selection.adversaries.tolist()
    assert result.voided == (bad,)
    assert ledger.balance(owner_account(bad)) == 0
    states = {award.owner: award.state for award in ledger.awards()}
    assert states.pop(owner_account(bad)) is AwardState.VOIDED
    assert set(states.values()) == {AwardState.POSTED}
    assert not result.included[:, result.selection.clients == bad].any()
    assert all(check.holds for check in check_guarantees(result.market_result()))


def test_m2_owes_more_than_the_budget_and_is_refused_unless_allowed(spec):
    with pytest.raises(MechanismViolation):
        spec(auction="m2", budget=300.0).run()
    result = spec(auction="m2", budget=300.0, allow_overspending=True).run()
    assert result.selection.paid_micros.sum() > 300_000_000
    broken = [check.key for check in check_guarantees(result.market_result()) if not check.holds]
    assert broken == ["within_budget"]
    for within in ("m1", "m2-bf", "posted"):
        assert spec(auction=within, budget=300.0).select().paid_micros.sum() <= 300_000_000


def test_nobody_is_chosen_and_nothing_happens(spec):
    ledger = MemoryLedger()
    result = spec(budget=0.0).run(ledger=ledger)
    assert result.rounds == ()
    assert not result.selection.paid_micros.any()
    assert np.isnan(result.accuracy)
    assert not list(ledger.awards())


# --- stopping


def test_training_stops_at_the_accuracy(spec):
    result = spec(rounds=40, stop_accuracy=0.7, stop_epsilon=50.0).run()
    assert result.stopped
    assert len(result.rounds) < 40
    assert result.accuracy > 0.55
    assert result.rounds[-1].spent_micros == result.selection.paid_micros.sum()
    assert not spec(rounds=3, stop_accuracy=1.0).run().stopped
    assert not spec(rounds=3).run().stopped


def test_totals_are_for_the_rounds_agreed_on_not_for_those_played(spec):
    """When a training stops depends on what was released, so only the agreed maximum is a promise."""
    early = spec(rounds=40, stop_accuracy=0.7, stop_epsilon=50.0).run()
    assert len(early.rounds) < early.privacy.rounds == 40
    once = early.spec.perturbation.guarantee(early.spec.epsilon).noise_multiplier
    agreed = float(gaussian_epsilon(sigma=once / np.sqrt(40), delta=early.privacy.delta))
    assert early.privacy.client_total == pytest.approx(agreed, rel=1e-6)


def test_stopping_is_as_noisy_as_its_epsilon_says(spec):
    """AboveThreshold at distance 0: the noise is Laplace(2/(|V|ε)) on the threshold and Laplace(4/(|V|ε)) on a look."""
    training, gaps = spec(stop_accuracy=0.5, stop_epsilon=0.5), []
    for seed in range(3000):
        stops = joint.AboveThreshold(dataclasses.replace(training, seed=seed))
        unit = 1 / (150 * 0.5)
        gaps.append(float(stops._draw.laplace(scale=4 * unit)) - (stops._limit - 0.5))
    expected = 2 * (2**2 + 4**2) * (1 / (150 * 0.5)) ** 2
    assert np.var(gaps) == pytest.approx(expected, rel=0.15)


# --- bad input


@pytest.mark.parametrize(
    "changes",
    [
        {"costs": [1.0, 2.0]},
        {"budget": -1.0},
        {"rounds": 0},
        {"rounds": 2.5},
        {"validation": 0},
        {"validation": 10**6},
        {"validation": 100},  # not what the rule was built with
        {"adversaries": 2},
        {"adversaries": -1},
        {"epsilon": 0.0},
        {"stop_accuracy": 1.5},
        {"stop_epsilon": 0.0},
    ],
)
def test_bad_input_is_refused(spec, changes):
    with pytest.raises(InvalidInput):
        spec(**changes)


def test_more_adversaries_than_clients_are_refused(spec):
    with pytest.raises(InvalidInput):
        spec(adversary=adversaries.get("sign-flip"), adversaries=13).select()


@pytest.mark.parametrize(
    "changes", [{"clip": 0.0}, {"delta": 0.0}, {"clipped": "x"}, {"calibration": "x"}, {"unit": "x"}]
)
def test_bad_noise_is_refused(changes):
    with pytest.raises(InvalidInput):
        LocalPerturbation(**changes)


# --- a market in a file

FILE = {
    "task": {"rounds": 3},
    "data": {"name": "digits", "owners": 20, "partition": "equal"},
    "training": {"local_steps": 3, "batch_size": 16},
    "mechanism": {"auction": "jdp"},
    "jdp": {"budget_factor": 0.7, "adversary": "dirty-label", "adversary_target": 3, "validation": 50},
}


def test_a_market_in_a_file(digits):
    training = MarketConfig.parse(FILE).jdp_training(data=digits)
    assert training.adversary == adversaries.DirtyLabel(3)
    assert training.adversaries == 1
    assert training.budget == pytest.approx(0.7 * np.sum(training.costs))
    assert training.aggregation.epsilon == training.epsilon
    other = FILE | {"jdp": {"budget": 5.0, "aggregation": "leave-k-out", "leave_out": 4, "groups": 9, "validation": 60}}
    made = MarketConfig.parse(other).jdp_training(data=digits)
    assert made.aggregation.grouping == robust.LeaveKOut(4, 9)
    assert made.budget == 5.0
    assert made.adversary is None


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"budget": 1.0, "budget_factor": 1.0},
        {"budget": 1.0, "selection": "nobody"},
        {"budget": 1.0, "aggregation": "median", "leave_out": 2},
        {"budget": 1.0, "aggregation": "sum"},
        {"budget": 1.0, "adversary": "sign-flip", "adversary_target": 2},
        {"budget": 1.0, "epsilon": 0.0},
        {"budget": 1.0, "sensitivity": "none"},
        {"budget": 1.0, "unknown": 1},
    ],
)
def test_a_bad_file_is_refused(section, digits):
    with pytest.raises((ConfigError, InvalidInput)):
        MarketConfig.parse(FILE | {"jdp": section}).jdp_training(data=digits)


def test_a_budget_per_round_is_refused():
    with pytest.raises(ConfigError, match=r"joint\.budget"):
        MarketConfig.parse(FILE | {"task": {"rounds": 3, "budget_per_round": 5.0}})


def test_a_network_for_other_images_is_refused(digits):
    pytest.importorskip("torch")
    with pytest.raises(InvalidInput, match=r"model.*mnist-cnn"):
        MarketConfig.parse(FILE | {"jdp": {"budget": 1.0, "model": "mnist-cnn"}}).jdp_training(data=digits)
    with pytest.raises(InvalidInput, match=r"model.*cifar-cnn"):
        MarketConfig.parse(FILE | {"jdp": {"budget": 1.0}, "model": {"name": "cifar-cnn"}}).jdp_training(data=digits)


def test_run_writes_a_report(tmp_path, capsys):
    market = tmp_path / "market.toml"
    market.write_text(
        'seed = 3\n[task]\nrounds = 4\n[data]\nname = "digits"\nowners = 20\npartition = "equal"\n'
        '[mechanism]\nauction = "jdp"\n[jdp]\nbudget_factor = 0.8\nvalidation = 60\nadversary = "sign-flip"\n',
        encoding="utf-8",
    )
    run_market(market, tmp_path / "out", None, None, True)
    said = json.loads(capsys.readouterr().out)
    assert said["jdp"]["privacy"]["client_per_round"] == pytest.approx(100.0, rel=1e-6)
    assert all(said["guarantees"].values())
    rows = (tmp_path / "out" / "clients.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 21
    assert sum(int(row.split(",")[5]) for row in rows[1:]) == said["spent_micros"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "whole data set" in page
