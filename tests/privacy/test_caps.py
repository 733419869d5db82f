"""The cap mechanism's numbers against independent ones: 40-digit quadrature, brute-force search, the law itself."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from flmarket.privacy import PrivUnit, PrivUnitG, ProjUnit, SimulationNoise, Sphere
from flmarket.privacy.caps import NormalLaw, SphereLaw, best_cap, cap_at, coin, draw

GRID = [(d, eps) for d in (2, 3, 10, 100, 650) for eps in (0.1, 0.5, 1.0, 2.0, 8.0)]


def one_cap(law, epsilon):
    return best_cap(law, np.array([epsilon]))


def exact_sphere(dimension: int, edge: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """P(t ≥ edge) and E[t; t ≥ edge] by integrating the density, with s the angle: t = cos s."""
    with mpmath.workdps(40):
        angle, power = mpmath.acos(mpmath.mpf(edge)), dimension - 2
        points = mpmath.linspace(0, angle, 9)
        total = mpmath.sqrt(mpmath.pi) * mpmath.gamma(mpmath.mpf(dimension - 1) / 2) / mpmath.gamma(dimension / 2)
        tail = mpmath.quad(lambda s: mpmath.sin(s) ** power, points) / total
        return tail, mpmath.quad(lambda s: mpmath.cos(s) * mpmath.sin(s) ** power, points) / total


@pytest.mark.parametrize(("dimension", "epsilon"), [*GRID, (2, 30.0), (3, 50.0), (650, 50.0), (10_000, 1.0)])
def test_sphere_cap_against_quadrature(dimension, epsilon):
    """Tail, mean, probability and the density ratio itself: exactly e^ε, and neither more nor less."""
    cap = one_cap(SphereLaw(dimension), epsilon)
    tail, pull = exact_sphere(dimension, float(cap.edge[0]))
    outside = mpmath.mpf(float(cap.outside[0]))
    assert float(cap.tail[0]) == pytest.approx(float(tail), rel=1e-9)
    ratio = mpmath.log((1 - outside) / outside * (1 - tail) / tail)
    assert float(ratio) == pytest.approx(epsilon, rel=1e-8)
    mean = (1 - outside) * pull / tail - outside * pull / (1 - tail)
    assert float(cap.mean[0]) == pytest.approx(float(mean), rel=1e-8)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 8.0, 50.0])
def test_normal_cap_against_mpmath(epsilon):
    cap = one_cap(NormalLaw(), epsilon)
    with mpmath.workdps(40):
        tail, pull = mpmath.ncdf(-mpmath.mpf(float(cap.edge[0]))), mpmath.npdf(mpmath.mpf(float(cap.edge[0])))
        outside = mpmath.mpf(float(cap.outside[0]))
        assert float(mpmath.log((1 - outside) / outside * (1 - tail) / tail)) == pytest.approx(epsilon, rel=1e-9)
        assert float(cap.mean[0]) == pytest.approx(float((1 - outside) * pull / tail - outside * pull / (1 - tail)))


@pytest.mark.parametrize(("dimension", "epsilon"), GRID)
def test_no_other_edge_is_better(dimension, epsilon):
    """The fixed point γ = m is the optimum that a blind search over the edge finds."""
    eps = np.array([epsilon])

    def loss(edge: float) -> float:
        return -float(cap_at(SphereLaw(dimension), eps, np.array([edge])).mean[0])

    grid = np.linspace(0, 0.999, 400)
    start = grid[np.argmin([loss(edge) for edge in grid])]
    found = optimize.minimize_scalar(loss, bounds=(max(start - 0.01, 0), min(start + 0.01, 0.9999)), method="bounded")
    cap = one_cap(SphereLaw(dimension), epsilon)
    assert -found.fun <= cap.mean[0] * (1 + 1e-9)
    assert cap.edge[0] == pytest.approx(cap.mean[0], rel=1e-9)


@pytest.mark.parametrize("dimension", [1, 2, 3, 650, 1_000_000])
@pytest.mark.parametrize("kind", [Sphere, PrivUnit, PrivUnitG, ProjUnit])
def test_the_split_never_passes_epsilon(kind, dimension):
    """ε₀ + ε₁ ≤ ε from 0.001 to 50, and it is all used; larger ε are served as 64."""
    eps = np.geomspace(1e-3, 50, 60)
    plan = kind().plan(eps, dimension)
    first, second = plan.cap.split
    np.testing.assert_allclose(first + second, eps, rtol=1e-9)
    assert (first + second <= eps + 2e-14).all()  # that of the allowance, and rounding of this very sum
    assert (plan.cap.mean > 0).all()
    assert np.isfinite(kind().noise_energy(eps, dimension)).all()
    beyond = kind().plan(np.array([1e3]), dimension).cap.split
    assert beyond[0] + beyond[1] == pytest.approx(64.0)


def test_a_wrong_split_is_seen():
    """Spending ε on the coin and the cap's ε₁ on top is what the split check is for."""
    cap = one_cap(SphereLaw(10), 1.0)
    wrong = type(cap)(cap.edge, cap.tail, 1 / (1 + np.exp([1.0])), cap.mean)
    assert sum(wrong.split)[0] > 1.2


