"""A round of the market on Flower's simulation, against a round of Flower's own FedAvg: same clients, data and model.

Both run on Ray in the same process, one after the other, with seeded noise on our side (OpenDP's costs what it costs
anywhere, see bench_privacy) and no client-side evaluation. Everybody wins, so that as many clients train. The median
round counts: the first one starts Ray's workers. FedAvg's times include the tenth of a second that Flower's loop
sleeps between looks; ours look more often.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measure import Row
from flmarket.engines import Simulation
from flmarket.engines.config import MarketConfig

CLIENTS, ROUNDS = 10, 12
PEER = "Flower's FedAvg"


def spec() -> Simulation:
    """Ten owners of digits; a budget that buys from all of them."""
    return MarketConfig.parse(
        {
            "task": {"rounds": ROUNDS, "bidders_per_round": CLIENTS, "budget_factor": 2.0},
            "data": {"name": "digits", "owners": CLIENTS, "partition": "equal"},
            "mechanism": {"auction": "all-in", "perturbation": "sphere"},
        }
    ).simulation()


def fedavg_seconds(market: Simulation) -> list[float]:
    """Seconds per round of Flower's FedAvg with one local gradient step."""
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from flmarket.learning import SoftmaxRegression, fedsgd

    data, deal = market.data, market.partition
    model = SoftmaxRegression(data.features, data.n_classes)
    shares = [(data.x_train[deal.records(i)], data.y_train[deal.records(i)]) for i in range(CLIENTS)]
    client, server, marks = ClientApp(), ServerApp(), []

    @client.train()
    def train(message: Message, context: Context) -> Message:
        x, y = shares[int(context.node_config["partition-id"])]
        start = message.content.array_records["arrays"]["parameters"].numpy()
        step = fedsgd(model, start, x, y, np.array([0, len(y)]))[0]
        arrays = ArrayRecord({"parameters": Array(start - 0.1 * step)})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(y)})}), reply_to=message
        )

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS
        )
        start = ArrayRecord({"parameters": Array(model.initial())})

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            found = model.evaluate(arrays["parameters"].numpy(), data.test)["accuracy"]
            marks.append(time.perf_counter())
            return MetricRecord({"accuracy": found})

        strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate)

    run_simulation(server, client, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    return np.diff(marks)[1:].tolist()


def market_seconds(market: Simulation) -> list[dict[str, float]]:
    """Seconds per round of the market, by step."""
    from flmarket.engines.flower import simulate

    with tempfile.TemporaryDirectory() as folder:
        run = simulate(market, Path(folder), backend="ray", bid_seconds=600.0)
    assert all(record.delivered.all() for record in run.records), "everybody must train, as with FedAvg"
    return list(run.seconds[1:])


def run() -> Iterator[Row]:
    """With and without the exchange of bids."""
    logging.getLogger("flwr").disabled = True  # it writes every round's summary on the screen
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    market = spec()
    ours = market_seconds(market)
    peer = median(fedavg_seconds(market))
    without = median(one["train"] + one["close"] + one["decide"] for one in ours)
    yield Row(f"market round on Flower but for the bids, {CLIENTS} clients", "round", without, PEER, peer)
    yield Row(f"market round on Flower, {CLIENTS} clients", "round", median(sum(o.values()) for o in ours), PEER, peer)
