"""What every ledger store must do, whatever it is made of."""

import dataclasses
import json
from pathlib import Path

import pytest

from flmarket import privacy
from flmarket.errors import InvalidInput, PrivacyBudgetExhausted, SettlementError
from flmarket.ledger import (
    BANK,
    ESCROW,
    FEES,
    Award,
    AwardState,
    Entry,
    EntryKind,
    Head,
    HoldNotProven,
    HoldReceipt,
    IdReused,
    LedgerCorrupt,
    MemoryLedger,
    Receipt,
    Release,
    Resolution,
    SealedReceipt,
    SqlLedger,
    Transfer,
    store,
)
from flmarket.ledger.receipt import seal
from flmarket.ledger.replay import Replay
from flmarket.privacy import ApproxDp, ExponentialRelease, GaussianL2, GaussianRelease, PureDp, Unprotected, ZCdp


def money(ledger):
    return ledger.balance("buyer"), ledger.balance(ESCROW), ledger.balance("owner-1")


def delivered(id, guarantee, state=AwardState.POSTED):
    return Resolution(id, state, release=Release(id, "laplace-l1", guarantee))


def test_an_award_is_paid_once(ledger, award):
    ledger.hold(award())
    assert money(ledger) == (700, 300, 0)
    assert ledger.post("t/0/1").state is AwardState.POSTED
    assert ledger.post("t/0/1").state is AwardState.POSTED  # a retry changes nothing
    assert money(ledger) == (700, 0, 300)
    ledger.verify()


@pytest.mark.parametrize("end", ["void", "expire"])
def test_what_is_not_delivered_goes_back(ledger, award, end):
    ledger.hold(award())
    ledger.void("t/0/1", "dropped out") if end == "void" else ledger.expire("t/0/1")
    assert ledger.balance("buyer") == 1000
    assert ledger.award("t/0/1").reason == ("dropped out" if end == "void" else "deadline passed")
    with pytest.raises(SettlementError, match="already"):
        ledger.post("t/0/1")
    assert ledger.balance("owner-1") == 0
    ledger.verify()


def test_repeats_are_harmless_and_contradictions_refused(ledger, award):
    ledger.deposit("d1", "buyer", 1000)
    assert ledger.balance("buyer") == 1000
    for account, amount in (("buyer", 2000), ("other", 1000)):
        with pytest.raises(IdReused, match="other terms"):
            ledger.deposit("d1", account, amount)
    ledger.hold(award())
    ledger.hold(award())
    assert ledger.balance(ESCROW) == 300
    for change in (
        {"price_micros": 301},
        {"owner": "owner-2"},
        {"loss": PureDp(2.0)},
        {"round_index": 1},
        {"buyer": "b2"},
    ):
        with pytest.raises(IdReused, match="other terms"):
            ledger.hold(award(**change))
    ledger.post("t/0/1")
    assert ledger.hold(award()).state is AwardState.POSTED  # a late retry of the hold does not open it again
    assert ledger.balance(ESCROW) == 0
    assert len(list(ledger.entries())) == 3


def test_nobody_spends_what_she_does_not_have(ledger, award):
    with pytest.raises(SettlementError, match=r"holds 0\.001"):
        ledger.hold(award(price=1001))
    for take in (ledger.withdraw, ledger.charge_fee):
        with pytest.raises(SettlementError, match="holds 0"):
            take("w1", "owner-1", 1)
    assert ledger.balance("buyer") == 1000
    assert list(ledger.awards()) == []
    with pytest.raises(SettlementError, match="no award"):
        ledger.post("t/9/9")
    with pytest.raises(SettlementError, match="no award"):
        ledger.award("t/9/9")


@pytest.mark.parametrize("amount", [-1, 1.5, True, "7", 2**63])
def test_amounts_are_whole_and_positive(ledger, award, amount):
    with pytest.raises(InvalidInput, match="amount_micros"):
        ledger.deposit("d2", "buyer", amount)
    with pytest.raises(InvalidInput, match="amount_micros"):
        ledger.hold(award(price=amount))


