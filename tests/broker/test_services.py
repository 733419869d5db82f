"""The services without HTTP, on SQLite and PostgreSQL."""

import io
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors
from sqlalchemy import update

from flmarket.broker.errors import Conflict, Forbidden, NotFound, Unauthenticated
from flmarket.broker.office import (
    audits,
    explore,
    ledger,
    market,
    offers,
    operator,
    parties,
    sessions,
    statements,
    tasks,
)
from flmarket.broker.requests import AuditRequest, BidHelpRequest, BidRequest, ExploreRequest, Valuation
from flmarket.broker.stamps import now
from flmarket.broker.tables import TaskRow
from flmarket.broker.work.rounds import play_round
from flmarket.broker.work.worker import Worker
from flmarket.engines import play as memory_play
from flmarket.errors import InvalidInput
from flmarket.learning.travel import Bundle
from flmarket.ledger import ESCROW, AwardState, Receipt, SealedReceipt


def test_a_task_from_order_to_model(broker, joined, order, play):
    buyer, desk = joined(broker, "buyer").party, joined(broker, "operator").party
    before = parties.account(broker, buyer).balance_micros
    task = tasks.post_task(broker, buyer, order(owners={"dropout": 0.2, "faulty": 0.1}))
    assert task.state == "queued"
    held = parties.account(broker, buyer)
    assert (held.balance_micros, held.escrow_micros) == (before - task.escrow_micros, task.escrow_micros)
    with pytest.raises(Conflict, match="no finished model"):
        tasks.model(broker, buyer, task.id)
    play(broker)

    done = tasks.get_task(broker, buyer, task.id)
    assert (done.state, done.rounds_done, done.error) == ("finished", 3, "")
    bill = tasks.bill(broker, buyer, task.id)
    assert bill.left_micros == 0
    assert bill.spent_micros == sum(line.spent_micros for line in bill.lines) > 0
    assert bill.escrow_micros == bill.spent_micros + bill.refunded_micros
    after = parties.account(broker, buyer)
    assert (after.balance_micros, after.escrow_micros) == (before - bill.spent_micros, 0)
    assert broker.books.ledger.balance(task.id) == broker.books.ledger.balance(ESCROW) == 0
    assert ledger.verify(broker, desk).ok

    states = set()
    for index in range(3):
        detail = tasks.round_detail(broker, desk, task.id, index)
        paid = sum(award.price_micros for award in detail.awards if award.state == "posted")
        assert paid == detail.round.spent_micros
        for award in detail.awards:
            assert broker.books.ledger.award(award.award_id).state == AwardState(award.state)
            states.add(award.state)
    assert {"posted", "expired"} <= states
    kinds = [event.kind for event in tasks.events(broker, buyer, task.id)]
    assert kinds == ["queued", "running", *["open", "bids", "awards", "updates", "settled"] * 3, "finished"]


def test_the_broker_plays_what_the_simulation_plays(broker, joined, order, play):
    """An oracle: the engine alone, in memory, ends with the same model and the same payments."""
    buyer = joined(broker, "buyer").party
    request = order(rounds=4, owners={"dropout": 0.2, "faulty": 0.1}, training={"average": True})
    task = tasks.post_task(broker, buyer, request)
    play(broker)
    run, _ = memory_play(broker.simulations.build(task.id, request))
    expected = run.records
    played = tasks.rounds(broker, buyer, task.id).items
    assert [one.spent_micros for one in played] == [one.spent_micros for one in expected]
    assert [one.accuracy for one in played] == [one.metrics["accuracy"] for one in expected]
    file = tasks.model(broker, buyer, task.id)
    with np.load(io.BytesIO(file.content), allow_pickle=False) as model:
        flat = np.concatenate([model["weights"].ravel(), model["biases"].ravel()])
        about = json.loads(str(model["about"]))
    np.testing.assert_array_equal(flat, run.kind.buyers_model)
    assert json.loads(about["classes"]) == ["malignant", "benign"]
    other = load_safetensors(tasks.model(broker, buyer, task.id, format="safetensors").content)
    np.testing.assert_array_equal(other["weights"].ravel(), flat[:30])


