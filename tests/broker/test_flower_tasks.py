"""Tasks on Flower: a run plays them on the broker's books. In one process, cut off anywhere; and on real processes."""

import io
import json
import logging
import math
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import update

pytest.importorskip("flwr")

from brokers import await_true
from power_cuts import PowerCut, cut, swap

from flmarket.broker.books import Books
from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict
from flmarket.broker.office import ledger, offers, parties, statements, tasks
from flmarket.broker.requests import order_of
from flmarket.broker.settings import Settings
from flmarket.broker.tables import FlowerRun, Lease, TaskRow
from flmarket.broker.work import rounds as rounds_module
from flmarket.broker.work.flower import runs, server
from flmarket.broker.work.flower.server import play_task
from flmarket.broker.work.flower.tenancy import Replaced, Tenancy, at_work
from flmarket.broker.work.rounds import SqlStore
from flmarket.broker.work.worker import Worker
from flmarket.engines.config import MarketConfig
from flmarket.engines.flower import FileStore, InProcessGrid, KindStrategy, client_app
from flmarket.engines.flower.messages import BID, TRAIN, Delivery, reply, unpack, unpack_vector
from flmarket.engines.flower.play import Dealer, store_spec
from flmarket.errors import InvalidInput
from flmarket.ledger import (
    ESCROW,
    Award,
    AwardState,
    DurableAccount,
    LedgerUnavailable,
    MemoryLedger,
    Receipt,
    Release,
    SealedReceipt,
    SqlLedger,
)
from flmarket.market import Announcement, Bid
from flmarket.market.record import close_records
from flmarket.privacy import ApproxDp, PureDp, RecordLevel, analytic_gaussian_sigma

logging.getLogger("flwr").setLevel(logging.CRITICAL)

OWNERS = 3
AT_HOME = {
    "seed": 5,
    "task": {"name": "at-home", "rounds": 3, "bidders_per_round": OWNERS, "budget_per_round": 100.0},
    "data": {"name": "breast-cancer", "owners": OWNERS, "partition": "equal"},
    "owners": {"valuations": ["linear"], "rate": [0.005, 0.01], "privacy_budget": [0.5, 0.9], "privacy_cap": 50.0},
}
SOLD = MarketConfig.parse(AT_HOME)
OF_RECORDS = {"unit": "record", "auction": "all-in"}
RECORDS_SOLD = MarketConfig.parse(
    AT_HOME | {"mechanism": OF_RECORDS, "owners": AT_HOME["owners"] | {"privacy_cap_delta": 1e-5}}
)


class Grid(InProcessGrid):
    """Owners' nodes in this process; `before[owner](message)` may say what is answered instead."""

    def __init__(self, folder, sold=SOLD):
        spec = sold.simulation()
        super().__init__(client_app(Dealer(store_spec(spec, folder), folder / "owners")), OWNERS)
        self.before = {}

    def answer(self, message):
        owner = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        instead = self.before[owner](message) if owner in self.before else None
        return super().answer(message) if instead is None else instead


