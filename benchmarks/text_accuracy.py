"""Accuracy of examples/flower-text with and without privacy, through the plug-in: `python -m benchmarks.text_accuracy`.

Plays the example's own two apps on Flower's messages in this process: owners behind their guards, with the
noise that leaves a machine. Without privacy it is the same app without the market: no mod, and the inner strategy.
Settings are those that score best on validation texts, the third of the buyer's texts that also made the projection;
the other two thirds measure, after the choice. Noise is never seeded, so a seed is that of the training alone.

    python -m benchmarks.text_accuracy --data DIR --work out/text --choose      # the choice, one run a setting
    python -m benchmarks.text_accuracy --data DIR --work out/text --seeds 3     # the figures
"""

import argparse
import itertools
import logging
import os
import shutil
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

EXAMPLE = Path(__file__).parents[1] / "examples" / "flower-text"
OWNERS = 8
GRID = {"clip": (2.0, 4.0, 8.0), "server-rate": (0.5, 1.0, 2.0), "local-epochs": (1, 3)}


def played(settings: dict[str, Any], work: Path, *, private: bool, seed: int) -> dict[str, float]:
    """One market, or the same training without it, from fresh accounts; the last round's shares."""
    import torch
    from flwr.app import Context, RecordDict
    from flwr.clientapp import ClientApp
    from sections import client_app, server_app

    from flmarket.engines.flower import InProcessGrid
    from flmarket.market.record import close_records

    logging.getLogger("flwr").setLevel(logging.ERROR)
    folder = work / "run"
    for made in folder.glob("owner-*/embeddings-*.npy"):  # an earlier run's, the same in all of them
        if not made.is_symlink():
            made.replace(work / made.name)
    shutil.rmtree(folder, ignore_errors=True)
    text = (EXAMPLE / "sections" / "owner.toml").read_text(encoding="utf-8")
    for i in range(OWNERS):
        home = folder / f"owner-{i}"
        home.mkdir(parents=True)
        (home / "owner.toml").write_text(text.replace("owner = 0", f"owner = {i}"), encoding="utf-8")
        for kept in work.glob(f"embeddings-{i}-of-*.npy"):
            (home / kept.name).symlink_to(kept)
    app = client_app.app
    if not private:
        app = ClientApp()
        app.train()(client_app.train)
    grid = InProcessGrid(app, OWNERS, lambda i: {"owner-file": str(folder / f"owner-{i}" / "owner.toml")})
    for context in grid.contexts.values():
        context.run_config = settings
    shares: list[dict[str, float]] = []

    def plain(inner: Any, **_: Any) -> Any:
        inner.fraction_evaluate = 0.0
        return inner

    def heard(self: Any, *given: Any, evaluate_fn: Any, **named: Any) -> Any:
        def tell(index: int, arrays: Any) -> Any:
            found = evaluate_fn(index, arrays)
            shares.append(dict(found))
            return found

        result = begin(self, *given, evaluate_fn=tell, **named)
        if not private:
            result.bill = ""
        return result

    chosen = server_app.MarketStrategy if private else server_app.FedAdam
    begin, before = chosen.start, Path.cwd()
    torch.manual_seed(seed)
    os.chdir(work)
    Path("market.db").unlink(missing_ok=True)
    try:
        market = server_app.MarketStrategy if private else plain
        with mock.patch.object(chosen, "start", heard), mock.patch.object(server_app, "MarketStrategy", market):
            server_app.app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings))
    finally:
        os.chdir(before)
        close_records()
    return shares[-1]


def main() -> None:
    """Choose settings, or state figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder with debian-sections")
    parser.add_argument("--work", type=Path, default=Path("out/text"), help="embeddings are kept here")
    parser.add_argument("--choose", action="store_true", help="try the settings, judged on validation texts")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    os.environ["FLMARKET_DATA"] = str(Path(given.data).resolve())
    sys.path.insert(0, str(EXAMPLE))
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    described = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    settings = described["tool"]["flwr"]["app"]["config"]
    for private in (True, False):
        name = "private" if private else "without privacy"
        if given.choose:
            grid = GRID if private else {name: GRID[name] for name in GRID if name != "clip"}
            tried = []
            for values in itertools.product(*grid.values()):
                changed = settings | dict(zip(grid, values, strict=True))
                tried.append((played(changed, work, private=private, seed=100)["validation"], values))
                print(name, dict(zip(grid, values, strict=True)), f"validation {tried[-1][0]:.4f}", flush=True)
            print(name, "best:", dict(zip(grid, max(tried)[1], strict=True)), flush=True)
            continue
        found = [played(settings, work, private=private, seed=seed)["accuracy"] for seed in range(given.seeds)]
        mean, spread = statistics.mean(found), max(found) - min(found)
        print(f"{name}: {', '.join(f'{one:.4f}' for one in found)}; mean {mean:.4f}, range {spread:.4f}", flush=True)


if __name__ == "__main__":
    main()