def test_the_download_is_a_model_one_can_use(broker, joined, order, play, tmp_path):
    """Raw measurements of scikit-learn's own table, scaled by what came in the zip, give what the site says."""
    buyer = joined(broker, "buyer").party
    request = order(rounds=3, data={"validation": 50}, owners={"privacy_budget": [4.0, 8.0]})
    task = tasks.post_task(broker, buyer, request)
    play(broker)
    file = tasks.model(broker, buyer, task.id, format="zip")
    (tmp_path / file.name).write_bytes(file.content)
    bundle = Bundle.read(tmp_path / file.name)
    spec = broker.simulations.build(task.id, request)
    raw = spec.data.x_test * spec.data.encoding.scale + spec.data.encoding.offset
    site = tasks.get_task(broker, buyer, task.id).accuracy
    assert abs(np.mean(bundle.predict(raw, "last") == spec.data.y_test) - site) < 1e-12
    run, _ = memory_play(spec)
    best = np.concatenate([part.ravel() for part in bundle.weights("best").values()])
    np.testing.assert_array_equal(best, run.kind.best)
    card = bundle.card
    assert card["use"] == "best"
    assert card["accuracy"]["best"]["round"] == run.kind.notes["best_round"] + 1
    assert card["bill"]["spent_micros"] == tasks.bill(broker, buyer, task.id).spent_micros
    assert "broker holds all records" in card["privacy"]["where"]
    for one in json.loads(bundle.files["receipts.json"])["receipts"]:
        SealedReceipt.from_dict(one).check()
    assert "owner-" not in bundle.files["card.json"].decode()


def test_no_money_no_task(broker, joined, order):
    buyer = joined(broker, "buyer").party
    with pytest.raises(Conflict, match="in escrow"):
        tasks.post_task(broker, buyer, order(rounds=1000, budget_per_round=10**8))
    assert tasks.list_tasks(broker, buyer).items == ()
    assert parties.account(broker, buyer).escrow_micros == 0


def test_orders_that_cannot_be_played_are_refused_before_money_moves(small, joined, order):
    buyer = joined(small, "buyer").party
    with pytest.raises(Conflict, match="flower"):
        tasks.post_task(small, buyer, order(engine="flower"))
    with pytest.raises(InvalidInput, match=r"data\.name"):
        tasks.post_task(small, buyer, order(data={"name": "mnist"}))
    with pytest.raises(InvalidInput):
        tasks.post_task(small, buyer, order(data={"owners": 2000}))  # more owners than records
    assert tasks.list_tasks(small, buyer).items == ()


def test_a_mechanism_that_overspends_fails_the_task_and_the_money_comes_back(broker, joined, order, play):
    buyer = joined(broker, "buyer").party
    before = parties.account(broker, buyer).balance_micros
    bad = order(rounds=20, mechanism={"auction": "m2"}, budget_per_round=60)
    task = tasks.post_task(broker, buyer, bad)
    play(broker)
    done = tasks.get_task(broker, buyer, task.id)
    assert done.state == "failed"
    assert "exceed the budget" in done.error
    assert done.escrow_micros == done.spent_micros + done.refunded_micros
    assert parties.account(broker, buyer).balance_micros == before - done.spent_micros
    broker.books.ledger.verify()


def test_cancel_and_deadline(broker, joined, order, play):
    buyer = joined(broker, "buyer").party
    stopped = tasks.post_task(broker, buyer, order())
    tasks.cancel_task(broker, buyer, stopped.id)
    late = tasks.post_task(broker, buyer, order())
    with broker.database.write() as session:
        session.execute(update(TaskRow).where(TaskRow.id == late.id).values(deadline_at=now() - 1))
    play(broker)
    for task, state in ((stopped, "cancelled"), (late, "expired")):
        done = tasks.get_task(broker, buyer, task.id)
        assert (done.state, done.rounds_done, done.refunded_micros) == (state, 0, done.escrow_micros)
    with pytest.raises(Conflict):
        tasks.cancel_task(broker, buyer, stopped.id)


