"""One training iteration of DM-RegretNet at the paper's sizes, the paper's network and ours, and auctions at work.

The peer is the published loop re-implemented as one would type it from the paper (FL-Market 2022 App. A): two
networks of three layers of 100 on all bids side by side; J = 100 ascent steps in which every owner's misreport goes
through a full forward of a tiled batch (K·n profiles of n owners) and autograd runs through everything; the error
bound by one cvxpy solve per profile. All K = 1024 profiles, n = 10, M = 8. To keep the benchmark short, the peer's
ascent is timed on three of its 100 steps and its solver on 32 of its 1024 profiles, and scaled; ours is timed whole.
Times are processor time of one thread, which a busy machine disturbs less than the clock on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import cvxpy
import numpy as np
import torch

from benchmarks.measure import Row
from flmarket import BidProfile, auctions
from flmarket.aggregation import OptAggr, error_bound
from flmarket.auctions.learned import DEFAULTS, PAPERS, LearnedAuction, weight_names
from flmarket.auctions.learned.training import preset
from flmarket.auctions.learned.training.market import Source, make_batch
from flmarket.auctions.learned.training.papers import PaperTrainer
from flmarket.auctions.learned.training.trainer import VALUE_LIES, Trainer, measure

PROFILES, OWNERS, ITEMS, STEPS = 1024, 10, 8, 100
TIMED_STEPS, TIMED_SOLVES = 3, 32


def best_of(work: Callable[[], object], repeats: int = 2) -> float:
    """The least processor time of several runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


