"""Masked sums over Flower's messages: the model as in memory, whoever goes, whatever dies; and nobody sees parts."""

import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from masked_owners import MaskedOwners

from flmarket.engines.config import MarketConfig
from flmarket.engines.flower.messages import BID, MASK, MASKED, Refusal, unpack, unpack_stage
from flmarket.engines.memory import MemoryOwners
from flmarket.errors import SumVoid, Tampered
from flmarket.ledger import AwardState, DurableAccount, EntryKind
from flmarket.ledger.journal import BANK
from flmarket.market import Guard, Rounds
from flmarket.market.kind import Silent, release_id
from flmarket.market.masking import AGREE, INPUT, KEYS, SHARES, STAGES, UNMASK, Summing
from flmarket.market.masking.guarding import _LINKS, SumGuard, identity_of, mask_terms, public_identity
from flmarket.market.masking.masker import NUMBERS, Advert
from flmarket.market.masking.primitives import identity_key, packed
from flmarket.market.owner import guarded
from flmarket.market.record import Mask, OwnerJournal
from flmarket.market.round import new_task
from flmarket.market.store import FileStore, MemoryStore

GONE = 2  # the owner who goes


@pytest.fixture
def secure():
    """Six owners who all sell, of whom five must stay."""

    def make(rounds=2):
        values = {
            "seed": 11, "trust": "secure-aggregation",
            "task": {"name": "sums", "rounds": rounds, "bidders_per_round": 6, "budget_factor": 2.0},
            "data": {"name": "breast-cancer", "owners": 6, "partition": "equal"},
            "owners": {"privacy_cap": 60.0, "privacy_cap_delta": 1e-5},
            "mechanism": {"auction": "all-in", "clip": 0.5},
        }  # fmt: skip
        return MarketConfig.parse(values).simulation()

    return make


def in_memory(spec, gone=()):
    """The same market in one process without masks; owners in `gone` fall silent in the first round."""

    class Owners(MemoryOwners):
        def train(self, call, orders, parameters, bids, prove):
            left = gone if orders and orders[0].round_index == 0 else ()
            for batch in super().train(call, [one for one in orders if one.owner not in left], parameters, bids, prove):
                yield batch | {owner: Silent() for owner in left}

    rounds = Rounds(spec.kind(), Owners(spec), new_task(None, spec.name), MemoryStore())
    rounds.play()
    return rounds


def asks(message):
    """The stage that a message asks for, if any."""
    return unpack_stage(message)[0] if message.metadata.message_type in (MASK, MASKED) else ""


def silent_at(stage, round_index=0):
    """Answers nothing from this stage of a round on, until the round is over."""

    def behaviour(message, honest):
        late = asks(message) and STAGES.index(asks(message)) >= STAGES.index(stage)
        return [] if late and message.metadata.group_id == str(round_index) else honest()

    return behaviour


def states(record):
    return dict(zip(record.bidders.tolist(), record.state, strict=True))


def check_books(ledger):
    ledger.verify()
    assert sum(ledger.balances().values()) == 0
    assert ledger.balance("escrow") == 0
    paid = [entry.line.ref for entry in ledger.entries() if entry.line.kind is EntryKind.POSTED]
    assert sorted(paid) == sorted({award.id for award in ledger.awards() if award.state is AwardState.POSTED})
    assert {release.award_id for release in ledger.releases()} == set(paid), "booked is what was unmasked"


