"""`flmarket run` with `auction = "sampling"`: clients with private costs take part at random, paid when they do."""

from __future__ import annotations

from pathlib import Path

from flmarket.cli.output import errors, print_json, print_path, progress, screen, show_trust, table
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError
from flmarket.ledger import format_micros
from flmarket.report import summarize_sampled, write_sampled
from flmarket.trust import RAW_HERE

__all__ = ["run_sampled"]


def run_sampled(
    config: MarketConfig, out: Path, data_dir: Path | None, as_json: bool, command: str, base: Path = Path()
) -> None:
    """Train, write report.html, summary.json and clients.csv, and show the run in a few lines."""
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", str(out), "a folder")
    training = config.sampled_training(data_dir=data_dir, base=base)
    if not as_json:
        errors.print(
            f"[bold]{training.name}[/]: {training.partition.owners} clients of {training.data.name}, "
            f"{training.rounds} rounds, scheme {training.scheme}"
        )
    with progress(training.rounds, quiet=as_json) as step:
        result = training.run(progress=lambda r: step(f"round {r.index + 1}: loss {r.loss:.3f}"))
    path = write_sampled(result, out, command=command)
    facts = summarize_sampled(result)
    if as_json:
        print_json(facts | {"report": str(path)})
        return
    rows = table("", "", "", text=2)
    rows.show_header = False
    rounds, budget = len(result.rounds), training.budget_micros or 0
    expected, paid = format_micros(int(result.expected_micros)), format_micros(result.spent_micros // rounds)
    cap = "" if result.hard_cap_micros is None else f", never above {format_micros(result.hard_cap_micros)}"
    for name, value in (
        ("loss", f"{result.rounds[-1].loss:.4g} (before training {result.initial_loss:.4g})"),
        ("accuracy", f"{facts['final_accuracy']:.3f} (always the larger class: {facts['baseline_accuracy']:.3f})"),
        ("a round costs", f"{paid} on average, {expected} expected, budget {format_micros(budget)}{cap}"),
        (
            "clients paid",
            f"{facts['clients_paid']} of {facts['clients']}, average q {facts['average_participation']:.3f}",
        ),
        ("rules", "all kept" if all(facts["guarantees"].values()) else "[bold red]broken: see the report[/]"),
    ):
        rows.add_row(f"[bold]{name}[/]", value)
    screen.print(rows)
    show_trust(RAW_HERE)
    print_path("report     ", path)