class Stage:
    """A broker with a Flower task, three owners with nodes, and Flower's commands played by this test."""

    def __init__(self, url, folder, joined, order, monkeypatch, sold=SOLD, **changes):
        self.settings = Settings(
            database_url=url, run_worker=False, superlink="test", flower_folder=folder / "runs",
            flower_bid_seconds=0.3, flower_train_seconds=0.3,  # whoever answers here does so at once
        )  # fmt: skip
        self.broker = Broker.open(self.settings)
        self.buyer = joined(self.broker, "buyer").party
        self.desk = joined(self.broker, "operator").party
        self.owners = [joined(self.broker, "owner", f"owner {i}").party for i in range(OWNERS)]
        self.grid = Grid(folder, sold)
        for owner, node in zip(self.owners, self.grid.contexts, strict=True):
            parties.bind_node(self.broker, self.desk, owner.id, node_id=str(node))
        self.commands, self.answers = [], True
        swap(monkeypatch, runs, "_flwr", self._flwr)
        self.task_id = self.post(order, **changes)

    def post(self, order, **changes):
        values = {"engine": "flower", "rounds": 3, "bidders_per_round": OWNERS, "seed": 5, **changes}
        return tasks.post_task(self.broker, self.buyer, order(**values)).id

    def _flwr(self, said, *arguments):
        self.commands.append(arguments)
        said.write_text("Successfully\n" + json.dumps({"run-id": "7"}) if self.answers else "no answer")
        return subprocess.Popen(["true" if self.answers else "false"])

    def look(self, looks=2):
        """The worker sees to the task, as often as it takes to start a run and hear that it was started."""
        worker = Worker(self.broker)
        for _ in range(looks):
            with self.broker.database.write() as session:
                session.execute(update(TaskRow).values(next_at=0))
            worker.step()
            worker._flower.join()
        worker.stop()
        return self.task()

    def lapse(self):
        """What a dead run and a dead worker leave behind, later."""
        with self.broker.database.write() as session:
            session.execute(update(FlowerRun).values(expires_at=0, submitted_at=1))
            session.execute(update(Lease).values(expires_at=0))

    def play(self, **options):
        """The run that was started."""
        self.look()
        with self.broker.database.read() as session:
            attempt = session.get_one(FlowerRun, self.task_id).attempt
        play_task(self.broker, self.grid, self.task_id, attempt, **options)

    def finish(self):
        self.play()
        return self.look()

    def task(self):
        return tasks.get_task(self.broker, self.buyer, self.task_id)

    def run(self):
        with self.broker.database.read() as session:
            return session.get_one(FlowerRun, self.task_id)

    def awards(self):
        return [award for award in self.broker.books.ledger.awards() if award.id.startswith(f"{self.task_id}/")]

    def books(self):
        """Everything that must come out the same."""
        kept = self.broker.books.ledger
        return (
            sorted(
                (a.id.partition("/")[2], a.state, a.price_micros, a.epsilon, a.reason)
                for a in self.awards() if not a.id.endswith("refund")
            ),
            self.task().state,
            [(one.accuracy, one.spent_micros, one.delivered, one.state) for one in self.rounds()],
            [(kept.balance(one.id), kept.privacy_spent(one.id)) for one in self.owners],
            [(kept.earned_micros, kept.awards) for kept in map(self.statement, self.owners)],
        )  # fmt: skip

    def rounds(self):
        return tasks.rounds(self.broker, self.buyer, self.task_id).items

    def statement(self, owner):
        return statements.statement(self.broker, owner)

    def check(self):
        """What holds however a task ended."""
        kept, task = self.broker.books.ledger, self.task()
        assert ledger.verify(self.broker, self.desk).ok
        assert kept.balance(ESCROW) == kept.balance(self.task_id) == 0
        assert tasks.bill(self.broker, self.buyer, self.task_id).left_micros == 0
        assert task.spent_micros + task.refunded_micros == task.escrow_micros
        assert task.spent_micros == sum(one.spent_micros for one in self.rounds())
        for owner in self.owners:
            said = self.statement(owner)
            assert said.earned_micros == kept.balance(owner.id)
            assert said.privacy.spent_epsilon_total <= said.privacy.cap_epsilon_total * (1 + 1e-9)
        assert not [award for award in self.awards() if award.state is AwardState.PENDING]


@pytest.fixture
def stage(tmp_path, joined, order, monkeypatch):
    """On SQLite; stage(url=…) elsewhere."""
    made = []

    def make(url=None, **changes):
        made.append(Stage(url or f"sqlite:///{tmp_path}/b.db", tmp_path / "f", joined, order, monkeypatch, **changes))
        return made[-1]

    yield make
    for one in made:
        one.broker.close()
    close_records()


def kind_of(message):
    return message.metadata.message_type


