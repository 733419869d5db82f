"""README and docs: examples run as pasted, links lead somewhere, commands exist."""

import re
from pathlib import Path

import pytest

from flmarket import auctions

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PYTHON = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S), start=1)
]


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(auctions._registry, "_factories", dict(auctions._registry._factories))


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("code", PYTHON)
def test_example_runs(code, capsys):
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_there_are_examples():
    assert len(PYTHON) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_toml_of_the_how_to_is_accepted():
    import tomllib

    from flmarket.engines.config import MarketConfig

    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "how-to.md").read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        MarketConfig.parse(tomllib.loads(block)).simulation()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer asks click for names that click will rename
def test_options_in_the_docs_exist():
    import typer

    from flmarket.cli.app import app

    command = typer.main.get_command(app)
    for page in PAGES:
        for line in re.findall(r"(?:^    |`)flmarket ([a-z-]+)([^`\n]*)", page.read_text(), re.M):
            name, rest = line
            assert name in command.commands, f"{page.name}: flmarket {name}"
            known = {option for parameter in command.commands[name].params for option in parameter.opts}
            assert set(re.findall(r"--[a-z-]+", rest)) <= known, f"{page.name}: flmarket {name}{rest}"
