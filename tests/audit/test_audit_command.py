"""What `flmarket audit` does, called as the command calls it."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from flmarket.auctions import learned
from flmarket.cli.audit import load_mechanism, run_audit
from flmarket.errors import ConfigError, InvalidInput, UnknownName

MINE = """
import numpy as np
from flmarket import Outcome

class Generous:
    '''Pays everybody who asks for less than an equal share of the budget what she asks.'''

    def run(self, bids, budget, *, rng=None):
        share = np.asarray(budget)[..., None] / bids.n
        wins = bids.full_cost <= share
        return Outcome(np.where(wins, bids.privacy_budget, 0), np.where(wins, bids.full_cost, 0))

class Needy:
    def __init__(self, something):
        pass

class Empty:
    pass
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_to_audit.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(target, *, as_json=True, report=None, population="jdp", profiles=10, owners=6, search="quick"):
    run_audit(target, population, profiles, owners, search, 1, as_json, report)


def test_json_is_one_object_with_the_promised_keys(capsys):
    run("m1")
    read = json.loads(capsys.readouterr().out)
    assert (read["mechanism"], read["population"], read["profiles"]) == ("m1", "jdp", 10)
    assert read["truthful"]["mean_regret_over_cost"] == 0
    assert read["truthful"]["max_regret_over_cost"] == 0
    assert read["truthful"]["profiles_with_gain"] == 0
    assert read["rational"]["violations"] == 0
    assert read["rational"]["worst"] == 0
    assert read["budget"]["violations"] == 0
    assert read["budget"]["worst_ratio"] <= 1 + 1e-9
    assert read["search"]["strength"] == "quick"
    assert {claim["verdict"] for claim in read["claims"]} == {"holds"}


def test_tables_for_people(capsys):
    run("all-in", as_json=False, profiles=60)
    out = " ".join(capsys.readouterr().out.split())
    for text in ("not claimed", "first best", "Worst lie", "evidence, not proof"):
        assert text in out


def test_somebody_elses_mechanism_and_its_report(mine, capsys):
    run("mine_to_audit:Generous", report=mine / "out" / "page.html")
    read = json.loads(capsys.readouterr().out)
    assert read["mechanism"] == "Generous"
    assert read["truthful"]["profiles_with_gain"] > 0.5
    assert all(claim["level"] == "none" for claim in read["claims"][:3])
    assert "Generous" in (mine / "out" / "page.html").read_text()
    assert read["report"].endswith("page.html")


@pytest.mark.parametrize(
    ("target", "accepted"),
    [
        ("mine_to_audit:Needy", "needs no arguments"),
        ("mine_to_audit:Empty", r"run\(bids"),
        ("mine_to_audit:Nothing", "defines"),
        ("no_such_module:Thing", "imported"),
        (":Thing", "imported"),
    ],
)
def test_a_target_that_cannot_be_audited_is_named(mine, target, accepted):
    with pytest.raises(InvalidInput, match=accepted):
        load_mechanism(target)


def test_other_bad_input(tmp_path):
    with pytest.raises(UnknownName):
        run("m11")
    with pytest.raises(UnknownName):
        run("m1", population="mars")
    with pytest.raises(InvalidInput, match="search"):
        run("m1", search="deep")
    with pytest.raises(ConfigError, match="--report"):
        run("m1", report=tmp_path)


@pytest.fixture
def weights(tmp_path):
    shipped = Path(str(files(learned))) / "weights" / "cleared-menu" / "flm21-low.safetensors"
    return shutil.copy(shipped, tmp_path / "copy.safetensors")


def test_a_certificate_is_kept_with_the_weights(weights, capsys):
    target, before = "cleared-menu:flm21-low", learned.load("cleared-menu", str(weights))
    run_audit(target, "flm21-low", 19, 3, "quick", 5, True, None, weights=weights)
    found = json.loads(capsys.readouterr().out)["truthful"]
    kept = json.loads(weights.with_suffix(".json").read_text())
    figures = kept["audit"]
    assert kept["command"].startswith("flmarket train-auction cleared-menu")  # what was known stays
    assert (figures["profiles"], figures["seed"], figures["search"]) == (19, 5, "quick")
    assert figures["mean_regret_over_cost"] == found["mean_regret_over_cost"]
    # of 19 profiles the largest regret is the bound at 5 %
    assert figures["certificate"]["regret"] == found["max_regret_over_cost"]
    after = learned.load("cleared-menu", str(weights))
    bound = f"in a new profile above {found['max_regret_over_cost']:.3g} with probability ≤ 5%"
    assert bound in after.guarantees.source
    assert all(np.array_equal(value, after.parameters[key]) for key, value in before.parameters.items())


@pytest.mark.parametrize("target", ["m1", "cleared-menu:flm21-high"])
def test_figures_are_not_kept_with_weights_of_something_else(weights, target):
    before = weights.read_bytes()
    with pytest.raises(InvalidInput, match="weights"):
        run_audit(target, "flm21-low", 2, 3, "quick", 5, True, None, weights=weights)
    assert weights.read_bytes() == before
