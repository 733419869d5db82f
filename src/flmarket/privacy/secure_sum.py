"""A sum of many owners' updates and nothing else: whole numbers modulo 2^b with weighted updates and shared noise.

An owner's update is clipped to L2 norm L, weighed by λ, turned by a public random rotation, multiplied by a public
scale s, rounded to whole numbers without bias, and gets her own share of discrete Gaussian noise; all of it modulo 2^b.
Masks hide her vector (`flmarket.market.masking`), the broker learns the sum over those who stayed, and `decode` undoes
scale and rotation. Written for the distributed discrete Gaussian of Kairouz, Liu, Steinke, "The distributed discrete
Gaussian mechanism for federated learning with secure aggregation" (ICML 2021, arXiv:2102.06387), with unequal weights.

**What is promised, and to whom.** Owner i loses ρ in the sense of zCDP, for her whole update against any other update,
towards everybody who sees the sum (broker, buyer, other owners), if at least m of those who entered it are honest about
their noise and do not show it to the broker; she is one of them. Proof for what is computed here:

1. *Sensitivity.* The rounded vector z of an owner of weight λ is kept only if ‖z‖² ≤ B², a whole number that follows
   from s, λ, L and p (conditional rounding, Kairouz et al.). The test is on the integers,
   with an allowance for its own arithmetic, so neither the clip nor the rotation needs to be exact. Two updates of hers
   give integer vectors at most 2B apart.
2. *Rounding.* Its coins may be public: given them z is a function of the update, whatever they are, and the bound below
   holds for every pair of integer vectors at most 2B apart. (Rényi divergence is quasi-convex.)
3. *Noise.* m honest shares N_Z(0, σ²) add up to noise that is not quite discrete Gaussian; shifting it by an integer
   vector of norm Δ = 2B costs ε²/2-concentrated privacy with (Kairouz et al.; tests convolve it exactly)

       ε² = min( Δ²/(mσ²) + τp/2, (Δ/(√m·σ) + τ√p)² ),    τ = 10 Σ_{k=1}^{m−1} exp(−2π²σ²·k/(k+1)),

   that is ρ = ε²/2. At the scales chosen here τ is 0 to a double. More noise, by those above m, is post-processing; so
   is reduction modulo 2^b, and adding other owners' inputs.
4. *Records.* Where ρ is for one record, what two neighbouring data sets give is at most `change` apart before the
   weight (2L/m for a mean of m clipped gradients; clipping and rotating bring nothing further apart). Rounding by coins
   that do not depend on the data, and never again, moves two numbers at most 1 further apart, so the integer vectors
   are within Δ = s·λ·change + 2√p, the second half of the last term being for arithmetic. Their norm is not tested,
   because a test that one of the two fails would draw other coins for it. At the scales chosen here 2√p is small
   beside the rest; it is counted.

**Wrap-around** spoils a sum and no privacy. A coordinate of the rotated mean update is at most L·√(2/p)·q but for a
probability of 2·exp(−q²/2) (the cosine transform has entries up to √(2/p); Hoeffding over the random signs), the noise
of n owners at most σ√n·q (discrete Gaussians are σ²-sub-Gaussian: Canonne, Kamath, Steinke 2020,
arXiv:2004.00010). s is the largest power of two at which both stay below 2^(b−1) but for 1e-12 in all coordinates
together.

What would break it: fewer honest owners in the sum than m, so the masks must not open for fewer than the threshold; a
noise sampler that is not exact (simulations use a fast one); an owner who sends more than she should: nobody sees a
single vector, so nothing bounds what one liar adds to the sum but the modulus (docs/limitations.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import ceil, exp, floor, isfinite, log, log2, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import InvalidInput
from flmarket.privacy.events import ZCdp, checked_number, checked_whole
from flmarket.privacy.noise import NoiseSource, WholeNoise
from flmarket.privacy.perturbation import checked_dimension, clip_l2

Whole = NDArray[np.uint64]
BITS = 32
MOST_BITS = 52  # whole numbers below 2^53 are exact as doubles, which stores and messages carry
MOST_CONTRIBUTORS = 1_000_000
WRAP_AROUND = 1e-12
_FAILS = 1e-12  # how often rounding is drawn again because it came out too long
_TRIES = 100


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The trust model in numbers: how many must stay, and how many may side with the broker.

    `survivors` is the least share of a round's contributors whose inputs must enter the sum; with fewer the round is
    void. `colluders` is the share of contributors who may show their noise to the broker and everybody's ε still holds.
    The noise is sized for those who are left: all stay and are honest, the sum has `excess` times the noise it needs.
    """

    survivors: float = 0.8
    colluders: float = 0.0
    bits: int = BITS

    def __post_init__(self) -> None:
        object.__setattr__(self, "survivors", checked_number("survivors", self.survivors, 0.5, 1.0))
        object.__setattr__(self, "colluders", checked_number("colluders", self.colluders, 0.0, 1.0))
        if not 2 * self.survivors > 1 + self.colluders:  # else two sums could be opened, of two parts of the owners
            raise InvalidInput(
                "survivors", self.survivors, f"more than (1 + colluders)/2 = {(1 + self.colluders) / 2:g}"
            )
        checked_whole("bits", self.bits, 8, MOST_BITS)

    def counts(self, contributors: int) -> tuple[int, int]:
        """(threshold, honest): how many must stay, and how many of them are counted on for noise."""
        threshold = min(contributors, max(1, ceil(self.survivors * contributors - 1e-9)))
        return threshold, max(1, threshold - ceil(self.colluders * contributors - 1e-9))

    @property
    def excess(self) -> float:
        """Noise energy of a sum in which all stay, over what their promises need; a little more in small sums."""
        return 1.0 / (self.survivors - self.colluders)


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """What one owner goes by: her `weight`, and what all contributors of a round have in common.

    `scale`: how many units make 1. `noise`: σ of every contributor's own noise, in units. `contributors` were asked,
    `threshold` must stay for the sum to be opened, `honest` are counted on for noise. All is modulo 2^`bits`.
    """

    weight: float
    scale: float
    noise: float
    contributors: int
    threshold: int
    honest: int
    bits: int = BITS

    def __post_init__(self) -> None:
        checked_number("weight", self.weight, 0.0, 1.0)
        checked_number("scale", self.scale, 2.0**-60, 2.0**60)
        checked_number("noise", self.noise, 1e-3, 2.0**MOST_BITS)
        checked_whole("contributors", self.contributors, 1, MOST_CONTRIBUTORS)
        checked_whole("threshold", self.threshold, 1, self.contributors)
        checked_whole("honest", self.honest, 1, self.threshold)
        checked_whole("bits", self.bits, 8, MOST_BITS)

    def to_json(self) -> str:
        """As an order carries it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> SumTerms:
        """What `to_json` wrote; anything else is refused."""
        try:
            saved = json.loads(text)
            if set(saved) != {field.name for field in fields(cls)}:
                raise ValueError
            return cls(**saved)
        except (ValueError, TypeError, RecursionError):
            raise InvalidInput("share", text, "the terms of a share in a sum") from None


def squared_limit(terms: SumTerms, *, clip: float, dimension: int) -> int:
    """B²: how long an owner's rounded vector may be; rounding passes it with a probability below 1e-12."""
    length, size = terms.scale * terms.weight * clip, checked_dimension(dimension)
    tail = sqrt(2 * log(1 / _FAILS)) * (length + sqrt(size) / 2)  # Kairouz et al. 2021
    return floor((length * length + size / 4 + tail) * (1 + _arithmetic(size))) + 1