def test_a_run_plays_the_task_on_the_brokers_books(url, stage, tmp_path):
    one = stage(url)
    task = one.finish()
    assert (task.state, task.rounds_done) == ("finished", 3)
    one.check()
    assert not list(one.settings.flower_folder.rglob("broker.json"))  # it may hold a password
    # the same market without a broker pays the same
    alone = KindStrategy(
        one.broker.simulations.build(one.task_id, order_of(task.request)).kind(), MemoryLedger(),
        FileStore(tmp_path / "alone"), bid_seconds=5.0, train_seconds=5.0,
    )  # fmt: skip
    alone.start(Grid(tmp_path / "other"))
    assert [one.spent_micros for one in one.rounds()] == [record.spent_micros for record in alone.records]
    assert [one.accuracy for one in one.rounds()] == [record.metrics["accuracy"] for record in alone.records]
    assert task.spent_micros > 0
    # what people read
    kinds = [event.kind for event in tasks.events(one.broker, one.buyer, one.task_id)]
    assert kinds == ["queued", "running", *["open", "bids", "awards", "updates", "settled"] * 3, "finished"]
    for index in range(3):
        page = tasks.receipts(one.broker, one.buyer, one.task_id, index)
        for receipt in page.items:
            SealedReceipt.from_dict(receipt.document).check()
        for receipt in tasks.receipts(one.broker, one.desk, one.task_id, index).items:
            Receipt.from_dict(receipt.document).check()
        assert len(page.items) == len(tasks.round_detail(one.broker, one.buyer, one.task_id, index).awards) > 0
    model = tasks.model(one.broker, one.buyer, one.task_id)
    with np.load(io.BytesIO(model.content)) as saved:
        assert saved["weights"].size + saved["biases"].size == task.dimension
    # what the owners' own machines remember is what the broker's books say
    for number, owner in enumerate(one.owners):
        said = one.statement(owner)
        with DurableAccount.open(tmp_path / "f" / "owners" / f"owner-{number}.account.sqlite") as home:
            assert [release.award_id for release in home.releases()] == [item.award_id for item in said.releases]
            assert home.spent == pytest.approx(said.privacy.spent_epsilon_total)


POINTS = [  # what, and how many calls of it belong to the first round
    (rounds_module, "open_round", 1),
    (SqlStore, "save_plan", 1),
    (SqlLedger, "hold_many", 1),
    (rounds_module, "award_round", 1),
    (SqlStore, "save_deliveries", 1),
    (rounds_module, "add_event", 8),  # of five a round, the one for its deliveries
    (SqlLedger, "resolve_many", 1),
    (SqlStore, "save_round", 1),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, joined, order):
    """What the task ends with when nothing happens."""
    folder = tmp_path_factory.mktemp("calm")
    with pytest.MonkeyPatch.context() as patch:
        one = Stage(f"sqlite:///{folder}/b.db", folder / "f", joined, order, patch, rounds=2)
        one.finish()
        one.check()
        one.broker.close()
        close_records()
        return one.books()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("where", "name", "skip"), POINTS, ids=[name for _, name, _ in POINTS])
def test_power_cut_at_every_step(stage, monkeypatch, undisturbed, where, name, skip, after):
    """In the second round, before and after each thing that is written; another run goes on."""
    one = stage(rounds=2)
    with monkeypatch.context() as patch:
        cut(patch, where, name, after=after, skip=skip)
        with pytest.raises(PowerCut):
            one.play()
    assert one.task().rounds_done in (1, 2)
    one.lapse()
    one.look() if one.task().rounds_done == 2 else one.finish()
    assert one.books() == undisturbed
    one.check()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_power_cut_while_a_task_is_closed(stage, monkeypatch, undisturbed, after):
    one = stage(rounds=2)
    one.play()
    with monkeypatch.context() as patch:
        cut(patch, Books, "refund", after=after, skip=0)
        with pytest.raises(PowerCut):
            one.look()
    one.lapse()
    one.look()
    assert one.books() == undisturbed
    one.check()


def test_power_cut_on_the_other_database(url, stage, monkeypatch, undisturbed):
    one = stage(url, rounds=2)
    with monkeypatch.context() as patch:
        cut(patch, SqlLedger, "resolve_many", after=True, skip=1)
        with pytest.raises(PowerCut):
            one.play()
    one.lapse()
    one.look() if one.task().rounds_done == 2 else one.finish()
    assert one.books() == undisturbed
    one.check()