@pytest.mark.parametrize("account", [BANK, ESCROW, FEES])
def test_the_house_is_no_party(ledger, award, account):
    with pytest.raises(InvalidInput, match="account"):
        ledger.deposit("d2", account, 1)
    for side in ("buyer", "owner"):
        with pytest.raises(InvalidInput, match=side):
            ledger.hold(award(**{side: account}))


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\0b", "\ud800", 7, None])
def test_names_are_printable_and_bounded(ledger, award, name):
    for call in (
        lambda: ledger.deposit(name, "buyer", 1),
        lambda: ledger.deposit("d2", name, 1),
        lambda: ledger.hold(award(id=name)),
        lambda: ledger.hold(award(owner=name)),
        lambda: ledger.register_cap(name, PureDp(1.0)),
    ):
        with pytest.raises(InvalidInput):
            call()
    assert len(list(ledger.entries())) == 1
    assert ledger.balance(name) == 0
    assert list(ledger.awards(owner=name)) == [] or name is None
    with pytest.raises(SettlementError, match="no award"):
        ledger.award(name)


@pytest.mark.parametrize(
    "change",
    [{"loss": -1.0}, {"loss": float("nan")}, {"loss": True}, {"loss": "1"}, {"loss": None}, {"round_index": -1}],
)
def test_terms_make_sense(ledger, award, change):
    with pytest.raises(InvalidInput):
        ledger.hold(award(**change))


def test_names_of_any_script_and_endless_epsilon(ledger, award):
    odd = award(id="аукцион/0/ø", owner="owner-µ", loss=float("inf"))
    assert ledger.hold(odd) == odd
    assert list(ledger.awards()) == [odd]
    ledger.verify()


def test_a_reason_is_cleaned_not_refused(ledger, award):
    ledger.hold(award())
    ledger.void("t/0/1", "bad\0update:\n" + "x" * 1000)
    reason = ledger.award("t/0/1").reason
    assert reason.startswith("bad update: xxx")
    assert len(reason) == 500
    ledger.verify()


def test_only_pending_awards_are_held(ledger, award):
    with pytest.raises(SettlementError, match="only a pending"):
        ledger.hold(award(state=AwardState.POSTED))
    ledger.hold(award())
    with pytest.raises(InvalidInput, match="state"):
        ledger.resolve_many([Resolution("t/0/1", AwardState.PENDING)])


def test_money_comes_in_pays_fees_and_goes_out(ledger):
    ledger.charge_fee("f1", "buyer", 50)
    ledger.charge_fee("f1", "buyer", 50)
    ledger.withdraw("w1", "buyer", 900)
    ledger.withdraw("w2", FEES, 20)
    assert dict(ledger.balances()) == {BANK: -80, ESCROW: 0, "buyer": 50, FEES: 30}
    assert [t for t in ledger.transfers() if t.credit == BANK] == [
        Transfer("w1/withdrawal", "buyer", BANK, 900),
        Transfer("w2/withdrawal", FEES, BANK, 20),
    ]
    ledger.verify()


