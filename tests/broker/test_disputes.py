"""Disputes: one award is frozen until the operator decides, everything else goes on, and the books always agree."""

import threading
from dataclasses import replace

import pytest
from power_cuts import PowerCut, cut
from sqlalchemy import update

from flmarket.broker.books import Books
from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict, Forbidden, NotFound
from flmarket.broker.office import disputes, ledger, notices, offers, operator, parties, statements, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import DecisionRequest, DisputeRequest, HookRequest
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import DisputeRow, Lease, Notice, Release, TaskRow
from flmarket.broker.work.rounds import play_round
from flmarket.broker.work.worker import Worker
from flmarket.ledger import ESCROW, AwardState, Frozen, MemoryLedger, Resolution, SqlLedger, dispute_of
from flmarket.ledger.journal import Award
from flmarket.ledger.memory import Wanted
from flmarket.market import Bad, MarketKind
from flmarket.market import round as rounds

PAY, REFUND = (DecisionRequest(decision=one, note="the log shows it") for one in ("pay", "refund"))


class Scene:
    """A task of two rounds, of which one registered owner wins an award in each; the first is held, not settled."""

    def __init__(self, broker, joined, order, cheap_bid, rounds=2):
        self.broker = broker
        self.buyer, self.owner = joined(broker, "buyer").party, joined(broker, "owner").party
        self.desk = joined(broker, "operator").party
        self.before = parties.account(broker, self.buyer).balance_micros
        self.task = tasks.post_task(broker, self.buyer, order(rounds=rounds, bidders_per_round=12)).id
        offers.place_bid(broker, self.owner, self.task, cheap_bid())
        steps = play_round(broker, self.task)
        for step in steps:
            if step == "awards":
                break
        steps.close()
        (self.award,) = (one for one in broker.books.ledger.awards(owner=self.owner.id))
        assert self.award.state is AwardState.PENDING

    def open(self, party=None, reason="I did deliver"):
        return disputes.open_dispute(self.broker, party or self.owner, self.request(party, reason))

    def request(self, party=None, reason="I did deliver"):
        award = self.award.id
        if party is not None and party.role == "buyer":
            found = tasks.round_detail(self.broker, party, self.task, 0).awards
            plain = tasks.round_detail(self.broker, self.desk, self.task, 0).awards
            slot = int(award.rpartition("/")[2])
            key = next((one.price_micros, one.weight) for one in plain if one.slot == slot)
            award = next(one.award_id for one in found if (one.price_micros, one.weight) == key)
        return DisputeRequest(award_id=award, reason=reason)

    def play(self, broker=None):
        worker = Worker(broker or self.broker)
        worker.run_until_idle()
        worker.stop()

    def state(self):
        return self.broker.books.ledger.award(self.award.id).state

    def check(self):
        """Books and rows agree, the log replays, and every micro-unit of the buyer's is somewhere."""
        broker = self.broker
        assert ledger.verify(broker, self.desk).ok, reconcile(broker.database.engine)
        bill = tasks.bill(broker, self.buyer, self.task)
        assert bill.escrow_micros == bill.spent_micros + bill.refunded_micros + bill.left_micros
        assert sum(one.spent_micros for one in bill.lines) == bill.spent_micros
        task = tasks.get_task(broker, self.buyer, self.task)
        if task.ended:
            held = [one for one in broker.books.ledger.awards(state=AwardState.PENDING) if one.buyer == self.task]
            assert bill.left_micros == bill.disputed_micros == sum(one.price_micros for one in held)
            assert broker.books.ledger.balance(self.task) == 0
        decided = disputes.list_disputes(broker, self.buyer).items
        credited = sum(one.credited_micros for one in decided if one.decision == "refund")
        has = parties.account(broker, self.buyer).balance_micros
        assert has == self.before - bill.escrow_micros + bill.refunded_micros + credited
        return bill