def test_a_sale_elsewhere_voids_one_award_and_not_the_run(url, stage):
    """She sells in another task between her bid and her delivery: the ledger refuses, her award is void."""
    one = stage(url)
    seller = one.owners[1]
    statements.set_cap(one.broker, seller, 1.0)
    kept = one.broker.books.ledger

    def sell_elsewhere(message):
        if kind_of(message) == TRAIN and kept.privacy_spent(seller.id) < 0.9:
            kept.hold(Award("elsewhere/0/1", 0, one.buyer.id, seller.id, 0.9, 1))
            kept.release(Release("elsewhere/0/1", "laplace", PureDp(0.9)))
            kept.post("elsewhere/0/1")

    one.grid.before[1] = sell_elsewhere
    assert one.finish().state == "finished"
    first = tasks.round_detail(one.broker, one.desk, one.task_id, 0)
    states = {award.slot: award.state for award in first.awards}
    assert states == {0: "posted", 1: "voided", 2: "posted"}
    (void,) = [award for award in first.awards if award.state == "voided"]
    assert "past the registered cap" in void.reason
    # afterwards she is asked for what is left to her, and no more
    later = [a for i in (1, 2) for a in tasks.round_detail(one.broker, one.desk, one.task_id, i).awards if a.slot == 1]
    assert sum(award.epsilon for award in later) <= 0.1 + 1e-9
    assert kept.privacy_spent(seller.id) <= 1.0
    assert ledger.verify(one.broker, one.desk).ok


def test_a_registered_cap_cuts_bids(stage):
    one = stage(mechanism={"auction": "all-in"})  # whatever she offers is bought, so all that her cap leaves her
    statements.set_cap(one.broker, one.owners[0], 0.3)
    assert one.finish().state == "finished"
    sold = [award.epsilon for award in one.awards() if award.owner == one.owners[0].id and award.epsilon]
    assert sold
    assert 0.29 < sum(sold) <= 0.3
    one.check()


def home_of(tmp_path, number):
    return DurableAccount.open(tmp_path / "f" / "owners" / f"owner-{number}.account.sqlite")


def test_records_are_sold_by_owners_whose_registered_caps_count_them(stage, tmp_path):
    """One of the three is capped tightly here, and one's cap counts whole updates: she is left out."""
    one = stage(sold=RECORDS_SOLD, mechanism=OF_RECORDS)
    kept = one.broker.books.ledger
    for owner, most in ((one.owners[0], 8.0), (one.owners[1], 1.0)):
        said = statements.set_cap(one.broker, owner, most, unit="record")
        assert (said.unit, said.delta, said.cap_epsilon_total) == ("record", 1e-5, most)
        assert "any one of your records" in said.words
    assert one.finish().state == "finished"
    one.check()
    sold = {number: [a for a in one.awards() if a.owner == one.owners[number].id] for number in range(OWNERS)}
    assert [len(sold[0]), len(sold[2])] == [3, 0]
    for number in (0, 1):
        owner, awards = one.owners[number], sold[number]
        assert {(type(a.loss), a.loss.loss.delta) for a in awards} == {(RecordLevel, 1e-5)}
        said = one.statement(owner)
        assert said.releases[-1].epsilon_total == pytest.approx(said.privacy.spent_epsilon_total, abs=1e-9)
        with home_of(tmp_path, number) as home:
            assert len(list(home.releases())) == len(awards)
            assert home.spent == pytest.approx(kept.privacy_spent(owner.id))
    # three Gaussian releases of ε each at δ: more than one of them and less than their sum, for it is ρ that adds up
    spent, each = kept.privacy_spent(one.owners[0].id), sold[0][0].loss.loss.epsilon
    rho = 3 / (2 * analytic_gaussian_sigma(epsilon=each, delta=1e-5, sensitivity=1.0) ** 2)
    assert each < spent < min(3 * each, rho + 2 * math.sqrt(rho * math.log(1e5)))
    with home_of(tmp_path, 1) as home:  # cut here, and not at home, where there is room for more
        assert 0.5 < home.spent <= 1.0 + 1e-9
        assert home.cap == RecordLevel(ApproxDp(50.0, 1e-5))
    # what was sold settles the unit
    with pytest.raises(Conflict, match="of its own"):
        statements.set_cap(one.broker, one.owners[0], 50.0, unit="update")
    with pytest.raises(Conflict, match="already"):
        statements.set_cap(one.broker, one.owners[0], 0.1)
    assert statements.set_cap(one.broker, one.owners[0], 9.0).unit == "record"


