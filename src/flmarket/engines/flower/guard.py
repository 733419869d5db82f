"""The owner's guard: a Flower mod between what a server asks and what leaves an owner's machine.

Nothing passes it but four things: a bid cut to what her account still allows, a private vector, the same vector again,
and refusals. The raw update that the training function returns stops here; so do metrics and whatever else it returned.

**Decided on terms and books alone.** An order is carried out only if

- it is for her, for a round she bid in, and its award id is the one that follows from task, round and owner;
- it asks for no more privacy and no more records than she bid, no less than she sells at all, and for training on the
  terms of the announcement, from parameters that are finite, bounded and as many as announced;
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

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from flmarket import privacy
from flmarket.engines.flower.messages import (
    BID,
    LASTING,
    RELEASE,
    REPLAY,
    TRAIN,
    Announcement,
    Bid,
    Delivery,
    Order,
    Refusal,
    profile,
    release_id,
    reply,
    unpack,
    unpack_escrow,
    unpack_head,
    unpack_vector,
)
from flmarket.engines.flower.owner import Owner, joint_noise, raw_update
from flmarket.engines.flower.record import OwnerRecord, open_record
from flmarket.errors import PrivacyBudgetExhausted
from flmarket.games.contest import family
from flmarket.games.stackelberg import noise_scale
from flmarket.ledger import MICROS, Head, HoldNotProven, ReplayRefused
from flmarket.market import award_id, owner_account
from flmarket.privacy import Event, PureDp, Uncapped, Unprotected, ZCdp
from flmarket.privacy.events import ROUNDING_ALLOWANCE

__all__ = ["LARGEST_PARAMETER", "OwnerGuard"]

FloatArray = NDArray[np.float64]
LARGEST_PARAMETER = 1e9
# What an order must have in common with the announcement that was bid for.
_TERMS = ("buyer", "market", "rounds", "features", "classes", "perturbation", "clip", "delta")
_TRAINING = ("steps", "batch_size", "l2")
_log = logging.getLogger(__name__)


class _Refused(Exception):
    """Stops an order; `code` is for machines, the text for people."""

    def __init__(self, code: str, reason: str) -> None:
        self.code = code
        super().__init__(reason)


class OwnerGuard:
    """A mod for `ClientApp(mods=[...])`. `owner_of` says whose machine this is, from the node's own configuration."""

    def __init__(self, owner_of: Callable[[Context], Owner]) -> None:
        self.owner_of = owner_of

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer, or refuse; never raise."""
        number = 0
        try:
            owner = self.owner_of(context)
            number = owner.number
            desk = _Desk(owner, open_record(owner.record, owner.cap))
            if message.metadata.message_type == BID:
                return desk.bid(message)
            if message.metadata.message_type == TRAIN:
                return desk.train(message, lambda: unpack_vector(call_next(message, context)))
            if message.metadata.message_type == RELEASE:
                return desk.release(message)
            raise _Refused("unknown", "this owner answers bids, orders and nothing else")
        except _Refused as refusal:
            return reply(Refusal(owner=number, code=refusal.code, reason=str(refusal)), message)
        except PrivacyBudgetExhausted:
            reason = "the release would take the owner past her own cap"
            return reply(Refusal(owner=number, code="cap", reason=reason), message)
        except ReplayRefused:
            return reply(Refusal(owner=number, code=REPLAY, reason="this award was released for before"), message)
        except Exception as error:
            # Only the kind of error leaves. No record was touched: what fails later is answered by noise.
            _log.exception("refused after an error")
            reason = f"the owner's machine could not carry it out ({type(error).__name__})"
            return reply(Refusal(owner=number, code="error", reason=reason), message)


class _Desk:
    """One owner and her record, for one message."""

    def __init__(self, owner: Owner, record: OwnerRecord) -> None:
        self.owner, self.journal, self.account = owner, record.journal, record.account

    def bid(self, message: Message) -> Message:
        """What she proposes by her own configuration, cut to what her account allows, on record before it is said."""
        call = unpack(Announcement, message)
        if call is None:
            raise _Refused("malformed", "a bid is asked for by an announcement")
        standing = self.journal.offer(call.task, call.round_index)
        if standing is None:
            proposed = self.owner.bid(call)
            if proposed is None:
                raise _Refused("abstains", "the owner does not take part in this round")
            left = self._left(call, proposed.privacy_budget)
            if left < proposed.least_epsilon:
                raise _Refused("exhausted", "the owner has sold all the privacy that she sells")
            bid = replace(proposed, owner=self.owner.number, privacy_budget=left)
            seen = self.journal.head(call.task) or unpack_head(message)
            offer = _Offer(call, bid, seen if seen is not None and seen.size else None)
            standing = self.journal.make_offer(call.task, call.round_index, offer.to_json())
        offer = _Offer.from_json(standing)
        if offer.call != call:
            raise _Refused("terms", "the owner made a bid for this round on other terms")
        return reply(offer.bid, message, head=offer.seen)

    def train(self, message: Message, compute: Callable[[], FloatArray]) -> Message:
        """Check the order, claim, charge; then compute, randomise, keep, answer."""
        arrived = time.monotonic()
        order = _order(message)
        offer = self._standing(order)
        self._check_terms(order, offer.call, offer.bid)
        parameters = _checked_parameters(message, offer.call)
        release, terms = release_id(order), json.dumps(asdict(order), sort_keys=True)
        if self.journal.claimed(release):
            raise _Refused(REPLAY, f"{release} was released before; ask for it again with {RELEASE}")
        guarantee = self._guarantee(order)
        self._check_price(order, offer.bid)
        self._check_escrow(message, order, offer.seen)
        if not self.journal.claim(release, order.task, terms, self._work_seconds):
            raise _Refused(REPLAY, f"{release} was released before; ask for it again with {RELEASE}")
        self.account.charge(release, order.buyer, guarantee)
        if order.market == "reward":  # noise for one record's share: the clip of every record is the guard's own work
            compute = lambda: raw_update(self.owner, order, parameters)  # noqa: E731
        kept = self.journal.keep(release, self._private(order, self._trained(order, parameters, compute), parameters))
        if self.owner.answer_seconds is not None:
            time.sleep(max(0.0, arrived + self.owner.answer_seconds - time.monotonic()))
        return reply(Delivery(release=release, owner=self.owner.number), message, kept)

    def release(self, message: Message) -> Message:
        """The vector that left before, under the same terms: bytes that the buyer may have already.

        If her machine died while it was at work on it, nothing left: then noise around an update of nothing.
        """
        order = _order(message)
        release, terms = release_id(order), json.dumps(asdict(order), sort_keys=True)
        vector = self.journal.released(release, terms)
        if vector is None and self.journal.given_up(release, terms) and self.account.released(release):
            start = np.zeros(self._standing(order).call.parameters)
            vector = self.journal.keep(release, self._private(order, _nothing(order, start), start))
        if vector is None:
            raise _Refused("unreleased", f"nothing was released for {release} under these terms")
        return reply(Delivery(release=release, owner=self.owner.number), message, vector)

    # terms and books

    def _standing(self, order: Order) -> _Offer:
        """The announcement that the order refers to, and what she offered for it."""
        if order.owner != self.owner.number:
            raise _Refused("stranger", f"the order is for owner {order.owner}")
        first = 0 if order.market in LASTING else order.round_index
        if order.award != award_id(order.task, first, self.owner.number):
            raise _Refused("award", f"award {order.award!r} is not the one of this task, round and owner")
        offered = self.journal.offer(order.task, order.round_index if order.market == "auction" else 0)
        if offered is None:
            raise _Refused("no bid", "the owner made no bid for this round")
        return _Offer.from_json(offered)

    def _check_terms(self, order: Order, call: Announcement, bid: Bid) -> None:
        if any(getattr(order, name) != getattr(call, name) for name in (*_TERMS, *_TRAINING)):
            raise _Refused("terms", "the order is not on the terms of the announcement that the owner bid for")
        if not order.learning_rate <= call.learning_rate:
            raise _Refused("terms", f"a rate of {order.learning_rate:g} is above the announced {call.learning_rate:g}")
        if not (order.epsilon > 0 and bid.least_epsilon <= order.epsilon <= bid.privacy_budget):
            sold = f"{bid.least_epsilon:g} to {bid.privacy_budget:g}"
            raise _Refused("epsilon", f"ε = {order.epsilon:g} was asked for, {sold} was bid")
        if not max(bid.least_records, 1) <= order.records <= bid.data_size:
            sold = f"{bid.least_records} to {bid.data_size}"
            raise _Refused("records", f"{order.records} records were asked for, {sold} were bid")
        if order.market in LASTING and not 0 <= order.round_index < order.rounds:
            raise _Refused("round", f"round {order.round_index} of {order.rounds}")
        if not order.perturbation and not self.owner.allow_raw:
            raise _Refused("raw", "this owner lets nothing leave without noise")

    def _guarantee(self, order: Order) -> Event:
        """What one release of the order promises. Raises for unknown mechanisms, and for noise that does not hold."""
        if order.market not in ("auction", "sampling", "joint", "reward"):
            raise _Refused("market", f"{order.market!r} is no market that this owner knows")
        if not order.perturbation:
            return Unprotected()
        if order.market == "joint":
            return joint_noise(order).guarantee(order.epsilon, order.records)
        if order.market == "reward":
            return ZCdp(order.epsilon / order.rounds)
        mechanism = privacy.get(order.perturbation, clip=order.clip)
        if not self.owner.simulated and not privacy.is_sound(mechanism):
            raise _Refused("unsound", f"{order.perturbation} is private for ideal numbers only: simulations may use it")
        return mechanism.guarantee(order.epsilon)

    def _check_price(self, order: Order, bid: Bid) -> None:
        """No sale below her own valuation; a payment rounds down to whole micro-units."""
        if order.market == "auction":
            asked = float(profile([replace(bid, data_size=order.records)]).cost(order.epsilon)[0])
        elif order.market == "reward":
            asked = float(family(self.owner.cost).cost(np.array([bid.rate]), np.array([order.epsilon]))[0])
        else:
            asked = bid.rate
        if not order.price_micros >= np.floor(asked * MICROS * (1 - ROUNDING_ALLOWANCE)):
            raise _Refused("price", "the price is below what this release costs the owner by her own valuation")

    def _check_escrow(self, message: Message, order: Order, seen: Head | None) -> None:
        """The price waits in a ledger that extends what she has seen. Simulated owners take the market's word."""
        if self.owner.simulated:
            return
        receipt = unpack_escrow(message)
        if receipt is None:
            raise _Refused("escrow", "the order comes without proof that its price is in escrow")
        account = self.owner.account or owner_account(self.owner.number)
        try:
            head = receipt.verify(award_id=order.award, owner=account, price_micros=order.price_micros, seen=seen)
        except HoldNotProven as problem:
            raise _Refused("escrow", f"the proof of escrow does not hold: {problem}") from None
        self.journal.saw(order.task, head)

    def _left(self, call: Announcement, proposed: float) -> float:
        """What she proposes or, if her account has less left, the most that it allows, in the same currency."""
        if not call.perturbation:  # unbounded, whatever the number: an account with a cap has no room for it
            return proposed if self.owner.allow_raw and isinstance(self.owner.cap, Uncapped) else 0.0
        guarantee: Callable[[float], Event] = PureDp
        releases = 1
        if call.market == "reward":
            guarantee = ZCdp
        elif call.market == "joint":
            noise, records, releases = joint_noise(call), len(self.owner.y), call.rounds
            guarantee = lambda epsilon: noise.guarantee(epsilon, records)  # noqa: E731
        elif not isinstance(self.owner.cap, PureDp):
            guarantee = privacy.get(call.perturbation, clip=call.clip).guarantee
        if not self.account.would_exceed(guarantee(proposed), releases):
            return proposed
        return self.account.affordable(guarantee, releases=releases)

    # behind the charge

    @property
    def _work_seconds(self) -> float:
        """How long training may take: half of a fixed answering time, so that the rest is left for the noise."""
        fixed = self.owner.answer_seconds
        return self.owner.most_seconds if fixed is None else fixed / 2

    def _trained(self, order: Order, parameters: FloatArray, compute: Callable[[], FloatArray]) -> FloatArray:
        """What was computed, in time and in form; else nothing."""
        try:
            vector = compute() if self.owner.simulated else _in_time(compute, self._work_seconds)
            if vector.shape == parameters.shape and np.isfinite(vector).all():
                return vector
            _log.warning("training did not yield %s finite numbers: an update of nothing leaves", parameters.size)
        except (Exception, SystemExit):
            _log.exception("training failed: an update of nothing leaves")
        return _nothing(order, parameters)

    def _private(self, order: Order, vector: FloatArray, parameters: FloatArray) -> FloatArray:
        try:
            return self._noised(order, vector, parameters)
        except Exception:
            _log.exception("the update could not be made private: one of nothing leaves")
            return self._noised(order, _nothing(order, parameters), parameters)

    def _noised(self, order: Order, vector: FloatArray, parameters: FloatArray) -> FloatArray:
        if not order.perturbation:
            return vector
        noise = self.owner.noise(order)
        if order.market == "joint":
            mechanism = joint_noise(order)
            sigma = mechanism.sigma([order.epsilon], [order.records])
            return np.asarray(mechanism.upload(vector[None], parameters, sigma, [noise])[0])
        if order.market == "reward":
            scale = noise_scale(order.epsilon, rounds=order.rounds, records=order.records, clip=order.clip)
            sensitivity = 2 * order.clip / order.records
            return noise.add_gaussian(vector, scale=float(scale) * (1 + ROUNDING_ALLOWANCE), sensitivity=sensitivity)
        return privacy.get(order.perturbation, clip=order.clip).privatize(vector, order.epsilon, noise)


