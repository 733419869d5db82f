"""An owner and her guard: what she holds and asks, and what stands between that and everybody else.

The same object in memory and on a node. Nothing passes the guard but four things: a bid cut to what her account still
allows, a private vector, the same vector again, and refusals. What training returns stops here.

**Decided on terms and books alone.** An order is carried out only if

- it is for her, for a round she bid in, and its award id is the one that follows from task, round and owner;
- where only a sum of updates is to be seen, she admits that trust model, and the loss it names is no less than what her
  weight and the noise of as many honest others as announced come to;
- it asks for no more privacy and no more records than she bid, no less than she sells at all, and for training at no
  higher rate than announced, from parameters that are finite, bounded and as many as announced (all other terms of
  training are those of the announcement itself: an order cannot name any);
- its price is at least what her own valuation says this costs her, and a proof shows that it is in escrow, in a ledger
  that extends the head she had seen when she bid;
- it was never carried out before, not even begun;
- her account, kept on her own disk over all runs and buyers, can pay for it.

Then, in this order: claim the release, charge the account, and only then touch her records. From there on nothing but
noise may tell anything: whatever goes wrong (an error, numbers that are not finite, a wrong shape, too long a time) is
answered by an update of nothing, *with its noise*, of the same form and size. So before the charge an answer does not
depend on records, and after it only through the randomizer whose loss was charged. A crash anywhere costs privacy
budget, never privacy; a release that was begun and never finished is answered in the same way when asked for again.

The guard fails closed: errors before the charge become refusals whose words come from this module.

What would break it: code that reads the data and is not behind the guard. Flower runs the app that the *server* sends;
an owner must allow only apps she trusts (docs/flower.md, "What the guard cannot do"). Time: unless she fixes
`answer_seconds`, how long training took is visible (measured in docs/limitations.md). A training function that ends the
whole process is seen as silence.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, overload

import numpy as np

from flmarket import privacy
from flmarket.bids import FloatArray, IntArray, Kind, Valuations
from flmarket.errors import ConfigError, FlmarketError, InvalidInput, PrivacyBudgetExhausted, SumVoid, Tampered
from flmarket.learning import Model, Purpose, Records, built, dimension, stream, updates
from flmarket.learning.adversaries import Adversary
from flmarket.ledger import MICROS, Head, HoldNotProven, HoldReceipt, ReplayRefused
from flmarket.market.kind import (
    Announcement,
    Bid,
    Order,
    RawUpdate,
    Refused,
    ReleasedUpdate,
    award_id,
    cost,
    kinds,
    length_of,
    on_wire,
    owner_account,
    release_id,
)
from flmarket.market.record import Offer, OwnerRecord, open_record
from flmarket.privacy import (
    ApproxDp,
    Cap,
    Event,
    NoiseSource,
    Perturbation,
    PureDp,
    RecordLevel,
    SecureNoise,
    SimulationNoise,
    Uncapped,
    Unit,
    Unprotected,
    ZCdp,
    unit_of,
)
from flmarket.privacy.events import ROUNDING_ALLOWANCE

LARGEST_PARAMETER = 1e9
# Below this an owner has, in effect, nothing left to sell, and noise would drown the release.
LEAST_EPSILON = 1e-3
# What "no cap" means to an account, which must have one.
UNLIMITED = 1e9
# Of owners in markets that ask for a value, and for no valuation.
UNASKED = Valuations([int(Kind.LINEAR)], [1.0])
# Why an account has no room for what a kind of market sells.
COUNTS_UPDATES = 'a cap of whole updates has no room for losses of records: unit = "record" with it'
REPLAY = "replay"  # the refusal's code if the release was begun before
MASKING = "masking"  # if a masked sum is not in order; the words say whose part
_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class PrivacyCap:
    """The most privacy an owner gives up over her lifetime: ε in total, at δ (0 for pure ε)."""

    epsilon: float = math.inf
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise InvalidInput("privacy cap", self.epsilon, "a total ε above 0")
        if not 0 <= self.delta < 1:
            raise InvalidInput("privacy cap δ", self.delta, "a probability below 1")

    @property
    def cap(self) -> Cap:
        """As an account takes it."""
        limit = min(self.epsilon, UNLIMITED)
        return ApproxDp(limit, self.delta) if self.delta > 0 else PureDp(limit)

    @property
    def records(self) -> RecordLevel:
        """As an account for losses of single records takes it."""
        inner = self.gaussian
        assert isinstance(inner, ZCdp | ApproxDp)
        return RecordLevel(inner)

    @property
    def gaussian(self) -> Cap:
        """As an account for Gaussian noise takes it, which needs ρ or (ε, δ)."""
        if math.isinf(self.epsilon):
            return ZCdp(UNLIMITED)
        if self.delta == 0:
            what = "a δ above 0: a cap in ε alone holds no Gaussian noise"
            raise ConfigError("owners.privacy_cap_delta", self.delta, what)
        return ApproxDp(self.epsilon, self.delta)


def holds_noise(cap: Cap) -> str:
    """Why an account with this cap cannot hold Gaussian noise; empty if it can."""
    inner = cap.loss if isinstance(cap, RecordLevel) else cap
    pure = "a cap in ε alone cannot hold Gaussian noise: give delta with it, or rho instead"
    return pure if isinstance(inner, PureDp) else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Owner:
    """Who she is, what she holds, what she asks and where her record lies.

    `privacy_budget` is the most she sells in one round (in the reward game: in one task, as ρ). `value` is her cost of
    taking part, or her value of privacy, in markets that ask for that; without it she stays out of them. She trains the
    announced model, built from what is installed on her own machine (`allow` names models by `package.module:Name` that
    she admits besides the registered ones), or `model` if she has one of her own for it. `allow_raw` lets updates leave
    without any noise, which sampling markets need; they count as unbounded, so it takes an account without a cap.
    `classes` is how many her records have, as she says; without it she bids for any number, because a bid must not
    depend on her records. `account` is hers in the buyer's ledger, if she knows it, and `cost` how a value of privacy
    becomes a cost in reward games.

    `trust` names the models of trust that she admits: releases that are private by themselves ("local"), sums of which
    nobody sees the parts ("secure-aggregation"), where what protects her is also the noise of others.

    `holds` is how many records she sells where only her own app can read them; `x` and `y` are then left out, and
    `trainer` says what is trained. `reads` has the app read so many of them, where the guard itself trains.

    `least_epsilon` and `least_records` are the least that she sells at once: they bound how often anybody can ask. She
    takes no price below `least_price` for a release, whatever her valuation says.
    Training that takes `most_seconds` is given up; `answer_seconds` makes every answer to an order leave so long after
    it came, whatever training did (at most half of it is for training).

    In masked sums she is known by `identity`, her Ed25519 key, and knows others by their public ones in `peers`, from
    anywhere but the broker; any sum that she is in has at least `least_honest` owners who do not collude with the
    broker, herself among them.

    For simulations only: `simulation_seed` makes her noise repeatable and unsafe, `adversary` makes her malicious,
    `dropout` and `faulty` are probabilities of failing on purpose.
    """

    number: int
    x: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    y: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    valuation: Valuations
    privacy_budget: float
    cap: Cap
    holds: int | None = None
    reads: Callable[[int], Records] | None = None
    record: Path = Path()
    value: float | None = None
    model: Model | None = None
    trainer: Callable[[Announcement], Model | None] | None = None
    allow: tuple[str, ...] = ()
    adversary: Adversary | None = None
    classes: int | None = None
    account: str = ""
    cost: str = "linear"
    trust: tuple[str, ...] = ("local",)
    least_epsilon: float = LEAST_EPSILON
    least_records: int = 1
    least_price: float = 0.0
    most_seconds: float = 600.0
    answer_seconds: float | None = None
    simulation_seed: int | None = None
    allow_raw: bool = False
    identity: bytes = field(default=b"", repr=False)
    peers: Mapping[int, bytes] | None = None
    least_honest: int = 2
    dropout: float = 0.0
    faulty: float = 0.0

    def __post_init__(self) -> None:
        if self.x.ndim < 2 or self.y.shape != (len(self.x),) or not np.isfinite(self.x).all():
            raise InvalidInput("data", (self.x.shape, self.y.shape), "finite features (n, f) and n classes")
        if self.holds is not None and (self.holds < 1 or len(self.y)):
            raise InvalidInput("holds", self.holds, "a number of records of at least 1, and no table of them")
        if self.valuation.shape != (1,):
            raise InvalidInput("valuation", self.valuation.shape, "the valuation of one owner")

    @property
    def data_size(self) -> int:
        """How many records she sells."""
        return len(self.y) if self.holds is None else self.holds

    @property
    def simulated(self) -> bool:
        """Whether her noise is seeded: repeatable, and not private."""
        return self.simulation_seed is not None

    def noise(self, order: Order) -> NoiseSource:
        """Where the noise of a release comes from."""
        return SimulationNoise(self.stream(order, Purpose.NOISE)) if self.simulated else SecureNoise()

    def stream(self, order: Order, purpose: Purpose) -> np.random.Generator:
        """Her generator for one purpose in one round; drawn from the system unless she is simulated."""
        seed = secrets.randbits(128) if self.simulation_seed is None else self.simulation_seed
        return stream(seed, order.round_index, self.number, purpose=purpose)

    def records(self, count: int) -> Records:
        """The records that she sells: her first ones, which lie in random order."""
        if self.reads is not None:
            return self.reads(count)
        return Records(self.x[:count], self.y[:count])

    def trains(self, call: Announcement) -> Model | None:
        """What she trains for an announcement, if she can: her own model, or the announced one; None otherwise."""
        own = self.model
        if own is None and self.trainer is not None:
            own = self.trainer(call)
        if own is None and call.model:
            try:
                own = _built(call.model, self.allow)
            except FlmarketError as problem:
                _log.warning("owner %s cannot train what is announced: %s", self.number, problem)
        if own is None or dimension(own) != call.parameters:
            return None
        takes = [getattr(own, name, getattr(call, name)) for name in ("features", "classes")]
        return own if takes == [call.features, call.classes] else None

    def proposal(self, call: Announcement) -> Bid | None:
        """What she asks if she takes part at all; the guard cuts it to what her account allows.

        By her configuration and by how many records and features she has, never by what is in them.
        """
        side = kinds.of(call.market).side
        fits = self.data_size >= self.least_records and math.prod(self.x.shape[1:]) == call.features
        if call.trust not in self.trust or (call.trust != "local" and isinstance(self.cap, PureDp)):
            return None  # a cap in ε alone has no room for a share of Gaussian noise
        if not fits or (self.classes is not None and self.classes > call.classes):
            return None
        if side.unit(call) != unit_of(self.cap):  # another product than her account counts
            return None
        said = side.stays_out(value=self.value, allow_raw=self.allow_raw, cap=self.cap, trust=self.trust, call=call)
        if said or self.trains(call) is None:
            return None
        bid = side.bid(self, call)
        return None if bid.privacy_budget < bid.least_budget else bid


@lru_cache(maxsize=32)
def _built(text: str, allow: tuple[str, ...]) -> Model:
    return built(text, allow=allow)


@lru_cache(maxsize=32)
def _noise(name: str, clip: float) -> Perturbation:
    return privacy.get(name, clip=clip)


@dataclass(frozen=True, eq=False)
class Work:
    """An admitted order: whose it is, on which announcement, from which parameters, with which model."""

    owner: Owner
    call: Announcement
    order: Order
    parameters: FloatArray
    model: Model
    record: OwnerRecord

    @property
    def records(self) -> Records:
        """What is trained on."""
        return self.owner.records(self.order.records)


class Streams(Sequence[np.random.Generator]):
    """Everybody's generator for her batches, made when it is asked for."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def __len__(self) -> int:
        return len(self._works)

    @overload
    def __getitem__(self, index: int) -> np.random.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> Streams: ...
    def __getitem__(self, index: int | slice) -> np.random.Generator | Streams:
        found = self._works[index]
        return found.owner.stream(found.order, Purpose.BATCHES) if isinstance(found, Work) else Streams(found)


