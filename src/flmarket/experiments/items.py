"""What a reproduction yields, how its claims are judged, and how a paper joins `flmarket reproduce`.

A paper is a module of this package with `ITEMS`, a dictionary from a short key ("fig7") to a function of a `Job` that
yields the items of that table or figure, each gathered in a `Sheet`. Each entry is a unit of work: `flmarket reproduce
PAPER:fig7` runs it alone, finished ones are kept and skipped when the command is run again, and several run side by
side in processes.

The functions must be found by name in the imported module (processes look them up), write plots and CSV into the job's
folder, use no randomness but its seeds, and name files after their item. Keys of items begin with the paper's
("flm22-fig7-iid"), since `flmarket.experiments.items` finds the evidence for each claim of a paper by key. A data set
or an optional package that is missing may simply raise (`DataUnavailable`, `MissingDependency`): the unit then appears
as not run, with the error as the reason.

Every claim is judged by one rule: an interval from independent runs, and what it says of the claim.

A claim is about means: "this difference is above 0", "this ratio is between 0.92 and 0.96", "this curve grows". Runs
are seeds, or random profiles; what is compared is computed on the same ones and subtracted run by run (paired). With
Student's interval at `LEVEL` (Clopper and Pearson's for a share of yes and no) a claim is

- **reproduced** if the interval lies where the claim has it, for each of its parts;
- **differs** if the interval of some part lies outside, at a level that allows for the number of parts (Bonferroni);
- **undecided** otherwise, one run included: then the text says about how many runs would decide.

So noise alone is called a difference, or a success, in at most one of a hundred claims. A statement without chance in
it (`exact`) is so or not. What would break it: runs that are not independent, or a mean over so few runs of so heavy a
tail that Student's interval misses it.

`CLAIMS` are the papers' experimental claims, each with the items that test it: a table that the index page begins with.
A claim's evidence is a list of patterns over the keys of items ("flm22-fig7-*"), with "#name" for one of an item's
checks. Its verdict is theirs together: a difference counts, then doubt (`combined`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import wraps
from math import ceil, inf, isfinite, sqrt
from operator import ge, gt
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from flmarket.audit.privacy import rate_at_least, rate_at_most
from flmarket.bids import FloatArray
from flmarket.files import write_files
from flmarket.report import Curve, CurveSet, write_curves
from flmarket.report.comparison import ClaimRow

Verdict = Literal["reproduced", "differs", "undecided", "not run"]
LEVEL = 0.99


@dataclass(frozen=True)
class Estimate:
    """A mean over independent runs with its standard error; `yes` counts successes where each run is yes or no."""

    mean: float
    se: float
    runs: int
    yes: int | None = None

    @classmethod
    def of(cls, values: ArrayLike) -> Estimate:
        """From one value per run; the mean of an endless or missing value is known to nobody."""
        array = np.asarray(values, dtype=np.float64).ravel()
        if array.size < 2 or not np.isfinite(array).all():
            with np.errstate(invalid="ignore"):
                return cls(float(array.mean()) if array.size else float("nan"), inf, array.size)
        return cls(float(array.mean()), float(array.std(ddof=1) / sqrt(array.size)), array.size)

    @classmethod
    def share(cls, hits: ArrayLike) -> Estimate:
        """From one yes or no per run."""
        array = np.asarray(hits, dtype=bool).ravel()
        p = float(array.mean()) if array.size else float("nan")
        return cls(p, sqrt(p * (1 - p) / array.size) if array.size else inf, array.size, int(array.sum()))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Where the true mean is, with this confidence."""
        if not isfinite(self.se):
            return -inf, inf
        tail = (1 - level) / 2
        if self.yes is not None:
            return rate_at_least(self.yes, self.runs, tail), rate_at_most(self.yes, self.runs, tail)
        reach = float(stdtrit(self.runs - 1, 1 - tail)) * self.se
        return self.mean - reach, self.mean + reach

    def __str__(self) -> str:
        error = f" ± {self.se:.2g}" if isfinite(self.se) else ""
        return f"{self.mean:.3g}{error}"


@dataclass(frozen=True)
class Finding:
    """A verdict with the numbers behind it."""

    verdict: Verdict
    text: str

    def told(self, text: str) -> Finding:
        """The same in other words."""
        return Finding(self.verdict, text)

    def __add__(self, more: str) -> Finding:
        """The same with something to add."""
        return Finding(self.verdict, self.text + more)

    def __and__(self, other: Finding) -> Finding:
        """Both statements together."""
        return Finding(combined((self.verdict, other.verdict)), f"{self.text}; {other.text}")


