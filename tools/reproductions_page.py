"""Carry finished reproductions into the documentation.

    .venv/bin/python tools/reproductions_page.py OUT [OUT ...]

Items of the folders' items.json replace those of the same key in docs/reproductions.json, the tables of
docs/reproductions.md are written anew from all of them, and plots that the page shows are copied.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from flmarket.experiments.items import CLAIMS, PAPERS, Check, Item, judge
from flmarket.report.html import strict_json

DOCS = Path(__file__).parent.parent / "docs"
HEAD = "| where | claim | verdict | what we found |\n| --- | --- | --- | --- |\n"


def main(folders: list[Path]) -> None:
    """Merge, in the order of papers."""
    kept = DOCS / "reproductions.json"
    items = {item["key"]: item for item in json.loads(kept.read_text(encoding="utf-8"))}
    for folder in folders:
        found = json.loads((folder / "items.json").read_text(encoding="utf-8"))
        items |= {item["key"]: item for item in found if item["verdict"] != "not run"}
    papers = list(PAPERS)
    ordered = sorted(items.values(), key=lambda item: papers.index(item["key"].split("-")[0]))
    kept.write_text(strict_json(ordered), encoding="utf-8")
    page = DOCS / "reproductions.md"
    page.write_text(_tables(page.read_text(encoding="utf-8"), ordered), encoding="utf-8")
    for shown in re.findall(r"images/reproductions/([\w-]+\.svg)", page.read_text(encoding="utf-8")):
        for folder in folders:
            if (folder / shown).exists():
                shutil.copy(folder / shown, DOCS / "images" / "reproductions" / shown)


def _tables(page: str, items: list[dict[str, object]]) -> str:
    found = [_item(dict(item)) for item in items]
    for paper, about in PAPERS.items():
        rows = judge(found, [claim for claim in CLAIMS if claim.paper == paper])
        start = page.find(f"### {about.title}\n")
        if not rows or start < 0:
            continue
        top = page.index(HEAD, start) + len(HEAD)
        end = page.index("\n\n", top)
        cells = [(o.where, o.text, o.verdict, " ".join(f"{why}." for why in o.reasons)) for o in rows]
        lines = [" | ".join(text.replace("|", "∣").replace("..", ".") for text in row) for row in cells]
        page = page[:top] + "\n".join(f"| {line} |" for line in lines) + page[end:]
    return page


def _item(values: dict[str, object]) -> Item:
    values.pop("settings", None)
    return Item(**values | {"checks": tuple(Check(**check) for check in values["checks"])})  # type: ignore[attr-defined]


if __name__ == "__main__":
    main([Path(given) for given in sys.argv[1:]])