def test_limits_are_the_last_that_is_accepted(empty, award):
    """Each number and name at its limit, and one past it."""
    assert dict(empty.balances()) == {BANK: 0, ESCROW: 0}
    empty.deposit("d", "rich", 2**62)
    for party in ("rich", "other"):  # her account has no room, nor has the bank's
        with pytest.raises(SettlementError, match="past"):
            empty.deposit("d2", party, 1)
    with pytest.raises(InvalidInput, match="amount_micros"):
        empty.deposit("d2", "other", 2**62 + 1)
    empty.deposit("d2", "buyer", 0)
    empty.withdraw("w", "rich", 2**62 - 100)
    empty.deposit("d3", "buyer", 100)
    long = "n" * 200
    empty.hold_many([award(id=long, price=1, owner=long), award(id="z", price=99, round_index=2**62 - 1)])
    assert empty.award("z").round_index == 2**62 - 1
    for index in (-1, 2**62, True, 0.0, None, "0"):
        with pytest.raises(InvalidInput, match="round_index"):
            empty.hold(award(id="y", price=0, round_index=index))
    with pytest.raises(InvalidInput, match="mechanism"):
        empty.release(Release("z", long + "n", PureDp(1.0)))
    empty.release(Release("z", long, PureDp(1.0)))
    empty.void(long, "r" * 500)
    assert empty.award(long).reason == "r" * 500
    empty.void("z", "r" * 501)
    assert empty.award("z").reason == "r" * 499 + "…"
    for owner, cap in enumerate((PureDp(1e6), ZCdp(1e6), privacy.RecordLevel(ZCdp(1e-9)))):
        empty.register_cap(f"owner-{owner}", cap)
        empty.register_cap(f"owner-{owner}", cap)
        assert empty.cap(f"owner-{owner}") == cap
    for cap in (PureDp(1e6 + 1), ZCdp(0.0), privacy.Uncapped()):
        with pytest.raises(InvalidInput, match="cap"):
            empty.register_cap("owner-9", cap)
    assert empty.cap("owner-9") is None
    assert empty.privacy_spent("owner-9") == 0.0
    size = len(list(empty.entries()))
    assert empty.head(0).size == 0
    assert empty.head(size) == empty.head() == empty.verify()
    for wrong in (-1, size + 1, True, 1.0, "1"):
        with pytest.raises(InvalidInput, match="size"):
            empty.head(wrong)


def test_what_one_owner_gave_and_which_tasks_there_are(ledger, award):
    ledger.register_cap("cap/1", PureDp(3.0))
    ledger.hold_many([award(id=f"t/0/{i}", owner=f"owner-{i}", price=1) for i in range(3)])
    for i in (1, 0, 2):
        ledger.release(Release(f"t/0/{i}", "m", PureDp(0.1 + i / 10)))
    assert [one.award_id for one in ledger.releases()] == ["t/0/1", "t/0/0", "t/0/2"]
    assert [one.award_id for one in ledger.releases("owner-0")] == ["t/0/0"]
    assert list(ledger.releases("owner-7")) == []
    assert [ledger.has_task(task) for task in ("t", "t/0", "d1", "cap", "cap/1", "\0")] == [True, True] + 4 * [False]
    assert [one.debit for one in ledger.transfers()] == [BANK, "buyer", "buyer", "buyer"]


def test_a_release_and_its_resolution_are_one_award_s(ledger, award):
    ledger.hold_many([award(id="a", price=1), award(id="b", price=1)])
    with pytest.raises(InvalidInput, match="release"):
        ledger.resolve_many([Resolution("a", AwardState.POSTED, release=Release("b", "m", PureDp(1.0)))])
    ledger.release(Release("a", "m", PureDp(1.0)))
    ledger.release(Release("a", "m", PureDp(1.0)))
    for other in (Release("a", "n", PureDp(1.0)), Release("a", "m", PureDp(0.9))):
        with pytest.raises(IdReused, match="another release"):
            ledger.release(other)
    ledger.post("b")
    with pytest.raises(SettlementError, match="before the payment"):
        ledger.release(Release("b", "m", PureDp(1.0)))
    ledger.void("a", "late")
    ledger.register_cap("owner-1", PureDp(1.0))
    ledger.hold(award(id="c", price=1))
    with pytest.raises(SettlementError, match="record her release first"):
        ledger.post("c")
    ledger.hold(award(id="d", price=1, loss=Unprotected()))
    with pytest.raises(PrivacyBudgetExhausted, match="without noise"):
        ledger.post("d")
    with pytest.raises(PrivacyBudgetExhausted, match="cannot hold"):
        ledger.release(Release("d", "m", GaussianRelease(1.0)))