def _arithmetic(size: int) -> float:
    """How far a floating-point sum of so many squares may be off, relatively."""
    return (size + 16) * 2.0**-51


def _squared_distance(terms: SumTerms, *, clip: float, dimension: int, change: float | None) -> float:
    """Δ²: how far apart what two neighbours give is, in units; of whole updates, or of those `change` apart."""
    if change is None:
        return 4 * squared_limit(terms, clip=clip, dimension=dimension)
    arithmetic = _arithmetic(checked_dimension(dimension))
    apart = terms.scale * terms.weight * (change * (1 + arithmetic) + 2 * clip * arithmetic)
    return (apart + 2 * sqrt(dimension)) ** 2


def loss(terms: SumTerms, *, clip: float, dimension: int, change: float | None = None) -> ZCdp:
    """What the owner of this share loses in the sum: for her whole update, or for what moves it by `change` at most."""
    squared, variance = _squared_distance(terms, clip=clip, dimension=dimension, change=change), terms.noise**2
    gap = _not_gaussian(terms.noise, terms.honest)
    shift = squared / (terms.honest * variance)
    squared_epsilon = min(shift + gap * dimension / 2, (sqrt(shift) + gap * sqrt(dimension)) ** 2)
    return ZCdp(squared_epsilon / 2 * (1 + 1e-14))


