"""What the simulator found in what was shipped, each as a case of its own."""

import pytest
from tiny_markets import market

from flmarket.engines import MemoryOwners
from flmarket.engines.config import MarketConfig
from flmarket.errors import PrivacyBudgetExhausted
from flmarket.ledger import Award, AwardState, MemoryLedger, Release, Resolution
from flmarket.market import FileStore, MemoryStore, Rounds
from flmarket.privacy import GaussianRelease, PureDp, Unprotected


def rounds_of(kind, **changes):
    spec, ledger = MarketConfig.parse(market(kind, **changes)).spec(), MemoryLedger()
    return Rounds(spec.kind(), MemoryOwners(spec), ledger, MemoryStore()), ledger


def play(rounds, *, register_at=None):
    """All rounds; whoever has an award registers a cap in ε at that step of the first round."""
    capped = None
    for index in range(rounds.kind.rounds):
        for step in rounds.steps(index):
            if step == register_at and capped is None:
                capped = min(rounds.awards)
                rounds.ledger.register_cap(f"owner-{capped}", PureDp(50.0))
    return capped


@pytest.mark.parametrize("kind", ["reward", "joint", "sampling"])
def test_a_cap_that_cannot_hold_the_release_stops_nobody_elses_round(kind):
    """Registered between award and settlement, it made every settlement of the round fail, for ever."""
    rounds, ledger = rounds_of(kind)
    capped = play(rounds, register_at="updates")
    ends = {award.owner: award for award in ledger.awards()}
    assert ends[f"owner-{capped}"].state is not AwardState.PENDING
    assert not any(award.state is AwardState.PENDING for award in ledger.awards())
    assert any(award.state is AwardState.POSTED for award in ledger.awards())
    assert all(
        award.state is AwardState.VOIDED for award in ledger.awards(owner=f"owner-{capped}") if award.price_micros
    )
    assert ledger.balance("escrow") == 0
    ledger.verify()


@pytest.mark.parametrize("kind", ["reward", "joint", "sampling"])
def test_who_has_such_a_cap_is_not_bought_from(kind):
    """Otherwise she would release and could not be paid."""
    rounds, ledger = rounds_of(kind)
    ledger.register_cap("owner-1", PureDp(50.0))
    play(rounds)
    assert len(rounds.records) == 3
    assert not list(ledger.awards(owner="owner-1"))
    assert any(award.state is AwardState.POSTED for award in ledger.awards())


def test_an_upload_whose_award_is_void_is_in_no_model_whatever_the_stopping_rule_has_seen():
    """The rule looked at a model of all uploads, which was then taken for that of those that count."""
    rounds, ledger = rounds_of("joint", joint={"stop_accuracy": 0.0})
    for step in rounds.steps(0):
        if step == "updates":
            capped = min(rounds.awards)
            ledger.register_cap(f"owner-{capped}", PureDp(50.0))
    (record,) = rounds.records
    assert rounds.kind.done
    assert record.weights[capped] == 0
    assert record.weights.sum() == pytest.approx(1.0)
    assert not any(award.state is AwardState.PENDING for award in ledger.awards())


def test_a_cap_in_epsilon_that_holds_the_release_is_as_before():
    rounds, ledger = rounds_of("auction")
    for number in range(4):
        ledger.register_cap(f"owner-{number}", PureDp(50.0))
    play(rounds)
    assert any(award.state is AwardState.POSTED for award in ledger.awards())


def test_the_ledger_says_that_it_does_not_fit():
    ledger = MemoryLedger()
    ledger.deposit("d", "buyer", 10)
    ledger.register_cap("o", PureDp(1.0))
    ledger.hold_many(
        [Award("t/0/1", 0, "buyer", "o", GaussianRelease(2.0), 5), Award("t/0/2", 0, "buyer", "o", Unprotected(), 5)]
    )
    noise = Resolution("t/0/1", AwardState.POSTED, "", Release("t/0/1", "m3", GaussianRelease(2.0)))
    with pytest.raises(PrivacyBudgetExhausted, match="cannot hold"):
        ledger.resolve_many([noise])
    with pytest.raises(PrivacyBudgetExhausted, match="without noise"):
        ledger.post("t/0/2")
    assert [award.state for award in ledger.awards()] == [AwardState.PENDING] * 2


def test_a_market_that_buys_from_nobody_closes_its_round_after_a_crash(tmp_path):
    """Nobody is chosen: the market is over with its first round, which was cut off before its record was written."""
    spec = MarketConfig.parse(market("joint", joint={"budget": 0.5})).spec()

    def rounds():
        return Rounds(spec.kind(), MemoryOwners(spec), MemoryLedger(), FileStore(tmp_path, synchronised=False))

    for step in rounds().steps(0):
        if step == "bids":  # the plan is stored
            break
    (record,) = rounds().play()
    assert not record.valid
    (again,) = rounds().play()
    assert again.index == record.index == 0
