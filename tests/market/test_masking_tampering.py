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
    primitives,
)
from flmarket.market.masking.masker import (
    ADVERTS,
    DEALT,
    NUMBERS,
    REVEALED,
    SIGNED,
    TAGS,
    Advert,
    Dealt,
    Pair,
    agree_text,
    shares_text,
)
from flmarket.market.masking.primitives import Table, identity_key, mac, packed, sealed, unpacked

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


def flipped(text: bytes) -> bytes:
    return text[:-1] + bytes([text[-1] ^ 1])


def altered(table: Table, text: bytes, owner: int, column: int) -> bytes:
    """A table in whose row of one owner one column is changed."""
    rows = [list(row) for row in table.unpack(text)]
    for row in rows:
        if row[0] == owner:
            row[column] = flipped(row[column])
    return table.pack(rows)


def adverts(question: bytes) -> tuple[bytes, list[Any]]:
    """The broker's key and the rows of a question for shares."""
    desk, table = unpacked(question)  # type: ignore[misc]
    return desk, ADVERTS.unpack(table)


def advert(masker: Masker) -> tuple[Any, ...]:
    """A row of such a question, as from one who knows nobody."""
    key, seed, signature, names = unpacked(masker.answer(KEYS, masker.terms.text))  # type: ignore[misc]
    assert names == b""
    return masker.owner, key, seed, signature, bytes(16)


def sets(*owners: int) -> bytes:
    return NUMBERS.pack((owner,) for owner in owners)


# what a hostile broker can try on an owner


@pytest.mark.parametrize("column", [1, 2, 3])
def test_an_altered_key_commitment_or_signature(column: int) -> None:
    party, summing = at(SHARES)
    desk, table = unpacked(summing.questions()[1])  # type: ignore[misc]
    with pytest.raises(Tampered, match="owner 7") as caught:
        party.answer(1, SHARES, packed((desk, altered(ADVERTS, table, 7, column))))
    assert (caught.value.owner, caught.value.what) == (7, "key")


def test_an_invented_owner() -> None:
    party, summing = at(SHARES)
    desk, rows = adverts(summing.questions()[1])
    with pytest.raises(Tampered, match=r"owner 99 .* not on the roster"):
        party.answer(1, SHARES, packed((desk, ADVERTS.pack([*rows, (99, b"k" * 32, *rows[0][2:])]))))
    # in the place of one who is there: keys that the broker made, signed by a key of its own
    other = Masker(4, MALLORY, replace(party.terms, roster=((1, party.terms.keys[1]), (4, identity_key(MALLORY)),
                   *party.terms.roster[2:])), b"r" * 32)  # fmt: skip
    with pytest.raises(Tampered, match=r"owner 4 .* did not sign"):
        party.answer(1, SHARES, packed((desk, ADVERTS.pack([advert(other), *rows[1:]]))))
    with pytest.raises(Tampered, match=r"owner 4 .* another key in her place"):
        Masker(4, party.identities[4], other.terms, b"r" * 32)


def test_keys_of_another_round_or_of_other_terms() -> None:
    party, summing = at(SHARES)
    for changed in ({"round_index": 5}, {"survivors": 5}, {"bits": 31}, {"terms": b"u" * 32}, {"task": "other"}):
        old = advert(Masker(7, party.identities[7], replace(party.terms, **changed), b"r" * 32))
        desk, rows = adverts(summing.questions()[1])
        with pytest.raises(Tampered, match=r"owner 7 .* for this round"):
            party.answer(1, SHARES, packed((desk, ADVERTS.pack(old if row[0] == 7 else row for row in rows))))


def test_one_owner_s_keys_in_two_places_or_her_own_ones_returned() -> None:
    party, summing = at(SHARES)
    desk, rows = adverts(summing.questions()[1])
    twin = Masker(4, party.identities[4], party.terms, party.maskers[1].root)
    row = advert(twin)  # derived from owner 1's root: the same keys, signed by 4
    with pytest.raises(Tampered, match=r"owner 4 .* owner 1 has the same"):
        party.answer(1, SHARES, packed((desk, ADVERTS.pack([row, *rows[1:]]))))
    with pytest.raises(Tampered, match=r"owner 1 .* twice"):
        party.answer(1, SHARES, packed((desk, ADVERTS.pack([(1, *row[1:]), *rows[1:]]))))


