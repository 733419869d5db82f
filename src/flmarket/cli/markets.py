"""`flmarket demo` and `flmarket run`: simulate a market, show a summary, write the report."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.cli.output import errors, print_json, print_path, progress, screen, show_trust, table
from flmarket.engines import Simulation, StackelbergResult, StackelbergTraining
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError
from flmarket.files import write_files
from flmarket.ledger import format_micros
from flmarket.market import MarketResult
from flmarket.report import summarize, write_report
from flmarket.report.view import Table
from flmarket.trust import OWNERS_HERE, RECORDS_HERE, TrustWords

__all__ = ["DEMO", "run_demo", "run_market", "show_run"]

_MAX_USERS = 2_000  # in the page's table; users.csv has all
DEMO_STORY = (
    "Sixty hospitals of different sizes hold patient records they may not share. A buyer wants a model that tells "
    "malignant from benign tumours and offers a budget each round. Hospitals bid what the privacy of their update "
    "costs them; the auction picks whom to buy from and at what price; winners’ updates are clipped and noised, and "
    "paid on delivery."
)
DEMO: dict[str, Any] = {
    "task": {
        "name": "tumour-diagnosis",
        "rounds": 25,
        "bidders_per_round": 40,
        "budget_factor": 1.0,
        "learning_rate": 0.2,
    },
    "data": {"name": "breast-cancer", "owners": 60, "partition": "power-law", "sigma": 0.5, "minimum": 3},
    "owners": {"privacy_budget": [0.2, 1.0], "privacy_cap": 10.0, "dropout": 0.02, "faulty": 0.005},
    "mechanism": {"auction": "posted", "aggregation": "opt-aggr", "perturbation": "recommended", "clip": 0.5},
}


def run_demo(out: Path, rounds: int | None, seed: int, as_json: bool) -> None:
    """The market of README on data bundled with scikit-learn."""
    task = DEMO["task"] | ({"rounds": rounds} if rounds else {})
    config = MarketConfig.parse(DEMO | {"task": task, "seed": seed}, source="demo")
    command = f"flmarket demo --seed {seed}" + (f" --rounds {rounds}" if rounds else "")
    _play(config.simulation(), out, as_json, story=DEMO_STORY, command=command)


def run_market(market: Path, out: Path, data_dir: Path | None, seed: int | None, as_json: bool) -> None:
    """The market of a TOML file."""
    config = MarketConfig.load(market)
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
    command = f"flmarket run {shlex.quote(market.name)} --seed {config.seed}"
    if config.kind == "reward":
        _play_game(config, out, data_dir, as_json, command, market.parent)
        return
    if config.kind == "joint":
        from flmarket.cli.jdp import run_jdp

        run_jdp(config, out, data_dir, as_json, command, market.parent)
        return
    if config.kind == "sampling":
        from flmarket.cli.sampled import run_sampled

        run_sampled(config, out, data_dir, as_json, command, market.parent)
        return
    _play(config.simulation(data_dir=data_dir, base=market.parent), out, as_json, story=None, command=command)


def _play(simulation: Simulation, out: Path, as_json: bool, *, story: str | None, command: str) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", str(out), "a folder")
    task = simulation.task
    if not as_json:
        errors.print(
            f"[bold]{task.name}[/]: {simulation.partition.owners} owners of {simulation.data.name}, "
            f"{task.rounds} rounds, auction {simulation.auction.name}, aggregation {simulation.aggregation.name}, "
            f"noise {simulation.perturbation.name}"
        )
    with progress(task.rounds, quiet=as_json) as step:
        result = simulation.run(progress=lambda r: step(f"round {r.index + 1}: accuracy {r.metrics['accuracy']:.3f}"))
    path = write_report(result, out, story=story, command=command)
    if as_json:
        print_json(summarize(result) | {"report": str(path), "trust": asdict(OWNERS_HERE)})
    else:
        show_run(result, path)


def _play_game(config: MarketConfig, out: Path, data_dir: Path | None, as_json: bool, command: str, base: Path) -> None:
    training = config.stackelberg_training(data_dir=data_dir, base=base)
    with progress(training.rounds, quiet=as_json) as step:
        played = training.run(progress=lambda r: step(f"round {r.index + 1}: accuracy {r.metrics['accuracy']:.3f}"))
    result = played.market_result()
    largest = float(played.epsilon.max(initial=0.0))
    story = (
        f"The server announces a reward of {format_micros(played.reward_micros)}. Each of {len(played.rho)} users "
        f"answers with a privacy budget; {int((played.rho > 0).sum())} take part, train with per-record clipping and "
        f"Gaussian noise, and share the reward in proportion. On this page ε stands for the zCDP budget ρ of one "
        f"record; the largest total means (ε, δ) = ({largest:.2f}, {training.delta:g})."
    )
    privacy = [_privacy_table(training, played)]
    path = write_report(result, out, story=story, command=command, tables=privacy, trust=RECORDS_HERE)
    _write_users(training, played, out)
    if as_json:
        users = {"rho": played.rho.tolist(), "epsilon": played.epsilon.tolist(), "delta": training.delta}
        game = {"reward_micros": played.reward_micros, "server_utility": played.server_utility}
        print_json(summarize(result) | {"report": str(path), "users": users | game, "trust": asdict(RECORDS_HERE)})
        return
    show_run(result, path, RECORDS_HERE)
    rows = table("Who takes part", "user", "ρ total", f"ε at δ = {training.delta:g}", "paid")
    for user in played.rho.argsort()[::-1][: int((played.rho > 0).sum())]:
        paid = format_micros(int(played.paid_micros[user]))
        rows.add_row(str(user), f"{played.rho[user]:.4f}", f"{played.epsilon[user]:.2f}", paid)
    screen.print(rows)


def _privacy_table(training: StackelbergTraining, played: StackelbergResult) -> Table:
    """What each participant's ρ means as (ε, δ), total over all rounds."""
    order = played.rho.argsort(kind="stable")[::-1][: int((played.rho > 0).sum())]
    shown = order[:_MAX_USERS]
    rows = tuple(
        (str(user), f"{played.rho[user]:.4g}", f"{played.epsilon[user]:.3f}", f"{training.delta:g}",
         f"{played.sigma[user]:.3g}", format_micros(int(played.paid_micros[user])))
        for user in shown.tolist()
    )  # fmt: skip
    total = "total, all rounds"
    columns = (("User", ""), ("ρ", total), ("ε", total), ("δ", total), ("σ", "noise, per round"), ("Paid", "total"))
    lead = (
        f"One record of a participant’s data is (ε, δ)-private over all {training.rounds:,} rounds together: whatever "
        f"replaces it, what she releases stays as likely up to e^ε, but for δ. Those who stay out release nothing."
    )
    left_out = len(order) - len(shown)
    return Table("privacy", "What is private, per user", lead, columns, rows, left_out)


