"""An adaptive hostile server against the shipped app: for every kind and mechanism, no gain beyond what was charged.

Two halves. *Nothing but numbers*: thousands of messages with fields chosen at random, by extremes and from earlier
answers go to two owners whose records differ; whatever is not the vector of a charged delivery must be equal, so that
only the randomizer's output can tell anything (see `hostile.TwoWorlds`). *The numbers*: worst-case updates of two
worlds are bought again and again, and the server guesses which world each release came from; it must not be right more
often than the guarantee in the owner's own account allows. A false alarm has probability below 1e-6 per test.

`make attack` runs this file with 10,000 messages per kind and mechanism; `make test` with fewer.
"""

import os
from dataclasses import fields, replace
from itertools import count

import numpy as np
import pytest

pytest.importorskip("flwr")

from hostile import FEATURES, LENGTH, RECORDS, Desk, TwoWorlds, call, delivered, m3, order, softmax, terms_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scipy import stats

from flmarket import privacy
from flmarket.engines.flower.messages import BID, RELEASE, TRAIN, pack, unpack, unpack_vector
from flmarket.ledger import DurableAccount
from flmarket.market import Announcement, Bid, Order
from flmarket.market.record import close_records
from flmarket.privacy import ApproxDp, GaussianRelease, PureDp, RecordLevel, Uncapped, Unprotected, ZCdp

MESSAGES = int(os.environ.get("FLMARKET_HOSTILE_MESSAGES", "450"))
RNG = np.random.default_rng(5)
FIRST = {"x": RNG.normal(size=(RECORDS, FEATURES)), "y": np.zeros(RECORDS, dtype=int)}
SECOND = {"x": 1e6 * RNG.normal(size=(RECORDS, FEATURES)), "y": np.arange(RECORDS) % 3}
KINDS = {
    **{f"auction {name}": terms_of("auction", perturbation=name) for name in privacy.names()},
    "reward": terms_of("reward"),
    "reward, with a penalty": terms_of("reward", model=softmax(l2=2.0**23)),
    "joint": terms_of("joint"),
    "joint, a record": terms_of("joint", settings=m3(calibration="paper", unit="record")),
    "sampling": terms_of("sampling"),
}
RECORDS_SOLD = ("reward", "joint, a record")  # by whom a loss is one of a record
MODELS = [
    softmax(), softmax(steps=3), softmax(batch_size=2), softmax(l2=1e9), softmax(learning_rate=1e9), softmax(5),
    softmax(classes=4), softmax(epochs=3), '{"classes":2,"features":3,"local":null,"name":"os:system","settings":{}}',
]  # fmt: skip
TEXTS = ["", "t", "buyer", "auction", "reward", "joint", "sampling", "sphere", "t/0/7", "x" * 400, "{}", m3(delta=0.4)]
LOSSES = [PureDp(0.0), PureDp(0.3), PureDp(1e9), ZCdp(0.2), ApproxDp(0.3, 1e-5), ApproxDp(0.3, 0.4), Unprotected()]
LOSSES += [RecordLevel(ZCdp(0.2)), RecordLevel(ApproxDp(0.3, 1e-5))]


def owner_for(kind):
    """Settings under which an owner takes part in a kind; raw updates fit under no cap."""
    market = KINDS[kind]["market"]
    pure = market == "auction" and isinstance(privacy.get(call(**KINDS[kind]).perturbation).guarantee(0.5), PureDp)
    cap = Uncapped() if market == "sampling" else PureDp(20.0) if pure else ApproxDp(1e4, 1e-5)
    if kind.startswith(RECORDS_SOLD):
        cap = RecordLevel(cap)
    return {"cap": cap, "value": 1.0, "allow_raw": market == "sampling"}


@pytest.fixture(autouse=True)
def closed_records():
    yield
    close_records()