def test_keys_of_small_order_and_a_broker_without_one() -> None:
    party, summing = at(SHARES)
    desk, rows = adverts(summing.questions()[1])
    with pytest.raises(SumVoid, match="broker's key"):
        party.answer(1, SHARES, packed((bytes(32), ADVERTS.pack(rows))))
    party, summing = at(KEYS)
    bad, mallory = bytes(32), party.maskers[7]
    seed = unpacked(mallory.answer(KEYS, party.terms.text))[1]  # type: ignore[index]
    signature = primitives.signed(mallory.identity, Advert(7, bad, seed, b"").text(party.terms))  # type: ignore[arg-type]
    with pytest.raises(Tampered, match=r"owner 7 .* small order"):
        summing.take(7, packed((bad, seed, signature, b"")))
    party, summing = at(SHARES)
    row = (7, bad, seed, signature, bytes(16))
    with pytest.raises(Tampered, match=r"owner 7 .* small order"):
        party.answer(1, SHARES, packed((desk, ADVERTS.pack(row if one[0] == 7 else one for one in rows))))


def test_too_few_neighbours() -> None:
    party, summing = at(SHARES)
    desk, rows = adverts(summing.questions()[1])
    with pytest.raises(SumVoid, match="keys of 2 neighbours"):
        party.answer(1, SHARES, packed((desk, ADVERTS.pack(rows[:2]))))
    with pytest.raises(Tampered, match="there twice"):
        party.answer(1, SHARES, packed((desk, ADVERTS.pack([*rows, rows[0]]))))


@pytest.mark.parametrize("column", [1, 2, 3, 4])
def test_an_altered_share(column: int) -> None:
    party, summing = at(INPUT)
    with pytest.raises(Tampered, match="owner 10") as caught:
        party.answer(1, INPUT, altered(DEALT, summing.questions()[1], 10, column))
    assert (caught.value.owner, caught.value.what) == (10, "share")


def test_a_share_that_was_meant_for_another_or_comes_from_another_round() -> None:
    party, summing = at(INPUT)
    to_one, to_four = (DEALT.unpack(summing.questions()[owner]) for owner in (1, 4))
    elsewhere = next(row for row in to_four if row[0] == 10)
    with pytest.raises(Tampered, match=r"owner 10 .* not what she sealed"):
        party.answer(1, INPUT, DEALT.pack(elsewhere if row[0] == 10 else row for row in to_one))
    swapped = [(10 if row[0] == 7 else 7 if row[0] == 10 else row[0], *row[1:]) for row in to_one]
    with pytest.raises(Tampered, match="not what she sealed"):
        party.answer(1, INPUT, DEALT.pack(swapped))


def dealing(party: Party, owner: int, change: Callable[[Masker, dict[int, Dealt]], None]) -> Any:
    """What asks all, while one owner deals what `change` makes of it."""
    liar = party.maskers[owner]

    def ask(stage: str, questions: Mapping[int, bytes]) -> Iterator[Mapping[int, Reply]]:
        for one, question in questions.items():
            answer, vector = party.answer(one, stage, question)
            if one == owner and stage == SHARES:
                table, box, _ = unpacked(answer)  # type: ignore[misc]
                dealt = {holder: Dealt(*parts) for holder, *parts in DEALT.unpack(table)}
                change(liar, dealt)
                table = DEALT.pack((holder, *parts) for holder, parts in dealt.items())
                answer = packed((table, box, mac(liar.desk, shares_text(table, box))))
            yield {one: (answer, vector)}

    return ask


