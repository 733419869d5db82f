"""The broker's side of a masked sum, and the loop that plays it with whatever reaches owners.

`Summing` knows which question goes to whom, takes answers one by one, and after each stage goes on with those who
answered it well. An answer that is not in order is refused and named (`Tampered`), and its owner counts as gone; with
fewer than T left the sum is void (`SumVoid`), and of nobody's input anything is known. After the last stage `total` is
the sum of the survivors' inputs modulo 2^b, exactly, and there is nothing else that it could be: seeds and keys that
come out of shares are compared with what their owners committed to, so a wrong share is found, and named.

Of inputs only their running sum is kept. `state` after a stage and `restore` let another process go on.

What would break it: two of these at work on one round. Owners would sign one of two sets of survivors, and at most one
of them is unmasked.

A round's masked sum told as deliveries, the way the round takes them: all at once, and only their sum says anything.

Whatever reaches owners comes in as one function that asks (`AskOwners`): Flower's grid, or a call in the same process.
What each stage left is stored before the next begins, so a server that ends is followed by one that goes on: owners
repeat what they have said. The survivor with the least number is booked as having delivered the whole sum, the others
as having delivered zeros, because nobody knows more. If the sum is void, those who answered to the last have delivered
empty vectors: they stayed, and there is nothing to see (`flmarket.market.summing`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from flmarket.errors import InvalidInput, SumVoid, Tampered
from flmarket.market.kind import Announcement, Delivered, Delivery, Order, Refused, ReleasedUpdate
from flmarket.market.masking.guarding import mask_terms
from flmarket.market.masking.masker import (
    ADVERTS,
    AGREE,
    BOX,
    DEALT,
    INPUT,
    KEYS,
    NONE,
    NUMBERS,
    REVEALED,
    SEED,
    SHARES,
    SIGNED,
    STAGES,
    TAGS,
    UNMASK,
    VOID,
    VOIDED,
    Advert,
    Dealt,
    commitment,
    desk_key,
    input_tag,
    numbers,
    pair_commitment,
    seed_commitment,
    self_key,
    shares_text,
    void_text,
)
from flmarket.market.masking.primitives import (
    KEY,
    Secret,
    Table,
    Words,
    add_masks,
    agreed,
    is_signed,
    mac,
    opened,
    packed,
    public_key,
    recovered,
    same,
    secret_key,
    unpacked,
    weights,
)
from flmarket.market.masking.terms import MaskTerms, items
from flmarket.market.owner import MASKING
from flmarket.market.store import RoundStore

_log = logging.getLogger(__name__)
DONE = "done"
_DESKS = Table(KEY)  # owner: the key of her tags for the broker
Reply = tuple[bytes, Words | None]
Ask = Callable[[str, Mapping[int, bytes]], Iterable[Mapping[int, Reply]]]


class Summing:
    """One round's sum, from the first stage to the last. `problems` says what was refused, whose, and why."""

    def __init__(self, terms: MaskTerms, desk: bytes = b"") -> None:
        self.terms, self.stage = terms, KEYS
        self.problems: list[Tampered] = []
        self.adverts: dict[int, Advert] = {}
        self.tags: dict[int, dict[int, bytes]] = {}  # by owner, on her advert for others or on a set for others
        self.dealt: dict[int, dict[int, Dealt]] = {}
        self.boxes: dict[int, bytes] = {}
        self.survivors: tuple[int, ...] = ()
        self.signatures: dict[int, bytes] = {}
        self.is_void, self.why = False, ""
        self.total: Words = np.zeros(terms.length, dtype=terms.dtype)
        self._came: set[int] = set()
        self._revealed: dict[int, dict[int, bytes]] = {}
        self._desk = desk or os.urandom(KEY)
        self._keys: dict[int, bytes] = {}
        self._neighbours = cache(terms.neighbours)
        self._secret: Secret | None = None

    @property
    def left(self) -> list[int]:
        """Who is asked at this stage: all who answered the last."""
        return sorted(self._asked())

    def _asked(self) -> Iterable[int]:
        before: dict[str, Iterable[int]] = {
            KEYS: self.terms.keys, SHARES: self.adverts, INPUT: self.dealt, AGREE: self.survivors,
            UNMASK: self.tags, VOID: self.survivors, VOIDED: self.signatures,
        }  # fmt: skip
        return before.get(self.stage, ())

    def questions(self) -> dict[int, bytes]:
        """What each owner who is left is asked now, but for those who have answered."""
        terms, asked = self.terms, [owner for owner in self.left if owner not in self._came]
        if self.stage == SHARES:
            desk, known = public_key(self._private()), sorted(self.adverts.items())
            tables = {
                owner: ADVERTS.pack((*one, self.tags[at].get(owner, NONE)) for at, one in known if at != owner)
                for owner in asked
            }
            return {owner: packed((desk, table)) for owner, table in tables.items()}
        if self.stage == INPUT:
            return {
                owner: DEALT.pack((at, *self.dealt[at][owner]) for at in self._neighbours(owner) if at in self.dealt)
                for owner in asked
            }
        if self.stage == UNMASK:
            consents = sorted(self.tags.items())
            return {owner: TAGS.pack((at, tags[owner]) for at, tags in consents if at != owner) for owner in asked}
        same = {
            KEYS: terms.text,
            AGREE: NUMBERS.pack((one,) for one in self.survivors),
            VOID: terms.digest,
            VOIDED: SIGNED.pack(sorted(self.signatures.items())[: terms.voiders]),
        }
        return dict.fromkeys(asked, same[self.stage])

    def _private(self) -> Secret:
        """The broker's own key for this round, by which owners' tags for it are made."""
        if self._secret is None:
            self._secret = secret_key(self._desk)
        return self._secret

    def _key(self, owner: int) -> bytes:
        """Of one owner's tags for the broker."""
        if owner not in self._keys:
            secret = agreed(self._private(), self.adverts[owner].key)
            self._keys[owner] = desk_key(self.terms, secret, owner)
        return self._keys[owner]

    def take(self, owner: int, answer: bytes, vector: Words | None = None) -> None:
        """One owner's answer to this stage; Tampered if it is not in order, and then she is gone."""
        if owner not in self._asked() or owner in self._came:
            raise Tampered(owner, self.stage, "she was not asked, or answered before")
        taken = {
            KEYS: self._take_keys, SHARES: self._take_shares, AGREE: self._take_consents, UNMASK: self._take_revealed,
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
        key, seed, signature, tags = items(unpacked(answer), bytes, bytes, bytes, bytes)
        if len(key) != KEY or len(seed) != KEY:
            raise Tampered(owner, "key", f"keys have {KEY} bytes")
        advert, said = Advert(owner, key, seed, signature).checked(self.terms), dict(TAGS.unpack(tags))
        for other in self.adverts.values():
            if advert.key == other.key:
                raise Tampered(owner, "key", f"owner {other.owner} has the same")
        self.adverts[owner], self.tags[owner] = advert, said
        try:
            self._key(owner)
        except ValueError:
            del self.adverts[owner], self.tags[owner]
            raise Tampered(owner, "key", "it is of small order") from None

    def _take_shares(self, owner: int, answer: bytes) -> None:
        table, box, tag = items(unpacked(answer), bytes, bytes, bytes)
        if not same(tag, mac(self._key(owner), shares_text(table, box))):
            raise Tampered(owner, "share", "these are not what she dealt")
        found = DEALT.unpack(table)
        dealt = {holder: Dealt(*parts) for holder, *parts in found}
        holders = {owner, *self._neighbours(owner)} & self.adverts.keys()
        if dealt.keys() != holders or len(found) != len(holders):
            raise Tampered(owner, "share", "not one for each of her neighbours and herself")
        self.dealt[owner], self.boxes[owner] = dealt, box

    def _take_input(self, owner: int, answer: bytes, vector: Words | None) -> None:
        terms = self.terms
        if vector is None or vector.shape != (terms.length,) or vector.dtype != terms.dtype:
            raise Tampered(owner, "input", f"not {terms.length} numbers below 2^{terms.bits}")
        if terms.bits < 8 * vector.dtype.itemsize and int(vector.max()) >> terms.bits:
            raise Tampered(owner, "input", f"not {terms.length} numbers below 2^{terms.bits}")
        if not same(answer, input_tag(self._key(owner), np.ascontiguousarray(vector))):
            raise Tampered(owner, "input", "it is not what she masked")
        self.total += vector

    def _take_consents(self, owner: int, answer: bytes) -> None:
        """The broker cannot check what owners say to each other, only that it is from her, and for everybody."""
        tags, tag = items(unpacked(answer), bytes, bytes)
        if not same(tag, mac(self._key(owner), b"agree" + tags)):
            raise Tampered(owner, "consent", "it is not what she said")
        found = dict(TAGS.unpack(tags))
        if found.keys() != set(self.survivors) - {owner}:
            raise Tampered(owner, "consent", "not one for each other survivor")
        self.tags[owner] = found

    def _take_signature(self, owner: int, answer: bytes) -> None:
        if not is_signed(self.terms.keys[owner], answer, void_text(self.terms, owner)):
            raise Tampered(owner, "signature", "it is not hers on the round's being void")
        self.signatures[owner] = answer

    def _take_nothing(self, owner: int, answer: bytes) -> None:
        """She has taken her charge back."""

    def _take_revealed(self, owner: int, answer: bytes) -> None:
        """Every share is the one that its dealer committed to, and of the kind that is due."""
        alive, found = set(self.survivors), dict[int, bytes]()
        for dealer, kind, share in REVEALED.unpack(answer):
            one = self.dealt.get(dealer, {}).get(owner)
            if one is None or dealer in found or kind != (SEED if dealer in alive else BOX):
                raise Tampered(owner, "share", f"not one of the kind that is due of owner {dealer}")
            if commitment(self.terms, kind, dealer, owner, share) != (one.seed if kind == SEED else one.box):
                raise Tampered(owner, "share", f"it is not the one that owner {dealer} dealt her")
            found[dealer] = share
        if any(owner in dealt and dealer not in found for dealer, dealt in self.dealt.items()):
            raise Tampered(owner, "share", "not one of each neighbour who dealt")
        for dealer, share in found.items():
            self._revealed.setdefault(dealer, {})[self.terms.holder(owner)] = share

    def close(self) -> None:
        """The stage is over: who did not answer is gone. SumVoid if too few are left."""
        if self.stage == INPUT:
            self.survivors, self.tags = tuple(sorted(self._came)), {}
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
        for dealer, dealt in sorted(self.dealt.items()):
            secret = self._recovered(dealer, known)
            if dealer in alive:
                if seed_commitment(terms, dealer, secret) != self.adverts[dealer].seed:
                    raise self._blamed(dealer, "her shares are not of the seed that she committed to")
                masks.append((self_key(terms, dealer, secret), -1))
                continue
            for peer, key in self._inside(dealer, secret).items():
                if peer in alive:
                    if pair_commitment(terms, dealer, peer, key) != dealt[peer].pair:
                        raise self._blamed(dealer, "her shares are not of the keys that she committed to")
                    masks.append((key, -1 if peer < dealer else 1))
        add_masks(self.total, masks)
        terms.reduce(self.total)

    def _inside(self, dealer: int, secret: bytes) -> dict[int, bytes]:
        """The keys in the box of one who dealt and then went, by neighbour."""
        peers = sorted(self.dealt[dealer].keys() - {dealer})
        inside = opened(secret, self.boxes[dealer], self.terms.digest)
        if inside is None or len(inside) != KEY * len(peers):
            raise self._blamed(dealer, "her shares are not of the key of her box")
        return {peer: inside[KEY * at : KEY * (at + 1)] for at, peer in enumerate(peers)}

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
        adverts = ADVERTS.pack((*advert, NONE) for advert in self.adverts.values())
        tags = [(owner, TAGS.pack(found.items())) for owner, found in self.tags.items()]
        dealt = [
            (owner, DEALT.pack((holder, *one) for holder, one in held.items()), self.boxes[owner])
            for owner, held in self.dealt.items()
        ]
        signed, survivors = SIGNED.pack(sorted(self.signatures.items())), NUMBERS.pack((one,) for one in self.survivors)
        desk = self._desk + _DESKS.pack(self._keys.items())
        rest = (self.stage, desk, adverts, tags, dealt, survivors, signed, self.total.tobytes())
        return packed((self.terms.text, *rest, int(self.is_void)))

    @classmethod
    def restore(cls, state: bytes) -> Summing:
        """What `state` gave, from the same disk."""
        terms, stage, desk, adverts, tags, dealt, survivors, signed, total, void = items(
            unpacked(state), bytes, str, bytes, bytes, list, list, bytes, bytes, bytes, int
        )
        found = cls(MaskTerms.unpack(terms), desk[:KEY])
        found._keys = dict(_DESKS.unpack(desk[KEY:]))
        found.stage, found.survivors, found.signatures = stage, numbers(survivors), dict(SIGNED.unpack(signed))
        found.adverts = {one[0]: Advert(*one[:4]) for one in ADVERTS.unpack(adverts)}
        found.tags = {owner: dict(TAGS.unpack(table)) for owner, table in tags}
        for owner, table, box in dealt:
            found.dealt[owner] = {holder: Dealt(*parts) for holder, *parts in DEALT.unpack(table)}
            found.boxes[owner] = box
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


# stage and questions by owner → answers or refusals by owner, as they come
AskOwners = Callable[[str, Mapping[int, bytes]], Iterable[Mapping[int, Reply | Refused]]]


def summed(
    call: Announcement, orders: Sequence[Order], identities: Mapping[int, bytes], store: RoundStore, ask: AskOwners
) -> Iterator[Mapping[int, Delivery]]:
    """Play a round's sum, or go on with it, and tell it as deliveries in one batch."""
    if not orders:
        return
    index, told = orders[0].round_index, dict[int, Delivery]()

    def asked(stage: str, questions: Mapping[int, bytes]) -> Iterator[Mapping[int, Reply]]:
        for batch in ask(stage, questions):
            told.update({owner: answer for owner, answer in batch.items() if isinstance(answer, Refused)})
            yield {owner: answer for owner, answer in batch.items() if not isinstance(answer, Refused)}

    try:
        summing = _begun(call, orders, identities, store.exchange(index))
    except SumVoid as void:
        _log.warning("round %s of %s is void: %s", index, call.task, void)
        return
    exchange(summing, asked, lambda state: store.save_exchange(index, state))
    size = 0 if summing.is_void else call.parameters
    delivered = dict.fromkeys(summing.survivors, np.zeros(size))
    if not summing.is_void:
        delivered[summing.survivors[0]] = summing.total.astype(np.float64)
    told.update({owner: Delivered(ReleasedUpdate(vector)) for owner, vector in delivered.items()})
    out = () if summing.is_void else summing.survivors  # a dealer who voids a sum has answered to the last, too
    told.update({one.owner: Refused(MASKING, str(one)) for one in summing.problems if one.owner not in out})
    yield told


def _begun(call: Announcement, orders: Sequence[Order], identities: Mapping[int, bytes], state: bytes) -> Summing:
    known = {order.owner: identities[order.owner] for order in orders if order.owner in identities}
    try:
        if state:
            return Summing.restore(state)
        return Summing(mask_terms(call, orders[0], known))
    except InvalidInput as problem:
        raise SumVoid(str(problem)) from None
