"""Robust aggregation: one vector from many clients, a few of whom may lie. `get(name, ...)` builds a rule.

JDP's choice among groups (`leave-one-out`, `leave-k-out`, `partition`) takes `epsilon`, `validation` and `sensitivity`;
its peers take `adversaries` where they need to know how many to expect, and nothing otherwise.

A rule sees vectors, the clients' data sizes and, if it wants, a score: how good a candidate is on records that the
server holds. It never sees who is honest. Rules are immutable; all randomness comes from the generator given.

What would break all of them: one client who turns up under many names. Each rule bounds the influence of a *number* of
clients, and counting heads is meaningless where heads are free.

Rules to compare with: the plain average, and the robust statistics that federated learning usually reaches for.

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

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import pdist, squareform
from scipy.special import log_softmax

from flmarket.aggregation.rules import normalised, shares_and_winners
from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy import ExponentialRelease, NoiseSource, exponential
from flmarket.privacy.events import checked_number, checked_whole
from flmarket.registry import Registry

BoolArray = NDArray[np.bool_]
Rng = np.random.Generator | None
Score = Callable[[FloatArray], FloatArray]
"""Candidates (k, p) in, a number from 0 to 1 for each out: accuracy on the server's validation records."""


@dataclass(frozen=True, eq=False)
class Choice:
    """How an exponential mechanism chose: every candidate's members (k, m), score and probability, and which won."""

    index: int
    probabilities: FloatArray
    scores: FloatArray
    members: BoolArray


@dataclass(frozen=True, eq=False)
class Combined:
    """The result of a rule. `total_size` is Σd of the clients in it; (average·total_size, total_size) is M4's pair.

    `shares` (m,) add up to 1 and say how much each client counts. Rules that work coordinate by coordinate have no
    such numbers; theirs are the shares of a client chosen at random.
    """

    average: FloatArray
    total_size: float
    shares: FloatArray
    choice: Choice | None = None


@runtime_checkable
class RobustAggregation(Protocol):
    """One vector from many, some of which may be malicious."""

    @property
    def name(self) -> str:
        """The registered name."""

    def combine(
        self, vectors: ArrayLike, data_size: ArrayLike, *, score: Score | None = None, rng: Rng = None
    ) -> Combined:
        """Combine vectors (m, p) of clients with data sizes (m,)."""


def mix(combined: Combined, own: ArrayLike, data_size: ArrayLike) -> FloatArray:
    """M5: (agg + d·θ)/(sum + d) for each client, with her own true parameters θ (m, p) and size d (m,).

    The result is hers alone. By the billboard lemma all clients' results together are jointly private because each
    uses the public pair and her own data; one that is published is not private at all.
    """
    mine, size = checked_uploads(own, data_size)
    share = (size / (combined.total_size + size))[:, None]
    return np.asarray(combined.average + share * (mine - combined.average))


def checked_uploads(vectors: ArrayLike, data_size: ArrayLike, *, least: int = 1) -> tuple[FloatArray, FloatArray]:
    """Finite vectors (m, p) of at least `least` clients and a positive size for each, or a typed error."""
    array = np.asarray(vectors, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] < 1 or len(array) < least:
        raise InvalidInput("vectors", array.shape, f"(m, p): vectors of {least} clients or more")
    if not np.isfinite(array).all():
        raise InvalidInput("vectors", array[~np.isfinite(array)][0], "finite coordinates")
    size = checked_array("data_size", data_size)
    if size.shape != (len(array),) or not (size > 0).all():
        raise InvalidInput("data_size", data_size, f"a size above 0 for each of {len(array)} clients")
    return array, size


_ENUMERATE_BELOW = 5_000


@runtime_checkable
class Grouping(Protocol):
    """Groups of m clients, and every group's sum of vectors.

    Which groups of clients the server averages before it chooses one of them (JDP Alg. 4 and Figure 5).

    | grouping | groups | keeps every adversary out of some group |
    | --- | --- | --- |
    | `LeaveOneOut` | m, each without one client | of one adversary, always |
    | `LeaveKOut(k, count)` | `count` random ones, each without k clients | of f ≤ k, as likely as `coverage` says |
    | `Partition(size)` | about m/size, every client in one | of f < number of groups, always; but each group is small |

    Leave-one-out sums take O(m·p) by running sums from both ends. The obvious total minus own would cost the same and
    is not safe here: an upload of 1e20 swallows the digits of all others, so exactly the group without the adversary
    would be destroyed by her (a test shows it).
    """

    def members(self, clients: int, rng: Rng) -> BoolArray:
        """Who is in which group, shape (groups, clients); no group is empty."""

    def sums(self, weighted: FloatArray, members: BoolArray) -> FloatArray:
        """Sums (groups, p) over each group of vectors (clients, p) that are already multiplied by their sizes."""
        return np.asarray(members.astype(np.float64) @ weighted)


