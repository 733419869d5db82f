"""The papers' losses and their training loop: FL-Market 2022 App. A and 2021 App. A, term by term.

    C(θ) = n·ERR + Σ_i φ_i·rgt_i + ρ/2·(Σ_i rgt_i)² + the same for irv (paid below cost) and dav (not deterministic)

    rgt_i = mean_k max(0, u_i(b*_i) − u_i(b_i)) / c_i     irv_i = mean_k max(0, −u_i(b_i)) / c_i
    dav_i = mean_k [M/(M+1) − Σ_m (z'_im − 1/(M+1))²]     c_i = Σ_m z'_im·v_i(mε̄_i/M)     z' = softmax(z/τ)

for DM-RegretNet, whose training sells ε̂ = Σ_m z'_im·mε̄/M. RegretNet and M-RegretNet have z' = z, no dav, and
−mean W·E[ε] instead of ERR. MURBA has no n before ERR, and rgt and irv in money, not over cost. Multipliers φ grow by ρ
times the violation every Q batches; ρ grows with the epochs. The sample is T batches of K profiles, the same in every
epoch. The last iterate counts: there is no early stopping, no clipping of gradients or asks, and no cap on ERR.

A lie b*_i is M values, never falling, and an ε̄ of at most the true one (above it the utility is −∞): M + 1 numbers. J
steps of γ times the gradient lead from the truth to it, and the last one counts, though it may be worse than the truth.

What the papers leave open, and what is done here: Adam ("the RegretNet training algorithm"); the unit in which a lie
climbs is money per record of the owner; τ = 1/8 as in the published code; ERR of MURBA is that of VarOpt; networks
start on standardised inputs, which the first layer absorbs.

**Speed.** Of a liar's profile only her own M + 1 inputs move, and only her own M + 1 logits matter: the first and the
last layer are computed for those alone. tanh(x) = 2σ(2x) − 1 turns the search into a network of σ, which is five times
faster to evaluate.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flmarket.auctions.learned.papers import PaperAuction, PaperSettings, first_parameters, inputs_of, outputs
from flmarket.auctions.learned.training import PaperSchedule, Preset
from flmarket.auctions.learned.training.market import (
    Source,
    Training,
    bound_and_empty,
    conventional_bound,
    optimal_bound,
)
from flmarket.bids import Auction, BidProfile, FloatArray, Kind, slices
from flmarket.errors import InvalidInput

Parameters = Mapping[str, torch.Tensor]
_CHUNK = 256  # profiles whose lies climb together: what stays in the cache
_LEAST_PRIVACY = 1e-3  # of a lie, as a part of ε̄
_LEAST_COST = 1e-12

# ---- a batch ----


@dataclass(frozen=True)
class PaperBatch:
    """K profiles of n owners. Money is per record: of the owner in `unit` and `value`, of everybody in `x`."""

    x: torch.Tensor  # (K, inputs) what the networks see of honest bids
    value: torch.Tensor  # (K, n, M) of the sub-bids
    privacy: torch.Tensor  # (K, n) ε̄
    share: torch.Tensor  # (K, n) W
    size: torch.Tensor  # (K, n) d
    unit: torch.Tensor  # (K, n) B / d_i
    shape: torch.Tensor  # (4, K, n) v(ε) = a·ε + b·ε² + c·√ε + e·(exp ε − 1)

    def rows(self, part: slice) -> PaperBatch:
        """Some of the profiles."""
        return PaperBatch(
            self.x[part], self.value[part], self.privacy[part], self.share[part], self.size[part], self.unit[part],
            self.shape[:, part],
        )  # fmt: skip

    def cost(self, epsilon: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
        """v(ε) per record; `shape` is (4, …) like ε."""
        a, b, c, e = shape
        total: torch.Tensor = a * epsilon + b * epsilon**2 + c * epsilon.sqrt() + e * torch.expm1(epsilon)
        return total


def make_batch(settings: PaperSettings, bids: BidProfile, budget: np.ndarray) -> PaperBatch:
    """Tensors of profiles of shape (K, n) whose valuations are of the papers' four families."""
    kind, rate = bids.valuations.kind, bids.valuations.rate
    if kind.max() > Kind.EXPONENTIAL:
        raise InvalidInput("valuations", Kind(int(kind.max())).name, "linear, quadratic, sqrt or exponential ones")
    if bids.n != settings.owners:
        raise InvalidInput("owners", bids.n, f"{settings.owners}, as the network has")
    if bids.data_size.min() <= 0:
        raise InvalidInput("data_size", 0, "at least one record of every owner")
    shape = np.stack([(kind == k) * rate * factor for k, factor in zip(Kind, (2.0, 1.0, 2.0, 1.0), strict=False)])
    x = inputs_of(settings, bids, budget)
    each = x[:, :-1].reshape(*bids.shape, settings.items + 2)
    size = bids.data_size
    unit, share = budget[:, None] / size, size / size.sum(axis=-1, keepdims=True)
    arrays = (x, each[..., :-2], bids.privacy_budget, share, size, unit, shape)
    return PaperBatch(*(torch.tensor(array, dtype=torch.float32) for array in arrays))