def test_the_model_of_a_market_in_memory_and_nobody_sees_a_part(secure, stage):
    spec, ready = secure(), stage(secure())
    played, alone = ready.play(), in_memory(spec)
    np.testing.assert_array_equal(played.kind.parameters, alone.kind.parameters)
    assert [record.metrics for record in played.records] == [record.metrics for record in alone.records]
    assert {message.metadata.message_type for message, _ in ready.grid.seen} == {BID, MASK, MASKED}
    check_books(ready.ledger)
    # what left is nobody's encoded update, though the journals have them all
    parts = set()
    for owner in range(6):
        journal = OwnerJournal(ready.folder / "owners" / f"owner-{owner}.journal.sqlite")
        rows = journal._connection.execute("select vector from releases").fetchall()
        parts |= {np.frombuffer(row[0]).astype(np.uint32).tobytes() for row in rows}
        ((links,),) = journal._connection.execute("select links from chains").fetchall()
        assert [first for first, _, _ in _LINKS.unpack(links)] == [2] * 5, "the next round's, and no other"
        journal.close()
    assert len(parts) == 12
    sent = [
        array.numpy().astype(np.uint32).tobytes()
        for _, answers in ready.grid.seen
        for answer in answers
        for record in answer.content.array_records.values()
        for array in record.values()
    ]
    assert len(sent) == 12
    assert not parts & set(sent)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.6])
def test_direct_calls_give_the_same_as_no_masks(dropout, secure):
    found = []
    for owners in (MemoryOwners, MaskedOwners):
        spec = replace(secure(), dropout=dropout)
        rounds = Rounds(spec.kind(), owners(spec), new_task(None, spec.name), MemoryStore())
        rounds.play()
        check_books(rounds.ledger)
        found.append(rounds)
    plain, masked = found
    np.testing.assert_array_equal(masked.kind.parameters, plain.kind.parameters)
    assert [record.state for record in masked.records] == [record.state for record in plain.records]
    paid = {state for record in plain.records for state in record.state}
    assert (AwardState.POSTED in paid) == (dropout < 0.5)


@pytest.mark.parametrize(("lasts", "met"), [(64, 1), (1, 3)])
def test_owners_meet_in_the_first_round_and_when_chains_have_lasted(lasts, met, secure, monkeypatch):
    real, made = Advert.checked, []

    def checked(advert, terms):
        made.append(advert.owner)
        return real(advert, terms)

    monkeypatch.setattr(Advert, "checked", checked)
    monkeypatch.setattr("flmarket.market.masking.guarding.LASTS", lasts)
    spec = secure(rounds=3)
    rounds = Rounds(spec.kind(), MaskedOwners(spec), new_task(None, spec.name), MemoryStore())
    rounds.play()
    assert [set(record.state) for record in rounds.records] == [{AwardState.POSTED}] * 3
    assert len(made) == 3 * 6 + met * 6 * 5  # the broker in every round, each owner of each other when they meet


@pytest.mark.parametrize("at", STAGES)
def test_one_owner_goes_at_any_stage(at, secure, stage):
    ready = stage(secure(), bid_seconds=0.3, train_seconds=0.3)
    ready.grid.behaviour[GONE] = silent_at(at)
    played = ready.play()
    before_input = at in (KEYS, SHARES, INPUT)
    alone = in_memory(secure(), gone=(GONE,) if before_input else ())
    np.testing.assert_array_equal(played.kind.parameters, alone.kind.parameters)
    first = states(played.records[0])
    assert first.pop(GONE) is (AwardState.EXPIRED if before_input else AwardState.POSTED), "paid is who is in the sum"
    assert set(first.values()) == {AwardState.POSTED}
    assert set(played.records[1].state) == {AwardState.POSTED}
    check_books(ready.ledger)


@pytest.mark.parametrize("at", [KEYS, INPUT, UNMASK])
def test_below_the_threshold_nobody_is_paid_or_booked_and_the_money_goes_back(at, secure, stage, tmp_path):
    ready = stage(secure(), bid_seconds=0.3, train_seconds=0.3)
    ready.grid.behaviour = {owner: silent_at(at) for owner in (1, GONE)}
    played = ready.play(ledger=ready.ledger)
    assert set(played.records[0].state) == {AwardState.EXPIRED}
    assert played.records[0].spent_micros == 0
    assert set(played.records[1].state) == {AwardState.POSTED}, "the next round is not touched"
    check_books(ready.ledger)
    assert {release.award_id for release in ready.ledger.releases()} == {f"sums/1/{owner}" for owner in range(6)}
    assert -ready.ledger.balance(BANK) == sum(b for a, b in ready.ledger.balances().items() if a != BANK)
    # at home: before the input nobody is charged, after it enough sign the void, and who signed survivors cannot
    files = sorted(tmp_path.rglob("*.account.sqlite"))
    charged = [[one.award_id.split("/")[1] for one in DurableAccount.open(path).releases()] for path in files]
    assert charged == [["0", "1"] if at == UNMASK else ["1"]] * 6