@dataclass(frozen=True)
class LeaveOneOut(Grouping):
    """Group i is everybody but client i."""

    def members(self, clients: int, rng: Rng) -> BoolArray:
        """Deterministic."""
        del rng
        if clients < 2:
            raise InvalidInput("clients", clients, "two or more, so that one can be left out")
        return ~np.eye(clients, dtype=bool)

    def sums(self, weighted: FloatArray, members: BoolArray) -> FloatArray:
        """Sum before i plus sum after i."""
        del members
        before, after = np.zeros_like(weighted), np.zeros_like(weighted)
        np.cumsum(weighted[:-1], axis=0, out=before[1:])
        np.cumsum(weighted[:0:-1], axis=0, out=after[-2::-1])
        before += after
        return before


@dataclass(frozen=True)
class LeaveKOut(Grouping):
    """`count` different random groups, each without k clients; all of them if there are no more than `count`."""

    k: int = 2
    count: int = 40

    def __post_init__(self) -> None:
        checked_whole("k", self.k, 1)
        checked_whole("count", self.count, 1)

    def members(self, clients: int, rng: Rng) -> BoolArray:
        """Fresh groups each time."""
        if clients <= self.k:
            raise InvalidInput("clients", clients, f"more than the {self.k} that are left out")
        possible = comb(clients, self.k)
        if possible <= self.count:
            return _all_without(clients, self.k)
        draw = _generator(rng)
        if possible <= _ENUMERATE_BELOW:  # few: sampling until enough differ could take long
            return _all_without(clients, self.k)[np.sort(draw.choice(possible, self.count, replace=False))]
        seen: dict[bytes, BoolArray] = {}
        while len(seen) < self.count:
            group = np.ones(clients, dtype=bool)
            group[draw.choice(clients, self.k, replace=False)] = False
            seen[group.tobytes()] = group
        return np.array(list(seen.values()))