def test_a_ledger_that_reads_two_rows_at_a_time_says_the_same(tmp_path, award, monkeypatch):
    """Against the ledger in memory, which has no pages; and with a second reader whose counts are older."""
    monkeypatch.setattr("flmarket.ledger.sql.CHUNK", 2)
    model, url = MemoryLedger(clock=lambda: 7), f"sqlite:///{tmp_path}/small.db"
    with SqlLedger(url, clock=lambda: 7) as book, SqlLedger(url, clock=lambda: 7) as second:
        for one in (model, book):
            one.deposit("d1", "buyer", 1000)
            one.register_cap("owner-1", PureDp(3.0))
            one.hold_many([award(id=f"t/{i}", owner=f"owner-{i % 3}", price=i, round_index=i % 2) for i in range(7)])
            assert second.privacy_spent("owner-1") in (0.0, 1.0)
            one.resolve_many([delivered(f"t/{i}", PureDp(1.0)) for i in (1, 4)])
            one.void("t/5", "x")
        for reader in (book, second):
            assert list(reader.entries()) == list(model.entries())
            assert list(reader.entries(3, 8)) == list(model.entries(3, 8))
            assert list(reader.entries(0, 0)) == []
            assert list(reader.awards()) == list(model.awards())
            assert list(reader.awards(owner="owner-2")) == list(model.awards(owner="owner-2"))
            assert dict(reader.balances()) == dict(model.balances())
            assert reader.verify(model.head(5)) == model.verify() == model.head()
            pending = [one.id for one in model.awards(state=AwardState.PENDING)]
            assert reader.hold_receipts(pending) == model.hold_receipts(pending)
            assert reader.receipt("t/1") == model.receipt("t/1")
            assert reader.privacy_spent("owner-1") == model.privacy_spent("owner-1") == 2.0
            found = reader.privacy_accounts(f"owner-{i}" for i in range(5))
            assert {owner: account.spent for owner, account in found.items()} == {"owner-1": 2.0}
        book.register_cap("owner-1", PureDp(2.5))
        assert second.cap("owner-1") == PureDp(2.5)
        second.hold(award(id="t/9", price=1, owner="owner-1"))
        second.release(Release("t/9", "m", PureDp(0.25)))
        assert book.privacy_spent("owner-1") == 2.25
        book.hold(award(id="t/10", price=1, owner="owner-1"))
        with pytest.raises(PrivacyBudgetExhausted):
            book.release(Release("t/10", "m", PureDp(0.5)))
        assert book.verify() == second.head()


def test_a_round_is_held_whole_or_not_at_all(ledger, award):
    batch = [award(id=f"t/0/{i}", owner=f"owner-{i}", price=300) for i in range(4)]
    with pytest.raises(SettlementError, match=r"holds 0\.0001"):
        ledger.hold_many(batch)
    assert money(ledger) == (1000, 0, 0)
    assert list(ledger.awards()) == []
    assert ledger.hold_many(batch[:3]) == tuple(batch[:3])
    assert ledger.hold_many(batch[:3]) == tuple(batch[:3])
    assert ledger.hold_many([]) == ()
    assert money(ledger)[:2] == (100, 900)


def test_a_round_settles_whole_or_not_at_all(ledger, award):
    ledger.hold_many([award(id=f"t/0/{i}", owner=f"owner-{i}", price=300) for i in range(3)])
    good = [delivered("t/0/0", PureDp(1.0)), Resolution("t/0/1", AwardState.VOIDED, "late")]
    with pytest.raises(SettlementError, match="no award"):
        ledger.resolve_many([*good, Resolution("t/0/7", AwardState.POSTED)])
    with pytest.raises(SettlementError, match="already voided"):
        ledger.resolve_many([*good, Resolution("t/0/1", AwardState.POSTED)])
    assert money(ledger)[:2] == (100, 900)
    assert list(ledger.releases()) == []
    done = ledger.resolve_many([*good, Resolution("t/0/2", AwardState.EXPIRED)])
    assert [one.state for one in done] == [AwardState.POSTED, AwardState.VOIDED, AwardState.EXPIRED]
    assert ledger.resolve_many(good) == done[:2]
    assert (ledger.balance("buyer"), ledger.balance(ESCROW), ledger.balance("owner-0")) == (700, 0, 300)
    assert list(ledger.releases()) == [Release("t/0/0", "laplace-l1", PureDp(1.0))]
    ledger.verify()


