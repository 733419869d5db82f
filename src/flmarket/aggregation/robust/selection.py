"""M4: average every group, score it on the server's validation records, choose one by the exponential mechanism.

Group j is chosen with probability ∝ exp(ε·y_j/(2Δ)), y_j its accuracy in [0, 1] (JDP Alg. 4). What Δ must be depends on
whose change is to be hidden, and three are offered:

| `sensitivity` | Δ | one choice is ε-DP for |
| --- | --- | --- |
| `record` | 1/&#124;V&#124; | one of the server's &#124;V&#124; validation records |
| `client` | 1 | one client's whole upload (the choice of group, not the average that is published) |
| `paper` | 1/(m−1) | neither: ε(m−1) for an upload, ε(m−1)/&#124;V&#124; for a record (docs/errata.md E10) |

`record` is the default. The uploads are already private when they arrive (M3), so whatever the server does with them
costs clients nothing more; what the choice does use in the clear is V. It also happens to be the robust one: at m = 20
and |V| = 1000 a lead of one point of accuracy counts e^{5ε}, under `client` e^{0.005ε}.

What would break it: validation records that do not look like the test (then the best score is the wrong goal), or more
adversaries than the grouping leaves out. And ε limits no adversary: as ε → 0 the choice is uniform, and under
leave-one-out she is in with probability (m−1)/m. It is a *large* ε/Δ that keeps her out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax

from flmarket.aggregation.robust.base import Choice, Combined, Score, checked_uploads
from flmarket.aggregation.robust.groupings import Grouping, LeaveOneOut
from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput
from flmarket.privacy import ExponentialRelease, NoiseSource, exponential
from flmarket.privacy.events import checked_number

__all__ = ["SENSITIVITIES", "ExponentialChoice", "Sensitivity"]

Sensitivity = Literal["record", "client", "paper"]
SENSITIVITIES: tuple[Sensitivity, ...] = ("record", "client", "paper")


@dataclass(frozen=True, kw_only=True)
class ExponentialChoice:
    """The exponential mechanism over groups; `validation` is |V|, how many records the score is a mean over."""

    epsilon: float
    validation: int
    sensitivity: Sensitivity = "record"
    grouping: Grouping = field(default_factory=LeaveOneOut)
    name: str = "leave-one-out"

    def __post_init__(self) -> None:
        checked_number("epsilon", self.epsilon, 1e-30, 1e30)
        if type(self.validation) is not int or self.validation < 1:
            raise InvalidInput("validation", self.validation, "a whole number of at least 1: the server's records")
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
        self,
        vectors: ArrayLike,
        data_size: ArrayLike,
        *,
        score: Score | None = None,
        rng: np.random.Generator | None = None,
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
