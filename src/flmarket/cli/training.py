"""`flmarket train-auction`: fit a learned auction to a population, with progress, checkpoints and resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flmarket.auctions.posted import LINEAR, Menu
from flmarket.auctions.posted.training import Trainer
from flmarket.cli.output import print_json, print_path, progress, screen
from flmarket.errors import UnknownName

__all__ = ["PRESETS", "train_auction"]

PRESETS = ("posted",)


def train_auction(
    preset: str,
    populations: Sequence[str],
    profiles: int,
    generations: int,
    unit: float | None,
    start: Path | None,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Train and write the menu after every generation, so that an interrupted run can be resumed with --start."""
    if preset not in PRESETS:
        raise UnknownName("preset", preset, f"one of {', '.join(PRESETS)}")
    first = LINEAR if start is None else Menu.read(start)
    trainer = Trainer(populations, profiles=profiles, seed=seed)
    before, began = trainer.loss(LINEAR), time.perf_counter()
    options = " ".join(f"--population {name}" for name in populations)
    command = f"flmarket train-auction {preset} {options} --profiles {profiles} --generations {generations}"
    command += (f" --unit {unit:g}" if unit is not None else "") + f" --seed {seed}"
    out.parent.mkdir(parents=True, exist_ok=True)
    loss, evaluations = before, 0
    with progress(generations, quiet=as_json) as step:
        search = trainer.train(
            start=first, unit=unit, generations=generations, seed=seed, step=0.1 if start is None else 0.05
        )
        for state in search:
            loss, evaluations = state.best, state.evaluations
            replace(state.menu, name=out.stem, provenance=command).save(out)
            step(f"generation {state.generation}: {loss:.4f} (untrained {before:.4f})")
    if as_json:
        seconds = time.perf_counter() - began
        print_json(
            {"loss": loss, "untrained": before, "evaluations": evaluations, "seconds": seconds, "menu": str(out)}
        )
    else:
        screen.print(f"loss {loss:.4f} after {evaluations} evaluations (untrained {before:.4f})")
        print_path("menu", out)
