"""`flmarket ledger …` as a user runs it."""

import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest

from flmarket.cli import main
from flmarket.ledger import Award, AwardState, MemoryLedger, Release, Resolution, SqlLedger
from flmarket.ledger.receipt import seal
from flmarket.privacy import PureDp

# typer asks click for names that click will rename
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def flmarket(monkeypatch, capsys):
    """Runs the command in a folder: what it printed, and its exit code."""

    def run(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.delenv("FLMARKET_LEDGER", raising=False)
        monkeypatch.setattr(sys, "argv", ["flmarket", "ledger", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=printed.out, stderr=printed.err)

    return run


@pytest.fixture
def folder(tmp_path, award):
    """A folder with market.db, the default."""
    with SqlLedger(f"sqlite:///{tmp_path}/market.db") as book:
        book.deposit("d1", "buyer", 5_000_000)
        book.register_cap("owner-1", PureDp(2.0))
        book.hold_many([award(id=f"t/0/{i}", price=1_000_000, owner=f"owner-{i}") for i in range(3)])
        book.resolve_many([Resolution("t/0/1", AwardState.POSTED, release=Release("t/0/1", "privunit", PureDp(1.0)))])
    return tmp_path


def test_receipts_travel_without_the_database(flmarket, folder, tmp_path_factory):
    assert flmarket("receipt", "t/0/1", "--out", "receipt.json", cwd=folder).returncode == 0
    head = flmarket("head", cwd=folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "head.json").write_text(head.stdout)
    (elsewhere / "receipt.json").write_text((folder / "receipt.json").read_text())
    done = flmarket("receipt", "--check", "receipt.json", "--head", "head.json", "--json", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["owner"], told["price_micros"], told["state"]) == ("owner-1", 1_000_000, "posted")
    assert told["release"] == {"mechanism": "privunit", "guarantee": {"kind": "pure-dp", "epsilon": 1.0}}
    assert told["head_known"] is True
    bent = (folder / "receipt.json").read_text().replace('"amount_micros": 1000000', '"amount_micros": 2000000')
    (elsewhere / "receipt.json").write_text(bent)
    done = flmarket("receipt", "--check", "receipt.json", "--head", "head.json", cwd=elsewhere)
    assert done.returncode == 9
    assert "entry 3: the content does not match" in done.stderr


def test_verify_names_the_entry_and_has_its_own_code(flmarket, folder):
    done = flmarket("verify", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True
    assert told["head"]["size"] == 7
    assert told["balances_micros"]["owner-1"] == 1_000_000
    (folder / "head.json").write_text(done.stdout)
    assert flmarket("verify", "--head", "head.json", cwd=folder).returncode == 0
    connection = sqlite3.connect(folder / "market.db")
    connection.execute("DROP TRIGGER ledger_entries_stay")
    connection.execute("UPDATE ledger_entries SET amount_micros = 2000000 WHERE seq = 3")
    connection.commit()
    connection.close()
    done = flmarket("verify", cwd=folder)
    assert done.returncode == 9
    assert done.stderr == "error: entry 3: the content does not match the hash\n"


def test_show_balance_and_export(flmarket, folder):
    shown = json.loads(flmarket("show", "--award", "t/0/1", "--json", cwd=folder).stdout)["entries"]
    assert [entry["kind"] for entry in shown] == ["hold", "release", "posted"]
    assert "t/0/2" in flmarket("show", "--last", 4, cwd=folder).stdout
    told = json.loads(flmarket("balance", "owner-1", "--db", "sqlite:///market.db", "--json", cwd=folder).stdout)
    assert told["balances_micros"] == {"owner-1": 1_000_000}
    assert told["privacy"]["owner-1"] == {"spent": 1.0, "cap": {"kind": "pure-dp", "epsilon": 2.0}}
    assert "PureDp(epsilon=2.0)" in flmarket("balance", cwd=folder).stdout
    assert flmarket("export", "--out", "journal.jsonl", cwd=folder).returncode == 0
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert [line["seq"] for line in lines[:-1]] == list(range(7))
    assert lines[-1]["head"]["last"] == lines[-2]["hash"]


def test_mistakes_are_one_line(flmarket, folder, tmp_path_factory):
    nowhere = tmp_path_factory.mktemp("nowhere")
    done = flmarket("verify", cwd=nowhere)
    assert done.returncode == 3
    assert "a ledger that exists" in done.stderr
    assert list(nowhere.iterdir()) == []
    done = flmarket("receipt", "t/9/9", cwd=folder)
    assert done.returncode == 8
    assert done.stderr == "error: there is no award t/9/9\n"
    assert flmarket("receipt", cwd=folder).returncode == 2
    assert flmarket("receipt", "--check", "none.json", cwd=folder).returncode == 3
    done = flmarket("migrate", "--db", "sqlite:///new.db", cwd=nowhere)
    assert done.returncode == 0, done.stderr
    assert flmarket("verify", "--db", "sqlite:///new.db", cwd=nowhere).returncode == 0


def test_a_buyers_sealed_receipt_is_checked_too(tmp_path, flmarket):
    """What a buyer downloads: entries in the log, terms by the broker's word; an altered one is refused."""
    ledger = MemoryLedger()
    ledger.deposit("d", "buyer", 10)
    ledger.hold(Award("t/0/1", 0, "buyer", "hospital", 0.5, 7))
    ledger.resolve_many([Resolution("t/0/1", AwardState.POSTED, release=Release("t/0/1", "sphere", PureDp(0.5)))])
    sealed = seal(ledger.receipt("t/0/1"), award="t/0/a", owner="seller-a").to_dict()
    path = tmp_path / "sealed.json"
    path.write_text(json.dumps(sealed))
    said = flmarket("receipt", "--check", path, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "in the log" in said.stdout
    assert "seller-a" in said.stdout
    sealed["entries"][0]["hash"] = "0" * 64
    path.write_text(json.dumps(sealed))
    assert flmarket("receipt", "--check", path, cwd=tmp_path).returncode == 9
