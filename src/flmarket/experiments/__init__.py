"""Experiments: mechanisms compared on one bench."""

from flmarket.experiments.compare import FACTORS, compare_learning, compare_population, learning_curves

__all__ = ["FACTORS", "compare_learning", "compare_population", "learning_curves"]
