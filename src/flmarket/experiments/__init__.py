"""Experiments: mechanisms compared on one bench."""

from flmarket.experiments.compare import FACTORS, compare_learning, compare_population

__all__ = ["FACTORS", "compare_learning", "compare_population"]
