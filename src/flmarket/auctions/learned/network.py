"""The networks, written once: the same lines run in NumPy (inference) and in torch (training).

Every function takes the array library as `xp` and arrays of shape (rows, n, …). Nothing here draws random numbers or
knows about valuations: it sees costs as shares of the budget and data sizes as shares of all records, so that neither
the unit of money nor the unit of data matters.

The exchangeable encoder is of the Deep Sets kind (Zaheer et al. 2017): a small network embeds each owner, and each
owner's decoder sees her own public features and the pooled embeddings of the *others*. The price curve

    κ_i(ε) = Σ_k a_ik · (how much of the interval between two knots lies below ε),   a_i ≥ 0, Σ_k a_ik = 1,

never falls, starts at 0 and ends at 1. It is a function of ε itself, not of the sub-bid's number: what an owner states
as her ε̄ moves no price.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from flmarket.errors import ConfigError, InvalidInput
from flmarket.privacy.events import checked_whole

# Where the price curve may bend; it is linear in between and flat beyond. ε has a natural unit in the error bound.
KNOTS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)

SEES = ("sizes", "others", "all")
# what weight files may say besides, as it is true of all these networks
_ALWAYS = {"head": "menu", "encoder": "exchangeable", "activation": "relu", "rational": True, "owners": None}


@dataclass(frozen=True)
class Settings:
    """The shape of one auction network.

    What one of this project's networks is made of: a frozen value from which the network and its file follow.

    After FL-Market 2021 §5.2 and 2022 §V: every owner's bid becomes M sub-bids, sell m·ε̄/M, m = 0..M, where m = 0 is
    always there. The network says what share of the budget each owner may earn and at which price for every ε; she gets
    the sub-bid that she likes best, or a draw among those that she likes. The papers' own networks are in `papers.py`.

    | setting | choices |
    | --- | --- |
    | `sees` | of the bids that set prices: data "sizes" only, the asks of "others", or "all", her own included |
    | `clearing` | raise all prices together until the budget is spent (`mechanism`); else one draw of outcome and pay |
    """

    items: int = 8
    sees: str = "sizes"
    clearing: bool = True
    dummy: bool = False  # a share of the budget that nobody gets, so that the buyer may keep it
    temperature: float = 0.01  # of soft choices, as a share of the owner's full cost
    hidden: tuple[int, ...] = (32, 32)
    embedding: int = 8
    knots: tuple[float, ...] = KNOTS

    def __post_init__(self) -> None:
        if self.sees not in SEES:
            raise InvalidInput("sees", self.sees, f"one of {', '.join(SEES)}")
        checked_whole("items", self.items, 1, 64)
        if not 0 < self.temperature <= 100:
            raise InvalidInput("temperature", self.temperature, "a positive number of at most 100")
        if self.clearing and self.sees != "sizes":
            raise InvalidInput("clearing", self.clearing, "False unless prices follow from sizes")
        if list(self.knots) != sorted(set(self.knots)) or self.knots[0] <= 0:
            raise InvalidInput("knots", self.knots, "increasing positive privacy losses")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`; unknown fields are refused."""
        always = _ALWAYS | {"deployment": "argmax" if values.get("clearing", True) else "sampled"}
        own = {key: value for key, value in values.items() if (key, value) not in always.items()}
        return cls(**checked_fields(cls, own))


