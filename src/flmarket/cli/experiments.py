"""`flmarket compare`, one table and one plot for many mechanisms; `flmarket reproduce`, the papers' beside ours."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from flmarket import auctions, learning
from flmarket.cli.markets import demo_config
from flmarket.cli.output import errors, print_json, print_path, progress, screen, show_trust, table
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput, MechanismViolation
from flmarket.experiments import FACTORS, compare_learning, compare_population, learning_curves
from flmarket.experiments.items import CLAIMS, PAPERS, judge
from flmarket.experiments.units import (
    SEEDS,
    Finished,
    Settings,
    Unit,
    agreement,
    finished_units,
    papers,
    run_units,
    select,
)
from flmarket.report import Comparison, write_comparison, write_curves, write_reproduction
from flmarket.report.comparison import PaperSection
from flmarket.report.formatting import count
from flmarket.trust import BIDS_ONLY, OWNERS_HERE, PAPERS_HERE


def compare_on_population(
    population: str,
    auction_names: Sequence[str] | None,
    aggregation_names: Sequence[str] | None,
    factors: Sequence[float] | None,
    profiles: int,
    owners: int | None,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Error bound per budget factor."""
    chosen = tuple(auction_names or auctions.names())
    rules = tuple(aggregation_names or ("opt-aggr",))
    budgets = tuple(factors or FACTORS)
    with progress(len(chosen) * len(rules) * len(budgets), quiet=as_json) as step:
        comparison = compare_population(
            population=population,
            auction_names=chosen,
            aggregation_names=rules,
            factors=budgets,
            profiles=profiles,
            owners=owners,
            seed=seed,
            step=step,
        )
    command = f"flmarket compare --population {population} --profiles {profiles} --seed {seed}"
    page = None if out is None else write_comparison(comparison, out, command=command)
    if as_json:
        print_json(asdict(comparison) | ({"page": str(page)} if page else {}))
        return
    screen.print(_by_factor(comparison, budgets))
    show_trust(BIDS_ONLY)
    if page:
        print_path("page", page)


