"""A masked sum per owner and round, against Flower's FedAvg and Flower's legacy SecAgg+ on the same vectors.

Four things are timed, in seconds of this process's own CPU time, so that neighbours on the machine do not count:

- *an owner's work*: keys, shares, masked input, consent, unmasking, with as many neighbours as our graph gives her;
- *the round*: that, the broker's work and all checks, over the number of owners, messages handed over in memory;
- *all owners in one process*, one after the other, in wall time, beside FedAvg on Flower's own simulation (Ray);
- peers: the same client stages of `flwr.client.mod.secaggplus_mod`, called directly, with as many neighbours; and a
  round of `FedAvg` with one array of p float64 each way through Flower's own messages, in one process.

Flower's masks come from a generator that is seeded with 32 bits, and nobody signs anything there; so the work is not
the same, and ours is the larger. Every owner stays, which is where unmasking costs the broker least.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Row
from flmarket.market.masking import INPUT, STAGES, Masker, MaskTerms, Summing
from flmarket.market.masking.primitives import identity_key


class Spent(NamedTuple):
    """CPU seconds of an owner's own work, of the whole round over n, and the number of neighbours."""

    owner: float
    whole: float
    degree: int


CASES = [(20, 10_000), (100, 10_000), (20, 1_000_000), (100, 1_000_000)]
BITS = 32


