"""`audit`: every check on one mechanism, on one population, from one seed.

Works on anything with the `run` of the `Auction` protocol that clears a batch. It sees the mechanism from outside only,
so it can refute a claim with an example and cannot prove one. Cheap checks (payments below cost, overspending) run on
at least 10,000 profiles whatever `profiles` is, since a rule broken once in a thousand auctions is a broken rule.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from flmarket import auctions
from flmarket.aggregation import TRUST, Trust
from flmarket.audit.example import Example
from flmarket.audit.rules import BudgetUse, Rationality, Structure, check_rules, measure_structure
from flmarket.audit.search import FIELDS, STRENGTHS, Strength
from flmarket.audit.second_best import Efficiency, measure_efficiency, rate_law
from flmarket.audit.trials import crafted_ties, draw, run_checked
from flmarket.audit.truthfulness import Truthfulness, measure_truthfulness
from flmarket.bids import Auction, BidProfile, Guarantee
from flmarket.errors import InvalidInput
from flmarket.files import jsonable

Verdict = Literal["holds", "contradicted", "no figure", "not claimed"]


@dataclass(frozen=True)
class ClaimVerdict:
    """One claim, how strong it is, and what became of it."""

    claim: str
    level: str
    verdict: Verdict
    evidence: str


def check_claims(mechanism: Auction, report: "AuditReport") -> list[ClaimVerdict]:
    """Truthful, rational, within budget as the mechanism declares them; and the cap, which no mechanism may break.

    An EXACT claim is contradicted by a single violation above tolerance. An APPROXIMATE one needs a measured figure;
    how much is acceptable is the reader's to judge. Where nothing is claimed, the finding is given all the same.
    "Holds" means that this search on these profiles found nothing against it: it is evidence, not proof.
    """
    declared = getattr(mechanism, "guarantees", None)
    verdicts = []
    regret, rational, budget = report.truthful.overall, report.rational, report.budget
    for claim, broken, figure, evidence in (
        ("truthful", regret.owners_with_gain > 0, regret.mean_regret_over_cost, _truthful(report)),
        ("rational", rational.violations > 0, rational.mean_loss_over_cost, _rational(rational)),
        ("budget_feasible", budget.violations > 0, budget.mean_ratio, _budget(budget)),
    ):
        level = Guarantee(getattr(declared, claim, Guarantee.NONE))
        verdict: Verdict = "holds" if math.isfinite(figure) else "no figure"
        if level is Guarantee.NONE:
            verdict = "not claimed"
        elif level is Guarantee.EXACT:
            verdict = "contradicted" if broken else "holds"
        verdicts.append(ClaimVerdict(claim, str(level), verdict, evidence))
    over = report.rational.over_cap
    evidence = (
        f"{over:,} owners were awarded more than their own limit, up to {report.rational.worst_over_cap:.3g} times it."
        if over
        else f"None of {report.rational.owners_checked:,} owners was awarded more privacy loss than she allows."
    )
    verdicts.append(ClaimVerdict("within_privacy_budget", "exact", "contradicted" if over else "holds", evidence))
    return verdicts


def _truthful(report: "AuditReport") -> str:
    found, search = report.truthful.overall, report.truthful.search
    fields = " or ".join(", ".join(report.private).replace("_", " ").rsplit(", ", 1))
    tried = sum(sum(search.by_search.get(dimension, {}).values()) for dimension in report.truthful.judged)
    searched = f"{tried:,} misreports by each of {search.profiles * search.owners_per_profile:,} owners"
    if not found.owners_with_gain > 0:
        menus = (
            f"; and truth got {search.by_menu:,} more the best of the menus they were shown" if search.by_menu else ""
        )
        return f"No lie about {fields} paid off, in {searched}{menus}."
    return (
        f"In {found.profiles_with_gain:.1%} of profiles somebody gains by a lie about {fields}; "
        f"regret is {found.mean_regret_over_cost:.3g} of cost on average and {found.max_regret_over_cost:.3g} at worst "
        f"({searched})."
    )


def _rational(found: Rationality) -> str:
    if not found.violations:
        return f"None of {found.owners_checked:,} honest owners was paid below cost."
    ties = f", {found.crafted_violations:,} of them where bids tie" if found.crafted_violations else ""
    return (
        f"{found.violations:,} of {found.owners_checked:,} honest owners were paid below cost{ties}; the worst lost "
        f"{-found.worst:.3g} of her cost, the mean loss is {found.mean_loss_over_cost:.3g}."
    )


def _budget(found: BudgetUse) -> str:
    if not found.violations:
        return (
            f"None of {found.profiles_checked:,} auctions cost more than the budget; on average "
            f"{found.mean_ratio:.1%} of it was spent."
        )
    return (
        f"{found.violations:,} of {found.profiles_checked:,} auctions ({found.profiles_over:.1%} of the random ones) "
        f"cost more than the budget, up to {found.worst_ratio:.3g} times it."
    )


@dataclass(frozen=True)
class AuditReport:
    """Everything measured about one mechanism on one population."""

    mechanism: str
    source: str
    assumes: str
    population: str
    profiles: int
    owners: int
    seed: int
    budget_factor: tuple[float, float]
    private: tuple[str, ...]
    randomised: bool
    truthful: Truthfulness
    rational: Rationality
    budget: BudgetUse
    structure: Structure
    efficiency: tuple[Efficiency, ...]
    claims: tuple[ClaimVerdict, ...] = ()

    @property
    def worst(self) -> Example:
        """The most profitable lie found, replayable; with gain 0 if there was none."""
        return self.truthful.worst

    @property
    def contradicted(self) -> tuple[ClaimVerdict, ...]:
        """The claims that did not survive."""
        return tuple(claim for claim in self.claims if claim.verdict == "contradicted")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; what is infinite or not a number becomes null."""
        values = asdict(self)
        truthful = values.pop("truthful")
        truthful.pop("profile_regret")
        values |= {name: truthful.pop(name) for name in ("search", "worst")}
        plain: dict[str, Any] = jsonable(values | {"truthful": truthful.pop("overall") | truthful})
        return plain


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
    trust: Trust = "local",
) -> AuditReport:
    """Measure whether a mechanism keeps what it claims; `population` is a name, or your own profiles.

    `trust` is the model in which what it buys is compared with the first best.
    """
    if trust not in TRUST:
        raise InvalidInput("trust", trust, " or ".join(TRUST))
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
    few = sample[:50]
    one, two = (run_checked(auction, few.bids, few.budget, np.random.default_rng((seed, s))) for s in (111, 112))
    randomised = not (np.array_equal(one.epsilon, two.epsilon) and np.array_equal(one.payment, two.payment))
    draws = strength.draws if randomised else 1

    note(0.02, "checking payments and budgets")
    # the profiles that are searched are also checked; where they are few, the many others as well
    checked = wide if len(wide) > len(sample) else sample
    rational, budget = check_rules(auction, checked, crafted, seed=seed, draws=min(draws, 4))
    note(0.05, "checking structure")
    few = sample[: strength.structure_profiles]
    structure = measure_structure(auction, few, seed=seed, randomised=randomised)
    name = str(getattr(auction, "name", type(auction).__name__))
    note(0.1, "searching for profitable lies")
    truthful = measure_truthfulness(
        auction, name, sample, strength, fields, seed=seed, draws=draws,
        step=lambda share: note(0.1 + 0.75 * share, "searching for profitable lies"),
    )  # fmt: skip
    note(0.85, "comparing with the best that could be bought")
    efficiency: tuple[Efficiency, ...] = ()
    if strength.efficiency_profiles:
        few, law = sample[: strength.efficiency_profiles], rate_law(population)
        efficiency = measure_efficiency(auction, few, seed=seed, law=law, trust=trust)
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
