"""Masked sums: exact for whoever stays, whoever goes and when; void below the threshold; uniform until unmasked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from masked_sums import Party
from scipy import stats

from flmarket.errors import InvalidInput, SumVoid, Tampered
from flmarket.market.masking import AGREE, DONE, INPUT, KEYS, SHARES, UNMASK, MaskTerms, Summing, exchange, primitives
from flmarket.market.masking.masker import Advert
from flmarket.market.masking.primitives import PRIME, recovered, shares, stream, weights


def subsets(items: list[int]) -> list[tuple[int, ...]]:
    return [chosen for size in range(len(items) + 1) for chosen in itertools.combinations(items, size)]


def acquainted(party: Party, rounds: int = 1) -> Party:
    """The same owners so many rounds after one in which all met."""
    exchange(Summing(party.terms), party.ask)
    return party.later(rounds)


def test_every_pattern_of_drop_outs_of_six_owners_at_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flmarket.market.masking.broker.is_signed", cache(primitives.is_signed)
    )  # same answers, many branches
    # A tree over who is left after each stage. Each step restores both sides from their states, as other processes do.
    ended = {"sum": 0, "void": 0}

    def go_on(party: Party, broker: bytes, owners: list[int]) -> None:
        summing = Summing.restore(broker)
        stage, party = summing.stage, party.restarted()
        answers = {owner: party.answer(owner, stage, question) for owner, question in summing.questions().items()}
        for stay in subsets(owners):
            if len(stay) < party.terms.survivors - 1 and stage != KEYS:
                continue  # void with one more is void
            left = Summing.restore(broker)
            for owner in stay:
                left.take(owner, *answers[owner])
            if len(stay) < party.terms.survivors:
                with pytest.raises(SumVoid, match="needed"):
                    left.close()
                ended["void"] += 1
                continue
            left.close()
            if left.stage == DONE:
                np.testing.assert_array_equal(left.total, party.plain(left.survivors))
                ended["sum"] += 1
            else:
                go_on(party, left.state(), list(stay))

    party = acquainted(Party(6, survivors=4, colluders=1, length=3, bits=20))
    for one, other in ((1, 4), (4, 13), (7, 10)):  # some pairs have met before, some have not
        party.maskers[one].known = {peer: link for peer, link in party.maskers[one].known.items() if peer != other}
    go_on(party, Summing(party.terms).state(), list(party.inputs))
    # each of at most two owners may go at any of five stages: 1 + 6·5 + 15·25 ways
    assert ended["sum"] == 406
    assert ended["void"] > 2000


def test_the_oracle_counts_patterns_independently() -> None:
    ways = [pattern for pattern in itertools.product(range(6), repeat=6) if sum(stage < 5 for stage in pattern) <= 2]
    assert len(ways) == 406


def test_hundred_owners_on_the_sparse_graph_with_random_drop_outs() -> None:
    party = Party(100, survivors=80, colluders=10, length=40, bits=45)
    assert (party.terms.degree, party.terms.threshold) == (50, 31)
    order = list(party.inputs)
    random.Random(5).shuffle(order)
    party.gone = {KEYS: order[:3], SHARES: order[3:7], INPUT: order[7:12]}
    summing, states = Summing(party.terms), list[bytes]()
    party.gone[AGREE] = order
    assert exchange(summing, party.ask, states.append).is_void  # behind the inputs: the rest is tried twice below
    before = party.restarted()
    party.gone = {AGREE: order[12:14], UNMASK: order[14:20]}
    done = exchange(Summing.restore(states[-2]), party.ask)
    assert set(done.survivors) == set(order[12:])
    np.testing.assert_array_equal(done.total, party.plain(done.survivors))

    # the worst for one owner: all eight who may still go are holders of her shares, and one who went before is too
    victim = order[20]
    around = [one for one in before.terms.neighbours(victim) if one in order[12:]][:8]
    before.gone = {UNMASK: around}
    done = exchange(Summing.restore(states[-2]), before.ask)
    np.testing.assert_array_equal(done.total, before.plain(order[12:]))


def meetings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for every secret that an owner agrees on with another, and every signature that she checks."""
    made, real = list[int](), Advert.checked

    def checked(advert: Advert, terms: MaskTerms) -> Advert:
        made.append(advert.owner)
        return real(advert, terms)

    monkeypatch.setattr(Advert, "checked", checked)
    return made


