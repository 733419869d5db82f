"""A small batch of `broker_chaos`, in a process of its own; the full one (500 kills, 200 faults) is run by hand."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("broker_conftest", Path(__file__).parents[1] / "broker" / "conftest.py")
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
postgres, url = _shared.postgres, _shared.url


@pytest.mark.slow
def test_kills_and_faults_cost_nobody_anything(url, tmp_path):
    seed = os.environ.get("FLMARKET_CHAOS_SEED", "7")
    script = Path(__file__).parent / "broker_chaos.py"
    command = [sys.executable, str(script), "--url", url, "--kills", "10", "--faults", "10", "--seed", seed]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["wrong"] == [], told
    assert (told["kills"], told["faults"]) == (10, 10)
    assert told["entries"]["posted"] > 10


def test_the_verdict_finds_what_is_planted(tmp_path):
    """Otherwise a clean verdict would mean nothing: the same checks on books that somebody changed."""
    spec = importlib.util.spec_from_file_location("broker_chaos", Path(__file__).parent / "broker_chaos.py")
    chaos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chaos)
    from flmarket.broker.core import Broker
    from flmarket.broker.office import parties, tasks
    from flmarket.broker.requests import TaskRequest
    from flmarket.broker.settings import Settings
    from flmarket.broker.work.worker import Worker

    at = f"sqlite:///{tmp_path}/b.db"
    broker = Broker.open(Settings(database_url=at, run_worker=False))
    made = parties.create_party(broker, None, role="buyer", name="B")
    parties.deposit(broker, None, made.id, chaos.MONEY)
    buyer = parties.get_party(broker, made.id)
    order = {"task": {"name": "x", "rounds": 2, "bidders_per_round": 8, "budget_per_round": 100}}
    order["data"] = {"name": "breast-cancer", "owners": 12, "minimum": 5}
    tasks.post_task(broker, buyer, TaskRequest.model_validate(order))
    Worker(broker).run_until_idle()
    broker.close()
    assert chaos.check(at) == []
    lies = (
        "UPDATE broker_tasks SET spent_micros = spent_micros + 1",
        "UPDATE broker_tasks SET state = 'running'",
        "UPDATE broker_rounds SET closed_at = NULL",
        "UPDATE broker_releases SET state = 'voided'",
        "DELETE FROM broker_releases",
        "UPDATE ledger_accounts SET balance = balance + 1 WHERE name = 'escrow'",
        "DELETE FROM ledger_entries WHERE kind = 'posted' AND ref LIKE '%/0/%'",
        "UPDATE ledger_entries SET detail = replace(detail, '\"epsilon\":', '\"epsilon\":9') WHERE kind = 'release'",
    )
    clean = (tmp_path / "b.db").read_bytes()
    for lie in lies:
        (tmp_path / "b.db").write_bytes(clean)
        with chaos.closing(chaos.connect(at)) as connection:
            for (trigger,) in chaos.rows(connection, "SELECT name FROM sqlite_master WHERE type = 'trigger'"):
                connection.execute(f"DROP TRIGGER {trigger}")
            connection.execute(lie)
            connection.commit()
        assert chaos.check(at) != [], lie
