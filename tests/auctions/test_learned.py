"""Learned auctions as deployed: clearing against brute force, guarantees for any weights, shipped weights, errors."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flmarket import APPROXIMATE, EXACT, BidProfile, InvalidInput, Outcome, Valuations, auctions
from flmarket.auctions.learned import DEFAULTS, LearnedAuction, Settings, load, save, weight_names
from flmarket.auctions.learned.mechanism import clear_market, demand_steps
from flmarket.auctions.learned.network import first_parameters
from flmarket.auctions.learned.training.trainer import measure
from flmarket.errors import ConfigError, UnknownName
from flmarket.ledger import payments_to_micros, to_micros

SHIPPED = [(auction, weights) for auction in DEFAULTS for weights in weight_names(auction)]


def made(settings, seed=0, **parameters):
    """An auction with random weights, much wilder than where training starts."""
    rng = np.random.default_rng(seed)
    first = first_parameters(settings, rng)
    wild = {key: value + rng.normal(0.0, 0.5, value.shape) for key, value in first.items()}
    return LearnedAuction(settings, wild | {key: np.array(value) for key, value in parameters.items()})


# ---- clearing ----


def market(rng, rows=30, n=5, items=4):
    share = rng.dirichlet(np.ones(n), rows)
    price = np.concatenate([np.zeros((rows, n, 1)), np.sort(rng.random((rows, n, items)), axis=-1)], axis=-1)
    cost = np.concatenate([np.zeros((rows, n, 1)), np.cumsum(rng.random((rows, n, items)) ** 3, axis=-1)], axis=-1)
    return share, price, cost * rng.uniform(0.02, 0.5, (rows, 1, 1)), rng.random((rows, n))


def brute_multiplier(share, price, cost, caution, owner):
    """The largest x with x·(Σ w κ + c w_i (1 − κ_i)) ≤ 1, by bisection on owners' plain argmax choices."""

    def spent(x):
        pick = (x * share[:, None] * price - cost).argmax(axis=-1)
        kappa = np.take_along_axis(price, pick[:, None], axis=-1)[:, 0]
        return x * ((share * kappa).sum() + caution[owner] * share[owner] * (1 - kappa[owner]))

    low, high = 0.0, 1e6
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spent(middle) <= 1 else (low, middle)
    return low


def test_clearing_agrees_with_brute_force(rng):
    share, price, cost, caution = market(rng)
    item, paid = clear_market(share, price, cost, caution)
    assert (item > 0).any()
    for row in range(len(share)):
        for owner in range(share.shape[1]):
            x = brute_multiplier(share[row], price[row], cost[row], caution[row], owner) * (1 - 1e-12)
            surplus = x * share[row, owner] * price[row, owner] - cost[row, owner]
            assert item[row, owner] == surplus.argmax()
            assert paid[row, owner] == pytest.approx(x * share[row, owner] * price[row, owner, surplus.argmax()])


def test_demand_steps_by_hand():
    # half for 1, everything for 3: the first step at multiplier 2, the second at 4; then a step that never pays alone
    steps, targets = demand_steps(np.array([[0.0, 1.0, 3.0]]), np.array([[0.0, 0.5, 1.0]]))
    np.testing.assert_allclose(steps, [[2.0, 4.0]])
    np.testing.assert_array_equal(targets, [[1, 2]])
    steps, targets = demand_steps(np.array([[0.0, 2.0, 2.5]]), np.array([[0.0, 0.5, 1.0]]))
    np.testing.assert_allclose(steps, [[2.5, np.inf]])
    np.testing.assert_array_equal(targets, [[2, 2]])


@given(seed=st.integers(0, 10_000), n=st.integers(1, 8), items=st.integers(1, 9))
def test_clearing_is_within_budget_and_rational_for_any_market(seed, n, items):
    share, price, cost, caution = market(np.random.default_rng(seed), rows=5, n=n, items=items)
    item, paid = clear_market(share, price, cost, caution)
    assert (paid.sum(axis=-1) <= 1 + 1e-12).all()
    assert (paid >= np.take_along_axis(cost, item[..., None], axis=-1)[..., 0] * (1 - 1e-12)).all()


