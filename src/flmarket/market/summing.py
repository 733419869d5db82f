"""Rounds of which only a sum is seen, for every kind that buys updates: shares, the guard's check, opening the sum.

A kind settles weights and noise with its plan and puts every owner's part (`secure_sum.SumTerms`) into her order. What
she delivers is whole numbers modulo 2^b: her weighted update and her share of the noise. Nobody must see these: over
Flower they travel masked, and what reaches the round is one vector whose sum over those who stayed is right; in memory
they are added as they are, which gives the same sum to the bit. So a kind may look at a round's deliveries only through
`opened`, and only if at least the threshold of them came (`opens`); with fewer the round is void: awards expire, the
money goes back, the market books no release. Who masked into a round that is void has delivered an empty vector: she
stayed, and there is nothing to see. What her own account makes of it: `masking.guarding`.

Where awards run over all rounds a void round ends nobody's but those of who left, and the roster of the next sum is who
is left. Who stayed to the end is paid if any sum was opened. Booked is what the opened sums gave away.

Paid is who is in the sum. What she put there cannot be checked (docs/limitations.md).

What would break it: a plan whose orders do not agree on the common terms, or contributors who are not its orders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput
from flmarket.ledger import EXPIRY, Award, AwardState, Release, Resolution
from flmarket.market.descent import descend
from flmarket.market.kind import Announcement, Bad, Delivered, MarketKind, Order, RawUpdate, ReleasedUpdate, RoundPlan
from flmarket.market.owner import OwnerSide, Work
from flmarket.privacy import (
    Cap,
    DistributedGaussian,
    Event,
    NoiseSource,
    RecordLevel,
    RecordNoise,
    ZCdp,
    epsilon_of_rho,
    rho_of_epsilon,
    secure_sum,
)
from flmarket.privacy.joint import LocalPerturbation
from flmarket.privacy.secure_sum import SecureAggregation, SumTerms

SECURE = "secure-aggregation"
# why an award ends whose owner's part of a sum came, and too few others'
VOID = "too few stayed for the sum to be opened: the round is void"
_POLICY = ("survivors", "colluders", "bits")


def is_secure(call: Announcement) -> bool:
    """Whether only the sum of a round's updates is to be seen."""
    return call.trust == SECURE


def said(policy: SecureAggregation | None) -> dict[str, object]:
    """What an announcement says of it."""
    return {} if policy is None else asdict(policy)


def unsaid(settings: Mapping[str, object]) -> dict[str, object]:
    """What else an announcement's settings say."""
    return {name: value for name, value in settings.items() if name not in _POLICY}


def _policy(call: Announcement) -> SecureAggregation:
    try:
        settings = json.loads(call.settings)
        return SecureAggregation(**{name: settings[name] for name in _POLICY})
    except (ValueError, TypeError, KeyError):
        raise InvalidInput("settings", call.settings, "survivors, colluders and bits of a sum") from None


def has_company(policy: SecureAggregation, contributors: int) -> bool:
    """Whether a sum of so many has two in it at least whose noise counts: a sum of one is none."""
    return contributors >= 2 and policy.counts(contributors)[1] >= 2


def shares(
    weights: Sequence[float],
    rho: Sequence[float],
    *,
    clip: float,
    dimension: int,
    policy: SecureAggregation,
    change: float | None = None,
) -> list[tuple[ZCdp, str]]:
    """What each contributor loses in the sum, at most her ρ, and her share as an order carries it.

    `change`: how far a record moves an update, where ρ is for records.
    """
    terms = secure_sum.agreed(weights, rho, clip=clip, dimension=dimension, policy=policy, change=change)
    return [(secure_sum.loss(one, clip=clip, dimension=dimension, change=change), one.to_json()) for one in terms]


def given(order: Order, call: Announcement, loss: Event, *, change: float | None = None) -> Event:
    """`loss`, if an order's share is on the announced terms and costs its owner no more; else InvalidInput.

    With `change`, how far a record moves an update, it is a record's loss.
    """
    terms, policy = SumTerms.from_json(order.share), _policy(call)
    if (terms.threshold, terms.honest) != policy.counts(terms.contributors) or terms.bits != policy.bits:
        raise InvalidInput("share", order.share, "the announced shares of survivors and colluders")
    least = secure_sum.loss(terms, clip=call.clip, dimension=call.parameters, change=change)
    inner = loss.loss if isinstance(loss, RecordLevel) else loss
    if isinstance(loss, RecordLevel) != (change is not None) or not isinstance(inner, ZCdp) or inner.rho < least.rho:
        raise InvalidInput("loss", loss, f"at least {least}{' of a record' if change is not None else ''}")
    return loss


