"""Engines drive the market loop with real updates: in one process here, over a network elsewhere."""

from flmarket.engines.owners import OwnerPool, PrivacyCap
from flmarket.engines.simulation import LocalTraining, Simulation

__all__ = ["LocalTraining", "OwnerPool", "PrivacyCap", "Simulation"]
