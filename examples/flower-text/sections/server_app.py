"""What runs at the buyer's: a third of her texts makes the projection and chose the settings, the rest says how good the
head is."""

from pathlib import Path

import torch
from flmarket.flower import Market, MarketStrategy
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam

from sections.task import Head, accuracy, embed, principal, read

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Buy a head."""
    settings = context.run_config
    texts, labels = read(settings["data"], "test")
    x, y = embed(texts, Path("embeddings-test.npy")), torch.tensor(labels)
    net = Head()
    torch.nn.init.zeros_(net.head.weight)
    torch.nn.init.zeros_(net.head.bias)
    net.load_state_dict(net.state_dict() | principal(x[::3]))
    kept = torch.arange(len(y)) % 3 != 0

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        shares = {"accuracy": accuracy(net, x[kept], y[kept]), "validation": accuracy(net, x[~kept], y[~kept])}
        return MetricRecord(shares)

    market = Market(
        budget_per_round=400.0, auction="all-in", epsilon_per_round=16.0, clip=float(settings["clip"]),
        ledger="sqlite:///market.db", bid_seconds=300.0,
    )
    inner = FedAdam(eta=float(settings["server-rate"]), tau=1.0)
    strategy = MarketStrategy(inner, market=market, release=["head.*"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        train_config=ConfigRecord({"lr": settings["learning-rate"]}),
        num_rounds=settings["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), "head.pt")
    Path("bill.md").write_text(result.bill + "\n", encoding="utf-8")
