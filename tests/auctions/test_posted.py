"""`posted` claims EXACT on everything, so these tests try to break it with whatever an owner might think of."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flmarket import BidProfile, Valuations, aggregation, auctions, populations
from flmarket.auctions.learned.training.market import Source
from flmarket.auctions.posted import LINEAR, NetworkMenu, PostedAuction, UnlikeHistory, load_menu, menu_names
from flmarket.auctions.posted import mechanism as mechanism_module
from flmarket.auctions.posted.menu import CATALOGUE, FEATURES, INPUTS, KNOTS, Seen, Situation
from flmarket.auctions.posted.training import Objective, Trainer, _tensors
from flmarket.errors import ConfigError, InvalidInput, UnknownName


def tabulated(draw, n):
    """Arbitrary monotone valuations: jumps, plateaus, concave and convex stretches."""
    points = draw(st.integers(1, 5))
    grid = np.cumsum(draw(st.lists(st.floats(0.01, 1.5), min_size=points, max_size=points)))
    rises = st.lists(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0, 80.0]), min_size=points, max_size=points)
    return Valuations.tabulated(grid, np.array([np.cumsum(draw(rises)) for _ in range(n)]))


@st.composite
def profiles(draw):
    n = draw(st.integers(1, 6))
    families = Valuations(
        draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)),
        draw(st.lists(st.floats(0.0, 20.0), min_size=n, max_size=n)),
    )
    valuations = Valuations.concatenate([families, tabulated(draw, draw(st.integers(1, 3)))])
    n = valuations.shape[-1]
    privacy = draw(st.lists(st.floats(0.0, 12.0), min_size=n, max_size=n))
    size = draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n))
    budget = draw(st.sampled_from([0.0, 1e-9, 0.3, 10.0, 1e3, 1e9])) * draw(st.floats(0.1, 1.0))
    return BidProfile(valuations, privacy, size), budget


@given(case=profiles(), menu=st.sampled_from(menu_names()), data=st.data())
def test_no_lie_pays_for_any_valuation(case, menu, data):
    bids, budget = case
    auction = auctions.get("posted", menu=menu)
    honest = bids.utility(auction.run(bids, budget))
    assert (honest >= 0).all()
    owner = data.draw(st.integers(0, bids.n - 1))
    lie = Valuations([data.draw(st.integers(0, 4))], [data.draw(st.floats(0.0, 50.0))])
    parts = [lie if i == owner else bids.valuations[i : i + 1] for i in range(bids.n)]
    privacy = bids.privacy_budget.copy()
    privacy[owner] = data.draw(st.floats(0.0, 12.0))
    outcome = auction.run(BidProfile(Valuations.concatenate(parts), privacy, bids.data_size), budget)
    assert outcome.spent <= budget * (1 + 1e-12)
    assert bids.utility(outcome)[owner] <= honest[owner] + 1e-9 * (bids.full_cost[owner] + 1e-12)


@given(case=profiles(), menu=st.sampled_from(menu_names()), data=st.data())
def test_an_auction_alone_and_in_a_batch_agree_to_the_last_bit(case, menu, data):
    """One row is served with plain floats, many with arrays: ties, step kinds, tables and empty purses included."""
    bids, budget = case
    auction = auctions.get("posted", menu=menu)
    rows = [data.draw(st.permutations(range(bids.n))) for _ in range(3)]
    shuffled = [bids[order] for order in rows]
    rates = np.array([1.0, data.draw(st.floats(0.01, 100.0)), data.draw(st.floats(0.01, 100.0))])
    budgets = np.array([budget, 0.0, data.draw(st.floats(0.0, 1e4))])
    valuations = Valuations(
        np.array([one.valuations.kind for one in shuffled]),
        np.array([one.valuations.rate for one in shuffled]) * rates[:, None],
        grid=np.array([one.valuations.grid for one in shuffled]),
        values=np.array([one.valuations.values for one in shuffled]),
    )
    batch = BidProfile(valuations, [one.privacy_budget for one in shuffled], [one.data_size for one in shuffled])
    together = auction.run(batch, budgets)
    for row in range(3):
        alone = auction.run(batch[row], budgets[row])
        np.testing.assert_array_equal(together.epsilon[row], alone.epsilon)
        np.testing.assert_array_equal(together.payment[row], alone.payment)


def test_ties_go_to_the_lower_index_and_the_larger_epsilon_alone_and_in_a_batch():
    """Two equal owners and step values: the first is served first, and sells all that the catalogue has for her."""
    bids = BidProfile(Valuations([4, 4], [0.1, 0.1]), [1.0, 1.0], [10, 10])
    alone = auctions.get("posted:linear").run(bids, 10.0)
    together = auctions.get("posted:linear").run(
        BidProfile(bids.valuations, np.ones((2, 2)), np.full((2, 2), 10)), 10.0
    )
    np.testing.assert_array_equal(together.epsilon, [alone.epsilon, alone.epsilon])
    np.testing.assert_array_equal(together.payment, [alone.payment, alone.payment])
    assert alone.epsilon[0] == CATALOGUE[CATALOGUE <= 1.0][-1]
    assert alone.payment[0] == pytest.approx(4.5 * alone.epsilon[0])  # 0.9 of half the purse, linear in ε


class Nosy(mechanism_module.Queue):
    """A planted cheat: what an owner says herself counts among the words of those served before her."""

    def situation(self, budget):
        known = super().situation(budget)
        louder = np.where(known.value_per_record > 0, known.value_per_record, 1.0) * np.sqrt(self._said)
        return dataclasses.replace(known, value_per_record=louder)

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._said = 1e-9 + self._valuations.per_record(1.0)


def best_gain(auction, bids, budget):
    """Of one owner who scales her whole valuation by something, over her full cost."""
    honest = bids.utility(auction.run(bids, budget))
    found = -np.inf
    for owner in range(bids.n):
        for factor in (0.3, 0.6, 0.8, 1.25, 1.6, 3.0):
            lie = np.ones(bids.n)
            lie[owner] = factor
            told = BidProfile(bids.valuations.scaled(lie), bids.privacy_budget, bids.data_size)
            gain = (bids.utility(auction.run(told, budget)) - honest)[:, owner] / bids.full_cost[:, owner]
            found = max(found, float(gain.max()))
    return found


@pytest.mark.parametrize("menu", ["mixed", "general"])
def test_a_menu_that_looks_at_her_own_report_is_caught(monkeypatch, rng, menu):
    auction = auctions.get("posted", menu=menu)
    bids = populations.get("flm21-high").sample(rng, 20, 6)
    budget = 0.7 * bids.full_cost.sum(-1)
    assert best_gain(auction, bids, budget) <= 1e-12
    monkeypatch.setattr(mechanism_module, "Queue", Nosy)
    assert best_gain(auction, bids, budget) > 0.01


@given(size=st.lists(st.integers(0, 50), min_size=2, max_size=7), seed=st.integers(0, 99), explorers=st.integers(0, 3))
def test_what_a_turn_knows_is_a_function_of_earlier_turns(size, seed, explorers):
    """Change one report in every way: nothing known at her turn or before moves, by any path."""
    rng, n = np.random.default_rng(seed), len(size)
    kind, rate = rng.integers(0, 4, n), rng.uniform(0.5, 1.5, n)
    privacy, data, who = rng.uniform(0.5, 2.0, n), np.array([size], dtype=float), int(rng.integers(n))

    def known(rate, kind, privacy):
        queue = mechanism_module.Queue(BidProfile(Valuations([kind], [rate]), privacy[None], data), explorers=explorers)
        situation = queue.situation(np.array([5.0]))
        turn = int(np.flatnonzero(queue.unsorted(np.arange(float(n)))[0].argsort() == who)[0])
        return turn, [getattr(situation, field.name) for field in dataclasses.fields(Situation)]

    turn, before = known(rate, kind, privacy)
    other = [x.copy() for x in (rate, kind, privacy)]
    other[0][who], other[1][who], other[2][who] = 7.0, (kind[who] + 1) % 4, 0.1
    for mine, theirs in zip(before, known(*other)[1], strict=True):
        np.testing.assert_array_equal(mine[: turn + 1], theirs[: turn + 1])


@pytest.mark.parametrize("menu", ["mixed", "general"])
@given(case=profiles())
def test_earlier_owners_do_not_feel_later_reports(menu, case):
    (bids, budget), auction = case, auctions.get("posted", menu=menu)
    order, first = np.argsort(-bids.data_size, kind="stable"), min(load_menu(menu).explorers, bids.n // 4)
    order = np.concatenate([order[bids.n - first :], order[: bids.n - first]])
    before = auction.run(bids, budget)
    last = order[-1]
    rate = bids.valuations.rate.copy()
    rate[last] = rate[last] * 3 + 1
    changed = Valuations(bids.valuations.kind, rate, grid=bids.valuations.grid, values=bids.valuations.values)
    after = auction.run(BidProfile(changed, bids.privacy_budget, bids.data_size), budget)
    np.testing.assert_array_equal(before.payment[order[:-1]], after.payment[order[:-1]])


@given(case=profiles(), data=st.data())
def test_private_sizes_no_lie_about_anything_pays(case, data):
    bids, budget = case
    auction = auctions.get("posted-private", prior_size=data.draw(st.sampled_from([1.0, 50.0, 1e4])))
    outcome = auction.run(bids, budget)
    honest = bids.utility(outcome)
    assert (honest >= 0).all()
    assert outcome.spent <= budget * (1 + 1e-12)
    owner = data.draw(st.integers(0, bids.n - 1))
    lie = Valuations([data.draw(st.integers(0, 4))], [data.draw(st.floats(0.0, 50.0))])
    parts = [lie if i == owner else bids.valuations[i : i + 1] for i in range(bids.n)]
    privacy, size = bids.privacy_budget.copy(), bids.data_size.copy()
    privacy[owner], size[owner] = data.draw(st.floats(0.0, 12.0)), data.draw(st.integers(0, 3000))
    gain = bids.utility(auction.run(BidProfile(Valuations.concatenate(parts), privacy, size), budget))[owner]
    assert gain <= honest[owner] + 1e-9 * (bids.full_cost[owner] + 1e-12)


def test_private_sizes_buy_part_of_a_large_data_set():
    """Prior 10 records, one owner with 1,000 and a budget of 20: at 1.8·ε a record money ends before records."""
    bids = BidProfile(Valuations(0, 0.1), 1.0, 1000)
    outcome = auctions.get("posted-private", menu="linear", prior_size=10.0).run(bids, 20.0)
    assert 0 < outcome.records[0] < 1000
    assert outcome.payment[0] <= 20.0
    assert outcome.payment[0] == pytest.approx(20.0)


def test_fewer_records_cost_accuracy_only_with_the_sampling_term():
    weights, eps, size = [0.5, 0.5], [1.0, 1.0], [100, 100]
    whole = aggregation.error_bound(weights, eps, size)
    part = aggregation.error_bound(weights, eps, size, records=[100, 10], record_variance=1.0)
    assert part - whole == pytest.approx(0.25 * (1 / 10 - 1 / 100))
    assert aggregation.error_bound(weights, eps, size, records=[100, 10]) == whole


def test_by_hand():
    """One owner, cost 2·0.4·ε a record, ε̄ = 1, 10 records, budget 20: an even share is 2 a record, 0.9 of it 1.8·ε."""
    bids = BidProfile(Valuations(0, 0.4), 1.0, 10)
    outcome = auctions.get("posted", menu="linear").run(bids, 20.0)
    sold = CATALOGUE[CATALOGUE <= 1.0][-1]
    assert outcome.epsilon[0] == sold
    assert outcome.payment[0] == pytest.approx(1.8 * sold * 10)
    # at cost 2·1.0·ε the price 1.8·ε is too low: she declines
    assert auctions.get("posted", menu="linear").run(BidProfile(Valuations(0, 1.0), 1.0, 10), 20.0).epsilon[0] == 0
    # quadratic cost ε²: she sells until 2ε = 1.8
    eps = auctions.get("posted", menu="linear").run(BidProfile(Valuations(1, 1.0), 5.0, 10), 20.0).epsilon[0]
    assert eps == pytest.approx(0.9, rel=0.01)


def test_money_scale_does_not_matter_without_a_unit(rng):
    bids = BidProfile.sample(rng, 20, 10, "flm22-iid")
    budget = 0.5 * bids.full_cost.sum(-1)
    one = auctions.get("posted").run(bids, budget)
    scaled = BidProfile(bids.valuations.scaled(1024.0), bids.privacy_budget, bids.data_size)
    two = auctions.get("posted").run(scaled, 1024.0 * budget)
    np.testing.assert_allclose(two.payment, 1024.0 * one.payment, rtol=1e-12)


def test_blocks_keep_the_promises(rng, monkeypatch):
    monkeypatch.setattr(mechanism_module, "MAX_STEPS", 4)
    bids = BidProfile.sample(rng, 30, 13, "flm22-iid")
    budget = rng.uniform(0.1, 2.0, 30) * bids.full_cost.sum(-1)
    auction = auctions.get("posted")
    honest = bids.utility(auction.run(bids, budget))
    assert (honest >= 0).all()
    assert (auction.run(bids, budget).spent <= budget * (1 + 1e-12)).all()
    for owner in range(13):
        for factor in (0.3, 0.8, 1.2, 3.0):
            lie = np.ones(13)
            lie[owner] = factor
            outcome = auction.run(BidProfile(bids.valuations.scaled(lie), bids.privacy_budget, bids.data_size), budget)
            assert (bids.utility(outcome)[:, owner] <= honest[:, owner] + 1e-9 * bids.full_cost[:, owner]).all()


def test_a_large_auction(rng):
    n = 20_000
    valuations = Valuations(rng.integers(0, 4, n), rng.uniform(0.5, 1.5, n))
    bids = BidProfile(valuations, rng.uniform(0.5, 2, n), rng.integers(1, 1000, n))
    budget = 0.5 * float(bids.full_cost.sum())
    outcome = auctions.get("posted").run(bids, budget)
    assert 0.9 * budget < outcome.spent <= budget * (1 + 1e-12)
    assert (bids.utility(outcome) >= 0).all()


def mean_bound(auction, population, profiles=2000):
    rng = np.random.default_rng(7)
    bids = populations.get(population).sample(rng, profiles, 10)
    budget = rng.uniform(0.1, 2.0, profiles) * bids.full_cost.sum(-1)
    epsilon = auction.run(bids, budget).epsilon
    weights = aggregation.get("opt-aggr").weights(epsilon, bids.data_size)
    return float(aggregation.error_bound(weights, epsilon, bids.data_size).mean())


def test_it_buys_more_accuracy_than_all_in_on_every_fl_market_population():
    for population in ("flm22-iid", "flm22-niid"):
        assert mean_bound(auctions.get("posted"), population) < mean_bound(auctions.get("all-in"), population)
    assert mean_bound(auctions.get("posted"), "flm22-iid") <= 2.03
    assert mean_bound(auctions.get("posted", menu="flm22-iid"), "flm22-iid") < mean_bound(
        auctions.get("posted"), "flm22-iid"
    )


def test_cost_type_owners(rng):
    """JDP's clients: one cost each. The catalogue's largest ε within the budget is sold, or nothing."""
    bids = BidProfile.sample(rng, 50, 20, "jdp")
    outcome = auctions.get("posted").run(bids, 0.5 * bids.full_cost.sum(-1))
    assert set(np.unique(outcome.epsilon)) <= {0.0, CATALOGUE[CATALOGUE <= 1.0][-1]}
    assert outcome.winners.mean() > 0.2


def test_menus_survive_a_file(tmp_path):
    seen = Seen(40, (0.5, 2.0), (0.6, 1.9))
    for menu in (load_menu("general"), dataclasses.replace(load_menu("mixed"), seen=seen)):
        changed = dataclasses.replace(menu, unit=2.0, reserve=0.25)
        changed.save(tmp_path / "menu.json")
        assert load_menu(str(tmp_path / "menu.json")) == changed


def test_a_menu_file_of_the_earlier_form_prices_as_it_did(tmp_path):
    """Written by hand, as files were: 1.5·(money/records)·ε^0.5 for the only owner, whose cost is √ε."""
    zeros = [0.0] * (len(FEATURES) - 1)
    values = {"level": [np.log(1.5), *zeros], "power": [0.5, *zeros], "bend": [0.0, *zeros], "reserve": 0.0}
    (tmp_path / "old.json").write_text(json.dumps(values | {"unit": None, "name": "old", "provenance": "by hand"}))
    auction = auctions.get("posted", menu=str(tmp_path / "old.json"))
    outcome = auction.run(BidProfile(Valuations(2, 0.5), 0.4, 10), 20.0)
    sold = CATALOGUE[CATALOGUE <= 0.4][-1]
    assert outcome.epsilon[0] == sold
    assert outcome.payment[0] == pytest.approx(1.5 * 20.0 * np.sqrt(sold))
    private = auctions.get("posted-private", menu=str(tmp_path / "old.json"), prior_size=10.0)
    assert private.run(BidProfile(Valuations(2, 0.5), 0.4, 10), 20.0).epsilon[0] == sold


def test_a_network_by_hand():
    """One layer whose only weights are the bias: prices (money/records)·ε², whatever happened before."""
    layer = [tuple(2 * np.log(KNOTS)), *[(0.0,) * len(KNOTS)] * len(INPUTS)]
    menu = NetworkMenu((tuple(layer),))
    outcome = PostedAuction(menu).run(BidProfile(Valuations(0, 0.5), 2.0, 10), 20.0)  # costs ε, is paid 2ε² ≤ 20/10
    sold = outcome.epsilon[0]
    assert outcome.payment[0] == pytest.approx(20.0 * min(sold**2, 1.0), rel=1e-9)
    assert sold == CATALOGUE[CATALOGUE >= 1.0][0]  # beyond ε = 1 all the money is on offer already


def test_a_ceiling_cuts_the_menu():
    """Prices 10·2ε² of one owner who loses 10ε: with a ceiling of 1.2, 12ε beyond ε = 0.6."""
    layer = [tuple(2 * np.log(KNOTS) + np.log(2.0)), *[(0.0,) * len(KNOTS)] * len(INPUTS)]
    auction = auctions.get("posted", menu=NetworkMenu((tuple(layer),)), ceiling=1.2)
    bids = BidProfile(Valuations(0, 0.5), 2.0, 10)
    alone, batch = (
        auction.run(bids, 10.0),
        auction.run(BidProfile(Valuations([[0], [0]], 0.5), 2.0, [[10], [10]]), 10.0),
    )
    assert alone.epsilon[0] == CATALOGUE[CATALOGUE <= 10.0 / 12.0][-1]  # all the money is 10
    assert alone.payment[0] == pytest.approx(12.0 * alone.epsilon[0])
    np.testing.assert_array_equal(batch.payment, np.broadcast_to(alone.payment, (2, 1)))
    with pytest.raises(InvalidInput, match="ceiling"):
        auctions.get("posted", ceiling=0.0)


@pytest.mark.parametrize("change", [{"layers": ()}, {"layers": (((1.0,),),)}, {"explorers": -1}, {"reserve": 2.0}])
def test_a_network_of_another_shape_is_refused(change):
    with pytest.raises(ConfigError, match="menu"):
        dataclasses.replace(load_menu("mixed"), **change)


def test_bidders_unlike_the_history_bring_a_warning(rng):
    history = populations.get("flm22-iid").sample(rng, 1, 200)[0]
    auction = PostedAuction(dataclasses.replace(load_menu("flm22-iid"), seen=Seen.of(history)))
    for _ in range(20):
        bids = populations.get("flm22-iid").sample(rng, None, 10)
        auction.run(bids, 10.0)
    dear = BidProfile(bids.valuations.scaled(10.0), bids.privacy_budget, bids.data_size)
    with pytest.warns(UnlikeHistory, match="value of a record"):
        auction.run(dear, 10.0)
    with pytest.warns(UnlikeHistory, match="privacy budget"):
        auction.run(BidProfile(bids.valuations, bids.privacy_budget + 3.0, bids.data_size), 10.0)


@pytest.mark.parametrize("text", ["{", "{}", '{"level": [1], "power": [], "bend": []}', "[]"])
def test_bad_menu_files_are_refused(tmp_path, text):
    (tmp_path / "menu.json").write_text(text)
    with pytest.raises(ConfigError, match="menu"):
        load_menu(str(tmp_path / "menu.json"))


def test_variants_by_name():
    assert auctions.get("posted:linear").menu == LINEAR
    assert auctions.get("posted:linear").name == "posted:linear"
    assert auctions.get("posted").name == "posted"
    with pytest.raises(UnknownName):
        auctions.get("m1:linear")


def test_unknown_menu():
    with pytest.raises(UnknownName, match="general"):
        auctions.get("posted", menu="generall")
    with pytest.raises(ConfigError, match="reserve"):
        dataclasses.replace(LINEAR, reserve=2.0)


def test_prices_never_fall_and_every_menu_says_where_it_comes_from():
    for name in menu_names():
        menu = load_menu(name)
        assert menu.name == name
        assert menu.provenance


def test_training_improves_the_untrained_menu():
    trainer = Trainer([Source("flm21-high")], profiles=128, held_out=60, unit=1.0, seed=3)
    *_, final = trainer.train(steps=40, rate=0.03)
    assert final.loss < 0.9 * trainer.loss(LINEAR)
    assert final.menu.unit == 1.0
    assert PostedAuction(final.menu).guarantees.truthful == "exact"


def test_training_sees_the_auction_that_it_trains(rng):
    """At a temperature of almost nothing, soft choices are the mechanism's own."""
    bids = populations.get("flm22-iid").sample(rng, 40, 10)
    budget = rng.uniform(0.1, 2.0, 40) * bids.full_cost.sum(-1)
    menu = load_menu("mixed")
    trainer = Trainer([Source("flm22-iid")], explorers=menu.explorers, profiles=4, held_out=2)
    soft, _, queue = trainer.served(*_tensors(menu), bids, budget, 1e-7, slice(None))
    hard = PostedAuction(menu).run(bids, budget).epsilon
    close = np.isclose(queue.unsorted(soft.detach().numpy().astype(float)), hard, rtol=1e-3)
    assert close.mean() > 0.98  # single precision may turn a choice that is nearly a tie


