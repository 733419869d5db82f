"""An attacker who reads all 64 bits of every number of a release, and knows everything but the update.

The first attack looks for coordinates that are exactly zero in an update, which for an image are pixels that are blank
in all of an owner's records. The second asks which outputs are possible at all. The third leaves nothing to chance:
on a small instance every output's probability is counted, under many inputs, and no two may differ by more than e^ε.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from math import exp

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from flmarket import privacy
from flmarket.privacy import PrivUnit, PrivUnitG, ProjUnit, SecureNoise, Sphere, candidates, directional

PIXELS, CLASSES = 64, 10


# --- blank pixels


def blank_and_inked() -> tuple[np.ndarray, np.ndarray]:
    """An update of 64 pixels × 10 classes with 16 blank pixels, and which those are."""
    rng = np.random.default_rng(3)
    update, blank = rng.standard_normal((PIXELS, CLASSES)), rng.permutation(PIXELS) < 16
    update[blank] = 0.0
    return update, blank


def is_a_bare_normal(numbers: np.ndarray, scale: float) -> np.ndarray:
    """Whether each is scale·Φ⁻¹((k + ½)·2⁻⁵²) to the last bit for a whole k, as if nothing had been added to it."""
    guess = np.rint(ndtr(numbers / scale) * 2.0**52 - 0.5)
    near = guess[..., None] + np.arange(-6, 7)
    return (ndtri((near + 0.5) * 2.0**-52) * scale == numbers[..., None]).any(axis=-1)


def trailing_zeros(numbers: np.ndarray) -> np.ndarray:
    """How many of the last bits of each number are 0: sums of numbers of different sizes have more."""
    mantissa = numbers.view(np.uint64) | np.uint64(1 << 52)
    return np.log2((mantissa & -mantissa).astype(float))


@pytest.mark.parametrize("name", privacy.names())
def test_blank_pixels_are_not_found_by_their_bits(name):
    """ε = 0.1 allows odds of 1.1 for telling two updates apart; the bits of blank pixels once gave more than 600."""
    mechanism, (update, blank) = privacy.get(name), blank_and_inked()
    releases = 3 if name in ("laplace-l1", "gaussian-l2", "gaussian-zcdp") else 40
    seen = mechanism.privatize(np.tile(update.ravel(), (releases, 1)), 0.1, SecureNoise())
    seen = seen.reshape(releases, PIXELS, CLASSES)
    scale = float(np.sqrt(mechanism.noise_energy(0.1, update.size) / update.size))  # of one coordinate's noise
    for evidence in (is_a_bare_normal(seen, scale).all(axis=-1), trailing_zeros(seen).mean(axis=-1)):
        hits, false = evidence[:, blank].mean(), evidence[:, ~blank].mean()
        error = evidence.std() * np.sqrt(1 / (releases * 16) + 1 / (releases * 48))
        assert abs(hits - false) <= 6 * error, f"blank pixels {hits:.3g}, others {false:.3g}"


# --- what can come out


class Scripted:
    """A source whose public randomness is fixed and whose secret numbers are given, one list for each bound."""

    def __init__(self, frame=None, picks=(), coins=()):
        self.frame, self.picks, self.coins = frame, list(picks), list(coins)

    def below(self, bound):
        if bound == 1 << candidates.CHANCE_BITS:
            return self.coins.pop(0)
        if not self.picks:
            raise Bound(bound)
        assert self.picks[0] < bound
        return self.picks.pop(0)

    def generator(self):
        generator = np.random.default_rng(7)
        return generator if self.frame is None else _Framed(self.frame, generator)

    def add_laplace(self, values, *, scale, sensitivity):
        raise NotImplementedError

    add_gaussian = noisy_argmax = add_laplace


class Bound(Exception):
    """Carries the bound of the secret choice."""


@dataclass
class _Framed:
    frame: np.ndarray
    rest: np.random.Generator

    def standard_normal(self, shape):
        return np.broadcast_to(self.frame, shape).copy()

    def __getattr__(self, name):
        return getattr(self.rest, name)


@pytest.mark.parametrize("kind", [Sphere, PrivUnit])
def test_one_parameter_has_the_same_two_outputs_for_all_inputs(kind):
    values = (1.0, 1e-9, 0.0, *np.random.default_rng(0).uniform(-1, 1, 40))
    seen = [
        {out.tobytes() for out in kind().privatize(np.full((100, 1), value), 0.5, SecureNoise())} for value in values
    ]
    assert all(len(outputs) == 2 and outputs == seen[0] for outputs in seen)


@pytest.mark.parametrize("kind", [Sphere, PrivUnit, PrivUnitG, ProjUnit])
@pytest.mark.parametrize(("dimension", "epsilon"), [(1, 2.0), (2, 0.1), (3, 1.0), (100, 1.5)])
def test_the_same_outputs_are_possible_for_all_inputs(kind, dimension, epsilon):
    """With the candidates fixed: a release for each rank, and the same set of bit patterns whatever the input."""
    rng, mechanism = np.random.default_rng(dimension), kind()
    pairs = int(mechanism.plan(np.array([epsilon]), dimension).cap.pairs[0])
    near, far = candidates.weights(float(directional.delivered(np.array(epsilon))), candidates.WEIGHT_BITS)
    count = int(mechanism.plan(np.array([epsilon]), dimension).cap.count[0])
    firsts = [near * rank for rank in range(count)] + [near * count + far * rank for rank in range(2 * pairs - count)]
    sets = []
    for vector in (rng.standard_normal(dimension), np.eye(dimension)[0] * 0.3, np.zeros(dimension)):
        outputs = set()
        for pick in firsts:
            outputs.add(mechanism.privatize(vector, epsilon, Scripted(picks=[pick], coins=[0])).tobytes())
        assert len(outputs) == 2 * pairs
        sets.append(outputs)
    assert sets[0] == sets[1] == sets[2]


@pytest.mark.parametrize("name", ["laplace-l1", "gaussian-l2", "gaussian-zcdp"])
def test_additive_noise_comes_out_on_one_grid_for_all_inputs(name):
    """OpenDP's: every output is a whole multiple of a grid that depends on scale and clip only."""
    mechanism = privacy.get(name)
    grid = 2.0**-50
    for value in (1 / 3, -0.7, 1e-9, 0.0, 1.0):
        out = mechanism.privatize(np.full((50, 1), value), 1.0, SecureNoise())
        np.testing.assert_array_equal(out, np.rint(out / grid) * grid)
        assert len(np.unique(np.rint(out / grid) % 16)) > 4  # no coarser grid that would tell the value


