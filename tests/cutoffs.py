"""Cutoffs of feedback levels that are the same within every quarter."""

from recpo.base.feedback import LOWEST, NUM_GRADES

#: the levels that ``quarters`` tells apart: a watch time longer than none, the first, the second and all of its limits
LEVELS = LOWEST, LOWEST + NUM_GRADES // 4, LOWEST + NUM_GRADES // 2, LOWEST + NUM_GRADES - 1


def quarters(low, middle, high):
    """The 15 cutoffs of a bucket whose quartiles are these watch times."""
    return (low,) * (NUM_GRADES // 4) + (middle,) * (NUM_GRADES // 4) + (high,) * (NUM_GRADES // 2 - 1)