@pytest.mark.parametrize("name", ["box", "seed", "pair"])
def test_a_dealer_who_commits_to_another_share_or_key_than_hers(name: str) -> None:
    party = Party(5, survivors=4)

    def change(liar: Masker, dealt: dict[int, Dealt]) -> None:
        wrong = dealt[1]._replace(**{name: flipped(getattr(dealt[1], name))})
        parts = primitives.opened(liar.pairs[1].seal, wrong.text, b"".join(dealt[1][1:]), 1)
        assert parts is not None
        dealt[1] = wrong._replace(text=sealed(liar.pairs[1].seal, parts, b"".join(wrong[1:]), 1))

    with pytest.raises(Tampered, match=r"owner 7 .* committed to another"):
        exchange(Summing(party.terms), dealing(party, 7, change))


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
                party.answer(owner, stage, b"?")
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
        party.answer(1, AGREE, sets(*survivors))


def test_a_survivor_whose_shares_this_owner_never_got() -> None:
    # the broker hides owner 13's shares from owner 1 alone, to cut their mask out, and says that both survived
    party, summing = at(INPUT)
    rows = DEALT.unpack(summing.questions()[1])
    party.answer(1, INPUT, DEALT.pack(row for row in rows if row[0] != 13))
    with pytest.raises(Tampered, match=r"owner 13 .* dealt nothing"):
        party.answer(1, AGREE, sets(1, 4, 7, 10, 13))


def consents(answers: Mapping[int, bytes], owner: int) -> list[tuple[int, bytes]]:
    """What others said to one owner."""
    said = {one: dict(TAGS.unpack(unpacked(text)[0])) for one, text in answers.items()}  # type: ignore[index, arg-type]
    return [(one, tags[owner]) for one, tags in sorted(said.items()) if one != owner]


def test_two_views_of_who_survived_unmask_nobody() -> None:
    party, _ = at(AGREE)
    one, other = (1, 4, 7, 10), (1, 4, 7, 10, 13)
    said = {owner: party.answer(owner, AGREE, sets(*one))[0] for owner in (1, 4, 7)}
    with pytest.raises(SumVoid, match="has answered another question"):
        party.answer(1, AGREE, sets(*other))
    said |= {owner: party.answer(owner, AGREE, sets(*other))[0] for owner in (10, 13)}
    for owner in (1, 4, 7):
        rows = [row for row in consents(said, owner) if row[0] in one]
        with pytest.raises(Tampered, match=r"owner 10 .* not hers to this set") as caught:
            party.answer(owner, UNMASK, TAGS.pack(rows))
        assert caught.value.what == "consent"
        with pytest.raises(SumVoid, match="3 owners agree"):
            party.answer(owner, UNMASK, TAGS.pack(rows[:2]))
    # three colluders sign both sets: with 2T > n + c that many are no longer allowed for, and the arithmetic shows why
    with pytest.raises(InvalidInput, match="survivors"):
        replace(party.terms, colluders=3)


def test_a_consent_is_good_for_one_owner_from_one_owner() -> None:
    party, summing = at(UNMASK)
    to_one, to_four = (TAGS.unpack(summing.questions()[owner]) for owner in (1, 4))
    mine = dict(to_four)[1]
    for rows in (
        [(owner, dict(to_four).get(owner, mine)) for owner, _ in to_one],  # said to another
        [(owner, mine) for owner, _ in to_one],  # her own, returned
        [(owner, bytes(16)) for owner, _ in to_one],
    ):
        with pytest.raises(Tampered, match="not hers to this set"):
            party.answer(1, UNMASK, TAGS.pack(rows))
    # one that is wrong does no harm where there are enough without it
    party.answer(1, UNMASK, TAGS.pack([(to_one[0][0], bytes(16)), *to_one[1:]]))


def test_both_kinds_of_share_of_one_owner() -> None:
    party, summing = at(UNMASK)
    answer = REVEALED.unpack(party.answer(1, UNMASK, summing.questions()[1])[0])
    assert [(row[0], row[1]) for row in answer] == [(owner, b"\x01") for owner in (1, 4, 7, 10, 13)]  # one kind each
    without = (1, 4, 7, 10)
    text = agree_text(party.terms, without)
    rows = [(one, party.maskers[one].pairs[4].consent(one, 4, text)) for one in (7, 10)]
    with pytest.raises(SumVoid, match="has answered another question"):
        party.answer(1, UNMASK, TAGS.pack([]))
    assert not party.maskers[1].pairs
    with pytest.raises(Tampered, match="not hers to this set"):
        party.answer(4, UNMASK, TAGS.pack(rows))


