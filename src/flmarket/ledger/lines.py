"""What lines of the journal say, as values: awards, releases, caps, transfers, and owners' totals in whole numbers."""

from __future__ import annotations

from flmarket.errors import InvalidInput
from flmarket.ledger.entry import Line
from flmarket.ledger.journal import Award, AwardState, Release, Transfer
from flmarket.privacy import (
    ApproxDp,
    Cap,
    GaussianL2,
    GaussianRelease,
    GaussianZCdp,
    PrivacyAccount,
    PureDp,
    Uncapped,
    Unprotected,
    ZCdp,
    event_from_dict,
)
from flmarket.privacy.composition import zcdp_rho

__all__ = ["ROUNDING", "award_of", "cap_of", "limit_of", "loss_of", "pico", "release_of", "transfer_of"]

PICO = 10**12
# an award's release may exceed the awarded privacy loss by floating-point rounding only
ROUNDING = 1e-9


def award_of(held: Line, resolved: Line | None) -> Award:
    """An award from the line that holds it and the one that resolves it."""
    assert held.debit is not None
    assert held.owner is not None
    assert held.round_index is not None
    state = AwardState.PENDING if resolved is None else AwardState(resolved.kind.value)
    reason = "" if resolved is None else resolved.terms.get("reason", "")
    epsilon = float(held.terms["epsilon"])
    return Award(held.ref, held.round_index, held.debit, held.owner, epsilon, held.amount_micros, state, reason)


def release_of(line: Line) -> Release:
    """A release from its line."""
    terms = line.terms
    return Release(line.ref, terms["mechanism"], event_from_dict(terms["guarantee"]))


def loss_of(release: Release) -> float:
    """The part of a release that its award's number bounds.

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