def _order(message: Message) -> Order:
    order = unpack(Order, message)
    if order is None:
        raise _Refused("malformed", "work and releases are asked for by an order")
    return order


def _checked_parameters(message: Message, call: Announcement) -> FloatArray:
    parameters = unpack_vector(message, call.parameters)
    if parameters.shape != (call.parameters,):
        raise _Refused("parameters", f"{parameters.shape} parameters came, {call.parameters} were announced")
    if not (np.abs(parameters) <= LARGEST_PARAMETER).all():
        raise _Refused("parameters", f"parameters are finite and within ±{LARGEST_PARAMETER:g}")
    return parameters


def _nothing(order: Order, parameters: FloatArray) -> FloatArray:
    """An update of nothing: the model as it came where parameters are sent, zeros elsewhere."""
    return parameters if order.market == "joint" else np.zeros_like(parameters)


def _in_time(work: Callable[[], FloatArray], seconds: float) -> FloatArray:
    """The result of `work`, or TimeoutError; what runs on after that is ignored."""
    answers: queue.SimpleQueue[FloatArray | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(work())
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=run, name="flmarket-training", daemon=True).start()
    try:
        found = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"training took more than {seconds:g} s") from None
    if isinstance(found, BaseException):
        raise found
    return found


@dataclass(frozen=True)
class _Offer:
    """What she offered, for which announcement, and the head of the buyer's ledger that she goes by, if she saw one."""

    call: Announcement
    bid: Bid
    seen: Head | None

    def to_json(self) -> str:
        seen = None if self.seen is None else self.seen.to_dict()
        return json.dumps({"call": asdict(self.call), "bid": asdict(self.bid), "seen": seen})

    @classmethod
    def from_json(cls, body: str) -> _Offer:
        offer = json.loads(body)
        bid = offer["bid"] | {name: tuple(offer["bid"][name]) for name in ("grid", "values")}
        seen = None if offer["seen"] is None else Head.from_dict(offer["seen"])
        return cls(Announcement(**offer["call"]), Bid(**bid), seen)
