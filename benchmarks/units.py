"""Two products beside each other: ε of any one record and ε of an owner's whole update, at the same lifetime cap of
(8, 1e-5) for 60 owners: `python -m benchmarks.units [--data DIR] [--seeds 3]`.

For records it is the two market files as they are. For updates the same file with the best of two mechanisms and three
numbers of rounds that was found: two rounds of ε = 4, pure, by `privunit-g` at its usual clip.
"""

import argparse
import tomllib
from pathlib import Path

from threadpoolctl import threadpool_limits

from flmarket.engines.config import MarketConfig

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDED = {"digits": 0.74, "mnist": 0.86}


def market(name: str, unit: str, seed: int) -> MarketConfig:
    """A market file of the examples, for one of the two units."""
    values = tomllib.loads((EXAMPLES / f"{name}-record.toml").read_text(encoding="utf-8")) | {"seed": seed}
    if unit == "update":
        values["task"]["rounds"] = 2
        values["owners"] = {"privacy_budget": [4.0, 4.0], "privacy_cap": values["owners"]["privacy_cap"]}
        values["mechanism"] = {"auction": "all-in", "perturbation": "privunit-g"}
    return MarketConfig.parse(values)


def main() -> None:
    """The table, and whether records reach what was asked of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="the folder with MNIST; digits alone without it")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for name in ("digits", "mnist") if given.data else ("digits",):
        for unit in ("record", "update"):
            found = []
            for seed in range(given.seeds):
                result = market(name, unit, seed).simulation(data_dir=given.data).run()
                found.append(result.rounds[-1].metrics["accuracy"])
            shown = ", ".join(f"{one:.3f}" for one in found)
            asked = f"   (at least {NEEDED[name]})" if unit == "record" else ""
            print(f"{name:8} {unit:8} {shown}{asked}", flush=True)
            assert unit == "update" or min(found) >= NEEDED[name], "records reach less than was asked of them"


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
