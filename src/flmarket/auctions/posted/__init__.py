"""`posted`: an auction that is exactly truthful, rational and within budget, and buys accuracy all the same."""

from flmarket.auctions.posted.mechanism import PostedAuction, PostedPrivateSizes, posted, posted_private
from flmarket.auctions.posted.menu import (
    LINEAR,
    AnyMenu,
    Menu,
    NetworkMenu,
    UnlikeHistory,
    load_menu,
    menu_names,
    read_menu,
)

__all__ = [
    "LINEAR",
    "AnyMenu",
    "Menu",
    "NetworkMenu",
    "PostedAuction",
    "PostedPrivateSizes",
    "UnlikeHistory",
    "load_menu",
    "menu_names",
    "posted",
    "posted_private",
    "read_menu",
]
