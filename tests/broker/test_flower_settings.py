"""What a Flower task needs around it: owners' nodes, a connection, a secret that stays secret, and who is alive."""

import stat
import subprocess
import sys
import time

import pytest

from flmarket.broker.errors import Conflict
from flmarket.broker.office import operator, parties
from flmarket.broker.settings import Settings
from flmarket.broker.work.flower.files import check_connection, load_in_run, save_for_run
from flmarket.broker.work.holders import may_run, new_holder
from flmarket.errors import ConfigError


def test_nodes_are_bound_once(small, joined):
    desk, owner, other = (joined(small, role) for role in ("operator", "owner", "owner"))
    first = parties.bind_node(small, desk.party, owner.party.id, node_id="18446744073709551615")
    again = parties.bind_node(small, desk.party, owner.party.id, node_id="18446744073709551615", number=0)
    assert first == again
    assert (first.node_id, first.owner_number) == ("18446744073709551615", 0)
    with pytest.raises(Conflict, match="another owner's"):
        parties.bind_node(small, desk.party, other.party.id, node_id="18446744073709551615")
    with pytest.raises(Conflict, match="another owner's"):
        parties.bind_node(small, desk.party, other.party.id, node_id="5", number=0)
    with pytest.raises(Conflict, match="for good"):
        parties.bind_node(small, desk.party, owner.party.id, node_id="5", number=1)
    with pytest.raises(Conflict, match="no owner"):
        parties.bind_node(small, desk.party, desk.party.id, node_id="5")
    assert parties.unbind_node(small, desk.party, owner.party.id).node_id is None
    moved = parties.bind_node(small, desk.party, owner.party.id, node_id="6")
    assert (moved.node_id, moved.owner_number) == ("6", 0)
    assert parties.bind_node(small, desk.party, other.party.id, node_id="7").owner_number == 1
    actions = [line.action for line in operator.audit_log(small, desk.party, about=owner.party.id).items]
    assert actions.count("node.bind") == 2
    assert actions.count("node.unbind") == 1


def test_the_databases_password_stays_off_the_superlink(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        database_url="postgresql+psycopg://u:hush@host/db", flower_folder=tmp_path.relative_to(tmp_path)
    )
    path = save_for_run(settings, "t_1")
    assert "hush" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_in_run(path).database_url == settings.database_url
    relative = load_in_run(save_for_run(Settings(database_url="sqlite:///b.db"), "t_2"))
    assert relative.database_url == f"sqlite:///{tmp_path}/b.db"
    assert relative.flower_folder == tmp_path / "flmarket-flower"


def test_connections_are_checked_before_the_market_opens(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        check_connection("broker")
    (tmp_path / "config.toml").write_text('[superlink]\ndefault = "x"\n[superlink.x]\naddress = "a:1"\n')
    check_connection("x")
    with pytest.raises(ConfigError, match="there: x"):
        check_connection("broker")
    with pytest.raises(ConfigError):
        check_connection("default")


def test_a_process_that_ended_holds_nothing():
    """Also one that its parent has not noticed yet, as happens to a run that was killed."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host, _, mark = new_holder().split(":")
    holder = f"{host}:{child.pid}:{mark}"
    assert may_run(holder)
    child.kill()
    for _ in range(6000):
        if not may_run(holder):
            break
        time.sleep(0.1)
    assert not may_run(holder)
    child.communicate()
    assert not may_run(holder)
    assert may_run(f"elsewhere:{child.pid}:{mark}")
