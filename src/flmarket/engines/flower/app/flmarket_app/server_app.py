"""The buyer's side."""

from flmarket.engines.flower.server import app

__all__ = ["app"]
