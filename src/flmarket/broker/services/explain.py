"""Privacy in plain words. For a release with ε, whatever the odds of a suspicion were before, seeing the release
multiplies them by at most e^ε; that is the definition of local differential privacy read as a bet."""

from __future__ import annotations

import math

from flmarket.broker.services.views import EpsilonWords

__all__ = ["epsilon_words", "privacy_words"]


def epsilon_words(epsilon: float) -> EpsilonWords:
    """What an ε lets others learn at most."""
    factor = math.exp(min(epsilon, 700.0))
    certainty = 1 / (1 + math.exp(-min(epsilon, 700.0)))
    surer = f"{certainty:.0%}" if certainty < 0.99 else f"{certainty:.4%}"
    if epsilon <= 0.5:
        verdict = "Very strong: nobody learns much about any record."
    elif epsilon <= 2:
        verdict = "Moderate: a suspicion can grow, not become a certainty."
    elif epsilon <= 8:
        verdict = "Weak: a determined observer could become nearly sure."
    else:
        verdict = "Hardly any protection against somebody who knows what to look for."
    words = (
        f"Somebody who gives your data a 50 : 50 chance of being one thing rather than another can be at most {surer} "
        f"sure after seeing this release, whatever else she knows (odds grow by at most {factor:.3g}). {verdict}"
    )
    return EpsilonWords(epsilon, factor, certainty, words)


def privacy_words(cap: float, spent: float) -> str:
    """Where an owner stands against her own cap."""
    if cap <= 0:
        return "You have no cap yet: set one before you bid."
    left = max(0.0, cap - spent)
    if left == 0:
        return "You have sold all the privacy that you were willing to sell: no more updates leave."
    return (
        f"All your releases together cost at most ε = {spent:.3g} in total; {left:.3g} of {cap:.3g} "
        f"({left / cap:.0%}) is left."
    )
