"""Brokers who want an owner's update without her price in escrow, or a receipt for less than it says."""

import copy
import dataclasses
import json
import time

import pytest

from flmarket.errors import FlmarketError, InvalidInput, SettlementError
from flmarket.ledger import (
    Award,
    AwardState,
    Head,
    HoldNotProven,
    HoldReceipt,
    LedgerCorrupt,
    MemoryLedger,
    Receipt,
    Release,
    Resolution,
    SqlLedger,
    hold_receipt,
    hold_receipts,
)
from flmarket.ledger.entry import EntryKind, Line, sealed
from flmarket.ledger.merkle import Tree
from flmarket.ledger.receipt import Proof
from flmarket.privacy import PureDp, ZCdp

HERS = {"award_id": "t/1/7", "owner": "owner-7", "price_micros": 17}
EXACT = {**HERS, "buyer": "buyer", "loss": 0.5, "round_index": 1}


def awards(count, index=1):
    return [Award(f"t/{index}/{i}", index, "buyer", f"owner-{i}", 0.5, 10 + i) for i in range(count)]


def over_the_wire(receipt):
    return HoldReceipt.from_dict(json.loads(json.dumps(receipt.to_dict())))


@pytest.fixture
def held(empty):
    """A ledger with a round that is paid, and one that is held."""
    empty.deposit("d", "buyer", 10**6)
    for award in empty.hold_many(awards(3, 0)):
        empty.post(award.id)
    empty.hold_many(awards(20))
    return empty


def wrong(receipt, part, seen=None, **changes):
    with pytest.raises(HoldNotProven) as caught:
        receipt.verify(**{**HERS, **changes}, seen=seen)
    assert caught.value.part == part


def test_an_owner_sees_her_price_in_escrow_before_and_after_she_knows_the_broker(held):
    first = over_the_wire(hold_receipt(held, "t/1/7"))
    seen = first.verify(**EXACT)
    assert seen == held.head()
    held.deposit("more", "buyer", 5)
    held.hold_many(awards(300, 2))
    again = over_the_wire(hold_receipt(held, "t/2/7", since=seen))
    head = again.verify(award_id="t/2/7", owner="owner-7", price_micros=17, seen=seen)
    assert head == held.head()
    assert over_the_wire(hold_receipt(held, "t/2/7", since=head)).verify(**{**HERS, "award_id": "t/2/7"}, seen=head)
    # and from an empty log on
    nothing = held.head(0)
    assert hold_receipt(held, "t/1/7", since=nothing).verify(**HERS, seen=nothing) == held.head()


@pytest.mark.parametrize(
    "change",
    [
        {"award_id": "t/1/8"},
        {"owner": "owner-8"},
        {"price_micros": 18},
        {"price_micros": 16},
        {"buyer": "other"},
        {"loss": 0.4},
        {"loss": ZCdp(0.5)},
        {"round_index": 2},
    ],
)
def test_a_receipt_for_other_terms_is_no_receipt(held, change):
    wrong(hold_receipt(held, "t/1/7"), "award", **change)


def test_only_what_is_pending_gets_a_receipt(held):
    held.void("t/1/7", "changed our mind")
    held.post("t/1/8")
    for award_id, words in (("t/1/7", "voided"), ("t/1/8", "posted"), ("t/0/0", "posted"), ("t/9/9", "no award")):
        with pytest.raises(SettlementError, match=words):
            hold_receipt(held, award_id)
    with pytest.raises(SettlementError, match="voided"):
        hold_receipts(held, ["t/1/6", "t/1/7"])
    assert hold_receipts(held, []) == {}


def test_a_receipt_of_before_does_not_hide_a_void(held):
    """The broker shows yesterday's receipt after voiding: its head is older than the one she has seen since."""
    old = hold_receipt(held, "t/1/7")
    held.void("t/1/7", "changed our mind")
    seen = hold_receipt(held, "t/1/8").verify(award_id="t/1/8", owner="owner-8", price_micros=18)
    wrong(old, "consistency", seen=seen)
    with pytest.raises(InvalidInput, match="since"):
        hold_receipt(held, "t/1/8", since=Head(seen.size + 1, seen.last, seen.root))


def test_a_broker_with_two_logs_is_caught(held):
    """She saw the true log; the hold stands in another one, made for her eyes, that claims the same past."""
    seen = hold_receipt(held, "t/1/7").verify(**HERS)
    other = MemoryLedger(clock=lambda: 5)
    other.deposit("d", "buyer", 10**6)
    other.hold_many([award for index in range(40) for award in awards(20, index)])
    shown = hold_receipt(other, "t/1/7")
    assert shown.verify(**HERS)  # nothing wrong by itself: that is what the head of before is for
    wrong(shown, "consistency", seen=seen)
    with pytest.raises(InvalidInput, match="since"):
        hold_receipt(other, "t/1/7", since=seen)
    tree = Tree(other.head().size, other._hashes)
    path = tuple(step.hex() for step in tree.consistency(seen.size))
    for steps in (path, path[:-1], (*path, path[0]), ()):
        wrong(dataclasses.replace(shown, since=seen.size, consistency=steps), "consistency", seen=seen)


