"""The whole market in one process, from one seed, with everything failing that can: `flmarket torture`.

The round, the kinds, the guard, the accounts, the ledger and the broker are the shipped ones. What is simulated is what
lies behind their seams: disks, the network, the clock, and people. After every step promises are checked in which no
shipped code has a say (`watch`). One seed gives one run, so whatever is found can be found again.

Two worlds: owners on nodes behind a network (`nodes`), and a broker of two processes on one database (`service`).

What would break it: a decision that does not come from the seed (a clock, a set's order, a thread). The same seed must
tell the same story, and a test says so.

Runs without end: a seed at a time, until enough rounds were played; a seed that fails is made small and told.

Making it small is trying again with less: fewer tasks and turns, then without some of the faults that happened
(Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 2002), as long as the same rule is
broken. What is left is the story: who did what, which faults it took, and which promise was not kept.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

from flmarket.simulator.world import Chance, Crash, Fault, Swarm, World

__all__ = ["Chance", "Crash", "Run", "Swarm", "Total", "run_seed", "smallest", "torture"]

_SERVICE_EVERY = 16  # one run of so many is the broker's: they take longer
SEEDS = 1_000_000  # runs of one torture have numbers from here: seed · SEEDS + 0, 1, 2, …
_PATIENCE = 90.0  # seconds of making small


@dataclass(frozen=True)
class Run:
    """What one seed came to; `broken` is empty if every promise was kept."""

    seed: int
    world: str
    swarm: Swarm
    tasks: int
    rounds: int
    faults: tuple[Fault, ...]
    broken: tuple[tuple[str, str], ...]
    story: tuple[str, ...]
    seconds: float = field(default=0.0, compare=False)  # of a processor

    def told(self) -> str:
        """For people."""
        lines = [
            f"seed {self.seed}, {self.world}: {self.swarm.owners} owners, {self.tasks} tasks, {self.rounds} rounds"
        ]
        lines += [f"  {line}" for line in self.story]
        lines.append(f"  it took {len(self.faults)} faults: " + (_counted(self.faults) or "none at all"))
        lines += [f"  BROKEN {rule}: {message}" for rule, message in self.broken[:5]]
        return "\n".join(lines)


def _counted(faults: tuple[Fault, ...]) -> str:
    return ", ".join(f"{name} ×{count}" for name, count in sorted(Counter(name for name, _ in faults).items()))


@dataclass
class Total:
    """What all runs of a torture came to."""

    seed: int
    runs: int = 0
    tasks: int = 0
    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failed: Run | None = None

    @property
    def tasks_per_minute(self) -> float:
        """Of one processor."""
        return 60 * self.tasks / self.seconds if self.seconds else 0.0


def run_seed(
    seed: int, *, swarm: Swarm | None = None, spared: frozenset[Fault] = frozenset(), world: str | None = None
) -> Run:
    """One run. `world` is "nodes" or "service"; the seed says which if it is not given."""
    chosen = world or ("service" if seed % _SERVICE_EVERY == _SERVICE_EVERY - 1 else "nodes")
    settings, began = Swarm.of(seed) if swarm is None else swarm, time.process_time()
    chance, folder = Chance(seed, settings.rates, spared), Path(tempfile.mkdtemp(prefix="flmarket-", dir=_fast()))
    try:
        played = _world(chosen)(settings, folder, chance)
        played.play()
        return Run(
            seed, chosen, settings, played.begun, played.rounds, tuple(chance.fired), tuple(played.watch.broken),
            tuple(played.story), time.process_time() - began,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _world(name: str) -> Callable[[Swarm, Path, Chance], World]:
    if name == "service":
        from flmarket.simulator.service import ServiceWorld

        return ServiceWorld
    from flmarket.simulator.nodes import NodeWorld

    return NodeWorld


def _fast() -> str | None:
    """Where files cost nothing, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  # a folder of our own is made there


def seeds(first: int) -> Iterator[int]:
    """The seeds of a torture, one run each."""
    return iter(range(first * SEEDS, (first + 1) * SEEDS))


def torture(
    seed: int,
    *,
    rounds: int | None = None,
    seconds: float | None = None,
    world: str | None = None,
    jobs: int = 1,
    progress: Callable[[Total], None] | None = None,
) -> Total:
    """Run seeds until so many rounds were played or so much time has passed, or a promise was not kept.

    With several `jobs`, so many processes; runs are counted in the order of their seeds all the same.
    """
    total, until = Total(seed), None if seconds is None else time.monotonic() + seconds
    for found in _runs(seed, world, jobs):
        total.runs, total.tasks, total.rounds = total.runs + 1, total.tasks + found.tasks, total.rounds + found.rounds
        total.faults.update(name for name, _ in found.faults)
        total.seconds += found.seconds
        if found.broken:
            total.failed = smallest(found)
        if progress is not None:
            progress(total)
        done = rounds is not None and total.rounds >= rounds
        if found.broken or done or (until is not None and time.monotonic() > until):
            break
    return total


def _runs(first: int, world: str | None, jobs: int) -> Iterator[Run]:
    """Runs of one seed after another, a few ahead if there are processes for them."""
    if jobs == 1:
        yield from (run_seed(seed, world=world) for seed in seeds(first))
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: deque[Future[Run]] = deque()
        try:
            for seed in seeds(first):
                waiting.append(pool.submit(run_seed, seed, world=world))
                if len(waiting) > 2 * jobs:
                    yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


def smallest(failed: Run, *, seconds: float = _PATIENCE) -> Run:
    """The smallest run that was found in time in which the same rule is broken."""
    rule, until = failed.broken[0][0], time.monotonic() + seconds
    best, spared = failed, frozenset[Fault]()

    def tried(swarm: Swarm, without: frozenset[Fault]) -> Run | None:
        if time.monotonic() > until:
            return None
        found = run_seed(failed.seed, swarm=swarm, spared=without, world=failed.world)
        return found if found.broken and found.broken[0][0] == rule else None

    for tasks, turns in ((1, 20), (1, 60), (2, 60), (2, 120), (4, 120), (8, 200)):
        if tasks < best.swarm.tasks or turns < best.swarm.turns:
            found = tried(replace(failed.swarm, tasks=tasks, turns=turns), spared)
            if found is not None:
                best = found
                break
    for name in sorted({fault for fault, _ in best.faults}):  # a whole sort of fault at a time
        rates = {fault: rate for fault, rate in best.swarm.rates.items() if fault != name}
        found = tried(replace(best.swarm, rates=rates), spared)
        best = found or best
    size = max(1, len(best.faults) // 2)
    while size and time.monotonic() < until:
        for start in range(0, len(best.faults), size):
            without = spared | frozenset(best.faults[start : start + size])
            found = tried(best.swarm, without)
            if found is not None and len(found.faults) < len(best.faults):
                best, spared = found, without
                break
        else:
            size //= 2
    return best
