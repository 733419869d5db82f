"""A server that chooses every field of every message, against two owners who differ in their records only.

`TwoWorlds` sends each message to both. What it gets back must be the same in everything but the numbers of a charged
delivery: kind of answer, words, sizes, bids, and the accounts afterwards. If so, whatever the server learns about
records it learns through the randomizer's output, however it chooses its messages (they may depend on all answers of
the first world). `gain` is the other half: how well the numbers themselves tell the worlds apart.
"""

import json
from dataclasses import fields, replace

import numpy as np
from flwr.app import Message
from scipy import stats

from flmarket.bids import Kind, Valuations
from flmarket.engines.flower import InProcessGrid, Owner, client_app
from flmarket.engines.flower.messages import (
    BID,
    RELEASE,
    TRAIN,
    Delivery,
    Refusal,
    pack,
    unpack,
    unpack_head,
    unpack_vector,
)  # fmt: skip
from flmarket.errors import FlmarketError
from flmarket.learning import LocalTraining, SoftmaxRegression, described
from flmarket.ledger import Award, DurableAccount, MemoryLedger
from flmarket.market import Announcement, Bid, Order, kinds, owner_account
from flmarket.privacy import ApproxDp, PureDp, RecordLevel, Unprotected, ZCdp
from flmarket.privacy.joint import LocalPerturbation

FEATURES, RECORDS, NUMBER = 3, 20, 7
LENGTH = FEATURES + 1  # two classes: one row of weights and a bias


def softmax(features=FEATURES, classes=2, l2=0.0, **local):
    """How an announcement names the usual model."""
    return described(SoftmaxRegression(features, max(classes, 2), l2, local=LocalTraining(**local)))


def terms_of(market, **changes):
    """What an announcement says beside the usual in each kind of market."""
    said = {
        "auction": {},
        "reward": {"perturbation": "gaussian-zcdp"},
        "joint": {"perturbation": "m3", "settings": m3(), "model": softmax(steps=2)},
        "sampling": {"perturbation": "", "clip": 0.0},
    }[market]
    return {"market": market, **said} | changes


def m3(**choices):
    """What an announcement says of M3's noise."""
    return json.dumps(LocalPerturbation(**choices).choices, sort_keys=True)


def call(**changes) -> Announcement:
    """An announcement of an auction round; `features` and `classes` change the model with them."""
    terms = dict(  # noqa: C408
        task="t", buyer="buyer", market="auction", round_index=0, rounds=5, features=FEATURES, classes=2,
        perturbation="laplace-l1", clip=1.0, parameters=LENGTH, learning_rate=0.1,
    ) | changes  # fmt: skip
    return Announcement(**({"model": softmax(terms["features"], terms["classes"])} | terms))


def loss(market, amount, by_record=False):
    """So much of the currency in which bids of a market are."""
    kinds_of = {
        "reward": lambda rho: RecordLevel(ZCdp(rho)),
        "joint": lambda epsilon: ApproxDp(epsilon, 1e-5),
        "sampling": lambda _: Unprotected(),
    }
    found = kinds_of.get(market, PureDp)(amount)
    return RecordLevel(found) if by_record and market == "joint" else found


def order(amount=0.5, **changes) -> Order:
    """The order that follows from an announcement of these terms, at a price that its owner accepts."""
    known = {field.name for field in fields(Order)}
    assert changes.keys() <= known | {field.name for field in fields(Announcement)}
    terms = dict(  # noqa: C408
        task="t", buyer="buyer", market="auction", round_index=0, owner=NUMBER,
        price_micros=20_000_000, records=RECORDS, learning_rate=0.1,
    ) | {name: value for name, value in changes.items() if name in known}  # fmt: skip
    lasting = terms["market"] in kinds.names() and kinds.of(terms["market"]).side.lasting
    follows = {
        "award": f"{terms['task']}/{0 if lasting else terms['round_index']}/{terms['owner']}",
        "lasting": lasting,
        "loss": loss(terms["market"], amount, '"unit": "record"' in changes.get("settings", "")),
    }
    return Order(**(follows | terms))


def make_owner(folder, **changes) -> Owner:
    """An owner with records of her own: her noise is the secure one, unless a seed is given."""
    rng = np.random.default_rng(0)
    values = dict(  # noqa: C408
        number=NUMBER, x=rng.normal(size=(RECORDS, FEATURES)), y=np.arange(RECORDS) % 2, privacy_budget=0.5,
        valuation=Valuations([int(Kind.LINEAR)], [1.0]), cap=PureDp(2.0), record=folder / f"owner-{NUMBER}",
    )  # fmt: skip
    return Owner(**(values | changes))


class Tiny:
    """A model of somebody's own, known by its path only."""

    def __init__(self, features, classes):
        inner = SoftmaxRegression(features, classes)
        self.tensors, self.initial, self.train, self.evaluate = (
            inner.tensors,
            inner.initial,
            inner.train,
            inner.evaluate,
        )


