"""Run every benchmark, show a table, and write out/bench.json."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

import benchmarks


def duration(seconds: float | None) -> str:
    """Seconds in the unit one would say."""
    if seconds is None:
        return "–"
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def main() -> None:
    """Names given on the command line choose modules: `python -m benchmarks aggregation`."""
    console, rows = Console(), []
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name.startswith("bench_")]
    wanted = [name for name in names if not sys.argv[1:] or name.removeprefix("bench_") in sys.argv[1:]]
    table = Table(title="One thread; time per unit; ratio = peer / ours", title_justify="left", box=None)
    for column in ("what", "per", "ours", "peer", "peer's time", "ratio"):
        table.add_column(column, justify="right" if column in ("ours", "peer's time", "ratio") else "left")
    modules = [importlib.import_module(f"benchmarks.{name}") for name in wanted]
    with threadpool_limits(1):  # reaches only libraries that are loaded already
        for module in modules:
            for row in module.run():
                rows.append(row.to_dict())
                ratio = "–" if row.ratio is None else f"{row.ratio:,.1f}×"
                table.add_row(
                    row.what, row.unit, duration(row.ours_seconds), row.peer, duration(row.peer_seconds), ratio
                )
                console.print(f"[dim]{row.what}: {duration(row.ours_seconds)} per {row.unit}[/]")
    console.print(table)
    out = Path(os.environ.get("OUT", "out")) / "bench.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"python": platform.python_version(), "machine": platform.machine(), "rows": rows}
    out.write_text(json.dumps(about, indent=1))
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
