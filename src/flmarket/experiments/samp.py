"""SAMP's figures again: q against cost, average q against mean cost, learning the prior, and training loss.

Costs are uniform or truncated exponential on [0.5, 10]; the paper names the families, not their ranges, so levels are
ours and orders are the paper's. Training is softmax regression on Dirichlet-split records, with the rate 2/(μ(γ + Er))
of the theory but γ from a first rate of 0.2: the theory's γ = 8L/μ gives 0.005 on these images and nothing to see in so
few rounds. The convergence bound is for the theory's rate: it is drawn beside the losses for comparing mechanisms and
does not formally cover these runs (it is also some 10⁸ times the loss). All mechanisms of a seed share costs, partition
and random streams, so their differences are paired.

Budget and first rate were chosen after a look at 8 settings on MNIST at the quick scale (B̄ 1 or 2, first rate 0.05 or
0.2, both cost families; 3 seeds). The order of losses was the same in all 8; the ratio optimal/uniform was not (0.936
to 0.999). So verdicts on training are on the order of means only, and each says how it compares with its noise.

Complete information knows the drawn costs and spends B̄ on exactly these; the other two spend B̄ in expectation over the
distribution. EMNIST is replaced by Fashion-MNIST, and a data set that is not to be had by scikit-learn's digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.engines import SampledTraining
from flmarket.errors import DataUnavailable, InvalidInput
from flmarket.experiments.items import Check, Item, Reproduction, Step
from flmarket.learning import DataSet, Purpose, load, stream
from flmarket.learning.partition import dirichlet
from flmarket.market.kinds.sampling import SampledResult
from flmarket.report import Curve, CurveSet, write_curves
from flmarket.sampling import (
    CompleteInformation,
    Empirical,
    OptimalSampling,
    Posted,
    TruncatedExponential,
    Uniform,
    UniformSampling,
)
from flmarket.sampling.figures import average_participation, learning_curve

__all__ = ["FULL", "ITEMS", "QUICK", "Scale", "reproduce"]

FloatArray = NDArray[np.float64]
C_MIN, C_MAX, BUDGET, L2, FIRST_RATE = 0.5, 10.0, 1.0, 0.01, 0.2
FAMILIES: dict[Literal["uniform", "exponential"], Uniform | TruncatedExponential] = {
    "uniform": Uniform(C_MIN, C_MAX),
    "exponential": TruncatedExponential(C_MIN, C_MAX, 2.0),
}
PRINTED_RATIO = {"mnist": "94 %", "fashion-mnist": "90 %"}  # the latter printed for EMNIST
COMPLETE, OPTIMAL, UNIFORM = "complete information", "optimal", "uniform sampling"


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    data_sets: tuple[str, ...]
    records: int
    clients: int
    rounds: int
    most_seeds: int
    population: int
    learners: tuple[int, ...]
    draws: int


QUICK = Scale(("mnist", "fashion-mnist"), 2000, 40, 30, 3, 400, (50, 200, 800, 3200), 3)
FULL = Scale(("mnist", "fashion-mnist"), 6000, 100, 100, 1000, 2000, (50, 200, 800, 3200, 12800), 10)


def fig1(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """The illustration of the optimal q."""
    del quick, seeds, data_dir
    step("q against cost")
    return _q_against_cost(out_dir)


def fig4(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """Average q against the mean cost."""
    del seeds, data_dir
    step("average q against mean cost")
    return _average_q(out_dir, QUICK if quick else FULL)


def prior(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """The prior-independent mechanism against the prior-based one."""
    del seeds, data_dir
    step("prior-independent against prior-based")
    return _learning_the_prior(out_dir, QUICK if quick else FULL)


def fig2(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Training loss with uniform costs."""
    return _losses(out_dir, "uniform", quick=quick, seeds=seeds, data_dir=data_dir, step=step)


