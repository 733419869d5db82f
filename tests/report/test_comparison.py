from __future__ import annotations

import csv
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flmarket import BidProfile, Valuations, auctions
from flmarket.audit.yardsticks import first_best, optimal_bound
from flmarket.errors import InvalidInput
from flmarket.experiments import compare_population
from flmarket.report import Comparison, ComparisonRow, Curve, CurveSet, write_comparison, write_curves

HOSTILE = "<script>$a_b$</script>"


@pytest.fixture
def comparison() -> Comparison:
    rows = tuple(
        ComparisonRow(auction, aggregation, factor, scale * bias / factor, 0.01 / factor, 0.1, 0.8, 0.4)
        for auction, scale in (("all-in", 1.5), ("m1", 1.0))
        for aggregation, bias in (("conventional", 2.0), ("opt-aggr", 1.0))
        for factor in (0.1, 0.5, 1.0)
    )
    return Comparison("Auctions compared", "fl-market", 100, 3, rows)


def test_all_five_files(comparison: Comparison, tmp_path: Path) -> None:
    path = write_comparison(comparison, tmp_path, command="flmarket compare --seed 3")
    assert path.name == "comparison.html"
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {f"comparison.{ext}" for ext in ("csv", "json", "svg", "png", "html")}
    source = path.read_text()
    assert not re.search(r"https?:", source)
    assert "flmarket compare --seed 3" in source
    # one star per budget, all for the same pair
    assert source.count('class="best"') == 3
    assert "m1 with opt-aggr has the lowest mean error bound at 3 of 3 budgets" in source
    ElementTree.parse(tmp_path / "comparison.svg")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_survive_the_files(comparison: Comparison, tmp_path: Path) -> None:
    write_comparison(comparison, tmp_path)
    with open(tmp_path / "comparison.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [float(row["error_bound_mean"]) for row in rows] == [row.error_bound_mean for row in comparison.rows]
    loaded = json.loads((tmp_path / "comparison.json").read_text())
    assert Comparison(**{**loaded, "rows": tuple(ComparisonRow(**row) for row in loaded["rows"])}) == comparison


def test_infinite_bounds_and_hostile_names(comparison: Comparison, tmp_path: Path) -> None:
    first, *rest = comparison.rows
    broken = replace(first, auction=HOSTILE, error_bound_mean=math.inf, error_bound_se=math.nan, invalid_rate=1.0)
    odd = replace(comparison, title=HOSTILE, rows=(broken, *rest))
    source = write_comparison(odd, tmp_path).read_text()
    assert "<script" not in source
    assert "∞" in source
    assert json.loads((tmp_path / "comparison.json").read_text())["rows"][0]["error_bound_mean"] is None
    alone = replace(comparison, rows=(broken,))
    assert "No pair within the budget had a finite error bound" in write_comparison(alone, tmp_path).read_text()


def test_overspending_wins_nothing(comparison: Comparison, tmp_path: Path) -> None:
    rows = tuple(replace(row, spent_share=1.7) if row.auction == "m1" else row for row in comparison.rows)
    source = write_comparison(replace(comparison, rows=rows), tmp_path).read_text()
    assert "all-in with opt-aggr has the lowest mean error bound at 3 of 3 budgets" in source
    assert "m1 spends more than the budget and is not ranked" in source
    assert source.count('class="over">170 %') == 6
    assert "m1 · opt-aggr (over budget)" in source


def test_same_bytes_again(comparison: Comparison, tmp_path: Path) -> None:
    write_comparison(comparison, tmp_path / "a")
    write_comparison(comparison, tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_many_lines_keep_their_labels(tmp_path: Path) -> None:
    curves = tuple(Curve(f"curve {i}", (0.0, 1.0), (1.0, 2.0 + 0.01 * i)) for i in range(24))
    path = write_curves(CurveSet("Many", "x", "y", curves), tmp_path, "many")
    svg = path.with_suffix(".svg").read_text()
    heights = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>curve \d+<', svg)]
    assert len(heights) == 24
    gaps = [b - a for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)]
    assert min(gaps) > 11


def test_curves_with_bands(tmp_path: Path) -> None:
    rounds = tuple(float(i) for i in range(1, 51))
    curves = CurveSet(
        "Accuracy",
        "round",
        "test accuracy",
        (
            Curve("m1", rounds, tuple(0.6 + 0.005 * i for i in rounds), tuple(0.01 for _ in rounds)),
            Curve("guess", rounds, tuple(0.6 for _ in rounds)),
        ),
    )
    path = write_curves(curves, tmp_path, "accuracy")
    assert path == tmp_path / "accuracy.png"
    with open(tmp_path / "accuracy.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 100
    assert rows[0]["se"] == "0.01"
    assert rows[-1]["se"] == ""


def test_bad_input_is_refused(comparison: Comparison, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="rows"):
        write_comparison(replace(comparison, rows=()), tmp_path)
    with pytest.raises(InvalidInput, match="stem"):
        write_curves(CurveSet("t", "x", "y", (Curve("a", (1.0,), (1.0,)),)), tmp_path, "../out")
    with pytest.raises(InvalidInput, match="curve 'a'"):
        Curve("a", (1.0, 2.0), (1.0,))
    with pytest.raises(InvalidInput, match="curves"):
        CurveSet("t", "x", "y", ())
    assert list(tmp_path.iterdir()) == []


def test_held_against_the_second_best_where_rates_have_a_law() -> None:
    settings = {"auction_names": ["all-in"], "factors": [0.4], "owners": 3, "seed": 5}
    found = compare_population(population="flm21-high", aggregation_names=["opt-aggr"], profiles=130, **settings)
    bids = BidProfile.sample(np.random.default_rng(5), 130, 3, "flm21-high")[:100]
    budget = 0.4 * bids.full_cost.sum(axis=-1)
    bound = optimal_bound(auctions.get("all-in").run(bids, budget).epsilon, bids.data_size)
    virtual = Valuations(bids.valuations.kind, 2 * bids.valuations.rate - 0.5)
    best = first_best(BidProfile(virtual, bids.privacy_budget, bids.data_size), budget)[1]
    sold = np.isfinite(bound)
    assert found.rows[0].over_second_best == pytest.approx(bound[sold].mean() / best[sold].mean(), rel=1e-9)
    other = compare_population(population="jdp", aggregation_names=["opt-aggr"], profiles=5, **settings)
    assert other.rows[0].over_second_best is None
