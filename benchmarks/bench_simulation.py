"""A round's gradients for all winners at once, against one scikit-style gradient per owner; a whole market; and markets
under a lifetime cap on (ε, δ), whose total is an optimisation, against one on ε, whose total is a sum."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, best_of
from flmarket.engines.config import MarketConfig
from flmarket.learning import Partition, SoftmaxRegression, fedsgd


def plain_gradients(params: np.ndarray, x: np.ndarray, y: np.ndarray, part: Partition, classes: int) -> np.ndarray:
    """One owner after the other, as in the usual federated loop."""
    features = x.shape[1]
    out = np.empty((part.owners, params.size))
    weights, bias = params[: features * classes].reshape(classes, features), params[features * classes :]
    for owner in range(part.owners):
        rows = part.records(owner)
        scores = x[rows] @ weights.T + bias
        scores -= scores.max(axis=1, keepdims=True)
        residual = np.exp(scores)
        residual /= residual.sum(axis=1, keepdims=True)
        residual[np.arange(len(rows)), y[rows]] -= 1
        out[owner] = np.concatenate([(residual.T @ x[rows]).ravel(), residual.sum(axis=0)]) / len(rows)
    return out


def run() -> Iterator[Row]:
    """Ten thousand owners of ten records each; and the demo's market from bids to settlement."""
    rng = np.random.default_rng(0)
    owners, records, features, classes = 10_000, 10, 122, 5
    x, y = rng.normal(size=(owners * records, features)), rng.integers(0, classes, owners * records)
    part = Partition(np.arange(owners * records), np.arange(owners + 1) * records)
    model = SoftmaxRegression(features, classes)
    params = rng.normal(size=model.dimension) * 0.1
    ours = best_of(lambda: fedsgd(model, params, x, y, part.offsets)) / owners
    peer = best_of(lambda: plain_gradients(params, x, y, part, classes)) / owners
    difference = np.abs(fedsgd(model, params, x, y, part.offsets) - plain_gradients(params, x, y, part, classes)).max()
    assert difference < 1e-9, "the two must compute the same"
    yield Row("gradients of 10,000 owners, 122 features", "owner", ours, "plain loop over owners", peer)
    config = MarketConfig.parse(
        {
            "task": {"rounds": 20, "bidders_per_round": 40, "budget_factor": 1.0},
            "data": {"owners": 60, "minimum": 3, "sigma": 0.5},
        }
    )
    simulation = config.simulation()
    yield Row(
        "whole market, 60 owners, 40 bids a round",
        "round",
        best_of(lambda: simulation.run(), 2) / 20,
        "none: no peer has the loop",
        None,
    )
    yield from caps()


def caps() -> Iterator[Row]:
    """400 owners, 20 rounds, one run each: processor time."""
    found = {}
    for name, cap, noise in (
        ("ε", {}, "privunit-g"),
        ("(ε, δ)", {"privacy_cap_delta": 1e-5}, "privunit-g"),
        ("(ε, δ), Gaussian noise", {"privacy_cap_delta": 1e-5}, "gaussian-l2"),
    ):
        config = MarketConfig.parse(
            {
                "task": {"rounds": 20, "bidders_per_round": 400, "budget_factor": 1.0},
                "data": {"name": "digits", "owners": 400, "partition": "equal"},
                "owners": {"privacy_budget": [0.05, 0.2], "privacy_cap": 3.0, **cap},
                "mechanism": {"perturbation": noise},
            }
        )
        found[name] = best_of(config.simulation().run, 1, clock=time.process_time) / 20
    for name in list(found)[1:]:
        yield Row(f"market of 400 owners, lifetime cap on {name}", "round", found[name], "cap on ε", found["ε"])
