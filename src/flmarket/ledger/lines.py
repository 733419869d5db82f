"""What lines of the journal say, as values: awards, releases, caps, transfers, and owners' totals in whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flmarket.errors import InvalidInput
from flmarket.ledger.entry import Line
from flmarket.ledger.journal import NOTHING, Award, AwardState, Release, Transfer, as_loss
from flmarket.privacy import (
    ApproxDp,
    Cap,
    Event,
    ExponentialRelease,
    GaussianL2,
    GaussianRelease,
    GaussianZCdp,
    PrivacyAccount,
    PureDp,
    Uncapped,
    Unprotected,
    ZCdp,
    event_from_dict,
    event_to_dict,
)
from flmarket.privacy.composition import ApproxTotal, pure_epsilon, zcdp_rho

__all__ = ["award_of", "cap_of", "fits", "limit_of", "loss_of", "loss_terms", "pico", "release_of", "transfer_of"]

PICO = 10**12
# an award's release may exceed the awarded privacy loss by floating-point rounding only
_ROUNDING = 1e-9


def award_of(held: Line, resolved: Line | None) -> Award:
    """An award from the line that holds it and the one that resolves it."""
    assert held.debit is not None
    assert held.owner is not None
    assert held.round_index is not None
    state = AwardState.PENDING if resolved is None else AwardState(resolved.kind.value)
    reason = "" if resolved is None else resolved.terms.get("reason", "")
    loss = loss_of(held.terms)
    return Award(held.ref, held.round_index, held.debit, held.owner, loss, held.amount_micros, state, reason)


def loss_terms(loss: Event) -> dict[str, Any]:
    """What a hold says of its loss. No loss at all is written as ever: the database's triggers know it by that."""
    return {"epsilon": "0.0"} if loss == NOTHING else {"loss": event_to_dict(loss)}


def loss_of(terms: Mapping[str, Any]) -> Event:
    """The loss that a hold's terms state; holds of before state a bare number."""
    return event_from_dict(terms["loss"]) if "loss" in terms else as_loss(float(terms["epsilon"]))


def release_of(line: Line) -> Release:
    """A release from its line."""
    terms = line.terms
    return Release(line.ref, terms["mechanism"], event_from_dict(terms["guarantee"]))


def fits(release: Release, loss: Event) -> bool:
    """Whether a release gives away no more than its award is for, but for rounding.

    Compared in the award's currency: ρ under a ρ or under noise, ε at the award's δ under an (ε, δ). What cannot be
    stated in that currency does not fit. Awards for a pure ε are bounded as `_number_of` says.
    """
    given = release.guarantee
    if isinstance(loss, Unprotected) or given == loss:
        return True
    try:
        if isinstance(loss, PureDp):
            spent, limit = _number_of(release), loss.epsilon
        elif isinstance(loss, ExponentialRelease):
            spent, limit = pure_epsilon(given), loss.epsilon
        elif isinstance(loss, ApproxDp):
            spent, limit = ApproxTotal().plus(given, 1).epsilon(loss.delta), loss.epsilon
        else:
            spent, limit = zcdp_rho(given), zcdp_rho(loss)
    except InvalidInput:
        return False
    return spent <= limit * (1 + _ROUNDING)


def _number_of(release: Release) -> float:
    """The part of a release that an award's bare number bounds: callers and logs that know no other loss.

    ε for pure and approximate guarantees; ρ for zCDP and for an auction's Gaussian noise. Under "gaussian-zcdp" the
    award's number is ρ. Under "gaussian-l2" it is ε at a δ that the ledger does not know; ρ is below that ε at any δ in
    use (δ ≤ 0.01), so this finds gross lies and no honest release. Other Gaussian releases are those of joint markets,
    whose award states one upload and whose release all of them: only the owner's cap bounds those.
    """
    guarantee = release.guarantee
    if isinstance(guarantee, Unprotected):
        return float("inf")
    if isinstance(guarantee, GaussianRelease):
        return zcdp_rho(guarantee) if release.mechanism in (GaussianL2.name, GaussianZCdp.name) else 0.0
    return guarantee.rho if isinstance(guarantee, ZCdp) else guarantee.epsilon


def cap_of(line: Line) -> Cap:
    """A cap from its line."""
    cap = event_from_dict(line.terms["cap"])
    if not isinstance(cap, PureDp | ZCdp | ApproxDp):
        raise InvalidInput("cap", cap, "PureDp, ZCdp or ApproxDp")
    return cap


def transfer_of(line: Line) -> Transfer | None:
    """The movement of money in a line, if it has one."""
    if line.debit is None or line.credit is None:
        return None
    return Transfer(f"{line.ref}/{line.kind}", line.debit, line.credit, line.amount_micros)


def pico(account: PrivacyAccount) -> tuple[int, int]:
    """Total and cap in 10⁻¹²: the total rounded down, the cap up with twice the account's relative allowance of 10⁻¹².

    So whatever the account accepts passes the integer comparison, and a relative excess of 3 · 10⁻¹² does not.
    """
    spent, parts = account.spent.as_integer_ratio()
    limit, limit_parts = limit_of(account.cap).as_integer_ratio()
    return spent * PICO // parts, -(-limit * (PICO + 2) // limit_parts)


def limit_of(cap: Cap) -> float:
    """The number in a cap: ρ, or ε."""
    if isinstance(cap, Uncapped):
        return float("inf")
    return cap.rho if isinstance(cap, ZCdp) else cap.epsilon
