"""The energy table of docs/perturbations.md: `python -m flmarket.privacy.table`.

Each entry is the noise energy divided by p·C²: the noise variance of one coordinate in units of the squared clip, for
dense updates of L2 norm at most C.
"""

from __future__ import annotations

from collections.abc import Sequence

from flmarket.privacy.recommend import recommend

__all__ = ["energy_table"]

_NAMES = ("laplace-l1", "sphere", "privunit", "privunit-g", "projunit")
_DIMENSIONS = (1, 10, 100, 650)
_EPSILONS = (0.1, 0.5, 1.0, 2.0, 8.0)


def energy_table(dimensions: Sequence[int] = _DIMENSIONS, epsilons: Sequence[float] = _EPSILONS) -> str:
    """A Markdown table: one row per dimension and ε, one column per mechanism, and what `recommend` picks."""
    lines = ["| p | ε | " + " | ".join(_NAMES) + " | recommended |"]
    lines.append("| --: | --: |" + " --: |" * len(_NAMES) + " :-- |")
    for dimension in dimensions:
        for epsilon in epsilons:
            pick = recommend(dimension, epsilon)
            cells = " | ".join(f"{pick.energy_table[name] / dimension:.4g}" for name in _NAMES)
            lines.append(f"| {dimension} | {epsilon:g} | {cells} | {pick.name} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(energy_table())
