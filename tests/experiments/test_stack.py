import csv
import json

import numpy as np
import pytest

from flmarket.experiments import stack
from flmarket.experiments.items import Job


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything at three points of each axis."""
    folder, found = tmp_path_factory.mktemp("stack"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "USERS", (50, 200, 800))
        patch.setattr(stack, "VALUE_MAX", (2, 5, 10))
        for unit, work in stack.ITEMS.items():
            patch.setattr(stack, "RUNS", (30 if unit == "fig3" else 4, 0))
            items = work(Job(folder, quick=True, seeds=range(4)))
            found |= {item.key: item for item in (items if isinstance(items, tuple) else (items,))}
    return folder, found


def test_six_panels_with_files_numbers_and_verdicts(made):
    tmp_path, items = made
    items = {key: item for key, item in items.items() if key != "stack-equilibrium"}
    assert set(items) == {*(f"stack-{figure.key}" for figure in stack.FIGURES), "stack-eq17"}
    assert {name for item in items.values() for name in item.files} < {path.name for path in tmp_path.iterdir()}
    json.dumps([item.numbers for item in items.values()], allow_nan=False)
    for figure in stack.FIGURES:
        item = items[f"stack-{figure.key}"]
        with open(tmp_path / f"{item.key}.csv", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["label"] in ("printed noise", "all accounts")]
        np.testing.assert_allclose([float(row["mean"]) for row in rows], item.numbers["printed"][figure.quantity])


def test_the_paper_is_followed_and_by_its_equation_only_figure_3_is_not(made):
    """docs/errata.md E18: the average that Algorithm 1 applies has the trends of Figure 3, equation (17) has not."""
    items = dict(made[1])
    assert items.pop("stack-eq17").verdict == "differs"
    assert items.pop("stack-fig3a").verdict != "differs"  # that gains diminish takes more runs than a test has
    assert {key: item.verdict for key, item in items.items()} == dict.fromkeys(items, "reproduced")
    assert [check.key for check in items["stack-fig4a"].checks] == ["trend", "spread"]
