"""The broker's side."""

from flmarket.broker.work.flower.server import app

__all__ = ["app"]