def test_full_caution_leaves_no_gain_from_any_reported_cost(rng):
    """At c = 1 an owner's own report does not move her prices; at c = 0 somebody gains, so the test can fail."""
    share, price, cost, _ = market(rng, rows=300)
    gains = {}
    for c in (0.0, 1.0):
        caution, best = np.full(share.shape, c), np.zeros(len(share))

        def utility(told, caution=caution):
            item, paid = clear_market(share, price, told, caution)
            return paid[:, 0] - np.take_along_axis(cost[:, 0], item[:, :1], axis=-1)[:, 0]

        honest = utility(cost)
        for _ in range(60):
            told = cost.copy()
            shape = np.sort(rng.random((len(share), 4)), axis=-1)
            told[:, 0, 1:] = shape * rng.uniform(0, 2, (len(share), 1)) * cost[:, 0, -1:]
            best = np.maximum(best, utility(told) - honest)
        gains[c] = best.max()
    assert gains[1.0] <= 1e-12
    assert gains[0.0] > 1e-3


# ---- any weights keep the promises ----


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(sees="all", clearing=False, dummy=True),
        Settings(sees="others", clearing=False),
        Settings(clearing=False, items=20),
    ],
    ids=["cleared", "sees-all", "sees-others", "sees-sizes"],
)
@pytest.mark.parametrize("seed", range(3))
def test_any_weights_are_rational_and_within_budget(settings, seed):
    rng = np.random.default_rng(seed)
    auction = made(settings, seed)
    bids = BidProfile.sample(rng, 400, 10, "flm22-iid")
    budget = bids.full_cost.sum(-1) * 10 ** rng.uniform(-2, 2, 400)
    outcome = auction.run(bids, budget, rng=rng)
    assert outcome.winners.any()
    assert (outcome.spent <= budget * (1 + 1e-12)).all()
    assert (bids.utility(outcome) >= -1e-12 * bids.full_cost).all()
    assert (outcome.payment[~outcome.winners] == 0).all()
    assert auction.guarantees.rational is EXACT
    assert auction.guarantees.truthful is APPROXIMATE


def test_extreme_bids_are_survived():
    for auction in (made(Settings()), made(Settings(sees="all", clearing=False))):
        valuations = Valuations([0, 1, 2, 3, 4], [1e-12, 1e12, 0.0, 1.0, 5.0])
        bids = BidProfile(valuations, [1e-6, 50.0, 0.0, 10.0, 1.0], [0.0, 1e9, 1.0, 1e-3, 7.0])
        for budget in (0.0, 1e-9, 1.0, 1e15):
            outcome = auction.run(bids, budget)
            assert outcome.spent <= budget * (1 + 1e-12)
            assert (bids.utility(outcome) >= -1e-12 * (bids.full_cost + budget)).all()
        nobody = BidProfile(Valuations([0, 0], [1.0, 1.0]), 1.0, [0.0, 0.0])
        assert auction.run(nobody, 1.0).spent == 0


def test_lotteries_draw_what_they_say():
    auction = made(Settings(sees="all", clearing=False, temperature=0.3))
    bids = BidProfile.sample(np.random.default_rng(0), None, 6, "flm21-high")
    budget = float(bids.full_cost.sum())
    many = BidProfile(
        bids.valuations.broadcast_to((20_000, 6)),
        *(np.broadcast_to(x, (20_000, 6)) for x in (bids.privacy_budget, bids.data_size)),
    )
    drawn = auction.run(many, budget, rng=np.random.default_rng(1))
    item = np.rint(drawn.epsilon / bids.privacy_budget * 8).astype(int)
    cumulative, *_ = auction._lottery(bids, np.array([budget]))
    chances = np.diff(cumulative[0], prepend=0.0, axis=-1)
    frequency = np.stack([(item == m).mean(axis=0) for m in range(9)], axis=-1)
    np.testing.assert_allclose(frequency, chances, atol=0.015)
    one, two = (auction.run(many, budget, rng=np.random.default_rng(5)).payment for _ in range(2))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(auction.run(bids, budget).epsilon, auction.run(bids, budget).epsilon)


# ---- shipped weights ----


def test_every_auction_ships_its_populations():
    assert {"flm22-iid", "flm22-niid", "flm21-low", "flm21-high"} <= set(weight_names("cleared-menu"))
    for auction, weights in SHIPPED:
        found = auctions.get(f"{auction}:{weights}")
        assert found.name == (auction if weights == DEFAULTS[auction] else f"{auction}:{weights}")
        assert "regret" in found.guarantees.source
        assert "in a new profile above" in found.guarantees.source  # a certificate
        assert f"flmarket train-auction {auction} --population {weights}" in found.guarantees.source


@pytest.mark.parametrize(("population", "published"), [("flm22-iid", 5.00), ("flm22-niid", 3.89)])
def test_the_shipped_deterministic_auction_beats_the_published_one(population, published, rng):
    bids = BidProfile.sample(rng, 1000, 10, population)
    budget = rng.uniform(0.1, 2.0, 1000) * bids.full_cost.sum(-1)
    found = measure(auctions.get(f"cleared-menu:{population}"), bids, budget, liars=20)
    assert found.bound < 0.5 * published
    assert found.regret < 0.05
    assert found.below_cost == found.empty == 0


