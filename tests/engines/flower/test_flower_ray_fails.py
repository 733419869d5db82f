"""Ray that dies, hangs or never starts ends a run by a typed error; the backends here are planted ones."""

import threading

import pytest

from flmarket.engines.flower import FileStore, KindStrategy, client_app
from flmarket.engines.flower.play import Dealer, RayFailed, play_on_ray, store_spec
from flmarket.ledger import AwardState, MemoryLedger

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Backend:
    """Flower's backend without Ray: the app is called in the worker's thread, until `dies` says otherwise."""

    num_workers = 1
    answers = 10**9  # it dies after so many
    starts = True
    released = threading.Event()

    def __init__(self, config):
        pass

    def build(self, app_fn):
        if not self.starts:
            raise ValueError("no room for actors")
        self.app = app_fn()

    def process_message(self, message, context):
        type(self).answers -= 1
        if type(self).answers < 0:
            self.die()
        return self.app(message, context), context

    def die(self):
        self.released.wait(60)  # as a call that Ray never answers
        raise RuntimeError("released")

    def terminate(self):
        pass


class Dies(Backend):
    """Every call fails, as those to a dead actor do."""

    def die(self):
        raise RuntimeError("the actor died")


@pytest.fixture
def run(market, tmp_path, monkeypatch):
    from flwr.server.superlink.fleet.vce.backend import raybackend

    spec = market().simulation()
    ledger = MemoryLedger()

    def go(backend, seconds=120.0, **changes):
        planted = type("Planted", (backend,), {"released": threading.Event(), **changes})
        monkeypatch.setattr(raybackend, "RayBackend", planted)
        store, deadlines = FileStore(tmp_path / "server"), {"bid_seconds": seconds, "train_seconds": seconds}
        played = KindStrategy(spec.kind(), ledger, store, nodes=5, **deadlines)
        app = client_app(Dealer(store_spec(spec, tmp_path), tmp_path / "owners"))
        try:
            play_on_ray(played, app, 5, patience=1.0 if seconds < 10 else 60.0)
        finally:
            planted.released.set()
        return played

    return go, spec, ledger


def test_a_backend_that_lives_plays_the_market(run):
    go, spec, _ = run
    played = go(Backend)
    assert [record.state for record in played.records] == [record.state for record in spec.run().rounds]


@pytest.mark.parametrize("answers", [0, 7])
@pytest.mark.parametrize("backend", [Backend, Dies])
def test_a_backend_that_dies_ends_the_run_and_it_can_be_taken_up(run, backend, answers):
    """Before the first bid, and between bids and deliveries of the first round."""
    go, spec, ledger = run
    with pytest.raises(RayFailed, match="the actor died" if backend is Dies and not answers else "answered|ended"):
        go(backend, seconds=2.0, answers=answers)
    assert sum(ledger.balances().values()) == 0
    played = go(Backend)
    assert len(played.records) == spec.task.rounds
    assert not [award for award in ledger.awards() if award.state is AwardState.PENDING]
    ledger.verify()


def test_a_backend_that_does_not_start_ends_the_run(run):
    go, _, ledger = run
    with pytest.raises(RayFailed, match="no room for actors"):
        go(Backend, seconds=2.0, starts=False)
    assert not list(ledger.awards())
