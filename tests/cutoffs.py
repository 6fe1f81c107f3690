"""Cutoffs of feedback levels that are the same within every quarter."""

from recpo.base.feedback import LOWEST, STEPS

#: the levels that ``quarters`` tells apart: a watch time longer than none, the first, the second and all of its limits
LEVELS = LOWEST, LOWEST + STEPS // 4, LOWEST + STEPS // 2, LOWEST + STEPS - 1


def quarters(low, middle, high):
    """The 15 cutoffs of a bucket whose quartiles are these watch times."""
    return (low,) * (STEPS // 4) + (middle,) * (STEPS // 4) + (high,) * (STEPS // 2 - 1)
