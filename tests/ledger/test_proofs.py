"""Trees and receipts, against the definitions of RFC 6962 written out plainly."""

import copy
import dataclasses
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flmarket.errors import FlmarketError, InvalidInput, SettlementError
from flmarket.ledger import AwardState, Entry, Head, LedgerCorrupt, MemoryLedger, Receipt, Release, Resolution
from flmarket.ledger.entry import EntryKind, Line, fits, sealed
from flmarket.ledger.merkle import TILE, Tree, checked_consistency, checked_inclusion, digest, tiles
from flmarket.ledger.receipt import SealedReceipt, make_receipt, read_receipts, seal
from flmarket.privacy import ApproxDp, PureDp, RecordLevel, ZCdp


def leaf(number):
    return hashlib.sha256(b"\x00" + str(number).encode()).digest()


def plain_root(leaves):
    """RFC 6962, section 2.1, word by word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + plain_root(leaves[:k]) + plain_root(leaves[k:])).digest()


def plain_path(index, leaves):
    """Section 2.1.1."""
    if len(leaves) == 1:
        return []
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    if index < k:
        return [*plain_path(index, leaves[:k]), plain_root(leaves[k:])]
    return [*plain_path(index - k, leaves[k:]), plain_root(leaves[:k])]


def plain_consistency(old, leaves, whole=True):
    """Section 2.1.2."""
    if old == len(leaves):
        return [] if whole else [plain_root(leaves)]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    if old <= k:
        return [*plain_consistency(old, leaves[:k], whole), plain_root(leaves[k:])]
    return [*plain_consistency(old - k, leaves[k:], False), plain_root(leaves[:k])]


class Stored:
    """Leaves and tiles as a store keeps them, grown in steps, counting what proofs read."""

    def __init__(self, steps):
        self.nodes, self.read = {0: []}, 0
        for step in steps:
            old = len(self.nodes[0])
            self.nodes[0] += [leaf(old + i) for i in range(step)]
            for level, index, node in tiles(old, step, self.fetch):
                self.nodes.setdefault(level, []).append(node)
                assert len(self.nodes[level]) == index + 1

    def fetch(self, level, first, count):
        assert level % TILE == 0
        self.read += count
        found = self.nodes[level][first : first + count]
        assert len(found) == count
        return found


@settings(max_examples=60)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=4), st.data())
def test_roots_and_proofs_are_those_of_the_rfc(steps, data):
    stored = Stored(steps)
    leaves = stored.nodes[0]
    size = data.draw(st.integers(1, len(leaves)))
    tree = Tree(size, stored.fetch)
    assert tree.root() == plain_root(leaves[:size])
    index = data.draw(st.integers(0, size - 1))
    path = tree.inclusion(index)
    assert list(path) == plain_path(index, leaves[:size])
    assert checked_inclusion(leaves[index], index, path, size) == tree.root()
    old = data.draw(st.integers(1, size))
    proof = tree.consistency(old)
    assert list(proof) == plain_consistency(old, leaves[:size])
    assert checked_consistency(old, plain_root(leaves[:old]), size, proof) == tree.root()


def test_every_proof_of_every_small_log():
    """All logs of up to 18 entries, all entries, all earlier sizes; what is cut, bent or too long leads nowhere."""
    leaves, other = [leaf(i) for i in range(18)], leaf(-1)
    for size in range(1, 19):
        tree = Tree(size, lambda level, first, count: leaves[first : first + count])
        root = plain_root(leaves[:size])
        assert tree.head() == Head(size, leaves[size - 1].hex(), root.hex())
        for index in range(size):
            path = plain_path(index, leaves[:size])
            assert list(tree.inclusion(index)) == path
            assert checked_inclusion(leaves[index], index, path, size) == root
            for wrong in (path[:-1], [*path, other]):
                if wrong != path:
                    with pytest.raises(InvalidInput, match="path"):
                        checked_inclusion(leaves[index], index, wrong, size)
        for index in (-1, size):
            for wrong in (lambda at: tree.inclusion(at), lambda at: checked_inclusion(other, at, [], size)):  # noqa: B023
                with pytest.raises(InvalidInput):
                    wrong(index)
        for old in range(1, size + 1):
            before, path = plain_root(leaves[:old]), plain_consistency(old, leaves[:size])
            assert list(tree.consistency(old)) == path
            assert checked_consistency(old, before, size, path) == root
            for wrong in (path[:-1], [*path, other]):
                if wrong != path:
                    with pytest.raises(InvalidInput, match="path"):
                        checked_consistency(old, before, size, wrong)
            if old & (old - 1) and old < size:
                with pytest.raises(InvalidInput, match="old root"):
                    checked_consistency(old, other, size, path)
        assert tree.consistency(0) == ()
        for old in (-1, size + 1):
            with pytest.raises(InvalidInput, match="old_size"):
                tree.consistency(old)
        for old in (0, size + 1):
            with pytest.raises(InvalidInput, match="old size"):
                checked_consistency(old, root, size, [])


def test_heads_and_hashes_are_read_strictly():
    good = {"size": 0, "last": "0" * 64, "root": "ab" * 32}
    for size in (0, 1, 2**62 - 1):
        assert Head.from_dict(good | {"size": size}).to_dict() == good | {"size": size}
    bad = [good | {"size": size} for size in (-1, 2**62, True, 1.0, "1", None)]
    for wrong in (*bad, None, [], {}, good | {"more": 1}, {"size": 0, "last": "0" * 64}, good | {"root": "0" * 63}):
        with pytest.raises(InvalidInput, match="head"):
            Head.from_dict(wrong)
    assert digest("x", "0A" * 32) == b"\x0a" * 32
    for wrong in ("ab" * 31, "ab" * 33, "xy" * 32, " a" * 32, "\u0661" * 64, b"ab" * 32, 7, None):
        with pytest.raises(InvalidInput, match="hexadecimal"):
            digest("x", wrong)


def test_proofs_read_little_of_a_large_log():
    stored = Stored([70_000, 30_001])
    stored.read = 0
    tree = Tree(100_001, stored.fetch)
    path = tree.inclusion(77_777)
    assert stored.read < 2500
    assert checked_inclusion(leaf(77_777), 77_777, path, 100_001) == tree.root()
    assert len(path) == 17


@given(st.integers(2, 40), st.data())
def test_wrong_proofs_lead_elsewhere(size, data):
    leaves = [leaf(i) for i in range(size)]
    tree = Tree(size, lambda level, first, count: leaves[first : first + count])
    index = data.draw(st.integers(0, size - 1))
    path = list(tree.inclusion(index))
    spot = data.draw(st.integers(0, len(path) - 1))
    bent = [*path[:spot], leaf(-1), *path[spot + 1 :]]
    assert checked_inclusion(leaves[index], index, bent, size) != tree.root()
    for wrong in (path[:-1], [*path, leaf(0)]):
        with pytest.raises(InvalidInput, match="path"):
            checked_inclusion(leaves[index], index, wrong, size)
    with pytest.raises(InvalidInput):
        checked_inclusion(leaves[index], size, path, size)
    old = data.draw(st.integers(1, size - 1))
    with pytest.raises(InvalidInput, match="path"):
        checked_consistency(old, leaf(-1) if old & (old - 1) else plain_root(leaves[:old]), size, [])


def test_a_rewritten_past_has_no_consistency_proof():
    leaves = [leaf(i) for i in range(13)]
    forged = [leaf(99), *leaves[1:]]
    tree = Tree(13, lambda level, first, count: forged[first : first + count])
    for old in range(1, 13):
        try:
            led_to = checked_consistency(old, plain_root(leaves[:old]), 13, tree.consistency(old))
        except InvalidInput:
            continue
        assert old & (old - 1) == 0  # there the old root is part of the path, and leads to another new root
        assert led_to != tree.root()


@pytest.fixture
def settled(ledger, award):
    ledger.hold_many([award(id=f"t/0/{i}", owner=f"owner-{i}", price=i) for i in range(40)])
    ledger.resolve_many(
        Resolution(f"t/0/{i}", AwardState.POSTED, release=Release(f"t/0/{i}", "laplace-l1", PureDp(1.0)))
        for i in range(20)
    )
    return ledger


def test_a_receipt_is_checked_with_nothing_but_the_head(settled):
    head = Head.from_dict(json.loads(json.dumps(settled.head().to_dict())))
    receipt = Receipt.from_dict(json.loads(json.dumps(settled.receipt("t/0/7").to_dict())))
    award, release = receipt.check(head)
    assert (award.owner, award.price_micros, award.state) == ("owner-7", 7, AwardState.POSTED)
    assert release == Release("t/0/7", "laplace-l1", PureDp(1.0))
    award, release = settled.receipt("t/0/30").check(head, pending=True)
    assert award.state is AwardState.PENDING
    assert release is None
    settled.void("t/0/30", "late")
    with pytest.raises(LedgerCorrupt, match="another head"):
        settled.receipt("t/0/30").check(head)
    assert settled.receipt("t/0/30", head.size).check(head, pending=True)[0].state is AwardState.PENDING
    assert settled.receipt("t/0/30").check(settled.head())[0].reason == "late"
    with pytest.raises(SettlementError, match="no award"):
        settled.receipt("t/0/99")
    with pytest.raises(InvalidInput, match="award"):
        settled.receipt("t/0/30", 3)


def test_heads_are_consistent(settled):
    old = settled.head(17)
    settled.deposit("d2", "buyer", 5)
    new = settled.head()
    proof = [bytes.fromhex(step) for step in settled.consistency(17)]
    assert checked_consistency(17, bytes.fromhex(old.root), new.size, proof).hex() == new.root
    settled.verify(old)
    with pytest.raises(LedgerCorrupt, match="known head"):
        settled.verify(Head(17, old.last, "0" * 64))
    with pytest.raises(LedgerCorrupt, match=rf"entry {new.size}: missing"):
        settled.verify(Head(new.size + 1, new.last, new.root))
    with pytest.raises(InvalidInput, match="size"):
        settled.head(new.size + 1)


def test_any_changed_character_of_a_receipt_is_seen():
    """Every value in it, one character changed at a time."""
    book = MemoryLedger(clock=lambda: 5)
    book.deposit("d", "buyer", 100)
    book.hold_many([_award(i) for i in range(5)])
    book.resolve_many([Resolution("a3", AwardState.POSTED, release=Release("a3", "m", PureDp(0.5)))])
    head, good = book.head(), book.receipt("a3").to_dict()
    Receipt.from_dict(good).check(head)
    changes = 0
    for path, value in list(_leaves(good)):
        for other in _neighbours(value):
            bent = copy.deepcopy(good)
            place = bent
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = other
            with pytest.raises(FlmarketError):
                Receipt.from_dict(bent).check(head)
            changes += 1
    assert changes > 250


def test_a_receipt_cannot_mix_awards():
    book = MemoryLedger(clock=lambda: 5)
    book.deposit("d", "buyer", 100)
    book.hold_many([_award(i) for i in range(5)])
    given = {i: Release(f"a{i}", "m", PureDp(0.5)) for i in (1, 2)}
    book.resolve_many([Resolution(f"a{i}", AwardState.POSTED, release=given[i]) for i in (1, 2)])
    one, two = book.receipt("a1"), book.receipt("a2")
    one.check(book.head())
    for proofs in ((*one.proofs[:2], two.proofs[2]), one.proofs[1:], (*one.proofs, *one.proofs[1:]), ()):
        with pytest.raises(LedgerCorrupt):
            Receipt("a1", proofs, one.head).check(book.head())


@pytest.mark.parametrize("data", [None, {}, {"version": 2}, {"version": 1}, {"version": 1, "award": "a", "proofs": 3}])
def test_malformed_receipts_are_refused(data):
    with pytest.raises(InvalidInput):
        Receipt.from_dict(data)


def log_of(*lines):
    """Receipt of award "a" in a log that no rule was asked about."""
    entries, previous = [], "0" * 64
    for seq, line in enumerate(lines):
        entries.append(sealed(line, seq, 1, previous))
        previous = entries[-1].hash
    leaves = [bytes.fromhex(one.hash) for one in entries]
    return make_receipt("a", entries, Tree(len(leaves), lambda level, first, count: leaves[first : first + count]))


HELD = Line(EntryKind.HOLD, "a", "buyer", "escrow", 10, "her", 0, detail='{"loss":{"kind":"pure-dp","epsilon":1.0}}')
PAID = Line(EntryKind.POSTED, "a", "escrow", "her", 10, "her")
BACK = Line(EntryKind.VOIDED, "a", "escrow", "buyer", 10, "her", detail='{"reason":"late"}')


def given(epsilon, **changes):
    detail = f'{{"guarantee":{{"kind":"pure-dp","epsilon":{epsilon}}},"mechanism":"m"}}'
    return Line(EntryKind.RELEASE, "a", owner="her", detail=detail)._replace(**changes)


def test_a_broker_who_writes_what_he_likes_gets_no_receipt_for_it():
    """Rightly hashed and proven entries that do not belong together."""
    for story in ((HELD, given(1.0), PAID), (HELD, BACK), (HELD, given(0.5), BACK), (HELD, BACK, given(0.5))):
        receipt = log_of(*story)
        assert receipt.check(receipt.head)[0].price_micros == 10
    change = Line._replace
    stories = {
        "from its hold on": [(given(1.0), PAID), (PAID, HELD), (HELD, change(given(1.0), ref="b"), PAID),
                             (HELD, given(1.0), change(PAID, ref="b"))],
        "more than once": [(HELD, given(1.0), given(1.0), PAID), (HELD, given(1.0), PAID, BACK), (HELD, BACK, BACK),
                           (HELD, HELD, BACK), (HELD, HELD, given(1.0), PAID)],
        "do not belong together": [
            (HELD, given(1.1), PAID), (HELD, PAID, given(1.0)), (HELD, given(1.0, owner="him"), PAID),
            (HELD, given(1.0), change(PAID, credit="buyer")), (HELD, given(1.0), change(PAID, amount_micros=9)),
            (HELD, given(1.0), change(PAID, debit="bank")), (HELD, change(BACK, credit="her")),
            (HELD, change(BACK, owner="him"))],
        "neither payment nor refund": [(HELD,), (HELD, given(1.0))],
        "without its release": [(HELD, PAID)],
    }  # fmt: skip
    for words, wrong in stories.items():
        for story in wrong:
            with pytest.raises(LedgerCorrupt, match=words):
                log_of(*story).check()
    assert log_of(HELD).check(pending=True)[0].state is AwardState.PENDING


def test_sealed_receipts_are_read_strictly():
    receipt = seal(log_of(HELD, given(1.0), PAID), award="x", owner="y")
    receipt.check(receipt.head)
    assert [one.kind for one in receipt.entries] == ["hold", "release", "posted"]
    one, two, _ = receipt.entries
    for entries in ((), (one, one), (two, one)):
        with pytest.raises(LedgerCorrupt, match="no entries, or one twice"):
            dataclasses.replace(receipt, entries=entries).check()
    good = receipt.to_dict()
    assert SealedReceipt.from_dict(good) == receipt
    before = {name: value for name, value in good.items() if name != "loss"} | {"version": 1, "epsilon": 1.0}
    assert SealedReceipt.from_dict(before) == receipt
    bad = [good | change for change in ({"version": 1}, {"version": 3}, {"version": 2.0}, {"more": 1}, {"head": None},
           {"entries": 3}, {"entries": [{}]}, {"price_micros": "x"}, {"loss": {"kind": "gift"}})]  # fmt: skip
    for wrong in (*bad, {name: good[name] for name in good if name != "state"}, {}, [], None, "x"):
        with pytest.raises(InvalidInput):
            SealedReceipt.from_dict(wrong)


def test_receipts_are_found_in_what_markets_hand_out_and_in_nothing_else():
    receipt = seal(log_of(HELD, given(1.0), PAID), award="x", owner="y")
    good = receipt.to_dict()
    for wrapped in (good, [good], {"items": [{"document": good}]}, {"receipts": [good]}):
        assert read_receipts(wrapped) == [receipt]
    nested, boxed = good, good
    for _ in range(5_000):
        nested, boxed = [nested], {"items": boxed}
    for wrong in ("x", "", [], ["x"], [good, "x"], {}, 3, None, nested, boxed, [[]], {"items": []}):
        with pytest.raises(InvalidInput):
            read_receipts(wrong)


def test_a_loss_of_records_fits_one_of_records_only():
    records = RecordLevel(ZCdp(0.5))
    for loss, gave, fit in [
        (records, RecordLevel(ZCdp(0.5)), True), (records, RecordLevel(ZCdp(0.4)), True),
        (records, RecordLevel(ZCdp(0.6)), False), (records, ZCdp(0.1), False), (ZCdp(0.5), records, False),
        (PureDp(1.0), records, False), (ApproxDp(1.0, 1e-5), ApproxDp(1.0, 1e-5), True),
        (ApproxDp(1.0, 1e-5), ApproxDp(1.0 + 5e-10, 1e-5), True), (ApproxDp(1.0, 1e-5), ApproxDp(1.0, 2e-5), False),
        (ApproxDp(1.0, 1e-5), ApproxDp(1.0 + 1e-8, 1e-5), False), (PureDp(1.0), PureDp(1.0 + 5e-10), True),
        (PureDp(1.0), PureDp(1.0 + 2e-9), False),
    ]:  # fmt: skip
        assert fits(Release("a", "m", gave), loss) is fit, (loss, gave)


def test_entries_are_read_strictly():
    book = MemoryLedger(clock=lambda: 5)
    book.deposit("d", "buyer", 100)
    good = next(book.entries()).to_dict()
    assert Entry.from_dict(good) == next(book.entries())
    for bad in (good | {"seq": True}, good | {"seq": 0.0}, good | {"kind": "gift"}, good | {"more": 1}, {}, None, []):
        with pytest.raises(InvalidInput, match="entry"):
            Entry.from_dict(bad)


def test_the_bytes_that_are_hashed():
    """Pinned: old receipts must stay checkable."""
    book = MemoryLedger(clock=lambda: 5)
    book.deposit("d-ü", "buyer", 100)
    text = (
        '{"amount_micros":100,"credit":"buyer","debit":"bank","detail":"{}","kind":"deposit","limit_pico":null,'
        '"owner":null,"previous":"' + "0" * 64 + '","ref":"d-\\u00fc","round_index":null,"seq":0,"spent_pico":null,'
        '"time_us":5}'
    )
    assert next(book.entries()).hash == hashlib.sha256(b"\x00" + text.encode()).hexdigest()


def _award(i):
    from flmarket.ledger import Award

    return Award(f"a{i}", 0, "buyer", f"owner-{i}", 1.0, 10)


def _leaves(value, path=()):
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _neighbours(value):
    if value is None:
        return ["x", 0]
    if isinstance(value, int):
        return [value + 1, str(value)]
    return [value[:i] + ("1" if value[i] != "1" else "2") + value[i + 1 :] for i in range(0, len(value), 7)] + [
        value + "0"
    ]