# --- every probability, counted


INPUTS = {
    1: [[1.0], [-1.0], [0.5], [-0.3], [1e-6], [0.0]],
    2: [[1.0, 0.0], [0.0, -1.0], [0.6, 0.8], [-0.3, 0.1], [1e-9, 1e-9], [0.0, 0.0]],
    3: [[1.0, 0.0, 0.0], [-0.5, 0.5, 0.5], [0.1, -0.2, 0.0], [0.0, 0.0, 0.0]],
}


@pytest.fixture
def coarse(monkeypatch):
    """Two pairs of candidates, odds in halves: small enough to be written out."""
    monkeypatch.setattr(candidates, "_PAIRS", ((np.inf, 2),))
    monkeypatch.setattr(candidates, "WEIGHT_BITS", 1)
    monkeypatch.setattr(candidates, "CHANCE_BITS", 2)
    return monkeypatch


def counted(mechanism, vector, epsilon, levels, size):
    """How many of all equally likely runs (candidates × coin × choice) end in each pair of candidates and output."""
    plan = mechanism.plan(np.array([epsilon]), len(vector))
    pairs, lifted = int(plan.cap.pairs[0]), bool(plan.lift[0])
    with pytest.raises(Bound) as found:
        mechanism.privatize(vector, epsilon, Scripted(np.ones((pairs, size)), coins=[0]))
    runs = list(itertools.product(range(1 if lifted else 4), range(found.value.args[0])))
    together = 1 if isinstance(mechanism, ProjUnit) else len(runs)  # projunit has a projection of its own in each row
    outputs = Counter()
    for frame in itertools.product(levels, repeat=pairs * size):
        for first in range(0, len(runs), together):
            coins, picks = zip(*runs[first : first + together], strict=True)
            source = Scripted(np.reshape(frame, (pairs, size)), picks, () if lifted else coins)
            for out in mechanism.privatize(np.tile(vector, (together, 1)), epsilon, source):
                outputs[frame, (out + 0.0).tobytes()] += 1
    return outputs


def worst_ratio(mechanism, dimension, epsilon, levels, size):
    """The largest ratio of the probabilities of one output under two inputs, to somebody who knows the candidates too.

    Infinite if an output is possible under one input and not under another.
    """
    tables = [counted(mechanism, np.array(vector), epsilon, levels, size) for vector in INPUTS[dimension]]
    outputs = set().union(*tables)
    counts = np.array([[table[out] for out in outputs] for table in tables], dtype=float)
    with np.errstate(divide="ignore"):
        return float((counts.max(axis=0) / counts.min(axis=0)).max())