def test_whole_updates_are_not_bought_from_accounts_of_records(stage, order, cheap_bid):
    """Neither from a node, nor for a standing bid; and no simulated task takes registered owners for records."""
    one = stage()
    statements.set_cap(one.broker, one.owners[1], 8.0, unit="record", delta=1e-6)
    assert one.finish().state == "finished"
    sellers = {a.owner for a in one.awards() if not a.id.endswith(("refund", "escrow"))}
    assert sellers == {one.owners[0].id, one.owners[2].id}
    simulated = one.post(order, engine="simulation")
    with pytest.raises(Conflict, match="whole updates"):
        offers.place_bid(one.broker, one.owners[1], simulated, cheap_bid())
    with pytest.raises(InvalidInput, match=r"broker\.open.*own machines"):
        one.post(order, engine="simulation", mechanism=OF_RECORDS)
    with pytest.raises(InvalidInput, match="delta"):
        statements.set_cap(one.broker, one.owners[0], 8.0, delta=1e-5)
    with pytest.raises(InvalidInput, match="trust"):  # a remedy that can be followed
        one.post(order, trust="secure-aggregation")


def test_bad_updates_cost_the_liar_and_nobody_else(stage):
    one = stage()

    def nonsense(message):
        if kind_of(message) != TRAIN:
            return None
        (answer,) = InProcessGrid.answer(one.grid, message)
        broken = np.full_like(unpack_vector(answer), np.nan)
        return [reply(unpack(Delivery, answer), message, broken)]

    one.grid.before[2] = nonsense
    assert one.finish().state == "finished"
    said = one.statement(one.owners[2])
    assert said.earned_micros == 0
    assert {item.reason for item in said.releases} == {"bad update: not finite"}
    assert said.privacy.spent_epsilon_total == pytest.approx(sum(item.epsilon for item in said.releases))
    assert one.statement(one.owners[0]).earned_micros > 0
    one.check()


@pytest.mark.parametrize("why", ["cancelled", "expired"])
def test_a_task_ends_between_rounds(stage, why):
    one = stage()

    def stop(message):
        call = unpack(Announcement, message) if kind_of(message) == BID else None
        if call is not None and call.round_index == 1:
            if why == "cancelled":
                tasks.cancel_task(one.broker, one.buyer, one.task_id)
            else:
                with one.broker.database.write() as session:
                    session.get_one(TaskRow, one.task_id).deadline_at = 1

    one.grid.before[0] = stop
    task = one.finish()
    assert (task.state, task.rounds_done) == (why, 2)
    assert task.refunded_micros > 0
    one.check()


@pytest.mark.parametrize(
    ("name", "rounds"), [("save_plan", 1), ("hold_many", 1), ("add_event", 2), ("save_deliveries", 2)]
)
def test_a_cancelled_task_whose_run_is_gone(stage, monkeypatch, name, rounds):
    """A round that nobody was asked to deliver in is voided; one with orders out is played to its end."""
    one = stage()
    where = {"hold_many": SqlLedger, "add_event": rounds_module}.get(name, SqlStore)
    with monkeypatch.context() as patch:
        cut(patch, where, name, after=True, skip=8 if name == "add_event" else 1)
        with pytest.raises(PowerCut):
            one.play()
    tasks.cancel_task(one.broker, one.buyer, one.task_id)
    one.lapse()
    task = one.look()
    if rounds == 2:
        assert task.state == "running"
        task = one.finish()
    assert (task.state, task.rounds_done) == ("cancelled", rounds)
    one.check()


