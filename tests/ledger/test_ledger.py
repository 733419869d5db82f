"""Every ledger store must pass these; a state machine tries to break the books."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flmarket.errors import InvalidInput, MechanismViolation, SettlementError
from flmarket.ledger import (
    BANK,
    ESCROW,
    Award,
    AwardState,
    MemoryLedger,
    Transfer,
    format_micros,
    payments_to_micros,
    to_micros,
)


def award(id="t/0/1", price=300, **changes):
    return dataclasses.replace(Award(id, 0, "buyer", "owner-1", 1.0, price), **changes)


@pytest.fixture
def ledger():
    book = MemoryLedger()
    book.deposit("d1", "buyer", 1000)
    return book


def test_an_award_is_paid_once(ledger):
    ledger.hold(award())
    assert (ledger.balance("buyer"), ledger.balance(ESCROW), ledger.balance("owner-1")) == (700, 300, 0)
    assert ledger.post("t/0/1").state is AwardState.POSTED
    ledger.post("t/0/1")  # a retry changes nothing
    assert (ledger.balance("buyer"), ledger.balance(ESCROW), ledger.balance("owner-1")) == (700, 0, 300)
    ledger.verify()


@pytest.mark.parametrize("end", ["void", "expire"])
def test_what_is_not_delivered_goes_back(ledger, end):
    ledger.hold(award())
    ledger.void("t/0/1", "dropped out") if end == "void" else ledger.expire("t/0/1")
    assert ledger.balance("buyer") == 1000
    assert ledger.award("t/0/1").reason
    with pytest.raises(SettlementError, match="already"):
        ledger.post("t/0/1")
    assert ledger.balance("owner-1") == 0


def test_repeats_are_harmless_and_contradictions_refused(ledger):
    ledger.deposit("d1", "buyer", 1000)
    assert ledger.balance("buyer") == 1000
    with pytest.raises(SettlementError, match="other terms"):
        ledger.deposit("d1", "buyer", 2000)
    ledger.hold(award())
    ledger.hold(award())
    assert ledger.balance(ESCROW) == 300
    with pytest.raises(SettlementError, match="other terms"):
        ledger.hold(award(price=301))
    ledger.post("t/0/1")
    assert ledger.hold(award()).state is AwardState.POSTED  # a late retry of the hold does not open it again
    assert ledger.balance(ESCROW) == 0


def test_nobody_spends_what_she_does_not_have(ledger):
    with pytest.raises(SettlementError, match=r"holds 0\.001"):
        ledger.hold(award(price=1001))
    assert ledger.balance("buyer") == 1000
    assert list(ledger.awards()) == []
    with pytest.raises(SettlementError, match="no award"):
        ledger.post("t/9/9")


@pytest.mark.parametrize("amount", [-1, 1.5, True, "7", 2**63])
def test_amounts_are_whole_and_positive(ledger, amount):
    with pytest.raises(InvalidInput, match="amount_micros"):
        ledger.deposit("d2", "buyer", amount)


@pytest.mark.parametrize("account", [BANK, ESCROW])
def test_deposits_go_to_parties(ledger, account):
    with pytest.raises(InvalidInput, match="account"):
        ledger.deposit("d2", account, 1)


def test_only_pending_awards_are_held(ledger):
    with pytest.raises(SettlementError, match="only a pending"):
        ledger.hold(award(state=AwardState.POSTED))


def test_verify_sees_a_forged_journal(ledger):
    ledger.hold(award())
    ledger._journal.append(Transfer("forged", "buyer", "owner-9", 5))
    with pytest.raises(SettlementError, match="buyer"):
        ledger.verify()


def test_verify_sees_money_missing_from_escrow(ledger):
    ledger.hold(award())
    ledger._awards["t/0/1"] = award(state=AwardState.POSTED)
    with pytest.raises(SettlementError, match="escrow"):
        ledger.verify()


class Books(RuleBasedStateMachine):
    """Random calls with repeats and nonsense; after each, the books balance and nobody was paid twice."""

    def __init__(self):
        super().__init__()
        self.ledger = MemoryLedger()
        self.deposited = 0
        self.seen = {}

    @rule(number=st.integers(0, 5), amount=st.integers(0, 1000))
    def deposit(self, number, amount):
        id = f"deposit-{number}"
        if id in self.seen and self.seen[id] != amount:
            with pytest.raises(SettlementError):
                self.ledger.deposit(id, "buyer", amount)
            return
        self.deposited += 0 if id in self.seen else amount
        self.seen[id] = amount
        self.ledger.deposit(id, "buyer", amount)

    @rule(number=st.integers(0, 8), price=st.integers(0, 400))
    def hold(self, number, price):
        with contextlib.suppress(SettlementError):
            self.ledger.hold(award(id=f"a{number}", price=price, owner=f"owner-{number % 3}"))

    @rule(number=st.integers(0, 8), how=st.sampled_from(["post", "void", "expire"]))
    def resolve(self, number, how):
        reason = ("x",) if how == "void" else ()
        with contextlib.suppress(SettlementError):
            getattr(self.ledger, how)(f"a{number}", *reason)

    @invariant()
    def books_balance(self):
        self.ledger.verify()
        paid = sum(self.ledger.balance(f"owner-{k}") for k in range(3))
        assert paid == sum(a.price_micros for a in self.ledger.awards() if a.state is AwardState.POSTED)
        assert self.ledger.balance("buyer") + self.ledger.balance(ESCROW) + paid == self.deposited


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_money_rounds_down():
    assert to_micros("budget", 1.2345678) == 1_234_567
    assert payments_to_micros([0.1234567, 0.0], 200_000).tolist() == [123_456, 0]
    for bad in (-1.0, float("nan"), float("inf"), 1e300, True, "7"):
        with pytest.raises(InvalidInput, match="budget"):
            to_micros("budget", bad)


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50), st.integers(1, 10**12))
def test_payments_that_use_the_whole_budget_still_fit(shares, budget):
    if sum(shares) <= 0:
        return
    payment = np.array(shares) / sum(shares) * (budget / 1e6)
    micros = payments_to_micros(payment, budget)
    assert micros.sum() <= budget
    assert (micros >= 0).all()
    assert (micros <= payment * 1e6 + 1e-3).all()


def test_overspending_is_refused_whole():
    with pytest.raises(MechanismViolation, match=r"3\.00 exceed the budget of 2\.00"):
        payments_to_micros([1.5, 1.5], 2_000_000)


def test_amounts_read_well():
    assert format_micros(1_234_567_890) == "1,234.56789"
    assert format_micros(-2_500_000) == "-2.50"
    assert format_micros(0) == "0.00"
