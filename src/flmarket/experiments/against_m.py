"""The papers' networks with few or many sub-bids an owner (M), trained here: FLM22 Figure 10 and FLM21 Figure 7.

The papers train for days: 5,000 or 10,000 batches of a thousand profiles, for each of ten models per M. These are the
same networks and losses with a training of minutes, the same for every M, so levels are ours and only the direction in
M can be compared. Regret is that of a gauge, a fixed list of lies, over the owner's full cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flmarket.auctions.learned import PaperAuction
from flmarket.errors import MissingDependency
from flmarket.experiments import fl_market as fl
from flmarket.experiments.items import Check, Item, Step, from_checks
from flmarket.report import Curve, CurveSet

__all__ = ["SHORT", "fig10", "short_training"]

SIZES = (1, 2, 4, 8, 16)
POPULATION = "flm22-iid"
# epochs, batches an epoch, profiles a batch, steps of the search for lies
SHORT = {True: (2, 15, 32, 6), False: (10, 20, 128, 20)}


def short_training(
    preset_name: str, items: int, population: str, *, quick: bool, seed: int
) -> tuple[PaperAuction, float, float]:
    """A paper's network with M = `items`, trained briefly: the auction, its regret and its payments below cost."""
    try:
        import torch

        from flmarket.auctions.learned.training.data import Source
        from flmarket.auctions.learned.training.papers import PaperTrainer
        from flmarket.auctions.learned.training.presets import paper_preset
        from flmarket.auctions.learned.training.trainer import measure
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "torch") from None
    chosen = paper_preset(preset_name)
    epochs, batches, profiles, misreports = SHORT[quick]
    schedule = replace(chosen.schedule, epochs=epochs, batches=batches, profiles=profiles, misreports=misreports)
    settings = replace(chosen.settings, items=items)
    torch.manual_seed(seed)
    trainer = PaperTrainer(
        replace(chosen, settings=settings, schedule=schedule), Source(population), seed=seed, validation=300
    )
    for _ in trainer.run():
        pass
    auction = trainer.auction()
    draws = 4 if settings.sold == "drawn" else 1
    found = measure(auction, *trainer.held_out, liars=40, draws=draws, seed=seed)
    return auction, found.regret, found.below_cost


def fig10(out_dir: Path, *, quick: bool, seeds: int, step: Step) -> Item:
    """Train M-RegretNet for each M and draw regret and IR violation."""
    regret, loss = np.zeros((seeds, len(SIZES))), np.zeros((seeds, len(SIZES)))
    for place, m in enumerate(SIZES):
        for seed in range(seeds):
            step(f"training M-RegretNet, M = {m}, seed {seed}")
            _, regret[seed, place], loss[seed, place] = short_training(
                "m-regretnet", m, POPULATION, quick=quick, seed=seed
            )
    curves = tuple(_curve(name, values) for name, values in (("regret", regret), ("IR violation", loss)))
    title = "M-RegretNet against M, short training"
    files = fl.written(out_dir, "flm22-fig10", CurveSet(title, "M", "share of the owner's cost", curves))
    checks = [_falls("regret", "regret", regret), _falls("ir", "IR violation", loss)]
    epochs, batches, profiles, _ = SHORT[quick]
    return from_checks(
        "flm22-fig10",
        "FLM22 Figure 10: effect of M on regret and IR violation",
        checks,
        files=files,
        numbers={"m": list(SIZES), "regret": regret.mean(axis=0).tolist(), "ir_violation": loss.mean(axis=0).tolist()},
        note=f"{seeds} models per M, each trained on {epochs * batches} batches of {profiles} profiles (the paper: ten "
        "models, 5,000 batches of 1,024).",
    )


def _falls(key: str, what: str, values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Check:
    change, error = fl.paired(values[:, -1], values[:, 0])
    text = ", ".join(f"{value:.3f}" for value in values.mean(axis=0))
    return Check.of(
        key,
        f"M-RegretNet's {what} falls as M grows.",
        change < -2 * error,
        f"{what} at M = {', '.join(map(str, SIZES))}: {text}; from first to last {change:+.3f} ± {error:.3f}",
    )


def _curve(label: str, values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Curve:
    mean, error = fl.mean_and_se(values)
    x: Sequence[float] = SIZES
    return Curve(label, tuple(x), tuple(mean.tolist()), None if error is None else tuple(error.tolist()))
