"""The service with a real SuperLink and real SuperNodes: processes, TLS, registered keys, kill -9."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from brokers import await_true

from flmarket.broker.core import Broker
from flmarket.broker.office import ledger, operator, parties, statements, tasks
from flmarket.broker.settings import Settings
from flmarket.broker.tables import FlowerRun, RoundRow
from flmarket.broker.work.flower.tenancy import at_work
from flmarket.engines.flower import Deployment
from flmarket.engines.flower.deployment import MARK, free_ports, processes_marked
from flmarket.ledger import ESCROW

MARKET = """
seed = 4
[task]
rounds = 1
budget_factor = 1.0
[data]
name = "breast-cancer"
owners = 2
partition = "equal"
[owners]
rate = [0.05, 0.2]
privacy_cap = 5.0
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")
def test_service_and_run_are_killed_and_the_task_finishes(tmp_path, joined, order):
    """SuperLink, two SuperNodes and `flmarket serve` as processes. kill -9 the service: the run goes on, and the next
    service finds it. kill -9 the run: the service starts another, which goes on."""
    url, folder = f"sqlite:///{tmp_path}/b.db", tmp_path / "runs"
    with Deployment(tmp_path / "d", MARKET) as deployment:
        deployment.prepare()
        broker = Broker.open(Settings(database_url=url, run_worker=False, superlink="local", flower_folder=folder))
        buyer, desk, *sellers = (joined(broker, role).party for role in ("buyer", "operator", "owner", "owner"))
        for number, owner in enumerate(sellers):  # their guards want to see the price in escrow for their own accounts
            file = deployment.owner_folder(number) / "owner.toml"
            file.write_text(f'account = "{owner.id}"\n{file.read_text()}')
        deployment.start()
        for number, owner in enumerate(sellers):
            said = (deployment.folder / "logs" / f"register-{number}.log").read_text()
            node = re.search(r"SuperNode (\d+) registered", said)[1]
            parties.bind_node(broker, desk, owner.id, node_id=node, number=number)
        task_id = tasks.post_task(
            broker, buyer, order(engine="flower", rounds=2, minimum_bids=2, bidders_per_round=2)
        ).id

        def serve():
            command = [sys.executable, "-m", "flmarket", "serve", "--db", url, "--port", str(free_ports(1)[0])]
            command += ["--superlink", "local", "--flower-folder", str(folder)]
            variables = {"FLWR_HOME": str(deployment.folder / "flwr"), MARK: deployment.mark, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, env=os.environ | variables)

        def round_state(index):
            with broker.database.read() as session:
                row = session.get(RoundRow, (task_id, index))
            return "" if row is None else row.state

        def run():
            with broker.database.read() as session:
                return session.get_one(FlowerRun, task_id)

        service = serve()
        await_true(lambda: round_state(0) == "awarded")
        service.send_signal(signal.SIGKILL)
        service.wait()
        assert at_work(run())
        assert ledger.verify(broker, desk).ok
        first = run().holder
        service = serve()
        try:
            await_true(lambda: round_state(1) == "awarded")
            assert run().holder == first  # still the same run
            os.kill(int(first.split(":")[1]), signal.SIGKILL)
            await_true(lambda: tasks.get_task(broker, buyer, task_id).state not in ("queued", "running"))
        finally:
            service.terminate()
            service.wait()
        homes = deployment.accounts()
    assert processes_marked(deployment.mark) == []
    task, kept = tasks.get_task(broker, buyer, task_id), broker.books.ledger
    assert (task.state, task.rounds_done, task.error) == ("finished", 2, "")
    assert ledger.verify(broker, desk).ok
    assert kept.balance(ESCROW) == kept.balance(task_id) == 0
    starts = [
        line.detail for line in operator.audit_log(broker, desk, about=task_id).items if line.action == "flower.start"
    ]
    assert starts == ["attempt 2", "attempt 1"]
    for number, owner in enumerate(sellers):
        said = statements.statement(broker, owner)
        assert said.earned_micros == kept.balance(owner.id)
        paid = [item.award_id for item in said.releases if item.state == "posted"]
        assert len(set(paid)) == len(paid)
        with homes[number] as home:
            assert set(paid) <= {release.award_id for release in home.releases()}
            assert home.spent <= 5.0
    assert task.spent_micros == sum(statements.statement(broker, owner).earned_micros for owner in sellers) > 0
    broker.close()
