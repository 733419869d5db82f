"""Which perturbation adds the least noise, for updates of a given size at a given ε.

Compares worst-case noise energies for updates of L2 norm at most 1. The L2 mechanisms clip at 1. Laplace noise clips in
L1, so it must let the L1 norm of such an update through: √p for a dense one, 1 for one with a single non-zero
coordinate. Its energy is 8p·(L1 norm)²/ε² accordingly.

Only mechanisms that are sound in finite precision are compared (see `perturbation`).

Assumes one release judged on its own, unless `rounds` says how many share one (ε, δ): then pure mechanisms get what an
account leaves each of them, and Gaussian noise its share of ρ. With several `owners` of equal weight the noise of their
mean is compared, and if a δ is allowed so is secure aggregation, where one common noise protects all: in the mean of n
owners local noise has energy σ/n, common noise κσ'/n², so beyond some number of owners it wins (`break_even`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from types import MappingProxyType

from flmarket.privacy.accountant import PrivacyAccount
from flmarket.privacy.additive import DistributedGaussian, GaussianL2, LaplaceL1
from flmarket.privacy.directional import PrivUnit, PrivUnitG, ProjUnit, Sphere
from flmarket.privacy.events import ApproxDp, checked_number
from flmarket.privacy.perturbation import Perturbation, checked_dimension, is_sound, positive_epsilon
from flmarket.privacy.secure_sum import SecureAggregation

# Simplest first: additive noise, then by what they cost to draw.
_CANDIDATES = ("laplace-l1", "gaussian-l2", "sphere", "privunit-g", "privunit")
_CLOSE = 1.01


@dataclass(frozen=True)
class Recommendation:
    """A perturbation's name, one sentence why, and the noise energy of each (per squared L2 norm of the update).

    `trust` is the model of trust that it is for, and `break_even` the least number of owners from which secure
    aggregation has less noise than the best local mechanism; None if no δ allows it.
    """

    name: str
    reason: str
    energy_table: Mapping[str, float]
    trust: str = "local"
    break_even: int | None = None


def recommend(
    dimension: int,
    epsilon: float,
    *,
    delta: float = 0.0,
    l1_norm: float | None = None,
    owners: int = 1,
    rounds: int = 1,
    policy: SecureAggregation | None = None,
) -> Recommendation:
    """The least noise energy; among those within 1 %, the simplest. Pure ε unless a `delta` is allowed.

    Of one release, or of each of `rounds` that share (ε, δ). With more `owners` than one both models of trust are
    compared, secure aggregation with this `policy` (by default that of markets).

    `l1_norm` is how long updates are in L1 when they have length 1 in L2: from 1 (one non-zero coordinate) to
    √dimension (all coordinates alike), which is assumed unless given.
    """
    size, eps = checked_dimension(dimension), positive_epsilon(epsilon)
    longest = sqrt(size)
    l1 = longest if l1_norm is None else checked_number("l1_norm", l1_norm, 1.0, longest * (1 + 1e-9))
    allowed: list[Perturbation] = [LaplaceL1(clip=l1), Sphere(), PrivUnit(), PrivUnitG(), ProjUnit()]
    spare = checked_number("delta", delta, 0.0, 0.5)
    once = eps if rounds == 1 else _each(eps, spare, rounds)
    table = {one.name: float(one.noise_energy(once, size)) for one in allowed if is_sound(one)}
    if spare > 0:
        table[GaussianL2.name] = rounds * float(GaussianL2(delta=spare).noise_energy(eps, size))
    best = min(table.values())
    name = next(one for one in _CANDIDATES if table.get(one, float("inf")) <= _CLOSE * best)
    local = Recommendation(name, _reason(name, table, size, once, l1), MappingProxyType(table))
    if spare == 0:
        return local
    kept = SecureAggregation() if policy is None else policy
    common = rounds * float(DistributedGaussian(delta=spare).noise_energy(eps, size)) * kept.excess
    least = max(2, ceil(common / best))
    if checked_dimension(owners) < least:
        return replace(local, break_even=least)
    return Recommendation(
        DistributedGaussian.name,
        f"secure aggregation: in the mean of {owners} owners one common noise has energy {common / owners**2:.3g}, "
        f"noise that each adds by herself {best / owners:.3g} ({name}); from {least} owners on it pays.",
        MappingProxyType(table | {DistributedGaussian.name: common / owners}),
        "secure-aggregation",
        least,
    )


def _each(epsilon: float, delta: float, rounds: int) -> float:
    """The pure ε of each of so many releases that share (ε, δ)."""
    if delta == 0:
        return epsilon / rounds
    return PrivacyAccount(ApproxDp(epsilon, delta)).affordable(rounds)


def _reason(name: str, table: Mapping[str, float], size: int, epsilon: float, l1: float) -> str:
    others = sorted((energy, other) for other, energy in table.items() if other != name)
    against = ", ".join(f"{other} {energy:.3g}" for energy, other in others)
    least = "the least" if table[name] <= others[0][0] else "within 1 % of the least"
    why = {
        "laplace-l1": f" because updates are sparse or short (L1 norm {l1:.3g}) and ε is large",
        "gaussian-l2": " because δ is allowed",
        "sphere": " and is the simplest; a better cap pays only at larger ε",
        "privunit-g": " and is faster to draw than privunit",
    }.get(name, " because its cap is the best for this ε and dimension")
    unit = "parameter" if size == 1 else "parameters"
    return (
        f"{name} has {least} noise energy at {size} {unit} and ε = {epsilon:g} "
        f"({table[name]:.3g} per squared norm; {against}){why}."
    )


_COLUMNS = ("laplace-l1", "sphere", "privunit", "privunit-g", "projunit")


def energy_table(
    dimensions: Sequence[int] = (1, 10, 100, 650), epsilons: Sequence[float] = (0.1, 0.5, 1.0, 2.0, 8.0)
) -> str:
    """A Markdown table: one row per dimension and ε, one column per mechanism, and what `recommend` picks.

    The table of docs/perturbations.md. Each entry is the noise energy divided by p·C²: the noise variance of one
    coordinate in units of the squared clip, for dense updates of L2 norm at most C.
    """
    lines = ["| p | ε | " + " | ".join(_COLUMNS) + " | recommended |"]
    lines.append("| --: | --: |" + " --: |" * len(_COLUMNS) + " :-- |")
    for dimension in dimensions:
        for epsilon in epsilons:
            pick = recommend(dimension, epsilon)
            cells = " | ".join(f"{pick.energy_table[name] / dimension:.4g}" for name in _COLUMNS)
            lines.append(f"| {dimension} | {epsilon:g} | {cells} | {pick.name} |")
    return "\n".join(lines)
