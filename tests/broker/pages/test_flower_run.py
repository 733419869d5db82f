"""The operator's page of a Flower run: whether it is at work, whose nodes are connected, and what Flower said."""

import re
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.office import parties, runs, tasks
from flmarket.broker.office.runs import ENDED, WORKING
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import FlowerRun, TaskRow
from flmarket.broker.web.pages.tasks import _cards
from flmarket.broker.work.flower import runs as worker_runs


@pytest.fixture
def scene(tmp_path, joined, order, serve):
    """A Flower task under way, two owners with nodes, and the operator at her desk."""
    folder = tmp_path / "runs"
    settings = Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, superlink="far")
    broker = Broker.open(settings.model_copy(update={"flower_folder": folder}))
    desk, buyer = joined(broker, "operator", "Dora"), joined(broker, "buyer", "Bert")
    owners = [joined(broker, "owner", name).party for name in ("Anna", "<b>Berta</b>")]
    for number, one in enumerate(owners):
        parties.bind_node(broker, desk.party, one.id, node_id=str(70 + number))
    task = tasks.post_task(broker, buyer.party, order(engine="flower")).id
    (folder / task).mkdir(parents=True)
    with serve(create_app(broker=broker)) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert client.post("/sign-in", data={"key": desk.key}).status_code == 303

        def run(**values):
            with broker.database.write() as session:
                session.get_one(TaskRow, task).state = "running"
                session.merge(FlowerRun(task_id=task, **({"expires_at": now() + 60_000, "attempt": 2} | values)))

        yield SimpleNamespace(
            broker=broker, client=client, task=task, run=run, desk=desk, buyer=buyer, folder=folder / task,
            page=f"/operator/runs/{task}",
        )  # fmt: skip
    broker.close()


def test_a_run_at_work_and_whose_nodes_it_sees(scene):
    scene.run(state=WORKING, run_id="7", nodes=[0])
    text = scene.client.get(scene.page).text
    assert "Its run is at work, 1 of 2 nodes are connected." in text
    assert re.findall(r'class="state \w+">([\w ]*connected)', text) == ["connected", "not connected"]
    assert "<b>Berta</b>" not in text
    found = runs.run_detail(scene.broker, scene.desk.party, scene.task)
    assert [(one.name, one.connected) for one in found.nodes] == [("Anna", True), ("<b>Berta</b>", False)]
    assert scene.page in scene.client.get(f"/tasks/{scene.task}").text


def test_a_superlink_that_starts_nothing_is_told_in_its_own_words(scene):
    """Colours and signs that turn text around are taken off; the end is what is shown."""
    (scene.folder / "run-2.log").write_text(
        "first\n" * 900 + "\x1b[31mStatusCode.UNAVAILABLE\x1b[0m: no\u202ewhere <b>\n"
    )
    scene.run(state=ENDED, error="UNAVAILABLE")
    text = scene.client.get(scene.page).text
    assert "The SuperLink starts no run (asked 2 times)" in text
    assert "StatusCode.UNAVAILABLE: nowhere &lt;b&gt;" in text
    assert "\x1b" not in text
    assert text.count("first") == 199
    assert "Ask the SuperLink" not in text, "there is no run to ask for"
    api = scene.client.get(f"/api/v1{scene.page}").json()
    assert api["said"][-1] == "StatusCode.UNAVAILABLE: nowhere <b>"
    assert scene.page in scene.client.get("/operator").text, "it is among what is to be seen to"


def test_the_runs_own_log_is_asked_of_the_superlink(scene, monkeypatch):
    asked = []

    def flwr(said, *arguments):
        asked.append(arguments)
        script = "import sys; print('INFO : round 1 settled'); sys.exit(1)"
        with said.open("wb") as output:
            return subprocess.Popen([sys.executable, "-c", script], stdout=output)

    monkeypatch.setattr(worker_runs, "_flwr", flwr)
    scene.run(state=WORKING, run_id="7", nodes=[])
    assert "round 1 settled" not in scene.client.get(scene.page).text
    assert asked == []
    assert "INFO : round 1 settled" in scene.client.get(f"{scene.page}?log=1").text
    assert asked == [("log", "7", "far", "--show")]


def test_a_superlink_that_is_silent_is_not_waited_for(scene, monkeypatch):
    monkeypatch.setattr(worker_runs, "_SECONDS", 0.2)

    def silent(said, *_arguments):
        said.write_text("")
        return subprocess.Popen(["sleep", "30"])

    monkeypatch.setattr(worker_runs, "_flwr", silent)
    scene.run(state=WORKING, run_id="7", nodes=[])
    assert "did not answer within" in scene.client.get(f"{scene.page}?log=1").text


def test_runs_are_the_operators(scene):
    scene.run(state=WORKING, run_id="7", nodes=[0])
    assert scene.client.get("/operator/runs/t_none").status_code == 404
    scene.client.cookies.clear()
    assert scene.client.post("/sign-in", data={"key": scene.buyer.key}).status_code == 303
    assert scene.client.get(scene.page).status_code == 403


def test_the_reason_is_taken_out_of_flowers_json():
    """As `flwr run --format json` says it, version 1.41."""
    words = worker_runs._last_words
    said = '\x1b[1mLoading\x1b[0m\n{\n "success": false,\n "error-message": "Using SuperLink: far\\n\\nIt is away."\n}'
    assert words(said) == "Using SuperLink: far It is away."
    assert words("no { json") == "no { json"
    assert words("") == "Flower’s command ended without a word."


def test_while_it_is_asked_again_the_last_words_stay(scene):
    (scene.folder / "run-1.log").write_text("StatusCode.UNAVAILABLE\n")
    (scene.folder / "run-2.log").write_text("")
    scene.run(state=ENDED, error="UNAVAILABLE")
    assert "StatusCode.UNAVAILABLE" in scene.client.get(scene.page).text
    task = tasks.get_task(scene.broker, scene.buyer.party, scene.task)
    assert _cards(task, [], lasting=False)[1][2] == "the task waits for the SuperLink"
    text = scene.client.get(f"/tasks/{scene.task}").text
    assert "Waits for the SuperLink" in text
    assert "the task is running" not in text
