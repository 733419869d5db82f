"""Making updates private, against the same mechanism written the plain way: one owner at a time, in NumPy.

The peer is handed its parameters (edge, odds, scale), so that only drawing is timed. Ours is timed with everything:
checks, clipping, solving for the best cap of each ε.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv, ndtr, ndtri
from threadpoolctl import threadpool_limits

from benchmarks.measure import Row, best_of
from flmarket import privacy

PARAMETERS, OWNERS, PEER_OWNERS = 650, 4_000, 400
LARGE = 100_000
LOOP = "plain NumPy loop"

Vector = NDArray[np.float64]


def plain_laplace(vector: Vector, scale: float, rng: np.random.Generator) -> Vector:
    """Clip in L1, add noise."""
    clipped = vector / max(1.0, np.abs(vector).sum())
    return clipped + rng.laplace(scale=scale, size=vector.size)


def plain_sphere(vector: Vector, edge: float, outside: float, scale: float, rng: np.random.Generator) -> Vector:
    """Round onto the sphere, choose a half, draw a point of it."""
    del edge
    norm = np.linalg.norm(vector)
    unit = vector / norm
    if rng.random() > 0.5 + min(norm, 1.0) / 2:
        unit = -unit
    point = rng.standard_normal(vector.size)
    point /= np.linalg.norm(point)
    if (point @ unit > 0) == (rng.random() < outside):
        point = -point
    return point * scale


def plain_privunit(vector: Vector, edge: float, outside: float, scale: float, rng: np.random.Generator) -> Vector:
    """Choose cap or rest, draw the component along by inversion, then the rest."""
    unit, half = vector / np.linalg.norm(vector), (vector.size - 1) / 2
    at_edge = betainc(half, half, (1 + edge) / 2)
    rank = rng.random()
    rank = rank * at_edge if rng.random() < outside else at_edge + rank * (1 - at_edge)
    along = 2 * betaincinv(half, half, rank) - 1
    noise = rng.standard_normal(vector.size)
    noise -= (noise @ unit) * unit
    return scale * (along * unit + np.sqrt(1 - along**2) / np.linalg.norm(noise) * noise)


def plain_privunit_g(vector: Vector, edge: float, outside: float, scale: float, rng: np.random.Generator) -> Vector:
    """A truncated normal along, plain normals across."""
    unit = vector / np.linalg.norm(vector)
    at_edge, rank = ndtr(edge), rng.random()
    along = ndtri(rank * at_edge if rng.random() < outside else at_edge + rank * (1 - at_edge))
    noise = rng.standard_normal(vector.size)
    return scale * (along * unit + noise - (noise @ unit) * unit)


def plain_projunit(vector: Vector, edge: float, outside: float, scale: float, rng: np.random.Generator) -> Vector:
    """With the projection held in memory."""
    matrix = rng.standard_normal((16, vector.size))
    return matrix.T @ plain_privunit(matrix @ vector, edge, outside, scale, rng)


PEERS: dict[str, Callable[..., Vector]] = {
    "laplace-l1": plain_laplace,
    "sphere": plain_sphere,
    "privunit": plain_privunit,
    "privunit-g": plain_privunit_g,
    "projunit": plain_projunit,
}


def settings_of(mechanism: Any, epsilon: Vector, dimension: int) -> list[tuple[float, ...]]:
    """Edge, probability outside and scale for each ε; for Laplace noise the scale alone."""
    if mechanism.name == "laplace-l1":
        return [(2.0 / eps,) for eps in epsilon.tolist()]
    cap = mechanism.plan(epsilon, dimension).cap
    # of the continuous mechanism, whose best edge is its mean
    return list(zip(cap.mean.tolist(), cap.outside.tolist(), (1 / cap.mean).tolist(), strict=True))


def run() -> Iterator[Row]:
    """All rows on one thread. Limited here too: a limit set before NumPy is imported does not reach its BLAS."""
    with threadpool_limits(1):
        yield from rows()


def rows() -> Iterator[Row]:
    """650 parameters for many owners with ε of their own, then 100,000 parameters for one owner."""
    rng = np.random.default_rng(0)
    vectors, epsilon = rng.standard_normal((OWNERS, PARAMETERS)), rng.uniform(0.5, 2.0, OWNERS)
    some = vectors[:PEER_OWNERS]
    for name, plain in PEERS.items():
        mechanism = privacy.get(name)
        settings = settings_of(mechanism, epsilon[:PEER_OWNERS], PARAMETERS)
        pairs = list(zip(some, settings, strict=True))
        ours = best_of(lambda m=mechanism: m.privatize(vectors, epsilon, rng)) / OWNERS
        peer = best_of(lambda f=plain, p=pairs: [f(vector, *one, rng) for vector, one in p]) / PEER_OWNERS
        yield Row(f"{name}, 650 parameters", "vector", ours, LOOP, peer)
    large = rng.standard_normal(LARGE)
    for name, plain in PEERS.items():
        mechanism = privacy.get(name)
        (one,) = settings_of(mechanism, np.ones(1), LARGE)
        ours = best_of(lambda m=mechanism: m.privatize(large, 1.0, rng), 5)
        yield Row(f"{name}, 100,000 parameters", "owner", ours, LOOP, best_of(lambda f=plain, s=one: f(large, *s, rng)))
    projunit = privacy.ProjUnit()
    sketch = projunit.encode(large, 1.0, rng)
    peer = best_of(lambda: plain_projunit(large, 0.3, 0.5, 1.0, rng))
    yield Row(
        "projunit encode, 100,000 parameters", "owner", best_of(lambda: projunit.encode(large, 1.0, rng)), LOOP, peer
    )
    yield Row(
        "projunit decode, 100,000 parameters", "owner", best_of(lambda: projunit.decode(sketch, LARGE)), "–", None
    )
    source, laplace = privacy.SecureNoise(), privacy.get("laplace-l1")
    peer = best_of(lambda: laplace.privatize(some[0], 1.0, source))
    for name in ("sphere", "privunit", "privunit-g", "projunit"):
        mechanism = privacy.get(name)
        ours = best_of(lambda m=mechanism: m.privatize(some[0], 1.0, source), 20)
        yield Row(f"{name}, 650 parameters, real release", "release", ours, "laplace-l1 through OpenDP", peer)
        ours = best_of(lambda m=mechanism: m.privatize(large, 1.0, source), 5)
        yield Row(f"{name}, 100,000 parameters, real release", "release", ours, "–", None)
