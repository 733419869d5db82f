"""An owner's side of a masked sum: five answers, each to be given once.

    keys      → a public key for this round and a commitment to her own mask's seed, signed by her registered key; and
              for every owner whom she has met in an earlier round the name of their chain
    shares    everybody's keys → Shamir shares of her seed and of the key of her box, sealed for each neighbour; and the
              box, in which are the keys of the masks between her and her neighbours
    input     neighbours' sealed shares, opened and checked → her numbers behind all masks, with a tag for the broker
    agree     the set of owners whose input came → her consent to it, a tag for each of them
    unmask    consents of T owners to that set → of each neighbour in it the share of her seed, of each other
              neighbour the share of the key of her box; never both, because the set is the one that she consented to

If too few inputs came the sum is void, and two more questions let her take her charge back:

    void      → her signature that she has consented to no set of survivors in this round and never will
    voided    such signatures of n − T + c + 1 owners → her secrets are forgotten: no sum with her in it can be unmasked

An honest owner consents to a set of survivors or signs the void, never both. With so many voids n − T + 1 honest ones
at least are out for good, so no set ever has T consents, and nobody honest reveals a share; colluders alone hold c < t.

Her input leaves as x + mask(seed) ± mask(key shared with each neighbour), modulo 2^b. The masks between two owners
cancel in the sum; her own goes once t neighbours say that she is in it. What she must not do is answer one stage twice
differently: `answer` compares with what she has said and repeats or refuses, and whoever calls it must have stored
`state` before the answer leaves (`flmarket.market.record`). The object itself does no input or output.

**Chains.** Two owners who meet agree on a secret by X25519 keys that both have signed for this round: the first link of
a chain. From a link come by a keyed hash, apart from each other, what the two share in its round (`Pair`) and the
link of the next round, a one-way step that both take by themselves, whoever of them takes part in which round. So in
later rounds there is nothing to sign or to agree on: a name that comes from the link tells the other that the chain
is there, and what is sealed and consented to under the link and the round's terms can be by nobody else. A link is
forgotten when its round's secrets are made: who reads an owner's disk learns nothing of the masks of rounds that are
over. If the name is missing or another (one of the two has lost the chain) they meet anew; every `LASTS` rounds they do
in any case.

What would break it: a state restored from before it was used, which forgets that a mask was spent; and a registered
key that is not its owner's.

Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning (CCS 2017), figure 4, with the
consistency check of its active variant, and the graph of `terms`. There the secret of masks is itself shared, and so
good for one round; here it stays with its two owners, and a box of one round's keys is opened instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import InvalidInput, SumVoid, Tampered
from flmarket.market.masking.primitives import (
    KEY,
    SHARE,
    Secret,
    Table,
    Words,
    add_masks,
    agreed,
    derived,
    digest,
    identity_key,
    is_signed,
    mac,
    opened,
    packed,
    public_key,
    same,
    sealed,
    secret_key,
    shares,
    signed,
    stream,
    tagged,
    two_keys,
    unpacked,
)
from flmarket.market.masking.terms import MaskTerms, items

KEYS, SHARES, INPUT, AGREE, UNMASK = STAGES = ("keys", "shares", "input", "agree", "unmask")
VOID, VOIDED = AFTER = ("void", "voided")  # instead of the last two, if the sum is void
# what she may have said before she answers a stage
_BEFORE = {stage: STAGES[:at] for at, stage in enumerate(STAGES)} | {VOID: STAGES[:3], VOIDED: (*STAGES[:3], VOID)}

LASTS = 64  # rounds after which owners meet anew
SIGNATURE, TAG = 64, 16
SEALED = 2 * SHARE + TAG
ADVERTS = Table(KEY, KEY, SIGNATURE, TAG)  # owner: key, commitment to her seed, signature, name of the chain with her
TAGS = Table(TAG)  # owner: name of the chain with her; or consent, of her or for her
DEALT = Table(SEALED, KEY, KEY, KEY)  # holder or dealer: `Dealt`
NUMBERS = Table()
REVEALED = Table(1, SHARE)  # dealer: kind, share
SIGNED = Table(SIGNATURE)
BOX, SEED, PAIR, OWN = b"\x00", b"\x01", b"\x02", b"\x03"  # what a share or a commitment is of
NONE = bytes(TAG)
_place = Struct(">QQ").pack
_sha256 = hashlib.sha256
_NUMBER = Struct(">Q")


class Link(NamedTuple):
    """What comes from one link of a chain: the next round's, and what tells the other that this one is there."""

    after: bytes
    name: bytes

    @classmethod
    def of(cls, chain: bytes) -> Link:
        """One step."""
        after, name = two_keys(chain, b"next")
        return cls(after, name[:TAG])


