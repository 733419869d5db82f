import json

import numpy as np
import pytest

from flmarket import STEP, BidProfile, InvalidInput, populations
from flmarket.errors import ConfigError, UnknownName


@pytest.mark.parametrize("name", populations.names())
def test_shapes_and_seeds(name):
    one = BidProfile.sample(np.random.default_rng(5), 7, 4, name)
    two = BidProfile.sample(np.random.default_rng(5), 7, 4, name)
    assert one.shape == (7, 4)
    np.testing.assert_array_equal(one.full_cost, two.full_cost)
    assert BidProfile.sample(np.random.default_rng(5), None, 3, name).shape == (3,)
    assert BidProfile.sample(np.random.default_rng(5), (2, 3), None, name).shape[:2] == (2, 3)


def test_the_papers_ranges(rng):
    for name, top in (("flm21-low", 5.0), ("flm21-high", 2.0), ("flm22-iid", 2.0)):
        bids = BidProfile.sample(rng, 5000, 10, name)
        assert 0.5 <= bids.privacy_budget.min() < 0.51
        assert top - 0.01 < bids.privacy_budget.max() <= top
        assert bids.valuations.rate.min() >= 0.5
        assert bids.valuations.rate.max() <= 1.5
        assert set(np.unique(bids.valuations.kind)) == {0, 1, 2, 3}
    assert (BidProfile.sample(rng, 10, 10, "flm21-low").data_size == 1).all()


def test_jdp_clients_have_one_cost_and_a_size(rng):
    bids = BidProfile.sample(rng, 2000, 100, "jdp")
    assert (bids.valuations.kind == STEP).all()
    np.testing.assert_allclose(bids.full_cost, bids.cost(0.01))
    assert bids.data_size.min() == 1
    assert bids.data_size.max() == 1000
    assert bids.full_cost.min() * (1 + 1e-12) >= 1
    assert bids.full_cost.max() <= 1000 * (1 + 1e-12)


def test_flm22_owners_share_nsl_kdd():
    sizes = populations.get("flm22-iid").sizes
    assert len(sizes) == 1000
    assert sizes.sum() == 125_973
    assert sizes.min() >= 10
    # log-normal with σ = 2: the spread of the logarithm above the floor is about 2 (rounding cuts the lower tail)
    spare = sizes[sizes > 30] - 10.0
    assert np.log(spare).std() > 1.0
    niid = populations.get("flm22-niid").sizes
    assert niid.min() >= 1
    assert niid.sum() == 125_973


def test_bidders_of_a_profile_are_distinct_owners():
    sizes = np.arange(1, 1001)
    population = populations.Population("all-different", 10, (0.5, 2.0), sizes)
    for n in (10, 400):
        drawn = population.sample(np.random.default_rng(1), 50, n).data_size
        assert all(len(set(row)) == n for row in drawn)
    frequencies = np.bincount(population.sample(np.random.default_rng(1), 20_000, 10).data_size.astype(int).ravel())
    assert frequencies[1:].std() < 1.2 * np.sqrt(200)  # uniform: mean 200, Poisson spread


def test_sizes_are_split_exactly(rng):
    sizes = populations.log_normal_sizes(rng, 7, 100, minimum=3)
    assert sizes.sum() == 100
    assert sizes.min() >= 3
    with pytest.raises(InvalidInput):
        populations.log_normal_sizes(rng, 20, 100, minimum=10)


def test_unknown_population_suggests_one():
    with pytest.raises(UnknownName, match="did you mean 'flm22-iid'"):
        BidProfile.sample(np.random.default_rng(0), 1, 1, "flm22-idd")


def test_more_bidders_than_owners_is_refused(rng):
    with pytest.raises(InvalidInput, match="at most the 1000 owners"):
        BidProfile.sample(rng, 1, 1001, "flm22-iid")


CSV = "owner,kind,rate,privacy_budget,data_size\na,linear,1.0,2.0,10\nb,step,0.5,1.0,4\n"


def test_own_bids_from_csv_and_json(tmp_path):
    path = tmp_path / "bids.csv"
    path.write_text(CSV)
    bids = populations.read_bids(path)
    np.testing.assert_allclose(bids.full_cost, [40.0, 2.0])
    rows = [
        {"kind": "Linear", "rate": 1.0, "privacy_budget": 2.0, "data_size": 10},
        {"kind": "tabulated", "grid": [1, 2], "values": [1, 4], "privacy_budget": 2.0, "data_size": 3},
    ]
    path = tmp_path / "bids.json"
    path.write_text(json.dumps(rows))
    np.testing.assert_allclose(populations.read_bids(path).full_cost, [40.0, 12.0])


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("b.csv", "kind,rate\nlinear,1\n", "data_size"),
        ("b.csv", CSV.replace("1.0,2.0", "nan,2.0"), "rate"),
        ("b.csv", CSV.replace("2.0,10", "-2.0,10"), "privacy_budget"),
        ("b.csv", CSV.replace("step", "cubic"), "cubic"),
        ("b.csv", CSV.replace("10", "ten"), "ten"),
        ("b.csv", "kind,rate,privacy_budget,data_size\n", "0 bids"),
        ("b.csv", 'kind,"rate', "valid CSV"),
        ("b.json", "{not json", "valid JSON"),
        ("b.json", "[" * 100_000, "valid JSON"),
        ("b.json", '[{"kind": "linear", "rate": ' + "9" * 5000 + "}]", "valid JSON"),
        ("b.json", '{"kind": "linear"}', "list of objects"),
        ("b.json", '[{"kind": "linear", "rate": true, "privacy_budget": 1, "data_size": 1}]', "rate"),
    ],
)
def test_malformed_files_say_where(tmp_path, name, text, hint):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        populations.read_bids(path)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_a_typed_error(tmp_path):
    with pytest.raises(ConfigError, match="readable"):
        populations.read_bids(tmp_path / "none.csv")
