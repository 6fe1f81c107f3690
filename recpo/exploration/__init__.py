"""Slates drawn at random with exact propensities: what a served policy needs so that its log can be learned from."""

from recpo.exploration.inclusion import inclusion_probabilities as inclusion_probabilities
from recpo.exploration.pool import Pool as Pool
from recpo.exploration.slates import Exploration as Exploration
from recpo.exploration.slates import Slate as Slate
from recpo.exploration.slates import SlateBatch as SlateBatch

__all__ = ["Exploration", "Pool", "Slate", "SlateBatch", "inclusion_probabilities"]
