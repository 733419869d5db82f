"""How far the time of an answer tells records apart: `python -m benchmarks.timing_leak`.

The same orders go to an owner with plain records and to owners with zeros, subnormal numbers, and numbers near the
largest; training alone and the guard's whole answer are timed in turn. Printed: medians, and how often a threshold on
one answer's time, chosen afterwards in the attacker's favour, tells the two apart (0.5 is a coin). Two samples of the
same owner show what that is worth by chance.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from flmarket.bids import Kind, Valuations
from flmarket.engines.flower import InProcessGrid, Owner, client_app
from flmarket.engines.flower.messages import BID, TRAIN, Delivery, pack, unpack
from flmarket.learning import SoftmaxRegression, described, updates
from flmarket.market import Announcement, Order, award_id
from flmarket.privacy import PureDp

FEATURES, RECORDS, TIMES = 30, 400, 400
MODEL = SoftmaxRegression(FEATURES, 2)


def main() -> None:
    """Measure and print."""
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(RECORDS, FEATURES))
    worlds = {"the same records": plain, "zeros": 0 * plain, "subnormal": plain * 1e-310, "huge": plain * 1e300}
    print(f"{'against':18} {'training':>22} {'whole answer':>24}")
    with threadpool_limits(1), np.errstate(all="ignore"):
        for name, x in worlds.items():
            cells = []
            for work in (_training, _answer):
                first, second = _in_turn(work(plain), work(x))
                cells.append(f"{1e6 * np.median(second):8.0f} µs, {_advantage(first, second):.2f}")
            print(f"{name:18} {cells[0]:>22} {cells[1]:>24}")


def _owner(x: NDArray[np.float64]) -> Owner:
    return Owner(
        number=0, x=x, y=np.arange(RECORDS) % 2, valuation=Valuations([int(Kind.LINEAR)], [1e-9]), privacy_budget=1.0,
        cap=PureDp(1e9), record=Path(tempfile.mkdtemp()) / "owner-0", simulation_seed=0,
    )  # fmt: skip


def _order(index: int) -> Order:
    return Order(
        award=award_id("t", index, 0), task="t", buyer="b", market="auction", round_index=index, owner=0,
        loss=PureDp(1.0), price_micros=10**6, records=RECORDS, learning_rate=0.1,
    )  # fmt: skip


def _call(index: int) -> Announcement:
    return Announcement(
        task="t", buyer="b", market="auction", round_index=index, rounds=10**6, features=FEATURES, classes=2,
        model=described(MODEL), parameters=FEATURES + 1, learning_rate=0.1, perturbation="sphere", clip=1.0,
    )  # fmt: skip


def _training(x: NDArray[np.float64]) -> Callable[[int], float]:
    records, parameters, rng = _owner(x).records(RECORDS), np.zeros(FEATURES + 1), np.random.default_rng(0)

    def once(index: int) -> float:
        begun = time.perf_counter()
        updates(MODEL, parameters, [records], [rng])
        return time.perf_counter() - begun

    return once


def _answer(x: NDArray[np.float64]) -> Callable[[int], float]:
    owner = _owner(x)
    grid = InProcessGrid(client_app(lambda context: owner), 1)
    (node,) = grid.get_node_ids()

    def once(index: int) -> float:
        list(grid.send_and_receive([Message(pack(_call(index)), node, BID)]))
        message = Message(pack(_order(index), np.zeros(FEATURES + 1)), node, TRAIN)
        begun = time.perf_counter()
        (answer,) = grid.send_and_receive([message])
        seconds = time.perf_counter() - begun
        assert unpack(Delivery, answer) is not None
        return seconds

    return once


def _in_turn(
    first: Callable[[int], float], second: Callable[[int], float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    pairs = np.array([(first(index), second(index)) for index in range(TIMES)])
    return pairs[:, 0], pairs[:, 1]


def _advantage(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """The best threshold's share of right guesses, either way round."""
    edges = np.concatenate([first, second])
    right = [(np.mean(first <= edge) + np.mean(second > edge)) / 2 for edge in edges]
    return float(max(max(right), 1 - min(right)))


if __name__ == "__main__":
    main()
