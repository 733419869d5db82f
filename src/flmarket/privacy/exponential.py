"""The exponential mechanism: choose one of m candidates, better ones more often.

Candidate j is chosen with probability proportional to exp(ε·score_j / (2Δ)), where Δ is how much one owner
can move any score; this is ε-DP (McSherry & Talwar 2007, Theorem 6). Drawing is by the Gumbel trick: adding
Gumbel noise of scale 2Δ/ε and taking the largest has exactly these probabilities.

Breaks when the candidates themselves depend on private data, or when a score can move by more than Δ.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.events import ROUNDING_ALLOWANCE, ExponentialRelease, checked_number
from flmarket.privacy.noise import NoiseSource, as_noise_source
from flmarket.privacy.perturbation import positive_epsilon, release_epsilon


def probabilities(scores: ArrayLike, *, epsilon: ArrayLike, sensitivity: float) -> FloatArray:
    """How likely each candidate is; scores (..., m), epsilon (...) or one number."""
    values = _scores(scores)
    eps = release_epsilon(epsilon, values.shape[:-1])[..., None]
    # The best score is subtracted first, so that only differences are multiplied and the best logit is 0.
    rate = eps / (2 * checked_number("sensitivity", sensitivity, 1e-100, 1e100))
    with np.errstate(over="ignore", under="ignore"):
        logits = (values - values.max(axis=-1, keepdims=True)) * rate
        return np.asarray(softmax(logits, axis=-1))


def select(
    scores: ArrayLike, *, epsilon: ArrayLike, sensitivity: float, rng: np.random.Generator | NoiseSource
) -> NDArray[np.intp]:
    """Draw one candidate's index per row of scores (..., m); the result has shape (...)."""
    source, values = as_noise_source(rng), _scores(scores)
    span = checked_number("sensitivity", sensitivity, 1e-100, 1e100)
    scale = 2 * span / release_epsilon(epsilon, values.shape[:-1]) * (1 + ROUNDING_ALLOWANCE)
    return source.noisy_argmax(values, scale=scale, sensitivity=span)


def guarantee(epsilon: float) -> ExponentialRelease:
    """What one selection promises, for the account."""
    return ExponentialRelease(positive_epsilon(epsilon))


def _scores(scores: ArrayLike) -> FloatArray:
    values = checked_array("scores", scores, minimum=-np.inf)
    if values.ndim == 0:
        raise InvalidInput("scores", scores, "an array of shape (..., candidates)")
    if np.abs(values).max() > 1e300:
        raise InvalidInput("scores", np.abs(values).max(), "scores between -1e300 and 1e300")
    return values
