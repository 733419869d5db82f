"""The broker's side."""

from flmarket.broker.flower.server import app

__all__ = ["app"]