@pytest.mark.parametrize(
    "point",
    [None, (runs, "resolve_each"), (rounds_module, "void_round"), (SqlLedger, "resolve_many"), (Books, "refund")],
)
def test_a_run_that_keeps_dying_fails_the_task_and_deliveries_are_paid(stage, monkeypatch, point):
    """Also if the worker dies while it closes the task."""
    one = stage()
    with monkeypatch.context() as patch:
        cut(patch, SqlLedger, "resolve_many", after=False, skip=1)  # the second round has two deliveries
        one.grid.before[1] = lambda message: [] if kind_of(message) == TRAIN and one.task().rounds_done else None
        with pytest.raises(PowerCut):
            one.play()
    paid = {owner.id: one.broker.books.ledger.balance(owner.id) for owner in one.owners}
    for _ in range(one.settings.flower_tries):
        assert one.task().state == "running"
        one.lapse()
        one.look()
    one.lapse()
    if point is not None:
        with monkeypatch.context() as patch:
            cut(patch, *point, after=True, skip=0)
            with pytest.raises(PowerCut):
                one.look()
        one.lapse()
    task = one.look()
    assert task.state == "failed"
    assert "without settling a round" in task.error
    second = {a.slot: a.state for a in tasks.round_detail(one.broker, one.desk, one.task_id, 1).awards}
    assert second == {0: "posted", 1: "voided", 2: "posted"}
    assert [one.broker.books.ledger.balance(owner.id) > paid[owner.id] for owner in one.owners] == [True, False, True]
    one.check()


def test_a_run_says_why_it_ended(stage, monkeypatch):
    one = stage()

    def broken(*_):
        raise RuntimeError("inner secret")

    with monkeypatch.context() as patch:
        swap(patch, SqlStore, "save_plan", broken)
        with pytest.raises(RuntimeError, match="inner secret"):
            one.play()
    assert (one.run().state, one.run().holder) == ("ended", "")
    assert "internal error" in one.run().error
    assert "secret" not in one.run().error


def test_a_fault_of_the_database_is_waited_out(stage, monkeypatch):
    """The same run goes on: no attempt is lost."""
    one, original, calls = stage(), SqlLedger.resolve_many, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) in (2, 3):
            if len(calls) == 3:
                original(*arguments)  # it happened, and nobody heard of it
            raise LedgerUnavailable("the connection broke")
        return original(*arguments)

    with monkeypatch.context() as patch:
        swap(patch, SqlLedger, "resolve_many", failing)
        one.play(sleep=lambda _: None)
    assert one.look().state == "finished"
    assert [command[0] for command in one.commands] == ["run"]
    assert len(calls) == 4
    one.check()


def test_a_cap_that_is_raised_again_after_a_crash_fails_no_run(stage, monkeypatch):
    """Her award was void because her cap was too low; the run dies, she raises it, the next run goes on."""
    one = stage(rounds=1)
    seller = one.owners[1]

    def lower(message):
        if kind_of(message) == TRAIN:
            statements.set_cap(one.broker, seller, 1e-6)

    one.grid.before[1] = lower
    with monkeypatch.context() as patch:
        cut(patch, SqlLedger, "void", after=True, skip=0)
        with pytest.raises(PowerCut):
            one.play()
    statements.set_cap(one.broker, seller, 100.0)
    one.lapse()
    assert one.finish().state == "finished"
    states = {award.slot: award.state for award in tasks.round_detail(one.broker, one.desk, one.task_id, 0).awards}
    assert states == {0: "posted", 1: "voided", 2: "posted"}
    assert one.broker.books.ledger.privacy_spent(seller.id) == 0
    one.check()


def test_a_run_goes_on_from_the_database_alone(stage, monkeypatch, undisturbed):
    """The books are at round 2, the folder is lost: no round is decided anew."""
    one = stage(rounds=2)
    with monkeypatch.context() as patch:
        cut(patch, SqlLedger, "hold_many", after=False, skip=1)
        with pytest.raises(PowerCut):
            one.play()
    shutil.rmtree(one.settings.flower_folder)
    one.lapse()
    one.finish()
    assert one.books() == undisturbed
    one.check()


def test_a_masked_sum_under_way_is_kept_beside_deliveries(stage):
    played = stage()
    store = SqlStore(played.broker, played.task_id, None, {})
    assert store.exchange(0) == b""
    for state in (b"keys", b"input"):
        store.save_exchange(0, state)
    store.save_deliveries(0, {1: np.ones(2)})
    assert (store.exchange(0), store.exchange(1)) == (b"input", b"")
    assert set(store.deliveries(0)) == {1}