def test_awards_are_found_by_state_owner_and_round(ledger, award):
    made = [award(id=f"t/{i}", owner=f"owner-{i % 2}", price=10, round_index=i // 2) for i in range(6)]
    ledger.hold_many(made)
    ledger.post("t/1")
    ledger.void("t/2", "x")
    assert [one.id for one in ledger.awards()] == [f"t/{i}" for i in range(6)]
    assert [one.id for one in ledger.awards(state=AwardState.PENDING)] == ["t/0", "t/3", "t/4", "t/5"]
    assert [one.id for one in ledger.awards(state=AwardState.POSTED)] == ["t/1"]
    assert [one.id for one in ledger.awards(owner="owner-0", round_index=1)] == ["t/2"]
    assert [one.id for one in ledger.awards(state=AwardState.PENDING, round_index=2)] == ["t/4", "t/5"]


def test_award_release_payment_is_one_chain(ledger, award):
    ledger.hold(award())
    ledger.release(Release("t/0/1", "laplace-l1", PureDp(1.0)))
    ledger.release(Release("t/0/1", "laplace-l1", PureDp(1.0)))
    with pytest.raises(SettlementError, match="another release"):
        ledger.release(Release("t/0/1", "laplace-l1", PureDp(0.5)))
    ledger.post("t/0/1")
    kinds = [entry.line.kind for entry in ledger.entries() if entry.line.ref == "t/0/1"]
    assert kinds == [EntryKind.HOLD, EntryKind.RELEASE, EntryKind.POSTED]
    ledger.verify()


def test_a_release_needs_an_award_that_covers_it(ledger, award):
    with pytest.raises(SettlementError, match="no award"):
        ledger.release(Release("t/0/1", "laplace-l1", PureDp(1.0)))
    ledger.hold(award())
    with pytest.raises(SettlementError, match=r"is for PureDp\(epsilon=1.0\)"):
        ledger.release(Release("t/0/1", "laplace-l1", PureDp(1.1)))
    with pytest.raises(InvalidInput, match="release"):
        ledger.resolve_many([Resolution("t/0/1", AwardState.POSTED, release=Release("other", "m", PureDp(1.0)))])
    ledger.post("t/0/1")
    with pytest.raises(SettlementError, match="before the payment"):
        ledger.release(Release("t/0/1", "laplace-l1", PureDp(1.0)))
    ledger.hold(award(id="late"))
    ledger.expire("late")
    ledger.release(Release("late", "laplace-l1", PureDp(1.0)))  # it left, though too late to be paid
    assert len(list(ledger.releases("owner-1"))) == 1
    ledger.verify()


@pytest.mark.parametrize("name", privacy.names())
def test_every_honest_release_fits_its_award(name, award):
    """What a mechanism promises at the awarded ε is within the award, for every mechanism of the package."""
    noise, book = privacy.get(name), MemoryLedger()
    book.deposit("d", "buyer", 100)
    for i, epsilon in enumerate([1e-3, 0.1, 1.0, 3.0, 8.0, 50.0]):
        book.hold(award(id=f"a{i}", loss=epsilon, price=1))
        given = Release(f"a{i}", noise.name, noise.guarantee(epsilon))
        book.resolve_many([Resolution(f"a{i}", AwardState.POSTED, release=given)])
        assert book.receipt(f"a{i}").check(book.head())[1] == given
    book.verify()


@pytest.mark.parametrize(
    ("mechanism", "guarantee"),
    [
        ("laplace-l1", PureDp(1.001)),
        ("m", ApproxDp(1.001, 1e-5)),
        ("m", ExponentialRelease(1.001)),
        ("gaussian-zcdp", ZCdp(1.001)),
        ("gaussian-zcdp", GaussianRelease(0.706)),  # ρ = 1.003
        ("gaussian-l2", GaussianRelease(0.706)),
    ],
)
def test_a_release_beyond_its_award_is_refused(ledger, award, mechanism, guarantee):
    ledger.hold(award())
    with pytest.raises(SettlementError, match=r"is for PureDp\(epsilon=1.0\)"):
        ledger.release(Release("t/0/1", mechanism, guarantee))
    assert list(ledger.releases()) == []


TYPED = [
    # the award's loss, releases that fit it, releases that do not
    (ZCdp(0.5), [ZCdp(0.5), GaussianRelease(1.0), PureDp(1.0), ExponentialRelease(2.0)],
     [ZCdp(0.501), GaussianRelease(0.99), PureDp(1.01), ApproxDp(0.1, 1e-9), Unprotected()]),
    (ApproxDp(1.0, 1e-5), [ApproxDp(1.0, 1e-5), ApproxDp(0.9, 1e-6), PureDp(1.0), GaussianL2().guarantee(1.0)],
     [ApproxDp(1.0, 2e-5), PureDp(1.01), GaussianL2().guarantee(1.01), ZCdp(0.1), Unprotected()]),
    (GaussianRelease(2.0), [GaussianRelease(2.0), GaussianRelease(3.0), ZCdp(0.125)],
     [GaussianRelease(1.99), ZCdp(0.126), ApproxDp(0.1, 1e-9), Unprotected()]),
    (ExponentialRelease(1.0), [ExponentialRelease(1.0), PureDp(1.0)], [PureDp(1.1), ZCdp(1e-6), GaussianRelease(50.0)]),
    (PureDp(1.0), [PureDp(1.0), ExponentialRelease(1.0)], [PureDp(1.1), Unprotected()]),
    (Unprotected(), [Unprotected(), PureDp(7.0), GaussianRelease(0.1)], []),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "within", "beyond"), TYPED, ids=lambda one: type(one).__name__)
def test_an_award_is_for_a_typed_loss(ledger, award, loss, within, beyond):
    """In every store: it is read back as it was held, bounds its releases in its own currency, and proves itself."""
    terms = {"owner": "owner-1", "price_micros": 1}
    for i, given in enumerate(within):
        held = award(id=f"a{i}", price=1, loss=loss)
        assert ledger.hold(held) == ledger.hold(held) == ledger.award(f"a{i}") == held
        wire = HoldReceipt.from_dict(json.loads(json.dumps(ledger.hold_receipts([f"a{i}"])[f"a{i}"].to_dict())))
        assert wire.verify(award_id=f"a{i}", **terms, loss=loss) == ledger.head()
        with pytest.raises(HoldNotProven):
            wire.verify(award_id=f"a{i}", **terms, loss=ZCdp(9.0))
        ledger.resolve_many([Resolution(f"a{i}", AwardState.POSTED, release=Release(f"a{i}", "m", given))])
        receipt = Receipt.from_dict(json.loads(json.dumps(ledger.receipt(f"a{i}").to_dict())))
        assert receipt.check(ledger.head()) == (ledger.award(f"a{i}"), Release(f"a{i}", "m", given))
        sealed = seal(receipt, award="x", owner="y")
        assert SealedReceipt.from_dict(json.loads(json.dumps(sealed.to_dict()))) == sealed
        assert sealed.loss == loss
    ledger.hold(award(id="b", price=1, loss=loss))
    for given in beyond:
        with pytest.raises(SettlementError, match="gives away"):
            ledger.release(Release("b", "m", given))
    if not isinstance(loss, Unprotected):
        ledger.post("b")  # no cap is registered; but no receipt shows it as paid for nothing
        with pytest.raises(LedgerCorrupt, match="without its release"):
            ledger.receipt("b").check()
    assert {one.loss for one in ledger.awards()} == {loss}
    ledger.verify()


def test_no_rho_is_read_as_an_epsilon(award):
    assert award(loss=0.5).loss == PureDp(0.5)
    assert award(loss=0.5).epsilon == award(loss=ExponentialRelease(0.5)).epsilon == 0.5
    assert award(loss=float("inf")).loss == Unprotected()
    assert award(loss=Unprotected()).epsilon == float("inf")
    for loss in (ZCdp(0.5), ApproxDp(0.5, 1e-5), GaussianRelease(1.0)):
        with pytest.raises(InvalidInput, match="read `loss`"):
            assert award(loss=loss).epsilon


BEFORE = json.loads((Path(__file__).parent / "before_typed_loss.json").read_text())


def test_receipts_of_before_awards_had_typed_losses():
    """A log, receipts, a hold receipt and a sealed one as they were written when an award had a bare number."""
    head = Head.from_dict(BEFORE["head"])
    assert Replay().feed(map(Entry.from_dict, BEFORE["entries"])).finish(head) == head
    hold = dataclasses.replace(HoldReceipt.from_dict(BEFORE["hold_receipt"]), since=0, consistency=())
    assert hold.verify(award_id="t/1/1", owner="owner-1", price_micros=310, loss=PureDp(1.5)) == head
    assert [Receipt.from_dict(one).check(head)[0].epsilon for one in BEFORE["receipts"]] == [
        1.0,
        float("inf"),
        0.0,
        0.5,
    ]
    sealed = SealedReceipt.from_dict(BEFORE["sealed"])
    sealed.check(head)
    assert sealed.epsilon == 1.0


def test_books_of_before_awards_had_typed_losses_open_and_go_on(url):
    SqlLedger(url).close()
    with SqlLedger(url) as book:
        with book.engine.begin() as connection:
            for entry in BEFORE["entries"]:
                connection.execute(store.entries.insert(), entry)
        assert book.verify().to_dict() == BEFORE["head"]
        numbers = [1.0, float("inf"), 0.0, 0.5, 2.0, 0.25, 1.0, 1.5, 0.5]
        assert [one.epsilon for one in book.awards()] == numbers
        book.resolve_many([delivered("t/1/1", PureDp(1.5))])
        given = Release("t/1/5", "gaussian-zcdp", GaussianRelease(1.0))
        book.resolve_many([Resolution("t/1/5", AwardState.POSTED, release=given)])
        book.hold(Award("t/2/1", 2, "buyer", "owner-1", ZCdp(0.1), 5))
        book.verify(Head.from_dict(BEFORE["head"]))


def test_no_owner_above_her_cap(ledger, award):
    ledger.register_cap("owner-1", PureDp(1.0))
    ledger.hold_many([award(id=f"a{i}", loss=0.1, price=1) for i in range(11)])
    for i in range(10):
        ledger.resolve_many([delivered(f"a{i}", PureDp(0.1))])
    assert ledger.privacy_spent("owner-1") == pytest.approx(1.0)
    with pytest.raises(PrivacyBudgetExhausted):
        ledger.resolve_many([delivered("a10", PureDp(0.1))])
    with pytest.raises(SettlementError, match="record her release first"):
        ledger.post("a10")
    assert ledger.award("a10").state is AwardState.PENDING
    assert ledger.balance("owner-1") == 10
    ledger.void("a10", "refused")
    ledger.verify()


@pytest.mark.parametrize(
    ("cap", "guarantee", "fits"),
    [
        (PureDp(1.0), PureDp(0.4), 2),
        (PureDp(1.0), ExponentialRelease(0.4), 2),
        (ZCdp(1.0), GaussianRelease(1.0), 2),  # ρ = 1/2 each
        (ZCdp(1.0), PureDp(1.0), 2),
        (ApproxDp(4.0, 1e-5), GaussianRelease(2.0), 3),  # 3.709 after three, 4.377 after four
    ],
)
def test_caps_in_every_currency(ledger, award, cap, guarantee, fits):
    ledger.register_cap("owner-1", cap)
    ledger.hold_many([award(id=f"a{i}", price=1) for i in range(fits + 1)])
    ledger.resolve_many([delivered(f"a{i}", guarantee) for i in range(fits)])
    with pytest.raises(PrivacyBudgetExhausted):
        ledger.resolve_many([delivered(f"a{fits}", guarantee)])
    assert len(list(ledger.releases("owner-1"))) == fits
    ledger.verify()


def test_a_cap_counts_the_past_and_may_change(ledger, award):
    ledger.hold_many([award(id=f"a{i}", price=1) for i in range(4)])
    ledger.resolve_many([delivered("a0", PureDp(1.0))])
    assert ledger.cap("owner-1") is None
    assert ledger.privacy_spent("owner-1") == 0.0
    with pytest.raises(PrivacyBudgetExhausted, match="already"):
        ledger.register_cap("owner-1", PureDp(0.5))
    ledger.register_cap("owner-1", PureDp(2.0))
    ledger.register_cap("owner-1", PureDp(2.0))
    assert ledger.privacy_spent("owner-1") == 1.0
    ledger.resolve_many([delivered("a1", PureDp(1.0))])
    with pytest.raises(PrivacyBudgetExhausted):
        ledger.resolve_many([delivered("a2", PureDp(1.0))])
    ledger.register_cap("owner-1", ZCdp(1.5))
    assert ledger.cap("owner-1") == ZCdp(1.5)
    assert ledger.privacy_spent("owner-1") == 1.0  # 2 · ε²/2
    ledger.resolve_many([delivered("a2", PureDp(1.0))])
    with pytest.raises(PrivacyBudgetExhausted):
        ledger.resolve_many([delivered("a3", PureDp(1.0))])
    assert sum(entry.line.kind is EntryKind.CAP for entry in ledger.entries()) == 2
    ledger.verify()


def test_an_award_for_no_privacy_needs_no_release(ledger, award):
    """A refund to a buyer who also sells, say."""
    ledger.register_cap("owner-1", PureDp(1.0))
    for id, zero in (("refund", 0.0), ("refund-2", -0.0)):
        ledger.hold(award(id=id, loss=zero))
        assert ledger.post(id).state is AwardState.POSTED
    assert ledger.privacy_spent("owner-1") == 0.0
    ledger.verify()


def test_accounts_of_many_owners_at_once(ledger, award):
    ledger.register_cap("owner-1", PureDp(3.0))
    ledger.register_cap("owner-2", PureDp(5.0))
    ledger.hold(award(id="a", price=1))
    ledger.resolve_many([delivered("a", PureDp(1.0))])
    accounts = ledger.privacy_accounts(["owner-1", "owner-2", "owner-9"])
    assert {owner: (account.cap, account.spent) for owner, account in accounts.items()} == {
        "owner-1": (PureDp(3.0), 1.0),
        "owner-2": (PureDp(5.0), 0.0),
    }
    accounts["owner-1"].compose(PureDp(2.0))  # a copy: what is done to it does not count
    assert ledger.privacy_spent("owner-1") == 1.0


@pytest.mark.parametrize("cap", [PureDp(0.0), PureDp(1e9), GaussianRelease(1.0), 3.0])
def test_what_is_no_cap(ledger, cap):
    with pytest.raises(InvalidInput, match="cap"):
        ledger.register_cap("owner-1", cap)


def test_all_stores_write_the_same_log(empty, award):
    """The same calls give the same hashes, so receipts do not depend on where the books are kept."""
    model = MemoryLedger(clock=lambda: 1_700_000_000_000_000)
    for book in (empty, model):
        book.deposit("d1", "buyer", 10**9)
        book.register_cap("owner-3", ApproxDp(3.0, 1e-6))
        made = book.hold_many([award(id=f"t/0/{i}", owner=f"owner-{i % 7}", price=i) for i in range(400)])
        book.resolve_many([delivered(one.id, GaussianRelease(40.0)) for one in made[:300]])
        book.void(made[-1].id, "zu spät")
    assert empty.head() == model.head()
    assert list(empty.entries(395, 405)) == list(model.entries(395, 405))
    assert dict(empty.balances()) == dict(model.balances())
    assert list(empty.awards()) == list(model.awards())
    assert empty.privacy_spent("owner-3") == model.privacy_spent("owner-3")
    assert empty.verify() == model.verify() == model.head()
