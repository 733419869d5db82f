"""Rounds of which only a sum is seen, for every kind that buys updates: shares, the guard's check, opening the sum.

A kind settles weights and noise with its plan and puts every owner's part (`secure_sum.SumTerms`) into her order. What
she delivers is whole numbers modulo 2^b: her weighted update and her share of the noise. Nobody must see these: over
Flower they travel masked, and what reaches the round is one vector whose sum over those who stayed is right; in memory
they are added as they are, which gives the same sum to the bit. So a kind may look at a round's deliveries only through
`opened`, and only if at least the threshold of them came (`opens`); with fewer the round is void: awards expire, the
money goes back, the market books no release. Who delivered into a void round keeps the charge in her own account: what
left her was masked, but that nobody can open it she has only the others' word for.

Paid is who is in the sum. What she put there cannot be checked (docs/limitations.md).

What would break it: a plan whose orders do not agree on the common terms, or contributors who are not its orders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import InvalidInput
from flmarket.ledger import EXPIRY, Award, AwardState, Resolution
from flmarket.market.kind import Announcement, Bad, Delivered, Order, RawUpdate, ReleasedUpdate, RoundPlan
from flmarket.privacy import NoiseSource, ZCdp, secure_sum
from flmarket.privacy.secure_sum import SecureAggregation, SumTerms

SECURE = "secure-aggregation"
# why an award ends whose owner's part of a sum came, and too few others'
VOID = "too few stayed for the sum to be opened: the round is void"


def is_secure(call: Announcement) -> bool:
    """Whether only the sum of a round's updates is to be seen."""
    return call.trust == SECURE


def said(policy: SecureAggregation | None) -> dict[str, object]:
    """What an announcement says of it."""
    return {} if policy is None else asdict(policy)


def _policy(call: Announcement) -> SecureAggregation:
    try:
        settings = json.loads(call.settings)
        return SecureAggregation(**{name: settings[name] for name in ("survivors", "colluders", "bits")})
    except (ValueError, TypeError, KeyError):
        raise InvalidInput("settings", call.settings, "survivors, colluders and bits of a sum") from None


def shares(
    weights: Sequence[float], rho: Sequence[float], *, clip: float, dimension: int, policy: SecureAggregation
) -> list[tuple[ZCdp, str]]:
    """What each contributor loses in the sum, at most her ρ, and her share as an order carries it."""
    terms = secure_sum.agreed(weights, rho, clip=clip, dimension=dimension, policy=policy)
    return [(secure_sum.loss(one, clip=clip, dimension=dimension), one.to_json()) for one in terms]


def given(order: Order, call: Announcement) -> ZCdp:
    """What an order's share costs its owner; InvalidInput if it says less, or is not on the announced terms."""
    terms, policy = SumTerms.from_json(order.share), _policy(call)
    if (terms.threshold, terms.honest) != policy.counts(terms.contributors) or terms.bits != policy.bits:
        raise InvalidInput("share", order.share, "the announced shares of survivors and colluders")
    least = secure_sum.loss(terms, clip=call.clip, dimension=call.parameters)
    if not isinstance(order.loss, ZCdp) or order.loss.rho < least.rho:
        raise InvalidInput("loss", order.loss, f"at least {least}")
    return order.loss


def share(order: Order, raw: RawUpdate, *, clip: float, noise: NoiseSource) -> ReleasedUpdate:
    """An owner's part of the sum, as numbers that stores and messages carry exactly."""
    terms = SumTerms.from_json(order.share)
    return ReleasedUpdate(
        secure_sum.encode(raw, terms, clip=clip, topic=_topic(order), source=noise).astype(np.float64)
    )


def checked(order: Order, vector: object, *, length: int) -> Delivered | Bad:
    """Of a part of a sum only the form can be checked: whole numbers below the modulus."""
    problem = secure_sum.in_form(vector, length=length, bits=SumTerms.from_json(order.share).bits)
    return Bad(problem) if problem else Delivered(ReleasedUpdate(np.asarray(vector, dtype=np.float64)))


def opens(plan: RoundPlan, updates: Mapping[int, FloatArray]) -> bool:
    """Whether as many came as the sum needs, if there is one."""
    text = plan.orders[0].share if plan.orders else ""
    return not text or len(updates) >= SumTerms.from_json(text).threshold


def void(plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> list[Resolution]:
    """How open awards end if the sum is not opened: nobody is paid, nothing is booked."""
    pending = [order for order in plan.orders if awards[order.owner].state is AwardState.PENDING]
    return [
        Resolution(order.award, AwardState.EXPIRED, VOID if order.owner in updates else EXPIRY) for order in pending
    ]


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
