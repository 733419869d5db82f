"""`audit`: every check on one mechanism, on one population, from one seed.

Works on anything with the `run` of the `Auction` protocol that clears a batch. It sees the mechanism from outside only,
so it can refute a claim with an example and cannot prove one. Cheap checks (payments below cost, overspending) run on
at least 10,000 profiles whatever `profiles` is, since a rule broken once in a thousand auctions is a broken rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flmarket import auctions
from flmarket.audit.claims import check_claims
from flmarket.audit.efficiency import Efficiency, measure_efficiency
from flmarket.audit.hunt import FIELDS
from flmarket.audit.profiles import Sample, crafted_ties, draw
from flmarket.audit.report import AuditReport
from flmarket.audit.rules import check_rules
from flmarket.audit.strength import STRENGTHS, Strength
from flmarket.audit.structure import measure_structure
from flmarket.audit.trials import run_checked
from flmarket.audit.truthfulness import measure_truthfulness
from flmarket.bids import Auction, BidProfile
from flmarket.errors import InvalidInput

__all__ = ["audit", "private_fields"]

Progress = Callable[[float, str], None]  # share done from 0 to 1, and what comes next
_RULE_PROFILES, _RULE_ENTRIES = 10_000, 2_000_000
_CRAFTED = 1_000


def audit(
    mechanism: Auction | str,
    population: str | BidProfile = "flm22-iid",
    profiles: int = 500,
    owners: int | None = None,
    search: str | Strength = "quick",
    budget_factor: tuple[float, float] = (0.1, 2.0),
    seed: int = 0,
    private: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Measure whether a mechanism keeps what it claims; `population` is a name, or your own profiles."""
    auction = auctions.get(mechanism) if isinstance(mechanism, str) else mechanism
    if isinstance(auction, type) or not callable(getattr(auction, "run", None)):
        raise InvalidInput("mechanism", mechanism, "an object with run(bids, budget, rng=None)")
    strength = STRENGTHS.get(search) if isinstance(search, str) else search
    if strength is None:
        raise InvalidInput("search", search, f"one of {', '.join(STRENGTHS)}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidInput("seed", seed, "a whole number of at least 0")
    seed = int(seed)
    fields = private_fields(auction) if private is None else _checked_fields(private)
    if isinstance(population, BidProfile):  # taken as they are, each once
        profiles, owners = int(np.prod(population.shape[:-1], dtype=np.int64)), None
    note = progress or (lambda share, text: None)

    note(0.0, "drawing profiles")
    sample = draw(population, profiles, owners, budget_factor, np.random.default_rng((seed, 100)))
    n = sample.bids.n
    many = max(profiles, min(_RULE_PROFILES, _RULE_ENTRIES // n))
    wide = draw(population, many, owners, budget_factor, np.random.default_rng((seed, 109)))
    crafted = crafted_ties(wide[: min(_CRAFTED, many)], np.random.default_rng((seed, 110)))
    randomised = _is_randomised(auction, sample, seed)
    draws = strength.draws if randomised else 1

    note(0.02, "checking payments and budgets")
    rational, budget = check_rules(auction, _joined(sample, wide), crafted, seed=seed, draws=min(draws, 4))
    note(0.05, "checking structure")
    few = sample[: strength.structure_profiles]
    structure = measure_structure(auction, few, seed=seed, randomised=randomised)
    name = str(getattr(auction, "name", type(auction).__name__))
    note(0.1, "searching for profitable lies")
    truthful = measure_truthfulness(
        auction, name, sample, strength, fields, seed=seed, draws=draws,
        step=lambda share: note(0.1 + 0.75 * share, "searching for profitable lies"),
    )  # fmt: skip
    note(0.85, "comparing with the first best")
    efficiency: tuple[Efficiency, ...] = ()
    if strength.efficiency_profiles:
        efficiency = measure_efficiency(auction, sample[: strength.efficiency_profiles], seed=seed)
    promise = getattr(auction, "guarantees", None)
    report = AuditReport(
        mechanism=name,
        source=str(getattr(promise, "source", "")),
        assumes=str(getattr(promise, "assumes", "")),
        population=population if isinstance(population, str) else "given profiles",
        profiles=profiles,
        owners=n,
        seed=seed,
        budget_factor=(float(budget_factor[0]), float(budget_factor[1])),
        private=fields,
        randomised=randomised,
        truthful=truthful,
        rational=rational,
        budget=budget,
        structure=structure,
        efficiency=efficiency,
    )
    note(1.0, "done")
    return replace(report, claims=tuple(check_claims(auction, report)))


def private_fields(mechanism: Auction) -> tuple[str, ...]:
    """What owners may lie about under the mechanism's own assumption.

    Its attribute `private_fields` if it has one; else the value alone if `guarantees.assumes` says that something is
    "not private"; else value, privacy budget and data size.
    """
    declared = getattr(mechanism, "private_fields", None)
    if declared is not None:
        return _checked_fields(declared)
    assumes = str(getattr(getattr(mechanism, "guarantees", None), "assumes", ""))
    return ("value",) if "not private" in assumes else FIELDS


def _checked_fields(fields: Sequence[str]) -> tuple[str, ...]:
    if isinstance(fields, str) or not fields or not set(fields) <= set(FIELDS):
        raise InvalidInput("private", fields, f"some of {', '.join(FIELDS)}")
    return tuple(field for field in FIELDS if field in fields)


def _is_randomised(mechanism: Auction, sample: Sample, seed: int) -> bool:
    few = sample[:50]
    one, two = (run_checked(mechanism, few.bids, few.budget, np.random.default_rng((seed, s))) for s in (111, 112))
    return not (np.array_equal(one.epsilon, two.epsilon) and np.array_equal(one.payment, two.payment))


def _joined(sample: Sample, wide: Sample) -> Sample:
    """The profiles that are searched are also checked; where they are few, the many others as well."""
    return wide if len(wide) > len(sample) else sample