class OwnerSide:
    """What a kind of market means at an owner's. As it stands: one release a round for ε, by any perturbation.

    `asks_once`: bids are for all rounds. `lasting`: so are awards.
    """

    asks_once = False
    lasting = False

    def unit(self, call: Announcement) -> Unit:
        """What a loss is for in this market: her whole update, or any one of her records."""
        return "update"

    def stays_out(
        self, *, value: float | None, allow_raw: bool, cap: Cap, trust: Sequence[str], call: Announcement | None = None
    ) -> str:
        """Why she takes no part in markets of this kind, or in this one, by what her configuration says; empty if she
        does. `trust` are the models of trust that she admits."""
        return ""

    def bid(self, owner: Owner, call: Announcement) -> Bid:
        """What she asks: her valuation, for the most privacy that she sells at once."""
        grid, values, valued = (), (), owner.valuation
        if valued.grid is not None and valued.values is not None:
            grid, values = tuple(valued.grid[0].tolist()), tuple(valued.values[0].tolist())
        return Bid(
            owner=owner.number, data_size=owner.data_size, privacy_budget=owner.privacy_budget,
            kind=int(valued.kind[0]), rate=float(valued.rate[0]), grid=grid, values=values,
            least_budget=owner.least_epsilon, least_records=owner.least_records, unit=self.unit(call),
        )  # fmt: skip

    def reported(self, owner: Owner, call: Announcement, *, budget: float, least: float) -> Bid:
        """A bid that reports her value, where that is what is asked for."""
        return Bid(
            owner=owner.number, data_size=owner.data_size, privacy_budget=budget, kind=int(Kind.LINEAR),
            rate=owner.value or 0.0, least_budget=least, least_records=owner.least_records, unit=self.unit(call),
        )  # fmt: skip

    def amount(self, loss: Event, call: Announcement | None = None) -> float:
        """An order's loss in the currency of bids; raises InvalidInput for one of another kind."""
        if not isinstance(loss, PureDp):
            raise InvalidInput("loss", loss, "pure ε")
        return loss.epsilon

    def guarantee(self, amount: float, records: int, call: Announcement) -> Event:
        """What one release promises, for so much of the bid's currency on so many records."""
        return _noise(call.perturbation, call.clip).guarantee(amount)

    def given(self, order: Order, call: Announcement) -> Event:
        """What carrying out an order gives away; raises InvalidInput if the order says less."""
        return self.guarantee(self.amount(order.loss, call), order.records, call)

    def whole(self, call: Announcement, cap: Cap, records: int) -> tuple[Callable[[float], Event], int]:
        """What a bid of so much gives away: that of one release, and how many there are."""
        if isinstance(cap, PureDp):
            return PureDp, 1
        return lambda amount: self.guarantee(amount, records, call), 1

    def is_sound(self, call: Announcement) -> bool:
        """Whether the noise holds for numbers of finite precision, as what leaves a machine must."""
        return privacy.is_sound(_noise(call.perturbation, call.clip))

    def trains_itself(self, call: Announcement) -> bool:
        """Whether training is part of the guarantee: where records are protected each one's gradient is clipped."""
        return self.unit(call) == "record"

    def noises_itself(self, call: Announcement) -> bool:
        """Whether what `train` returns is private already; `privatise` is then for updates of nothing only."""
        return False

    def asked(self, owner: Owner, bid: Bid, order: Order, call: Announcement) -> float:
        """The least price that covers her cost, by her own valuation."""
        return cost(bid, self.amount(order.loss, call), order.records)

    def train(self, works: Sequence[Work]) -> FloatArray:
        """Raw updates of several owners of one announcement, one a row; each as if she were alone."""
        first = works[0]
        return updates(first.model, first.parameters, [work.records for work in works], Streams(works))

    def privatise(self, work: Work, raw: RawUpdate, noise: NoiseSource) -> ReleasedUpdate:
        """Clip, and noise."""
        noised = _noise(work.call.perturbation, work.call.clip)
        return ReleasedUpdate(noised.privatize(raw, self.amount(work.order.loss, work.call), noise))

    def nothing(self, parameters: FloatArray) -> RawUpdate:
        """An update of nothing."""
        return RawUpdate(np.zeros_like(parameters))


