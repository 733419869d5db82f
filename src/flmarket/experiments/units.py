"""Units of work: which papers there are, running their tables and figures side by side, and never twice.

A finished unit leaves a record in the output folder with the settings that it was run with. Running the command again
with the same settings reads the record; it is run again when a setting, the experiment's module, the version, the set
of its `ENTRANTS` that are registered auctions or their trained weights have changed, or when a file of it is gone. The
check does not see changes elsewhere in the library: `fresh` runs everything.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import flmarket
from flmarket import auctions
from flmarket.auctions import learned
from flmarket.errors import DataUnavailable, FlmarketError, InvalidInput, MissingDependency, UnknownName
from flmarket.experiments.items import PAPERS, Check, Item, Job, Reproduction, Step, agreed, from_checks
from flmarket.files import jsonable, write_files

RECORDS = "units"  # folder of records inside the output folder
SEEDS = 5  # by default
_POLL_SECONDS = 0.2
_DRAW = 100_000  # seeds from one draw to the next, more than any figure uses
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Settings:
    """How much of everything to run, and where data sets lie."""

    quick: bool
    seeds: int
    data_dir: Path | None = None
    draw: int = 0  # another one, other seeds

    def __post_init__(self) -> None:
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or self.seeds < 1:
            raise InvalidInput("seeds", self.seeds, "a whole number of at least 1")

    def job(self, out_dir: Path, step: Step) -> Job:
        """What a figure is told."""
        first = self.draw * _DRAW
        return Job(out_dir, self.quick, range(first, first + self.seeds), self.data_dir, step)


@dataclass(frozen=True)
class Unit:
    """One entry of a paper's `ITEMS`."""

    paper: str
    item: str

    def __str__(self) -> str:
        return f"{self.paper}:{self.item}"

    @property
    def record(self) -> str:
        """The name of the file that says it is done."""
        return f"{self.paper}-{self.item}.json"


@dataclass(frozen=True)
class Finished:
    """What a unit left behind, and how many seconds of a processor it took."""

    unit: Unit
    quick: bool
    seeds: int
    seconds: float
    items: tuple[Item, ...]


Report = Callable[[Unit, str], None]  # a note about a unit; "" when it is done


def papers() -> dict[str, tuple[str, ...]]:
    """Every paper with the keys of its items, in the order of publication."""
    found = {}
    for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
        loaded = importlib.import_module(f"{__package__}.{module.name}")
        if hasattr(loaded, "ITEMS"):
            found[module.name] = tuple(loaded.ITEMS)
    order = [*PAPERS, *sorted(set(found) - set(PAPERS))]
    return {name: found[name] for name in order if name in found}


def select(wanted: str) -> tuple[Unit, ...]:
    """The units behind "all", "flm22" or "flm22:fig7"."""
    known = papers()
    if wanted == "all":
        return tuple(unit for paper, items in known.items() for unit in _units(paper, items))
    paper, colon, item = wanted.partition(":")
    if paper not in known:
        raise UnknownName("paper", wanted, f"one of {', '.join(known)}, all; PAPER:ITEM for one table or figure")
    if not colon:
        return _units(paper, known[paper])
    if item not in known[paper]:
        raise UnknownName("item", wanted, f"one of {', '.join(f'{paper}:{key}' for key in known[paper])}")
    return (Unit(paper, item),)


def run_units(
    units: Sequence[Unit],
    out_dir: Path,
    settings: Settings,
    *,
    jobs: int = 1,
    fresh: bool = False,
    report: Report = lambda unit, note: None,
) -> list[Finished]:
    """Run what is not done yet; what is done is read. Results in the order of `units`."""
    if jobs < 1:
        raise InvalidInput("jobs", jobs, "at least 1")
    done: dict[Unit, Finished] = {}
    for unit in units:
        earlier = None if fresh else _earlier(unit, out_dir, settings)
        if earlier is not None:
            done[unit] = earlier
            report(unit, "")
    left = [unit for unit in units if unit not in done]
    if jobs == 1 or len(left) < 2:
        for unit in left:
            report(unit, "starting")
            done[unit] = _run(unit, out_dir, settings, partial(report, unit))
            report(unit, "")
    else:
        done |= _side_by_side(left, out_dir, settings, min(jobs, len(left)), report)
    return [done[unit] for unit in units]


def finished_units(out_dir: Path) -> list[Finished]:
    """Everything that the folder holds, whenever and however it was run, in the order of papers."""
    known = [unit for paper, items in papers().items() for unit in _units(paper, items)]
    records = ((unit, _record(unit, out_dir)) for unit in known)
    return [record.finished(unit) for unit, record in records if record is not None]


def agreement(draws: Sequence[Sequence[Finished]]) -> list[Finished]:
    """The first draw's results with the verdicts that every draw of the seeds agrees on, else "undecided"."""
    items = [{item.key: item for one in draw for item in one.items} for draw in draws]

    def settled(item: Item) -> Item:
        same = [each[item.key] for each in items if item.key in each]
        checks = tuple(_over(check, [one.checks[place] for one in same]) for place, check in enumerate(item.checks))
        seen = ", ".join(one.verdict for one in same)
        made = from_checks(item.key, item.title, checks) if checks else item
        return replace(
            item, verdict=made.verdict, reason=made.reason, checks=checks, note=f"{item.note} Draws: {seen}."
        )

    return [replace(one, items=tuple(settled(item) for item in one.items)) for one in draws[0]]


