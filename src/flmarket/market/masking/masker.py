"""An owner's side of a masked sum: five answers, each to be given once.

    keys      → two public keys for this round and a commitment to her own mask's seed, signed by her registered key
    shares    neighbours' keys → Shamir shares of her mask key and of her seed, sealed for each neighbour
    input     neighbours' sealed shares, opened and checked → her numbers behind all masks, signed
    agree     the set of owners whose input came → her signature on it
    unmask    signatures of T owners on that set → of each neighbour in it the share of her seed, of each other
              neighbour the share of her mask key; never both, because the set is the one that she signed

If too few inputs came the sum is void, and two more questions let her take her charge back:

    void      → her signature that she has signed no set of survivors in this round and never will
    voided    such signatures of n − T + c + 1 owners → her secrets are forgotten: no sum with her in it can be unmasked

An honest owner signs a set of survivors or the void, never both. With so many voids n − T + 1 honest ones at least are
out for good, so no set ever has T signatures, and nobody honest reveals a share; colluders alone hold c < t of them.

Her input leaves as x + mask(seed) ± mask(key agreed with each neighbour), modulo 2^b. The masks between two owners
cancel in the sum; her own goes once t neighbours say that she is in it. What she must not do is answer one stage twice
differently: `answer` compares with what she has said and repeats or refuses, and whoever calls it must have stored
`state` before the answer leaves (`flmarket.market.record`). The object itself does no input or output.

What would break it: a state restored from before it was used, which forgets that a mask was spent; and a registered
key that is not its owner's.

Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning (CCS 2017), figure 4, with the
consistency check of its active variant, and the graph of `terms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import InvalidInput, SumVoid, Tampered
from flmarket.market.masking.primitives import (
    KEY,
    SHARE,
    Secret,
    Words,
    add_masks,
    agreed,
    derived,
    digest,
    identity_key,
    is_signed,
    opened,
    packed,
    public_key,
    sealed,
    secret_key,
    shares,
    signed,
    stream,
    unpacked,
)
from flmarket.market.masking.terms import MaskTerms, items

KEYS, SHARES, INPUT, AGREE, UNMASK = STAGES = ("keys", "shares", "input", "agree", "unmask")
VOID, VOIDED = AFTER = ("void", "voided")  # instead of the last two, if the sum is void
# what she may have said before she answers a stage
_BEFORE = {stage: STAGES[:at] for at, stage in enumerate(STAGES)} | {VOID: STAGES[:3], VOIDED: (*STAGES[:3], VOID)}


@dataclass(frozen=True)
class Advert:
    """An owner's public keys for one round: for shares in transit, for masks; and the commitment to her seed."""

    owner: int
    cipher_key: bytes
    mask_key: bytes
    seed: bytes
    signature: bytes

    def parts(self) -> tuple[bytes, ...]:
        """What travels besides her number."""
        return self.cipher_key, self.mask_key, self.seed, self.signature

    @classmethod
    def checked(cls, owner: int, parts: Any, terms: MaskTerms) -> Advert:
        """Refused unless this owner's registered key signed these keys for these terms."""
        try:
            advert = cls(owner, *items(parts, bytes, bytes, bytes, bytes))
        except InvalidInput as problem:
            raise Tampered(owner, "key", str(problem)) from None
        if owner not in terms.keys:
            raise Tampered(owner, "key", "she is not on the roster")
        if any(len(part) != KEY for part in (advert.cipher_key, advert.mask_key, advert.seed)):
            raise Tampered(owner, "key", f"keys have {KEY} bytes")
        if not is_signed(terms.keys[owner], advert.signature, _advert_text(terms, owner, advert.parts()[:3])):
            raise Tampered(owner, "key", "her registered key did not sign it for this round, its terms and its roster")
        return advert


@dataclass(frozen=True)
class SealedShare:
    """Two shares on their way from dealer to holder, sealed, and what the dealer commits to of each."""

    text: bytes
    mask_key: bytes
    seed: bytes

    def parts(self) -> tuple[bytes, ...]:
        """What travels."""
        return self.text, self.mask_key, self.seed

    @classmethod
    def of(cls, dealer: int, parts: Any) -> SealedShare:
        """Read, and nothing more."""
        try:
            return cls(*items(parts, bytes, bytes, bytes))
        except InvalidInput as problem:
            raise Tampered(dealer, "share", str(problem)) from None


def _advert_text(terms: MaskTerms, owner: int, keys: tuple[bytes, ...]) -> bytes:
    return digest("keys", terms.digest, owner, *keys)