@pytest.fixture
def scene(broker, joined, order, cheap_bid):
    return Scene(broker, joined, order, cheap_bid)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """One market for all that does not break its books."""
    made = Broker.open(Settings(database_url=f"sqlite:///{tmp_path_factory.mktemp('house')}/b.db", run_worker=False))
    yield made
    made.close()


@pytest.fixture
def quick(house, joined, order, cheap_bid):
    return Scene(house, joined, order, cheap_bid)


@pytest.mark.parametrize("decision", [PAY, REFUND], ids=["pay", "refund"])
def test_an_award_in_escrow_is_frozen_until_the_operator_decides(scene, decision):
    """The round, the task's end and time itself pass it by; bill, statement and ledger agree at every stage."""
    made = scene.open()
    assert (made.state, made.award_state, made.opened_by) == ("open", "pending", "owner")
    assert "stays frozen in escrow" in made.words
    with pytest.raises(Conflict, match="still being played"):
        disputes.decide(scene.broker, scene.desk, made.id, decision)
    scene.play()
    assert scene.state() is AwardState.PENDING
    assert tasks.get_task(scene.broker, scene.buyer, scene.task).state == "finished"
    assert scene.check().disputed_micros == scene.award.price_micros
    first, second = statements.statement(scene.broker, scene.owner).releases
    assert (first.state, first.paid_micros) == ("pending", 0)
    assert first.reason == "in dispute, else posted"
    assert first.epsilon_total > 0  # what left her machine is charged
    assert second.state == "posted"  # the other round went on
    done = disputes.decide(scene.broker, scene.desk, made.id, decision)
    assert (done.state, done.note) == ("decided", "the log shows it")
    paid = decision is PAY
    assert scene.state() is (AwardState.POSTED if paid else AwardState.VOIDED)
    bill = scene.check()
    assert (bill.disputed_micros, bill.left_micros) == (0, 0)
    found = statements.statement(scene.broker, scene.owner)
    assert found.earned_micros == scene.broker.books.ledger.balance(scene.owner.id)
    assert found.releases[0].paid_micros == (scene.award.price_micros if paid else 0)
    assert disputes.decide(scene.broker, scene.desk, made.id, decision) == done  # again: nothing changes
    with pytest.raises(Conflict, match="is decided"):
        disputes.decide(scene.broker, scene.desk, made.id, REFUND if paid else PAY)
    assert scene.check() == bill


def test_nothing_hangs_on_the_words_of_a_reason(quick, monkeypatch):
    """A frozen award is one, whatever is said about how it would have ended; here nothing is."""
    made, honest = quick.open(), rounds.resolve_each
    monkeypatch.setattr(rounds, "resolve_each", lambda *call: [replace(one, reason="") for one in honest(*call)])
    quick.play()
    assert [one.state for one in statements.statement(quick.broker, quick.owner).releases] == ["pending", "posted"]
    assert quick.check().disputed_micros == quick.award.price_micros
    disputes.decide(quick.broker, quick.desk, made.id, PAY)
    assert quick.check().disputed_micros == 0


def test_all_other_awards_end_as_they_would_have(house, joined, order, cheap_bid):
    """Compared with the same market without a dispute, award by award."""
    disputed, calm = (Scene(house, joined, order, cheap_bid) for _ in range(2))
    disputed.open()
    for one in (disputed, calm):
        one.play()
    ends = [
        {
            award.id.partition("/")[2]: (award.state, award.price_micros, award.loss)
            for award in one.broker.books.ledger.awards()
            if award.id.startswith(f"{one.task}/0/") and award.id not in (one.award.id, dispute_of(one.award.id))
        }
        for one in (disputed, calm)
    ]
    assert ends[0] == ends[1]
    assert ends[0]


