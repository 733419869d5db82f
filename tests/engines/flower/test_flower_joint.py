"""Joint-DP training on Flower: chosen once, noised at home, combined robustly, as the simulation engine does it."""

import dataclasses

import numpy as np
import pytest

from flmarket import auctions
from flmarket.aggregation import robust
from flmarket.engines import JdpTraining
from flmarket.engines.flower import FileStore, KindStrategy, simulate
from flmarket.engines.flower.messages import Delivery, unpack, unpack_vector
from flmarket.learning import LocalTraining, Purpose, SoftmaxRegression, adversaries, load, partition, stream
from flmarket.ledger import AwardState, DurableAccount, MemoryLedger
from flmarket.privacy.joint import LocalPerturbation


def training(**changes):
    digits = load("digits")
    given = {
        "data": digits,
        "partition": partition.equal(stream(0, purpose=Purpose.PARTITION), len(digits.y_train), 6),
        "costs": np.random.default_rng(1).uniform(1, 100, 6),
        "budget": 400.0,
        "auction": auctions.get("m1"),
        "model": SoftmaxRegression(64, 10, local=LocalTraining(steps=3, batch_size=32, momentum=0.9)),
        "aggregation": robust.get("leave-one-out", epsilon=1.0, validation=150),
        "perturbation": LocalPerturbation(clip=1.0),
        "epsilon": 20.0,
        "rounds": 3,
        "validation": 150,
        "seed": 5,
    }
    return JdpTraining(**(given | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixing": False},
        {"perturbation": None},
        {"aggregation": robust.get("median")},
        {"adversary": adversaries.get("sign-flip"), "adversaries": 1},
        {"adversary": adversaries.get("dirty-label"), "adversaries": 2},
        {"stop_accuracy": 0.2, "stop_epsilon": 50.0, "rounds": 6},
    ],
    ids=["default", "unmixed", "no-noise", "median", "sign-flip", "dirty-label", "stops"],
)
def test_as_simulated(changes, tmp_path):
    spec, books = training(**changes), MemoryLedger()
    expected, found = spec.run(ledger=books), simulate(spec, tmp_path)
    assert len(expected.selection.clients) > 2
    assert list(found.ledger.awards()) == list(books.awards())
    assert len(found.records) == len(expected.rounds)
    for one, other in zip(expected.rounds, found.records, strict=True):
        np.testing.assert_allclose(one.weights, other.weights, atol=1e-12)
        assert one.price_micros.tolist() == other.price_micros.tolist()
        assert one.metrics["accuracy"] == pytest.approx(other.metrics["accuracy"])
    np.testing.assert_allclose(found.parameters, expected.parameters, rtol=1e-9, atol=1e-12)
    if spec.perturbation is not None:
        for client, rho in expected.spent_rho.items():
            with DurableAccount.open(tmp_path / "owners" / f"owner-{client}.account.sqlite") as account:
                assert account.spent == pytest.approx(rho)


def test_a_client_who_misses_a_round_is_out_and_unpaid(stage):
    spec = training()
    missing = int(spec.select().clients[0])
    ready = stage(spec, train_seconds=0.3)
    asked = []

    def fails_once(message, honest):
        if message.metadata.message_type == "train":
            asked.append(message.metadata.group_id)
            return [] if message.metadata.group_id == "1" else honest()
        return honest()

    ready.grid.behaviour[missing] = fails_once
    played = ready.play()
    states = {award.owner: award.state for award in ready.ledger.awards()}
    assert states.pop(f"owner-{missing}") is AwardState.EXPIRED
    assert set(states.values()) == {AwardState.POSTED}
    assert asked == ["0", "1"]
    assert played.records[-1].weights[missing] == 0
    given = {release.award_id: release.guarantee.noise_multiplier for release in ready.ledger.releases()}
    assert given[f"task/0/{missing}"] > max(m for award, m in given.items() if award != f"task/0/{missing}")


def test_her_own_models_stay_at_home(stage):
    """What leaves is clipped around the public model and noised; her own parameters never appear in a message."""
    ready = stage(training())
    ready.play()
    own = {tuple(np.load(path)) for path in ready.folder.glob("owners/*.own/*.npy")}
    assert own
    for _, answers in ready.grid.seen:
        for answer in answers:
            if unpack(Delivery, answer) is not None:
                assert tuple(unpack_vector(answer)) not in own


def test_a_server_that_was_cut_off_goes_on(stage):
    spec = training()
    expected = spec.run()
    ready = stage(spec)

    class CutOff(Exception):
        pass

    def stop(record):
        if record.index == 1:
            raise CutOff

    with pytest.raises(CutOff):
        ready.play(progress=stop)
    played = ready.play()
    np.testing.assert_allclose(played.kind.parameters, expected.parameters, rtol=1e-9, atol=1e-12)
    assert {award.state for award in ready.ledger.awards()} == {AwardState.POSTED}


def test_costs_decide_who_is_chosen(stage):
    """The server's own figures are wrong; what clients report counts."""
    spec = training()
    ready = stage(spec)
    kind = dataclasses.replace(spec, costs=np.full(6, 399.0)).kind()
    KindStrategy(kind, ready.ledger, FileStore(ready.folder / "server")).start(ready.grid)
    assert kind.terms["costs"] == np.asarray(spec.costs).tolist()
    assert {award.owner for award in ready.ledger.awards()} == {f"owner-{i}" for i in spec.select().clients}
