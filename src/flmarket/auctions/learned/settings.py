"""What one of this project's networks is made of: a frozen value from which the network and its file follow.

After FL-Market 2021 §5.2 and 2022 §V: every owner's bid becomes M sub-bids, sell m·ε̄/M, m = 0..M, where m = 0 is
always there. The network says what share of the budget each owner may earn and which sub-bid she sells. Head "shares",
deployment "expected" and encoder "concatenated" are read from files of earlier versions and no longer trained: the
papers' own networks are in `papers.py`.

| setting | choices |
| --- | --- |
| `head` | "menu": a price for every ε, of which each owner gets her best; "shares": the papers' two softmax outputs |
| `deployment` | "argmax", "sampled" (one draw; outcome and payment together) or "expected" (FL-Market 2021 Alg. 5) |
| `encoder` | "exchangeable": any number of owners, in any order; "concatenated": the papers', one fixed number |
| `sees` | of the bids that set prices: data "sizes" only, the asks of "others", or "all", the owner's own included |
| `clearing` | raise all prices together until the budget is spent (`flmarket.auctions.learned.clearing`) |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from flmarket.errors import ConfigError, InvalidInput

__all__ = ["KNOTS", "Settings"]

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
    """The shape of one auction network. `owners` is fixed for concatenated encoders and None otherwise."""

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
