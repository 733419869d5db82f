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

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from flmarket.errors import ConfigError, InvalidInput

# Where the price curve may bend; it is linear in between and flat beyond. ε has a natural unit in the error bound.
KNOTS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)

_CHOICES = {
    "head": ("menu", "shares"),
    "deployment": ("argmax", "sampled", "expected"),
    "encoder": ("exchangeable", "concatenated"),
    "sees": ("sizes", "others", "all"),
    "activation": ("relu", "tanh"),
}


@dataclass(frozen=True)
class Settings:
    """The shape of one auction network. `owners` is fixed for concatenated encoders and None otherwise.

    What one of this project's networks is made of: a frozen value from which the network and its file follow.

    After FL-Market 2021 §5.2 and 2022 §V: every owner's bid becomes M sub-bids, sell m·ε̄/M, m = 0..M, where m = 0 is
    always there. The network says what share of the budget each owner may earn and which sub-bid she sells. Head
    "shares", deployment "expected" and encoder "concatenated" are read from files of earlier versions and no longer
    trained: the papers' own networks are in `papers.py`.

    | setting | choices |
    | --- | --- |
    | `head` | "menu": a price for every ε, each owner gets her best; "shares": the papers' two softmax outputs |
    | `deployment` | "argmax", "sampled" (one draw; outcome and payment together) or "expected" (2021 Alg. 5) |
    | `encoder` | "exchangeable": any number of owners, in any order; "concatenated": the papers', one fixed number |
    | `sees` | of the bids that set prices: data "sizes" only, the asks of "others", or "all", her own included |
    | `clearing` | raise all prices together until the budget is spent (`flmarket.auctions.learned.mechanism`) |
    """

    items: int = 8
    head: str = "menu"
    deployment: str = "argmax"
    encoder: str = "exchangeable"
    sees: str = "sizes"
    clearing: bool = True
    dummy: bool = False  # a share of the budget that nobody gets, so that the buyer may keep it
    rational: bool = True  # by construction: what does not cover an owner's reported cost is not chosen
    temperature: float = 0.01  # of soft choices, as a share of the owner's full cost (menu) or of the logits (shares)
    hidden: tuple[int, ...] = (32, 32)
    embedding: int = 8
    activation: str = "relu"  # tanh in the papers; relu is several times faster in NumPy
    owners: int | None = None
    knots: tuple[float, ...] = KNOTS

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise InvalidInput(field, getattr(self, field), f"one of {', '.join(allowed)}")
        if not 1 <= self.items <= 64:
            raise InvalidInput("items", self.items, "a whole number from 1 to 64")
        if not 0 < self.temperature <= 100:
            raise InvalidInput("temperature", self.temperature, "a positive number of at most 100")
        if self.clearing and (self.head, self.deployment, self.sees) != ("menu", "argmax", "sizes"):
            raise InvalidInput("clearing", self.clearing, "False unless it is a menu from sizes, deployed by argmax")
        if self.encoder == "concatenated" and (self.owners is None or self.head != "shares"):
            raise InvalidInput("owners", self.owners, "a number of owners, and head 'shares', for this encoder")
        if list(self.knots) != sorted(set(self.knots)) or self.knots[0] <= 0:
            raise InvalidInput("knots", self.knots, "increasing positive privacy losses")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`; unknown fields are refused."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError("settings", sorted(unknown), "the fields of a learned auction")
        made: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in values.items()}
        return cls(**made)


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
    part of that share (rows, n, M+1), how cautiously her offer is cleared, and (head "shares") outcome logits."""

    share: Any
    price: Any
    caution: Any
    logits: Any | None


def forward(xp: Any, settings: Settings, parameters: Parameters, inputs: Inputs) -> Offer:
    """The network's offers."""
    if settings.encoder == "concatenated":
        return _concatenated(xp, settings, parameters, inputs)
    own = _size_features(xp, inputs.share)
    if settings.sees != "sizes":
        asks = _ask_features(xp, settings, inputs)
        seen = xp.concatenate([own, asks], axis=-1)
    else:
        asks, seen = None, own
    pooled = _pooled_others(xp, _mlp(xp, settings, parameters, "encoder", seen), inputs.share)
    parts = [own, pooled] if settings.sees != "all" else [own, asks, pooled]
    out = _mlp(xp, settings, parameters, "decoder", xp.concatenate(parts, axis=-1))
    logit = out[..., 0] + parameters["power"] * xp.log(xp.clip(inputs.share, _LEAST_SHARE, None))
    share = _budget_shares(xp, settings, parameters, logit, inputs.share)
    if settings.head == "shares":
        return Offer(share, _flat_price(xp, inputs.ask), None, out[..., 1:] + parameters["start"])
    caution = _sigmoid(xp, out[..., 1] + parameters["caution"])
    return Offer(share, _price_curve(xp, settings, out[..., 2:] + parameters["start"], inputs), caution, None)


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


def _mlp(xp: Any, settings: Settings, parameters: Parameters, name: str, x: Any) -> Any:
    """Fully connected layers, the last one linear."""
    layers = sum(key.startswith(f"{name}.") for key in parameters) // 2
    for layer in range(layers):
        x = x @ parameters[f"{name}.{layer}.weight"] + parameters[f"{name}.{layer}.bias"]
        if layer < layers - 1:
            x = xp.tanh(x) if settings.activation == "tanh" else xp.clip(x, 0.0, None)
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
    part = xp.exp(logits - _max(logits))
    part = part / part.sum(axis=-1, keepdims=True)
    reached = xp.cumsum(part, axis=-1) - part
    interval, into = inputs.position or curve_position(settings, inputs.privacy)
    if xp is np:
        low, rise = (np.take_along_axis(x, interval, axis=-1) for x in (reached, part))
    else:
        low, rise = reached.gather(-1, interval), part.gather(-1, interval)
    return low + into * rise


def _flat_price(xp: Any, ask: Any) -> Any:
    """The papers' payment: the whole share for any sale, nothing for none."""
    return xp.concatenate([0.0 * ask[..., :1], 0.0 * ask[..., 1:] + 1.0], axis=-1)


def _concatenated(xp: Any, settings: Settings, parameters: Parameters, inputs: Inputs) -> Offer:
    """The papers' two networks on all bids side by side: sub-bid values, ε̄ and data sizes."""
    rows, n, items = inputs.ask.shape[0], inputs.ask.shape[1], settings.items
    even = xp.clip(inputs.ask[..., 1:] * n, 0.0, 10.0)  # asks over an even share of the budget
    each = xp.concatenate([even, inputs.privacy[..., None], inputs.share[..., None] * n], axis=-1)
    flat = each.reshape(rows, n * (items + 2))
    logits = _mlp(xp, settings, parameters, "allocation", flat).reshape(rows, n, items + 1)
    pay = _mlp(xp, settings, parameters, "payment", flat)
    part = xp.exp(pay - _max(pay))
    share = (part / part.sum(axis=-1, keepdims=True))[..., :n]
    return Offer(share, _flat_price(xp, inputs.ask), None, logits)


def _max(x: Any) -> Any:
    top = x.max(axis=-1, keepdims=True)
    return top if isinstance(top, np.ndarray) else top.values


def _sigmoid(xp: Any, x: Any) -> Any:
    return 0.5 * (xp.tanh(0.5 * x) + 1.0)


def first_parameters(settings: Settings, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Where training starts: prices rise with ε^1.2 and shares with W^0.7, which is a fair mechanism already."""
    items, sizes = settings.items, {}
    if settings.encoder == "concatenated":
        assert settings.owners is not None
        n = settings.owners
        wide = (n * (items + 2), *settings.hidden)
        sizes = {"allocation": (*wide, n * (items + 1)), "payment": (*wide, n + settings.dummy)}
    else:
        asks = 0 if settings.sees == "sizes" else len({-(-items // 4), -(-items // 2), items}) + 1
        own = 2 + (asks if settings.sees == "all" else 0)
        outputs = 2 + len(settings.knots) if settings.head == "menu" else 2 + items
        sizes = {
            "encoder": (2 + asks, settings.hidden[0], settings.embedding),
            "decoder": (own + 2 * settings.embedding, *settings.hidden, outputs),
        }
    made: dict[str, np.ndarray[Any, Any]] = {}
    for name, widths in sizes.items():
        for layer, (wide_in, wide_out) in enumerate(pairwise(widths)):
            last = layer == len(widths) - 2 and name == "decoder"
            gain = 1.4 if settings.activation == "relu" else 1.0
            scale = (0.1 if last else gain) / np.sqrt(wide_in)
            made[f"{name}.{layer}.weight"] = rng.normal(0.0, scale, (wide_in, wide_out))
            made[f"{name}.{layer}.bias"] = np.zeros(wide_out)
    if settings.encoder == "exchangeable":
        made["power"] = np.array(0.7)
        made["dummy"] = np.array(-4.0)
        made["caution"] = np.array(-2.0)
        knots = np.array((0.0, *settings.knots))
        rise = np.log(np.maximum(np.diff(np.minimum(knots / 2.0, 1.0) ** 1.2), 1e-3))
        made["start"] = rise if settings.head == "menu" else np.zeros(items + 1)
    return {key: value.astype(np.float32) for key, value in made.items()}