class Dies(BaseException):
    """The process is gone."""


class DyingStore(FileStore):
    """Ends the process after it has kept a stage."""

    def __init__(self, folder, at):
        super().__init__(folder)
        self.at, self.count = at, 0

    def save_exchange(self, index, state):
        self.count += 1
        super().save_exchange(index, state)
        if self.count == self.at:
            raise Dies


@pytest.mark.parametrize("at", range(1, 7))
def test_the_server_dies_between_any_two_stages_and_the_next_one_goes_on(at, secure, stage):
    ready = stage(secure(rounds=1), bid_seconds=0.3, train_seconds=0.3)
    store = DyingStore(ready.folder / "server", at)
    with pytest.raises(Dies):
        ready.play(store=store)
    store.unlock()
    if at > 3:  # her input is in the sum that was kept; she herself is gone for this round
        ready.grid.behaviour[GONE] = lambda message, honest: [] if message.metadata.group_id == "0" else honest()
    played, alone = ready.play(), in_memory(secure(rounds=1))
    np.testing.assert_array_equal(played.kind.parameters, alone.kind.parameters)
    assert all(set(record.state) == {AwardState.POSTED} for record in played.records)
    check_books(ready.ledger)


def test_a_server_that_forgot_and_says_that_others_survived_gets_nothing(secure, stage):
    # Its folder is lost after everybody signed; now one owner more or less is there. What was signed stands: void.
    ready = stage(secure(), bid_seconds=0.3, train_seconds=0.3)
    ready.grid.behaviour[GONE] = silent_at(INPUT)
    store = DyingStore(ready.folder / "server", 5)
    with pytest.raises(Dies):
        ready.play(store=store)
    store.unlock()
    (ready.folder / "server" / "exchange-000000.bin").unlink()
    del ready.grid.behaviour[GONE]
    played = ready.play()
    assert AwardState.POSTED not in played.records[0].state
    assert set(played.records[1].state) == {AwardState.POSTED}
    check_books(ready.ledger)


def tampering(at, change):
    def behaviour(message, honest):
        answers = honest()
        if asks(message) == at and message.metadata.group_id == "0":
            for answer in answers:
                change(answer.content)
        return answers

    return behaviour


def other_body(content):
    body = content["stage"]["body"]
    content["stage"]["body"] = body[:-1] + bytes([body[-1] ^ 1])


def other_words(content):
    words = content["words"]["values"].numpy().copy()
    words[0] ^= 1
    content["words"] = ArrayRecord({"values": Array(words)})


def no_stage(content):
    del content["stage"]


@pytest.mark.parametrize(
    ("at", "change"),
    [(KEYS, other_body), (SHARES, other_body), (INPUT, other_body), (INPUT, other_words), (AGREE, other_body),
     (UNMASK, other_body), (SHARES, no_stage)],
)  # fmt: skip
def test_an_altered_answer_is_refused_and_named_in_the_books(at, change, secure, stage):
    ready = stage(secure(rounds=1))
    ready.grid.behaviour[GONE] = tampering(at, change)
    played = ready.play()
    (award,) = [award for award in ready.ledger.awards() if award.id == f"sums/0/{GONE}"]
    if at in (AGREE, UNMASK):  # her input was in order, and is in the sum
        assert award.state is AwardState.POSTED
    else:
        assert award.state is AwardState.VOIDED
        assert f"owner {GONE}" in award.reason
    others = states(played.records[0])
    del others[GONE]
    assert set(others.values()) == {AwardState.POSTED}
    check_books(ready.ledger)


# the guard


