"""`flmarket reproduce`: the tables and figures of a paper, next to what it printed, with a verdict for each."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from flmarket.cli.output import errors, print_json, print_path, screen, show_trust, table
from flmarket.experiments.claims import PAPERS, judge
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
from flmarket.report import write_reproduction
from flmarket.report.formatting import count
from flmarket.report.reproduction import ClaimRow, PaperSection
from flmarket.trust import PAPERS_HERE

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
    judged = judge(item for one in finished for item in one.items)
    return [
        PaperSection(
            paper,
            PAPERS[paper].title if paper in PAPERS else paper,
            PAPERS[paper].source if paper in PAPERS else "",
            tuple(
                ClaimRow(one.claim.where, one.claim.text, one.verdict, one.items, one.reasons)
                for one in judged
                if one.claim.paper == paper
            ),
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
