"""What is invented, altered, replayed or asked for twice in a masked sum is refused, and its owner named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from masked_sums import Party

from flmarket.errors import FlmarketError, InvalidInput, SumVoid, Tampered
from flmarket.market.masking import (
    AGREE,
    INPUT,
    KEYS,
    SHARES,
    STAGES,
    UNMASK,
    VOID,
    VOIDED,
    Masker,
    Reply,
    Summing,
    exchange,
)
from flmarket.market.masking.masker import Advert, SealedShare, agree_text, shares_text
from flmarket.market.masking.primitives import derived, identity_key, packed, sealed, secret_key, signed, unpacked

MALLORY = b"m" * 32


def at(stage: str, *, colluders: int = 0) -> tuple[Party, Summing]:
    """Five owners (1, 4, 7, 10, 13) of whom four must stay, and the broker, at the beginning of a stage."""
    party = Party(5, survivors=4, colluders=colluders)
    summing = Summing(party.terms)
    while summing.stage != stage:
        for owner, question in summing.questions().items():
            summing.take(owner, *party.answer(owner, summing.stage, question))
        summing.close()
    return party, summing


def rows_of(value: object) -> list[Any]:
    assert isinstance(value, list)
    return value


def flipped(text: bytes) -> bytes:
    return text[:-1] + bytes([text[-1] ^ 1])


def altered(question: bytes, owner: int, column: int, change: Callable[[bytes], bytes] = flipped) -> bytes:
    """A question in whose row of one owner one column is changed."""
    rows = rows_of(unpacked(question))
    for row in rows:
        if row[0] == owner:
            row[column] = change(row[column])
    return packed(rows)


# what a hostile broker can try on an owner


@pytest.mark.parametrize("column", [1, 2, 3, 4])
def test_an_altered_key_commitment_or_signature(column: int) -> None:
    party, summing = at(SHARES)
    question = altered(summing.questions()[1], 7, column)
    with pytest.raises(Tampered, match="owner 7") as caught:
        party.answer(1, SHARES, question)
    assert (caught.value.owner, caught.value.what) == (7, "key")


def test_an_invented_owner() -> None:
    party, summing = at(SHARES)
    rows = rows_of(unpacked(summing.questions()[1]))
    with pytest.raises(Tampered, match=r"owner 99 .* not on the roster"):
        party.answer(1, SHARES, packed([*rows, [99, *rows[0][1:]]]))
    # in the place of one who is there: keys that the broker made, signed by a key of its own
    other = Masker(4, MALLORY, replace(party.terms, roster=((1, party.terms.keys[1]), (4, identity_key(MALLORY)),
                   *party.terms.roster[2:])), b"r" * 32)  # fmt: skip
    forged = unpacked(other.answer(KEYS, other.terms.pack()))
    assert isinstance(forged, list)
    with pytest.raises(Tampered, match=r"owner 4 .* did not sign"):
        party.answer(1, SHARES, packed([[4, *forged], *rows[1:]]))
    with pytest.raises(Tampered, match=r"owner 4 .* another key in her place"):
        Masker(4, party.identities[4], other.terms, b"r" * 32)


def test_keys_of_another_round_or_of_other_terms() -> None:
    party, summing = at(SHARES)
    for changed in ({"round_index": 5}, {"survivors": 5}, {"bits": 31}, {"terms": b"u" * 32}, {"task": "other"}):
        old = Masker(7, party.identities[7], replace(party.terms, **changed), b"r" * 32)
        parts = unpacked(old.answer(KEYS, old.terms.pack()))
        rows = unpacked(summing.questions()[1])
        assert isinstance(rows, list)
        assert isinstance(parts, list)
        with pytest.raises(Tampered, match=r"owner 7 .* for this round"):
            party.answer(1, SHARES, packed([[7, *parts] if row[0] == 7 else row for row in rows]))


def test_one_owner_s_keys_in_two_places_or_her_own_ones_returned() -> None:
    party, _ = at(SHARES)
    twin = Masker(4, party.identities[4], party.terms, party.maskers[1].root)
    row = unpacked(twin.answer(KEYS, party.terms.pack()))  # derived from owner 1's root: the same keys, signed by 4
    assert isinstance(row, list)
    others = [
        [owner, *unpacked(party.maskers[owner].answer(KEYS, party.terms.pack()))]  # type: ignore[misc]
        for owner in (7, 10, 13)
    ]
    with pytest.raises(Tampered, match=r"owner 4 .* owner 1 has the same"):
        party.answer(1, SHARES, packed([[4, *row], *others]))


def test_too_few_neighbours() -> None:
    party, summing = at(SHARES)
    rows = rows_of(unpacked(summing.questions()[1]))
    with pytest.raises(SumVoid, match="keys of 2 neighbours"):
        party.answer(1, SHARES, packed(rows[:2]))
    with pytest.raises(Tampered, match="there twice"):
        party.answer(1, SHARES, packed([*rows, rows[0]]))


@pytest.mark.parametrize("column", [1, 2, 3])
def test_an_altered_share(column: int) -> None:
    party, summing = at(INPUT)
    with pytest.raises(Tampered, match="owner 10") as caught:
        party.answer(1, INPUT, altered(summing.questions()[1], 10, column))
    assert (caught.value.owner, caught.value.what) == (10, "share")


def test_a_share_that_was_meant_for_another_or_comes_from_another_round() -> None:
    party, summing = at(INPUT)
    to_one, to_four = (unpacked(summing.questions()[owner]) for owner in (1, 4))
    assert isinstance(to_one, list)
    assert isinstance(to_four, list)
    elsewhere = next(row for row in to_four if row[0] == 10)
    with pytest.raises(Tampered, match=r"owner 10 .* not what she sealed"):
        party.answer(1, INPUT, packed([elsewhere if row[0] == 10 else row for row in to_one]))
    swapped = [[10 if row[0] == 7 else 7 if row[0] == 10 else row[0], *row[1:]] for row in to_one]
    with pytest.raises(Tampered, match="not what she sealed"):
        party.answer(1, INPUT, packed(swapped))


def test_a_dealer_who_commits_to_another_share_than_she_deals() -> None:
    party = Party(5, survivors=4)
    liar = party.maskers[7]

    def ask(stage: str, questions: Mapping[int, bytes]) -> Iterator[Mapping[int, Reply]]:
        for owner, question in questions.items():
            answer, vector = party.answer(owner, stage, question)
            if owner == 7 and stage == SHARES:
                table = rows_of(unpacked(answer)[0])  # type: ignore[index]
                dealt = {row[0]: SealedShare(*row[1:]) for row in table}
                key, kept = liar._transit(liar.peers[1], 7, 1), flipped(dealt[1].mask_key)
                dealt[1] = SealedShare(sealed(key, bytes(66), kept + dealt[1].seed), kept, dealt[1].seed)
                table = [[holder, *one.parts()] for holder, one in sorted(dealt.items())]
                answer = packed((table, signed(liar.identity, shares_text(liar.terms, 7, dealt))))
            yield {owner: (answer, vector)}

    with pytest.raises(Tampered, match=r"owner 7 .* committed to another"):
        exchange(Summing(party.terms), ask)


def test_the_same_question_gets_the_same_bytes_and_another_one_nothing() -> None:
    party = Party(5, survivors=4)
    summing = Summing(party.terms)
    while summing.stage in STAGES:
        stage, questions = summing.stage, summing.questions()
        first = {owner: party.answer(owner, stage, question) for owner, question in questions.items()}
        party = party.restarted()  # a process ended after the answer was stored
        for owner, question in questions.items():
            if stage == INPUT:
                with pytest.raises(SumVoid, match="was used before"):
                    party.answer(owner, stage, question)
            else:
                assert party.answer(owner, stage, question) == first[owner]
            with pytest.raises(FlmarketError):
                party.answer(owner, stage, packed([]))
            later = STAGES[STAGES.index(stage) + 2 : STAGES.index(stage) + 3]
            for skipped in later:
                with pytest.raises(SumVoid, match="was not asked for"):
                    party.answer(owner, skipped, packed([]))
        for owner, reply in first.items():
            summing.take(owner, *reply)
        summing.close()
    np.testing.assert_array_equal(summing.total, party.plain(summing.survivors))
    assert all(not masker.root and not masker.held for masker in party.maskers.values())  # forgotten when done


def test_a_mask_is_used_once_whatever_is_put_in() -> None:
    party, summing = at(INPUT)
    question = summing.questions()[1]
    party.answer(1, INPUT, question)
    party.inputs[1] = party.inputs[1] ^ np.uint64(1)
    for masker in (party.maskers[1], party.restarted().maskers[1]):
        with pytest.raises(SumVoid, match="mask of owner 1 was used before"):
            masker.masked(question, party.inputs[1])
    with pytest.raises(InvalidInput, match="below 2"):
        party.maskers[4].masked(summing.questions()[4], np.full(5, 2**32, dtype=np.uint64))


@pytest.mark.parametrize(
    ("survivors", "words"),
    [
        ((1, 4, 7), "3 owners are left, 4 are agreed on"),
        ((4, 7, 10, 13), "owner 1 is not among"),
        ((1, 1, 4, 7), "each once"),
        ((1, 4, 7, 99), "owners of the roster"),
        ((4, 1, 7, 10), "in order"),
    ],
)
def test_a_set_of_survivors_that_is_not_agreed_on(survivors: tuple[int, ...], words: str) -> None:
    party, _ = at(AGREE)
    with pytest.raises(SumVoid, match=words):
        party.answer(1, AGREE, packed(survivors))


def test_a_survivor_whose_shares_this_owner_never_got() -> None:
    # the broker hides owner 13's shares from owner 1 alone, to cut their mask out, and says that both survived
    party, summing = at(INPUT)
    rows = rows_of(unpacked(summing.questions()[1]))
    party.answer(1, INPUT, packed([row for row in rows if row[0] != 13]))
    with pytest.raises(Tampered, match=r"owner 13 .* dealt nothing"):
        party.answer(1, AGREE, packed((1, 4, 7, 10, 13)))


def test_two_views_of_who_survived_unmask_nobody() -> None:
    party, _ = at(AGREE)
    one, other = (1, 4, 7, 10), (1, 4, 7, 10, 13)
    signatures = {}
    for owner in (1, 4, 7):
        (signatures[owner],) = unpacked(party.answer(owner, AGREE, packed(one))[0])  # type: ignore[misc]
    with pytest.raises(SumVoid, match="has answered another question"):
        party.answer(1, AGREE, packed(other))
    for owner in (10, 13):
        (signatures[owner],) = unpacked(party.answer(owner, AGREE, packed(other))[0])  # type: ignore[misc]
    rows = sorted(signatures.items())
    for owner in (1, 4, 7):
        with pytest.raises(Tampered, match=r"owner 10 .* not hers on this set") as caught:
            party.answer(owner, UNMASK, packed([row for row in rows if row[0] in one]))
        assert caught.value.what == "signature"
        with pytest.raises(SumVoid, match="3 owners signed"):
            party.answer(owner, UNMASK, packed(rows[:3]))
    # three colluders sign both sets: with 2T > n + c that many are no longer allowed for, and the arithmetic shows why
    with pytest.raises(InvalidInput, match="survivors"):
        replace(party.terms, colluders=3)


def test_both_kinds_of_share_of_one_owner() -> None:
    party, summing = at(UNMASK)
    answer = unpacked(party.answer(1, UNMASK, summing.questions()[1])[0])
    assert isinstance(answer, list)
    assert [(row[0], row[1]) for row in answer] == [(owner, 1) for owner in (1, 4, 7, 10, 13)]  # one kind each
    without = (1, 4, 7, 10)
    rows = [(owner, signed(party.identities[owner], agree_text(party.terms, without))) for owner in without]
    for asked in (packed(rows), packed([*rows, rows[0]])):
        with pytest.raises(SumVoid, match="has answered another question"):
            party.answer(1, UNMASK, asked)
    with pytest.raises(Tampered, match="not hers on this set"):
        party.answer(4, UNMASK, packed(rows))


# what a hostile owner can try on the broker


def replies(party: Party, summing: Summing) -> dict[int, Reply]:
    return {owner: party.answer(owner, summing.stage, question) for owner, question in summing.questions().items()}


@pytest.mark.parametrize("stage", STAGES)
def test_an_altered_answer_is_refused_and_the_others_go_on(stage: str) -> None:
    party, summing = at(stage)
    came = replies(party, summing)
    for owner, (answer, vector) in came.items():
        for bad in (flipped(answer), b"", packed([]), packed([b"x"]), packed(7)):
            if owner == 7 and bad != answer:
                with pytest.raises(Tampered, match="owner 7") as caught:
                    summing.take(7, bad, vector)
                assert caught.value.owner == 7
        if owner != 7:
            summing.take(owner, answer, vector)
    with pytest.raises(Tampered, match=r"owner 1 .* answered before"):
        summing.take(1, *came[1])
    with pytest.raises(Tampered, match=r"owner 99 .* not asked"):
        summing.take(99, *came[1])
    summing.close()
    party.gone = {}
    done = exchange(summing, party.ask)
    np.testing.assert_array_equal(done.total, party.plain(done.survivors))
    assert (7 in done.survivors) == (stage in (AGREE, UNMASK))


def test_an_input_that_is_another_s_altered_or_out_of_form() -> None:
    party, summing = at(INPUT)
    came = replies(party, summing)
    answer, vector = came[7]
    assert isinstance(vector, np.ndarray)
    for bad in (vector + vector.dtype.type(1), vector[:-1], vector.astype(np.uint64), None, came[4][1]):
        with pytest.raises(Tampered, match="input of owner 7"):
            summing.take(7, answer, bad)
    with pytest.raises(Tampered, match="input of owner 7"):
        summing.take(7, *came[4])


def test_a_number_beyond_the_modulus() -> None:
    party = Party(3, survivors=2, bits=20)
    summing = Summing(party.terms)
    for _ in range(2):
        for owner, question in summing.questions().items():
            summing.take(owner, *party.answer(owner, summing.stage, question))
        summing.close()
    answer, vector = party.answer(1, INPUT, summing.questions()[1])
    assert vector is not None
    with pytest.raises(Tampered, match="below 2"):
        summing.take(1, answer, vector | vector.dtype.type(2**20))


def test_a_share_that_is_not_the_one_that_was_dealt() -> None:
    party, summing = at(UNMASK)
    rows = rows_of(unpacked(replies(party, summing)[7][0]))
    for change in (
        lambda row: [row[0], row[1], flipped(row[2])],
        lambda row: [row[0], 1 - row[1], row[2]],
        lambda row: [99, row[1], row[2]],
        lambda row: [row[0], row[1], row[2][:-1]],
    ):
        with pytest.raises(Tampered, match="share of owner 7"):
            summing.take(7, packed([change(rows[0]), *rows[1:]]))


@pytest.mark.parametrize("gone", [(), (7,)])  # her seed is recovered if she stays, her key if she goes
def test_shares_of_another_seed_or_key_void_the_sum_and_name_the_dealer(gone: tuple[int, ...]) -> None:
    party = Party(5, survivors=4)
    party.gone = {INPUT: gone}
    liar, deals = party.maskers[7], party.maskers[7]._dealt

    def dealt(peers: Mapping[int, Advert]) -> dict[int, SealedShare]:
        right, liar.root = liar.root, b"another root of all her secrets!"
        liar._cipher = secret_key(derived(right, liar.terms.digest, "cipher"))
        found, liar.root = deals(peers), right
        return found

    liar._dealt = dealt  # type: ignore[method-assign]
    found = exchange(Summing(party.terms), party.ask)
    assert found.is_void
    assert "share of owner 7 is refused: her shares are not of" in found.why
    assert [one.owner for one in found.problems] == [7]


# a round that is said to be void


def given_up(*, colluders: int = 0) -> tuple[Party, Summing, dict[int, bytes]]:
    """Seven owners of whom five must stay; four sent their input, and all four signed that they sign nothing else."""
    party = Party(7, survivors=5, colluders=colluders)
    party.gone = {INPUT: list(party.inputs)[:3]}
    summing = Summing(party.terms)
    while summing.stage != VOID:
        for batch in party.ask(summing.stage, summing.questions()):
            for owner, reply in batch.items():
                summing.take(owner, *reply)
        try:
            summing.close()
        except SumVoid:
            summing.give_up()
    said = {owner: party.answer(owner, VOID, question)[0] for owner, question in summing.questions().items()}
    return party, summing, said


def voids(said: Mapping[int, bytes]) -> bytes:
    return packed([(owner, rows_of(unpacked(text))[0]) for owner, text in sorted(said.items())])


def test_enough_statements_free_an_owner_and_her_secrets_are_gone() -> None:
    party, _, said = given_up()
    assert party.terms.voiders == 3  # n − T + c + 1
    owner = max(said)
    party.answer(owner, VOIDED, voids(said))
    assert party.maskers[owner].root == b""
    assert party.maskers[owner].held == {}


def test_who_signed_the_void_signs_no_survivors_and_the_other_way_round() -> None:
    party, _, said = given_up()
    owner = max(said)
    for restarted in (party, party.restarted()):
        with pytest.raises(SumVoid, match="is past the stage 'agree'"):
            restarted.answer(owner, AGREE, packed(sorted(party.inputs)))
        with pytest.raises(SumVoid, match="is past the stage 'unmask'"):
            restarted.answer(owner, UNMASK, packed(()))
    party, summing = at(UNMASK)
    for restarted in (party, party.restarted()):
        with pytest.raises(SumVoid, match="is past the stage 'void'"):
            restarted.answer(1, VOID, party.terms.digest)
    assert set(summing.signatures) == set(party.inputs)


def test_who_signed_the_void_before_her_input_sends_none() -> None:
    party, summing = at(INPUT)
    question = summing.questions()[1]
    party.answer(1, VOID, party.terms.digest)
    with pytest.raises(SumVoid, match="is past the stage 'input'"):
        party.answer(1, INPUT, question)


def test_a_broker_s_word_too_few_forged_or_other_rounds_statements_free_nobody() -> None:
    party, _, said = given_up(colluders=1)
    owner, need = max(said), party.terms.voiders
    assert need == 4 == len(said)
    few = dict(list(said.items())[: need - 1])
    elsewhere = Masker(owner, party.identities[owner], replace(party.terms, round_index=9), b"r" * 32)
    elsewhere.answer(KEYS, elsewhere.terms.pack())
    stale = elsewhere.answer(VOID, elsewhere.terms.digest)
    for question, words in (
        (packed(()), "0 owners signed"),
        (voids(few), f"{need - 1} owners signed"),
        (voids(few | {owner: packed((bytes(64),))}), "not hers"),
        (voids(few | {owner: stale}), "not hers"),
        (voids(few | {99: said[owner]}), "not on the roster"),
        (packed([*rows_of(unpacked(voids(few))), rows_of(unpacked(voids(few)))[0]]), "there twice"),
    ):
        with pytest.raises((SumVoid, Tampered), match=words):
            party.answer(owner, VOIDED, question)
        assert party.maskers[owner].root
    party.answer(owner, VOIDED, voids(said))


@pytest.mark.parametrize(("n", "survivors", "colluders"), [(5, 4, 0), (5, 4, 1), (6, 4, 1), (7, 5, 2), (6, 6, 3)])
def test_survivors_and_the_void_are_never_both_signed_by_enough(n: int, survivors: int, colluders: int) -> None:
    """Whatever each honest owner signs, once, and with colluders who sign both."""
    terms = Party(n, survivors=survivors, colluders=colluders).terms
    honest = n - colluders
    for agreed in range(honest + 1):
        for void in range(honest - agreed + 1):
            opened = agreed + colluders >= terms.survivors
            freed = void + colluders >= terms.voiders
            assert not (opened and freed)
    # and one statement fewer would not do
    assert any(
        agreed + colluders >= terms.survivors and honest - agreed + colluders >= terms.voiders - 1
        for agreed in range(honest + 1)
    )
