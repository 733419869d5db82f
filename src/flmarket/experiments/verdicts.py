"""The one rule by which every claim is judged: an interval from independent runs, and what it says of the claim.

A claim is about means: "this difference is above 0", "this ratio is between 0.92 and 0.96", "this curve grows". Runs
are seeds, or random profiles; what is compared is computed on the same ones and subtracted run by run (paired). With
Student's interval at `LEVEL` (Clopper and Pearson's for a share of yes and no) a claim is

- **reproduced** if the interval lies where the claim has it, for each of its parts;
- **differs** if the interval of some part lies outside, at a level that allows for the number of parts (Bonferroni);
- **undecided** otherwise, one run included: then the text says about how many runs would decide.

So noise alone is called a difference, or a success, in at most one of a hundred claims. A statement without chance in
it (`exact`) is so or not. What would break it: runs that are not independent, or a mean over so few runs of so heavy a
tail that Student's interval misses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf, isfinite, sqrt
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincinv, stdtrit

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
            no = self.runs - self.yes
            low = float(betaincinv(self.yes, no + 1, tail)) if self.yes else 0.0
            return low, float(betaincinv(self.yes + 1, no, 1 - tail)) if no else 1.0
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
    if any(_outside(one.interval(strict), above, below, or_equal) for one in found.values()):
        return Finding("differs", text)
    open_ = {name: one for name, one in found.items() if not _inside(one.interval(), above, below, or_equal)}
    if not open_:
        return Finding("reproduced", text)
    return Finding(
        "undecided", text + max((_power(one, above, below) for one in open_.values()), key=lambda p: p[0])[1]
    )


def _inside(interval: tuple[float, float], above: float, below: float, or_equal: bool) -> bool:
    low, high = interval
    return (low > above or (or_equal and low == above) or above == -inf) and (
        high < below or (or_equal and high == below) or below == inf
    )


def _outside(interval: tuple[float, float], above: float, below: float, or_equal: bool) -> bool:
    low, high = interval
    if or_equal:
        return high < above or low > below
    return (isfinite(above) and high <= above) or (isfinite(below) and low >= below)


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
    against = sum(_outside(one.interval(strict), 0.0, inf, True) for one in each)
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