def next_link(chain: bytes, rounds: int) -> bytes:
    """A chain so many rounds later."""
    for _ in range(rounds):
        chain = Link.of(chain).after
    return chain


class Advert(NamedTuple):
    """An owner's public key for one round and the commitment to her seed; her signature on both."""

    owner: int
    key: bytes
    seed: bytes
    signature: bytes

    def text(self, terms: MaskTerms) -> bytes:
        """What is signed, and tagged for those whom she has met."""
        return digest("keys", terms.digest, self.owner, self.key, self.seed)

    def checked(self, terms: MaskTerms) -> Advert:
        """Refused unless this owner's registered key signed this for these terms."""
        if self.owner not in terms.keys:
            raise Tampered(self.owner, "key", "she is not on the roster")
        if not is_signed(terms.keys[self.owner], self.signature, self.text(terms)):
            problem = "her registered key did not sign it for this round, its terms and its roster"
            raise Tampered(self.owner, "key", problem)
        return self


class Dealt(NamedTuple):
    """Two shares on their way from dealer to holder, sealed, and what the dealer commits to: each share, and the key of
    the mask between the two."""

    text: bytes
    box: bytes
    seed: bytes
    pair: bytes


class Pair(NamedTuple):
    """What two owners share in one round: the key of their mask, and of all that one seals for the other."""

    mask: bytes
    seal: bytes

    @classmethod
    def of(cls, chain: bytes, terms: MaskTerms) -> Pair:
        """From this round's link of their chain."""
        return cls(*two_keys(chain, b"pair" + terms.digest))

    def consent(self, owner: int, other: int, said: bytes) -> bytes:
        """Her tag for the other on a set of survivors."""
        return sealed(self.seal, b"", said, 2 + (owner > other))


def shares_text(table: bytes, box: bytes) -> bytes:
    """What a dealer tags for the broker of all that she deals."""
    return b"shares" + hashlib.sha256(table).digest() + box


def input_tag(desk: bytes, masked: Words) -> bytes:
    """An owner's tag for the broker on her masked input."""
    return tagged(mac(desk, b"input"), masked)


def agree_text(terms: MaskTerms, survivors: tuple[int, ...]) -> bytes:
    """What everybody consents to: the set whose sum is unmasked."""
    return hashlib.sha256(b"agree" + terms.digest + NUMBERS.pack((one,) for one in survivors)).digest()


def void_text(terms: MaskTerms, owner: int) -> bytes:
    """What an owner signs who will consent to no set of survivors."""
    return digest("void", terms.digest, owner)


def commitment(terms: MaskTerms, kind: bytes, dealer: int, holder: int, secret: bytes) -> bytes:
    """What a dealer commits to of one share or key: hides it, as that is random in 2^256."""
    return _sha256(terms.digest + kind + _place(dealer, holder) + secret).digest()


def pair_commitment(terms: MaskTerms, one: int, other: int, mask: bytes) -> bytes:
    """What both owners commit to of the key of the mask between them."""
    return commitment(terms, PAIR, min(one, other), max(one, other), mask)


def seed_commitment(terms: MaskTerms, owner: int, seed: bytes) -> bytes:
    """What an owner commits to of her own mask's seed."""
    return commitment(terms, OWN, owner, owner, seed)


def desk_key(terms: MaskTerms, secret: bytes, owner: int) -> bytes:
    """The key of an owner's tags for the broker."""
    return derived(secret, terms.digest, "desk", owner)


def self_key(terms: MaskTerms, owner: int, seed: bytes) -> bytes:
    """The key of an owner's own mask."""
    return mac(seed, b"own mask" + terms.digest + _NUMBER.pack(owner))


