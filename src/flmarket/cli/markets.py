"""`flmarket demo` and `flmarket run`: simulate a market of any kind, show a summary, write the report."""

import shlex
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.cli.output import errors, print_json, print_path, progress, screen, show_trust, table, template
from flmarket.engines import (
    JdpResult,
    JdpTraining,
    SampledTraining,
    Simulation,
    Spec,
    StackelbergResult,
    StackelbergTraining,
    run,
)
from flmarket.engines.config import MarketConfig
from flmarket.errors import ConfigError, InvalidInput
from flmarket.files import write_files
from flmarket.learning import dimension
from flmarket.ledger import format_micros
from flmarket.market import AuctionSpec, MarketResult, Rounds
from flmarket.market.kinds.joint import JointKind
from flmarket.report import said, summarize, summarize_sampled, write_report, write_sampled
from flmarket.report.html import Table
from flmarket.report.model_card import model_zip
from flmarket.trust import (
    AUCTION_RECORDS_HERE,
    CLIENTS_HERE,
    OWNERS_HERE,
    RAW_HERE,
    RECORDS_HERE,
    TrustWords,
    in_sums,
    sampled_words,
)

MODEL = "model.zip"
_UNITS = {"update": "an owner's whole update", "record": "any one record"}
_MAX_USERS = 2_000  # in the page's table; users.csv has all
DEMO_STORY = (
    "Sixty hospitals of different sizes hold patient records they may not share. A buyer wants a model that tells "
    "malignant from benign tumours and offers a budget each round. Hospitals bid what the privacy of their update "
    "costs them; the auction picks whom to buy from and at what price; winners’ updates are clipped and noised, and "
    "paid on delivery."
)


def demo_config(**changes: Any) -> MarketConfig:
    """The demo's market, with other values for its task or its seed."""
    values = tomllib.loads(template("demo.toml"))
    seed = {"seed": changes.pop("seed")} if "seed" in changes else {}
    return MarketConfig.parse(values | {"task": values["task"] | changes} | seed, source="demo")


def run_demo(out: Path, rounds: int | None, seed: int, as_json: bool) -> None:
    """The market of README on data bundled with scikit-learn."""
    _takes_files(out)
    config = demo_config(seed=seed, **({"rounds": rounds} if rounds else {}))
    command = f"flmarket demo --seed {seed}" + (f" --rounds {rounds}" if rounds else "")
    _play(config.simulation(), out, as_json, story=DEMO_STORY, command=command)


def run_market(market: Path, out: Path, data_dir: Path | None, seed: int | None, as_json: bool) -> None:
    """The market of a TOML file."""
    _takes_files(out)
    config = MarketConfig.load(market)
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
    command = f"flmarket run {shlex.quote(market.name)} --seed {config.seed}"
    spec = config.spec(data_dir=data_dir, base=market.parent)
    if isinstance(spec, StackelbergTraining):
        _play_game(spec, out, as_json, command)
    elif isinstance(spec, JdpTraining):
        _play_jdp(spec, out, as_json, command)
    elif isinstance(spec, SampledTraining):
        _play_sampled(spec, out, as_json, command)
    else:
        _play(spec, out, as_json, story=None, command=command)


def _takes_files(out: Path) -> None:
    """Whether what a run leaves can be written there is known before it begins."""
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", str(out), "a folder")


def _play(spec: Spec, out: Path, as_json: bool, *, story: str | None, command: str) -> None:
    """An auction, or a kind of one's own."""
    kind, trust = spec.kind(), OWNERS_HERE
    about = f"{kind.rounds} rounds, {kind.name}"
    if isinstance(spec, AuctionSpec):
        sold = f" {spec.auction.name}" if isinstance(spec, Simulation) else ""
        about += f"{sold}, aggregation {spec.aggregation.name}, noise {spec.perturbation.name}"
        trust = in_sums(OWNERS_HERE, spec.trust)
        trust = RAW_HERE if spec.unprotected else AUCTION_RECORDS_HERE if kind.unit == "record" else trust
    if not as_json:
        errors.print(f"[bold]{spec.name}[/]: {spec.partition.owners} owners of {spec.data.name}, {about}")
    with progress(kind.rounds, quiet=as_json) as step:
        result = run(spec, progress=_told(step), finished=partial(write_model, spec, out, trust))
    path = write_report(result, out, story=story, command=command, trust=trust)
    if as_json:
        print_json(summarize(result) | {"report": str(path), "model": str(out / MODEL)} | said(trust))
    else:
        show_run(result, path, trust)
        print_path("model      ", out / MODEL)