def mixture_cdf(law, cap, t):
    """The law of the component along, from its definition: e^ε times the base density beyond the edge."""
    inside, outside = (1 - cap.outside[0]) / cap.tail[0], cap.outside[0] / (1 - cap.tail[0])
    low = law.cdf(np.minimum(t, cap.edge[0])) * outside
    return low + np.maximum(law.cdf(t) - law.cdf(cap.edge[0]), 0) * inside


@pytest.mark.parametrize("dimension", [2, 3, 10, 650, 100_000])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_sampler_draws_the_law_of_the_sphere(dimension, epsilon, rng):
    cap = one_cap(SphereLaw(dimension), epsilon)
    many = cap.take(np.zeros(50_000, dtype=np.intp))
    along, across = draw(SphereLaw(dimension), many, SimulationNoise(rng))
    np.testing.assert_allclose(along**2 + across**2, 1.0, rtol=1e-12)
    base = stats.beta((dimension - 1) / 2, (dimension - 1) / 2, loc=-1, scale=2)
    assert stats.kstest(along, lambda t: mixture_cdf(base, cap, t)).pvalue > 1e-7
    assert stats.kstest(-along, lambda t: mixture_cdf(base, cap, t)).pvalue < 1e-7


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_sampler_draws_the_normal_law(epsilon, rng):
    cap = one_cap(NormalLaw(), epsilon)
    along, _ = draw(NormalLaw(), cap.take(np.zeros(50_000, dtype=np.intp)), SimulationNoise(rng))
    assert stats.kstest(along, lambda t: mixture_cdf(stats.norm, cap, t)).pvalue > 1e-7
    # the variance along is 1 at the best edge: the noise is white
    assert along.var() == pytest.approx(1.0, abs=5 * np.sqrt(2 / 50_000) * 1.5)


class Fixed:
    """A source whose uniforms are given."""

    def __init__(self, *values):
        self.values = list(values)

    def uniform(self, shape):
        return np.full(shape, self.values.pop(0))


def test_coin_resolves_what_one_uniform_cannot():
    least = 2.0**-53  # the smallest number that `uniform` returns
    tiny = np.array([2.0**-72])
    assert coin(Fixed(least, 2.0**-22), tiny)
    assert not coin(Fixed(least, 2.0**-19), tiny)
    assert not coin(Fixed(3 * least, 2.0**-52), tiny)


def test_coin_frequency(rng):
    for probability in (0.0, 1e-3, 0.3, 0.5, 0.99, 1.0):
        hits = coin(SimulationNoise(rng), np.full(100_000, probability)).mean()
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
