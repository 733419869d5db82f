"""The owners of a described market as files: what each would write about herself, and the records that she holds.

For try-outs, where one machine plays everybody. Owners with files are honest and well: adversaries, drop-outs and
faults that a market file asks for exist in simulations only and are left out here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.bids import Kind
from flmarket.engines.flower.files import BidSection, CapSection, ModelSection, OwnerFile
from flmarket.engines.flower.owner import Owner
from flmarket.engines.flower.play import Spec
from flmarket.engines.jdp import JdpTraining
from flmarket.engines.owners import UNLIMITED, PrivacyCap
from flmarket.engines.sampled import SampledTraining
from flmarket.engines.simulation import Simulation
from flmarket.errors import ConfigError
from flmarket.privacy import ApproxDp, Cap, Uncapped, ZCdp

__all__ = ["lifetime_cap", "registered_cap", "write_owner"]

RECORDS = "records.npz"


def lifetime_cap(market: Spec, cap: PrivacyCap) -> Cap:
    """A market file's cap as an account takes it: Gaussian noise (reward game, joint DP) needs ρ or (ε, δ).

    Updates without noise fit under none: who sells them has no cap, whatever the file says.
    """
    if isinstance(market, SampledTraining) or (isinstance(market, JdpTraining) and market.perturbation is None):
        return Uncapped()
    if isinstance(market, Simulation):
        return cap.account().cap
    if math.isinf(cap.epsilon):
        return ZCdp(UNLIMITED)
    if cap.delta == 0:
        raise ConfigError(
            "owners.privacy_cap_delta", cap.delta, "a δ above 0: a cap in ε alone holds no Gaussian noise"
        )
    return ApproxDp(cap.epsilon, cap.delta)


def registered_cap(market: Spec, cap: PrivacyCap) -> Cap | None:
    """What the ledger is told; None without a cap, and in sampling, where nothing is private and all is paid for."""
    found = lifetime_cap(market, cap)
    return None if math.isinf(cap.epsilon) or isinstance(found, Uncapped) else found


def write_owner(market: Spec, number: int, folder: Path, cap: PrivacyCap) -> Path:
    """Write owner `number`'s records and her `owner.toml`, and return the latter's path."""
    honest = replace(market, adversary=None, adversaries=0) if isinstance(market, JdpTraining) else market
    owner = Owner.dealt(honest, number, folder, seeded=False)
    described = _described(honest, owner, lifetime_cap(market, cap))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / RECORDS, x=owner.x, y=owner.y)
    path = folder / "owner.toml"
    path.write_text(described.to_toml(), encoding="utf-8")
    return path


def _described(market: Spec, owner: Owner, cap: Cap) -> OwnerFile:
    """What she would write about herself."""
    given: dict[str, Any] = {"owner": owner.number, "data": RECORDS, "record": "record"}
    given |= {"classes": market.data.n_classes}
    if owner.allow_raw:
        given["allow_raw"] = True
    if isinstance(market, Simulation):
        kind = Kind(int(owner.valuation.kind[0])).name.lower()
        if kind == "tabulated":
            raise ConfigError("owners.bids", kind, "a valuation family; an owner file has no tables")
        rate = float(owner.valuation.rate[0])
        bid = BidSection(valuation=kind, rate=rate, privacy_budget=owner.privacy_budget)  # type: ignore[arg-type]
    elif isinstance(market, SampledTraining):
        bid = BidSection(value=owner.value)
    else:
        budget = market.epsilon if isinstance(market, JdpTraining) else owner.privacy_budget
        bid = BidSection(value=owner.value, privacy_budget=budget, cost=owner.cost)  # type: ignore[arg-type]
    if owner.model is not None:
        given["model"] = ModelSection.of(owner.model)
    return OwnerFile(**given, bid=bid, cap=CapSection.of(cap))
