"""Owners who lie: what they report moves neither the budget nor what others have delivered; what left is charged."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from flmarket.engines.config import MarketConfig
from flmarket.engines.flower import FileStore, InProcessGrid, KindStrategy, client_app
from flmarket.engines.flower.messages import TRAIN, Delivery, pack, unpack
from flmarket.engines.flower.play import Dealer, store_spec
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import Order, owner_account
from flmarket.market.kind import release_id
from flmarket.market.record import close_records
from flmarket.privacy import PureDp

OWNERS = 5


def market(**task):
    return MarketConfig.parse(
        {
            "seed": 3,
            "task": {"name": "t", "rounds": 2, "bidders_per_round": OWNERS, "budget_factor": 0.6} | task,
            "data": {"name": "breast-cancer", "owners": OWNERS, "sigma": 0.5, "minimum": 20},
            "mechanism": {"auction": "posted", "perturbation": "laplace-l1"},
        }
    )


@pytest.fixture(autouse=True)
def closed_records():
    yield
    close_records()


def honest_bids(kind, spec, folder):
    """Everybody's true bids for the first round."""
    dealer = Dealer(store_spec(spec, folder), folder / "owners")
    grid = InProcessGrid(client_app(dealer), OWNERS)
    owners = [dealer(context) for context in grid.contexts.values()]
    return {owner.number: owner.proposal(kind.announcement(0)) for owner in owners}


@pytest.mark.parametrize("factor", [0.0, 0.1, 3.0, 1000.0])
def test_a_report_does_not_move_the_budget(tmp_path, factor):
    """With B = 0.5·Σ reported cost, most owners gained by a lie."""
    spec = market().simulation()
    kind = spec.kind()
    true = honest_bids(kind, spec, tmp_path)
    lies = {owner: replace(bid, rate=max(bid.rate * factor, 1e-6)) for owner, bid in true.items()}
    expected = round(0.6 * float(spec.bids.full_cost.sum()), 6)
    assert kind.plan(0, true).deposit_micros == pytest.approx(expected * 1e6, abs=1)
    assert kind.plan(0, lies).deposit_micros == kind.plan(0, true).deposit_micros


class Spoiler(InProcessGrid):
    """Owner 0's node sends nonsense in place of what her guard let out."""

    def __init__(self, app, nodes, nonsense):
        super().__init__(app, nodes)
        self.nonsense, self.spoiled = nonsense, 0

    def answer(self, message):
        answers = super().answer(message)
        owner = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        if owner != 0 or message.metadata.message_type != TRAIN:
            return answers
        order = unpack(Order, message)
        self.spoiled += 1
        false = Delivery(release=release_id(order), owner=0)
        return [Message(pack(false, self.nonsense(31)), reply_to=message)]


NONSENSE = {
    "not finite": lambda length: np.full(length, np.nan),
    "too long": lambda length: np.full(length, 1e30),
    "too short": lambda length: np.zeros(3),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_bad_update_is_charged_to_the_registered_cap_and_not_paid(tmp_path, kind):
    """The broker charged it, plain Flower did not: what left is charged, paid or not."""
    spec = market(budget_factor=2.0).simulation()
    ledger = MemoryLedger()
    for owner in range(OWNERS):
        ledger.register_cap(owner_account(owner), PureDp(100.0))
    dealer = Dealer(store_spec(spec, tmp_path), tmp_path / "owners")
    grid = Spoiler(client_app(dealer), OWNERS, NONSENSE[kind])
    KindStrategy(spec.kind(), ledger, FileStore(tmp_path / "server"), bid_seconds=20.0, train_seconds=20.0).start(grid)
    ledger.verify()
    hers = [award for award in ledger.awards() if award.owner == "owner-0"]
    assert grid.spoiled
    assert hers
    assert {award.state for award in hers} == {AwardState.VOIDED}
    assert ledger.balance("owner-0") == 0
    assert ledger.privacy_spent("owner-0") == pytest.approx(sum(award.loss.epsilon for award in hers))
    assert {release.award_id for release in ledger.releases("owner-0")} == {award.id for award in hers}