# ---- what the networks decide, honest and lying ----


def _sharper(schedule: PaperSchedule, z: torch.Tensor) -> torch.Tensor:
    """The soft argmax of 2022 Alg. 3 line 4: a softmax of the probabilities themselves."""
    return z if schedule.temperature is None else torch.softmax(z / schedule.temperature, dim=-1)


@dataclass(frozen=True)
class Decided:
    """Of every owner: chances z' (…, M+1), privacy loss (…), what it costs and what is paid, per record of hers."""

    chance: torch.Tensor
    epsilon: torch.Tensor
    cost: torch.Tensor
    paid: torch.Tensor

    @property
    def utility(self) -> torch.Tensor:
        """Per record of hers."""
        return self.paid - self.cost


def _decided(
    settings: PaperSettings, batch: PaperBatch, chance: torch.Tensor, paid: torch.Tensor, privacy: torch.Tensor, t: bool
) -> Decided:
    """`privacy` is the reported ε̄; `t`: tensors have the owners first, as where each of them lies."""
    fractions = torch.tensor(settings.fractions, dtype=torch.float32)
    shape, unit = (batch.shape.transpose(1, 2), batch.unit.T) if t else (batch.shape, batch.unit)
    epsilon = (chance * fractions).sum(dim=-1) * privacy
    if settings.sold == "mean":
        cost = batch.cost(epsilon, shape)
    else:
        cost = (chance[..., 1:] * batch.cost(privacy[..., None] * fractions[1:], shape[..., None])).sum(dim=-1)
    return Decided(chance, epsilon, cost, paid * unit)


def honest(settings: PaperSettings, schedule: PaperSchedule, parameters: Parameters, batch: PaperBatch) -> Decided:
    """Everybody tells the truth; shapes (K, n)."""
    logits, pay = outputs(torch, settings, parameters, batch.x)
    share = torch.softmax(pay, dim=-1)[:, : settings.owners]
    chance = _sharper(schedule, torch.softmax(logits, dim=-1))
    return _decided(settings, batch, chance, share, batch.privacy, False)


def _truth(batch: PaperBatch) -> torch.Tensor:
    """What an owner could lie about, as it is: values and ε̄, (n, K, M+1)."""
    return torch.cat([batch.value, batch.privacy[..., None]], dim=-1).transpose(0, 1).contiguous()


def _own_rows(settings: PaperSettings, weight: torch.Tensor) -> torch.Tensor:
    """The first layer's weights at each owner's values and ε̄, (n, M+1, hidden)."""
    n, m = settings.owners, settings.items
    return weight[: n * (m + 2)].reshape(n, m + 2, -1)[:, : m + 1]


def _own_columns(settings: PaperSettings, last: torch.Tensor) -> torch.Tensor:
    """The last layer's weights (hidden, …) or bias (…) at each owner's own logits, (n, hidden or 1, M+1)."""
    return last.reshape(-1, settings.owners, settings.items + 1).transpose(0, 1)


