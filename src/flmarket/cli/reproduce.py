"""`flmarket reproduce`: the tables and figures of a paper, next to what it printed, with a verdict for each."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from flmarket.cli.output import errors, print_json, print_path, screen, table
from flmarket.errors import UnknownName
from flmarket.experiments.items import Item, Reproduction
from flmarket.report import write_reproduction

__all__ = ["PAPERS", "run_reproduction"]

PAPERS = ("samp", "stack")


def run_reproduction(
    paper: str, out: Path, quick: bool, seeds: int | None, data_dir: Path | None, as_json: bool
) -> None:
    """Run one paper's experiments, or all, and write the index."""
    if paper not in (*PAPERS, "all"):
        raise UnknownName("paper", paper, f"one of {', '.join(PAPERS)}, all")
    chosen = PAPERS if paper == "all" else (paper,)
    runs = seeds if seeds is not None else (2 if quick else 5)
    items: list[Item] = []
    with errors.status("starting") as status:
        for name in chosen:
            reproduce: Reproduction = import_module(f"flmarket.experiments.{name}").reproduce

            def step(note: str, name: str = name) -> None:
                status.update(f"{name}: {note}")

            items += reproduce(out, quick=quick, seeds=runs, data_dir=data_dir, step=step)
    command = f"flmarket reproduce {paper} --seeds {runs}" + (" --quick" if quick else "")
    note = "A quick run: smaller data, fewer rounds." if quick else ""
    page = write_reproduction([asdict(item) for item in items], out, command=command, note=note)
    if as_json:
        print_json({"items": [asdict(item) for item in items], "page": str(page)})
        return
    listing = table("", "item", "verdict", "why", text=3)
    for item in items:
        verdict = "[green]reproduced[/]" if item.verdict == "reproduced" else "[yellow]differs[/]"
        listing.add_row(item.title, verdict, item.reason)
    screen.print(listing)
    print_path("page", page)