class Server:
    """Chooses everything, and remembers what it was told."""

    def __init__(self, worlds, kind, seed):
        self.worlds, self.rng, self.terms = worlds, np.random.default_rng(seed), KINDS[kind]
        self.rounds, self.orders, self.last = [0], [], np.zeros(LENGTH)

    def number(self):
        odd = [0.0, 1e-9, 0.1, 0.5, 1.0, 2.0, 1e9, 1e300, float("inf"), float(self.rng.normal() ** 2)]
        return odd[self.rng.integers(len(odd))]

    def changed(self, value, most=2):
        """The same message with up to so many fields replaced by something odd."""
        for field in self.rng.choice(fields(value), self.rng.integers(most + 1), replace=False):
            kind = str(field.type)
            odd = MODELS if field.name == "model" else {"str": TEXTS, "Event": LOSSES, "bool": [True, False]}.get(kind)
            if odd is not None:
                new = odd[self.rng.integers(len(odd))]
            elif kind == "int":
                new = int([0, 1, 2, 3, 5, 7, 19, 21, 2**40][self.rng.integers(9)])
            else:
                new = self.number()
            value = replace(value, **{field.name: new})
        return value

    def parameters(self):
        """Anything: zeros, extremes, nonsense, or what was delivered last, larger."""
        choice = self.rng.integers(7)
        if choice == 0:
            return np.zeros(self.rng.integers(1, 9))
        if choice == 1:
            return np.full(LENGTH, [np.nan, np.inf, -1e308, 1e9][self.rng.integers(4)])
        if choice == 2:
            return 1e9 * np.eye(LENGTH)[self.rng.integers(LENGTH)]
        if choice == 3:
            return np.clip(self.last * 10.0 ** self.rng.integers(12), -1e9, 1e9)
        return self.rng.normal(size=LENGTH) * 10.0 ** self.rng.integers(-3, 9)

    def step(self):
        action = self.rng.random()
        index = int(self.rng.choice(self.rounds))
        if action < 0.3:
            index = len(self.rounds) if self.rng.random() < 0.7 else index
            wanted = self.changed(call(round_index=index, **self.terms), most=1)
            answer = self.worlds.bid(wanted)
            if answer.has_content() and unpack(Bid, answer) is not None:
                self.rounds.append(index)
        elif action < 0.8:
            lasting = self.terms["market"] in ("reward", "joint")  # one award for five rounds
            amount = float(self.rng.uniform(0.01, 0.5))
            made = order(amount, round_index=index % 5 if lasting else index, **self.terms)
            made = self.changed(made) if self.rng.random() < 0.6 else made
            dtype = ["float64", "float64", "float32", "float16"][self.rng.integers(4)]
            answer = self.worlds.train(made, parameters=self.parameters(), dtype=dtype)
            self.orders.append(made)
            if answer.has_content() and answer.content.array_records:
                self.last = unpack_vector(answer)
        elif action < 0.9 and self.orders:
            self.worlds.release(self.orders[self.rng.integers(len(self.orders))])
        else:
            kind = [BID, TRAIN, RELEASE, "evaluate", "query.data"][self.rng.integers(5)]
            self.worlds.send(kind, pack(self.changed(order(**self.terms), most=4), self.parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_but_a_charged_vector_depends_on_records(tmp_path, kind):
    worlds = TwoWorlds(tmp_path, FIRST, SECOND, **owner_for(kind))
    server = Server(worlds, kind, seed=len(kind))
    worlds.bid(call(**KINDS[kind]))  # or the first one, which stands for all rounds in some kinds, may be nonsense
    while worlds.messages < MESSAGES // 3:
        server.step()
        if worlds.messages % 97 == 0:
            close_records()  # her machine restarts
    worlds.check_accounts()
    assert worlds.desks[0].releases, "no message of this server was ever carried out"


def bought(kind, folder, trials, seed=0):
    """Worst-case updates bought from one of two worlds at random: how often the server guesses which, and the bound.

    The bound is that of the guarantee which the owner's own account shows for such a release.
    """
    terms, rng = KINDS[kind], np.random.default_rng(seed)
    market, reward = terms["market"], terms["market"] == "reward"
    by_record = kind.startswith(RECORDS_SOLD)  # then the guard trains, and what is worst is a record

    def update(sign):
        def compute(owner, wanted, parameters):
            change = np.zeros(LENGTH)
            change[0] = sign * call(**terms).clip
            return parameters + change if market == "joint" else change

        return compute

    def records(sign):
        """One record that pushes the first weight as far as its clip lets it; all others the same."""
        x = np.zeros((RECORDS, FEATURES))
        x[0, 0] = (sign if reward else -sign) * 1e6  # an update is subtracted, a model is not
        return {"x": x, "y": np.zeros(RECORDS, dtype=int)}

    cap = PureDp(1e9) if isinstance(owner_for(kind)["cap"], PureDp) else ZCdp(1e9)
    capped = {"cap": RecordLevel(cap) if by_record else cap, "privacy_budget": 8.0}
    desks = [
        Desk(folder / str(sign), update(sign), **(owner_for(kind) | capped | (records(sign) if by_record else {})))
        for sign in (1, -1)
    ]
    wins, tries = 0, count()
    for _ in range(trials):
        world = int(rng.integers(2))
        task = f"t{next(tries)}"
        desk = desks[world]
        asked = {"task": task, "rounds": 1} | terms
        assert unpack(Bid, desk.bid(**asked)) is not None
        # so much that 150 guesses show it: ε with a small δ shows much less than ε alone
        amount = 1.0 if reward else 2.0 if isinstance(cap, PureDp) else 8.0
        vector = delivered(desk.train(amount=amount, price_micros=10**9, **asked))
        wins += (vector[0] > 0) == (world == 0)
    with DurableAccount.open(desks[0].owner.record.with_suffix(".account.sqlite")) as account:
        guarantee = list(account.releases())[-1].guarantee
    assert isinstance(guarantee, RecordLevel) == by_record
    return wins, best_guess(guarantee.loss if by_record else guarantee)


def best_guess(guarantee):
    """The most often that anybody can be right about a fair coin after a release with this guarantee.

    Pure: e^ε/(1 + e^ε). Gaussian: Φ(Δ/2σ) (Neyman, Pearson). ρ-zCDP is charged for Gaussian noise here: Δ/σ = √(2ρ).
    """
    if isinstance(guarantee, GaussianRelease):
        return float(stats.norm.cdf(0.5 / guarantee.noise_multiplier))
    if isinstance(guarantee, ZCdp):
        return float(stats.norm.cdf(np.sqrt(2 * guarantee.rho) / 2))
    return float(np.exp(guarantee.epsilon) / (1 + np.exp(guarantee.epsilon)))


def refuted(wins, trials, bound, alpha=1e-6):
    return stats.binom.sf(wins - 1, trials, bound) < alpha


@pytest.mark.parametrize("kind", [kind for kind in KINDS if call(**KINDS[kind]).perturbation])
def test_guesses_from_releases_stay_within_what_was_charged(tmp_path, kind):
    trials = MESSAGES // 3
    wins, bound = bought(kind, tmp_path, trials)
    assert not refuted(wins, trials, bound), f"{wins} of {trials} right, at most {bound:.3f} allowed"
    assert wins > 0.5 * trials, "the attack does not even see the update: it tests nothing"


def test_planted_half_the_noise_is_caught(tmp_path, monkeypatch):
    honest = privacy.LaplaceL1.privatize
    monkeypatch.setattr(privacy.LaplaceL1, "privatize", lambda self, v, epsilon, rng: honest(self, v, 4 * epsilon, rng))
    wins, bound = bought("auction laplace-l1", tmp_path, 200)
    assert refuted(wins, 200, bound)


def odd_one(message, field, value, odd):
    """The message with one field made odd by a number."""
    if not odd:
        return message
    kind, number = type(getattr(message, field)), min(value, 2.0**40)
    if field == "model":
        return replace(message, model=MODELS[int(number) % len(MODELS)])
    if field == "loss":
        return replace(message, loss=LOSSES[int(number) % len(LOSSES)])
    return replace(message, **{field: f"{value}" if kind is str else kind(number)})


class HostileServer(RuleBasedStateMachine):
    """Hypothesis chooses the messages, and shrinks what it finds."""

    @initialize(kind=st.sampled_from(sorted(KINDS)))
    def begin(self, kind):
        import tempfile
        from pathlib import Path

        self.kind, self.rounds, self.orders = kind, 0, []
        self.worlds = TwoWorlds(Path(tempfile.mkdtemp()), FIRST, SECOND, **owner_for(kind))

    @rule(
        field=st.sampled_from([f.name for f in fields(Announcement)]),
        value=st.floats(0, allow_nan=False),
        odd=st.booleans(),
    )
    def announce(self, field, value, odd):
        wanted = odd_one(call(round_index=self.rounds, **KINDS[self.kind]), field, value, odd)
        self.worlds.bid(wanted)
        self.rounds += 1

    @rule(
        index=st.integers(0, 5),
        field=st.sampled_from([f.name for f in fields(Order)]),
        value=st.floats(0, allow_nan=False),
        odd=st.booleans(),
        scale=st.floats(allow_nan=True),
    )
    def ask(self, index, field, value, odd, scale):
        wanted = odd_one(order(0.3, round_index=index, **KINDS[self.kind]), field, value, odd)
        self.orders.append(wanted)
        with np.errstate(all="ignore"):
            self.worlds.train(wanted, parameters=np.full(LENGTH, scale))

    @rule(which=st.integers(0, 20))
    def ask_again(self, which):
        if self.orders:
            self.worlds.release(self.orders[which % len(self.orders)])

    @rule()
    def restart(self):
        close_records()

    @invariant()
    def accounts_agree_and_hold(self):
        if hasattr(self, "worlds") and self.worlds.messages and self.worlds.messages % 5 == 0 and self.orders:
            self.worlds.check_accounts()

    def teardown(self):
        close_records()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestHostileServer(HostileServer.TestCase):
    settings = settings(max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
