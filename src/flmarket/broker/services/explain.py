"""An owner's privacy in plain words, always from the total of everything she gave up (`flmarket.trust`)."""

from __future__ import annotations

import math

from flmarket.broker.services.views import EpsilonWords
from flmarket.trust import certainty, meaning_of

__all__ = ["epsilon_words", "privacy_words"]


def epsilon_words(epsilon_total: float) -> EpsilonWords:
    """What a total ε lets others learn at most."""
    if epsilon_total <= 0.5:
        verdict = "Very strong: nobody learns much about your data."
    elif epsilon_total <= 2:
        verdict = "Moderate: a suspicion can grow, not become a certainty."
    elif epsilon_total <= 8:
        verdict = "Weak: a determined observer could become nearly sure."
    else:
        verdict = "Hardly any protection against somebody who knows what to look for."
    factor = math.exp(min(epsilon_total, 700.0))
    words = f"{meaning_of(epsilon_total)} Odds grow by at most {factor:.3g}. {verdict}"
    return EpsilonWords(epsilon_total, factor, certainty(epsilon_total), words)


def privacy_words(cap: float, spent: float) -> str:
    """Where an owner stands against her own cap, and what the cap means."""
    if cap <= 0:
        return "You have no cap yet: set one before you bid."
    left = max(0.0, cap - spent)
    stands = (
        f"All your releases together cost at most ε = {spent:.4g} in total; {left:.3g} of {cap:.4g} "
        f"({100 * left / cap:.0f} %) is left under your cap."
        if left
        else f"You have sold all the privacy that you were willing to sell, ε = {cap:.4g} in total: no more is sold."
    )
    return f"{stands} {meaning_of(cap)}"
