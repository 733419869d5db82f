"""A masked sum among owners in this process, for tests that lose, change or repeat messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from flmarket.market.masking import INPUT, Masker, MaskTerms, Reply
from flmarket.market.masking.masker import next_link
from flmarket.market.masking.primitives import identity_key


class Party:
    """n owners with random inputs; `ask` is what `exchange` takes. Owners in `gone[stage]` do not answer that stage."""

    def __init__(self, n: int, *, survivors: int, colluders: int = 0, length: int = 5, bits: int = 32, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.identities = {3 * i + 1: rng.bytes(32) for i in range(n)}
        roster = tuple((owner, identity_key(key)) for owner, key in self.identities.items())
        self.terms = MaskTerms("task", 4, b"t" * 32, bits, length, survivors, colluders, roster)
        self.maskers = {owner: Masker(owner, key, self.terms, rng.bytes(32)) for owner, key in self.identities.items()}
        self.inputs = {owner: rng.integers(0, 2**bits, length, dtype=np.uint64) for owner in self.identities}
        self.gone: dict[str, Collection[int]] = {}
        self.seen: dict[str, dict[int, Reply]] = {}

    def later(self, rounds: int = 1) -> Party:
        """The same owners in a later round, with what they know of each other from this one."""
        again, rng = object.__new__(Party), np.random.default_rng(rounds)
        again.__dict__.update(self.__dict__)
        again.terms = replace(self.terms, round_index=self.terms.round_index + rounds)
        again.maskers = {
            owner: Masker(
                owner, self.identities[owner], again.terms, rng.bytes(32),
                {peer: next_link(chain, rounds - 1) for peer, chain in masker.met.items()},
            )
            for owner, masker in self.maskers.items()
        }  # fmt: skip
        again.gone, again.seen = {}, {}
        return again

    def plain(self, owners: Iterable[int]) -> np.ndarray:
        """What the sum of these owners should be, in Python's own numbers."""
        chosen = [self.inputs[owner].tolist() for owner in owners]
        return np.array([sum(column) % 2**self.terms.bits for column in zip(*chosen, strict=True)], dtype=np.uint64)

    def answer(self, owner: int, stage: str, question: bytes) -> Reply:
        """One owner's answer."""
        masker = self.maskers[owner]
        if stage == INPUT:
            return masker.masked(question, self.inputs[owner])
        return masker.answer(stage, question), None

    def ask(self, stage: str, questions: Mapping[int, bytes]) -> Iterable[Mapping[int, Reply]]:
        """All who are there, one batch each."""
        for owner, question in questions.items():
            if owner not in self.gone.get(stage, ()):
                reply = self.answer(owner, stage, question)
                self.seen.setdefault(stage, {})[owner] = reply
                yield {owner: reply}

    def restarted(self) -> Party:
        """The same owners, each read back from her state."""
        again = object.__new__(Party)
        again.__dict__.update(self.__dict__)
        again.maskers = {
            owner: Masker.restore(self.identities[owner], masker.state(), masker.known)
            for owner, masker in self.maskers.items()
        }
        again.seen = {}
        return again
