from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flmarket.market import MarketResult, RoundRecord
from flmarket.report import check_guarantees, market_charts
from flmarket.report.charts import evenly
from flmarket.report.drawing import spread


def test_same_bytes_again_and_no_global_state(normal: MarketResult) -> None:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcParams["lines.linewidth"] = 9  # a user's own setting neither leaks in nor is lost
        before = dict(matplotlib.rcParams)
        again = market_charts(normal)
        assert dict(matplotlib.rcParams) == before
    assert again == market_charts(normal)


def test_inline_svg_is_whole_named_and_keeps_to_itself(troubled: MarketResult) -> None:
    charts = market_charts(troubled)
    identifiers: list[str] = []
    for chart in charts:
        ElementTree.fromstring(chart.svg)
        assert "http" not in chart.svg
        assert "<style" not in chart.svg
        assert f">{chart.title}</title>" in chart.svg
        assert "var(--" in chart.svg
        found = re.findall(r'\bid="([^"]+)"', chart.svg)
        identifiers += found
        for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', chart.svg):
            assert reference in found
        # every colour follows the theme
        assert not re.findall(r": (#[0-9a-f]{6})", chart.svg)
    assert len(set(identifiers)) == len(identifiers)


def test_captions_are_computed(normal: MarketResult, troubled: MarketResult) -> None:
    captions = {chart.key: chart.caption for chart in market_charts(normal)}
    first, last = normal.accuracy[0], normal.accuracy[-1]
    assert f"rose from {first:.3f} to {last:.3f}" in captions["accuracy"]
    assert captions["accuracy"].endswith("gives 0.630.")
    assert f"{max(o.loss_total for o in normal.owners):.2f} in total" in captions["epsilon-owners"]
    captions = {chart.key: chart.caption for chart in market_charts(troubled)}
    invalid = sum(not record.valid for record in troubled.rounds)
    assert f"in {invalid} rounds nobody delivered" in captions["error-bound"]
    assert "set no cap" in captions["epsilon-owners"]


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 1},
        {"rounds": 2, "bidders": 1, "owners": 1},
        {"rounds": 3, "empty_rounds": (0, 1, 2)},
        {"rounds": 1500, "bidders": 2, "owners": 3, "cap": 1e6},
        {"rounds": 2, "owners": 3000, "bidders": 2500},
        {"rounds": 3, "uncapped_share": 1.0},
    ],
    ids=["one round", "one owner", "nothing delivered", "many rounds", "many owners", "no caps"],
)
def test_odd_runs_draw_and_stay_small(factory: Callable[..., MarketResult], options: dict[str, object]) -> None:
    charts = market_charts(factory(**options))
    assert len(charts) == 6
    assert all(chart.caption.endswith(".") for chart in charts)
    assert sum(len(chart.svg) for chart in charts) < 600_000


def test_nothing_awarded_at_all(normal: MarketResult) -> None:
    record = normal.rounds[0]
    n = len(record.bidders)
    empty = replace(
        record, loss=np.zeros(n), price_micros=np.zeros(n, dtype=np.int64), state=(None,) * n, reason=("",) * n,
        weights=np.zeros(n), error_bound=float("inf"), metrics={}, budget_micros=0,
    )  # fmt: skip
    idle = tuple(replace(owner, paid_micros=0, loss_total=0.0, releases=0) for owner in normal.owners)
    captions = [chart.caption for chart in market_charts(replace(normal, rounds=(empty,), owners=idle))]
    assert any("Nobody was awarded" in caption for caption in captions)


def test_a_round_that_nobody_could_join(normal: MarketResult) -> None:
    nobody, owners = np.empty(0), np.empty(0, dtype=np.int64)
    empty = RoundRecord(40, owners, nobody, nobody, owners, (), (), nobody, 0, float("inf"), {"accuracy": 0.9})
    result = replace(normal, rounds=(*normal.rounds, empty))
    captions = {chart.key: chart.caption for chart in market_charts(result)}
    assert "in 1 round nobody delivered" in captions["error-bound"]
    assert all(check.holds for check in check_guarantees(result))


def test_the_only_delivery_of_many_rounds_may_be_one_that_is_not_drawn(factory: Callable[..., MarketResult]) -> None:
    many = factory(rounds=1500, bidders=2, owners=3)
    lone = next(k for k in range(1500) if k not in evenly(1500, 1000))
    rounds = (r if k == lone else replace(r, error_bound=float("inf")) for k, r in enumerate(many.rounds))
    captions = {chart.key: chart.caption for chart in market_charts(replace(many, rounds=tuple(rounds)))}
    assert "in 1,499 rounds nobody delivered" in captions["error-bound"]


def test_labels_are_spread_apart() -> None:
    placed = spread([1.0, 1.0, 0.0, 9.9, 10.0], 1.0, 0.0, 10.0)
    assert sorted(placed) == pytest.approx([0.0, 1.0, 2.0, 9.0, 10.0])
    assert placed[2] == 0.0