def share(order: Order, raw: RawUpdate, *, clip: float, noise: NoiseSource, records: bool = False) -> ReleasedUpdate:
    """An owner's part of the sum, as numbers that stores and messages carry exactly."""
    terms = SumTerms.from_json(order.share)
    whole = secure_sum.encode(raw, terms, clip=clip, topic=_topic(order), source=noise, records=records)
    return ReleasedUpdate(whole.astype(np.float64))


class SumSide(OwnerSide):
    """An owner's side of a kind that also buys into sums: bids are in ε, a loss in a sum is ρ.

    In a round of its own, or in each of all rounds if bids are for all of them.
    """

    def sum_delta(self, call: Announcement | None) -> float:
        """The δ at which a bid's ε is one of ρ."""
        return DistributedGaussian.delta

    def amount(self, loss: Event, call: Announcement | None = None) -> float:
        """In a sum, ε of what one release loses there."""
        if call is not None and not is_secure(call):
            return super().amount(loss, call)
        if not isinstance(loss, ZCdp):
            raise InvalidInput("loss", loss, "ρ")
        return float(epsilon_of_rho(loss.rho, delta=self.sum_delta(call)))

    def guarantee(self, amount: float, records: int, call: Announcement) -> Event:
        """In a sum, ρ."""
        if not is_secure(call):
            return super().guarantee(amount, records, call)
        return ZCdp(float(rho_of_epsilon(amount, delta=self.sum_delta(call))))

    def given(self, order: Order, call: Announcement) -> Event:
        """In a sum, what the order says, if that is what her weight and the honest shares of noise come to at least."""
        if is_secure(call):
            return given(order, call, order.loss)
        if order.share:
            raise InvalidInput("share", order.share, "none: every update is private by itself here")
        return super().given(order, call)

    def whole(self, call: Announcement, cap: Cap, records: int) -> tuple[Callable[[float], Event], int]:
        """One release, or one in every round."""
        if not is_secure(call):
            return super().whole(call, cap, records)
        return lambda amount: self.guarantee(amount, records, call), call.rounds if self.asks_once else 1

    def is_sound(self, call: Announcement) -> bool:
        """Whole numbers are."""
        return is_secure(call) or super().is_sound(call)

    def privatise(self, work: Work, raw: RawUpdate, noise: NoiseSource) -> ReleasedUpdate:
        """In a sum, her share of it, in whole numbers."""
        if not is_secure(work.call):
            return super().privatise(work, raw, noise)
        return share(work.order, raw, clip=work.call.clip, noise=noise)

    def descended(
        self, works: Sequence[Work], starts: FloatArray, noise: RecordNoise | LocalPerturbation, *, blind: bool = False
    ) -> FloatArray:
        """Where noised steps on all records end, each one's gradient clipped; `blind`: noise only."""
        return descend(
            works[0].model, starts, None if blind else [work.records for work in works],
            [work.owner.noise(work.order) for work in works], clip=works[0].call.clip,
            sizes=[work.order.records for work in works],
            scale=[partial(noise.scale, self.amount(work.order.loss, work.call)) for work in works],
        )  # fmt: skip


class SumKind(MarketKind):
    """A kind that also buys into sums: `policy` says so."""

    policy: SecureAggregation | None = None

    def checked(self, order: Order, vector: object) -> Delivered | Bad:
        """Of a share in a sum only the form can be checked: whole numbers below the modulus, or none at all."""
        if not order.share:
            return super().checked(order, vector)
        array = np.asarray(vector)
        if array.shape == (0,):
            return Delivered(ReleasedUpdate(np.zeros(0)))
        problem = secure_sum.in_form(array, length=self.dimension, bits=SumTerms.from_json(order.share).bits)
        return Bad(problem) if problem else Delivered(ReleasedUpdate(np.asarray(array, dtype=np.float64)))

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """Where awards are for a round: nobody is paid, and nothing booked, if a sum is not opened."""
        if opens(plan, updates):
            return super().resolutions(plan, updates, awards)
        pending = [order for order in plan.orders if awards[order.owner].state is AwardState.PENDING]
        return [
            Resolution(order.award, AwardState.EXPIRED, VOID if order.owner in updates else EXPIRY) for order in pending
        ]


