"""Does a perturbation release what it says: the clipped input on average, with the stated noise energy, always afresh?

Inputs at the clip and ten times beyond it. Means and energies are compared with their closed forms by normal
approximation, so a few thousand releases are needed; laws with very heavy tails would need more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from flmarket.bids import FloatArray
from flmarket.privacy import NoiseSource, Perturbation, clip_l1, clip_l2

__all__ = ["NoiseLaw", "check_noise_law"]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class NoiseLaw:
    """Measured against stated; `allowed_z` is how many standard errors chance explains."""

    energy_stated: float
    energy_measured: float
    energy_z: float  # negative: less noise than stated
    mean_z: float  # of the worst coordinate of the worst input
    mean_input: str
    repeated: float  # share of releases whose noise is the same as that of the next one or of the next call
    correlation_z: float
    allowed_z: float

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong, one sentence each."""
        found = []
        ratio = self.energy_measured / self.energy_stated
        if self.energy_z < -self.allowed_z:
            found.append(f"less noise than stated: {ratio:.3g} of the stated energy")
        if self.energy_z > self.allowed_z:
            found.append(f"more noise than stated: {ratio:.3g} times the stated energy")
        if self.mean_z > self.allowed_z:
            found.append(f"the mean is not the clipped input ({self.mean_input})")
        if self.repeated > 0 or self.correlation_z > self.allowed_z:
            found.append("noise is reused: releases are not independent")
        return tuple(found)


def check_noise_law(
    perturbation: Perturbation,
    epsilon: float,
    dimension: int,
    trials: int,
    failure_probability: float,
    rng: np.random.Generator | NoiseSource,
) -> NoiseLaw:
    """All comparisons together raise a false alarm with about `failure_probability`."""
    clip = clip_l1 if perturbation.norm == "l1" else clip_l2
    spike, dense = np.zeros(dimension), np.ones(dimension)
    spike[0] = 1.0
    order = 1 if perturbation.norm == "l1" else 2
    at_clip = perturbation.clip / float(np.linalg.norm(dense, ord=order)) * dense
    inputs = {
        "one coordinate at the clip": perturbation.clip * spike,
        "all coordinates, norm at the clip": at_clip,
        "one coordinate, ten times the clip": 10 * perturbation.clip * spike,
        "all coordinates, ten times the clip": 10 * perturbation.clip * dense,
    }
    # per input a mean of `dimension` coordinates, energies of two inputs, two correlations
    allowed = float(-ndtri(failure_probability / (2 * (len(inputs) * dimension + 4))))
    stated = _stated_energy(perturbation, epsilon, dimension)
    mean_z, mean_input, energies = 0.0, "", []
    for name, x in inputs.items():
        centre = clip(x, perturbation.clip)
        noise = perturbation.privatize(np.broadcast_to(x, (trials, dimension)), epsilon, rng) - centre
        error = noise.std(axis=0, ddof=1) / np.sqrt(trials) + _ROUNDING * perturbation.clip
        z = float((np.abs(noise.mean(axis=0)) / error).max())
        if z > mean_z:
            mean_z, mean_input = z, name
        if name.endswith("at the clip"):
            energies.append(np.square(noise).sum(axis=-1))
    scores = [_z(energy, stated) for energy in energies]
    worst = int(np.argmax(np.abs(scores)))
    repeated, correlation = _independence(perturbation, epsilon, at_clip, trials, rng)
    return NoiseLaw(
        stated, float(energies[worst].mean()), scores[worst], mean_z, mean_input, repeated, correlation, allowed
    )


def _stated_energy(perturbation: Perturbation, epsilon: float, dimension: int) -> float:
    """At inputs of norm `clip`; `noise_energy` is for the worst input where the energy depends on it."""
    at_norm = getattr(perturbation, "energy", None)
    if at_norm is not None:
        return float(at_norm(epsilon, dimension, norm=perturbation.clip))
    return float(perturbation.noise_energy(epsilon, dimension))


def _z(energy: FloatArray, stated: float) -> float:
    error = energy.std(ddof=1) / np.sqrt(len(energy)) + _ROUNDING * stated
    return float((energy.mean() - stated) / error)


def _independence(
    perturbation: Perturbation, epsilon: float, x: FloatArray, trials: int, rng: np.random.Generator | NoiseSource
) -> tuple[float, float]:
    """Two calls in a row, and neighbouring rows of one call: equal noise, or noise that goes together?"""
    batch = np.broadcast_to(x, (trials, len(x)))
    first, second = (perturbation.privatize(batch, epsilon, rng) - x for _ in range(2))
    scale = float(np.sqrt(np.mean(np.square(first)))) or 1.0
    repeated, z = 0.0, 0.0
    for one, two in ((first, second), (first[:-1], first[1:])):
        # a mechanism with few possible releases repeats some by chance: only the whole vector counts, and only often
        same = float((np.abs(one - two).max(axis=-1) <= 1e-12 * scale).mean())
        repeated = max(repeated, same if same > 0.5 else 0.0)
        product = (one * two).sum(axis=-1)
        error = float(product.std(ddof=1)) / len(product) ** 0.5
        z = max(z, abs(float(product.mean())) / error if error > 0 else 0.0)
    return repeated, z