@pytest.mark.parametrize("ending", ["cancel", "deadline", "failure"])
def test_a_task_that_ends_leaves_the_frozen_price_in_escrow(quick, monkeypatch, ending):
    made = quick.open()
    mine = TaskRow.id == quick.task
    if ending == "cancel":
        tasks.cancel_task(quick.broker, quick.buyer, quick.task)
    elif ending == "deadline":
        with quick.broker.database.write() as session:
            session.execute(update(TaskRow).where(mine).values(deadline_at=0))
    else:
        monkeypatch.setattr("flmarket.broker.work.worker.play_round", lambda *_: iter(1 / 0 for _ in "x"))
    quick.play()
    state = {"cancel": "cancelled", "deadline": "expired", "failure": "failed"}[ending]
    assert tasks.get_task(quick.broker, quick.buyer, quick.task).state == state
    assert quick.state() is AwardState.PENDING
    assert quick.check().disputed_micros == quick.award.price_micros
    text = tasks.bill_csv(quick.broker, quick.buyer, quick.task)
    assert "in escrow until a dispute is decided" in text
    disputes.decide(quick.broker, quick.desk, made.id, REFUND)
    assert quick.check().left_micros == 0
    assert "dispute" not in tasks.bill_csv(quick.broker, quick.buyer, quick.task)


@pytest.mark.parametrize("who", ["owner", "buyer"])
@pytest.mark.parametrize("decision", [PAY, REFUND], ids=["pay", "refund"])
def test_what_has_ended_stays_and_the_operator_credits(quick, who, decision):
    quick.play()
    party = getattr(quick, who)
    made = quick.open(party, "not what was agreed")
    assert made.award_state == "posted"
    assert "is not frozen" in made.words
    had = quick.broker.books.ledger.balance(quick.buyer.id), quick.broker.books.ledger.balance(quick.owner.id)
    done = disputes.decide(quick.broker, quick.desk, made.id, decision)
    price = quick.award.price_micros
    credit = 0 if decision is PAY else price
    assert done.credited_micros == credit
    has = quick.broker.books.ledger.balance(quick.buyer.id), quick.broker.books.ledger.balance(quick.owner.id)
    assert has == (had[0] + credit, had[1])
    assert quick.state() is AwardState.POSTED
    quick.check()
    assert disputes.decide(quick.broker, quick.desk, made.id, decision) == done
    assert quick.broker.books.ledger.balance(quick.buyer.id) == has[0]


def test_an_owner_who_was_marked_bad_can_be_paid_after_all(house, joined, order, cheap_bid, monkeypatch):
    """Frozen before her update was found bad: what left is charged, and the operator may still pay it."""
    scene = Scene(house, joined, order, cheap_bid)
    made = scene.open()
    mine = scene.award.id
    honest = MarketKind.checked

    def picky(self, order, vector):
        return Bad("not finite") if order.award == mine else honest(self, order, vector)

    monkeypatch.setattr(MarketKind, "checked", picky)
    scene.play()
    seen = disputes.get_dispute(house, scene.desk, made.id)
    assert (seen.award_state, seen.award_reason) == ("pending", "in dispute, else voided: bad update: not finite")
    assert disputes.get_dispute(house, scene.buyer, made.id).award_reason == ""  # it may say who she is
    disputes.decide(house, scene.desk, made.id, PAY)
    assert scene.state() is AwardState.POSTED
    scene.check()


def test_an_owner_who_delivered_nothing_is_charged_if_she_is_paid(house, joined, order, cheap_bid, monkeypatch):
    scene = Scene(house, joined, order, cheap_bid, rounds=1)
    made = scene.open()
    monkeypatch.setattr("flmarket.broker.work.rounds.TaskOwners.train", lambda *_: iter(()))
    monkeypatch.setattr("flmarket.broker.work.rounds.TaskOwners.released", lambda *_: iter(()))
    scene.play()
    assert house.books.privacy(scene.owner.id)[1] == 0
    statements.set_cap(house, scene.owner, scene.award.epsilon / 2)
    with pytest.raises(Conflict, match="her cap does not allow"):
        disputes.decide(house, scene.desk, made.id, PAY)
    assert disputes.get_dispute(house, scene.desk, made.id).state == "open"
    assert scene.state() is AwardState.PENDING
    statements.set_cap(house, scene.owner, 10.0)
    disputes.decide(house, scene.desk, made.id, PAY)
    assert house.books.privacy(scene.owner.id)[1] == pytest.approx(scene.award.epsilon)
    scene.check()