class Desk:
    """One owner's shipped app, and a ledger of the server's own that really holds the prices."""

    def __init__(self, folder, compute=None, app=client_app, ledger=None, **changes):
        self.owner = make_owner(folder, **changes)
        self.grid = InProcessGrid(app(lambda context: self.owner, compute), 1)
        self.ledger = MemoryLedger() if ledger is None else ledger
        self.seen = {}  # by task and round: the head that she goes by

    def send(self, kind, content):
        (node,) = self.grid.get_node_ids()
        (answer,) = self.grid.send_and_receive([Message(content, node, kind)])
        return answer

    def bid(self, announcement=None, **changes):
        announcement = call(**changes) if announcement is None else replace(announcement, **changes)
        answer = self.send(BID, pack(announcement, head=self.ledger.head()))
        self.remember(announcement, answer)
        return answer

    def remember(self, announcement, answer):
        """What a bid says of the head that its order's proof must extend."""
        if answer.has_content() and unpack(Bid, answer) is not None:
            self.seen[announcement.task, announcement.round_index] = unpack_head(answer)

    def train(self, wanted=None, parameters=None, held=True, dtype="float64", **changes):
        wanted = order(**changes) if wanted is None else replace(wanted, **changes)
        start = np.zeros(LENGTH) if parameters is None else parameters
        return self.send(TRAIN, pack(wanted, start, escrow=self.proof(wanted) if held else None, dtype=dtype))

    def release(self, wanted):
        return self.send(RELEASE, pack(wanted))

    def proof(self, wanted):
        """A true proof that the order's price is in escrow, where the server's ledger can give one."""
        account, price = self.owner.account or owner_account(wanted.owner), wanted.price_micros
        once = wanted.market in kinds.names() and kinds.of(wanted.market).side.asks_once
        seen = self.seen.get((wanted.task, 0 if once else wanted.round_index))
        try:
            self.ledger.deposit(f"{wanted.award}/{price}", "buyer", price)
            self.ledger.hold(Award(wanted.award, 0, "buyer", account, 1.0, price))
            since = {} if seen is None else {wanted.award: seen}
            return self.ledger.hold_receipts([wanted.award], since)[wanted.award]
        except FlmarketError:
            return None

    @property
    def account(self):
        return DurableAccount.open(self.owner.record.with_suffix(".account.sqlite"))

    @property
    def releases(self):
        with self.account as account:
            return [release.award_id for release in account.releases()]

    @property
    def spent(self):
        with self.account as account:
            return account.spent


def visible(answer):
    """Everything that the server sees of an answer but the numbers of its vector."""
    if answer.has_error():
        return ("error", answer.error.code)
    records = {name: dict(record) for name, record in answer.content.config_records.items()}
    arrays = {
        (name, key): (array.dtype, tuple(array.shape), len(array.data))
        for name, record in answer.content.array_records.items()
        for key, array in record.items()
    }
    return (
        answer.metadata.message_type,
        records,
        arrays,
        sorted(answer.content),
        sorted(answer.content.metric_records),
    )


class TwoWorlds:
    """The same messages to two owners whose records differ; `AssertionError` once an answer tells them apart."""

    def __init__(self, folder, first, second, compute=None, app=client_app, **changes):
        ledger = MemoryLedger(clock=lambda: 0)
        self.desks = [
            Desk(folder / name, compute=compute, app=app, ledger=ledger, **(changes | data))
            for name, data in (("first", first), ("second", second))
        ]
        self.messages = 0

    def send(self, kind, content):
        answers = [desk.send(kind, content) for desk in self.desks]
        self.messages += 1
        first, second = (visible(answer) for answer in answers)
        assert first == second, f"an answer depends on records: {first} or {second}"
        return answers[0]

    def bid(self, announcement=None, **changes):
        announcement = call(**changes) if announcement is None else replace(announcement, **changes)
        answer = self.send(BID, pack(announcement, head=self.desks[0].ledger.head()))
        self.desks[0].remember(announcement, answer)
        return answer

    def train(self, wanted=None, parameters=None, dtype="float64", **changes):
        wanted = order(**changes) if wanted is None else replace(wanted, **changes)
        start = np.zeros(LENGTH) if parameters is None else parameters
        return self.send(TRAIN, pack(wanted, start, escrow=self.desks[0].proof(wanted), dtype=dtype))

    def release(self, wanted):
        return self.send(RELEASE, pack(wanted))

    def check_accounts(self):
        """Both accounts say the same, and hold."""
        assert self.desks[0].releases == self.desks[1].releases
        for desk in self.desks:
            with desk.account as account:
                assert account.spent <= getattr(account.cap, "epsilon", np.inf) * (1 + 1e-9)


def refused(answer, code):
    """A refusal with this code, and nothing beside it."""
    refusal = unpack(Refusal, answer)
    assert refusal is not None, "something other than a refusal left"
    assert refusal.code == code, refusal
    assert set(answer.content) == {"refusal"}
    return True


def delivered(answer):
    """The vector of a delivery."""
    assert unpack(Delivery, answer) is not None, unpack(Refusal, answer)
    assert set(answer.content) == {"delivery", "vector"}
    return unpack_vector(answer)


def too_good(wins: int, trials: int, epsilon: float, *, alpha: float = 1e-6) -> bool:
    """Whether so many right guesses between two worlds refute ε-DP, with a false alarm in one of 1/α cases.

    Under ε-DP nobody guesses a fair coin's side right more often than e^ε/(1 + e^ε) (Kairouz, Oh, Viswanath 2015).
    """
    return bool(stats.binom.sf(wins - 1, trials, np.exp(epsilon) / (1 + np.exp(epsilon))) < alpha)