G_CASE = (PrivUnitG(clip=0.77), 1, 2.0, (-1.0, 0.0, 1.0), 2)
CASES = [
    (Sphere(clip=0.77), 1, 1.0, (-1.5, -0.5, 0.5, 1.5), 1),
    (Sphere(clip=0.77), 3, 0.5, (-1.5, -0.5, 0.5, 1.5), 3),
    (PrivUnit(clip=0.77), 1, 2.0, (-1.0, -0.25, 0.25, 1.0), 2),
    (PrivUnit(clip=0.77), 2, 3.0, (-1.0, 0.5), 3),
    G_CASE,
    (PrivUnitG(clip=0.77), 2, 3.0, (-1.0, 0.5), 3),
    (ProjUnit(clip=0.77, rank=2), 3, 2.0, (-1.0, 0.5), 2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}-{case[2]}")
def test_no_output_is_likelier_than_allowed_under_any_input(case, coarse):
    """At most e^ε, and not far below it: the odds are e^ε rounded down to halves."""
    mechanism, dimension, epsilon, levels, size = case
    worst = worst_ratio(mechanism, dimension, epsilon, levels, size)
    assert worst <= exp(epsilon)
    assert worst == np.floor(2 * exp(epsilon)) / 2 or mechanism.name == "sphere"  # whose coin hides a little


def test_weights_are_whole_numbers_within_the_promise():
    for epsilon in (1e-30, 1e-9, 0.1, 1.0, 8.0, 50.0, 64.0):
        near, far = candidates.weights(float(directional.delivered(np.array(epsilon))), candidates.WEIGHT_BITS)
        with mpmath.workdps(80):
            ratio = mpmath.mpf(near) / far
            assert 1 <= ratio <= mpmath.exp(mpmath.mpf(epsilon))
            assert float(mpmath.log(ratio)) == pytest.approx(epsilon, rel=1e-6)


# --- planted cheats: the counting must see each of them


@dataclass(frozen=True)
class AddsABit(PrivUnitG):
    """Noise that is added to the update, however little of the update is in it."""

    def _chosen(self, ball, plan, epsilon, source):
        return super()._chosen(ball, plan, epsilon, source) + 1e-12 * ball


@dataclass(frozen=True)
class OwnGrid(PrivUnitG):
    """Outputs on a grid that depends on the update."""

    def _chosen(self, ball, plan, epsilon, source):
        grid = 1e-6 if ball[0, 0] > 0 else 1.1e-6
        return np.rint(super()._chosen(ball, plan, epsilon, source) / grid) * grid


def test_cheats_on_outputs_are_counted(coarse):
    for cheat in (AddsABit, OwnGrid):
        assert worst_ratio(cheat(clip=0.77), *G_CASE[1:]) == np.inf


def test_odds_that_are_a_little_too_good_are_counted(coarse):
    honest = candidates.weights
    coarse.setattr(
        candidates, "weights", lambda epsilon, bits: (honest(epsilon, bits)[0] + 1, honest(epsilon, bits)[1])
    )
    assert worst_ratio(*G_CASE) > exp(2.0)


def test_a_cap_by_threshold_whose_mass_depends_on_the_input_is_counted(coarse):
    """The textbook mechanism: those beyond an edge are the cap. On a finite law their number depends on the input."""

    def beyond_an_edge(units, cap, epsilon, source, *, normal):
        points = source.generator().standard_normal((len(units), 2, units.shape[1]))
        signed = np.concatenate([points, -points], axis=1)
        near, far = candidates.weights(float(epsilon[0]), candidates.WEIGHT_BITS)
        out = np.empty_like(units)
        for row, (unit, options) in enumerate(zip(units, signed, strict=True)):
            inside = options @ unit > 0
            pick = source.below(2 * near + 2 * far)
            side = inside if pick < 2 * near else ~inside
            side = side if side.any() else ~side
            out[row] = options[np.flatnonzero(side)[pick % side.sum()]]
        return out

    coarse.setattr(directional, "choose", beyond_an_edge)
    assert worst_ratio(*G_CASE) > 1.1 * exp(2.0)


# --- who may release at all


@dataclass(frozen=True)
class Unproven(PrivUnit):
    sound = False


def test_a_mechanism_that_is_not_sound_makes_no_real_release(rng):
    with pytest.raises(privacy.UnsoundNoise, match="privunit"):
        Unproven().privatize(np.ones(3), 1.0, SecureNoise())
    assert np.isfinite(Unproven().privatize(np.ones(3), 1.0, rng)).all()
    assert not privacy.is_sound(Unproven())
    assert all(privacy.is_sound(privacy.get(name)) for name in privacy.names())


def test_only_sound_mechanisms_are_recommended(monkeypatch):
    assert privacy.recommend(10, 2.0).name == "privunit"
    monkeypatch.setattr(PrivUnit, "sound", False)
    pick = privacy.recommend(10, 2.0)
    assert pick.name == "privunit-g"
    assert "privunit" not in pick.energy_table
