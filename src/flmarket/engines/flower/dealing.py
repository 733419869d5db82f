"""The owners of a described market as files: what each would write about herself, and the records that she holds.

For try-outs, where one machine plays everybody. Owners with files are honest and well: adversaries, drop-outs and
faults that a market file asks for exist in simulations only and are left out here.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.bids import Kind
from flmarket.engines.flower.files import IDENTITY, PEERS, BidSection, CapSection, OwnerFile
from flmarket.engines.memory import Spec
from flmarket.errors import ConfigError
from flmarket.market import AuctionSpec, JointSpec, Owner
from flmarket.privacy import Cap, Uncapped

RECORDS = "records.npz"


def registered_cap(market: Spec) -> Cap | None:
    """What the ledger is told; None without a cap, and where nothing is private and all is paid for."""
    cap, owner = getattr(market, "cap", None), market.owner(0)
    return None if cap is None or math.isinf(cap.epsilon) or isinstance(owner.cap, Uncapped) else owner.cap


def write_owner(market: Spec, number: int, folder: Path, kind: str = "") -> Path:
    """Write owner `number`'s records and her `owner.toml`; returns the latter's path. `kind` as the file names it."""
    honest = replace(market, adversary=None, adversaries=0) if isinstance(market, JointSpec) else market
    owner = honest.owner(number)
    described = _described(honest, owner, kind)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / RECORDS, x=owner.x, y=owner.y)
    path = folder / "owner.toml"
    path.write_text(described.to_toml(), encoding="utf-8")
    return path


def _described(market: Spec, owner: Owner, kind_of_market: str) -> OwnerFile:
    """What she would write about herself."""
    given: dict[str, Any] = {"owner": owner.number, "data": RECORDS, "record": "record"}
    given |= {"classes": market.data.n_classes, "cap": CapSection.of(owner.cap)}
    if market.kind().announcement(0).trust != "local":
        given |= {"trust": owner.trust, "identity": IDENTITY, "peers": PEERS}
    if owner.allow_raw:
        given["allow_raw"] = True
    said = market.kind().announcement(0).model
    model = json.loads(said)["name"] if said else ""
    if not model:
        raise ConfigError("model", owner.model, "one that is registered, so that owners' machines can build it")
    if ":" in model:
        given["models"] = (model,)
    if ":" in kind_of_market:
        given["kinds"] = (kind_of_market,)
    bid: dict[str, Any] = {"value": owner.value, "privacy_budget": owner.privacy_budget, "cost": owner.cost}
    if isinstance(market, AuctionSpec):
        kind = Kind(int(owner.valuation.kind[0])).name.lower()
        if kind == "tabulated":
            raise ConfigError("owners.bids", kind, "a valuation family; an owner file has no tables")
        rate = float(owner.valuation.rate[0])
        bid = {"valuation": kind, "rate": rate, "privacy_budget": owner.privacy_budget}
    elif isinstance(owner.cap, Uncapped):
        bid = {"value": owner.value}
    elif isinstance(market, JointSpec):
        bid["privacy_budget"] = market.epsilon
    return OwnerFile(**given, bid=BidSection(**bid))