class PayAsBid:
    """The planted cheat of the gauge: everybody sells everything for what she asks, while the money lasts."""

    def run(self, bids, budget, *, rng=None):
        fits = np.cumsum(bids.full_cost, axis=-1) <= np.asarray(budget)[..., None]
        return Outcome(np.where(fits, bids.privacy_budget, 0.0), np.where(fits, bids.full_cost, 0.0))


def test_the_gauge_of_training_sees_regret_where_there_is_some(rng):
    bids = BidProfile.sample(rng, 30, 6, "flm22-iid")
    budget = 1.5 * bids.full_cost.sum(-1)
    assert measure(PayAsBid(), bids, budget).regret > 0.3
    assert measure(auctions.get("all-in-capped"), bids, budget, liars=10).below_cost == 0


@pytest.mark.slow
def test_no_budget_violation_in_100_000_profiles_after_rounding(rng):
    auction = auctions.get("cleared-menu")
    profiles = 100_000
    bids = BidProfile.sample(rng, profiles, 10, "flm22-iid")
    budget = rng.uniform(0.1, 2.0, profiles) * bids.full_cost.sum(-1)
    payment = auction.run(bids, budget).payment
    for paid, money in zip(payment, budget, strict=True):
        micros = to_micros("budget", float(money))
        assert payments_to_micros(paid, micros).sum() <= micros


@pytest.mark.parametrize("n", [1, 3, 100])
def test_any_number_of_owners_is_served(n, rng):
    bids = BidProfile.sample(rng, 20, n, "flm22-iid")
    outcome = auctions.get("cleared-menu").run(bids, 0.8 * bids.full_cost.sum(-1))
    assert outcome.winners.any()
    assert (outcome.spent <= 0.8 * bids.full_cost.sum(-1) * (1 + 1e-12)).all()


# ---- files and errors ----


def test_weights_are_written_and_read_back(tmp_path):
    settings, path = Settings(items=3, hidden=(4,), embedding=2), tmp_path / "mine.safetensors"
    auction = made(settings)
    save(path, settings, auction.parameters, {"command": "by hand", "seed": 1})
    read = auctions.get("cleared-menu", weights=str(path))
    assert read.settings == settings
    assert "by hand" in read.guarantees.source
    assert json.loads(path.with_suffix(".json").read_text())["seed"] == 1
    bids = BidProfile.sample(np.random.default_rng(0), 50, 5, "flm22-iid")
    budget = bids.full_cost.sum(-1)
    np.testing.assert_allclose(read.run(bids, budget).payment, auction.run(bids, budget).payment, rtol=1e-4)


def test_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(UnknownName, match="flm22-iid"):
        auctions.get("cleared-menu:nowhere")
    with pytest.raises(ConfigError, match="train-auction"):
        load("cleared-menu", str(tmp_path / "missing.safetensors"))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a tensor")
    with pytest.raises(ConfigError):
        load("cleared-menu", str(broken))
    wrong = tmp_path / "wrong.safetensors"
    save(wrong, Settings(items=3), first_parameters(Settings(items=3, hidden=(7,)), np.random.default_rng(0)), {})
    with pytest.raises(ConfigError, match="shapes"):
        load("cleared-menu", str(wrong))
    with pytest.raises(InvalidInput, match="10 owners"):
        auctions.get("regretnet").run(BidProfile.sample(np.random.default_rng(0), None, 5, "flm22-iid"), 1.0)


@pytest.mark.parametrize(
    "bad",
    [{"sees": "other"}, {"items": 0}, {"temperature": 0.0}, {"sees": "all"}, {"knots": (1.0, 0.5)}],
    ids=["sees", "items", "temperature", "asks cleared", "knots"],
)
def test_settings_are_checked(bad):
    with pytest.raises(InvalidInput):
        Settings(**bad)


def test_what_files_say_besides_is_read_and_nothing_else():
    """Files of earlier versions say more, in the one way that is left; another way was another network."""
    said = {"head": "menu", "encoder": "exchangeable", "activation": "relu", "rational": True, "owners": None}
    assert Settings.from_dict(said | {"deployment": "argmax", "hidden": [3]}) == Settings(hidden=(3,))
    assert not Settings.from_dict(said | {"deployment": "sampled", "clearing": False}).clearing
    for other in ({"no such": 1}, {"head": "shares"}, {"deployment": "sampled"}, {"deployment": "expected"}):
        with pytest.raises(ConfigError, match="fields of a learned auction"):
            Settings.from_dict(other)