@dataclass
class Masker:
    """One owner in one round. `identity` is her registered Ed25519 key, `root` 32 secret bytes drawn for this round.

    `known`: this round's links of her chains with owners whom she has met. `met`, once she has dealt: the next round's.
    """

    owner: int
    identity: bytes = field(repr=False)
    terms: MaskTerms
    root: bytes = field(repr=False)
    known: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    pairs: dict[int, Pair] = field(default_factory=dict, repr=False)
    desk: bytes = field(default=b"", repr=False)
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    survivors: tuple[int, ...] = ()
    said: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.terms.keys.get(self.owner) != identity_key(self.identity):
            raise Tampered(self.owner, "key", "the roster has another key in her place than her own")
        self._around = self.terms.neighbours(self.owner)
        self.met: dict[int, bytes] = {}
        self._key: Secret | None = None
        self._links: dict[int, Link] = {}

    def said_before(self, stage: str, question: bytes) -> bytes | None:
        """What she answered to this before, None if she was not asked; refused if she was asked something else."""
        if stage not in self.said:
            if self.said.keys() - set(_BEFORE[stage]):
                raise SumVoid(f"owner {self.owner} is past the stage {stage!r} of this round")
            return None
        asked, answer = self.said[stage]
        if asked != digest(question):
            raise SumVoid(f"owner {self.owner} has answered another question at the stage {stage!r} of this round")
        return answer

    def answer(self, stage: str, question: bytes) -> bytes:
        """Her answer to any stage but the input; the same to the same question."""
        made = {
            KEYS: self._keys, SHARES: self._shares, AGREE: self._agree, UNMASK: self._unmask, VOID: self._void,
            VOIDED: self._voided,
        }  # fmt: skip
        if stage not in made:
            raise InvalidInput("stage", stage, ", ".join(made))
        before = self.said_before(stage, question)
        if before is None:
            before = made[stage](question)
            self.said[stage] = digest(question), before
        return before

    # what she derives from her root: her key for this round, and all else; the key is forgotten when she has dealt

    def _private(self) -> Secret:
        if self._key is None:
            self._key = secret_key(mac(self.root, b"key"))
        return self._key

    def _link(self, peer: int) -> Link:
        if peer not in self._links:
            self._links[peer] = Link.of(self.known[peer])
        return self._links[peer]

    def _secret(self, purpose: bytes) -> bytes:
        own = self.root if SHARES in self.said else mac(self.root, b"own")
        return mac(own, purpose + self.terms.digest)

    # the stages

    def _keys(self, question: bytes) -> bytes:
        if question != self.terms.text:
            raise SumVoid("these are not the terms of this round")
        key, seed = public_key(self._private()), seed_commitment(self.terms, self.owner, self._secret(b"seed"))
        signature = signed(self.identity, Advert(self.owner, key, seed, b"").text(self.terms))
        return packed((key, seed, signature, TAGS.pack((peer, self._link(peer).name) for peer in self.known)))

    def _shares(self, question: bytes) -> bytes:
        """Check everybody's keys, then deal."""
        self._needs(KEYS, SHARES)
        desk, table = items(unpacked(question), bytes, bytes)
        private, chains, after = self._private(), dict[int, bytes](), dict[int, bytes]()
        met = {public_key(private): self.owner}
        for owner, key, seed, signature, name in ADVERTS.unpack(table):
            if owner in chains or owner == self.owner:
                raise Tampered(owner, "key", "it is there twice")
            if met.setdefault(key, owner) != owner:
                raise Tampered(owner, "key", f"owner {met[key]} has the same")
            if owner in self.known and same(name, self._link(owner).name):
                chains[owner], after[owner] = self.known[owner], self._link(owner).after
            else:
                chains[owner] = self._first(Advert(owner, key, seed, signature).checked(self.terms))
                after[owner] = Link.of(chains[owner]).after
        around = [one for one in self._around if one in chains]
        self._enough(around, "keys")
        if len(chains) + 1 < self.terms.survivors:
            raise SumVoid(f"keys of {len(chains)} other owners came, {self.terms.survivors - 1} are needed")
        try:
            shared = desk_key(self.terms, agreed(private, desk), self.owner)
        except ValueError:
            raise SumVoid("the broker's key is none") from None
        pairs = {owner: Pair.of(chain, self.terms) for owner, chain in chains.items()}
        own, dealt, box = self._dealt({one: pairs[one] for one in around})
        self.pairs, self.desk, self.held = pairs, shared, {self.owner: own}
        self.root, self.known, self.met, self._key, self._links = mac(self.root, b"own"), {}, after, None, {}
        table = DEALT.pack((holder, *one) for holder, one in sorted(dealt.items()))
        return packed((table, box, mac(shared, shares_text(table, box))))

    def _first(self, advert: Advert) -> bytes:
        """The link of this round with somebody whom she meets."""
        try:
            secret = agreed(self._private(), advert.key)
        except ValueError:
            raise Tampered(advert.owner, "key", "it is of small order") from None
        return derived(secret, self.terms.digest, "met", *sorted((self.owner, advert.owner)))

    def _dealt(self, pairs: Mapping[int, Pair]) -> tuple[tuple[bytes, bytes], dict[int, Dealt], bytes]:
        """Her own shares, those for all neighbours that are there, and her box."""
        terms, me = self.terms, self.owner
        holders = {one: terms.holder(one) for one in (me, *pairs)}
        secrets = key, _ = self._secret(b"box"), self._secret(b"seed")
        randomness = stream(self._secret(b"polynomials"), 128 * (terms.threshold - 1))
        parts, found = shares(secrets, list(holders.values()), terms.threshold, randomness), {}
        for holder, at in holders.items():
            (box, seed), text, pair = parts[at], bytes(SEALED), bytes(KEY)
            kept = commitment(terms, BOX, me, holder, box), commitment(terms, SEED, me, holder, seed)
            if holder != me:
                pair = pair_commitment(terms, me, holder, pairs[holder].mask)
                text = sealed(pairs[holder].seal, box + seed, b"".join((*kept, pair)), int(me > holder))
            found[holder] = Dealt(text, *kept, pair)
        inside = b"".join(pairs[peer].mask for peer in sorted(pairs))
        return parts[holders[me]], found, sealed(key, inside, terms.digest)

    def received(self, question: bytes) -> dict[int, tuple[bytes, bytes]]:
        """The shares that neighbours dealt her, opened and checked, her own among them; nothing is masked yet."""
        if self.said_before(INPUT, question) is not None:
            raise SumVoid(f"the mask of owner {self.owner} was used before")
        self._needs(SHARES, INPUT)
        held, around = {self.owner: self.held[self.owner]}, set(self._around)
        for dealer, *parts in DEALT.unpack(question):
            if dealer not in self.pairs or dealer not in around or dealer in held:
                raise Tampered(dealer, "share", "her keys were not among the neighbours', or it is there twice")
            held[dealer] = self._opened(dealer, Dealt(*parts))
        self._enough([one for one in held if one != self.owner], "shares")
        return held

    def masked(self, question: bytes, vector: NDArray[np.uint64]) -> tuple[bytes, Words]:
        """Her numbers behind all masks, and her tag on that. Once: whoever calls keeps it, and repeats it."""
        held, terms = self.received(question), self.terms
        if vector.shape != (terms.length,) or vector.dtype != np.uint64 or int(vector.max()) >> terms.bits:
            raise InvalidInput("input", (vector.shape, vector.dtype), f"{terms.length} numbers below 2^{terms.bits}")
        masks = [(self_key(terms, self.owner, self._secret(b"seed")), 1)]
        for peer in held:
            if peer != self.owner:
                masks.append((self.pairs[peer].mask, 1 if self.owner < peer else -1))
        total: Words = vector.astype(terms.dtype)
        add_masks(total, masks)
        terms.reduce(total)
        answer = input_tag(self.desk, total)
        self.held = held
        self.said[INPUT] = digest(question), answer
        return answer, total

    def _opened(self, dealer: int, one: Dealt) -> tuple[bytes, bytes]:
        pair, terms, me = self.pairs[dealer], self.terms, self.owner
        text = opened(pair.seal, one.text, one.box + one.seed + one.pair, int(dealer > me))
        if text is None:
            raise Tampered(dealer, "share", "it is not what she sealed for this owner in this round")
        box, seed = text[:SHARE], text[SHARE:]
        if one[1:] != (
            commitment(terms, BOX, dealer, me, box),
            commitment(terms, SEED, dealer, me, seed),
            pair_commitment(terms, dealer, me, pair.mask),
        ):
            raise Tampered(dealer, "share", "she committed to another")
        return box, seed

    def _agree(self, question: bytes) -> bytes:
        """Consent to the set, if it is large enough, she is in it and she masked against all its members around her."""
        self._needs(INPUT, AGREE)
        survivors, terms = numbers(question), self.terms
        if list(survivors) != sorted(set(survivors)) or not terms.keys.keys() >= set(survivors):
            raise SumVoid("the survivors are not owners of the roster, each once and in order")
        if len(survivors) < terms.survivors:
            raise SumVoid(f"{len(survivors)} owners are left, {terms.survivors} are agreed on")
        if self.owner not in survivors:
            raise SumVoid(f"owner {self.owner} is not among the survivors")
        for one in set(survivors).intersection(self._around) - self.held.keys():
            raise Tampered(one, "share", "she is said to have survived, and dealt nothing to this neighbour")
        self.survivors, said, me = survivors, agree_text(terms, survivors), self.owner
        tags = TAGS.pack((one, self.pairs[one].consent(me, one, said)) for one in survivors if one in self.pairs)
        return packed((tags, mac(self.desk, b"agree" + tags)))

    def _unmask(self, question: bytes) -> bytes:
        """One share of each neighbour, which one by the set that she consented to; then her secrets are forgotten."""
        self._needs(AGREE, UNMASK)
        said, alive = agree_text(self.terms, self.survivors), set(self.survivors)
        agree, wrong = {self.owner}, set[int]()
        for owner, tag in TAGS.unpack(question):
            if owner not in alive or owner in agree or owner in wrong:
                raise Tampered(owner, "consent", "she is not among the survivors, or there twice")
            known = self.pairs.get(owner)
            (agree if known is not None and same(tag, known.consent(owner, self.owner, said)) else wrong).add(owner)
        if len(agree) < self.terms.survivors:
            for owner in sorted(wrong):
                raise Tampered(owner, "consent", "it is not hers to this set of survivors")
            raise SumVoid(f"{len(agree)} owners agree on the survivors, {self.terms.survivors} are needed")
        revealed = [
            (dealer, SEED if dealer in alive else BOX, pair[dealer in alive])
            for dealer, pair in sorted(self.held.items())
        ]
        self._forget()
        return REVEALED.pack(revealed)

    def _void(self, question: bytes) -> bytes:
        """She agreed on no set, or this would be refused; and from here on she agrees on none."""
        self._needs(KEYS, VOID)
        if question != self.terms.digest:
            raise SumVoid("these are not the terms of this round")
        return signed(self.identity, void_text(self.terms, self.owner))

    def _voided(self, question: bytes) -> bytes:
        """So many others will agree on none that no sum can be unmasked; her secrets are forgotten."""
        self._needs(VOID, VOIDED)
        signers = set[int]()
        for owner, signature in SIGNED.unpack(question):
            if owner not in self.terms.keys or owner in signers:
                raise Tampered(owner, "signature", "she is not on the roster, or there twice")
            if not is_signed(self.terms.keys[owner], signature, void_text(self.terms, owner)):
                raise Tampered(owner, "signature", "it is not hers on this round's being void")
            signers.add(owner)
        if len(signers) < self.terms.voiders:
            raise SumVoid(f"{len(signers)} owners signed that the round is void, {self.terms.voiders} are needed")
        self._forget()
        return b""

    def _forget(self) -> None:
        self.held, self.root, self.pairs, self.desk = {}, b"", {}, b""

    def _needs(self, before: str, stage: str) -> None:
        if before not in self.said:
            raise SumVoid(f"owner {self.owner} was not asked for {before!r} before {stage!r}")

    def _enough(self, peers: Collection[int], what: str) -> None:
        """Of her shares' holders, herself included, as many as unmasking needs."""
        if len(peers) + 1 < self.terms.threshold:
            raise SumVoid(f"{what} of {len(peers)} neighbours came, {self.terms.threshold - 1} are needed")

    # what outlives a process

    def state(self) -> bytes:
        """Everything but her identity and her chains, secrets included: for her own disk."""
        pairs = _PAIRS.pack((owner, *pair) for owner, pair in self.pairs.items())
        held = _HELD.pack((owner, *pair) for owner, pair in self.held.items())
        said = [(stage, *one) for stage, one in self.said.items()]
        survivors = NUMBERS.pack((one,) for one in self.survivors)
        return packed((self.owner, self.terms.text, self.root, pairs, self.desk, held, survivors, said))

    @classmethod
    def restore(cls, identity: bytes, state: bytes, known: Mapping[int, bytes] | None = None) -> Masker:
        """What `state` gave, on the same disk: not checked again."""
        owner, terms, root, pairs, desk, held, survivors, said = items(
            unpacked(state), int, bytes, bytes, bytes, bytes, bytes, bytes, list
        )
        return cls(
            owner, identity, MaskTerms.unpack(terms), root, known or {},
            {one: Pair(*keys) for one, *keys in _PAIRS.unpack(pairs)}, desk,
            {one: (box, seed) for one, box, seed in _HELD.unpack(held)}, numbers(survivors),
            {one[0]: (one[1], one[2]) for one in said},
        )  # fmt: skip


_PAIRS = Table(KEY, KEY)
_HELD = Table(SHARE, SHARE)


def numbers(text: bytes) -> tuple[int, ...]:
    """Owners' numbers in a list."""
    return tuple(one for (one,) in NUMBERS.unpack(text))