def shares_text(terms: MaskTerms, dealer: int, dealt: Mapping[int, SealedShare]) -> bytes:
    """What a dealer signs of all that she deals."""
    return digest("shares", terms.digest, dealer, [(holder, *one.parts()) for holder, one in sorted(dealt.items())])


def input_text(terms: MaskTerms, owner: int, masked: Words) -> bytes:
    """What an owner signs of her masked input."""
    return digest("input", terms.digest, owner, masked.tobytes())


def agree_text(terms: MaskTerms, survivors: tuple[int, ...]) -> bytes:
    """What everybody signs of the set whose sum is unmasked."""
    return digest("agree", terms.digest, survivors)


def void_text(terms: MaskTerms, owner: int) -> bytes:
    """What an owner signs who will sign no set of survivors."""
    return digest("void", terms.digest, owner)


def commitment(terms: MaskTerms, kind: str, dealer: int, holder: int, share: bytes) -> bytes:
    """What a dealer commits to of one share: hides it, as the share is random in 2^256."""
    return digest("share", terms.digest, kind, dealer, holder, share)


def seed_commitment(terms: MaskTerms, owner: int, seed: bytes) -> bytes:
    """What an owner commits to of her own mask's seed."""
    return digest("seed", terms.digest, owner, seed)


def _agreed(other: int, private: Secret, public: bytes) -> bytes:
    try:
        return agreed(private, public)
    except ValueError:
        raise Tampered(other, "key", "it is of small order") from None


def pair_key(terms: MaskTerms, private: Secret, public: bytes, one: int, other: int) -> bytes:
    """The key of the mask between two owners."""
    return derived(_agreed(other, private, public), terms.digest, "mask", min(one, other), max(one, other))


def self_key(terms: MaskTerms, owner: int, seed: bytes) -> bytes:
    """The key of an owner's own mask."""
    return derived(seed, terms.digest, "own mask", owner)