def test_registered_owners_sell_and_their_statement_agrees_with_the_ledger(broker, joined, order, cheap_bid, play):
    buyer, desk = joined(broker, "buyer").party, joined(broker, "operator").party
    one, two = joined(broker, "owner").party, joined(broker, "owner").party
    task = tasks.post_task(broker, buyer, order(bidders_per_round=12))
    first = offers.place_bid(broker, one, task.id, cheap_bid())
    assert offers.place_bid(broker, one, task.id, cheap_bid(0.5)).slot == first.slot  # replaced, not a second place
    assert offers.place_bid(broker, two, task.id, cheap_bid()).slot != first.slot
    offers.withdraw_bid(broker, two, task.id)
    play(broker)
    found = statements.statement(broker, one)
    assert found.deliveries == 3
    assert found.earned_micros == broker.books.ledger.balance(one.id) > 0
    assert all(release.epsilon <= 0.5 for release in found.releases)
    assert found.releases[-1].epsilon_total == pytest.approx(found.privacy.spent_epsilon_total)
    assert found.privacy.spent_epsilon_total == broker.books.ledger.privacy_spent(one.id)
    table = statements.statement_csv(broker, one).splitlines()
    assert len(table) == 4
    assert table[0].startswith("When,Task,")
    assert statements.statement(broker, two).awards == 0
    document = tasks.receipts(broker, one, task.id, 0).items
    assert len(document) == 1  # hers alone
    award, release = Receipt.from_dict(document[0].document).check(broker.books.ledger.head())
    assert (award.owner, award.price_micros) == (one.id, found.releases[0].price_micros)
    assert release.guarantee.epsilon == found.releases[0].epsilon
    with pytest.raises(NotFound):
        tasks.receipts(broker, two, task.id, 0)
    assert {entry.owner for entry in ledger.entries(broker, one).items} == {one.id}
    assert len(ledger.entries(broker, desk, limit=500).items) > len(ledger.entries(broker, one, limit=500).items)


def test_nobody_passes_her_lifetime_cap_over_several_tasks(broker, joined, order, cheap_bid, play):
    buyer, owner = joined(broker, "buyer").party, joined(broker, "owner").party
    statements.set_cap(broker, owner, 2.5)
    for seed in range(2):
        task = tasks.post_task(broker, buyer, order(rounds=4, bidders_per_round=12, seed=seed))
        offers.place_bid(broker, owner, task.id, cheap_bid(1.0))
    play(broker)
    view = statements.privacy(broker, owner)
    assert 2.0 < view.spent_epsilon_total <= 2.5
    with pytest.raises(Conflict, match="given up"):
        statements.set_cap(broker, owner, 1.0)
    assert statements.privacy(broker, owner).cap_epsilon_total == 2.5
    statements.set_cap(broker, owner, 5.0)
    assert statements.privacy(broker, owner).left_epsilon_total == pytest.approx(5.0 - view.spent_epsilon_total)


