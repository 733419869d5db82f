from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flmarket import privacy
from flmarket.errors import InvalidInput
from flmarket.privacy.recommend import energy_table

DOCS = Path(__file__).parents[2] / "docs" / "perturbations.md"


@pytest.mark.parametrize("dimension", [1, 3, 10, 100, 650, 100_000])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_pick_is_within_one_percent_of_the_least(dimension, epsilon, delta):
    pick = privacy.recommend(dimension, epsilon, delta=delta)
    assert pick.name in privacy.names()
    assert pick.energy_table[pick.name] <= 1.01 * min(pick.energy_table.values())
    assert pick.reason.startswith(pick.name)
    assert pick.reason.endswith(".")
    assert "\n" not in pick.reason
    if delta == 0:
        assert "gaussian-l2" not in pick.energy_table
        assert isinstance(privacy.get(pick.name).guarantee(epsilon), privacy.PureDp)


def test_energies_are_those_of_the_mechanisms():
    table = privacy.recommend(650, 1.5, delta=1e-6, l1_norm=5.0).energy_table
    for name in ("sphere", "privunit", "privunit-g", "projunit"):
        assert table[name] == pytest.approx(float(privacy.get(name).noise_energy(1.5, 650)))
    assert table["laplace-l1"] == pytest.approx(8 * 650 * 25 / 1.5**2)
    assert table["gaussian-l2"] == pytest.approx(float(privacy.get("gaussian-l2", delta=1e-6).noise_energy(1.5, 650)))


def test_simple_where_it_costs_nothing_and_good_where_it_pays():
    assert privacy.recommend(650, 0.05).name == "sphere"
    assert privacy.recommend(650, 1.0).name == "privunit-g"
    assert privacy.recommend(10, 2.0).name == "privunit"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"dimension": 0}, "dimension"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": np.nan}, "epsilon"),
        ({"delta": -1.0}, "delta"),
        ({"l1_norm": 0.5}, "l1_norm"),
        ({"l1_norm": 100.0}, "l1_norm"),
    ],
)
def test_bad_input_is_refused(arguments, field):
    with pytest.raises(InvalidInput, match=field):
        privacy.recommend(**{"dimension": 10, "epsilon": 1.0, **arguments})


def test_the_table_in_the_docs_is_what_the_command_prints():
    assert energy_table() in DOCS.read_text(encoding="utf-8")


def test_many_owners_share_one_noise() -> None:
    """A single release: local among few, secure aggregation beyond; lifetimes almost always."""
    recommend = privacy.recommend
    few, many = (recommend(7850, 1.0, delta=1e-6, owners=n) for n in (5, 60))
    assert (few.trust, many.trust) == ("local", "secure-aggregation")
    assert few.break_even == many.break_even
    assert 8 <= many.break_even <= 20
    assert many.name == "distributed-gaussian"
    at, below = (recommend(7850, 1.0, delta=1e-6, owners=many.break_even - k).trust for k in (0, 1))
    assert (at, below) == ("secure-aggregation", "local")
    assert recommend(7850, 8.0, delta=1e-6, owners=3, rounds=60).trust == "secure-aggregation"
    assert recommend(7850, 1.0, owners=60).trust == "local"  # nothing pure protects a sum
    assert recommend(7850, 1.0, owners=60).break_even is None
