"""README and docs: examples run as pasted, links lead somewhere, commands exist, the site needs no network."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flmarket import aggregation, auctions, privacy
from flmarket.learning import datasets, models
from flmarket.market.kind import kinds

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CODE = {page: re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) for page in PAGES}
WITH_CODE = [page for page in PAGES if CODE[page]]
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))


def name_of(page):
    return str(page.relative_to(ROOT))


def anchors(page):
    """The anchors of a page's headings, by GitHub's and MkDocs' common rule for plain headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.fixture
def clean_registry(monkeypatch):
    for registry in (auctions._registry, aggregation._registry, privacy._REGISTRY, datasets._registry, models, kinds):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setitem(sys.modules, "example", ModuleType("example"))  # what is defined there can be pickled


def run_page(page):
    """A page's examples in order, as a reader would paste them into one session."""
    names = vars(sys.modules["example"])
    for number, code in enumerate(CODE[page], start=1):
        exec(compile(code, f"{page.name}, example {number}", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")  # what Flower's command asks click for
@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_examples_run(page, capsys):
    run_page(page)


def test_there_are_examples():
    assert len(WITH_CODE) >= 6
    assert {page.stem for page in TUTORIALS} == {"researcher", "buyer", "owner", "broker"}
    assert all(CODE[page] for page in TUTORIALS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        other = (page.parent / target) if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def test_the_navigation_lists_pages_that_exist_and_leaves_no_orphans():
    yaml = pytest.importorskip("yaml")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for value in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(value)]

    listed = leaves(settings["nav"])
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert set(listed) <= pages
    linked = {
        (page.parent / target).resolve()
        for page in (ROOT / "docs").rglob("*.md")
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text())
    }
    assert not [page for page in pages - set(listed) if (ROOT / "docs" / page).resolve() not in linked]


def test_the_site_asks_for_nothing_from_elsewhere():
    yaml = pytest.importorskip("yaml")
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    assert theme["highlightjs"] is False  # it would come from a CDN
    assert "analytics" not in theme


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"""<(?:script|img|link)[^>]+(?:src|href)=["']?(https?:)?//""", page.read_text())
        assert not fetched, page.name


@pytest.mark.parametrize("page", ["how-to.md", "tutorials/buyer.md"])
def test_the_toml_is_accepted(page):
    from flmarket.engines.config import MarketConfig

    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        if "task" in tomllib.loads(block):
            MarketConfig.parse(tomllib.loads(block)).simulation()


@pytest.mark.usefixtures("clean_registry")
def test_the_sections_of_the_extend_page_are_accepted(tmp_path, monkeypatch):
    from flmarket.engines.config import MarketConfig

    (raffle,) = (code for code in CODE[ROOT / "docs" / "extend.md"] if code.startswith('"""A raffle'))
    assert raffle.count("\n") <= 80
    (tmp_path / "raffle.py").write_text(raffle)
    monkeypatch.syspath_prepend(tmp_path)
    for block in re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "extend.md").read_text(), re.M | re.S):
        MarketConfig.parse({"task": {"budget_per_round": 1.0}} | tomllib.loads(block))
    sys.modules.pop("raffle", None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer asks click for names that click will rename
def test_options_in_the_docs_exist():
    import typer

    from flmarket.cli.app import app

    command = typer.main.get_command(app)
    for page in PAGES:
        for name, rest in re.findall(r"(?:^    |`)flmarket ([a-z-]+)([^`\n]*)", page.read_text(), re.M):
            assert name in command.commands, f"{page.name}: flmarket {name}"
            words = re.split(r"[|&;#]", rest)[0].split()
            found = command.commands[name]
            while words and words[0] in getattr(found, "commands", {}):  # a group of commands, as in `ledger verify`
                found = found.commands[words.pop(0)]
            known = {option for parameter in found.params for option in parameter.opts}
            assert set(re.findall(r"--[a-z-]+", " ".join(words))) <= known, f"{page.name}: flmarket {name}{rest}"


# commands of the tutorials that take minutes, or data that is not there: their options are checked above
LONG = ("reproduce", "audit", "train-auction", "compare --data")


def tutorial_commands():
    found = []
    for page in TUTORIALS:
        lines = re.findall(r"^    (flmarket [^\n]+)$", page.read_text(), re.M)
        found += [pytest.param(page, line, id=line) for line in lines if not line[9:].startswith(LONG)]
    return found


@pytest.mark.parametrize(("page", "line"), tutorial_commands())
def test_commands_of_the_tutorials_run(page, line, tmp_path):
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.M | re.S)):
        (tmp_path / ("market.toml" if number == 0 else f"{number}.toml")).write_text(block)
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any((tmp_path / "out").rglob("*.html"))


@pytest.mark.usefixtures("clean_registry")
def test_the_mechanism_of_the_extend_page_passes_contract_and_audit(capsys):
    """The page's own example, through the suite that every registered auction must pass."""
    names = run_page(ROOT / "docs" / "extend.md")
    file = ROOT / "tests" / "auctions" / "test_auction_contract.py"
    spec = importlib.util.spec_from_file_location("auction_contract", file)
    contract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contract)
    name = "even-price"
    contract.test_promises_hold(name)
    contract.test_scale_of_money_does_not_matter(name)
    contract.test_order_of_owners_does_not_matter(name)
    contract.test_exactly_truthful_means_no_lie_about_value_pays(name)
    contract.test_a_batch_is_the_auctions_one_by_one(name, np.random.default_rng(0))
    contract.test_deep_batches_keep_their_shape(name, np.random.default_rng(0))
    contract.test_every_auction_says_where_its_claims_come_from(name)
    assert not names["report"].contradicted
    code = CODE[ROOT / "docs" / "extend.md"][0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
