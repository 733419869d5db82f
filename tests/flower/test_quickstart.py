"""The quickstart app of examples/: the plain one becomes a market by the lines that docs/flower.md shows."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAdam
from typer.testing import CliRunner

from flmarket.cli.app import app as market_command
from flmarket.engines.flower import InProcessGrid
from flmarket.engines.flower.deployment import AppDeployment, processes_marked
from flmarket.ledger import SqlLedger
from flmarket.market.record import close_records

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {"num-server-rounds": 2, "local-epochs": 2, "batch-size": 32, "learning-rate": 0.05}


def shown_diff():
    """The diff in the documentation."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (REPOSITORY / "docs/flower.md").read_text(), re.DOTALL)
    return diff


@pytest.fixture
def app(tmp_path, monkeypatch):
    """`app(plain)`: the example's two apps, from a copy; plain is what it is without the shown lines."""

    def load(plain=False):
        folder = tmp_path / ("plain" if plain else "market")
        shutil.copytree(
            REPOSITORY / "src/flmarket/cli/templates/app", folder, ignore=shutil.ignore_patterns("record", "__py*")
        )
        if plain:
            command = ["patch", "-R", "-p1", "--no-backup-if-mismatch"]
            subprocess.run(command, input=shown_diff(), text=True, cwd=folder, check=True, stdout=subprocess.PIPE)
        for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.chdir(folder)
        import quickstart.client_app
        import quickstart.server_app

        return quickstart.client_app.app, quickstart.server_app.app

    yield load
    close_records()


def run(apps, nodes):
    client, server = apps
    grid = InProcessGrid(client, nodes)
    for context in grid.contexts.values():
        context.run_config = dict(SETTINGS)
    server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(SETTINGS)))
    return torch.load("final_model.pt")


def test_at_most_six_lines_make_it_a_market(app, tmp_path):
    changed = [line for line in shown_diff().splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert 1 <= len(changed) <= 6
    model = run(app(), 4)
    assert set(model) == {"conv.weight", "conv.bias", "fc.weight", "fc.bias"}
    with SqlLedger(f"sqlite:///{tmp_path / 'market' / 'market.db'}", create=False) as ledger:
        ledger.verify()
        assert [award.state.value for award in ledger.awards()] == ["posted"] * 8
    assert FedAdam.__name__ in (tmp_path / "market/quickstart/server_app.py").read_text()


def test_without_them_it_is_a_plain_flower_app(app, tmp_path):
    before = (REPOSITORY / "src/flmarket/cli/templates/app/quickstart/task.py").read_text()
    run(app(plain=True), 2)
    assert "flmarket" not in (tmp_path / "plain/quickstart/server_app.py").read_text()
    assert "flmarket" not in (tmp_path / "plain/quickstart/client_app.py").read_text()
    assert (tmp_path / "plain/quickstart/task.py").read_text() == before  # model and loops are untouched


def test_a_new_app_is_the_example_under_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(market_command, ["new", "my-market"]).exit_code == 0
    described = tomllib.loads(Path("my-market/pyproject.toml").read_text())
    assert described["project"]["name"] == "my-market"
    assert described["tool"]["flwr"]["app"]["components"]["clientapp"] == "my_market.client_app:app"
    assert 'owner_guard("my_market:owner.toml")' in Path("my-market/my_market/client_app.py").read_text()
    assert not [path for path in Path("my-market").rglob("*") if path.is_file() and "quickstart" in path.read_text()]
    for name in ("my-market", "9lives", "../up"):
        assert runner.invoke(market_command, ["new", name]).exit_code != 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")
def test_it_is_sold_by_processes_with_folders_of_their_own(tmp_path):
    told = []
    settings = "num-server-rounds=1 local-epochs=1"
    folder = REPOSITORY / "src/flmarket/cli/templates/app"
    with AppDeployment(tmp_path / "out", app=folder, count=2, overrides=settings) as deployment:
        deployment.prepare()
        deployment.start()
        deployment.run()
        deployment.wait(600.0, told.append)
        for account in deployment.accounts().values():
            with account:
                assert account.spent == 8.0
    assert processes_marked(deployment.mark) == []
    assert any("[ROUND 1/1] awards: 2 posted" in line for line in told)
    assert any("'accuracy'" in line for line in told)
    with SqlLedger(f"sqlite:///{tmp_path / 'out' / 'market.db'}", create=False) as ledger:
        ledger.verify()
        assert {award.owner for award in ledger.awards() if award.state.value == "posted"} == {"owner-0", "owner-1"}
    assert (tmp_path / "out" / "final_model.pt").exists()