class LastingKind(SumKind):
    """A kind whose awards are for all rounds. `notes` has who is out and how many sums were opened, as a plan cannot
    look at awards. What so many rounds of an order gave away (`given`), and which round is the last, is the kind's own.
    """

    def given(self, order: Order, rounds: int) -> Release | None:
        """What so many rounds gave away."""
        raise NotImplementedError

    def last(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> bool:
        """Whether this round is the last, by number or because too few are left for another."""
        return plan.index == self.rounds - 1 or not self.goes_on(plan, updates, awards)

    @property
    def out(self) -> list[int]:
        """Whose award ended before."""
        return list(self.notes.get("out", []))

    def left(self, order: Order) -> Release | None:
        """What left in the rounds so far, and in this one."""
        return self.given(order, self.opened_before(order.round_index) + 1)

    def resolutions(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> list[Resolution]:
        """Who did not stay is out; after the last round the others are paid, for what was opened of theirs."""
        ends, before, last = [], self.opened_before(plan.index), self.last(plan, updates, awards)
        after = before + opens(plan, updates)
        for order in plan.orders:
            if awards[order.owner].state is not AwardState.PENDING:
                continue
            if order.owner not in updates:
                reason = f"missed round {plan.index}"
                ends.append(Resolution(order.award, AwardState.EXPIRED, reason, self.given(order, before)))
            elif last and after:
                ends.append(Resolution(order.award, AwardState.POSTED, "", self.given(order, after)))
            elif last:
                ends.append(Resolution(order.award, AwardState.EXPIRED, VOID))
        return ends

    def opened_before(self, index: int) -> int:
        """How many rounds before this one counted."""
        return index if self.policy is None else int(self.notes.get("opened", 0))

    def goes_on(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> bool:
        """Whether those who stayed are enough for another sum."""
        open_or_paid = (AwardState.PENDING, AwardState.POSTED)
        stayed = [one for one in plan.orders if one.owner in updates and awards[one.owner].state in open_or_paid]
        return self.policy is None or has_company(self.policy, len(stayed))

    def remember(
        self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]
    ) -> dict[str, object]:
        """What the next plan needs to know."""
        if self.policy is None:
            return {}
        gone = [one.owner for one in plan.orders if awards[one.owner].state in (AwardState.EXPIRED, AwardState.VOIDED)]
        return {"opened": self.opened_before(plan.index) + opens(plan, updates), "out": [*self.out, *gone]}


def opens(plan: RoundPlan, updates: Mapping[int, FloatArray]) -> bool:
    """Whether the round counts: as many came as its sum needs, and it was opened, if there is one."""
    text = plan.orders[0].share if plan.orders else ""
    if not text:
        return True
    return len(updates) >= SumTerms.from_json(text).threshold and all(one.size for one in updates.values())


@dataclass(frozen=True, eq=False)
class Opened:
    """The mean of who stayed, with noise of this expected squared norm; weights by owner, of sum 1."""

    mean: FloatArray
    weights: Mapping[int, float]
    energy: float


def opened(plan: RoundPlan, updates: Mapping[int, FloatArray], *, dimension: int) -> Opened:
    """Add up, decode, and divide by the weight of those who stayed."""
    orders = [order for order in plan.orders if order.owner in updates]
    terms = {order.owner: SumTerms.from_json(order.share) for order in orders}
    first = terms[orders[0].owner]
    total = secure_sum.added((updates[order.owner] for order in orders), bits=first.bits)
    inside = sum(one.weight for one in terms.values())
    energy = secure_sum.noise_energy(first, contributors=len(orders), dimension=dimension) / inside**2
    mean = secure_sum.decode(total, first, topic=_topic(orders[0])) / inside
    return Opened(mean, {owner: one.weight / inside for owner, one in terms.items()}, energy)


def _topic(order: Order) -> str:
    return f"{order.task}/{order.round_index}"
