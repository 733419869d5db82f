"""The simulator finds every planted bug, and nothing in what is shipped; short runs here, long ones by hand.

Seeds are tried in order until one finds the bug, so a change of what is drawn when needs no other seed; for bugs that
few seeds find the search begins where one did lately. The fresh batch takes its seed from the clock and prints it, so
whatever it finds can be found again: `flmarket torture --seed SEED`.
"""

import json
import time

import pytest

pytest.importorskip("flwr")
pytest.importorskip("fastapi")

from planted_bugs import BUGS, first_seed, planted
from typer.testing import CliRunner

from flmarket.cli.app import app
from flmarket.simulator import Chance, Swarm, run_seed, smallest, torture
from flmarket.simulator.world import FAULTS

RARE = {"double pay on resume": 50, "end before resume": 27, "unfenced lease": 24}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_the_same_seed_finds_nothing_without_it(name):
    seed, broken, _ = first_seed(name, seconds=200, start=RARE.get(name, 0))
    assert broken is not None, "nobody noticed"
    found = run_seed(seed, world=BUGS[name][0])
    assert not found.broken, found.told()
    assert found.rounds > 0


def test_a_seed_tells_one_story():
    for world in ("nodes", "service"):
        one, two = (run_seed(5, world=world) for _ in range(2))
        assert one == two
        assert one.story != run_seed(6, world=world).story


def test_a_fixed_and_a_fresh_batch_keep_every_promise(capsys):
    for seed in (1, int(time.time())):
        with capsys.disabled():
            print(f"\nflmarket torture --seed {seed}", flush=True)
        total = torture(seed, rounds=120)
        assert total.failed is None, total.failed.told()
        assert total.rounds >= 120
        assert sum(total.faults.values()) > 20


def test_a_failure_is_made_small_and_told():
    with planted("cap checked after release"):
        found = run_seed(first_seed("cap checked after release")[0], world="nodes")
        small = smallest(found, seconds=20)
    assert small.broken[0][0] == found.broken[0][0]
    assert len(small.faults) < len(found.faults) or not small.faults
    assert len(small.story) <= len(found.story)
    told = small.told()
    assert "BROKEN cap: owner" in told
    assert "buyer: posts t1" in told


def test_every_fault_is_in_some_swarm_and_none_in_all():
    swarms = [Swarm.of(seed) for seed in range(60)]
    for fault in FAULTS:
        has = sum(fault in swarm.rates for swarm in swarms)
        assert 0 < has < len(swarms)


def test_what_is_spared_does_not_happen_and_quiet_is_quiet():
    chance = Chance(1, {"disk full": 0.5})
    fired = [chance.happens("disk full") for _ in range(100)]
    assert 20 < sum(fired) < 80
    again = Chance(1, {"disk full": 0.5}, frozenset(chance.fired[:3]))
    assert [again.happens("disk full") for _ in range(100)].count(True) == sum(fired) - 3
    again.quiet = True
    assert not any(again.happens("disk full") for _ in range(100))


def test_without_a_clip_any_length_is_in_form():
    """A seed that took a very long update of a sampling market for a bad one; its kind bounds no length."""
    from flmarket.market import kinds

    assert kinds.of("sampling").largest_norm is kinds.of("sampling").__mro__[1].largest_norm
    swarm = Swarm({"hostile owner": 0.4}, owners=6, tasks=2, turns=30)
    assert not run_seed(1000084, swarm=swarm, world="nodes").broken


def test_the_command():
    runner = CliRunner()
    done = runner.invoke(app, ["torture", "--seed", "2", "--rounds", "20", "--world", "nodes", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["rounds"] >= 20
    assert told["failed"] is None
    with planted("record written before settle"):
        failed = runner.invoke(app, ["torture", "--run", "0", "--world", "nodes"])
    assert failed.exit_code == 1
    assert "BROKEN bill" in failed.output
    with planted("record written before settle"):
        alone = runner.invoke(app, ["torture", "--seed", "0", "--rounds", "50", "--world", "nodes"])
    assert "again: flmarket torture --run" in alone.output