def test_one_run_at_a_time(stage):
    one = stage()
    one.look()
    first = Tenancy(one.broker, one.task_id, 1, patience=60.0)
    first.take()
    with pytest.raises(Replaced, match="at work"):
        play_task(one.broker, one.grid, one.task_id, 1)
    commands = len(one.commands)
    one.look()
    assert len(one.commands) == commands  # the worker leaves a living run alone
    one.lapse()
    one.look()
    assert [command[0] for command in one.commands] == ["run", "stop", "run"]
    with one.broker.database.write() as session, pytest.raises(Replaced, match="another run"):
        first.check(session)  # it may write nothing more
    with pytest.raises(Replaced, match="not the latest"):
        play_task(one.broker, one.grid, one.task_id, 1)
    play_task(one.broker, one.grid, one.task_id, 2)
    assert one.look().state == "finished"
    with pytest.raises(Replaced, match="ended"):
        play_task(one.broker, one.grid, one.task_id, 2)
    one.check()


def test_a_tenancy_is_renewed_while_there_is_progress(stage):
    one = stage()
    one.look()
    quick = replace(one.broker, settings=one.settings.model_copy(update={"flower_lease_seconds": 0.2}))
    tenancy = Tenancy(quick, one.task_id, 1, patience=60.0)
    tenancy.take()
    with tenancy.renewing():
        first = one.run().expires_at
        await_true(lambda: one.run().expires_at > first)
    idle = Tenancy(quick, one.task_id, 1, patience=0.0)
    tenancy.end()
    idle.take()
    with idle.renewing():
        await_true(lambda: not at_work(one.run()))


def test_a_superlink_that_does_not_answer_fails_nobody(stage):
    one = stage()
    one.answers = False
    for _ in range(2 * one.settings.flower_tries):
        one.lapse()
        assert one.look().state == "running"
    assert one.run().tries == 0
    one.answers = True
    one.lapse()
    assert one.finish().state == "finished"
    one.check()


def test_a_round_waits_for_enough_bids(stage, monkeypatch):
    monkeypatch.setattr(server, "_WAIT_FOR_BIDS_SECONDS", 0.01)
    one = stage(minimum_bids=OWNERS, rounds=1)
    asked = []

    def late(message):
        if kind_of(message) == BID:
            asked.append(1)
            return [] if len(asked) == 1 else None
        return None

    one.grid.before[1] = late
    one.settings = one.settings.model_copy(update={"flower_bid_seconds": 0.2})
    object.__setattr__(one.broker, "settings", one.settings)
    assert one.finish().state == "finished"
    assert len(asked) == 2
    assert one.rounds()[0].bids == OWNERS


def test_only_bound_nodes_sell_and_nobody_sells_for_another(stage):
    """Node 2 loses its binding, node 1 says that it is owner 0."""
    one = stage(rounds=1)
    parties.unbind_node(one.broker, one.desk, one.owners[2].id)

    def impostor(message):
        (answer,) = InProcessGrid.answer(one.grid, message)
        bid = unpack(Bid, answer)
        return None if bid is None else [reply(replace(bid, owner=0, rate=0.0001), message)]

    one.grid.before[1] = impostor
    assert one.finish().state == "finished"
    assert {award.owner for award in one.awards() if award.epsilon} == {one.owners[0].id}


def test_bids_in_a_flower_task_come_from_nodes(stage, order, cheap_bid):
    one = stage()
    with pytest.raises(InvalidInput, match=r"broker\.open"):
        one.post(order, open=False)
    assert offers.list_offers(one.broker, one.owners[0]).items == ()
    one.finish()
    with pytest.raises(Conflict, match=r"owner\.toml"):
        offers.place_bid(one.broker, one.owners[0], one.task_id, cheap_bid())


def test_the_run_config_names_the_file_only(stage):
    one = stage()
    one.look()
    ((*_, config),) = one.commands
    assert "broker.json" in config
    assert one.settings.database_url not in config
    assert "sqlite" not in config
