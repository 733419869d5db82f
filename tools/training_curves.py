"""Draw how the papers' networks trained, from the curves in training/, for docs/learned.md.

.venv/bin/python tools/training_curves.py
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

from flmarket.report.curves import Curve, CurveSet, write_curves

ROOT = Path(__file__).parent.parent
NETWORKS = ("dm-regretnet-flm22", "m-regretnet-flm22", "regretnet-flm22", "murba-flm21")
DRAWN = {
    "learned-regret": ("valid_rgt", "regret rgt of held-out profiles", "Regret of the papers' networks in training"),
    "learned-bound": ("deployed_bound", "error bound as deployed", "Error bound of the papers' networks in training"),
}


def main() -> None:
    """Both figures."""
    for stem, (column, label, title) in DRAWN.items():
        curves = []
        for color, network in enumerate(NETWORKS):
            for dash, path in enumerate(sorted((ROOT / "training").glob(f"{network}-*id.csv")) or _murba()):
                with path.open(encoding="utf-8") as file:
                    rows = list(csv.DictReader(file))
                whole = float(rows[-1]["iteration"])
                x = tuple(100 * float(row["iteration"]) / whole for row in rows)
                curves.append(Curve(path.stem, x, tuple(float(row[column]) for row in rows), None, color, dash))
        with tempfile.TemporaryDirectory() as folder:
            write_curves(CurveSet(title, "% of the paper's iterations", label, tuple(curves)), folder, stem, log_y=True)
            (ROOT / "docs" / "images" / f"{stem}.svg").write_bytes((Path(folder) / f"{stem}.svg").read_bytes())


def _murba() -> list[Path]:
    return [ROOT / "training" / f"murba-flm21-{population}.csv" for population in ("low", "high")]


if __name__ == "__main__":
    main()
