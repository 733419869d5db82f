"""The papers' networks with few or many sub-bids an owner (M), trained here: FLM22 Figure 10 and FLM21 Figure 7.

The papers train for days: 5,000 or 10,000 batches of a thousand profiles, for each of ten models per M. These are the
same networks and losses with a training of minutes, the same for every M, so levels are ours and only the direction in
M can be compared. Regret is that of a gauge, a fixed list of lies, over the owner's full cost.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flmarket.auctions.learned import PaperAuction
from flmarket.errors import MissingDependency
from flmarket.experiments.items import Check, Item, Job, from_checks, line
from flmarket.experiments.verdicts import trend

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


def fig10(job: Job) -> Item:
    """Train M-RegretNet for each M and draw regret and IR violation."""
    found = {name: np.zeros((len(job.seeds), len(SIZES))) for name in ("regret", "IR violation")}
    for place, m in enumerate(SIZES):
        for row, seed in enumerate(job.seeds):
            job.step(f"training M-RegretNet, M = {m}, seed {seed}")
            measured = short_training("m-regretnet", m, POPULATION, quick=job.quick, seed=seed)[1:]
            found["regret"][row, place], found["IR violation"][row, place] = measured
    epochs, batches, profiles, _ = SHORT[job.quick]
    return from_checks(
        "flm22-fig10",
        "FLM22 Figure 10: effect of M on regret and IR violation",
        [
            Check.of(key, f"M-RegretNet's {name} falls as M grows.", trend(values, -1, steps=False))
            for key, (name, values) in zip(("regret", "ir"), found.items(), strict=True)
        ],
        files=job.written(
            "flm22-fig10", "M-RegretNet against M, short training", "M", "share of the owner's cost",
            [line(name, SIZES, values) for name, values in found.items()],
        ),
        numbers={"m": list(SIZES), **{name: values.mean(axis=0).tolist() for name, values in found.items()}},
        note=f"{len(job.seeds)} models per M, each trained on {epochs * batches} batches of {profiles} profiles (the "
        "paper: ten models, 5,000 batches of 1,024).",
    )  # fmt: skip
