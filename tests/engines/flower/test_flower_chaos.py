"""A crash between any two steps of the protocol, at the server or at an owner, and then on from the files.

Every call that the server makes to ledger or store, every file that the store writes, and every write on an owner's
machine, gets a fuse: the process "dies" just before or just after it. A dead server loses everything in memory; the
next one has only the ledger's database and the folder. A dead owner loses her answer.
"""

import shutil
from collections import Counter

import numpy as np
import pytest

from flmarket.engines.flower import FileStore
from flmarket.ledger import AwardState, DurableAccount, EntryKind, Resolution, SqlLedger
from flmarket.ledger.journal import BANK
from flmarket.market.kinds import AuctionKind
from flmarket.market.record import OwnerJournal


class Dies(BaseException):
    """The process is gone; not an Exception, so nothing handles it."""


class Fuse:
    """Counts steps and blows at one of them."""

    def __init__(self, at=None):
        self.step, self.at = 0, at

    def __call__(self):
        self.step += 1
        if self.step == self.at:
            raise Dies


class Wired:
    """An object whose every call passes a fuse before and after."""

    def __init__(self, inner, fuse):
        self._inner, self._fuse = inner, fuse

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*arguments, **options):
            self._fuse()
            result = value(*arguments, **options)
            self._fuse()
            return result

        return call


class FusedStore(FileStore):
    """Also between the files of one call: those of a finished round are its record, the checkpoint, and what goes."""

    def __init__(self, folder, fuse):
        super().__init__(folder)
        self._fuse = fuse

    def _write(self, *arguments, **options):
        super()._write(*arguments, **options)
        self._fuse()

    def tidy(self, next_round):
        super().tidy(next_round)
        self._fuse()


@pytest.fixture(scope="module")
def empty_ledger(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "empty.db"
    with SqlLedger(f"sqlite:///{path}") as ledger:
        ledger.verify()
    return path


def start(ready, fuse=None):
    """A server process: new objects on the same files."""
    with SqlLedger(f"sqlite:///{ready.folder / 'ledger.db'}") as ledger:
        store = FileStore(ready.folder / "server") if fuse is None else FusedStore(ready.folder / "server", fuse)
        try:
            wired = [ledger, store] if fuse is None else [Wired(ledger, fuse), Wired(store, fuse)]
            return ready.play(ledger=wired[0], store=wired[1])
        finally:
            store.unlock()


@pytest.fixture
def scene(market, stage, empty_ledger):
    """Three owners, two rounds; the noise is seeded, so the undisturbed run is known exactly."""
    spec = market(task={"rounds": 2, "bidders_per_round": 3}, data={"owners": 3}).simulation()

    def make(name, **options):
        ready = stage(spec, str(name), **options)
        shutil.copy(empty_ledger, ready.folder / "ledger.db")
        return ready

    return make


def first_winner(spec):
    """An owner who wins in the first round when all is well."""
    record = spec.run().rounds[0]
    return int(record.bidders[np.flatnonzero(record.epsilon)[0]])


def check_books(ready):
    """What must hold whatever happened; returns the awards."""
    with SqlLedger(f"sqlite:///{ready.folder / 'ledger.db'}") as ledger:
        ledger.verify()
        assert sum(ledger.balances().values()) == 0
        awards = {award.id: award for award in ledger.awards()}
        assert ledger.balance("escrow") == 0
        assert -ledger.balance(BANK) == sum(b for a, b in ledger.balances().items() if a != BANK)
        paid = Counter(entry.line.ref for entry in ledger.entries() if entry.line.kind is EntryKind.POSTED)
        recorded = {release.award_id for release in ledger.releases()}
    posted = {award for award, one in awards.items() if one.state is AwardState.POSTED}
    assert paid == dict.fromkeys(posted, 1)
    assert posted <= recorded
    released = set()
    for owner in range(ready.spec.partition.owners):
        path = ready.folder / "owners" / f"owner-{owner}.account.sqlite"
        if path.exists():
            with DurableAccount.open(path) as account:
                mine = [release.award_id for release in account.releases()]
                assert len(mine) == len(set(mine))
                assert account.spent <= account.cap.epsilon * (1 + 1e-12)
                released |= set(mine)
    assert posted <= released, "nobody is paid who did not release"
    return awards, posted, released


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_server_dies_at_any_step_and_the_next_one_goes_on(part, scene):
    """Each part tries every fourth step. The run ends as the undisturbed one does, to the last bit."""
    quiet = Fuse()
    expected = start(scene("quiet"), quiet)
    assert quiet.step > 50
    for step in range(1 + part, quiet.step + 1, 4):
        ready = scene(step)
        with pytest.raises(Dies):
            start(ready, Fuse(step))
        played = start(ready)
        _, posted, released = check_books(ready)
        assert posted == released, f"step {step}: everybody who released was paid"
        np.testing.assert_array_equal(played.kind.parameters, expected.kind.parameters, err_msg=f"step {step}")
        assert [record.state for record in played.records] == [record.state for record in expected.records]
        assert [record.metrics for record in played.records] == [record.metrics for record in expected.records]


def test_the_server_dies_again_and_again(scene):
    """Every start gets a few steps further at best; in the end everything is paid once."""
    ready, expected = scene("again"), start(scene("quiet"))
    for attempt in range(200):
        try:
            played = start(ready, Fuse(20 + 7 * attempt % 40))
            break
        except Dies:
            continue
    _, posted, released = check_books(ready)
    assert posted == released
    np.testing.assert_array_equal(played.kind.parameters, expected.kind.parameters)


OWNER_WRITES = [(OwnerJournal, "make_offer"), (OwnerJournal, "claim"), (DurableAccount, "charge"),
                (OwnerJournal, "keep")]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("store", "write"), OWNER_WRITES, ids=[write for _, write in OWNER_WRITES])
