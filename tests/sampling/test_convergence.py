import numpy as np
import pytest

from flmarket.errors import InvalidInput
from flmarket.sampling import FedAvgConstants, convergence_bound


def test_the_bound_by_hand():
    assert convergence_bound([0.5, 1.0], [1.0, 2.0], beta=3.0, rounds=10) == pytest.approx(0.7)
    assert convergence_bound([0.5, 0.0], 1.0, beta=3.0, rounds=10) == np.inf


def test_the_constants_by_hand():
    """L = 2, μ = 1, E = 4, two clients of G = 1, 3 and σ = 0.5, Γ = 0.1, distance 2."""
    problem = FedAvgConstants(
        smoothness=2.0,
        strong_convexity=1.0,
        local_steps=4,
        gradient_norms=[1.0, 3.0],
        gradient_deviations=0.5,
        heterogeneity=0.1,
        initial_distance=2.0,
    )
    np.testing.assert_allclose(problem.scale, [16.0, 144.0])
    d = 2 * 0.25**2 + 8 * 16 * 5
    assert problem.beta == pytest.approx(d + 12 * 4 / 4 * 0.1 + 4 * 4 / 4 * 4)
    assert problem.learning_rate(0) == pytest.approx(2 / 16)
    assert problem.learning_rate(4) == pytest.approx(2 / 20)
    assert problem.bound([0.5, 1.0], rounds=7) == pytest.approx((32 + 144 + problem.beta) / 7)


def test_the_bound_holds_on_a_quadratic(rng):
    """FedAvg with independent sampling on ½‖w − a_n‖² stays below the bound."""
    n, steps, rounds = 8, 3, 40
    targets = rng.normal(size=(n, 2))
    best = targets.mean(axis=0)
    start = best + 2.0
    problem = FedAvgConstants(
        smoothness=1.0,
        strong_convexity=1.0,
        local_steps=steps,
        gradient_norms=np.full(n, np.linalg.norm(targets - start, axis=1).max() + 4.0),
        heterogeneity=0.5 * float(np.mean(np.sum((targets - best) ** 2, axis=1))),
        initial_distance=float(np.linalg.norm(start - best)),
    )
    q = rng.uniform(0.3, 1.0, n)
    gaps = []
    for _ in range(200):
        w = start.copy()
        for r in range(rounds):
            shrink = (1 - problem.learning_rate(r)) ** steps
            updates = (1 - shrink) * (targets - w)
            w = w + ((rng.random(n) < q) / q) @ updates / n
        gaps.append(0.5 * np.sum((w - best) ** 2))
    assert np.mean(gaps) <= problem.bound(q, rounds)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([1.5], 1.0, 0.0, 1), "participation"),
        (([0.5], -1.0, 0.0, 1), "scale"),
        (([0.5], 1.0, -1.0, 1), "beta"),
        (([0.5], 1.0, 0.0, 0), "rounds"),
    ],
)
def test_bad_input(arguments, field):
    q, scale, beta, rounds = arguments
    with pytest.raises(InvalidInput) as error:
        convergence_bound(q, scale, beta=beta, rounds=rounds)
    assert error.value.field == field


def test_bad_constants():
    with pytest.raises(InvalidInput, match="smoothness"):
        FedAvgConstants(smoothness=0.5, strong_convexity=1.0, local_steps=1, gradient_norms=[1.0])