def _write_users(training: StackelbergTraining, played: StackelbergResult, out: Path) -> None:
    """users.csv beside the report: what each user's ρ means as (ε, δ), and what she was paid."""
    lines = ["user,privacy_value,rho,epsilon,delta,paid_micros"]
    for user, (value, rho, epsilon, paid) in enumerate(
        zip(np.asarray(training.privacy_values), played.rho, played.epsilon, played.paid_micros, strict=True)
    ):
        lines.append(f"{user},{value:.9g},{rho:.9g},{epsilon:.9g},{training.delta:g},{paid}")
    write_files(out, {"users.csv": "\n".join(lines) + "\n"})


def show_run(result: MarketResult, path: Path, trust: TrustWords = OWNERS_HERE) -> None:
    """The run in some lines, the last of which say what is private."""
    facts = summarize(result)
    rows = table("", "", "", text=2)
    rows.show_header = False
    paid, budget = format_micros(result.spent_micros), format_micros(result.budget_micros)
    delivered = facts["awards"]
    most, unit = facts["epsilon_per_round_max"], "ρ" if result.perturbation == "gaussian-zcdp" else "ε"
    for name, value in (
        ("accuracy", f"{facts['final_accuracy']:.3f} (always the larger class: {facts['baseline_accuracy']:.3f})"),
        ("paid", f"{paid} of {budget} ({result.spent_micros / max(result.budget_micros, 1):.0%})"),
        ("owners paid", f"{facts['owners_paid']} of {facts['owners']}"),
        ("awards", f"{delivered['posted']} delivered, {delivered['voided']} voided, {delivered['expired']} expired"),
        ("privacy", f"at most {unit} = {most:.3g} per round, {facts['epsilon_total_max']:.3g} total"),
    ):
        rows.add_row(f"[bold]{name}[/]", value)
    screen.print(rows)
    show_trust(trust)
    print_path("report     ", path)