def test_a_cap_reached_between_bid_and_settlement_voids_her_award_and_no_other(small, joined, order, cheap_bid):
    """Two tasks' rounds overlap: both accounts were read before either release, and only one release fits."""
    buyer, owner = joined(small, "buyer").party, joined(small, "owner").party
    statements.set_cap(small, owner, 1.5)
    rounds = []
    for seed in range(2):
        request = order(rounds=1, bidders_per_round=12, seed=seed, mechanism={"auction": "all-in"})
        task = tasks.post_task(small, buyer, request)
        offers.place_bid(small, owner, task.id, cheap_bid(1.0))
        rounds.append((task.id, play_round(small, task.id)))
    for _, steps in rounds:
        assert list(itertools.islice(steps, 3)) == ["open", "bids", "awards"]
    for _, steps in rounds:
        assert list(steps) == ["updates"]
    books = small.books.ledger
    mine = [award for award in books.awards(owner=owner.id) if award.epsilon > 0]
    assert [award.state for award in mine] == [AwardState.POSTED, AwardState.VOIDED]
    assert "cap" in mine[1].reason
    others = [
        award for award in books.awards() if award.id.startswith(f"{rounds[1][0]}/0/") and award.owner != owner.id
    ]
    assert len(others) >= 2
    assert {award.state for award in others} == {AwardState.POSTED}
    assert statements.privacy(small, owner).spent_epsilon_total == 1.0
    books.verify()


def test_a_task_for_registered_owners_waits_for_their_bids(broker, joined, order, cheap_bid, play):
    buyer = joined(broker, "buyer").party
    one, two = joined(broker, "owner").party, joined(broker, "owner").party
    request = order(rounds=2, simulated=False, minimum_bids=2, mechanism={"auction": "all-in"})
    task = tasks.post_task(broker, buyer, request)
    offers.place_bid(broker, one, task.id, cheap_bid())
    play(broker)
    assert tasks.get_task(broker, buyer, task.id).rounds_done == 0
    table = Valuation(kind="tabulated", grid=[0.5, 1.0], values=[0.01, 0.02])
    offers.place_bid(broker, two, task.id, BidRequest(valuation=table, privacy_budget=1.0))
    with broker.database.write() as session:
        session.execute(update(TaskRow).values(next_at=0))
    play(broker)
    assert tasks.get_task(broker, buyer, task.id).state == "finished"
    assert {
        award.slot for award in tasks.round_detail(broker, joined(broker, "operator").party, task.id, 1).awards
    } == {0, 1}


def test_bids_are_checked(small, joined, order, cheap_bid):
    buyer, owner = joined(small, "buyer").party, joined(small, "owner").party
    task = tasks.post_task(small, buyer, order(data={"name": "breast-cancer", "owners": 1, "minimum": 5}))
    with pytest.raises(InvalidInput, match="data_size"):
        offers.place_bid(small, owner, task.id, cheap_bid(data_size=10_000))
    falling = Valuation(kind="tabulated", grid=[0.5, 1.0], values=[2.0, 1.0])
    with pytest.raises(InvalidInput, match="non-decreasing"):
        offers.place_bid(small, owner, task.id, BidRequest(valuation=falling, privacy_budget=1.0))
    assert offers.get_offer(small, owner, task.id).slot is None  # nothing half-written
    offers.place_bid(small, owner, task.id, cheap_bid())
    with pytest.raises(Conflict, match="taken"):
        offers.place_bid(small, joined(small, "owner").party, task.id, cheap_bid())
    closed = tasks.post_task(small, buyer, order(open=False))
    with pytest.raises(NotFound):
        offers.place_bid(small, owner, closed.id, cheap_bid())


def test_the_same_key_posts_once(broker, joined, order):
    buyer = joined(broker, "buyer").party
    one = tasks.post_task(broker, buyer, order(), key="k")
    assert tasks.post_task(broker, buyer, order(), key="k").id == one.id
    assert parties.account(broker, buyer).escrow_micros == one.escrow_micros
    desk = joined(broker, "operator").party
    first = parties.deposit(broker, desk, buyer.id, 5, key="d")
    assert parties.deposit(broker, desk, buyer.id, 5, key="d") == first


