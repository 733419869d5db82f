"""`flmarket train-auction`: fit a learned auction to a population, with progress, checkpoints and resume."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.auctions.posted import LINEAR, NetworkMenu, read_menu
from flmarket.bids import BidProfile
from flmarket.cli.audit import figures_for_weights
from flmarket.cli.output import print_json, print_path, progress, screen
from flmarket.errors import InvalidInput, needed
from flmarket.populations import get as get_population
from flmarket.populations import read_bids


@dataclass(frozen=True)
class MenuOptions:
    """How a posted menu is fitted."""

    profiles: int = 384
    steps: int = 2400
    unit: float | None = None
    explorers: int | None = None
    aggregation: str = "opt-aggr"
    owners: int = 10
    start: Path | None = None


def train_menu(
    populations: Sequence[str], bids: Path | None, options: MenuOptions, seed: int, out: Path, as_json: bool
) -> None:
    """Fit a posted menu; it is written as training goes on, so that an interrupted run goes on with --start."""
    with needed("torch"):
        import torch
    from flmarket.auctions.learned.training.market import Source
    from flmarket.auctions.posted.training import Objective, Trainer

    if bool(populations) == (bids is not None):
        raise InvalidInput("population", list(populations), "one --population or several, or --bids with past bids")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    history, unit, words = None, options.unit, [f"--population {name}" for name in populations]
    if bids is not None:
        history, words = read_bids(bids), [f"--bids {bids.name}"]
    if unit is None and len(populations) < 2:  # bidders of one kind, so it is known what their money is worth
        unit = _typical_value(history or get_population(populations[0]).sample(np.random.default_rng(0), None, 1000))
    sources = [Source(None, history, owners=options.owners)] if history else []
    sources += [Source(name, owners=options.owners) for name in populations]
    # before anybody has spoken, a menu without a unit of money does not know what a record is worth
    explorers = (0 if unit is not None else 2) if options.explorers is None else options.explorers
    first = None if options.start is None else read_menu(options.start)
    if first is not None and not isinstance(first, NetworkMenu):
        raise InvalidInput("start", str(options.start), "a menu that is a network")
    trainer = Trainer(
        sources, objective=Objective(options.aggregation), unit=unit, explorers=explorers, profiles=options.profiles,
        seed=seed,
    )  # fmt: skip
    before, began = trainer.loss(LINEAR), time.process_time()
    words += [f"--profiles {options.profiles} --steps {options.steps} --explorers {explorers} --seed {seed}"]
    words += _changed(options, ("unit", "aggregation", "owners", "start"))
    command = " ".join(["flmarket train-auction posted", *words])
    out.parent.mkdir(parents=True, exist_ok=True)
    loss = before
    with progress(options.steps, quiet=as_json) as step:
        done, hot = 0, 0.05 if first is None else 0.015
        for state in trainer.train(steps=options.steps, start=first, temperature=(hot, 0.005)):
            loss = state.loss
            replace(state.menu, name=out.stem, provenance=command).save(out)
            for _ in range(done, state.step):
                step(f"step {state.step}: {loss:.4f} (untrained {before:.4f})")
            done = state.step
    seconds = time.process_time() - began
    if as_json:
        print_json({"loss": loss, "untrained": before, "steps": options.steps, "seconds": seconds, "menu": str(out)})
    else:
        screen.print(f"loss {loss:.4f} after {options.steps} steps (untrained {before:.4f}, {seconds:.0f} s)")
        print_path("menu", out)


def _changed(options: "MenuOptions | LearningOptions", names: Sequence[str]) -> list[str]:
    """Those of the options that are not what they are by default, as they are typed."""
    given = [(name, getattr(options, name)) for name in names if getattr(options, name) != getattr(type(options), name)]
    shown = [(name, value.name if isinstance(value, Path) else value) for name, value in given]
    return [f"--{name.replace('_', '-')} {value if isinstance(value, str) else f'{value:g}'}" for name, value in shown]


def _typical_value(bids: BidProfile) -> float:
    """The geometric mean of what a record at ε = 1 is worth."""
    values = bids.valuations.per_record(1.0)
    if not (values > 0).any():
        raise InvalidInput("bids", "values of 0", "some owner who puts a value on a record")
    return float(np.exp(np.log(values[values > 0]).mean()))


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
    schedule: str = "paper"  # of the papers' networks: "paper", "eighths" of its batches, or "short" to try out
    checkpoints: Path | None = None
    iterations: int | None = None  # at most, in all, counting those of the checkpoint


@dataclass(frozen=True)
class _Job:
    """One training as it was asked for: whose bids, with what, and where it goes."""

    population: str | None
    source: Any
    options: LearningOptions
    seed: int
    out: Path
    command: str
    as_json: bool


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
    with needed("torch"):
        import torch
    from flmarket.auctions.learned.training import PAPER_PRESETS, preset
    from flmarket.auctions.learned.training.market import Source

    paper, chosen = preset_name in PAPER_PRESETS, preset(preset_name)
    if (population is None) == (bids is None):
        raise InvalidInput("population", population, "one --population, or --bids with a file of past bids")
    if out.suffix != ".safetensors":
        raise InvalidInput("out", str(out), "a file name that ends in .safetensors")
    schedule = chosen.schedule
    if paper and options.schedule == "short":
        schedule = replace(schedule, epochs=5, batches=20, profiles=128, misreports=20)
    elif paper and options.schedule == "eighths":
        schedule = replace(schedule, parts=8)
    elif options.schedule not in ("paper", "eighths", "short"):
        raise InvalidInput("preset", options.schedule, "paper, eighths or short")
    given = {name: getattr(options, name) for name in ("profiles", "epochs", "batches", "misreports")}
    schedule = replace(schedule, **{name: value for name, value in given.items() if value is not None})
    if options.regret_weight is not None:
        schedule = replace(schedule, regret=replace(schedule.regret, multiplier=options.regret_weight))
    torch.set_num_threads(options.threads)
    command = _command(preset_name, population, bids, options, seed)
    source = Source(population, None if bids is None else read_bids(bids), owners=options.owners)
    out.parent.mkdir(parents=True, exist_ok=True)
    job = _Job(population, source, options, seed, out, command, as_json)
    (_train_paper if paper else _train)(replace(chosen, schedule=schedule), job)


def _train(chosen: Any, job: _Job) -> None:
    from flmarket.auctions import learned
    from flmarket.auctions.learned.training import trainer as training

    options, out = job.options, job.out
    trainer = training.Trainer(chosen, job.source, seed=job.seed)
    checkpoint, metrics = out.with_suffix(".checkpoint"), out.with_suffix(".csv")
    if options.resume and checkpoint.exists():
        trainer.resume(checkpoint)
    elif metrics.exists():
        metrics.unlink()  # of an earlier run
    provenance: dict[str, Any] = {"command": job.command, "seed": job.seed, "epoch": trainer.best_epoch, "seconds": 0.0}
    began = time.process_time()
    with progress(chosen.schedule.epochs, quiet=job.as_json) as step:
        for _ in range(trainer.epoch):
            step("resumed")
        for epoch in trainer.run():
            seconds = time.process_time() - began
            provenance |= {"epoch": trainer.best_epoch, "seconds": round(seconds, 1)}
            if epoch.best:
                provenance["validation"] = asdict(epoch.deployed)
            learned.save(out, chosen.settings, dict(trainer.auction().parameters), provenance)
            trainer.save(checkpoint)
            training.append_metrics(metrics, epoch)
            found = epoch.deployed
            step(f"epoch {epoch.epoch}: error bound {found.bound:.3f}, regret {found.regret:.4f}")
    last = trainer.measure(trainer.best)
    words = (
        f"error bound {last.bound:.4f}, nobody sells in {last.empty:.2%}, regret {last.regret:.4f} of cost "
        f"(few lies; best epoch {provenance['epoch']}, {provenance['seconds']:.0f} s of processor time)"
    )
    _finish(trainer.auction(), provenance | {"validation": asdict(last)}, words, job)
    checkpoint.unlink(missing_ok=True)


SAVE_EVERY = 120.0  # seconds between checkpoints


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C came: the iteration under way is finished and kept."""
    asked: list[int] = []
    handlers = {
        one: signal.signal(one, lambda number, _: asked.append(number)) for one in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(asked)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


def _train_paper(chosen: Any, job: _Job) -> None:
    """One of the papers' networks: goes on from its checkpoint, if there is one, and may be stopped at any time."""
    from flmarket.auctions.learned.training.papers import PaperTrainer

    options = job.options
    if options.owners != chosen.settings.owners:
        chosen = replace(chosen, settings=replace(chosen.settings, owners=options.owners))
    trainer = PaperTrainer(chosen, job.source, seed=job.seed)
    folder = job.out.parent if options.checkpoints is None else options.checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    called = f"{chosen.name}-{job.population or 'bids'}"
    checkpoint, curve = folder / f"{called}.checkpoint", folder / f"{called}.csv"
    if checkpoint.exists():
        trainer.resume(checkpoint)

    def keep() -> None:
        trainer.save(checkpoint)
        trainer.write_curve(curve)

    saved, end = time.monotonic(), trainer.total if options.iterations is None else options.iterations
    with _asked_to_stop() as stop, progress(trainer.total, quiet=job.as_json) as step:
        for _ in range(trainer.iteration):
            step("resumed")
        for done in trainer.run(end):
            step(f"iteration {trainer.iteration}" + (f": regret {done.valid_rgt:.3f}" if done else ""))
            if done or time.monotonic() - saved > SAVE_EVERY:
                keep()
                saved = time.monotonic()
            if stop():
                break
        stopped = stop()
    keep()
    if stopped:
        screen.print(f"stopped at iteration {trainer.iteration} of {trainer.total}; the same command goes on")
        return
    _write_paper(trainer, job)


def _write_paper(trainer: Any, job: _Job) -> None:
    from flmarket.auctions.learned.training.papers import by_the_papers, deployed

    auction, schedule = trainer.auction(), trainer.preset.schedule
    bound, empty = deployed(auction, *trainer.held_out, seed=trainer.seed)
    found = by_the_papers(auction, schedule, *trainer.held_out, seed=trainer.seed)
    provenance: dict[str, Any] = {
        "command": job.command, "seed": trainer.seed, "iterations": trainer.iteration, "scheduled": trainer.total,
        "validation_is_flat": trainer.flat, "seconds": round(trainer.seconds, 1),
        "deployed": {"bound": bound, "empty": empty}, "papers_metric": asdict(found),
    }  # fmt: skip
    words = (
        f"{trainer.iteration:,} of {trainer.total:,} iterations; error bound {bound:.3f}, nobody sells in {empty:.2%}; "
        f"by the papers' metric rgt {found.rgt:.4f}, irv {found.irv:.4f}"
    )
    _finish(auction, provenance, words, job)


def _audited(auction: Any, job: _Job) -> dict[str, Any]:
    """The strong search on a sample, for the record; docs/learned.md has the figures of full audits."""
    from flmarket.audit import STRENGTHS, audit

    # the search alone: how good the auction is was measured on the validation profiles
    strong = replace(STRENGTHS["strong"], efficiency_profiles=0, structure_profiles=10)
    profiles = job.options.audit_profiles
    given = job.population or job.source.draw(np.random.default_rng((job.seed, 3)), profiles)[0]
    report = audit(auction, given, profiles=profiles, search=strong, seed=job.seed)
    return figures_for_weights(report, job.population or "the history's bids", "strong")


def _command(preset_name: str, population: str | None, bids: Path | None, options: LearningOptions, seed: int) -> str:
    source = f"--population {population}" if population else f"--bids {bids.name if bids else ''}"
    words = _changed(options, ("profiles", "epochs", "batches", "misreports", "regret_weight", "owners"))
    words += [f"--preset {options.schedule}"] if options.schedule != "paper" else []
    return " ".join(["flmarket train-auction", preset_name, source, *words, f"--seed {seed}"])


def _finish(auction: Any, provenance: dict[str, Any], words: str, job: _Job) -> None:
    """Audit it, write the weights with all that is known of them, and say so."""
    from flmarket.auctions import learned

    if job.options.audit_profiles:
        provenance["audit"] = _audited(auction, job)
    learned.save(job.out, auction.settings, dict(auction.parameters), provenance)
    if job.as_json:
        print_json({**provenance, "weights": str(job.out)})
        return
    screen.print(words)
    if "audit" in provenance:
        screen.print(f"audited: regret {provenance['audit']['mean_regret_over_cost']:.4f} of cost, strong search")
    print_path("weights", job.out)
