"""Questions that the papers leave open, in the same form as their figures.

- Do weights for all coordinates of the noise train better models than the paper's, which count one (docs/errata.md E2)?
- How much accuracy does a unit of money, or of privacy, buy under each auction?

Markets are those of FLM22's Figure 9 (1,000 owners of NSL-KDD, 10 bidders, 100 rounds) at fixed budgets, with the
recommended noise: under the paper's Laplace noise on 615 coordinates nothing is learned and nothing can be compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.engines.config import MarketConfig
from flmarket.experiments import fl_market as fl
from flmarket.experiments.items import Check, Item, Reproduction, Step, from_checks
from flmarket.learning import DataSet, load
from flmarket.market import MarketResult
from flmarket.report import Curve, CurveSet

__all__ = ["ITEMS"]

FloatArray = NDArray[np.float64]
POPULATION = "flm22-iid"
ENTRANTS = ("posted", "all-in", "all-in-capped", "m1", "cleared-menu")
FACTORS = (0.1, 0.5, 1.0)
LAST = 20  # rounds over which the final accuracy is averaged


def dimension(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """opt-aggr for one coordinate, for all of them, and conventional weights, on the same rounds."""
    data, rounds = _data(data_dir, quick), 60 if quick else 100
    posted = fl.contenders(POPULATION, ("posted",))["posted"]
    rules: dict[str, dict[str, object]] = {
        "opt-aggr, all coordinates": {"aggregation": "opt-aggr", "bound_dimension": "model"},
        "opt-aggr, one coordinate": {"aggregation": "opt-aggr", "bound_dimension": 1},
        "conventional": {"aggregation": "conventional", "bound_dimension": 1},
    }
    accuracy: dict[str, dict[str, FloatArray]] = {}
    for noise in ("laplace-l1", "recommended"):
        for label, mechanism in rules.items():
            step(f"{label}, {noise} noise")
            config = _market(1.0, rounds, perturbation=noise, **mechanism)
            runs = fl.runs(config, data, posted, range(seeds))
            accuracy.setdefault(noise, {})[label] = np.array([run.accuracy for run in runs])
    curves = [
        Curve(f"{label} · {noise}", tuple(range(1, rounds + 1)), tuple(values.mean(axis=0).tolist()), None, place, dash)
        for dash, (noise, group) in enumerate(accuracy.items())
        for place, (label, values) in enumerate(group.items())
    ]
    title = "Weights for one coordinate or for all: accuracy on NSL-KDD"
    files = fl.written(out_dir, "beyond-dimension", CurveSet(title, "round", "test accuracy", tuple(curves)))
    final = {n: {label: v[:, -LAST:].mean(axis=1) for label, v in group.items()} for n, group in accuracy.items()}
    best, paper, plain = (final["recommended"][label] for label in rules)
    labels = tuple(rules)
    gap, error = fl.paired(best, paper)
    over, over_error = fl.paired(best, plain)
    checks = [
        Check.of(
            "dimension",
            "Weights that count every coordinate's noise train models at least as good as the paper's one coordinate.",
            gap >= -2 * error,
            f"with the recommended noise {best.mean():.3f} against {paper.mean():.3f} in the end, a difference of "
            f"{gap:+.3f} ± {error:.3f}; mean over all rounds {_overall(accuracy, labels[0])} against "
            f"{_overall(accuracy, labels[1])}",
        ),
        Check.of(
            "conventional",
            "And better ones than weights by data size alone.",
            over > 2 * over_error,
            f"{over:+.3f} ± {over_error:.3f} against {plain.mean():.3f}",
        ),
    ]
    laplace = ", ".join(f"{label} {values.mean():.3f}" for label, values in final["laplace-l1"].items())
    return from_checks(
        "beyond-dimension",
        "Does dimension-aware aggregation train better models?",
        checks,
        files=files,
        numbers={noise: {label: v.tolist() for label, v in group.items()} for noise, group in final.items()},
        note=f"With the paper's Laplace noise: {laplace}. Last {LAST} rounds, {seeds} seeds, posted, B̄ = 1.",
    )


def _overall(accuracy: dict[str, dict[str, FloatArray]], label: str) -> str:
    """How fast it learns: the mean of all rounds' accuracy."""
    return f"{accuracy['recommended'][label].mean():.3f}"


