"""The whole market in one process, from one seed, with everything failing that can: `flmarket torture`.

The round, the kinds, the guard, the accounts, the ledger and the broker are the shipped ones. What is simulated is what
lies behind their seams: disks, the network, the clock, and people. After every step promises are checked in which no
shipped code has a say (`watch`). One seed gives one run, so whatever is found can be found again.

Two worlds: owners on nodes behind a network (`nodes`), and a broker of two processes on one database (`service`).

What would break it: a decision that does not come from the seed (a clock, a set's order, a thread). The same seed must
tell the same story, and a test says so.
"""

from flmarket.simulator.torture import Run, Total, run_seed, smallest, torture
from flmarket.simulator.world import Chance, Crash, Swarm

__all__ = ["Chance", "Crash", "Run", "Swarm", "Total", "run_seed", "smallest", "torture"]
