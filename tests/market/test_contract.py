"""The proof that the seams are right: one market, whoever plays it, on whatever books, cut off anywhere.

Every kind, with softmax regression and with a PyTorch network: the same seed gives the same awards, money, releases and
model, bit for bit, in memory, on Flower and in the broker, with stores in memory, in files and in a database.
"""

import numpy as np
import pytest
from power_cuts import PowerCut, cut
from tiny_markets import CASES, MARKETS, market

from flmarket.engines import MemoryOwners, play
from flmarket.engines.config import MarketConfig
from flmarket.ledger import AwardState, MemoryLedger, SqlLedger
from flmarket.market import FileStore, MemoryStore, Rounds, kinds
from flmarket.market.record import close_records


def spec_of(kind, model="softmax", **changes):
    return MarketConfig.parse(market(kind, model, **changes)).spec()


def told(ledger, task="t"):
    """What the books say: awards as they ended, releases, balances of owners; without the task's own name."""
    tail = lambda identifier: identifier.removeprefix(f"{task}/")  # noqa: E731
    awards = [one for one in ledger.awards() if one.id.startswith(f"{task}/") and tail(one.id)[0].isdigit()]
    ends = [(tail(a.id), a.round_index, a.loss, a.price_micros, a.state, a.reason) for a in awards]
    known = {award.id for award in awards}
    given = [(tail(r.award_id), r.mechanism, r.guarantee) for r in ledger.releases() if r.award_id in known]
    return sorted(ends, key=str), sorted(given, key=str)


def same_records(one, two):
    for first, second in zip(one, two, strict=True):
        for name in ("bidders", "price_micros", "loss", "weights", "data_size"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
        assert (first.state, first.reason, first.budget_micros) == (second.state, second.reason, second.budget_micros)
        assert (first.metrics, first.currency) == (second.metrics, second.currency)


@pytest.fixture(scope="module")
def alone():
    """Each market as it is played in memory, once."""
    played = {}

    def find(kind, model):
        if (kind, model) not in played:
            ledger = MemoryLedger()
            rounds, _ = play(spec_of(kind, model), ledger=ledger)
            ledger.verify()
            played[kind, model] = rounds, told(ledger)
        return played[kind, model]

    return find


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_something_happens(kind, model, alone):
    rounds, (awards, releases) = alone(kind, model)
    assert len(rounds.records) == 3
    assert any(state is AwardState.POSTED for *_, state, _ in awards)
    assert bool(releases) == (kind != "sampling")
    assert (rounds.kind.parameters != spec_of(kind, model).kind().parameters).any()


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_stores_make_no_difference(kind, model, alone, tmp_path):
    rounds, books = alone(kind, model)
    with SqlLedger(f"sqlite:///{tmp_path}/l.db") as ledger:
        again, _ = play(spec_of(kind, model), ledger=ledger, store=FileStore(tmp_path / "rounds"))
        ledger.verify()
        assert told(ledger) == books
    same_records(again.records, rounds.records)
    np.testing.assert_array_equal(again.kind.buyers_model, rounds.kind.buyers_model)


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_flower_makes_no_difference(kind, model, alone, tmp_path):
    pytest.importorskip("flwr")
    from flmarket.engines.flower import simulate

    rounds, books = alone(kind, model)
    ledger = MemoryLedger()
    flower = simulate(spec_of(kind, model), tmp_path, ledger=ledger)
    close_records()
    assert told(ledger) == books
    same_records(flower.records, rounds.records)
    np.testing.assert_array_equal(flower.parameters, rounds.kind.parameters)


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_the_broker_makes_no_difference(kind, model, alone, tmp_path):
    pytest.importorskip("fastapi")
    from in_broker import played_in_broker

    from flmarket.broker.tables import vector

    rounds, books = alone(kind, model)
    with played_in_broker(tmp_path, market(kind, model)) as (broker, row):
        np.testing.assert_array_equal(vector(row.parameters), rounds.kind.buyers_model)
        assert row.spent_micros == sum(record.spent_micros for record in rounds.records)
        assert told(broker.books.ledger, row.id) == books


STEPS = [(where, name) for where, names in (
    (FileStore, ("save_plan", "save_deliveries", "save_round")),
    (SqlLedger, ("deposit", "hold_many", "resolve_many")),
) for name in names]  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("where", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("kind", MARKETS)
def test_a_power_cut_at_any_step_ends_in_the_same_books(kind, where, name, after, alone, tmp_path, monkeypatch):
    """In the first round and in a later one; whoever goes on knows nothing but ledger and store."""
    rounds, books = alone(kind, "softmax")
    for skip in (0, 1):
        folder = tmp_path / str(skip)
        folder.mkdir()
        spec = spec_of(kind)
        with SqlLedger(f"sqlite:///{folder}/l.db") as ledger:
            with monkeypatch.context() as patch:
                cut(patch, where, name, after=after, skip=skip)
                try:
                    Rounds(spec.kind(), MemoryOwners(spec), ledger, FileStore(folder / "s")).play()
                except PowerCut:
                    pass
                else:
                    assert skip, "the cut came"  # in some kinds a step happens once
            again = Rounds(spec.kind(), MemoryOwners(spec), ledger, FileStore(folder / "s"))
            again.play()
            ledger.verify()
            assert told(ledger) == books
        np.testing.assert_array_equal(again.kind.parameters, rounds.kind.parameters)


def test_a_store_that_forgets_a_delivery_is_noticed(alone, tmp_path):
    """A planted cheat: what this suite compares would differ."""

    class Forgets(MemoryStore):
        def save_deliveries(self, index, vectors):
            super().save_deliveries(index, dict(list(vectors.items())[:-1]))

        def deliveries(self, index):
            return dict(self._updates)

    spec, ledger = spec_of("auction"), MemoryLedger()
    forgetful = Rounds(spec.kind(), MemoryOwners(spec), ledger, Forgets())
    forgetful.updates = {}
    for index in range(3):
        for step in forgetful.steps(index):
            if step == "updates":
                forgetful.updates = forgetful.store.deliveries(index)
    assert told(ledger) != alone("auction", "softmax")[1]


def test_every_registered_kind_is_in_this_suite():
    assert set(MARKETS) == set(kinds.names())
