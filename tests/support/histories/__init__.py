"""Recorded histories of real services: `services` runs and breaks them, `people` use them, `checker` judges.

PYTHONPATH=tests/support python -m histories --seconds 180 --database sqlite --seed 1
"""
