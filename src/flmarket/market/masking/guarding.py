"""Masked sums behind an owner's guard: what she checks before she masks, and what is on her disk before she answers.

Before she gives her keys she has compared: the order with her bid, as for any order; the terms of the sum with the
announcement that she bid for and with her own share in it, so that modulus, length, threshold and the number of
colluders that is allowed for are those that her loss was computed with; the roster with the keys that she has of other
owners from elsewhere, so that nobody on it was invented; and that enough honest ones will be in the sum for her own
taste. At every later stage the order must say the same of the sum, or she would count on noise that others do not add.
Before she trains she has opened and checked everything that neighbours dealt her. Then the guard claims and
charges as ever, and her input leaves masked, or not at all.

Each answer is stored with the state that it follows from, before it leaves; asked again she repeats the same bytes, and
asked otherwise she refuses. So a crash costs privacy budget at worst, never privacy. An input that was encoded and not
yet masked when her machine died is masked then: nothing of it had left.

She takes a charge back in one case only: her input left, and as many owners as make any opening impossible have signed
that they will open nothing (`masker`, `voided`). A broker's word that a round is void is nothing to her: it has her
masked input, and could have it opened later. Her part itself is forgotten with her secrets; the award stays used.

Chains with owners whom she has met (`masker`) are kept for a task, under their registered keys, and stored with her
shares: from then on this round's links are nowhere.

What would break it: a list of peers' keys that comes from the broker. Simulated owners take the roster's word.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput, SumVoid, Tampered
from flmarket.ledger import HoldReceipt
from flmarket.market.kind import Announcement, Order, release_id
from flmarket.market.masking.masker import INPUT, KEYS, LASTS, SHARES, VOIDED, Masker, next_link
from flmarket.market.masking.primitives import KEY, Table, Words, digest, identity_key
from flmarket.market.masking.terms import MaskTerms
from flmarket.market.owner import Guard, Owner
from flmarket.market.record import Mask
from flmarket.privacy.secure_sum import SumTerms

_LINKS = Table(KEY, KEY)  # first round in which it is used: the other's registered key, the link of the chain


def mask_terms(call: Announcement, order: Order, identities: Mapping[int, bytes]) -> MaskTerms:
    """The terms of a round's sum, from what was announced, what is common to all its orders, and owners' keys."""
    share = SumTerms.from_json(order.share)
    common = {name: value for name, value in asdict(share).items() if name != "weight"}
    said = digest(json.dumps(asdict(call), sort_keys=True), json.dumps(common, sort_keys=True))
    if share.contributors != len(identities):
        raise InvalidInput("roster", len(identities), f"the {share.contributors} contributors of the order")
    return MaskTerms(
        task=order.task, round_index=order.round_index, terms=said, bits=share.bits, length=call.parameters,
        survivors=share.threshold, colluders=share.threshold - share.honest, roster=tuple(sorted(identities.items())),
    )  # fmt: skip


def identity_of(owner: Owner) -> bytes:
    """Her Ed25519 key; a simulated owner's follows from her seed."""
    if owner.identity or not owner.simulated:
        return owner.identity
    return digest("simulated identity", str(owner.simulation_seed), owner.number)


def public_identity(owner: Owner) -> bytes:
    """What others know her by; empty if she has no key and takes part in no masked sum."""
    key = identity_of(owner)
    return identity_key(key) if key else b""


class SumGuard:
    """One owner's answers in masked sums."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.owner, self.journal = guard, guard.owner, guard.journal

    def answer(
        self,
        order: Order,
        stage: str,
        question: bytes,
        parameters: FloatArray | None = None,
        escrow: HoldReceipt | None = None,
        compute: Callable[[], object] | None = None,
    ) -> tuple[bytes, Words | None]:
        """Her answer to a stage, and her masked input to that one; stored before it is returned."""
        call, release = self.guard.ordered(order), release_id(order)
        while True:
            before = self.journal.mask(release)
            masker = self._begun(order, stage, question) if before is None else self._restored(before)
            if stage in (KEYS, SHARES) and stage not in masker.said:
                masker.known = self._known(masker.terms)
            if masker.terms != mask_terms(call, order, masker.terms.keys):
                raise SumVoid("the terms of the sum are not those of the announcement and the order")
            if before is None:
                self._agree(masker.terms)
            words, masked = None, b"" if before is None else before.masked
            if stage == INPUT:
                said = masker.said_before(INPUT, question)
                if said is not None:
                    return said, self._kept(masker, masked)
                masker.received(question)
                if parameters is None:
                    raise InvalidInput("parameters", None, "those to train from")
                vector = self.guard.train(order, parameters, escrow, compute, masked=True)
                answer, words = masker.masked(question, vector.astype(np.uint64))
                masked = words.tobytes()
            else:
                answer = masker.answer(stage, question)
            after, chains = Mask(masker.state(), b"" if stage == VOIDED else masked), None
            if masker.met:
                chains = self._chains(masker)
            if self.journal.keep_mask(order, before, after, chains):
                if stage == VOIDED:  # also if it is said again: a crash may have come between
                    self.guard.account.take_back(release)
                return answer, words

    def _begun(self, order: Order, stage: str, question: bytes) -> Masker:
        """The first stage: the terms as asked for, and a fresh root."""
        if stage != KEYS:
            raise SumVoid(f"owner {self.owner.number} was not asked for {KEYS!r} before {stage!r}")
        asked, identity = MaskTerms.unpack(question), identity_of(self.owner)
        if not identity:
            raise SumVoid(f"owner {self.owner.number} has no key to be known by")
        if self.owner.simulated:
            root = digest("simulated root", str(self.owner.simulation_seed), self.owner.number, release_id(order))
        else:
            root = secrets.token_bytes(32)
        return Masker(self.owner.number, identity, asked, root)

    def _known(self, terms: MaskTerms) -> dict[int, bytes]:
        """This round's links of her chains with owners on the roster."""
        now, owners, found = terms.round_index, {key: owner for owner, key in terms.roster}, dict[int, bytes]()
        for first, key, chain in _LINKS.unpack(self.journal.chains(terms.task)):
            if key in owners and first <= now and first // LASTS == now // LASTS:
                found[owners[key]] = next_link(chain, now - first)
        return found

    def _chains(self, masker: Masker) -> bytes:
        """The next round's links with all whom she has met now, and what there is with others."""
        terms = masker.terms
        links = {key: (first, key, chain) for first, key, chain in _LINKS.unpack(self.journal.chains(terms.task))}
        for owner, chain in masker.met.items():
            links[terms.keys[owner]] = terms.round_index + 1, terms.keys[owner], chain
        return _LINKS.pack(link for link in links.values() if link[0] // LASTS == terms.round_index // LASTS)

    def _agree(self, terms: MaskTerms) -> None:
        """Enough honest company, and nobody whom she does not know."""
        honest, least = terms.survivors - terms.colluders, self.owner.least_honest
        if honest < least:
            raise SumVoid(f"{honest} honest owners are in the sum at least, {least} should be")
        if self.owner.simulated and self.owner.peers is None:
            return
        known = self.owner.peers or {}
        for peer, key in terms.roster:
            if peer != self.owner.number and known.get(peer) != key:
                raise Tampered(peer, "key", "it is not the one under which this owner knows her")

    def _restored(self, saved: Mask) -> Masker:
        return Masker.restore(identity_of(self.owner), saved.state)

    def _kept(self, masker: Masker, masked: bytes) -> Words:
        if not masked:
            raise SumVoid("the masked input is not kept any more")
        return np.frombuffer(masked, dtype=masker.terms.dtype)