def value(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Accuracy against money paid and against privacy sold, a point for every auction and budget."""
    data, rounds = _data(data_dir, quick), 60 if quick else 100
    entrants = fl.contenders(POPULATION, ENTRANTS)
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for name, auction in entrants.items():
        for factor in FACTORS:
            step(f"{name} at budget factor {factor:g}")
            config = _market(factor, rounds, perturbation="recommended", aggregation="opt-aggr")
            runs = fl.runs(config, data, auction, range(seeds))
            accuracy = np.array([np.mean(run.accuracy[-LAST:]) for run in runs])
            found.setdefault(name, []).append(
                (
                    float(accuracy.mean()),
                    float(accuracy.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else 0.0,
                    float(np.mean([run.spent_micros / 1e6 for run in runs])),
                    float(np.mean([_privacy_sold(run) for run in runs])),
                )
            )
    return (
        _against(out_dir, "money", "paid in all, thousands of currency units", found, 2, 1e-3, rounds, seeds),
        _against(out_dir, "privacy", "privacy sold: Σ ε·records, millions", found, 3, 1e-6, rounds, seeds),
    )


def _against(
    out_dir: Path,
    what: str,
    x_label: str,
    found: dict[str, list[tuple[float, float, float, float]]],
    column: int,
    unit: float,
    rounds: int,
    seeds: int,
) -> Item:
    curves = []
    for name, points in found.items():
        ordered = sorted(points, key=lambda point: point[column])
        x = tuple(round(point[column] * unit, 6) for point in ordered)
        curves.append(Curve(name, x, tuple(p[0] for p in ordered), tuple(p[1] for p in ordered)))
    title = f"Accuracy on NSL-KDD against {what}"
    files = fl.written(out_dir, f"beyond-{what}", CurveSet(title, x_label, "test accuracy", tuple(curves)))
    cheap = {name: points[0] for name, points in found.items()}
    listed = ", ".join(
        f"{name} {point[0]:.3f} ± {point[1]:.3f} for {point[column] * unit:.3g}" for name, point in cheap.items()
    )
    top = max(point[0] for point in cheap.values())
    ours = cheap["posted"]
    return from_checks(
        f"beyond-{what}",
        f"Accuracy for a unit of {what}",
        [
            Check.of(
                what,
                f"At the smallest budget posted buys accuracy within noise of the best for its {what}.",
                ours[0] + 2 * ours[1] >= top,
                f"B̄ = {FACTORS[0]:g}: {listed}",
            )
        ],
        files=files,
        numbers={name: [list(point) for point in points] for name, points in found.items()},
        note=f"Columns of the numbers: accuracy, standard error, money, Σ ε·records. {rounds} rounds, {seeds} seeds.",
    )


def _privacy_sold(run: MarketResult) -> float:
    return float(sum((record.epsilon * record.data_size)[record.delivered].sum() for record in run.rounds))


def _data(data_dir: Path | None, quick: bool) -> DataSet:
    data = load("nsl-kdd", data_dir)
    return fl.few_tests(data, 4000) if quick else data


def _market(factor: float, rounds: int, **mechanism: object) -> MarketConfig:
    return MarketConfig.parse(
        {
            "task": {"rounds": rounds, "bidders_per_round": 10, "budget_factor": factor, "learning_rate": 0.05},
            "data": {"name": "nsl-kdd", "owners": 1000, "partition": "power-law"},
            "mechanism": {"auction": "posted", **mechanism},
        }
    )


ITEMS: dict[str, Reproduction] = {"dimension": dimension, "value": value}