def test_strangers_and_latecomers_are_refused_and_nothing_changes(quick, joined):
    stranger, rival = joined(quick.broker, "owner").party, joined(quick.broker, "buyer").party
    for who in (stranger, rival):
        with pytest.raises(NotFound):
            disputes.open_dispute(quick.broker, who, DisputeRequest(award_id=quick.award.id, reason="mine"))
    with pytest.raises(Forbidden):
        disputes.open_dispute(quick.broker, quick.desk, quick.request())
    with pytest.raises(NotFound):  # a buyer knows owners by their names in her task only
        disputes.open_dispute(quick.broker, quick.buyer, DisputeRequest(award_id=quick.award.id, reason="why"))
    for wrong in (f"{quick.task}/0/11", f"{quick.task}/7/0", "t_none/0/0"):
        with pytest.raises(NotFound):
            disputes.open_dispute(quick.broker, quick.owner, DisputeRequest(award_id=wrong, reason="why"))
    quick.play()
    with quick.broker.database.write() as session:
        session.execute(update(Release).where(Release.task_id == quick.task).values(at=now() - 15 * 86_400_000))
    with pytest.raises(Conflict, match="within 14 days"):
        quick.open()
    assert disputes.list_disputes(quick.broker, quick.owner).items == ()
    with quick.broker.database.write() as session:
        session.execute(update(Release).where(Release.task_id == quick.task).values(at=now() - 13 * 86_400_000))
    made = quick.open()
    with pytest.raises(Forbidden):
        disputes.decide(quick.broker, quick.owner, made.id, PAY)
    for who in (stranger, rival):
        with pytest.raises(NotFound):
            disputes.get_dispute(quick.broker, who, made.id)
        assert disputes.list_disputes(quick.broker, who).items == ()
    with pytest.raises(Conflict, match="already"):
        quick.open(quick.buyer, "me too")


def test_a_party_has_so_many_open_disputes(small, joined, order, cheap_bid):
    few = Broker.open(small.settings.model_copy(update={"max_disputes_per_party": 2}))
    scene = Scene(few, joined, order, cheap_bid, rounds=3)
    scene.play()
    awards = [one.award_id for one in statements.statement(few, scene.owner).releases]
    made = [disputes.open_dispute(few, scene.owner, DisputeRequest(award_id=one, reason="no")) for one in awards[:2]]
    third = DisputeRequest(award_id=awards[2], reason="no")
    with pytest.raises(Conflict, match="at most 2"):
        disputes.open_dispute(few, scene.owner, third)
    again = disputes.open_dispute(few, scene.owner, DisputeRequest(award_id=awards[0], reason="no"))
    assert again == made[0]  # a repetition is no new one
    disputes.decide(few, scene.desk, made[0].id, REFUND)
    assert disputes.open_dispute(few, scene.owner, third).state == "open"
    page = disputes.list_disputes(few, scene.owner, limit=2)
    rest = disputes.list_disputes(few, scene.owner, limit=2, before=page.next)
    assert [one.award_id for one in (*page.items, *rest.items)] == awards[::-1]
    assert page.undecided == 2
    few.close()