def test_lists_come_in_pages(broker, joined, order):
    buyer, owner, desk = (joined(broker, role).party for role in ("buyer", "owner", "operator"))
    posted = [tasks.post_task(broker, buyer, order(name=f"task {k}")).id for k in range(5)]
    page = tasks.list_tasks(broker, buyer, limit=3)
    rest = tasks.list_tasks(broker, buyer, limit=3, before=page.next)
    assert {task.id for task in (*page.items, *rest.items)} == set(posted)
    assert rest.next is None
    some = offers.list_offers(broker, owner, limit=2)
    assert len(some.items) == 2
    assert some.next is not None
    lines = operator.audit_log(broker, desk, limit=2)
    more = operator.audit_log(broker, desk, limit=2, before=lines.next)
    assert [line.id for line in (*lines.items, *more.items)] == sorted(
        [line.id for line in (*lines.items, *more.items)], reverse=True
    )
    assert {line.target for line in operator.audit_log(broker, desk, about=posted[0]).items} == {posted[0]}
    first = parties.list_parties(broker, desk, limit=2)
    assert parties.list_parties(broker, desk, limit=2, after=first.next).items
    assert operator.status(broker, desk).tasks == {"queued": 5}
    assert market.overview(broker, None).tasks_running == 5
    assert all(task.mine for task in market.overview(broker, buyer).tasks)


def test_keys_sessions_and_links(small, joined):
    person = joined(small, "owner")
    assert parties.party_of_key(small, person.key) == person.party
    forged = person.key[:-1] + ("a" if person.key[-1] != "a" else "b")
    for wrong in (forged, "flm_x_y", "", person.key + " ", "flm_" + "x" * 300):
        with pytest.raises(Unauthenticated):
            parties.party_of_key(small, wrong)
    signed_in = sessions.sign_in(small, person.key)
    assert sessions.session_of(small, signed_in.cookie)[0] == person.party
    sessions.sign_out(small, person.party, signed_in.cookie)
    with pytest.raises(Unauthenticated):
        sessions.session_of(small, signed_in.cookie)
    token = sessions.make_link(small, person.party.id)
    again = sessions.redeem_link(small, token)
    with pytest.raises(Unauthenticated):
        sessions.redeem_link(small, token)  # once
    with pytest.raises(Unauthenticated):
        sessions.redeem_link(small, sessions.make_link(small, person.party.id, seconds=-1))
    key_id = parties.list_keys(small, person.party).items[0].id
    parties.revoke_key(small, person.party, key_id)
    with pytest.raises(Unauthenticated):
        parties.party_of_key(small, person.key)
    desk = joined(small, "operator").party
    parties.set_active(small, desk, person.party.id, active=False)
    with pytest.raises(Unauthenticated):
        sessions.session_of(small, again.cookie)
    with pytest.raises(Conflict):
        parties.set_active(small, desk, desk.id, active=False)


def test_an_operator_who_replaces_her_own_key_has_the_new_one(small, joined):
    """And where the new one cannot be made, the old one still holds."""
    person = joined(small, "operator")
    desk = parties.party_of_key(small, person.key)
    for n in range(small.settings.max_keys_per_party):
        new = parties.reissue_key(small, desk, desk.id, key=f"again {n}").key
        with pytest.raises(Unauthenticated):
            parties.party_of_key(small, person.key)
        desk, person = parties.party_of_key(small, new), replace(person, key=new)
    assert len([one for one in parties.list_keys(small, desk).items if one.revoked_at is None]) == 1


def test_a_closed_owner_sells_no_more(small, joined, order, cheap_bid, play):
    """She cannot sign in to withdraw her bid, so it must not stand."""
    buyer, owner, desk = (joined(small, role).party for role in ("buyer", "owner", "operator"))
    task = tasks.post_task(small, buyer, order(rounds=2, bidders_per_round=12, simulated=False, minimum_bids=1))
    offers.place_bid(small, owner, task.id, cheap_bid())
    parties.set_active(small, desk, owner.id, active=False)
    play(small)
    assert tasks.get_task(small, buyer, task.id).rounds_done == 0
    parties.set_active(small, desk, owner.id, active=True)
    with small.database.write() as session:
        session.execute(update(TaskRow).values(next_at=0))
    play(small)
    assert tasks.get_task(small, buyer, task.id).rounds_done == 2
    assert statements.statement(small, owner).deliveries == 2


