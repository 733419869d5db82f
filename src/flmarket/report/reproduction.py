"""The index of a reproduction: every table and figure with its claim, its verdict and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flmarket.report.files import write_files
from flmarket.report.html import render, strict_json

__all__ = ["write_reproduction"]


def write_reproduction(items: Sequence[Mapping[str, object]], out_dir: Path, *, command: str, note: str = "") -> Path:
    """Write index.html and items.json beside the items' own files; returns the path of the page.

    An item has key, title, claim, verdict ("reproduced" or "differs"), reason, files and numbers.
    """
    rows = []
    for item in items:
        files = [str(name) for name in item["files"]] if isinstance(item["files"], list | tuple) else []
        rows.append(dict(item) | {"files": files, "pictures": [name for name in files if name.endswith(".svg")]})
    page = render(
        "reproduction.html.j2",
        title="Papers, reproduced",
        items=rows,
        reproduced=sum(row["verdict"] == "reproduced" for row in rows),
        note=note,
        command=command,
    )
    public = [{key: value for key, value in row.items() if key != "pictures"} for row in rows]
    return write_files(out_dir, {"items.json": strict_json(public), "index.html": page}) / "index.html"
