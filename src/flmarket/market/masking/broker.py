"""The broker's side of a masked sum, and the loop that plays it with whatever reaches owners.

`Summing` knows which question goes to whom, takes answers one by one, and after each stage goes on with those who
answered it well. An answer that is not in order is refused and named (`Tampered`), and its owner counts as gone; with
fewer than T left the sum is void (`SumVoid`), and of nobody's input anything is known. After the last stage `total` is
the sum of the survivors' inputs modulo 2^b, exactly, and there is nothing else that it could be: seeds and keys that
come out of shares are compared with what their owners committed to, so a wrong share is found, and named.

Of inputs only their running sum is kept. `state` after a stage and `restore` let another process go on.

What would break it: two of these at work on one round. Owners would sign one of two sets of survivors, and at most one
of them is unmasked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from flmarket.errors import InvalidInput, SumVoid, Tampered
from flmarket.market.masking.masker import (
    AGREE,
    INPUT,
    KEYS,
    SHARES,
    STAGES,
    UNMASK,
    VOID,
    VOIDED,
    Advert,
    SealedShare,
    agree_text,
    commitment,
    input_text,
    pair_key,
    rows,
    seed_commitment,
    self_key,
    shares_text,
    void_text,
)
from flmarket.market.masking.primitives import (
    SHARE,
    Words,
    add_masks,
    is_signed,
    packed,
    public_key,
    recovered,
    secret_key,
    unpacked,
    weights,
)
from flmarket.market.masking.terms import MaskTerms, items

_log = logging.getLogger(__name__)
DONE = "done"
Reply = tuple[bytes, Words | None]
Ask = Callable[[str, Mapping[int, bytes]], Iterable[Mapping[int, Reply]]]


class Summing:
    """One round's sum, from the first stage to the last. `problems` says what was refused, whose, and why."""

    def __init__(self, terms: MaskTerms) -> None:
        self.terms, self.stage = terms, KEYS
        self.problems: list[Tampered] = []
        self.adverts: dict[int, Advert] = {}
        self.dealt: dict[int, dict[int, SealedShare]] = {}
        self.survivors: tuple[int, ...] = ()
        self.signatures: dict[int, bytes] = {}
        self.is_void, self.why = False, ""
        self.total: Words = np.zeros(terms.length, dtype=terms.dtype)
        self._came: set[int] = set()
        self._revealed: dict[int, dict[int, bytes]] = {}

    @property
    def left(self) -> list[int]:
        """Who is asked at this stage: all who answered the last."""
        before: dict[str, Iterable[int]] = {
            KEYS: self.terms.keys, SHARES: self.adverts, INPUT: self.dealt, AGREE: self.survivors,
            UNMASK: self.signatures, VOID: self.survivors, VOIDED: self.signatures,
        }  # fmt: skip
        return sorted(before.get(self.stage, ()))

    def questions(self) -> dict[int, bytes]:
        """What each owner who is left is asked now, but for those who have answered."""
        terms, asked = self.terms, [owner for owner in self.left if owner not in self._came]
        if self.stage == SHARES:
            return {owner: self._around(owner, self.adverts, lambda one, at: one.parts()) for owner in asked}
        if self.stage == INPUT:
            return {owner: self._around(owner, self.dealt, lambda one, at: one[at].parts()) for owner in asked}
        same = {
            KEYS: terms.pack(),
            AGREE: packed(self.survivors),
            UNMASK: packed(sorted(self.signatures.items())[: terms.survivors]),
            VOID: terms.digest,
            VOIDED: packed(sorted(self.signatures.items())[: terms.voiders]),
        }
        return dict.fromkeys(asked, same[self.stage])

    def _around(self, owner: int, known: Mapping[int, Any], parts: Callable[[Any, int], tuple[bytes, ...]]) -> bytes:
        around = self.terms.neighbours(owner)
        return packed([(one, *parts(known[one], owner)) for one in around if one in known])

    def take(self, owner: int, answer: bytes, vector: Words | None = None) -> None:
        """One owner's answer to this stage; Tampered if it is not in order, and then she is gone."""
        if owner not in self.left or owner in self._came:
            raise Tampered(owner, self.stage, "she was not asked, or answered before")
        taken = {
            KEYS: self._take_keys, SHARES: self._take_shares, AGREE: self._take_signature, UNMASK: self._take_revealed,
            VOID: self._take_signature, VOIDED: self._take_nothing,
        }  # fmt: skip
        try:
            if self.stage == INPUT:
                self._take_input(owner, answer, vector)
            else:
                taken[self.stage](owner, answer)
        except InvalidInput as problem:
            raise Tampered(owner, self.stage, str(problem)) from None
        self._came.add(owner)

    def _take_keys(self, owner: int, answer: bytes) -> None:
        advert = Advert.checked(owner, unpacked(answer), self.terms)
        for other in self.adverts.values():
            if {advert.cipher_key, advert.mask_key} & {other.cipher_key, other.mask_key}:
                raise Tampered(owner, "key", f"owner {other.owner} has the same")
        self.adverts[owner] = advert

    def _take_shares(self, owner: int, answer: bytes) -> None:
        table, signature = items(unpacked(answer), list, bytes)
        dealt = {int(row[0]): SealedShare.of(owner, row[1:]) for row in rows(packed(table))}
        holders = {owner, *self.terms.neighbours(owner)} & set(self.adverts)
        if set(dealt) != holders or len(table) != len(holders):
            raise Tampered(owner, "share", "not one for each of her neighbours and herself")
        if not is_signed(self.terms.keys[owner], signature, shares_text(self.terms, owner, dealt)):
            raise Tampered(owner, "share", "her registered key did not sign these")
        self.dealt[owner] = dealt

    def _take_input(self, owner: int, answer: bytes, vector: Words | None) -> None:
        (signature,) = items(unpacked(answer), bytes)
        terms = self.terms
        if vector is None or vector.shape != (terms.length,) or vector.dtype != terms.dtype:
            raise Tampered(owner, "input", f"not {terms.length} numbers below 2^{terms.bits}")
        if (vector >> terms.dtype(terms.bits - 1) > 1).any():
            raise Tampered(owner, "input", f"not {terms.length} numbers below 2^{terms.bits}")
        if not is_signed(terms.keys[owner], signature, input_text(terms, owner, vector)):
            raise Tampered(owner, "input", "her registered key did not sign it")
        self.total += vector

    def _take_signature(self, owner: int, answer: bytes) -> None:
        (signature,) = items(unpacked(answer), bytes)
        terms, void = self.terms, self.stage == VOID
        text = void_text(terms, owner) if void else agree_text(terms, self.survivors)
        if not is_signed(terms.keys[owner], signature, text):
            said = "the round's being void" if void else "this set of survivors"
            raise Tampered(owner, "signature", f"it is not hers on {said}")
        self.signatures[owner] = signature

    def _take_nothing(self, owner: int, answer: bytes) -> None:
        """She has taken her charge back."""

    def _take_revealed(self, owner: int, answer: bytes) -> None:
        """Every share is the one that its dealer committed to, and of the kind that is due."""
        alive, found = set(self.survivors), {}
        for row in rows(answer):
            dealer, kind, share = items(row, int, int, bytes)
            one = self.dealt.get(dealer, {}).get(owner)
            if one is None or dealer in found or kind != int(dealer in alive) or len(share) != SHARE:
                raise Tampered(owner, "share", f"not one of the kind that is due of owner {dealer}")
            name, kept = ("seed", one.seed) if kind else ("mask", one.mask_key)
            if commitment(self.terms, name, dealer, owner, share) != kept:
                raise Tampered(owner, "share", f"it is not the one that owner {dealer} dealt her")
            found[dealer] = share
        if any(owner in dealt and dealer not in found for dealer, dealt in self.dealt.items()):
            raise Tampered(owner, "share", "not one of each neighbour who dealt")
        for dealer, share in found.items():
            self._revealed.setdefault(dealer, {})[self.terms.holder(owner)] = share

    def close(self) -> None:
        """The stage is over: who did not answer is gone. SumVoid if too few are left."""
        if self.stage == INPUT:
            self.survivors = tuple(sorted(self._came))
        if self.stage in (VOID, VOIDED):
            enough = self.stage == VOID and len(self.signatures) >= self.terms.voiders
            self.stage, self._came = VOIDED if enough else DONE, set()
            return
        if len(self._came) < self.terms.survivors:
            least = self.terms.survivors
            raise SumVoid(
                f"{len(self._came)} of {len(self.terms.roster)} owners are left after {self.stage!r}: {least} needed"
            )
        if self.stage == UNMASK:
            self._unmask()
        after = STAGES.index(self.stage) + 1
        self.stage, self._came = STAGES[after] if after < len(STAGES) else DONE, set()

    def give_up(self) -> None:
        """The sum is void: `survivors` are who answered to the last. Where inputs had come, and nobody had been asked
        for a signature, those who sent one are told that they are not used (`masker`); else there is nothing left to
        ask: before, nobody was charged, and later somebody may have signed."""
        self.survivors = tuple(sorted(self._came))
        self.stage, self._came = VOID if self.stage == INPUT else DONE, set()
        self.total[:] = 0
        self.is_void = True

    def _unmask(self) -> None:
        """Take all masks off: survivors' own ones, and those between them and whoever dealt and then went."""
        terms, alive, masks = self.terms, set(self.survivors), list[tuple[bytes, int]]()
        known: dict[tuple[int, ...], dict[int, int]] = {}
        for dealer in sorted(self.dealt):
            secret = self._recovered(dealer, known)
            if dealer in alive:
                if seed_commitment(terms, dealer, secret) != self.adverts[dealer].seed:
                    raise self._blamed(dealer, "her shares are not of the seed that she committed to")
                masks.append((self_key(terms, dealer, secret), -1))
                continue
            private = secret_key(secret)
            if public_key(private) != self.adverts[dealer].mask_key:
                raise self._blamed(dealer, "her shares are not of her key")
            for peer in terms.neighbours(dealer):
                if peer in alive:
                    key = pair_key(terms, private, self.adverts[peer].mask_key, dealer, peer)
                    masks.append((key, -1 if peer < dealer else 1))
        add_masks(self.total, masks)
        self.total &= terms.dtype(2**terms.bits - 1)

    def _recovered(self, dealer: int, known: dict[tuple[int, ...], dict[int, int]]) -> bytes:
        parts = self._revealed.get(dealer, {})
        if len(parts) < self.terms.threshold:
            raise SumVoid(f"{len(parts)} shares of owner {dealer} came, {self.terms.threshold} are needed")
        holders = tuple(sorted(parts)[: self.terms.threshold])
        if holders not in known:
            known[holders] = weights(holders)
        secret = recovered({one: parts[one] for one in holders}, known[holders])
        if secret is None:
            raise self._blamed(dealer, "her shares are of no secret")
        return secret

    def _blamed(self, dealer: int, why: str) -> SumVoid:
        """The sum is void, and everybody is told through whom."""
        self.problems.append(Tampered(dealer, "share", why))
        return SumVoid(str(self.problems[-1]))

    # what outlives a process

    def state(self) -> bytes:
        """After a stage: everything that the rest of the round needs."""
        adverts = [(owner, *advert.parts()) for owner, advert in self.adverts.items()]
        dealt = [
            (owner, [(holder, *one.parts()) for holder, one in held.items()]) for owner, held in self.dealt.items()
        ]
        signed = sorted(self.signatures.items())
        rest = (self.stage, adverts, dealt, self.survivors, signed, self.total.tobytes(), int(self.is_void))
        return packed((self.terms.pack(), *rest))

    @classmethod
    def restore(cls, state: bytes) -> Summing:
        """What `state` gave, from the same disk."""
        terms, stage, adverts, dealt, survivors, signed, total, void = items(
            unpacked(state), bytes, str, list, list, list, list, bytes, int
        )
        found = cls(MaskTerms.unpack(terms))
        found.stage, found.survivors, found.signatures = stage, tuple(survivors), dict(signed)
        found.adverts = {one[0]: Advert(*one) for one in adverts}
        found.dealt = {owner: {one[0]: SealedShare(*one[1:]) for one in held} for owner, held in dealt}
        found.total += np.frombuffer(total, dtype=found.total.dtype)
        found.is_void = bool(void)
        return found


def exchange(summing: Summing, ask: Ask, keep: Callable[[bytes], None] = lambda state: None) -> Summing:
    """Play what is left: `ask(stage, questions)` yields answers by owner, as they come.

    `keep` gets the state at the beginning and after every stage, before the next one begins.

    Whoever is in no answer has dropped out. If too few are left the sum is given up: `is_void`.
    """
    keep(summing.state())
    while summing.stage != DONE:
        for batch in ask(summing.stage, summing.questions()):
            for owner, (answer, vector) in batch.items():
                try:
                    summing.take(owner, answer, vector)
                except Tampered as problem:
                    _log.warning("%s", problem)
                    summing.problems.append(problem)
        try:
            summing.close()
        except SumVoid as void:
            _log.warning("round %s of %s is void: %s", summing.terms.round_index, summing.terms.task, void)
            summing.why = str(void)
            summing.give_up()
        keep(summing.state())
    return summing
