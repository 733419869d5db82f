"""An owner's side. The guard is part of it and cannot be left out."""

from flmarket.engines.flower.node import app

__all__ = ["app"]