def fig3(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Training loss with exponential costs."""
    return _losses(out_dir, "exponential", quick=quick, seeds=seeds, data_dir=data_dir, step=step)


ITEMS: dict[str, Reproduction] = {"fig1": fig1, "fig4": fig4, "prior": prior, "fig2": fig2, "fig3": fig3}


def reproduce(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Run everything at one of two scales; `quick` uses at most three seeds."""
    made: list[Item] = []
    for work in ITEMS.values():
        found = work(out_dir, quick=quick, seeds=seeds, data_dir=data_dir, step=step)
        made += (found,) if isinstance(found, Item) else found
    return tuple(made)


def _losses(
    out_dir: Path,
    family: Literal["uniform", "exponential"],
    *,
    quick: bool,
    seeds: int,
    data_dir: Path | None,
    step: Step,
) -> tuple[Item, ...]:
    if seeds < 1:
        raise InvalidInput("seeds", seeds, "at least 1")
    scale = QUICK if quick else FULL
    runs = min(seeds, scale.most_seeds)
    return tuple(
        _training(out_dir, data, note, family, scale, runs, step) for data, note in _data_sets(scale, data_dir)
    )


def _q_against_cost(out_dir: Path) -> Item:
    cost = np.linspace(C_MIN, C_MAX, 191)
    ok = True
    files: tuple[str, ...] = ()
    objectives: dict[str, dict[str, float]] = {}
    numbers: dict[str, object] = {}
    for family, distribution in FAMILIES.items():
        kinds = (CompleteInformation, OptimalSampling, UniformSampling)
        posted = {
            name: kind.from_distribution(distribution, BUDGET)
            for name, kind in zip((COMPLETE, OPTIMAL, UNIFORM), kinds, strict=True)
        }
        curves = tuple(_curve(name, cost, mechanism.offer(cost)[0]) for name, mechanism in posted.items())
        title = f"Participation against cost, {family} costs"
        files += _written(out_dir, f"samp-q-{family}", CurveSet(title, "cost c", "q(c)", curves))
        objective = {name: mechanism.objective for name, mechanism in posted.items()}
        falls = bool((np.diff(posted[OPTIMAL].offer(cost)[0]) <= 1e-12).all())
        spent = {name: mechanism.expected_payment for name, mechanism in posted.items()}
        ok &= falls and _ordered(objective) and max(spent.values()) <= BUDGET * (1 + 1e-9)
        objectives[family] = objective
        numbers[family] = {"objective": objective, "expected_payment": spent, "q_falls": falls}
    return Item(
        "samp-q",
        "SAMP Figure 1: q against cost (illustration)",
        "The optimal q falls in the cost, and E[1/q] is complete information ≤ optimal ≤ uniform at one budget.",
        "reproduced" if ok else "differs",
        "E[1/q], complete / optimal / uniform: " + "; ".join(f"{f} costs {_three(o)}" for f, o in objectives.items()),
        files,
        numbers,
    )


def _average_q(out_dir: Path, scale: Scale) -> Item:
    means = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
    ok = True
    files: tuple[str, ...] = ()
    numbers: dict[str, dict[str, list[float]]] = {}
    for family in FAMILIES:
        found = average_participation(
            means, family=family, budget_per_client=BUDGET, minimum=C_MIN, maximum=C_MAX, clients=scale.population
        )
        lines = {
            COMPLETE: found.complete_information,
            OPTIMAL: found.prior_based,
            "prior-independent": found.prior_independent,
            UNIFORM: found.uniform,
        }
        curves = tuple(_curve(name, means, q) for name, q in lines.items())
        title = f"Average participation against mean cost, {family} costs"
        files += _written(out_dir, f"samp-average-q-{family}", CurveSet(title, "mean cost", "average q", curves))
        more = bool(
            (found.prior_based > found.uniform).all() and (found.complete_information >= found.prior_based).all()
        )
        falls = bool((np.diff(found.prior_based) < 0).all())
        learnt = bool((found.prior_independent > found.uniform).all())
        ok &= more and falls and learnt
        numbers[family] = {name: q.tolist() for name, q in lines.items()}
    return Item(
        "samp-average-q",
        "SAMP Figure 4: average q against mean cost",
        "Average q falls with the mean cost; the optimal one, known prior or not, recruits more than uniform sampling.",
        "reproduced" if ok else "differs",
        "Average q at the lowest mean cost, complete / optimal / uniform: "
        + "; ".join(f"{f} costs {_three({k: v[0] for k, v in n.items()})}" for f, n in numbers.items())
        + f". Uniform sampling knows c_max = {C_MAX:g} only, the others the distribution. The paper's text says "
        "'lower' where the mechanism recruits more.",
        files,
        {"mean_cost": list(means), **numbers},
    )


def _learning_the_prior(out_dir: Path, scale: Scale) -> Item:
    ok = True
    curves: list[Curve] = []
    ratios: dict[str, list[float]] = {}
    uniform: dict[str, float] = {}
    x = np.round(np.log10(scale.learners), 2)
    for place, (family, distribution) in enumerate(FAMILIES.items()):
        found = learning_curve(scale.learners, distribution, budget_per_client=BUDGET, draws=scale.draws)
        curves.append(_curve(f"{family} costs", x, found.ratio, found.spread, color=place))
        flat = np.full(x.size, found.uniform_ratio)
        curves.append(_curve(f"uniform sampling, {family} costs", x, flat, color=place, dash=1))
        gap = np.abs(found.ratio - 1.0)
        ok &= bool(gap[-1] < gap[0] and found.ratio[-1] < found.uniform_ratio and gap[-1] < 0.05)
        ratios[family], uniform[family] = found.ratio.tolist(), found.uniform_ratio
    title = "Prior-independent E[1/q] over the prior-based optimum"
    files = _written(out_dir, "samp-prior", CurveSet(title, "clients (log10)", "ratio", tuple(curves)))
    return Item(
        "samp-prior",
        "SAMP Algorithm 1: prior-independent against N",
        "Without the cost distribution the objective approaches the optimum as clients become many (5 % is our bar).",
        "reproduced" if ok else "differs",
        f"Ratio at N = {scale.learners[0]:,} and {scale.learners[-1]:,}: "
        + "; ".join(f"{f} costs {r[0]:.3f} and {r[-1]:.3f}" for f, r in ratios.items()),
        files,
        {"clients": list(scale.learners), "ratio": ratios, "uniform_ratio": uniform},
    )


def _training(
    out_dir: Path,
    data: DataSet,
    note: str,
    family: Literal["uniform", "exponential"],
    scale: Scale,
    seeds: int,
    step: Step,
) -> Item:
    runs: dict[str, list[SampledResult]] = {COMPLETE: [], OPTIMAL: [], UNIFORM: []}
    for seed in range(seeds):
        step(f"training on {data.name}, {family} costs, seed {seed}")
        for name, result in _paired_runs(data, family, scale, seed).items():
            runs[name].append(result)
    loss = {name: np.array([run.loss for run in results]) for name, results in runs.items()}
    settled = {name: array[:, -max(1, scale.rounds // 4) :].mean(axis=1) for name, array in loss.items()}
    means = {name: float(values.mean()) for name, values in settled.items()}
    rounds, stem = np.arange(1, scale.rounds + 1), f"samp-loss-{data.name}-{family}"
    curves = tuple(_curve(name, rounds, array.mean(axis=0), _se(array)) for name, array in loss.items())
    files = _written(out_dir, stem, CurveSet(f"{data.name}, {family} costs", "round", "training loss", curves))
    bounds = {name: np.array([record.bound for record in results[0].rounds]) for name, results in runs.items()}
    limits = tuple(_curve(f"bound at the theory's rate, {name}", rounds, values) for name, values in bounds.items())
    beside = CurveSet(f"{data.name}, {family} costs: loss and bound", "round", "loss", curves + limits)
    files += _written(out_dir, f"{stem}-bound", beside, log_y=True)
    gains = {
        "uniform − optimal": settled[UNIFORM] - settled[OPTIMAL],
        "optimal − complete": settled[OPTIMAL] - settled[COMPLETE],
    }
    order = f"Loss, complete / optimal / uniform: {_three(means)} (mean of {seeds} seeds, last quarter of rounds)"
    noise = ", ".join(f"{name} {_difference(values)}" for name, values in gains.items())
    share = (
        f"optimal is {means[OPTIMAL] / means[UNIFORM]:.1%} of uniform; the verdict is on the order, not on this ratio"
    )
    return Item(
        stem,
        f"SAMP Figure {2 if family == 'uniform' else 3}: training loss on {data.name}, {family} costs",
        "At one budget the training loss is complete information ≤ optimal ≤ uniform sampling.",
        "reproduced" if _ordered(means) else "differs",
        f"{order}; {noise}; {share}.{note}",
        files,
        {
            "loss": means,
            "loss_by_seed": {name: values.tolist() for name, values in settled.items()},
            "accuracy": {name: float(np.mean([r.rounds[-1].accuracy for r in rs])) for name, rs in runs.items()},
            "bound_at_theory_rate": {name: float(values[-1]) for name, values in bounds.items()},
            "spent_per_client_and_round": {
                name: float(np.mean([r.spent_micros for r in rs]) / 1e6 / scale.rounds / scale.clients)
                for name, rs in runs.items()
            },
            "budget_per_client": BUDGET,
        },
        (
            Check.of(
                "order",
                "Complete information ≤ optimal ≤ uniform sampling.",
                _ordered(means),
                f"{order}; {noise}.{note}",
            ),
            _printed_ratio(data.name, means[OPTIMAL] / means[UNIFORM]),
        ),
        (
            (
                f"optimal over uniform, {data.name}",
                PRINTED_RATIO.get(data.name, "–"),
                f"{means[OPTIMAL] / means[UNIFORM]:.1%}",
            ),
        ),
    )


def _printed_ratio(data_set: str, ratio: float) -> Check:
    """Not part of the item's verdict: the paper does not give the budget and the rate that its ratio depends on."""
    claim = "The loss is 94 % (MNIST) or 90 % (EMNIST) of uniform sampling's."
    printed = PRINTED_RATIO.get(data_set)
    evidence = f"{ratio:.1%} at our budget and rate, which the paper does not state; within two points counts"
    if printed is None:
        return Check.skipped("ratio", claim, f"another data set; {ratio:.1%} on {data_set}")
    return Check.of("ratio", claim, abs(ratio - float(printed.rstrip(" %")) / 100) <= 0.02, evidence)


def _paired_runs(
    data: DataSet, family: Literal["uniform", "exponential"], scale: Scale, seed: int
) -> dict[str, SampledResult]:
    distribution, steps = FAMILIES[family], 5
    costs = distribution.sample(stream(seed, purpose=Purpose.BIDS), scale.clients)
    draw = stream(seed, purpose=Purpose.PARTITION)
    split = dirichlet(draw, data.y_train, scale.clients, concentration=0.5, minimum=5)
    posted: dict[str, Posted] = {
        COMPLETE: CompleteInformation.from_distribution(Empirical(costs), BUDGET),
        OPTIMAL: OptimalSampling.from_distribution(distribution, BUDGET),
        UNIFORM: UniformSampling.from_distribution(distribution, BUDGET),
    }
    results = {}
    for name, mechanism in posted.items():
        q, r = mechanism.offer(costs)
        results[name] = SampledTraining(
            data=data,
            partition=split,
            costs=costs,
            participation=q,
            payment=r,
            rounds=scale.rounds,
            local_steps=steps,
            batch_size=16,
            l2=L2,
            learning_rate=lambda index: 2.0 / (L2 * (2.0 / (L2 * FIRST_RATE) + steps * index)),
            seed=seed,
        ).run()
    return results


def _data_sets(scale: Scale, data_dir: Path | None) -> list[tuple[DataSet, str]]:
    """A fixed random subset of each data set, with what must be said about it."""
    found: dict[str, tuple[DataSet, str]] = {}
    for name in scale.data_sets:
        try:
            data, note = load(name, data_dir), ""
        except DataUnavailable:
            data, note = load("digits"), f" {name} was not available: these are scikit-learn's digits instead."
        if name == "fashion-mnist" and not note:
            note = " Fashion-MNIST stands in for the paper's EMNIST."
        some = np.random.default_rng(0).permutation(len(data.y_train))[: scale.records]
        test = slice(0, scale.records)
        parts = (data.x_train[some], data.y_train[some], data.x_test[test], data.y_test[test])
        found.setdefault(data.name, (DataSet(data.name, *parts, data.classes), note))
    return list(found.values())


def _written(out_dir: Path, stem: str, curves: CurveSet, *, log_y: bool = False) -> tuple[str, ...]:
    write_curves(curves, out_dir, stem, log_y=log_y)
    return tuple(f"{stem}.{kind}" for kind in ("png", "svg", "csv"))


def _curve(
    name: str,
    x: ArrayLike,
    y: FloatArray,
    se: FloatArray | None = None,
    color: int | None = None,
    dash: int | None = None,
) -> Curve:
    band = None if se is None else tuple(se.tolist())
    return Curve(name, tuple(np.asarray(x, dtype=np.float64).tolist()), tuple(y.tolist()), band, color, dash)


def _se(values: FloatArray) -> FloatArray | None:
    return np.asarray(values.std(axis=0, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _ordered(value: Mapping[str, float]) -> bool:
    return value[COMPLETE] <= value[OPTIMAL] <= value[UNIFORM]


def _three(value: Mapping[str, float]) -> str:
    return " / ".join(f"{value[name]:.3g}" for name in (COMPLETE, OPTIMAL, UNIFORM))


def _difference(values: FloatArray) -> str:
    """A paired difference, its standard error over seeds, and whether two of those reach zero."""
    if len(values) < 2:
        return f"{values[0]:.3g} (one seed)"
    mean, error = float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
    return f"{mean:.3g} ± {error:.2g}" + (" (within noise)" if abs(mean) < 2 * error else "")
