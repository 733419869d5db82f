"""The cap mechanism's numbers against independent ones: 40-digit quadrature, brute force over candidates, the limit."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from flmarket.privacy import PrivUnit, PrivUnitG, ProjUnit, Sphere
from flmarket.privacy.candidates import NormalLaw, SphereLaw, best_cap, coin, draw, half_cap
from flmarket.privacy.directional import delivered

LAWS = [NormalLaw(), *(SphereLaw(dimension) for dimension in (1, 2, 3, 11, 650))]


def one_cap(law, epsilon):
    return best_cap(law, np.array([epsilon]))


@pytest.mark.parametrize("dimension", [2, 3, 10, 650, 100_000])
@pytest.mark.parametrize("edge", [0.0, 0.3, 2.5])
def test_tails_of_the_sphere_against_quadrature(dimension, edge):
    """P(t ≥ γ), E[t; t ≥ γ] and E[t²; t ≥ γ] by integrating the density, with s the angle: t = cos s."""
    edge = min(edge / np.sqrt(dimension), 0.95)
    with mpmath.workdps(40):
        angle, power = mpmath.acos(mpmath.mpf(edge)), dimension - 2
        points = mpmath.linspace(max(0, angle - 20 / mpmath.sqrt(dimension)), angle, 17)
        total = mpmath.sqrt(mpmath.pi) * mpmath.gamma(mpmath.mpf(dimension - 1) / 2) / mpmath.gamma(dimension / 2)
        exact = [
            mpmath.quad(lambda s, k=k: mpmath.cos(s) ** k * mpmath.sin(s) ** power, points) / total for k in range(3)
        ]
    np.testing.assert_allclose(SphereLaw(dimension).beyond(np.array(edge)), [float(x) for x in exact], rtol=1e-9)


@pytest.mark.parametrize("edge", [0.0, 0.5, 3.0, 8.0])
def test_tails_of_the_normal_law_against_quadrature(edge):
    with mpmath.workdps(40):
        exact = [
            mpmath.quad(lambda t, k=k: t**k * mpmath.npdf(t), mpmath.linspace(edge, edge + 20, 9)) for k in range(3)
        ]
    np.testing.assert_allclose(NormalLaw().beyond(np.array(edge)), [float(x) for x in exact], rtol=1e-9)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0, 8.0])
def test_mean_and_square_against_candidates_that_are_sorted(law, epsilon, rng):
    """Draw M candidates' |t|, sort, weigh the first n by e^ε: the definition itself."""
    cap, trials = one_cap(law, epsilon), 300
    pairs, count = int(cap.pairs[0]), int(cap.count[0])
    size = np.sort(law.component(rng.random((trials, pairs)) / 2)[0], axis=1)[:, ::-1]
    signed = np.concatenate([size, -size[:, ::-1]], axis=1)
    weight = np.where(np.arange(2 * pairs) < count, np.exp(epsilon), 1.0)
    weight /= weight.sum()
    assert cap.outside[0] == pytest.approx(weight[count:].sum(), rel=1e-9)
    for power, stated in ((1, cap.mean[0]), (2, cap.square[0])):
        found = (signed**power) @ weight
        assert abs(found.mean() - stated) < 5 * found.std() / np.sqrt(trials) + 1e-9 * stated


def ideal(law, epsilon):
    """The largest mean of a cap {t ≥ γ} in the law itself, by a blind search over γ."""

    def mean(edge):
        tail, pull, _ = (float(part) for part in law.beyond(np.array(edge)))
        return np.expm1(epsilon) * pull / (1 + tail * np.expm1(epsilon))

    top = 6.0 if isinstance(law, NormalLaw) else 0.9999
    start = max(np.linspace(0, top, 400), key=mean)
    found = optimize.minimize_scalar(lambda edge: -mean(edge), bounds=(max(start - 0.02, 0), min(start + 0.02, top)))
    return max(-found.fun, mean(start))


@pytest.mark.parametrize("law", [law for law in LAWS if law != SphereLaw(1)], ids=str)
@pytest.mark.parametrize(("epsilon", "within"), [(0.1, 0.003), (1.0, 0.01), (2.0, 0.01), (4.0, 0.005), (8.0, 0.02)])
def test_few_candidates_are_nearly_as_good_as_all(law, epsilon, within):
    """1/m² is the noise: at most 1 % above that of the continuous mechanism up to ε = 2, 2 % up to 8."""
    loss = (ideal(law, epsilon) / one_cap(law, epsilon).mean[0]) ** 2 - 1
    assert -1e-9 < loss < within