@pytest.fixture
def desk(secure, stage):
    """Six owners in earnest, their guards, the terms of the first round, and its orders."""
    ready = stage(secure(), "desk")
    spec, kind = ready.spec, ready.spec.kind()
    keys = {i: bytes([i]) * 32 for i in range(6)}
    peers = {i: identity_key(key) for i, key in keys.items()}
    owners = [
        replace(spec.owner(i, ready.folder / f"own-{i}"), identity=keys[i], peers=peers, simulation_seed=None)
        for i in range(6)
    ]
    guards = [Guard(owner) for owner in owners]
    call = kind.announcement(0)
    plan = kind.plan(0, {guard.owner.number: guard.bid(call)[0] for guard in guards})
    orders = {order.owner: order for order in plan.orders}
    for guard in guards:  # escrow has tests of its own
        guard._check_escrow = lambda order, receipt, seen: None
    return guards, orders, mask_terms(call, orders[0], peers), kind.parameters


def ask(desk, owner, stage, question, **changes):
    guards, orders, _, parameters = desk
    order = replace(orders[owner], **changes)
    return SumGuard(guards[owner]).answer(order, stage, question, parameters if stage == INPUT else None)


def exchanged(desk, upto):
    """Play the stages before this one; returns the questions of this one."""
    summing = Summing(desk[2])
    while summing.stage != upto:
        for owner, question in summing.questions().items():
            summing.take(owner, *ask(desk, owner, summing.stage, question))
        summing.close()
    return summing.questions()


def test_a_part_of_a_sum_never_leaves_alone(desk):
    guards, orders, _, parameters = desk
    questions = exchanged(desk, AGREE)
    assert questions
    for answer in (
        lambda: guards[0].train(orders[0], parameters),
        lambda: guards[0].release(orders[0]),
        lambda: guards[0].train(replace(orders[0], share=""), parameters),
        lambda: guards[0].release(replace(orders[0], share="")),
    ):
        assert guarded(answer).code in ("masking", "terms", "unreleased", "replay")


def test_terms_roster_and_company_are_checked_before_any_key_is_given(desk):
    guards, orders, terms, _ = desk
    roster = dict(terms.roster)
    mallory = identity_key(b"m" * 32)
    for changes, error, words in [
        ({"bits": terms.bits - 1}, SumVoid, "not those of the announcement"),
        ({"survivors": 6}, SumVoid, "not those of the announcement"),
        ({"colluders": 1}, SumVoid, "not those of the announcement"),
        ({"round_index": 1}, SumVoid, "not those of the announcement"),
        ({"terms": b"x" * 32}, SumVoid, "not those of the announcement"),
        ({"length": 3}, SumVoid, "not those of the announcement"),
        ({"roster": tuple((roster | {4: mallory}).items())}, Tampered, "owner 4"),
        ({"roster": tuple((roster | {0: mallory}).items())}, Tampered, "owner 0"),
    ]:
        with pytest.raises(error, match=words):
            ask(desk, 0, KEYS, replace(terms, **changes).text)
    invented = (*terms.roster[:5], (77, mallory))
    with pytest.raises(Tampered, match="owner 77"):
        ask(desk, 0, KEYS, replace(terms, roster=invented).text)
    share = json.loads(orders[0].share)
    for change in ({"weight": 0.9}, {"noise": share["noise"] / 2}, {"honest": 6}, {"contributors": 60}):
        refused = guarded(lambda c=change: ask(desk, 0, KEYS, terms.text, share=json.dumps(share | c)))
        assert refused.code in ("terms", "masking"), change
    guards[0].owner = replace(guards[0].owner, least_honest=6)
    with pytest.raises(SumVoid, match="honest owners"):
        ask(desk, 0, KEYS, terms.text)
    guards[0].owner = replace(guards[0].owner, least_honest=2, identity=b"")
    with pytest.raises(SumVoid, match="no key"):
        ask(desk, 0, KEYS, terms.text)
    assert guards[0].journal.mask(release_id(orders[0])) is None
    assert not guards[0].account.released(release_id(orders[0]))


