"""`flmarket train-auction`: fit a learned auction to a population, with progress, checkpoints and resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flmarket.auctions.posted import LINEAR, Menu
from flmarket.auctions.posted.training import Trainer
from flmarket.cli.output import print_json, print_path, progress, screen
from flmarket.errors import InvalidInput, MissingDependency

__all__ = ["LearningOptions", "train_auction", "train_network"]


def train_auction(
    populations: Sequence[str],
    profiles: int,
    generations: int,
    unit: float | None,
    start: Path | None,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Fit a posted menu; it is written after every generation, so that an interrupted run goes on with --start."""
    first = LINEAR if start is None else Menu.read(start)
    trainer = Trainer(populations, profiles=profiles, seed=seed)
    before, began = trainer.loss(LINEAR), time.perf_counter()
    options = " ".join(f"--population {name}" for name in populations)
    command = f"flmarket train-auction posted {options} --profiles {profiles} --generations {generations}"
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


@dataclass(frozen=True)
class LearningOptions:
    """What may be set of a network's training; None keeps the preset's value."""

    profiles: int | None = None
    epochs: int | None = None
    batches: int | None = None
    misreports: int | None = None
    regret_weight: float | None = None
    owners: int = 10
    threads: int = 1
    resume: bool = False
    audit_profiles: int = 100


def train_network(
    preset_name: str,
    population: str | None,
    bids: Path | None,
    options: LearningOptions,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Train a network; weights, provenance, metrics and a checkpoint are written after every epoch."""
    try:
        import torch
    except ImportError:
        raise MissingDependency("torch", "torch") from None
    from flmarket.auctions.learned.training.presets import preset

    chosen = preset(preset_name)
    if (population is None) == (bids is None):
        raise InvalidInput("population", population, "one --population, or --bids with a file of past bids")
    if out.suffix != ".safetensors":
        raise InvalidInput("out", str(out), "a file name that ends in .safetensors")
    schedule = chosen.schedule
    given = {name: getattr(options, name) for name in ("profiles", "epochs", "batches", "misreports")}
    schedule = replace(schedule, **{name: value for name, value in given.items() if value is not None})
    if options.regret_weight is not None:
        schedule = replace(schedule, regret=replace(schedule.regret, multiplier=options.regret_weight))
    torch.set_num_threads(options.threads)
    command = _command(preset_name, population, bids, options, seed)
    _train(replace(chosen, schedule=schedule), population, bids, options, seed, out, command, as_json)


def _train(
    chosen: Any,
    population: str | None,
    bids: Path | None,
    options: LearningOptions,
    seed: int,
    out: Path,
    command: str,
    as_json: bool,
) -> None:
    from flmarket.auctions.learned import weights
    from flmarket.auctions.learned.training import trainer as training
    from flmarket.auctions.learned.training.data import Source
    from flmarket.populations import read_bids

    source = Source(population, None if bids is None else read_bids(bids), owners=options.owners)
    trainer = training.Trainer(chosen, source, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint, metrics = out.with_suffix(".checkpoint"), out.with_suffix(".csv")
    if options.resume and checkpoint.exists():
        trainer.resume(checkpoint)
    elif metrics.exists():
        metrics.unlink()  # of an earlier run
    provenance: dict[str, Any] = {"command": command, "seed": seed, "epoch": trainer.best_epoch, "seconds": 0.0}
    began = time.process_time()
    with progress(chosen.schedule.epochs, quiet=as_json) as step:
        for _ in range(trainer.epoch):
            step("resumed")
        for epoch in trainer.run():
            seconds = time.process_time() - began
            provenance |= {"epoch": trainer.best_epoch, "seconds": round(seconds, 1)}
            if epoch.best:
                provenance["validation"] = asdict(epoch.deployed)
            weights.save(out, chosen.settings, dict(trainer.auction().parameters), provenance)
            trainer.save(checkpoint)
            training.append_metrics(metrics, epoch)
            found = epoch.deployed
            step(f"epoch {epoch.epoch}: error bound {found.bound:.3f}, regret {found.regret:.4f}")
    best = trainer.auction()
    provenance["validation"] = asdict(trainer.measure(trainer.best))
    if options.audit_profiles:
        provenance["audit"] = _audited(best, source, population, options.audit_profiles, seed)
    weights.save(out, chosen.settings, dict(best.parameters), provenance)
    checkpoint.unlink(missing_ok=True)
    _show(provenance, out, as_json)


def _audited(auction: Any, source: Any, population: str | None, profiles: int, seed: int) -> dict[str, Any]:
    """The strong search on a sample, for the record; docs/learned.md has the figures of full audits."""
    import numpy as np

    from flmarket.audit import STRENGTHS, audit

    # the search alone: how good the auction is was measured on the validation profiles
    strong = replace(STRENGTHS["strong"], efficiency_profiles=0, structure_profiles=10)
    given = population or source.draw(np.random.default_rng((seed, 3)), profiles)[0]
    report = audit(auction, given, profiles=profiles, search=strong, seed=seed)
    overall = report.truthful.overall
    return {
        "population": population or "the history's bids",
        "search": "strong",
        "profiles": profiles,
        "mean_regret_over_cost": overall.mean_regret_over_cost,
        "max_regret_over_cost": overall.max_regret_over_cost,
        "by_lie": {name: found.mean_regret_over_cost for name, found in report.truthful.by_dimension.items()},
        "mean_loss_over_cost": report.rational.mean_loss_over_cost,
        "budget_violations": report.budget.violations,
    }


def _command(preset_name: str, population: str | None, bids: Path | None, options: LearningOptions, seed: int) -> str:
    words = ["flmarket train-auction", preset_name]
    words.append(f"--population {population}" if population else f"--bids {bids.name if bids else ''}")
    for name in ("profiles", "epochs", "batches", "misreports", "regret_weight"):
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')} {value:g}")
    if options.owners != 10:
        words.append(f"--owners {options.owners}")
    return " ".join([*words, f"--seed {seed}"])


def _show(provenance: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        print_json({**provenance, "weights": str(out)})
        return
    found = provenance["validation"]
    screen.print(
        f"error bound {found['bound']:.4f}, nobody sells in {found['empty']:.2%}, regret {found['regret']:.4f} of cost "
        f"(few lies; best epoch {provenance['epoch']}, {provenance['seconds']:.0f} s of processor time)"
    )
    if "audit" in provenance:
        screen.print(f"audited: regret {provenance['audit']['mean_regret_over_cost']:.4f} of cost, strong search")
    print_path("weights", out)