@dataclass(frozen=True)
class Partition(Grouping):
    """Clients dealt at random into groups of `size`; the last group also takes what is left over."""

    size: int = 5

    def __post_init__(self) -> None:
        checked_whole("size", self.size, 1)

    def members(self, clients: int, rng: Rng) -> BoolArray:
        """Every client in exactly one group."""
        if clients < self.size:
            raise InvalidInput("clients", clients, f"at least the {self.size} of a group")
        groups = clients // self.size
        place = np.minimum(np.arange(clients) // self.size, groups - 1)
        made = np.zeros((groups, clients), dtype=bool)
        made[place, _generator(rng).permutation(clients)] = True
        return made


def coverage(clients: int, adversaries: int, grouping: LeaveKOut) -> float:
    """How likely some group is free of all adversaries: 1 − (1 − C(m−f, k−f)/C(m, k))^count, groups as if independent.

    The groups are drawn without repetition, so the true probability is at least this.
    """
    if adversaries > grouping.k:
        return 0.0
    clean = comb(clients - adversaries, grouping.k - adversaries) / comb(clients, grouping.k)
    return 1.0 - (1.0 - clean) ** min(grouping.count, comb(clients, grouping.k))


def _all_without(clients: int, k: int) -> BoolArray:
    absent = np.array(list(combinations(range(clients), k)), dtype=np.intp)
    made = np.ones((len(absent), clients), dtype=bool)
    made[np.arange(len(absent))[:, None], absent] = False
    return made


def _generator(rng: Rng) -> np.random.Generator:
    if rng is None:
        raise InvalidInput("rng", rng, "a numpy.random.Generator, to draw groups")
    return rng


Sensitivity = Literal["record", "client", "paper"]
SENSITIVITIES: tuple[Sensitivity, ...] = ("record", "client", "paper")


@dataclass(frozen=True, kw_only=True)
class ExponentialChoice:
    """The exponential mechanism over groups; `validation` is |V|, how many records the score is a mean over.

    M4: average every group, score it on the server's validation records, choose one by the exponential mechanism.

    Group j is chosen with probability ∝ exp(ε·y_j/(2Δ)), y_j its accuracy in [0, 1] (JDP Alg. 4). What Δ must be
    depends on whose change is to be hidden, and three are offered:

    | `sensitivity` | Δ | one choice is ε-DP for |
    | --- | --- | --- |
    | `record` | 1/&#124;V&#124; | one of the server's &#124;V&#124; validation records |
    | `client` | 1 | one client's whole upload (the choice of group, not the average that is published) |
    | `paper` | 1/(m−1) | neither: ε(m−1) for an upload, ε(m−1)/&#124;V&#124; for a record (docs/errata.md E10) |

    `record` is the default. The uploads are already private when they arrive (M3), so whatever the server does with
    them costs clients nothing more; what the choice does use in the clear is V. It also happens to be the robust one:
    at m = 20 and |V| = 1000 a lead of one point of accuracy counts e^{5ε}, under `client` e^{0.005ε}.

    What would break it: validation records that do not look like the test (then the best score is the wrong goal), or
    more adversaries than the grouping leaves out. And ε limits no adversary: as ε → 0 the choice is uniform, and under
    leave-one-out she is in with probability (m−1)/m. It is a *large* ε/Δ that keeps her out.
    """

    epsilon: float
    validation: int
    sensitivity: Sensitivity = "record"
    grouping: Grouping = field(default_factory=LeaveOneOut)
    name: str = "leave-one-out"

    def __post_init__(self) -> None:
        checked_number("epsilon", self.epsilon, 1e-30, 1e30)
        checked_whole("validation", self.validation, 1)
        if self.sensitivity not in SENSITIVITIES:
            raise InvalidInput("sensitivity", self.sensitivity, f"one of {', '.join(SENSITIVITIES)}")

    def delta_y(self, clients: int) -> float:
        """Δ, with m clients taking part."""
        if self.sensitivity == "paper" and clients < 2:
            raise InvalidInput("clients", clients, "two or more: the paper's sensitivity is 1/(m−1)")
        return {"record": 1.0 / self.validation, "client": 1.0, "paper": 1.0 / max(clients - 1, 1)}[self.sensitivity]

    def guarantee(self, of: Literal["record", "client"], clients: int) -> ExponentialRelease:
        """What one choice really promises for one validation record, or for one client's upload.

        A record moves a score by 1/|V| at most and an upload by 1; the promise is the ε asked for times that over Δ.
        """
        moves = 1.0 / self.validation if of == "record" else 1.0
        return ExponentialRelease(self.epsilon * moves / self.delta_y(clients))

    def probabilities(self, scores: ArrayLike, clients: int) -> FloatArray:
        """How likely each group is, given its score; scores (..., groups)."""
        return exponential.probabilities(_scores(scores), epsilon=self.epsilon, sensitivity=self.delta_y(clients))

    def log_probabilities(self, scores: ArrayLike, clients: int) -> FloatArray:
        """Their logarithms, finite also where a probability is too small for a float."""
        return np.asarray(log_softmax(_scores(scores) * (self.epsilon / (2 * self.delta_y(clients))), axis=-1))

    def draw(self, scores: ArrayLike, clients: int, rng: np.random.Generator | NoiseSource) -> NDArray[np.intp]:
        """Choose a group for each row of scores (..., groups)."""
        return exponential.select(_scores(scores), epsilon=self.epsilon, sensitivity=self.delta_y(clients), rng=rng)

    def combine(
        self, vectors: ArrayLike, data_size: ArrayLike, *, score: Score | None = None, rng: Rng = None
    ) -> Combined:
        """The chosen group's average, with the choice; `score` and `rng` are needed."""
        uploads, size = checked_uploads(vectors, data_size, least=2)
        if score is None or rng is None:
            raise InvalidInput("score, rng", (score, rng), "both: groups are scored, then one is drawn")
        members = self.grouping.members(len(uploads), rng)
        total = members @ size
        averages = self.grouping.sums(uploads * size[:, None], members) / total[:, None]
        scores = _scores(score(averages))
        if scores.shape != (len(members),):
            raise InvalidInput("score", scores.shape, f"one number for each of {len(members)} groups")
        chance = self.probabilities(scores, len(uploads))
        index = int(self.draw(scores, len(uploads), rng))
        shares = np.where(members[index], size, 0.0) / total[index]
        return Combined(averages[index], float(total[index]), shares, Choice(index, chance, scores, members))


def _scores(scores: ArrayLike) -> FloatArray:
    """Outside [0, 1] one record could move a score by more than Δ, so that is refused rather than chosen from."""
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim == 0 or not ((array >= 0) & (array <= 1)).all():
        raise InvalidInput("scores", scores, "accuracies from 0 to 1, one for each group")
    return array


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
        self, vectors: ArrayLike, data_size: ArrayLike, *, score: Score | None = None, rng: Rng = None
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
        checked_whole("adversaries", self.adversaries, 0)


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


_registry: Registry[RobustAggregation] = Registry("robust aggregation", "flmarket.robust_aggregations")
get = _registry.get
names = _registry.names
register = _registry.register
admit = _registry.admit
about = _registry.about


def _leave_one_out(*, epsilon: float, validation: int, sensitivity: Sensitivity = "record") -> RobustAggregation:
    return ExponentialChoice(epsilon=epsilon, validation=validation, sensitivity=sensitivity)


def _leave_k_out(
    *, epsilon: float, validation: int, sensitivity: Sensitivity = "record", k: int = 2, count: int = 40
) -> RobustAggregation:
    return ExponentialChoice(
        epsilon=epsilon,
        validation=validation,
        sensitivity=sensitivity,
        grouping=LeaveKOut(k, count),
        name="leave-k-out",
    )


def _partition(
    *, epsilon: float, validation: int, sensitivity: Sensitivity = "record", size: int = 5
) -> RobustAggregation:
    return ExponentialChoice(
        epsilon=epsilon, validation=validation, sensitivity=sensitivity, grouping=Partition(size), name="partition"
    )


register("leave-one-out", _leave_one_out, about="Everybody but one, chosen by accuracy with the exponential mechanism.")
register("leave-k-out", _leave_k_out, about="Everybody but k, chosen by accuracy with the exponential mechanism.")
register("partition", _partition, about="One of several groups, chosen by accuracy with the exponential mechanism.")
for _rule in (WeightedAverage, *ROBUST):
    register(_rule.name, _rule)