CUTS = [(SqlLedger, "decide"), (Books, "give_back"), (disputes, "_write_down")]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("where", "name"), CUTS, ids=[name for _, name in CUTS])
@pytest.mark.parametrize("decision", [PAY, REFUND], ids=["pay", "refund"])
def test_power_cut_between_a_decision_and_its_entries(quick, monkeypatch, decision, where, name, after):
    """The worker finishes it, with the same books as if nothing had happened; nobody can decide otherwise meanwhile."""
    if (decision, name) == (PAY, "give_back"):
        return
    made = quick.open()
    quick.play()
    with monkeypatch.context() as patch:
        cut(patch, where, name, after=after, skip=0)
        with pytest.raises(PowerCut):
            disputes.decide(quick.broker, quick.desk, made.id, decision)
    with pytest.raises(Conflict, match="is decided"):
        disputes.decide(quick.broker, quick.desk, made.id, REFUND if decision is PAY else PAY)
    with quick.broker.database.write() as session:
        session.execute(update(DisputeRow).values(decided_at=now() - 60_000))
        session.execute(update(Lease).values(expires_at=0))
    quick.play()
    assert disputes.get_dispute(quick.broker, quick.desk, made.id).state == "decided"
    assert quick.state() is (AwardState.POSTED if decision is PAY else AwardState.VOIDED)
    assert quick.check().left_micros == 0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_power_cut_while_a_dispute_is_opened(quick, monkeypatch, after):
    """Its row comes first: cut off before the award was frozen, it is a dispute about how the award ended."""
    with monkeypatch.context() as patch:
        cut(patch, SqlLedger, "freeze", after=after, skip=0)
        with pytest.raises(PowerCut):
            quick.open()
    quick.play()
    (made,) = disputes.list_disputes(quick.broker, quick.owner).items
    assert made.award_state == ("pending" if after else "posted")
    quick.check()
    disputes.decide(quick.broker, quick.desk, made.id, REFUND)
    quick.check()


def test_dispute_and_settlement_at_the_same_moment(scene):
    """Whoever comes first in the ledger: the award is frozen, or it has ended; never both, never neither."""
    failed = []

    def dispute():
        try:
            scene.open()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=dispute)
    thread.start()
    scene.play()
    thread.join()
    assert not failed
    (made,) = disputes.list_disputes(scene.broker, scene.owner).items
    frozen = scene.broker.books.find(dispute_of(scene.award.id)) is not None
    assert (scene.state() is AwardState.PENDING) == frozen == (made.award_state == "pending")
    scene.check()
    disputes.decide(scene.broker, scene.desk, made.id, REFUND)
    scene.check()


def test_decided_while_the_task_ends(quick, monkeypatch):
    """The decision lands between the ledger's refund of the task and its rows, and before it: the bill adds up."""
    made = quick.open()
    tasks.cancel_task(quick.broker, quick.buyer, quick.task)
    steps = play_round(quick.broker, quick.task)
    for _ in steps:
        pass
    hold, done = SqlLedger.hold, []

    def meanwhile(self, award):
        if award.id == f"{quick.task}/refund" and not done:  # the balance has been read
            done.append(disputes.decide(quick.broker, quick.desk, made.id, REFUND))
        return hold(self, award)

    monkeypatch.setattr(SqlLedger, "hold", meanwhile)
    quick.play()
    assert done
    assert quick.check().left_micros == 0


def test_swept_with_the_rest_of_the_task(quick, monkeypatch):
    """Its price has come back to the task when all that is left of that is returned: it is returned once."""
    made = quick.open()
    tasks.cancel_task(quick.broker, quick.buyer, quick.task)
    for _ in play_round(quick.broker, quick.task):
        pass
    honest = Books.give_back

    def late(self, award, buyer):
        quick.play()  # the task ends here
        return honest(self, award, buyer)

    monkeypatch.setattr(Books, "give_back", late)
    disputes.decide(quick.broker, quick.desk, made.id, REFUND)
    assert tasks.get_task(quick.broker, quick.buyer, quick.task).state == "cancelled"
    assert quick.check().left_micros == 0


