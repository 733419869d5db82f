"""What a reproduction yields, and how a paper joins `flmarket reproduce`.

A paper is a module of this package with `ITEMS`, a dictionary from a short key ("fig7") to a function of a `Job` that
yields the items of that table or figure. Each entry is a unit of work: `flmarket reproduce PAPER:fig7` runs it alone,
finished ones are kept and skipped when the command is run again, and several run side by side in processes.

The functions must be found by name in the imported module (processes look them up), write plots and CSV into the job's
folder, use no randomness but its seeds, and name files after their item. Keys of items begin with the paper's
("flm22-fig7-iid"), since `flmarket.experiments.claims` finds the evidence for each claim of a paper by key. A data set
or an optional package that is missing may simply raise (`DataUnavailable`, `MissingDependency`): the unit then appears
as not run, with the error as the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flmarket.experiments.verdicts import Finding, Verdict, combined
from flmarket.files import write_files
from flmarket.report import Curve, CurveSet, write_curves

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

    def written(
        self, stem: str, title: str, x_label: str, y_label: str, curves: Sequence[Curve], *, log_y: bool = False
    ) -> tuple[str, ...]:
        """Draw curves as PNG, SVG and CSV; returns the files' names."""
        write_curves(CurveSet(title, x_label, y_label, tuple(curves)), self.out_dir, stem, log_y=log_y)
        return tuple(f"{stem}.{kind}" for kind in ("png", "svg", "csv"))

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


def line(
    label: str, x: ArrayLike, values: ArrayLike, color: int | None = None, dash: int | None = None
) -> Curve:  # fmt: skip
    """A curve through the means of values (runs, points), or (points,), with their standard errors."""
    rows = np.atleast_2d(np.asarray(values, dtype=np.float64))
    error = rows.std(axis=0, ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else None
    places = np.round(np.asarray(x, dtype=np.float64), 4).tolist()
    band = None if error is None else tuple(error.tolist())
    return Curve(label, tuple(places), tuple(rows.mean(axis=0).tolist()), band, color, dash)


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


def from_checks(
    key: str,
    title: str,
    checks: Sequence[Check],
    *,
    files: tuple[str, ...] = (),
    numbers: Mapping[str, object] | None = None,
    beside: Sequence[tuple[str, str, str]] = (),
    note: str = "",
) -> Item:
    """An item whose claim, verdict and reason are those of its checks together."""
    papers_own = [check.verdict for check in checks if not check.beyond]
    return Item(
        key,
        title,
        " ".join(check.claim for check in checks),
        combined(papers_own or [check.verdict for check in checks]),
        " ".join(f"{check.evidence} ({_MARKS[check.verdict]})." for check in checks),
        files,
        dict(numbers or {}),
        tuple(checks),
        tuple(beside),
        note.strip(),
    )