def _told(step: Callable[[str], None]) -> Callable[[Any], None]:
    """Each round's accuracy, for a progress bar."""
    return lambda record: step(f"round {record.index + 1}: accuracy {record.metrics['accuracy']:.3f}")


def write_model(spec: Spec, out: Path, trust: TrustWords, rounds: Rounds) -> None:
    """model.zip beside the report: what was bought, with all that it takes to use it."""
    statements: Sequence[str] = ()
    if isinstance(rounds.kind, JointKind):
        if not rounds.records:  # nobody was chosen
            return
        statements = rounds.kind.privacy().sentences()
    parts = {name: getattr(spec, name, None) for name in ("auction", "aggregation", "perturbation")}
    names = {name: str(part.name) for name, part in parts.items() if part is not None and hasattr(part, "name")}
    content = model_zip(
        rounds.kind, spec.data, rounds.ledger, trust, rounds_played=len(rounds.records), names=names,
        statements=statements,
    )  # fmt: skip
    write_files(out, {MODEL: content})


def _play_game(training: StackelbergTraining, out: Path, as_json: bool, command: str) -> None:
    trust = in_sums(RECORDS_HERE, training.trust)
    with progress(training.rounds, quiet=as_json) as step:
        played = training.run(progress=_told(step), finished=partial(write_model, training, out, trust))
    result = played.market_result()
    largest = float(played.epsilon.max(initial=0.0))
    story = (
        f"The server announces a reward of {format_micros(played.reward_micros)}. Each of {len(played.rho)} users "
        f"answers with a privacy budget; {int((played.rho > 0).sum())} take part, train with per-record clipping and "
        f"Gaussian noise{'' if training.secure is None else ' that all add together'}, and share the reward in "
        f"proportion. On this page ε stands for the zCDP budget ρ of one "
        f"record; the largest total means (ε, δ) = ({largest:.2f}, {training.delta:g})."
    )
    privacy = [_privacy_table(training, played)]
    path = write_report(result, out, story=story, command=command, tables=privacy, trust=trust)
    _write_users(training, played, out)
    if as_json:
        users = {"rho": played.rho.tolist(), "epsilon": played.epsilon.tolist(), "delta": training.delta}
        game = {"reward_micros": played.reward_micros, "server_utility": played.server_utility}
        print_json(summarize(result) | {"report": str(path), "users": users | game} | said(trust))
        return
    show_run(result, path, trust)
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
    paid, budget = format_micros(result.spent_micros), format_micros(result.budget_micros)
    delivered = facts["awards"]
    unit, kept = "ρ" if result.currency == "rho" else "ε", result.currency
    most, total = (
        "∞" if facts[name] is None else f"{facts[name]:.3g}" for name in (f"{kept}_per_round_max", f"{kept}_total_max")
    )
    rows = (
        ("accuracy", f"{facts['final_accuracy']:.3f} (always the larger class: {facts['baseline_accuracy']:.3f})"),
        ("paid", f"{paid} of {budget} ({result.spent_micros / max(result.budget_micros, 1):.0%})"),
        ("owners paid", f"{facts['owners_paid']} of {facts['owners']}"),
        ("awards", f"{delivered['posted']} delivered, {delivered['voided']} voided, {delivered['expired']} expired"),
        ("privacy", f"at most {unit} = {most} per round, {total} total{_as_epsilon(facts)}, of {_UNITS[result.unit]}"),
    )
    _show_facts(rows, path, trust)


def _show_facts(facts: Iterable[tuple[str, str]], path: Path, trust: TrustWords) -> None:
    rows = table("", "", "", text=2)
    rows.show_header = False
    for name, value in facts:
        rows.add_row(f"[bold]{name}[/]", value)
    screen.print(rows)
    show_trust(trust)
    print_path("report     ", path)


