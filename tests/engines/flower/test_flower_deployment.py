"""A real deployment on loopback: processes, TLS, registered keys, secure noise, a database; also with kill −9."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flmarket.engines.flower import FileStore, OwnerFile
from flmarket.engines.flower.certificates import node_keys
from flmarket.engines.flower.deployment import Deployment, free_ports, processes_marked
from flmarket.learning.travel import Bundle, read_raw
from flmarket.ledger import AwardState, EntryKind, SqlLedger
from flmarket.market.masking import Summing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc"),
]

PATIENCE = 600.0  # these machines may be busy; a quiet one needs a tenth


# Whoever runs the tests in the background may have SIGINT ignored, and children inherit that.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from flmarket.cli import main
main()
"""


def revive(deployment, owner):
    """Start a SuperNode that was killed: Flower takes it back once its heartbeat has lapsed, a minute at most."""
    deadline, log = time.monotonic() + PATIENCE, deployment.log(f"supernode-{owner}")
    while time.monotonic() < deadline:
        begun = log.stat().st_size
        deployment.start_node(owner)
        process = deployment.processes[f"supernode-{owner}"]
        while process.poll() is None and time.monotonic() < deadline:
            if b"SuperNode ID" in log.read_bytes()[begun:]:
                return
            time.sleep(0.2)
        time.sleep(2.0)
    raise AssertionError(f"supernode-{owner} was not taken back, see {log}")


def flmarket(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "500"}, **options,
    )  # fmt: skip


def mark_of(process):
    """The deployment's mark, which the command prints first."""
    for line in process.stderr:
        if found := re.search(r"FLMARKET_DEPLOYMENT=([0-9a-f]{32})", line):
            return found[1]
    raise AssertionError("no mark on standard error")


def await_true(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")


OWN = """
task = {name = "grades", rounds = 9, bidders_per_round = 3, budget_factor = 1.2, learning_rate = 2.0}
data = {train = "train.csv", test = "test.csv", label = "grade", owners = 9, partition = "equal"}
owners = {privacy_budget = [6.0, 6.0], privacy_cap = 40.0}
mechanism = {auction = "all-in"}
"""


def write_grades(path, rows, seed):
    rng = np.random.default_rng(seed)
    kind = rng.integers(2, size=rows)
    lines = [f"{1e5 + 300 * k + rng.normal() * 90},{rng.random()},g{k}" for k in kind]
    path.write_text("\n".join(["pressure,share,grade", *lines]) + "\n")


def test_one_command_sells_own_tables_and_what_was_bought_scores_as_reported(tmp_path):
    (tmp_path / "market.toml").write_text(OWN)
    write_grades(tmp_path / "train.csv", 300, 0)
    write_grades(tmp_path / "test.csv", 101, 1)
    command = flmarket(
        "deploy", "local", str(tmp_path / "market.toml"), "--nodes", "3", "--rounds", "2", "--out", str(tmp_path / "d"),
        "--json",
    )  # fmt: skip
    mark = mark_of(command)
    output, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 0, errors
    assert processes_marked(mark) == []
    facts = json.loads(output)
    assert facts["rounds"] == 2
    assert facts["awards"]["posted"] >= 1
    assert facts["awards"]["pending"] == 0
    assert sum(facts["balances_micros"].values()) == 0
    assert facts["balances_micros"]["escrow"] == 0
    assert len(facts["owners"]) == 3
    for owner in facts["owners"]:
        assert owner["epsilon_total"] <= owner["epsilon_cap"]
        assert (owner["releases"] > 0) == (owner["paid_micros"] > 0)
    assert len(facts["accuracy"]) == 2
    bundle, raw = Bundle.read(tmp_path / "d"), read_raw(tmp_path / "test.csv")
    assert np.mean(bundle.right(raw["grade"], bundle.predict(raw))) == facts["accuracy"][-1]
    assert Path(facts["model"]).name == "model.zip"
    assert bundle.card["bill"]["awards"]["posted"] == facts["awards"]["posted"]
    verified = flmarket("ledger", "verify", "--db", facts["ledger"])
    told = verified.communicate(timeout=PATIENCE)
    assert verified.returncode == 0, told
    status = flmarket("owner", "status", str(tmp_path / "d" / "owner-0" / "owner.toml"), "--json")
    told = json.loads(status.communicate(timeout=PATIENCE)[0])
    assert len(told["releases"]) == facts["owners"][0]["releases"]


def test_an_interrupted_deployment_leaves_nothing_running(tmp_path):
    command = flmarket("deploy", "local", "--out", str(tmp_path / "d"))
    mark = mark_of(command)
    await_true(lambda: processes_marked(mark, "flower-superlink"))
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=PATIENCE)
    assert command.returncode == 130
    assert processes_marked(mark) == []


MARKET = """
seed = 4
[task]
name = "tumours"
rounds = 2
bidders_per_round = 4
budget_factor = 1.0
[data]
name = "breast-cancer"
owners = 3
partition = "equal"
[owners]
privacy_cap = 3.0
[mechanism]
auction = "all-in"
perturbation = "sphere"
"""


