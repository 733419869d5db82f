"""`posted`: an auction that is exactly truthful, rational and within budget, and buys accuracy all the same."""

from flmarket.auctions.posted.mechanism import PostedAuction, posted
from flmarket.auctions.posted.menu import LINEAR, Menu, load_menu, menu_names
from flmarket.auctions.posted.private_sizes import PostedPrivateSizes, posted_private

__all__ = [
    "LINEAR",
    "Menu",
    "PostedAuction",
    "PostedPrivateSizes",
    "load_menu",
    "menu_names",
    "posted",
    "posted_private",
]
