"""The page of sharp edges names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_edge_is_pinned_by_a_test_that_exists():
    lines = [
        line
        for line in (ROOT / "docs" / "sharp-edges.md").read_text(encoding="utf-8").splitlines()
        if "`tests/" in line
    ]
    assert len(lines) >= 20
    for line in lines:
        assert re.search(r"\| (severe|serious|mild) \| (owner|buyer|broker|researcher)", line), line
        for file, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", line):
            content = (ROOT / file).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in content, f"{file} has no {name}"