def test_an_owner_dies_at_any_write(store, write, when, scene, monkeypatch):
    """Her award expires, or is never made; what she began she does not begin again; the others are paid."""
    ready = scene("owner", bid_seconds=0.5, train_seconds=0.5)
    honest, dead, victim = getattr(store, write), [], first_winner(ready.spec)

    def dies_once(self, *arguments):
        if f"owner-{victim}." in str(self.path) and not dead:
            dead.append(write)
            if when == "after":
                honest(self, *arguments)
            raise Dies
        return honest(self, *arguments)

    monkeypatch.setattr(store, write, dies_once)

    def machine(message, answer):
        try:
            return answer()
        except Dies:
            return []

    ready.grid.behaviour[victim] = machine
    played = start(ready)
    assert dead
    awards, posted, released = check_books(ready)
    assert len(played.records) == 2
    assert any(record.valid for record in played.records)
    mine = {award for award in released if award.endswith(f"/{victim}")}
    lost = mine - posted
    assert len(lost) <= 1, "one release at most is lost with her"
    if (write, when) in {("charge", "after"), ("keep", "before"), ("keep", "after")}:
        assert len(lost) == 1
        assert awards[lost.pop()].state is AwardState.EXPIRED


def test_a_lost_delivery_is_fetched_by_the_next_server(scene):
    """All owners released; the server died before it read a single answer. Nobody releases twice, all are paid."""
    ready = scene("fetch")
    pull, trained = ready.grid.pull_messages, []

    def deaf(identifiers):
        if any(message.metadata.message_type == "train" for message, _ in ready.grid.seen):
            raise Dies
        return pull(identifiers)

    ready.grid.pull_messages = deaf
    with pytest.raises(Dies):
        start(ready)
    trained = [m for m, _ in ready.grid.seen if m.metadata.message_type == "train"]
    assert trained
    ready.grid.pull_messages, ready.grid.seen = pull, []
    start(ready)
    kinds = Counter(m.metadata.message_type for m, _ in ready.grid.seen if m.metadata.group_id == "0")
    assert kinds["query.release"] == len(trained)
    assert kinds["train"] == 0
    _, posted, released = check_books(ready)
    assert posted == released


def test_a_release_for_a_dead_servers_late_order_is_paid(scene):
    """The dead server's order reaches an owner after the next server asked what she has: she refuses the new order."""
    ready = scene("late")
    push = ready.grid.push_messages
    held = []

    def lost(messages):
        held.extend(m for m in messages if m.metadata.message_type == "train")
        if held:
            raise Dies
        return push(messages)

    ready.grid.push_messages = lost
    with pytest.raises(Dies):
        start(ready)

    def late(messages):
        if any(m.metadata.message_type == "train" for m in messages) and held:
            old, held[:] = list(held), []
            push(old)
        return push(messages)

    ready.grid.push_messages = late
    played = start(ready)
    _, posted, released = check_books(ready)
    assert posted == released
    assert all(record.valid for record in played.records)


def test_a_server_that_pays_without_delivery_would_be_seen(scene, monkeypatch):
    """The planted cheat: everything that was awarded is posted, also what never came."""
    monkeypatch.setattr(
        AuctionKind,
        "resolutions",
        lambda self, plan, updates, awards: [Resolution(order.award, AwardState.POSTED) for order in plan.orders],
    )
    ready = scene("cheat", train_seconds=0.3)
    victim = first_winner(ready.spec)
    ready.grid.behaviour[victim] = lambda message, honest: [] if message.metadata.message_type == "train" else honest()
    start(ready)
    with pytest.raises(AssertionError):
        check_books(ready)
