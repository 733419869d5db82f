"""Synthetic runs that obey the market's rules, and a few that break one on purpose."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import numpy as np
import pytest

from flmarket.ledger import AwardState
from flmarket.market import MarketResult, OwnerStatement, RoundRecord, Task

Factory = Callable[..., MarketResult]

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "</title><script>alert('x')</script> & \"quoted\" $x_1$"


class Page(HTMLParser):
    """Collects text by element and checks that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.identifiers: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.identifiers += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def make_result(
    *,
    name: str = "Will the customer subscribe?",
    data_set: str = "bank-marketing",
    rounds: int = 40,
    owners: int = 60,
    bidders: int = 12,
    cap: float = 6.0,
    uncapped_share: float = 0.0,
    drop_rate: float = 0.0,
    empty_rounds: tuple[int, ...] = (),
    seed: int = 7,
) -> MarketResult:
    """A run played out award by award, so that statements, states and money agree by construction."""
    rng = np.random.default_rng(seed)
    size = rng.integers(80, 1200, owners)
    caps = np.where(rng.random(owners) < uncapped_share, np.inf, cap * rng.uniform(0.6, 1.4, owners).round(2))
    total, paid = np.zeros(owners), np.zeros(owners, dtype=np.int64)
    bids, releases, refusals = (np.zeros(owners, dtype=int) for _ in range(3))
    accuracy, base, records = 0.61, 0.63, []
    for index in range(rounds):
        who = np.sort(rng.choice(owners, bidders, replace=False)).astype(np.int64)
        bids[who] += 1
        won = rng.random(bidders) < 0.6
        epsilon = np.where(won, rng.uniform(0.15, 1.3, bidders), 0.0)
        budget = int(rng.uniform(9e6, 13e6))
        value = np.where(won, size[who] * epsilon * rng.uniform(0.7, 1.3, bidders), 0.0)
        share = rng.uniform(0.75, 0.97)
        price = np.floor(value / max(value.sum(), 1e-9) * budget * share).astype(np.int64)
        state: list[AwardState | None] = []
        reason: list[str] = []
        for i, owner in enumerate(who):
            outcome, why = None, ""
            if won[i]:
                if total[owner] + epsilon[i] > caps[owner]:
                    outcome, why = AwardState.VOIDED, "refused: over her cap"
                    refusals[owner] += 1
                elif index in empty_rounds or rng.random() < drop_rate / 2:
                    outcome, why = AwardState.EXPIRED, "deadline passed"
                elif rng.random() < drop_rate / 2:
                    outcome, why = AwardState.VOIDED, "bad update: not finite"
                else:
                    outcome = AwardState.POSTED
                    total[owner] += epsilon[i]
                    releases[owner] += 1
                    paid[owner] += price[i]
            state.append(outcome)
            reason.append(why)
        posted = np.array([s is AwardState.POSTED for s in state])
        weights, bound = np.zeros(bidders), float("inf")
        if posted.any():
            raw = np.where(posted, size[who] * epsilon, 0.0)
            weights = raw / raw.sum()
            share_of_data = size[who] / size[who].sum()
            noise = float((weights[posted] ** 2 * 8 / epsilon[posted] ** 2).sum())
            bound = noise + float(np.abs(weights - share_of_data).sum()) ** 2
            accuracy += (0.915 - accuracy) * 0.11 + rng.normal(0, 0.008)
        records.append(
            RoundRecord(
                index,
                who,
                size[who].astype(float),
                epsilon,
                price,
                tuple(state),
                tuple(reason),
                weights,
                budget,
                bound,
                {"accuracy": float(accuracy)},
            )
        )
    statements = tuple(
        OwnerStatement(
            i,
            int(size[i]),
            int(bids[i]),
            int(releases[i]),
            int(refusals[i]),
            int(paid[i]),
            float(total[i]),
            float(caps[i]),
        )
        for i in range(owners)
    )
    return MarketResult(
        task=Task(name=name, rounds=rounds, bidders_per_round=bidders, budget_factor=0.5),
        mechanism="m1",
        aggregation="opt-aggr",
        perturbation="laplace-l1",
        data_set=data_set,
        seed=seed,
        rounds=tuple(records),
        owners=statements,
        parameters=np.zeros(4),
        baseline_accuracy=base,
    )


@pytest.fixture(scope="session")
def factory() -> Factory:
    return make_result


@pytest.fixture(scope="session")
def normal() -> MarketResult:
    return make_result()


@pytest.fixture(scope="session")
def troubled() -> MarketResult:
    """Drop-outs, refusals, bad updates, empty rounds, and owners without a cap, all in one run."""
    return make_result(drop_rate=0.3, empty_rounds=(4, 5, 21), uncapped_share=0.3, cap=2.0)