class _Stop(Exception):
    """Stops an order; `code` is for machines, the text for people."""

    def __init__(self, code: str, reason: str) -> None:
        self.code = code
        super().__init__(reason)


def guarded(answer: Callable[[], _Answer]) -> _Answer | Refused:
    """What a guard answers, its refusals included; it never raises, and only this module's words leave."""
    try:
        return answer()
    except _Stop as stop:
        return Refused(stop.code, str(stop), replayed=stop.code == REPLAY)
    except PrivacyBudgetExhausted:
        return Refused("cap", "the release would take the owner past her own cap")
    except (SumVoid, Tampered) as problem:
        return Refused(MASKING, str(problem))
    except ReplayRefused:
        return Refused(REPLAY, "this award was released for before", replayed=True)
    except Exception as error:
        # Only the kind of error leaves. No record was touched: what fails later is answered by noise.
        _log.exception("refused after an error")
        return Refused("error", f"the owner's machine could not carry it out ({type(error).__name__})")


class Guard:
    """One owner and her record."""

    def __init__(self, owner: Owner, record: OwnerRecord | None = None) -> None:
        self.owner = owner
        if record is None:
            record = open_record(owner.record, owner.cap, synchronised=not owner.simulated)
        self.record: OwnerRecord = record
        self.journal, self.account = self.record.journal, self.record.account
        self._proposal: tuple[Announcement, Bid | None] | None = None  # the latest, where the account cuts it anew

    def bid(self, call: Announcement, head: Head | None = None) -> tuple[Bid, Head | None]:
        """What she proposes by her own configuration, cut to what her account allows, on record before it is said.

        With it the head that she goes by: the largest that a proof has shown her, or the one that came along.
        """
        standing = self.journal.offer(call.task, call.round_index)
        if standing is None:
            seen = self.journal.head(call.task) or head
            offer = Offer(call, self.proposed(call), seen if seen is not None and seen.size else None)
            standing = self.journal.make_offer(offer)
        if standing.call != call:
            raise _Stop("terms", "the owner made a bid for this round on other terms")
        return standing.bid, standing.seen

    def offer(self, call: Announcement, bid: Bid) -> None:
        """Put on record what she offered, where that is known from elsewhere."""
        self.journal.make_offer(Offer(call, bid, None))

    def proposed(self, call: Announcement) -> Bid:
        """The bid that she would make now."""
        if self._proposal is None or self._proposal[0] is not call:
            self._proposal = call, self.owner.proposal(call) if call.market in kinds else None
        proposed, number = self._proposal[1], self.owner.number
        if proposed is None:
            raise _Stop("abstains", "the owner does not take part in this round")
        left = self._left(call, proposed)
        if left < proposed.least_budget:
            raise _Stop("exhausted", "the owner has sold all the privacy that she sells")
        same = (proposed.owner, proposed.privacy_budget) == (number, left)
        return proposed if same else replace(proposed, owner=number, privacy_budget=left)

    def train(
        self,
        order: Order,
        parameters: FloatArray,
        escrow: HoldReceipt | None = None,
        compute: Callable[[], object] | None = None,
        settings: str | None = None,
        *,
        masked: bool = False,
    ) -> ReleasedUpdate:
        """Check the order, claim, charge; then train (or `compute`, in her own way), randomise, keep, answer.

        `settings`: what came with the order and must be what was announced, where an order repeats it. `masked`: her
        share in a sum, which whoever calls masks before it leaves; if it was made before, it once more.
        """
        if not masked:
            self._leaves_alone(order)
        made = self.journal.released(order) if order.share else None
        if made is not None:
            return ReleasedUpdate(made)
        arrived = time.monotonic()
        work = self.admit(order, parameters, escrow, settings)
        vector = self.finish(work, self._trained(work, compute))
        if self.owner.answer_seconds is not None:
            time.sleep(max(0.0, arrived + self.owner.answer_seconds - time.monotonic()))
        return vector

    def admit(
        self, order: Order, parameters: FloatArray, escrow: HoldReceipt | None = None, settings: str | None = None
    ) -> Work:
        """Decide on terms and books; then claim and charge. From here on something must leave."""
        offer, side = self._standing(order), kinds.of(order.market).side
        call = offer.call
        self._check_terms(order, offer)
        if settings is not None and settings != call.settings:
            raise _Stop("terms", "what came with the order is not what was announced")
        if parameters.shape != (call.parameters,):
            raise _Stop("parameters", f"{parameters.shape} parameters came, {call.parameters} were announced")
        small = length_of(parameters) < LARGEST_PARAMETER / 2  # as ever; else it takes a look at each
        if not (small or (np.abs(parameters) <= LARGEST_PARAMETER).all()):
            raise _Stop("parameters", f"parameters are finite and within ±{LARGEST_PARAMETER:g}")
        model = self.owner.trains(call)
        if model is None:
            raise _Stop("model", "the owner cannot train what was announced any more")
        release = release_id(order)
        if self.journal.claimed(release):
            raise _Stop(REPLAY, f"{release} was released before; ask for the release itself")
        if not self.owner.simulated and call.perturbation and not side.is_sound(call):
            raise _Stop("unsound", f"{call.perturbation} is private for ideal numbers only: simulations may use it")
        guarantee = self._given(order, call)
        if isinstance(guarantee, Unprotected) and not self.owner.allow_raw:
            raise _Stop("raw", "this owner lets nothing leave without noise")
        asked = max(side.asked(self.owner, offer.bid, order, call), self.owner.least_price)
        if not order.price_micros >= np.floor(asked * MICROS * (1 - ROUNDING_ALLOWANCE)):  # payments round down
            raise _Stop("price", "the price is below what this release costs the owner by her own valuation")
        self._check_escrow(order, escrow, offer.seen)
        if not self.journal.claim(order, self._work_seconds):
            raise _Stop(REPLAY, f"{release} was released before; ask for the release itself")
        self.account.charge(release, order.buyer, guarantee)
        return Work(self.owner, call, order, parameters, model, self.record)

    def finish(self, work: Work, raw: object) -> ReleasedUpdate:
        """What training gave, made private, kept, and returned; if it is not in form, an update of nothing instead."""
        vector, side = _in_form(raw, work), kinds.of(work.call.market).side
        if vector is not None and side.noises_itself(work.call):
            return ReleasedUpdate(self.journal.keep(work.order, on_wire(ReleasedUpdate(vector), work.model)))
        try:
            private = self._private(work, side.nothing(work.parameters) if vector is None else vector)
        except Exception:
            _log.exception("the update could not be made private: one of nothing leaves")
            private = self._private(work, side.nothing(work.parameters))
        # a share in a sum is whole numbers, which fewer bits would spoil
        sent = private if work.order.share else on_wire(private, work.model)
        return ReleasedUpdate(self.journal.keep(work.order, sent))

    def release(self, order: Order) -> ReleasedUpdate:
        """The vector that left before, under the same terms: bytes that the buyer may have already.

        If her machine died while it was at work on it, nothing left: then noise around an update of nothing.
        """
        self._leaves_alone(order)
        release, vector = release_id(order), self.journal.released(order)
        if vector is None and self.journal.given_up(order) and self.account.released(release):
            call = self._standing(order).call
            start, model = np.zeros(call.parameters), self.owner.trains(call)
            if model is not None:
                work = Work(self.owner, call, order, start, model, self.record)
                vector = self.finish(work, None)
        if vector is None:
            raise _Stop("unreleased", f"nothing was released for {release} under these terms")
        return ReleasedUpdate(vector)

    def ordered(self, order: Order) -> Announcement:
        """The announcement that an order answers to, if it is on the terms that she bid for; nothing is claimed yet."""
        offer = self._standing(order)
        self._check_terms(order, offer)
        self._given(order, offer.call)
        return offer.call

    # terms and books

    def _leaves_alone(self, order: Order) -> None:
        """A share in a sum leaves masked only, if it is anybody's in earnest."""
        if order.share and not self.owner.simulated:
            raise _Stop(MASKING, "a share in a sum leaves this owner's machine masked only")

    def _standing(self, order: Order) -> Offer:
        """The announcement that the order refers to, and what she offered for it."""
        if order.owner != self.owner.number:
            raise _Stop("stranger", f"the order is for owner {order.owner}")
        if order.market not in kinds:
            raise _Stop("market", f"{order.market!r} is no market that this owner knows")
        side = kinds.of(order.market).side
        first = 0 if side.lasting else order.round_index
        if order.lasting != side.lasting or order.award != award_id(order.task, first, self.owner.number):
            raise _Stop("award", f"award {order.award!r} is not the one of this task, round and owner")
        offered = self.journal.offer(order.task, 0 if side.asks_once else order.round_index)
        if offered is None:
            raise _Stop("no bid", "the owner made no bid for this round")
        return offered

    def _given(self, order: Order, call: Announcement) -> Event:
        """What the order's release costs her."""
        if not call.perturbation:
            return Unprotected()
        try:
            return kinds.of(call.market).side.given(order, call)
        except InvalidInput as problem:
            raise _Stop("terms", f"the order says less than it takes: {problem}") from None

    def _check_terms(self, order: Order, offer: Offer) -> None:
        """Whether the order asks for what she bid, in the bid's currency."""
        call, bid, side = offer.call, offer.bid, kinds.of(order.market).side
        if (order.market, order.buyer) != (call.market, call.buyer):
            raise _Stop("terms", "the order is not on the terms of the announcement that the owner bid for")
        if not order.learning_rate <= call.learning_rate:
            raise _Stop("terms", f"a rate of {order.learning_rate:g} is above the announced {call.learning_rate:g}")
        try:
            amount = side.amount(order.loss, call)
        except InvalidInput:
            raise _Stop("terms", "the order's privacy loss is in another currency than was bid for") from None
        if not (amount > 0 and bid.least_budget <= amount <= bid.privacy_budget):
            sold = f"{bid.least_budget:g} to {bid.privacy_budget:g}"
            raise _Stop("epsilon", f"a privacy loss of {amount:g} was asked for, {sold} was bid")
        if not max(bid.least_records, 1) <= order.records <= bid.data_size:
            sold = f"{bid.least_records} to {bid.data_size}"
            raise _Stop("records", f"{order.records} records were asked for, {sold} were bid")
        if side.asks_once and not 0 <= order.round_index < call.rounds:
            raise _Stop("round", f"round {order.round_index} of {call.rounds}")

    def _check_escrow(self, order: Order, receipt: HoldReceipt | None, seen: Head | None) -> None:
        """The price waits in a ledger that extends what she has seen. Simulated owners take the market's word."""
        if self.owner.simulated:
            return
        if receipt is None:
            raise _Stop("escrow", "the order comes without proof that its price is in escrow")
        account = self.owner.account or owner_account(self.owner.number)
        try:
            head = receipt.verify(award_id=order.award, owner=account, price_micros=order.price_micros, seen=seen)
        except HoldNotProven as problem:
            raise _Stop("escrow", f"the proof of escrow does not hold: {problem}") from None
        self.journal.saw(order.task, head)

    def _left(self, call: Announcement, proposed: Bid) -> float:
        """What she proposes or, if her account has less left, the most that it allows, in the same currency."""
        if not call.perturbation:  # unbounded, whatever the number: an account with a cap has no room for it
            raw = self.owner.allow_raw and isinstance(self.owner.cap, Uncapped)
            return proposed.privacy_budget if raw else 0.0
        whole, releases = kinds.of(call.market).side.whole(call, self.owner.cap, self.owner.data_size)
        least, most = proposed.least_budget, proposed.privacy_budget
        return self.account.affordable(whole, releases=releases, least=least, most=most)

    # behind the charge

    @property
    def _work_seconds(self) -> float:
        """How long training may take: half of a fixed answering time, so that the rest is left for the noise."""
        fixed = self.owner.answer_seconds
        return self.owner.most_seconds if fixed is None else fixed / 2

    def _trained(self, work: Work, compute: Callable[[], object] | None) -> object:
        """What was computed, in time; None if that failed."""
        side = kinds.of(work.call.market).side
        if compute is None or side.trains_itself(work.call):
            compute = lambda: side.train([work])[0]  # noqa: E731
        try:
            return compute() if self.owner.simulated else _in_time(compute, self._work_seconds)
        except (Exception, SystemExit):
            _log.exception("training failed: an update of nothing leaves")
            return None

    def _private(self, work: Work, vector: RawUpdate) -> ReleasedUpdate:
        if not work.call.perturbation:
            return ReleasedUpdate(vector)
        return kinds.of(work.call.market).side.privatise(work, vector, self.owner.noise(work.order))


