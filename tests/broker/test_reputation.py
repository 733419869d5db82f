"""How reliably owners deliver, against the ledger's own log."""

import pytest
from sqlalchemy import event

from flmarket.broker.books import slot_account
from flmarket.broker.office import offers, parties, pseudonyms, statements, tasks
from flmarket.broker.office.pseudonyms import WINDOW, reputations
from flmarket.broker.tables import Release
from flmarket.broker.work.rounds import TaskOwners
from flmarket.ledger.entry import RESOLUTIONS

ENDS = set(RESOLUTIONS.values())


def by_the_log(broker, account):
    """The last 20 ends of an account's awards, as the log has them: how many were paid, of how many."""
    ends = [
        one.line.kind for one in broker.books.ledger.entries() if one.line.owner == account and one.line.kind in ENDS
    ]
    return sum(kind == "posted" for kind in ends[-20:]), len(ends[-20:])


@pytest.fixture
def market(broker, joined, order, cheap_bid, play, monkeypatch):
    """Two tasks of 14 rounds, in which one registered owner sells, and a third of the simulated ones drop out."""
    buyer, owner, desk = (joined(broker, role).party for role in ("buyer", "owner", "operator"))
    flaky = order(rounds=14, bidders_per_round=12, owners={"dropout": 0.3, "privacy_cap": 1e6})
    ids = [tasks.post_task(broker, buyer, flaky).id for _ in range(2)]
    for task in ids:
        offers.place_bid(broker, owner, task, cheap_bid(0.2))
    honest = TaskOwners.train

    def sometimes(self, call, orders, *rest):
        """The registered owner is away in every third round."""
        away = {slot for slot in self.parties if call.round_index % 3 == 0}
        return honest(self, call, [one for one in orders if one.owner not in away], *rest)

    monkeypatch.setattr(TaskOwners, "train", sometimes)
    play(broker)
    return broker, buyer, owner, desk, ids


def test_everybody_sees_the_same_figures_and_they_are_the_log_s(market, monkeypatch):
    broker, buyer, owner, desk, ids = market
    delivered, ended = by_the_log(broker, owner.id)
    assert ended == WINDOW == 20
    assert 5 < delivered < 20
    hers = statements.statement(broker, owner).reputation
    assert (hers.delivered, hers.ended, hers.window) == (delivered, ended, 20)
    assert hers.words == f"Delivered {delivered} of the last 20 awards."
    assert parties.list_parties(broker, desk).reputations == {owner.id: hers}
    assert parties.reputation_of(broker, desk, owner.id) == hers
    assert parties.reputation_of(broker, desk, buyer.id) is None
    seen = 0
    for task in ids:
        for index in range(14):
            known = {one.slot: one.reputation for one in tasks.round_detail(broker, desk, task, index).awards}
            bought = [one.reputation for one in tasks.round_detail(broker, buyer, task, index).awards]
            assert sorted(map(str, known.values())) == sorted(map(str, bought))
            with broker.database.read() as session:
                rows = session.query(Release).filter_by(task_id=task, index=index).all()
            for row in rows:
                one = known[row.slot]
                assert (one.delivered, one.ended) == by_the_log(broker, row.party_id or slot_account(task, row.slot))
                seen += one.delivered < one.ended
    assert seen > 5, "nobody failed to deliver: this showed nothing"

    def now():
        with broker.database.read() as session:
            return reputations(session, [owner.id])[owner.id].ended

    monkeypatch.setattr(pseudonyms, "WINDOW", 19)
    assert now() == 19  # another window would be noticed
    monkeypatch.undo()
    with broker.database.write() as session:  # what is in escrow is not counted, and earlier awards move up
        rows = session.query(Release).filter_by(party_id=owner.id).order_by(Release.at.desc()).all()
        for row in rows[:3]:
            row.state = "pending"
        assert now() == min(20, len(rows) - 3) == 20
        for row in rows[:13]:
            row.state = "pending"
    assert now() == len(rows) - 13 < 20


def test_an_owner_of_long_standing_costs_no_more(small, joined):
    """The database looks at 20 rows of an index, whatever she has behind her."""
    owner = joined(small, "owner").party
    asked = []
    event.listen(small.database.engine, "before_cursor_execute", lambda *args: asked.append((args[2], args[3])))
    with small.database.read() as session:
        assert reputations(session, [owner.id])[owner.id].words == "No award has ended yet; the last 20 count."
    query, values = next(one for one in asked if "broker_releases" in one[0])
    with small.database.engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).all()
    told = [row[-1] for row in plan]
    assert any("SEARCH" in one and "ix_broker_releases_party_at (party_id=?)" in one for one in told), told
    assert not any(one.startswith("SCAN") and "one" in one.split() for one in told), told
    assert "USE TEMP B-TREE FOR ORDER BY" not in told, told


@pytest.mark.parametrize(
    ("delivered", "ended", "words"),
    [
        (0, 0, "No award has ended yet; the last 20 count."),
        (3, 4, "Delivered 3 of 4 so far; the last 20 awards count."),
        (17, 20, "Delivered 17 of the last 20 awards."),
    ],
)
def test_the_words_state_the_window(delivered, ended, words):
    assert pseudonyms.reputation(delivered, ended).words == words