def test_the_past_is_as_long_and_as_it_was(held):
    """A path without a past; and a head of the same entries and root that names another last one."""
    receipt, head = hold_receipt(held, "t/1/7"), held.head()
    wrong(dataclasses.replace(receipt, consistency=receipt.newest), "consistency")
    again = hold_receipt(held, "t/1/7", head)
    assert again.verify(**HERS, seen=head) == head
    wrong(again, "consistency", seen=dataclasses.replace(head, last="0" * 64))
    longer = dataclasses.replace(head, size=head.size + 1)
    wrong(dataclasses.replace(again, since=head.size + 1), "consistency", seen=longer)
    for path in ("ab" * 32, {}, None, ("ab" * 32,), ["ab" * 32] * 65):
        for name in ("path", "newest", "consistency"):
            with pytest.raises(InvalidInput, match=name):
                HoldReceipt.from_dict(receipt.to_dict() | {name: path})


def test_proofs_have_no_node_too_many_or_too_few(held):
    seen = held.head(9)
    good = hold_receipt(held, "t/1/7", since=seen)
    good.verify(**HERS, seen=seen)
    node = good.head.root
    for bad in ((*good.hold.path, node), good.hold.path[:-1], (), good.hold.path[::-1]):
        wrong(dataclasses.replace(good, hold=Proof(good.hold.entry, bad)), "inclusion", seen=seen)
    for bad in ((*good.newest, node), good.newest[:-1]):
        wrong(dataclasses.replace(good, newest=bad), "head", seen=seen)
    for bad in ((*good.consistency, node), good.consistency[:-1], ()):
        wrong(dataclasses.replace(good, consistency=bad), "consistency", seen=seen)
    wrong(dataclasses.replace(good, since=0), "consistency", seen=seen)
    wrong(good, "consistency", seen=None)  # she has seen nothing, and is shown a proof from somewhere


def test_another_entry_is_no_hold(held):
    """Genuine entries of the log that put nothing into escrow, and one that never was in it."""
    tree = Tree(held.head().size, held._hashes)
    good = hold_receipt(held, "t/1/7")
    for entry in held.entries():
        if entry.line.kind is not EntryKind.HOLD:
            path = tuple(step.hex() for step in tree.inclusion(entry.seq))
            wrong(dataclasses.replace(good, hold=Proof(entry, path)), "entry")
    true = good.hold.entry
    for line in (
        true.line._replace(credit="buyer"),
        true.line._replace(debit=None),
        true.line._replace(detail="{"),
        true.line._replace(detail="[" * 4000),
        true.line._replace(detail="{}"),
        Line(EntryKind.HOLD, "t/1/7"),
    ):
        forged = sealed(line, true.seq, true.time_us, true.previous)
        wrong(dataclasses.replace(good, hold=Proof(forged, good.hold.path)), "entry")
    richer = sealed(true.line._replace(amount_micros=18), true.seq, true.time_us, true.previous)
    wrong(dataclasses.replace(good, hold=Proof(richer, good.hold.path)), "inclusion", price_micros=18)


def test_any_changed_character_is_seen():
    book = MemoryLedger(clock=lambda: 5)
    book.deposit("d", "buyer", 1000)
    book.hold_many(awards(8))
    seen = book.head(5)
    good = hold_receipt(book, "t/1/7", since=seen).to_dict()
    places, tried = [(good, key) for key in good if not isinstance(good[key], dict | list)], 0
    places += [(part, key) for part in (good["entry"], good["head"]) for key in part]
    places += [(part, i) for part in (good["path"], good["newest"], good["consistency"]) for i in range(len(part))]
    for part, key in places:
        value = part[key]
        for other in _others(value):
            part[key] = other
            with pytest.raises(FlmarketError):
                HoldReceipt.from_dict(copy.deepcopy(good)).verify(**HERS, seen=seen)
            part[key] = value
            tried += 1
    assert tried > 120
    HoldReceipt.from_dict(good).verify(**HERS, seen=seen)


def _others(value):
    if value is None:
        return ["x", 0]
    if isinstance(value, int):
        return [value + 1, str(value), bool(value), float(value) + 0.5]
    return [value[:i] + ("1" if value[i] != "1" else "2") + value[i + 1 :] for i in range(0, len(value), 9)] + [None]