@pytest.mark.parametrize("rounds", [1, 5])
def test_owners_who_have_met_agree_on_nothing_anew(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    party = acquainted(Party(6, survivors=4, colluders=1, length=3), rounds)
    made = meetings(monkeypatch)
    party.gone = {INPUT: [4], UNMASK: [10]}
    done = exchange(Summing(party.terms), party.ask)
    np.testing.assert_array_equal(done.total, party.plain([1, 7, 10, 13, 16]))
    assert sorted(made) == sorted(party.inputs)  # the broker checks each once
    # what they share in one round says nothing of the other: no mask, no name comes again
    before = {link for masker in party.maskers.values() for link in masker.met.values()}
    later = party.later()
    assert not before & {link for masker in later.later().maskers.values() for link in masker.known.values()}


def test_who_lost_her_chains_meets_all_anew_and_the_others_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    party = acquainted(Party(5, survivors=4))
    made = meetings(monkeypatch)
    party.maskers[7].known = {}
    assert not exchange(Summing(party.terms), party.ask).is_void
    assert len(made) == 5 + 4 + 4  # the broker, she with four, four with her
    del made[:]
    assert not exchange(Summing(party.later().terms), party.later().ask).is_void
    assert len(made) == 5


@pytest.mark.parametrize("what", ["hidden", "another"])
def test_a_broker_who_meddles_with_a_chain_stops_one_round(what: str) -> None:
    """One of two believes that the chain is there, the other does not: neither can read what the other deals."""
    party = acquainted(Party(5, survivors=4))
    summing = Summing(party.terms)
    for owner, question in summing.questions().items():
        summing.take(owner, *party.answer(owner, KEYS, question))
    summing.close()
    if what == "hidden":
        del summing.tags[4][1]
    else:
        summing.tags[4][1] = summing.tags[7][1]
    for owner, question in summing.questions().items():
        summing.take(owner, *party.answer(owner, SHARES, question))
    summing.close()
    questions = summing.questions()
    for owner, other in ((1, 4), (4, 1)):
        with pytest.raises(Tampered, match=f"owner {other} .* not what she sealed"):
            party.answer(owner, INPUT, questions[owner])
    after = party.later()  # their chains are no longer the same, and they find out by the names
    assert after.maskers[1].known[4] != after.maskers[4].known[1]
    assert not exchange(Summing(after.terms), after.ask).is_void


def test_what_is_on_disk_after_dealing_says_nothing_of_chains_and_keys() -> None:
    for party in (Party(4, survivors=3), acquainted(Party(4, survivors=3))):
        summing, roots = Summing(party.terms), {owner: masker.root for owner, masker in party.maskers.items()}
        links = {owner: dict(masker.known) for owner, masker in party.maskers.items()}
        for stage in (KEYS, SHARES):
            for owner, question in summing.questions().items():
                summing.take(owner, *party.answer(owner, stage, question))
            summing.close()
        for owner, masker in party.maskers.items():
            secrets = [roots[owner], primitives.mac(roots[owner], b"key"), *links[owner].values(), *masker.met.values()]
            assert all(secret not in masker.state() for secret in secrets)
            assert masker.root in masker.state()  # what the test would find


@pytest.mark.parametrize("bits", [2, 31, 32, 33, 62])
def test_every_modulus(bits: int) -> None:
    party = Party(4, survivors=3, length=7, bits=bits)
    party.gone = {INPUT: [1]}
    done = exchange(Summing(party.terms), party.ask)
    assert done.survivors == (4, 7, 10)
    np.testing.assert_array_equal(done.total, party.plain(done.survivors))
    assert done.total.dtype == (np.uint32 if bits <= 32 else np.uint64)


def test_a_long_vector_is_masked_block_by_block_as_if_at_once() -> None:
    key, length = b"k" * 32, 3 * primitives._BLOCK + 17
    total = np.zeros(length, dtype=np.uint32)
    primitives.add_masks(total, [(key, 1)])
    np.testing.assert_array_equal(total, np.frombuffer(stream(key, 4 * length), dtype=np.uint32))


# terms and graph


def roster(n: int) -> tuple[tuple[int, bytes], ...]:
    return tuple((i, i.to_bytes(32)) for i in range(n))


def terms(n: int, survivors: int, colluders: int, bits: int = 32) -> MaskTerms:
    return MaskTerms("task", 0, b"", bits, 10, survivors, colluders, roster(n))


@pytest.mark.parametrize(
    ("n", "survivors", "colluders"), [(10, 5, 0), (10, 6, 2), (10, 11, 0), (10, 2, 1), (4, 3, 2), (1, 1, 0)]
)
def test_terms_under_which_the_broker_could_learn_two_sums_are_refused(n: int, survivors: int, colluders: int) -> None:
    with pytest.raises(InvalidInput):
        terms(n, survivors, colluders)


def test_two_owners_with_one_key_are_one_owner() -> None:
    with pytest.raises(InvalidInput, match="roster"):
        MaskTerms("task", 0, b"", 32, 10, 3, 0, ((0, b"k" * 32), (1, b"k" * 32), (2, b"l" * 32)))


@pytest.mark.parametrize(("n", "gone", "colluders"), [(61, 0, 3), (64, 4, 3), (100, 20, 10), (101, 3, 0), (200, 10, 9)])
def test_whatever_leaves_the_sparse_graph_hangs_together_and_enough_holders_are_left(
    n: int, gone: int, colluders: int
) -> None:
    agreed = terms(n, n - gone, colluders)
    around = {owner: set(agreed.neighbours(owner)) for owner in range(n)}
    assert all(owner in around[other] for owner in around for other in around[owner])
    assert {len(found) for found in around.values()} == {agreed.degree}
    assert agreed.degree < n - 1
    assert colluders < agreed.threshold <= agreed.degree + 1 - gone
    ring = sorted(range(n), key=agreed.holder)
    rng = random.Random(n)
    for trial in range(60):
        if trial < 40:  # two runs of neighbours in the ring: what cuts a ring
            cut, start, far = rng.randint(0, gone + colluders), rng.randrange(n), rng.randrange(n)
            lost = {ring[(start + i) % n] for i in range(cut)}
            lost |= {ring[(far + i) % n] for i in range(gone + colluders - cut)}
        else:
            lost = set(rng.sample(range(n), gone + colluders))
        left = set(range(n)) - lost
        reached, edge = set[int](), {min(left)}
        while edge:
            reached |= edge
            edge = {other for one in edge for other in around[one] if other in left} - reached
        assert reached == left


def test_terms_travel_and_one_byte_more_is_refused() -> None:
    agreed = terms(5, 4, 1)
    assert MaskTerms.unpack(agreed.text) == agreed
    for text in (agreed.text + b"i", agreed.text[:-1], b"", b"l1;", b"i05;", b"i+5;", b"l9999999;", b"x1;a"):
        with pytest.raises(InvalidInput):
            MaskTerms.unpack(text)


# primitives


def test_the_field_is_one_and_holds_every_key() -> None:
    assert PRIME > 2**256
    for base in range(2, 40):  # Miller and Rabin's test
        odd, halvings = PRIME - 1, 0
        while odd % 2 == 0:
            odd, halvings = odd // 2, halvings + 1
        power = pow(base, odd, PRIME)
        chain = [pow(power, 2**step, PRIME) for step in range(halvings)]
        assert power == 1 or PRIME - 1 in chain


def test_any_shares_of_the_threshold_give_the_secret_and_fewer_fit_every_secret() -> None:
    secrets, randomness = (b"\xff" * 32, b"s" * 32), stream(b"r" * 32, 128 * 3)
    dealt = shares(secrets, [1, 2, 5, 9, 14, 70], 4, randomness)
    for which, secret in enumerate(secrets):
        one_s = {holder: pair[which] for holder, pair in dealt.items()}
        for chosen in itertools.combinations(dealt, 4):
            assert recovered({one: one_s[one] for one in chosen}, weights(chosen)) == secret
        # with three shares each other secret is a polynomial of the same degree: the fourth share decides
        known, other = (1, 2, 5), b"\x00" * 31 + b"\x07"
        basis = weights((*known, 9))
        wanted = int.from_bytes(other) - sum(int.from_bytes(one_s[one]) * basis[one] for one in known)
        fourth = (wanted * pow(basis[9], -1, PRIME) % PRIME).to_bytes(33)
        assert recovered({**{one: one_s[one] for one in known}, 9: fourth}, basis) == other


def test_shares_are_the_polynomials_by_their_definition() -> None:
    randomness = stream(b"r" * 32, 128 * 30)
    coefficients = [int.from_bytes(randomness[at : at + 64]) for at in range(0, len(randomness), 64)]
    dealt = shares((b"a" * 32, b"b" * 32), range(1, 10_001, 322), 31, randomness)
    for holder, pair in dealt.items():
        for which, secret in enumerate((b"a" * 32, b"b" * 32)):
            own = coefficients[which::2]  # the highest power first
            value = sum(one * holder**power for one, power in zip(own, range(30, 0, -1), strict=True))
            assert pair[which] == ((value + int.from_bytes(secret)) % PRIME).to_bytes(33)


def every_bit_counts(keystream: Callable[[bytes, int], bytes]) -> bool:
    """Whether no two keys among a key and its neighbours in one and two bits give the same stream."""
    key, met = int.from_bytes(b"\x35" * 32), set[bytes]()
    flips = [0, *(1 << i for i in range(256)), *(1 << i | 1 << j for j in range(256) for i in range(j % 8, j, 8))]
    for flip in flips:
        met.add(keystream((key ^ flip).to_bytes(32), 8))
    return len(met) == len(flips)


def test_masks_come_from_the_whole_key_and_a_folded_one_is_caught() -> None:
    assert every_bit_counts(stream)

    def folded(key: bytes, length: int) -> bytes:
        words = np.frombuffer(key, dtype=np.uint32)
        return np.random.default_rng(int(np.bitwise_xor.reduce(words))).bytes(length)

    def cut(key: bytes, length: int) -> bytes:
        return stream(key[:4] * 8, length)

    assert not every_bit_counts(folded)
    assert not every_bit_counts(cut)


# what the broker holds before unmasking


def looks_random(words: np.ndarray, others: list[np.ndarray]) -> bool:
    """Bytes by χ², neighbouring words and other owners' words by correlation; each at a level of 1e-5."""
    level = 1e-5
    counts = np.bincount(np.frombuffer(words.tobytes(), dtype=np.uint8), minlength=256)
    if stats.chisquare(counts).pvalue < level:
        return False
    one = words.astype(np.float64)
    pairs = [(one[:-1], one[1:]), *((one, other.astype(np.float64)) for other in others)]
    return all(np.ptp(a) > 0 and stats.pearsonr(a, b).pvalue > level for a, b in pairs)


def stored(party: Party) -> dict[int, np.ndarray]:
    """What comes to the broker up to the inputs."""
    party.gone = {AGREE: list(party.inputs)}
    assert exchange(Summing(party.terms), party.ask).is_void
    return {owner: vector for owner, (_, vector) in party.seen[INPUT].items() if vector is not None}


def quiet(seed: int) -> Party:
    """Inputs as they are after training: small numbers around nought."""
    party, rng = Party(4, survivors=3, length=20_000, seed=seed), np.random.default_rng(8)
    for owner in party.inputs:
        small = np.rint(rng.normal(0, 50, party.terms.length)).astype(np.int64)
        party.inputs[owner] = (small % 2**party.terms.bits).astype(np.uint64)
    return party


def test_what_is_stored_before_unmasking_is_uniform_and_planted_mistakes_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    party, later = quiet(1), quiet(2)
    now, then = stored(party), stored(later)
    for owner, vector in now.items():
        others = [other for one, other in now.items() if one != owner]
        assert looks_random(vector, [*others, *then.values(), party.inputs[owner]])
        assert looks_random(vector - then[owner], [])
    assert looks_random(now[1] + now[4], [])  # a pair's masks cancel, her own ones stay
    assert not looks_random(party.inputs[1].astype(np.uint32), [])  # sent as it is

    again = quiet(1)  # the same roots: a mask used twice
    again.inputs = {owner: vector[::-1].copy() for owner, vector in party.inputs.items()}
    reused = stored(again)
    assert looks_random(reused[1], [])
    assert not looks_random(reused[1] - now[1], [])

    def only_own_mask(total: np.ndarray, keys: list[tuple[bytes, int]]) -> None:
        primitives.add_masks(total, [(b"\x00" * 32, 1) for _ in keys[:1]])

    monkeypatch.setattr("flmarket.market.masking.masker.add_masks", only_own_mask)  # everybody's mask is the same
    weak = stored(quiet(3))
    assert not looks_random(weak[1] - weak[4], [])
