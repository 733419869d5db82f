"""`posted`: an auction that is exactly truthful, rational and within budget, and buys accuracy all the same."""

from flmarket.auctions.posted.mechanism import PostedAuction, PostedPrivateSizes, posted, posted_private
from flmarket.auctions.posted.menu import LINEAR, Menu, load_menu, menu_names

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