def start_stranger(deployment):
    """A SuperNode for a fourth owner, with all that the others have but a registered key."""
    folder = deployment.folder / "stranger"
    keys = node_keys(folder, "key")
    known = deployment.owner_folder(0)
    (folder / "records.npz").write_bytes((known / "records.npz").read_bytes())
    (folder / "owner.toml").write_text((known / "owner.toml").read_text().replace("owner = 0", "owner = 3"))
    assert OwnerFile.load(folder / "owner.toml").owner == 3
    return deployment.launch_node("stranger", folder, keys.private, free_ports(1)[0])


def test_server_and_owner_are_killed_in_mid_round_and_a_stranger_is_kept_out(tmp_path):
    with Deployment(tmp_path / "d", MARKET, bid_seconds=PATIENCE, train_seconds=PATIENCE) as deployment:
        deployment.prepare()
        deployment.start()
        stranger = start_stranger(deployment)
        await_true(lambda: stranger.poll() is not None)
        assert stranger.returncode != 0
        said = deployment.log("stranger").read_text()
        assert "Failed to activate SuperNode" in said, "it reached the SuperLink, which refused the key"
        assert "SuperNode ID" not in said
        deployment.run()
        plan = deployment.state / "server" / "plan-000000.json"
        await_true(plan.exists)
        await_true(lambda: any((deployment.state / "server").glob("updates-*")) or not plan.exists())
        for pid in processes_marked(deployment.mark, "flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        os.killpg(deployment.processes["supernode-0"].pid, signal.SIGKILL)
        with SqlLedger(deployment.ledger_url) as ledger:
            ledger.verify()
        await_true(lambda: not processes_marked(deployment.mark, "flwr-serverapp"))
        revive(deployment, 0)
        deployment.run()
        result = deployment.wait(PATIENCE)
        assert result["rounds"] == 2
        accounts = deployment.accounts()
    assert processes_marked(deployment.mark) == []
    records = [FileStore(deployment.state / "server").record(index) for index in (0, 1)]
    assert {owner for record in records for owner in record.bidders.tolist()} == {0, 1, 2}, (
        "there was room for a fourth"
    )
    released = set()
    for account in accounts.values():
        with account:
            assert account.spent <= 3.0 * (1 + 1e-12)
            released |= {release.award_id for release in account.releases()}
    with SqlLedger(deployment.ledger_url) as ledger:
        ledger.verify()
        assert sum(ledger.balances().values()) == 0
        assert ledger.balance("escrow") == 0
        posted = [award.id for award in ledger.awards(state=AwardState.POSTED)]
        payments = [entry.line.ref for entry in ledger.entries() if entry.line.kind is EntryKind.POSTED]
    assert sorted(payments) == sorted(set(posted))
    assert set(posted) <= released
    assert posted


SECURE = """
seed = 4
trust = "secure-aggregation"
[task]
name = "sums"
rounds = 1
bidders_per_round = 5
budget_factor = 3.0
[data]
name = "breast-cancer"
owners = 5
partition = "equal"
[owners]
privacy_cap = 30.0
privacy_cap_delta = 1e-5
[mechanism]
auction = "all-in"
clip = 0.5
"""


def test_a_masked_sum_outlives_an_owner_and_the_server(tmp_path):
    """Five owners of whom four must stay: one is killed before her input, then the server before the sum is opened."""
    with Deployment(tmp_path / "d", SECURE) as deployment:
        deployment.prepare()
        begun = time.monotonic()
        deployment.start()
        deployment.bid_seconds = deployment.train_seconds = 30 + 4 * (time.monotonic() - begun)  # by how busy it is
        deployment.run()
        state = deployment.state / "server" / "exchange-000000.bin"

        def stage():
            return Summing.restore(state.read_bytes()).stage if state.exists() else ""

        await_true(lambda: stage() == "input")
        killed = deployment.processes.pop("supernode-0")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait(timeout=PATIENCE)
        await_true(lambda: stage() == "agree")
        for pid in processes_marked(deployment.mark, "flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        await_true(lambda: not processes_marked(deployment.mark, "flwr-serverapp"))
        assert stage() in ("agree", "unmask")
        with SqlLedger(deployment.ledger_url) as ledger:
            ledger.verify()
        deployment.run()
        assert deployment.wait(PATIENCE)["rounds"] == 1
    assert processes_marked(deployment.mark) == []
    record = FileStore(deployment.state / "server").record(0)
    assert record.state == (AwardState.EXPIRED, *[AwardState.POSTED] * 4), "paid is who is in the sum"
    with SqlLedger(deployment.ledger_url) as ledger:
        ledger.verify()
        assert sum(ledger.balances().values()) == 0
        assert ledger.balance("escrow") == 0
        assert {release.award_id for release in ledger.releases()} == {f"sums/0/{owner}" for owner in range(1, 5)}