class PlainNetwork(torch.nn.Module):
    """The papers' networks."""

    def __init__(self) -> None:
        super().__init__()
        wide = OWNERS * (ITEMS + 2)

        def stack(outputs: int) -> torch.nn.Sequential:
            tanh = torch.nn.Tanh
            return torch.nn.Sequential(
                torch.nn.Linear(wide, 100), tanh(), torch.nn.Linear(100, 100), tanh(),
                torch.nn.Linear(100, 100), tanh(), torch.nn.Linear(100, outputs),
            )  # fmt: skip

        self.allocation, self.payment = stack(OWNERS * (ITEMS + 1)), stack(OWNERS + 1)

    def forward(self, bids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chances (rows, n, M+1) and budget shares (rows, n) of bids (rows, n, M+2)."""
        flat = bids.reshape(len(bids), -1)
        chance = torch.softmax(self.allocation(flat).reshape(-1, OWNERS, ITEMS + 1) / 0.125, dim=-1)
        return chance, torch.softmax(self.payment(flat), dim=-1)[:, :OWNERS]


def plain_ascent(network: PlainNetwork, bids: torch.Tensor, cost: torch.Tensor, steps: int) -> torch.Tensor:
    """`steps` of gradient ascent on all misreports; owner i's lie goes through a whole copy of the profile."""
    lies = bids.clone()
    who = torch.arange(OWNERS)
    for _ in range(steps):
        lies = lies.detach().requires_grad_(True)
        tiled = bids[:, None].repeat(1, OWNERS, 1, 1)  # (K, liar, owner, features)
        tiled[:, who, who] = lies
        chance, pay = network(tiled.reshape(-1, OWNERS, ITEMS + 2))
        chance, pay = chance.reshape(-1, OWNERS, OWNERS, ITEMS + 1), pay.reshape(-1, OWNERS, OWNERS)
        utility = pay[:, who, who] - (chance[:, who, who, 1:] * cost).sum(dim=-1)
        utility.sum().backward()
        lies = lies.detach() + 0.1 * lies.grad
    return lies


def plain_weights(epsilon: np.ndarray, share: np.ndarray) -> np.ndarray:
    """OptAggr as the paper has it: one quadratic programme per profile."""
    weights = np.empty_like(epsilon)
    for row, (eps, data) in enumerate(zip(epsilon, share, strict=True)):
        lam = cvxpy.Variable(len(eps), nonneg=True)
        bias = cvxpy.sum(cvxpy.abs(lam - data))
        objective = cvxpy.Minimize(cvxpy.sum_squares(cvxpy.multiply(lam, np.sqrt(8.0) / eps)) + cvxpy.square(bias))
        cvxpy.Problem(objective, [cvxpy.sum(lam) == 1]).solve(solver=cvxpy.CLARABEL)
        weights[row] = lam.value
    return weights


def plain_iteration(bids: BidProfile, budget: np.ndarray) -> float:
    """Seconds of one iteration of the published loop."""
    torch.manual_seed(0)
    network = PlainNetwork()
    batch = make_batch(bids, budget)
    cost = batch.asks(ITEMS)[..., 1:]
    features = torch.cat([cost, batch.privacy[..., None], batch.size[..., None]], dim=-1)
    ascent = best_of(lambda: plain_ascent(network, features, cost, TIMED_STEPS)) * STEPS / TIMED_STEPS
    chance, _ = network(features)
    epsilon = (chance * torch.arange(ITEMS + 1) / ITEMS).sum(dim=-1) * batch.privacy
    some = epsilon[:TIMED_SOLVES].detach().double().numpy().clip(1e-2), batch.size[:TIMED_SOLVES].double().numpy()
    solves = best_of(lambda: plain_weights(*some), 2) * len(epsilon) / TIMED_SOLVES
    lies = plain_ascent(network, features, cost, 1)

    def update() -> None:
        network.zero_grad()
        tiled = lies[:, None].repeat(1, OWNERS, 1, 1).reshape(-1, OWNERS, ITEMS + 2)
        (network(features)[0].sum() + network(tiled)[1].sum()).backward()

    return ascent + solves + best_of(update, 2)


def run() -> Iterator[Row]:
    """A training iteration against the published loop; a batch and a single auction at inference."""
    torch.set_num_threads(1)
    chosen = preset("cleared-menu")
    schedule = replace(chosen.schedule, profiles=PROFILES, misreports=STEPS)
    source = Source("flm22-iid", owners=OWNERS)
    trainer = Trainer(replace(chosen, schedule=schedule), source, validation=10)
    bids, budget = source.draw(np.random.default_rng(0), PROFILES)
    batch = make_batch(bids, budget)
    ours = best_of(lambda: trainer.step(batch, chosen.settings.temperature))
    peer = plain_iteration(bids, budget)
    size = "K=1024, n=10, M=8, J=100"
    yield Row(f"cleared-menu, {size}", "training iteration", ours, "published loop, plainly", peer)
    papers = PaperTrainer(preset("dm-regretnet"), source, validation=10)
    yield Row(f"DM-RegretNet, {size}", "training iteration", best_of(papers.step), "published loop, plainly", peer)
    many = BidProfile.sample(np.random.default_rng(1), 10_000, 10, "flm22-iid")
    money = 0.5 * many.full_cost.sum(axis=-1)
    auction = auctions.get("cleared-menu")
    each = best_of(lambda: auction.run(many, money)) / len(money)
    yield Row("cleared-menu, 10,000 auctions of 10", "auction", each, "none", None)
    rounds = [(many[i], money[i]) for i in range(100)]
    single = best_of(lambda: [auction.run(*one) for one in rounds]) / len(rounds)
    yield Row("cleared-menu, one auction of 10 at a time", "auction", single, "none", None)


def mean_bound(auction: str, population: str, profiles: int = 5000, seed: int = 7) -> str:
    """Mean error bound ± standard error where somebody sold, and how often nobody did; factor uniform in (0.1, 2)."""
    rng = np.random.default_rng(seed)
    bids = BidProfile.sample(rng, profiles, 10, population)
    budget = rng.uniform(0.1, 2.0, profiles) * bids.full_cost.sum(axis=-1)
    epsilon = auctions.get(auction).run(bids, budget, rng=rng).epsilon
    bound = error_bound(OptAggr().weights(epsilon, bids.data_size), epsilon, bids.data_size)
    sold = bound[np.isfinite(bound)]
    return f"{sold.mean():.3f} ± {sold.std() / np.sqrt(sold.size):.3f}, {1 - sold.size / profiles:.1%} empty"


def frontier(caution: float | None, profiles: int = 2000, liars: int = 150) -> str:
    """Error bound and the gauge's regret on flm22-iid when every owner's caution is set to one number."""
    trained = auctions.get("cleared-menu")
    parameters = dict(trained.parameters)
    if caution is not None:
        last = f"decoder.{len(trained.settings.hidden)}"
        keep = np.arange(parameters[f"{last}.bias"].size) != 1  # the output that caution comes from
        parameters |= {key: parameters[key] * keep for key in (f"{last}.weight", f"{last}.bias")}
        odds = np.clip(caution, 1e-9, 1 - 1e-9)
        parameters["caution"] = np.log(odds / (1 - odds))
    auction = LearnedAuction(trained.settings, parameters)
    bids, budget = Source("flm22-iid").draw(np.random.default_rng(7), profiles)
    everything = measure(auction, bids, budget, liars=liars)
    values = measure(auction, bids, budget, liars=liars, lies=VALUE_LIES)
    return f"error bound {everything.bound:.3f}, regret {everything.regret:.4f}, about values alone {values.regret:.5f}"


def main() -> None:
    """The error bounds of docs/learned.md: every auction with weights for a population, on that population."""
    for name in (*DEFAULTS, *PAPERS):
        for weights in weight_names(name):
            print(f"{name}:{weights}  {mean_bound(f'{name}:{weights}', weights)}", flush=True)
    for caution in (None, 0.0, 0.25, 0.5, 1.0):
        print(f"cleared-menu, caution {'as trained' if caution is None else caution}: {frontier(caution)}", flush=True)


if __name__ == "__main__":
    main()