def lying(
    settings: PaperSettings, schedule: PaperSchedule, parameters: Parameters, batch: PaperBatch, lie: torch.Tensor
) -> Decided:
    """Each owner in turn reports `lie` (n, K, M+1) while the others are honest; shapes (n, K)."""
    n, last, difference, ends = settings.owners, len(settings.hidden), lie - _truth(batch), []
    for name in ("allocation", "payment"):
        first = parameters[f"{name}.0.weight"]
        h = batch.x @ first + parameters[f"{name}.0.bias"] + torch.bmm(difference, _own_rows(settings, first))
        for layer in range(1, last):
            h = torch.tanh(h) @ parameters[f"{name}.{layer}.weight"] + parameters[f"{name}.{layer}.bias"]
        ends.append(torch.tanh(h))
    weight, bias = (_own_columns(settings, parameters[f"allocation.{last}.{part}"]) for part in ("weight", "bias"))
    chance = _sharper(schedule, torch.softmax(torch.bmm(ends[0], weight) + bias, dim=-1))
    pay = torch.softmax(ends[1] @ parameters[f"payment.{last}.weight"] + parameters[f"payment.{last}.bias"], dim=-1)
    share = pay[torch.arange(n), :, torch.arange(n)]
    return _decided(settings, batch, chance, share, lie[..., -1], True)


# ---- the search for lies ----


class _Climbing:
    """One network in σ form, at each owner's own inputs; forward keeps what backward needs."""

    def __init__(self, settings: PaperSettings, parameters: Parameters, name: str, x: torch.Tensor) -> None:
        layers = [
            (parameters[f"{name}.{i}.weight"], parameters[f"{name}.{i}.bias"]) for i in range(len(settings.hidden) + 1)
        ]
        (first, bias), *middle, (last, end) = layers
        self.base = 2.0 * (x @ first + bias)
        self.own = 2.0 * _own_rows(settings, first)
        self.middle = [(4.0 * weight, 2.0 * (bias - weight.sum(dim=0))) for weight, bias in middle]
        self.last, self.end = 2.0 * last, end - last.sum(dim=0)
        self.grouped = name == "allocation"  # each owner needs her own logits only
        if self.grouped:
            self.last, self.end = _own_columns(settings, self.last), _own_columns(settings, self.end)

    def forward(self, difference: torch.Tensor) -> torch.Tensor:
        shape = (*difference.shape[:2], self.base.shape[-1])
        self.kept = [torch.baddbmm(self.base.expand(shape), difference, self.own).sigmoid_().flatten(0, 1)]
        for weight, bias in self.middle:
            self.kept.append(torch.addmm(bias, self.kept[-1], weight).sigmoid_())
        top = self.kept[-1]
        if self.grouped:
            return torch.baddbmm(self.end, top.reshape(*shape[:2], -1), self.last)
        return torch.addmm(self.end, top, self.last).reshape(*shape[:2], -1)

    def backward(self, slope: torch.Tensor) -> torch.Tensor:
        """The gradient in the owner's inputs, (n, K, M+1), for one in the outputs."""
        d = (
            torch.bmm(slope, self.last.transpose(1, 2)).flatten(0, 1)
            if self.grouped
            else slope.flatten(0, 1) @ self.last.T
        )
        for (weight, _), s in zip(reversed(self.middle), reversed(self.kept[1:]), strict=True):
            d = torch.mm(d.mul_((1.0 - s).mul_(s)), weight.T)
        s = self.kept[0]
        d = d.mul_((1.0 - s).mul_(s)).reshape(*slope.shape[:2], -1)
        return torch.bmm(d, self.own.transpose(1, 2))