def test_both_sides_and_the_desk_are_told_in_their_own_names(quick):
    told = {one.role: one for one in (quick.buyer, quick.owner, quick.desk)}
    for party in told.values():
        hook = HookRequest(address="https://example.org/", events=["dispute.opened", "dispute.decided"])
        notices.create_hook(quick.broker, party, party.id, hook)
    made = quick.open()
    quick.play()
    disputes.decide(quick.broker, quick.desk, made.id, PAY)
    disputes.decide(quick.broker, quick.desk, made.id, PAY)
    with quick.broker.database.read() as session:
        bodies = [row.body for row in session.query(Notice).all() if made.id in row.body]
    assert len(bodies) == 6
    for body in bodies:
        assert "I did deliver" not in body
        if quick.buyer.id in body.partition('"data"')[0]:
            assert quick.award.id not in body
            assert quick.owner.id not in body
    lines = [one.action for one in operator.audit_log(quick.broker, quick.desk, about=quick.task).items]
    assert {"dispute.open", "dispute.decide"} <= set(lines)
    assert lines.count("dispute.decide") == 1
    for entry in ledger.entries(quick.broker, quick.buyer, limit=500).items:
        assert quick.owner.id not in str(entry)
        assert not entry.ref.startswith(quick.award.id), entry
    shown = disputes.get_dispute(quick.broker, quick.buyer, made.id)
    assert quick.owner.id not in str(shown)
    assert quick.owner.name not in (shown.owner, shown.award_id)
    assert shown.reason == ""


CHEATS = {
    "paid though frozen": lambda scene: _raw(scene, AwardState.POSTED),
    "nobody disputes it": lambda scene: _delete(scene),
    "decided and still frozen": lambda scene: _set(scene, state="decided", decision="pay"),
    "a credit that never was": lambda scene: _credit(scene),
}


def _raw(scene, state):
    """The dispute is not even looked up."""
    wanted = Wanted([scene.award.id], privacy=True)
    scene.broker.books.ledger._write(wanted, lambda draft: draft.resolve(Resolution(scene.award.id, state)))


def _credit(scene):
    (made,) = disputes.list_disputes(scene.broker, scene.desk).items
    disputes.decide(scene.broker, scene.desk, made.id, PAY)
    scene.check()
    _set(scene, decision="refund", credited_micros=scene.award.price_micros)


def _delete(scene):
    with scene.broker.database.write() as session:
        session.delete(session.query(DisputeRow).one())


def _set(scene, **values):
    with scene.broker.database.write() as session:
        session.execute(update(DisputeRow).values(**values))


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_with_disputes_are_found(small, joined, order, cheap_bid, cheat):
    scene = Scene(small, joined, order, cheap_bid, rounds=1)
    scene.open()
    scene.play()
    scene.check()
    CHEATS[cheat](scene)
    assert not ledger.verify(small, scene.desk).ok


def test_the_rule_of_the_ledger_itself():
    books = MemoryLedger()
    books.deposit("d", "buyer", 100)
    books.hold(Award("t/0/1", 0, "buyer", "anna", 0.5, 60))
    books.hold(Award("t/0/2", 0, "buyer", "bea", 0.5, 40))
    books.freeze("t/0/1")
    books.freeze("t/0/1")  # again: nothing changes
    for end in AwardState.POSTED, AwardState.VOIDED, AwardState.EXPIRED:
        with pytest.raises(Frozen):
            books.resolve_many([Resolution("t/0/2", end), Resolution("t/0/1", end)])
    assert books.award("t/0/2").state is AwardState.PENDING  # all or none
    books.post("t/0/2")
    with pytest.raises(Exception, match="cannot be frozen"):
        books.freeze("t/0/2")
    size = books.head().size
    assert books.decide(Resolution("t/0/1", AwardState.VOIDED, "no")).state is AwardState.VOIDED
    assert books.head().size == size + 2
    books.decide(Resolution("t/0/1", AwardState.VOIDED, "no"))
    with pytest.raises(Exception, match="already voided"):
        books.decide(Resolution("t/0/1", AwardState.POSTED))
    assert (books.balance("buyer"), books.balance("bea"), books.balance(ESCROW)) == (60, 40, 0)
    books.verify()