@pytest.mark.parametrize("name", ["opt-aggr", "conventional", "secure-opt"])
def test_soft_bounds_are_the_bounds_and_their_slopes(rng, name):
    objective, size = Objective(name), rng.uniform(1.0, 9.0, (6, 4))
    epsilon = rng.uniform(0.5, 2.0, (6, 4))
    given = torch.tensor(epsilon, requires_grad=True)
    bound = objective.soft(given, torch.ones(6, 4, dtype=torch.float64), size)
    np.testing.assert_allclose(bound.detach().numpy(), objective.bound(epsilon, size), rtol=1e-6)
    bound.sum().backward()
    moved = epsilon.copy()
    moved[:, 1] += 1e-5
    slope = (objective.bound(moved, size) - objective.bound(epsilon, size)) / 1e-5
    np.testing.assert_allclose(given.grad[:, 1].numpy(), slope, rtol=0.02, atol=1e-4)


def test_training_can_aim_at_another_noise_or_rule():
    class Loud:
        def noise_energy(self, epsilon, dimension):
            return 100.0 * dimension / np.asarray(epsilon) ** 2

    def untrained(**given):
        return Trainer([Source("flm21-high")], objective=Objective(**given), held_out=40).loss(LINEAR)

    assert untrained(perturbation=Loud()) > 2 * untrained()
    assert untrained(dimension=31) > 2 * untrained()
    assert untrained(name="conventional") > untrained()
    assert untrained(name="secure-opt") < untrained()
    with pytest.raises(InvalidInput, match="aggregation"):
        Objective("krum")


def test_a_menu_fitted_to_past_bids_remembers_them(rng):
    history = populations.get("flm22-iid").sample(rng, 1, 30)[0]
    trainer = Trainer([Source(history=history, owners=5)], unit=1.2, profiles=8, held_out=4)
    *_, final = trainer.train(steps=2)
    assert final.menu.seen == Seen.of(history)
    assert final.menu.unit == 1.2