@pytest.mark.parametrize("dimension", [1, 2, 3, 650, 1_000_000])
@pytest.mark.parametrize("kind", [Sphere, PrivUnit, PrivUnitG, ProjUnit])
def test_all_of_epsilon_is_spent_and_no_more(kind, dimension):
    """The odds of one of the first n against one of the others; larger ε are served as 64."""
    eps = np.geomspace(1e-3, 50, 60)
    cap = kind().plan(eps, dimension).cap
    ratio = np.log((1 - cap.outside) / cap.count) - np.log(cap.outside / (2 * cap.pairs - cap.count))
    np.testing.assert_allclose(ratio, eps, rtol=1e-9)
    assert (cap.mean > 0).all()
    assert np.isfinite(kind().noise_energy(eps, dimension)).all()
    assert delivered(np.array([1e3])) == pytest.approx(64.0)


@pytest.mark.parametrize("law", [law for law in LAWS if law != SphereLaw(1)], ids=str)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_simulation_draws_the_law_of_a_chosen_candidate(law, epsilon, rng):
    """Against candidates that are drawn, sorted and chosen from."""
    cap, draws = one_cap(law, epsilon), 600
    along, across = draw(law, cap.take(np.zeros(draws, dtype=np.intp)), rng)
    if isinstance(law, SphereLaw):
        np.testing.assert_allclose(along**2 + across**2, 1.0, rtol=1e-12)
    pairs, count = int(cap.pairs[0]), int(cap.count[0])
    size = np.sort(law.component(rng.random((draws, pairs)) / 2)[0], axis=1)[:, ::-1]
    signed = np.concatenate([size, -size[:, ::-1]], axis=1)
    place = np.where(
        rng.random(draws) < cap.outside, rng.integers(count, 2 * pairs, draws), rng.integers(count, size=draws)
    )
    chosen = signed[np.arange(draws), place]
    assert stats.ks_2samp(along, chosen).pvalue > 1e-7
    if epsilon > 0.5:
        assert stats.ks_2samp(-along, chosen).pvalue < 1e-7


def test_one_pair_is_the_half_sphere():
    for epsilon in (0.1, 1.0, 8.0):
        cap = half_cap(SphereLaw(10), np.array([epsilon]))
        assert cap.outside[0] == pytest.approx(1 / (1 + np.exp(epsilon)))
        assert (cap.pairs[0], cap.count[0]) == (1, 1)


class Fixed:
    """A generator whose numbers are given."""

    def __init__(self, whole, part):
        self.whole, self.part = whole, part

    def integers(self, high, size):
        return np.full(size, self.whole)

    def random(self, size):
        return np.full(size, self.part)


def test_coin_resolves_what_one_uniform_cannot():
    tiny = np.array([2.0**-72])
    assert coin(Fixed(0, 2.0**-22), tiny)
    assert not coin(Fixed(0, 2.0**-19), tiny)
    assert not coin(Fixed(1, 2.0**-52), tiny)


def test_coin_frequency(rng):
    for probability in (0.0, 1e-3, 0.3, 0.5, 0.99, 1.0):
        hits = coin(rng, np.full(100_000, probability)).mean()
        assert hits == pytest.approx(probability, abs=5 * np.sqrt(probability * (1 - probability) / 1e5))


@pytest.mark.parametrize("dimension", [1, 2, 10, 650])
def test_sphere_radius_is_the_published_one(dimension):
    """B = C·coth(ε/2)·√π·Γ((p+1)/2)/Γ(p/2), and 1/coth·B is the inverse of the mean |t| by quadrature."""
    eps = 0.7
    radius = float(np.sqrt(Sphere(clip=3.0).noise_energy(eps, dimension)))
    gamma = float(mpmath.sqrt(mpmath.pi) * mpmath.gamma(mpmath.mpf(dimension + 1) / 2) / mpmath.gamma(dimension / 2))
    assert radius == pytest.approx(3.0 / np.tanh(eps / 2) * gamma, rel=1e-10)
    if dimension > 2:
        total, first = (
            integrate.quad(lambda s, k=k: np.cos(s) ** k * np.sin(s) ** (dimension - 2), 0, np.pi / 2)[0]
            for k in (0, 1)
        )
        assert radius == pytest.approx(3.0 / np.tanh(eps / 2) * total / first, rel=1e-8)
