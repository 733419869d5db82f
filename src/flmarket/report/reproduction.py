"""The index of a reproduction: every claim with its verdict, then every table and figure with its plot and numbers.

A folder that one can put on the web: pages and pictures refer to each other by relative name only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flmarket.files import write_files
from flmarket.report.html import render, strict_json
from flmarket.trust import PAPERS_HERE

_SIGNS = {"reproduced": "✓", "differs": "✗", "undecided": "?", "not run": "–"}


@dataclass(frozen=True)
class ClaimRow:
    """One line of the table of claims; `items` are keys of items on the page."""

    where: str
    text: str
    verdict: str
    items: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperSection:
    """A paper: its claims, and its items as mappings with key, title, claim, verdict, reason, files and numbers.

    Items may also have checks, beside, note and settings (a few words on how they were run).
    """

    key: str
    title: str
    source: str
    claims: tuple[ClaimRow, ...]
    items: tuple[Mapping[str, object], ...]


def write_reproduction(sections: Sequence[PaperSection], out_dir: Path, *, command: str, note: str = "") -> Path:
    """Write index.html, claims.md and items.json beside the items' own files; returns the path of the page."""
    claims = [claim.verdict for section in sections for claim in section.claims]
    page = render(
        "reproduction.html.j2",
        trust=PAPERS_HERE,
        title="Papers, reproduced",
        sections=[section for section in sections if section.items or section.claims],
        claims={verdict: claims.count(verdict) for verdict in _SIGNS},
        figures=sum(len(section.items) for section in sections),
        signs=_SIGNS,
        note=note,
        command=command,
    )
    public = [dict(item) for section in sections for item in section.items]
    files = {"items.json": strict_json(public), "claims.md": _markdown(sections), "index.html": page}
    return write_files(out_dir, files) / "index.html"


def _markdown(sections: Sequence[PaperSection]) -> str:
    """The claims of every paper as tables for a README or a documentation page; items where there are no claims."""
    lines: list[str] = []
    for section in sections:
        lines += [f"## {section.title}", "", f"{section.source}.", ""]
        if section.claims:
            lines += ["| where | claim | verdict | what we found |", "| --- | --- | --- | --- |"]
            lines += [
                _cells(c.where, c.text, c.verdict, " ".join(f"{one}." for one in c.reasons)) for c in section.claims
            ]
        else:
            lines += ["| question | verdict | what we found |", "| --- | --- | --- |"]
            lines += [_cells(str(i["title"]), str(i["verdict"]), str(i["reason"])) for i in section.items]
        lines.append("")
    return "\n".join(lines)


def _cells(*texts: str) -> str:
    return f"| {' | '.join(text.replace('|', '∣').replace('..', '.') for text in texts)} |"
