"""What a reproduction yields, and how a paper joins `flmarket reproduce`.

A paper is a module of this package. It joins by having one of

- `ITEMS`, a dictionary from a short key ("fig7") to a `Reproduction` that yields the items of that table or figure.
  Each entry is a unit of work: `flmarket reproduce PAPER:fig7` runs it alone, finished ones are kept and skipped when
  the command is run again, and several run side by side in processes of their own;
- only `reproduce`, itself a `Reproduction`: then the whole paper is one unit.

Either way the functions must be found by name in the imported module (processes look them up), write plots and CSV into
`out_dir`, use no randomness but seeds 0 … `seeds` − 1, and name files after their item. Keys of items begin with the
paper's ("flm22-fig7-iid"), since `flmarket.experiments.claims` finds the evidence for each claim of a paper by key. A
data set or an optional package that is missing may simply raise (`DataUnavailable`, `MissingDependency`): the unit then
appears as not run, with the error as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["Check", "Item", "Reproduction", "Step", "Verdict", "combined", "from_checks"]

Step = Callable[[str], None]
Verdict = Literal["reproduced", "differs", "not run"]


@dataclass(frozen=True)
class Check:
    """One statement that an item tests; `key` is the item's own name for it.

    A statement `beyond` the paper is ours: it does not count in the verdict of an item that tests the paper's.
    """

    key: str
    claim: str
    verdict: Verdict
    evidence: str
    beyond: bool = False

    @classmethod
    def of(cls, key: str, claim: str, holds: bool, evidence: str, *, beyond: bool = False) -> Check:
        """A statement that was tested."""
        return cls(key, claim, "reproduced" if holds else "differs", evidence, beyond)

    @classmethod
    def skipped(cls, key: str, claim: str, why: str, *, beyond: bool = False) -> Check:
        """A statement that could not be tested, and why."""
        return cls(key, claim, "not run", why, beyond)


@dataclass(frozen=True)
class Item:
    """One table or figure. `files` lie in the output folder; `numbers` is JSON-ready.

    `beside` sets printed figures next to ours, in rows of (what, the paper's, ours). `checks` are the statements that
    make up the verdict where there are several, `note` says what else one should know.
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


class Reproduction(Protocol):
    """A paper's experiments, or one of them: writes plots and CSV into a folder and returns an item for each."""

    def __call__(
        self, out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step
    ) -> Item | tuple[Item, ...]:
        """Run everything; `step` is told what is being done."""


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several statements: a single difference counts, and what was not run adds nothing."""
    tested = [verdict for verdict in verdicts if verdict != "not run"]
    if not tested:
        return "not run"
    return "differs" if "differs" in tested else "reproduced"


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
    marks = {"reproduced": "as claimed", "differs": "not as claimed", "not run": "not run"}
    reason = " ".join(f"{check.evidence} ({marks[check.verdict]})." for check in checks)
    return Item(
        key,
        title,
        " ".join(check.claim for check in checks),
        combined(papers_own or [check.verdict for check in checks]),
        reason,
        files,
        dict(numbers or {}),
        tuple(checks),
        tuple(beside),
        note.strip(),
    )
