"""Questions that the papers leave open, in the same form as their figures.

- Do weights for all coordinates of the noise train better models than the paper's, which count one (docs/errata.md E2)?
- How much accuracy does a unit of money, or of privacy, buy under each auction?

Markets are those of FLM22's Figure 9 (1,000 owners of NSL-KDD, 10 bidders, 100 rounds) at fixed budgets, with the
recommended noise: under the paper's Laplace noise on 615 coordinates nothing is learned and nothing can be compared.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from flmarket.bids import FloatArray
from flmarket.engines.config import MarketConfig
from flmarket.experiments import fl_market as fl
from flmarket.experiments.items import Estimate, Item, Job, Reproduction, Sheet, judged
from flmarket.learning import DataSet, load
from flmarket.report import Curve

POPULATION = "flm22-iid"
ENTRANTS = ("posted", "all-in", "all-in-capped", "m1", "cleared-menu")
FACTORS = (0.1, 0.5, 1.0)
LAST = 20  # rounds over which the final accuracy is averaged
CLOSE = 0.02  # of accuracy: what we call as good


def dimension(job: Job) -> Item:
    """opt-aggr for one coordinate, for all of them, and conventional weights, on the same rounds."""
    data, rounds = _data(job), 60 if job.quick else 100
    posted = fl.contenders(POPULATION, ("posted",))["posted"]
    rules: dict[str, dict[str, object]] = {
        "opt-aggr, all coordinates": {"aggregation": "opt-aggr", "bound_dimension": "model"},
        "opt-aggr, one coordinate": {"aggregation": "opt-aggr", "bound_dimension": 1},
        "conventional": {"aggregation": "conventional", "bound_dimension": 1},
    }
    accuracy: dict[str, FloatArray] = {}
    for noise, (label, mechanism) in product(("laplace-l1", "recommended"), rules.items()):
        job.step(f"{label}, {noise} noise")
        config = _market(1.0, rounds, perturbation=noise, **mechanism)
        accuracy[f"{label} · {noise}"] = fl.trained(job, config, data, posted, job.runs(1, 4))["accuracy"]
    final = {label: values[:, -LAST:].mean(axis=1) for label, values in accuracy.items()}
    best, one, plain = (final[f"{label} · recommended"] for label in rules)
    sheet = Sheet(job, "beyond-dimension", "Does dimension-aware aggregation train better models?")
    claim = f"Weights that count every coordinate's noise train models at least as good (within {CLOSE:g}) as the "
    found = judged({"lead": Estimate.of(best - one)}, above=-CLOSE)
    found += f"; {best.mean():.3f} against {one.mean():.3f} in the end"
    sheet.check("dimension", claim + "paper's one coordinate.", found)
    found = judged({"lead": Estimate.of(best - plain)}, above=0.0)
    sheet.check("conventional", "And better ones than weights by data size alone.", found)
    curves = fl.labelled(range(1, rounds + 1), accuracy, tuple(rules))
    sheet.draw("round", "test accuracy", curves, "Weights for one coordinate or for all: accuracy on NSL-KDD")
    sheet.numbers |= {label: values.tolist() for label, values in final.items()}
    laplace = ", ".join(f"{label} {final[f'{label} · laplace-l1'].mean():.3f}" for label in rules)
    runs = f"Last {LAST} rounds, {len(best)} runs, posted, B̄ = 1."
    return sheet.item(f"With the paper's Laplace noise: {laplace}. {runs}")


def value(job: Job) -> tuple[Item, ...]:
    """Accuracy against money paid and against privacy sold, a point for every auction and budget."""
    data, rounds = _data(job), 60 if job.quick else 100
    found: dict[str, list[dict[str, FloatArray]]] = {}
    for (name, auction), factor in product(fl.contenders(POPULATION, ENTRANTS).items(), FACTORS):
        job.step(f"{name} at budget factor {factor:g}")
        config = _market(factor, rounds, perturbation="recommended", aggregation="opt-aggr")
        measured = fl.trained(job, config, data, auction, job.runs(1, 4))
        measured["accuracy"] = measured["accuracy"][:, -LAST:].mean(axis=1)
        found.setdefault(name, []).append(measured)
    return (
        _against(job, "money", "spent", "paid in all, thousands of currency units", found, 1e-3),
        _against(job, "privacy", "privacy", "privacy sold: Σ ε·records, millions", found, 1e-6),
    )


def _against(
    job: Job, what: str, column: str, x_label: str, found: dict[str, list[dict[str, FloatArray]]], unit: float
) -> Item:
    curves = []
    for name, points in found.items():
        spots = sorted((float(p[column].mean()) * unit, Estimate.of(p["accuracy"])) for p in points)
        curves.append(
            Curve(
                name,
                tuple(round(x, 6) for x, _ in spots),
                tuple(one.mean for _, one in spots),
                tuple(one.se if np.isfinite(one.se) else 0.0 for _, one in spots),
            )
        )
    cheap = {name: points[0] for name, points in found.items()}
    listed = ", ".join(
        f"{name} {Estimate.of(p['accuracy'])} for {p[column].mean() * unit:.3g}" for name, p in cheap.items()
    )
    lead = {
        f"over {name}": Estimate.of(cheap["posted"]["accuracy"] - p["accuracy"])
        for name, p in cheap.items()
        if name != "posted"
    }
    sheet = Sheet(job, f"beyond-{what}", f"Accuracy for a unit of {what}")
    sheet.draw(x_label, "test accuracy", curves, f"Accuracy on NSL-KDD against {what}")
    claim = f"At the smallest budget posted trains models as accurate as any other auction's (within {CLOSE:g})."
    sheet.check(what, claim, judged(lead, above=-CLOSE) + f"; B̄ = {FACTORS[0]:g}: {listed}")
    for name, points in found.items():
        sheet.numbers[name] = [{key: float(values.mean()) for key, values in point.items()} for point in points]
    return sheet.item(f"{len(cheap['posted']['accuracy'])} runs.")


def _data(job: Job) -> DataSet:
    return fl.few_tests(load("nsl-kdd", job.data_dir), 2000)


def _market(factor: float, rounds: int, **mechanism: object) -> MarketConfig:
    return MarketConfig.parse(
        {
            "task": {"rounds": rounds, "bidders_per_round": 10, "budget_factor": factor, "learning_rate": 0.05},
            "data": {"name": "nsl-kdd", "owners": 1000, "partition": "power-law"},
            "mechanism": {"auction": "posted", **mechanism},
        }
    )


ITEMS: dict[str, Reproduction] = {"dimension": dimension, "value": value}
