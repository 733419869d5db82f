"""The sampling market from its file to its page; broken rules show."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from flmarket.cli.markets import run_market
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError, InvalidInput
from flmarket.market.kinds.sampling import decaying_rate
from flmarket.report.sampled_page import check_sampled, summarize_sampled, write_sampled

MARKET = """
seed = 2
[task]
rounds = 6
budget_per_round = 20.0
[data]
name = "breast-cancer"
owners = 15
partition = "equal"
[training]
local_steps = 2
batch_size = 8
[mechanism]
auction = "sampling"
[sampling]
scheme = "{scheme}"
distribution = "exponential"
costs = [0.5, 6.0]
first_rate = 0.1
{more}
"""


def config(scheme="optimal", more=""):
    import tomllib

    return MarketConfig.parse(tomllib.loads(MARKET.format(scheme=scheme, more=more)))


@pytest.fixture(scope="module")
def result():
    return config().sampled_training().run()


@pytest.mark.parametrize("scheme", ["optimal", "uniform", "complete", "prior-independent"])
def test_every_scheme_runs_from_a_file(scheme, tmp_path, capsys):
    (tmp_path / "market.toml").write_text(MARKET.format(scheme=scheme, more=""))
    run_market(tmp_path / "market.toml", tmp_path / "out", None, None, True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["scheme"] == scheme
    assert len(printed["loss"]) == len(printed["bound"]) == printed["rounds"] == 6
    assert printed["loss"][-1] < printed["initial_loss"]
    assert printed["spent_micros"] == sum(printed["spent_per_round_micros"])
    assert all(printed["guarantees"].values())
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == {
        key: value for key, value in printed.items() if key != "report"
    }
    rows = list(csv.DictReader((tmp_path / "out" / "clients.csv").read_text().splitlines()))
    assert sum(int(row["paid_micros"]) for row in rows) == printed["spent_micros"]
    assert np.mean([float(row["participation"]) for row in rows]) == pytest.approx(printed["average_participation"])


def test_the_page_shows_bound_terms_money_and_clients(result, tmp_path):
    page = write_sampled(result, tmp_path, command="flmarket run market.toml").read_text()
    for text in (
        "Loss beside the convergence bound",
        "Participation by cost",
        "Pay by cost",
        "Spending per round",
        "Who took part",
        "this run used another",
        "flmarket run market.toml",
        "no privacy is claimed",
    ):
        assert text in page
    assert page.count("<svg") == 6
    assert 'role="alert"' not in page


def test_the_summary_holds_the_rounds(result):
    facts = summarize_sampled(result)
    assert facts["bound"] == [record.bound for record in result.rounds]
    assert facts["expected_per_round_micros"] == pytest.approx(
        sum(client.participation * client.payment_micros for client in result.clients)
    )
    assert facts["mean_inverse_participation"] == pytest.approx(np.mean([1 / c.participation for c in result.clients]))
    assert not facts["bound_applies"]
    assert config("optimal").sampling.first_rate == 0.1


def test_the_theorys_rate_has_a_bound_that_applies():
    import tomllib

    values = tomllib.loads(MARKET.format(scheme="optimal", more=""))
    del values["sampling"]["first_rate"]
    assert MarketConfig.parse(values).sampled_training().run().bound_applies


def broken(result, **changes):
    return {check.key for check in check_sampled(dataclasses.replace(result, **changes)) if not check.holds}


def test_broken_rules_are_found_and_shown(result, tmp_path):
    first, *others = result.clients
    assert broken(result) == set()
    underpaid = dataclasses.replace(first, paid_micros=first.paid_micros + 1)
    assert broken(result, clients=(underpaid, *others)) == {"paid_as_promised"}
    dear = dataclasses.replace(first, cost=first.payment_micros / 1e6 + 0.1)
    assert "rational" in broken(result, clients=(dear, *others))
    ranked = sorted(result.clients, key=lambda client: client.cost)
    often = dataclasses.replace(ranked[-1], participation=1.0)
    assert broken(result, clients=(*ranked[:-1], often)) == {"monotone"}
    over = {"hard_cap_micros": 1}
    assert broken(result, **over) == {"hard_cap"}
    assert broken(result, scheme="complete", budget_micros=1000) == {"expected_budget"}
    page = write_sampled(dataclasses.replace(result, **over), tmp_path).read_text()
    assert "1 of 4 rules was broken" in page


def test_a_hard_cap_holds_and_voids_the_bound(tmp_path):
    capped = config(more="hard_cap = 12.0").sampled_training().run()
    assert max(record.spent_micros for record in capped.rounds) <= 12_000_000
    assert sum(record.turned_away.size for record in capped.rounds) > 0
    facts = summarize_sampled(capped)
    assert facts["bound"] == [None] * 6
    assert facts["guarantees"]["hard_cap"]
    page = write_sampled(capped, tmp_path).read_text()
    assert "No bound can be given: a hard cap is set." in page
    assert "was turned away" in page


def test_the_shipped_example_is_one_of_these():
    path = Path(__file__).parents[2] / "examples" / "sampling.toml"
    training = MarketConfig.load(path).sampled_training()
    assert training.scheme == "optimal"
    assert training.budget_micros == 50_000_000
    assert training.partition.owners == 50


def test_the_rate_falls_as_the_theorys():
    rate = decaying_rate(0.2, l2=0.01, local_steps=5)
    assert rate(0) == pytest.approx(0.2)
    assert rate(100) == pytest.approx(2 / (0.01 * (2 / (0.01 * 0.2) + 5 * 100)))
    with pytest.raises(InvalidInput, match="first"):
        decaying_rate(0.0, l2=0.01, local_steps=5)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("budget_per_round = 20.0", "", "budget_per_round"),
        ("budget_per_round = 20.0", "budget_factor = 1.0", "budget_per_round"),
        ('scheme = "optimal"', 'scheme = "best"', "sampling.scheme"),
        ("first_rate = 0.1", "first_rate = 0.0", "first_rate"),
        ("first_rate = 0.1", "frist_rate = 0.1", "frist_rate"),
    ],
)
def test_bad_files_name_the_key(old, new, words, tmp_path):
    (tmp_path / "market.toml").write_text(MARKET.format(scheme="optimal", more="").replace(old, new))
    with pytest.raises(ConfigError, match=words):
        MarketConfig.load(tmp_path / "market.toml")


def test_bad_costs_and_caps_are_refused():
    with pytest.raises(InvalidInput, match="minimum"):
        config().model_copy(
            update={"sampling": config().sampling.model_copy(update={"costs": (0.0, 1.0)})}
        ).sampled_training()
    with pytest.raises(InvalidInput, match="hard_cap_micros"):
        config(more="hard_cap = 1.0").sampled_training()