def _over(check: Check, draws: Sequence[Check]) -> Check:
    """The check with the verdict of all draws; where they are not of one mind, it says what each found."""
    verdicts = [one.verdict for one in draws]
    if len(set(verdicts)) == 1:
        return check
    told = "; ".join(f"{one.verdict}: {one.evidence}" for one in draws)
    return replace(check, verdict=agreed(verdicts), evidence=f"draws of the seeds disagree ({told})")


def _units(paper: str, items: tuple[str, ...]) -> tuple[Unit, ...]:
    return tuple(Unit(paper, item) for item in items)


def _run(unit: Unit, out_dir: Path, settings: Settings, step: Callable[[str], None]) -> Finished:
    module = importlib.import_module(f"{__package__}.{unit.paper}")
    work: Reproduction = module.ITEMS[unit.item]
    start = time.process_time()  # of the processor: a busy machine makes nothing look slow
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        made = work(settings.job(out_dir, step))
    except (DataUnavailable, MissingDependency) as missing:
        return Finished(unit, settings.quick, settings.seeds, 0.0, (_not_run(unit, str(missing)),))
    items = tuple(
        replace(item, numbers=jsonable(item.numbers)) for item in ((made,) if isinstance(made, Item) else made)
    )
    finished = Finished(unit, settings.quick, settings.seeds, time.process_time() - start, items)
    record = asdict(_Record(_inputs(unit, settings), finished.seconds, items))
    write_files(out_dir / RECORDS, {unit.record: json.dumps(record, ensure_ascii=False, indent=1)})
    return finished


def _not_run(unit: Unit, why: str) -> Item:
    """Not recorded, so that the next run tries again."""
    return Item(str(unit).replace(":", "-"), str(unit), "", "not run", why)


def _inputs(unit: Unit, settings: Settings) -> dict[str, object]:
    """All that decides whether an earlier result still stands."""
    module = importlib.import_module(f"{__package__}.{unit.paper}")
    source = module.__file__
    assert source is not None
    where = "" if settings.data_dir is None else str(settings.data_dir.resolve())
    return {
        "quick": settings.quick,
        "seeds": settings.seeds,
        "draw": settings.draw,
        "data": hashlib.sha256(where.encode()).hexdigest()[:12],  # a record may be published: no path in it
        "code": hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12],
        "version": flmarket.__version__,
        "auctions": _trained(getattr(module, "ENTRANTS", ())),
    }


def _trained(entrants: Sequence[str]) -> list[str]:
    """The entrants that are there, learned ones with what their weights say of their training."""
    found = [name for name in entrants if auctions.known(name)]
    for name in [name for name in found if name in learned.DEFAULTS or name in learned.PAPERS]:
        for weights in learned.weight_names(name):
            try:
                found.append(f"{name}:{weights}: {learned.load(name, weights).guarantees.source}")
            except FlmarketError as problem:  # unreadable, or the library that reads them is missing
                found.append(f"{name}:{weights}: {type(problem).__name__}")
    return found


@dataclass(frozen=True)
class _Record:
    """What a unit that is done leaves in a file."""

    inputs: dict[str, Any]
    seconds: float
    items: tuple[Item, ...]

    def finished(self, unit: Unit) -> Finished:
        """What `run_units` gives."""
        return Finished(unit, bool(self.inputs["quick"]), int(self.inputs["seeds"]), self.seconds, self.items)


def _record(unit: Unit, out_dir: Path) -> _Record | None:
    """None where there is none that can be read, or a file that it names is gone."""
    try:
        record = TypeAdapter(_Record).validate_json((out_dir / RECORDS / unit.record).read_bytes())
    except (OSError, ValueError):
        return None
    return record if all((out_dir / name).exists() for item in record.items for name in item.files) else None


def _earlier(unit: Unit, out_dir: Path, settings: Settings) -> Finished | None:
    record = _record(unit, out_dir)
    return None if record is None or record.inputs != _inputs(unit, settings) else record.finished(unit)


_notes: Any = None  # in a worker: where its notes go


def _begin_worker(notes: Any) -> None:
    global _notes
    _notes = notes
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed command should not leave figures in the making behind: nobody would take them."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _in_worker(unit: Unit, out_dir: Path, settings: Settings) -> Finished:
    return _run(unit, out_dir, settings, lambda note: _notes.put((unit, note)))


def _side_by_side(
    units: Sequence[Unit], out_dir: Path, settings: Settings, jobs: int, report: Report
) -> dict[Unit, Finished]:
    """A process for each unit, `jobs` at a time, one thread each; spawned, since torch does not survive a fork."""
    context = multiprocessing.get_context("spawn")
    notes = context.SimpleQueue()
    done: dict[Unit, Finished] = {}
    with (
        _one_thread(),
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_worker, initargs=(notes,)) as pool,
    ):
        waiting: dict[Future[Finished], Unit] = {pool.submit(_in_worker, u, out_dir, settings): u for u in units}
        try:
            while waiting:
                ready, _ = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                while not notes.empty():
                    report(*notes.get())
                for future in ready:
                    unit = waiting.pop(future)
                    done[unit] = future.result()
                    report(unit, "")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done


@contextmanager
def _one_thread() -> Iterator[None]:
    """New processes read these when they load NumPy or torch: two threads each on two cores are slower than one."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