def _as_epsilon(facts: dict[str, Any]) -> str:
    """A total in ρ as (ε, δ), where it is of an owner in sums."""
    if "rho_total_max" not in facts or facts.get("epsilon_total_max") is None:
        return ""
    return f": ε = {facts['epsilon_total_max']:.3g} at δ = {facts['delta']:g}"


def _play_jdp(training: JdpTraining, out: Path, as_json: bool, command: str) -> None:
    """Train, write report.html, summary.json and clients.csv, and print the privacy statement."""
    trust = in_sums(CLIENTS_HERE, training.trust)
    if not as_json:
        errors.print(
            f"[bold]{training.name}[/]: {training.partition.owners} clients of {training.data.name}, selection "
            f"{training.auction.name}, aggregation {training.aggregation.name}, model of "
            f"{dimension(training.model):,} parameters"
        )
    with progress(training.rounds, quiet=as_json) as step:
        trained = training.run(progress=_told(step), finished=partial(write_model, training, out, trust))
    if not trained.rounds:
        raise InvalidInput("joint.budget", training.budget, "enough for at least one client")
    result = trained.market_result()
    path = write_report(result, out, story=_jdp_story(training, trained), command=command, trust=trust)
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
        print_json(summarize(result) | {"report": str(path), "jdp": facts} | said(trust))
        return
    show_run(result, path, trust)
    for sentence in trained.privacy.sentences():
        screen.print(f"[bold]private[/]      {sentence}", highlight=False)


def _jdp_story(training: JdpTraining, trained: JdpResult) -> str:
    chosen = trained.selection
    # what left the server's account: voided awards do not
    paid = sum(int(chosen.paid_micros[i]) for i in chosen.clients if i not in trained.voided)
    attack = ""
    if training.adversary is not None:
        attack = (
            f"{chosen.adversaries.size} of them attack ({training.adversary.name}); an adversary's upload counted in "
            f"{trained.adversaries_included:.0%} of the rounds. "
        )
    end = "once the accuracy was reached" if trained.stopped else "after the last round"
    return (
        f"{training.partition.owners} clients named a cost; {training.auction.name} chose {chosen.clients.size} of "
        f"them for {format_micros(paid)}, paid {end}. {attack}Each round they train, clip, add noise and upload; the "
        f"server combines uploads by {training.aggregation.name}. On this page ε stands for the zCDP budget ρ of a "
        f"whole client. {' '.join(trained.privacy.sentences())}"
    )


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


def _play_sampled(training: SampledTraining, out: Path, as_json: bool, command: str) -> None:
    """Train, write report.html, summary.json and clients.csv, and show the run in a few lines."""
    if not as_json:
        errors.print(
            f"[bold]{training.name}[/]: {training.partition.owners} clients of {training.data.name}, "
            f"{training.rounds} rounds, scheme {training.scheme}"
        )
    with progress(training.rounds, quiet=as_json) as step:
        result = training.run(
            progress=lambda r: step(f"round {r.index + 1}: loss {r.loss:.3f}"),
            finished=partial(write_model, training, out, sampled_words(training.trust)),
        )
    path = write_sampled(result, out, command=command)
    facts = summarize_sampled(result)
    if as_json:
        print_json(facts | {"report": str(path)})
        return
    rounds, budget = len(result.rounds), training.budget_micros or 0
    expected, paid = format_micros(int(result.expected_micros)), format_micros(result.spent_micros // rounds)
    cap = "" if result.hard_cap_micros is None else f", never above {format_micros(result.hard_cap_micros)}"
    rows = (
        ("loss", f"{result.rounds[-1].loss:.4g} (before training {result.initial_loss:.4g})"),
        ("accuracy", f"{facts['final_accuracy']:.3f} (always the larger class: {facts['baseline_accuracy']:.3f})"),
        ("a round costs", f"{paid} on average, {expected} expected, budget {format_micros(budget)}{cap}"),
        (
            "clients paid",
            f"{facts['clients_paid']} of {facts['clients']}, average q {facts['average_participation']:.3f}",
        ),
        ("rules", "all kept" if all(facts["guarantees"].values()) else "[bold red]broken: see the report[/]"),
    )
    _show_facts(rows, path, sampled_words(training.trust))
