"""`flmarket torture`: how many rounds, how many faults, and the story of whatever broke."""

from __future__ import annotations

import json
import sys
import time

import typer

from flmarket.errors import InvalidInput, MissingDependency

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
    try:
        from flmarket.simulator import Total, run_seed, torture
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "flower,broker") from None
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