class Owners:
    """n owners of whom a fifth may go and a tenth collude, with inputs of p numbers; from the second round they know
    each other."""

    def __init__(self, n: int, p: int) -> None:
        self.n, self.p, self.rounds = n, p, 0
        self.identities = {owner: os.urandom(32) for owner in range(n)}
        self.roster = tuple((owner, identity_key(key)) for owner, key in self.identities.items())
        self.known: dict[int, dict[int, bytes]] = {owner: {} for owner in range(n)}
        self.vectors = np.random.default_rng(0).integers(0, 2**BITS, (4, p), dtype=np.uint64)
        counts = np.bincount(np.arange(n) % 4, minlength=4)[:, None].astype(np.uint64)
        self.wanted = (self.vectors * counts).sum(axis=0, dtype=np.uint64) & np.uint64(2**BITS - 1)

    def round(self) -> Spent:
        """Play one. In the first everybody meets everybody."""
        n = self.n
        terms = MaskTerms("task", self.rounds, bytes(32), BITS, self.p, n - n // 5, n // 10, self.roster)
        owners, start = 0.0, time.process_time()
        maskers = {
            owner: Masker(owner, key, terms, os.urandom(32), self.known[owner])
            for owner, key in self.identities.items()
        }
        summing = Summing(terms)
        for stage in STAGES:
            for owner, question in summing.questions().items():
                began = time.process_time()
                if stage == INPUT:
                    answer, words = maskers[owner].masked(question, self.vectors[owner % 4])
                else:
                    answer, words = maskers[owner].answer(stage, question), None
                owners += time.process_time() - began
                summing.take(owner, answer, words)
            summing.close()
        whole = time.process_time() - start
        assert (summing.total == self.wanted).all()
        self.known, self.rounds = {owner: masker.met for owner, masker in maskers.items()}, self.rounds + 1
        return Spent(owners / n, whole / n, terms.degree)


def legacy_client(neighbours: int, p: int) -> float:
    """CPU seconds of one client of Flower's SecAgg+ with so many neighbours."""
    from flwr.app import ConfigRecord
    from flwr.common import ndarrays_to_parameters
    from flwr.common.secure_aggregation.secaggplus_constants import Key
    from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat

    # the package has a function of the module's name
    legacy = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
    settings = ConfigRecord(
        {
            Key.SAMPLE_NUMBER: neighbours + 1, Key.SHARE_NUMBER: neighbours + 1, Key.THRESHOLD: neighbours // 2 + 1,
            Key.CLIPPING_RANGE: 8.0, Key.TARGET_RANGE: 2**22, Key.MOD_RANGE: 2**BITS, Key.MAX_WEIGHT: 1000.0,
        }
    )  # fmt: skip
    update = ndarrays_to_parameters([np.random.default_rng(0).normal(size=p)])
    state = legacy.SecAggPlusState()
    state.nid = 1
    peers = {nid: [legacy.generate_key_pairs() for _ in range(2)] for nid in range(2, neighbours + 2)}
    public = {str(nid): [legacy.public_key_to_bytes(key) for _, key in pairs] for nid, pairs in peers.items()}

    start = time.process_time()
    own = legacy._setup(state, settings)
    table = ConfigRecord({"1": [own[Key.PUBLIC_KEY_1], own[Key.PUBLIC_KEY_2]], **public})
    legacy._share_keys(state, table)
    spent = time.process_time() - start

    texts = []
    for nid, pairs in peers.items():
        private = legacy.bytes_to_private_key(legacy.private_key_to_bytes(pairs[1][0]))
        key = legacy.generate_shared_key(private, legacy.bytes_to_public_key(state.pk2))
        texts.append(legacy.encrypt(key, share_keys_plaintext_concat(nid, 1, os.urandom(48), os.urandom(48))))

    start = time.process_time()
    shares = ConfigRecord({Key.CIPHERTEXT_LIST: texts, Key.SOURCE_LIST: list(peers)})
    legacy._collect_masked_vectors(state, shares, 100, update)
    everybody = ConfigRecord({Key.ACTIVE_NODE_ID_LIST: [1, *peers], Key.DEAD_NODE_ID_LIST: []})
    legacy._unmask(state, everybody)
    return spent + time.process_time() - start


def fedavg_round(n: int, p: int) -> float:
    """CPU seconds of a FedAvg round over n: one array each way for every client, and their mean."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from flmarket.engines.flower.play import InProcessGrid

    client, vector = ClientApp(), np.random.default_rng(0).normal(size=p)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        start = message.content.array_records["arrays"]["parameters"].numpy()
        arrays = ArrayRecord({"parameters": Array(start + vector)})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 100})}), reply_to=message)

    grid = InProcessGrid(client, n)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
    start = time.process_time()
    arrays = ArrayRecord({"parameters": Array(np.zeros(p))})
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    found, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    spent = time.process_time() - start
    assert found is not None
    np.testing.assert_allclose(found["parameters"].numpy(), vector)
    return spent / n


def simulated_fedavg(n: int, p: int, rounds: int = 5) -> float:
    """Wall seconds of a FedAvg round of n clients on Flower's simulation: the median, without the first."""
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, marks = ClientApp(), ServerApp(), list[float]()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        start = message.content.array_records["arrays"]["parameters"].numpy()
        content = {"arrays": ArrayRecord({"parameters": Array(start + 1.0)})}
        return Message(RecordDict({**content, "metrics": MetricRecord({"num-examples": 100})}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            marks.append(time.perf_counter())
            return MetricRecord({"round": server_round})

        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
        start = ArrayRecord({"parameters": Array(np.zeros(p))})
        strategy.start(grid, start, num_rounds=rounds, evaluate_fn=evaluate)

    run_simulation(server, client, n, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    return float(np.median(np.diff(marks)[1:]))


def wall_rounds(n: int, p: int) -> float:
    """Wall seconds of a whole masked sum of n owners in this process, one after the other: the median of three."""
    owners, marks = Owners(n, p), list[float]()
    for _ in range(5):
        owners.round()
        marks.append(time.perf_counter())
    return float(np.median(np.diff(marks)[1:]))


def run() -> Iterator[Row]:
    """The table."""
    Owners(4, 10).round()  # what is loaded at first use
    fedavg_round(2, 10)
    legacy_client(2, 10)
    for n, p in CASES:
        again, owners = 4 if p < 1_000_000 else 2, Owners(n, p)
        first, later, plain = owners.round(), list[Spent](), list[float]()
        for _ in range(again):  # in turns, so that a busy machine slows both
            later.append(owners.round())
            plain.append(fedavg_round(n, p))
        legacy, fedavg = min(legacy_client(first.degree, p) for _ in range(2)), min(plain)
        about = f"n = {n}, p = {p:,}, {first.degree} neighbours"
        own, whole = min(one.owner for one in later), min(one.whole for one in later)
        yield Row(f"secure sum, an owner's work, {about}", "owner", own, "Flower's legacy SecAgg+", legacy)
        yield Row(f"secure sum, the round, {about}", "owner", whole, "Flower's FedAvg", fedavg)
        yield Row(f"secure sum, the first round of a task, {about}", "owner", first.whole, "Flower's FedAvg", fedavg)
    for n in (20, 100):
        about, simulated = f"n = {n}, p = 10,000", simulated_fedavg(n, 10_000)
        ours = wall_rounds(n, 10_000)
        yield Row(f"secure sum, all owners in one process, {about}", "round", ours, "FedAvg, simulated", simulated)
