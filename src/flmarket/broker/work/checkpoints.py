"""A run's state and bids as they are stored: NumPy's own format for vectors, JSON for the rest, no pickles."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from flmarket.bids import BidProfile, Valuations
from flmarket.engines import OpenRound, RunState
from flmarket.errors import InvalidInput

__all__ = ["opened_from", "opened_to", "state_from", "state_to"]


def state_to(state: RunState) -> bytes:
    """A run's state as one compressed file."""
    rest = {"accounts": state.accounts, "offers": state.offers, "refusals": state.refusals}
    out = io.BytesIO()
    history = np.array(state.history) if state.history else np.empty((0, state.parameters.size))
    text = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
    np.savez_compressed(out, parameters=state.parameters, history=history, rest=text)
    return out.getvalue()


def state_from(stored: bytes) -> RunState:
    """The state that `state_to` wrote."""
    try:
        with np.load(io.BytesIO(stored), allow_pickle=False) as file:
            rest = json.loads(file["rest"].tobytes())
            return RunState(
                file["parameters"],
                tuple(file["history"]),
                tuple(rest["accounts"]),
                tuple(rest["offers"]),
                tuple(rest["refusals"]),
            )
    except (ValueError, KeyError, OSError) as error:
        raise InvalidInput("checkpoint", f"{len(stored)} bytes", f"a stored run ({error})") from None


def opened_to(opened: OpenRound) -> dict[str, Any]:
    """A round's bids as JSON; repr of a float64 reads back to the same number."""
    bids = opened.bids
    tables = {}
    if bids.valuations.grid is not None and bids.valuations.values is not None:
        tables = {"grid": bids.valuations.grid.tolist(), "values": bids.valuations.values.tolist()}
    return {
        "index": opened.index,
        "bidders": opened.bidders.tolist(),
        "kind": bids.valuations.kind.tolist(),
        "rate": bids.valuations.rate.tolist(),
        "privacy_budget": bids.privacy_budget.tolist(),
        "data_size": bids.data_size.tolist(),
        "budget_micros": opened.budget_micros,
        **tables,
    }


def opened_from(stored: dict[str, Any]) -> OpenRound:
    """The round that `opened_to` wrote."""
    valuations = Valuations(
        np.array(stored["kind"], dtype=np.int8), stored["rate"], grid=stored.get("grid"), values=stored.get("values")
    )
    bids = BidProfile(valuations, stored["privacy_budget"], stored["data_size"])
    return OpenRound(stored["index"], np.array(stored["bidders"], dtype=np.int64), bids, stored["budget_micros"])
