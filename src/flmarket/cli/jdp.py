"""`flmarket run` with `auction = "jdp"`: select once, train robustly, pay at the end, and say what is private."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from flmarket.cli.markets import show_run
from flmarket.cli.output import errors, print_json, progress, screen
from flmarket.engines import JdpResult, JdpTraining
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput
from flmarket.files import write_files
from flmarket.learning import dimension
from flmarket.ledger import format_micros
from flmarket.report import summarize, write_report
from flmarket.trust import CLIENTS_HERE

__all__ = ["run_jdp"]


def run_jdp(
    config: MarketConfig, out: Path, data_dir: Path | None, as_json: bool, command: str, base: Path = Path()
) -> None:
    """Train, write report.html, summary.json and clients.csv, and print the privacy statement."""
    training = config.jdp_training(data_dir=data_dir, base=base)
    if not as_json:
        errors.print(
            f"[bold]{training.name}[/]: {training.partition.owners} clients of {training.data.name}, selection "
            f"{training.auction.name}, aggregation {training.aggregation.name}, model of "
            f"{dimension(training.model):,} parameters"
        )
    with progress(training.rounds, quiet=as_json) as step:
        trained = training.run(progress=lambda r: step(f"round {r.index + 1}: accuracy {r.metrics['accuracy']:.3f}"))
    if not trained.rounds:
        raise InvalidInput("jdp.budget", training.budget, "enough for at least one client")
    result = trained.market_result()
    path = write_report(result, out, story=_story(training, trained), command=command, trust=CLIENTS_HERE)
    write_files(out, {"clients.csv": _clients(training, trained)})
    if as_json:
        chosen = trained.selection
        facts = {
            "clients": chosen.clients.tolist(),
            "adversaries": chosen.adversaries.tolist(),
            "adversaries_included": trained.adversaries_included,
            "stopped_early": trained.stopped,
            "privacy": {
                name: getattr(trained.privacy, name)
                for name in (
                    "delta", "client_per_round", "client_total", "record_per_round", "record_total", "paper_per_round"
                )
            } | {"statement": list(trained.privacy.sentences())},
        }  # fmt: skip
        print_json(summarize(result) | {"report": str(path), "jdp": facts, "trust": asdict(CLIENTS_HERE)})
        return
    show_run(result, path, CLIENTS_HERE)
    for sentence in trained.privacy.sentences():
        screen.print(f"[bold]private[/]      {sentence}", highlight=False)


def _story(training: JdpTraining, trained: JdpResult) -> str:
    chosen = trained.selection
    paid = format_micros(_paid(trained))
    attack = ""
    if training.adversary is not None:
        attack = (
            f"{chosen.adversaries.size} of them attack ({training.adversary.name}); an adversary's upload counted in "
            f"{trained.adversaries_included:.0%} of the rounds. "
        )
    end = "once the accuracy was reached" if trained.stopped else "after the last round"
    return (
        f"{training.partition.owners} clients named a cost; {training.auction.name} chose {chosen.clients.size} of "
        f"them for {paid}, paid {end}. {attack}Each round they train, clip, add noise and upload; the server "
        f"combines uploads by {training.aggregation.name}. On this page ε stands for the zCDP budget ρ of a whole "
        f"client. {' '.join(trained.privacy.sentences())}"
    )


def _paid(trained: JdpResult) -> int:
    """What left the server's account: voided awards do not."""
    return sum(int(trained.selection.paid_micros[i]) for i in trained.selection.clients if i not in trained.voided)


def _clients(training: JdpTraining, trained: JdpResult) -> str:
    """Everybody's cost, records, price, and in how many rounds her upload counted."""
    counted = dict(zip(trained.selection.clients.tolist(), trained.included.sum(axis=0).tolist(), strict=True))
    lines = ["client,cost,records,chosen,adversary,paid_micros,rounds_counted,epsilon_asked"]
    for i, (cost, size) in enumerate(zip(training.bids().full_cost, training.partition.sizes, strict=True)):
        adversary, paid = i in trained.selection.adversaries, int(trained.selection.paid_micros[i])
        paid = 0 if i in trained.voided else paid
        epsilon = float(trained.selection.epsilon[i])
        lines.append(
            f"{i},{cost:.9g},{size},{int(i in counted)},{int(adversary)},{paid},{counted.get(i, 0)},{epsilon:.9g}"
        )
    return "\n".join(lines) + "\n"
