"""What a reproduction yields: for each table or figure of a paper, the claim, our figures, and a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["Item", "Reproduction", "Step"]

Step = Callable[[str], None]


@dataclass(frozen=True)
class Item:
    """One table or figure. `files` lie in the output folder; `numbers` is JSON-ready."""

    key: str
    title: str
    claim: str
    verdict: Literal["reproduced", "differs"]
    reason: str
    files: tuple[str, ...] = ()
    numbers: dict[str, object] = field(default_factory=dict)


class Reproduction(Protocol):
    """A paper's experiments: writes plots and CSV into a folder and returns an item for each."""

    def __call__(
        self, out_dir: Path, *, quick: bool, seeds: int, data_dir: Path | None, step: Step
    ) -> tuple[Item, ...]:
        """Run everything; `step` is told what is being done."""