def test_the_same_bytes_after_a_crash_and_nothing_to_another_question(desk):
    questions = exchanged(desk, INPUT)
    first = ask(desk, 0, INPUT, questions[0])
    for _ in range(2):
        again = ask(desk, 0, INPUT, questions[0])
        assert again[0] == first[0]
        np.testing.assert_array_equal(again[1], first[1])
    with pytest.raises(SumVoid, match="another question"):
        ask(desk, 0, INPUT, packed([]))
    guards, orders, _, _ = desk
    assert [release.award_id for release in guards[0].account.releases()] == [orders[0].award], "charged once"


def test_an_order_that_says_later_that_others_add_more_noise_is_refused(desk):
    # with it her own account would be charged less than the sum gives away
    questions = exchanged(desk, INPUT)
    guards, orders, _, _ = desk
    share = json.loads(orders[0].share)
    louder = json.dumps(share | {"noise": 2 * share["noise"]}, sort_keys=True)
    with pytest.raises(SumVoid, match="not those of the announcement and the order"):
        ask(desk, 0, INPUT, questions[0], share=louder)
    assert not guards[0].account.released(release_id(orders[0]))


def test_bad_shares_are_found_before_anything_is_charged(desk):
    questions = exchanged(desk, INPUT)
    guards, orders, _, _ = desk
    with pytest.raises(SumVoid, match="neighbours"):
        ask(desk, 0, INPUT, b"")
    with pytest.raises(Tampered):
        ask(desk, 0, INPUT, questions[1])
    assert not guards[0].account.released(release_id(orders[0]))


def test_a_machine_that_dies_before_the_mask_is_stored_masks_the_same_numbers_once(desk, monkeypatch):
    questions = exchanged(desk, INPUT)
    guards, orders, terms, _ = desk
    keep = OwnerJournal.keep_mask
    with monkeypatch.context() as patch:
        patch.setattr(OwnerJournal, "keep_mask", lambda *arguments: (_ for _ in ()).throw(Dies()))
        with pytest.raises(Dies):
            ask(desk, 0, INPUT, questions[0])
    encoded = guards[0].journal.released(orders[0])
    assert encoded is not None
    answer, words = ask(desk, 0, INPUT, questions[0])
    assert keep(guards[0].journal, orders[0], Mask(b"what is not there"), Mask(b"")) is False
    np.testing.assert_array_equal(guards[0].journal.released(orders[0]), encoded)
    assert ask(desk, 0, INPUT, questions[0])[0] == answer
    assert words.dtype == terms.dtype


def test_two_sets_at_the_same_time_get_one_signature(desk, monkeypatch):
    questions = exchanged(desk, AGREE)
    other = NUMBERS.pack((one,) for one in range(5))
    assert other != questions[0]
    real, raced = OwnerJournal.mask, []

    def mask(self, release):  # what is read is out of date when it is written
        found = real(self, release)
        if not raced:
            raced.append(1)
            ask(desk, 0, AGREE, questions[0])
        return found

    monkeypatch.setattr(OwnerJournal, "mask", mask)
    with pytest.raises(SumVoid, match="another question"):
        ask(desk, 0, AGREE, other)


def test_simulated_owners_have_keys_that_follow_from_the_seed(secure):
    spec = secure()
    keys = {public_identity(spec.owner(i)) for i in range(6)}
    assert len(keys) == 6
    assert keys == {public_identity(spec.owner(i)) for i in range(6)}
    assert identity_of(replace(spec.owner(0), simulation_seed=None)) == b""


@pytest.mark.parametrize("odd", ["order", "stage", "name"])
def test_a_stage_without_its_order_or_with_an_unknown_name_is_refused(odd, secure, stage):
    ready = stage(secure(rounds=1))
    ready.play()
    message, _ = next(one for one in ready.grid.seen if asks(one[0]) == KEYS)
    if odd == "name":
        message.content["stage"]["name"] = "all"
    else:
        del message.content[odd]
    (answer,) = ready.grid.answer(message)
    assert unpack(Refusal, answer) is not None
    assert list(answer.content) == ["refusal"]