@dataclass
class Masker:
    """One owner in one round. `identity` is her registered Ed25519 key, `root` 32 secret bytes drawn for this round."""

    owner: int
    identity: bytes = field(repr=False)
    terms: MaskTerms
    root: bytes = field(repr=False)
    peers: dict[int, Advert] = field(default_factory=dict, repr=False)
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    survivors: tuple[int, ...] = ()
    said: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.terms.keys.get(self.owner) != identity_key(self.identity):
            raise Tampered(self.owner, "key", "the roster has another key in her place than her own")
        self._around = self.terms.neighbours(self.owner)
        self._cipher: Secret | None = None
        self._agreed: dict[Advert, bytes] = {}

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

    # what she derives from her root

    def _secret(self, *purpose: str, length: int = KEY) -> bytes:
        return derived(self.root, self.terms.digest, *purpose, length=length)

    def _advert(self) -> Advert:
        cipher, mask = (public_key(secret_key(self._secret(purpose))) for purpose in ("cipher", "mask"))
        keys = cipher, mask, seed_commitment(self.terms, self.owner, self._secret("seed"))
        return Advert(self.owner, *keys, signed(self.identity, _advert_text(self.terms, self.owner, keys)))

    # the stages

    def _keys(self, question: bytes) -> bytes:
        if question != self.terms.pack():
            raise SumVoid("these are not the terms of this round")
        return packed(self._advert().parts())

    def _shares(self, question: bytes) -> bytes:
        """Check every neighbour's keys, then deal."""
        self._needs(KEYS, SHARES)
        own = self._advert()
        met = {own.cipher_key: self.owner, own.mask_key: self.owner}
        peers = {}
        for owner, *parts in rows(question):
            advert = Advert.checked(owner, parts, self.terms)
            if owner not in self._around or owner in peers:
                raise Tampered(owner, "key", "she is no neighbour, or there twice")
            for key in (advert.cipher_key, advert.mask_key):
                if met.setdefault(key, owner) != owner:
                    raise Tampered(owner, "key", f"owner {met[key]} has the same")
            peers[owner] = advert
        self._enough(peers, "keys")
        dealt = self._dealt(peers)
        self.peers = peers
        table = [(holder, *one.parts()) for holder, one in sorted(dealt.items())]
        return packed((table, signed(self.identity, shares_text(self.terms, self.owner, dealt))))

    def _dealt(self, peers: Mapping[int, Advert]) -> dict[int, SealedShare]:
        """Shares for all neighbours that are there; her own ones stay with her."""
        terms, number = self.terms, self.terms.holder
        holders = {number(one): one for one in (self.owner, *peers)}
        parts = {}
        for kind, secret in (("mask", self._secret("mask")), ("seed", self._secret("seed"))):
            randomness = stream(self._secret("polynomial", kind), 64 * (terms.threshold - 1))
            made = shares(secret, list(holders), terms.threshold, randomness)
            parts[kind] = {holders[at]: share for at, share in made.items()}
        found = {}
        for holder in holders.values():
            pair = parts["mask"][holder], parts["seed"][holder]
            kept = [commitment(terms, kind, self.owner, holder, parts[kind][holder]) for kind in ("mask", "seed")]
            text = b""
            if holder == self.owner:
                self.held[holder] = pair
            else:
                text = sealed(self._transit(peers[holder], self.owner, holder), b"".join(pair), b"".join(kept))
            found[holder] = SealedShare(text, *kept)
        return found

    def _transit(self, peer: Advert, dealer: int, holder: int) -> bytes:
        """The key of what travels from dealer to holder, one of whom she is."""
        if peer not in self._agreed:
            if self._cipher is None:
                self._cipher = secret_key(self._secret("cipher"))
            self._agreed[peer] = _agreed(peer.owner, self._cipher, peer.cipher_key)
        return derived(self._agreed[peer], self.terms.digest, "share", dealer, holder)

    def received(self, question: bytes) -> dict[int, tuple[bytes, bytes]]:
        """The shares that neighbours dealt her, opened and checked, her own among them; nothing is masked yet."""
        if self.said_before(INPUT, question) is not None:
            raise SumVoid(f"the mask of owner {self.owner} was used before")
        self._needs(SHARES, INPUT)
        held = {self.owner: self.held[self.owner]}
        for dealer, *parts in rows(question):
            if dealer not in self.peers or dealer in held:
                raise Tampered(dealer, "share", "her keys were not among the neighbours', or it is there twice")
            held[dealer] = self._opened(dealer, SealedShare.of(dealer, parts))
        self._enough([one for one in held if one != self.owner], "shares")
        return held

    def masked(self, question: bytes, vector: NDArray[np.uint64]) -> tuple[bytes, Words]:
        """Her numbers behind all masks, and her signature on that. Once: whoever calls keeps it, and repeats it."""
        held, terms = self.received(question), self.terms
        if vector.shape != (terms.length,) or vector.dtype != np.uint64 or (vector >> np.uint64(terms.bits)).any():
            raise InvalidInput("input", (vector.shape, vector.dtype), f"{terms.length} numbers below 2^{terms.bits}")
        masks = [(self_key(terms, self.owner, self._secret("seed")), 1)]
        private = secret_key(self._secret("mask"))
        for peer in held:
            if peer != self.owner:
                key = pair_key(terms, private, self.peers[peer].mask_key, self.owner, peer)
                masks.append((key, 1 if self.owner < peer else -1))
        total: Words = vector.astype(terms.dtype)
        add_masks(total, masks)
        total &= terms.dtype(2**terms.bits - 1)
        answer = packed((signed(self.identity, input_text(terms, self.owner, total)),))
        self.held = held
        self.said[INPUT] = digest(question), answer
        return answer, total

    def _opened(self, dealer: int, one: SealedShare) -> tuple[bytes, bytes]:
        beside = one.mask_key + one.seed
        text = opened(self._transit(self.peers[dealer], dealer, self.owner), one.text, beside)
        if text is None or len(text) != 2 * SHARE:
            raise Tampered(dealer, "share", "it is not what she sealed for this owner in this round")
        pair = text[:SHARE], text[SHARE:]
        if beside != b"".join(
            commitment(self.terms, kind, dealer, self.owner, share)
            for kind, share in zip(("mask", "seed"), pair, strict=True)
        ):
            raise Tampered(dealer, "share", "she committed to another")
        return pair

    def _agree(self, question: bytes) -> bytes:
        """Sign the set, if it is large enough, she is in it and she masked against all its members around her."""
        self._needs(INPUT, AGREE)
        survivors = numbers(question)
        terms = self.terms
        if list(survivors) != sorted(set(survivors)) or not terms.keys.keys() >= set(survivors):
            raise SumVoid("the survivors are not owners of the roster, each once and in order")
        if len(survivors) < terms.survivors:
            raise SumVoid(f"{len(survivors)} owners are left, {terms.survivors} are agreed on")
        if self.owner not in survivors:
            raise SumVoid(f"owner {self.owner} is not among the survivors")
        for one in survivors:
            if one in self._around and one not in self.held:
                raise Tampered(one, "share", "she is said to have survived, and dealt nothing to this neighbour")
        self.survivors = survivors
        return packed((signed(self.identity, agree_text(terms, survivors)),))

    def _unmask(self, question: bytes) -> bytes:
        """One share of each neighbour, which one by the set that she signed; then her secrets are forgotten."""
        self._needs(AGREE, UNMASK)
        text, signers = agree_text(self.terms, self.survivors), set[int]()
        for owner, *rest in rows(question):
            (signature,) = items(rest, bytes)
            if owner not in self.survivors or owner in signers:
                raise Tampered(owner, "signature", "she is not among the survivors, or there twice")
            if len(signers) < self.terms.survivors:  # as many as are needed
                if not is_signed(self.terms.keys[owner], signature, text):
                    raise Tampered(owner, "signature", "it is not hers on this set of survivors")
                signers.add(owner)
        if len(signers) < self.terms.survivors:
            raise SumVoid(f"{len(signers)} owners signed the survivors, {self.terms.survivors} are agreed on")
        alive = set(self.survivors)
        revealed = [(dealer, int(dealer in alive), pair[dealer in alive]) for dealer, pair in sorted(self.held.items())]
        self.held, self.root, self._cipher, self._agreed = {}, b"", None, {}
        return packed(revealed)

    def _void(self, question: bytes) -> bytes:
        """She signed no set, or this would be refused; and from here on she signs none."""
        self._needs(KEYS, VOID)
        if question != self.terms.digest:
            raise SumVoid("these are not the terms of this round")
        return packed((signed(self.identity, void_text(self.terms, self.owner)),))

    def _voided(self, question: bytes) -> bytes:
        """So many others will sign none that no sum can be unmasked; her secrets are forgotten."""
        self._needs(VOID, VOIDED)
        signers = set[int]()
        for owner, *rest in rows(question):
            (signature,) = items(rest, bytes)
            if owner not in self.terms.keys or owner in signers:
                raise Tampered(owner, "signature", "she is not on the roster, or there twice")
            if not is_signed(self.terms.keys[owner], signature, void_text(self.terms, owner)):
                raise Tampered(owner, "signature", "it is not hers on this round's being void")
            signers.add(owner)
        if len(signers) < self.terms.voiders:
            raise SumVoid(f"{len(signers)} owners signed that the round is void, {self.terms.voiders} are needed")
        self.held, self.root, self._cipher, self._agreed = {}, b"", None, {}
        return packed(())

    def _needs(self, before: str, stage: str) -> None:
        if before not in self.said:
            raise SumVoid(f"owner {self.owner} was not asked for {before!r} before {stage!r}")

    def _enough(self, peers: Mapping[int, object] | list[int], what: str) -> None:
        """Of her shares' holders, herself included, as many as unmasking needs."""
        if len(peers) + 1 < self.terms.threshold:
            raise SumVoid(f"{what} of {len(peers)} neighbours came, {self.terms.threshold - 1} are needed")

    # what outlives a process

    def state(self) -> bytes:
        """Everything but her identity, secrets included: for her own disk."""
        peers = [(owner, *advert.parts()) for owner, advert in self.peers.items()]
        held = [(owner, *pair) for owner, pair in self.held.items()]
        said = [(stage, *one) for stage, one in self.said.items()]
        return packed((self.owner, self.terms.pack(), self.root, peers, held, self.survivors, said))

    @classmethod
    def restore(cls, identity: bytes, state: bytes) -> Masker:
        """What `state` gave, on the same disk: not checked again."""
        owner, terms, root, peers, held, survivors, said = items(
            unpacked(state), int, bytes, bytes, list, list, list, list
        )
        return cls(
            owner, identity, MaskTerms.unpack(terms), root, {one[0]: Advert(*one) for one in peers},
            {one[0]: (one[1], one[2]) for one in held}, tuple(survivors), {one[0]: (one[1], one[2]) for one in said},
        )  # fmt: skip


def numbers(text: bytes) -> tuple[int, ...]:
    """Owners' numbers in a list."""
    found: Any = unpacked(text)
    if not isinstance(found, list) or any(type(one) is not int for one in found):
        raise InvalidInput("message", text[:40], "a list of owners' numbers")
    return tuple(found)


def rows(text: bytes) -> list[list[Any]]:
    """Rows that begin with an owner's number."""
    found: Any = unpacked(text)
    if not isinstance(found, list) or any(not isinstance(row, list) or not row for row in found):
        raise InvalidInput("message", text[:40], "a list of rows")
    if any(type(row[0]) is not int for row in found):
        raise InvalidInput("message", text[:40], "rows that begin with an owner's number")
    return found
