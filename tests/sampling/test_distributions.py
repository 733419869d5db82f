"""Densities, distribution functions, inverses and virtual costs agree with each other and with quadrature."""

import numpy as np
import pytest
from scipy.integrate import quad

from flmarket.errors import InvalidInput
from flmarket.sampling import Discrete, Empirical, Histogram, TruncatedExponential, Uniform

CONTINUOUS = [Uniform(1, 4), TruncatedExponential(0.5, 4, 0.7), Histogram([1, 2, 3, 4.5], [0.1, 0.7, 0.2])]


@pytest.mark.parametrize("costs", CONTINUOUS)
def test_continuous_functions_agree(costs, rng):
    for c in np.linspace(costs.minimum, costs.maximum, 9):
        inside = [k for k in costs.knots if costs.minimum < k < c]
        mass = quad(costs.pdf, costs.minimum, c, points=inside or None)[0]
        assert float(costs.cdf(c)) == pytest.approx(mass, abs=1e-9)
        assert float(costs.ppf(costs.cdf(c))) == pytest.approx(c)
    inner = costs.knots[1:-1]
    mean = quad(lambda c: c * costs.pdf(c), costs.minimum, costs.maximum, points=inner if inner.size else None)[0]
    assert costs.mean == pytest.approx(mean)
    draws = costs.sample(rng, 100_000)
    assert draws.mean() == pytest.approx(mean, rel=0.01)
    assert draws.min() >= costs.minimum
    assert draws.max() <= costs.maximum
    outside = [costs.minimum - 0.1, costs.maximum + 0.1]
    np.testing.assert_array_equal(costs.pdf(outside), [0, 0])
    np.testing.assert_array_equal(costs.cdf(outside), [0, 1])


def test_virtual_costs_by_formula():
    c = np.linspace(1, 4, 7)
    np.testing.assert_allclose(Uniform(1, 4).virtual_cost(c), 2 * c - 1)
    exponential = TruncatedExponential(1, 4, 0.7)
    np.testing.assert_allclose(exponential.virtual_cost(c), c + 0.7 * np.expm1((c - 1) / 0.7))


def test_an_irregular_density_is_ironed():
    """U-shaped hull: the ironed virtual cost never falls, and its mean over the pooled stretch is the raw one's."""
    costs = Histogram([1, 2, 3, 4], [0.1, 0.8, 0.1])
    c = np.linspace(1.0005, 3.9995, 3000)
    raw, ironed = costs.virtual_cost(c, ironed=False), costs.virtual_cost(c)
    assert np.diff(raw).min() < -0.5
    assert np.diff(ironed).min() >= 0
    weight = costs.pdf(c)
    pooled = np.abs(raw - ironed) > 1e-2
    assert pooled.any()
    assert (weight * raw).sum() == pytest.approx((weight * ironed).sum(), rel=1e-3)


def test_an_empty_bin_is_skipped():
    costs = Histogram([1, 2, 3, 4], [0.5, 0.0, 0.5])
    np.testing.assert_allclose(costs.ppf([0.25, 0.75]), [1.5, 3.5])
    ironed = costs.virtual_cost(np.linspace(1, 4, 100))
    assert np.isfinite(ironed).all()
    assert np.diff(ironed).min() >= -1e-12


@pytest.mark.parametrize("mean", [1.2, 2.0, 4.0, 5.4])
def test_an_exponential_of_a_given_mean(mean):
    assert TruncatedExponential.of_mean(mean, 1, 10).mean == pytest.approx(mean)


def test_discrete_functions(rng):
    costs = Discrete([1, 2, 4], [0.2, 0.5, 0.3])
    np.testing.assert_allclose(costs.pdf([1, 1.5, 4]), [0.2, 0, 0.3])
    np.testing.assert_allclose(costs.cdf([0.5, 1, 3, 4]), [0, 0.2, 0.7, 1])
    np.testing.assert_allclose(costs.ppf([0.1, 0.2, 0.21, 1.0]), [1, 1, 2, 4])
    draws = costs.sample(rng, 50_000)
    np.testing.assert_allclose([(draws == c).mean() for c in costs.support], costs.probabilities, atol=0.01)
    assert costs.mean == pytest.approx(2.4)
    # φ₁ = 1, φ₂ = 2 + 1·0.2/0.5, φ₃ = 4 + 2·0.7/0.3; unlisted costs count as the next listed one
    np.testing.assert_allclose(costs.virtual_cost([1, 1.5, 4]), [1, 2.4, 4 + 1.4 / 0.3])


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Uniform(0, 1), "minimum"),
        (lambda: Uniform(2, 1), "maximum"),
        (lambda: Uniform(1, np.inf), "maximum"),
        (lambda: TruncatedExponential(1, 2, 0), "scale"),
        (lambda: TruncatedExponential.of_mean(1.6, 1, 2), "mean"),
        (lambda: Histogram([1], []), "edges"),
        (lambda: Histogram([1, 2], [0.5, 0.5]), "probabilities"),
        (lambda: Discrete([1, 2], [0.9, 0.2]), "probabilities"),
        (lambda: Empirical([]), "samples"),
        (lambda: Empirical([0.0, 1.0]), "support"),
        (lambda: Discrete([1, 2], [0.5, 0.5]).virtual_cost(3), "cost"),
    ],
)
def test_bad_input(make, field):
    with pytest.raises(InvalidInput) as error:
        make()
    assert error.value.field == field
