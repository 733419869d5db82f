"""The app that `flwr run` starts for the buyer: a market file played to its end.

The run's configuration names `market` (a market file), `ledger` (a database URL) and `state` (a folder), the deadlines
`bid-seconds` and `train-seconds`, and how many `nodes` to wait for. A run on the folder of one that was cut off goes on
where that one stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flmarket.engines.flower.files import located
from flmarket.engines.flower.node import market_of, run_setting
from flmarket.engines.flower.strategy import KindStrategy
from flmarket.files import write_file
from flmarket.ledger import SqlLedger
from flmarket.market import FileStore

app = ServerApp()


@app.main()
def serve(grid: Grid, context: Context) -> None:
    """Play the market, verify the ledger, write `result.json`."""
    settings, state = context.run_config, Path(run_setting(context, "state"))
    kind = market_of(located(run_setting(context, "market"))).kind()
    with SqlLedger(run_setting(context, "ledger")) as ledger:
        strategy = KindStrategy(
            kind, ledger, FileStore(state / "server"), nodes=int(settings.get("nodes", 1)),
            bid_seconds=float(settings.get("bid-seconds", 60.0)),
            train_seconds=float(settings.get("train-seconds", 600.0)),
        )  # fmt: skip
        strategy.start(grid)
        head = ledger.verify()
    summary: dict[str, Any] = {
        "rounds": len(strategy.records), "entries": head.size,
        "metrics": strategy.records[-1].metrics if strategy.records else {},
        "accuracy": [record.metrics.get("accuracy") for record in strategy.records],
    }  # fmt: skip
    write_file(state / "result.json", json.dumps(summary))