def test_a_flood_is_not_read():
    """Texts, paths and numbers beyond any real receipt are refused by their size, before they are hashed or parsed."""
    book = MemoryLedger(clock=lambda: 5)
    book.deposit("d", "buyer", 1000)
    book.hold_many(awards(8))
    good = hold_receipt(book, "t/1/7").to_dict()
    floods = [{name: ["0" * 64] * 65} for name in ("path", "newest", "consistency")]
    floods += [{"entry": {**good["entry"], "detail": "[" * 10**6}}, {"since": 2**62}, {"since": True}, {"more": 1}]
    floods += [{"version": 2}, {"head": None}, {"entry": []}, {"path": "0" * 64}, {"path": [0]}, {"path": ["0" * 63]}]
    for flood in floods:
        with pytest.raises(InvalidInput) as caught:
            HoldReceipt.from_dict({**good, **flood})
        assert len(str(caught.value)) < 2000
    for data in (None, [], {}, "x"):
        with pytest.raises(InvalidInput):
            HoldReceipt.from_dict(data)


@pytest.mark.parametrize("end", [AwardState.POSTED, AwardState.VOIDED, AwardState.EXPIRED])
def test_a_receipt_with_an_entry_left_out_is_refused(held, end):
    """The broker shows her the hold and not the payment, the payment and not the release, or the other way round."""
    given = Release("t/1/7", "laplace-l1", PureDp(0.5))
    held.resolve_many([Resolution("t/1/7", end, "", given)])
    held.void("t/1/8", "no update came")
    head, whole = held.head(), held.receipt("t/1/7")
    award, release = whole.check(head)
    assert (award.state, release) == (end, given)
    assert [proof.entry.line.kind for proof in whole.proofs] == [EntryKind.HOLD, EntryKind.RELEASE, EntryKind(end)]
    hold, left, ending = whole.proofs
    missing = [(hold,), (hold, left), (left, ending), (ending,), (), (hold, hold, left, ending), (hold, left, left)]
    missing += [(hold, ending)] if end is AwardState.POSTED else []  # a void without release: nothing left
    for proofs in missing:
        with pytest.raises(LedgerCorrupt):
            Receipt("t/1/7", proofs, head).check(head)
    assert held.receipt("t/1/8").check(head)[1] is None
    with pytest.raises(LedgerCorrupt, match="neither payment nor refund"):
        held.receipt("t/1/9").check(head)
    assert held.receipt("t/1/9").check(head, pending=True)[0].state is AwardState.PENDING


def test_a_payment_for_nothing_said_is_no_receipt(held):
    """An owner without a registered cap may be paid with no release on record; a receipt that hides it is refused."""
    held.post("t/1/7")
    with pytest.raises(LedgerCorrupt, match="without its release"):
        held.receipt("t/1/7").check(held.head())
    for award_id, epsilon in (("refund", 0.0), ("raw", float("inf"))):
        held.hold(Award(award_id, 0, "buyer", "owner-1", epsilon, 1))
        held.post(award_id)
        assert held.receipt(award_id).check(held.head())[0].state is AwardState.POSTED


def test_receipts_have_no_node_too_many_or_too_few(held):
    held.void("t/1/7", "no update came")
    head, good = held.head(), held.receipt("t/1/7")
    good.check(head)
    for path in ((*good.proofs[1].path, head.root), good.proofs[1].path[:-1], ()):
        with pytest.raises(LedgerCorrupt):
            Receipt("t/1/7", (good.proofs[0], Proof(good.proofs[1].entry, path)), head).check(head)
    flood = good.to_dict()
    flood["proofs"][0]["path"] = ["0" * 64] * 65
    with pytest.raises(InvalidInput, match="path"):
        Receipt.from_dict(flood)


def test_a_round_of_receipts_reads_little(tmp_path, monkeypatch):
    """Each tile once for all owners, so that a round's receipts cost little more than one; each owner has her past."""
    with SqlLedger(f"sqlite:///{tmp_path}/market.db") as book:
        book.deposit("d", "buyer", 10**9)
        heads = []
        for index in range(12):
            book.hold_many(awards(500, index))
            heads.append(book.head())
        reads, hashes = [], book._hashes
        monkeypatch.setattr(book, "_hashes", lambda *run: reads.append(run) or hashes(*run))
        since = {f"t/11/{i}": heads[i % 10] for i in range(400)}  # the last hundred know nothing yet
        start = time.process_time()
        made = hold_receipts(book, [f"t/11/{i}" for i in range(500)], since)
        assert time.process_time() - start < 5
        assert len(reads) < 60
        assert len(set(reads)) > 3
        for i in range(500):
            expected = {"award_id": f"t/11/{i}", "owner": f"owner-{i}", "price_micros": 10 + i}
            seen = since.get(f"t/11/{i}")
            assert over_the_wire(made[f"t/11/{i}"]).verify(**expected, seen=seen) == book.head()
        assert len(json.dumps(made["t/11/0"].to_dict())) < 5000
