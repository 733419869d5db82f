"""This checkout against an earlier one, in one run: `python -m benchmarks.against REVISION --repeats 3 --only WORDS`.

The same markets through the same public calls, in processes of the two versions by turns, so that whatever else the
machine does falls on both. A row is the ratio of the best times; below 1 means faster now. On a busy machine
`--processor` counts processor time instead, which others do not lengthen; waiting for a disk is then not in it.
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
from pathlib import Path
import numpy as np
from flmarket.engines.config import MarketConfig
from flmarket.ledger import Award, AwardState, MemoryLedger, Resolution, SqlLedger
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

def on_flower(market=flower):
    from flmarket.engines.flower import simulate
    with tempfile.TemporaryDirectory() as folder:
        simulate(parse(market).simulation(), Path(folder))

def on_disk():
    with tempfile.TemporaryDirectory() as folder, SqlLedger(f"sqlite:///{folder}/l.db") as ledger:
        books(ledger)

work = {name: spec.run for name, spec in specs.items()}
work |= {"ledger in memory, 4,000 awards": lambda: books(MemoryLedger()), "ledger on SQLite, 4,000 awards": on_disk,
         "auction on Flower, 10 nodes, 3 rounds": on_flower}
work["auction on Flower, 400 nodes, 3 rounds"] = lambda: on_flower(many)
times, clock = {}, getattr(time, sys.argv[2])
for name, run in work.items():
    if sys.argv[1] not in name:
        continue
    if "400" not in name:
        run()
    best = 1e9
    for _ in range(1 if "400" in name else 3):
        started = clock()
        run()
        best = min(best, clock() - started)
    times[name] = best
print(json.dumps(times))
"""


def measured(source: Path, only: str, clock: str) -> dict[str, float]:
    """Seconds of each piece of work, or of those with this in their names, by the code of one checkout."""
    env = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WORK, only, clock], env=env, check=True, capture_output=True, text=True, cwd=source
    )
    return {name: float(seconds) for name, seconds in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    """Check the earlier revision out beside this one, measure both by turns, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="what its name has in it")
    parser.add_argument("--processor", action="store_const", dest="clock", const="process_time", default="perf_counter")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(before), given.revision], check=True)
        try:
            runs = [
                tuple(measured(source, given.only, given.clock) for source in (before, HERE))
                for _ in range(given.repeats)
            ]
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    for name in runs[0][0]:
        then, now = (min(pair[side][name] for pair in runs) for side in (0, 1))
        print(f"{name:40} before {1000 * then:9.1f} ms   now {1000 * now:9.1f} ms   ratio {now / then:5.2f}")


if __name__ == "__main__":
    main()