# what a hostile owner can try on the broker


def replies(party: Party, summing: Summing) -> dict[int, Reply]:
    return {owner: party.answer(owner, summing.stage, question) for owner, question in summing.questions().items()}


@pytest.mark.parametrize("stage", STAGES)
def test_an_altered_answer_is_refused_and_the_others_go_on(stage: str) -> None:
    party, summing = at(stage)
    came = replies(party, summing)
    for owner, (answer, vector) in came.items():
        for bad in (flipped(answer), b"x", packed([]), packed([b"x"]), packed(7)):
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
    rows = REVEALED.unpack(replies(party, summing)[7][0])
    for change in (
        lambda row: [row[0], row[1], flipped(row[2])],
        lambda row: [row[0], flipped(row[1]), row[2]],
        lambda row: [99, row[1], row[2]],
        lambda row: [row[0], row[1], row[2][:-1]],
        lambda row: rows[1],
    ):
        with pytest.raises(Tampered, match="share of owner 7"):
            summing.take(7, REVEALED.pack([change(rows[0]), *rows[1:]]))
    with pytest.raises(Tampered, match=r"share of owner 7 .* each neighbour"):
        summing.take(7, REVEALED.pack(rows[1:]))


@pytest.mark.parametrize("gone", [(), (7,)])  # her seed is recovered if she stays, the keys in her box if she goes
def test_shares_of_another_seed_or_key_void_the_sum_and_name_the_dealer(gone: tuple[int, ...]) -> None:
    party = Party(5, survivors=4)
    party.gone = {INPUT: gone}
    liar, deals = party.maskers[7], party.maskers[7]._dealt

    def dealt(pairs: Mapping[int, Pair]) -> Any:
        right, liar.root = liar.root, b"another root of all her secrets!"
        (own, found, _), liar.root = deals(pairs), right
        return own, found, deals(pairs)[2]  # the box is hers, its key is not what she shares

    liar._dealt = dealt  # type: ignore[method-assign]
    found = exchange(Summing(party.terms), party.ask)
    assert found.is_void
    assert "share of owner 7 is refused: her shares are not of" in found.why
    assert [one.owner for one in found.problems] == [7]


def test_a_box_with_another_key_than_that_of_the_mask() -> None:
    party = Party(5, survivors=4)
    party.gone = {INPUT: (7,)}
    liar, deals = party.maskers[7], party.maskers[7]._dealt

    def dealt(pairs: Mapping[int, Pair]) -> Any:
        own, found, _ = deals(pairs)
        inside = b"".join(flipped(pairs[peer].mask) for peer in sorted(pairs))
        return own, found, sealed(liar._secret(b"box"), inside, party.terms.digest)

    liar._dealt = dealt  # type: ignore[method-assign]
    found = exchange(Summing(party.terms), party.ask)
    assert found.is_void
    assert "share of owner 7 is refused: her shares are not of the keys that she committed to" in found.why


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
    return SIGNED.pack(sorted(said.items()))


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
            restarted.answer(owner, AGREE, sets(*sorted(party.inputs)))
        with pytest.raises(SumVoid, match="is past the stage 'unmask'"):
            restarted.answer(owner, UNMASK, b"")
    party, summing = at(UNMASK)
    for restarted in (party, party.restarted()):
        with pytest.raises(SumVoid, match="is past the stage 'void'"):
            restarted.answer(1, VOID, party.terms.digest)
    assert set(summing.tags) == set(party.inputs)


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
    elsewhere.answer(KEYS, elsewhere.terms.text)
    stale = elsewhere.answer(VOID, elsewhere.terms.digest)
    for question, words in (
        (b"", "0 owners signed"),
        (voids(few), f"{need - 1} owners signed"),
        (voids(few | {owner: bytes(64)}), "not hers"),
        (voids(few | {owner: stale}), "not hers"),
        (voids(few | {99: said[owner]}), "not on the roster"),
        (voids(few) + SIGNED.pack([next(iter(few.items()))]), "there twice"),
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
