"""Somebody who may sign in: keys, sessions, money."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AccountView",
    "KeyPage",
    "KeyView",
    "NewKey",
    "PartyPage",
    "PartyView",
    "SessionView",
]


@dataclass(frozen=True)
class PartyView:
    """Somebody who may sign in. Owners in Flower tasks have a SuperNode, and a number that their `owner.toml` names."""

    id: str
    role: str
    name: str
    active: bool
    created_at: str
    node_id: str | None
    owner_number: int | None


@dataclass(frozen=True)
class PartyPage:
    """Some parties; `next` is the cursor of the following page."""

    items: tuple[PartyView, ...]
    next: str | None


@dataclass(frozen=True)
class KeyView:
    """An API key without its secret."""

    id: str
    label: str
    created_at: str
    revoked_at: str | None


@dataclass(frozen=True)
class KeyPage:
    """All keys of a party."""

    items: tuple[KeyView, ...]


@dataclass(frozen=True)
class NewKey:
    """A fresh key, shown this once."""

    id: str
    label: str
    key: str


@dataclass(frozen=True)
class SessionView:
    """A signed-in browser: send `csrf` as the header X-CSRF-Token with every write."""

    party: PartyView
    csrf: str
    expires_at: str


@dataclass(frozen=True)
class AccountView:
    """A party's money: what she holds, and what her running tasks have in escrow."""

    account: str
    balance_micros: int
    escrow_micros: int
