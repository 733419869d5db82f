"""What runs beside an owner's texts. PyTorch is imported for training only: Flower starts a process for every bid too."""

import tempfile
from pathlib import Path

from flmarket.flower import owner_guard
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[owner_guard("sections:owner.toml")])


@app.train()
def train(msg: Message, context: Context):
    """Train the head on this partition's texts."""
    import torch
    from sections.task import Head, embed, read
    from sections.task import train as train_fn

    number, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    texts, labels = read(context.run_config["data"], "train")
    own = Path(str(context.node_config.get("owner-file", Path(tempfile.gettempdir()) / "sections" / "owner.toml"))).parent
    x = embed(texts[number::parts], own / f"embeddings-{number}-of-{parts}.npy")
    y = torch.tensor(labels[number::parts])
    net = Head()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    train_fn(net, x, y, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)
