"""Malicious clients: who trains on false labels, or sends something else than she trained.

| name | what she does | source |
| --- | --- | --- |
| `dirty-label` | gives all of her records one label, then follows the protocol | JDP section 6; Bhagoji et al. 2019 |
| `label-flip` | swaps label y for (classes − 1) − y, then follows the protocol | Tolpegin et al. 2020 |
| `random-noise` | sends the last public model plus noise `factor` times as long as her honest step | JDP section 4.2 |
| `sign-flip` | sends her honest step backwards, `factor` times as long | Li et al. 2019 (RSA) |
| `scaled-update` | poisons like `dirty-label` and boosts her step `factor` times | Bagdasaryan et al. 2020 |

Data poisoning leaves clip and noise in place, because the adversary's own software adds them. Whoever crafts a message
does so after clip and noise: nobody can make her clip. `factor` is relative to what an honest client would have
sent, so an attack means the same at every noise level.

Not covered: adversaries who see the others' uploads and fit theirs to the defence, and backdoors that leave the
accuracy alone. A rule that passes here is not safe against those.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_positive, checked_whole
from flmarket.registry import Registry


@runtime_checkable
class Adversary(Protocol):
    """What a malicious client changes: the labels she trains on, and the message she sends."""

    @property
    def name(self) -> str:
        """The registered name."""

    def labels(self, y: IntArray, classes: int) -> IntArray:
        """The labels she trains on instead of y; her own unless she lies about them."""
        return y

    def upload(self, honest: FloatArray, public: FloatArray, rng: np.random.Generator) -> FloatArray:
        """What she sends instead of her clipped and noised upload; `public` is the last model everybody has."""
        return honest


@dataclass(frozen=True)
class DirtyLabel(Adversary):
    """Every record is called `target` (the paper: the digit 2, or cat, which is class 3)."""

    target: int = 2
    name: str = "dirty-label"

    def __post_init__(self) -> None:
        checked_whole("target", self.target, 0)

    def labels(self, y: IntArray, classes: int) -> IntArray:
        """All the same."""
        if self.target >= classes:
            raise InvalidInput("target", self.target, f"a class from 0 to {classes - 1}")
        return np.full_like(y, self.target)


@dataclass(frozen=True)
class LabelFlip(Adversary):
    """The classes in reverse order; with an odd number of them the middle one keeps its label."""

    name: str = "label-flip"

    def labels(self, y: IntArray, classes: int) -> IntArray:
        """(classes − 1) − y."""
        return np.asarray(classes - 1 - y)


@dataclass(frozen=True)
class _Crafted(Adversary):
    factor: float = 1.0

    def __post_init__(self) -> None:
        checked_positive("factor", self.factor)


@dataclass(frozen=True)
class RandomNoise(_Crafted):
    """A step in a random direction."""

    name: str = "random-noise"

    def upload(self, honest: FloatArray, public: FloatArray, rng: np.random.Generator) -> FloatArray:
        """The public model plus noise, `factor` times as long as the honest step."""
        direction = rng.standard_normal(honest.shape)
        length = self.factor * float(np.linalg.norm(honest - public))
        return np.asarray(public + direction * (length / float(np.linalg.norm(direction))))


@dataclass(frozen=True)
class SignFlip(_Crafted):
    """Backwards."""

    name: str = "sign-flip"

    def upload(self, honest: FloatArray, public: FloatArray, rng: np.random.Generator) -> FloatArray:
        """The public model minus `factor` times the honest step."""
        return np.asarray(public - self.factor * (honest - public))


@dataclass(frozen=True)
class ScaledUpdate(DirtyLabel):
    """Dirty labels, boosted: with factor m she replaces the average."""

    factor: float = 20.0
    name: str = "scaled-update"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_positive("factor", self.factor)

    def upload(self, honest: FloatArray, public: FloatArray, rng: np.random.Generator) -> FloatArray:
        """The public model plus `factor` times the poisoned step."""
        return np.asarray(public + self.factor * (honest - public))


_registry: Registry[Adversary] = Registry("adversary")
get = _registry.get
names = _registry.names
for _kind in (DirtyLabel, LabelFlip, RandomNoise, SignFlip, ScaledUpdate):
    _registry.register(_kind().name, _kind)
