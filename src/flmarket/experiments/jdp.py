"""JDP's Figures 2 to 5, and two questions beyond it: several adversaries, and what the choice of a group gives away.

Scale. The paper trains for as long as it takes at a rate of 0.001; here a client holds 300 records, a round is 20
steps at a rate of 0.015 and there are 6 rounds, so that all of Figure 3 fits in twenty minutes on two cores. Levels are
therefore ours, orders the paper's. The clip is loose (4, where a usual update is 1 long), so that it does not decide;
averaging is also run with a clip of 1. Figures 4 and 5 and the adversaries use softmax regression, where a
run takes a second and several seeds are cheap.

This setting was chosen after a look at six others on MNIST, mostly with seed 0, because in some of them the attack cost
averaging nothing to compare rules by (docs/jdp.md lists them). So Figure 3 is about the order of rules where the attack
does harm, not about how often it does.

Noise. The paper leaves the sensitivity of M3 open. With 2C, which protects a client, Gaussian noise at its ε's drowns a
network of 16,784 parameters; Figure 3 shows that curve too. All others take 2C/d, which assumes that one of d records
moves the clipped update by no more than that, and which nothing enforces (docs/errata.md E20). What the noise really
guarantees a client is in the numbers of each item.

Verdicts are on differences paired by seed. An order holds if no step of it is reversed by more than two standard errors
and the step the paper makes most of, ours over plain averaging, is positive by more than two at the largest ε.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.aggregation.robust import SENSITIVITIES, ExponentialChoice, LeaveKOut, coverage
from flmarket.audit.choice import ChoiceAudit, audit_choice
from flmarket.experiments.items import Check, Item, Step, from_checks
from flmarket.experiments.jdp_runs import Runner, Setting
from flmarket.experiments.jdp_selection import figure_2
from flmarket.experiments.stack import Trend
from flmarket.report import Curve, CurveSet, write_curves

__all__ = ["ITEMS", "Scale"]

FloatArray = NDArray[np.float64]
EPSILONS = (1.0, 3.0, 10.0, 30.0)
TIGHT_CLIP = 1.0
TRAINED = 0.25  # of ten classes: a model below this accuracy has learnt too little to compare attacks on
NO_ATTACK, ATTACKED = "no attack, averaging", "attack, averaging"
OURS, OURS_RECORD = "attack, ours as printed", "attack, ours with Δ = 1/|V|"
PEERS = {"attack, median": "median", "attack, Multi-Krum": "multi-krum"}
SOUND = "no attack, noise that protects a client"


@dataclass(frozen=True)
class Scale:
    """How much of everything for one data set."""

    base: Setting
    epsilons: tuple[float, ...]
    most_seeds: int
    peers: bool = True


MNIST = Setting(
    data="mnist", model="mnist-cnn", rounds=6, steps=20, batch_size=16, learning_rate=0.015, clip=4.0, validation=300,
    test=1500,
)  # fmt: skip
CIFAR = Setting(
    data="cifar10", model="cifar-cnn", records_per_client=400, rounds=10, steps=20, batch_size=16, learning_rate=0.03,
    clip=4.0, target=3, validation=200, test=800,
)  # fmt: skip
QUICK_MNIST = replace(MNIST, rounds=4, steps=12, learning_rate=0.02, validation=200, test=1000)
FULL = {"mnist": Scale(MNIST, EPSILONS, 1000), "cifar10": Scale(CIFAR, (10.0, 100.0), 3, peers=False)}
QUICK = {
    "mnist": Scale(QUICK_MNIST, (3.0, 30.0), 2, peers=False),
    "cifar10": Scale(replace(CIFAR, model="softmax"), (3.0, 30.0), 2),
}
# softmax regression: its updates are longer than a network's, and a round's clip is their usual length
SOFTMAX = Setting(
    data="mnist", model="softmax", learning_rate=0.05, records_per_client=100, rounds=10, steps=10, epsilon=10.0
)


def figure_3_mnist(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """Accuracy against ε on MNIST, with a convolutional network."""
    return _figure_3(out_dir, "mnist", quick, seeds, data_dir, step)


def figure_3_cifar10(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """The same on the CIFAR-10 subset; softmax regression in quick runs."""
    return _figure_3(out_dir, "cifar10", quick, seeds, data_dir, step)


def _figure_3(out_dir: Path, name: str, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    scale = (QUICK if quick else FULL)[name]
    runner, count = Runner(out_dir, data_dir, step, f"accuracy against ε on {name}"), min(seeds, scale.most_seeds)
    lines = methods(scale.base, peers=scale.peers)
    settings = {label: [replace(one, epsilon=e) for e in scale.epsilons] for label, one in lines.items()}
    tight = [replace(settings[label][-1], clip=TIGHT_CLIP) for label in (NO_ATTACK, ATTACKED)]
    found = runner.accuracies([*(one for line in settings.values() for one in line), *tight], count)
    accuracy = {label: np.stack([found[one] for one in line], axis=1) for label, line in settings.items()}
    clipped = _mean_error(100 * (found[tight[0]] - found[tight[1]]))
    stem = f"jdp-fig3-{name}"
    x = np.log10(scale.epsilons)
    files = _written(
        out_dir, stem, f"{name}, {scale.base.clients} clients, one adversary", "ε per upload (log10)", x, accuracy
    )
    real = [runner.measure(settings[ATTACKED][i], 0) for i in range(len(x))]
    kept_out = {
        label: [
            1.0 - float(np.mean([runner.measure(one, s).included or 0.0 for s in range(count)]))
            for one in settings[label]
        ]
        for label in (OURS, OURS_RECORD)
    }
    return from_checks(
        stem,
        f"Accuracy against ε on {name} (Fig. 3)",
        (order_check(accuracy, scale.epsilons), gap_check(accuracy)),
        files=files,
        numbers={
            "epsilon": list(scale.epsilons),
            "accuracy": {label: values.mean(axis=0).tolist() for label, values in accuracy.items()},
            "accuracy_by_seed": {label: values.tolist() for label, values in accuracy.items()},
            "adversary_left_out": kept_out,
            "client_epsilon_per_round": [one.client_epsilon_per_round for one in real],
            "client_epsilon_total": [one.client_epsilon_total for one in real],
            "seeds": count,
        },
        note=_noise_note(accuracy, scale.epsilons, [one.client_epsilon_per_round for one in real], kept_out)
        + f" With a tighter clip ({TIGHT_CLIP:g} instead of {scale.base.clip:g}) averaging loses "
        f"{_signed(*clipped, unit=1)} to the same adversary." + (" One seed: no errors." if count == 1 else ""),
    )


def methods(base: Setting, *, peers: bool) -> dict[str, Setting]:
    """The curves of Figure 3: labels and settings; ε is still open."""
    attacked = replace(base, adversary="dirty-label", adversaries=1)
    lines = {
        NO_ATTACK: base,
        ATTACKED: attacked,
        OURS: replace(attacked, rule="leave-one-out"),
        OURS_RECORD: replace(attacked, rule="leave-one-out", sensitivity="record"),
        SOUND: replace(base, unit="client", calibration="analytic"),
    }
    return lines | ({label: replace(attacked, rule=rule) for label, rule in PEERS.items()} if peers else {})


def order_check(accuracy: Mapping[str, FloatArray], epsilons: Sequence[float]) -> Check:
    """No attack ≥ ours ≥ averaging under attack, wherever the model has learnt something."""
    learnt = accuracy[NO_ATTACK].mean(axis=0) >= TRAINED
    first, second = accuracy[NO_ATTACK] - accuracy[OURS], accuracy[OURS] - accuracy[ATTACKED]
    reversed_ = [
        f"{what} at ε = {e:g}"
        for what, gap in (("no attack < ours", first), ("ours < averaging", second))
        for e, (mean, error), judged in zip(epsilons, map(_mean_error, gap.T), learnt, strict=True)
        if judged and mean < -2 * error
    ]
    mean, error = _mean_error(second[:, -1])
    holds = not reversed_ and mean > 2 * error and bool(learnt[-1])
    said = (
        f"At ε = {epsilons[-1]:g}: no attack {_points(accuracy[NO_ATTACK])}, ours {_points(accuracy[OURS])}, averaging "
    )
    said += f"{_points(accuracy[ATTACKED])}; ours over averaging {_signed(mean, error)}"
    said += f"; reversed beyond noise: {', '.join(reversed_)}" if reversed_ else "; no step reversed beyond noise"
    return Check.of("order", "Accuracy: no attack ≥ ours under attack ≥ averaging under attack.", holds, said)


def gap_check(accuracy: Mapping[str, FloatArray]) -> Check:
    """Averaging loses 4 to 5 points, ours 1 to 2: within a point of either, at the largest ε."""
    losses = {label: _mean_error(100 * (accuracy[NO_ATTACK] - accuracy[label])[:, -1]) for label in (ATTACKED, OURS)}
    (averaging, _), (ours, _) = losses.values()
    said = ", ".join(f"{label.split(', ')[1]} loses {_signed(*loss, unit=1)}" for label, loss in losses.items())
    return Check.of(
        "gap",
        "One dirty-label adversary of 20 costs averaging 4 to 5 points, ours 1 to 2.",
        3 <= averaging <= 6 and 0 <= ours <= 3 and ours < averaging,
        said,
    )


def _noise_note(
    accuracy: Mapping[str, FloatArray],
    epsilons: Sequence[float],
    real: Sequence[float],
    kept_out: Mapping[str, Sequence[float]],
) -> str:
    sound = accuracy[SOUND].mean(axis=0)
    return (
        f"Noise scaled to 2C/d at ε = {epsilons[0]:g} … {epsilons[-1]:g} guarantees a client only ε = {real[0]:,.0f} … "
        f"{real[-1]:,.0f} per round; noise that really protects a client at these ε gives accuracies of "
        f"{sound.min():.2f} to {sound.max():.2f}. The adversary is left out in {kept_out[OURS][0]:.0%} (smallest ε) to "
        f"{kept_out[OURS][-1]:.0%} (largest) of rounds as printed, {kept_out[OURS_RECORD][0]:.0%} to "
        f"{kept_out[OURS_RECORD][-1]:.0%} with Δ = 1/|V|; chance is 5%."
    )


def figure_4(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> tuple[Item, ...]:
    """Accuracy of ours against ε, and of all methods against the number of clients."""
    base = replace(SOFTMAX, rounds=5) if quick else SOFTMAX
    runner, count = Runner(out_dir, data_dir, step, "against clients"), seeds if quick else max(seeds, 10)
    epsilons, clients = (1.0, 3.0, 10.0, 30.0, 100.0), (5, 10, 20, 40) if quick else (5, 10, 20, 40, 80)
    ours = replace(base, rule="leave-one-out", adversary="dirty-label", adversaries=1)
    by_epsilon = [replace(ours, epsilon=e) for e in epsilons]
    lines = methods(base, peers=False)
    by_clients = {label: [replace(lines[label], clients=m) for m in clients] for label in (NO_ATTACK, ATTACKED, OURS)}
    found = runner.accuracies([*by_epsilon, *(one for line in by_clients.values() for one in line)], count)
    against_epsilon = np.stack([found[one] for one in by_epsilon], axis=1)
    against = {label: np.stack([found[one] for one in line], axis=1) for label, line in by_clients.items()}
    return (
        _trend_item(
            out_dir,
            "jdp-fig4-epsilon",
            "Accuracy of ours against ε (Fig. 4a, b)",
            "ε per upload (log10)",
            np.log10(epsilons),
            {OURS: against_epsilon},
            OURS,
            "Accuracy grows with the privacy budget.",
        ),
        _trend_item(
            out_dir,
            "jdp-fig4-clients",
            "Accuracy against the number of clients (Fig. 4c, d)",
            "clients m, one adversary",
            np.array(clients, dtype=float),
            against,
            OURS,
            "Accuracy grows with the number of clients, of whom one is malicious.",
        ),
    )


def figure_5(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """Accuracy against the size of the groups, 60 clients of whom one attacks, beside leave-one-out."""
    base = replace(SOFTMAX, clients=60, adversary="dirty-label", adversaries=1, rounds=4 if quick else SOFTMAX.rounds)
    runner, count = Runner(out_dir, data_dir, step, "grouping"), seeds if quick else max(seeds, 10)
    sizes = (5, 10, 15, 20, 30)
    groups = [replace(base, rule="partition", options=(("size", size),)) for size in sizes]
    alone = replace(base, rule="leave-one-out")
    found = runner.accuracies([*groups, alone], count)
    values = np.stack([found[one] for one in groups], axis=1)
    lines = {"groups": values, "leave-one-out": np.repeat(found[alone][:, None], len(sizes), axis=1)}
    x = np.array(sizes, dtype=float)
    files = _written(out_dir, "jdp-fig5", "60 clients, one adversary", "clients in a group", x, lines)
    trend = Trend.of(values, +1)
    mean, error = _mean_error(found[alone] - values[:, -1])
    checks = (
        Check.of("size", "Accuracy grows with the size of the groups.", trend.holds, f"Accuracy {trend}"),
        Check.of(
            "leave-one-out",
            "Leave-one-out is better than any partition.",
            mean > 2 * error,
            f"leave-one-out over groups of {sizes[-1]}: {_signed(mean, error)}",
        ),
    )
    note = "Larger groups average more noise away; that is what decides here, not the adversary."
    title = "Accuracy against the grouping (Fig. 5)"
    numbers = {"size": list(sizes), "accuracy": {k: v.mean(axis=0).tolist() for k, v in lines.items()}, "seeds": count}
    return from_checks("jdp-fig5", title, checks, files=files, numbers=numbers, note=note)


def several_adversaries(
    out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step
) -> tuple[Item, ...]:
    """Accuracy against the number of adversaries, for two attacks and seven rules (the paper's future work)."""
    base = replace(SOFTMAX, rounds=5) if quick else SOFTMAX
    count = seeds if quick else max(seeds, 5)
    numbers = (0, 1, 2, 4, 6, 8) if not quick else (0, 1, 4, 8)
    expected, out = (("adversaries", 8),), LeaveKOut(k=8, count=60)
    rules = {
        "averaging": replace(base, rule="average"),
        "leave-one-out": replace(base, rule="leave-one-out", sensitivity="record"),
        "leave-8-out, 60 groups": replace(
            base, rule="leave-k-out", sensitivity="record", options=(("count", out.count), ("k", out.k))
        ),
        "median": replace(base, rule="median"),
        "trimmed mean": replace(base, rule="trimmed-mean", options=expected),
        "Multi-Krum": replace(base, rule="multi-krum", options=expected),
        "geometric median": replace(base, rule="geometric-median"),
    }
    items = []
    for attack in ("dirty-label", "sign-flip"):
        runner = Runner(out_dir, data_dir, step, f"{attack} adversaries")
        lines = {
            label: [replace(one, adversary=attack if f else None, adversaries=f) for f in numbers]
            for label, one in rules.items()
        }
        found = runner.accuracies([one for line in lines.values() for one in line], count)
        accuracy = {label: np.stack([found[one] for one in line], axis=1) for label, line in lines.items()}
        items.append(_adversaries_item(out_dir, attack, numbers, accuracy, out, base.clients))
    return tuple(items)


def _adversaries_item(
    out_dir: Path,
    attack: str,
    numbers: Sequence[int],
    accuracy: dict[str, FloatArray],
    out: LeaveKOut,
    clients: int,
) -> Item:
    stem, x = f"jdp-adversaries-{attack}", np.array(numbers, dtype=float)
    files = _written(out_dir, stem, f"{attack}, {clients} clients", "adversaries", x, accuracy)
    losses = {label: 100 * (values[:, :1] - values[:, 1:]) for label, values in accuracy.items()}
    one = _mean_error(losses["averaging"][:, 0] - losses["leave-one-out"][:, 0])
    many = _mean_error(losses["averaging"][:, -1] - losses["leave-one-out"][:, -1])
    wide = _mean_error(losses["leave-one-out"][:, -1] - losses["leave-8-out, 60 groups"][:, -1])
    checks = (
        Check.of(
            "one", "Leave-one-out loses less than averaging to one adversary.", one[0] > 2 * one[1],
            f"It saves {_signed(*one, unit=1)}", beyond=True,
        ),
        Check.of(
            "several", f"It saves little from {numbers[-1]}; leaving several out saves more.", wide[0] > 2 * wide[1],
            f"Leave-one-out saves {_signed(*many, unit=1)}, leaving {out.k} out another {_signed(*wide, unit=1)}",
            beyond=True,
        ),
    )  # fmt: skip
    covered = ", ".join(f"{coverage(clients, f, out):.0%} at {f}" for f in numbers if f)
    losing = "; ".join(f"{label} {value[:, -1].mean():.1f}" for label, value in losses.items())
    return from_checks(
        stem,
        f"Several adversaries: {attack} (beyond the paper)",
        checks,
        files=files,
        numbers={"adversaries": list(numbers), "accuracy": {k: v.mean(axis=0).tolist() for k, v in accuracy.items()}},
        note=f"Points lost to {numbers[-1]} adversaries: {losing}. Chance that some of the {out.count} groups is free "
        f"of adversaries: {covered}.",
    )


def choice_privacy(out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step) -> Item:
    """What one choice gives away about one upload or one validation record, exactly and by an audit from samples."""
    del data_dir
    epsilons, clients, validation = (0.1, 0.3, 1.0, 3.0), 20, 1000
    rng, trials = np.random.default_rng(seeds), 20_000 if quick else 200_000
    seen: dict[tuple[str, str], list[ChoiceAudit]] = {}
    for sensitivity in SENSITIVITIES:
        for changed in ("client", "record"):
            step(f"audit of the choice, {sensitivity} sensitivity, {changed} changed")
            seen[sensitivity, changed] = [
                audit_choice(
                    ExponentialChoice(epsilon=e, validation=validation, sensitivity=sensitivity),
                    changed,
                    clients,
                    trials=trials,
                    rng=rng,
                )
                for e in epsilons
            ]
    lines = {
        f"{sensitivity}: {what}": np.array([[getattr(one, field) for one in seen[sensitivity, "client"]]])
        for sensitivity in SENSITIVITIES
        for what, field in (("exact", "epsilon_exact"), ("from samples", "epsilon_lower"))
    }
    lines["asked for"] = np.array([epsilons])
    stem = "jdp-choice"
    files = _written(
        out_dir, stem, "One client changes her upload", "ε asked for (log10)", np.log10(epsilons), lines,
        y_label="ε given away", log_y=True,
    )  # fmt: skip
    paper, worst = seen["paper", "client"], seen["paper", "client"][-1]
    sound = [one for key in (("client", "client"), ("record", "record")) for one in seen[key]]
    checks = (
        Check.of(
            "paper", "With Δ = 1/(m−1) the choice is ε-DP.", all(one.as_asked for one in paper),
            f"asked for ε = {worst.epsilon_asked:g} it gives away {worst.epsilon_exact:.3g} about an upload on a "
            f"crafted pair (from samples at least {worst.epsilon_lower:.3g}; the bound is "
            f"{worst.epsilon_promised:.3g}) (E10)",
        ),
        Check.of(
            "sound", "With Δ = 1 it is for an upload, with Δ = 1/|V| for a validation record.",
            all(one.as_asked and one.holds for one in sound),
            f"at most {max(one.epsilon_exact / one.epsilon_asked for one in sound):.2f} of the ε asked for was found",
            beyond=True,
        ),
    )  # fmt: skip
    numbers: dict[str, object] = {
        f"{s}, {c} changed": [
            {"asked": a.epsilon_asked, "exact": a.epsilon_exact, "lower": a.epsilon_lower, "bound": a.epsilon_promised}
            for a in audits
        ]
        for (s, c), audits in seen.items()
    }
    return from_checks(stem, "What the choice of a group gives away", checks, files=files, numbers=numbers)


ITEMS = {
    "fig2": figure_2,
    "fig3-mnist": figure_3_mnist,
    "fig3-cifar10": figure_3_cifar10,
    "fig4": figure_4,
    "fig5": figure_5,
    "adversaries": several_adversaries,
    "choice": choice_privacy,
}


def _trend_item(
    out_dir: Path,
    stem: str,
    title: str,
    axis: str,
    x: FloatArray,
    lines: Mapping[str, FloatArray],
    judged: str,
    claim: str,
) -> Item:
    files = _written(out_dir, stem, title, axis, x, lines)
    trend = Trend.of(lines[judged], +1)
    return from_checks(
        stem,
        title,
        (Check.of("trend", claim, trend.holds, f"Accuracy {trend}"),),
        files=files,
        numbers={"x": x.tolist(), "accuracy": {label: v.mean(axis=0).tolist() for label, v in lines.items()}},
    )


def _written(
    out_dir: Path,
    stem: str,
    title: str,
    axis: str,
    x: FloatArray,
    lines: Mapping[str, FloatArray],
    *,
    y_label: str = "accuracy",
    log_y: bool = False,
) -> tuple[str, ...]:
    curves = []
    for label, values in lines.items():
        error = values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
        band = None if error is None else tuple(error.tolist())
        curves.append(Curve(label, tuple(np.round(x, 3).tolist()), tuple(values.mean(axis=0).tolist()), band))
    write_curves(CurveSet(title, axis, y_label, tuple(curves)), out_dir, stem, log_y=log_y)
    return tuple(f"{stem}.{ending}" for ending in ("png", "svg", "csv"))


def _mean_error(values: FloatArray) -> tuple[float, float]:
    """Mean over seeds and its standard error; one seed has none, which counts as 0."""
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
    return float(values.mean()), error


def _points(values: FloatArray) -> str:
    return f"{100 * values[:, -1].mean():.1f}%"


def _signed(mean: float, error: float, *, unit: float = 100.0) -> str:
    return f"{unit * mean:+.1f} ± {unit * error:.1f} points"
