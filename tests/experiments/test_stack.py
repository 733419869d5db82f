import csv
import json

import numpy as np
import pytest

from flmarket import InvalidInput
from flmarket.experiments.stack import FIGURES, Trend, reproduce


def reproduced(tmp_path, **changes):
    settings = {"quick": True, "seeds": 4, "data_dir": None, "step": lambda _: None}
    return reproduce(tmp_path, **settings | {"users": (50, 200, 800), "value_max": (2, 5, 10)} | changes)


def test_six_panels_with_files_numbers_and_verdicts(tmp_path):
    steps = []
    items = reproduced(tmp_path, step=steps.append)
    assert [item.key for item in items] == [f"stack-{figure.key}" for figure in FIGURES]
    assert {path.name for path in tmp_path.iterdir()} == {name for item in items for name in item.files}
    json.dumps([item.numbers for item in items], allow_nan=False)
    assert len(steps) == 10
    for item in items:
        with open(tmp_path / f"{item.key}.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 3 * (1 if item.numbers["accounts_agree"] else 2)
        np.testing.assert_array_equal([float(row["mean"]) for row in rows[:3]], item.numbers["printed"]["mean"])
        assert (item.verdict == "reproduced") == item.numbers["printed"]["trend_holds"]


def test_participants_and_users_follow_the_paper_and_the_server_only_with_pooled_noise(tmp_path):
    """docs/errata.md E18."""
    items = {item.key: item for item in reproduced(tmp_path)}
    for key in ("stack-fig2a", "stack-fig2b", "stack-fig4a", "stack-fig4b"):
        assert items[key].verdict == "reproduced", items[key].reason
    for key in ("stack-fig3a", "stack-fig3b"):
        assert items[key].verdict == "differs"
        assert "E18" in items[key].reason
        assert items[key].numbers["pooled"]["trend_holds"]


@pytest.mark.parametrize(
    ("rows", "sign", "holds"),
    [
        ([[1, 2, 3], [2, 3, 5]], +1, True),
        ([[1, 2, 3], [2, 3, 5]], -1, False),
        ([[1, 3, 2], [1, 3, 2.1]], +1, False),  # a clear step back
        ([[1, 2, 3], [3, 2, 1]], +1, False),  # no change beyond its error
        ([[1, 2, 3]], +1, True),
    ],
)
def test_a_trend_needs_its_sign_beyond_the_error(rows, sign, holds):
    assert Trend.of(np.array(rows, dtype=float), sign).holds is holds


def test_gains_that_grow_are_not_diminishing():
    assert Trend.of(np.array([[0.0, 3.0, 4.0]]), +1, diminishing=True).holds
    assert not Trend.of(np.array([[0.0, 1.0, 4.0]]), +1, diminishing=True).holds


@pytest.mark.parametrize("changes", [{"seeds": 0}, {"users": (100,)}, {"value_max": (5, 2)}])
def test_bad_input_is_refused(tmp_path, changes):
    with pytest.raises(InvalidInput):
        reproduced(tmp_path, **changes)
