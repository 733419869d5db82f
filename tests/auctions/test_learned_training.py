"""Training: gradients against differences, lies against brute force, a known optimum, resume, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flmarket import BidProfile, Valuations, auctions  # noqa: E402
from flmarket.aggregation import Conventional, OptAggr, error_bound  # noqa: E402
from flmarket.auctions.learned import LearnedAuction, Settings  # noqa: E402
from flmarket.auctions.learned.mechanism import inputs_of  # noqa: E402
from flmarket.auctions.learned.network import Inputs, first_parameters, forward  # noqa: E402
from flmarket.auctions.learned.training import PRESETS, Penalty, Preset, Schedule, market, preset  # noqa: E402
from flmarket.auctions.learned.training.market import (  # noqa: E402
    Source,
    conventional_bound,
    error_bound_loss,
    make_batch,
    optimal_bound,
)
from flmarket.auctions.learned.training.trainer import Trainer  # noqa: E402
from flmarket.cli.training import LearningOptions, train_network  # noqa: E402
from flmarket.errors import ConfigError, InvalidInput, UnknownName  # noqa: E402

TINY = replace(
    preset("cleared-menu"), schedule=Schedule(epochs=2, batches=3, profiles=8, misreports=16, regret=Penalty(5.0, 1.0))
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def wild(settings, seed=0):
    rng = np.random.default_rng(seed)
    return {k: v + rng.normal(0.0, 0.3, v.shape) for k, v in first_parameters(settings, rng).items()}


def tensors(parameters, dtype=torch.float32, grad=False):
    return {key: torch.tensor(value, dtype=dtype, requires_grad=grad) for key, value in parameters.items()}


# ---- one network, two libraries ----


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_torch_and_numpy_agree(name, rng):
    settings = PRESETS[name].settings
    parameters = wild(settings)
    bids = BidProfile.sample(rng, 50, 10, "flm22-iid")
    inputs, _ = inputs_of(settings, bids, bids.full_cost.sum(-1) * rng.uniform(0.1, 2.0, 50))
    ours = forward(np, settings, parameters, inputs)
    batch = make_batch(bids, bids.full_cost.sum(-1))
    told = (torch.tensor(x, dtype=torch.float32) for x in (inputs.share, inputs.ask, inputs.privacy))
    theirs = forward(torch, settings, tensors(parameters), Inputs(*told, batch.positions(settings)))
    for field in ("share", "price", "caution"):
        one, two = getattr(ours, field), getattr(theirs, field)
        np.testing.assert_allclose(two.numpy(), one, atol=1e-5 * max(1.0, np.abs(one).max()))


def test_the_soft_market_cools_to_the_one_deployed(rng):
    settings = Settings()
    parameters = wild(settings)
    bids = BidProfile.sample(rng, 200, 10, "flm22-iid")
    budget = bids.full_cost.sum(-1) * rng.uniform(0.1, 2.0, 200)
    hard = LearnedAuction(settings, parameters).run(bids, budget)
    gaps = []
    exact, batch = tensors(parameters, torch.float64), make_batch(bids, budget, torch.float64)
    for temperature in (0.1, 0.01, 0.0005):
        soft = market.clear(settings, exact, batch, temperature)
        gaps.append(np.abs(soft.epsilon.numpy() - hard.epsilon).mean())
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.02
    utility = bids.utility(hard) / budget[:, None]
    assert np.median(np.abs(soft.utility.clamp_min(0).numpy() - utility)) < 1e-3


# ---- gradients ----


def test_the_bound_has_the_envelope_gradient(rng):
    epsilon, size = rng.uniform(0.1, 2.0, (6, 5)), rng.integers(1, 100, (6, 5)).astype(float)
    share = size / size.sum(-1, keepdims=True)
    variable = torch.tensor(epsilon, requires_grad=True)
    value = optimal_bound(variable, torch.tensor(share))
    np.testing.assert_allclose(
        value.detach().numpy(), error_bound(OptAggr().weights(epsilon, size), epsilon, size), rtol=1e-9
    )
    (slope,) = torch.autograd.grad(value.sum(), variable)
    for i in range(5):
        step = np.zeros(5)
        step[i] = 1e-6
        up, down = (optimal_bound(torch.tensor(epsilon + s * step), torch.tensor(share)).numpy() for s in (1, -1))
        np.testing.assert_allclose(slope[:, i].numpy(), (up - down) / 2e-6, rtol=1e-4, atol=1e-6)


def test_the_conventional_bound_is_that_of_the_aggregation(rng):
    """Losers or not; the loss is its mean until the tail begins."""
    epsilon, size = rng.uniform(0.5, 2.0, (6, 5)), rng.integers(1, 100, (6, 5)).astype(float)
    epsilon[:3, :2] = 0.0  # losers
    share = torch.tensor(size / size.sum(-1, keepdims=True))
    expected = error_bound(Conventional().weights(epsilon, size), epsilon, size)
    np.testing.assert_allclose(conventional_bound(torch.tensor(epsilon), share).numpy(), expected, rtol=1e-12)
    loss = error_bound_loss(torch.tensor(epsilon), share, cap=1e6, conventional=True)
    assert loss.item() == pytest.approx(expected.mean())
    assert loss.item() > error_bound_loss(torch.tensor(epsilon), share, cap=1e6).item()


def test_multipliers_have_the_implicit_gradient_of_the_soft_market(rng):
    """dx/dw = −(∂S/∂w)/(∂S/∂x) for the soft spending S(x, w), by differences in NumPy at the multiplier found."""
    n, items, temperature = 4, 3, 0.2
    price = np.concatenate([np.zeros((1, n)), np.sort(rng.random((items, n)), axis=0)])
    ask = np.concatenate([np.zeros((1, n)), np.cumsum(rng.random((items, n)), axis=0)]) * 0.1
    share, fixed = rng.dirichlet(np.ones(n)), 0.15
    counted = np.array([0.0, 1.0, 1.0, 1.0])

    def spending(x, w):
        logits = (x * w * price - ask) / (temperature * ask[-1])
        chance = np.exp(logits) / np.exp(logits).sum(axis=0)
        return x * ((counted * w * (chance * price).sum(axis=0)).sum() + fixed)

    variable = torch.tensor(share, requires_grad=True)
    made = market._Market(
        variable[None, None],
        *(torch.tensor(values)[:, None, None] for values in (price, ask)),
        torch.tensor(temperature * ask[-1])[None, None],
        torch.zeros(1, 1, n, dtype=torch.float64),
    )
    root = made.root(torch.tensor(counted)[None, None], torch.full((1, 1), fixed, dtype=torch.float64))
    (slope,) = torch.autograd.grad(root.sum(), variable)
    x, step = root.item(), 1e-6
    by_x = (spending(x + step, share) - spending(x - step, share)) / (2 * step)
    for i in range(n):
        move = step * np.eye(n)[i]
        by_w = (spending(x, share + move) - spending(x, share - move)) / (2 * step)
        assert slope[i].item() == pytest.approx(-by_w / by_x, rel=1e-4, abs=1e-8)


# ---- lies ----


def test_the_best_commitment_is_the_best_lie_that_brute_force_finds(rng):
    """Against the deployed auction, over values, families, ε̄ and sizes: nothing beats it by more than the grid."""
    settings = Settings()
    parameters = first_parameters(settings, np.random.default_rng(0))
    auction = LearnedAuction(settings, parameters)
    bids = BidProfile.sample(rng, 20, 6, "flm22-iid")
    budget = bids.full_cost.sum(-1) * rng.uniform(0.1, 2.0, 20)
    batch = make_batch(bids, budget, torch.float64)
    exact = tensors(parameters, torch.float64)
    honest_x = market.clear(settings, exact, batch, 1e-3).multiplier
    item, part = market.best_commitment(settings, exact, batch, honest_x, torch.linspace(1.0, 0.1, 19), points=30)
    found = market.commitment_utility(settings, exact, batch, 1e-3, item, part).numpy() * budget[:, None]
    honest = bids.utility(auction.run(bids, budget))
    ours = np.maximum(found - honest, 0.0) / bids.full_cost
    best = np.zeros(bids.shape)
    for _ in range(60):
        factor, eps, size = np.exp(rng.normal(0, 1, 20)), rng.uniform(0.3, 1, 20), rng.uniform(0.1, 1, 20)
        size[rng.random(20) < 0.3] = 1.0
        factor[rng.random(20) < 0.4] = 0.0
        for owner in range(6):
            rate, privacy, records = (x.copy() for x in (bids.valuations.rate, bids.privacy_budget, bids.data_size))
            rate[:, owner] *= factor
            privacy[:, owner] *= eps
            records[:, owner] *= size
            outcome = auction.run(BidProfile(Valuations(bids.valuations.kind, rate), privacy, records), budget)
            cost = records * bids.valuations.per_record(outcome.epsilon)
            gain = (outcome.payment - cost - honest)[:, owner] / bids.full_cost[:, owner]
            best[:, owner] = np.maximum(best[:, owner], gain)
    assert best.mean() > 0.003
    assert ours.mean() > 0.9 * best.mean()
    assert ours.mean() < 2.0 * best.mean() + 0.005


def test_climbing_finds_better_lies_than_it_starts_from(rng):
    settings = Settings(sees="all", clearing=False, temperature=0.1)
    parameters = tensors(wild(settings))
    bids = BidProfile.sample(rng, 16, 5, "flm22-iid")
    batch = make_batch(bids, bids.full_cost.sum(-1))
    honest = market.honest_outcome(settings, parameters, batch, 0.1).utility
    truth = torch.zeros(16, 5, 3)
    np.testing.assert_allclose(market.lying_utility(settings, parameters, batch, truth, 0.1), honest, atol=1e-5)
    _, best = market.climb(settings, parameters, batch, truth, 0.1, steps=15, length=0.2)
    assert (best >= honest - 1e-6).all()
    assert (best - honest).mean() > 1e-3 * batch.cost.mean()


# ---- a known optimum ----


@pytest.mark.parametrize("budget", [0.25, 0.5])
def test_one_owner_with_linear_cost_is_offered_the_best_price(budget):
    """One owner, cost a·ε up to ε̄ = 1, P(a ≤ x) = √x, maximise E[ε].

    A menu sells ε(a), falling in a; its largest payment is ∫₀¹ ε(a) da (the envelope theorem), so ∫ ε(a) da ≤ B. The
    density 1/(2√a) falls, so it is best to sell everything to the cheapest types: the posted price B, and E[ε] = √B.
    """
    unit_cost = ((np.arange(400) + 0.5) / 400) ** 2
    history = BidProfile(Valuations(np.zeros(400, dtype=int), unit_cost / 2), 1.0, 1.0)
    settings = Settings(clearing=False, temperature=0.02, hidden=(4,), embedding=2)
    schedule = Schedule(epochs=8, batches=15, profiles=64, misreports=2, objective="privacy", rate=0.05, rate_end=0.01)
    source = Source(history=history, owners=1, budget=budget)
    trainer = Trainer(Preset("tiny", settings, schedule), source, validation=10)
    owners = BidProfile(history.valuations.reshape((400, 1)), 1.0, 1.0)

    def sold():
        return trainer.auction(trainer.parameters).run(owners, np.full(400, budget)).epsilon.mean()

    assert sold() < 0.9 * budget**0.5  # there is something to learn
    for _ in trainer.run():
        pass
    assert sold() == pytest.approx(budget**0.5, rel=0.04)


# ---- the trainer ----


@pytest.mark.parametrize("name", ["cleared-menu", "menu-lottery"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(name, tmp_path):
    schedule = replace(preset(name).schedule, epochs=3, batches=2, profiles=6, misreports=8)
    chosen, source = replace(preset(name), schedule=schedule), Source("flm22-iid", owners=4)
    whole, first, second = (Trainer(chosen, source, seed=3, validation=20) for _ in range(3))
    list(whole.run())
    list(first.run(until=1))
    first.save(tmp_path / "state")
    second.resume(tmp_path / "state")
    assert [epoch.epoch for epoch in second.run()] == [2, 3]
    for key, value in whole.parameters.items():
        assert torch.equal(value, second.parameters[key])
    with pytest.raises(ConfigError, match="seed"):
        Trainer(chosen, source, seed=4, validation=20).resume(tmp_path / "state")
    (tmp_path / "rubbish").write_bytes(b"?")
    with pytest.raises(ConfigError, match="checkpoint"):
        second.resume(tmp_path / "rubbish")


def test_training_lowers_the_regret_it_is_punished_for():
    schedule = Schedule(epochs=3, batches=12, profiles=16, misreports=24, regret=Penalty(200.0, 1.0), rate=0.01)
    trainer = Trainer(replace(TINY, schedule=schedule), Source("flm22-iid"), validation=200)
    before = trainer.measure(trainer.parameters).regret
    list(trainer.run())
    assert trainer.measure(trainer.parameters).regret < 0.8 * before


def test_early_stopping_waits_for_patience():
    trainer = Trainer(replace(TINY, schedule=replace(TINY.schedule, patience=2)), Source("flm22-iid"), validation=20)
    trainer.epoch, trainer.best_epoch = 4, 2
    assert not trainer.stopped
    trainer.epoch = 5
    assert trainer.stopped


def test_bad_input_is_refused():
    with pytest.raises(UnknownName, match="cleared-menu"):
        preset("nothing")
    with pytest.raises(InvalidInput):
        Source()
    with pytest.raises(InvalidInput, match="history"):
        Source(history=BidProfile.sample(np.random.default_rng(0), None, 5, "flm22-iid"))
    with pytest.raises(InvalidInput):
        Schedule(objective="profit")
    with pytest.raises(InvalidInput):
        Schedule(epochs=0)


# ---- the command's work ----


def test_a_market_trains_on_its_own_bids(tmp_path, capsys):
    rng = np.random.default_rng(0)
    lines = [f"linear,{rng.uniform(0.5, 1.5):.3f},{rng.uniform(0.5, 2):.3f},{rng.integers(10, 500)}" for _ in range(30)]
    bids = tmp_path / "bids.csv"
    bids.write_text("kind,rate,privacy_budget,data_size\n" + "\n".join(lines))
    out = tmp_path / "new" / "mine.safetensors"
    options = LearningOptions(profiles=4, epochs=1, batches=1, owners=5, audit_profiles=1)
    train_network("cleared-menu", None, bids, options, 0, out, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["audit"]["budget_violations"] == 0
    assert shown["command"] == (
        "flmarket train-auction cleared-menu --bids bids.csv --profiles 4 --epochs 1 --batches 1 --owners 5 --seed 0"
    )
    assert out.with_suffix(".csv").read_text().count("\n") == 2
    auction = auctions.get("cleared-menu", weights=str(out))
    assert "regret" in auction.guarantees.source
    assert auction.run(BidProfile.sample(rng, None, 7, "flm22-iid"), 1.0).epsilon.shape == (7,)


def test_the_command_refuses_what_makes_no_sense(tmp_path):
    out = tmp_path / "x.safetensors"
    for name, population, where, error in (
        ("cleared-menu", None, out, InvalidInput),
        ("nothing", "jdp", out, UnknownName),
        ("cleared-menu", "jdp", tmp_path / "x.json", InvalidInput),
        ("cleared-menu", "nowhere", out, UnknownName),
    ):
        with pytest.raises(error):
            train_network(name, population, None, LearningOptions(), 0, where, as_json=True)
    assert not list(tmp_path.iterdir())