def exact(holds: bool, text: str) -> Finding:
    """A statement without chance in it."""
    return Finding("reproduced" if holds else "differs", text)


def missing(what: str) -> Finding:
    """Undecided because something is not there."""
    return Finding("undecided", what)


def judged(
    found: Mapping[str, Estimate], *, above: float = -inf, below: float = inf, or_equal: bool = False, unit: str = ""
) -> Finding:
    """Whether every mean lies above `above` and below `below`; `or_equal` admits the bounds themselves."""
    if not found:
        return missing("nothing to compare")
    strict = 1 - (1 - LEVEL) / len(found)
    text = ", ".join(f"{name} {one}{unit}".lstrip() for name, one in found.items())
    if not all(_within(*one.interval(strict)[::-1], above, below, or_equal) for one in found.values()):
        return Finding("differs", text)
    unsure = [one for one in found.values() if not _within(*one.interval(), above, below, or_equal)]
    if not unsure:
        return Finding("reproduced", text)
    return Finding("undecided", text + max((_power(one, above, below) for one in unsure), key=lambda p: p[0])[1])


def _within(low: float, high: float, above: float, below: float, or_equal: bool) -> bool:
    """Whether all of an interval lies there; with its ends exchanged, whether some of it may."""
    more = ge if or_equal else gt
    return (above == -inf or more(low, above)) and (below == inf or more(below, high))


def _power(one: Estimate, above: float, below: float) -> tuple[float, str]:
    """How many runs would decide if the mean is what it seems to be."""
    if not isfinite(one.se):
        return inf, f" ({'one run has' if one.runs == 1 else 'these runs have'} no interval)"
    low, high = one.interval()
    gap = min(abs(one.mean - bound) for bound in (above, below) if isfinite(bound))
    reach = (high - low) / 2
    needed = one.runs * (reach / gap) ** 2 if gap > reach * 1e-3 else inf
    few = f"about {_round(needed):,}" if isfinite(needed) else "far more"
    return needed, f" (within {low:.3g} to {high:.3g} after {one.runs:,} runs; {few} would decide)"


def _round(number: float) -> int:
    """Up to two digits: it is an order of magnitude."""
    digit = int(10 ** max(0, len(str(int(number))) - 2))
    return ceil(number / digit) * digit


def trend(values: ArrayLike, sign: int, *, steps: bool = True, diminishing: bool = False) -> Finding:
    """Whether a curve, (runs, points), goes in the direction of `sign`, and ever more slowly if that is claimed.

    From end to end; with `steps` a single step that clearly goes the other way refutes it.
    """
    array = sign * np.asarray(values, dtype=np.float64)
    parts = {"change": Estimate.of(array[:, -1] - array[:, 0])}
    if diminishing:
        middle = array.shape[1] // 2
        parts["slowing"] = Estimate.of(2 * array[:, middle] - array[:, 0] - array[:, -1])
    found = judged(parts, above=0.0)
    each = [Estimate.of(step) for step in np.diff(array, axis=1).T] if steps else []
    strict = 1 - (1 - LEVEL) / max(1, len(each))
    against = sum(one.interval(strict)[1] < 0.0 for one in each)
    first, last = sign * array[:, 0].mean(), sign * array[:, -1].mean()
    verb = "stays at" if first == last else "rises from" if last > first else "falls from"
    said = f"{verb} {first:.4g} to {last:.4g} (± {parts['change'].se:.2g})"
    if found.verdict == "undecided":
        said += "".join(_power(one, 0.0, inf)[1] for one in parts.values() if one.interval()[0] <= 0)
    if against:
        return Finding("differs", f"{said}, {against} of {len(each)} steps the other way")
    return Finding(found.verdict, said)