def test_the_explorer_uses_the_mechanisms_own_model(small, joined, order):
    buyer = joined(small, "buyer").party
    budgets = [100_000_000, 200_000_000, 1_000_000_000]
    request = ExploreRequest(task=order(bidders_per_round=12), budgets_micros=budgets, profiles=1)
    found = explore.explore(small, buyer, request)
    bounds = [point.error_bound for point in found.points]
    assert bounds == sorted(bounds, reverse=True)  # more money, less error
    assert all(point.spent_micros <= point.budget_micros for point in found.points)
    # all twelve owners bid in every round, so the explorer's figure is what the task's first round reports
    task = tasks.post_task(small, buyer, order(rounds=1, bidders_per_round=12, budget_per_round=200))
    Worker(small).run_until_idle()
    played = tasks.rounds(small, buyer, task.id).items[0]
    assert played.error_bound == pytest.approx(found.points[1].error_bound)
    assert played.spent_micros == pytest.approx(found.points[1].spent_micros, abs=20)
    over = ExploreRequest(
        task=order(mechanism={"auction": "m2"}), budgets_micros=[60_000_000], profiles=40, accuracy=True
    )
    assert "overspend" in explore.explore(small, buyer, over).points[0].failed
    assert all(point.over_second_best is None for point in found.points)  # nobody asked
    asked = request.model_copy(update={"second_best": True, "profiles": 4, "budgets_micros": budgets[:2]})
    held = [point.over_second_best for point in explore.explore(small, buyer, asked).points]
    assert all(1.0 < ratio < 3.0 for ratio in held)


def test_the_bid_helper_says_what_a_bid_earns(small, joined):
    owner = joined(small, "owner").party

    def ask(rate):
        bid = BidRequest(valuation=Valuation(rate=rate), privacy_budget=1.0)
        return explore.bid_help(small, owner, BidHelpRequest(bid=bid, auction="m1", profiles=100))

    cheap, dear = ask(0.1), ask(1000.0)
    assert cheap.wins > 0.9
    assert cheap.mean_payment_micros_if_won >= cheap.mean_cost_micros_if_won
    assert dear.wins == 0
    assert "not have won" in dear.words
    assert statements.epsilon_words(1.0).certainty_from_half == pytest.approx(np.e / (1 + np.e))
    assert "73 %" in cheap.epsilon.words


def test_an_audit_runs_in_the_background_and_finds_the_liar(small, joined):
    owner, other = joined(small, "owner").party, joined(small, "owner").party
    started = audits.start_audit(small, owner, AuditRequest(auction="all-in", profiles=20, owners=5), key="a")
    same = AuditRequest(auction="all-in", profiles=20, owners=5)
    assert audits.start_audit(small, owner, same, key="a").id == started.id
    Worker(small)._audits.run_all()
    done = audits.get_audit(small, owner, started.id)
    assert (done.state, done.progress) == ("done", 1.0)
    verdicts = {claim.claim: claim.verdict for claim in done.claims}
    assert verdicts == {
        "truthful": "not claimed",
        "rational": "holds",
        "budget_feasible": "holds",
        "within_privacy_budget": "holds",
    }
    assert done.report["truthful"]["owners_with_gain"] > 0
    with pytest.raises(NotFound):
        audits.get_audit(small, other, started.id)
    assert audits.list_audits(small, owner).items[0].report is None


def test_roles_are_checked_in_the_services_too(small, joined, order):
    buyer, owner = joined(small, "buyer").party, joined(small, "owner").party
    for call in (
        lambda: tasks.post_task(small, owner, order()),
        lambda: statements.statement(small, buyer),
        lambda: operator.status(small, buyer),
        lambda: ledger.verify(small, owner),
        lambda: parties.deposit(small, buyer, buyer.id, 1),
    ):
        with pytest.raises(Forbidden):
            call()
