"""The owner's guard: a Flower mod between what a server asks and what leaves an owner's machine.

Nothing passes it but four things: a bid cut to what her account still allows, a private vector, the same vector again,
and refusals. The raw update that the training function returns stops here; so do metrics and whatever else it returned.
An order is carried out only if

- it is for her, for a round she bid in, and its award id is the one that follows from task, round and owner;
- it asks for no more privacy and no more records than she bid;
- it was never carried out before, not even begun;
- her account, kept on her own disk over all runs and buyers, can pay for it.

Then, in this order: claim the release, charge the account, draw the noise, keep the vector, answer. A crash anywhere in
between costs privacy budget, never privacy. The guard fails closed: whatever goes wrong, also in the code it wraps, is
answered by a refusal whose words come from this module, so that no exception text carries data out.

What would break it: code that reads the data and is not behind the guard. Flower runs the app that the *server* sends;
an owner must allow only apps she trusts (docs/flower.md, "What the guard cannot do").
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace

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
    release_id,
    reply,
    unpack,
    unpack_vector,
)
from flmarket.engines.flower.owner import Owner, joint_noise
from flmarket.engines.flower.record import OwnerRecord, open_record
from flmarket.engines.owners import LEAST_EPSILON
from flmarket.errors import PrivacyBudgetExhausted
from flmarket.games.noise import noise_scale
from flmarket.ledger import ReplayRefused
from flmarket.market import award_id
from flmarket.privacy import Event, PureDp, ZCdp
from flmarket.privacy.events import ROUNDING_ALLOWANCE

__all__ = ["OwnerGuard"]

FloatArray = NDArray[np.float64]
# What an order must have in common with the announcement that was bid for.
_TERMS = ("buyer", "market", "rounds", "features", "classes", "perturbation", "clip", "delta")
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
                return desk.bid(message, context, call_next)
            if message.metadata.message_type == TRAIN:
                return desk.train(message, context, call_next)
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
            # Only the kind of error leaves: its text may quote a record.
            _log.exception("refused after an error")
            reason = f"the owner's machine could not carry it out ({type(error).__name__})"
            return reply(Refusal(owner=number, code="error", reason=reason), message)


class _Desk:
    """One owner and her record, for one message."""

    def __init__(self, owner: Owner, record: OwnerRecord) -> None:
        self.owner, self.journal, self.account = owner, record.journal, record.account

    def bid(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """What she proposes, cut to what her account allows, and on record before it is said."""
        call = unpack(Announcement, message)
        if call is None:
            raise _Refused("malformed", "a bid is asked for by an announcement")
        standing = self.journal.offer(call.task, call.round_index)
        if standing is None:
            proposed = unpack(Bid, call_next(message, context))
            if proposed is None:
                raise _Refused("abstains", "the owner does not take part in this round")
            left = self._left(call, proposed.privacy_budget)
            if left < LEAST_EPSILON:
                raise _Refused("exhausted", "the owner has sold all the privacy that she sells")
            bid = replace(proposed, owner=self.owner.number, privacy_budget=min(proposed.privacy_budget, left))
            body = json.dumps({"call": asdict(call), "bid": asdict(bid)})
            standing = self.journal.make_offer(call.task, call.round_index, body)
        announced, bid = _offer(standing)
        if announced != call:
            raise _Refused("terms", "the owner made a bid for this round on other terms")
        return reply(bid, message)

    def train(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Check the order, compute, claim, charge, randomise, keep, answer."""
        order = self._checked_order(message)
        release, terms = release_id(order), json.dumps(asdict(order), sort_keys=True)
        if self.journal.claimed(release):
            raise _Refused(REPLAY, f"{release} was released before; ask for it again with {RELEASE}")
        guarantee = _guarantee(order)
        parameters = unpack_vector(message)
        vector = self._raw(call_next(message, context), parameters.size)
        if not self.journal.claim(release, order.task, terms):
            raise _Refused(REPLAY, f"{release} was released before; ask for it again with {RELEASE}")
        if guarantee is not None:
            self.account.charge(release, order.buyer, guarantee)
        private = self._private(order, vector, parameters)
        self.journal.keep(release, private)
        return reply(Delivery(release=release, owner=self.owner.number), message, private)

    def release(self, message: Message) -> Message:
        """The vector that left before, under the same terms: bytes that the buyer may have already."""
        order = unpack(Order, message)
        if order is None:
            raise _Refused("malformed", "a release is asked for by its order")
        release, terms = release_id(order), json.dumps(asdict(order), sort_keys=True)
        vector = self.journal.released(release, terms)
        if vector is None:
            raise _Refused("unreleased", f"nothing was released for {release} under these terms")
        return reply(Delivery(release=release, owner=self.owner.number), message, vector)

    def _checked_order(self, message: Message) -> Order:
        order, owner = unpack(Order, message), self.owner
        if order is None:
            raise _Refused("malformed", "training is asked for by an order")
        if order.owner != owner.number:
            raise _Refused("stranger", f"the order is for owner {order.owner}")
        first = 0 if order.market in LASTING else order.round_index
        if order.award != award_id(order.task, first, owner.number):
            raise _Refused("award", f"award {order.award!r} is not the one of this task, round and owner")
        offered = self.journal.offer(order.task, order.round_index if order.market == "auction" else 0)
        if offered is None:
            raise _Refused("no bid", "the owner made no bid for this round")
        call, bid = _offer(offered)
        if any(getattr(order, name) != getattr(call, name) for name in _TERMS):
            raise _Refused("terms", "the order is not on the terms of the announcement that the owner bid for")
        if not 0 < order.epsilon <= bid.privacy_budget:
            raise _Refused("epsilon", f"ε = {order.epsilon:g} was asked for, {bid.privacy_budget:g} was bid")
        if not 1 <= order.records <= bid.data_size:
            raise _Refused("records", f"{order.records} records were asked for, {bid.data_size} were bid")
        if order.market in LASTING and not 0 <= order.round_index < order.rounds:
            raise _Refused("round", f"round {order.round_index} of {order.rounds}")
        if not order.perturbation and not owner.allow_raw:
            raise _Refused("raw", "this owner lets nothing leave without noise")
        return order

    def _left(self, call: Announcement, proposed: float) -> float:
        """The most privacy that her account still allows, in the currency of the announcement's ε."""
        if not call.perturbation:
            return proposed if self.owner.allow_raw else 0.0
        if call.market == "reward":
            return float(self.account.affordable(guarantee=ZCdp))
        if call.market == "joint":
            noise, records = joint_noise(call), len(self.owner.y)
            return float(
                self.account.affordable(lambda epsilon: noise.guarantee(epsilon, records), releases=call.rounds)
            )
        if isinstance(self.owner.cap, PureDp):
            return float(self.account.affordable())
        mechanism = privacy.get(call.perturbation, clip=call.clip)
        return float(self.account.affordable(guarantee=mechanism.guarantee))

    def _raw(self, message: Message, length: int) -> FloatArray:
        """The vector that the wrapped training function computed; anything else about it is dropped."""
        vector = unpack_vector(message)
        if vector.shape != (length,) or not np.isfinite(vector).all():
            raise _Refused("training", f"training did not yield {length} finite numbers")
        return vector

    def _private(self, order: Order, vector: FloatArray, parameters: FloatArray) -> FloatArray:
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


def _guarantee(order: Order) -> Event | None:
    """What one release of the order promises; None if it promises nothing. Raises for unknown mechanisms."""
    if order.market in ("sampling", "joint") and not order.perturbation:
        return None
    if order.market == "joint":
        return joint_noise(order).guarantee(order.epsilon, order.records)
    if order.market == "reward":
        return ZCdp(order.epsilon / order.rounds)
    if order.market == "auction":
        return privacy.get(order.perturbation, clip=order.clip).guarantee(order.epsilon)
    raise _Refused("market", f"{order.market!r} is no market that this owner knows")


def _offer(body: str) -> tuple[Announcement, Bid]:
    offer = json.loads(body)
    bid = offer["bid"]
    return Announcement(**offer["call"]), Bid(**{**bid, "grid": tuple(bid["grid"]), "values": tuple(bid["values"])})