def combined(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for several statements: a difference counts, then doubt; what was not run adds nothing."""
    tested = set(verdicts) - {"not run"}
    for verdict in ("differs", "undecided", "reproduced"):
        if verdict in tested:
            return verdict
    return "not run"


def agreed(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for several draws of the seeds: theirs if it is the same every time, else undecided."""
    seen = set(verdicts)
    return seen.pop() if len(seen) == 1 else "undecided"


Step = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """How much to run, with which seeds, and where everything is; `step` is told what is being done."""

    out_dir: Path
    quick: bool
    seeds: range
    data_dir: Path | None = None
    step: Step = lambda _: None

    def runs(self, quick: int, full: int) -> range:
        """More seeds, so many times: for what is cheap, or noisy."""
        first, times = self.seeds.start, quick if self.quick else full
        return range(first, first + times * len(self.seeds))

    def kept(self, folder: str, setting: Mapping[str, object], run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """A run's numbers: read if a run of the same setting is in the folder, else measured and written there.

        So an interrupted figure goes on where it stopped. `setting` must have everything that decides the result.
        """
        key = json.dumps(setting, sort_keys=True)
        path = self.out_dir / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8"))["measured"]
            if isinstance(known, dict):
                return known
        except (OSError, ValueError, KeyError, TypeError):
            pass
        measured = dict(run())
        write_files(path.parent, {path.name: json.dumps({**json.loads(key), "measured": measured}, indent=1)})
        return measured


Reproduction = Callable[[Job], "Item | tuple[Item, ...]"]


def drawn_for(each: Iterable[str]) -> Callable[[Callable[[Job, str], Item]], Callable[[Job], tuple[Item, ...]]]:
    """Of a function that makes one item, the unit of work that makes it for each of these."""
    return lambda one: wraps(one)(lambda job: tuple(one(job, which) for which in each))


def line(
    label: str, x: ArrayLike, values: ArrayLike, color: int | None = None, dash: int | None = None
) -> Curve:  # fmt: skip
    """A curve through the means of values (runs, points), or (points,), with their standard errors."""
    rows = np.atleast_2d(np.asarray(values, dtype=np.float64))
    error = rows.std(axis=0, ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else None
    places = np.round(np.asarray(x, dtype=np.float64), 4).tolist()
    band = None if error is None else tuple(error.tolist())
    return Curve(label, tuple(places), tuple(rows.mean(axis=0).tolist()), band, color, dash)


def lines_of(x: ArrayLike, values: Mapping[str, ArrayLike]) -> list[Curve]:
    """A curve for each label."""
    return [line(label, x, rows) for label, rows in values.items()]


def means_of(values: Mapping[str, FloatArray]) -> dict[str, list[float]]:
    """Over runs, of values (runs, points), for each label."""
    return {label: rows.mean(axis=0).tolist() for label, rows in values.items()}


@dataclass(frozen=True)
class Check:
    """One statement that an item tests; `key` is the item's own name for it.

    A statement `beyond` the paper's is ours: it does not count in the verdict of an item that tests the paper's.
    """

    key: str
    claim: str
    verdict: Verdict
    evidence: str
    beyond: bool = False

    @classmethod
    def of(cls, key: str, claim: str, found: Finding, *, beyond: bool = False) -> Check:
        """A statement and what was found about it."""
        return cls(key, claim, found.verdict, found.text, beyond)


@dataclass(frozen=True)
class Item:
    """One table or figure. `files` lie in the output folder; `numbers` is JSON-ready.

    `beside` sets printed figures next to ours, in rows of (what, the paper's, ours). `checks` are the statements that
    make up the verdict, `note` says what else one should know.
    """

    key: str
    title: str
    claim: str
    verdict: Verdict
    reason: str
    files: tuple[str, ...] = ()
    numbers: dict[str, object] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    beside: tuple[tuple[str, str, str], ...] = ()
    note: str = ""


_MARKS = {"reproduced": "as claimed", "differs": "not as claimed", "undecided": "undecided", "not run": "not run"}


def from_checks(key: str, title: str, checks: Sequence[Check]) -> Item:
    """An item whose claim, verdict and reason are those of its checks together."""
    papers_own = [check.verdict for check in checks if not check.beyond]
    verdict = combined(papers_own or [check.verdict for check in checks])
    reason = " ".join(f"{check.evidence} ({_MARKS[check.verdict]})." for check in checks)
    return Item(key, title, " ".join(check.claim for check in checks), verdict, reason, checks=tuple(checks))


@dataclass
class Sheet:
    """An item in the making: what is drawn, stated and counted for one table or figure."""

    job: Job
    key: str
    title: str
    numbers: dict[str, object] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def draw(
        self, x: str, y: str, curves: Sequence[Curve], title: str = "", *, more: str = "", log_y: bool = False
    ) -> None:
        """Curves as PNG, SVG and CSV, by the item's title if they have none; `more` follows its key in file names."""
        stem = self.key + more
        write_curves(CurveSet(title or self.title, x, y, tuple(curves)), self.job.out_dir, stem, log_y=log_y)
        self.files += [f"{stem}.{kind}" for kind in ("png", "svg", "csv")]

    def check(self, key: str, claim: str, found: Finding, *, beyond: bool = False) -> None:
        """A statement and what was found about it."""
        self.checks.append(Check.of(key, claim, found, beyond=beyond))

    def item(self, note: str = "", *, beside: Sequence[tuple[str, str, str]] = ()) -> Item:
        """As it is now."""
        made = from_checks(self.key, self.title, self.checks)
        return replace(made, files=tuple(self.files), numbers=self.numbers, beside=tuple(beside), note=note.strip())


@dataclass(frozen=True)
class Paper:
    """Where the claims are from."""

    title: str
    source: str


PAPERS = {
    "flm21": Paper("FL-Market, 2021", "Zheng, Cao and Yoshikawa, first version"),
    "flm22": Paper("FL-Market, 2022", "Zheng, Cao and Yoshikawa, IEEE Big Data 2022"),
    "samp": Paper("Client sampling with private costs", "Liao, Luo, Feng and Zhang"),
    "stack": Paper("Trading data for learning", "Hu and Gong"),
    "jdp": Paper(
        "Robust federated learning with joint differential privacy", "Zhang, Zhu, Xiong, Zhou and Yu, IEEE TKDE"
    ),
    "beyond": Paper("Beyond the papers", "the same measures on questions that the papers leave open"),
}


@dataclass(frozen=True)
class Claim:
    """One statement of a paper's experiments."""

    paper: str
    where: str
    text: str
    evidence: tuple[str, ...]


_CLAIMS = {
    "flm21": (
        ("Fig. 5", "At the smallest budgets All-in buys nobody.", "fig5-*#nobody"),
        ("Fig. 5", "At small budgets MURBA outperforms All-in.", "fig5-*#small-budgets"),
        ("Fig. 5", "VarOpt beats BiasOpt (noise of the whole gradient).", "fig5-*#var-opt"),
        ("Fig. 5", "VarOpt beats BiasOpt (ERR as printed).", "fig5-*#var-opt-printed"),
        ("Fig. 5", "Highly sensitive: All-in is better at large budgets.", "fig5-high#large-budgets"),
        ("Fig. 6", "More owners lower every bound (noise of the whole gradient).", "fig6-*#owners"),
        ("Fig. 6", "More owners lower every bound (ERR as printed).", "fig6-*#owners-printed"),
        ("Fig. 6", "With few owners All-in may buy nobody.", "fig6-*#nobody"),
        ("Fig. 6", "The lead of MURBA with VarOpt shrinks as owners become many.", "fig6-*#lead"),
        ("Fig. 7", "MURBA's error bound falls as M grows.", "fig7-*"),
        ("Fig. 8", "Accuracy on Bank Marketing tends to grow with the budget.", "fig8-*#budget"),
        ("Fig. 8", "MURBA with VarOpt trains the most accurate models.", "fig8-*#murba"),
        ("Table 1", "MURBA's regret and IR violations are small: .0009 to .16.", "table1*"),
    ),
    "flm22": (
        ("Fig. 7", "DM-RegretNet's bound is below RegretNet's and M-RegretNet's.", "fig7-*#dm"),
        ("Fig. 7", "OptAggr is below ConvlAggr under every auction.", "fig7-*#opt-aggr"),
        ("Fig. 7", "The error bound still falls beyond B̄ = 1.", "fig7-*#budget"),
        ("Fig. 8", "DM-RegretNet never yields an invalid gradient.", "fig8-*#dm"),
        ("Fig. 8", "RegretNet and M-RegretNet often do.", "fig8-*#randomised"),
        ("Fig. 9", "DM-RegretNet trains more accurate models.", "fig9-*#dm"),
        ("Fig. 9", "OptAggr trains more accurate models than ConvlAggr.", "fig9-*#opt-aggr"),
        ("Fig. 10", "A larger M lowers M-RegretNet's regret and IR violation.", "fig10*"),
        (
            "Table I",
            "DM-RegretNet's regret and IR violation are below RegretNet's and M-RegretNet's.",
            "table1-*#order",
        ),
        ("Table I", "DM-RegretNet's are as printed (.02 to .06).", "table1-*#metric"),
    ),
    "samp": (
        ("Fig. 1", "The optimal q falls in the cost.", "q#falls"),
        ("Figs. 2, 3", "Loss is complete information ≤ prior-based ≤ uniform sampling.", "loss-*#order"),
        ("Fig. 2", "On MNIST prior-based ends at 94 % of uniform's loss.", "loss-mnist-uniform#ratio"),
        (
            "Fig. 2",
            "On EMNIST (Fashion-MNIST without its files) at 90 %.",
            "loss-emnist-uniform#ratio",
            "loss-fashion-mnist-uniform#ratio",
        ),
        ("Fig. 4", "Average q falls with the mean cost.", "average-q#falls"),
        ("Fig. 4", "It is above uniform sampling's (the text says lower).", "average-q#more"),
        ("Alg. 1", "Without a prior the objective nears the optimum as clients become many.", "prior"),
    ),
    "stack": (
        ("Fig. 2(a)", "The number of participants grows with the users.", "fig2a"),
        ("Fig. 2(b)", "It falls with the largest privacy value.", "fig2b"),
        ("Fig. 3(a)", "The server's utility grows with the users, ever more slowly.", "fig3a"),
        ("Fig. 3(b)", "It falls with the largest privacy value.", "fig3b"),
        ("eq. (17)", "The printed utility has the trends of Fig. 3.", "eq17"),
        ("Fig. 4(a)", "Users' mean utility falls with the users.", "fig4a#trend"),
        ("Fig. 4(a)", "So does its spread among them.", "fig4a#spread"),
        ("Fig. 4(b)", "It grows with the largest privacy value.", "fig4b#trend"),
        ("Fig. 4(b)", "So does its spread.", "fig4b#spread"),
        ("Alg. 2", "At the equilibrium no user gains by a deviation.", "equilibrium"),
    ),
    "jdp": (
        ("Fig. 2", "Clients and data selected grow with budget and candidates.", "fig2-*#growth"),
        ("Fig. 2", "M2 selects no fewer of either than M1.", "fig2-*#order"),
        ("Fig. 2(d)", "At 90 candidates M1 buys 35,000 records, M2 39,000.", "fig2-*#levels"),
        ("Thm. 3", "M1 is budget-balanced.", "promises#m1-budget"),
        ("§4.2", "M2 is budget-balanced.", "promises#m2-budget"),
        ("§4.2.1", "M1 is envy-free.", "promises#envy"),
        ("Alg. 4", "The choice of a group is ε-differentially private.", "choice#paper"),
        ("Fig. 3", "Accuracy: no attack ≥ the method under attack > plain averaging.", "fig3*#order"),
        ("Fig. 3", "The attack costs averaging 4 to 5 points, the method 1 to 2.", "fig3*#gap"),
        ("Fig. 3", "So it does with the adversary's step doubled.", "fig3*#boosted"),
        ("Fig. 4", "Accuracy grows with ε and, up to a point, with the number of clients.", "fig4*", "fig3*#epsilon"),
        ("Fig. 5", "Accuracy grows with the size of the groups.", "fig5#size"),
        ("Fig. 5", "Leave-one-out is better than any partition.", "fig5#leave-one-out"),
    ),
}
CLAIMS = tuple(
    Claim(paper, where, text, tuple(f"{paper}-{pattern}" for pattern in evidence))
    for paper, claims in _CLAIMS.items()
    for where, text, *evidence in claims
)


def judge(items: Iterable[Item], claims: Sequence[Claim] = CLAIMS) -> list[ClaimRow]:
    """Every claim with its verdict, from whatever items there are."""
    items, judged = list(items), []
    for claim in claims:
        found: list[tuple[str, Verdict, str]] = []
        for keys, _, name in (pattern.partition("#") for pattern in claim.evidence):
            for item in (item for item in items if fnmatchcase(item.key, keys)):
                said = [(check.verdict, check.evidence) for check in item.checks if check.key == name]
                for verdict, reason in said if name else [(item.verdict, item.reason)]:
                    found.append((item.key, verdict, f"{item.title}: {reason}"))
        verdict = combined(verdict for _, verdict, _ in found)
        used = tuple(dict.fromkeys(key for key, _, _ in found))
        judged.append(ClaimRow(claim.where, claim.text, verdict, used, tuple(reason for *_, reason in found)))
    return judged
