"""`deploy local`: what is told while it runs, and what a folder that was cut off keeps."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from flmarket.cli.app import app as market_command
from flmarket.cli.flower import _market_text
from flmarket.cli.output import template
from flmarket.engines.flower.deployment import MARK, AppDeployment, Deployment
from flmarket.errors import ConfigError
from flmarket.ledger import AwardState, SqlLedger
from flmarket.market import FileStore, RoundRecord
from flmarket.market.store import Checkpoint

TEXT = template("market.toml").format(seed=0, rounds=2, nodes=2)
EXAMPLE = Path(__file__).parents[2] / "src/flmarket/cli/templates/app"


def test_owners_who_are_there_stay_as_they_are(tmp_path):
    first = Deployment(tmp_path, TEXT)
    first.prepare()
    mine = tmp_path / "owner-1" / "owner.toml"
    mine.write_text(mine.read_text().replace("rate", "# hers\nrate"))
    before = mine.read_text()
    with SqlLedger(first.ledger_url) as ledger:
        entries = ledger.head().size
    Deployment(tmp_path, TEXT).prepare()
    assert mine.read_text() == before
    with SqlLedger(first.ledger_url) as ledger:
        assert ledger.head().size == entries
        assert ledger.cap("owner-1").epsilon == 40.0


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by their environment")
def test_what_a_killed_command_left_running_is_ended_and_a_living_one_is_left_in_peace(tmp_path):
    """Its SuperLink would go on with the same run, and lock out whoever plays on in the folder."""
    first, second = Deployment(tmp_path, TEXT), Deployment(tmp_path, TEXT)
    first.take_over()
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={MARK: first.mark})
    try:
        with pytest.raises(ConfigError, match="no other deployment"):
            second.take_over()
        assert orphan.poll() is None
        first._lock.release()  # as the system does when a process is killed
        second.take_over()
        assert orphan.wait(timeout=20) == -signal.SIGKILL
    finally:
        orphan.kill()
        orphan.communicate()
        second.stop()


def test_a_folder_is_played_on_alone(tmp_path):
    Deployment(tmp_path, TEXT).prepare()
    answer = CliRunner().invoke(market_command, ["deploy", "local", "--out", str(tmp_path), "--rounds", "5"])
    assert isinstance(answer.exception, ConfigError)
    assert "play on" in str(answer.exception)


def test_rounds_are_told_as_they_end(tmp_path):
    deployment, told = Deployment(tmp_path, TEXT), []
    store = FileStore(deployment.state / "server")
    record = RoundRecord(
        0, np.array([0, 1]), np.array([10.0, 10.0]), np.array([1.0, 0.0]), np.array([5, 0]), (AwardState.POSTED, None),
        ("", ""), np.array([1.0, 0.0]), 10, 1.0, {"accuracy": 0.9},
    )  # fmt: skip
    store.save_round(record, Checkpoint(1, np.zeros(3), [], {}))
    (deployment.state / "result.json").write_text(json.dumps({"rounds": 1}))
    assert deployment.wait(5.0, told.append) == {"rounds": 1}
    assert told == ["round 1: 1 posted, 0.000005 paid; accuracy 0.900 (always the largest class: 0.626)"]


def test_an_app_needs_its_owners_file(tmp_path):
    with pytest.raises(ConfigError, match="pyproject"):
        AppDeployment(tmp_path / "out", app=tmp_path)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match=r"owner\.toml"):
        AppDeployment(tmp_path / "out", app=tmp_path)
    assert not (tmp_path / "out").exists()


def test_every_owner_of_an_app_has_a_number_and_a_file_of_her_own(tmp_path):
    deployment = AppDeployment(tmp_path / "out", app=EXAMPLE, count=3)
    deployment.prepare()
    texts = [(deployment.owner_folder(i) / "owner.toml").read_text() for i in range(3)]
    assert [f"owner = {i}" in text for i, text in enumerate(texts)] == [True] * 3
    assert deployment.node_config(deployment.owner_folder(2)).endswith("partition-id=2 num-partitions=3")
    assert (tmp_path / "out/app/quickstart/task.py").exists()


def test_what_an_app_decides_for_itself_is_not_taken_from_the_command(tmp_path):
    for option in (["--seed", "1"], ["--trust", "local"]):
        answer = CliRunner().invoke(market_command, ["deploy", "local", str(EXAMPLE), "--out", str(tmp_path), *option])
        assert isinstance(answer.exception, ConfigError)
        assert "an app says for itself" in str(answer.exception)
    assert not list(tmp_path.iterdir())


def test_a_market_file_may_begin_with_a_mark(tmp_path):
    file = tmp_path / "market.toml"
    file.write_text(TEXT, encoding="utf-8-sig")
    assert _market_text(file, None, None, None) == TEXT
    assert "rounds = 7" in _market_text(file, None, 7, None)
