"""The command as a user runs it: its output and its exit code."""

import json
import subprocess
import sys

import pytest

from flmarket.cli import main

MARKET = """
seed = 3
[task]
rounds = 3
bidders_per_round = 8
budget_factor = 0.8
[data]
name = "breast-cancer"
owners = 20
sigma = 0.5
minimum = 5
"""


def in_a_process(*arguments):
    command = [sys.executable, "-m", "flmarket", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def flmarket(capsys, monkeypatch, tmp_path):
    """The command without a process of its own, in the test's folder."""

    def run(*arguments):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["flmarket", *map(str, arguments)])
            patch.chdir(tmp_path)
            try:
                main()
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run


def test_demo_writes_a_report_and_a_summary(tmp_path):
    done = in_a_process("demo", "--out", tmp_path / "demo", "--rounds", 6)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {
        "mechanism",
        "aggregation",
        "rounds",
        "accuracy",
        "spent_micros",
        "budget_micros",
        "epsilon_total_max",
        "owners_paid",
    } <= set(summary)
    assert summary["rounds"] == len(summary["accuracy"]) == 6
    assert 0 < summary["spent_micros"] <= summary["budget_micros"]
    assert (tmp_path / "demo" / "report.html").read_text().startswith("<!doctype html>")


def test_run_and_json(flmarket, tmp_path):
    (tmp_path / "market.toml").write_text(MARKET)
    done = flmarket("run", tmp_path / "market.toml", "--out", tmp_path / "o", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["seed"] == 3
    stored = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert printed["accuracy"] == stored["accuracy"]
    again = json.loads(flmarket("run", tmp_path / "market.toml", "--out", tmp_path / "p", "--json").stdout)
    assert again["accuracy"] == printed["accuracy"]
    other = json.loads(flmarket("run", tmp_path / "market.toml", "--out", tmp_path / "q", "--json", "--seed", 9).stdout)
    assert other["seed"] == 9


def test_compare_on_a_population(flmarket, tmp_path):
    done = flmarket(
        "compare", "--population", "jdp", "--owners", 8, "--profiles", 50, "--auction", "m1", "--auction", "m2",
        "--factor", 0.5, "--json", "--out", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["auction"] for row in rows] == ["m1", "m2"]
    assert rows[0]["spent_share"] <= 1 < rows[1]["spent_share"]
    assert {"comparison.csv", "comparison.html", "comparison.png", "comparison.svg"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert "!" in flmarket("compare", "--population", "jdp", "--profiles", 20, "--owners", 8).stdout


def test_compare_on_a_data_set(flmarket, tmp_path):
    done = flmarket(
        "compare",
        "--data",
        "breast-cancer",
        "--auction",
        "m1",
        "--seeds",
        2,
        "--rounds",
        2,
        "--json",
        "--out",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    final = json.loads(done.stdout)["final"]
    assert len(final["m1 + opt-aggr"]["accuracy"]) == 2
    assert (tmp_path / "compare-breast-cancer-accuracy.png").exists()
    assert (tmp_path / "compare-breast-cancer-balanced_accuracy.svg").exists()


def test_mechanisms_lists_what_each_guarantees(flmarket):
    listing = json.loads(flmarket("mechanisms", "--json").stdout)
    claims = {entry["name"]: entry for entry in listing["auctions"]}
    assert claims["all-in"]["truthful"] == "none"
    assert claims["m1"]["truthful"] == "exact"
    assert claims["m2"]["budget_feasible"] == "none"
    assert {"laplace-l1", "gaussian-l2"} <= set(listing["perturbations"])
    assert {"leave-one-out", "multi-krum"} <= set(listing["robust_aggregations"])
    assert "dirty-label" in listing["adversaries"]
    assert "all-in" in flmarket("mechanisms").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["run", "missing.toml"], 3, "missing.toml"),
        (["run", "broken.toml"], 3, "valid TOML"),
        (["run", "negative.toml"], 3, "budget_factor"),
        (["run", "unknown.toml"], 2, "did you mean 'all-in'"),
        (["run", "nodata.toml", "--data-dir", "."], 4, "FLMARKET_DATA"),
        (["run", "badbids.toml"], 3, "rate"),
        (["compare", "--population", "flm22"], 2, "flm22-iid"),
        (["compare", "--auction", "vickrey"], 2, "auction"),
        (["compare", "--factor", "-1"], 2, "-1"),
        (["demo", "--rounds", "0"], 2, "0"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_gets_one_line_a_code_and_leaves_nothing(flmarket, tmp_path, monkeypatch, arguments, code, hint):
    monkeypatch.setenv("FLMARKET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLMARKET_DATA", raising=False)
    files = {
        "broken.toml": "[task\nrounds = 3",
        "negative.toml": MARKET.replace("0.8", "-0.8"),
        "unknown.toml": MARKET + '[mechanism]\nauction = "allin"\n',
        "nodata.toml": MARKET.replace("breast-cancer", "nsl-kdd"),
        "badbids.toml": MARKET + '[owners]\nbids = "bids.csv"\n',
        "bids.csv": "kind,rate,privacy_budget,data_size\nlinear,nan,1,1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = flmarket(*arguments)
    assert done.returncode == code, done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    if done.stderr.startswith("error:"):
        assert done.stderr.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} - {"cache"} == set(files)


def test_help_has_examples(flmarket):
    for command in ("demo", "run", "compare", "mechanisms"):
        text = flmarket(command, "--help").stdout
        assert "Example" in text
    assert "flmarket" in flmarket("--version").stdout


def test_light_commands_do_not_import_heavy_packages():
    code = (
        "import sys; sys.argv = ['flmarket', 'mechanisms', '--json']\n"
        "from flmarket.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'sklearn', 'matplotlib', 'opendp', 'dp_accounting', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_train_auction_writes_a_menu_that_can_be_used(flmarket, tmp_path):
    menu = tmp_path / "menus" / "mine.json"
    options = ["--population", "flm21-high", "--profiles", 60, "--steps", 2, "--out", menu]
    done = flmarket("train-auction", "posted", *options, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    assert "flmarket train-auction posted --population flm21-high" in json.loads(menu.read_text())["provenance"]
    resumed = flmarket("train-auction", "posted", *options, "--start", menu, "--json")
    assert resumed.returncode == 0, resumed.stderr
    used = flmarket("compare", "--population", "flm21-high", "--profiles", 20, "--auction", f"posted:{menu}", "--json")
    assert used.returncode == 0, used.stderr
    assert flmarket("train-auction", "no-such-preset", "--population", "jdp").returncode == 2


def test_the_reward_game_runs_from_a_file(flmarket, tmp_path):
    text = '[task]\nrounds = 5\n[data]\nname = "breast-cancer"\nowners = 20\npartition = "equal"\n'
    (tmp_path / "game.toml").write_text(text + '[mechanism]\nauction = "stackelberg"\n')
    done = flmarket("run", tmp_path / "game.toml", "--out", tmp_path / "o", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    users = printed["users"]
    assert len(users["rho"]) == len(users["epsilon"]) == 20
    assert printed["spent_micros"] <= users["reward_micros"]
    assert (tmp_path / "o" / "report.html").exists()
    assert len((tmp_path / "o" / "users.csv").read_text().splitlines()) == 21
    (tmp_path / "taken").write_text("mine")
    refused = flmarket("run", tmp_path / "game.toml", "--out", tmp_path / "taken")
    assert refused.returncode == 3, refused.stderr
    assert "--out" in refused.stderr  # before a round is played: not when there is a report to write
    (tmp_path / "bad.toml").write_text(
        text.replace("[data]", "budget_factor = 1.0\n[data]") + '[mechanism]\nauction = "stackelberg"\n'
    )
    assert flmarket("run", tmp_path / "bad.toml").returncode == 3


def test_reproduce_stack(flmarket, tmp_path):
    done = flmarket("reproduce", "stack", "--quick", "--out", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    items = json.loads(done.stdout)["items"]
    assert {item["verdict"] for item in items} <= {"reproduced", "differs", "undecided"}
    assert all((tmp_path / name).exists() for item in items for name in item["files"])
    assert (tmp_path / "index.html").read_text().startswith("<!doctype html>")
    assert flmarket("reproduce", "flm99").returncode == 2


def test_an_attack_takes_no_option_that_it_would_pass_over(flmarket, tmp_path):
    refused = flmarket("audit", "m1", "--attack", "split-task", "--search", "strong", "--report", tmp_path / "a.html")
    assert refused.returncode == 3, refused.stderr
    assert "not --search and --report" in " ".join(refused.stderr.split())
