"""What a lifetime of (ε = 8, δ = 1e-5) learns: noise at each owner against one noise for all, three seeds.

    python -m benchmarks.secure_learning DATA-DIR OUT

Runs the two examples (MNIST also with 200 owners) with both models of trust, as often as a result is missing in OUT;
prints the table of docs/secure-aggregation.md and draws its plot. In the local model the same rounds share the same
lifetime: ε = 8 in all, an equal part of it pure in each round, by the recommended randomizer.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.engines import run
from flmarket.engines.config import MarketConfig
from flmarket.report import summarize
from flmarket.report.html import strict_json

EXAMPLES = Path(__file__).parents[1] / "examples"
SEEDS = (0, 1, 2)
MANY: dict[str, Any] = {"owners": 200, "learning_rate": 4.0, "batch_size": 100}
CASES = {
    "MNIST, 60 owners": ("mnist-secure.toml", {}),
    "MNIST, 200 owners": ("mnist-secure.toml", MANY),
    "Debian sections, 200 owners": ("debian-sections-secure.toml", {}),
}
TRUST = {"secure-aggregation": "one noise for all", "local": "noise at each owner"}


def values(example: str, changes: dict[str, Any], trust: str, seed: int) -> dict[str, Any]:
    """The market file of one run."""
    market = tomllib.loads((EXAMPLES / example).read_text()) | {"seed": seed, "trust": trust}
    if changes:
        market["data"]["owners"] = market["task"]["bidders_per_round"] = changes["owners"]
        market["task"]["learning_rate"] = changes["learning_rate"]
        market["training"]["batch_size"] = changes["batch_size"]
    if trust == "local":
        del market["secure"]
        once = market["owners"]["privacy_cap"] / market["task"]["rounds"]
        market["owners"]["privacy_budget"] = [once, once]
    return market


def result(case: str, trust: str, seed: int, data_dir: Path, out: Path) -> dict[str, Any]:
    """A run's summary, kept in OUT."""
    path = out / f"{case.replace(', ', '-').replace(' ', '-').lower()}-{trust}-{seed}.json"
    if not path.exists():
        example, changes = CASES[case]
        config = MarketConfig.parse(values(example, changes, trust, seed))
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(strict_json(summarize(run(config.spec(data_dir=data_dir)))))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def drawn(found: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """Accuracy over rounds, mean and standard error."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(11, 3.4), sharey=True)
    for axis, (case, by_trust) in zip(axes, found.items(), strict=True):
        for trust, runs in by_trust.items():
            curves = np.array([one["accuracy"] for one in runs])
            rounds, error = np.arange(1, curves.shape[1] + 1), curves.std(axis=0, ddof=1) / np.sqrt(len(curves))
            axis.errorbar(rounds, curves.mean(axis=0), error, label=TRUST[trust], marker="o", ms=3)
        axis.axhline(runs[0]["baseline_accuracy"], color="grey", ls=":", lw=1)
        axis.set(title=case, xlabel="round", ylim=(0, 1))
    axes[0].set_ylabel("test accuracy")
    axes[0].legend(loc="center right", fontsize=8)
    figure.suptitle("One lifetime, (ε = 8, δ = 1e-5) for an owner's whole data set", fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run what is missing, print, draw."""
    data_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = {
        case: {trust: [result(case, trust, seed, data_dir, out) for seed in SEEDS] for trust in TRUST} for case in CASES
    }
    print("| data, owners | noise at each owner | secure aggregation | always the largest class |")
    print("| --- | --: | --: | --: |")
    for case, by_trust in found.items():
        cells = []
        for trust in ("local", "secure-aggregation"):
            last = np.array([one["final_accuracy"] for one in by_trust[trust]])
            cells.append(f"{last.mean():.3f} ± {last.std(ddof=1) / np.sqrt(len(last)):.3f}")
        print(f"| {case} | {cells[0]} | {cells[1]} | {by_trust['local'][0]['baseline_accuracy']:.3f} |")
    drawn(found, out / "secure-aggregation.svg")


if __name__ == "__main__":
    main()