@lru_cache(maxsize=1024)
def _not_gaussian(sigma: float, shares: int) -> float:
    """τ: how far a sum of so many discrete Gaussians is from one."""
    rate = 2 * pi**2 * sigma**2
    if rate / 2 > 745 + log(shares):  # the largest term, k = 1, and all of them together are 0 as doubles
        return 0.0
    return 10 * sum(exp(-rate * k / (k + 1)) for k in range(1, shares))


def agreed(
    weights: Sequence[float],
    rho: Sequence[float],
    *,
    clip: float,
    dimension: int,
    policy: SecureAggregation,
    change: float | None = None,
) -> tuple[SumTerms, ...]:
    """Everybody's terms: the least common noise at which nobody of these weights loses more than her ρ."""
    if not weights or len(weights) != len(rho) or min(rho) <= 0:
        raise InvalidInput("rho", rho, "a loss above 0 for each of at least one contributor")
    n, (threshold, honest) = len(weights), policy.counts(len(weights))
    apart = 2 * clip if change is None else change
    whole = max(apart * weight / sqrt(2 * one) for weight, one in zip(weights, rho, strict=True))
    spread = _spread(n=n, noise=whole / sqrt(honest), clip=clip, dimension=dimension)
    common = {"contributors": n, "threshold": threshold, "honest": honest, "bits": policy.bits}
    scale = 2.0 ** floor(log2((2.0 ** (policy.bits - 1) - n) / spread))
    for _ in range(policy.bits):
        terms = [SumTerms(weight=weight, scale=scale, noise=1.0, **common) for weight in weights]
        sized = _sized(terms, rho, clip=clip, dimension=dimension, change=change)
        reach = _spread(n=n, noise=sized[0].noise / scale, clip=clip, dimension=dimension) * scale
        if reach + n < 2.0 ** (policy.bits - 1):
            return sized
        scale /= 2
    raise InvalidInput("bits", policy.bits, f"enough bits for a sum of {n} updates of {dimension} numbers")


def _spread(*, n: int, noise: float, clip: float, dimension: int) -> float:
    """How far a coordinate of the sum gets from 0, in units of 1, but for `WRAP_AROUND` in all coordinates together."""
    q = sqrt(2 * log(4 * dimension / WRAP_AROUND))
    return clip * min(1.0, sqrt(2 / dimension) * q) + noise * sqrt(n) * q


def _sized(
    terms: list[SumTerms], rho: Sequence[float], *, clip: float, dimension: int, change: float | None
) -> tuple[SumTerms, ...]:
    """The same terms with the least noise that keeps every promise."""
    lengths = [sqrt(_squared_distance(one, clip=clip, dimension=dimension, change=change)) for one in terms]
    noise = max(length / sqrt(2 * one * terms[0].honest) for length, one in zip(lengths, rho, strict=True))
    noise, step = max(noise, 1e-3) * (1 + 1e-13), 1e-13
    while True:
        sized = tuple(replace(one, noise=noise) for one in terms)
        lost = (loss(one, clip=clip, dimension=dimension, change=change) for one in sized)
        if all(a.rho <= b for a, b in zip(lost, rho, strict=True)):
            return sized
        step = min(2 * step, 0.1)
        noise *= 1 + step


