"""Real data sets: where files come from and how they become arrays. The way in: `flmarket.learning.load`."""
