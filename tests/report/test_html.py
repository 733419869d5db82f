from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flmarket.errors import InvalidInput, MissingDependency
from flmarket.ledger import format_micros
from flmarket.market import MarketResult
from flmarket.report import write_report
from flmarket.report.formatting import money

from .conftest import HOSTILE, Page


def test_page_is_whole_and_needs_nothing_else(troubled: MarketResult, tmp_path: Path) -> None:
    path = write_report(troubled, tmp_path / "deep" / "out", command="flmarket run --seed 7")
    assert path == tmp_path / "deep" / "out" / "report.html"
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.html", "summary.json"]
    source = path.read_text(encoding="utf-8")
    page = Page(source)
    assert len(set(page.identifiers)) == len(page.identifiers)
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"https?:|//cdn|@import|url\((?!#)", source)
    assert page.tags.count("svg") == 6
    assert "flmarket run --seed 7" in page.text
    json.loads((path.parent / "summary.json").read_text(), parse_constant=pytest.fail)


def test_numbers_agree_with_the_result(normal: MarketResult, tmp_path: Path) -> None:
    source = write_report(normal, tmp_path).read_text()
    text = Page(source).text
    for owner in normal.owners:
        assert f'title="{format_micros(owner.paid_micros)}"' in source
    assert f"Final accuracy {normal.accuracy[-1]:.3f} 0.630 by always" in text
    assert f"Paid to owners {money(normal.spent_micros)}" in text
    assert f"Largest ε, total {max(o.loss_total for o in normal.owners):.2f}" in text
    assert f"Owners paid {sum(o.paid_micros > 0 for o in normal.owners)} of {len(normal.owners)}" in text
    ranked = sorted(record.spent_micros for record in normal.rounds)
    median = ranked[(len(ranked) - 1) // 2]
    assert f"delivered and were paid {money(median, 2)}." in text
    assert source.count("✓") == 6
    assert "✗" not in source
    assert "seed 7" in text


def test_a_broken_rule_is_shown(normal: MarketResult, tmp_path: Path) -> None:
    first, *rest = normal.rounds
    overspent = replace(normal, rounds=(replace(first, budget_micros=first.spent_micros - 1), *rest))
    text = Page(write_report(overspent, tmp_path / "a").read_text()).text
    assert "✗ Payments never exceed the budget" in text
    assert "1 of 6 rules was broken" in text
    worst = max(normal.owners, key=lambda owner: owner.loss_total)
    owners = tuple(replace(o, loss_cap=0.5) if o is worst else o for o in normal.owners)
    text = Page(write_report(replace(normal, owners=owners), tmp_path / "b").read_text()).text
    assert "✗ Nobody exceeds her own privacy cap" in text
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["guarantees"]["within_caps"] is False


def test_hostile_text_is_escaped(factory: Callable[..., MarketResult], tmp_path: Path) -> None:
    result = factory(name=HOSTILE, data_set=HOSTILE, rounds=3, owners=14)
    record = replace(result.rounds[0], reason=(HOSTILE,) * len(result.rounds[0].bidders))
    result = replace(result, rounds=(record,) * 1 + result.rounds[1:], mechanism=HOSTILE)
    source = write_report(result, tmp_path, command=HOSTILE).read_text()
    page = Page(source)
    assert "script" not in page.tags
    assert HOSTILE in page.text


def test_a_slug_becomes_a_heading(factory: Callable[..., MarketResult], tmp_path: Path) -> None:
    source = write_report(factory(name="tumour-diagnosis", rounds=1), tmp_path).read_text()
    assert "<h1>Tumour diagnosis</h1>" in source


def test_every_epsilon_says_per_round_or_total(normal: MarketResult, tmp_path: Path) -> None:
    text = Page(write_report(normal, tmp_path).read_text()).text
    for match in re.finditer("ε", text):
        near = text[max(0, match.start() - 60) : match.end() + 60]
        assert re.search(r"total|per round|this round", near), near


def test_failure_leaves_the_old_report(
    normal: MarketResult, troubled: MarketResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report(normal, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(troubled, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert path.exists()


def test_same_result_same_bytes(normal: MarketResult, tmp_path: Path) -> None:
    assert write_report(normal, tmp_path / "a").read_bytes() == write_report(normal, tmp_path / "b").read_bytes()


def test_out_dir_that_is_a_file(normal: MarketResult, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InvalidInput, match="out_dir"):
        write_report(normal, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_missing_dependency_is_named(
    package: str, normal: MarketResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=package):
        write_report(normal, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_many_owners_stay_readable(factory: Callable[..., MarketResult], tmp_path: Path) -> None:
    result = factory(rounds=2, owners=2500, bidders=40)
    source = write_report(result, tmp_path, story="A story of our own.").read_text()
    text = Page(source).text
    assert "All 2,500 owners" in text
    assert "500 owners with the least pay are left out" in text
    assert "24 more bids are not shown" in text
    assert "A story of our own." in text


def test_losses_in_rho_are_nowhere_called_epsilon(normal: MarketResult, tmp_path: Path) -> None:
    """Where only sums are seen, or nobody's loss is pure, a number on the page is a ρ and says so."""
    rounds = tuple(replace(record, currency="rho") for record in normal.rounds)
    text = Page(write_report(replace(normal, rounds=rounds), tmp_path).read_text()).text
    for said in ("ρ awarded", "ρ total / cap", "ρ of one release", "bought ρ", "gave up is ρ", "cap on total ρ"):
        assert said in text
    for wrong in ("ε awarded", "ε total / cap", "ε of one release", "bought ε", "Largest ε", "gave up is ε"):
        assert wrong not in text
