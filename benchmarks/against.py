"""This checkout against an earlier one, in one run: `python -m benchmarks.against REVISION --repeats 3 --only WORDS`.

The same markets through the same public calls, in processes of the two versions by turns, so that whatever else the
machine does falls on both. A row has the best times by the clock and of the processor, which others do not lengthen but
in which waiting for a disk is not, and for both how many times faster this checkout is. The log of a million entries
takes minutes to build and is measured only when asked for: `--only "million"`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
WORK = """
import json, logging, sys, tempfile, time
from contextlib import contextmanager, nullcontext
from pathlib import Path
import numpy as np
from flmarket.engines.config import MarketConfig
from flmarket.ledger import Award, AwardState, MemoryLedger, Release, Resolution, SqlLedger
from flmarket.privacy import PureDp
logging.disable(logging.CRITICAL)

DATA = {"owners": 60, "minimum": 3, "sigma": 0.5}
market = {"task": {"rounds": 20, "bidders_per_round": 40, "budget_factor": 1.0}, "data": DATA}
sampling = {"task": {"rounds": 20, "budget_per_round": 60.0}, "data": DATA, "mechanism": {"auction": "sampling"},
            "training": {"local_steps": 5, "batch_size": 8}}
reward = {"task": {"rounds": 20}, "data": DATA | {"partition": "equal", "owners": 20},
          "mechanism": {"auction": "stackelberg"}}
joint = {"task": {"rounds": 5}, "data": {"name": "digits", "owners": 12, "partition": "equal"},
         "mechanism": {"auction": "jdp"}, "training": {"local_steps": 5, "batch_size": 32},
         "jdp": {"budget_factor": 1.0, "validation": 100}}
flower = {"task": {"rounds": 3, "bidders_per_round": 8, "budget_factor": 1.0},
          "data": {"owners": 10, "partition": "equal"}}
many = {"task": {"rounds": 3, "bidders_per_round": 400, "budget_factor": 1.0},
        "data": {"name": "digits", "owners": 400, "partition": "equal"}}
longer = many | {"task": many["task"] | {"rounds": 10}}
small = {"privacy_budget": [0.05, 0.2], "privacy_cap": 3.0}
capped = many | {"task": many["task"] | {"rounds": 20}, "owners": small, "mechanism": {"perturbation": "privunit-g"}}
both = capped | {"owners": small | {"privacy_cap_delta": 1e-5}}
parse = MarketConfig.parse
specs = {"auction, 60 owners, 20 rounds": parse(market).simulation(),
         "sampling, 60 clients, 20 rounds": parse(sampling).sampled_training(),
         "reward, 20 users, 20 rounds": parse(reward).stackelberg_training(),
         "joint, 12 clients, 5 rounds": parse(joint).jdp_training(),
         "400 owners, 20 rounds, cap on ε": parse(capped).simulation(),
         "400 owners, 20 rounds, cap on (ε, δ)": parse(both).simulation(),
         "the same, Gaussian noise": parse(both | {"mechanism": {"perturbation": "gaussian-l2"}}).simulation()}

def books(ledger):
    ledger.deposit("d", "buyer", 10**12)
    for index in range(20):
        held = ledger.hold_many(Award(f"t/{index}/{i}", index, "buyer", f"owner-{i}", 1.0, 1000) for i in range(200))
        ledger.resolve_many(Resolution(award.id, AwardState.POSTED) for award in held)

def on_flower(market=flower, **options):
    from flmarket.engines.flower import simulate
    with tempfile.TemporaryDirectory() as folder:
        simulate(parse(market).simulation(), Path(folder), **options)

def on_disk():
    with tempfile.TemporaryDirectory() as folder, SqlLedger(f"sqlite:///{folder}/l.db") as ledger:
        books(ledger)

@contextmanager
def rounds(count):
    # every other owner is capped; the awards of a round are held when it is asked for, and not yet settled
    with tempfile.TemporaryDirectory() as folder, SqlLedger(f"sqlite:///{folder}/l.db") as ledger:
        ledger.deposit("d", "buyer", 10**12)
        for owner in range(0, 1000, 2):
            ledger.register_cap(f"owner-{owner}", PureDp(1e6))
        def held():
            for index in range(count):
                ids = [f"task/{index}/{i}" for i in range(1000)]
                ledger.hold_many(Award(id, index, "buyer", f"owner-{i}", 1.0, 100) for i, id in enumerate(ids))
                given = (Release(id, "laplace-l1", PureDp(1.0)) for id in ids)
                yield [Resolution(one.award_id, AwardState.POSTED, release=one) for one in given]
        yield ledger, held()

@contextmanager
def settling():
    with rounds(5) as (ledger, held):
        waiting = iter(list(held))
        yield lambda: ledger.resolve_many(next(waiting))

@contextmanager
def verifying(entries):
    with rounds(entries // 3000) as (ledger, held):
        for one in held:
            ledger.resolve_many(one)
        yield ledger.verify

work = {name: nullcontext(spec.run) for name, spec in specs.items()}
work |= {"ledger in memory, 4,000 awards": nullcontext(lambda: books(MemoryLedger())),
         "ledger on SQLite, 4,000 awards": nullcontext(on_disk),
         "settle a round of 1,000 awards, SQLite": settling(),
         "verify a log of 100,000 entries, SQLite": verifying(100_000),
         "verify a log of a million entries, SQLite": verifying(1_000_000),
         "auction on Flower, 10 nodes, 3 rounds": nullcontext(on_flower),
         "auction on Flower, 400 nodes, 3 rounds": nullcontext(lambda: on_flower(many)),
         "auction on Flower, 400 nodes, 10 rounds": nullcontext(lambda: on_flower(longer)),
         # Owners with seeded noise have nothing to protect from a power cut, and versions differ in whether they wait
         # for the disk. With noise of their own every version does, before anything leaves: like is compared with like.
         "owners' own noise on Flower, 400 nodes, 3 rounds": nullcontext(lambda: on_flower(many, secure_noise=True)),
         "owners' own noise on Flower, 400 nodes, 10 rounds": nullcontext(lambda: on_flower(longer, secure_noise=True))}
times, clocks = {}, (time.perf_counter, time.process_time)
for name, prepared in work.items():
    long = any(size in name for size in ("400", "000 entries", "million"))
    if sys.argv[1] not in name or "million" in name and "million" not in sys.argv[1]:
        continue
    with prepared as run:
        if not long:
            run()
        best = [1e9, 1e9]
        for _ in range(1 if long else 3):
            started = [clock() for clock in clocks]
            run()
            best = [min(least, clock() - since) for least, clock, since in zip(best, clocks, started)]
    times[name] = best
print(json.dumps(times))
"""


def measured(source: Path, only: str) -> dict[str, tuple[float, float]]:
    """Seconds of each piece of work, or of those with this in their names, by the code of one checkout."""
    env = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WORK, only], env=env, check=True, stdout=subprocess.PIPE, text=True, cwd=source
    )
    return {name: (wall, processor) for name, (wall, processor) in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    """Check the earlier revision out beside this one, measure both by turns, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="what its name has in it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(before), given.revision], check=True)
        try:
            runs = [[measured(source, given.only) for source in (before, HERE)] for _ in range(given.repeats)]
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    for name in runs[0][0]:
        print(name)
        for clock, what in enumerate(("clock", "processor")):
            then, now = (min(pair[side][name][clock] for pair in runs) for side in (0, 1))
            print(f"  {what:10} before {1000 * then:10.1f} ms   now {1000 * now:10.1f} ms   {then / now:5.2f}×")


if __name__ == "__main__":
    main()
