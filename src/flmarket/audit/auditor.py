"""`audit`: every check on one mechanism, on one population, from one seed.

Works on anything with the `run` of the `Auction` protocol that clears a batch. It sees the mechanism from outside only,
so it can refute a claim with an example and cannot prove one. Cheap checks (payments below cost, overspending) run on
at least 10,000 profiles whatever `profiles` is, since a rule broken once in a thousand auctions is a broken rule.

Is anybody paid less than her cost, asked for more than her cap, or the buyer charged more than the budget?

Judged on honest bids, on many random profiles and on crafted ones with ties. An `Outcome` states expected payments and
probabilities of taking part; the rules must hold for those, in every draw of a mechanism that draws random numbers.
"Realised" asks what happens in the round itself: an owner who takes part gets payment / participation and bears the
whole cost, and in the worst case everybody who may take part does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from flmarket.aggregation import TRUST, Trust
from flmarket.audit.search import FIELDS, Strength, strength_of
from flmarket.audit.trials import (
    Sample,
    Trials,
    admitted,
    bisected,
    called,
    crafted_ties,
    draw,
    draws_lots,
    geometric,
    run_checked,
    times,
)
from flmarket.audit.truthfulness import Example, LieSearch, Truthfulness, measure_truthfulness
from flmarket.audit.yardsticks import Efficiency, measure_efficiency, rate_law
from flmarket.bids import Auction, BidProfile, FloatArray, Guarantee, Outcome, slices
from flmarket.errors import InvalidInput
from flmarket.files import jsonable

TOLERANCE = 1e-9
_CHUNK_ENTRIES = 2_000_000


@dataclass(frozen=True)
class Rationality:
    """Owners paid below cost. `worst` is the lowest utility over full cost, 0 if nobody loses."""

    violations: int
    crafted_violations: int  # of these, in crafted profiles
    owners_checked: int
    profiles_with_violation: float  # share of the random profiles
    worst: float
    mean_loss_over_cost: float
    realised_violations: int
    realised_worst: float
    over_cap: int  # owners awarded more than their privacy budget
    worst_over_cap: float  # awarded ε over ε̄, at most 1 if nobody


@dataclass(frozen=True)
class BudgetUse:
    """Profiles that cost more than the budget. Ratios are spending over budget."""

    violations: int
    crafted_violations: int
    profiles_checked: int
    profiles_over: float  # share of the random profiles
    worst_ratio: float
    mean_ratio: float
    realised_violations: int
    realised_worst_ratio: float


def _measured(bids: BidProfile, budget: FloatArray, outcome: Outcome) -> dict[str, FloatArray]:
    """What the rules are judged by, a number for each profile."""
    cost, part, pay, cap = bids.cost_of(outcome), outcome.participation, outcome.payment, bids.privacy_budget
    full, spent = bids.full_cost, outcome.spent
    utility = pay - part * cost
    realised = np.where(part > 0, np.divide(pay, part, out=np.zeros_like(pay), where=part > 0) - cost, 0.0)
    relative, real = (np.divide(gain, full, out=np.minimum(gain, 0.0), where=full > 0) for gain in (utility, realised))
    below, really_below = utility < -TOLERANCE * full, realised < -TOLERANCE * full
    share = np.divide(outcome.epsilon, cap, out=np.where(outcome.epsilon > 0, np.inf, 0.0), where=cap > 0)
    most = np.divide(pay, part, out=pay.copy(), where=part > 0).sum(axis=-1)
    return {
        "below_cost": below.sum(axis=-1),
        "realised_below_cost": really_below.sum(axis=-1),
        "loss": np.maximum(-relative, 0.0).sum(axis=-1),
        "worst": np.where(below, relative, 0.0).min(axis=-1),
        "realised_worst": np.where(really_below, real, 0.0).min(axis=-1),
        "over_cap": (share > 1 + TOLERANCE).sum(axis=-1),
        "share_of_cap": share.max(axis=-1),
        "over_budget": spent > budget * (1 + TOLERANCE),
        "realised_over_budget": most > budget * (1 + TOLERANCE),
        "ratio": _ratio(spent, budget),
        "realised_ratio": _ratio(most, budget),
    }


def _ratio(spent: FloatArray, budget: FloatArray) -> FloatArray:
    return np.divide(spent, budget, out=np.where(spent > 0, np.inf, 0.0), where=budget > 0)


def check_rules(
    mechanism: Auction, sample: Sample, crafted: Sample, *, seed: int, draws: int
) -> tuple[Rationality, BudgetUse]:
    """Run the mechanism on honest bids and count."""
    plain, tied = (_counted(mechanism, part, seed=seed, draws=draws) for part in (sample, crafted))
    both = {name: np.concatenate([plain[name], tied[name]]) for name in plain}
    count = {name: int(values.sum()) for name, values in both.items() if "below" in name or "over" in name}
    owners, profiles = sample.bids.n, len(plain["loss"])
    rational = Rationality(
        violations=count["below_cost"],
        crafted_violations=int(tied["below_cost"].sum()),
        owners_checked=len(both["loss"]) * owners,
        profiles_with_violation=float((plain["below_cost"] > 0).mean()),
        worst=float(both["worst"].min()),
        mean_loss_over_cost=float(plain["loss"].sum()) / (profiles * owners),
        realised_violations=count["realised_below_cost"],
        realised_worst=float(both["realised_worst"].min()),
        over_cap=count["over_cap"],
        worst_over_cap=float(both["share_of_cap"].max()),
    )
    budget = BudgetUse(
        violations=count["over_budget"],
        crafted_violations=int(tied["over_budget"].sum()),
        profiles_checked=len(both["ratio"]),
        profiles_over=float(plain["over_budget"].mean()),
        worst_ratio=float(both["ratio"].max()),
        mean_ratio=float(plain["ratio"][np.isfinite(plain["ratio"])].sum()) / profiles,
        realised_violations=count["realised_over_budget"],
        realised_worst_ratio=float(both["realised_ratio"].max()),
    )
    return rational, budget


def _counted(mechanism: Auction, sample: Sample, *, seed: int, draws: int) -> dict[str, FloatArray]:
    found = []
    for rows in slices(len(sample), _CHUNK_ENTRIES // sample.bids.n):
        part = sample[rows]
        for drawn in range(draws):
            rng = np.random.default_rng((seed, 103, rows.start, drawn))
            found.append(_measured(part.bids, part.budget, run_checked(mechanism, part.bids, part.budget, rng)))
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


_SCALE = 1024.0
_AGREE = 1e-6
_LARGEST_FACTOR = 1e6
_OWNERS = 4  # of each profile, for lower and critical bids


@dataclass(frozen=True)
class Structure:
    """Shares lie between 0 and 1; None means that the question does not apply.

    Properties that explain why a mechanism is truthful or not, and how it treats owners. None is a promise by itself.

    * **monotone**: bidding less (the valuation multiplied by a factor below 1) never lowers the privacy loss awarded.
    * **critical payment**: a winner is paid the highest bid with which she would still win, found by bisection. With
      monotonicity and unpaid losers, this *is* truthfulness in value for owners who sell everything or nothing (Myerson
      1981); asked only of mechanisms that award ε̄ or 0.
    * **permutation equivariance**: reordering the owners reorders the outcome. Random profiles have no ties, which a
      rule must break somehow.
    * **scale invariance**: all valuations and the budget times 1024 gives the same ε and 1024 times the payments.
    * **envy, per record**: owner i envies j if selling her own d_i records on j's terms, at privacy loss ε_j for
      p_j/d_j a record, would be better for her at her own valuation than her own outcome: (d_i/d_j)·p_j − d_i·v_i(ε_j)
      > u_i. j's terms are only open to her if ε_j ≤ ε̄_i. The stricter **envy, whole contract** compares p_j −
      d_i·v_i(ε_j) with u_i, whatever the sizes; it means something only among owners of equal size.
    """

    profiles: int
    monotone: float | None  # share of owners whom no tried lower bid made sell less
    critical_payment: float | None  # share of winners paid their critical bid
    always_winning: float | None  # share of winners with no critical bid: they win at any bid tried
    permutation_equivariant: float | None  # share of profiles
    scale_invariant: float | None  # share of profiles
    envy_per_record: float  # share of profiles in which somebody envies
    envy_whole_contract: float
    losers_paid: float  # share of profiles
    budget_used: float  # mean of spending / budget
    nobody_selected: float  # share of profiles
    all_or_nothing: bool  # every award is ε̄ or 0


def measure_structure(mechanism: Auction, sample: Sample, *, seed: int, randomised: bool) -> Structure:
    """Measure every property on these profiles; for lower bids and critical bids, on a few owners of each."""
    bids, budget = sample.bids, sample.budget
    outcome = run_checked(mechanism, bids, budget, _rng(seed))
    share = np.divide(outcome.epsilon, bids.privacy_budget, out=np.zeros(bids.shape), where=bids.privacy_budget > 0)
    whole = bool((np.minimum(np.abs(share), np.abs(share - 1)) <= TOLERANCE).all())
    full_participation = bool(np.isin(outcome.participation, (0.0, 1.0)).all())
    rng = np.random.default_rng((seed, 104))

    k = min(bids.n, _OWNERS)
    owner = rng.random(bids.shape).argpartition(k - 1, axis=-1)[:, :k].ravel()
    row = np.repeat(np.arange(len(sample)), k)
    trials = Trials(mechanism, bids[row], budget[row], owner, seed=(seed, 105))
    critical, always = _critical(trials) if whole and full_participation and not randomised else (None, None)
    per_record, contract = envy(bids, outcome)
    monotone, reordered = _monotone(trials, rng), None
    if not randomised:
        at = (np.arange(len(budget))[:, None], rng.random(bids.shape).argsort(axis=-1))
        moved = run_checked(mechanism, bids[at], budget, _rng(seed))
        reordered = _same(moved, outcome.epsilon[at], outcome.payment[at], budget)
    larger = BidProfile(bids.valuations.scaled(_SCALE), bids.privacy_budget, bids.data_size)
    scaled = run_checked(mechanism, larger, budget * _SCALE, _rng(seed))
    return Structure(
        profiles=len(sample),
        monotone=monotone,
        critical_payment=critical,
        always_winning=always,
        permutation_equivariant=reordered,
        scale_invariant=_same(scaled, outcome.epsilon, outcome.payment * _SCALE, budget * _SCALE),
        envy_per_record=per_record,
        envy_whole_contract=contract,
        losers_paid=float(((outcome.payment > TOLERANCE * budget[:, None]) & ~outcome.winners).any(axis=-1).mean()),
        budget_used=float(np.divide(outcome.spent, budget, out=np.zeros(len(budget)), where=budget > 0).mean()),
        nobody_selected=float((~outcome.winners.any(axis=-1)).mean()),
        all_or_nothing=whole,
    )


def _rng(seed: int) -> np.random.Generator:
    """The same draws for every run that is compared."""
    return np.random.default_rng((seed, 106))


def _monotone(trials: Trials, rng: np.random.Generator) -> float:
    kept = np.ones(len(trials.rows), dtype=bool)
    for factor in (0.0, 0.5, 0.9, 0.99, rng.random(len(kept)), rng.random(len(kept))):
        award = trials.run(times(trials.truth, value=factor))
        kept &= award.epsilon >= trials.honest.epsilon * (1 - TOLERANCE)
    return float(kept.mean())


def _critical(trials: Trials) -> tuple[float | None, float | None]:
    wins = trials.honest.wins & (trials.cost > 0)
    if not wins.any():
        return None, None
    one, most = np.ones(len(wins)), np.full(len(wins), _LARGEST_FACTOR)
    unbounded = trials.run(times(trials.truth, value=most)).wins
    low, _ = bisected(lambda factor: trials.run(times(trials.truth, value=factor)).wins, one, most, 60, geometric)
    asked = wins & ~unbounded
    agree = np.isclose(low * trials.cost, trials.honest.payment, rtol=_AGREE, atol=0)
    always = float((wins & unbounded).sum() / wins.sum())
    return (float(agree[asked].mean()) if asked.any() else None), always


def _same(one: Outcome, epsilon: FloatArray, payment: FloatArray, budget: FloatArray) -> float:
    slack = TOLERANCE * budget[:, None]
    same = np.isclose(one.epsilon, epsilon, rtol=1e-6, atol=1e-9)
    same &= np.abs(one.payment - payment) <= 1e-6 * np.abs(payment) + slack
    return float(same.all(axis=-1).mean())


def envy(bids: BidProfile, outcome: Outcome) -> tuple[float, float]:
    """Shares of profiles with envy; owners i along axis -2, the envied j along axis -1."""
    n, shape = bids.n, bids.shape
    utility = (outcome.payment - outcome.participation * bids.cost_of(outcome))[..., None]
    slack = (TOLERANCE * bids.full_cost)[..., None]
    per_record, contract = np.zeros(shape[0], dtype=bool), np.zeros(shape[0], dtype=bool)
    size = bids.data_size
    for j in range(n):
        theirs = outcome.epsilon[:, j : j + 1]
        open_to = (theirs <= bids.privacy_budget * (1 + TOLERANCE))[..., None]
        cost = (outcome.participation[:, j : j + 1] * bids.cost(np.broadcast_to(theirs, shape)))[..., None]
        pay = outcome.payment[:, j : j + 1, None]
        fair = np.divide(size, size[:, j : j + 1], out=np.zeros(shape), where=size[:, j : j + 1] > 0)[..., None] * pay
        per_record |= (open_to & (fair - cost > utility + slack)).any(axis=(-2, -1))
        contract |= (open_to & (pay - cost > utility + slack)).any(axis=(-2, -1))
    return float(per_record.mean()), float(contract.mean())


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
    auction, strength, seed = admitted(mechanism, seed), strength_of(search), int(seed)
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
    randomised = draws_lots(auction, sample[:50], (seed, 111), (seed, 112))
    draws = strength.draws if randomised else 1

    note(0.02, "checking payments and budgets")
    # the profiles that are searched are also checked; where they are few, the many others as well
    checked = wide if len(wide) > len(sample) else sample
    rational, budget = check_rules(auction, checked, crafted, seed=seed, draws=min(draws, 4))
    note(0.05, "checking structure")
    few = sample[: strength.structure_profiles]
    structure = measure_structure(auction, few, seed=seed, randomised=randomised)
    name, whose = called(auction, population)
    note(0.1, "searching for profitable lies")

    def step(share: float) -> None:
        note(0.1 + 0.75 * share, "searching for profitable lies")

    truthful = measure_truthfulness(LieSearch(auction, name, strength, fields, seed, draws, step), sample)
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
        population=whose,
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