def encode(
    update: FloatArray, terms: SumTerms, *, clip: float, topic: str, source: NoiseSource, records: bool = False
) -> Whole:
    """An owner's input to the sum, p whole numbers below 2^bits; `topic` names the round, and with it the rotation.

    `records`: her loss is for one of her records, by how far that moves her update, and not for all of it.
    """
    if not isinstance(source, WholeNoise):
        raise InvalidInput("source", source, "a source of noise for whole numbers, such as SecureNoise()")
    turned = _turned(terms.weight * clip_l2(update, clip), topic) * terms.scale
    limit = None if records else squared_limit(terms, clip=clip, dimension=turned.size)
    rounded = _rounded(turned, limit, source.generator())
    noisy = rounded + source.whole_gaussian(turned.size, scale=terms.noise)
    return (noisy & np.int64((1 << terms.bits) - 1)).astype(np.uint64)


def added(vectors: Iterable[NDArray[Any]], *, bits: int) -> Whole:
    """The sum modulo 2^bits of whole-number vectors, whatever type of number carries them."""
    total = np.zeros((), dtype=np.uint64)
    for vector in vectors:
        total = total + vector.astype(np.uint64)  # wraps modulo 2^64, of which 2^bits is a divisor
    return total & np.uint64((1 << bits) - 1)


def decode(total: Whole, terms: SumTerms, *, topic: str) -> FloatArray:
    """The weighted sum of updates, and its noise, from the sum of everybody's inputs; whosever terms."""
    half, signed = 1 << (terms.bits - 1), total.astype(np.int64)
    values = np.where(signed >= half, signed - 2 * half, signed) / terms.scale
    return np.asarray(idct(values, norm="ortho") * _signs(topic, values.size))


def in_form(vector: object, *, length: int, bits: int) -> str:
    """What is wrong with a contribution as it arrives, if anything; what it says nobody can see."""
    array = np.asarray(vector)
    if array.shape != (length,) or array.dtype.kind not in "fiu":
        return f"{array.dtype} of shape {array.shape} instead of {length} numbers"
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.floor(array)).all()):
        return "not whole numbers"
    return "" if ((array >= 0) & (array < 2.0**bits)).all() else f"numbers that are not from 0 to 2^{bits} − 1"


def noise_energy(terms: SumTerms, *, contributors: int, dimension: int) -> float:
    """E‖noise‖² of a sum in which so many stayed, rounding included."""
    rounding = dimension / 4
    return contributors * (dimension * terms.noise**2 + rounding) / terms.scale**2


def _turned(vector: FloatArray, topic: str) -> FloatArray:
    return np.asarray(dct(vector * _signs(topic, vector.size), norm="ortho"))


@lru_cache(maxsize=8)
def _signs(topic: str, size: int) -> FloatArray:
    """Random signs that everybody computes from the round's name."""
    digest = hashlib.shake_256(f"flmarket rotation {topic}".encode()).digest(-(-size // 8))
    signs = 1.0 - 2.0 * np.unpackbits(np.frombuffer(digest, dtype=np.uint8))[:size].astype(np.float64)
    signs.flags.writeable = False
    return signs


def _rounded(values: FloatArray, limit: int | None, generator: np.random.Generator) -> IntArray:
    """Each number up or down by a coin that keeps its mean, all drawn again while the vector is too long, if ever."""
    for _ in range(_TRIES):
        rounded = np.floor(values + generator.random(values.size))
        if limit is None or _fits(rounded, limit):
            return rounded.astype(np.int64)
    assert limit is not None
    cut = np.trunc(values)  # never in practice; shorter than any rounding, and not unbiased
    return (cut if _fits(cut, limit) else np.zeros_like(cut)).astype(np.int64)


def _fits(rounded: FloatArray, limit: int) -> bool:
    squared = float(rounded @ rounded)
    return isfinite(squared) and squared * (1 + _arithmetic(rounded.size)) <= limit
