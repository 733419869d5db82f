"""Truthful designs side by side: how close to the second best can menus come that no owner's own report moves?

    python -m benchmarks.posted_designs --design clock     # train, or go on with it
    python -m benchmarks.posted_designs --table            # the table of docs/decisions/0004-posted-menus.md

A design is an order of owners, cut into groups with a fixed purse each and into blocks that are cleared one after
another on what is left of their purse. Every owner of a block has a curve A(ε) ≥ 0 of public facts and of what others
reported whose outcome hers cannot move. One owner alone is offered min(A(ε), what is left). Several are cleared by a
clock t ≤ 1: each is offered for ε the largest t·A(ε) with which the others' payments at t, as they would choose at
t·A, stay within what is left (docs/decisions/0004-posted-menus.md has the proof). So all but the `relaxed` designs are
truthful, rational and within budget. Training softens choices; every figure is of the exact best choices.

A design is trained on all populations at once, with parameters of its own for each: small tensors are all overhead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from flmarket import auctions
from flmarket.auctions.learned.training.market import Source
from flmarket.auctions.posted.menu import CATALOGUE, KNOTS
from flmarket.auctions.posted.training import NOBODY, SoftChoice
from flmarket.audit import rate_law, second_best
from flmarket.audit.yardsticks import optimal_bound
from flmarket.bids import BidProfile, FloatArray

OUT, RESULTS = Path("out/posted-designs"), Path("training/posted-designs")  # checkpoints; figures and curves
POPULATIONS = ("flm22-iid", "flm22-niid", "flm21-low", "flm21-high")
FRESH, FRESH_SEED = 5000, 20261119  # fixed before anything was trained
OWNERS, VALIDATION, REPORTS = 10, 1000, 12
TICKS = 96  # of a clock
_LOG_KNOTS = np.log(KNOTS)
_TYPICAL = np.log(1.5)  # a record at ε = 1


@dataclass(frozen=True)
class Design:
    """What a row of the table is."""

    about: str
    groups: tuple[tuple[int, ...], ...] = (tuple(range(OWNERS)),)  # ranks by size, in order of service
    blocks: tuple[int, ...] = (1,) * OWNERS  # of each group, cut off where it ends
    history: bool = False  # sees all that was said before one by one
    table: bool = False  # a tabulated menu in place of a network
    hidden: tuple[int, ...] = (48, 48)
    others: str = ""  # whose reports it sees besides: of other "groups"; "later" (relaxed)
    own: tuple[str, ...] = ()  # relaxed: sees her "family", her "cap" ε̄
    batch: int = 256  # profiles of each population

    @property
    def relaxed(self) -> bool:
        """Whether it is no mechanism."""
        return bool(self.own) or self.others == "later"


_ALONE = tuple((rank,) for rank in range(OWNERS))
_HALVES = ((0, 3, 4, 7, 8), (1, 2, 5, 6, 9))
_CLOCK = {"batch": 64}
DESIGNS = {
    "sequence": Design("one after another, largest first; summaries of what was said and sold"),
    "history": Design("... and every earlier report and sale, sizes to come", history=True, hidden=(128, 96)),
    "table": Design("... tabulated over turn, money left and precision bought", table=True),
    "smallest-first": Design("one after another, smallest first", groups=(tuple(reversed(range(OWNERS))),)),
    "clock": Design("one clock for all", blocks=(OWNERS,), **_CLOCK),
    "first-then-clock": Design("the largest alone, then a clock", blocks=(1, OWNERS), **_CLOCK),
    "pairs": Design("clocks of two", blocks=(2,) * 5, **_CLOCK),
    "halves": Design("two halves with a purse each, prices from the other's reports", _HALVES, others="groups"),
    "leave-one-out": Design("a purse each, prices from all others' reports", _ALONE, others="groups"),
    "sees-later": Design("sequence that sees summaries of later reports", others="later"),
    "sees-cap": Design("sequence that sees her ε̄", own=("cap",)),
    "sees-family": Design("sequence that sees her family", own=("family",)),
    "sees-own": Design("sequence that sees her family and ε̄", own=("family", "cap")),
}


class Profiles:
    """Profiles as tensors, owners from the largest to the smallest, money in budgets."""

    def __init__(self, bids: BidProfile, budget: FloatArray, levels: slice) -> None:
        order = np.argsort(-bids.data_size, axis=-1, kind="stable")
        bids = bids[np.arange(len(order))[:, None], order]
        epsilon, self.size = CATALOGUE[levels], bids.data_size
        worth = bids.valuations.reshape((*bids.shape, 1)).per_record(np.append(epsilon, 1.0))
        cost = bids.data_size[..., None] * worth[..., :-1] / budget[:, None, None]
        cost[epsilon > bids.privacy_budget[..., None]] = 1e30
        tensor = torch.from_numpy

        def of(values: FloatArray) -> torch.Tensor:
            return tensor(np.ascontiguousarray(values, dtype=np.float32))

        self.epsilon, self.cost = of(epsilon), of(cost)
        self.share = of(bids.data_size / bids.data_size.sum(axis=-1, keepdims=True))
        self.value = of(np.log(np.maximum(worth[..., -1], 1e-9)) - _TYPICAL)
        self.cap, self.full = of(np.log(bids.privacy_budget)), of(bids.full_cost / budget[:, None])
        self.family = torch.nn.functional.one_hot(tensor(bids.valuations.kind.astype(np.int64)), 5).float()
        self.rich = of(np.log(budget / bids.data_size.sum(axis=-1)) - _TYPICAL)
        log = np.log(epsilon)
        tents = np.stack([np.interp(log, _LOG_KNOTS, row) for row in np.eye(len(KNOTS))], axis=-1)
        low, high = _LOG_KNOTS[:-1], _LOG_KNOTS[1:]
        heights = np.clip(_LOG_KNOTS[:, None], low, high) - np.clip(0.0, low, high)
        self.basis = of((tents @ np.column_stack([np.ones(len(KNOTS)), heights])).T)  # from level and slopes

    @classmethod
    def together(cls, some: Sequence[Profiles]) -> Profiles:
        """One after the other."""
        made = cls.__new__(cls)
        made.epsilon, made.basis = some[0].epsilon, some[0].basis
        made.size = np.concatenate([one.size for one in some])
        for field in ("cost", "share", "value", "cap", "full", "family", "rich"):
            setattr(made, field, torch.cat([getattr(one, field) for one in some]))
        return made

    def reports(self, ranks: list[int]) -> torch.Tensor:
        """A summary of what these owners reported, (K, 5)."""
        if not ranks:
            return torch.zeros(len(self.rich), 5)
        share, value, cap = self.share[:, ranks], self.value[:, ranks], self.cap[:, ranks]
        by_size = share / share.sum(dim=1, keepdim=True)
        columns = (value.mean(1), (by_size * value).sum(1), cap.mean(1), (by_size * cap).sum(1))
        return torch.stack([*columns, (0.05 + self.full[:, ranks].sum(1).clamp(max=20)).log()], dim=1)


class Table(torch.nn.Module):
    """Curves by interpolation between states: the turn, the money left a record, and Σ ε² bought."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.heights = torch.nn.Parameter(torch.zeros(count, OWNERS, 11, 7, len(KNOTS)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, (populations, rows, inputs), start with turn / 10, money, log squares (see `Mechanism.inputs`)."""
        whose = torch.arange(len(values))[:, None]
        turn = (values[..., 0] * OWNERS).round().long()
        found = torch.zeros(1)
        places = []
        for at, (low, high, count) in ((values[..., 1], (-3.0, 3.0, 11)), (values[..., 2], (-3.0, 4.0, 7))):
            where = ((at - low) / (high - low) * (count - 1)).clamp(0, count - 1 - 1e-4)
            places.append((where.long(), where - where.floor()))
        (row, into_row), (column, into_column) = places
        for a, b in itertools.product((0, 1), repeat=2):
            weight = (into_row if a else 1 - into_row) * (into_column if b else 1 - into_column)
            found = found + weight[..., None] * self.heights[whose, turn, row + a, column + b]
        return found