def checked_fields(settings: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of such settings, with tuples for its lists; unknown fields are refused."""
    if unknown := set(values) - {field.name for field in fields(settings)}:
        raise ConfigError("settings", sorted(unknown), "the fields of a learned auction")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


Parameters = Mapping[str, Any]

_LEAST_SHARE = 1e-7
_NEVER = -1e9  # a logit of what cannot be chosen


@dataclass(frozen=True)
class Inputs:
    """What the network sees: W (rows, n); asks, cost over budget of every sub-bid (rows, n, M+1); ε̄ (rows, n)."""

    share: Any
    ask: Any
    privacy: Any
    position: tuple[Any, Any] | None = None  # of the sub-bids between the knots, where known already


@dataclass(frozen=True)
class Offer:
    """What the network says: of every owner the share of the budget on offer, the price curve at her sub-bids as a
    part of that share (rows, n, M+1), and how cautiously her offer is cleared."""

    share: Any
    price: Any
    caution: Any


def forward(xp: Any, settings: Settings, parameters: Parameters, inputs: Inputs) -> Offer:
    """The network's offers."""
    own = _size_features(xp, inputs.share)
    asks = [] if settings.sees == "sizes" else [_ask_features(xp, settings, inputs)]

    def relu(x: Any) -> Any:  # several times faster in NumPy than the papers' tanh
        return xp.clip(x, 0.0, None)

    seen = mlp(parameters, "encoder", xp.concatenate([own, *asks], axis=-1), relu)
    shown = asks if settings.sees == "all" else []
    parts = [own, *shown, _pooled_others(xp, seen, inputs.share)]
    out = mlp(parameters, "decoder", xp.concatenate(parts, axis=-1), relu)
    logit = out[..., 0] + parameters["power"] * xp.log(xp.clip(inputs.share, _LEAST_SHARE, None))
    share = _budget_shares(xp, settings, parameters, logit, inputs.share)
    caution = _sigmoid(xp, out[..., 1] + parameters["caution"])
    return Offer(share, _price_curve(xp, settings, out[..., 2:] + parameters["start"], inputs), caution)


def _size_features(xp: Any, share: Any) -> Any:
    log = xp.log(xp.clip(share, _LEAST_SHARE, None))
    return xp.stack([log / 3.0 + 1.0, share], axis=-1)


def _ask_features(xp: Any, settings: Settings, inputs: Inputs) -> Any:
    """Asks at a quarter, half and all of ε̄ per share of the records, in logarithms, and ε̄ itself."""
    items = settings.items
    columns = sorted({-(-items // 4), -(-items // 2), items})
    size = xp.clip(inputs.share, _LEAST_SHARE, None)
    logs = [xp.clip(xp.log(xp.clip(inputs.ask[..., m] / size, 1e-9, 1e9)), -6.0, 6.0) / 3.0 for m in columns]
    privacy = xp.clip(xp.log(xp.clip(inputs.privacy, 1e-3, 1e3)), -3.0, 3.0)
    return xp.stack([*logs, privacy], axis=-1)


def _pooled_others(xp: Any, embedded: Any, share: Any) -> Any:
    """Mean of the others' embeddings, and their sum weighted by records; zero for an owner who is alone."""
    n = share.shape[-1]
    weighted = embedded * share[..., None]
    mean = (embedded.sum(axis=-2, keepdims=True) - embedded) / max(n - 1, 1)
    return xp.concatenate([mean, weighted.sum(axis=-2, keepdims=True) - weighted], axis=-1)


def mlp(parameters: Parameters, name: str, x: Any, active: Callable[[Any], Any]) -> Any:
    """Fully connected layers, the last one linear."""
    layers = sum(key.startswith(f"{name}.") for key in parameters) // 2
    for layer in range(layers):
        x = x @ parameters[f"{name}.{layer}.weight"] + parameters[f"{name}.{layer}.bias"]
        if layer < layers - 1:
            x = active(x)
    return x


def _budget_shares(xp: Any, settings: Settings, parameters: Parameters, logit: Any, records: Any) -> Any:
    """A softmax over owners (and the dummy), so that shares sum to at most 1; nothing for owners without records."""
    logit = xp.where(records > 0, logit, _NEVER + 0.0 * logit)
    top = _max(logit)
    if settings.dummy:
        top = xp.maximum(top, parameters["dummy"] + 0.0 * top)
    weight = xp.exp(logit - top) * (records > 0)
    total = weight.sum(axis=-1, keepdims=True)
    if settings.dummy:
        total = total + xp.exp(parameters["dummy"] - top)
    return weight / xp.clip(total, 1e-30, None)


def curve_position(settings: Settings, privacy: Any) -> tuple[Any, Any]:
    """Between which knots each sub-bid of ε̄ lies, and how far along; NumPy arrays of shape (…, n, M+1)."""
    knots, width = np.array((0.0, *settings.knots)), np.diff((0.0, *settings.knots))
    epsilon = privacy[..., None] * (np.arange(settings.items + 1) / settings.items)
    interval = np.minimum(np.searchsorted(knots, epsilon, side="right") - 1, width.size - 1)
    return interval, np.minimum((epsilon - knots[interval]) / width[interval], 1.0)


def _price_curve(xp: Any, settings: Settings, logits: Any, inputs: Inputs) -> Any:
    """κ at the sub-bids of each owner: linear between knots, whose rises are a softmax."""
    part = softmax(xp, logits)
    reached = xp.cumsum(part, axis=-1) - part
    interval, into = inputs.position or curve_position(settings, inputs.privacy)
    if xp is np:
        low, rise = (np.take_along_axis(x, interval, axis=-1) for x in (reached, part))
    else:
        low, rise = reached.gather(-1, interval), part.gather(-1, interval)
    return low + into * rise


def softmax(xp: Any, logits: Any) -> Any:
    """Over the last axis."""
    part = xp.exp(logits - _max(logits))
    return part / part.sum(axis=-1, keepdims=True)


def _max(x: Any) -> Any:
    top = x.max(axis=-1, keepdims=True)
    return top if isinstance(top, np.ndarray) else top.values


def _sigmoid(xp: Any, x: Any) -> Any:
    return 0.5 * (xp.tanh(0.5 * x) + 1.0)


def first_parameters(settings: Settings, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Where training starts: prices rise with ε^1.2 and shares with W^0.7, which is a fair mechanism already."""
    items, embedding = settings.items, settings.embedding
    asks = 0 if settings.sees == "sizes" else len({-(-items // 4), -(-items // 2), items}) + 1
    own = 2 + (asks if settings.sees == "all" else 0)
    sizes = {
        "encoder": (2 + asks, settings.hidden[0], embedding),
        "decoder": (own + 2 * embedding, *settings.hidden, 2 + len(settings.knots)),
    }
    made: dict[str, np.ndarray[Any, Any]] = {}
    for name, widths in sizes.items():
        for layer, (wide_in, wide_out) in enumerate(pairwise(widths)):
            last = layer == len(widths) - 2 and name == "decoder"
            scale = (0.1 if last else 1.4) / np.sqrt(wide_in)
            made[f"{name}.{layer}.weight"] = rng.normal(0.0, scale, (wide_in, wide_out))
            made[f"{name}.{layer}.bias"] = np.zeros(wide_out)
    made |= {"power": np.array(0.7), "dummy": np.array(-4.0), "caution": np.array(-2.0)}
    knots = np.array((0.0, *settings.knots))
    made["start"] = np.log(np.maximum(np.diff(np.minimum(knots / 2.0, 1.0) ** 1.2), 1e-3))
    return {key: value.astype(np.float32) for key, value in made.items()}
