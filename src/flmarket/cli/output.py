"""What the commands share: consoles, progress bars, tables, and JSON that machines can rely on."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from flmarket.files import jsonable
from flmarket.trust import TrustWords

screen = Console(highlight=False)
errors = Console(stderr=True)  # progress and remarks, so that standard output stays clean for --json


def print_json(value: Any) -> None:
    """One strict JSON object on standard output; infinities become null."""
    print(json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False))


def answer(as_json: bool, value: Any, *shown: Any) -> None:
    """The value as JSON, or else what is shown to people."""
    if as_json:
        print_json(value)
    for one in () if as_json else shown:
        screen.print(one)


def print_path(label: str, path: Path) -> None:
    """A file that was written, whole and on one line, so that it can be copied."""
    screen.print(f"[bold]{label}[/]  {path}", soft_wrap=True)


def show_trust(trust: TrustWords) -> None:
    """Where records and noise are, and what is private against whom."""
    screen.print(f"[bold]{trust.place}[/]: {trust.text}")


def template(name: str) -> str:
    """One of the files that commands start from."""
    return (files("flmarket.cli") / "templates" / name).read_text(encoding="utf-8")


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[Any]:
    """A progress bar on standard error; yields a function to call with a short note after each step."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=quiet,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=total)
        yield lambda note: bar.update(task, advance=1, description=note)


def table(title: str, *columns: str, text: int = 1, rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table whose first `text` columns are words and whose others are numbers; what a row is about stays in one
    piece, and nothing is cut off on a narrow screen."""
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < text else "right", overflow="fold", no_wrap=index == 0)
    for row in rows:
        made.add_row(*row)
    return made