class Network(torch.nn.Module):
    """A network for each population, which start alike."""

    def __init__(self, widths: Sequence[int], count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList()
        for inputs, outputs in itertools.pairwise(widths):
            start = (2 * torch.rand(inputs + 1, outputs) - 1) / np.sqrt(inputs)
            if outputs == len(KNOTS):
                start = 0.02 * torch.randn(inputs + 1, outputs)
                start[0] = 0.0
            self.layers.append(torch.nn.Parameter(start.repeat(count, 1, 1)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(populations, rows, inputs) to (populations, rows, heights)."""
        for at, layer in enumerate(self.layers):
            values = torch.baddbmm(layer[:, :1], values.relu() if at else values, layer[:, 1:])
        return values


class Mechanism(torch.nn.Module):
    """A design with its parameters, for `count` populations, whose profiles come one after the other in equal numbers.

    Choices are exact, or soft (temperature `tau`) for training. Every parameter has one row a population.
    """

    def __init__(self, design: Design, count: int = 1) -> None:
        super().__init__()
        self.design, self.count = design, count
        self.reserve = torch.nn.Parameter(torch.full((count,), -1.0))
        self.purse = torch.nn.Parameter(torch.full((count,), 0.8))
        if design.table:
            self.curve: torch.nn.Module = Table(count)
            return
        inputs = 16 + 5 + (6 * OWNERS if design.history else 0) + 5 * bool(design.others) + 6 * bool(design.own)
        self.curve = Network((inputs, *design.hidden, len(KNOTS)), count)

    def alone(self, at: int, state: Mapping[str, torch.Tensor]) -> Mechanism:
        """The mechanism for one of the populations, from all their parameters."""
        one = Mechanism(self.design)
        one.load_state_dict({key: value[at : at + 1] for key, value in state.items()})
        return one

    def forward(self, of: Profiles, tau: float = 0.0, clock: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        """(ε, payment) by rank, (K, n); with tau = 0 exactly as the mechanism does it."""
        weight = torch.stack([of.share[:, list(group)].sum(1) for group in self.design.groups], dim=1)
        weight = weight ** self.each(of, self.purse)[:, None]
        ranks, epsilon, paid = [], [], []
        for group, purse in zip(self.design.groups, (weight / weight.sum(1, keepdim=True)).T, strict=True):
            start, state = 0, State.empty(purse)
            for length in self.design.blocks:
                block = list(group[start : start + length])
                if not block:
                    break
                chosen, pay, sold = self.serve(of, state, group, start, block, tau, clock)
                ranks, epsilon, paid = [*ranks, *block], [*epsilon, chosen], [*paid, pay]
                state = state.after(of.share[:, block], chosen, pay, sold)
                start += length
        by_rank = np.argsort(ranks)
        return torch.cat(epsilon, dim=1)[:, by_rank], torch.cat(paid, dim=1)[:, by_rank]

    def each(self, of: Profiles, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter at every row."""
        return parameter.repeat_interleave(len(of.share) // self.count)

    def serve(
        self, of: Profiles, state: State, group: tuple[int, ...], start: int, block: list[int], tau: float, clock: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One block: (ε, payment, chance of a sale), each (K, b)."""
        rest = of.share[:, list(group[start:])].sum(1).clamp_min(1e-6)
        level = state.money.clamp_min(1e-9) / rest
        inputs = self.inputs(of, state, rest, group, start, block)
        heights = self.curve(inputs.reshape(self.count, -1, inputs.shape[-1])).reshape(*inputs.shape[:2], -1)
        slopes = torch.cat([torch.zeros(1), torch.ones(len(KNOTS) - 1)])  # nothing learned: linear in ε
        log_price = (heights + slopes) @ of.basis + (1.5 if len(block) > 1 else -0.1)
        part = (of.share[:, block].sum(1) / rest).clamp(max=1.0)
        limit = state.money * part ** torch.sigmoid(self.each(of, self.reserve))
        cost, scale = of.cost[:, block], (tau * of.share[:, block])[..., None]
        if tau > 0.0 and max(self.design.blocks) == 1:  # the same softly, in one step
            log_price = log_price[:, 0] + (level * of.share[:, block[0]]).log()[:, None]
            found = SoftChoice.apply(log_price, limit, cost[:, 0], scale[:, 0, 0], of.epsilon)
            return tuple(values[:, None] for values in found)
        offers = (log_price.clamp(max=20.0)).exp() * (level[:, None] * of.share[:, block])[..., None]
        if tau == 0.0:
            offers = offers.cummax(dim=-1).values
        if len(block) > 1:
            offers = cleared(offers, cost, scale, limit, tau, clock, of.epsilon)
        else:
            offers = torch.minimum(offers, limit[:, None, None])
        return choices(offers, cost, scale, tau, of.epsilon, through=max(self.design.blocks) > 1)

    def inputs(
        self, of: Profiles, state: State, rest: torch.Tensor, group: tuple[int, ...], start: int, block: list[int]
    ) -> torch.Tensor:
        """What the curves of a block depend on, (K, b, inputs)."""
        before, later = list(group[:start]), list(group[start + len(block) :])
        left = of.share[:, list(group[start:])]
        measured = (of.rich + (state.money.clamp_min(1e-9) / rest).log()).clamp(-8, 8)
        columns = [
            torch.full_like(rest, start / OWNERS), measured, (state.squares + 0.05).log(), 0.2 * measured**2,
            state.declined, 0.5 * (state.noise + 0.01).log(), rest, (left**2).sum(1) / rest**2, state.money,
            left[:, len(block)] / rest if later else torch.zeros_like(rest), of.rich,
        ]  # fmt: skip
        common = [torch.stack(columns, dim=1), of.reports(before)]
        if self.design.history:
            slots = torch.zeros(len(rest), OWNERS, 6)
            for at, j in enumerate(before):
                told = (of.value[:, j], of.cap[:, j], of.full[:, j].clamp(max=5), of.share[:, j])
                slots[:, at, :4] = torch.stack(told, dim=1)
                slots[:, at, 4] = state.epsilon[:, at]
            for at, j in enumerate(group[start:]):
                slots[:, at, 5] = of.share[:, j]
            common.append(slots.flatten(1))
        if self.design.others == "groups":
            common.append(of.reports([j for j in range(OWNERS) if j not in group]))
        elif self.design.others == "later":
            common.append(of.reports(later))
        share = of.share[:, block]
        part = share / rest[:, None]
        logs = ((x + 1e-4).log() / 3 for x in (share, part))
        mine = [torch.stack([share, part, *logs, part * measured[:, None]], dim=-1)]
        if self.design.own:
            seen = torch.tensor([*["family" in self.design.own] * 5, "cap" in self.design.own])
            mine.append(torch.cat([of.family[:, block], of.cap[:, block, None]], dim=-1) * seen)
        together = torch.cat(common, dim=1)[:, None].expand(-1, len(block), -1)
        return torch.cat([together, *mine], dim=-1)


@dataclass(frozen=True)
class State:
    """What was sold before a block."""

    money: torch.Tensor
    declined: torch.Tensor
    noise: torch.Tensor
    squares: torch.Tensor
    epsilon: torch.Tensor

    @classmethod
    def empty(cls, purse: torch.Tensor) -> State:
        """Nothing."""
        zero = torch.zeros_like(purse)
        return cls(purse, zero, zero, zero, torch.zeros(len(purse), 0))

    def after(self, share: torch.Tensor, chosen: torch.Tensor, paid: torch.Tensor, sold: torch.Tensor) -> State:
        """With a block's sales."""
        each = (chosen / sold.clamp_min(1e-6)).clamp_min(CATALOGUE[0])
        return State(
            self.money - paid.sum(1),
            self.declined + (share * (1 - sold)).sum(1),
            self.noise + (8 * (share / each) ** 2 * sold).sum(1),
            self.squares + (chosen**2).sum(1),
            torch.cat([self.epsilon, chosen], dim=1),
        )


def choices(
    offers: torch.Tensor,
    cost: torch.Tensor,
    scale: torch.Tensor,
    tau: float,
    epsilon: torch.Tensor,
    *,
    through: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ε, payment, sold) over the last axis: exact if tau is 0, soft otherwise; `through`: exact with soft slopes."""
    surplus = offers - cost
    best, pick = surplus.max(dim=-1)
    sells = (best >= 0).to(offers.dtype)
    exact = epsilon[pick] * sells, offers.gather(-1, pick[..., None])[..., 0] * sells, sells
    if tau == 0.0:
        return exact
    worth = surplus / scale
    top = worth.amax(dim=-1, keepdim=True).clamp_min(0.0).detach()
    chance = (worth - top).exp()
    chance = chance / (chance.sum(dim=-1, keepdim=True) + (-top).exp())
    soft = chance @ epsilon, (chance * offers).sum(-1), chance.sum(-1)
    if not through:
        return soft
    found = [a + (b - a).detach() for a, b in zip(soft, exact, strict=True)]
    return found[0], found[1], found[2]


def cleared(
    curve: torch.Tensor,
    cost: torch.Tensor,
    scale: torch.Tensor,
    limit: torch.Tensor,
    tau: float,
    steps: int,
    epsilon: torch.Tensor,
) -> torch.Tensor:
    """Menus of a block, (K, b, E): for each ε the largest t·A(ε) that the others' payments at t leave room for."""
    clock = torch.cat([torch.zeros(1), torch.logspace(-1.7, 0.0, steps)])
    if tau == 0.0:
        last = torch.zeros(curve.shape)
        for t in clock.tolist():
            scaled = t * curve
            paid = choices(scaled, cost, scale, tau, epsilon)[1]
            others = paid.sum(dim=1, keepdim=True) - paid
            last[others[..., None] + scaled <= limit[:, None, None] + 1e-7] = t
        return last * curve
    scaled = clock[:, None] * curve[:, :, None]  # (K, b, T, E)
    paid = choices(scaled, cost[:, :, None], scale[:, :, None], tau, epsilon, through=True)[1]
    others = paid.sum(dim=1, keepdim=True) - paid
    over = others[..., None] + scaled - limit[:, None, None, None]
    index = torch.where(over <= 1e-7, torch.arange(len(clock))[:, None], 0).amax(dim=2, keepdim=True)
    following = (index + 1).clamp(max=len(clock) - 1)
    low, high = over.gather(2, index)[:, :, 0], over.gather(2, following)[:, :, 0]
    start, end = clock[index[:, :, 0]], clock[following[:, :, 0]]
    into = torch.where(end > start, (-low / (high - low).clamp_min(1e-6)).clamp(0, 1), torch.zeros(1))
    return (start + into * (end - start)) * curve


class _Bound(torch.autograd.Function):
    """ERR with the best weights, like its logarithm beyond `NOBODY`; slopes at fixed weights (the envelope theorem)."""

    @staticmethod
    def forward(ctx, epsilon: torch.Tensor, size: FloatArray) -> torch.Tensor:  # type: ignore[no-untyped-def]
        from flmarket.aggregation import OptAggr, error_bound

        at = np.maximum(epsilon.detach().double().numpy(), 1e-6)
        weights = OptAggr().weights(at, size)
        bound = error_bound(weights, at, size)
        slopes = -16.0 * weights**2 / at**3 * np.minimum(1.0, NOBODY / bound)[:, None]
        ctx.slopes = torch.from_numpy(slopes).float()
        return torch.from_numpy(np.where(bound < NOBODY, bound, NOBODY * (1 + np.log(bound / NOBODY)))).float()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        return gradient[:, None] * ctx.slopes, None


def drawn(population: str, seed: int, count: int) -> tuple[BidProfile, FloatArray]:
    """Profiles with budgets: a factor uniform in (0.1, 2) times all costs."""
    return Source(population, owners=OWNERS).draw(np.random.default_rng(seed), count)


def estimate(population: str, seed: int, count: int) -> FloatArray:
    """The second-best estimate of these profiles, kept in a file."""
    path = OUT / f"second-best-{population}-{seed}-{count}.npy"
    if not path.exists():
        law = rate_law(population)
        assert law is not None
        OUT.mkdir(parents=True, exist_ok=True)
        np.save(path, second_best(*drawn(population, seed, count), law)[1])
    return np.asarray(np.load(path))


def reached(
    mechanism: Mechanism, population: str, seed: int, count: int, fine: int = 1
) -> tuple[FloatArray, FloatArray]:
    """ERR and the share of the budget spent, with exact choices; `fine` thins the catalogue and the clock."""
    bids, budget = drawn(population, seed, count)
    bounds, spent = [], []
    rows = 500 if max(mechanism.design.blocks) == 1 else 50
    for at in range(0, count, rows):
        some = Profiles(bids[at : at + rows], budget[at : at + rows], slice(None, None, fine))
        with torch.no_grad():
            epsilon, paid = mechanism(some, clock=TICKS // fine)
        bounds.append(optimal_bound(epsilon.double().numpy(), some.size))
        spent.append(paid.sum(1).double().numpy())
    return np.concatenate(bounds), np.concatenate(spent)


def ratio(bound: FloatArray, best: FloatArray) -> tuple[float, float]:
    """The mean bound over the mean estimate where somebody sold, and its standard error."""
    sold = np.isfinite(bound)
    bound, best = bound[sold], best[sold]
    value = bound.mean() / best.mean()
    return float(value), float((bound - value * best).std() / best.mean() / np.sqrt(bound.size))


def train(name: str, steps: int, seed: int, rate: float) -> Iterator[tuple[int, list[float]]]:
    """Adam on fresh profiles, from where a former run stopped; yields (step, validation ratios)."""
    design, path = DESIGNS[name], OUT / f"{name}.pt"
    torch.manual_seed(seed)
    mechanism = Mechanism(design, len(POPULATIONS))
    descent = torch.optim.Adam(mechanism.parameters(), lr=rate, betas=(0.9, 0.98))
    chosen = {key: value.clone() for key, value in mechanism.state_dict().items()}  # each population's best so far
    rng, done, curve, seconds = np.random.default_rng((seed, 0)), 0, [], 0.0
    if path.exists():
        kept = torch.load(path, weights_only=False)
        if kept["steps"] == steps:
            mechanism.load_state_dict(kept["parameters"])
            descent.load_state_dict(kept["descent"])
            rng.bit_generator.state = kept["rng"]
            done, curve, seconds, chosen = kept["done"], kept["curve"], kept["seconds"], kept["chosen"]
    sources = [Source(population, owners=OWNERS) for population in POPULATIONS]
    fine, began = 1 if max(design.blocks) == 1 else 8, time.process_time() - seconds
    for step in range(done, steps):
        part = step / steps
        cool = min(1.0, (step + 1) / 30) * 0.02 ** max(0.0, (part - 0.3) / 0.7)
        descent.param_groups[0]["lr"] = rate * cool * (5.0 if design.table else 1.0)
        tau = 0.05 * 0.06 ** min(1.0, part / 0.7)
        spacing = 8 if part < 0.7 else 4
        levels = slice(int(rng.integers(spacing)), None, spacing)
        some = Profiles.together([Profiles(*source.draw(rng, design.batch), levels) for source in sources])
        epsilon, _ = mechanism(some, tau)
        descent.zero_grad()
        (_Bound.apply(epsilon, some.size).sum() / design.batch).backward()
        _clip(mechanism)
        descent.step()
        if (step + 1) % max(1, steps // REPORTS) == 0 or step + 1 == steps:
            state, found = mechanism.state_dict(), []
            for at, population in enumerate(POPULATIONS):
                bound, _ = reached(mechanism.alone(at, state), population, 1, VALIDATION, fine)
                found.append(ratio(np.minimum(bound, NOBODY), estimate(population, 1, VALIDATION))[0])
                if all(found[at] <= values[at] for _, values in curve):
                    for key, value in state.items():
                        chosen[key][at] = value[at]
            curve.append((step + 1, found))
            seconds = time.process_time() - began
            torch.save(
                {
                    "steps": steps, "done": step + 1, "curve": curve, "seconds": seconds,
                    "rng": rng.bit_generator.state, "parameters": state, "chosen": chosen,
                    "descent": descent.state_dict(),
                },
                path,
            )  # fmt: skip
            yield curve[-1]
    if (RESULTS / f"{name}.json").exists() and done == steps:
        return
    found = {
        "design": name, "steps": steps, "batch": design.batch, "seconds": round(seconds), "populations": {},
        "parameters": sum(x.numel() for x in mechanism.parameters()) // len(POPULATIONS),
    }  # fmt: skip
    for at, population in enumerate(POPULATIONS):
        bound, spent = reached(mechanism.alone(at, chosen), population, FRESH_SEED, FRESH)
        value, error = ratio(bound, estimate(population, FRESH_SEED, FRESH))
        found["populations"][population] = {
            "ratio": value, "error": error, "curve": [(step, values[at]) for step, values in curve],
            "empty": float(np.isinf(bound).mean()), "spent": float(spent.mean()), "most_spent": float(spent.max()),
        }  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


def _clip(mechanism: Mechanism) -> None:
    """Each population's slopes to a norm of at most 1."""
    slopes = [x.grad for x in mechanism.parameters() if x.grad is not None]
    norm = sum(slope.reshape(mechanism.count, -1).square().sum(1) for slope in slopes) ** 0.5
    for slope in slopes:
        slope /= norm.clamp_min(1.0).reshape(-1, *[1] * (slope.dim() - 1))


def fell(curve: list[tuple[int, float]]) -> float:
    """How much the best validation ratio still fell in the last third of the training.

    Of the best, because one empty round in a thousand lifts a ratio by a tenth and is gone at the next report.
    """
    values = [value for _, value in curve]
    return min(values[: 2 * len(values) // 3]) - min(values)


def table() -> None:
    """Print every design's figures, in Markdown; shipped mechanisms first."""
    print(f"| design | parameters | steps | fell in the last third | {' | '.join(POPULATIONS)} |")
    print(f"| --- | --: | --: | --: |{' --: |' * len(POPULATIONS)}")
    for title, pattern in (("`posted`", "posted"), ("`posted:` its own menu", "posted:{}"), ("`all-in`", "all-in")):
        cells = []
        for population in POPULATIONS:
            bids, budget = drawn(population, FRESH_SEED, FRESH)
            bound = optimal_bound(auctions.get(pattern.format(population)).run(bids, budget).epsilon, bids.data_size)
            cells.append(_cell(*ratio(bound, estimate(population, FRESH_SEED, FRESH)), float(np.isinf(bound).mean())))
        print(f"| {title} | | | | {' | '.join(cells)} |")
    for name, design in DESIGNS.items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        kept = json.loads(path.read_text())
        found = [kept["populations"][population] for population in POPULATIONS]
        cells = [_cell(f["ratio"], f["error"], f["empty"]) for f in found]
        still = max(fell(f["curve"]) for f in found)
        label = f"{'relaxed: ' if design.relaxed else ''}{design.about}"
        print(f"| `{name}`: {label} | {kept['parameters']:,} | {kept['steps']:,} | {still:.3f} | {' | '.join(cells)} |")


def _cell(value: float, error: float, empty: float) -> str:
    return f"{value:.3f} ± {error:.3f}" + (f" ({empty:.2%} empty)" if empty else "")


def main() -> None:
    """Train one design, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--design", choices=DESIGNS)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.table:
        return table()
    if chosen.batch:
        DESIGNS[chosen.design] = replace(DESIGNS[chosen.design], batch=chosen.batch)
    began = time.time()
    for step, values in train(chosen.design, chosen.steps, chosen.seed, chosen.rate):
        print(chosen.design, f"{step:6d}", *(f"{x:.4f}" for x in values), f"{time.time() - began:6.0f} s", flush=True)


if __name__ == "__main__":
    main()