def _in_form(raw: object, work: Work) -> RawUpdate | None:
    try:
        vector = np.asarray(raw, dtype=np.float64)
        fits = vector.shape == work.parameters.shape
        if fits and (math.isfinite(length_of(vector)) or np.isfinite(vector).all()):
            return RawUpdate(vector)
    except Exception:  # whatever a training function's own numbers raise when they are read
        _log.exception("training did not yield numbers")
    _log.warning("training did not yield %s finite numbers: an update of nothing leaves", work.parameters.size)
    return None


def _in_time(work: Callable[[], object], seconds: float) -> object:
    """The result of `work`, or TimeoutError; what runs on after that is ignored."""
    answers: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="flmarket-training", daemon=True).start()
    try:
        found, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"training took more than {seconds:g} s") from None
    if error is not None:
        raise error
    return found


def drops_out(owner: Owner, order: Order) -> bool:
    """Whether a simulated owner falls silent at this order, as often as she was told to."""
    return owner.dropout > 0 and owner.stream(order, Purpose.PARTICIPATION).random() < owner.dropout


def spoilt(owner: Owner, order: Order, vector: ReleasedUpdate, parameters: FloatArray) -> ReleasedUpdate:
    """What a simulated owner sends instead of what she should, as often as she was told to: nonsense, or malice."""
    if owner.faulty and owner.stream(order, Purpose.PARTICIPATION).random() < owner.dropout + owner.faulty:
        return ReleasedUpdate(np.full_like(vector, np.nan))
    if owner.adversary is None:
        return vector
    return ReleasedUpdate(owner.adversary.upload(vector, parameters, owner.stream(order, Purpose.ADVERSARY)))
