"""What is promised, and whether it is kept: `flmarket mechanisms`, `flmarket audit` and `flmarket torture`.

A mechanism is audited by its name if it is one of ours, or as package.module:Class if it is anybody's. `sampling:NAME`
(or sampling:package.module:Class) audits a client sampling scheme instead of an auction.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import typer

from flmarket import aggregation, auctions, learning, populations, privacy
from flmarket.aggregation import Trust, robust
from flmarket.auctions import learned
from flmarket.audit import Attack, AuditReport, ClaimVerdict, SamplingAudit, attack, audit, audit_sampling, certify
from flmarket.audit.attacks import PROFILES, Gain, Split
from flmarket.bids import Auction, Guarantee
from flmarket.cli.output import print_json, print_path, progress, screen, show_trust, table
from flmarket.errors import ConfigError, InvalidInput, needed
from flmarket.learning import adversaries
from flmarket.registry import imported
from flmarket.report.audit_page import write_audit, write_sampling_audit
from flmarket.trust import BIDS_ONLY

_MARK = {
    Guarantee.EXACT: "[green]exact[/]",
    Guarantee.APPROXIMATE: "[yellow]approximate[/]",
    Guarantee.NONE: "[red]no[/]",
}


def list_mechanisms(as_json: bool) -> None:
    """Print every registered name."""
    others = {
        "aggregations": list(aggregation.names()),
        "robust_aggregations": list(robust.names()),
        "adversaries": list(adversaries.names()),
        "perturbations": list(privacy.names()),
        "populations": list(populations.names()),
        "models": list(learning.models.names()),
        "data_sets": list(learning.names()),
    }
    # the papers' networks that have weights serve ten owners, and are not listed where any number may bid
    papers = [name for name, population in learned.PAPERS.items() if population in learned.weight_names(name)]
    promises = {name: auctions.get(name).guarantees for name in (*auctions.names(), *papers)}
    if as_json:
        about = [{"name": name, **asdict(one), "about": auctions.about(name)} for name, one in promises.items()]
        print_json({"auctions": about, **others})
        return
    listing = table("Auctions", "name", "truthful", "rational", "within budget", text=4)
    notes = table("\nWhere they come from, and what their promises assume", "", "", text=2)
    notes.show_header = False
    for name, promise in promises.items():
        marks = (_MARK[level] for level in (promise.truthful, promise.rational, promise.budget_feasible))
        listing.add_row(name, *marks)
        notes.add_row(name, promise.source + (f" · assumes {promise.assumes}" if promise.assumes else ""))
    screen.print(listing, notes)
    for title, names in others.items():
        screen.print(f"\n[bold]{title.replace('_', ' ').capitalize()}[/]  {', '.join(names)}")


SAMPLING = "sampling:"
DEFAULT_POPULATION = "flm22-iid"
_STEPS = 100
_VERDICT = {
    "holds": "[green]holds[/]",
    "contradicted": "[bold red]contradicted[/]",
    "no figure": "[yellow]no figure[/]",
    "not claimed": "[dim]not claimed[/]",
}


def run_audit(
    target: str,
    population: str | None,
    profiles: int,
    owners: int | None,
    search: str,
    seed: int,
    as_json: bool,
    report_path: Path | None,
    trust: str = "local",
    weights: Path | None = None,
) -> None:
    """Audit, show, and write the page if asked to, and the figures beside the weights of a learned auction."""
    mechanism = None if target.startswith(SAMPLING) else load_mechanism(target)
    if weights is not None:
        mechanism = of_weights(mechanism, weights)
    if report_path is not None and (report_path.is_dir() or report_path.suffix.lower() not in (".html", ".htm")):
        raise ConfigError("--report", str(report_path), "a path that ends in .html")
    found: AuditReport | SamplingAudit
    with progress(_STEPS, quiet=as_json) as step:
        advance = _by_share(step)
        if mechanism is None:
            name, clients = target.removeprefix(SAMPLING), 50 if owners is None else owners
            scheme, population = imported(name, "mechanism") if ":" in name else name, population or "uniform-costs"
            found = audit_sampling(
                scheme, population, profiles, clients=clients, search=search, seed=seed, progress=advance
            )
            sizes = f"--profiles {found.draws} --owners {found.clients}"
        else:
            population = DEFAULT_POPULATION if population is None else population
            found = audit(
                mechanism, population, profiles, owners=owners, search=search, seed=seed, progress=advance,
                trust=cast(Trust, trust),
            )  # fmt: skip
            sizes = f"--profiles {found.profiles} --owners {found.owners}"
    if weights is not None and isinstance(found, AuditReport):
        learned.audited(weights, figures_for_weights(found, population, search))
    command = f"flmarket audit {shlex.quote(target)} --population {shlex.quote(population)} {sizes}"
    command += f" --search {search} --seed {seed}"
    page = None
    if report_path is not None and isinstance(found, SamplingAudit):
        page = write_sampling_audit(found, report_path, command=command)
    elif report_path is not None and isinstance(found, AuditReport):
        page = write_audit(found, report_path, command=command)
    if as_json:
        print_json(found.to_dict() | ({"report": str(page)} if page else {}))
        return
    _show_sampling(found) if isinstance(found, SamplingAudit) else _show(found)
    show_trust(BIDS_ONLY)
    if page is not None:
        print_path("\nreport", page)


def of_weights(mechanism: Auction | None, path: Path) -> Auction:
    """The learned auction that was named, if these are its weights."""
    held = learned.load("", str(path))
    same = isinstance(mechanism, learned.LearnedAuction | learned.PaperAuction) and (
        mechanism.settings == held.settings
        and all(np.array_equal(value, held.parameters[key]) for key, value in mechanism.parameters.items())
    )
    if mechanism is None or not same:
        raise InvalidInput("weights", str(path), "the file with the weights of the learned auction that is audited")
    return mechanism


def figures_for_weights(report: AuditReport, population: str, search: str) -> dict[str, Any]:
    """What is kept with the weights of a learned auction."""
    overall, regrets = report.truthful.overall, np.array(report.truthful.profile_regret)
    return {
        "population": population,
        "search": search,
        "profiles": report.profiles,
        "seed": report.seed,
        "mean_regret_over_cost": overall.mean_regret_over_cost,
        "max_regret_over_cost": overall.max_regret_over_cost,
        "by_lie": {name: found.mean_regret_over_cost for name, found in report.truthful.by_dimension.items()},
        "mean_loss_over_cost": report.rational.mean_loss_over_cost,
        "budget_violations": report.budget.violations,
        "certificate": certify(regrets, population=population, search=search).to_dict(),
    }


def run_attack(
    name: str,
    target: str,
    population: str | None,
    profiles: int | None,
    owners: int | None,
    seed: int,
    as_json: bool,
    **unused: object,
) -> None:
    """Attack and show; `unused` are options that only an audit has, None where not given."""
    given = " and ".join(f"--{option}" for option, value in unused.items() if value is not None)
    if given:
        raise ConfigError("--attack", name, f"none of an audit's options beside it, so not {given}")
    if target.startswith(SAMPLING):
        raise InvalidInput(
            "mechanism", target, "an auction: a scheme for sampling sells no ε, and has one rate a client"
        )
    mechanism = load_mechanism(target)
    with progress(_STEPS, quiet=as_json) as step:
        found = attack(
            name, mechanism, population or DEFAULT_POPULATION, profiles or PROFILES, owners, seed,
            progress=_by_share(step),
        )  # fmt: skip
    if as_json:
        print_json(found.to_dict())
        return
    _show_attack(found)


def _by_share(step: Callable[[str], None]) -> Callable[[float, str], None]:
    """Progress told as a share done, for a bar of `_STEPS` steps."""
    done = 0

    def advance(share: float, note: str) -> None:
        nonlocal done
        while done < int(share * _STEPS):
            step(note)
            done += 1

    return advance


def _show_attack(found: Attack) -> None:
    screen.print(
        f"[bold]{found.mechanism}[/], attack: {found.attack}, on {found.profiles:,} profiles of {found.owners} owners, "
        f"population {found.population}, seed {found.seed}\n"
    )
    if found.refused:
        screen.print(f"Not attacked: {found.refused}")
        return
    if found.gains:
        title = "Gain over the truth, in full costs a round"
        columns = ("setting", "best strategy for all", "gain", "in hindsight", "who gain", "honest bound", "spent")
        screen.print(table(title, *columns, text=2, rows=map(_gain, found.gains)))
    if found.splits:
        title = "The same budget in pieces: error bound (lower is better), price of precision over that in one piece"
        names = ("pieces", "one piece", "pieces", "ratio", "price", "empty")
        screen.print(table(title, *names, rows=map(_split, found.splits)))
    if found.arbitrage is not None:
        screen.print(f"\nCheapest two pieces on any menu: {found.arbitrage:.3f} of the price of one.")
    if found.holds:
        screen.print(f"\nProved for {found.holds}.")
    screen.print(
        "\n[dim]A finite family of strategies, everybody else honest. Finding nothing is evidence, not proof.[/]"
    )


def _gain(row: Gain) -> tuple[str, ...]:
    hindsight = ("–", "–") if row.hindsight is None else (f"{row.hindsight:.4f}", f"{row.gaining or 0.0:.1%}")
    buyer = ("", "") if row.bound is None or row.spent is None else (f"{row.bound:.3f}", f"{row.spent:.0%}")
    return row.setting, row.strategy, f"{row.mean:.4f} ± {row.standard_error:.4f}", *hindsight, *buyer


def _split(row: Split) -> tuple[str, ...]:
    bounds = (f"{row.whole:.3f}", f"{row.pieces:.3f}", f"{row.ratio:.3f} ± {row.standard_error:.3f}")
    return row.setting, *bounds, f"{row.precision_price:.2f}", f"{row.empty_whole:.1%} → {row.empty_pieces:.1%}"


def load_mechanism(target: str) -> Auction:
    """A registered auction, or `package.module:Class`, imported (also from the current folder) and instantiated."""
    try:
        made = auctions.get(auctions.admit(target))
    except TypeError as error:
        raise InvalidInput("mechanism", target, f"a class that needs no arguments ({error})") from None
    if not callable(getattr(made, "run", None)):
        raise InvalidInput("mechanism", target, "a class with run(bids, budget, *, rng=None)")
    return made


def claims_table(claims: Sequence[ClaimVerdict]) -> Any:
    """Every claim with its verdict."""
    rows = [(one.claim.replace("_", " "), one.level, _VERDICT[one.verdict], one.evidence) for one in claims]
    return table("Claims", "claim", "level", "verdict", "evidence", text=4, rows=rows)


def _show(report: AuditReport) -> None:
    screen.print(
        f"[bold]{report.mechanism}[/] on {report.profiles:,} profiles of {report.owners} owners, population "
        f"{report.population}, budgets {report.budget_factor[0]:g} to {report.budget_factor[1]:g} × all costs\n"
    )
    screen.print(claims_table(report.claims))
    regret = table(
        "\nRegret: best misreport found, over the owner's cost", "lie about", "mean", "max", "profiles", "owners"
    )
    for name, found in report.truthful.by_dimension.items():
        label = name.replace("_", " ") + ("" if name in report.truthful.judged else " (not private)")
        gained = (f"{found.mean_regret_over_cost:.4f}", f"{found.max_regret_over_cost:.4f}")
        regret.add_row(label, *gained, f"{found.profiles_with_gain:.1%}", f"{found.owners_with_gain:.1%}")
    screen.print(regret)
    bound = table(
        "\nError bound against a buyer who knows every cost (first best) or the law of costs only (second, estimated)",
        "budget factor", "reached", "first best", "ratio", "second best", "ratio", "no seller",
    )  # fmt: skip
    for row in report.efficiency:
        reached = (f"{row.error_bound:.3g}", f"{row.first_best:.3g}", f"{row.ratio:.2f}")
        second = row.second_best
        known = ("–", "–") if second is None else (f"{second:.3g}", f"{row.error_bound / second:.2f}")
        bound.add_row(f"{row.budget_factor:g}", *reached, *known, f"{row.nobody_selected:.1%}")
    screen.print(bound)
    worst, log = report.worst, report.truthful.search
    if worst.gain > 0:
        truth = worst.bids[worst.owner]
        screen.print(
            f"\n[bold]Worst lie[/]  owner {worst.owner} of 0 to {len(worst.bids) - 1}, budget {worst.budget:.6g}: "
            f"reports a full cost of {worst.lie.full_cost:.6g} (truly {truth.full_cost:.6g}), "
            f"ε̄ {worst.lie.privacy_budget:.4g} ({truth.privacy_budget:.4g}) per round, "
            f"{worst.lie.data_size:.6g} records ({truth.data_size:.6g}); "
            f"her utility goes from {worst.honest.utility:.6g} to {worst.lying.utility:.6g}."
        )
    screen.print(
        f"\n[dim]Searched: {log.misreports_per_owner:,} misreports for each of {log.owners_per_profile} owners of "
        f"{log.profiles:,} profiles ({log.strength})"
        + (f"; {log.by_menu:,} more owners judged by their menus" if log.by_menu else "")
        + ". Finding nothing is evidence, not proof.[/]"
    )


def _show_sampling(found: SamplingAudit) -> None:
    screen.print(f"[bold]{found.scheme}[/] on {found.draws:,} draws of {found.clients} clients, {found.population}\n")
    screen.print(claims_table(found.claims))
    rows = table(
        "\nA round's expected bill over its budget; budget per client as a multiple of the mean cost",
        "budget", "mean", "worst draw", "mean 1/q", "told the costs",
    )  # fmt: skip
    for row in found.spending:
        bill = (f"{row.mean_ratio:.4f} ± {row.standard_error:.4f}", f"{row.worst_ratio:.4f}")
        rows.add_row(f"{row.budget_factor:g}", *bill, f"{row.objective:.3g}", f"{row.first_best:.3g}")
    screen.print(rows)
    screen.print(
        f"\n[dim]Searched: {found.reports_per_client:,} reports by each of {found.draws * found.clients:,} clients "
        f"({found.search}). Finding nothing is evidence, not proof.[/]"
    )


_DEFAULT_ROUNDS = 2_000
_TELL_EVERY = 5.0  # seconds


def run_torture(
    seed: int | None,
    rounds: int | None,
    hours: float | None,
    *,
    world: str | None,
    run: int | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Run it, say how far it got, and end with 1 if a promise was not kept."""
    if world not in (None, "nodes", "service"):
        raise InvalidInput("world", world, "nodes or service")
    with needed("flower,broker"):
        from flmarket.simulator import Total, run_seed, torture
    if run is not None:
        found = run_seed(run, world=world)
        print(found.told())
        raise typer.Exit(int(bool(found.broken)))
    first = int(time.time()) if seed is None else seed
    if hours is None and rounds is None:
        rounds = _DEFAULT_ROUNDS
    told = [time.monotonic()]

    def progress(total: Total) -> None:
        if not as_json and time.monotonic() - told[0] > _TELL_EVERY:
            told[0] = time.monotonic()
            print(
                f"{total.rounds:,} rounds of {total.tasks:,} tasks, {sum(total.faults.values()):,} faults",
                file=sys.stderr,
            )

    if not as_json:
        print(f"seed {first}", file=sys.stderr)
    seconds = None if hours is None else 3600 * hours
    total = torture(first, rounds=rounds, seconds=seconds, world=world, jobs=jobs, progress=progress)
    if as_json:
        said = {name: getattr(total, name) for name in ("seed", "runs", "tasks", "rounds", "seconds")}
        broken = [] if total.failed is None else [f"{rule}: {message}" for rule, message in total.failed.broken]
        failed = None if total.failed is None else total.failed.seed
        print(json.dumps(said | {"faults": dict(sorted(total.faults.items())), "failed": failed, "broken": broken}))
    elif total.failed is not None:
        print(total.failed.told())
        print(f"\nagain: flmarket torture --run {total.failed.seed}")
    else:
        played = f"{total.rounds:,} rounds of {total.tasks:,} tasks in {total.runs:,} runs"
        speed = f"{total.seconds:,.0f} s of a processor, {total.tasks_per_minute:,.0f} tasks a minute"
        print(f"seed {first}: {played}, {sum(total.faults.values()):,} faults, every promise kept; {speed}")
    raise typer.Exit(int(total.failed is not None))
