"""Rules to compare with: the plain average, and the robust statistics that federated learning usually reaches for.

| rule | tolerates f of m | source |
| --- | --- | --- |
| `WeightedAverage` | none | McMahan et al., AISTATS 2017 |
| `CoordinateMedian` | f < m/2, coordinate by coordinate | Yin et al., ICML 2018 |
| `TrimmedMean(f)` | f < m/2 | Yin et al., ICML 2018 |
| `Krum(f)`, `MultiKrum(f)` | 2f + 2 < m | Blanchard et al., NeurIPS 2017 |
| `GeometricMedian` | half of the total *size* | Pillutla et al., IEEE TSP 2022 |

None looks at a validation set. Median, trimmed mean and Krum count heads: a client's claimed data size plays no part,
because it would be a lever for whoever lies about it. Flower has three of these as strategies over its own messages, at
the price of its whole runtime; here they are a few lines of NumPy, and the tests compare them with Flower's.

What would break them: honest clients whose data differ. All of these take what is far from the others for malicious.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import pdist, squareform

from flmarket.aggregation.robust.base import Combined, Score, checked_uploads
from flmarket.aggregation.rules import normalised, shares_and_winners
from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput

__all__ = ["ROBUST", "CoordinateMedian", "GeometricMedian", "Krum", "MultiKrum", "TrimmedMean", "WeightedAverage"]


class _Statistic:
    """Rules that use neither a score nor randomness."""

    least: ClassVar[int] = 1
    by_size: ClassVar[bool] = False

    def weights(self, epsilon: ArrayLike, data_size: ArrayLike) -> FloatArray:
        """How much each counts before anything is seen: all who release equally, or by size where sizes matter.

        As `Aggregation.weights`, for markets that plan ahead; the error bound of these weights is that of an average.
        """
        shares, eps = shares_and_winners(epsilon, data_size)
        return normalised(np.where((eps > 0) & (shares > 0), shares if self.by_size else 1.0, 0.0), shares)

    def combine(
        self,
        vectors: ArrayLike,
        data_size: ArrayLike,
        *,
        score: Score | None = None,
        rng: np.random.Generator | None = None,
    ) -> Combined:
        """See `RobustAggregation.combine`; `score` and `rng` play no part."""
        del score, rng
        uploads, size = checked_uploads(vectors, data_size, least=self.least)
        average, counted = self._statistic(uploads, size)
        return Combined(average, float(size[counted > 0].sum()), counted)

    def _statistic(self, uploads: FloatArray, size: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The result and everybody's share."""
        raise NotImplementedError


@dataclass(frozen=True)
class WeightedAverage(_Statistic):
    """Σ dθ / Σ d: what one adversary can move anywhere."""

    by_size: ClassVar[bool] = True
    name: str = "average"

    def _statistic(self, uploads: FloatArray, size: FloatArray) -> tuple[FloatArray, FloatArray]:
        shares = size / size.sum()
        return shares @ uploads, shares


@dataclass(frozen=True)
class CoordinateMedian(_Statistic):
    """The median of each coordinate."""

    name: str = "median"

    def _statistic(self, uploads: FloatArray, size: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.median(uploads, axis=0), np.full(len(size), 1.0 / len(size))


@dataclass(frozen=True)
class _Against(_Statistic):
    """Rules that are told how many adversaries to expect."""

    adversaries: int = 1

    def __post_init__(self) -> None:
        if type(self.adversaries) is not int or self.adversaries < 0:
            raise InvalidInput("adversaries", self.adversaries, "a whole number of at least 0")


@dataclass(frozen=True)
class TrimmedMean(_Against):
    """The mean of each coordinate without its `adversaries` smallest and largest values."""

    name: str = "trimmed-mean"

    def _statistic(self, uploads: FloatArray, size: FloatArray) -> tuple[FloatArray, FloatArray]:
        m, cut = len(uploads), self.adversaries
        if m <= 2 * cut:
            raise InvalidInput("adversaries", cut, f"fewer than half of the {m} clients")
        return np.sort(uploads, axis=0)[cut : m - cut].mean(axis=0), np.full(m, 1.0 / m)


@dataclass(frozen=True)
class MultiKrum(_Against):
    """The mean of the `keep` vectors of least Krum score (default m − f): the sum of squared distances to the m − f − 2
    nearest others."""

    keep: int | None = None
    name: str = "multi-krum"

    def _statistic(self, uploads: FloatArray, size: FloatArray) -> tuple[FloatArray, FloatArray]:
        m, f = len(uploads), self.adversaries
        if m < 2 * f + 3:
            raise InvalidInput("adversaries", f, f"2f + 3 ≤ m, and there are {m} clients")
        keep = m - f if self.keep is None else self.keep
        if not 1 <= keep <= m:
            raise InvalidInput("keep", keep, f"from 1 to {m}")
        # distances relative to the largest upload, so that squares cannot overflow
        scale = float(np.abs(uploads).max()) or 1.0
        distance = np.sort(squareform(pdist(uploads / scale, "sqeuclidean")), axis=1)
        best = np.argsort(distance[:, 1 : m - f - 1].sum(axis=1), kind="stable")[:keep]
        shares = np.zeros(m)
        shares[best] = 1.0 / keep
        return uploads[best].mean(axis=0), shares


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one vector of least Krum score."""

    keep: int | None = 1
    name: str = "krum"


@dataclass(frozen=True)
class GeometricMedian(_Statistic):
    """The point of least size-weighted sum of distances, by Weiszfeld's iteration with Vardi and Zhang's step.

    Their step (PNAS 2000) is what gets the iteration off a point that is itself an upload, where the plain one stops.
    """

    by_size: ClassVar[bool] = True
    tolerance: float = 1e-10
    steps: int = 1000
    name: str = "geometric-median"

    def _statistic(self, uploads: FloatArray, size: FloatArray) -> tuple[FloatArray, FloatArray]:
        # the coordinate median starts near the answer even if half of the uploads are at infinity
        here, weights = np.median(uploads, axis=0), size / size.sum()
        scale = float(np.median(np.linalg.norm(uploads - here, axis=1))) or float(np.abs(uploads).max()) or 1.0
        pull = weights
        for _ in range(self.steps):
            moved, pull = _towards_median(uploads, weights, here, scale)
            here = here + moved
            if np.linalg.norm(moved) <= self.tolerance * scale:
                break
        # towards an upload that is the median the steps get ever shorter: look whether it is
        nearest = uploads[np.argmin(np.linalg.norm(uploads - here, axis=1))]
        moved, there = _towards_median(uploads, weights, nearest, scale)
        if not moved.any():
            here, pull = nearest, there
        return here, pull / pull.sum() if pull.any() else weights


def _towards_median(
    uploads: FloatArray, weights: FloatArray, here: FloatArray, scale: float
) -> tuple[FloatArray, FloatArray]:
    """One step of the iteration, and each upload's share in it: 0 if it is where we stand."""
    distance = np.linalg.norm(uploads - here, axis=1)
    at = distance <= 1e-14 * scale
    pull = np.divide(weights, distance, out=np.zeros_like(weights), where=~at)
    if not pull.any():
        return np.zeros_like(here), pull
    held, force = float(weights[at].sum()), float(np.linalg.norm(pull @ (uploads - here)))
    stay = held / force if held < force else 1.0  # 1: the others pull no more than what we stand on holds
    return (1.0 - stay) * (pull @ uploads / pull.sum() - here), pull


ROBUST = (CoordinateMedian, TrimmedMean, Krum, MultiKrum, GeometricMedian)
"""Those that tolerate adversaries and need nothing but the uploads."""