def compare_on_data(
    data_name: str,
    market: Path | None,
    auction_names: Sequence[str] | None,
    aggregation_names: Sequence[str] | None,
    perturbation_names: Sequence[str] | None,
    factors: Sequence[float] | None,
    rounds: int | None,
    seeds: int,
    seed: int,
    data_dir: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Accuracy over rounds, the same owners and bids for every pair."""
    noises = tuple(perturbation_names or ())
    chosen = tuple(auction_names or (("posted",) if noises else ("all-in", "all-in-capped", "m1", "posted")))
    if factors and len(factors) > 1:
        raise InvalidInput("--factor", list(factors), "one budget factor with --data")
    config = MarketConfig.load(market) if market else demo_config()
    rules = tuple(aggregation_names or ("opt-aggr" if config.trust == "local" else "secure-opt",))
    changes: dict[str, object] = {} if rounds is None else {"rounds": rounds}
    if factors:
        changes |= {"budget_factor": float(factors[0]), "budget_per_round": None}
    config = config.model_copy(
        update={
            "task": config.task.model_copy(update=changes),
            "data": config.data.model_copy(update={"name": data_name, "train": None}),
        }
    )
    data = learning.load(learning.datasets.admit(data_name), data_dir)
    runs = range(seed, seed + seeds)
    with progress(len(chosen) * len(rules) * max(len(noises), 1) * seeds, quiet=as_json) as step:
        try:
            results = compare_learning(
                config,
                data,
                auction_names=chosen,
                aggregation_names=rules,
                perturbation_names=noises,
                seeds=runs,
                step=step,
            )
        except MechanismViolation as violation:
            raise MechanismViolation(f"{violation} (leave that auction out: it does not keep to a budget)") from None
    plots = []
    if out is not None:
        for metric in ("accuracy", "balanced_accuracy"):
            plots.append(write_curves(learning_curves(results, metric), out, f"compare-{data_name}-{metric}"))
    final: dict[str, dict[str, list[float]]] = {
        label: {
            "accuracy": [run.accuracy[-1] for run in group],
            "balanced_accuracy": [run.rounds[-1].metrics["balanced_accuracy"] for run in group],
            "spent_micros": [run.spent_micros for run in group],
        }
        for label, group in results.items()
    }
    if as_json:
        print_json({"data_set": data_name, "rounds": config.task.rounds, "seeds": list(runs), "final": final})
        return
    listing = table(
        f"{data_name}, {config.task.rounds} rounds, {seeds} seeds", "mechanism", "accuracy", "balanced", "paid"
    )
    for label, values in final.items():
        paid = np.mean(values["spent_micros"]) / 1e6
        listing.add_row(label, _spread(values["accuracy"]), _spread(values["balanced_accuracy"]), f"{paid:,.2f}")
    screen.print(listing)
    show_trust(OWNERS_HERE)
    for plot in plots:
        print_path("plot", plot)


def _spread(values: Sequence[float]) -> str:
    mean = float(np.mean(values))
    return f"{mean:.3f}" if len(values) < 2 else f"{mean:.3f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"


def _by_factor(comparison: Comparison, factors: Sequence[float]) -> object:
    pairs = list(dict.fromkeys((row.auction, row.aggregation) for row in comparison.rows))
    rules = {rule for _, rule in pairs}
    names = ("auction", "aggregation")[: len(rules)]  # one that is everybody's is in the title
    same = f", {pairs[0][1]}" if len(rules) == 1 else ""
    title = f"{comparison.title}{same}: mean over {comparison.profiles:,} profiles per budget factor (lower is better)"
    held = ("over second best",) if any(row.over_second_best is not None for row in comparison.rows) else ()
    shown = (*names, *(f"{factor:g}" for factor in factors), *held, "nobody bought")
    listing = table(title, *shown, text=len(names))
    for pair in pairs:
        rows = [row for row in comparison.rows if (row.auction, row.aggregation) == pair]
        marks = [("[bold]{:.2f}[/]" if comparison.leads(row) else "{:.2f}") + "!" * row.overspends for row in rows]
        cells = [mark.format(row.error_bound_mean) for mark, row in zip(marks, rows, strict=True)]
        if held:
            ratios = [row.over_second_best for row in rows if row.over_second_best is not None]
            cells.append(f"{np.mean(ratios):.3f}" if ratios else "–")
        listing.add_row(*pair[: len(names)], *cells, f"{np.mean([row.invalid_rate for row in rows]):.1%}")
    if any(row.overspends for row in comparison.rows):
        listing.caption = "! spends more than the budget"
        listing.caption_justify = "left"
    return listing


_COLOURS = {"reproduced": "green", "differs": "yellow", "undecided": "cyan", "not run": "dim"}


def run_reproduction(
    wanted: str,
    out: Path,
    *,
    quick: bool,
    seeds: int | None,
    jobs: int,
    data_dir: Path | None,
    fresh: bool,
    as_json: bool,
    draws: int = 1,
) -> None:
    """Run what is not done yet, and write the index of everything in the folder.

    Every further draw of the seeds goes to a folder of its own; a verdict on which draws do not agree is undecided.
    """
    units = select(wanted)
    settings = Settings(quick, seeds if seeds is not None else SEEDS, data_dir)
    drawn = []
    for draw in range(draws):
        folder = out / f"draw-{draw + 1}" if draw else out
        drawn.append(_with_progress(units, folder, replace(settings, draw=draw), jobs, fresh))
    done = agreement(drawn) if draws > 1 else drawn[0]
    # what was not run leaves no record, and the folder may hold more than was asked for today
    everything = list({f.unit: f for f in (*finished_units(out), *done)}.values())
    command = f"flmarket reproduce {wanted} --seeds {settings.seeds}" + (" --quick" if quick else "")
    command += f" --draws {draws}" if draws > 1 else ""
    note = "Quick runs use smaller data, fewer rounds and fewer seeds." if any(f.quick for f in everything) else ""
    page = write_reproduction(_sections(everything), out, command=command, note=note)
    if as_json:
        items = [asdict(item) for finished in done for item in finished.items]
        print_json({"items": items, "seconds": {str(f.unit): f.seconds for f in done}, "page": str(page)})
        return
    listing = table("", "item", "verdict", "why", text=3)
    for finished in done:
        for item in finished.items:
            listing.add_row(item.title, f"[{_COLOURS[item.verdict]}]{item.verdict}[/]", item.reason)
    screen.print(listing)
    show_trust(PAPERS_HERE)
    print_path("page", page)


def _with_progress(
    units: tuple[Unit, ...], out: Path, settings: Settings, jobs: int, fresh: bool
) -> list[Finished]:  # fmt: skip
    running: dict[Unit, str] = {}
    ready: set[Unit] = set()
    with errors.status("starting") as status:

        def report(unit: Unit, note: str) -> None:
            if note:
                running[unit] = note
            else:
                running.pop(unit, None)
                ready.add(unit)
            now = "; ".join(f"{one}: {text}" for one, text in running.items())
            status.update(f"{len(ready)} of {len(units)} done. {now}")

        return run_units(units, out, settings, jobs=jobs, fresh=fresh, report=report)


def _sections(finished: Sequence[Finished]) -> list[PaperSection]:
    order, size = list(papers()), ("full", "quick")
    everything = [item for one in finished for item in one.items]
    return [
        PaperSection(
            paper,
            PAPERS[paper].title if paper in PAPERS else paper,
            PAPERS[paper].source if paper in PAPERS else "",
            tuple(judge(everything, [claim for claim in CLAIMS if claim.paper == paper])),
            tuple(
                asdict(item)
                | {"settings": f"{size[one.quick]} run, {count(one.seeds, 'seed')}, {one.seconds:.0f} s of a core"}
                for one in finished
                if one.unit.paper == paper
                for item in one.items
            ),
        )
        for paper in order
        if any(one.unit.paper == paper for one in finished)
    ]
