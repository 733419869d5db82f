"""Several services on one database, broken while people use them; afterwards the history is judged.

    PYTHONPATH=tests/support python -m histories --seconds 180 --database sqlite --seed 1
    PYTHONPATH=tests/support python -m histories --database postgres --plant "key ignored"

The verdict has three parts: what clients saw (`checker`), what plain SQL finds in the books
(`flmarket.simulator.watch`), and what the service says of its own ledger.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from .plants import PLANTS
from .runs import run
from .services import postgres


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long things break")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--share", type=float, default=0.3, help="of requests that the network loses, delays or doubles"
    )
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--url", help="an empty database to use instead")
    parser.add_argument("--plant", choices=PLANTS, help="a bug in the services, which must be found")
    options = parser.parse_args()
    # before NumPy is imported: a process with threads cannot be forked safely
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # processes are killed, not machines: files need not reach a disk
    folder, server = tempfile.mkdtemp(prefix="histories-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None), None
    url = options.url or f"sqlite:///{folder}/broker.db"
    if options.url is None and options.database == "postgres":
        server, url = postgres(folder)
    try:
        result = run(
            url, seconds=options.seconds, seed=options.seed, folder=folder, share=options.share, plant=options.plant
        )
    finally:
        if server is not None:
            server.cleanup()
    print(json.dumps(result | {"folder": folder}, indent=1))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