@torch.no_grad()
def search(
    settings: PaperSettings,
    schedule: PaperSchedule,
    parameters: Parameters,
    batch: PaperBatch,
    steps: int | None = None,
) -> torch.Tensor:
    """The papers' search: the last of J steps of gradient ascent from the truth; (n, K, M+1)."""
    steps = schedule.misreports if steps is None else steps
    parts = (batch.rows(part) for part in slices(len(batch.x), _CHUNK))
    return torch.cat([_climb(settings, schedule, parameters, part, steps) for part in parts], dim=1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis, computed along the profiles: ten times faster than over nine numbers at a time."""
    return torch.softmax(x.transpose(1, 2).contiguous(), dim=1).transpose(1, 2).contiguous()


def _climb(
    settings: PaperSettings, schedule: PaperSchedule, parameters: Parameters, batch: PaperBatch, steps: int
) -> torch.Tensor:
    n, m, tau = settings.owners, settings.items, schedule.temperature
    truth, unit = _truth(batch), batch.unit.T[..., None].contiguous()
    a, b, c, e = batch.shape.transpose(1, 2)[..., None].contiguous()
    fractions = torch.tensor(settings.fractions, dtype=torch.float32)
    allocation, payment = (_Climbing(settings, parameters, name, batch.x) for name in ("allocation", "payment"))
    owner = torch.arange(n)
    lie, cap = truth.clone(), truth[..., m:]
    for _ in range(steps):
        difference = lie - truth
        z = _softmax(allocation.forward(difference))
        q = z if tau is None else _softmax(z / tau)
        shares = _softmax(payment.forward(difference))
        privacy = lie[..., m:]
        # the slopes of the utility in q, and in ε̄ where it sets the grid of what is sold
        epsilon = (
            (q * fractions).sum(dim=-1, keepdim=True) * privacy if settings.sold == "mean" else privacy * fractions[1:]
        )
        root, power = epsilon.sqrt(), epsilon.exp()
        rise = a + 2.0 * b * epsilon + 0.5 * c / root + e * power
        if settings.sold == "mean":
            by_chance = -rise * privacy * fractions
            by_privacy = -rise * epsilon / privacy
        else:
            value = a * epsilon + b * epsilon * epsilon + c * root + e * (power - 1.0)
            by_chance = torch.cat([torch.zeros_like(privacy), -value], dim=-1)
            by_privacy = -(q[..., 1:] * fractions[1:] * rise).sum(dim=-1, keepdim=True)
        if tau is not None:
            by_chance = q * (by_chance - (by_chance * q).sum(dim=-1, keepdim=True)) / tau
        by_logit = z * (by_chance - (by_chance * z).sum(dim=-1, keepdim=True))
        own = shares[owner, :, owner][..., None]
        by_pay = shares * (-unit * own)
        by_pay[owner, :, owner] += (unit * own)[..., 0]
        slope = allocation.backward(by_logit).add_(payment.backward(by_pay))
        slope[..., m:] += by_privacy
        lie.add_(slope, alpha=schedule.step)
        lie[..., :m] = lie[..., :m].clamp_min_(0.0).cummax(dim=-1).values
        lie[..., m:] = torch.minimum(torch.maximum(lie[..., m:], _LEAST_PRIVACY * cap), cap)
    return lie


# ---- the terms of the loss ----


@dataclass(frozen=True)
class Violations:
    """Each owner's mean violation over a batch, (n,); `determinism` is None where the paper does not ask for it."""

    regret: torch.Tensor
    rational: torch.Tensor
    determinism: torch.Tensor | None

    def named(self) -> dict[str, torch.Tensor]:
        """Those that count."""
        return {name: value for name, value in vars(self).items() if value is not None}


def terms(
    settings: PaperSettings, schedule: PaperSchedule, parameters: Parameters, batch: PaperBatch, lie: torch.Tensor
) -> tuple[torch.Tensor, Violations]:
    """The objective (ERR or −mean W·E[ε]) and the violations of a batch against the lies found."""
    told = honest(settings, schedule, parameters, batch)
    gain = lying(settings, schedule, parameters, batch, lie).utility.T - told.utility
    scale = 1.0 / told.cost.clamp_min(_LEAST_COST) if schedule.over_cost else batch.size
    even = 1.0 / (settings.items + 1)
    spread = (1.0 - even) - ((told.chance - even) ** 2).sum(dim=-1)
    found = Violations(
        (torch.relu(gain) * scale).mean(dim=0),
        (torch.relu(-told.utility) * scale).mean(dim=0),
        spread.mean(dim=0) if schedule.determinism is not None else None,
    )
    return _objective(schedule, told.epsilon, batch.share), found


def _objective(schedule: PaperSchedule, epsilon: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    if schedule.objective == "privacy":
        return -(share * epsilon).mean()
    if schedule.objective == "opt-aggr":
        return optimal_bound(epsilon, share, least=0.0).mean()
    if schedule.objective == "conventional":
        return conventional_bound(epsilon, share, least=0.0).mean()
    squares = epsilon**2
    total = squares.sum(dim=-1, keepdim=True)
    return (8.0 / total[..., 0] + (squares / total - share).abs().sum(dim=-1) ** 2).mean()


def lagrangian(
    schedule: PaperSchedule,
    objective: torch.Tensor,
    violations: Violations,
    multipliers: Mapping[str, torch.Tensor],
    epoch: int,
) -> torch.Tensor:
    """C(θ) in an epoch, counted from 0."""
    n = len(violations.regret)
    loss = (n if schedule.weight is None else schedule.weight) * objective
    for name, violation in violations.named().items():
        rho = getattr(schedule, name).rho_at(epoch)
        loss = loss + (multipliers[name] * violation).sum() + 0.5 * rho * violation.sum() ** 2
    return loss


# ---- the loop ----


@dataclass(frozen=True)
class Progress:
    """Where training stands after an epoch; `valid_loss` weighs the violations of held-out profiles by 1, always."""

    iteration: int
    epoch: int
    loss: float
    objective: float
    rgt: float
    irv: float
    dav: float
    valid_objective: float
    valid_rgt: float
    valid_irv: float
    valid_dav: float
    valid_loss: float
    deployed_bound: float
    deployed_empty: float
    seconds: float


class PaperTrainer(Training):
    """One training run, iteration by iteration; all of it follows from the preset, the source and the seed."""

    preset: Preset[PaperSettings, PaperSchedule]

    def __init__(
        self, preset: Preset[PaperSettings, PaperSchedule], source: Source, *, seed: int = 0, validation: int = 1000
    ) -> None:
        if source.owners != preset.settings.owners:
            raise InvalidInput("owners", source.owners, f"{preset.settings.owners}, as the network has")
        first = first_parameters(preset.settings, np.random.default_rng((seed, 0)))
        super().__init__(preset, source, seed, validation, first)
        self.validation = make_batch(preset.settings, *self.held_out)
        sample = make_batch(preset.settings, *source.draw(np.random.default_rng((seed, 3)), 4096)).x
        self.centre, self.spread = self._standard(sample)
        names = [name for name in ("regret", "rational", "determinism") if getattr(preset.schedule, name) is not None]
        self.multipliers = {
            name: torch.full((source.owners,), float(getattr(preset.schedule, name).multiplier)) for name in names
        }
        self.iteration, self.seconds = 0, 0.0
        self.history: list[Progress] = []
        self._sums, self._count = np.zeros(5), 0

    def _standard(self, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Centre and spread of each kind of input, the same for every owner."""
        n = self.preset.settings.owners
        each = sample[:, :-1].reshape(len(sample), n, -1)
        centre = torch.cat([each.mean(dim=(0, 1)).repeat(n), sample[:, -1:].mean(dim=0)])
        spread = torch.cat([each.std(dim=(0, 1)).repeat(n), sample[:, -1:].std(dim=0)])
        return centre, torch.where(spread > 1e-6, spread, torch.ones_like(spread))

    @property
    def total(self) -> int:
        """Iterations of the whole schedule."""
        return self.preset.schedule.epochs * self.preset.schedule.batches

    def effective(self) -> dict[str, torch.Tensor]:
        """The networks on inputs as they are: the first layer takes up centre and spread."""
        made = dict(self.parameters)
        for name in ("allocation", "payment"):
            weight = self.parameters[f"{name}.0.weight"] / self.spread[:, None]
            made[f"{name}.0.weight"] = weight
            made[f"{name}.0.bias"] = self.parameters[f"{name}.0.bias"] - self.centre @ weight
        return made

    def batch(self, index: int) -> PaperBatch:
        """Part `index` of the sample, which is T batches of K profiles, each in as many parts as the schedule says."""
        schedule = self.preset.schedule
        drawn = self.source.draw(np.random.default_rng((self.seed, 2, index)), schedule.profiles // schedule.parts)
        return make_batch(self.preset.settings, *drawn)

    def step(self) -> Progress | None:
        """One iteration; at the end of an epoch, where things stand."""
        began, settings, schedule = time.process_time(), self.preset.settings, self.preset.schedule
        epoch = self.iteration // schedule.batches
        batch, parameters = self.batch(self.iteration % (schedule.batches * schedule.parts)), self.effective()
        lie = search(settings, schedule, parameters, batch)
        objective, violations = terms(settings, schedule, parameters, batch, lie)
        loss = lagrangian(schedule, objective, violations, self.multipliers, epoch)
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        if not torch.isfinite(loss):
            raise InvalidInput(
                "loss", float(loss), f"a finite number (iteration {self.iteration} of {self.preset.name})"
            )
        self.optimiser.step()
        self.iteration += 1
        if self.iteration % schedule.update_every == 0:
            for name, violation in violations.named().items():
                self.multipliers[name] += getattr(schedule, name).rho_at(epoch) * violation.detach()
        self._sums += [loss.item(), objective.item(), *_means(violations)]
        self._count += 1
        self.seconds += time.process_time() - began
        return self._close_epoch() if self.iteration % schedule.batches == 0 else None

    def run(self, iterations: int | None = None) -> Iterator[Progress | None]:
        """Iterate to the end of the schedule, or up to a given iteration."""
        end = self.total if iterations is None else min(iterations, self.total)
        while self.iteration < end:
            yield self.step()

    def _close_epoch(self) -> Progress:
        began, schedule = time.process_time(), self.preset.schedule
        means = (self._sums / self._count).tolist()
        self._sums, self._count = np.zeros(5), 0
        objective, violations = self.validate()
        rgt, irv, dav = _means(violations)
        n = self.source.owners
        weighed = (n if schedule.weight is None else schedule.weight) * objective + n * (rgt + irv + dav)
        bound, empty = deployed(self.auction(), *self.held_out, seed=self.seed)
        self.seconds += time.process_time() - began
        loss, train_objective, train_rgt, train_irv, train_dav = means
        done = Progress(
            self.iteration, self.iteration // schedule.batches, loss, train_objective, train_rgt, train_irv, train_dav,
            objective, rgt, irv, dav, weighed, bound, empty, round(self.seconds, 1),
        )  # fmt: skip
        self.history.append(done)
        return done

    def validate(self) -> tuple[float, Violations]:
        """Objective and violations on held-out profiles, by the papers' own search."""
        settings, schedule = self.preset.settings, self.preset.schedule
        parameters = {key: value.detach() for key, value in self.effective().items()}
        lie = search(settings, schedule, parameters, self.validation)
        with torch.no_grad():
            objective, violations = terms(settings, schedule, parameters, self.validation, lie)
        return float(objective), violations

    @property
    def flat(self) -> bool:
        """Whether held-out loss changed by less than 2 % between the last five epochs and the five before."""
        if len(self.history) < 10:
            return False
        loss = np.array([done.valid_loss for done in self.history[-10:]])
        before, after = loss[:5].mean(), loss[5:].mean()
        return bool(abs(after - before) <= 0.02 * abs(before))

    def auction(self) -> PaperAuction:
        """The network as it stands."""
        weights = {key: value.detach().numpy().copy() for key, value in self.effective().items()}
        return PaperAuction(self.preset.settings, weights, self.preset.name)

    # ---- checkpoints ----

    def identity(self) -> dict[str, Any]:
        """The schedule and the population too."""
        return super().identity() | {
            "schedule": asdict(self.preset.schedule), "population": self.source.population,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Where training stands."""
        return {
            "iteration": self.iteration, "seconds": self.seconds, "multipliers": self.multipliers,
            "history": [asdict(done) for done in self.history], "sums": [*self._sums.tolist(), self._count],
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.multipliers, self.iteration, self.seconds = state["multipliers"], state["iteration"], state["seconds"]
        self.history = [Progress(**done) for done in state["history"]]
        *sums, count = state["sums"]
        self._sums, self._count = np.array(sums), int(count)

    def write_curve(self, path: Path) -> None:
        """The epochs so far, as CSV."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(Progress.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(done) for done in self.history)


def _means(violations: Violations) -> tuple[float, float, float]:
    dav = 0.0 if violations.determinism is None else violations.determinism.mean().item()
    return violations.regret.mean().item(), violations.rational.mean().item(), dav


def deployed(auction: PaperAuction, bids: BidProfile, budget: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """Mean error bound with OptAggr of the auction as deployed, and the share of rounds in which nobody sells."""
    epsilon = auction.run(bids, budget, rng=np.random.default_rng(seed)).epsilon
    return bound_and_empty(epsilon, bids.data_size)


@dataclass(frozen=True)
class PapersMetric:
    """Means over owners and profiles; `worst` are the largest means of one owner, as in the 2021 paper's Table 1.

    How the papers measure regret and rationality (2022 App. A, Table I; 2021 App. A, Table 1), and what that hides.

    | figure | utilities | lies |
    | --- | --- | --- |
    | rgt, irv | of the soft allocation that training uses, over its expected cost c_i (MURBA: in money) | J steps |
    | rgt_deployed, irv_deployed | of the auction as deployed, over the (expected) cost of what is sold | the same |
    | noise | rgt of two independent draws of the same honest bids | none |

    The published tables draw an allocation for the truth and another for the lie. For a lottery this is `noise`: an
    owner who sells with probability z for a payment of her expected cost shows a "regret" of 1 − z without any lie
    (docs/errata.md E22). The strong search is `flmarket.audit`; it divides by the cost of the whole bid, never less.
    """

    rgt: float
    irv: float
    worst_rgt: float
    worst_irv: float
    rgt_deployed: float
    irv_deployed: float
    noise: float
    profiles: int


def by_the_papers(
    auction: PaperAuction, schedule: PaperSchedule, bids: BidProfile, budget: FloatArray, *, seed: int = 0
) -> PapersMetric:
    """Everything that the papers' search finds about one of their networks, on profiles of shape (K, n)."""
    settings = auction.settings
    parameters = {
        key: torch.tensor(np.asarray(value), dtype=torch.float32) for key, value in auction.parameters.items()
    }
    batch = make_batch(settings, bids, budget)
    lie = search(settings, schedule, parameters, batch)
    with torch.no_grad():
        _, found = terms(settings, schedule, parameters, batch, lie)
        hard = replace(schedule, temperature=_HARD if settings.sold == "argmax" else None)
        told = honest(settings, hard, parameters, batch)
        gain = torch.relu(lying(settings, hard, parameters, batch, lie).utility.T - told.utility)
        below = torch.relu(-told.utility)
        scale = 1.0 / told.cost if schedule.over_cost else batch.size
        sells = told.cost > 1e-6 * batch.value[..., -1]  # where nothing is sold there is nothing to divide by
        rgt, irv = (float((value * scale)[sells].mean()) if sells.any() else 0.0 for value in (gain, below))
    drawn = settings.sold == "drawn"
    noise = regret_of_two_draws(auction, bids, budget, told.cost.double().numpy(), seed=seed) if drawn else 0.0
    soft, paid = found.regret, found.rational
    worst = float(soft.max()), float(paid.max())
    return PapersMetric(float(soft.mean()), float(paid.mean()), *worst, rgt, irv, noise, len(budget))


_HARD = 1e-4  # a soft argmax as cold as this is the argmax


def regret_of_two_draws(
    auction: Auction, bids: BidProfile, budget: FloatArray, cost: FloatArray, *, seed: int = 0
) -> float:
    """mean max(0, u of a second draw − u of a first one) / expected cost a record: what no lie at all "gains"."""
    first, second = (
        bids.utility(auction.run(bids, budget, rng=np.random.default_rng((seed, draw)))) / bids.data_size
        for draw in (1, 2)
    )
    return float(np.mean(np.maximum(second - first, 0.0) / np.maximum(cost, 1e-12)))
