"""The papers' own auctions: every term of their losses worked by hand, grids, payments, search and checkpoints."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flmarket import APPROXIMATE, EXACT, BidProfile, InvalidInput, Valuations, auctions  # noqa: E402
from flmarket.auctions.learned import PAPERS, load, save, weight_names  # noqa: E402
from flmarket.auctions.learned.papers import PaperAuction, PaperSettings, first_parameters, inputs_of, outputs  # noqa: E402
from flmarket.auctions.learned.training import PAPER_PRESETS  # noqa: E402
from flmarket.auctions.learned.training import papers as training  # noqa: E402
from flmarket.auctions.learned.training.market import Source, conventional_bound  # noqa: E402
from flmarket.auctions.learned.training.papers import (  # noqa: E402
    PaperTrainer,
    by_the_papers,
    make_batch,
    regret_of_two_draws,
    search,
    terms,
)
from flmarket.cli import training as command  # noqa: E402
from flmarket.errors import ConfigError, UnknownName  # noqa: E402
from flmarket.experiments.fl_market import DrawnBudget  # noqa: E402
from flmarket.market.kinds.auction import cleared  # noqa: E402

NAMES = list(PAPER_PRESETS)
LINEAR = 0


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wild(settings, seed=0):
    """Random weights under which decisions depend on the bids."""
    rng = np.random.default_rng(seed)
    return {key: value + rng.normal(0, 0.2, value.shape) for key, value in first_parameters(settings, rng).items()}


def tensors(parameters):
    return {key: torch.tensor(value, dtype=torch.float32) for key, value in parameters.items()}


# ---- a batch worked by hand ----
#
# Two profiles of two owners, M = 2. Valuations are linear, v(ε) = 2αε a record.
#   profile 1: B = 100, d = (10, 30), ε̄ = (1, 2), α = (1, 0.5)
#   profile 2: B = 40,  d = (10, 10), ε̄ = (2, 1), α = (0.5, 1)
# The networks say the same whatever they see: z_1 = (.5, .25, .25), z_2 = (.2, .3, .5), fractions (.5, .3, dummy .2).

TWO = PaperSettings(items=2, owners=2, hidden=(3, 3))
BIDS = BidProfile(Valuations(np.full((2, 2), LINEAR), [[1.0, 0.5], [0.5, 1.0]]), [[1.0, 2.0], [2.0, 1.0]],
                  [[10.0, 30.0], [10.0, 10.0]])  # fmt: skip
MONEY = np.array([100.0, 40.0])
Z = ((0.5, 0.25, 0.25), (0.2, 0.3, 0.5))
FRACTION = (0.5, 0.3)


def constant(settings=TWO):
    made = {key: np.zeros(value.shape) for key, value in first_parameters(settings, np.random.default_rng(0)).items()}
    made["allocation.2.bias"] = np.log(np.array(Z)).ravel()
    made["payment.2.bias"] = np.log(np.array([*FRACTION, 0.2][: 2 + settings.dummy]))
    return tensors(made)


def worked(settings, schedule, lie=None):
    batch = make_batch(settings, BIDS, MONEY)
    told = training._truth(batch) if lie is None else lie
    return terms(settings, schedule, constant(settings), batch, told)


LOTTERY = PAPER_PRESETS["m-regretnet"].schedule


def test_what_is_paid_below_cost_over_the_cost_of_what_is_sold():
    # cost a record at (0, ε̄/2, ε̄): profile 1 owner 1 (0, 1, 2), owner 2 (0, 1, 2); profile 2 owner 1 (0, 1, 2),
    # owner 2 (0, 1, 2). So c = (.25·1 + .25·2) = .75 a record for owner 1 and .3 + .5·2 = 1.3 for owner 2.
    # Times records: profile 1: 7.5 and 39; profile 2: 7.5 and 13.
    # Paid: profile 1: .5·100 = 50 and .3·100 = 30; profile 2: 20 and 12.
    # Below cost: owner 2 by 9 of 39, and by 1 of 13. irv = (0, (9/39 + 1/13) / 2).
    objective, found = worked(TWO, LOTTERY)
    np.testing.assert_allclose(found.rational.numpy(), [0.0, (9 / 39 + 1 / 13) / 2], rtol=1e-5)
    np.testing.assert_allclose(found.regret.numpy(), [0.0, 0.0], atol=1e-6)
    assert found.determinism is None
    # E[ε]: owner 1 (.25·½ + .25)·ε̄ = .375ε̄, owner 2 .65ε̄. Profile 1: .375, 1.3; W = (¼, ¾): .09375 + .975 = 1.06875.
    # Profile 2: .75, .65; W = (½, ½): .7. NPL = −(1.06875 + .7) / (K·n = 4).
    assert float(objective) == pytest.approx(-(1.06875 + 0.7) / 4)


def test_regret_is_what_the_lie_brings_over_the_cost_of_the_truth():
    # Owner 1 halves her ε̄ in both profiles: the networks do not care, so she is paid the same and sells half:
    # her linear cost falls from .75 to .375 a record, a gain of half of c. Owner 2 stays honest.
    # With values reported at will besides (9, 9): nothing changes, for costs are the true ones.
    batch = make_batch(TWO, BIDS, MONEY)
    lie = training._truth(batch).clone()
    lie[0, :, 2] *= 0.5
    lie[0, :, :2] = 9.0
    _, found = worked(TWO, LOTTERY, lie)
    np.testing.assert_allclose(found.regret.numpy(), [0.5, 0.0], rtol=1e-5, atol=1e-6)


def test_a_lie_that_hurts_is_no_negative_regret():
    lie = training._truth(make_batch(TWO, BIDS, MONEY)).clone()
    lie[..., 2] *= 1.5  # sells more for the same payment
    _, found = worked(TWO, LOTTERY, lie)
    np.testing.assert_array_equal(found.regret.numpy(), [0.0, 0.0])


def test_murbas_violations_are_in_money_at_the_mean_privacy_loss():
    # The harmonic grid with M = 2 is (0, ½, 1), here the same. Quadratic valuations tell v(mean) from mean v:
    # v(ε) = αε²; owner 1's mean is .375ε̄, owner 2's .65ε̄. No dummy: fractions (.625, .375).
    # Costs, profile 1: 10·1·.375² = 1.40625 and 30·.5·1.3² = 25.35; profile 2: 10·.5·.75² = 2.8125, 10·1·.65² = 4.225.
    # Paid: 62.5, 37.5; 25, 15: all rational. With budgets a tenth of that: 6.25, 3.75; 2.5, 1.5.
    # Below cost: owner 1: 0 and .3125, mean .15625; owner 2: 21.6 and 2.725, mean 12.1625.
    settings = PaperSettings(items=2, owners=2, hidden=(3, 3), grid="harmonic", sold="mean", dummy=False)
    bids = BidProfile(Valuations(np.full((2, 2), 1), BIDS.valuations.rate), BIDS.privacy_budget, BIDS.data_size)
    batch = make_batch(settings, bids, MONEY / 10)
    schedule, lie = PAPER_PRESETS["murba"].schedule, training._truth(batch).clone()
    lie[1, :, 2] *= 0.5  # owner 2 sells half of ε: her cost falls to a quarter: gains 19.0125 and 3.16875
    objective, found = terms(settings, schedule, constant(settings), batch, lie)
    np.testing.assert_allclose(found.rational.numpy(), [0.15625, 12.1625], rtol=1e-5)
    np.testing.assert_allclose(found.regret.numpy(), [0.0, (19.0125 + 3.16875) / 2], rtol=1e-5, atol=1e-5)
    # VarOpt: λ ∝ ε². Profile 1: ε = (.375, 1.3): ε² = .140625, 1.69; profile 2: (.75, .65): .5625, .4225.
    one = 8 / 1.830625 + (2 * (0.25 - 0.140625 / 1.830625)) ** 2
    two = 8 / 0.985 + (2 * (0.5625 / 0.985 - 0.5)) ** 2
    assert float(objective) == pytest.approx((one + two) / 2, rel=1e-5)


def soft(z, tau):
    weight = [math.exp(value / tau) for value in z]
    return [value / sum(weight) for value in weight]


def least_bound(epsilon, share):
    """min over λ of λ²σ₁ + (1−λ)²σ₂ + (|λ−W₁| + |1−λ−W₂|)², on a grid of a million points."""
    lam = np.linspace(0, 1, 1_000_001)
    variance = lam**2 * 8 / epsilon[0] ** 2 + (1 - lam) ** 2 * 8 / epsilon[1] ** 2
    return (variance + (abs(lam - share[0]) + abs(1 - lam - share[1])) ** 2).min()


@pytest.mark.parametrize("aggregation", ["opt-aggr", "conventional"])
def test_dm_regretnet_sharpens_probabilities_not_logits(aggregation):
    # z' = softmax(z/τ) with τ = 1/8: z_1/τ = (4, 2, 2), so z'_1 = (e², 1, 1)/(e² + 2); z_2/τ = (1.6, 2.4, 4).
    schedule = replace(PAPER_PRESETS["dm-regretnet"].schedule, objective=aggregation)
    settings = replace(TWO, sold="argmax")
    sharp = [soft(z, 0.125) for z in Z]
    assert sharp[0] == pytest.approx([math.exp(2) / (math.exp(2) + 2), *[1 / (math.exp(2) + 2)] * 2])
    cost = [q[1] * 1 + q[2] * 2 for q in sharp]  # a record, in both profiles alike
    below = (max(0.0, 30 * cost[1] - 30) / (30 * cost[1]) + max(0.0, 10 * cost[1] - 12) / (10 * cost[1])) / 2
    objective, found = worked(settings, schedule)
    np.testing.assert_allclose(found.rational.numpy(), [0.0, below], rtol=1e-5)
    # dav = 2/3 − Σ (z' − 1/3)²
    dav = [2 / 3 - sum((value - 1 / 3) ** 2 for value in q) for q in sharp]
    np.testing.assert_allclose(found.determinism.numpy(), dav, rtol=1e-5)
    mean = [q[1] / 2 + q[2] for q in sharp]
    bounds = []
    for privacy, share in (((1, 2), (0.25, 0.75)), ((2, 1), (0.5, 0.5))):
        epsilon = [mean[0] * privacy[0], mean[1] * privacy[1]]
        plain = sum(8 * w**2 / e**2 for w, e in zip(share, epsilon, strict=True))  # nobody loses: λ = W, no bias
        bounds.append(plain if aggregation == "conventional" else least_bound(epsilon, share))
    assert float(objective) == pytest.approx(sum(bounds) / 2, rel=1e-5)


def test_conventional_aggregation_with_a_loser():
    # ε = (1, 1, 0), d = (5, 4, 1): λ = (5/9, 4/9, 0). Variance 8·(25 + 16)/81 = 4.0494, and
    # bias (.0556 + .0444 + .1)² = .04
    share = torch.tensor([[0.5, 0.4, 0.1]])
    found = conventional_bound(torch.tensor([[1.0, 1.0, 0.0]]), share)
    assert float(found[0]) == pytest.approx(8 * 41 / 81 + 0.04, rel=1e-6)
    assert float(conventional_bound(torch.zeros(1, 3), share)[0]) > 1e5  # nobody sells: worse than anything


def test_the_lagrangian_by_hand():
    # rgt = (.5, .1), irv = (.2, 0), dav = (.3, .3); φ = 2, 1, 1.5; third epoch: ρ = 3, 3, 1; n = 2; ERR = 4.
    # 2·4 + 2·.6 + 1.5·.6² + .2 + 1.5·.2² + 1.5·.6 + .5·.6² = 8 + 1.2 + .54 + .2 + .06 + .9 + .18 = 11.08
    found = training.Violations(torch.tensor([0.5, 0.1]), torch.tensor([0.2, 0.0]), torch.tensor([0.3, 0.3]))
    multipliers = {"regret": torch.full((2,), 2.0), "rational": torch.ones(2), "determinism": torch.full((2,), 1.5)}
    schedule = PAPER_PRESETS["dm-regretnet"].schedule
    assert float(training.lagrangian(schedule, torch.tensor(4.0), found, multipliers, 2)) == pytest.approx(11.08)
    # MURBA, fifth epoch: ρ = 3 and 10, ERR once: 4 + 1.2 + 1.5·.36 + .2 + 5·.04 = 6.14
    schedule, found = PAPER_PRESETS["murba"].schedule, replace(found, determinism=None)
    assert float(training.lagrangian(schedule, torch.tensor(4.0), found, multipliers, 4)) == pytest.approx(6.14)


def test_the_papers_schedules():
    flm22, flm21 = PAPER_PRESETS["dm-regretnet"].schedule, PAPER_PRESETS["murba"].schedule
    assert (flm22.epochs, flm22.batches, flm22.profiles, flm22.misreports, flm22.update_every) == (
        50,
        100,
        1024,
        100,
        10,
    )
    assert (flm22.step, flm22.rate, flm22.weight) == (0.1, 0.001, None)
    assert (flm21.epochs, flm21.batches, flm21.profiles, flm21.misreports, flm21.weight) == (100, 100, 1000, 25, 1.0)
    assert [flm22.regret.rho_at(epoch) for epoch in (0, 1, 2)] == [1.0, 2.0, 3.0]
    assert [flm22.determinism.rho_at(epoch) for epoch in (0, 9)] == [1.0, 1.0]
    assert [flm21.regret.rho_at(epoch) for epoch in (0, 1, 2)] == [1.0, 1.0, 2.0]
    assert [flm21.rational.rho_at(epoch) for epoch in (0, 1, 2, 4)] == [4.0, 4.0, 7.0, 10.0]
    shapes = {name: (p.settings.items, p.settings.sold, p.settings.dummy) for name, p in PAPER_PRESETS.items()}
    assert shapes["regretnet"] == (1, "drawn", True)
    assert shapes["m-regretnet"] == (8, "drawn", True)
    assert shapes["dm-regretnet"] == shapes["dm-regretnet-convl"] == (8, "argmax", True)
    assert [shapes[f"murba{end}"] for end in ("", "-15", "-10")] == [(m, "mean", False) for m in (20, 15, 10)]
    assert all(p.settings.hidden == (100, 100) and p.settings.owners == 10 for p in PAPER_PRESETS.values())


# ---- the auction as deployed ----


def test_the_grids():
    np.testing.assert_allclose(PaperSettings(items=4).fractions, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(PaperSettings(items=4, grid="harmonic").fractions, [0, 1 / 4, 1 / 3, 1 / 2, 1])


@pytest.mark.parametrize("name", NAMES)
def test_payments_do_not_depend_on_the_draw_and_never_exceed_the_budget(name, rng):
    settings = PAPER_PRESETS[name].settings
    auction = PaperAuction(settings, wild(settings))
    bids = BidProfile.sample(rng, 200, 10, "flm22-iid")
    budget = bids.full_cost.sum(-1) * 10 ** rng.uniform(-2, 2, 200)
    one, two = (auction.run(bids, budget, rng=np.random.default_rng(seed)) for seed in (1, 2))
    np.testing.assert_array_equal(one.payment, two.payment)
    assert (one.payment > 0).all()  # whoever sells or not
    assert (one.spent <= budget * (1 + 1e-12)).all()
    part = one.epsilon / bids.privacy_budget
    if settings.sold == "mean":
        np.testing.assert_allclose(one.spent, budget)  # no dummy: all of it
    else:
        assert np.isclose(part[..., None], settings.fractions).any(axis=-1).all()
        assert (~one.winners).any()
    assert np.array_equal(one.epsilon, two.epsilon) == (settings.sold != "drawn")
    promise = auction.guarantees
    assert (promise.truthful, promise.rational, promise.budget_feasible) == (APPROXIMATE, APPROXIMATE, EXACT)


def test_lotteries_are_drawn_as_the_network_says(rng):
    auction = PaperAuction(TWO, {key: value.numpy() for key, value in constant().items()})
    many = BidProfile(BIDS[0].valuations.broadcast_to((20_000, 2)), BIDS.privacy_budget[0], BIDS.data_size[0])
    part = auction.run(many, 100.0, rng=rng).epsilon / BIDS.privacy_budget[0]
    for owner in range(2):
        seen = [np.isclose(part[:, owner], at).mean() for at in (0, 0.5, 1)]
        np.testing.assert_allclose(seen, Z[owner], atol=0.015)
    np.testing.assert_allclose(auction.run(BIDS, MONEY).payment, [[50, 30], [20, 12]])
    argmax = PaperAuction(replace(TWO, sold="argmax"), auction.parameters).run(BIDS, MONEY)
    np.testing.assert_allclose(argmax.epsilon, [[0, 2], [0, 1]])
    mean = PaperAuction(replace(TWO, sold="mean"), auction.parameters).run(BIDS, MONEY)
    np.testing.assert_allclose(mean.epsilon, [[0.375, 1.3], [0.75, 0.65]])


def test_what_the_networks_see():
    # profile 1: values a record at ε̄/2 and ε̄, ε̄, n·W for each owner, then the budget a record
    np.testing.assert_allclose(inputs_of(TWO, BIDS, MONEY)[0], [1, 2, 1, 0.5, 1, 2, 2, 1.5, 2.5])


def test_another_number_of_owners_is_refused(rng):
    settings = PAPER_PRESETS["dm-regretnet"].settings
    with pytest.raises(InvalidInput, match="10 owners"):
        PaperAuction(settings, wild(settings)).run(BidProfile.sample(rng, None, 9, "flm22-iid"), 1.0)
    for bad in ({"items": 0}, {"grid": "other"}, {"sold": "all"}, {"owners": 0}):
        with pytest.raises(InvalidInput):
            PaperSettings(**bad)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_market_leaves_losers_payments_with_the_buyer(wrapped):
    """As printed owner 1, who sells nothing, is paid 50; a market has no delivery of hers to pay for."""
    auction = PaperAuction(replace(TWO, sold="argmax"), {key: value.numpy() for key, value in constant().items()})
    assert auction.run(BIDS[0], 100.0).payment[0] == pytest.approx(50.0)
    clearing = DrawnBudget(auction, 1.0) if wrapped else auction
    found = cleared(clearing, BIDS[0], 100_000_000, np.random.default_rng(0))
    np.testing.assert_allclose(found.price_micros, [0, 30_000_000], atol=1)
    assert found.winners.tolist() == [False, True]


def test_extreme_bids_are_survived():
    auction = PaperAuction(replace(TWO, owners=5), wild(replace(TWO, owners=5)))
    bids = BidProfile(
        Valuations([0, 1, 2, 3, 4], [1e-12, 1e12, 0.0, 1.0, 5.0]), [1e-6, 900, 0, 10, 1], [0, 1e9, 1, 1e-3, 7]
    )
    for budget in (0.0, 1e-9, 1.0, 1e15):
        outcome = auction.run(bids, budget)
        assert outcome.spent <= budget * (1 + 1e-12)
        assert (outcome.epsilon <= bids.privacy_budget * (1 + 1e-12)).all()


# ---- the search ----


def plain_utility(settings, schedule, parameters, bids, budget, owner, lie):
    """One liar, the plain way: her inputs replaced in the whole row; (K,), in money a record of hers."""
    m = settings.items
    x = torch.tensor(inputs_of(settings, bids, budget), dtype=torch.float64)
    at = owner * (m + 2)
    x = torch.cat([x[:, :at], lie, x[:, at + m + 1 :]], dim=1)
    logits, pay = outputs(torch, settings, parameters, x)
    z = torch.softmax(logits[:, owner], dim=-1)
    q = z if schedule.temperature is None else torch.softmax(z / schedule.temperature, dim=-1)
    fractions = torch.tensor(settings.fractions)
    kind, rate = (torch.tensor(a[:, owner : owner + 1]) for a in (bids.valuations.kind, bids.valuations.rate))

    def value(eps):
        shapes = (2 * eps, eps**2, 2 * eps.sqrt(), torch.expm1(eps))
        return rate * sum(torch.where(kind == k, shape, 0.0) for k, shape in enumerate(shapes))

    privacy = lie[:, m:]
    if settings.sold == "mean":
        cost = value((q * fractions).sum(dim=-1, keepdim=True) * privacy)[:, 0]
    else:
        cost = (q[:, 1:] * value(privacy * fractions[1:])).sum(dim=-1)
    each = torch.tensor(budget / bids.data_size[:, owner])
    return torch.softmax(pay, dim=-1)[:, owner] * each - cost


@pytest.mark.parametrize("name", ["dm-regretnet", "regretnet", "murba-10"])
def test_the_search_is_plain_gradient_ascent(name, rng):
    """The fast search against autograd on the whole network, owner by owner, in double precision."""
    preset = PAPER_PRESETS[name]
    settings, schedule = replace(preset.settings, owners=3, hidden=(7, 5)), preset.schedule
    bids = BidProfile.sample(rng, 6, 3, "flm21-high")
    budget = bids.full_cost.sum(-1) * rng.uniform(0.1, 2, 6)
    parameters = wild(settings, 3)
    double = {key: torch.tensor(value, dtype=torch.float64) for key, value in parameters.items()}
    batch = make_batch(settings, bids, budget)
    found = search(settings, schedule, tensors(parameters), batch, steps=5)
    reported = training.lying(settings, schedule, tensors(parameters), batch, found)
    m = settings.items
    for owner in range(3):
        truth = torch.tensor(inputs_of(settings, bids, budget))[:, owner * (m + 2) : owner * (m + 2) + m + 1]
        lie = truth.clone()
        for _ in range(5):
            lie.requires_grad_(True)
            utility = plain_utility(settings, schedule, double, bids, budget, owner, lie)
            (slope,) = torch.autograd.grad(utility.sum(), lie)
            with torch.no_grad():
                lie = lie + 0.1 * slope
                lie[:, :m] = lie[:, :m].clamp_min(0).cummax(dim=-1).values
                lie[:, m:] = torch.minimum(lie[:, m:].clamp_min(0), truth[:, m:]).maximum(1e-3 * truth[:, m:])
        np.testing.assert_allclose(found[owner], lie, rtol=2e-3, atol=2e-4)
        brought = plain_utility(settings, schedule, double, bids, budget, owner, lie)
        np.testing.assert_allclose(reported.utility[owner], brought, rtol=2e-3, atol=2e-3)


# ---- the loop ----


def tiny(name="dm-regretnet", **changes):
    preset = PAPER_PRESETS[name]
    schedule = replace(preset.schedule, **{"epochs": 2, "batches": 3, "profiles": 6, "misreports": 3, **changes})
    return replace(preset, schedule=schedule, settings=replace(preset.settings, hidden=(6, 6), owners=4))


@pytest.mark.parametrize("name", NAMES)
def test_every_network_trains_and_its_first_layer_takes_up_the_scales(name):
    trainer = PaperTrainer(tiny(name), Source("flm22-iid", owners=4), validation=10)
    before = {key: value.detach().clone() for key, value in trainer.parameters.items()}
    done = [progress for progress in trainer.run() if progress is not None]
    assert [one.epoch for one in done] == [1, 2]
    assert all(not torch.equal(before[key], value) for key, value in trainer.parameters.items())
    chance, share = trainer.auction().lottery(*trainer.held_out)
    settings, schedule = trainer.preset.settings, replace(trainer.preset.schedule, temperature=None)
    seen = training.honest(settings, schedule, trainer.effective(), trainer.validation)
    np.testing.assert_allclose(chance, seen.chance.detach(), atol=1e-4)
    np.testing.assert_allclose(share, (seen.paid / trainer.validation.unit).detach(), atol=1e-4)


def test_multipliers_grow_by_rho_times_the_violation_every_q_batches():
    trainer = PaperTrainer(tiny(update_every=2), Source("flm22-iid", owners=4), validation=10)
    trainer.step()
    assert all((value == 1).all() for value in trainer.multipliers.values())
    settings, schedule = trainer.preset.settings, trainer.preset.schedule
    batch, parameters = trainer.batch(1), {key: value.detach() for key, value in trainer.effective().items()}
    _, found = terms(settings, schedule, parameters, batch, search(settings, schedule, parameters, batch))
    trainer.step()
    for name, violation in found.named().items():
        np.testing.assert_allclose(trainer.multipliers[name], 1.0 + violation, rtol=1e-5)


def test_every_epoch_sees_the_same_sample():
    trainer = PaperTrainer(tiny(), Source("flm22-iid", owners=4), validation=10)
    assert torch.equal(trainer.batch(1).x, trainer.batch(1).x)
    assert not torch.equal(trainer.batch(0).x, trainer.batch(1).x)


def test_a_run_stopped_in_the_middle_of_an_epoch_ends_where_an_uninterrupted_one_does(tmp_path):
    source = Source("flm22-iid", owners=4)
    whole, first, second = (PaperTrainer(tiny(), source, seed=3, validation=10) for _ in range(3))
    list(whole.run())
    list(first.run(2))
    first.save(tmp_path / "state")
    second.resume(tmp_path / "state")
    list(second.run())
    for key, value in whole.parameters.items():
        assert torch.equal(value, second.parameters[key])
    assert [replace(one, seconds=0) for one in whole.history] == [replace(one, seconds=0) for one in second.history]
    with pytest.raises(ConfigError, match="seed"):
        PaperTrainer(tiny(), source, seed=4, validation=10).resume(tmp_path / "state")
    with pytest.raises(ConfigError, match="schedule"):
        PaperTrainer(tiny(epochs=9), source, seed=3, validation=10).resume(tmp_path / "state")
    (tmp_path / "rubbish").write_bytes(b"?")
    with pytest.raises(ConfigError, match="checkpoint"):
        second.resume(tmp_path / "rubbish")


def test_what_cannot_be_trained_on_is_refused(rng):
    bids = BidProfile.sample(rng, 3, 10, "jdp")
    settings = PAPER_PRESETS["dm-regretnet"].settings
    with pytest.raises(InvalidInput, match="STEP"):
        make_batch(settings, bids, bids.full_cost.sum(-1))
    with pytest.raises(InvalidInput, match="owners"):
        PaperTrainer(tiny(), Source("flm22-iid", owners=5))


# ---- names and files ----


def saved(path, auction, **provenance):
    save(path, auction.settings, auction.parameters, {"command": "by hand", **provenance})
    return str(path)


def test_the_papers_names_are_the_papers_mechanisms(tmp_path):
    assert set(PAPERS) == set(PAPER_PRESETS)
    for name in PAPERS:
        settings = PAPER_PRESETS[name].settings
        path = saved(
            tmp_path / f"{name}.safetensors", PaperAuction(settings, wild(settings)), iterations=7, scheduled=9
        )
        found = auctions.get(name, weights=path)
        assert isinstance(found, PaperAuction)
        assert found.settings == settings
        assert "7 of 9 iterations" in found.guarantees.source
        assert name not in auctions.names(), "serves ten owners only, so it is not among those that serve anybody"
        assert auctions.known(name)
        for population in weight_names(name):
            shipped = auctions.get(f"{name}:{population}")
            assert isinstance(shipped, PaperAuction)
            assert shipped.settings == settings


def test_without_weights_nothing_else_is_put_in_their_place():
    for name in PAPERS:
        with pytest.raises(UnknownName, match=f"flmarket train-auction {name} --population jdp"):
            auctions.get(f"{name}:jdp")


def test_files_of_the_former_names_still_open_and_say_what_they_are(tmp_path):
    """A broker's own weights, trained when dm-regretnet was the name of this project's network."""
    ours = auctions.get("cleared-menu")
    path = saved(tmp_path / "mine.safetensors", ours)
    with pytest.warns(FutureWarning, match="cleared-menu"):
        found = auctions.get("dm-regretnet", weights=path)
    assert found.settings == ours.settings
    paper = PAPER_PRESETS["murba-10"].settings
    path = saved(tmp_path / "theirs.safetensors", PaperAuction(paper, wild(paper)))
    with pytest.raises(ConfigError, match="papers"):
        auctions.get("cleared-menu", weights=path)
    with pytest.raises(ConfigError, match="another"):
        auctions.get("murba", weights=path)  # M = 10 is no murba, nor dm-regretnet


def test_damaged_files_are_refused(tmp_path):
    settings = PAPER_PRESETS["murba-10"].settings
    wrong = PaperAuction(settings, wild(replace(settings, hidden=(100, 99))))
    with pytest.raises(ConfigError, match="shapes"):
        load("murba-10", saved(tmp_path / "wrong.safetensors", wrong))
    with pytest.raises(ConfigError, match="fields"):
        PaperSettings.from_dict({"family": "paper", "more": 1})


# ---- the papers' metric ----


def test_erratum_e22_a_lottery_shows_regret_without_any_lie(rng):
    """An owner who sells with chance z: a second draw beats the first by her cost v with chance z(1 − z), and over the
    expected cost z·v this is a "regret" of 1 − z. She told the truth both times, and no value that she names gains."""
    settings = PaperSettings(items=1, owners=2, hidden=(3, 3))
    parameters = {key: np.zeros(value.shape) for key, value in first_parameters(settings, rng).items()}
    z = np.array([0.2, 0.5])
    parameters["allocation.2.bias"] = np.log(np.stack([1 - z, z], axis=-1)).ravel()
    auction = PaperAuction(settings, parameters)
    bids, money = BidProfile(Valuations([[LINEAR, LINEAR]] * 40_000, 1.0), 1.0, 1.0), np.full(40_000, 3.0)
    found = regret_of_two_draws(auction, bids, money, np.broadcast_to(2 * z, (40_000, 2)))
    assert found == pytest.approx(np.mean(1 - z), abs=0.02)
    batch = make_batch(settings, bids[:50], money[:50])
    lie = training._truth(batch)
    lie[..., 0] = torch.rand(lie.shape[:2]) * 9
    _, expected = terms(settings, LOTTERY, tensors(parameters), batch, lie)
    np.testing.assert_allclose(expected.regret.numpy(), 0.0, atol=1e-6)
    assert by_the_papers(auction, LOTTERY, bids[:200], money[:200]).noise > 0.5


def test_the_metric_sees_what_the_deployed_auction_does():
    """DM-RegretNet by hand: its argmax sells nothing of owner 1 and everything of owner 2 (the batch above)."""
    settings = replace(TWO, sold="argmax")
    auction = PaperAuction(settings, {key: value.numpy() for key, value in constant(settings).items()})
    schedule = replace(PAPER_PRESETS["dm-regretnet"].schedule, misreports=1, step=1e-9)
    found = by_the_papers(auction, schedule, BIDS, MONEY)
    # owner 2 sells all: costs 30·2 and 10·2 against payments of 30 and 12: below by half and by 8/20
    assert found.irv_deployed == pytest.approx((0.5 + 0.4) / 2, rel=1e-5)
    assert found.rgt_deployed == pytest.approx(0.0, abs=1e-6)
    assert found.noise == 0.0


# ---- the command ----


def options(folder, **changes):
    small = {"profiles": 4, "epochs": 2, "batches": 2, "misreports": 2, "audit_profiles": 0, "checkpoints": folder}
    return command.LearningOptions(**{**small, **changes})


def test_the_command_goes_on_where_it_was_stopped(tmp_path, capsys):
    folder, out = tmp_path / "state", tmp_path / "out" / "murba.safetensors"
    run = lambda **changes: command.train_network(  # noqa: E731
        "murba-10", "flm21-low", None, options(folder, **changes), 0, out, as_json=True
    )
    run(iterations=3)
    first = capsys.readouterr().out
    assert '"iterations": 3' in first
    assert (folder / "murba-10-flm21-low.csv").read_text().count("\n") == 2
    run()
    assert (folder / "murba-10-flm21-low.csv").read_text().count("\n") == 3
    straight = tmp_path / "straight.safetensors"
    command.train_network("murba-10", "flm21-low", None, options(tmp_path / "other"), 0, straight, as_json=True)
    one, two = (auctions.get("murba-10", weights=str(path)) for path in (out, straight))
    assert "4 of 4 iterations" in one.guarantees.source
    for key, value in one.parameters.items():
        np.testing.assert_array_equal(value, two.parameters[key])
    with pytest.raises(InvalidInput, match="short"):
        run(schedule="long")


def test_a_terminated_training_keeps_its_last_iteration(tmp_path, monkeypatch):
    import os
    import signal

    step = PaperTrainer.step

    def and_terminate(self):
        done = step(self)
        os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(PaperTrainer, "step", and_terminate)
    out = tmp_path / "dm.safetensors"
    before = signal.getsignal(signal.SIGTERM)
    command.train_network("regretnet", "flm22-iid", None, options(tmp_path), 0, out, as_json=True)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not out.exists()
    state = torch.load(tmp_path / "regretnet-flm22-iid.checkpoint", weights_only=True)
    assert state["iteration"] == 1
